"""Attributes of vector-quantize-pytorch's layers on ours: setting one has an effect or raises an error."""

from __future__ import annotations

import inspect
import itertools
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import uefl_kernels.nn
from uefl_kernels.nn import GroupedResidualVQ, ResidualSimVQ, ResidualVQ, SimVQ, VectorQuantize

from .conftest import normal
from .nn_layers import state

# Attributes of version 1.32 of the peer. test_list_of_attributes_equals_the_peer compares them.
ATTRIBUTES = {
    "VectorQuantize": (
        "_codebook accept_3d_fmap accept_image_fmap channel_last codebook codebook_diversity_loss_weight"
        " codebook_diversity_temperature codebook_size commitment_use_cross_entropy_loss commitment_weight"
        " dim directional_reparam directional_reparam_variance ema_update eps expire_codes_ forward"
        " freeze_codebook get_codes_from_indices get_output_from_indices has_codebook_diversity_loss"
        " has_codebook_orthogonal_loss has_commitment_loss has_projections heads in_place_codebook_optimizer"
        " learnable_codebook manual_in_place_optimizer_update maybe_split_heads_from_input"
        " orthogonal_reg_active_codes_only orthogonal_reg_max_codes orthogonal_reg_weight project_in"
        " project_out return_zeros_for_masked_padding rotation_trick route_gradients_to_input"
        " separate_codebook_per_head sync_update_v update_ema_indices update_in_place_optimizer"
        " update_indices use_cosine_sim zero"
    ),
    "Codebook": (
        "affine_param all_reduce_fn cluster_size codebook_size decay ema_update embed embed_avg eps"
        " expire_codes_ forward gumbel_sample has_dead_code_replacement init_embed_ initted"
        " kmeans_all_reduce_fn kmeans_iters learnable_codebook manual_ema_update num_codebooks replace"
        " replace_sample_fn reset_cluster_size sample_codebook_temp sample_fn sync_affine_param"
        " threshold_ema_dead_code track_cluster_size_and_embed_avg transform_input update_affine"
        " update_codebook update_ema update_ema_indices update_indices update_with_decay use_cosine_sim"
        " use_ddp vq_bridge"
    ),
    "ResidualVQ": (
        "accept_image_fmap beam_score_weights beam_size codebook_dim codebook_size codebook_sizes codebooks"
        " diveq eval_beam_size forward get_codes_from_indices get_output_from_indices has_projections"
        " implicit_neural_codebook layers mlps num_quantizers project_in project_out quant_grad_frac"
        " quantize_dropout quantize_dropout_cutoff_index quantize_dropout_multiple_of"
        " return_zeros_for_masked_padding shared_codebook uniform_codebook_size vq_is_ema_updating"
    ),
    "GroupedResidualVQ": (
        "accept_image_fmap codebooks dim forward get_codes_from_indices get_output_from_indices groups rvqs"
        " split_dim"
    ),
    "SimVQ": (
        "channel_first code_transform codebook codebook_size commitment_weight forward frozen_codebook"
        " indices_to_codes input_to_quantize_commit_loss_weight rotation_trick"
    ),
    "ResidualSimVQ": (
        "channel_first codebook_dim codebook_size codebooks forward get_codes_from_indices"
        " get_output_from_indices layers num_quantizers quantize_dropout quantize_dropout_cutoff_index"
        " quantize_dropout_multiple_of"
    ),
    "FSQ": (
        "allowed_dtypes bound bound_hard_clamp channel_first codebook_dim codebook_size codes_to_indices dim"
        " effective_codebook_dim force_quantization_f32 forward has_projections implicit_codebook"
        " indices_to_codes indices_to_level_indices keep_num_codebooks_dim maybe_apply_noise noise_dropout"
        " num_codebooks orthogonal_rotation preserve_symmetry project_in project_out quantize return_indices"
        " scale symmetry_preserving_bound"
    ),
    "FSP": (
        "act_func act_name channel_first codebook_dim codebook_size dim forward has_projections"
        " indices_to_act_value indices_to_codes indices_to_level_indices inv_act_func"
        " level_indices_to_indices need_inv_act project_in project_out quantize_act_value quantize_rate"
        " vector_norm"
    ),
    "LFQ": (
        "activation bits_to_codes channel_first codebook codebook_dim codebook_scale codebook_size"
        " commitment_loss_weight dim diversity_gamma dtype entropy_loss_offset entropy_loss_weight"
        " experimental_softplus_entropy_loss force_quantization_f32 forward frac_per_sample_entropy"
        " has_projections indices_to_codes keep_num_codebooks_dim mask maybe_l2norm num_codebooks"
        " orthogonal_rotation project_in project_out soft_clamp_input_value spherical zero"
    ),
    "ResidualFSQ": (
        "codebook_size codebooks forward get_codes_from_indices get_output_from_indices has_projections"
        " is_channel_first layers levels num_quantizers project_in project_out quantize_dropout"
        " quantize_dropout_cutoff_index quantize_dropout_multiple_of scales soft_clamp_input_value"
    ),
    "ResidualLFQ": (
        "codebooks forward get_codes_from_indices get_output_from_indices has_projections layers"
        " num_quantizers project_in project_out quantize_dropout quantize_dropout_cutoff_index"
        " quantize_dropout_multiple_of"
    ),
    "GroupedResidualFSQ": (
        "accept_image_fmap codebook_size codebooks dim forward get_codes_from_indices"
        " get_output_from_indices groups rvqs split_dim"
    ),
    "GroupedResidualLFQ": (
        "accept_image_fmap codebooks dim forward get_codes_from_indices get_output_from_indices groups rvqs"
        " split_dim"
    ),
    "LatentQuantize": (
        "codebook_dim codebook_size codes_to_indices commitment_loss commitment_loss_weight dim"
        " effective_codebook_dim forward has_projections implicit_codebook in_place_codebook_optimizer"
        " indices_to_codes keep_num_codebooks_dim num_codebooks project_in project_out quantization_loss"
        " quantization_loss_weight quantize quantize_and_project values_per_latent"
    ),
    "BinaryMapper": (
        "binary_entropy bits calc_aux_loss codes deterministic_on_eval forward kl_loss_threshold log_prob"
        " num_codes power_two zero"
    ),
    "RandomProjectionQuantizer": "forward norm num_codebooks rand_projs vq",
    "HierarchicalVQ": (
        "channel_first choose_phi codebook_sizes dim flatten_indices flatten_spatial forward"
        " get_output_from_indices get_vq indices_to_spatial level_shapes mask_from_channel mask_to_channel"
        " nested_dropout nested_dropout_min_levels num_levels phi_levels phi_shared pool_residual"
        " sample_nested_cutoff scales spatial_dims to_channel_first to_channel_last unflatten_spatial"
        " upsample_to_full vq vqs"
    ),
    "Sequential": "fns forward",
}
# Internals of the peer that our layers do not have. Reading or setting one raises AttributeError.
ABSENT = {
    *(
        "zero",
        "maybe_split_heads_from_input",
        "gumbel_sample",
        "sample_fn",
        "replace_sample_fn",
        "all_reduce_fn",
    ),
    *("kmeans_all_reduce_fn", "update_codebook", "update_with_decay", "track_cluster_size_and_embed_avg"),
    *("flatten_indices", "flatten_spatial", "indices_to_spatial", "mask_from_channel", "mask_to_channel"),
    *("to_channel_first", "to_channel_last", "unflatten_spatial", "quantize_and_project"),
    ("LatentQuantize", "in_place_codebook_optimizer"),
}
MAKE = {
    "VectorQuantize": lambda kit: kit.VectorQuantize(8, 16),
    "Codebook": lambda kit: kit.VectorQuantize(8, 16)._codebook,
    "ResidualVQ": lambda kit: kit.ResidualVQ(dim=8, num_quantizers=3, codebook_size=16),
    "GroupedResidualVQ": lambda kit: kit.GroupedResidualVQ(
        dim=8, groups=2, num_quantizers=3, codebook_size=16
    ),
    "SimVQ": lambda kit: kit.SimVQ(8, 16),
    "ResidualSimVQ": lambda kit: kit.ResidualSimVQ(dim=8, num_quantizers=3, codebook_size=16),
    "FSQ": lambda kit: kit.FSQ([8, 5, 5], dim=8),
    "FSP": lambda kit: kit.FSP([8, 5, 5], dim=8),
    "LFQ": lambda kit: kit.LFQ(dim=8, codebook_size=16),
    "ResidualFSQ": lambda kit: kit.ResidualFSQ(levels=[8, 5, 5], dim=8, num_quantizers=3),
    "ResidualLFQ": lambda kit: kit.ResidualLFQ(dim=8, codebook_size=16, num_quantizers=3),
    "GroupedResidualFSQ": lambda kit: kit.GroupedResidualFSQ(
        levels=[8, 5], dim=8, num_quantizers=3, groups=2
    ),
    "GroupedResidualLFQ": lambda kit: kit.GroupedResidualLFQ(
        dim=8, codebook_size=16, num_quantizers=3, groups=2
    ),
    "LatentQuantize": lambda kit: kit.LatentQuantize([5, 4], dim=8),
    "BinaryMapper": lambda kit: kit.BinaryMapper(bits=4),
    "RandomProjectionQuantizer": lambda kit: kit.RandomProjectionQuantizer(
        dim=8, codebook_size=16, codebook_dim=4
    ),
    "HierarchicalVQ": lambda kit: kit.HierarchicalVQ(
        dim=8, codebook_size=16, scales=(1, 2), accept_image_fmap=True
    ),
    "Sequential": lambda kit: kit.Sequential(nn.Linear(8, 3), kit.FSQ([8, 5, 5])),
}


