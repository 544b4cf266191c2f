"""Layers work where the caller has other defaults (dtype, device).

They also work where tensors have no values, and where something else computes the codewords.
"""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
import torch.nn.utils.parametrize as parametrize
from torch import nn
from torch.nn.utils import prune

import uefl_kernels.nn as nn_module
from uefl_kernels.nn import (
    FSP,
    FSQ,
    LFQ,
    GroupedResidualFSQ,
    GroupedResidualVQ,
    HierarchicalVQ,
    LatentQuantize,
    ResidualFSQ,
    ResidualVQ,
    VectorQuantize,
)
from uefl_kernels.nn._shared import _KINDS, Layer

from .conftest import normal
from .nn_layers import layer
from .test_nn_codes import LAYERS

DROPPING = {
    "one": lambda: ResidualVQ(dim=8, num_quantizers=4, codebook_size=5, quantize_dropout=True),
    "groups": lambda: GroupedResidualVQ(
        dim=8, groups=2, num_quantizers=4, codebook_size=5, quantize_dropout=True
    ),
    "scalar": lambda: ResidualFSQ(levels=[5, 3], dim=8, num_quantizers=4, quantize_dropout=True),
    "scalar groups": lambda: GroupedResidualFSQ(
        levels=[5, 3], dim=8, groups=2, num_quantizers=4, quantize_dropout=True
    ),
    "scales": lambda: HierarchicalVQ(
        dim=8, codebook_size=16, scales=(1, 5), channel_first=False, kmeans_init=False, nested_dropout=1.0
    ),
}


@pytest.fixture
def default_dtype():
    yield torch.set_default_dtype
    torch.set_default_dtype(torch.float32)


def results(model, x):
    torch.manual_seed(0)
    first = model.train()(x)
    model.eval()
    return [*first[:3], *model(x)[:2]]


