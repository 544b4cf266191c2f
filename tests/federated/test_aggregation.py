import math
import re

import pytest
import torch

from uefl.aggregation import WeightedMean, rejection
from uefl.algorithms.uefl.usage import CodewordMean
from uefl.engines.base import Expected, Message, Reply, expected_like


def test_weighted_mean():
    mean = WeightedMean(torch.zeros(2))
    mean.add(torch.tensor([1.0, 2.0]), 1)
    mean.add(torch.tensor([5.0, 4.0]), 3)
    assert mean.result().tolist() == [4.0, 3.5]


def test_empty_weighted_mean_keeps_the_value():
    assert WeightedMean(torch.tensor([3.0])).result().tolist() == [3.0]


@pytest.mark.parametrize("weight", [-1, math.nan, math.inf, "3", None])
def test_invalid_weight_is_refused(weight):
    with pytest.raises(ValueError, match=r"weight .*\b0\b"):
        WeightedMean(torch.zeros(1)).add(torch.ones(1), weight)


def test_weighted_mean_does_not_keep_the_client_s_tensor():
    mean, x = WeightedMean(torch.zeros(1)), torch.tensor([1.0])
    mean.add(x, 1)
    x.fill_(9)
    assert mean.result().tolist() == [1.0]


def test_codewords_are_averaged_by_use_and_unused_ones_stay():
    mean = CodewordMean(torch.tensor([[0.0], [7.0], [0.0]]))
    mean.add(torch.tensor([[1.0], [100.0], [2.0]]), torch.tensor([3, 0, 0]))
    mean.add(torch.tensor([[5.0], [200.0], [4.0]]), torch.tensor([1, 0, 8]))
    assert mean.result().tolist() == [[2.0], [7.0], [4.0]]


def test_group_of_one_keeps_its_codewords_bit_for_bit():
    codewords, usage = torch.randn(64, 8), torch.randint(0, 10_000, (64,))
    usage[5] = 0
    mean = CodewordMean(codewords.clone())
    mean.add(codewords, usage)
    assert torch.equal(mean.result(), codewords)


TENSORS = {"values": torch.zeros(4), "codebook": torch.zeros(2, 3)}
SENT = Message(TENSORS, expects=expected_like(TENSORS) | {"usage": Expected((2,), torch.int64)})
GROWING = Message(
    TENSORS,
    expects=SENT.expects
    | {"codebook": Expected((5, 3), torch.float32), "usage": Expected((5,), torch.int64)},
)


def reply(**tensors):
    valid = {"values": torch.ones(4), "codebook": torch.ones(2, 3), "usage": torch.tensor([5, 0])}
    return Reply("a", 1, valid | tensors)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"values": torch.tensor([1.0, float("nan"), 0, 0])}, "values .*finite"),
        ({"codebook": torch.full((2, 3), float("inf"))}, "codebook .*finite"),
        ({"values": torch.ones(5)}, r"values .*torch.float32 \[5\], .*torch.float32 \[4\]"),
        ({"values": torch.ones(4).double()}, "float64"),
        ({"codebook": torch.ones(1, 3)}, r"codebook .*\[1, 3\]"),
        ({"codebook": torch.ones(2, 4)}, r"codebook .*\[2, 4\]"),
        ({"codebook": torch.ones(5, 3)}, r"codebook .*torch.float32 \[5, 3\], .*torch.float32 \[2, 3\]"),
        ({"usage": torch.tensor([1])}, r"usage .*torch.int64 \[1\], .*torch.int64 \[2\]"),
        ({"usage": torch.tensor([1.0, float("nan")])}, "usage .*torch.float32"),
        ({"head": torch.ones(1)}, r"\bhead,"),
    ],
    ids=[
        "nan",
        "inf",
        "shape",
        "dtype",
        "shrunk",
        "wider",
        "more-codewords",
        "short-usage",
        "nan-usage",
        "unasked",
    ],
)
def test_invalid_updates_are_rejected(tensors, message):
    assert re.search(message, rejection(reply(**tensors), SENT, 0.0))


def test_valid_updates_pass_and_codebooks_grow_as_requested():
    assert rejection(reply(), SENT, 0.0) is None
    longer = {"codebook": torch.ones(5, 3), "usage": torch.arange(5)}
    assert rejection(reply(**longer), GROWING, 0.0) is None
    assert "torch.float32 [5, 3]" in rejection(reply(), GROWING, 0.0)


def test_private_tensors_must_be_finite_and_keep_their_form():
    message = Message(TENSORS, expects=SENT.expects, private={"head": torch.zeros(3)})
    valid = reply()
    for private, rejected in (
        ({"head": torch.ones(3)}, False),
        ({}, True),
        ({"head": torch.full((3,), torch.nan)}, True),
        ({"head": torch.ones(4)}, True),
        ({"head": torch.ones(3, dtype=torch.float64)}, True),
    ):
        valid.private = private
        assert (rejection(valid, message, 0.0) is not None) is rejected


def test_missing_and_failed_clients():
    assert "values" in rejection(Reply("a", 1, {"codebook": torch.ones(2, 3)}), SENT, 0.0)
    without_use = {k: v for k, v in reply().tensors.items() if k != "usage"}
    assert "usage" in rejection(Reply("a", 1, without_use), SENT, 0.0)
    assert rejection(Reply("a", error="broken"), SENT, 0.0) == "broken"
    assert "-96 examples" in rejection(Reply("a", -96, reply().tensors), SENT, 0.0)


def test_the_norm_bound_covers_all_that_is_averaged():
    length = (4 + 6) ** 0.5
    assert "max_update_norm" in rejection(reply(), SENT, 0.99 * length)
    assert rejection(reply(), SENT, 1.01 * length) is None
    assert "max_update_norm" in rejection(reply(codebook=torch.full((2, 3), 1e6)), SENT, 10.0)


def test_a_scalar_has_a_distance_too():
    sent = Message({"scale": torch.tensor(1.0)}, expects={"scale": Expected((), torch.float32)})
    assert rejection(Reply("a", 1, {"scale": torch.tensor(3.0)}), sent, 2.5) is None
    assert "max_update_norm" in rejection(Reply("a", 1, {"scale": torch.tensor(3.0)}), sent, 1.5)


@pytest.mark.parametrize("examples", [float("nan"), float("inf"), 0, -1])
def test_a_weight_that_is_no_number_of_examples_is_refused(examples):
    assert "examples" in rejection(Reply("a", examples, reply().tensors), SENT, 0.0)


def test_new_private_state_and_loss_must_be_finite():
    valid = reply()
    valid.private = {"new": torch.tensor([1, 2])}
    assert rejection(valid, SENT, 0.0) is None
    valid.private = {"new": torch.tensor([torch.nan])}
    assert re.search(r"\bnew\b", rejection(valid, SENT, 0.0))
    diverged = Reply("a", 1, reply().tensors, training={"train_loss": float("inf")})
    assert re.search(r"loss .*\binf\b", rejection(diverged, SENT, 0.0))
