"""Codes of layers: encode and decode, numbers of quantizers, integers of any width, bits."""

from __future__ import annotations

import math

import pytest
import torch

from uefl_kernels.nn import (
    FSP,
    FSQ,
    LFQ,
    BinaryMapper,
    GroupedResidualFSQ,
    GroupedResidualLFQ,
    GroupedResidualVQ,
    HierarchicalVQ,
    LatentQuantize,
    RandomProjectionQuantizer,
    ResidualFSQ,
    ResidualLFQ,
    ResidualSimVQ,
    ResidualVQ,
    Sequential,
    SimVQ,
    VectorQuantize,
)

from .conftest import normal
from .nn_layers import state

LAYERS = {
    "plain": lambda: VectorQuantize(8, 16),
    "drawn": lambda: VectorQuantize(8, 16, stochastic_sample_codes=True),
    "heads": lambda: VectorQuantize(8, 16, heads=2, codebook_dim=3, threshold_ema_dead_code=2),
    "residual": lambda: ResidualVQ(dim=8, num_quantizers=3, codebook_size=16, quantize_dropout=True),
    "beams": lambda: ResidualVQ(dim=8, num_quantizers=3, codebook_size=16, beam_size=3),
    "shared": lambda: ResidualVQ(dim=8, num_quantizers=3, codebook_size=16, shared_codebook=True),
    "implicit": lambda: ResidualVQ(dim=8, num_quantizers=3, codebook_size=16, implicit_neural_codebook=True),
    "groups": lambda: GroupedResidualVQ(dim=8, groups=2, num_quantizers=2, codebook_size=16),
    "sim": lambda: SimVQ(8, 16),
    "residual sim": lambda: ResidualSimVQ(dim=8, num_quantizers=3, codebook_size=16, quantize_dropout=True),
    "each projects": lambda: ResidualVQ(
        dim=8, num_quantizers=3, codebook_size=16, codebook_dim=3, project_each=True, cosine_search=True
    ),
    "fsq": lambda: FSQ([5, 4], dim=8),
    "fsp": lambda: FSP([5, 4], dim=8),
    "lfq": lambda: LFQ(dim=8, codebook_size=16),
    "residual fsq": lambda: ResidualFSQ(levels=[5, 3], dim=8, num_quantizers=3, quantize_dropout=True),
    "residual lfq": lambda: ResidualLFQ(dim=8, codebook_size=16, num_quantizers=3, quantize_dropout=True),
    "grouped fsq": lambda: GroupedResidualFSQ(levels=[5, 3], dim=8, num_quantizers=3, groups=2),
    "grouped lfq": lambda: GroupedResidualLFQ(dim=8, codebook_size=16, num_quantizers=3, groups=2),
    "hierarchical": lambda: HierarchicalVQ(
        dim=8, codebook_size=16, scales=(1, 5, 40), channel_first=False, kmeans_init=False
    ),
}
GROUPED = {"groups", "grouped fsq", "grouped lfq"}


def to_dtype(codes, dtype):
    return [piece.to(dtype) for piece in codes] if isinstance(codes, tuple) else codes.to(dtype)


def look_ups(layer):
    """Return the functions of a layer from codes to vectors."""
    names = ("decode", "get_codes_from_indices", "get_output_from_indices", "indices_to_codes")
    return [getattr(layer, name) for name in names if hasattr(layer, name)]


def equal(first, second):
    if isinstance(first, tuple):
        return all(map(torch.equal, first, second))
    return torch.equal(first, second)


@pytest.mark.parametrize("name", LAYERS)
def test_codes_round_trip_does_not_change_the_layer(name):
    torch.manual_seed(0)
    layer = LAYERS[name]()
    layer(normal(3, 40, 8))
    layer.train()
    before, x = state(layer), normal(3, 40, 8, seed=1)
    counts = [module.counts.clone() for module in layer.modules() if isinstance(module, VectorQuantize)]
    codes = layer.encode(x)
    assert all(module.training for module in layer.modules())
    assert all(map(torch.equal, state(layer).values(), before.values()))
    assert all(map(torch.equal, [m.counts for m in layer.modules() if isinstance(m, VectorQuantize)], counts))
    quantized, indices, *_ = layer.eval()(x)
    assert equal(codes, indices)
    torch.testing.assert_close(layer.decode(codes), quantized)


def test_a_codebook_that_waits_for_kmeans_has_no_codes():
    vq = VectorQuantize(8, 16, kmeans_init=True)
    with pytest.raises(RuntimeError, match="k-means"):
        vq.encode(normal(40, 8))
    assert not vq._codebook.initted
    assert vq.training


