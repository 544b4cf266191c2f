"""Layers in wrappers: averaged models, offloading, sharding, inference mode, passes without gradient."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from uefl_kernels.nn import (
    FSP,
    FSQ,
    LFQ,
    BinaryMapper,
    ExtensibleCodebook,
    GroupedResidualFSQ,
    GroupedResidualVQ,
    HierarchicalVQ,
    LatentQuantize,
    MCDropout,
    RandomProjectionQuantizer,
    ResidualLFQ,
    ResidualSimVQ,
    ResidualVQ,
    SimVQ,
    VectorQuantize,
)

from .conftest import normal
from .nn_layers import layer, state


def trained(**options):
    vq = layer(kmeans_init=True, **options)
    vq(normal(40, 8))
    return vq


# --- averaged models --------------------------------------------------------------------------------------


@pytest.mark.parametrize("saved", ["no", "copied", "assigned"])
@pytest.mark.parametrize("options", [{}, {"learnable_codebook": True}], ids=str)
def test_codewords_that_were_copied_without_their_flag(options, saved):
    """As by a wrapper that copies parameters, or only floating-point values into flags that are bool."""
    source, average = trained(**options), copy.deepcopy(layer(1, kmeans_init=True, **options))
    for mine, other in zip(
        (*average.parameters(), *average.buffers()), (*source.parameters(), *source.buffers()), strict=True
    ):
        if mine.is_floating_point() and mine.dim() > 0:
            mine.data.copy_(other.data)
    assert not average._codebook.initted
    if saved != "no":
        state, average = average.state_dict(), trained(**options)
        average.load_state_dict(state, assign=saved == "assigned")
    quantized, indices, _ = average.eval()(normal(40, 8, seed=3))
    assert torch.equal(average.codebook, source.codebook)
    assert torch.equal(indices, source.eval()(normal(40, 8, seed=3))[1])
    assert average._codebook.initted
    assert quantized.any()


def test_statistics_that_were_copied_without_their_flags():
    source, average, loaded = (layer(seed, affine_param=True) for seed in range(3))
    for _ in range(2):
        source(3 * normal(40, 8) + 2)
    for mine, other in zip(average.buffers(), source.buffers(), strict=True):
        if mine.is_floating_point() and mine.dim() > 0:
            mine.copy_(other)
    assert average._codebook.codebook_mean_needs_init
    loaded.load_state_dict(average.state_dict())
    x = normal(40, 8, seed=3)
    for found in (average, loaded):
        assert torch.equal(found.eval()(x)[0], source.eval()(x)[0])
        assert torch.equal(found.train()(x)[0], copy.deepcopy(source).train()(x)[0])


def test_ema_pytorch():
    ema_pytorch = pytest.importorskip("ema_pytorch", reason="ema-pytorch is not installed")
    source = layer(kmeans_init=True)
    average = ema_pytorch.EMA(source, update_after_step=0, update_every=1)
    source(normal(40, 8))
    average.update()
    codewords = average.ema_model.codebook.clone()
    average.eval()(normal(40, 8, seed=3))
    assert codewords.any()
    assert torch.equal(average.ema_model.codebook, codewords)


# --- offloading -------------------------------------------------------------------------------------------


class Offload:
    """Hooks like accelerate's: the tensors of a module are on the device only while it runs.

    accelerate replaces the forward of a module; other packages register hooks.
    """

    def __init__(self, model, replace):
        self.calls, self.replace = [], replace
        for name, module in model.named_modules():
            if any(True for _ in (*module.parameters(recurse=False), *module.buffers(recurse=False))):
                self.park(name, module)

    def park(self, name, module):
        own = {
            key: value
            for kind in (module._parameters, module._buffers)
            for key, value in kind.items()
            if value is not None
        }

        def place(tensors):
            for key, value in tensors.items():
                kind = module._parameters if key in module._parameters else module._buffers
                kind[key] = value

        away = {
            key: nn.Parameter(v.to("meta")) if key in module._parameters else v.to("meta")
            for key, v in own.items()
        }
        place(away)
        if not self.replace:
            module.register_forward_pre_hook(lambda *_: (place(own), self.calls.append(name))[:0] or None)
            module.register_forward_hook(lambda *_: place(away))
            return
        plain = module.forward

        def forward(*args, **kwargs):
            place(own)
            self.calls.append(name)
            try:
                return plain(*args, **kwargs)
            finally:
                place(away)

        module.forward = forward


OFFLOADED = {
    "averages": lambda: layer(),
    "learned": lambda: layer(learnable_codebook=True),
    "projected": lambda: layer(codebook_dim=4, heads=3),
    "affine": lambda: layer(affine_param=True),
    "residual": lambda: ResidualVQ(dim=8, num_quantizers=2, codebook_size=10),
    "shared": lambda: ResidualVQ(dim=8, num_quantizers=2, codebook_size=10, shared_codebook=True),
    "groups": lambda: GroupedResidualVQ(dim=8, groups=2, num_quantizers=2, codebook_size=10),
    "sim": lambda: SimVQ(8, 10),
    "residual sim": lambda: ResidualSimVQ(dim=8, num_quantizers=2, codebook_size=10),
    "scalar": lambda: FSQ([8, 5, 5], dim=8, orthogonal_rotation=True),
    "residual scalar": lambda: GroupedResidualFSQ(levels=[8, 5, 5], num_quantizers=2, dim=8, groups=2),
    "bins": lambda: FSP([3, 4, 5], dim=8),
    "binary": lambda: LFQ(codebook_size=16, dim=8, orthogonal_rotation=True),
    "residual binary": lambda: ResidualLFQ(codebook_size=16, num_quantizers=2, dim=8),
    "projection": lambda: RandomProjectionQuantizer(dim=8, codebook_size=16, codebook_dim=4),
    "latent": lambda: LatentQuantize([5, 4], 8, optimize_values=True),
    "extensible": lambda: ExtensibleCodebook(normal(4, 8, seed=3), capacity=8),
}


def pieces(output):
    """Return the tensors of the output of a layer."""
    if isinstance(output, torch.Tensor):
        return [output]
    values = output.values() if isinstance(output, dict) else output
    return [piece for value in values for piece in pieces(value)]


def same(found, expected):
    return all(map(torch.equal, pieces(found), pieces(expected)))


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("name", OFFLOADED)
def test_tensors_that_exist_only_during_a_call(name, replace):
    torch.manual_seed(0)
    vq, x = OFFLOADED[name](), normal(2, 8, 8)
    vq(normal(2, 8, 8, seed=1))
    expected = copy.deepcopy(vq).eval()
    hooks = Offload(vq.eval(), replace)
    assert same(vq(x), expected(x))
    assert hooks.calls
    for attribute in ("dim", "codebook_dim", "codebook_size", "num_quantizers", "bits_per_vector"):
        assert getattr(vq, attribute, None) == getattr(expected, attribute, None)
    assert repr(vq) == repr(expected)
    if name != "extensible":
        indices = expected.encode(x)
        assert torch.equal(vq.encode(x), indices)
        assert torch.equal(vq.decode(indices), expected.decode(indices))


def test_codewords_on_another_device_than_the_input():
    vq = ResidualVQ(dim=8, num_quantizers=2, codebook_size=10).eval()
    vq.layers[1]._codebook.to("meta")
    with pytest.raises(ValueError, match="meta"):
        vq(normal(2, 8, 8))


@pytest.mark.parametrize("where", ["cpu", "disk"])
@pytest.mark.parametrize("buffers", [False, True])
@pytest.mark.parametrize("name", OFFLOADED)
def test_accelerate(name, buffers, where, tmp_path):
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    torch.manual_seed(0)
    vq, x = OFFLOADED[name](), normal(2, 8, 8)
    vq(normal(2, 8, 8, seed=1))
    expected = vq.eval()(x)
    options = {"execution_device": torch.device("cpu"), "offload_buffers": buffers}
    if where == "cpu":
        accelerate.cpu_offload(vq, **options)
    else:
        accelerate.disk_offload(vq, tmp_path, **options)
    assert same(vq(x), expected)


# --- inference mode, and passes without gradient ----------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [lambda: VectorQuantize(8, 16, kmeans_init=True), lambda: ResidualVQ(**RESIDUAL)],
    ids=["one", "residual"],
)
def test_kmeans_in_inference_mode(make):
    found = []
    for mode in (torch.inference_mode, torch.no_grad):
        torch.manual_seed(0)
        with mode():
            vq = make().eval()
            found.append([piece.clone() for piece in vq(normal(4, 200, 8))])
            other = make()
            other.load_state_dict(vq.state_dict())
            other.load_state_dict(vq.state_dict(), assign=True)
            assert torch.equal(other.eval()(normal(4, 200, 8))[1], found[-1][1])
    assert found[0][1].shape[:2] == (4, 200)
    assert all(map(torch.equal, *found))


WAITING = {"kmeans_init": True}
TRAINED = OFFLOADED | {
    "waiting": lambda: layer(**WAITING),
    "waiting parameter": lambda: layer(learnable_codebook=True, **WAITING),
    "optimized": lambda: layer(
        learnable_codebook=True, in_place_codebook_optimizer=lambda codewords: torch.optim.SGD(codewords, 0.1)
    ),
    "implicit": lambda: ResidualVQ(
        dim=8, num_quantizers=2, codebook_size=10, implicit_neural_codebook=True, **WAITING
    ),
    "scales": lambda: HierarchicalVQ(dim=8, codebook_size=10, scales=(1, 2, 8)),
    "bits": lambda: BinaryMapper(bits=8),
}


def trained_once(vq, x):
    """Return the state of the layer, loaded, after a step of training."""
    vq.load_state_dict(state(vq))
    torch.manual_seed(1)
    given = x.clone().requires_grad_()
    found = [piece for piece in pieces(vq(given)) if piece.requires_grad]
    if found:
        sum(piece.sum() for piece in found).backward()
        torch.optim.SGD([given, *vq.parameters()], 0.1).step()
    return state(vq)


@pytest.mark.parametrize("name", TRAINED)
def test_layers_made_in_inference_mode_can_be_trained(name):
    x, made = normal(2, 8, 8), []
    for mode in (torch.inference_mode, torch.enable_grad):
        torch.manual_seed(0)
        with mode():
            made.append(TRAINED[name]())
        made[-1](x)
    torch.testing.assert_close(*(trained_once(vq, x) for vq in made), rtol=0, atol=0)


@pytest.mark.parametrize("change", [copy.deepcopy, lambda vq: vq.double().float()], ids=["copied", "moved"])
@pytest.mark.parametrize("name", ["averages", "affine", "residual", "groups", "waiting"])
def test_layers_changed_in_inference_mode_can_be_trained(name, change):
    x, expected = normal(2, 8, 8), TRAINED[name]()
    with torch.inference_mode():
        vq = change(copy.deepcopy(expected))
    if name != "waiting":
        indices = expected.encode(x)
        assert torch.equal(vq.encode(x), indices)
    for each in (vq, expected):
        torch.manual_seed(1)
        each(x)
    torch.testing.assert_close(state(vq), state(expected), rtol=0, atol=0)


RESIDUAL = {"dim": 8, "num_quantizers": 2, "codebook_size": 16, "kmeans_init": True}


def test_batches_that_wait_in_and_outside_of_inference_mode():
    made = []
    for mode in (torch.inference_mode, torch.enable_grad):
        vq = layer()
        with mode():
            vq(normal(40, 8), accum_ema_update=True)
        for seed in (1, 2):
            vq(normal(40, 8, seed=seed), accum_ema_update=True)
            made.append(vq._codebook.pending[1])
        assert made[-1] is made[-2]  # new tensors would let the heap grow
        vq(normal(40, 8, seed=3))
        made.append(state(vq))
    torch.testing.assert_close(made[2], made[5], rtol=0, atol=0)


GROWTH = """
from pathlib import Path
import torch
from uefl_kernels.nn import VectorQuantize

