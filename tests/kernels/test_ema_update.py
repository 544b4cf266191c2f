"""``ema_update`` agrees with its definition, and the layers move alike with it and without it."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from uefl_kernels import COMPILED
from uefl_kernels.nn import ResidualVQ, VectorQuantize
from uefl_kernels.ops.ema_update import composed

SHAPES = [(1, 1, 1), (2, 3, 0), (1, 4, 16), (2, 300, 33), (3, 257, 64)]
FORMS = [
    {},
    {"step": 0.0},
    {"step": 1.0, "scale": 1e9},  # the result does not depend on the averages
    {"step": 0.7, "unit": True},
    {"step": 0.0, "unit": True, "scale": 1e-9},  # too short for the length 1
    {"weighted": True},
]


def given(h, k, d, dtype=torch.float32, step=0.2, unit=False, weighted=False, scale=1.0):
    generator = torch.Generator().manual_seed(k)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=dtype)

    counts = torch.randint(0, 5, (h, k), generator=generator)
    sums = torch.randn(h, k, d, generator=generator, dtype=torch.float64)
    weights = normal(h, k).abs() if weighted else None
    state = normal(h, k).abs(), scale * normal(h, k, d), normal(h, k, d)
    return composed.Arguments(*state, counts, sums, weights, step, 1e-5, unit)


def largest_difference(found, expected):
    return max(
        float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1e-30))
        for a, b in zip(found, expected, strict=True)
        if b.numel() > 0
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_op_and_composition_agree_with_definition(shape, form, dtype):
    arguments = given(*shape, dtype=dtype, **form)
    expected = torch.ops.uefl_reference.ema_update(*arguments)
    tolerance = 4 * torch.finfo(dtype).eps
    assert largest_difference(torch.ops.uefl.ema_update(*arguments), expected) <= tolerance
    assert largest_difference(composed.ema_update(arguments), expected) <= tolerance


def test_opcheck():
    torch.library.opcheck(torch.ops.uefl.ema_update.default, given(2, 4, 3))


def test_nan_keeps_a_codeword_out_of_the_batch():
    arguments = given(2, 40, 8)
    arguments.sums[1, 3, 5] = torch.nan
    counts, sums = arguments.counts.clone(), arguments.sums.clone()
    counts[1, 3], sums[1, 3] = 0, 0
    for update in (torch.ops.uefl.ema_update, torch.ops.uefl_reference.ema_update):
        expected = update(*arguments._replace(counts=counts, sums=sums))
        assert all(torch.equal(a, b) for a, b in zip(update(*arguments), expected, strict=True))


def test_codewords_of_a_codebook_without_size_stay():
    arguments = given(1, 6, 4, step=1.0)._replace(
        counts=torch.zeros(1, 6, dtype=torch.int64), sums=torch.zeros(1, 6, 4, dtype=torch.float64)
    )
    for found in (torch.ops.uefl.ema_update(*arguments), composed.ema_update(arguments)):
        assert torch.equal(found[0], torch.zeros(1, 6))
        assert torch.equal(found[2], arguments.codewords)


def test_results_do_not_depend_on_threads_and_strides():
    arguments = given(2, 300, 33)
    threads = torch.get_num_threads()
    expected = torch.ops.uefl.ema_update(*arguments)
    strided = [
        value.mT.contiguous().mT if isinstance(value, torch.Tensor) and value.dim() == 3 else value
        for value in arguments
    ]
    try:
        torch.set_num_threads(1)
        found = torch.ops.uefl.ema_update(*strided)
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.skipif(not COMPILED, reason="needs the compiled kernels")
@pytest.mark.parametrize(
    ("place", "wrong"),
    [
        (0, torch.ones(1, 5)),
        (1, torch.ones(4, 3)),
        (2, torch.ones(1, 4, 3, dtype=torch.float64)),
        (3, torch.ones(1, 4, dtype=torch.int32)),
        (4, torch.ones(1, 4, 3)),
        (5, torch.ones(4)),
    ],
)
def test_direct_calls_are_checked(place, wrong):
    arguments = [*given(1, 4, 3)]
    arguments[place] = wrong
    with pytest.raises(RuntimeError, match="ema_update"):
        torch.ops.uefl.ema_update(*arguments)


def test_stages_that_move_together_move_as_one_by_one():
    def after(steps_apart):
        torch.manual_seed(0)
        layer = ResidualVQ(dim=8, codebook_size=16, num_quantizers=3, decay=0.9)
        x = torch.randn(4, 50, 8)
        for _ in range(3):
            if steps_apart:  # other options, the same update
                layer.layers[1].eps = layer.layers[1].eps + 1e-20
                layer.layers[2].decay = layer.layers[2].decay + 1e-12
            layer(x)
        return layer.state_dict()

    together, apart = after(False), after(True)
    for name, value in together.items():
        torch.testing.assert_close(value, apart[name], rtol=1e-6, atol=1e-7, msg=name)
    assert not torch.equal(
        together["layers.0._codebook.embed"],
        ResidualVQ(dim=8, codebook_size=16, num_quantizers=3).state_dict()["layers.0._codebook.embed"],
    )


@pytest.mark.parametrize(("option", "value"), [("decay", 0.5), ("eps", 1.0), ("manual_ema_update", True)])
def test_a_stage_moves_by_its_own_options(option, value):
    def after(**one_by_one):
        torch.manual_seed(0)
        layer = ResidualVQ(dim=8, codebook_size=16, num_quantizers=3)
        setattr(layer.layers[1], option, value)
        layer(torch.randn(4, 50, 8), **one_by_one)
        return layer.state_dict()

    torch.testing.assert_close(after(), after(mask=torch.ones(4, 50, dtype=torch.bool)))


@pytest.mark.parametrize("cosine", [False, True])
def test_update_ema_moves_codewords_as_a_pass_does(cosine):
    def moved(manual):
        torch.manual_seed(0)
        layer = VectorQuantize(8, 16, use_cosine_sim=cosine, manual_ema_update=manual)
        layer(torch.randn(60, 8))
        if manual:
            layer._codebook.update_ema()
        return layer.codebook

    torch.testing.assert_close(moved(True), moved(False))


class Count(TorchDispatchMode):
    """Count the operations of torch."""

    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("layer", "most"),
    [(VectorQuantize(8, 16), 15), (ResidualVQ(dim=8, codebook_size=16, num_quantizers=8), 37)],
)
def test_a_training_pass_takes_few_operations(layer, most):
    x = torch.randn(2, 5, 8, requires_grad=True)
    layer(x)
    with Count() as counted:
        layer(x)
    assert counted.calls <= most


@pytest.mark.parametrize("by_hand", [False, True])
def test_shared_codebook_moves_once_for_each_stage(by_hand):
    torch.manual_seed(0)
    layer = ResidualVQ(dim=8, codebook_size=16, num_quantizers=3, shared_codebook=not by_hand)
    for stage in layer.layers[1:] if by_hand else ():
        stage._codebook = layer.layers[0]._codebook
    alone = VectorQuantize(8, 16)
    alone.load_state_dict(layer.layers[0].state_dict())
    x = torch.randn(4, 50, 8)
    residual = x
    snapshot = alone.codebook.clone()
    for _ in range(3):
        taken = torch.cdist(residual, snapshot.expand(4, -1, -1)).argmin(-1)
        alone._codebook.update_indices(residual, taken.unsqueeze(-1))
        residual = residual - snapshot[taken]
    layer(x)
    torch.testing.assert_close(layer.layers[0].codebook, alone.codebook)
