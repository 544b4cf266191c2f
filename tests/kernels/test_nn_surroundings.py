"""Layers in export, AOTInductor, saved files, averaged models and several processes."""

from __future__ import annotations

import copy
import datetime
import io
import os
import subprocess
import sys
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
import torch.multiprocessing as mp
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from uefl_kernels import nn as layers
from uefl_kernels.nn import (
    FSP,
    FSQ,
    LFQ,
    BinaryMapper,
    GroupedResidualVQ,
    LatentQuantize,
    ResidualSimVQ,
    ResidualVQ,
    VectorQuantize,
)

from .conftest import normal

MODELS = {
    "averages": lambda: VectorQuantize(8, 10, threshold_ema_dead_code=1),
    "k-means": lambda: VectorQuantize(8, 10, kmeans_init=True),
    "learned": lambda: VectorQuantize(8, 10, learnable_codebook=True),
    "affine": lambda: VectorQuantize(8, 10, affine_param=True),
    "residual": lambda: ResidualVQ(dim=8, num_quantizers=2, codebook_size=6, shared_codebook=True),
    "grouped": lambda: GroupedResidualVQ(dim=8, groups=2, num_quantizers=2, codebook_size=6),
    "simple": lambda: ResidualSimVQ(dim=8, num_quantizers=2, codebook_size=6),
}


def trained(name):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), MODELS[name]())
    for step in range(2):
        model(normal(30, 8, seed=step))
    return model.eval()


def same(got, want):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


FEWER = ("averages", "residual", "simple")  # the kinds of layers in the fast tests


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FEWER else pytest.mark.slow) for name in MODELS]
)
def test_export(name):
    model, x = trained(name), normal(20, 8)
    program = torch.export.export(
        model, (x,), dynamic_shapes=({0: torch.export.Dim("rows", min=2, max=1000)},)
    )
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for rows in (20, 7):
        same(loaded(normal(rows, 8, seed=3)), model(normal(rows, 8, seed=3)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["averages"])
def test_aot_inductor(name, tmp_path):
    """A new process imports uefl_kernels for the op."""
    model, x = trained(name), normal(20, 8)
    with torch.no_grad():
        package = torch._inductor.aoti_compile_and_package(
            torch.export.export(model, (x,)), package_path=str(tmp_path / "model.pt2")
        )
        torch.save((x, model(x)), tmp_path / "expected.pt")
    code = (
        "import sys, torch, uefl_kernels.nn;"
        "x, want = torch.load(sys.argv[2]); got = torch._inductor.aoti_load_package(sys.argv[1])(x);"
        "[torch.testing.assert_close(a, b) for a, b in zip(got, want, strict=True)]"
    )
    subprocess.run([sys.executable, "-c", code, package, str(tmp_path / "expected.pt")], check=True)


@pytest.mark.parametrize("name", MODELS)
def test_saved_without_pickled_code(name):
    model, file = trained(name), io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    torch.manual_seed(1)
    other = nn.Sequential(nn.Linear(8, 8), MODELS[name]())
    assert list(other.load_state_dict(torch.load(file, weights_only=True))) == [[], []]
    same(other.eval()(normal(20, 8)), model(normal(20, 8)))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", MODELS)
def test_a_checkpoint_read_into_the_tensors_of_a_new_layer(name, tmp_path):
    """torch.distributed.checkpoint reads the keys that the new layer has."""
    model, other = trained(name), nn.Sequential(nn.Linear(8, 8), MODELS[name]())
    if name == "affine":  # as in the peer, it has the keys of the batches from the first one on
        other(normal(30, 8, seed=9))
    checkpoint.save({"model": model.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    state = {"model": other.state_dict()}
    checkpoint.load(state, checkpoint_id=tmp_path, no_dist=True)
    other.load_state_dict(state["model"])
    same(other.eval()(normal(20, 8)), model(normal(20, 8)))


@pytest.mark.parametrize("name", ["averages", "learned", "affine", "grouped"])
def test_functional_call_changes_the_tensors_it_is_given(name):
    model = trained(name).train()
    torch.manual_seed(1)
    other = nn.Sequential(nn.Linear(8, 8), MODELS[name]())
    before = {key: value.clone() for key, value in other.state_dict().items()}
    given = {key: value.detach().clone() for key, value in model.state_dict().items()}
    x, found = normal(20, 8), []
    for run in (model, lambda x: torch.func.functional_call(other, given, (x,))):
        torch.manual_seed(0)
        found.append(run(x))
    same(*found)
    same(given.values(), model.state_dict().values())
    assert all(torch.equal(value, before[key]) for key, value in other.state_dict().items())


@pytest.mark.parametrize("name", MODELS)
def test_averaged_models_decode_as_they_quantize(name):
    model = trained(name)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=False)
    average.update_parameters(model)
    model.train()(normal(30, 8, seed=5))
    average.update_parameters(model)
    average.module.load_state_dict(
        {key: value for key, value in model.state_dict().items() if key.startswith("1.")}, strict=False
    )
    same(average.eval().module[1](normal(20, 8)), model.eval()[1](normal(20, 8)))
    copy.deepcopy(average)


@pytest.mark.parametrize(
    "make",
    [
        lambda: FSQ([3, 6, 7, 3], dim=4),
        lambda: FSP([3, 6, 7, 3], dim=4),
        lambda: LatentQuantize([3, 6, 7, 3], 4),
        lambda: LFQ(codebook_size=16, dim=4),
        lambda: BinaryMapper(bits=4),
    ],
    ids=["FSQ", "FSP", "LatentQuantize", "LFQ", "BinaryMapper"],
)
@pytest.mark.parametrize("options", [{}, {"multi_avg_fn": get_ema_multi_avg_fn(0.9)}], ids=["mean", "ema"])
def test_averages_of_buffers_keep_levels_and_factors(make, options):
    """0.9 * 3 + 0.1 * 3, which a moving average writes into a buffer of integers, is rounded down to 2."""
    model, x = make(), normal(20, 4)
    average = AveragedModel(model, **options, use_buffers=True)
    for _ in range(5):
        average.update_parameters(model)
    indices, module = model.encode(x), average.module
    for wrap in (lambda method: method, partial(torch.compile, backend="eager", fullgraph=True)):
        assert torch.equal(wrap(module.encode)(x), indices)
        torch.testing.assert_close(wrap(module.decode)(indices), model.decode(indices))


# --- processes --------------------------------------------------------------------------------------------


SHARDED = {name: MODELS[name] for name in ("averages", "learned", "k-means", "residual")}
SHARDED["plain"] = lambda: VectorQuantize(8, 10)


def step(model, optimizer, x, share=1.0):
    quantized, _, loss = model(x)
    (quantized.square().sum() * share + loss.sum()).backward()
    optimizer.step()
    optimizer.zero_grad()


def sharded(name, seed, flat):
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 8), SHARDED[name]())
    return (
        FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
        if flat
        else fully_shard(model)
    )


