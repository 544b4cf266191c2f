"""``VectorQuantize``: a VQ layer with moving-average or learned codewords.

The layer replaces the layer of vector-quantize-pytorch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from .. import VQOutput, vq, vq_with_sums
from .._checks import refuse_forward_mode
from .._gather import flat_indices, gather, take_along
from .._snapshot import snapshot
from ..metrics import entropy
from . import _distributed, _losses, _search
from ._codebook import Codebook, Coder, UpdateWeight, refuse_vmap, set_counts, without_single_head
from ._losses import LossBreakdown
from ._recompute import put, runs_again
from ._search import Sampling
from ._shared import (
    Layout,
    absent,
    as_indices,
    at_least_float32,
    by_codebook,
    counts,
    differentiable,
    directional,
    fixed,
    numbers,
    project,
    refuse_together,
    rotate,
    straight_through,
    unit_length,
    without_padding,
)

__all__ = ["LossBreakdown", "VectorQuantize"]

Transform = Callable[[torch.Tensor], torch.Tensor]


class ForwardOptions(NamedTuple):
    """The arguments of one call of ``forward`` besides its input."""

    mask: torch.Tensor | None
    frozen: bool
    sampling: Sampling
    topk: int | None
    transform: Transform | None
    targets: torch.Tensor | None
    weight: UpdateWeight | None
    accumulate: bool
    ema: bool | None


class Assignment(NamedTuple):
    """The indices of codewords, ``[..., heads]`` or ``[..., k]``, and the other results of their search."""

    codebook: torch.Tensor  # as the ops take it, [K, d] or [h, K, d]
    indices: torch.Tensor
    counts: torch.Tensor
    sums: torch.Tensor | None
    output: VQOutput | None  # of the op, if the op has chosen
    values: torch.Tensor | None  # the chosen codewords, otherwise
    near: torch.Tensor | None  # distances [h, n, K], if a loss or a choice needs them

    def codewords(self) -> torch.Tensor:
        """Return ``[..., heads * d]`` or ``[..., k, d]``, with a gradient if codewords are learned."""
        if self.output is None:
            assert self.values is not None
            return self.values
        return (
            gather(self.codebook, self.indices).flatten(-2)
            if self.codebook.requires_grad
            else self.output.quantized.detach()
        )


class Quantized(NamedTuple):
    """The result of a quantization.

    It has values ``[..., heads * d]`` or ``[..., k, d]``, indices, the weighted loss, its terms, and the
    cross entropy of targets.
    """

    values: torch.Tensor
    indices: torch.Tensor
    loss: torch.Tensor
    terms: LossBreakdown
    cross_entropy: torch.Tensor | None


def _of_codebook(name: str) -> Any:
    """Make a property that reads and sets an attribute of the codebook."""
    return property(
        lambda layer: getattr(layer._codebook, name),
        lambda layer, value: setattr(layer._codebook, name, value),
    )


class VectorQuantize(Coder):
    """Replace every vector by its nearest codeword, and learn the codewords from the vectors.

    The arguments, the result of ``forward`` and the state_dict are the same as in
    ``vector_quantize_pytorch.VectorQuantize`` 1.32. The ops are exact and fused: a step stores nothing of
    size N x K, does not wait for the device, and sends one message under ``torch.distributed``. Only the
    options marked N x K below store all distances.

    Args:
        dim: length of the vectors.
        codebook_size: K, the number of codewords.
        codebook_dim: d, the length of a codeword; if heads * d is not ``dim``, ``project_in`` and
            ``project_out`` are linear.
        heads: codewords per vector; each head quantizes its d of the heads * d elements.
        separate_codebook_per_head: each head has its own codebook; by default, all heads share one.
        decay: decay of the moving averages; a batch has the weight 1 - decay.
        eps: Laplace smoothing of the averaged cluster sizes.
        freeze_codebook: never update the codewords; ``forward`` can override it.
        kmeans_init: make the codewords by ``kmeans_iters`` iterations of k-means on the first batch. If the
            batch is not finite, the call raises RuntimeError on the CPU, and the codewords become NaN on a
            GPU. The flag ``initted`` is read after each change, with one synchronization of a GPU.
        kmeans_iters: iterations of ``kmeans_init``, at least 1.
        sync_kmeans: run ``kmeans_init`` on the rows of all processes, under ``torch.distributed``.
        use_cosine_sim: quantize unit vectors by the angle; the codewords have length 1 too.
        layernorm_after_project_in: normalize the result of ``project_in``, if it is linear.
        threshold_ema_dead_code: codewords with an averaged cluster size below this number move to random rows
            of the batch; 0 = off.
        channel_last: False for ``[B, D, N]`` input; feature maps have their channels in the second dimension
            in any case.
        accept_image_fmap: ``[B, D, H, W]`` input, read in place.
        accept_3d_fmap: ``[B, D, L, H, W]`` input, read in place.
        commitment_weight: weight of the mean squared distance between the input and its codeword; with
            ``learnable_codebook`` its gradient also moves the codewords.
        commitment_use_cross_entropy_loss: N x K; the commitment loss is the cross entropy of the negative
            distances instead.
        orthogonal_reg_weight: weight of a loss that keeps codewords apart; with a weight above 0, the
            codewords are a parameter.
        orthogonal_reg_active_codes_only: this loss uses only codewords that the batch chose.
        orthogonal_reg_max_codes: this loss uses at most this number of codewords, drawn at random.
        codebook_diversity_loss_weight: N x K; weight of the negative entropy of the mean assignment
            probabilities.
        codebook_diversity_temperature: factor of the distances in the diversity loss.
        stochastic_sample_codes: in training, draw codewords with probability softmax(-distance /
            temperature), in blocks of rows.
        sample_codebook_temp: temperature of ``stochastic_sample_codes``; 0 takes the nearest. ``forward`` can
            override it.
        straight_through: N x K; the gradient of quantized also goes through the probabilities of
            ``stochastic_sample_codes`` (Gumbel softmax).
        rotation_trick: in the backward pass, the codeword is the input times a fixed rotation and a fixed
            factor; False: the gradient of quantized goes to the input unchanged. None, the default, means
            True for ``dim`` > 1. The output is always the exact codeword.
        directional_reparam: the output is the input plus a step to the codeword in nearly the exact
            direction, so the input and the codeword get a gradient (DiVeQ); the codewords are learned,
            without a commitment loss. It needs ``threshold_ema_dead_code``.
        directional_reparam_variance: variance of the noise on the direction.
        sync_codebook: None and True: all processes share the averages, under ``torch.distributed``. False:
            each process has its own averages.
        sync_affine_param: compute the statistics of ``affine_param`` over all processes.
        ema_update: move the codewords by averages; None, the default, means True unless the codewords are
            learned.
        vq_bridge: a module that maps the codewords ``[h, K, d]`` before the search; it needs
            ``learnable_codebook``.
        manual_ema_update: ``forward`` updates only the averages; call ``_codebook.update_ema()`` to set the
            codewords.
        learnable_codebook: the codewords are a parameter, moved by the gradient of the loss.
        in_place_codebook_optimizer: a function that makes an optimizer from the parameters of the codewords.
            ``forward`` runs a step of this optimizer towards the batch, with the mean of the gradients of all
            processes. It needs ``learnable_codebook`` or ``orthogonal_reg_weight``. It breaks the graph of
            ``torch.compile``, so ``fullgraph=True`` raises an error.
        manual_in_place_optimizer_update: ``forward`` does not run the step of this optimizer; call
            ``update_in_place_optimizer()`` instead.
        affine_param: move and scale the codewords to the averaged mean and variance of the batches.
        affine_param_batch_decay, affine_param_codebook_decay: decays of the averages of ``affine_param``.
        sync_update_v: the gradient of quantized is multiplied by 1 + v (Huh et al. 2023, eq. 21); it needs
            ``learnable_codebook``.
        return_zeros_for_masked_padding: False returns the input at masked positions.
        route_gradients_to_input: False sends the gradient of quantized to learned codewords and not to the
            input.
        cosine_search: choose the codeword by the angle, but keep the lengths of codewords and input, unlike
            ``use_cosine_sim`` (DAC). Not an argument of the peer.
        codebook_loss_weight: weight of the mean squared distance in the gradient of learned codewords;
            ``commitment_weight``, which must be above 0 then, is the weight in the gradient of the input
            only. None: ``commitment_weight`` is the weight in both gradients. Not an argument of the peer.

    Attributes:
        codebook: ``[K, d]``, or ``[heads, K, d]`` with ``separate_codebook_per_head``; an assignment sets the
            codewords and their averages.
        counts: how often the last forward pass of this process chose each codeword, ``[K]`` or ``[heads,
            K]``, int64.
        perplexity: exp of the entropy of ``counts``; a scalar, or ``[heads]``.
        usage: the share of codewords that were chosen at least once; a scalar, or ``[heads]``.

    Raises:
        ValueError: sizes that do not fit, options that exclude each other.
        TypeError: an unknown argument.

    Departures from the peer: indices are exact; the output is the codeword without the rounding of the
    rotation, also where the input is zero; ``project_in`` gets its gradient also if the input needs no
    gradient; a mask works with heads and projections, and lens with ``channel_last=False``; codewords stay
    float32 in a model that is cast to half precision, and decoding returns vectors in the dtype of the model;
    setting ``codebook`` also sets the averages, because otherwise the next step would undo the change;
    ``affine_param`` moves its averages in training only. A checkpointed region runs the layer twice. The
    codewords are updated once, and both runs choose from the same codewords.

    A row with NaN takes codeword 0, and quantized is codeword 0. The loss is then NaN, also in evaluation and
    without a commitment loss. The row does not change the codewords. A loss over no rows, or over masked rows
    only, is 0. Under autocast, distances stay float32, and codewords that a module makes (``vq_bridge``),
    too. Only first derivatives in reverse mode exist: second derivatives, forward mode and
    ``torch.func.grad`` raise an error. ``vmap`` works in evaluation and does not change ``counts``.

    Source: van den Oord et al. 2017, "Neural Discrete Representation Learning", eqs. 1-3 and appendix A.1
    (moving averages); Dhariwal et al. 2020, "Jukebox" (revival); Fifty et al. 2024 (rotation).

    Equivalent to: ``vector_quantize_pytorch.VectorQuantize`` with the same arguments.
    """

    channel_last: bool
    accept_image_fmap: bool
    accept_3d_fmap: bool
    freeze_codebook: bool
    manual_in_place_optimizer_update: bool
    return_zeros_for_masked_padding: bool
    rotation_trick: bool
    directional_reparam: bool
    directional_reparam_variance: float
    route_gradients_to_input: bool
    codebook_loss_weight: float | None
    sync_update_v: float
    stochastic_sample_codes: bool
    straight_through: bool
    commitment_weight: float
    commitment_use_cross_entropy_loss: bool
    codebook_diversity_loss_weight: float
    codebook_diversity_temperature: float
    orthogonal_reg_active_codes_only: bool
    orthogonal_reg_max_codes: int | None
    project_in: nn.Module
    project_out: nn.Module
    _codebook: Codebook
    in_place_codebook_optimizer: torch.optim.Optimizer | None

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
        cosine_search: bool = False,
        codebook_loss_weight: float | None = None,
    ) -> None:
        options = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        super().__init__()
        options |= _checked(options)
        for name in _ATTRIBUTES:
            setattr(self, name, options[name])
        for name in _SIZES:
            setattr(self, f"_{name}", options[name])
        self._make_projections(layernorm_after_project_in)
        self._make_codebook(options)

    def _make_projections(self, layernorm: bool) -> None:
        """Make ``project_in`` and ``project_out``, linear if the sizes differ."""
        inner = self.codebook_dim * self.heads
        self.project_in, self.project_out = nn.Identity(), nn.Identity()
        if inner != self.dim:
            self.project_in, self.project_out = nn.Linear(self.dim, inner), nn.Linear(inner, self.dim)
            if layernorm:
                self.project_in = nn.Sequential(self.project_in, nn.LayerNorm(inner))

    def _make_codebook(self, options: dict[str, Any]) -> None:
        """Make the codebook, and the optimizer that moves it if one is given."""
        self._codebook = Codebook(
            options["codebook_dim"],
            options["codebook_size"],
            self.heads if self.separate_codebook_per_head else 1,
            learnable_codebook=self.learnable_codebook or options["orthogonal_reg_weight"] > 0,
            use_ddp=options["sync_codebook"] is not False,
            **{name: options[name] for name in _OF_CODEBOOK},
        )
        self.orthogonal_reg_weight = options["orthogonal_reg_weight"]
        make_optimizer = options["in_place_codebook_optimizer"]
        self.in_place_codebook_optimizer = (
            None if make_optimizer is None else make_optimizer(self._codebook.parameters())
        )

    def extra_repr(self) -> str:
        """Return the sizes."""
        heads = f", heads={self.heads}" if self.heads > 1 else ""
        return f"dim={self.dim}, codebook_size={self.codebook_size}, codebook_dim={self.codebook_dim}{heads}"

    # --- attributes of a built layer -----------------------------------------------------------------------

    (
        decay,
        eps,
        kmeans_iters,
        sync_kmeans,
        threshold_ema_dead_code,
        sample_codebook_temp,
        manual_ema_update,
    ) = map(
        _of_codebook,
        (
            "decay",
            "eps",
            "kmeans_iters",
            "sync_kmeans",
            "threshold_ema_dead_code",
            "sample_codebook_temp",
            "manual_ema_update",
        ),
    )
    affine_param_batch_decay, affine_param_codebook_decay, sync_affine_param, sync_codebook = map(
        _of_codebook,
        ("affine_param_batch_decay", "affine_param_codebook_decay", "sync_affine_param", "use_ddp"),
    )

    @property
    def ema_update(self) -> bool:
        """Return True if moving averages make the codewords.

        ``_codebook.ema_update`` may be set.
        """
        return self._codebook.ema_update

    @property
    def orthogonal_reg_weight(self) -> float:
        """Return the weight of the loss that keeps codewords apart.

        The loss needs codewords that are a parameter.
        """
        return self._orthogonal_reg_weight

    @orthogonal_reg_weight.setter
    def orthogonal_reg_weight(self, weight: float) -> None:
        numbers("VectorQuantize", None, orthogonal_reg_weight=weight)
        if weight > 0 and not self._codebook.learnable_codebook:
            raise ValueError(
                f"VectorQuantize: orthogonal_reg_weight = {weight} needs codewords that are a parameter, but"
                " in this layer they are a buffer; make the layer with orthogonal_reg_weight above 0"
            )
        self._orthogonal_reg_weight = weight

    dim = fixed("dim", lambda layer: layer._dim, "Length of the vectors.")
    codebook_dim = fixed("codebook_dim", lambda layer: layer._codebook_dim, "Length of a codeword.")
    heads = fixed("heads", lambda layer: layer._heads, "Codewords per vector.")
    separate_codebook_per_head = fixed(
        "separate_codebook_per_head",
        lambda layer: layer._separate_codebook_per_head,
        "True if each head has its own codebook.",
    )
    learnable_codebook = fixed(
        "learnable_codebook", lambda layer: layer._learnable_codebook, "True if gradients move the codewords."
    )
    zero, maybe_split_heads_from_input = map(absent, ("zero", "maybe_split_heads_from_input"))
    codebook_size = fixed("codebook_size", lambda layer: layer._codebook.codebook_size, "K.")
    use_cosine_sim = fixed(
        "use_cosine_sim",
        lambda layer: layer._codebook.use_cosine_sim,
        "True if vectors are compared by the angle.",
    )
    cosine_search = fixed(
        "cosine_search",
        lambda layer: layer._codebook.cosine_search,
        "True if codewords of any length are compared by the angle.",
    )
    affine_param = fixed(
        "affine_param",
        lambda layer: layer._codebook.affine_param,
        "True if the codewords follow the mean and variance of the batches.",
    )
    kmeans_init = fixed(
        "kmeans_init",
        lambda layer: layer._codebook.kmeans_init,
        "True if k-means on the first batch makes the codewords; ``_codebook.initted`` is True after this.",
    )
    has_projections = fixed(
        "has_projections",
        lambda layer: not isinstance(layer.project_in, nn.Identity),
        "True if ``project_in`` and ``project_out`` are linear.",
    )
    has_commitment_loss = fixed(
        "has_commitment_loss",
        lambda layer: layer.commitment_weight > 0 and not layer.directional_reparam,
        "True if the loss has a commitment term; follows ``commitment_weight``.",
    )
    has_codebook_orthogonal_loss = fixed(
        "has_codebook_orthogonal_loss",
        lambda layer: layer.orthogonal_reg_weight > 0,
        "True if the loss keeps codewords apart; follows ``orthogonal_reg_weight``.",
    )
    has_codebook_diversity_loss = fixed(
        "has_codebook_diversity_loss",
        lambda layer: layer.codebook_diversity_loss_weight > 0,
        "True if the loss spreads assignments; follows ``codebook_diversity_loss_weight``.",
    )

    @property
    def bits_per_vector(self) -> float:
        """Return the bits of the indices of a vector, heads * log2(K)."""
        return float(self.heads * math.log2(self.codebook_size))

    @property
    def layout(self) -> Layout:
        """Return the place of the channels in the input."""
        spatial = 2 if self.accept_image_fmap else 3 if self.accept_3d_fmap else 0
        return Layout("VectorQuantize", self.dim, self.channel_last, spatial)

    # --- forward -------------------------------------------------------------------------------------------

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
        ema_update_weight: UpdateWeight | None = None,
        accum_ema_update: bool = False,
        ema_update: bool | None = None,
    ) -> Any:
        """Quantize x and, in training, update the codewords unless ``freeze_codebook`` is True.

        Args:
            x: ``[..., dim]`` with at least two dimensions, ``[B, dim, ...]`` for ``channel_last=False``,
                ``[B, dim, H, W]`` for ``accept_image_fmap``, or ``[B, dim, L, H, W]`` for ``accept_3d_fmap``;
                float32, bfloat16, float16 or float64, any strides.
            indices: N x K; target codewords, int64 as this layer returns indices; -1 for no target. Then the
                result is ``(quantized, loss)``, and loss is the cross entropy of the negative distances for
                these targets.
            mask: bool, the shape of x without its channels; False marks padding. There, quantized is 0 and
                the index is -1, and the padding affects neither the loss nor the codewords. Not for images.
            lens: int ``[B]``, the lengths of sequences, instead of a mask.
            topk: return the k nearest codewords, from near to far, and update nothing; only with one head.
            sample_codebook_temp: replaces the value of the constructor in this call.
            freeze_codebook: replaces the value of the constructor in this call.
            return_loss_breakdown: also return the unweighted terms of the loss.
            codebook_transform_fn: a function from codewords ``[h, K, d]`` to codewords ``[h, ..., K, d]``,
                with own codewords for each row (QINCo). Plain PyTorch compares each row with its codewords,
                with N x K x d elements in memory.
            ema_update_weight: weight of this batch in the averages, ``[K]`` or ``[h, K]``, or a function that
                returns this weight for the sums ``[h, K, d]`` and the cluster sizes ``[h, K]`` of the batch.
            accum_ema_update: do not update the codewords; add this batch to the next batch that is passed
                without this option.
            ema_update: replaces the value of the constructor in this call.

        Returns:
            ``(quantized, indices, loss)``, and a :class:`LossBreakdown` with ``return_loss_breakdown``.
            quantized has the shape and dtype of x (after projections, the dtype of the projections); indices
            are int64, ``[...]`` or ``[..., heads]``; loss is a scalar, float32 (float64 for float64 x), zero
            outside training. With ``topk``, quantized is ``[..., k, dim]`` (channels second: ``[B, dim, ...,
            k]``), indices and the loss are ``[..., k]``, the loss also outside training.

        Raises:
            ValueError: a shape that does not fit, or arguments that exclude each other.
            TypeError: x is not floating point or the mask not bool, or an unknown argument.
            RuntimeError: the codewords, or the first batch of ``kmeans_init``, are not finite (checked on the
                CPU).
        """
        # 1. Check the arguments and make the mask of the lengths.
        layout = self.layout
        layout.check(x, mask)
        mask = layout.mask_of(x, mask, lens)
        indices = None if indices is None else self._targets(indices, layout.inward(x))
        topk = None if topk is None else self._check_topk(topk)
        temperature = (
            self._codebook.sample_codebook_temp if sample_codebook_temp is None else sample_codebook_temp
        )
        random = temperature > 0
        sampling = Sampling(
            temperature, random and self.stochastic_sample_codes, random and self.straight_through
        )
        frozen = self.freeze_codebook if freeze_codebook is None else freeze_codebook
        call = ForwardOptions(
            mask,
            frozen,
            sampling,
            topk,
            codebook_transform_fn,
            indices,
            ema_update_weight,
            accum_ema_update,
            ema_update,
        )

        # 2. Project. Between the projections, choose codewords, update them and measure the losses.
        x = layout.inward(x)
        found: Quantized = self._codebook(
            self.project_in(x if mask is None else without_padding(x, mask)), self._quantize, call
        )
        quantized, chosen = self.project_out(found.values), found.indices

        # 3. Fill in the padding, and move the channels back.
        loss = found.loss
        if self.training and not loss.requires_grad:
            loss = differentiable(loss)
        if self.heads == 1 and topk is None:
            chosen = chosen.squeeze(-1)
        if mask is not None:
            quantized, chosen = self._fill_padding(x, quantized, chosen, mask, topk)
        quantized = layout.outward(quantized, x.dim())
        if indices is not None:
            return quantized, found.cross_entropy
        return (quantized, chosen, loss, found.terms) if return_loss_breakdown else (quantized, chosen, loss)

    def _targets(self, indices: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return indices as int64, or raise ValueError if they are not one for each head of each vector."""
        indices = self._indices(indices)
        expected = [*x.shape[:-1], *([self.heads] if self.heads > 1 else [])]
        if indices.numel() != math.prod(expected):
            raise ValueError(f"VectorQuantize: indices must have shape {expected}, got {list(indices.shape)}")
        return indices

    def _fill_padding(
        self,
        x: torch.Tensor,
        quantized: torch.Tensor,
        indices: torch.Tensor,
        mask: torch.Tensor,
        topk: int | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return quantized with zeros, or the input, and indices with -1, where the mask is False."""
        kept = mask if topk is None else mask.unsqueeze(-1)
        padding = torch.zeros_like(quantized)
        if not self.return_zeros_for_masked_padding:
            padding = (x if topk is None else x.unsqueeze(-2)).to(quantized.dtype)
        quantized = torch.where(kept.unsqueeze(-1), quantized, padding)
        masked = ~(mask if indices.dim() == mask.dim() else mask.unsqueeze(-1))
        return quantized, indices.masked_fill(masked, -1)

    def _quantize(self, given: torch.Tensor, call: ForwardOptions) -> Quantized:
        """Quantize ``[..., heads * d]``, the channels last, and update the codewords.

        The call and the options of the layer select the updates.
        """
        codebook, mask = self._codebook, call.mask

        # 1. Mask. The padding is zero before a projection, but not after it, so set it to zero here.
        rows = self._unit(given) if codebook.use_cosine_sim else given
        if self.has_projections:
            rows = without_padding(rows, mask)

        # 2. Read the codewords before this batch moves them.
        waiting = codebook.waiting
        optimizing = (
            self.training
            and self.in_place_codebook_optimizer is not None
            and any(parameter.requires_grad for parameter in codebook.parameters())
        )
        # here, or with topk in update_indices; as in the peer, codebook.eval() stops the averages of a layer
        # in training
        tracked = codebook.training and codebook.tracks(call.ema)
        updated = not call.frozen and (optimizing or tracked)
        changing = updated and call.topk is None
        if (updated or waiting) and torch._C._functorch.is_batchedtensor(rows):
            refuse_vmap(codebook)
        if waiting:
            codebook.initialize(rows, mask)
        # if it is not None, a checkpointed region runs this pass for the second time
        before = codebook.memory.recall(rows) if updated else None
        if codebook.training and codebook.affine_param and before is None:
            codebook.update_affine(rows, mask)
        in_place = None
        if changing and optimizing and before is None:
            in_place = self._optimize(rows, call)
        affine = codebook.affine
        if before is not None:
            codewords, affine = put(codebook.embed, before[0]), before[1]
        else:  # a copy if codewords change in place: the backward pass needs the chosen ones
            codewords = snapshot(codebook.embed) if updated else codebook.embed
            if updated:
                codebook.memory.note(rows, (codewords.detach(), affine))

        # 3. Choose.
        # also in the second run of a checkpointed region, which must save the same tensors as the first run
        summed = changing and not optimizing
        chosen = self._choose(rows, codebook.transformed(codewords, affine), call, summed and tracked)

        # 4. Update; the zeros of the padding have added nothing to the sums.
        if before is None and call.topk is None:
            set_counts([codebook], [_counts_without_padding(chosen, mask).view_as(codebook.counts)])
            if summed:
                self._update(rows, chosen, call)
        elif summed and chosen.sums is not None:
            codebook.skip_update(rows.detach(), mask, call.accumulate)

        # 5. Route the gradient of quantized, and compute the losses.
        values = self._route(rows, chosen, call).to(given.dtype)
        loss, terms = self._loss(given, rows, chosen, call, in_place)
        targets = None
        if call.targets is not None and chosen.near is not None:
            targets = _losses.cross_entropy(chosen.near, self._by_codebook(call.targets, given))
        return Quantized(values, chosen.indices, loss, terms, targets)

    # --- choosing ------------------------------------------------------------------------------------------

    def _choose(
        self, rows: torch.Tensor, codebook: torch.Tensor, call: ForwardOptions, summed: bool
    ) -> Assignment:
        """Choose codewords by the op, or by another search if the options need it."""
        drawn = (call.sampling.drawn or call.sampling.soft) and self._codebook.training
        measured = call.targets is not None or (
            self.training and (self.has_codebook_diversity_loss or self.commitment_use_cross_entropy_loss)
        )
        if call.topk is not None or call.transform is not None or drawn:
            return self._choose_by_distances(rows, codebook, call, summed, measured)
        op_codebook = without_single_head(codebook)
        near = (
            _search.distances(*self._searched(rows, codebook), self._codebook.metric == "cosine")
            if measured
            else None
        )
        learning = self._learning(call.frozen)
        weight = self._pull if learning and call.mask is None else 0.0
        out, sums = self._run_op(rows, op_codebook if learning else op_codebook.detach(), weight, summed)
        return Assignment(op_codebook, out.indices, out.counts, sums, out, None, near)

    def _run_op(
        self, rows: torch.Tensor, codebook: torch.Tensor, codebook_weight: float, summed: bool
    ) -> tuple[VQOutput, torch.Tensor | None]:
        """Run the op, with the sums of the rows of each codeword if ``summed`` is true."""
        found = (vq_with_sums if summed else vq)(
            rows,
            codebook,
            metric=self._codebook.metric,
            codebook_weight=codebook_weight,
            commitment_weight=1.0,
            estimator="rotation" if self.rotation_trick else "straight_through",
        )
        return found if summed else (found, None)  # type: ignore[return-value]

    def _choose_by_distances(
        self, rows: torch.Tensor, codebook: torch.Tensor, call: ForwardOptions, summed: bool, measured: bool
    ) -> Assignment:
        """Choose several codewords per row, draw codewords, or search a separate codebook for each row."""
        refuse_forward_mode("VectorQuantize", rows, codebook)
        cosine, k = self._codebook.metric == "cosine", call.topk
        sampling = call.sampling
        if not self._codebook.training:
            sampling = sampling._replace(drawn=False, soft=False)
        split, searched = self._searched(rows, codebook)
        near, own = None, None
        if call.transform is not None:
            own = call.transform(codebook)
            # In a compiled program, a comparison would fix the number of rows.
            traced = isinstance(own, torch.Tensor) and torch.compiler.is_compiling()
            if not traced and (
                not isinstance(own, torch.Tensor) or own.shape[1:-2].numel() != split.shape[1]
            ):
                got = list(own.shape) if isinstance(own, torch.Tensor) else type(own).__name__
                raise ValueError(
                    "VectorQuantize: codebook_transform_fn must return a tensor [h, ..., K, d], with"
                    f" codewords for each of {split.shape[1]} rows, got {got}"
                )
            own = own.flatten(1, -3)
            own = F.normalize(own, dim=-1, eps=1e-6) if self.use_cosine_sim else own
            near = _search.own_distances(
                split, F.normalize(own, dim=-1) if self.cosine_search else own, cosine
            )
        elif sampling.soft or measured:
            near = _search.distances(split, searched, cosine)
        if own is None and not sampling.drawn:
            indices = _search.nearest(split.detach(), searched.detach(), cosine, 1 if k is None else k)
            indices = indices.squeeze(-1) if k is None else indices
        elif near is not None:
            indices = _search.draw(near.detach(), sampling, k)
        else:
            indices = _search.draw_in_blocks(split, searched, cosine, sampling, k)
        where = indices if k is not None else indices.unsqueeze(-1)  # [h, n, k]
        candidates = codebook.unsqueeze(1).expand(-1, indices.shape[1], -1, -1) if own is None else own
        taken = take_along(candidates, where.unsqueeze(-1), 2)
        if sampling.soft and near is not None:
            share = (near / sampling.temperature).softmax(-1)
            share = (share - share.detach()).unsqueeze(-2)
            taken = taken + share @ (codebook.unsqueeze(1) if own is None else own).to(share.dtype)
        merged, found = self._from_codebooks(taken, rows), self._from_codebooks(where, rows)
        op_codebook = without_single_head(codebook)
        if k is not None:  # one head
            found, counted = found.squeeze(-2), _search.count(op_codebook, found.squeeze(-2))
            return Assignment(op_codebook, found, counted, None, None, merged.squeeze(-3), near)
        found = found.squeeze(-1)
        sums = None
        if summed:
            counted, sums = _search.count_and_sum(rows, op_codebook, found)
        else:
            counted = _search.count(op_codebook, found)
        return Assignment(op_codebook, found, counted, sums, None, merged.flatten(-3), near)

    def _searched(self, rows: torch.Tensor, codebook: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows ``[h, n, d]`` and the codewords as they are compared.

        They have one dtype, and length 1 for ``cosine_search``.
        """
        split = self._split(rows, codebook)
        dtype = torch.promote_types(split.dtype, codebook.dtype)
        split, codebook = split.to(dtype), codebook.to(dtype)
        return (
            (F.normalize(split, dim=-1), F.normalize(codebook, dim=-1))
            if self.cosine_search
            else (split, codebook)
        )

    def _split(self, rows: torch.Tensor, codebook: torch.Tensor) -> torch.Tensor:
        """Reshape rows ``[..., heads * d]`` to ``[h, n, d]``, at least float32."""
        return by_codebook(at_least_float32(rows), len(codebook), codebook.shape[2])

    def _by_codebook(self, indices: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        """Reshape indices as the caller has them to ``[h, n]``."""
        indices = indices.reshape(*given.shape[:-1], self.heads)
        return by_codebook(indices, len(self._codebook.embed), 1).squeeze(-1)

    def _from_codebooks(self, values: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Reshape ``[h, n, ...]`` in the order of ``by_codebook`` to ``[..., heads, ...]``."""
        lead, extra = rows.shape[:-1], values.shape[2:]
        if len(values) > 1:
            return values.view(self.heads, *lead, *extra).movedim(0, len(lead))
        return values.view(lead[0], self.heads, *lead[1:], *extra).movedim(1, len(lead))

    def _unit(self, x: torch.Tensor) -> torch.Tensor:
        """Scale the vector of every head to length 1, in float32.

        In half precision, the error would be 2^-9.
        """
        split = at_least_float32(x).unflatten(-1, (self.heads, self.codebook_dim))  # type: ignore[no-untyped-call]
        return unit_length(split).flatten(-2)

    def _learning(self, frozen: bool) -> bool:
        """Return True if the commitment loss moves the codewords."""
        return self.training and not frozen and self.learnable_codebook and self.has_commitment_loss

    @property
    def _pull(self) -> float:
        """Return the factor of the gradient of codewords in the commitment loss.

        The input has factor 1.
        """
        weight = self.codebook_loss_weight
        return 1.0 if weight is None else weight / self.commitment_weight

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
        return min(topk, int(self.codebook_size))

    # --- updating ------------------------------------------------------------------------------------------

    def _update(self, rows: torch.Tensor, chosen: Assignment, call: ForwardOptions) -> None:
        """Move the codewords by the averages, if the batch was summed."""
        if chosen.sums is not None:
            counted = _counts_without_padding(chosen, call.mask)
            options: dict[str, Any] = {"weight": call.weight, "accumulate": call.accumulate, "ema": call.ema}
            self._codebook.update(counted, chosen.sums, rows.detach(), call.mask, **options)

    def _optimize(self, rows: torch.Tensor, call: ForwardOptions) -> torch.Tensor:
        """Step the optimizer of the codewords towards the rows, and return its loss.

        Also update the other state of the codebook.
        """
        if torch.is_inference_mode_enabled():
            raise RuntimeError(
                "VectorQuantize: in_place_codebook_optimizer needs a gradient, and inference_mode has"
                " none; use torch.no_grad, or call eval() or freeze_codebook=True"
            )
        codebook, rows = self._codebook, rows.detach()
        if not self.manual_in_place_optimizer_update:
            self._clear_gradients()
        # The hooks of a checkpointed region would run the whole region again for this backward pass.
        with (
            torch.enable_grad(),
            torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor),
        ):
            chosen = self._choose(
                rows,
                codebook.transformed(snapshot(codebook.embed)),
                call._replace(targets=None),
                codebook.training and codebook.tracks(call.ema),
            )
            finite = rows.isfinite().all(-1, keepdim=True)  # as for averages
            error = (chosen.codewords() - at_least_float32(rows)).masked_fill(~finite, 0)
            loss = _losses.mean_square(error, call.mask)
            # The gradient goes only to the codewords, because the transform may belong to the graph of
            # earlier quantizers.
            own = [parameter for parameter in codebook.parameters() if parameter.requires_grad]
            loss.backward(  # type: ignore[no-untyped-call]
                inputs=own, retain_graph=call.transform is not None
            )
        self._update(rows, chosen, call)
        if not self.manual_in_place_optimizer_update:
            self.update_in_place_optimizer()
        return loss.detach()

    def _clear_gradients(self) -> None:
        """Clear gradients of the caller's losses, which the codewords' own optimizer must not take.

        A ``GradScaler`` may have scaled them.
        """
        if self.in_place_codebook_optimizer is not None:
            self.in_place_codebook_optimizer.zero_grad()

    def update_in_place_optimizer(self) -> None:
        """Step the codewords' own optimizer with the mean of the gradients of all processes.

        Raises:
            RuntimeError: the optimizer holds other parameters than the layer, because the codewords of the
                layer were replaced later.
        """
        if self.in_place_codebook_optimizer is None:
            return
        self._codebook._require_whole()
        held = (
            parameter
            for group in self.in_place_codebook_optimizer.param_groups
            for parameter in group["params"]
        )
        if not any(parameter is self._codebook.embed for parameter in held):
            raise RuntimeError(
                "VectorQuantize: in_place_codebook_optimizer holds codewords that were replaced, as"
                " load_state_dict(assign=True) or to_empty() does; create it again:"
                " layer.in_place_codebook_optimizer = torch.optim.SGD(layer._codebook.parameters(), lr)"
            )
        _distributed.average_gradients(list(self._codebook.parameters()), self._codebook.use_ddp)
        self.in_place_codebook_optimizer.step()
        self.in_place_codebook_optimizer.zero_grad()

    def update_indices(
        self, x: torch.Tensor, indices: torch.Tensor, mask: torch.Tensor | None = None
    ) -> None:
        """Update the codewords as if ``forward`` had chosen these indices for x.

        Call it after ``topk``, which updates nothing.

        In a backward pass, when a checkpointed region runs again, the method does nothing.

        Args:
            x: as for ``forward``.
            indices: int64 as ``forward`` returns them; -1 counts for codeword 0 unless it is masked, as in
                the peer.
            mask: as for ``forward``.
        """
        indices = self._indices(indices)
        if not self._codebook.tracks() or runs_again():
            return
        layout = self.layout
        layout.check(x, mask)
        with torch.no_grad():
            given = self.project_in(layout.inward(x))
            self._codebook(
                self._unit(given) if self.use_cosine_sim else given,
                self._codebook.update_indices,
                indices,
                mask,
            )

    update_ema_indices = update_indices

    def expire_codes_(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> None:
        """Replace dead codewords by rows of x ``[..., heads * codebook_dim]``, in training.

        Channels are last. Only rows with True in a mask ``[...]`` are taken.
        """
        self._codebook.expire(self._unit(x) if self.use_cosine_sim else x, mask)

    # --- gradients and losses ------------------------------------------------------------------------------

    def _route(self, rows: torch.Tensor, chosen: Assignment, call: ForwardOptions) -> torch.Tensor:
        """Choose where the gradient of quantized goes.

        In training, it goes to the input if the input needs a gradient, otherwise to learned codewords.
        """
        values = None
        if self.training and rows.requires_grad and self.route_gradients_to_input:
            x = rows if call.topk is None else rows.unsqueeze(-2)
            if self.directional_reparam:
                excluded = "rotation_trick and directional_reparam exclude each other; set one to False"
                refuse_together("VectorQuantize", (self.rotation_trick, excluded))
                variance = self.directional_reparam_variance
                values = self._by_head(x, chosen.codewords(), lambda a, b: directional(a, b, variance))
            elif chosen.output is not None:
                values = chosen.output.quantized
            elif self.rotation_trick:
                values = self._by_head(x, chosen.codewords(), rotate)
            else:
                values = straight_through(x, chosen.codewords())
        values = chosen.codewords() if values is None else values
        if self.training and self.sync_update_v > 0:
            values = values + self.sync_update_v * (values - values.detach())
        return values

    def _by_head(
        self,
        x: torch.Tensor,
        codewords: torch.Tensor,
        apply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        heads = (-1, (self.heads, self.codebook_dim))
        return apply(x.unflatten(*heads), codewords.unflatten(*heads)).flatten(-2)

    def _loss(
        self,
        given: torch.Tensor,
        rows: torch.Tensor,
        chosen: Assignment,
        call: ForwardOptions,
        in_place: torch.Tensor | None,
    ) -> tuple[torch.Tensor, LossBreakdown]:
        """Return the weighted loss and its terms."""
        commitment = self._commitment(given, rows, chosen, call)
        diversity = orthogonal = zero = given.new_zeros((), dtype=torch.float32)
        weighted = self.training or call.topk is not None
        loss = (
            commitment * (self.commitment_weight if self.commitment_weight > 0 else 1.0)
            if weighted
            else commitment
        )
        if self.codebook_loss_weight is not None and self._learning(call.frozen):
            loss = loss + self.codebook_loss_weight * commitment.detach()
        if self.training and self.has_codebook_diversity_loss and chosen.near is not None:
            kept = (
                None
                if call.mask is None
                else self._by_codebook(call.mask.unsqueeze(-1).expand(chosen.indices.shape), given)
            )
            diversity = _losses.diversity(
                chosen.near, kept, math.prod(given.shape[1:-1]), self.codebook_diversity_temperature
            )
            loss = loss + diversity * self.codebook_diversity_loss_weight
        if self.training and self.has_codebook_orthogonal_loss:
            active = self.orthogonal_reg_active_codes_only
            used = _counts_without_padding(chosen, call.mask) > 0 if active else None
            codebook = snapshot(self._codebook.embed)
            orthogonal = _losses.orthogonal(codebook, used, self.orthogonal_reg_max_codes)
            loss = loss + orthogonal * self.orthogonal_reg_weight
        return loss, LossBreakdown(commitment, diversity, orthogonal, zero if in_place is None else in_place)

    def _commitment(
        self, given: torch.Tensor, rows: torch.Tensor, chosen: Assignment, call: ForwardOptions
    ) -> torch.Tensor:
        """Return the mean squared distance to the codewords where the mask is True.

        Without a commitment loss, return zero, or NaN if a row has NaN.
        """
        out, mask = chosen.output, call.mask
        learning = self._learning(call.frozen)
        dtype = torch.float64 if given.dtype == torch.float64 else torch.float32
        if call.topk is not None and (self.has_commitment_loss or not self.training):
            target = self._target(chosen, learning) if self.training else chosen.codewords()
            error = (rows.to(dtype).unsqueeze(-2) - target.to(dtype)).square().mean(-1)
            return error if mask is None else error.masked_fill(~mask.unsqueeze(-1), 0)
        if not self.training or not self.has_commitment_loss:
            loss = (rows.sum() if out is None else out.loss).detach()
            return torch.where(loss.isnan(), loss, 0.0).to(dtype)
        if self.commitment_use_cross_entropy_loss:
            assert chosen.near is not None
            indices = chosen.indices if mask is None else chosen.indices.masked_fill(~mask.unsqueeze(-1), -1)
            return _losses.cross_entropy(chosen.near, self._by_codebook(indices, given))
        if mask is None and out is not None:
            # The op adds this mean once for the input and once for the codewords. The peer has one loss with
            # both gradients.
            pull = self._pull
            return out.loss - out.loss.detach() * (pull / (1 + pull)) if learning else out.loss
        # With a mask the peer measures the distance to the original input, even if it quantizes unit
        # vectors.
        target = self._target(chosen, learning)
        return _losses.mean_square((rows if mask is None else given).to(dtype) - target.to(dtype), mask)

    def _target(self, chosen: Assignment, learning: bool) -> torch.Tensor:
        """Return the codewords that were chosen, with the gradient that the loss gives to them."""
        codewords = chosen.codewords()
        fixed = codewords.detach()
        if not learning:
            return fixed
        return codewords if self._pull == 1 else fixed + self._pull * (codewords - fixed)

    # --- views of the codebook, and from indices to codewords ----------------------------------------------

    @property
    def codebook(self) -> torch.Tensor:
        """Return the codewords, ``[K, d]`` or ``[heads, K, d]``.

        Setting the codewords also sets their averages.
        """
        return self._codebook.embed if self.separate_codebook_per_head else self._codebook.embed[0]

    @codebook.setter
    def codebook(self, codebook: torch.Tensor) -> None:
        if not isinstance(codebook, torch.Tensor):
            raise TypeError(f"VectorQuantize: codebook must be a torch.Tensor, got {type(codebook).__name__}")
        if codebook.shape != self.codebook.shape:
            raise ValueError(
                f"VectorQuantize: codebook must have shape {list(self.codebook.shape)}, got"
                f" {list(codebook.shape)}"
            )
        self._codebook.assign(codebook if self.separate_codebook_per_head else codebook.unsqueeze(0))

    @property
    def counts(self) -> torch.Tensor:
        """Return the number of times that the last forward pass of this process chose each codeword.

        The shape is ``[K]`` or ``[heads, K]``.
        """
        return self._codebook.counts if self.separate_codebook_per_head else self._codebook.counts[0]

    @property
    def perplexity(self) -> torch.Tensor:
        """Return exp of the entropy of ``counts``.

        The value is 1 if one codeword takes all rows or the batch is empty, and K if all codewords are used
        equally.
        """
        share = self.counts.float() / self.counts.sum(-1, keepdim=True).clamp(min=1)
        return entropy(share).exp()

    @property
    def usage(self) -> torch.Tensor:
        """Return the share of codewords that the last forward pass chose at least once, from 0 to 1."""
        return (self.counts > 0).float().mean(-1)

    def get_codes_from_indices(self, indices: torch.Tensor) -> torch.Tensor:
        """Return the codewords of indices as ``forward`` returns them.

        Return zeros for the index -1 of a masked position.

        Args:
            indices: integers of any width ``[...]``, or ``[..., heads]``.

        Returns:
            ``[..., d]``; ``[..., heads, d]`` for heads that share a codebook, ``[..., heads * d]`` if each
            has its own. If the input has its channels in the second dimension, so has the result.
        """
        return self._codebook.as_model(self._float32_codes(indices))

    def _float32_codes(self, indices: torch.Tensor) -> torch.Tensor:
        codewords: torch.Tensor = self._codebook(self._indices(indices), self._gather)
        if self.heads > 1 and not self.separate_codebook_per_head:
            codewords = codewords.unflatten(-1, (self.heads, -1))  # type: ignore[no-untyped-call]
        return self.layout.outward(codewords, codewords.dim())

    def get_output_from_indices(self, indices: torch.Tensor) -> torch.Tensor:
        """Return what ``forward`` returns as quantized for these indices.

        This includes projections and several heads.
        """
        indices = self._indices(indices)
        output = project(self.project_out, self._codebook.as_model(self._codebook(indices, self._gather)))
        masked = (indices if self.heads == 1 else indices[..., 0]) < 0
        output = output.masked_fill(masked.unsqueeze(-1), 0)
        return self.layout.outward(output, output.dim())

    def _indices(self, indices: torch.Tensor) -> torch.Tensor:
        return as_indices("VectorQuantize", indices, least=-1, size=self.codebook_size)

    def _gather(self, indices: torch.Tensor) -> torch.Tensor:
        """Return codewords ``[..., heads * d]`` of int64 indices as returned."""
        if self.heads == 1:
            indices = indices.unsqueeze(-1)
        elif indices.dim() == 0 or indices.shape[-1] != self.heads:
            raise ValueError(
                f"VectorQuantize: indices must have shape [..., {self.heads}] for {self.heads} heads, got"
                f" {list(indices.shape)}"
            )
        codebook = without_single_head(self._codebook.searched)
        return gather(codebook, indices.clamp(min=0)).masked_fill((indices < 0).unsqueeze(-1), 0).flatten(-2)


def _counts_without_padding(chosen: Assignment, mask: torch.Tensor | None) -> torch.Tensor:
    """Count how often each codeword was chosen where the mask is True."""
    if mask is None:
        return chosen.counts
    padding = (~mask).unsqueeze(-1).expand_as(chosen.indices).reshape(-1).long()
    where = flat_indices(chosen.counts.unsqueeze(-1), chosen.indices)
    masked = torch.zeros(chosen.counts.numel(), dtype=torch.int64, device=padding.device)
    masked = masked.scatter_add(0, where, padding)  # not in place, for vmap
    return chosen.counts - masked.view(chosen.counts.shape)


# --- options of the constructor ---------------------------------------------------------------------------

_ATTRIBUTES = (  # options that the layer keeps and reads in every call
    *("channel_last", "accept_image_fmap", "accept_3d_fmap", "freeze_codebook"),
    *("manual_in_place_optimizer_update", "return_zeros_for_masked_padding"),
    *(
        "rotation_trick",
        "directional_reparam",
        "directional_reparam_variance",
        "route_gradients_to_input",
        "codebook_loss_weight",
        "sync_update_v",
    ),
    *(
        "stochastic_sample_codes",
        "straight_through",
        "commitment_weight",
        "commitment_use_cross_entropy_loss",
    ),
    *("codebook_diversity_loss_weight", "codebook_diversity_temperature"),
    *("orthogonal_reg_active_codes_only", "orthogonal_reg_max_codes"),
)
# options that are fixed when the layer is made
_SIZES = ("dim", "codebook_dim", "heads", "separate_codebook_per_head", "learnable_codebook")
_OF_CODEBOOK = (  # options that the codebook keeps
    *(
        "decay",
        "eps",
        "kmeans_init",
        "kmeans_iters",
        "sync_kmeans",
        "use_cosine_sim",
        "cosine_search",
        "threshold_ema_dead_code",
    ),
    *("sample_codebook_temp", "ema_update", "manual_ema_update", "vq_bridge"),
    *("affine_param", "affine_param_batch_decay", "affine_param_codebook_decay", "sync_affine_param"),
)


def _checked(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that are counts, or whose default depends on other options.

    Raise ValueError for an option that is not valid.
    """
    sizes = {
        name: options[name] for name in ("dim", "codebook_size", "codebook_dim", "heads", "kmeans_iters")
    }
    if sizes["codebook_dim"] is None:
        sizes["codebook_dim"] = sizes["dim"]
    found: dict[str, Any] = dict(zip(sizes, counts("VectorQuantize", **sizes), strict=True))
    for most, names in (
        (1, ("decay", "affine_param_batch_decay", "sync_update_v", "affine_param_codebook_decay")),
        (
            None,
            (
                "eps",
                "commitment_weight",
                "threshold_ema_dead_code",
                "orthogonal_reg_weight",
                "sample_codebook_temp",
            ),
        ),
        (None, ("codebook_diversity_loss_weight",)),
        (None, () if options["codebook_loss_weight"] is None else ("codebook_loss_weight",)),
    ):
        numbers("VectorQuantize", most, **{name: options[name] for name in names})
    learnable, ema, rotation = options["learnable_codebook"], options["ema_update"], options["rotation_trick"]
    if learnable is None:
        learnable = options["directional_reparam"] or options["vq_bridge"] is not None
    found["learnable_codebook"] = bool(learnable)
    found["ema_update"] = not learnable if ema is None else ema
    found["rotation_trick"] = (
        found["dim"] > 1 and not options["directional_reparam"] if rotation is None else rotation
    )
    _refuse_conflicts(options | found)
    return found


def _refuse_conflicts(given: dict[str, Any]) -> None:
    """Raise ValueError for options that exclude each other, or need others."""
    _refuse_of_gradients(given)
    _refuse_of_losses(given)
    cosine, maps = given["use_cosine_sim"], (given["accept_image_fmap"], given["accept_3d_fmap"])
    refuse_together(
        "VectorQuantize",
        (
            given["affine_param"] and cosine,
            "affine_param=True moves codewords, which use_cosine_sim=True keeps at length 1; use one of them",
        ),
        (
            cosine and given["cosine_search"],
            "use_cosine_sim=True already compares by the angle; omit cosine_search",
        ),
        (all(maps), "accept_image_fmap and accept_3d_fmap exclude each other"),
    )


def _refuse_of_gradients(given: dict[str, Any]) -> None:
    """Raise ValueError for conflicts of options for learned codewords and for gradient estimators."""
    learnable, directed = given["learnable_codebook"], given["directional_reparam"]
    optimized = given["in_place_codebook_optimizer"] is not None and given["orthogonal_reg_weight"] == 0
    refuse_together(
        "VectorQuantize",
        (
            learnable and given["ema_update"],
            "learnable_codebook=True excludes ema_update=True; use one of them",
        ),
        (
            learnable and given["use_cosine_sim"],
            "learnable_codebook=True excludes use_cosine_sim=True; use only one of them, or cosine_search",
        ),
        (
            learnable and given["straight_through"],
            "learnable_codebook=True excludes straight_through=True; use one of them",
        ),
        (
            sum(map(bool, (given["rotation_trick"], directed, given["straight_through"]))) > 1,
            (
                "rotation_trick, directional_reparam and straight_through exclude each other; set"
                " rotation_trick=False to use another one"
            ),
        ),
        (
            directed and given["threshold_ema_dead_code"] == 0,
            (
                "directional_reparam=True leaves codewords behind that no row takes; set"
                " threshold_ema_dead_code above 0"
            ),
        ),
        (
            not learnable and (given["vq_bridge"] is not None or given["sync_update_v"] > 0 or optimized),
            (
                "vq_bridge, sync_update_v and in_place_codebook_optimizer move codewords by gradients; set"
                " learnable_codebook=True and ema_update=False (in_place_codebook_optimizer: or"
                " orthogonal_reg_weight above 0)"
            ),
        ),
    )


def _refuse_of_losses(given: dict[str, Any]) -> None:
    """Raise ValueError for a loss without the options that it needs."""
    active = given["orthogonal_reg_weight"] > 0 and given["orthogonal_reg_active_codes_only"]
    other = given["directional_reparam"] or given["commitment_use_cross_entropy_loss"]
    separable = given["learnable_codebook"] and given["commitment_weight"] > 0 and not other
    refuse_together(
        "VectorQuantize",
        (
            given["codebook_loss_weight"] is not None and not separable,
            (
                "codebook_loss_weight needs learnable_codebook=True and commitment_weight above 0, and"
                " excludes directional_reparam and commitment_use_cross_entropy_loss"
            ),
        ),
        (
            active and given["separate_codebook_per_head"] and given["heads"] > 1,
            (
                "orthogonal_reg_active_codes_only=True needs one codebook, but"
                " separate_codebook_per_head=True makes several"
            ),
        ),
    )
