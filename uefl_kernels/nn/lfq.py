"""``LFQ``, ``ResidualLFQ`` and ``GroupedResidualLFQ``: take the sign of every element."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from .._checks import check_dense
from ..ops.lfq_entropy import lfq_entropy
from ..ops.lfq_entropy.composed import place_values, signs
from . import _distributed
from ._codebook import Coder
from ._shared import (
    ConstantBuffers,
    MethodCall,
    absent,
    as_indices,
    channels_last,
    check_codebooks,
    counts,
    fixed,
    in_a_call,
    no_autocast,
    random_rotation,
    refuse_together,
    straight_through,
)
from .fsq import GroupedScalar, ResidualScalarQuantizer


class LFQOutput(NamedTuple):
    """Quantized vectors, their indices, and the weighted loss."""

    quantized: torch.Tensor
    indices: torch.Tensor
    entropy_aux_loss: torch.Tensor


class LFQLosses(NamedTuple):
    """Unweighted terms of the loss."""

    per_sample_entropy: torch.Tensor
    batch_entropy: torch.Tensor
    commitment: torch.Tensor


class CosineSimLinear(nn.Module):
    """Multiply unit vectors ``[..., dim_in]`` by the unit columns of a weight ``[dim_in, dim_out]``."""

    def __init__(self, dim_in: int, dim_out: int, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.weight = nn.Parameter(torch.randn(dim_in, dim_out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``[..., dim_out]``, each element from ``-scale`` to ``scale``."""
        return F.normalize(x, dim=-1) @ F.normalize(self.weight, dim=0) * self.scale