def same(got, want):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", LAYERS | DROPPING)
def test_default_device_other_than_the_device_of_the_layer(name):
    torch.manual_seed(0)
    model, x = (LAYERS | DROPPING)[name](), normal(2, 40, 8)
    other = copy.deepcopy(model)
    expected = results(model, x)
    with torch.device("meta"):  # stands for "cuda" where there is none
        found = results(other, x)
        decoded = other.decode(found[-1])
    same(found, expected)
    assert torch.equal(decoded, model.decode(expected[-1]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize(
    "make",
    [
        lambda: FSQ([5, 3, 4, 4, 5, 4, 5, 8]),
        lambda: FSQ([5, 4], dim=8, orthogonal_rotation=True, preserve_symmetry=True),
        lambda: ResidualFSQ(levels=[5, 3], dim=8, num_quantizers=3),
        lambda: FSP([5, 3, 4, 4, 5, 4, 5, 8], need_inv_act=True),
        lambda: VectorQuantize(8, 16, affine_param=True),
        lambda: VectorQuantize(8, 16, threshold_ema_dead_code=99),
        lambda: LFQ(dim=8, codebook_size=16, frac_per_sample_entropy=0.1),
    ],
    ids=["fsq", "rotated", "residual", "fsp", "affine", "dead codewords", "lfq"],
)
def test_default_dtype_of_the_caller_changes_nothing(make, dtype, default_dtype):
    torch.manual_seed(0)
    model, x = make(), normal(2, 400, 8)
    other = copy.deepcopy(model)
    expected = results(model, x)
    default_dtype(dtype)
    found = results(other, x)
    same(found, expected)
    assert torch.equal(other.decode(found[-1]), model.decode(expected[-1]))


def test_codes_of_scalars_equal_the_output_in_float64():
    model = FSQ([5, 4], dim=8, orthogonal_rotation=True).double().eval()
    quantized, indices = model(normal(2, 40, 8, dtype=torch.float64))
    torch.testing.assert_close(model.decode(indices), quantized, rtol=1e-14, atol=1e-14)


def test_a_bridge_made_in_half_precision(default_dtype):
    default_dtype(torch.bfloat16)
    model = VectorQuantize(8, 16, vq_bridge=nn.Linear(8, 8), learnable_codebook=True)
    model(normal(40, 8).bfloat16())[2].backward()
    assert model._codebook.vq_bridge.weight.grad.any()


@pytest.mark.parametrize("assign", [False, True])
def test_fixed_values_of_a_layer_from_the_meta_device(assign):
    source, z = LatentQuantize([5, 4], 8, optimize_values=False), normal(2, 8, 40)
    with torch.device("meta"):
        model = LatentQuantize([5, 4], 8, optimize_values=False)
    if not assign:
        model.to_empty(device="cpu")
    model.load_state_dict(source.state_dict(), assign=assign)
    same(model(z), source(z))


@pytest.mark.parametrize("name", DROPPING)
def test_layers_that_leave_out_quantizers_on_the_meta_device(name):
    with torch.device("meta"):
        found = DROPPING[name]()(torch.empty(2, 40, 8))
    expected = DROPPING[name]()(normal(2, 40, 8))
    assert found[0].shape == expected[0].shape
    assert all(a.shape == b.shape for a, b in zip(found[1], expected[1], strict=True))


def test_no_positions_of_a_map_are_refused():
    model = HierarchicalVQ(dim=8, codebook_size=16, scales=(1, 5), kmeans_init=False)
    with pytest.raises(ValueError, match=r"^HierarchicalVQ: .*\[2, 8, 0\]"):
        model(torch.empty(2, 8, 0))
    assert model(torch.empty(0, 8, 5))[0].shape == (0, 8, 5)


def test_share_of_moved_elements_without_rows():
    assert FSP([5, 4], dim=8)(torch.empty(0, 8))[3]["p_accept_prob"] == 0


def test_an_optimizer_in_the_layer_needs_gradients():
    model = layer(
        learnable_codebook=True,
        ema_update=False,
        in_place_codebook_optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )
    with torch.inference_mode(), pytest.raises(RuntimeError, match="inference_mode"):
        model(normal(40, 8))
    with torch.inference_mode():
        model(normal(40, 8), freeze_codebook=True)
    with torch.no_grad():
        model(normal(40, 8))


# --- codewords that something else computes -----------------------------------------------------------------


class Doubled(nn.Module):
    def forward(self, codewords):
        return 2 * codewords


COMPUTED = {
    "parametrize": lambda codebook: parametrize.register_parametrization(codebook, "embed", Doubled()),
    "weight_norm": lambda codebook: nn.utils.parametrizations.weight_norm(codebook, "embed", dim=1),
    "prune": lambda codebook: prune.random_unstructured(codebook, "embed", 0.5),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_computed_codewords_learn_by_gradients(name):
    model = layer(learnable_codebook=True)
    COMPUTED[name](model._codebook)
    quantized, indices, loss = model(normal(40, 8))
    assert torch.equal(quantized, model.codebook[indices])
    loss.backward()
    assert all(parameter.grad.any() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("parametrize", {}),
        ("weight_norm", {}),
        ("parametrize", {"kmeans_init": True}),
        ("prune", {"learnable_codebook": True, "threshold_ema_dead_code": 5}),
    ],
    ids=str,
)
def test_values_written_into_computed_codewords_are_refused(name, options):
    """Such values would be lost."""
    model = layer(**options)
    COMPUTED[name](model._codebook)
    with pytest.raises(RuntimeError, match="weight_norm"):
        model(normal(400, 8))
    with pytest.raises(RuntimeError, match="weight_norm"):
        model.codebook = torch.ones(10, 8)


@pytest.mark.parametrize("name", nn_module.__all__)
def test_every_argument_of_another_kind_is_named(name):
    kind = getattr(nn_module, name)
    if not issubclass(kind, Layer):
        return
    checked = 0
    for argument, parameter in inspect.signature(kind.__init__).parameters.items():
        parts = {part.partition("[")[0] for part in str(parameter.annotation).split(" | ")}
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or not parts <= set(_KINDS):
            continue
        needed = {"dim": 8, "shared": torch.zeros(2, 2), "capacity": 4, "levels": [3], "codebook_size": 4}
        wrong = "x" if "Callable" in parts else complex(1, 2)
        given = {each: value for each, value in needed.items() if each in kind.__init__.__annotations__}
        with pytest.raises(ValueError, match=rf"^{name}: {argument} .*expected"):
            kind(**given | {argument: wrong})
        checked += 1
    assert checked > 1