@pytest.mark.parametrize("name", LAYERS)
def test_codes_of_any_width(name):
    layer = LAYERS[name]().eval()
    codes = layer.encode(normal(2, 40, 8))
    for dtype in (torch.int32, torch.int16, torch.uint16, torch.uint8):
        for look_up in look_ups(layer):
            assert torch.equal(look_up(to_dtype(codes, dtype)), look_up(codes)), (look_up, dtype)


@pytest.mark.parametrize("name", LAYERS)
def test_codes_that_are_no_tensor_of_integers(name):
    layer = LAYERS[name]().eval()
    codes = layer.encode(normal(2, 40, 8))
    pieces = isinstance(codes, tuple)  # a tensor for each scale
    others = (
        lambda piece: piece.numpy(),
        lambda piece: piece.tolist(),
        lambda piece: piece.float(),
        lambda piece: piece.to_sparse(),
        lambda piece: torch.nested.nested_tensor([*piece], layout=torch.jagged),
    )
    for look_up in look_ups(layer):
        for other in others:
            with pytest.raises(TypeError, match=rf"^{type(layer).__name__}: indices"):
                look_up([other(piece) for piece in codes] if pieces else other(codes))


@pytest.mark.parametrize("name", LAYERS)
def test_codes_out_of_range(name):
    """Codes of 256 codewords that are stored as int8 have values below -1."""
    layer = LAYERS[name]().eval()
    codes = layer.encode(normal(2, 40, 8))
    for look_up in look_ups(layer):
        for wrong in (-2, 99):
            given = [piece * 0 + wrong for piece in codes] if isinstance(codes, tuple) else codes * 0 + wrong
            with pytest.raises(IndexError, match=rf": indices .* {wrong}$"):
                look_up(given)


@pytest.mark.parametrize("name", LAYERS)
def test_codes_on_another_device(name):
    layer = LAYERS[name]().eval()
    codes = layer.encode(normal(2, 40, 8))
    given = [piece.to("meta") for piece in codes] if isinstance(codes, tuple) else codes.to("meta")
    for look_up in look_ups(layer):
        with pytest.raises(ValueError, match=f"^{type(layer).__name__}: .*meta.*cpu"):
            look_up(given)


@pytest.mark.parametrize(
    "layer", [FSQ([3, 4]), FSQ([3, 4], preserve_symmetry=True), LatentQuantize([3, 4], 2)]
)
@pytest.mark.parametrize(
    ("codewords", "error"),
    [
        (None, TypeError),
        (torch.zeros(5, 2).to_sparse(), TypeError),
        (torch.zeros(5, 1), ValueError),
        (torch.zeros(5, 3), ValueError),
        (torch.tensor(0.0), ValueError),
    ],
)
def test_codewords_that_do_not_fit(layer, codewords, error):
    with pytest.raises(error, match=rf"^{type(layer).__name__}: zhat"):
        layer.codes_to_indices(codewords)


def test_one_code_of_latent_quantize():
    layer = LatentQuantize([3, 4], 2)
    assert torch.equal(layer.decode(torch.tensor(7)), layer.decode(torch.tensor([7]))[0])


@pytest.mark.parametrize("name", sorted(GROUPED | {"residual", "residual sim", "residual fsq", "heads"}))
def test_one_number_is_no_codes(name):
    layer = LAYERS[name]().eval()
    for look_up in look_ups(layer):
        with pytest.raises(ValueError, match=rf"^{type(layer).__name__}: "):
            look_up(torch.tensor(1))


@pytest.mark.parametrize(
    "layer",
    [
        FSQ([5, 4], dim=8, num_codebooks=2),
        LFQ(dim=8, codebook_size=16, num_codebooks=2),
        LatentQuantize([5, 4], 8, num_codebooks=2, codebook_dim=2),
    ],
    ids=lambda layer: type(layer).__name__,
)
@pytest.mark.parametrize("shape", [(), (2, 5, 3)])
def test_codes_for_another_number_of_codebooks(layer, shape):
    with pytest.raises(ValueError, match=rf"^{type(layer).__name__}: indices .*\[\.\.\., 2\]"):
        layer.decode(torch.zeros(shape, dtype=torch.int64))


def test_given_codes_of_another_kind():
    """Layers that take codes in forward check them as they do in decoding."""
    x = normal(2, 10, 8)
    grouped, mapper = LAYERS["groups"](), BinaryMapper(4)
    calls = [
        lambda codes: VectorQuantize(8, 16)(x, indices=codes(2, 10)),
        lambda codes: VectorQuantize(8, 16).update_indices(x, codes(2, 10)),
        lambda codes: residual()(x, indices=codes(2, 10, 3)),
        lambda codes: residual()(x, indices=[codes(2, 10)] * 3),
        lambda codes: grouped(x, indices=codes(2, 2, 10, 2)),
        lambda codes: grouped(x, indices=[codes(2, 10, 2)] * 2),
        lambda codes: mapper.log_prob(normal(3, 4), indices=codes(3)),
    ]
    for call in calls:
        with pytest.raises(TypeError, match=": indices "):
            call(lambda *shape: torch.zeros(shape).long().numpy())
        with pytest.raises(IndexError, match=": indices "):
            call(lambda *shape: torch.full(shape, -2))
    for codes in ([torch.zeros(2, 10).long()] * 2, torch.tensor(1)):
        with pytest.raises(ValueError, match=r"^GroupedResidualVQ: "):
            grouped(x, indices=codes[:1] if isinstance(codes, list) else codes)
        with pytest.raises(ValueError, match=r"^ResidualVQ: "):
            residual()(x, indices=codes)


