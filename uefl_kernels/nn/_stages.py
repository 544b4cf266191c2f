"""Run the quantizers of a ``ResidualVQ`` as one ``rvq`` if their options allow it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .._checks import needs_gradient
from .._snapshot import snapshots
from ..ops.rvq import RVQOutput, composed, run
from ._codebook import Codebook, leave_inference_mode, refuse_vmap, set_counts, update_all
from ._model_cut import altered
from ._shared import HALF
from .vector_quantize import VectorQuantize


class Stages:
    """Several quantizers that run as one ``rvq``, with the same bits as one quantizer after the other."""

    def __init__(self, layers: Sequence[VectorQuantize], frozen: bool | None) -> None:
        self.first, self.layers = layers[0], layers
        self.codebooks: list[Codebook] = [layer._codebook for layer in layers]
        self.training = self.first.training
        self.frozen = self.first.freeze_codebook if frozen is None else frozen
        self.tracked = [codebook.training and codebook.tracks() for codebook in self.codebooks]
        self.updated = not self.frozen and any(self.tracked)

    def fit(self, start: torch.Tensor) -> bool:
        """Return True if one op gives the same result as the quantizers one by one for this input."""
        leave_inference_mode(self.codebooks)
        alike = _options(self.first)
        for layer, codebook in zip(self.layers, self.codebooks, strict=True):
            elsewhere = codebook.embed.device != start.device  # the quantizer says so in its error
            if _options(layer) != alike or not _plain(layer, codebook) or elsewhere:
                return False
        if self.updated and (_may_run_again() or not all(self.tracked)):
            return False
        # otherwise the gradient of quantized differs from the gradient of the op
        learned = [codebook.embed for codebook in self.codebooks if codebook.embed.requires_grad]
        return self._routed(start) or not learned or not self._needs_gradient(learned)

    def quantize(self, start: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the sum of the codewords, indices ``[..., q]`` and losses ``[q]``.

        Updates the codewords.
        """
        learning = self.first._learning(self.frozen)
        codebooks = [codebook.embed for codebook in self.codebooks]
        if self.updated:
            if torch._C._functorch.is_batchedtensor(start):
                refuse_vmap(self.codebooks[0])
            codebooks = snapshots(codebooks)
        if not learning:
            codebooks = [codebook.detach() for codebook in codebooks]
        out, sums = run(
            composed.Arguments(
                start,
                codebooks,
                metric="l2",
                exact=True,
                with_sums=self.updated or (learning and self._needs_gradient(codebooks)),
                codebook_weight=float(learning),
                commitment_weight=1.0,
                rotation=self.first.rotation_trick,
            )
        )
        set_counts(self.codebooks, out.counts)
        if self.updated:
            self._update(start.detach(), [codebook.detach() for codebook in codebooks], out, sums)
        total = out.quantized if self._routed(start) else out.quantized.detach()
        return total, out.indices.squeeze(-2), self._weighted(out.losses, learning)

    @staticmethod
    def _needs_gradient(codebooks: Sequence[torch.Tensor]) -> bool:
        return needs_gradient(*codebooks, traced=not torch.compiler.is_compiling())

    def _routed(self, start: torch.Tensor) -> bool:
        """Return True if the gradient of the codewords goes to the input."""
        return self.training and start.requires_grad and self.first.route_gradients_to_input

    def _update(
        self, start: torch.Tensor, codebooks: list[torch.Tensor], out: RVQOutput, sums: Sequence[torch.Tensor]
    ) -> None:
        """Move the codewords by the averages.

        Residuals are for the revival of dead codewords.
        """
        rows = [start] * len(codebooks)
        if any(codebook.threshold_ema_dead_code > 0 for codebook in self.codebooks):
            rows = list(composed.residuals(start, codebooks, out.indices))
        update_all(self.codebooks, out.counts, sums, rows)

    def _weighted(self, losses: torch.Tensor, learning: bool) -> torch.Tensor:
        """Return the weighted losses.

        Without a commitment loss they are zero, or NaN for NaN.
        """
        weight = self.first.commitment_weight
        if not self.training or weight == 0:
            losses = losses.detach()
            return torch.where(losses.isnan(), losses, 0.0)
        return (losses - losses.detach() / 2 if learning else losses) * weight


def _options(layer: VectorQuantize) -> tuple[Any, ...]:
    """Return the options that all stages of the op share."""
    return (
        *(layer.training, layer.rotation_trick, layer.route_gradients_to_input),
        *(layer.learnable_codebook, layer.commitment_weight, layer.freeze_codebook),
    )


def _plain(layer: VectorQuantize, codebook: Codebook) -> bool:
    """Return True if this quantizer only runs ``vq`` and updates moving averages."""
    return (
        type(layer) is VectorQuantize
        and type(codebook) is Codebook
        and not (layer.has_projections or layer.cosine_search or layer.codebook_loss_weight is not None)
        and layer.channel_last
        and not (
            layer.accept_image_fmap
            or layer.accept_3d_fmap
            or layer.directional_reparam
            or layer.sync_update_v
            or codebook._use_cosine_sim
            or codebook._affine_param
            or altered(layer)
            or altered(codebook)
            or ((layer.training or codebook.training) and _measured(layer))
        )
        and layer.in_place_codebook_optimizer is None
        and codebook.vq_bridge is None
        and codebook.embed_avg.dtype not in HALF  # the codebook would restore these values
        and not codebook.waiting
    )


def _measured(layer: VectorQuantize) -> bool:
    """Return True if training asks for other codewords than the nearest, or for other losses."""
    return bool(
        layer.stochastic_sample_codes
        or layer.straight_through
        or layer.commitment_use_cross_entropy_loss
        or layer.codebook_diversity_loss_weight
        or layer.orthogonal_reg_weight
    )


def _may_run_again() -> bool:
    """Return True in a region that a backward pass may run again, and in its second run."""
    if torch.compiler.is_compiling():  # there a checkpointed region saves the codewords itself
        return False
    return (
        not torch.is_grad_enabled()  # as in a reentrant checkpoint
        or torch._C._current_graph_task_id() != -1
        or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    )