class LFQ(ConstantBuffers, Coder):
    """Quantize every element of a vector to its sign, and keep the indices spread by an entropy loss.

    The loss compares every vector with all K codewords in training: N x K in memory.

    Args:
        dim: length of the vectors; ``num_codebooks * log2(codebook_size)`` by default.
        codebook_size: K, a power of two; ``2 ** dim`` by default.
        entropy_loss_weight: weight of the entropy loss.
        commitment_loss_weight: weight of the mean squared distance of the input to its codeword.
        diversity_gamma: weight of the batch's entropy within the entropy loss.
        straight_through_activation: a module that the gradient passes.
        num_codebooks: parts of a vector, each with an index.
        keep_num_codebooks_dim: keep the last dimension of the indices for one codebook too.
        codebook_scale: codewords have elements plus and minus this.
        frac_per_sample_entropy: share of the vectors that the entropy loss takes, drawn at random.
        has_projections: force or leave out the projections; by default, where sizes differ.
        projection_has_bias: whether the projections have a bias.
        soft_clamp_input_value: bound of the input, by tanh; at least ``codebook_scale``.
        cosine_sim_project_in: project unit vectors by unit columns.
        cosine_sim_project_in_scale: factor of that projection; ``codebook_scale`` by default.
        channel_first: ``[B, dim, ...]`` input; by default for four or more dimensions.
        experimental_softplus_entropy_loss: pass the entropy loss through softplus.
        entropy_loss_offset: shift before softplus.
        spherical: scale vectors and codewords to the length ``codebook_scale``.
        force_quantization_f32: quantize in float32.
        orthogonal_rotation: rotate by a fixed random rotation before quantization, and back after it.

    Raises:
        ValueError: sizes that do not fit, or options that exclude each other.

    Source: Yu et al. 2023, "Language Model Beats Diffusion: Tokenizer is Key to Visual Generation", eqs. 3-5;
        Zhao et al. 2024, "Binary Spherical Quantization" (``spherical``).

    Equivalent to: ``vector_quantize_pytorch.LFQ`` 1.32 with the same arguments, which also loads its
        state_dict. A mask ``[B, N]`` and several processes are counted correctly here.
    """

    mask: torch.Tensor
    _codewords: torch.Tensor
    orthogonal_rot: torch.Tensor
    project_in: nn.Module
    project_out: nn.Module

    def __init__(
        self,
        *,
        dim: int | None = None,
        codebook_size: int | None = None,
        entropy_loss_weight: float = 0.1,
        commitment_loss_weight: float = 0.0,
        diversity_gamma: float = 1.0,
        straight_through_activation: nn.Module | None = None,
        num_codebooks: int = 1,
        keep_num_codebooks_dim: bool | None = None,
        codebook_scale: float = 1.0,
        frac_per_sample_entropy: float = 1.0,
        has_projections: bool | None = None,
        projection_has_bias: bool = True,
        soft_clamp_input_value: float | None = None,
        cosine_sim_project_in: bool = False,
        cosine_sim_project_in_scale: float | None = None,
        channel_first: bool | None = None,
        experimental_softplus_entropy_loss: bool = False,
        entropy_loss_offset: float = 5.0,
        spherical: bool = False,
        force_quantization_f32: bool = True,
        orthogonal_rotation: bool = False,
    ) -> None:
        super().__init__()
        if codebook_size is None:
            if dim is None:
                raise ValueError("LFQ: give dim or codebook_size")
            codebook_size = 2 ** counts("LFQ", dim=dim)[0]
        codebook_size, num_codebooks = counts("LFQ", codebook_size=codebook_size, num_codebooks=num_codebooks)
        self._bits, self._num_codebooks = codebook_size.bit_length() - 1, num_codebooks
        self._keep = num_codebooks > 1 if keep_num_codebooks_dim is None else keep_num_codebooks_dim
        self._codebook_scale, self._orthogonal_rotation = codebook_scale, orthogonal_rotation
        self._check_options(codebook_size, frac_per_sample_entropy, soft_clamp_input_value)
        (self._dim,) = counts("LFQ", dim=self._bits * num_codebooks if dim is None else dim)
        self.channel_first, self.spherical = channel_first, spherical
        self.activation = (
            nn.Identity() if straight_through_activation is None else straight_through_activation
        )
        self.frac_per_sample_entropy, self.diversity_gamma = frac_per_sample_entropy, diversity_gamma
        self.entropy_loss_weight, self.commitment_loss_weight = entropy_loss_weight, commitment_loss_weight
        self.soft_clamp_input_value, self.entropy_loss_offset = soft_clamp_input_value, entropy_loss_offset
        self.experimental_softplus_entropy_loss = experimental_softplus_entropy_loss
        self.force_quantization_f32 = force_quantization_f32
        scale = codebook_scale if cosine_sim_project_in_scale is None else cosine_sim_project_in_scale
        self._make_projections(has_projections, projection_has_bias, scale if cosine_sim_project_in else None)
        if orthogonal_rotation:
            self.register_buffer("orthogonal_rot", random_rotation(self._bits))
        self._register_constants()
        self.register_buffer("mask", self._buffers["mask"])  # part of the state, as in the peer

    def _check_options(self, codebook_size: int, share: float, clamp: float | None) -> None:
        """Raise ValueError for a codebook that bits cannot number, and for values out of range."""
        refuse_together(
            "LFQ",
            (
                codebook_size != 2**self._bits or self._bits == 0,
                f"codebook_size={codebook_size} must be a power of 2, as {2 ** (self._bits + 1)}",
            ),
            (
                self._num_codebooks > 1 and not self._keep,
                f"num_codebooks={self._num_codebooks} needs keep_num_codebooks_dim=True",
            ),
            (not 0 < share <= 1, f"frac_per_sample_entropy={share} must be above 0 and at most 1"),
            (
                clamp is not None and clamp < self._codebook_scale,
                f"soft_clamp_input_value={clamp} must be at least codebook_scale={self._codebook_scale}",
            ),
        )

    def _make_projections(self, wanted: bool | None, bias: bool, cosine_scale: float | None) -> None:
        """Make ``project_in`` and ``project_out``, by default if the sizes differ."""
        inner = self._bits * self._num_codebooks
        self.project_in, self.project_out = nn.Identity(), nn.Identity()
        if self._dim != inner if wanted is None else wanted:
            self.project_in = (
                nn.Linear(self._dim, inner, bias=bias)
                if cosine_scale is None
                else CosineSimLinear(self._dim, inner, cosine_scale)
            )
            self.project_out = nn.Linear(inner, self._dim, bias=bias)

    def _constants(self, device: torch.device | None = None) -> dict[str, torch.Tensor | None]:
        codewords = signs(self._bits, torch.float32, device) * self._codebook_scale
        return {"_codewords": codewords, "mask": place_values(self._bits, device)}

    def extra_repr(self) -> str:
        """Return the sizes."""
        return f"dim={self.dim}, codebook_size={self.codebook_size}, num_codebooks={self.num_codebooks}"

    dim = fixed("dim", lambda layer: layer._dim, "Length of the vectors.")
    codebook_dim = fixed("codebook_dim", lambda layer: layer._bits, "Length of a codeword, log2(K).")
    codebook_size = fixed("codebook_size", lambda layer: 2**layer._bits, "K.")
    codebook_scale = fixed("codebook_scale", lambda layer: layer._codebook_scale, "Size of an element.")
    num_codebooks = fixed("num_codebooks", lambda layer: layer._num_codebooks, "Parts of a vector.")
    keep_num_codebooks_dim = fixed(
        "keep_num_codebooks_dim", lambda layer: layer._keep, "True if indices are [..., num_codebooks]."
    )
    orthogonal_rotation = fixed(
        "orthogonal_rotation", lambda layer: layer._orthogonal_rotation, "True if vectors are rotated."
    )
    has_projections = fixed(
        "has_projections",
        lambda layer: not isinstance(layer.project_in, nn.Identity),
        "True if project_in and project_out are linear.",
    )
    zero = absent("zero")
    codebook = fixed("codebook", lambda layer: layer._codewords, "Codewords ``[K, bits]``.")
    dtype = fixed("dtype", lambda layer: layer._codewords.dtype, "Dtype of the codewords.")

    @property
    def bits_per_vector(self) -> float:
        """Return the bits of the indices of a vector."""
        return float(self._bits * self._num_codebooks)

    def maybe_l2norm(self, x: torch.Tensor) -> torch.Tensor:
        """Scale vectors to the length ``codebook_scale`` where the layer is ``spherical``."""
        return F.normalize(x, dim=-1) * self._codebook_scale if self.spherical else x

    def bits_to_codes(self, bits: torch.Tensor) -> torch.Tensor:
        """Map bits 0 and 1 to minus and plus ``codebook_scale``."""
        return bits * self._codebook_scale * 2 - self._codebook_scale

    def _bits_of(self, indices: torch.Tensor) -> torch.Tensor:
        return indices.unsqueeze(-1).bitwise_and(self._constant("mask")) != 0

    @in_a_call
    def _codes(self, indices: torch.Tensor) -> torch.Tensor:
        """Return codewords ``[..., d]`` of indices ``[...]``, rotated and in the dtype of the model."""
        indices = as_indices("LFQ", indices, least=0, size=self.codebook_size)
        codewords = self.maybe_l2norm(self.bits_to_codes(self._bits_of(indices).to(self._model_dtype)))
        return codewords @ self.orthogonal_rot.t() if self.orthogonal_rotation else codewords

    def indices_to_codes(self, indices: torch.Tensor, project_out: bool = True) -> torch.Tensor:
        """Return what ``forward`` returns as quantized for these indices, integers of any width."""
        indices = as_indices("LFQ", indices)
        if self._keep:
            check_codebooks("LFQ", indices, self.num_codebooks)
        image = indices.dim() >= 3 + int(self._keep) if self.channel_first is None else self.channel_first
        codewords = self._codes(indices if self._keep else indices.unsqueeze(-1)).flatten(-2)
        if project_out:
            codewords = self.project_out(codewords)
        return codewords.movedim(-1, 1) if image else codewords

    get_output_from_indices = indices_to_codes

    def forward(
        self,
        x: torch.Tensor,
        inv_temperature: float = 100.0,
        return_loss_breakdown: bool = False,
        mask: torch.Tensor | None = None,
    ) -> Any:
        """Quantize x.

        Args:
            x: ``[..., dim]``, or ``[B, dim, ...]`` for images, video and ``channel_first``.
            inv_temperature: factor of the similarities in the entropy loss.
            return_loss_breakdown: also return the terms of the loss.
            mask: bool ``[B]`` or ``[B, N]``; False leaves vectors out of the losses.

        Returns:
            ``(quantized, indices, loss)``: the shape and dtype of x, int64 of that shape without its channels
            (or ``[..., num_codebooks]``), and a scalar, 0 outside training.

        Raises:
            ValueError: a shape that does not fit.
            TypeError: the input is not a tensor of floats, or a mask of another dtype than bool.
        """
        if isinstance(x, MethodCall):
            return x()
        image = self.channel_first
        if image is None:
            image = isinstance(x, torch.Tensor) and x.dim() >= 4
        x = self.project_in(channels_last("LFQ", x, self.dim, image))
        self._check_mask(mask, x)
        if self.soft_clamp_input_value is not None:
            x = (x / self.soft_clamp_input_value).tanh() * self.soft_clamp_input_value
        x = x.unflatten(-1, (self.num_codebooks, self.codebook_dim))  # type: ignore[no-untyped-call]
        dtype = x.dtype
        with no_autocast(x.device):
            x = x @ self.orthogonal_rot.to(dtype) if self.orthogonal_rotation else x
            x = self.maybe_l2norm(x)
            x = x.float() if self.force_quantization_f32 else x
            positive = x > 0
            indices = (positive * self._constant("mask")).sum(-1)
            quantized = self.maybe_l2norm(self.bits_to_codes(positive.to(x.dtype)))
            losses = self._losses(x, quantized, inv_temperature, mask)
            values = straight_through(self.activation(x), quantized) if self.training else quantized
            values = values.to(dtype)
            if self.orthogonal_rotation:
                values = values @ self.orthogonal_rot.to(dtype).t()
        output = self.project_out(values.flatten(-2))
        output = output.movedim(-1, 1) if image else output
        indices = indices if self._keep else indices.squeeze(-1)
        found = LFQOutput(output, indices, self._weighted(losses))
        return (found, losses) if return_loss_breakdown else found

    @staticmethod
    def _check_mask(mask: torch.Tensor | None, x: torch.Tensor) -> None:
        """Raise TypeError or ValueError for a mask that does not fit vectors ``[B, ..., d]``.

        An int mask would choose vectors by number.
        """
        if mask is None:
            return
        check_dense("LFQ", "mask", mask, (torch.bool,))
        shapes = [[x.shape[0]], [x.shape[0], math.prod(x.shape[1:-1])]]
        if list(mask.shape) not in shapes:
            raise ValueError(f"LFQ: mask must have shape {shapes[0]} or {shapes[1]}, got {list(mask.shape)}")

    def _weighted(self, losses: LFQLosses) -> torch.Tensor:
        """Return the weighted sum of the terms."""
        entropy = losses.per_sample_entropy - self.diversity_gamma * losses.batch_entropy
        if self.training and self.experimental_softplus_entropy_loss:
            entropy = F.softplus(entropy + self.entropy_loss_offset)
        return entropy * self.entropy_loss_weight + losses.commitment * self.commitment_loss_weight

    def _losses(
        self, x: torch.Tensor, quantized: torch.Tensor, inv_temperature: float, mask: torch.Tensor | None
    ) -> LFQLosses:
        """Return the entropies of the assignment probabilities, and the commitment.

        All are zero without vectors. The processes share the mean of their probabilities. A process without
        vectors takes part in the message, and its probabilities do not count.
        """
        zero = x.new_zeros(())
        if not self.training:
            return LFQLosses(zero, zero, zero)
        if mask is not None:
            flat = x.flatten(1, -3) if x.dim() > 3 else x
            codewords = quantized.flatten(1, -3) if x.dim() > 3 else quantized
            x, quantized = flat[mask], codewords[mask]
        rows = x.reshape(-1, self.num_codebooks, self.codebook_dim)
        commitment = zero
        if self.commitment_loss_weight > 0:
            commitment = _mean((x - quantized.detach()).square())
        if self.frac_per_sample_entropy < 1:
            wanted = max(1, int(len(rows) * self.frac_per_sample_entropy))
            rows = rows[torch.randn(len(rows), device=rows.device, dtype=torch.float32).argsort() < wanted]
        size = self._codebook_scale / (
            math.sqrt(self._bits) if self.spherical else 1
        )  # of an element of a code
        entropy, mean = lfq_entropy(rows * (2 * size * inv_temperature))
        if _distributed.rank_and_size()[1] > 1:
            from torch.distributed.nn.functional import all_reduce  # absent from builds without it

            counted = mean.new_full((1,), float(len(rows) > 0))
            message = all_reduce(torch.cat([mean.flatten(), counted]))  # type: ignore[no-untyped-call]
            mean = message[:-1].view_as(mean) / message[-1].clamp(min=1)
        return LFQLosses(entropy, _entropy(mean).mean(), commitment)


