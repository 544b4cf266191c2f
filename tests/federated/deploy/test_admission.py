"""A run over silos is tested from the greeting on.

The tests cover admission, messages, and the records of silos in the run folder.
"""

import json
import re
from contextlib import contextmanager

import pytest
import torch

from tests.federated.deploy.machines import images
from tests.federated.engines.memory_link import MemoryLink
from tests.federated.interrupted import Killer
from uefl import config
from uefl.algorithms.fedavg import FedAvg
from uefl.deploy import deployment, silo
from uefl.deploy.setting import greeting
from uefl.deploy.silo import SiloProgram
from uefl.deploy.silo_folder import SiloFolder
from uefl.deploy.sources import own
from uefl.engines.codec import Packet
from uefl.engines.flower.address import Address
from uefl.errors import RunError, UserError
from uefl.folder import read_silos
from uefl.run import resume, train


@pytest.fixture
def folder(tmp_path, monkeypatch):
    images(tmp_path / "a", {"cat": 0, "dog": 1})
    images(tmp_path / "b", {"dog": 1, "emu": 2}, seed=1)
    monkeypatch.setattr(Address, "wait", lambda self, seconds, **keys: None)
    monkeypatch.setattr("uefl.engines.flower.engine._EVERY", 0.0)
    return tmp_path


def settings(folder, algorithm="fedavg", **keys):
    table = {
        "data": {"source": str(folder), "legacy_holdout": True},
        "arms": {"arm": {"algorithm": algorithm}},
    }
    small = {
        "passes": 2,
        "precision": "fp32",
        "width": 4,
        "hidden": 16,
        "rounds": [1],
        "local_epochs": 1,
        "batch_size": 8,
    }
    return config.load(table, **(small | keys))


def program(folder, name):
    kept = SiloFolder(folder / f"{name}.silo")
    return SiloProgram(own(folder / name, None), torch.device("cpu"), kept=kept)


@contextmanager
def joined(monkeypatch, programs, *, silos=2, wait=5.0, keys=None):
    """Start a run over these programs.

    Yield the run, its output lines, and the messages that the programs have received.
    """
    said, got = [], []

    def heard(one):
        return lambda packet: got.append(packet.header) or one(packet)

    link = MemoryLink({i: heard(one) for i, one in enumerate(programs, 10)})
    link.keys = keys or {}

    @contextmanager
    def connect(*arguments):
        yield link

    monkeypatch.setattr(deployment, "connect", connect)
    with deployment.joined(Address("there:1"), silos, None, wait, said.append) as run:
        yield run, said, got


