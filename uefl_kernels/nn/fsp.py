"""``FSP``: map every element to 0 to 1 and round it to the middle of one of a few bins."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from .._dtypes import vector_of
from ._codebook import Coder
from ._shared import (
    ConstantBuffers,
    MethodCall,
    as_indices,
    channels_last,
    count_of_each,
    counts,
    fixed,
    in_a_call,
    numbers,
    place_values,
    project,
    refuse_together,
    straight_through,
)

Activation = Callable[[torch.Tensor], torch.Tensor]

_DEVIATION = 12**-0.5  # standard deviation of a uniform number from 0 to 1


# functions with names, so that a layer can be pickled
def _tanh(z: torch.Tensor) -> torch.Tensor:
    return (z.tanh() + 1) / 2


def _inverse_tanh(p: torch.Tensor) -> torch.Tensor:
    return (2 * p - 1).arctanh()


def _normal(z: torch.Tensor) -> torch.Tensor:
    return (1 + (z / math.sqrt(2)).erf()) / 2


def _inverse_normal(p: torch.Tensor) -> torch.Tensor:
    return (2 * p - 1).erfinv() * math.sqrt(2)


def _laplace(z: torch.Tensor) -> torch.Tensor:
    return (1 + z.sign() * (1 - (-z.abs()).exp())) / 2


def _inverse_laplace(p: torch.Tensor) -> torch.Tensor:
    return -(p - 0.5).sign() * (1 - 2 * (p - 0.5).abs()).log()


def _cauchy(z: torch.Tensor) -> torch.Tensor:
    return z.arctan() / math.pi + 0.5


def _inverse_cauchy(p: torch.Tensor) -> torch.Tensor:
    return ((p - 0.5) * math.pi).tan()


_ACTIVATIONS: dict[str, tuple[Activation, Activation]] = {
    "tanh": (_tanh, _inverse_tanh),
    "sigmoid": (torch.sigmoid, torch.logit),
    "normal": (_normal, _inverse_normal),
    "laplace": (_laplace, _inverse_laplace),
    "cauchy": (_cauchy, _inverse_cauchy),
}
_NORMS: dict[str, tuple[tuple[float, float], ...]] = {  # target and weight of each moment
    "none": ((0, 0), (1, 0), (0, 0), (0, 0)),
    "var": ((0, 0.1), (1, 0.07), (0, 0), (0, 0)),
    "kurt": ((0, 0.1), (1, 0.07), (0, 0.06), (0, 0.05)),
    "var_tanh": ((0, 0.1), (0.8225, 0.07), (0, 0), (0, 0)),
    "var_sigmoid": ((0, 0.1), (3.29, 0.07), (0, 0), (0, 0)),
    "var_laplace": ((0, 0.1), (2.0, 0.07), (0, 0), (0, 0)),
}


def build_cdf_act(act_name: str) -> tuple[Activation, Activation]:
    """Return the distribution function of that name, which maps to 0 to 1, and its inverse.

    Raises:
        ValueError: an unknown name.
    """
    found: tuple[Activation, Activation] = _named(_ACTIVATIONS, act_name=act_name)
    return found


def _named(known: dict[str, Any], **given: str) -> Any:
    ((argument, name),) = given.items()
    if name not in known:
        raise ValueError(f"FSP: {argument} is {name!r}, expected one of {', '.join(known)}")
    return known[name]


class VectorNorm(nn.Module):
    """Weighted squared distances of the first four moments of every element to their targets."""

    def __init__(
        self,
        l1_target: float = 0.0,
        l1_weight: float = 0.1,
        l2_target: float = 1.0,
        l2_weight: float = 0.07,
        l3_target: float = 0.0,
        l3_weight: float = 0.06,
        l4_target: float = 0.0,
        l4_weight: float = 0.05,
        eps: float = 1e-8,
    ) -> None:
        super().__init__()
        self.l1_target, self.l1_weight = l1_target, l1_weight
        self.l2_target, self.l2_weight = l2_target, l2_weight
        self.l3_target, self.l3_weight = l3_target, l3_weight
        self.l4_target, self.l4_weight = l4_target, l4_weight
        self.eps = eps

    def forward(self, z: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss of rows ``[n, d]``, a scalar, and the moments, each ``[d]``.

        All are zero without rows.
        """
        if z.shape[0] == 0:
            return z.sum(), dict.fromkeys(("mean", "variance", "skewness", "kurtosis"), z.sum(0))
        variance, mean = torch.var_mean(z, dim=0, correction=int(z.shape[0] > 1))
        scores = (z - mean) / variance.clamp(min=self.eps**2).sqrt()  # the gradient of sqrt(0) is infinite
        skewness, kurtosis = scores.pow(3).mean(0), scores.pow(4).mean(0) - 3
        terms = (
            (mean, self.l1_target, self.l1_weight),
            (variance, self.l2_target, self.l2_weight),
            (skewness, self.l3_target, self.l3_weight),
            (kurtosis, self.l4_target, self.l4_weight),
        )
        loss = z.new_zeros(())
        for moment, target, weight in terms:
            if weight:  # the gradient of an unused moment may be infinite
                loss = loss + (moment - target).square().mean() * weight
        return loss, {"mean": mean, "variance": variance, "skewness": skewness, "kurtosis": kurtosis}