def work(rank, folder, flat):
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        set_model_state_dict,
    )

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(minutes=3),
    )
    found, whole = {}, StateDictOptions(full_state_dict=True)
    for name in SHARDED:
        model = sharded(name, 0, flat)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for place in range(2):
            step(model, optimizer, normal(30, 8, seed=10 * place + rank))
        other, state = sharded(name, 1, flat), get_model_state_dict(model, options=whole)
        found[name] = {key: value.clone() for key, value in state.items()}
        set_model_state_dict(other, state, options=whole)
        same(other.eval()(normal(30, 8, seed=5)), model.eval()(normal(30, 8, seed=5)))
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()
    # FSDP's caches keep the group, and so gloo's threads, alive. A thread that frees a tensor while the
    # interpreter ends aborts the process (pytorch/pytorch#179291), so the interpreter does not end here: the
    # process does.
    os._exit(0)


@pytest.mark.slow
@pytest.mark.parametrize("flat", [True, False], ids=["FSDP1", "FSDP2"])
def test_fully_sharded(flat, tmp_path):
    """Two processes end with the codewords of one process that has their batches, and load their state."""
    mp.start_processes(work, (str(tmp_path), flat), nprocs=2, start_method="spawn")
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    for name, state in first.items():
        torch.manual_seed(0)
        alone = nn.Sequential(nn.Linear(8, 8), SHARDED[name]())
        optimizer, start = torch.optim.SGD(alone.parameters(), lr=0.1), copy.deepcopy(alone.state_dict())
        for place in range(2):
            batch = [normal(30, 8, seed=10 * place + rank) for rank in range(2)]
            step(alone, optimizer, torch.cat(batch), share=0.5)
        for key, value in state.items():
            assert torch.equal(value, second[name][key]), (name, key)
            if name not in ("averages", "k-means"):  # these draw rows, in each process from its own batch
                torch.testing.assert_close(value, alone.state_dict()[key], msg=f"{name}: {key}")
        moved = [key for key in state if key.endswith("embed")]
        assert moved
        assert not any(torch.equal(state[key], start[key]) for key in moved)


PROJECTED = {
    "VectorQuantize": lambda: layers.VectorQuantize(8, 16, codebook_dim=4),
    "ResidualVQ": lambda: layers.ResidualVQ(dim=8, codebook_dim=4, codebook_size=16, num_quantizers=2),
    "FSQ": lambda: layers.FSQ([8, 5, 5], dim=8),
    "ResidualFSQ": lambda: layers.ResidualFSQ(dim=8, levels=[8, 5, 5], num_quantizers=2),
    "GroupedResidualFSQ": lambda: layers.GroupedResidualFSQ(
        dim=8, groups=2, levels=[8, 5, 5], num_quantizers=2
    ),
    "LFQ": lambda: layers.LFQ(dim=8, codebook_size=16),
    "ResidualLFQ": lambda: layers.ResidualLFQ(dim=8, codebook_size=16, num_quantizers=2),
    "FSP": lambda: layers.FSP([8, 5, 5], dim=8),
}


@pytest.mark.parametrize("name", PROJECTED)
def test_an_error_of_torch_gets_the_words_of_the_layer(name):
    layer, x = PROJECTED[name](), torch.randn(2, 6, 8)
    with pytest.raises(ValueError, match=f"^{name}: .*meta.*cpu"):
        layer(x.to("meta"))
    with pytest.raises(TypeError, match=f"^{name}: .*float64.*float32"):
        layer(x.double())
    with torch.autocast("cpu"):
        layer(x)


@pytest.mark.parametrize(
    "error", [RuntimeError("can't allocate memory"), TypeError("no type of tensors for this disk")]
)
def test_an_error_of_a_hook_stays_as_it_is(error):
    def store(_):
        raise error

    layer = layers.VectorQuantize(8, 16, learnable_codebook=True, ema_update=False)
    x = torch.randn(2, 6, 8, dtype=torch.bfloat16).requires_grad_()
    storing = torch.autograd.graph.saved_tensors_hooks(store, lambda tensor: tensor)
    with storing, pytest.raises(type(error)) as raised:
        layer(x)
    assert raised.value.args == error.args


def test_an_error_of_an_inner_layer_names_the_outer_one():
    layer = layers.ResidualVQ(dim=8, codebook_size=4, num_quantizers=2, kmeans_init=True)
    with pytest.raises(RuntimeError, match=r"^ResidualVQ: .*k-means.*NaN"):
        layer(torch.full((2, 6, 8), torch.nan))