def own_names(layer):
    classes = itertools.takewhile(lambda kind: kind is not nn.Module, type(layer).__mro__)
    found = {name for kind in classes for name in vars(kind) if not name.startswith("__")}
    found |= {*vars(layer), *layer._parameters, *layer._buffers, *layer._modules} - set(vars(nn.Module()))
    return {name for name in found if name == "_codebook" or not name.startswith("_")}


def the_peer():
    return pytest.importorskip(
        "vector_quantize_pytorch", reason="the peer, vector-quantize-pytorch, is not installed"
    )


@pytest.mark.parametrize("kind", ATTRIBUTES)
def test_list_of_attributes_equals_the_peer(kind):
    assert own_names(MAKE[kind](the_peer())) == set(ATTRIBUTES[kind].split())


CLASSES = [kind for kind in ATTRIBUTES if kind != "Codebook"]
# None, the default here, leaves the option of the constructor in force
OTHER_DEFAULTS = {"freeze_codebook", "mlp_kwargs", "straight_through_activation", "init_fn"}


@pytest.mark.parametrize("method", ["__init__", "forward"])
@pytest.mark.parametrize("kind", CLASSES)
def test_arguments_are_those_of_the_peer(kind, method):
    """Names, order, kinds and defaults are equal.

    Further arguments of ours come after them, or only by name.
    """
    theirs, ours = (
        inspect.signature(getattr(getattr(kit, kind), method)).parameters
        for kit in (the_peer(), uefl_kernels.nn)
    )
    named = [each for each in theirs.values() if each.kind is not each.VAR_KEYWORD]
    positional = [each.name for each in named if each.kind is each.POSITIONAL_OR_KEYWORD]
    assert list(ours)[: len(positional)] == positional
    for each in named:
        mine = ours.get(each.name)
        if mine is None:  # an argument of the quantizers inside
            assert any(other.kind is other.VAR_KEYWORD for other in ours.values()), each.name
            continue
        assert mine.kind is each.kind, each.name
        assert each.name in OTHER_DEFAULTS or mine.default == each.default, each.name


