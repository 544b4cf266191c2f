"""The program of a client: no message of the server makes it open a file that the message names."""

import logging

import pytest
import torch

from tests.federated import tiny
from tests.federated.deploy.silos_in_memory import SourceInMemory, asked, program
from tests.federated.engines.conformance import messages
from uefl.deploy.silo import SiloProgram
from uefl.engines.base import Message, expected_like
from uefl.engines.codec import reply_of
from uefl.engines.processes import Processes


def test_only_the_server_reads_pretrained_weights(tmp_path):
    weights, fed = tmp_path / "weights.pth", tiny.federation()
    model = {"encoder": "resnet18", "hidden": 16}
    plain = tiny.settings("fedavg", base=tiny.KEYS | {"model": model})
    workspace = tiny.workspace_of(plain, fed)
    cfg = tiny.settings("fedavg", base=tiny.KEYS | {"model": model | {"pretrained": str(weights)}})
    assert not weights.exists()
    tensors = workspace.initial(5)[0]
    message = Message(
        tensors,
        {"seed": 0, "round": 0, "evaluate": True, "train": False, "last": False},
        expected_like(tensors),
    )
    silo = program(fed)
    replies = [reply_of(silo(asked(message, one, fed))) for one in (cfg, plain)]
    assert [reply.error for reply in replies] == [None, None]
    assert replies[0].metrics == replies[1].metrics


@pytest.mark.parametrize(
    ("line", "stays"),
    [("Traceback (most recent call last)", True), ("cannot reply: ", True), ("hello", False)],
)
def test_logs_with_an_error_are_kept(line, stays, tmp_path):
    processes = Processes(tmp_path / "logs")
    processes.folder.mkdir()
    processes.start("one", "this")  # ends without a signal
    processes.all["one"].wait()
    (processes.folder / "one.log").write_text(f"2026 {line}\n")
    said = []
    processes.stop(said.append, "clients")
    assert [str(processes.folder) in line for line in said] == [True] * stays
    assert processes.folder.exists() == stays


def test_a_run_that_fails_leaves_another_one_its_images(monkeypatch):
    """Two runs share a silo.

    If the network of the second run fails, the first run keeps the split of its seed.
    """
    fed, read = tiny.federation(), []

    class RecordingSource(SourceInMemory):
        def data(self, client, cfg, classes, channels):
            read.append(cfg.run.seed)
            return super().data(client, cfg, classes, channels)

    silo = SiloProgram(RecordingSource("silo-0", fed), torch.device("cpu"))
    first, second = tiny.settings("fedavg"), tiny.settings("fedavg", seed=7)

    def ask(cfg):
        return reply_of(silo(asked(messages(first)["silo-0"], cfg, fed)))

    assert ask(first).error is None
    with monkeypatch.context() as broken:
        broken.setattr("uefl.deploy.silo.Workspace", lambda *_: (_ for _ in ()).throw(MemoryError))
        assert ask(second).error == "memory"
    assert ask(first).error is None
    assert read == [0]
    assert ask(second).error is None
    assert read == [0, 7]


@pytest.mark.parametrize(
    ("options", "setting", "fault"),
    [
        ({"members": 10**9}, {}, "program"),
        ({"members": "2"}, {}, "program"),
        ({}, {"threads": 10**5}, "unreadable"),
        ({}, {"threads": "2"}, "unreadable"),
        ({}, {"mean": "x"}, "unreadable"),
        ({"\x1b[2J": 10**6 * "x"}, {}, None),
    ],
)
def test_a_message_of_a_malicious_server_costs_only_a_line(caplog, options, setting, fault):
    fed, cfg = tiny.federation(), tiny.settings("fedavg")
    tensors = tiny.workspace_of(cfg, fed).initial(5)[0]
    options = {"seed": 0, "round": 0, "evaluate": True, "train": False, "last": False} | options
    packet = asked(Message(tensors, options), cfg, fed)
    packet.header["setting"].update(setting)
    with caplog.at_level(logging.INFO, "uefl"):
        reply = reply_of(program(fed)(packet))
    assert reply.error == fault
    for line in "\n".join(record.getMessage() for record in caplog.records).splitlines():
        assert line.isprintable()
        assert len(line) < 3000
