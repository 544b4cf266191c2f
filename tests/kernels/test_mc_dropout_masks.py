"""The masks of mc_dropout_mlp: known answers of Philox, the definition, and their statistics."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from uefl_kernels._philox import philox
from uefl_kernels.ops.mc_dropout_mlp import composed

KNOWN_ANSWERS = [  # Random123, kat_vectors
    ([0, 0, 0, 0], 0, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, -1, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        0x299F31D0A4093822,
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "seed", "expected"), KNOWN_ANSWERS)
def test_philox_known_answers(counter, seed, expected):
    """Philox gives the known answers on tensors, and on arrays, as k-means uses it."""
    assert [
        int(word) for word in philox([torch.tensor(word) for word in counter], torch.tensor(seed))
    ] == expected
    assert [
        int(word[0]) for word in philox([np.array([word], np.uint64) for word in counter], seed)
    ] == expected


@pytest.mark.every_variant
@pytest.mark.parametrize("consistent", [False, True])
@pytest.mark.parametrize("shape", [(5, 33), (1, 1), (200, 8), (0, 3), (600, 512)])
def test_masks_equal_the_definition(shape, consistent):
    for seed, pass_, stream, p in (
        (0, 0, 0, 0.5),
        (2**62 + 12345, 99, 3, 0.1),
        (7, 2**31, 1, 0.99999999),
        (7, 1, 0, 0.0),
    ):
        arguments = (torch.tensor(seed), *shape, pass_, stream, p, consistent)
        found, expected = (
            torch.ops.uefl.dropout_mask(*arguments),
            torch.ops.uefl_reference.dropout_mask(*arguments),
        )
        assert found.dtype == expected.dtype == torch.bool
        assert torch.equal(found, expected)


def test_the_first_masks_by_hand():
    """With counter zero and key zero, the masks are the known answer above, cut into halves."""
    halves = [word >> shift & 0xFFFF for word in KNOWN_ANSWERS[0][2] for shift in (0, 16)]
    keep = torch.ops.uefl.dropout_mask(torch.tensor(0), 1, 8, 0, 0, 0.6, False)
    assert keep[0].tolist() == [half >= round(0.6 * 65536) for half in halves]


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_masks_drop_the_right_share_independently(p):
    rows, columns, passes = 256, 512, 8
    keep = torch.stack(
        [torch.ops.uefl.dropout_mask(torch.tensor(3), rows, columns, t, 0, p, False) for t in range(passes)]
    )
    drop = 1 - keep.double()
    deviation = math.sqrt(p * (1 - p))
    n = drop.numel()
    assert abs(float(drop.mean()) - composed.threshold(p) / 65536) < 4 * deviation / math.sqrt(n)
    centered = (drop - p) / deviation
    for dim in range(3):  # neighbors in pass, row and column, and a neighboring stream
        correlation = (centered * centered.roll(1, dim)).mean()
        assert abs(float(correlation)) < 4.5 / math.sqrt(n)
    other = torch.ops.uefl.dropout_mask(torch.tensor(3), rows, columns, 0, 1, p, False)
    assert abs(float((centered[0] * ((1 - other.double()) - p) / deviation).mean())) < 4.5 / math.sqrt(
        rows * columns
    )
    # the shares of each pass, row and column spread like independent draws
    for dim in ((1, 2), (0, 2), (0, 1)):
        count = n / drop.shape[({0, 1, 2} - set(dim)).pop()]
        spread = (centered.mean(dim) * math.sqrt(count)).square().mean()
        assert 0.2 < float(spread) < 2.6


def test_a_consistent_mask_is_one_row_for_all():
    keep = torch.ops.uefl.dropout_mask(torch.tensor(1), 40, 30, 2, 0, 0.5, True)
    assert bool((keep == keep[:1]).all())
    assert not torch.equal(keep[:1], torch.ops.uefl.dropout_mask(torch.tensor(1), 1, 30, 3, 0, 0.5, True))
