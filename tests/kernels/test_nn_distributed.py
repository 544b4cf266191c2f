"""The layers in two gloo processes with batches of different sizes: nobody hangs, and both end with the same codewords.

A process that waits for one that does not come fails after a minute.
"""

from __future__ import annotations

import datetime

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from uefl_kernels.nn import ResidualVQ, VectorQuantize

from .conftest import normal

WORLD = 2
SIZES = ((30, 7), (5, 40), (0, 12), (9, 0), (0, 0), (20, 21))  # rows of each process in each step
CASES = {
    "averages": {},
    "revival": {"threshold_ema_dead_code": 1},
    "per head": {"threshold_ema_dead_code": 1, "heads": 4, "codebook_dim": 2, "separate_codebook_per_head": True},
    "heads": {"threshold_ema_dead_code": 1, "heads": 4, "codebook_dim": 2},
    "cosine": {"threshold_ema_dead_code": 1, "use_cosine_sim": True},
    "k-means": {"kmeans_init": True},
    "k-means per head": {"kmeans_init": True, "heads": 4, "codebook_dim": 2, "separate_codebook_per_head": True},
}


def rows(rank, step):
    return normal(SIZES[step][rank], 8, seed=100 * rank + step) + 3 * rank


def layer(**options):
    torch.manual_seed(0)
    return VectorQuantize(8, 20, **options)


def train(rank, name, masked):
    vq, messages = layer(**CASES[name]), []
    torch.manual_seed(rank)  # whatever is drawn now differs between the processes
    for step in range(len(SIZES)):
        x = rows(rank, step)
        if masked:  # the same rows, with padding between them
            x = torch.stack([torch.full_like(x, float("nan")), x], 1).flatten(0, 1)
        given = {"mask": torch.arange(len(x)) % 2 == 1} if masked else {}
        before = sent()
        vq(x.requires_grad_(), **given)[2].backward()
        messages.append(sent() - before)
    return vq.state_dict() | {"messages": torch.tensor(messages)}


def train_residual(rank):
    torch.manual_seed(0)
    rvq = ResidualVQ(dim=8, num_quantizers=4, codebook_size=12, quantize_dropout=True, threshold_ema_dead_code=1)
    torch.manual_seed(rank)
    kept = [int((rvq(rows(rank, 5))[1][0] >= 0).sum()) for _ in range(10)]
    return rvq.state_dict() | {"kept": torch.tensor(kept)}


def train_learnable(rank):
    vq = torch.nn.parallel.DistributedDataParallel(layer(learnable_codebook=True, threshold_ema_dead_code=0.5))
    optimizer = torch.optim.SGD(vq.parameters(), lr=1.0)
    for step in (0, 1, 5):
        optimizer.zero_grad()
        vq(rows(rank, step).requires_grad_())[2].backward()
        optimizer.step()
    return vq.module.state_dict()


def sent():
    return dist.all_reduce.calls


def counted(function):
    def call(*args, **kwargs):
        call.calls += 1
        return function(*args, **kwargs)

    call.calls = 0
    return call


def give_rows(rank):
    vq = VectorQuantize(8, 20, threshold_ema_dead_code=1, decay=0.0)
    vq.codebook = torch.cat([torch.zeros(1, 8), torch.full((19, 8), 1e6)])
    vq(torch.arange(6.0)[:, None].expand(6, 8) + 10 * rank + 1)
    return vq.state_dict()


JOBS = {
    **{(name, masked): (train, name, masked) for name in CASES for masked in (False, True)},
    "rows": (give_rows,),
    "residual": (train_residual,),
    "learnable": (train_learnable,),
}


def work(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD, timeout=datetime.timedelta(seconds=60)
    )
    dist.all_reduce = counted(dist.all_reduce)
    torch.save({job: function(rank, *args) for job, (function, *args) in JOBS.items()}, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def states(tmp_path_factory):
    """What every job left in both processes; one pair of them does all, because they take seconds to start."""
    folder = tmp_path_factory.mktemp("processes")
    mp.spawn(work, (str(folder),), nprocs=WORLD)
    first, second = (torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(WORLD))
    return {job: (first[job], second[job]) for job in JOBS}


def assert_same(first, second):
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
        assert value.isfinite().all(), name


@pytest.mark.parametrize("masked", [False, True], ids=["rows", "masked"])
@pytest.mark.parametrize("name", CASES)
def test_same_codewords_and_one_message_per_step(states, name, masked):
    first, second = states[name, masked]
    assert_same(first, second)
    messages = first["messages"].tolist()
    assert messages[1:] == [1] * (len(SIZES) - 1)
    assert messages[0] == (13 if "kmeans_init" in CASES[name] else 1)  # how many rows, which rows, ten rounds, the step itself
    start = layer(**CASES[name])
    assert not torch.equal(first["_codebook.embed"], start._codebook.embed)


def test_averages_are_those_of_one_process_with_all_rows(states):
    state = states["averages", False][0]
    vq = layer()
    for step in range(len(SIZES)):
        vq(torch.cat([rows(rank, step) for rank in range(WORLD)]))
    for name, value in vq.state_dict().items():  # float32 sums of two halves instead of one
        torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)


def test_dead_codewords_take_rows_of_both_processes(states):
    state, other = states["rows"]
    assert_same(state, other)
    codes = state["_codebook.embed"][0, :, 0]
    assert {v for v in codes.tolist() if v in set(range(1, 7)) | set(range(11, 17))} == {float(v) for v in (*range(1, 7), *range(11, 17))}


def test_residual_quantisers_leave_out_the_same(states):
    first, second = states["residual"]
    assert_same(first, second)
    assert len(set(first["kept"].tolist())) > 1


def test_learned_codewords_under_ddp(states):
    assert_same(*states["learnable"])