@pytest.mark.parametrize("kind", CLASSES)
def test_state_has_the_keys_of_the_peer(kind):
    theirs, ours = (MAKE[kind](kit).state_dict() for kit in (the_peer(), uefl_kernels.nn))
    assert [(key, value.shape, value.dtype) for key, value in ours.items()] == [
        (key, value.shape, value.dtype) for key, value in theirs.items()
    ]


def test_classes_that_are_absent_are_named_with_a_reason():
    text = (Path(__file__).parents[2] / "docs" / "peers.md").read_text(encoding="utf-8")
    table = text.split("## Not implemented")[1].split("##")[0]
    named = set(re.findall(r"^\| `(\w+)` \| .+ \|$", table, re.MULTILINE))
    assert not named & {*CLASSES}
    public = {name for name, value in vars(the_peer()).items() if isinstance(value, type)}
    assert public - {*CLASSES} == named


@pytest.mark.parametrize("kind", ATTRIBUTES)
def test_attributes_exist_or_are_refused(kind):
    layer = MAKE[kind](uefl_kernels.nn)
    for name in ATTRIBUTES[kind].split():
        absent = bool(ABSENT & {name, (kind, name)})
        assert hasattr(layer, name) != absent, name
        if absent:
            with pytest.raises(AttributeError, match=name):
                setattr(layer, name, None)


