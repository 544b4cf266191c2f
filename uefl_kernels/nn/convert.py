"""State dicts of EnCodec, Mimi, DAC and VQModel to layers of ours, and back.

Each ``from_`` function takes the state dict of a model or of its quantizer, and returns a layer with the same
codewords, in float32. Each ``to_`` function returns a state dict for ``model.load_state_dict(...,
strict=False)``. A state dict holds no decays and no weights of losses. They default to the values of the
published training code; give other values as options of the layer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from .residual_vq import ResidualVQ
from .vector_quantize import VectorQuantize

__all__ = [
    "from_dac",
    "from_encodec",
    "from_mimi",
    "from_vqmodel",
    "to_dac",
    "to_encodec",
    "to_mimi",
    "to_vqmodel",
]

State = Mapping[str, torch.Tensor]
_LEARNED: dict[str, Any] = {"learnable_codebook": True, "rotation_trick": False}
_AVERAGED: dict[str, Any] = {
    "decay": 0.99,
    "threshold_ema_dead_code": 2,
    "rotation_trick": False,
    "quant_grad_frac": 1.0,
}


# --- EnCodec ---------------------------------------------------------------------------------------------


def from_encodec(state: State, **options: Any) -> ResidualVQ:
    """Make a :class:`ResidualVQ` of the codebooks of EnCodec.

    Args:
        state: of ``transformers.EncodecModel``, of the packages encodec and audiocraft, or of the quantizer.
        **options: of :class:`ResidualVQ`; encodec's training sets the defaults.

    Returns:
        a layer for ``[B, D, T]``; its indices are ``[B, T, Q]``, where EnCodec has ``[Q, B, T]``.

    Raises:
        ValueError: the state dict holds no codebooks of EnCodec.
    """
    pattern = r"layers\.(\d+)\._?codebook\.(inited|cluster_size|embed|embed_avg)"
    layers = _numbered("from_encodec", state, pattern)
    books = [
        {
            "initted": book["inited"].bool().reshape(()),
            "cluster_size": book["cluster_size"].unsqueeze(0),
            "embed": book["embed"].unsqueeze(0),
            "embed_avg": book["embed_avg"].unsqueeze(0),
        }
        for book in layers
    ]
    size, dim = layers[0]["embed"].shape
    made: dict[str, Any] = {
        "dim": dim,
        "num_quantizers": len(books),
        "codebook_size": size,
        "channel_last": False,
    }
    return _filled(ResidualVQ(**made | _AVERAGED | options), books)


def to_encodec(
    layer: ResidualVQ, prefix: str = "quantizer.", original: bool = False
) -> dict[str, torch.Tensor]:
    """Return the codebooks of a layer in the form of EnCodec.

    Args:
        layer: without projections, and with codewords that are averages.
        prefix: the beginning of every name.
        original: write names of the packages encodec and audiocraft, as ``vq.layers.0._codebook.embed``.
            The default is names of transformers, as ``layers.0.codebook.embed``.

    Raises:
        ValueError: EnCodec cannot hold the layer.
    """
    _require("to_encodec", layer, projections=False)
    name = "vq.layers.{}._codebook." if original else "layers.{}.codebook."
    found = {}
    for place, book in enumerate(_books(layer)):
        start = prefix + name.format(place)
        found[start + "inited"] = book.initted.float().reshape(1)
        for part in ("cluster_size", "embed", "embed_avg"):
            found[start + part] = getattr(book, part)[0].clone()
    return found


# --- Mimi ------------------------------------------------------------------------------------------------

_MIMI = ("semantic", "acoustic")
_FEWEST = 1e-5  # Mimi divides by at least this


def from_mimi(state: State, **options: Any) -> tuple[ResidualVQ, ResidualVQ]:
    """Make the semantic and the acoustic :class:`ResidualVQ` of Mimi; Mimi adds their outputs.

    Args:
        state: of ``transformers.MimiModel``, or of its quantizer.
        **options: of both layers.

    Returns:
        two layers for ``[B, D, T]``; their indices are ``[B, T, Q]``, where Mimi has ``[Q, B, T]``.

    Raises:
        ValueError: the state dict holds no codebooks of Mimi.
    """
    semantic, acoustic = (_from_half(state, half, options) for half in _MIMI)
    return semantic, acoustic


def _from_half(state: State, half: str, options: dict[str, Any]) -> ResidualVQ:
    start = rf"{half}_residual_vector_quantizer\."
    pattern = rf"{start}layers\.(\d+)\.codebook\.(initialized|cluster_usage|embed_sum)"
    layers = _numbered("from_mimi", state, pattern)
    books = []
    for book in layers:
        total, usage = book["embed_sum"].float(), book["cluster_usage"].float()
        codes = total / usage.clamp(min=_FEWEST).unsqueeze(-1)
        parts = {"cluster_size": usage, "embed": codes, "embed_avg": total}
        books.append({name: value.unsqueeze(0) for name, value in parts.items()})
        books[-1]["initted"] = book["initialized"].bool().reshape(())
    size, inner = layers[0]["embed_sum"].shape
    maps = _named(state, rf"{start}(input_proj|output_proj)\.weight")
    dim = maps["input_proj"].shape[1] if maps else inner
    made: dict[str, Any] = {
        "dim": dim,
        "codebook_dim": inner,
        "num_quantizers": len(books),
        "codebook_size": size,
    }
    layer = ResidualVQ(**made | {"channel_last": False} | _AVERAGED | options)
    if maps:
        layer.project_in, layer.project_out = (_linear(maps[name]) for name in ("input_proj", "output_proj"))
    return _filled(layer, books)


def to_mimi(
    semantic: ResidualVQ, acoustic: ResidualVQ, prefix: str = "quantizer."
) -> dict[str, torch.Tensor]:
    """Return the codebooks and projections of two layers in the form of Mimi.

    Raises:
        ValueError: Mimi cannot hold a layer, for example the bias of a projection.
    """
    found = {}
    for half, layer in zip(_MIMI, (semantic, acoustic), strict=True):
        _require("to_mimi", layer, projections=None)
        start = f"{prefix}{half}_residual_vector_quantizer."
        for name, module in (("input_proj", layer.project_in), ("output_proj", layer.project_out)):
            if isinstance(module, nn.Linear):
                if module.bias is not None and bool(module.bias.any()):
                    raise ValueError("to_mimi: the projections of Mimi have no bias, those of the layer do")
                found[f"{start}{name}.weight"] = module.weight.detach().unsqueeze(-1).clone()
        for place, book in enumerate(_books(layer)):
            usage, codes = book.cluster_size[0], book.embed[0]
            divisor = usage.clamp(min=_FEWEST).unsqueeze(-1)
            total = book.embed_avg[0]
            total = total if torch.equal(total / divisor, codes) else codes * divisor
            at = f"{start}layers.{place}.codebook."
            found[at + "initialized"] = book.initted.float().reshape(1)
            found[at + "cluster_usage"] = usage.clone()
            found[at + "embed_sum"] = total.clone()
    return found


# --- DAC -------------------------------------------------------------------------------------------------


def from_dac(state: State, **options: Any) -> ResidualVQ:
    """Make a :class:`ResidualVQ` of the codebooks and projections of DAC.

    The layer compares by the angle, keeps the lengths of its learned codewords, and each quantizer projects
    on its own. The weight normalization of the projections is multiplied out.

    Args:
        state: of ``transformers.DacModel``, of the package descript-audio-codec, or of the quantizer.
        **options: of :class:`ResidualVQ`; DAC's training sets the defaults.

    Returns:
        a layer for ``[B, D, T]``; its indices are ``[B, T, Q]``, where DAC has ``[B, Q, T]``.

    Raises:
        ValueError: the state dict holds no codebooks of DAC.
    """
    layers = _numbered("from_dac", state, r"quantizers\.(\d+)\.((?:in_proj|out_proj|codebook)\..+)")
    size, inner = layers[0]["codebook.weight"].shape
    dim = layers[0]["out_proj.bias"].shape[0]
    defaults: dict[str, Any] = {"cosine_search": True, "commitment_weight": 0.25, "codebook_loss_weight": 1.0}
    made: dict[str, Any] = {
        "dim": dim,
        "codebook_dim": inner,
        "num_quantizers": len(layers),
        "codebook_size": size,
    }
    made |= {"channel_last": False, "project_each": True, "quant_grad_frac": 1.0}
    layer = ResidualVQ(**made | defaults | _LEARNED | options)
    books = [_at_rest(parts["codebook.weight"]) for parts in layers]
    for quantizer, parts in zip(layer._quantizers, layers, strict=True):
        quantizer.project_in, quantizer.project_out = (
            _linear(_weight(parts, name), parts[f"{name}.bias"]) for name in ("in_proj", "out_proj")
        )
    return _filled(layer, books)


def to_dac(
    layer: ResidualVQ, prefix: str = "quantizer.", weight_norm: bool = False
) -> dict[str, torch.Tensor]:
    """Return the codebooks and projections of a layer in the form of DAC.

    Args:
        layer: made with ``project_each`` and ``cosine_search``.
        prefix: the beginning of every name.
        weight_norm: the projections as ``weight_g`` and ``weight_v``, as in descript-audio-codec, and not as
            ``weight``, as in transformers.

    Raises:
        ValueError: DAC cannot hold the layer.
    """
    _require("to_dac", layer, projections=True)
    found = {}
    for place, quantizer in enumerate(layer._quantizers):
        start = f"{prefix}quantizers.{place}."
        found[start + "codebook.weight"] = quantizer.codebook.detach().clone()
        for name, held in (("in_proj", quantizer.project_in), ("out_proj", quantizer.project_out)):
            module = cast(nn.Linear, held)
            weight = module.weight.detach().unsqueeze(-1).clone()
            found[f"{start}{name}.bias"] = module.bias.detach().clone()
            if weight_norm:
                found[f"{start}{name}.weight_g"] = weight.norm(dim=(1, 2), keepdim=True)
                found[f"{start}{name}.weight_v"] = weight
            else:
                found[f"{start}{name}.weight"] = weight
    return found


def _weight(parts: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """Return the weight ``[out, in, 1]`` of a convolution, also where it is stored as length and
    direction."""
    for length, direction in (
        ("weight_g", "weight_v"),
        ("parametrizations.weight.original0", "parametrizations.weight.original1"),
    ):
        if f"{name}.{length}" in parts:
            return torch._weight_norm(parts[f"{name}.{direction}"], parts[f"{name}.{length}"], 0)
    return parts[f"{name}.weight"]


# --- VQModel ---------------------------------------------------------------------------------------------


def from_vqmodel(state: State, beta: float = 0.25, legacy: bool = True, **options: Any) -> VectorQuantize:
    """Make a :class:`VectorQuantize` of the codebook of a VQModel.

    Args:
        state: of ``diffusers.VQModel``, of taming-transformers' models, or of the quantizer.
        beta: the weight of one of the two losses; the other one has weight 1.
        legacy: beta weighs the loss that moves the codewords, as both packages do by default; False weighs
            the loss that moves the input, as in the paper.
        **options: of :class:`VectorQuantize`.

    Returns:
        a layer for ``[B, D, H, W]``; its indices are ``[B, H, W]``.

    Raises:
        ValueError: the state dict holds no codebook of a VQModel.
    """
    found = _named(state, r"(?:quantize\.)?(embedding)\.weight")
    if not found:
        raise ValueError("from_vqmodel: found no name like 'quantize.embedding.weight' in the state dict")
    codes = found["embedding"]
    weights = (1.0, beta) if legacy else (beta, 1.0)
    made: dict[str, Any] = {"dim": codes.shape[1], "codebook_size": codes.shape[0], "accept_image_fmap": True}
    made |= dict(zip(("commitment_weight", "codebook_loss_weight"), weights, strict=True))
    layer = VectorQuantize(**made | _LEARNED | options)
    layer._codebook.load_state_dict(_at_rest(codes))
    return layer


def to_vqmodel(layer: VectorQuantize, prefix: str = "quantize.") -> dict[str, torch.Tensor]:
    """Return the codebook of a layer in the form of a VQModel.

    Raises:
        ValueError: a VQModel cannot hold the layer.
    """
    if layer.codebook.dim() != 2 or layer.heads > 1 or layer.has_projections or layer.use_cosine_sim:
        raise ValueError("to_vqmodel: a VQModel has one codebook, without projections, compared by distance")
    return {prefix + "embedding.weight": layer.codebook.detach().clone()}


# --- helpers ---------------------------------------------------------------------------------------------


def _numbered(where: str, state: State, pattern: str) -> list[dict[str, torch.Tensor]]:
    """Return the parts of each quantizer, by the name in the last group; raise ValueError for missing
    ones."""
    found: dict[int, dict[str, torch.Tensor]] = {}
    for name, value in state.items():
        match = re.fullmatch(rf"(?:.*\.)?{pattern}", name)
        if match is not None:
            found.setdefault(int(match[1]), {})[match[2]] = value
    parts = [found[place] for place in sorted(found)]
    if not parts or sorted(found) != list(range(len(parts))):
        raise ValueError(
            f"{where}: found quantizers {sorted(found)}, expected names like {pattern!r} from 0 on"
        )
    if any(part.keys() != parts[0].keys() for part in parts):
        raise ValueError(f"{where}: quantizers hold different names: {[sorted(part) for part in parts]}")
    return parts


def _named(state: State, pattern: str) -> dict[str, torch.Tensor]:
    """Find the tensors with a name that ends with the pattern; the keys are its first group."""
    matches = ((re.fullmatch(rf"(?:.*\.)?{pattern}", name), value) for name, value in state.items())
    return {match[1]: value for match, value in matches if match is not None}


def _books(layer: ResidualVQ) -> list[Any]:
    return [quantizer._codebook for quantizer in layer._quantizers]


def _at_rest(codes: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the state of a codebook with learned codewords ``[K, d]``."""
    codes = codes.float().unsqueeze(0)
    sizes = torch.ones(codes.shape[:2], device=codes.device)
    return {"initted": torch.tensor(True), "cluster_size": sizes, "embed": codes, "embed_avg": codes}