vq, x, pages = VectorQuantize(64, 16384, affine_param=True), torch.randn(64, 64), []
for step in range(250):
    vq(x)
    if step in (60, 249):
        pages.append(int(Path("/proc/self/statm").read_text().split()[1]))
print((pages[1] - pages[0]) * 4096 >> 20)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs the size of a process in /proc")
def test_steps_with_a_large_codebook_do_not_grow_the_heap():
    done = subprocess.run([sys.executable, "-c", GROWTH], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 300  # MiB; temporary tensors of each step may leave gaps of 8 MiB


def test_passes_without_gradient_store_no_codewords():
    vq = layer()
    for step in range(5):
        with torch.no_grad():
            vq(normal(40, 8, seed=step))
        vq(normal(40, 8, seed=step))
    assert len(vq._codebook.memory) == 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_codewords_of_checkpoints_are_freed_with_the_graph(reentrant):
    vq, held = layer(), []
    for step in range(40):
        x = normal(40, 8, seed=step).requires_grad_()
        held.append(torch.utils.checkpoint.checkpoint(lambda x: vq(x)[0], x, use_reentrant=reentrant))
    assert len(vq._codebook.memory) == 40  # the backward pass may run any of the regions again
    held[0].sum().backward()
    held.clear()
    gc.collect()
    assert len(vq._codebook.memory) == 0


def test_hooks_without_recomputation_keep_no_extra_tensors():
    vq = layer()
    with torch.autograd.graph.save_on_cpu():
        quantized = vq(normal(40, 8).requires_grad_())[0]
    quantized.sum().backward()
    del quantized
    gc.collect()
    assert len(vq._codebook.memory) == 0


# --- sharding, and precision that is changed behind the layer ---------------------------------------------


def tracked(model, clusters=16, steps=150):
    """Return the mean distance of a codeword to the mean of its rows, after training on separate clusters."""
    generator = torch.Generator().manual_seed(0)
    centers = 4 * torch.randn(clusters, 8, generator=generator)
    rows = centers.repeat(8, 1) + 0.1 * torch.randn(clusters * 8, 8, generator=generator)
    vq = next(module for module in model.modules() if isinstance(module, VectorQuantize))
    vq._codebook.assign(centers.unsqueeze(0) + 1)
    for _ in range(steps):
        model(rows)
    indices = vq(rows, freeze_codebook=True)[1]
    means = [(rows[indices == k].mean(0) - vq.codebook[k]).norm() for k in indices.unique()]
    return torch.stack(means).mean()


def cast_behind(model, dtype=torch.bfloat16):
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.data = buffer.data.to(dtype)


def dtypes(model):
    return {buffer.dtype for buffer in model.buffers() if buffer.is_floating_point()}


def test_buffers_cast_behind_the_layer():
    vq = nn.Sequential(layer(codebook_size=16, decay=0.99))
    exact = tracked(copy.deepcopy(vq))
    cast_behind(vq)
    with pytest.warns(UserWarning, match="buffer_dtype"):
        vq[0](normal(4, 8), freeze_codebook=True)
    assert dtypes(vq) == {torch.float32}
    torch.testing.assert_close(tracked(vq), exact, rtol=0.05, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["learned", "affine", "residual", "shared", "groups"])
def test_buffers_cast_behind_layers(name, dtype):
    vq = OFFLOADED[name]()
    cast_behind(vq, dtype)
    with pytest.warns(UserWarning, match="buffer_dtype"):
        vq(normal(2, 8, 8))
    assert dtypes(vq) == {torch.float32}


@pytest.fixture
def one_process(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_fsdp_with_buffers_in_half_precision(one_process):
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision

    found = []
    for options in ({}, {"mixed_precision": MixedPrecision(buffer_dtype=torch.bfloat16)}):
        model = nn.Sequential(nn.Linear(8, 8), layer(codebook_size=16, decay=0.99))
        with torch.no_grad():
            model[0].weight.copy_(torch.eye(8)), model[0].bias.zero_()
        found.append(tracked(FullyShardedDataParallel(model, device_id=torch.device("cpu"), **options)))
    torch.testing.assert_close(found[1], found[0], rtol=0.05, atol=1e-3)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("original", [False, True])
@pytest.mark.parametrize("options", [{"threshold_ema_dead_code": 2}, {"kmeans_init": True}], ids=str)
def test_fsdp_shards_codewords_that_the_layer_writes(one_process, options, original):
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = nn.Sequential(layer(learnable_codebook=True, **options))
    given = {"device_id": torch.device("cpu"), "use_orig_params": original}
    sharded = FullyShardedDataParallel(copy.deepcopy(model), **given)
    for gradients in (False, True):
        with torch.set_grad_enabled(gradients), pytest.raises(RuntimeError, match="ignored_states"):
            sharded(normal(40, 8))
    ignored = [*model[0]._codebook.parameters()]
    other = FullyShardedDataParallel(model, ignored_states=ignored, **given)
    before = model[0].codebook.clone()
    other(normal(40, 8))
    assert not torch.equal(model[0].codebook, before)


@pytest.mark.parametrize(
    "options",
    [
        {"learnable_codebook": True, "threshold_ema_dead_code": 2},
        {"learnable_codebook": True, "kmeans_init": True},
        {"orthogonal_reg_weight": 0.5},
        {
            "learnable_codebook": True,
            "in_place_codebook_optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.5),
        },
    ],
    ids=["revival", "k-means", "averages", "own optimizer"],
)
def test_fully_shard_of_codewords_that_the_layer_writes(one_process, options):
    from torch.distributed.fsdp import fully_shard

    sharded, model = (nn.Sequential(nn.Linear(8, 8), layer(**options)) for _ in range(2))
    with pytest.raises(RuntimeError, match="ignored_params"):
        fully_shard(sharded)(normal(40, 8))
    before = model[1].codebook.clone()
    fully_shard(model, ignored_params=set(model[1]._codebook.parameters()))(normal(40, 8))
    assert not torch.equal(model[1].codebook, before)


@pytest.mark.parametrize(
    "make",
    [
        lambda: SimVQ(8, 10),
        lambda: ResidualVQ(dim=8, num_quantizers=2, codebook_size=10, codebook_dim=4),
        lambda: RandomProjectionQuantizer(dim=8, codebook_size=10, codebook_dim=4, num_codebooks=2),
    ],
    ids=["sim", "projected", "random"],
)
def test_fully_shard_with_parameters_in_half_precision(one_process, make):
    """FSDP2 leaves buffers as they are."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), make())
    expected = copy.deepcopy(model).bfloat16()(normal(40, 8).bfloat16())
    found = fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))(normal(40, 8))
    for got, want in zip(*(x if isinstance(x, tuple) else [x] for x in (found, expected)), strict=True):
        torch.testing.assert_close(got, want)


# --- MCDropout --------------------------------------------------------------------------------------------


class Normalized(nn.Module):
    """A dropout as a module, one as a function, and batch norm, not in a chain."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.drop, self.last = (
            nn.Linear(8, 16),
            nn.BatchNorm1d(16),
            nn.Dropout(0.4),
            nn.Linear(16, 3),
        )

    def forward(self, x):
        return self.last(nn.functional.dropout(self.norm(self.drop(self.first(x)).sin()), 0.2, self.training))


@pytest.mark.parametrize("training", [False, True])
def test_calls_from_several_threads(training):
    torch.manual_seed(0)
    model = Normalized().train(training)
    mc, x, before = MCDropout(model, 5), normal(6, 8), state(model)
    mc.train(training)
    alone = [mc(x, seed=seed).mean_probs for seed in range(8)]
    found, failed = {}, []

    def run(seed):
        try:
            for _ in range(5):
                found[seed] = mc(x, seed=seed).mean_probs
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert all(torch.equal(found[seed], alone[seed]) for seed in range(8))
    assert all(module.training == training for module in mc.modules())
    assert all(map(torch.equal, state(model).values(), before.values()))


def segmenter(*more):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 1), nn.Dropout2d(0.5), nn.Conv2d(4, 4, 1), *more)