# name -> value, options of the layer, and what else the attribute needs
LEARNED = {"learnable_codebook": True, "ema_update": False}
REVIVED = {"threshold_ema_dead_code": 3.0}
SETTINGS = {
    "commitment_weight": (3.0, {}),
    "commitment_use_cross_entropy_loss": (True, {}),
    "codebook_diversity_loss_weight": (2.0, {}),
    "codebook_diversity_temperature": (3.0, {"codebook_diversity_loss_weight": 1.0}),
    "orthogonal_reg_weight": (100.0, {"orthogonal_reg_weight": 1.0}),
    "orthogonal_reg_active_codes_only": (True, {"orthogonal_reg_weight": 1.0, "codebook_size": 64}),
    "orthogonal_reg_max_codes": (4, {"orthogonal_reg_weight": 1.0}),
    "rotation_trick": (False, {}),
    "directional_reparam_variance": (0.7, {"directional_reparam": True, **REVIVED}),
    "freeze_codebook": (True, {}),
    "sync_update_v": (0.5, LEARNED),
    "route_gradients_to_input": (False, LEARNED),
    "stochastic_sample_codes": (True, {}),
    "straight_through": (True, {"rotation_trick": False}),
    "sample_codebook_temp": (5.0, {"stochastic_sample_codes": True, "sample_codebook_temp": 0.0}),
    "decay": (0.1, {}),
    "eps": (0.9, {}),
    "kmeans_iters": (1, {"kmeans_init": True}),
    "threshold_ema_dead_code": (0.0, REVIVED),
    "manual_ema_update": (True, {}),
    "affine_param_batch_decay": (0.1, {"affine_param": True}),
    "affine_param_codebook_decay": (0.1, {"affine_param": True}),
}
ON_CODEBOOK = {
    "sample_codebook_temp",
    "decay",
    "eps",
    "kmeans_iters",
    "threshold_ema_dead_code",
    "manual_ema_update",
}
CASES = [(name, False) for name in SETTINGS] + [(name, True) for name in sorted(ON_CODEBOOK)]


def steps(layer):
    found = []
    for step in range(3):
        torch.manual_seed(step)
        x = normal(2, 40, 8, seed=step).requires_grad_()
        quantized, indices, loss = layer(x)
        (quantized * normal(2, 40, 8, seed=9)).sum().add(loss.sum()).backward()
        found += [quantized.detach(), indices, loss.detach(), x.grad]
    return [*found, *state(layer).values()]


def same(first, second):
    return len(first) == len(second) and all(map(torch.equal, first, second))