def _filled(layer: ResidualVQ, books: Sequence[State]) -> ResidualVQ:
    """Load the state of each codebook."""
    for book, state in zip(_books(layer), books, strict=True):
        book.load_state_dict(state)
    return layer


def _linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> nn.Linear:
    """Make a linear layer of a convolution ``[out, in, 1]``."""
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    with torch.no_grad():
        made.weight.copy_(weight.squeeze(-1))
        if bias is not None:
            made.bias.copy_(bias)
    return made


def _require(where: str, layer: ResidualVQ, projections: bool | None) -> None:
    """Raise ValueError for a layer that the codec cannot hold.

    ``projections`` is True where each quantizer projects, False for none, None for one pair of the layer.
    """
    learned = projections is True
    codec = where.removeprefix("to_")
    checks = (
        (layer.project_each != learned, f"project_each={layer.project_each}"),
        (projections is False and layer.has_projections, "projections"),
        (layer.implicit_neural_codebook, "implicit_neural_codebook=True"),
        (not layer.uniform_codebook_size, "codebooks of several sizes"),
        (any(book.use_cosine_sim for book in _books(layer)), "use_cosine_sim=True"),
        (any(book.cosine_search != learned for book in _books(layer)), f"cosine_search={not learned}"),
    )
    for refused, what in checks:
        if refused:
            raise ValueError(f"{where}: {codec} cannot hold a layer with {what}")
