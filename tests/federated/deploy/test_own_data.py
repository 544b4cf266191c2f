"""Silos may have other data than labeled folders.

They may have unlabeled sets, the server may have images, and a silo may only be measured.
"""

import re
import shutil

import pytest
import torch

from tests.federated import tiny, tiny_sets
from tests.federated.data.test_own_sets import ROWS, write
from tests.federated.deploy import reports as reports_of
from tests.federated.deploy.machines import images
from tests.federated.engines.memory_link import MemoryLink
from uefl import config
from uefl.data import build
from uefl.deploy.agreement import check_asked
from uefl.deploy.setting import Setting, greeting, task
from uefl.deploy.silo import SiloProgram
from uefl.deploy.sources import own
from uefl.engines.codec import Packet
from uefl.engines.flower.engine import ClientNodes, FlowerEngine
from uefl.errors import UserError


def programs(*folders):
    return {i: SiloProgram(own(folder, None), torch.device("cpu")) for i, folder in enumerate(folders, 10)}


def reports(cfg, nodes):
    found = [program(Packet(greeting(cfg), {})) for program in nodes.values()]
    assert [reports_of.refusal(report) for report in found] == [None] * len(found)
    return {report.header["client"]: report for report in found}


def agreed(cfg, nodes):
    return reports_of.agreed(reports(cfg, nodes), cfg)


def check_same(cfg, whole, there, nodes):
    """Check that an arm over these programs has the metrics of a federation in one process."""
    for field in ("classes", "shape", "mean", "std", "kind"):
        assert getattr(there, field) == getattr(whole, field), field
    for group in ("clients", "unseen"):
        assert [(s.name, s.sizes) for s in getattr(there, group)] == [
            (s.name, s.sizes) for s in getattr(whole, group)
        ]
    roster = ClientNodes(MemoryLink(nodes), greeting(cfg), reports_of.refusal)
    for _ in range(2):
        roster._looked = 0.0
        roster.refresh()
    engine = FlowerEngine(roster._link, roster, task(Setting.of(cfg, there, 0), "arm"))
    local, remote = tiny.arm(cfg, whole)[0], tiny.arm(cfg, there, lambda _: engine)[0]
    while not local.finished:
        assert repr(remote.turn()) == repr(local.turn())
    assert remote.finished
    for name, tensor in local.state()[0].items():
        assert torch.equal(remote.state()[0][name], tensor), name


# --- unlabeled sets ---------------------------------------------------------------------------------------


@pytest.fixture
def sets(tmp_path):
    """Write the same images for one process, in ``whole``, and for two silos and a server."""
    whole = write(tmp_path / "whole", server=("labeled", "validation"))
    for name, entry in (("berlin", "berlin"), ("madrid", "madrid.npz")):
        there = tmp_path / name / "clients" / entry
        (shutil.copytree if name == "berlin" else _copy)(whole / "clients" / entry, there)
        rows = [f"{name},{one},{','.join(map(str, shares))}" for one, shares in ROWS[name].items()]
        (tmp_path / name / "priors.csv").write_text("\n".join(["client,set,cat,dog", *rows]))
    for part in ("labeled", "validation"):
        shutil.copytree(whole / part, tmp_path / "server" / part)
    return tmp_path


def _copy(file, target):
    target.parent.mkdir(parents=True)
    shutil.copy(file, target)


def of_sets(folder, algorithm="fedul", **keys):
    own = {key: keys.pop(key) for key in ("server",) if key in keys}
    table = {
        **tiny_sets.KEYS,
        "data": {"source": str(folder)},
        "arms": {"arm": {"algorithm": algorithm, **own}},
    }
    return config.load(table, **keys)


@pytest.mark.parametrize(
    ("algorithm", "keys"),
    [("fedul", {"server": "finetune"}), ("fedllp-vat", {}), ("fedul", {"prior_smoothing": 0.2})],
)
def test_server_sets_and_images_match_one_process(sets, algorithm, keys):
    whole = build(of_sets(sets / "whole", algorithm, **keys).data, kind="sets", seed=0)
    cfg = of_sets(sets / "server", algorithm, **keys)
    nodes = programs(sets / "madrid", sets / "berlin")
    there = agreed(cfg, nodes)
    assert torch.equal(there.server.labeled.images, whole.server.labeled.images)
    assert torch.equal(there.server.validation.labels, whole.server.validation.labels)
    check_same(cfg, whole, there, nodes)


def test_without_images_of_the_server_too(sets):
    for part in ("labeled", "validation"):
        shutil.rmtree(sets / "whole" / part)
    cfg = of_sets("digits")
    nodes = programs(sets / "berlin", sets / "madrid")
    check_same(cfg, build(of_sets(sets / "whole").data, kind="sets", seed=0), agreed(cfg, nodes), nodes)


def test_report_has_the_classes_and_no_priors(sets):
    header, parts = reports(of_sets("digits"), programs(sets / "berlin"))["berlin"]
    assert header["reach"] == {"has": [True, True], "full_rank": True}
    assert "0.75" not in str(header)
    assert "png" not in str(header)
    assert set(parts) == {"pixels"}