@pytest.mark.parametrize(("name", "on_codebook"), CASES)
def test_set_later_is_as_set_at_first(name, on_codebook):
    value, options = SETTINGS[name]
    layers = []
    for given in (options, options | {name: value}, options):
        torch.manual_seed(0)
        layers.append(VectorQuantize(**{"dim": 8, "codebook_size": 16} | given))
    plain, made, later = layers
    setattr(later._codebook if on_codebook else later, name, value)
    assert getattr(later, name) == value
    first, found = steps(made), steps(later)
    assert same(first, found)
    assert not same(first, steps(plain))


# (class, attribute) -> value, arguments of the layer, shape of the input
OF_OTHERS = {
    ("FSQ", "channel_first"): (True, {"levels": [5, 3], "dim": 8}, (2, 8, 8)),
    ("FSQ", "bound_hard_clamp"): (True, {"levels": [5, 3], "dim": 8}, (2, 9, 8)),
    ("FSQ", "noise_dropout"): (0.5, {"levels": [5, 3], "dim": 8, "preserve_symmetry": True}, (2, 9, 8)),
    ("FSP", "channel_first"): (True, {"levels": [5, 3], "dim": 8}, (2, 8, 8)),
    ("FSP", "need_inv_act"): (True, {"levels": [5, 3]}, (2, 9, 2)),
    ("FSP", "quantize_rate"): (0.9, {"levels": [5, 3]}, (2, 9, 2)),
    ("LFQ", "channel_first"): (True, {"dim": 8, "codebook_size": 16}, (2, 8, 8)),
    ("LFQ", "commitment_loss_weight"): (3.0, {"dim": 4}, (2, 9, 4)),
    ("LFQ", "diversity_gamma"): (0.3, {"dim": 4}, (2, 9, 4)),
    ("LFQ", "entropy_loss_weight"): (3.0, {"dim": 4}, (2, 9, 4)),
    ("LFQ", "entropy_loss_offset"): (0.5, {"dim": 4, "experimental_softplus_entropy_loss": True}, (2, 9, 4)),
    ("LFQ", "experimental_softplus_entropy_loss"): (True, {"dim": 4}, (2, 9, 4)),
    ("LFQ", "frac_per_sample_entropy"): (0.3, {"dim": 4}, (2, 9, 4)),
    ("LFQ", "soft_clamp_input_value"): (1.5, {"dim": 4, "commitment_loss_weight": 1.0}, (2, 9, 4)),
    ("LFQ", "spherical"): (True, {"dim": 4}, (2, 9, 4)),
    ("ResidualFSQ", "is_channel_first"): (True, {"levels": [5, 3], "dim": 8, "num_quantizers": 2}, (2, 8, 8)),
    ("LatentQuantize", "commitment_loss_weight"): (3.0, {"levels": [5, 4], "dim": 8}, (2, 8, 9)),
    ("LatentQuantize", "quantization_loss_weight"): (3.0, {"levels": [5, 4], "dim": 8}, (2, 8, 9)),
    ("BinaryMapper", "kl_loss_threshold"): (0.0, {"bits": 4}, (2, 9, 4)),
    ("HierarchicalVQ", "nested_dropout"): (
        1.0,
        {"dim": 8, "codebook_size": 16, "scales": (1, 2, 4), "kmeans_init": False},
        (2, 8, 4),
    ),
    ("HierarchicalVQ", "nested_dropout_min_levels"): (
        3,
        {"dim": 8, "codebook_size": 16, "scales": (1, 2, 4), "kmeans_init": False, "nested_dropout": 1.0},
        (2, 8, 4),
    ),
}