@pytest.mark.parametrize("consistent", [False, True])
@pytest.mark.parametrize("class_dim", [1, -3])
def test_classes_in_another_dimension(class_dim, consistent):
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = segmenter()

        def forward(self, x):
            return self.model(x).movedim(1, -1)

    x = normal(2, 3, 8, 6)
    mc = MCDropout(segmenter(), 6, class_dim=class_dim, consistent=consistent)
    other = MCDropout(Last(), 6, consistent=consistent)
    got, want = mc(x, seed=1), other(x, seed=1)
    assert got.mean_probs.shape == got.variance.shape == (2, 4, 8, 6)
    assert got.entropy.shape == got.mutual_info.shape == (2, 8, 6)
    torch.testing.assert_close(got.mean_probs.sum(1), torch.ones(2, 8, 6))
    for name in ("mean_probs", "variance"):
        torch.testing.assert_close(getattr(got, name), getattr(want, name).movedim(-1, 1))
    torch.testing.assert_close(got.entropy, want.entropy)
    torch.testing.assert_close(mc.probs(x, seed=1), other.probs(x, seed=1).movedim(-1, 2))


def test_classes_of_a_chain():
    torch.manual_seed(0)
    chain = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 5))
    plain, named = MCDropout(chain, 4), MCDropout(chain, 4, class_dim=1)
    assert all(map(torch.equal, plain(normal(6, 8), seed=1), named(normal(6, 8), seed=1)))
    stacked = named(normal(2, 6, 8), seed=1)
    assert stacked.mean_probs.shape == (2, 6, 5)
    assert stacked.entropy.shape == (2, 5)
    torch.testing.assert_close(stacked.mean_probs.sum(1), torch.ones(2, 5))