def read_jsonl(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_silos_get_no_file_names_of_the_server(folder, monkeypatch):
    weights = folder / "weights.pth"
    cfg = settings(folder, encoder="vgg16_bn", pretrained=str(weights), width=128)
    with joined(monkeypatch, [program(folder, name) for name in "ab"]) as (run, _, got):
        run.federation(cfg, None, {})
        head = run.engine("arm", lambda name: None)._header
    for sent in (*got, head):
        assert str(folder) not in str(sent)
        assert "vgg16_bn" in str(sent)
    assert len(got) == 2


def test_a_refused_silo_and_the_user_get_the_reason(folder, monkeypatch, caplog):
    images(folder / "c", {"cat": 0})
    programs = [program(folder, name) for name in "abc"]
    with (
        joined(monkeypatch, programs, silos=3, wait=0.1) as (run, said, got),
        pytest.raises(UserError) as error,
    ):
        run.federation(settings(folder), None, {})
    (why,) = (one["why"] for one in got if one["ask"] == "refused")
    assert re.match(r"silo 'c': .*\(fault data;", why)
    assert f"refused: {why};" in str(error.value)
    assert re.match(r"a, b of 3 silos .*there:1 .*--silos$", str(error.value))
    assert said.count(f"refused: {why}") == 1
    reported, refused = (record.getMessage() for record in caplog.records)
    assert re.search("client 'c': .*12 training .*class 'cat'", reported)
    assert refused.endswith(f": {why}")


@pytest.mark.parametrize("order", ["abc", "cab"])
def test_silo_with_other_images_does_not_block_the_run(folder, monkeypatch, order):
    """A silo with another image size is refused, whether it comes first or last, and the others train.

    Otherwise it could block the start.
    """
    images(folder / "c", {"cat": 0, "dog": 1}, size=10)
    with joined(monkeypatch, [program(folder, name) for name in order]) as (run, _, got):
        federation = run.federation(settings(folder), None, {})
        _, roster = run._engine.args
        roster._looked = 0.0
        roster.refresh()
        assert sorted(roster.nodes) == ["a", "b"]
    assert [client.name for client in federation.clients] == ["a", "b"]
    if order == "cab":
        assert any(re.search("silo 'c' .*10x10", one["why"]) for one in got if one["ask"] == "refused")


def test_a_silo_that_an_arm_cannot_train_does_not_block_the_run(folder, monkeypatch):
    """An arm needs features for its codewords.

    The report of a silo can claim any number of images.
    """
    images(folder / "c", {"cat": 0, "dog": 1})
    honest = program(folder, "c")

    def lies(packet):
        reply = honest(packet)
        if packet.header["ask"] == "report":
            reply.header["sizes"]["train"] = 1
            reply.header["content"]["train"]["images_of_class"] = [1, 0]
            reply.groups["pixels"]["counts"] = torch.eye(1, 256, dtype=torch.int64) * 64
        return reply

    programs = [lies, program(folder, "a"), program(folder, "b")]
    with joined(monkeypatch, programs) as (run, said, got):
        train(
            settings(folder, "uefl", codewords=10, segments=1),
            preset="x",
            out=folder / "run",
            device="cpu",
            data_root=None,
            observer=Killer(),
            deployment=run,
            pages=False,
        )
    assert {record["client"] for record in read_jsonl(folder / "run" / "metrics.jsonl")} == {"a", "b"}
    assert any(re.match("refused: client 'c' .*1 training images .*10", line) for line in said)
    assert any("'c'" in one["why"] for one in got if one["ask"] == "refused")


def test_silos_that_do_not_fit_together_are_named(folder, monkeypatch):
    images(folder / "c", {"cat": 0, "dog": 1}, size=10)
    with (
        joined(monkeypatch, [program(folder, name) for name in "ac"], wait=0.1) as (run, said, _),
        pytest.raises(UserError) as error,
    ):
        run.federation(settings(folder), None, {})
    assert re.match("a of 2 silos .*silo 'c' .*10x10, silo 'a' .*8x8; .*image_size", str(error.value))
    assert any("silo c " in line for line in said)


def test_version_has_no_terminal_control_characters(folder, caplog):
    program(folder, "a")(Packet(greeting(settings(folder)) | {"uefl": "\x1b[31m9\nFAKE LINE"}, {}))
    assert "FAKE LINE" in caplog.text
    assert all(record.getMessage().isprintable() for record in caplog.records)


def test_reason_of_the_server_is_one_short_line(folder, caplog):
    asked = greeting(settings(folder)) | {"ask": "refused", "why": "\x1b[31m\n" + 1000 * "x"}
    reply = program(folder, "a")(Packet(asked, {}))
    assert reply == Packet({"client": "a", "error": None}, {})
    (record,) = caplog.records
    assert ": ?[31m?xxx" in record.getMessage()
    assert len(record.getMessage()) < 250


def test_other_version_is_reported_at_both_ends(folder, caplog):
    reply = program(folder, "a")(Packet(greeting(settings(folder)) | {"uefl": "0.0"}, {}))
    assert reply.header["error"] == "version"
    assert re.search(r"version .*\b0\.0, ", caplog.text)


def test_unreadable_report_gets_a_reply(folder, monkeypatch):
    told = []

    def stranger(packet):
        told.append(packet.header["ask"])
        return Packet({"name": "a"}, {})

    with (
        joined(monkeypatch, [stranger], wait=0.1) as (run, _, _),
        pytest.raises(UserError, match=r"report .*read"),
    ):
        run.federation(settings(folder), None, {})
    assert told == ["report", "refused"]


def test_silo_with_data_of_another_kind_is_refused(folder, monkeypatch):
    honest = program(folder, "b")

    def liar(packet):
        report = honest(packet)
        if packet.header["ask"] == "report":
            content, sizes = report.header["content"], report.header["sizes"]
            del content["holdout"]
            sizes |= {"holdout": 0, "sets": [sizes["train"]]}
            report.header.update(kind="sets", reach={"has": [True, True], "full_rank": True})
        return report

    with (
        joined(monkeypatch, [program(folder, "a"), liar], wait=0.1) as (run, _, _),
        pytest.raises(UserError, match=r"refused: silo 'b' .*sets .*labeled"),
    ):
        run.federation(settings(folder), None, {})


def test_a_resumed_run_keeps_the_key_of_each_name(folder, monkeypatch):
    """The run folder has the hash of the key.

    So a node with another number is the same silo, and a node with another key is not.
    """
    programs = [program(folder, name) for name in "ab"]
    with joined(monkeypatch, programs, keys={10: b"key of a", 11: b"key of b"}) as (run, _, _):
        digest = run.federation(settings(folder), None, {}).digest
        known = run.silos
    assert sorted(known) == ["a", "b"]
    assert len({of["key"] for of in known.values()}) == 2
    with joined(monkeypatch, [programs[1], programs[0]], keys={10: b"key of b", 11: b"key of a"}) as (
        run,
        _,
        _,
    ):
        assert run.federation(settings(folder), None, known).digest == digest
        assert run.silos == known
    programs.insert(0, program(folder, "a"))  # the server hears this silo first
    with joined(monkeypatch, programs, keys={10: b"key of c", 11: b"key of a", 12: b"key of b"}) as (
        run,
        said,
        _,
    ):
        assert run.federation(settings(folder), None, known).digest == digest
        assert run.silos == known
    assert any(re.match("refused: .*'a' .*key; .*--name", line) for line in said)


def test_the_run_folder_records_how_each_silo_computes(folder, monkeypatch):
    monkeypatch.setattr(silo, "uses_bf16", lambda precision, device: device.index == 1)
    programs = [program(folder, name) for name in "ab"]
    programs[1]._device = torch.device("cpu", 1)
    cfg = settings(folder, precision="auto")
    with joined(monkeypatch, programs) as (run, _, _):
        federation = run.federation(cfg, None, {})
    assert {name: of["precision"] for name, of in run.silos.items()} == {"a": "fp32", "b": "bf16"}
    assert any(re.match("'a' .*float32, .*bfloat16", note) for note in federation.notes)
    programs[1]._device = torch.device("cpu")
    with joined(monkeypatch, programs) as (again, said, _):
        federation = again.federation(cfg, None, run.silos)
    assert any(re.match(r"silo b .*\bfp32, .*\bbf16: ", line) for line in said)
    assert not any("float32" in note for note in federation.notes)


def test_returning_silo_that_computes_otherwise_is_noted(folder, monkeypatch):
    """The server notes a change in the middle of a run, too.

    The server greets a new activation of the node again.
    """
    with joined(monkeypatch, [program(folder, name) for name in "ab"]) as (run, said, _):
        run.federation(settings(folder), None, {})
        before = run.silos["b"]["torch"]
        monkeypatch.setattr(silo.torch, "__version__", "9.9")
        monkeypatch.setattr(silo, "uses_bf16", lambda precision, device: True)
        link, roster = run._engine.args
        link.activated[11] = "2"
        roster.refresh()
    assert re.match(r"silo b .*\bbf16, .*\bfp32: ", said[-2])
    assert re.match(rf"silo b .*torch 9\.9, .*torch {re.escape(before)}: ", said[-1])


def test_a_node_rejected_twice_may_still_join(folder, monkeypatch):
    """The node is started again after each refusal."""
    good = program(folder, "b")
    replies = [
        lambda packet: Packet({}, {}),
        lambda packet: Packet(good(packet).header | {"error": "data"}, {}),
        good,
    ]

    def unsteady(packet):
        if packet.header["ask"] == "report":
            return replies.pop(0)(packet)
        link.activated[11] += "again"
        return Packet({}, {})

    with (
        joined(monkeypatch, [program(folder, "a"), unsteady]) as (run, said, _),
        deployment.connect(None, None) as link,
    ):
        run.federation(settings(folder), None, {})
        assert run._engine.args[1].refused == {}
    first, second = (line for line in said if line.startswith("refused"))
    assert "report" in first
    assert re.match(r"refused: silo 'b': .*\(fault data;", second)


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "sets", "sizes": {"train": 12, "holdout": 0, "test": 12, "sets": [12]}},
        {"classes": ["dog", "\N{LATIN SMALL LETTER A}"]},
        {"shape": [1, 4, 16]},
    ],
)
def test_returning_silo_with_other_data_is_refused(folder, monkeypatch, change):
    """A silo sends an honest report, and later another report that would end the run."""
    honest = program(folder, "b")

    def liar(packet):
        report = honest(packet)
        if packet.header["ask"] == "report":
            if link.activated[11] != "1":
                report.header.update(change, reach={"has": [True, True], "full_rank": True})
            link.activated[11] = "2"
        return report

    with (
        joined(monkeypatch, [program(folder, "a"), liar], silos=3, wait=3.0) as (run, said, _),
        deployment.connect(None, None) as link,
        pytest.raises(UserError, match=r"\b3 .*: silo 'b'"),
    ):
        run.federation(settings(folder), None, {})
    assert any(line.startswith("refused: silo 'b'") for line in said)