@pytest.mark.parametrize(("kind", "name"), OF_OTHERS)
def test_set_later_is_as_set_at_first_for_others(kind, name):
    value, options, shape = OF_OTHERS[kind, name]
    found = []
    for given, late in ((options, {}), (options | {name: value}, {}), (options, {name: value})):
        torch.manual_seed(0)
        layer = getattr(uefl_kernels.nn, kind)(**given)
        for attribute, wanted in late.items():
            setattr(layer, attribute, wanted)
            assert getattr(layer, attribute) == wanted
        torch.manual_seed(1)
        out = layer(normal(*shape, seed=3))
        found.append([piece.detach() for piece in out if isinstance(piece, torch.Tensor)])
    plain, made, later = found
    assert same(made, later)
    assert not same(plain, later)


@pytest.mark.parametrize("name", ["ema_update", "use_ddp", "reset_cluster_size"])
def test_attributes_of_the_codebook(name):
    torch.manual_seed(0)
    vq = VectorQuantize(8, 64, **REVIVED)
    if name == "ema_update":
        vq._codebook.ema_update = False
        vq._codebook.threshold_ema_dead_code = 0
        before = vq.codebook.clone()
        vq(normal(4, 40, 8))
        assert torch.equal(vq.codebook, before)
    elif name == "reset_cluster_size":
        for size in (0.0, 7.0):
            vq._codebook.reset_cluster_size = size
            vq(normal(4, 40, 8))
            assert (vq._codebook.cluster_size == size).any()
    else:  # without processes it changes nothing
        vq._codebook.use_ddp = False
        assert vq.sync_codebook is False


@pytest.mark.parametrize("options", [{}, {"directional_reparam": True, **REVIVED}], ids=str)
def test_estimators_that_exclude_each_other(options):
    vq = VectorQuantize(8, 16, **options)
    vq.rotation_trick = vq.directional_reparam = True
    with pytest.raises(ValueError, match=r"rotation_trick.*directional_reparam"):
        vq(normal(4, 40, 8).requires_grad_())


def test_dead_codewords_by_a_schedule():
    torch.manual_seed(0)
    vq = VectorQuantize(8, 32, threshold_ema_dead_code=50, decay=1.0, ema_update=False)
    before = vq.codebook.clone()
    for threshold in (0.5, 0):  # all sizes are 1
        vq._codebook.threshold_ema_dead_code = threshold
        vq(normal(1, 100, 8))
        assert torch.equal(vq.codebook, before)
    assert not vq._codebook.has_dead_code_replacement
    vq._codebook.threshold_ema_dead_code = 50
    vq(normal(1, 100, 8))
    assert (vq.codebook != before).any(-1).all()


@pytest.mark.parametrize(
    "make",
    [MAKE[name] for name in ("ResidualVQ", "ResidualSimVQ", "ResidualFSQ", "ResidualLFQ")],
    ids=["ResidualVQ", "ResidualSimVQ", "ResidualFSQ", "ResidualLFQ"],
)
@pytest.mark.parametrize(
    ("name", "value"), [("quantize_dropout_cutoff_index", 2), ("quantize_dropout_multiple_of", 3)]
)
def test_quantizers_that_are_left_out(make, name, value):
    layer, x = make(uefl_kernels.nn), normal(1, 4, 8)
    layer.quantize_dropout = True
    torch.manual_seed(0)
    assert any((layer(x)[1] == -1).any() for _ in range(20))
    setattr(layer, name, value)
    assert not any((layer(x)[1] == -1).any() for _ in range(20))
    with pytest.raises(ValueError, match=name):
        setattr(layer, name, -1)


