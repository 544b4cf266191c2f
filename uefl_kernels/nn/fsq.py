"""``FSQ``, ``ResidualFSQ`` and ``GroupedResidualFSQ``: round every element to one of a few levels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .._dtypes import result_dtype, vector_of
from ..ops.fsq import fsq
from ..ops.fsq.composed import Form, formula
from . import _distributed
from ._codebook import Coder
from ._shared import (
    ConstantBuffers,
    MethodCall,
    as_indices,
    channels_last,
    check_codebooks,
    check_codewords,
    count_of_each,
    counts,
    fixed,
    in_a_call,
    indices_of_each,
    no_autocast,
    not_replaceable,
    place_values,
    project,
    random_rotation,
    refuse_together,
)
from .residual_vq import ResidualQuantizer


class FSQ(ConstantBuffers, Coder):
    """Round every element of a vector to one of a few levels.

    The product of all levels is the codebook, so there is no codeword to learn and no search.

    Args:
        levels: the number of levels of each element; their product is the size of the codebook.
        dim: length of the vectors; where it is not ``len(levels) * num_codebooks``, ``project_in`` and
            ``project_out`` are linear.
        num_codebooks: parts of a vector, each with an index.
        keep_num_codebooks_dim: keep the last dimension of the indices for one codebook too.
        scale: accepted, but without effect, as in the peer.
        allowed_dtypes: dtypes that ``force_quantization_f32`` leaves as they are.
        channel_first: ``[B, dim, ...]`` input; input of four or more dimensions has that form anyway.
        projection_has_bias: whether the projections have a bias.
        return_indices: False returns None for the indices.
        force_quantization_f32: round in float32 where the input has another dtype.
        preserve_symmetry: levels that are symmetric around zero (Parker et al. 2024, section 3.2); two levels
            need it.
        noise_dropout: in training, the share of elements that get uniform noise; needs ``preserve_symmetry``.
        bound_hard_clamp: bound the input by clamping and not by tanh.
        orthogonal_rotation: rotate by a fixed random rotation before rounding, and back after it.

    Attributes:
        implicit_codebook: ``[K, len(levels)]``, all codewords.

    Raises:
        ValueError: sizes that do not fit, or options that exclude each other.

    Source: Mentzer et al. 2023, "Finite Scalar Quantization: VQ-VAE Made Simple", appendix A.1.

    Equivalent to: ``vector_quantize_pytorch.FSQ`` 1.32 with the same arguments, which also loads its
        state_dict. Input of two dimensions works here.
    """

    _levels: torch.Tensor
    _basis: torch.Tensor | None
    orthogonal_rot: torch.Tensor

    def __init__(
        self,
        levels: Sequence[int],
        dim: int | None = None,
        num_codebooks: int = 1,
        keep_num_codebooks_dim: bool | None = None,
        scale: float | None = None,
        allowed_dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float64),
        channel_first: bool = False,
        projection_has_bias: bool = True,
        return_indices: bool = True,
        force_quantization_f32: bool = True,
        preserve_symmetry: bool = False,
        noise_dropout: float = 0.0,
        bound_hard_clamp: bool = False,
        orthogonal_rotation: bool = False,
    ) -> None:
        super().__init__()
        levels = count_of_each("FSQ", "levels", levels)
        (self._num_codebooks,) = counts("FSQ", num_codebooks=num_codebooks)
        keep = num_codebooks > 1 if keep_num_codebooks_dim is None else keep_num_codebooks_dim
        refuse_together(
            "FSQ",
            (not levels or min(levels) < 2, f"levels={levels} must be at least 2 each"),
            (
                2 in levels and not preserve_symmetry,
                f"levels={levels} holds 2, which needs preserve_symmetry=True",
            ),
            (noise_dropout > 0 and not preserve_symmetry, "noise_dropout needs preserve_symmetry=True"),
            (
                num_codebooks > 1 and not keep,
                f"num_codebooks={num_codebooks} needs keep_num_codebooks_dim=True",
            ),
        )
        inner = len(levels) * num_codebooks
        (self._dim,) = counts("FSQ", dim=inner if dim is None else dim)
        self._keep, self.scale, self.allowed_dtypes = keep, scale, tuple(allowed_dtypes)
        self.channel_first, self.return_indices = channel_first, return_indices
        self.force_quantization_f32, self.bound_hard_clamp = force_quantization_f32, bound_hard_clamp
        self.noise_dropout = noise_dropout
        self._preserve_symmetry, self._orthogonal_rotation = preserve_symmetry, orthogonal_rotation
        self.project_in: nn.Module = nn.Identity()
        self.project_out: nn.Module = nn.Identity()
        if self._dim != inner:
            self.project_in = nn.Linear(self._dim, inner, bias=projection_has_bias)
            self.project_out = nn.Linear(inner, self._dim, bias=projection_has_bias)
        self._level_list, self._indexed = levels, return_indices
        self._register_constants()
        if orthogonal_rotation:
            self.register_buffer("orthogonal_rot", random_rotation(len(levels)))

    def _constants(self, device: torch.device | None = None) -> dict[str, torch.Tensor | None]:
        counted = self._indexed or self.codebook_size <= 2**63
        return {
            "_levels": vector_of(self._level_list, torch.int32, device),
            "_basis": place_values("FSQ", self._level_list, device) if counted else None,
        }

    def extra_repr(self) -> str:
        """Return the sizes."""
        return f"levels={self._level_list}, dim={self.dim}, num_codebooks={self.num_codebooks}"

    dim = fixed("dim", lambda layer: layer._dim, "Length of the vectors.")
    num_codebooks = fixed("num_codebooks", lambda layer: layer._num_codebooks, "Parts of a vector.")
    codebook_dim = fixed("codebook_dim", lambda layer: len(layer._levels), "Length of a codeword.")
    effective_codebook_dim = fixed(
        "effective_codebook_dim",
        lambda layer: len(layer._levels) * layer._num_codebooks,
        "Number of elements that are rounded.",
    )
    codebook_size = fixed(
        "codebook_size", lambda layer: math.prod(layer._level_list), "K, the product of levels."
    )
    keep_num_codebooks_dim = fixed(
        "keep_num_codebooks_dim", lambda layer: layer._keep, "True if indices are [..., num_codebooks]."
    )
    has_projections = fixed(
        "has_projections",
        lambda layer: not isinstance(layer.project_in, nn.Identity),
        "True if project_in and project_out are linear.",
    )
    preserve_symmetry = fixed(
        "preserve_symmetry", lambda layer: layer._preserve_symmetry, "True if levels are symmetric."
    )
    orthogonal_rotation = fixed(
        "orthogonal_rotation", lambda layer: layer._orthogonal_rotation, "True if vectors are rotated."
    )
    implicit_codebook = fixed(
        "implicit_codebook",
        lambda layer: layer._indices_to_codes(torch.arange(layer.codebook_size, device=layer._levels.device)),
        "All codewords.",
    )

    @property
    def bits_per_vector(self) -> float:
        """Return the bits of the indices of a vector, num_codebooks * log2(K)."""
        return float(self.num_codebooks * sum(map(math.log2, self._level_list)))

    # --- rounding ------------------------------------------------------------------------------------------

    def _levels_as(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the levels ``[d]`` in a dtype of at least 32 bits.

        Quotients of integers would have the default dtype.
        """
        return self._constant("_levels").to(torch.promote_types(dtype, torch.float32))

    @not_replaceable
    def bound(self, z: torch.Tensor, eps: float = 1e-3, hard_clamp: bool = False) -> torch.Tensor:
        """Bound ``[..., d]``, round it to integers, and scale these to -1 to 1."""
        form = Form(tuple(self._level_list), False, hard_clamp, eps)
        return formula(z.to(result_dtype(z)), form, indexed=False)[0]

    @not_replaceable
    def symmetry_preserving_bound(self, z: torch.Tensor, hard_clamp: bool = False) -> torch.Tensor:
        """Round ``[..., d]`` to levels from -1 to 1 that are symmetric around zero."""
        form = Form(tuple(self._level_list), True, hard_clamp)
        return formula(z.to(result_dtype(z)), form, indexed=False)[0]

    def _quantize(self, z: torch.Tensor, indexed: bool) -> tuple[torch.Tensor, torch.Tensor]:
        z = z.to(result_dtype(z))
        return fsq(z, self._level_list, self.preserve_symmetry, self.bound_hard_clamp, indexed)

    @not_replaceable
    def quantize(self, z: torch.Tensor) -> torch.Tensor:
        """Round ``[..., d]``.

        The gradient passes the rounding unchanged.
        """
        return self._quantize(z, indexed=False)[0]

    def maybe_apply_noise(self, bounded_z: torch.Tensor) -> torch.Tensor:
        """Add uniform noise to a share ``noise_dropout`` of the elements, in training."""
        if not self.training or self.noise_dropout == 0:
            return bounded_z
        # drawn in the order of the elements, whatever the strides
        plain = torch.empty_like(bounded_z, memory_format=torch.contiguous_format)
        noisy = torch.full_like(plain, self.noise_dropout).bernoulli_().bool()
        noise = torch.rand_like(plain) - 0.5
        return torch.where(noisy, bounded_z + noise, bounded_z).clamp(-1.0, 1.0)

    # --- indices -------------------------------------------------------------------------------------------

    def _counted(self) -> torch.Tensor:
        """Return the factor of each level in an index, or raise ValueError for more than int64 can count."""
        return place_values("FSQ", self._level_list) if self._basis is None else self._constant("_basis")

    @in_a_call
    def indices_to_level_indices(self, indices: torch.Tensor) -> torch.Tensor:
        """Return the level of every element, ``[..., d]``, of integers ``[...]``."""
        indices = as_indices("FSQ", indices, least=0, size=self.codebook_size)
        return indices.unsqueeze(-1) // self._counted() % self._constant("_levels")

    def codes_to_indices(self, zhat: torch.Tensor) -> torch.Tensor:
        """Return the index ``[...]``, int32 or int64 as ``forward``, of codewords ``[..., d]``.

        NaN counts as the first level.
        """
        check_codewords("FSQ", zhat, self.codebook_dim)
        if self.preserve_symmetry:
            levels = (zhat + 1.0) / (2.0 / (self._levels_as(zhat.dtype) - 1))
        else:
            levels = zhat * (self._constant("_levels") // 2) + self._constant("_levels") // 2
        basis = self._counted()
        return (levels.detach().nan_to_num(nan=0).round().long() * basis).sum(-1).to(basis.dtype)

    def _indices_to_codes(self, indices: torch.Tensor) -> torch.Tensor:
        places, levels = self.indices_to_level_indices(indices), self._levels_as(self._model_dtype)
        if self.preserve_symmetry:
            return places * (2.0 / (levels - 1)) - 1.0
        half = levels // 2
        return (places - half) / half

    @in_a_call
    def _codes(self, indices: torch.Tensor) -> torch.Tensor:
        """Return codewords ``[..., d]`` of indices ``[...]``, rotated and in the dtype of the model."""
        return self._rotated_back(self._indices_to_codes(indices)).to(self._model_dtype)

    def _rotated_back(self, codewords: torch.Tensor) -> torch.Tensor:
        return (
            codewords @ self.orthogonal_rot.to(codewords.dtype).t() if self.orthogonal_rotation else codewords
        )

    def indices_to_codes(self, indices: torch.Tensor) -> torch.Tensor:
        """Return what ``forward`` returns as quantized for these indices, integers of any width."""
        indices = as_indices("FSQ", indices)
        if self._keep:
            check_codebooks("FSQ", indices, self.num_codebooks)
        image = self.channel_first or indices.dim() >= 3 + int(self._keep)
        codewords = self._codes(indices)
        output = project(self.project_out, codewords.flatten(-2) if self._keep else codewords)
        return output.movedim(-1, 1) if image else output

    get_output_from_indices = indices_to_codes

    def forward(self, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Quantize z.

        Args:
            z: ``[..., dim]``, or ``[B, dim, ...]`` for images, video and ``channel_first``.

        Returns:
            ``(quantized, indices)``: the shape and dtype of z, and integers of that shape without its
            channels, or ``[..., num_codebooks]``: int32, or int64 for more than 2^31 codewords.

        Raises:
            ValueError: a shape that does not fit.
            TypeError: the input is not a tensor of floats.
        """
        if isinstance(z, MethodCall):
            return z()  # type: ignore[no-any-return]
        image = self.channel_first or (isinstance(z, torch.Tensor) and z.dim() >= 4)
        z = self.project_in(channels_last("FSQ", z, self.dim, image, "z"))
        z = z.unflatten(-1, (self.num_codebooks, self.codebook_dim))  # type: ignore[no-untyped-call]
        dtype = z.dtype
        with no_autocast(z.device):
            z = z @ self.orthogonal_rot.to(dtype) if self.orthogonal_rotation else z
            if self.force_quantization_f32 and dtype not in self.allowed_dtypes:
                z = z.float()
            if self.return_indices:
                self._counted()
            codewords, indices = self._quantize(z, self.return_indices)
            codewords = self._rotated_back(self.maybe_apply_noise(codewords)).flatten(-2).to(dtype)
        output = self.project_out(codewords)
        output = output.movedim(-1, 1) if image else output
        if not self.return_indices:
            return output, None
        return output, indices if self._keep else indices.squeeze(-1)


class ResidualScalarQuantizer(ResidualQuantizer):
    """Quantizers without learned codewords in a row, behind one pair of projections."""

    project_in: nn.Module
    project_out: nn.Module

    def _project(self, dim: int, inner: int) -> None:
        (self._dim,) = counts(type(self).__name__, dim=dim)
        same = dim == inner
        self.project_in = nn.Identity() if same else nn.Linear(dim, inner)
        self.project_out = nn.Identity() if same else nn.Linear(inner, dim)

    has_projections = fixed(
        "has_projections",
        lambda layer: not isinstance(layer.project_in, nn.Identity),
        "True if project_in and project_out are linear.",
    )
    codebook_size = fixed("codebook_size", lambda layer: layer.layers[0].codebook_size, "K.")

    @property
    def _quantizers(self) -> list[Any]:
        return list(self.layers)

    @property
    def codebooks(self) -> torch.Tensor:
        """Return the codewords of every quantizer, ``[Q, K, d]``, before they are scaled."""
        raise NotImplementedError

    def _kept(self, device: torch.device, seed: int | None) -> int:
        """Draw how many quantizers run.

        Without gradients all of them run, as in the peer.
        """
        return super()._kept(device, seed) if torch.is_grad_enabled() else self._num_quantizers

    def _scale(self, place: int) -> torch.Tensor | float:
        """Return the factor of the codewords of a quantizer."""
        return 1.0

    @in_a_call
    def get_codes_from_indices(self, indices: torch.Tensor) -> torch.Tensor:
        """Return the codeword of every quantizer, ``[Q, ..., d]``.

        Indices that are -1 or left out give zeros.
        """
        codewords = []
        pairs = zip(self._quantizers, self._padded(indices).unbind(-1), strict=True)
        for place, (layer, i) in enumerate(pairs):
            found = project(layer.project_out, layer._codes(i.clamp(min=0)))
            found = (found * self._scale(place)).to(found.dtype)
            codewords.append(found.masked_fill((i < 0).unsqueeze(-1), 0))
        return torch.stack(codewords)

    def get_output_from_indices(self, indices: torch.Tensor) -> torch.Tensor:
        """Return the quantized vectors ``[..., dim]`` of indices ``[..., q]``."""
        return project(self.project_out, self.get_codes_from_indices(indices).sum(0))


class ResidualFSQ(ConstantBuffers, ResidualScalarQuantizer):
    """Quantize x by an :class:`FSQ`, then the residual by a finer one, and so on.

    Args:
        levels: as :class:`FSQ`.
        num_quantizers: how many.
        dim: length of the vectors; ``len(levels)`` by default.
        is_channel_first: ``[B, dim, ...]`` input; indices are ``[B, Q, ...]`` then.
        quantize_dropout, quantize_dropout_cutoff_index, quantize_dropout_multiple_of: as :class:`ResidualVQ`.
        soft_clamp_input_value: bound of the input, by tanh; with ``bound_hard_clamp`` it follows from levels.
        bound_hard_clamp: as :class:`FSQ`.
        **kwargs: arguments of every :class:`FSQ`.

    Raises:
        ValueError: sizes or options that do not fit.

    Source: as :class:`FSQ` and :class:`ResidualVQ`.

    Equivalent to: ``vector_quantize_pytorch.ResidualFSQ`` 1.32 with the same arguments, which also loads its
        state_dict.
    """

    scales: torch.Tensor
    soft_clamp_input_value: torch.Tensor | None

    def __init__(
        self,
        *,
        levels: Sequence[int],
        num_quantizers: int,
        dim: int | None = None,
        is_channel_first: bool = False,
        quantize_dropout: bool = False,
        quantize_dropout_cutoff_index: int = 0,
        quantize_dropout_multiple_of: int = 1,
        soft_clamp_input_value: float | Sequence[float] | torch.Tensor | None = None,
        bound_hard_clamp: bool = True,
        **kwargs: Any,
    ) -> None:
        (num_quantizers,) = counts("ResidualFSQ", num_quantizers=num_quantizers)
        refuse_together(
            "ResidualFSQ",
            (
                bound_hard_clamp and soft_clamp_input_value is not None,
                "soft_clamp_input_value needs bound_hard_clamp=False",
            ),
        )
        super().__init__(
            num_quantizers, quantize_dropout, quantize_dropout_cutoff_index, quantize_dropout_multiple_of
        )
        levels = count_of_each("ResidualFSQ", "levels", levels)
        inner = len(levels)
        self._project(inner if dim is None else dim, inner)
        self.is_channel_first, self._level_list = is_channel_first, levels
        options = {"preserve_symmetry": True, "bound_hard_clamp": bound_hard_clamp, **kwargs}
        self.layers = nn.ModuleList(FSQ(levels, dim=inner, **options) for _ in range(num_quantizers))
        self._limit, self._limited_by_levels = soft_clamp_input_value, bound_hard_clamp
        self._register_constants()

    def _constants(self, device: torch.device | None = None) -> dict[str, torch.Tensor | None]:
        sizes = vector_of(self._level_list, torch.int64, device)
        scales = torch.stack([sizes.float() ** -place for place in range(self._num_quantizers)])
        limit = 1 + 1 / (sizes - 1) if self._limited_by_levels else self._limit
        return {"scales": scales, "soft_clamp_input_value": None if limit is None else torch.as_tensor(limit)}

    levels = fixed("levels", lambda layer: layer._level_list, "Levels of each element.")

    @property
    def codebooks(self) -> torch.Tensor:
        """Return the codewords of every quantizer, ``[Q, K, d]``, before they are scaled."""
        return torch.stack([layer.implicit_codebook for layer in self._quantizers])

    def _scale(self, place: int) -> torch.Tensor:
        return self.scales[place]

    def decode(self, indices: torch.Tensor) -> torch.Tensor:
        """Return the quantized vectors for the indices that ``forward`` returns."""
        if not self.is_channel_first:
            return self.get_output_from_indices(indices)
        return self.get_output_from_indices(indices.movedim(1, -1)).movedim(-1, 1)

    def forward(
        self,
        x: torch.Tensor,
        return_all_codes: bool = False,
        rand_quantize_dropout_fixed_seed: int | None = None,
        n_q: int | torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Quantize x, ``[..., dim]`` or ``[B, dim, ...]`` for ``is_channel_first``.

        The other arguments are as in :class:`ResidualVQ`.

        Returns:
            ``(quantized, indices)``: indices ``[..., Q]``, -1 where left out, and the codewords
            ``[Q, ..., d]`` if requested.

        Raises:
            ValueError: a shape that does not fit.
            TypeError: the input is not a tensor of floats.
        """
        if isinstance(x, MethodCall):
            return x()  # type: ignore[no-any-return]
        x = channels_last("ResidualFSQ", x, self._dim, self.is_channel_first)
        kept = self._number(x, n_q, rand_quantize_dropout_fixed_seed)
        x = self.project_in(x)
        dtype = x.dtype
        if self.soft_clamp_input_value is not None:
            limit = self.soft_clamp_input_value
            x = (x / limit).tanh() * limit
        lead = x.shape[:-1]
        # three dimensions: more are an image to FSQ
        residual = x.reshape(x.shape[0], math.prod(x.shape[1:-1]), x.shape[-1])
        total = torch.zeros_like(residual)
        chosen = []
        with no_autocast(x.device):
            for place, (scale, layer) in enumerate(zip(self.scales[:kept], self._quantizers, strict=False)):
                quantized, indices = self._of_examples(layer, residual / scale, place, n_q)
                quantized = quantized * scale
                residual = residual - quantized.detach()
                total = total + quantized
                chosen.append(indices.view(lead))
        found = torch.stack(chosen, -1)
        found = F.pad(found, (0, self._num_quantizers - kept), value=-1)
        codewords = (self.get_codes_from_indices(found),) if return_all_codes else ()
        output = self.project_out(total.view(x.shape).to(dtype))
        if self.is_channel_first:
            output, found = output.movedim(-1, 1), found.movedim(-1, 1)
        return output, found, *codewords


class GroupedScalar(Coder):
    """Cut the channels into groups, each with a residual quantizer of its own."""

    rvqs: nn.ModuleList

    def _group(self, dim: int, groups: int, accept_image_fmap: bool, kind: Any, **options: Any) -> None:
        name = type(self).__name__
        dim, groups = counts(name, dim=dim, groups=groups)
        if dim % groups:
            raise ValueError(f"{name}: dim={dim} cannot be cut into groups={groups}; make it a multiple")
        self._dim, self._image = dim, accept_image_fmap
        self.rvqs = nn.ModuleList(kind(dim=dim // groups, **options) for _ in range(groups))
        for rvq in self._residuals:
            rvq._part_of = name

    dim = fixed("dim", lambda layer: layer._dim, "Length of the vectors.")
    groups = fixed("groups", lambda layer: len(layer.rvqs), "The number of parts of the channels.")
    accept_image_fmap = fixed("accept_image_fmap", lambda layer: layer._image, "True if images are taken.")
    codebook_size = fixed("codebook_size", lambda layer: layer.rvqs[0].codebook_size, "K.")

    @property
    def _residuals(self) -> list[Any]:
        return list(self.rvqs)

    @property
    def codebooks(self) -> torch.Tensor:
        """Return the codewords, ``[groups, Q, K, d]``."""
        return torch.stack([rvq.codebooks for rvq in self._residuals])

    @property
    def bits_per_vector(self) -> float:
        """Return the bits of the indices of a vector, over all groups."""
        return float(sum(rvq.bits_per_vector for rvq in self._residuals))

    @property
    def split_dim(self) -> int:
        """Return the dimension of the channels."""
        return 1 if self.accept_image_fmap else -1

    def get_codes_from_indices(self, indices: Sequence[torch.Tensor] | torch.Tensor) -> torch.Tensor:
        """Return ``[groups, Q, ..., d]`` for the indices of each group, ``[groups, ..., q]``."""
        of_groups = indices_of_each(type(self).__name__, indices, len(self.rvqs))
        pairs = zip(self._residuals, of_groups, strict=True)
        return torch.stack([rvq.get_codes_from_indices(i) for rvq, i in pairs])

    def get_output_from_indices(self, indices: Sequence[torch.Tensor] | torch.Tensor) -> torch.Tensor:
        """Return what ``forward`` returns as quantized for the indices of each group."""
        of_groups = indices_of_each(type(self).__name__, indices, len(self.rvqs))
        return self._joined([rvq.decode(i) for rvq, i in zip(self._residuals, of_groups, strict=True)])

    @property
    def _moved(self) -> bool:
        """Return True if the channels of images go last for quantizers that expect them there."""
        return self.accept_image_fmap and not getattr(self._residuals[0], "is_channel_first", False)

    def _joined(self, groups: Sequence[torch.Tensor]) -> torch.Tensor:
        """Concatenate the channels of the groups, and move them to where the input has them."""
        if self._moved:
            return torch.cat([*groups], -1).movedim(-1, 1)
        return torch.cat([*groups], self.split_dim)

    def _quantize(self, x: torch.Tensor, **options: Any) -> tuple[torch.Tensor, ...]:
        """Quantize each group.

        All groups leave out the same quantizers.
        """
        last = channels_last(type(self).__name__, x, self.dim, self.accept_image_fmap)
        if self.training and options.get("n_q") is None and self._residuals[0].quantize_dropout:
            options["rand_quantize_dropout_fixed_seed"] = _distributed.drawn_on_all(0, 10_000, x.device)
        channels = last.chunk(self.groups, -1) if self._moved else x.chunk(self.groups, self.split_dim)
        found = [rvq(group, **options) for rvq, group in zip(self._residuals, channels, strict=True)]
        quantized, *others = zip(*found, strict=True)
        return self._joined(quantized), *map(torch.stack, others)


class GroupedResidualFSQ(GroupedScalar):
    """Cut the channels into groups, each with a :class:`ResidualFSQ` of its own.

    Args:
        dim: length of the vectors, a multiple of ``groups``.
        groups: how many parts.
        accept_image_fmap: ``[B, dim, H, W]`` input.
        **kwargs: arguments of every :class:`ResidualFSQ`.

    Raises:
        ValueError: sizes that do not fit.

    Source: as :class:`FSQ`; Yang et al. 2023, "HiFi-Codec" (groups).

    Equivalent to: ``vector_quantize_pytorch.GroupedResidualFSQ`` 1.32 with the same arguments.
    """

    def __init__(self, *, dim: int, groups: int = 1, accept_image_fmap: bool = False, **kwargs: Any) -> None:
        super().__init__()
        self._group(dim, groups, accept_image_fmap, ResidualFSQ, **kwargs)

    def forward(
        self, x: torch.Tensor, return_all_codes: bool = False, n_q: int | torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Quantize x, with the arguments of :class:`ResidualFSQ`.

        Return ``(quantized, indices)``, indices ``[groups, ..., Q]``, and the codewords if requested.

        Raises:
            ValueError: a shape that does not fit.
        """
        return self._quantize(x, return_all_codes=return_all_codes, n_q=n_q)
