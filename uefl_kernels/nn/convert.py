"""Convert state dicts of EnCodec, Mimi, DAC and VQModel to layers of this package, and back.

Each ``from_`` function takes the state dict of a model or of its quantizer, and returns a layer with the same
codewords, in float32. Each ``to_`` function returns a state dict for ``model.load_state_dict(...,
strict=False)``. A state dict has neither decays nor the weights of losses. The defaults are the values of the
published training code, and options of the layer replace them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import nn

from ._shared import at_least_float32
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

StateDict = Mapping[str, torch.Tensor]
_Quantizer = TypeVar("_Quantizer", ResidualVQ, VectorQuantize)
_LEARNED: dict[str, Any] = {"learnable_codebook": True, "rotation_trick": False}
_AVERAGED: dict[str, Any] = {
    "decay": 0.99,
    "threshold_ema_dead_code": 2,
    "rotation_trick": False,
    "quant_grad_frac": 1.0,
}


# --- EnCodec ---------------------------------------------------------------------------------------------


def from_encodec(state: StateDict, **options: Any) -> ResidualVQ:
    """Make a :class:`ResidualVQ` from the codebooks of EnCodec.

    Args:
        state: the state dict of ``transformers.EncodecModel``, of a model of the packages encodec or
            audiocraft, or of the quantizer.
        **options: options of :class:`ResidualVQ`; the defaults are the values of EnCodec's training.

    Returns:
        a layer for ``[B, D, T]``; its indices are ``[B, T, Q]``, where EnCodec has ``[Q, B, T]``.

    Raises:
        ValueError: the state dict has no codebooks of EnCodec.
    """
    pattern = r"layers\.(\d+)\._?codebook\.(inited|cluster_size|embed|embed_avg)"
    layers = _numbered("from_encodec", state, pattern, "layers.")
    codebooks = [
        {
            "initted": _of_shape("from_encodec", "inited", codebook["inited"].view(-1), 1)[0].bool(),
            "cluster_size": codebook["cluster_size"].unsqueeze(0),
            "embed": codebook["embed"].unsqueeze(0),
            "embed_avg": codebook["embed_avg"].unsqueeze(0),
        }
        for codebook in layers
    ]
    size, dim = _size("from_encodec", layers[0]["embed"])
    arguments: dict[str, Any] = {
        "dim": dim,
        "num_quantizers": len(codebooks),
        "codebook_size": size,
        "channel_last": False,
    }
    return _with_codebooks("from_encodec", ResidualVQ(**arguments | _AVERAGED | options), codebooks)


def to_encodec(
    layer: ResidualVQ, prefix: str = "quantizer.", original: bool = False
) -> dict[str, torch.Tensor]:
    """Return the codebooks of a layer as a state dict of EnCodec.

    Args:
        layer: a layer without projections, trained with moving averages.
        prefix: the beginning of every name.
        original: use the names of encodec and audiocraft, such as ``vq.layers.0._codebook.embed``; False: the
            names of transformers, such as ``layers.0.codebook.embed``.

    Raises:
        ValueError: EnCodec has no equivalent of the layer.
    """
    _require("to_encodec", layer, projections=False)
    name = "vq.layers.{}._codebook." if original else "layers.{}.codebook."
    found = {}
    for place, codebook in enumerate(_codebooks(layer)):
        start = prefix + name.format(place)
        usage, codewords = codebook.cluster_size[0], codebook.embed[0].detach()
        # learned codewords have no averages, and EnCodec's training makes the codewords from averages
        total = codebook.embed_avg[0] if codebook.ema_update else codewords * usage.unsqueeze(-1)
        found[start + "inited"] = codebook.initted.float().reshape(1)
        for buffer, value in (("cluster_size", usage), ("embed", codewords), ("embed_avg", total)):
            found[start + buffer] = value.clone()
    return found


# --- Mimi ------------------------------------------------------------------------------------------------

_MIMI = ("semantic", "acoustic")
_LEAST_USAGE = 1e-5  # Mimi divides by the usage of a codeword, or by this if the usage is smaller


def from_mimi(state: StateDict, **options: Any) -> tuple[ResidualVQ, ResidualVQ]:
    """Make the semantic and the acoustic :class:`ResidualVQ` of Mimi.

    Mimi adds their outputs.

    Args:
        state: the state dict of ``transformers.MimiModel``, or of its quantizer.
        **options: options of both layers.

    Returns:
        two layers for ``[B, D, T]``; their indices are ``[B, T, Q]``, where Mimi has ``[Q, B, T]``.

    Raises:
        ValueError: the state dict has no codebooks of Mimi.
    """
    semantic, acoustic = (_from_half(state, half, options) for half in _MIMI)
    return semantic, acoustic


def _from_half(state: StateDict, half: str, options: dict[str, Any]) -> ResidualVQ:
    start = rf"{half}_residual_vector_quantizer\."
    pattern = rf"{start}layers\.(\d+)\.codebook\.(initialized|cluster_usage|embed_sum)"
    layers = _numbered("from_mimi", state, pattern, f"{half}_residual_vector_quantizer.layers.")
    size, inner = _size("from_mimi", layers[0]["embed_sum"])
    codebooks = []
    for codebook in layers:
        total = _of_shape("from_mimi", "embed_sum", codebook["embed_sum"], size, inner)
        usage = _of_shape("from_mimi", "cluster_usage", codebook["cluster_usage"], size)
        # the model divides in the dtype of the state, too
        codewords = total / usage.clamp(min=_LEAST_USAGE).unsqueeze(-1)
        buffers = {"cluster_size": usage, "embed": codewords, "embed_avg": total}
        codebooks.append({name: value.unsqueeze(0) for name, value in buffers.items()})
        flag = _of_shape("from_mimi", "initialized", codebook["initialized"].view(-1), 1)
        codebooks[-1]["initted"] = flag[0].bool()
    names = [f"{half}_residual_vector_quantizer.{name}_proj." for name in ("input", "output")]
    projections = _named("from_mimi", state, rf"{start}(input_proj|output_proj)\.weight", *names)
    if len(projections) == 1:
        (only,) = projections
        raise ValueError(f"from_mimi: {half} has only {only}, expected input_proj and output_proj, or none")
    dim = max(1, projections["output_proj"].shape[:1].numel()) if projections else inner
    arguments: dict[str, Any] = {
        "dim": dim,
        "codebook_dim": inner,
        "num_quantizers": len(codebooks),
        "codebook_size": size,
    }
    layer = ResidualVQ(**arguments | {"channel_last": False} | _AVERAGED | options)
    if projections:
        layer.project_in, layer.project_out = (
            _linear("from_mimi", name, rows, columns, projections[name])
            for name, rows, columns in (("input_proj", inner, dim), ("output_proj", dim, inner))
        )
    return _with_codebooks("from_mimi", layer, codebooks)


def to_mimi(
    semantic: ResidualVQ, acoustic: ResidualVQ, prefix: str = "quantizer."
) -> dict[str, torch.Tensor]:
    """Return the codebooks and projections of two layers as a state dict of Mimi.

    Raises:
        ValueError: Mimi has no equivalent of a layer, for example of the bias of a projection.
    """
    found = {}
    for half, layer in zip(_MIMI, (semantic, acoustic), strict=True):
        _require("to_mimi", layer, projections=None)
        start = f"{prefix}{half}_residual_vector_quantizer."
        for name, module in (("input_proj", layer.project_in), ("output_proj", layer.project_out)):
            if isinstance(module, nn.Linear):
                if module.bias is not None and bool(module.bias.any()):
                    raise ValueError("to_mimi: the projections of the layer have a bias, but Mimi has none")
                found[f"{start}{name}.weight"] = module.weight.detach().unsqueeze(-1).clone()
        for place, codebook in enumerate(_codebooks(layer)):
            usage, codewords = codebook.cluster_size[0], codebook.embed[0].detach()
            divisor = usage.clamp(min=_LEAST_USAGE).unsqueeze(-1)
            total = codebook.embed_avg[0]
            # Mimi divides embed_sum by the usage, and the result must be the codewords of the layer
            total = total if torch.equal(total / divisor, codewords) else codewords * divisor
            at = f"{start}layers.{place}.codebook."
            found[at + "initialized"] = codebook.initted.float().reshape(1)
            found[at + "cluster_usage"] = usage.clone()
            found[at + "embed_sum"] = total.clone()
    return found


# --- DAC -------------------------------------------------------------------------------------------------


def from_dac(state: StateDict, **options: Any) -> ResidualVQ:
    """Make a :class:`ResidualVQ` from the codebooks and projections of DAC.

    The layer finds codewords by cosine similarity and keeps the lengths of the learned codewords. Each
    quantizer has its own projections. Weight normalization is multiplied into their weights.

    Args:
        state: the state dict of ``transformers.DacModel``, of a model of the package descript-audio-codec, or
            of the quantizer.
        **options: options of :class:`ResidualVQ`; the defaults are the values of DAC's training.

    Returns:
        a layer for ``[B, D, T]``; its indices are ``[B, T, Q]``, where DAC has ``[B, Q, T]``.

    Raises:
        ValueError: the state dict has no codebooks of DAC.
    """
    pattern = r"quantizers\.(\d+)\.((?:in_proj|out_proj|codebook)\..+)"
    layers = _numbered("from_dac", state, pattern, "quantizers.")
    size, inner = _size("from_dac", layers[0]["codebook.weight"])
    dim = max(1, layers[0]["out_proj.bias"].numel())
    defaults: dict[str, Any] = {"cosine_search": True, "commitment_weight": 0.25, "codebook_loss_weight": 1.0}
    arguments: dict[str, Any] = {
        "dim": dim,
        "codebook_dim": inner,
        "num_quantizers": len(layers),
        "codebook_size": size,
    }
    arguments |= {"channel_last": False, "project_each": True, "quant_grad_frac": 1.0}
    layer = ResidualVQ(**arguments | defaults | _LEARNED | options)
    codebooks = [_learned_state(tensors["codebook.weight"]) for tensors in layers]
    for quantizer, tensors in zip(layer._quantizers, layers, strict=True):
        quantizer.project_in, quantizer.project_out = (
            _linear(
                "from_dac",
                name,
                rows,
                columns,
                _weight(tensors, name, rows, columns),
                tensors[f"{name}.bias"],
            )
            for name, rows, columns in (("in_proj", inner, dim), ("out_proj", dim, inner))
        )
    return _with_codebooks("from_dac", layer, codebooks)


def to_dac(
    layer: ResidualVQ, prefix: str = "quantizer.", weight_norm: bool = False
) -> dict[str, torch.Tensor]:
    """Return the codebooks and projections of a layer as a state dict of DAC.

    Args:
        layer: a layer with ``project_each`` and ``cosine_search``.
        prefix: the beginning of every name.
        weight_norm: store projections as ``weight_g`` and ``weight_v``, as descript-audio-codec; False: as
            ``weight``, as transformers.

    Raises:
        ValueError: DAC has no equivalent of the layer.
    """
    _require("to_dac", layer, projections=True)
    found = {}
    for place, quantizer in enumerate(layer._quantizers):
        start = f"{prefix}quantizers.{place}."
        found[start + "codebook.weight"] = quantizer.codebook.detach().clone()
        for name, projection in (("in_proj", quantizer.project_in), ("out_proj", quantizer.project_out)):
            module = cast(nn.Linear, projection)
            weight = module.weight.detach().unsqueeze(-1).clone()
            found[f"{start}{name}.bias"] = module.bias.detach().clone()
            if weight_norm:
                found[f"{start}{name}.weight_g"] = weight.norm(dim=(1, 2), keepdim=True)
                found[f"{start}{name}.weight_v"] = weight
            else:
                found[f"{start}{name}.weight"] = weight
    return found


def _weight(state: Mapping[str, torch.Tensor], name: str, rows: int, columns: int) -> torch.Tensor:
    """Return the weight ``[rows, columns, 1]`` of a convolution.

    It may be stored as length and direction.
    """
    for length, direction in (
        ("weight_g", "weight_v"),
        ("parametrizations.weight.original0", "parametrizations.weight.original1"),
    ):
        if f"{name}.{length}" in state:
            lengths = _of_shape("from_dac", f"{name}.{length}", state[f"{name}.{length}"], rows, 1, 1)
            vectors = _of_shape(
                "from_dac", f"{name}.{direction}", state[f"{name}.{direction}"], rows, columns, 1
            )
            vectors = at_least_float32(vectors)
            return torch._weight_norm(vectors, lengths.to(vectors.dtype), 0)
    return state[f"{name}.weight"]


# --- VQModel ---------------------------------------------------------------------------------------------


def from_vqmodel(state: StateDict, beta: float = 0.25, legacy: bool = True, **options: Any) -> VectorQuantize:
    """Make a :class:`VectorQuantize` from the codebook of a VQModel.

    Args:
        state: the state dict of ``diffusers.VQModel``, of a model of taming-transformers, or of the
            quantizer.
        beta: the weight of one of the two losses; the other loss has weight 1.
        legacy: beta is the weight of the loss that moves the codewords, the default of both packages; False:
            beta is the weight of the commitment loss, as in the paper.
        **options: options of :class:`VectorQuantize`.

    Returns:
        a layer for ``[B, D, H, W]``; its indices are ``[B, H, W]``.

    Raises:
        ValueError: the state dict has no codebook of a VQModel.
    """
    found = _named("from_vqmodel", state, r"quantize\.(embedding)\.weight", "quantize.")
    found = found or _named("from_vqmodel", state, r"(embedding)\.weight", "embedding.", "used")
    if not found:
        raise ValueError("from_vqmodel: found no name like 'quantize.embedding.weight' in the state dict")
    codewords = found["embedding"]
    size, dim = _size("from_vqmodel", codewords)
    weights = (1.0, beta) if legacy else (beta, 1.0)
    arguments: dict[str, Any] = {"dim": dim, "codebook_size": size, "accept_image_fmap": True}
    arguments |= dict(zip(("commitment_weight", "codebook_loss_weight"), weights, strict=True))
    layer = VectorQuantize(**arguments | _LEARNED | options)
    return _with_codebooks("from_vqmodel", layer, [_learned_state(codewords)])


def to_vqmodel(layer: VectorQuantize, prefix: str = "quantize.") -> dict[str, torch.Tensor]:
    """Return the codebook of a layer as a state dict of a VQModel.

    Raises:
        ValueError: a VQModel has no equivalent of the layer.
    """
    _require_quantizer("to_vqmodel", layer, learned=False)
    codewords = layer._codebook.embed[0].detach().clone()
    return {prefix + "embedding.weight": codewords}


# --- helpers ---------------------------------------------------------------------------------------------


def _numbered(where: str, state: StateDict, pattern: str, *own: str) -> list[dict[str, torch.Tensor]]:
    """Return the tensors of each quantizer by name.

    The first group of the pattern is the number of the quantizer, the second the name. Raise ValueError if a
    number is missing, the names differ, or a name that begins with ``own`` is not read.
    """
    found: dict[int, dict[str, torch.Tensor]] = {}
    for match, value in _matches(where, state, pattern, own):
        found.setdefault(int(match[2]), _Parts(where))[match[3]] = value
    states = [found[place] for place in sorted(found)]
    if not states or sorted(found) != list(range(len(states))):
        raise ValueError(
            f"{where}: found quantizers {sorted(found)}; expected names like {pattern!r}, numbered from 0"
        )
    if any(each.keys() != states[0].keys() for each in states):
        raise ValueError(f"{where}: quantizers have different names: {[sorted(each) for each in states]}")
    return states


class _Parts(dict[str, torch.Tensor]):
    """The tensors of a quantizer by name.

    Reading an absent one raises ValueError.
    """

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def __missing__(self, name: str) -> torch.Tensor:
        raise ValueError(f"{self.where}: found no {name} of a quantizer, only {sorted(self)}")


def _named(where: str, state: StateDict, pattern: str, *own: str) -> dict[str, torch.Tensor]:
    """Return the tensors with a name that ends with the pattern.

    The keys are its first group.
    """
    return {match[2]: value for match, value in _matches(where, state, pattern, own)}


def _matches(
    where: str, state: StateDict, pattern: str, own: Sequence[str]
) -> list[tuple[re.Match[str], torch.Tensor]]:
    """Return the tensors with a name that ends with the pattern, and the match.

    Raise ValueError if the names begin in several ways, because they then belong to several models. Raise
    ValueError also if another name has the same beginning, followed by one of ``own``, because the layer
    would lose this part of the quantizer.
    """
    if not isinstance(state, Mapping):
        raise TypeError(
            f"{where}: state must be a state dict, got {type(state).__name__}; give model.state_dict()"
        )
    matches = [(re.fullmatch(rf"(.*\.)?{pattern}", str(name)), value) for name, value in state.items()]
    for match, value in matches:
        kind = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
        if match and (not isinstance(value, torch.Tensor) or value.is_complex() or value.is_meta):
            raise TypeError(f"{where}: {match[0]} must be a tensor of real numbers with values, got {kind}")
    found = [(match, value) for match, value in matches if match is not None]
    starts = sorted({match[1] or "" for match, _ in found})
    if len(starts) > 1:
        raise ValueError(f"{where}: found several models, {starts}; give the state dict of one")
    begins = tuple(starts[0] + name for name in own) if starts else ()
    unread = {name for name in map(str, state) if name.startswith(begins)} - {match[0] for match, _ in found}
    if unread:
        raise ValueError(
            f"{where}: the layer has no equivalent of {sorted(unread)}; omit it from the state dict to"
            " convert the rest"
        )
    return found


def _codebooks(layer: ResidualVQ) -> list[Any]:
    return [quantizer._codebook for quantizer in layer._quantizers]


def _learned_state(codewords: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the state of a codebook with learned codewords ``[K, d]``."""
    codewords = codewords.float().unsqueeze(0)
    usage = torch.ones(codewords.shape[:2], device=codewords.device)
    return {"initted": torch.tensor(True), "cluster_size": usage, "embed": codewords, "embed_avg": codewords}