FIXED = {
    "VectorQuantize": (
        "dim heads codebook_size codebook_dim separate_codebook_per_head use_cosine_sim learnable_codebook"
        " affine_param kmeans_init has_projections has_commitment_loss has_codebook_orthogonal_loss"
        " has_codebook_diversity_loss"
    ),
    "Codebook": (
        "num_codebooks codebook_size learnable_codebook use_cosine_sim affine_param has_dead_code_replacement"
        " transform_input update_ema expire_codes_ replace init_embed_"
    ),
    "ResidualVQ": (
        "num_quantizers codebook_size codebook_sizes codebook_dim uniform_codebook_size shared_codebook"
        " diveq implicit_neural_codebook has_projections vq_is_ema_updating"
    ),
    "GroupedResidualVQ": "dim groups accept_image_fmap channel_last",
    "SimVQ": "codebook_size",
    "ResidualSimVQ": "num_quantizers codebook_size codebook_dim channel_first",
    "FSQ": (
        "dim codebook_dim codebook_size effective_codebook_dim has_projections keep_num_codebooks_dim"
        " num_codebooks orthogonal_rotation preserve_symmetry bound quantize symmetry_preserving_bound"
    ),
    "FSP": "dim codebook_dim codebook_size has_projections act_name",
    "LFQ": (
        "dim codebook_dim codebook_size codebook_scale num_codebooks keep_num_codebooks_dim has_projections"
        " orthogonal_rotation dtype"
    ),
    "ResidualFSQ": "levels num_quantizers codebook_size has_projections",
    "ResidualLFQ": "num_quantizers has_projections",
    "GroupedResidualFSQ": "dim groups accept_image_fmap codebook_size split_dim",
    "GroupedResidualLFQ": "dim groups accept_image_fmap split_dim",
    "LatentQuantize": (
        "dim codebook_dim codebook_size effective_codebook_dim num_codebooks keep_num_codebooks_dim"
        " has_projections"
    ),
    "BinaryMapper": "bits num_codes",
    "RandomProjectionQuantizer": "num_codebooks",
    "HierarchicalVQ": "dim scales level_shapes num_levels spatial_dims channel_first codebook_sizes",
}


@pytest.mark.parametrize("kind", FIXED)
def test_attributes_without_effect_are_refused(kind):
    layer = MAKE[kind](uefl_kernels.nn)
    for name in FIXED[kind].split():
        value = getattr(layer, name)
        with pytest.raises(AttributeError, match=name):
            setattr(layer, name, value)
        assert getattr(layer, name) == value


@pytest.mark.parametrize(("kind", "name"), [("LFQ", "codebook"), ("BinaryMapper", "power_two")])
def test_constant_tensors_are_refused(kind, name):
    layer = MAKE[kind](uefl_kernels.nn)
    with pytest.raises(AttributeError, match=name):
        setattr(layer, name, torch.zeros_like(getattr(layer, name)))


def test_orthogonal_loss_of_codewords_that_no_gradient_moves():
    vq = VectorQuantize(8, 16)
    with pytest.raises(ValueError, match="orthogonal_reg_weight"):
        vq.orthogonal_reg_weight = 1.0
    assert vq.orthogonal_reg_weight == 0


def test_orthogonal_loss_of_no_codeword_that_was_chosen():
    vq = VectorQuantize(8, 16, orthogonal_reg_weight=1.0, orthogonal_reg_active_codes_only=True)
    loss = vq(normal(4, 8), mask=torch.zeros(4, dtype=torch.bool))[2]
    assert loss == 0


def test_methods_of_the_codebook():
    torch.manual_seed(0)
    rows = normal(1, 200, 8)
    vq = VectorQuantize(8, 16, kmeans_init=True, threshold_ema_dead_code=2)
    other = VectorQuantize(8, 16, kmeans_init=True, threshold_ema_dead_code=2)
    torch.manual_seed(1)
    vq._codebook.init_embed_(rows)
    torch.manual_seed(1)
    other.eval()(rows[0])
    assert torch.equal(vq.codebook, other.codebook)
    vq._codebook.init_embed_(rows + 1)
    assert torch.equal(vq.codebook, other.codebook)
    before = vq.codebook.clone()
    dead = torch.zeros(1, 16, dtype=torch.bool).index_fill(1, torch.tensor([3, 5]), True)
    vq._codebook.replace(rows, dead)
    assert ((vq.codebook != before).any(-1) == dead[0]).all()
    assert (vq.codebook[dead[0]].unsqueeze(1) == rows).all(-1).any(-1).all()
    vq._codebook.cluster_size[0, 7] = 0
    vq.eval()._codebook.expire_codes_(rows)
    assert torch.equal(vq.codebook[7], before[7])
    vq.train()._codebook.expire_codes_(rows)
    assert not torch.equal(vq.codebook[7], before[7])


