"""The configuration of nginx in docs/security.md works as the page has it.

The silos are on machines of their own.
"""

import re
import shutil
import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from tests.federated.deploy.chaos.certificates import certificate, node_key
from tests.federated.deploy.chaos.cluster import until
from tests.federated.deploy.machines import HOST, Machines, images, may_make_namespaces
from tests.federated.deploy.test_two_silos import CONFIG
from uefl.engines.flower import QUIET

SILOS = ("ulm", "bonn")
PAGE = Path(__file__).parents[3] / "docs" / "security.md"
SUPERLINK = (
    "flower-superlink --host 127.0.0.1 --port 8001 --isolation process --database superlink.db"
    " --enable-supernode-auth --superexec-auth-secret-file secret --ssl-ca-certfile server.pem"
    " --ssl-certfile server.pem --ssl-keyfile server.key"
)
WHERE = f"--superlink {HOST}:8000 --root-certificates server.pem --device cpu"
ASKS = f"""
import ssl, sys
from http.client import HTTPSConnection
there = HTTPSConnection("{HOST}", 8000, context=ssl.create_default_context(cafile="server.pem"))
there.request("POST", sys.argv[1], headers={{"content-length": sys.argv[2]}})
print(there.getresponse().status)
"""


def configuration(folder):
    """Return the configuration of the page.

    Addresses and the folders of temporary files are those of the test.
    """
    (text,) = re.findall(r"^```nginx\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert "192.0.2.1" in text
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    own = "".join(f"  {kind}_temp_path {folder / kind};\n" for kind in kinds) + "  access_log off;\n"
    return text.replace("192.0.2.1", HOST).replace("http {\n", f"http {{\n{own}")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("nginx") is None, reason="needs nginx")
@pytest.mark.skipif(not may_make_namespaces(), reason="network namespaces need the rights of root")
def test_a_run_behind_the_proxy_of_the_page(tmp_path):
    with Machines(tmp_path, SILOS, QUIET) as machines:
        server = tmp_path / "server"
        certificate(server, HOST)
        (server / "secret").write_bytes(bytes(range(64)))
        (server / "nginx.conf").write_text(configuration(server))
        (server / "mine.toml").write_text(CONFIG)
        (server / ".flwr").mkdir()
        lines = (f'address = "{HOST}:8000"', f'root-certificates = "{server / "server.pem"}"')
        (server / ".flwr" / "config.toml").write_text("\n".join(["[superlink.here]", *lines]))
        machines.start("server", SUPERLINK)
        machines.start("server", f"nginx -p {server} -c nginx.conf -e error.log -g 'daemon off; user root;'")
        train = f"uefl train mine.toml --out run --engine flower --silos 2 --secret secret {WHERE}"
        run = machines.start("server", train)
        for name, classes in (("ulm", {"cat": 0, "dog": 1}), ("bonn", {"dog": 1, "emu": 2})):
            images(tmp_path / name / "images", classes)
            shutil.copy(server / "server.pem", tmp_path / name)
            node_key(tmp_path / name, name)
            shutil.copy(tmp_path / name / f"{name}.key.pub", server)
            machines.start(name, f"uefl silo --data images --name {name} --key {name}.key {WHERE}")
        until("a run", lambda: "waiting for 2 silos" in run.log.read_text(), 120)
        for name in SILOS:
            code, said = machines.run("server", f"flwr supernode register {name}.key.pub here")
            assert code == 0, said
        (tmp_path / "bonn" / "asks.py").write_text(ASKS)
        for path, size, status in (
            ("/v1/control/start-run", 0, "403"),
            ("/v1/runtime/get-nodes", 0, "403"),
            ("/v1/fleet/push-object", 13 * 2**20, "413"),
        ):
            assert machines.run("bonn", f"{sys.executable} asks.py {path} {size}")[1].split() == [status]
        assert run.wait(400) == 0, run.log.read_text()
    assert (server / "run" / "report.html").exists()
