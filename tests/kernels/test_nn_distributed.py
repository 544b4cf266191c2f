"""The layers run in two, three and four gloo processes with batches of different sizes.

No process hangs, and all end with the same codewords.

A process that waits for one that does not come fails after five minutes. The processes are forked off one
that has imported torch.
"""

from __future__ import annotations

import datetime
import functools

import pytest
import torch
import torch._inductor.config
import torch.distributed as dist
import torch.multiprocessing as mp

import tests.fresh  # noqa: F401  one process to fork from for the whole run
from uefl_kernels.nn import LFQ, ResidualLFQ, ResidualVQ, VectorQuantize

from .conftest import normal

WORLDS = (2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow))
# rows of each process in each step
SIZES = ((30, 7, 0, 12), (5, 40, 3, 0), (0, 12, 25, 1), (9, 0, 1, 2), (0, 0, 0, 0), (20, 21, 22, 23))
CASES = {
    "averages": {},
    "revival": {"threshold_ema_dead_code": 1},
    "per head": {
        "threshold_ema_dead_code": 1,
        "heads": 4,
        "codebook_dim": 2,
        "separate_codebook_per_head": True,
    },
    "heads": {"threshold_ema_dead_code": 1, "heads": 4, "codebook_dim": 2},
    "cosine": {"threshold_ema_dead_code": 1, "use_cosine_sim": True},
    "k-means": {"kmeans_init": True},
    "k-means per head": {
        "kmeans_init": True,
        "heads": 4,
        "codebook_dim": 2,
        "separate_codebook_per_head": True,
    },
}

SGD = functools.partial(torch.optim.SGD, lr=0.5)
OPTIMIZED = {"learnable_codebook": True, "ema_update": False, "in_place_codebook_optimizer": SGD}
UPDATES = {  # options of the layer, and the arguments of the call in each step
    "apart": ({"sync_codebook": False, "threshold_ema_dead_code": 1}, lambda step: {}),
    "apart k-means": ({"sync_codebook": False, "kmeans_init": True}, lambda step: {}),
    "apart optimizer": (OPTIMIZED | {"sync_codebook": False}, lambda step: {}),
    "accumulated": ({}, lambda step: {"accum_ema_update": step % 3 < 2}),
    "manual": ({"manual_ema_update": True}, lambda step: {}),
    "weighted": ({}, lambda step: {"ema_update_weight": lambda sums, sizes: (sizes > 2).float()}),
    "affine": ({"affine_param": True, "sync_affine_param": True}, lambda step: {}),
    "optimizer": (OPTIMIZED, lambda step: {}),
}


def rows(rank, step):
    return normal(SIZES[step][rank], 8, seed=100 * rank + step) + 3 * rank


def layer(**options):
    torch.manual_seed(0)
    return VectorQuantize(8, 20, **options)


def train(rank, name, masked):
    vq, messages = layer(**CASES[name]), []
    torch.manual_seed(rank)  # from here on, the processes draw different numbers
    for step in range(len(SIZES)):
        x = rows(rank, step)
        if masked:  # the same rows, with padding between them
            x = torch.stack([torch.full_like(x, float("nan")), x], 1).flatten(0, 1)
        given = {"mask": torch.arange(len(x)) % 2 == 1} if masked else {}
        before = sent()
        vq(x.requires_grad_(), **given)[2].backward()
        messages.append(sent() - before)
    return vq.state_dict() | {"messages": torch.tensor(messages)}


def train_updated(rank, name):
    """Return the state after the first step and after the last one."""
    options, given = UPDATES[name]
    vq, messages, states = layer(**options), [], {}
    torch.manual_seed(rank)
    for step in range(len(SIZES)):
        before = sent()
        _, _, loss = vq(rows(rank, step).requires_grad_(), **given(step))
        if loss.requires_grad:
            loss.backward()
        if name == "manual" and step % 2 == 1:
            vq._codebook.update_ema()
        messages.append(sent() - before)
        if step == 0:
            states = {f"first.{key}": value.clone() for key, value in vq.state_dict().items()}
    return states | vq.state_dict() | {"messages": torch.tensor(messages)}


def train_residual(rank):
    torch.manual_seed(0)
    rvq = ResidualVQ(
        dim=8, num_quantizers=4, codebook_size=12, quantize_dropout=True, threshold_ema_dead_code=1
    )
    torch.manual_seed(rank)
    kept = [int((rvq(rows(rank, 5))[1][0] >= 0).sum()) for _ in range(10)]
    return rvq.state_dict() | {"kept": torch.tensor(kept)}


def train_under_ddp(rank, **options):
    vq = layer(**options)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 8), vq))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(len(SIZES)):
        optimizer.zero_grad()
        quantized, _, loss = model(rows(rank, step))
        (quantized.sum() + loss).backward()
        optimizer.step()
    return model.module.state_dict()