@pytest.mark.parametrize("name", sorted(GROUPED | {"hierarchical"}))
def test_too_few_tensors_of_codes(name):
    layer = LAYERS[name]().eval()
    codes = layer.encode(normal(2, 40, 8))
    with pytest.raises(ValueError, match=rf"^{type(layer).__name__}: "):
        layer.decode(codes[1:])


def test_given_codes_of_another_width():
    vq, x = VectorQuantize(8, 16).eval(), normal(2, 10, 8)
    codes = vq.encode(x)
    assert torch.equal(vq(x, indices=codes.int())[1], vq(x, indices=codes)[1])


def residual(**options):
    torch.manual_seed(0)
    return ResidualVQ(**{"dim": 8, "num_quantizers": 3, "codebook_size": 16} | options)


@pytest.mark.parametrize("options", [{}, {"beam_size": 3}, {"quantize_dropout": True}], ids=str)
def test_a_number_of_quantizers(options):
    rvq, x = residual(**options), normal(2, 10, 8)
    quantized, indices, losses = rvq(x, n_q=2)
    assert (indices[..., 2] == -1).all()
    assert (indices[..., :2] >= 0).all()
    assert losses[2] == 0
    rvq.eval()
    quantized, indices, _ = rvq(x, n_q=2)
    torch.testing.assert_close(rvq.decode(indices), quantized)
    assert torch.equal(rvq.encode(x, n_q=2), indices)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("image", [False, True])
def test_a_number_of_quantizers_for_each_example(image, training):
    n_q = torch.tensor([3, 1, 2])
    x = normal(3, 8, 4, 5) if image else normal(3, 10, 8)
    rvq, alone = residual(accept_image_fmap=image), [residual(accept_image_fmap=image) for _ in range(3)]
    found = rvq.train(training)(x, n_q=n_q)
    for example, other in enumerate(alone):
        want = other.train(training)(x[example : example + 1], n_q=int(n_q[example]))
        assert torch.equal(found[1][example], want[1][0])
        torch.testing.assert_close(found[0][example], want[0][0])
    assert [int((found[1][..., place] >= 0).sum()) for place in range(3)] == [
        size * found[1][0, ..., 0].numel() for size in (3, 2, 1)
    ]
    if training:  # only the rows of the first example have moved the last codebook
        assert rvq.layers[2].counts.sum() == found[1][0, ..., 0].numel()


def test_a_mask_and_a_number_for_each_example():
    mask = torch.arange(10).expand(3, 10) < torch.tensor([[4], [10], [7]])
    indices = residual().eval()(normal(3, 10, 8), mask=mask, n_q=torch.tensor([1, 2, 3]))[1]
    assert torch.equal(indices[..., 0] >= 0, mask)
    assert torch.equal(indices[..., 1] >= 0, mask & torch.tensor([[False], [True], [True]]))


DROPS = {"quantize_dropout": True}
STACKS = {
    "sim": lambda: ResidualSimVQ(dim=8, num_quantizers=3, codebook_size=16),
    "sim first": lambda: ResidualSimVQ(dim=8, num_quantizers=3, codebook_size=16, channel_first=True),
    "fsq": lambda: ResidualFSQ(levels=[5, 3], dim=8, num_quantizers=3),
    "lfq": lambda: ResidualLFQ(dim=8, codebook_size=16, num_quantizers=3),
    "grouped": lambda: GroupedResidualVQ(dim=8, groups=2, num_quantizers=3, codebook_size=16, **DROPS),
    "grouped fsq": lambda: GroupedResidualFSQ(levels=[5, 3], dim=8, num_quantizers=3, groups=2, **DROPS),
    "grouped lfq": lambda: GroupedResidualLFQ(dim=8, codebook_size=16, num_quantizers=3, groups=2, **DROPS),
}