def _mean(values: torch.Tensor) -> torch.Tensor:
    """Return the mean, or 0 without values."""
    return values.mean() if values.numel() > 0 else values.sum()


def _entropy(probs: torch.Tensor) -> torch.Tensor:
    """Return the entropy over the last dimension, in nats.

    The logarithm is taken of at least 1e-5.
    """
    return -(probs * probs.clamp(min=1e-5).log()).sum(-1)


class ResidualLFQ(ResidualScalarQuantizer):
    """Quantize x by an :class:`LFQ`, then the residual by one of half the scale, and so on.

    Args:
        dim: length of the vectors ``[..., dim]``.
        num_quantizers: how many.
        codebook_size: K of each, a power of two.
        quantize_dropout, quantize_dropout_cutoff_index, quantize_dropout_multiple_of: as :class:`ResidualVQ`.
        soft_clamp_input_value: bound of the first quantizer; it halves with each of the others.
        **kwargs: arguments of every :class:`LFQ`.

    Raises:
        ValueError: sizes that do not fit.

    Source: as :class:`LFQ` and :class:`ResidualVQ`.

    Equivalent to: ``vector_quantize_pytorch.ResidualLFQ`` 1.32 with the same arguments, which also loads its
        state_dict. Decoding a ``spherical`` or rotated layer gives what ``forward`` returned.
    """

    def __init__(
        self,
        *,
        dim: int,
        num_quantizers: int,
        codebook_size: int,
        quantize_dropout: bool = False,
        quantize_dropout_cutoff_index: int = 0,
        quantize_dropout_multiple_of: int = 1,
        soft_clamp_input_value: float | None = None,
        **kwargs: Any,
    ) -> None:
        num_quantizers, size = counts(
            "ResidualLFQ", num_quantizers=num_quantizers, codebook_size=codebook_size
        )
        super().__init__(
            num_quantizers, quantize_dropout, quantize_dropout_cutoff_index, quantize_dropout_multiple_of
        )
        inner, clamp = int(math.log2(size)), soft_clamp_input_value
        self._project(dim, inner)
        self.layers = nn.ModuleList(
            LFQ(
                dim=inner,
                codebook_scale=2.0**-place,
                soft_clamp_input_value=None if clamp is None else clamp * 0.5**place,
                **{"codebook_size": size, **kwargs},
            )
            for place in range(num_quantizers)
        )

    @property
    def codebooks(self) -> torch.Tensor:
        """Return the codewords of every quantizer, ``[Q, K, d]``."""
        return torch.stack([layer.codebook for layer in self._quantizers])

    def forward(
        self,
        x: torch.Tensor,
        mask: torch.Tensor | None = None,
        return_all_codes: bool = False,
        rand_quantize_dropout_fixed_seed: int | None = None,
        n_q: int | torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Quantize x, ``[..., dim]``.

        The mask is as for :class:`LFQ`, the other arguments as for :class:`ResidualVQ`.

        Returns:
            ``(quantized, indices, losses)``: indices int64 ``[..., Q]``, -1 where left out, losses ``[Q]``,
            and the codewords ``[Q, ..., d]`` if requested.

        Raises:
            ValueError: a shape that does not fit.
        """
        x = channels_last("ResidualLFQ", x, self._dim, False)
        kept = self._number(x, n_q, rand_quantize_dropout_fixed_seed)
        if n_q is not None:
            kept, n_q = self._agreed(kept, n_q, x)
        lead, x = x.shape[:-1], self.project_in(x)
        # three dimensions: more are an image to LFQ
        residual = x.reshape(x.shape[0], math.prod(x.shape[1:-1]), x.shape[-1])
        total, chosen, losses = torch.zeros_like(residual), [], []
        with no_autocast(x.device):
            for place, layer in zip(range(kept), self._quantizers, strict=False):
                quantized, indices, loss = self._of_examples(layer, residual, place, n_q, mask)
                residual, total = residual - quantized.detach(), total + quantized
                chosen.append(indices.reshape(*lead, *indices.shape[2:]))
                losses.append(loss)
        found = self._padded(torch.stack(chosen, -1))
        output = self.project_out(total.view(x.shape))
        result = output, found, F.pad(torch.stack(losses), (0, self._num_quantizers - kept))
        return (*result, self.get_codes_from_indices(found)) if return_all_codes else result


class GroupedResidualLFQ(GroupedScalar):
    """Cut the channels into groups, each with a :class:`ResidualLFQ` of its own.

    Args:
        dim: length of the vectors, a multiple of ``groups``.
        groups: how many parts.
        accept_image_fmap: ``[B, dim, H, W]`` input.
        **kwargs: arguments of every :class:`ResidualLFQ`.

    Raises:
        ValueError: sizes that do not fit.

    Source: as :class:`LFQ`; Yang et al. 2023, "HiFi-Codec" (groups).

    Equivalent to: ``vector_quantize_pytorch.GroupedResidualLFQ`` 1.32 with the same arguments.
    """

    def __init__(self, *, dim: int, groups: int = 1, accept_image_fmap: bool = False, **kwargs: Any) -> None:
        super().__init__()
        self._group(dim, groups, accept_image_fmap, ResidualLFQ, **kwargs)

    def forward(
        self,
        x: torch.Tensor,
        mask: torch.Tensor | None = None,
        return_all_codes: bool = False,
        n_q: int | torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Quantize x, with the arguments of :class:`ResidualLFQ`.

        Return ``(quantized, indices, losses)``, indices ``[groups, ..., Q]``, losses ``[groups, Q]``, and the
        codewords if requested.

        Raises:
            ValueError: a shape that does not fit.
        """
        return self._quantize(x, mask=mask, return_all_codes=return_all_codes, n_q=n_q)