class FSP(ConstantBuffers, Coder):
    """Map every element of a vector to 0 to 1, and round it to the middle of one of a few bins.

    In training most elements are moved within their bin at random instead, so that the gradient sees no
    rounding.

    Args:
        levels: the number of bins of each element; their product is the size of the codebook.
        dim: length of the vectors; where it is not ``len(levels)``, ``project_in`` and ``project_out`` are
            linear.
        channel_first: ``[B, dim, ...]`` input.
        projection_has_bias: whether the projections have a bias.
        act_name: the distribution function that maps to 0 to 1: ``"tanh"``, ``"sigmoid"``, ``"normal"``,
            ``"laplace"`` or ``"cauchy"``.
        quantize_rate: the share of elements that are rounded in training; the others are moved at random.
        need_inv_act: map back by the inverse of the distribution function, and not to variance 1.
        vector_norm: the moments of the elements that the loss keeps: ``"none"``, ``"var"``, ``"kurt"``,
            ``"var_tanh"``, ``"var_sigmoid"`` or ``"var_laplace"``.

    Raises:
        ValueError: sizes that do not fit, or unknown names.

    Source: "Finite Scalar Perturbation", arXiv 2602.17133.

    Equivalent to: ``vector_quantize_pytorch.FSP`` 1.32 with the same arguments, which also loads its
        state_dict. The loss of a single vector is finite here.
    """

    _levels: torch.Tensor
    _basis: torch.Tensor

    def __init__(
        self,
        levels: Sequence[int],
        dim: int | None = None,
        channel_first: bool = False,
        projection_has_bias: bool = True,
        act_name: str = "tanh",
        quantize_rate: float = 0.0,
        need_inv_act: bool = False,
        vector_norm: str = "var_tanh",
    ) -> None:
        super().__init__()
        levels = count_of_each("FSP", "levels", levels)
        refuse_together("FSP", (not levels or min(levels) < 1, f"levels={levels} must be at least 1 each"))
        numbers("FSP", 1, quantize_rate=quantize_rate)
        inner = len(levels)
        (self._dim,) = counts("FSP", dim=inner if dim is None else dim)
        self.channel_first, self.quantize_rate = channel_first, quantize_rate
        self.need_inv_act, self._act_name = need_inv_act, act_name
        self.act_func, self.inv_act_func = build_cdf_act(act_name)
        (l1, w1), (l2, w2), (l3, w3), (l4, w4) = _named(_NORMS, vector_norm=vector_norm)
        self.vector_norm = VectorNorm(l1, w1, l2, w2, l3, w3, l4, w4)
        self.project_in: nn.Module = nn.Identity()
        self.project_out: nn.Module = nn.Identity()
        if self._dim != inner:
            self.project_in = nn.Linear(self._dim, inner, bias=projection_has_bias)
            self.project_out = nn.Linear(inner, self._dim, bias=projection_has_bias)
        self._level_list = levels
        self._register_constants()

    def _constants(self, device: torch.device | None = None) -> dict[str, torch.Tensor | None]:
        levels = self._level_list
        return {
            "_levels": vector_of(levels, torch.int32, device),
            "_basis": place_values("FSP", levels, device),
        }

    def extra_repr(self) -> str:
        """Return the sizes."""
        return f"levels={self._level_list}, dim={self.dim}, act_name={self.act_name!r}"

    dim = fixed("dim", lambda layer: layer._dim, "Length of the vectors.")
    codebook_dim = fixed("codebook_dim", lambda layer: len(layer._levels), "Length of a codeword.")
    codebook_size = fixed(
        "codebook_size", lambda layer: math.prod(layer._level_list), "K, the product of levels."
    )
    act_name = fixed(
        "act_name", lambda layer: layer._act_name, "Name of act_func and inv_act_func, which may be set."
    )
    has_projections = fixed(
        "has_projections",
        lambda layer: not isinstance(layer.project_in, nn.Identity),
        "True if project_in and project_out are linear.",
    )

    @property
    def bits_per_vector(self) -> float:
        """Return the bits of the index of a vector, log2(K)."""
        return float(sum(map(math.log2, self._level_list)))

    # --- bins ----------------------------------------------------------------------------------------------

    def quantize_act_value(self, act_z: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the middles of the bins of ``[..., d]``, and the numbers of the bins.

        The middles have the gradient of ``act_z``.
        """
        places = (act_z.clamp(max=1 - eps) * self._constant("_levels")).floor().detach()
        return straight_through(act_z, (places + 0.5) / self._constant("_levels")), places

    def _perturbed(self, act_z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Move ``[..., d]`` by up to half a bin where the result is from 0 to 1.

        Also return the share of values that moved.
        """
        moved = act_z + (torch.rand_like(act_z, memory_format=torch.contiguous_format) * 2 - 1) / (
            self._constant("_levels") * 2
        )
        inside = (moved > 0) & (moved < 1)
        return torch.where(inside, moved, act_z), inside.float().sum() / max(1, inside.numel())

    def _values(self, act_z: torch.Tensor, eps: float) -> torch.Tensor:
        """Map numbers from 0 to 1 back."""
        if self.need_inv_act:
            return self.inv_act_func(act_z.clamp(eps, 1 - eps))
        return (act_z - 0.5) / _DEVIATION

    # --- indices -------------------------------------------------------------------------------------------

    def level_indices_to_indices(self, level_indices: torch.Tensor) -> torch.Tensor:
        """Return the index ``[...]``, int32 or int64 as ``forward``, of the numbers of bins ``[..., d]``.

        NaN counts as the first bin.
        """
        return (
            (level_indices.nan_to_num(nan=0).long() * self._constant("_basis"))
            .sum(-1)
            .to(self._constant("_basis").dtype)
        )

    @in_a_call
    def indices_to_level_indices(self, indices: torch.Tensor) -> torch.Tensor:
        """Return the numbers of bins ``[..., d]`` of indices ``[...]``."""
        indices = as_indices("FSP", indices, least=0, size=self.codebook_size)
        return indices.unsqueeze(-1) // self._constant("_basis") % self._constant("_levels")

    @in_a_call
    def indices_to_act_value(self, indices: torch.Tensor) -> torch.Tensor:
        """Return the middles of the bins ``[..., d]`` of indices ``[...]``."""
        return (self.indices_to_level_indices(indices).float() + 0.5) / self._constant("_levels")

    @in_a_call
    def indices_to_codes(self, indices: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
        """Return what ``forward`` returns as quantized for these indices, integers of any width."""
        codewords = self._values(self.indices_to_act_value(indices), eps).to(self._model_dtype)
        output = project(self.project_out, codewords)
        return output.movedim(-1, 1) if self.channel_first else output

    get_output_from_indices = indices_to_codes

    def forward(
        self, z: torch.Tensor, eps: float | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]:
        """Quantize z.

        Args:
            z: ``[..., dim]``, or ``[B, dim, ...]`` for ``channel_first``.
            eps: the last bin ends this much before 1; by default the epsilon of the dtype.

        Returns:
            ``(quantized, indices, loss, info)``. ``quantized`` has the shape of z. ``indices`` have this
            shape without the channels, int32, or int64 for more than 2^31 codewords. ``loss`` is the scalar
            of ``vector_norm``. ``info`` is a dict of the numbers of bins and the moments. In training, it
            also has the share of elements that could be moved.

        Raises:
            ValueError: a shape that does not fit.
            TypeError: the input is not a tensor of floats.
        """
        if isinstance(z, MethodCall):
            return z()  # type: ignore[no-any-return]
        z = channels_last("FSP", z, self.dim, self.channel_first, "z")
        eps = torch.finfo(z.dtype).eps if eps is None else eps
        lead = z.shape[:-1]
        z = self.project_in(z.reshape(-1, self.dim))
        loss, moments = self.vector_norm(z)
        act_z = self.act_func(z)
        values, places = self.quantize_act_value(act_z, eps)
        info: dict[str, Any] = {"level_indices": places.reshape(*lead, z.shape[-1]), "norm_info": moments}
        rate = self.quantize_rate if self.training else 1.0
        if rate < 1:
            moved, info["p_accept_prob"] = self._perturbed(act_z)
            values = torch.where(torch.rand_like(values) > rate, moved, values)
        codewords = self._values(values, eps)
        if self.need_inv_act:
            codewords = straight_through(z, codewords)
        output = self.project_out(codewords).reshape(*lead, self.dim)
        output = output.movedim(-1, 1) if self.channel_first else output
        return output, self.level_indices_to_indices(places).reshape(lead), loss, info