@pytest.mark.parametrize("name", STACKS)
def test_a_number_of_quantizers_of_every_residual_layer(name):
    torch.manual_seed(0)
    layer = STACKS[name]().eval()
    x = normal(3, 8, 10, seed=4) if name == "sim first" else normal(3, 10, 8, seed=4)
    n_q = torch.tensor([3, 1, 2], dtype=torch.uint16)
    quantized, indices, *_ = layer(x, n_q=n_q)
    for example in range(3):
        alone = layer(x[example : example + 1], n_q=int(n_q[example]))
        where = (slice(None), example) if "grouped" in name else (example,)
        first = (slice(None), 0) if "grouped" in name else (0,)
        torch.testing.assert_close(quantized[example], alone[0][0])
        assert torch.equal(indices[where], alone[1][first])
        assert (indices[where][..., int(n_q[example]) :] == -1).all()
    torch.testing.assert_close(layer.decode(indices), quantized)
    assert torch.equal(layer.encode(x, n_q=n_q), indices)
    for wrong in (4, torch.tensor([1, 2])):
        with pytest.raises(ValueError, match=rf"^{type(layer).__name__}: n_q"):
            layer(x, n_q=wrong)


@pytest.mark.parametrize("name", ["grouped", "grouped fsq", "grouped lfq"])
def test_groups_leave_out_the_same_quantizers(name):
    torch.manual_seed(0)
    layer = STACKS[name]()
    numbers = set()
    for _ in range(20):
        kept = (layer(normal(1, 4, 8))[1][:, 0, 0] >= 0).sum(-1)
        assert kept[0] == kept[1]
        numbers.add(int(kept[0]))
    assert numbers == {1, 2, 3}


def test_losses_of_the_examples_that_a_quantizer_has():
    layer, x = STACKS["sim"](), normal(3, 10, 8)
    losses = layer(x, n_q=torch.tensor([1, 2, 1]))[2]
    torch.testing.assert_close(losses[1], layer(x[1:2], n_q=2)[2][1])
    assert losses[2] == 0


@pytest.mark.parametrize(
    ("n_q", "options", "error"),
    [
        (0, {}, ValueError),
        (4, {}, ValueError),
        (1.5, {}, ValueError),
        (torch.tensor([1, 2]), {}, ValueError),
        (torch.tensor([1, 2, 0]), {}, ValueError),
        (torch.tensor([1, 2, 4]), {}, ValueError),
        (torch.tensor([1.0, 2.0, 3.0]), {}, TypeError),
        (torch.tensor([1, 2, 3]), {"beam_size": 2}, ValueError),
    ],
)
def test_numbers_of_quantizers_that_do_not_fit(n_q, options, error):
    with pytest.raises(error, match="n_q"):
        residual(**options)(normal(3, 10, 8), n_q=n_q)


def test_codes_of_modules_in_a_row():
    torch.manual_seed(0)
    model = Sequential(torch.nn.Linear(6, 8), VectorQuantize(8, 16), torch.nn.Linear(8, 5))
    x = normal(2, 10, 6)
    before, codes = state(model), model.encode(x)
    assert all(map(torch.equal, state(model).values(), before.values()))
    assert torch.equal(model.decode(codes), model.eval()(x)[0])
    assert model.bits_per_vector == 4


def test_codes_of_bits_and_of_random_projections():
    mapper, logits = BinaryMapper(4), normal(3, 5, 4)
    codes = mapper.encode(logits)
    assert torch.equal(mapper.decode(codes.int()), mapper(logits, deterministic=True)[0].detach())
    torch.manual_seed(0)
    projected = RandomProjectionQuantizer(dim=8, codebook_size=16, codebook_dim=4, num_codebooks=2)
    x = normal(2, 10, 8)
    codes = projected.encode(x)
    assert torch.equal(codes, projected(x))
    assert torch.equal(projected.decode(codes.to(torch.int16)), projected.decode(codes))
    assert (mapper.bits_per_vector, projected.bits_per_vector) == (4, 8)


def test_bits():
    assert FSQ([8, 4], num_codebooks=2).bits_per_vector == 10
    assert FSP([8, 4]).bits_per_vector == 5
    assert LFQ(codebook_size=16, num_codebooks=2).bits_per_vector == 8
    assert LatentQuantize([8, 4], 2).bits_per_vector == 5
    assert ResidualFSQ(levels=[8, 4], num_quantizers=3).bits_per_vector == 15
    assert GroupedResidualLFQ(dim=8, codebook_size=16, num_quantizers=3, groups=2).bits_per_vector == 24
    hierarchical = HierarchicalVQ(dim=8, codebook_size=16, scales=(1, 2), accept_image_fmap=True)
    assert hierarchical.bits_per_vector == 5
    assert VectorQuantize(8, 16, heads=2, codebook_dim=4).bits_per_vector == 8
    assert residual(codebook_size=(16, 8, 6)).bits_per_vector == 7 + math.log2(6)
    assert GroupedResidualVQ(dim=8, groups=2, num_quantizers=3, codebook_size=16).bits_per_vector == 24
    assert SimVQ(8, 32).bits_per_vector == 5
    assert ResidualSimVQ(dim=8, num_quantizers=2, codebook_size=32).bits_per_vector == 10
