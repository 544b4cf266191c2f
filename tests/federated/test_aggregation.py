import pytest
import torch

from uefl.aggregation import CodewordMean, WeightedMean, refusal
from uefl.engines.base import Reply


def test_weighted_mean():
    mean = WeightedMean(torch.zeros(2))
    mean.add(torch.tensor([1.0, 2.0]), 1)
    mean.add(torch.tensor([5.0, 4.0]), 3)
    assert mean.result().tolist() == [4.0, 3.5]


def test_weighted_mean_of_nothing_is_what_was_there():
    assert WeightedMean(torch.tensor([3.0])).result().tolist() == [3.0]


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


def test_the_codewords_of_a_group_of_one_come_back_bit_for_bit():
    codewords, usage = torch.randn(64, 8), torch.randint(0, 10_000, (64,))
    usage[5] = 0
    mean = CodewordMean(codewords.clone())
    mean.add(codewords, usage)
    assert torch.equal(mean.result(), codewords)


SENT = {"values": torch.zeros(4), "codebook": torch.zeros(2, 3)}


def reply(**tensors):
    return Reply("a", 1, {"values": torch.ones(4), "codebook": torch.ones(2, 3)} | tensors)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"values": torch.tensor([1.0, float("nan"), 0, 0])}, "values is not finite"),
        ({"codebook": torch.full((2, 3), float("inf"))}, "codebook is not finite"),
        ({"values": torch.ones(5)}, r"values is torch.float32 \[5\], expected torch.float32 \[4\]"),
        ({"values": torch.ones(4).double()}, "float64"),
        ({"codebook": torch.ones(1, 3)}, "codebook is"),
        ({"codebook": torch.ones(2, 4)}, "codebook is"),
    ],
    ids=["nan", "inf", "shape", "dtype", "shrunk", "wider"],
)
def test_unsound_updates_are_refused(tensors, message):
    import re

    assert re.search(message, refusal(reply(**tensors), SENT, 0.0))


def test_sound_updates_pass_and_a_codebook_may_grow():
    assert refusal(reply(), SENT, 0.0) is None
    assert refusal(reply(codebook=torch.ones(5, 3)), SENT, 0.0) is None


def test_missing_tensor_error_and_norm_bound():
    assert refusal(Reply("a", 1, {"codebook": torch.ones(2, 3)}), SENT, 0.0) == "values is missing"
    assert refusal(Reply("a", error="out of memory"), SENT, 0.0) == "out of memory"
    assert "max_update_norm" in refusal(reply(), SENT, 1.9)
    assert refusal(reply(), SENT, 2.1) is None