def _with_codebooks(where: str, layer: _Quantizer, codebooks: Sequence[StateDict]) -> _Quantizer:
    """Load the state of each codebook, and return the layer."""
    quantizers = layer._quantizers if isinstance(layer, ResidualVQ) else [layer]
    for quantizer, state in zip(quantizers, codebooks, strict=True):
        try:
            quantizer._codebook.load_state_dict(state)
        except RuntimeError as error:
            problem = str(error).splitlines()[-1].strip()
            raise ValueError(
                f"{where}: the state dict does not fit itself or the options: {problem}"
            ) from None
    return layer


def _size(where: str, codewords: torch.Tensor) -> tuple[int, int]:
    """Return K and the length of codewords."""
    if codewords.dim() != 2 or codewords.numel() == 0:
        raise ValueError(f"{where}: codewords must have shape [K, d], got {list(codewords.shape)}")
    return codewords.shape[0], codewords.shape[1]


def _of_shape(where: str, name: str, tensor: torch.Tensor, *shape: int) -> torch.Tensor:
    if tensor.shape != shape:
        raise ValueError(f"{where}: {name} must have shape {list(shape)}, got {list(tensor.shape)}")
    return tensor


def _linear(
    where: str, name: str, rows: int, columns: int, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> nn.Linear:
    """Make a linear layer from the weight ``[rows, columns, 1]`` of a convolution.

    It has the dtype of codewords.
    """
    _of_shape(where, f"{name}.weight", weight, rows, columns, 1)
    if bias is not None:
        _of_shape(where, f"{name}.bias", bias, rows)
    dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, dtype=dtype)
    with torch.no_grad():
        made.weight.copy_(weight.squeeze(-1))
        if bias is not None:
            made.bias.copy_(bias)
    return made