def accumulate_under_ddp(rank):
    """Train without no_sync(): every forward pass copies the buffers of the first process."""
    model = torch.nn.parallel.DistributedDataParallel(layer(codebook_dim=4))
    for step in range(2):
        quantized, _, loss = model(rows(rank, step), accum_ema_update=step == 0)
        (quantized.sum() + loss).backward()
    return model.module.state_dict()


def train_compiled(rank):
    """Compare with the same steps without the compiler.

    Return 1 for each step and tensor that agrees up to rounding.
    """
    torch._inductor.config.fallback_random = True  # the same draws
    eager, compiled = (layer(threshold_ema_dead_code=1) for _ in range(2))
    run, same = torch.compile(compiled, fullgraph=True), []
    for step in (0, 1):
        results = []
        for call in (eager, run):
            torch.manual_seed(step)
            x = rows(rank, step).requires_grad_()
            quantized, indices, loss = call(x)
            (quantized.sum() + loss).backward()
            results.append((quantized, indices, loss, x.grad))
        same += [torch.allclose(*pair, rtol=1e-4, atol=1e-5) for pair in zip(*results, strict=True)]
        same += [
            torch.allclose(value, compiled.state_dict()[name], rtol=1e-5)
            for name, value in eager.state_dict().items()
        ]
    return compiled.state_dict() | {"same": torch.tensor(same)}


def sent():
    return getattr(dist.all_reduce, "calls", 0)  # the process of the tests does not count calls


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


def give_nan(rank):
    """Give NaN in one process: all others raise an error, too, and none waits."""
    vq = layer(kmeans_init=True)
    with pytest.raises(RuntimeError, match=r"batch.*k-means.*NaN"):
        vq(torch.full((30, 8), float("nan") if rank == 0 else 1.0))
    return vq.state_dict()


def train_lfq(rank):
    """Train on batches, some of which are empty or all masked.

    Return the entropies that all processes share.
    """
    lfq, found = LFQ(codebook_size=256), []
    for step in range(len(SIZES)):
        x = rows(rank, step).unsqueeze(0).requires_grad_()
        for mask in (None, torch.full(x.shape[:2], rank == 0)):
            _, losses = lfq(x, mask=mask, return_loss_breakdown=True)
            sum(losses).backward()
            found.append(losses.batch_entropy.detach())
    return {"entropies": torch.stack(found)}


def train_numbers(rank):
    """Train with other numbers of quantizers in each process."""
    torch.manual_seed(0)
    rvq = ResidualVQ(dim=8, num_quantizers=4, codebook_size=20)
    lfq = ResidualLFQ(dim=8, num_quantizers=4, codebook_size=16)
    for step in range(len(SIZES)):
        x = rows(rank, step).unsqueeze(0)
        for n_q in (1 + (rank + step) % 4, torch.tensor([1 + (2 * rank + step) % 4])):
            indices, losses = rvq(x, n_q=n_q)[1:]
            assert ((indices >= 0).sum(-1) == int(n_q)).all()
            assert (losses[int(n_q) :] == 0).all()
            (lfq(x, n_q=n_q)[2].sum() + losses.sum()).backward()
    return rvq.state_dict()


def jobs(world):
    found = {(name, masked): (train, name, masked) for name in CASES for masked in (False, True)}
    found |= {("updates", name): (train_updated, name) for name in UPDATES}
    found["ddp"] = (functools.partial(train_under_ddp, threshold_ema_dead_code=1),)
    found["learnable"] = (
        functools.partial(train_under_ddp, learnable_codebook=True, threshold_ema_dead_code=0.5),
    )
    found["accumulated under ddp"] = (accumulate_under_ddp,)
    found |= {"rows": (give_rows,), "residual": (train_residual,), "nan": (give_nan,)}
    found |= {"lfq": (train_lfq,), "numbers": (train_numbers,)}
    return found | ({"compiled": (train_compiled,)} if world == 3 else {})


def work(rank, folder, world):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(minutes=5),
    )
    plain, dist.all_reduce = dist.all_reduce, counted(dist.all_reduce)
    found = {}
    for job, (function, *args) in jobs(world).items():
        if job == "compiled":
            dist.all_reduce = plain  # torch.compile traces only the original function
        found[job] = function(rank, *args)
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module", params=WORLDS)
def states(request, tmp_path_factory):
    """Return the result of every job in each process.

    One group runs all jobs: processes take seconds to start.
    """
    folder = tmp_path_factory.mktemp("processes")
    mp.start_processes(work, (str(folder), request.param), nprocs=request.param, start_method="forkserver")
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(request.param)]


def state_of(states, job):
    """Return the state of the first process, after a check that all processes agree."""
    if job not in states[0]:
        pytest.skip("run in another number of processes")
    first, *others = (found[job] for found in states)
    for other in others:
        assert_same(first, other)
    return first


def assert_same(first, second):
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
        assert value.isfinite().all(), name


