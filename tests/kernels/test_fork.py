"""A child that was forked after the kernels ran in the parent."""

import sys

import pytest

from tests import fresh

CHILD = """
import os, select
import torch
from uefl_kernels import KMeans
from uefl_kernels.nn import VectorQuantize

torch.set_num_threads(2)
x, layer = torch.randn(400, 8), VectorQuantize(8, 16).eval()

def call():
    return KMeans(4, random_state=0).fit(x).labels_, layer(x)[1]

right = call()
read, write = os.pipe()
if os.fork() == 0:
    torch.set_num_threads(1)
    same = all(map(torch.equal, call(), right))
    os.write(write, b"same" if same else b"other")
    os._exit(0)
ready = select.select([read], [], [], 30)[0]
print(os.read(read, 9).decode() if ready else "hangs")
"""

DURING_A_CALL = """
from uefl_kernels.nn.mc_dropout import MCDropout, _locked as held

measured, x = MCDropout(torch.nn.Sequential(torch.nn.Dropout(0.5)), passes=2), torch.randn(3, 4)

def use():
    measured(x)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs fork")
def test_a_child_forked_during_a_call_of_mc_dropout_can_call():
    result = fresh.python(fresh.FORKED.format(DURING_A_CALL))
    assert result.stdout.strip() == "0", result.stderr


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs fork")
def test_a_forked_child_with_one_thread_gives_the_same_bits():
    """With more threads it hangs in OpenMP, as plain PyTorch does (see docs/kmeans.md)."""
    result = fresh.python(CHILD)
    assert result.stdout.strip() == "same", result.stderr
