"""Arguments of vector-quantize-pytorch that these layers do not have: refused by name, never ignored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Names and defaults of version 1.32. An argument at its default asks for nothing and passes.
VECTOR_QUANTIZE: Mapping[str, Any] = {
    "sync_kmeans": True,
    "layernorm_after_project_in": False,
    "accept_3d_fmap": False,
    "commitment_use_cross_entropy_loss": False,
    "orthogonal_reg_weight": 0.0,
    "orthogonal_reg_active_codes_only": False,
    "orthogonal_reg_max_codes": None,
    "codebook_diversity_loss_weight": 0.0,
    "codebook_diversity_temperature": 100.0,
    "stochastic_sample_codes": False,
    "sample_codebook_temp": 1.0,
    "straight_through": False,
    "directional_reparam": False,
    "directional_reparam_variance": 5e-3,
    "sync_codebook": None,
    "sync_affine_param": False,
    "vq_bridge": None,
    "manual_ema_update": False,
    "in_place_codebook_optimizer": None,
    "manual_in_place_optimizer_update": False,
    "affine_param": False,
    "affine_param_batch_decay": 0.99,
    "affine_param_codebook_decay": 0.9,
    "sync_update_v": 0.0,
    "return_zeros_for_masked_padding": True,
    "route_gradients_to_input": True,
}
VECTOR_QUANTIZE_FORWARD: Mapping[str, Any] = {
    "indices": None,
    "lens": None,
    "topk": None,
    "sample_codebook_temp": None,
    "codebook_transform_fn": None,
    "ema_update_weight": None,
    "accum_ema_update": False,
    "ema_update": None,
}
RESIDUAL_VQ: Mapping[str, Any] = {
    "shared_codebook": False,
    "diveq": False,
    "heads": 1,
    "separate_codebook_per_head": False,
    "implicit_neural_codebook": False,
    "mlp_kwargs": {},
    "beam_size": None,
    "eval_beam_size": None,
    "beam_score_quantizer_weights": None,
    "channel_last": True,
}
RESIDUAL_VQ_FORWARD: Mapping[str, Any] = {"indices": None, "sample_codebook_temp": None, "beam_size": None}


def refuse(where: str, given: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Raise ValueError for a known argument that is not at its default and TypeError for one that nobody knows."""
    for name, value in given.items():
        if name not in known:
            raise TypeError(f"{where}: there is no argument {name!r}")
        if value is not known[name] and value != known[name]:
            raise ValueError(
                f"{where}: {name}={value!r} is not supported, only its default {known[name]!r}; vector-quantize-pytorch has this option"
            )
