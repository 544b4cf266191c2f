"""``VectorQuantize``: a VQ layer with moving-average or learned codewords, a drop-in for vector-quantize-pytorch's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from . import _affine, _distributed
from ._arguments import counts, numbers, refuse_together
from ._choose import Sampling, tally
from ._codebook import Codebook, Weight
from ._codewords import Codewords
from ._losses import LossBreakdown, Orthogonal
from ._quantize import Call, Transform, quantize

__all__ = ["LossBreakdown", "VectorQuantize"]


class VectorQuantize(Codewords):
    """Replace every vector by its nearest codeword, and learn the codewords from what they replace.

    Same constructor names, forward result and state_dict as ``vector_quantize_pytorch.VectorQuantize`` 1.32, on exact fused
    ops: nothing of size N x K, no wait for the device in a step, one message per step under ``torch.distributed``. Only options that
    are about all distances (marked N x K below) hold them.

    Args:
        dim: length of the vectors.
        codebook_size: K, the number of codewords.
        codebook_dim: d, the length of a codeword; where heads * d is not ``dim``, ``project_in`` and ``project_out`` are linear.
        heads: codewords per vector; each head quantises its d of the heads * d elements.
        separate_codebook_per_head: a codebook of its own for each head instead of one for all.
        decay: of the moving averages; a batch enters with 1 - decay.
        eps: Laplace smoothing of the averaged cluster sizes.
        freeze_codebook: never update the codewords; ``forward`` can override it.
        kmeans_init: make the codewords by ``kmeans_iters`` rounds of k-means on the first batch, which must be finite: checked on
            the CPU; on a GPU codewords become NaN. Whether it is the first is what the buffer ``initted`` says; to read it waits for
            the device, once after each change of it.
        kmeans_iters: see there; at least 1 (of the peer, 0 fails in the first batch).
        sync_kmeans: of all processes together, under ``torch.distributed``.
        use_cosine_sim: quantise unit vectors by the angle; the codewords are unit vectors too.
        layernorm_after_project_in: normalise behind ``project_in``, where there is one.
        threshold_ema_dead_code: codewords whose averaged cluster size falls below it are put onto random rows of the batch; 0 = off.
        channel_last: False for ``[B, D, N]`` input.
        accept_image_fmap: ``[B, D, H, W]`` input, read in place.
        accept_3d_fmap: ``[B, D, L, H, W]`` input, likewise.
        commitment_weight: of the mean squared distance between the input and its codeword; with ``learnable_codebook`` its
            gradient also moves the codewords.
        commitment_use_cross_entropy_loss: N x K; cross entropy of minus the distances instead.
        orthogonal_reg_weight: of a loss that keeps codewords apart; makes them a parameter.
        orthogonal_reg_active_codes_only: only those that the batch chose (waits for the device).
        orthogonal_reg_max_codes: of at most so many, drawn.
        codebook_diversity_loss_weight: N x K; of minus the entropy of the mean assignment probabilities.
        codebook_diversity_temperature: the factor of the distances there.
        stochastic_sample_codes: in training, draw codewords with probability softmax(-distance / temperature), in blocks of rows.
        sample_codebook_temp: that temperature; 0 takes the nearest. ``forward`` can override it.
        straight_through: N x K; quantized also gets the gradient of those probabilities (Gumbel softmax).
        rotation_trick: send the gradient to the input turned and scaled as the codeword is, instead of unchanged; the default
            None means True for ``dim`` > 1. The output is the codeword to the bit either way.
        directional_reparam: the output is the input moved by its distance to the codeword in nearly that direction, so that both get a
            gradient (DiVeQ); the codewords are learned, without commitment loss. It needs ``threshold_ema_dead_code``.
        directional_reparam_variance: of the noise on the direction.
        sync_codebook: False keeps the averages of each process to itself; None and True share them under ``torch.distributed``.
        sync_affine_param: take the statistics of ``affine_param`` over all processes.
        ema_update: move the codewords by averages; the default None means unless they are learned.
        vq_bridge: a module that the codewords ``[h, K, d]`` pass before they are searched; it needs ``learnable_codebook``.
        manual_ema_update: only the averages move; ``_codebook.update_ema()`` then sets the codewords.
        learnable_codebook: the codewords are a parameter, moved by the gradient of the loss.
        in_place_codebook_optimizer: makes an optimizer of the codewords' parameters, which steps in ``forward`` towards the batch, with
            the mean of the gradients of all processes; it needs ``learnable_codebook``.
        manual_in_place_optimizer_update: leave its step to ``update_in_place_optimizer()``.
        affine_param: move and scale the codewords to the averaged mean and variance of the batches.
        affine_param_batch_decay, affine_param_codebook_decay: of those averages.
        sync_update_v: quantized passes (1 + v) times its gradient (Huh et al. 2023, eq. 21); it needs ``learnable_codebook``.
        return_zeros_for_masked_padding: False returns the input at masked positions.
        route_gradients_to_input: False sends the gradient of quantized to learned codewords and not to the input.

    Attributes:
        codebook: ``[K, d]``, or ``[heads, K, d]`` with ``separate_codebook_per_head``; assign to it to set the codewords, and with them
            the averages that move them on.
        counts: how often the last forward pass of this process chose each codeword, the shape of the codebook less d, int64.
        perplexity: exp of the entropy of ``counts``; a scalar, or ``[heads]``.
        usage: the share of codewords that ``counts`` holds at least once; likewise.

    Raises:
        ValueError: sizes that do not fit, options that exclude each other.
        TypeError: an argument that nobody knows.

    Departures from the peer, all of them where its result is not what one would want: indices are exact; the output is the
    codeword without the rounding of the rotation, also where the input is zero; ``project_in`` gets its gradient also when
    the input needs none; a mask works with heads and projections, and lens with ``channel_last=False``; codewords stay float32 in a
    model cast to half precision; setting ``codebook`` also sets the averages, else the next step would undo it; ``affine_param`` moves
    its averages in training only. In a checkpointed region, which runs the layer a second time, the codewords are updated once, and the
    second time chooses from those of the first.

    A row that holds NaN takes codeword 0 and quantized is that codeword; the loss is NaN, outside training and without a commitment loss
    too, and the codewords do not move towards the row. What a loss measures of the rows is 0 where there are none, or all are masked.
    Under autocast distances, and codewords that a module makes (``vq_bridge``), stay float32. Reverse-mode first derivatives only: a
    second derivative and forward mode raise; so does ``torch.func.grad``; ``vmap`` fails because the layer writes ``counts``, give it the
    leading dimensions instead.

    Source: van den Oord et al. 2017, "Neural Discrete Representation Learning", eqs. 1-3 and appendix A.1 (moving averages);
    Dhariwal et al. 2020, "Jukebox" (revival); Fifty et al. 2024 (rotation).

    Equivalent to: ``vector_quantize_pytorch.VectorQuantize`` with the same arguments.
    """

    def __init__(
        self,
        dim: int,
        codebook_size: int,
        codebook_dim: int | None = None,
        heads: int = 1,
        separate_codebook_per_head: bool = False,
        decay: float = 0.8,
        eps: float = 1e-5,
        freeze_codebook: bool = False,
        kmeans_init: bool = False,
        kmeans_iters: int = 10,
        sync_kmeans: bool = True,
        use_cosine_sim: bool = False,
        layernorm_after_project_in: bool = False,
        threshold_ema_dead_code: float = 0,
        channel_last: bool = True,
        accept_image_fmap: bool = False,
        accept_3d_fmap: bool = False,
        commitment_weight: float = 1.0,
        commitment_use_cross_entropy_loss: bool = False,
        orthogonal_reg_weight: float = 0.0,
        orthogonal_reg_active_codes_only: bool = False,
        orthogonal_reg_max_codes: int | None = None,
        codebook_diversity_loss_weight: float = 0.0,
        codebook_diversity_temperature: float = 100.0,
        stochastic_sample_codes: bool = False,
        sample_codebook_temp: float = 1.0,
        straight_through: bool = False,
        rotation_trick: bool | None = None,
        directional_reparam: bool = False,
        directional_reparam_variance: float = 5e-3,
        sync_codebook: bool | None = None,
        sync_affine_param: bool = False,
        ema_update: bool | None = None,
        vq_bridge: nn.Module | None = None,
        manual_ema_update: bool = False,
        learnable_codebook: bool | None = None,
        in_place_codebook_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
        manual_in_place_optimizer_update: bool = False,
        affine_param: bool = False,
        affine_param_batch_decay: float = 0.99,
        affine_param_codebook_decay: float = 0.9,
        sync_update_v: float = 0.0,
        return_zeros_for_masked_padding: bool = True,
        route_gradients_to_input: bool = True,
    ) -> None:
        super().__init__()
        codebook_dim = dim if codebook_dim is None else codebook_dim
        dim, codebook_size, codebook_dim, heads, kmeans_iters = counts(
            "VectorQuantize", dim=dim, codebook_size=codebook_size, codebook_dim=codebook_dim, heads=heads, kmeans_iters=kmeans_iters
        )
        numbers("VectorQuantize", 1, decay=decay, affine_param_batch_decay=affine_param_batch_decay)
        numbers("VectorQuantize", 1, sync_update_v=sync_update_v, affine_param_codebook_decay=affine_param_codebook_decay)
        numbers("VectorQuantize", None, eps=eps, commitment_weight=commitment_weight, threshold_ema_dead_code=threshold_ema_dead_code)
        numbers("VectorQuantize", None, orthogonal_reg_weight=orthogonal_reg_weight, sample_codebook_temp=sample_codebook_temp)
        numbers("VectorQuantize", None, codebook_diversity_loss_weight=codebook_diversity_loss_weight)
        if learnable_codebook is None:
            learnable_codebook = directional_reparam or vq_bridge is not None
        ema_update = not learnable_codebook if ema_update is None else ema_update
        if rotation_trick is None:
            rotation_trick = dim > 1 and not directional_reparam
        learnable = bool(learnable_codebook)
        with_optimizer = in_place_codebook_optimizer is not None
        refuse_together(
            "VectorQuantize",
            (learnable and ema_update, "learnable_codebook=True excludes ema_update=True; use one of them"),
            (learnable and use_cosine_sim, "learnable_codebook=True excludes use_cosine_sim=True; use one of them"),
            (learnable and straight_through, "learnable_codebook=True excludes straight_through=True; use one of them"),
            (
                rotation_trick + directional_reparam + straight_through > 1,
                "rotation_trick, directional_reparam and straight_through exclude each other; set rotation_trick=False for another one",
            ),
            (
                directional_reparam and threshold_ema_dead_code == 0,
                "directional_reparam=True leaves codewords behind that no row takes; set threshold_ema_dead_code above 0",
            ),
            (
                not learnable and bool(vq_bridge is not None or sync_update_v or with_optimizer),
                "vq_bridge, sync_update_v and in_place_codebook_optimizer move codewords by gradients; set learnable_codebook=True and"
                " ema_update=False",
            ),
            (affine_param and use_cosine_sim, "affine_param=True moves codewords, which use_cosine_sim=True keeps at length 1; use one"),
            (accept_image_fmap and accept_3d_fmap, "accept_image_fmap and accept_3d_fmap exclude each other"),
            (
                bool(accept_image_fmap or accept_3d_fmap) and not channel_last,
                "accept_image_fmap=True says where the channels are, as accept_3d_fmap=True does; leave channel_last at True",
            ),
            (
                orthogonal_reg_weight > 0 and orthogonal_reg_active_codes_only and separate_codebook_per_head and heads > 1,
                "orthogonal_reg_active_codes_only=True needs one codebook, and separate_codebook_per_head=True has several",
            ),
        )
        self.dim, self.codebook_size, self.codebook_dim, self.heads = dim, codebook_size, codebook_dim, heads
        self.separate_codebook_per_head, self.freeze_codebook = separate_codebook_per_head, freeze_codebook
        self.channel_last, self.accept_image_fmap, self.accept_3d_fmap = channel_last, accept_image_fmap, accept_3d_fmap
        self.use_cosine_sim, self.learnable_codebook = use_cosine_sim, learnable
        self.commitment_weight, self.commitment_use_cross_entropy_loss = commitment_weight, commitment_use_cross_entropy_loss
        self.codebook_diversity_loss_weight = codebook_diversity_loss_weight
        self.codebook_diversity_temperature = codebook_diversity_temperature
        self.sampling = Sampling(sample_codebook_temp, stochastic_sample_codes, straight_through)
        self.rotation_trick, self.directional_reparam = rotation_trick, directional_reparam
        self.directional_reparam_variance, self.sync_update_v = directional_reparam_variance, sync_update_v
        self.return_zeros_for_masked_padding = return_zeros_for_masked_padding
        self.route_gradients_to_input = route_gradients_to_input
        self.orthogonal_reg: Orthogonal | None = None
        if orthogonal_reg_weight > 0:
            self.orthogonal_reg = Orthogonal(orthogonal_reg_weight, orthogonal_reg_active_codes_only, orthogonal_reg_max_codes)

        inner = codebook_dim * heads
        self.has_projections = inner != dim
        self.project_in: nn.Module = nn.Identity()
        self.project_out: nn.Module = nn.Identity()
        if self.has_projections:
            self.project_in, self.project_out = nn.Linear(dim, inner), nn.Linear(inner, dim)
            if layernorm_after_project_in:
                self.project_in = nn.Sequential(self.project_in, nn.LayerNorm(inner))
        self._codebook = Codebook(
            heads if separate_codebook_per_head else 1,
            codebook_size,
            codebook_dim,
            decay=decay,
            eps=eps,
            kmeans_init=kmeans_init,
            kmeans_iters=kmeans_iters,
            cosine=use_cosine_sim,
            threshold=threshold_ema_dead_code,
            learnable=learnable or orthogonal_reg_weight > 0,
            ema_update=ema_update,
            manual_ema_update=manual_ema_update,
            shared=sync_codebook is not False,
            shared_kmeans=sync_kmeans,
            affine=_affine.Decays(affine_param_batch_decay, affine_param_codebook_decay, sync_affine_param) if affine_param else None,
            bridge=vq_bridge,
        )
        self.manual_in_place_optimizer_update = manual_in_place_optimizer_update
        self.in_place_codebook_optimizer: torch.optim.Optimizer | None = None
        if in_place_codebook_optimizer is not None:
            self.in_place_codebook_optimizer = in_place_codebook_optimizer(self._codebook.parameters())

    def extra_repr(self) -> str:
        """The sizes."""
        heads = f", heads={self.heads}" if self.heads > 1 else ""
        return f"dim={self.dim}, codebook_size={self.codebook_size}, codebook_dim={self.codebook_dim}{heads}"

    @property
    def ema_update(self) -> bool:
        """Whether moving averages make the codewords."""
        return self._codebook.ema_update

    # --- forward -----------------------------------------------------------------------------------------------------

    def forward(
        self,
        x: torch.Tensor,
        indices: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        lens: torch.Tensor | None = None,
        topk: int | None = None,
        sample_codebook_temp: float | None = None,
        freeze_codebook: bool | None = None,
        return_loss_breakdown: bool = False,
        codebook_transform_fn: Transform | None = None,
        ema_update_weight: Weight | None = None,
        accum_ema_update: bool = False,
        ema_update: bool | None = None,
    ) -> Any:
        """Quantise x and, in training, update the codewords (not under ``freeze_codebook``).

        Args:
            x: ``[..., dim]`` with at least two dimensions, ``[B, dim, ...]`` for ``channel_last=False``, ``[B, dim, H, W]`` for
                ``accept_image_fmap``, or ``[B, dim, L, H, W]`` for ``accept_3d_fmap``; float32, bfloat16, float16 or float64, any strides.
            indices: N x K; int64 as this layer returns them: ``(quantized, loss)`` is returned then, with the cross entropy of minus the
                distances for these codewords; -1 for none.
            mask: bool, the shape of x less its channels; False marks padding: quantized is 0 there and the index -1, and neither
                loss nor codewords see it. Not for images.
            lens: int ``[B]``, the lengths of sequences, instead of a mask.
            topk: return the k nearest codewords, nearest first, and update nothing; for one head.
            sample_codebook_temp: overrides the constructor's for this call.
            freeze_codebook: overrides the constructor's for this call.
            return_loss_breakdown: also return the unweighted terms of the loss.
            codebook_transform_fn: makes codewords ``[h, K, d]`` into those of each row, ``[h, ..., K, d]`` (QINCo). These are compared by
                plain PyTorch, with N x K x d in memory.
            ema_update_weight: of this batch in the averages, ``[K]`` or ``[h, K]``, or a function of the batch's sums ``[h, K, d]`` and
                cluster sizes ``[h, K]`` that gives it.
            accum_ema_update: add the batch to the next one that does not set this, instead of updating the codewords.
            ema_update: overrides the constructor's for this call.

        Returns:
            ``(quantized, indices, loss)``, and a :class:`LossBreakdown` when asked. quantized has the shape and dtype of x (behind
            projections the dtype that they give); indices are int64, ``[...]`` or ``[..., heads]``; loss is a scalar, float32
            (float64 for float64 x), zero outside training. With ``topk``, quantized is ``[..., k, dim]`` (channels second: ``[B, dim, ...,
            k]``), indices and the loss are ``[..., k]``, the loss also outside training.

        Raises:
            ValueError: a shape that does not fit, or arguments that exclude each other.
            TypeError: x is not floating point or the mask not bool, or an argument that nobody knows.
            RuntimeError: the codewords, or the first batch of ``kmeans_init``, are not finite (checked on the CPU).
        """
        layout = self.layout
        layout.check(x, mask)
        mask = layout.mask_of(x, mask, lens)
        topk = None if topk is None else self._check_topk(topk)
        sampling = self.sampling if sample_codebook_temp is None else self.sampling._replace(temperature=sample_codebook_temp)
        given = self.project_in(layout.inward(x))
        frozen = self.freeze_codebook if freeze_codebook is None else freeze_codebook
        call = Call(mask, frozen, sampling, topk, codebook_transform_fn, indices, ema_update_weight, accum_ema_update, ema_update)
        found = quantize(self, given, call)
        quantized, chosen = self.project_out(found.values), found.indices
        if self.heads == 1 and topk is None:
            chosen = chosen.squeeze(-1)
        if mask is not None:
            kept = mask if topk is None else mask.unsqueeze(-1)
            padding = torch.zeros_like(quantized)
            if not self.return_zeros_for_masked_padding:
                padding = (layout.inward(x) if topk is None else layout.inward(x).unsqueeze(-2)).to(quantized.dtype)
            quantized = torch.where(kept.unsqueeze(-1), quantized, padding)
            chosen = chosen.masked_fill(~(mask if chosen.dim() == mask.dim() else mask.unsqueeze(-1)), -1)
        quantized = layout.outward(quantized, x.dim())
        if indices is not None:
            return quantized, found.cross_entropy
        return (quantized, chosen, found.loss, found.terms) if return_loss_breakdown else (quantized, chosen, found.loss)

    def update_indices(self, x: torch.Tensor, indices: torch.Tensor, mask: torch.Tensor | None = None) -> None:
        """Update the codewords as if ``forward`` had chosen these indices for x; for those that ``topk`` left alone.

        Args:
            x, mask: as for ``forward``.
            indices: int64 as ``forward`` returns them; -1 counts for codeword 0 unless it is masked, as in the peer.

        In a backward pass, where a checkpointed region runs again, it does nothing.
        """
        book = self._codebook
        if not book.tracks() or (not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1):
            return
        layout = self.layout
        layout.check(x, mask)
        with torch.no_grad():
            given = self.project_in(layout.inward(x))
            rows = self._unit(given) if book.cosine else given
            chosen = indices.reshape(*rows.shape[:-1], self.heads).clamp(min=0)
            codes = book.codes[0] if len(book.embed) == 1 else book.codes
            kept = (rows, chosen) if mask is None else (rows[mask], chosen[mask])
            book.update(*tally(kept[0], codes, kept[1]), rows, mask)

    update_ema_indices = update_indices

    def expire_codes_(self, x: torch.Tensor) -> None:
        """Put dead codewords onto rows of x ``[..., heads * codebook_dim]``, channels last."""
        self._codebook.expire(self._unit(x) if self.use_cosine_sim else x)

    def update_in_place_optimizer(self) -> None:
        """Step the codewords' own optimizer with the mean of the gradients of all processes.

        Raises:
            RuntimeError: it holds other parameters than the layer, whose codewords were replaced behind it.
        """
        if self.in_place_codebook_optimizer is None:
            return
        held = (parameter for group in self.in_place_codebook_optimizer.param_groups for parameter in group["params"])
        if not any(parameter is self._codebook.embed for parameter in held):
            raise RuntimeError(
                "VectorQuantize: in_place_codebook_optimizer holds codewords that were replaced, as load_state_dict(assign=True) or "
                "to_empty() does; make it anew: layer.in_place_codebook_optimizer = torch.optim.SGD(layer._codebook.parameters(), lr)"
            )
        _distributed.average_gradients(list(self._codebook.parameters()), self._codebook.shared)
        self.in_place_codebook_optimizer.step()
        self.in_place_codebook_optimizer.zero_grad()

    def _learning(self, frozen: bool) -> bool:
        """Whether the commitment loss moves the codewords."""
        weighted = self.commitment_weight > 0 and not self.directional_reparam
        return self.training and not frozen and self.learnable_codebook and weighted

    def _unit(self, x: torch.Tensor) -> torch.Tensor:
        """Every head's vector scaled to length 1, in float32: half precision would leave it off by 2^-9."""
        split = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(-1, (self.heads, self.codebook_dim))
        return nn.functional.normalize(split, dim=-1, eps=1e-6).flatten(-2)

    def _check_topk(self, topk: int) -> int:
        (topk,) = counts("VectorQuantize", topk=topk)
        in_training = self.commitment_use_cross_entropy_loss or self.in_place_codebook_optimizer is not None
        refuse_together(
            "VectorQuantize",
            (self.heads > 1, "topk is for one head"),
            (
                self.training and in_training,
                "topk excludes commitment_use_cross_entropy_loss and in_place_codebook_optimizer in training",
            ),
        )
        return min(topk, self.codebook_size)