@pytest.mark.parametrize("heads", [1, 2])
def test_given_indices_move_the_codebook_as_forward_does(heads):
    layers = []
    for _ in range(2):
        torch.manual_seed(0)
        layers.append(VectorQuantize(8, 16, heads=heads, codebook_dim=8 // heads))
    x = normal(3, 20, 8)
    indices = layers[0](x)[1]
    layers[1]._codebook.update_indices(x, indices)
    assert all(map(torch.equal, state(layers[0]).values(), state(layers[1]).values()))


def test_codebooks_take_the_rows_of_each_head():
    layers = []
    for _ in range(2):
        torch.manual_seed(0)
        layers.append(VectorQuantize(8, 16, heads=2, codebook_dim=4, separate_codebook_per_head=True))
    x = normal(3, 20, 8)
    indices, update = layers[0](x)[1], layers[1]._codebook.update_indices
    for rows in ((2, 60, 4), (3, 3, 20, 4), (1, 60, 6)):
        with pytest.raises(ValueError, match=rf"update_indices.*h = 2.*{rows[-2]}, {rows[-1]}\]"):
            update(normal(*rows), torch.zeros(rows[:-1], dtype=torch.int64))
    update(x.unflatten(-1, (2, 4)).movedim(2, 0), indices.movedim(-1, 0))
    assert all(map(torch.equal, state(layers[0]).values(), state(layers[1]).values()))


def test_codebooks_of_groups_with_unequal_sizes():
    groups = GroupedResidualVQ(dim=8, groups=2, num_quantizers=2, codebook_size=(32, 8))
    assert [[list(codebook.shape) for codebook in group] for group in groups.codebooks] == [
        [[32, 4], [8, 4]]
    ] * 2
    assert list(GroupedResidualVQ(dim=8, groups=2, num_quantizers=3, codebook_size=16).codebooks.shape) == [
        2,
        3,
        16,
        4,
    ]


def test_attributes_of_the_others():
    sim, residual, x = SimVQ(8, 16), ResidualVQ(dim=8, num_quantizers=2, codebook_size=16), normal(1, 30, 8)
    loss = sim(x)[2]
    sim.commitment_weight = 3.0
    torch.testing.assert_close(sim(x)[2], 3 * loss)
    sim.channel_first = True
    assert sim(x.mT)[0].shape == (1, 8, 30)
    residual.eval()
    residual.beam_size = residual.eval_beam_size = 3
    wide = residual(x)[0]
    residual.eval_beam_size = None
    assert (x - wide).square().mean() <= (x - residual(x)[0]).square().mean()
    assert ResidualSimVQ(dim=8, num_quantizers=3, codebook_size=16).codebook_dim == 8


@pytest.mark.parametrize("layer_trains", [True, False])
@pytest.mark.parametrize(
    "options", [{}, {"stochastic_sample_codes": True}, {"affine_param": True}, REVIVED, None], ids=str
)
def test_averages_follow_the_mode_of_the_codebook(options, layer_trains):
    """``_codebook.eval()`` alone freezes the codewords and draws none, as in the peer."""
    torch.manual_seed(0)
    layer = ResidualVQ(dim=8, codebook_size=16, num_quantizers=2)
    if options is not None:
        layer = VectorQuantize(8, 16, **options)
    codebooks = [module for module in layer.modules() if hasattr(module, "embed_avg")]
    layer.train(layer_trains)
    for codebook in codebooks:
        codebook.train(not layer_trains)
    before, x = state(layer), normal(4, 20, 8)
    indices = layer(x)[1]
    after = layer.state_dict()
    moved = after.keys() != before.keys() or any(not torch.equal(after[key], before[key]) for key in before)
    assert moved is not layer_trains
    if layer_trains:
        torch.testing.assert_close(indices, layer.eval()(x)[1])