def test_other_priors_or_server_images_are_another_federation(sets):
    cfg = of_sets(sets / "server")
    first = agreed(cfg, programs(sets / "berlin", sets / "madrid")).digest
    assert agreed(cfg, programs(sets / "berlin", sets / "madrid")).digest == first
    table = sets / "berlin" / "priors.csv"
    table.write_text(table.read_text().replace("berlin,a,0.75,0.25", "berlin,a,0.5,0.5"))
    second = agreed(cfg, programs(sets / "berlin", sets / "madrid")).digest
    next((sets / "server" / "labeled" / "cat").iterdir()).unlink()
    third = agreed(cfg, programs(sets / "berlin", sets / "madrid")).digest
    assert len({first, second, third}) == 3


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ("classes", "silo 'madrid' .*dog, cat, silo 'berlin' cat, dog; .*priors.csv"),
        ("test", "silo 'berlin' .*silo 'madrid' .*none"),
        ("unknown", "class 'emu' .*folder"),
        ("absent", "class 'emu' .*client"),
        ("strict", "rank.*strict = true"),
    ],
)
def test_incompatible_silos_and_server_are_one_line(sets, change, line):
    keys, tables = {}, [sets / name / "priors.csv" for name in ("berlin", "madrid")]
    match change:
        case "classes":
            tables[1].write_text(tables[1].read_text().replace("cat,dog", "dog,cat"))
        case "test":
            shutil.copytree(sets / "server" / "labeled", sets / "berlin" / "test")
        case "unknown":
            (sets / "server" / "labeled" / "cat").rename(sets / "server" / "labeled" / "emu")
        case "absent":
            for table in tables:
                head, *rows = table.read_text().splitlines()
                table.write_text("\n".join([f"{head},emu", *(f"{row},0" for row in rows)]))
        case "strict":
            keys = {"strict": True}
    nodes = programs(sets / "berlin", sets / "madrid")
    cfg = of_sets(sets / "server", **keys)
    found = reports(cfg, nodes)
    if change == "strict":
        for header, _ in found.values():
            header["reach"]["full_rank"] = False
    with pytest.raises(UserError, match=line):
        reports_of.agreed(found, cfg)


def test_a_server_without_images_of_its_own_is_noted(sets):
    nodes = programs(sets / "berlin", sets / "madrid")
    for source in ("nowhere", "berlin"):  # the first does not exist, and the second holds a client
        found = agreed(of_sets(sets / source), nodes)
        assert f" {sets / source} " in found.notes[-1]
        assert (found.server.labeled, found.server.validation) == (None, None)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ("two", "berlin, madrid; .*client"),
        ("server", "labeled .*validation .*server"),
        ("name", r"ulm: .*\bberlin"),
    ],
)
def test_a_folder_of_sets_that_is_no_silo_is_a_line(sets, change, line):
    folder = sets / {"two": "whole", "server": "berlin", "name": "berlin"}[change]
    if change == "server":
        shutil.copytree(sets / "server" / "labeled", folder / "labeled")
    with pytest.raises(UserError, match=line):
        own(folder, "ulm" if change == "name" else None)


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"priors": "estimated"}, "labeled .*sets"),
        ({"prior_noise": 0.1}, "key 'prior_noise': "),
        ({"labeled": 40}, "key 'labeled': .*data.source"),
        (
            {"data": {"partition": {"scheme": "unlabeled", "split": "iid", "sets": 3}}},
            "partition 'unlabeled'",
        ),
    ],
)
def test_impossible_requests_are_rejected_before_waiting(sets, keys, line):
    with pytest.raises(UserError, match=line):
        check_asked(of_sets(sets / "server", **keys))


def test_images_instead_of_sets_give_a_code_and_a_log_line(sets, tmp_path, caplog):
    images(tmp_path / "ulm", {"cat": 0, "dog": 1})
    for folder, cfg in ((tmp_path / "ulm", of_sets("digits")), (sets / "berlin", labeled(tmp_path))):
        (program,) = programs(folder).values()
        assert program(Packet(greeting(cfg), {})).header["error"] == "data"
    assert re.search("silo .* labeled .*; .* unlabeled", caplog.text)
    assert re.search("silo .* unlabeled .*; .* labeled", caplog.text)


# --- a silo that is only measured -------------------------------------------------------------------------


def labeled(folder, **keys):
    table = {key: value for key, value in tiny.KEYS.items() if key != "data"}
    return config.load(
        {
            **table,
            "data": {"source": str(folder), "legacy_holdout": True},
            "arms": {"arm": {"algorithm": "fedavg"}},
        },
        **keys,
    )


@pytest.fixture
def folders(tmp_path):
    images(tmp_path / "a", {"cat": 0, "dog": 1})
    images(tmp_path / "b", {"dog": 1, "emu": 2}, seed=1)
    images(tmp_path / "new", {"cat": 0, "emu": 2}, seed=2)
    return tmp_path


def apart(name):
    return {"partition": {"scheme": "leave_one_out", "domain": name}}


def test_a_left_out_silo_is_measured_and_never_trained(folders):
    cfg = labeled(folders, data=apart("new"))
    nodes = programs(folders / "a", folders / "b", folders / "new")
    there = agreed(cfg, nodes)
    assert [client.name for client in there.unseen] == ["new"]
    assert there.unseen[0].sizes.train == 0
    check_same(cfg, build(cfg.data, kind="labeled", seed=0), there, nodes)


@pytest.mark.parametrize(("there", "name"), [("ab", "c"), ("a", "a")])
def test_left_out_domain_is_one_of_several(folders, there, name):
    cfg = labeled(folders, data=apart(name))
    with pytest.raises(UserError, match=r"key 'domain': .*\ba\b.*'[ac]'$"):
        agreed(cfg, programs(*(folders / one for one in there)))


def test_silos_do_not_deal_some_of_their_images(folders):
    cfg = labeled(folders, data={"partition": {**apart("new")["partition"], "per_domain": 5}})
    with pytest.raises(UserError, match=r"key 'per_domain': .*SuperLink"):
        check_asked(cfg)
