"""metrics.jsonl has each rejected reply with its reason.

This holds for a complete run, for an interrupted run, and for a run that stops because of the reply.
"""

import json

import pytest

import uefl
from tests.federated.engine_wrappers import TamperingEngine
from tests.federated.interrupted import KEYS, Killer, outcome
from tests.federated.tiny import arm, settings
from uefl.algorithms.base import Algorithm
from uefl.engines.base import Reply
from uefl.errors import RunError, UserError
from uefl.suites import runner
from uefl.suites.suite import Job


class Failing(Algorithm):
    """silo-1 fails in the second round."""

    def before_round(self, work):
        if work.client == "silo-1" and work.round == 1:
            raise RuntimeError("memory")


LINE = {"arm": "failing", "iteration": 0, "round": 2, "client": "silo-1", "reason": "memory"}


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def run(out, observer=None, quorum=0.5):
    return uefl.train(KEYS, arms={"failing": Failing()}, quorum=quorum, out=out, observer=observer)


def test_rejected_replies_are_recorded_also_after_resume(tmp_path):
    whole = run(tmp_path / "whole")
    assert [line for line in lines(whole.path) if "reason" in line] == [LINE]
    assert whole.rejected.to_dict("records") == [LINE]
    assert "reason" not in whole.metrics.columns
    assert whole.summary["failing"]["rejected"] == 1
    assert whole.summary["failing"]["reasons"] == {"memory": 1}
    assert "| failing | silo-1 | 2 | 1 | memory |" in (whole.path / "report.md").read_text()
    for when in ((1, "silo-0"), (2, "silo-1")):  # in the rejected exchange, and after it
        out = tmp_path / f"stopped-{when[0]}"
        with pytest.raises(KeyboardInterrupt):
            run(out, Killer(("failing", *when)))
        assert outcome(uefl.resume(out, arms={"failing": Failing()}).path) == outcome(whole.path)


def test_stopped_run_records_rejected_replies(tmp_path):
    with pytest.raises(RunError, match=r"quorum .*\b2; .*\(silo-1: .*memory"):
        run(tmp_path / "run", quorum=1.0)
    assert lines(tmp_path / "run")[-1] == LINE
    with pytest.raises(UserError, match=r"silo-1 .*round 2: .*memory"):
        uefl.load(tmp_path / "run")


def test_suite_progress_counts_measured_rounds(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in ({"round": 1}, LINE)))
    assert runner._measured(Job("case", "arm", 0, None, tmp_path)) == 1


def test_an_algorithm_rejects_a_useless_reply():
    """FedIIR rejects a client that reports no batch."""
    one, _, notices = arm(settings("fediir", rounds=[1], quorum=0.5))
    honest = one.engine._clients["silo-1"]

    def lazy(message):
        reply = honest(message)
        if "batches" in reply.tensors:
            reply.tensors["batches"].zero_()
        return reply

    one.engine._clients["silo-1"] = lazy
    one.turn()
    (reason,) = (line["reason"] for line in one.rejected)
    assert "gradient" in reason
    assert notices == [f"round 1: rejected silo-1: {reason}"]


def test_a_client_that_only_measures_may_be_rejected():
    one, _, _ = arm(settings("fedavg", participation=0.6, quorum=0.3, rounds=[1]))
    one.turn()
    one.engine = TamperingEngine(
        one.engine, lambda reply: Reply(reply.client, error="gone") if reply.client == "silo-1" else reply
    )
    one.turn()
    assert [(line["client"], line["round"]) for line in one.rejected] == [("silo-1", 0)]