@pytest.mark.parametrize("masked", [False, True], ids=["rows", "masked"])
@pytest.mark.parametrize("name", CASES)
def test_same_codewords_and_one_message_per_step(states, name, masked):
    state = state_of(states, (name, masked))
    messages = state["messages"].tolist()
    assert messages[1:] == [1] * (len(SIZES) - 1)
    # messages of k-means: finite values, number of rows, chosen rows, ten iterations; and one of the step
    assert messages[0] == (14 if "kmeans_init" in CASES[name] else 1)
    assert not torch.equal(state["_codebook.embed"], layer(**CASES[name])._codebook.embed)


def test_averages_equal_one_process_with_all_rows(states):
    state = state_of(states, ("averages", False))
    vq = layer()
    for step in range(len(SIZES)):
        vq(torch.cat([rows(rank, step) for rank in range(len(states))]))
    for name, value in vq.state_dict().items():  # each process sums its rows in float32
        torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in UPDATES if name.startswith("apart")])
def test_unshared_codebooks_equal_those_of_one_process(states, name):
    for rank, found in enumerate(states):
        assert_same(train_updated(rank, name), found["updates", name])  # also the number of messages, 0
    codebooks = [found["updates", name]["_codebook.embed"] for found in states]
    assert not torch.equal(*codebooks[:2])


@pytest.mark.parametrize("name", ["accumulated", "manual", "weighted", "affine"])
def test_updates_equal_one_process_with_all_rows(states, name):
    state = state_of(states, ("updates", name))
    options, given = UPDATES[name]
    vq = layer(**options)
    for step in range(len(SIZES)):
        vq(torch.cat([rows(rank, step) for rank in range(len(states))]), **given(step))
        if name == "manual" and step % 2 == 1:
            vq._codebook.update_ema()
    assert not torch.equal(state["_codebook.embed"], layer()._codebook.embed)
    for key, value in vq.state_dict().items():
        torch.testing.assert_close(state[key], value, rtol=1e-4, atol=1e-5)
    if name == "accumulated":
        assert state["messages"].tolist() == [0, 0, 1, 0, 0, 1]


def test_accumulation_under_ddp_equals_one_process(states):
    state, vq = state_of(states, "accumulated under ddp"), layer(codebook_dim=4)
    for step in range(2):
        vq(torch.cat([rows(rank, step) for rank in range(len(states))]), accum_ema_update=step == 0)
    torch.testing.assert_close(state["_codebook.embed"], vq.codebook[None], rtol=1e-4, atol=1e-5)


def test_an_optimizer_in_the_layer_steps_by_the_mean_gradient(states):
    state = state_of(states, ("updates", "optimizer"))
    alone = [train_updated(rank, "optimizer")["first._codebook.embed"] for rank in range(len(states))]
    torch.testing.assert_close(
        state["first._codebook.embed"], torch.stack(alone).mean(0), rtol=1e-5, atol=1e-6
    )
    assert not torch.equal(state["_codebook.embed"], state["first._codebook.embed"])


def test_dead_codewords_take_rows_of_every_process(states):
    codewords = set(state_of(states, "rows")["_codebook.embed"][0, :, 0].tolist())
    for rank in range(len(states)):
        given = {float(10 * rank + i) for i in range(1, 7)}
        assert len(codewords & given) >= min(6, 19 // len(states))


def test_processes_offer_rows_for_each_place_in_turn(monkeypatch):
    monkeypatch.setattr("uefl_kernels.nn._distributed.rank_and_size", lambda *_: (1, 2))
    codebook, offered = layer(threshold_ema_dead_code=1)._codebook, []
    for _ in range(2):
        offered.append(codebook._offer(rows(0, 0), None)[0])
        codebook.steps.add_(1)
    assert torch.equal(offered[0] + offered[1], torch.ones_like(offered[0]))


def test_kmeans_init_refuses_what_is_not_finite_in_one_process(states):
    assert not state_of(states, "nan")["_codebook.initted"]


def test_processes_drop_the_same_residual_quantizers(states):
    assert len(set(state_of(states, "residual")["kept"].tolist())) > 1


@pytest.mark.parametrize("job", ["ddp", "learnable"])
def test_same_model_under_ddp(states, job):
    state = state_of(states, job)
    assert not torch.equal(state["1._codebook.embed"], layer()._codebook.embed)


def test_compiled_with_its_message_inside_one_graph(states):
    assert state_of(states, "compiled")["same"].all()


def test_lfq_shares_the_probabilities_of_processes_with_rows(states):
    found = state_of(states, "lfq")["entropies"]
    for step, sizes in enumerate(SIZES):
        shares = []
        for rank, size in enumerate(sizes[: len(states)]):
            codewords = LFQ(codebook_size=256).codebook
            probs = (200 * rows(rank, step) @ codewords.t()).softmax(-1)
            shares += [probs.mean(0)] * (size > 0)
        for place, kept in ((2 * step, shares), (2 * step + 1, shares[: int(sizes[0] > 0)])):
            mean = torch.stack(kept).mean(0) if kept else torch.zeros(256)
            want = -(mean * mean.clamp(min=1e-5).log()).sum()
            torch.testing.assert_close(found[place], want, rtol=1e-4, atol=1e-5)


def test_processes_may_use_other_numbers_of_quantizers(states):
    state_of(states, "numbers")