def test_whole_run_records_its_silos(folder, monkeypatch):
    with joined(monkeypatch, [program(folder, name) for name in "ab"]) as (run, _, _):
        out = folder / "run"
        train(
            settings(folder),
            preset="x",
            out=out,
            device="cpu",
            data_root=None,
            observer=Killer(),
            deployment=run,
            pages=False,
        )
    assert read_silos(out) == run.silos
    assert set(run.silos["a"]) == {"key", "precision", "torch"}


@pytest.mark.parametrize("text", ["", "[1]", '{"a": {"key": 3}}', 100_000 * "["])
def test_a_file_of_silos_that_is_damaged_is_a_line(tmp_path, text):
    (tmp_path / "silos.json").write_text(text)
    with pytest.raises(UserError, match=r"silos.json.* damaged"):
        read_silos(tmp_path)


def test_an_unexpected_failure_keeps_its_traceback(folder, caplog):
    one = program(folder, "a")
    one._source.federation = None
    assert one(Packet(greeting(settings(folder)), {})).header["error"] == "program"
    assert "Traceback" in caplog.text
    assert one(Packet({}, {})).header["error"] == "version"


def test_a_bad_round_ends_the_run_at_its_last_checkpoint(folder, monkeypatch):
    """If the silo no longer lies, the resumed run has the numbers of an undisturbed run."""
    aggregate = FedAvg.aggregate

    def power(self, state, averages):
        aggregate(self, state, averages)
        state.tensors["values"] = state.tensors["values"] ** 20

    monkeypatch.setattr(FedAvg, "aggregate", power)
    honest = [program(folder, name) for name in "ab"]
    cfg = settings(folder, rounds=[3])
    keys = {"device": "cpu", "data_root": None, "observer": Killer(), "pages": False}

    def lies(packet):
        reply = honest[1](packet)
        if packet.header["ask"] == "work" and packet.header["options"]["round"] == 2:
            reply.groups["update"]["values"][-1] = 500.0
        return reply

    with joined(monkeypatch, honest) as (run, _, _):
        train(cfg, preset="x", out=folder / "whole", deployment=run, **keys)
    with (
        joined(monkeypatch, [honest[0], lies]) as (run, _, _),
        pytest.raises(RunError, match=r"round 3: .*\bb .*\b500"),
    ):
        train(cfg, preset="x", out=folder / "run", deployment=run, **keys)
    assert 0 < len((folder / "run" / "metrics.jsonl").read_text().splitlines()) < 6
    with joined(monkeypatch, honest) as (run, _, _):
        resume(folder / "run", deployment=run, **keys)
    assert (folder / "run" / "metrics.jsonl").read_bytes() == (
        folder / "whole" / "metrics.jsonl"
    ).read_bytes()