@pytest.mark.parametrize("class_dim", [0, 1.5, None, True])
def test_class_dim_refused(class_dim):
    with pytest.raises(ValueError, match="class_dim"):
        MCDropout(segmenter(), class_dim=class_dim)


@pytest.mark.parametrize("class_dim", [4, -4])
def test_class_dim_out_of_range(class_dim):
    with pytest.raises(TypeError, match=rf"class_dim={class_dim} .*\[2, 4, 8, 6\] .*\b3, .*-3"):
        MCDropout(segmenter(), class_dim=class_dim)(normal(2, 3, 8, 6))


def test_a_compiled_model_is_compiled_once():
    graphs = []

    def backend(graph, example):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    with pytest.warns(UserWarning, match="MCDropout.*whole"):
        mc = MCDropout(torch.compile(Normalized(), backend=backend), 12)
    first = mc(normal(4, 8), seed=1)
    assert torch.equal(first.mean_probs, mc(normal(4, 8), seed=1).mean_probs)
    assert first.variance.any()
    assert len(graphs) == 1
    for rows in (9, 5, 7, 4):  # the second shape leaves the number of rows open
        for seed in (None, 1, 2):
            mc(normal(rows, 8), seed=seed)
    assert len(graphs) == 2


@pytest.mark.slow
def test_masks_of_a_compiled_model():
    """Inductor has a generator of its own, unless an option makes it draw from torch's."""
    torch.manual_seed(0)
    model, x = Normalized(), normal(64, 8)

    def found(**options):
        torch._dynamo.reset()
        with pytest.warns(UserWarning, match="MCDropout.*whole"):
            mc = MCDropout(torch.compile(model, **options), 4)
        return mc(x, seed=3).mean_probs

    plain = found(backend="eager")
    torch.testing.assert_close(found(options={"fallback_random": True}), plain)
    assert not torch.allclose(found(), plain)