def _require(where: str, layer: ResidualVQ, projections: bool | None) -> None:
    """Raise ValueError for a layer that has no equivalent in the codec.

    ``projections``: True if each quantizer of the codec has projections, False if there are none, None if
    there may be one pair for the layer.
    """
    if not isinstance(layer, ResidualVQ):
        raise TypeError(f"{where}: layer must be a ResidualVQ, got {type(layer).__name__}")
    learned = projections is True  # DAC: projections of each quantizer, cosine search
    _refuse(
        where,
        (layer.project_each != learned, f"project_each={layer.project_each}"),
        (projections is False and layer.has_projections, "projections"),
        (layer.implicit_neural_codebook, "implicit_neural_codebook=True"),
        (not layer.uniform_codebook_size, "codebooks of several sizes"),
    )
    for quantizer in layer._quantizers:
        _require_quantizer(where, quantizer, learned)


def _require_quantizer(where: str, quantizer: VectorQuantize, learned: bool) -> None:
    """Raise ValueError for a quantizer that the codec does not have, or has with other codewords."""
    if not isinstance(quantizer, VectorQuantize):
        raise TypeError(f"{where}: layer must be a VectorQuantize, got {type(quantizer).__name__}")
    codebook, projections = quantizer._codebook, (quantizer.project_in, quantizer.project_out)
    biased = all(isinstance(module, nn.Linear) and module.bias is not None for module in projections)
    _refuse(
        where,
        (quantizer.heads > 1, f"heads={quantizer.heads}"),
        (learned and not biased, "quantizers without linear projections, each with a bias"),
        (not learned and quantizer.has_projections, "projections"),
        (codebook.use_cosine_sim, "use_cosine_sim=True"),
        (codebook.cosine_search != learned, f"cosine_search={not learned}"),
        (codebook.affine_param, "affine_param=True"),
        (codebook.vq_bridge is not None, "vq_bridge"),
    )


def _refuse(where: str, *checks: tuple[bool, str]) -> None:
    for refused, what in checks:
        if refused:
            codec = where.removeprefix("to_")
            raise ValueError(f"{where}: {codec} has no equivalent of a layer with {what}")
