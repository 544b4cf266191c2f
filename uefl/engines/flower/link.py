"""The server's end of Flower: a run at a SuperLink, and the Grid that sends its messages.

A SuperLink with ``--isolation process`` leaves it to others to start the program of a run. Here the process
that asks for a run takes its task itself: the run folder, the progress and the end by Ctrl-C stay with the
process that the user started. Runs of uefl carry no program, so one is as good as another, and it does not
matter which of several that begin at the same time a process gets.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from email.utils import parsedate_to_datetime

import httpx
from flwr.cli.build import build_fab_from_files
from flwr.common.constant import SubStatus
from flwr.common.serde import fab_to_proto, run_from_proto
from flwr.proto.control_pb2 import StartRunRequest
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    PullTaskInputRequest,
    PushTaskOutputRequest,
    SendTaskHeartbeatRequest,
)
from flwr.serverapp import Grid
from flwr.supercore.constant import TaskType
from flwr.supercore.control.control_http_client import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.heartbeat import HeartbeatSender
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor, SuperExecAuthHttpInterceptor
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity

from .address import Address, Unreachable
from .grid import CheckedGrid
from .limits import stop_at_refusal

logging.getLogger("flwr").setLevel(logging.ERROR)

_ACQUIRE = "/flwr.proto.Runtime/AcquireTask"
_PATIENCE = 20.0  # seconds for a SuperLink to hand out the task of a run
# seconds that a SuperLink may be away in a run; it keeps a run for a minute after the last heartbeat
_ABSENCE = 120.0
_SKEW = 4.0  # seconds that two clocks may differ: less than a message lives beyond its deadline
_APP = b"""[project]
name = "uefl"
version = "1.0.0"
description = "Holds no program: silos are started with uefl silo."
license = { text = "Apache-2.0" }
[tool.flwr.app]
publisher = "uefl"
[tool.flwr.app.components]
serverapp = "refuse:app"
clientapp = "refuse:app"
"""
_REFUSE = b"raise RuntimeError('a run of uefl brings no program; start this node with: uefl silo')\n"


@contextmanager
def connect(address: Address, secret: bytes | None = None) -> Iterator[Grid]:
    """Open a run at a SuperLink for as long as the context lasts.

    Args:
        address: of the SuperLink.
        secret: that the SuperLink was started with (``--superexec-auth-secret-file``); without one, anybody
            who reaches it may take a task.

    Raises:
        Unreachable: the SuperLink refuses, or does not hand out the task.
    """
    address.avoid_proxy()
    try:
        _start(address)
        grid = CheckedGrid(
            address.place, address.insecure, address.root_certificates, token=_token(address, secret)
        )
        stop_at_refusal(grid._retry_invoker)
        grid._retry_invoker.max_time = _ABSENCE
        client = grid._runtime_client
        task = client.PullTaskInput(PullTaskInputRequest())
    except httpx.HTTPError as error:
        plain = isinstance(error, httpx.RemoteProtocolError) and address.insecure
        advice = "; if it speaks TLS, give --root-certificates" if plain else ""
        raise Unreachable(
            f"the SuperLink at {address.place} refuses a run: {_why(error, _NOT_BEGUN)}{advice}"
        ) from None
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = (
        task.task_id,
        task.run.run_id,
        task.context.node_id,
    )
    grid.set_run(run_from_proto(task.run))
    heartbeat = HeartbeatSender(_heartbeat(client))
    heartbeat.start()
    status = SubStatus.FAILED
    try:
        yield grid
        status = SubStatus.COMPLETED
    except httpx.HTTPError as error:
        raise Unreachable(f"lost the SuperLink at {address.place}: {_why(error, _LOST)}") from None
    except ObjectPushError:
        raise Unreachable(f"the SuperLink at {address.place} does not store a part of a message") from None
    finally:
        grid._retry_invoker.max_tries = 1
        with suppress(httpx.HTTPError):  # the SuperLink may be gone, and with it the run
            client.PushTaskOutput(PushTaskOutputRequest(sub_status=status, details=""))
        if heartbeat.is_running:
            heartbeat.stop()
        grid.close()


def _start(address: Address) -> None:
    content, _ = build_fab_from_files({"pyproject.toml": _APP, "refuse.py": _REFUSE})
    fab = Fab(hashlib.sha256(content).hexdigest(), content, {})
    version = RuntimeVersionHttpInterceptor(component_name="flwr CLI")
    with closing(
        ControlHttpClient.from_server_address(
            address.place, address.insecure, address.root_certificates, [version]
        )
    ) as control:
        control.StartRun(StartRunRequest(fab=fab_to_proto(fab)))


def _token(address: Address, secret: bytes | None) -> str:
    """Return the token of the task of a run that waits for its program."""
    interceptors: list[object] = [RuntimeVersionHttpInterceptor(component_name="SuperExec")]
    if secret is not None:
        interceptors.append(SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods={_ACQUIRE}))
    end = time.monotonic() + _PATIENCE
    with closing(
        RuntimeHttpClient.from_server_address(
            address.place, address.insecure, address.root_certificates, interceptors
        )  # type: ignore[arg-type]
    ) as client:
        while time.monotonic() < end:
            answer = client.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP]))
            if answer.token:
                return str(answer.token)
            time.sleep(0.2)
    raise Unreachable(
        f"the SuperLink at {address.place} gave the task away; start it with --isolation process"
    )


def _heartbeat(client: RuntimeHttpClient) -> Callable[[], bool]:
    """Return True if one was taken; Flower tries again where it was not, and a run that is lost is told by
    its next question.

    Flower's own raises in its thread where the SuperLink is not well, and sends this process Ctrl-C where the
    run is lost.
    """

    def beat() -> bool:
        try:
            return bool(client.SendTaskHeartbeat(SendTaskHeartbeatRequest()).success)
        except (httpx.HTTPError, ValueError):  # the last: what answers is no SuperLink
            return False

    return beat


_NOT_BEGUN = {401: "give with --secret the file that the SuperLink was started with"}
_LOST = dict.fromkeys((401, 403), "it has ended the run, or has forgotten it while it could not be reached")
"""the meaning of a status before a run, and in it"""


def _why(error: httpx.HTTPError, meaning: Mapping[int, str]) -> str:
    """Return the text of a status without the body, which may be long; and whether the clocks differ, for
    which messages are refused."""
    if not isinstance(error, httpx.HTTPStatusError):
        return str(error)
    code = error.response.status_code
    words = [str(code), meaning.get(code)]
    with suppress(KeyError, ValueError):
        ahead = time.time() - parsedate_to_datetime(error.response.headers["date"]).timestamp()
        if abs(ahead) > _SKEW:
            words.append(
                f"the clock of this machine is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'}"
                " that of the SuperLink"
            )
    return "; ".join(word for word in words if word is not None)
