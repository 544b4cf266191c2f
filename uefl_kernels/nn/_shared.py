"""Helpers of several layers.

They check arguments, move channels, keep codewords in float32, and estimate gradients.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from operator import index
from types import MethodType
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from .._checks import DTYPES, check_dense, check_tensor
from .._dtypes import vector_of
from .._numbers import as_integer, is_count

HALF = (torch.float16, torch.bfloat16)
_INDICES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32)

# --- arguments -----------------------------------------------------------------------------------


def counts(layer: str, **values: Any) -> tuple[int, ...]:
    """Return the values as ints, or raise ValueError for a value that is not an int of at least 1."""
    for name, value in values.items():
        if not is_count(value):
            raise ValueError(f"{layer}: {name} is {value!r}, expected an int of at least 1")
    return tuple(map(index, values.values()))


def count_of_each(layer: str, name: str, values: Any) -> list[int]:
    """Return a sequence of values as ints, or raise ValueError if it has others than ints of at least 1."""
    if isinstance(values, str) or not hasattr(values, "__len__"):
        raise ValueError(f"{layer}: {name} is {values!r}, expected a sequence of ints")
    return [*counts(layer, **{f"{name}[{place}]": value for place, value in enumerate(values)})]


def numbers(layer: str, most: float | None, **values: Any) -> None:
    """Raise ValueError for a value that is not a finite number from 0 to ``most`` (None: no limit)."""
    for name, value in values.items():
        number = float(value) if isinstance(value, Real) else -1.0
        if not 0 <= number <= (float("inf") if most is None else most) or number == float("inf"):
            expected = "of at least 0" if most is None else f"from 0 to {most}"
            raise ValueError(f"{layer}: {name} is {value!r}, expected a number {expected}")


def as_indices(
    layer: str, indices: Any, *, least: int | None = None, size: int | None = None, name: str = "indices"
) -> torch.Tensor:
    """Return indices, or other integers that ``name`` names, of any integer dtype as int64.

    On the CPU, the function refuses an index below ``least`` or above ``size`` - 1. Such an index can come
    from codes that were written in a type that is too narrow.

    Raises:
        TypeError: no dense tensor of integers.
        IndexError: an index is out of range.
    """
    if not isinstance(indices, torch.Tensor):
        kind = type(indices).__name__
        todo = (
            "; torch.from_numpy makes it one"
            if kind == "ndarray"
            else "; torch.tensor makes it one"
            if kind == "list"
            else ""
        )
        raise TypeError(f"{layer}: {name} must be a torch.Tensor, got {kind}{todo}")
    check_dense(layer, name, indices, (indices.dtype,))
    if indices.dtype not in _INDICES:
        raise TypeError(f"{layer}: {name}: expected integers, as torch.int64, got dtype {indices.dtype}")
    found = indices.long()
    if least is None or not _readable(found):
        return found
    low, high = (int(value) for value in found.aminmax())
    if low < least or (size is not None and high >= size):
        expected = f"at least {least}" if size is None else f"from {least} to {size - 1}"
        raise IndexError(f"{layer}: indices must be {expected}, got {low} to {high}")
    return found


def check_codewords(layer: str, codewords: torch.Tensor, d: int) -> None:
    """Raise TypeError or ValueError unless these are numbers ``[..., d]``."""
    check_dense(layer, "zhat", codewords, (*DTYPES, *_INDICES))
    if codewords.dim() == 0 or codewords.shape[-1] != d:
        raise ValueError(f"{layer}: zhat must have shape [..., {d}], got {list(codewords.shape)}")


def check_codebooks(layer: str, indices: torch.Tensor, codebooks: int) -> None:
    """Raise ValueError if the last dimension does not have one index for each codebook."""
    if indices.dim() == 0 or indices.shape[-1] != codebooks:
        raise ValueError(f"{layer}: indices must have shape [..., {codebooks}], got {list(indices.shape)}")


def _readable(indices: torch.Tensor) -> bool:
    """Return True if the values are at hand: on the CPU, outside of traces and function transforms."""
    if type(indices) is not torch.Tensor or indices.device.type != "cpu" or indices.numel() == 0:
        return False
    traced = torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined]
    return not traced and torch._C._functorch.peek_interpreter_stack() is None


def indices_of_each(layer: str, indices: Any, count: int) -> list[torch.Tensor]:
    """Return ``count`` tensors of indices as int64.

    The indices are given as a sequence or as ``[count, ...]``.

    Raises:
        TypeError: the indices are not tensors of integers.
        ValueError: the number of tensors is wrong.
    """
    if not isinstance(indices, (list, tuple)):
        indices = as_indices(layer, indices)
        indices = list(indices) if indices.dim() else []
    found = [as_indices(layer, each) for each in indices]
    if len(found) != count:
        raise ValueError(f"{layer}: expected {count} tensors of indices, got {len(found)}")
    return found


def channels_last(layer: str, x: torch.Tensor, dim: int, second: bool, name: str = "x") -> torch.Tensor:
    """Return vectors with their ``dim`` channels in the last dimension.

    If ``second`` is true, the channels of the input are in its second dimension.

    Raises:
        TypeError: x is not a dense tensor of floats.
        ValueError: fewer than two dimensions, or another number of channels.
    """
    check_dense(layer, name, x)
    if x.dim() < 2 or x.shape[1 if second else -1] != dim:
        expected = f"[B, {dim}, ...]" if second else f"[..., {dim}]"
        raise ValueError(f"{layer}: {name} must have shape {expected}, got {list(x.shape)}")
    return x.movedim(1, -1) if second else x


def place_values(layer: str, levels: Sequence[int], device: torch.device | None = None) -> torch.Tensor:
    """Return the factor ``[d]`` of each level in an index, int64 if int32 cannot represent every index.

    Raises:
        ValueError: more codewords than int64 can represent.
    """
    size = math.prod(levels)
    if size > 2**63:
        raise ValueError(
            f"{layer}: levels={list(levels)} has {size:.1e} codewords, more than int64 can index; divide the"
            " vectors among several codebooks"
        )
    factors = [math.prod(levels[:place]) for place in range(len(levels))]
    return vector_of(factors, torch.int32 if size <= 2**31 else torch.int64, device)


def refuse_together(layer: str, *found: tuple[bool, str]) -> None:
    """Raise ValueError for the first pair with a true condition."""
    for refused, message in found:
        if refused:
            raise ValueError(f"{layer}: {message}")


def fixed(name: str, get: Callable[[Any], Any], doc: str) -> Any:
    """Make a property whose value is fixed when the layer is made.

    Setting it raises AttributeError instead of doing nothing.
    """

    def refuse(layer: Any, value: Any) -> None:
        raise AttributeError(
            f"{type(layer).__name__}: {name} = {value!r} has no effect: the value is fixed when the layer"
            f" is made, or follows from another attribute ({doc}); make a new layer, or set that attribute"
        )

    return property(get, refuse, doc=doc)


def not_replaceable(method: Callable[..., Any]) -> Any:
    """Make a method that an instance cannot replace by a function of its own.

    The forward pass calls kernels in the place of this method, so the function would do nothing.
    """

    def refuse(layer: Any, value: Any) -> None:
        raise AttributeError(
            f"{type(layer).__name__}: {method.__name__} = {value!r} has no effect, because the forward pass"
            " does not call this method"
        )

    return property(lambda layer: MethodType(method, layer), refuse, doc=method.__doc__)


def absent(name: str) -> Any:
    """Make a property for an attribute that the peer has and this layer does not have.

    Setting it raises AttributeError instead of doing nothing.
    """

    def refuse(layer: Any, value: Any = None) -> Any:
        raise AttributeError(
            f"{type(layer).__name__}: {name} of vector-quantize-pytorch is not supported, so it cannot be set"
        )

    return property(refuse, refuse)


def no_torchscript(layer: nn.Module) -> nn.Module:
    """Refuse ``torch.jit.script``, which calls this function as ``__prepare_scriptable__``."""
    raise NotImplementedError(
        f"{type(layer).__name__}: torch.jit.script is not supported; use torch.export.export, torch.jit.trace"
        " or torch.onnx.export"
    )


# --- layout --------------------------------------------------------------------------------------


class Layout(NamedTuple):
    """Positions of the ``dim`` channels in the input of a layer: last, second, or second of feature maps."""

    layer: str
    dim: int
    channel_last: bool = True
    spatial: int = 0  # dimensions of a feature map; 0 for sequences

    @property
    def second(self) -> bool:
        """Return True if channels come second and there is more than one other dimension."""
        return self.spatial > 0 or not self.channel_last

    def check(self, x: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Raise TypeError or ValueError for an input or a mask that does not fit."""
        check_tensor(self.layer, "x", x)
        second = self.second and x.dim() > 2
        expected = f"[..., {self.dim}]"
        if self.spatial:
            expected = f"[B, {self.dim}, {'H, W' if self.spatial == 2 else 'L, H, W'}]"
        elif second:
            expected = f"[B, {self.dim}, ...]"
        wrong = self.spatial and x.dim() != 2 + self.spatial
        if x.dim() < 2 or wrong or x.shape[1 if second else -1] != self.dim:
            raise ValueError(f"{self.layer}: x must have shape {expected}, got {list(x.shape)}")
        if mask is None:
            return
        if self.spatial:
            raise ValueError(
                f"{self.layer}: mask is for sequences; images (accept_image_fmap=True) take none"
            )
        check_tensor(self.layer, "mask", mask, (torch.bool,))
        shape = [*x.shape[:1], *x.shape[2:]] if second else [*x.shape[:-1]]
        if list(mask.shape) != shape:
            raise ValueError(
                f"{self.layer}: mask must have shape {shape} for x {list(x.shape)}, got {list(mask.shape)}"
            )

    def mask_of(
        self, x: torch.Tensor, mask: torch.Tensor | None, lens: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Return the mask, or make a mask of the lengths ``[B]`` of the sequences."""
        if lens is None:
            return mask
        if mask is not None:
            raise ValueError(f"{self.layer}: mask and lens have the same meaning; give one of them")
        check_tensor(self.layer, "lens", lens, (torch.int64, torch.int32))
        if x.dim() != 3 or self.spatial or lens.shape != x.shape[:1]:
            raise ValueError(
                f"{self.layer}: lens must have shape [B] for x of three dimensions, got {list(lens.shape)}"
                f" for {list(x.shape)}"
            )
        length = x.shape[-1 if self.second else 1]
        return torch.arange(length, device=x.device) < lens.unsqueeze(-1)

    def inward(self, x: torch.Tensor) -> torch.Tensor:
        """Move the channels last."""
        return x.movedim(1, -1) if self.second and x.dim() > 2 else x

    def outward(self, x: torch.Tensor, given: int) -> torch.Tensor:
        """Move the channels where an input of ``given`` dimensions has them.

        Further dimensions of x stay last.
        """
        return x.movedim(-1, 1) if self.second and given > 2 else x


def without_padding(x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Return vectors ``[..., D]`` with zeros where the mask ``[...]`` is False.

    The values of the padding, NaN included, do not affect gradients of a projection.
    """
    return x if mask is None else x.masked_fill(~mask.unsqueeze(-1), 0)


def by_codebook(x: torch.Tensor, codebooks: int, d: int) -> torch.Tensor:
    """Reshape ``[..., heads * d]`` to ``[h, n, d]`` in the peer's order (batch, head, position).

    So a seed draws the same rows.
    """
    split: torch.Tensor = x.unflatten(-1, (x.shape[-1] // d, d))  # type: ignore[no-untyped-call]
    if codebooks > 1:
        return split.movedim(-2, 0).reshape(codebooks, -1, d)
    return split.movedim(-2, min(1, x.dim() - 1)).reshape(1, -1, d)


# --- precision -----------------------------------------------------------------------------------


def at_least_float32(x: torch.Tensor) -> torch.Tensor:
    """Convert half precision to float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def unit_length(x: torch.Tensor) -> torch.Tensor:
    """Scale vectors to length 1, even if the squares of their elements overflow."""
    length = x.norm(dim=-1, keepdim=True)
    far = length.isinf()
    if not _readable(far) or bool(far.any()):  # a power of two scales exactly
        x = torch.where(far, x * 2.0**-80, x)
        length = x.norm(dim=-1, keepdim=True)
    unit: torch.Tensor = x / length.clamp(min=1e-6)
    return unit


def no_autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Switch autocast off, because 8 bits are too few to distinguish codewords.

    If autocast is off, the context does nothing, because ``torch.export`` cannot take an autocast context.
    """
    active = device.type != "meta" and torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if active else contextlib.nullcontext()


def random_rotation(size: int) -> torch.Tensor:
    """Draw an orthogonal matrix ``[size, size]`` of the default dtype.

    PyTorch cannot make an orthogonal matrix in half precision.
    """
    dtype = torch.get_default_dtype()
    full = torch.empty(size, size, dtype=torch.promote_types(dtype, torch.float32))
    return nn.init.orthogonal_(full).to(dtype)


def project(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return ``module(x)``, with x in the dtype of the module's parameters if there are any."""
    parameter = next(module.parameters(), None)
    result: torch.Tensor = module(x if parameter is None else x.to(parameter.dtype))
    return result


_Forward = TypeVar("_Forward", bound=Callable[..., Any])
INNER = {"vq", "rvq"}  # names of ops and layers that errors of other layers do not show

_SEQUENCE = (
    lambda value: hasattr(value, "__len__") and getattr(value, "ndim", 1) == 1 and not isinstance(value, str),
    "a sequence",
)
_FUNCTION = (callable, "a function")
_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {  # annotation -> what fits
    "None": (lambda value: value is None, "None"),
    "bool": (
        lambda value: value is None or (isinstance(value, (bool, int, np.bool_)) and value in (0, 1)),
        "True or False",
    ),
    "int": (lambda value: as_integer(value) is not None, "an int"),
    "float": (
        lambda value: isinstance(value, (Real, torch.Tensor)) and not isinstance(value, bool),
        "a number",
    ),
    "str": (lambda value: isinstance(value, str), "a string"),
    "Sequence": _SEQUENCE,
    "tuple": _SEQUENCE,
    "nn.Module": (lambda value: isinstance(value, nn.Module), "a torch.nn.Module"),
    "Callable": _FUNCTION,
    "Transform": _FUNCTION,
    "UpdateWeight": (
        lambda value: callable(value) or isinstance(value, torch.Tensor),
        "a tensor or a function",
    ),
}


class Layer(nn.Module):
    """A module with tensors that can be trained and loaded, even if it is made in inference mode.

    The kinds of its arguments are checked by the annotations of ``__init__``.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "__init__" in vars(cls):
            cls.__init__ = _checked(cls.__init__)  # type: ignore[method-assign]


def _check_kinds(
    method: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments by name, or raise ValueError for one that does not fit its annotation."""
    given = dict(zip(inspect.signature(method).parameters, args, strict=False)) | options
    for name, value in given.items():
        annotation = str(method.__annotations__.get(name, "Any")).split(" | ")
        kinds = [_KINDS.get(kind.partition("[")[0]) for kind in annotation]
        if all(kinds) and not any(kind and kind[0](value) for kind in kinds):
            expected = " or ".join(dict.fromkeys(kind[1] for kind in kinds if kind))
            raise ValueError(f"{type(args[0]).__name__}: {name} is {value!r}, expected {expected}")
    return given


def explained(forward: _Forward) -> _Forward:
    """Give errors of torch in ``forward`` or decoding the words of the layer, if an argument is the cause.

    The cause is an argument of another kind, dtype or device. It is looked for after the error, so that a
    call without an error is not slower. An error of an inner layer or op gets the name of this layer. An
    error of a hook, or a lack of memory, stays as it is.
    """

    @functools.wraps(forward)
    def run(*args: Any, **options: Any) -> Any:
        try:
            return forward(*args, **options)
        except Exception as error:
            inner, found, rest = str(error).partition(": ")
            # Dynamo cannot trace this; torch ends passes by errors of its own types, as in checkpoint()
            if torch.compiler.is_compiling() or type(error).__module__ != "builtins":
                pass
            elif found and inner in INNER:
                error.args = (f"{type(args[0]).__name__}: {rest}",)
            elif not inner.isidentifier():
                given = _check_kinds(forward, args, options)
                if isinstance(error, RuntimeError):
                    _find_cause(args[0], given, str(error))
            raise

    return cast(_Forward, run)


def _find_cause(layer: nn.Module, given: dict[str, Any], error: str) -> None:
    """Raise ValueError or TypeError if another device or dtype than the layer's has led to an error."""
    name = type(layer).__name__
    of_device = any(word in error for word in ("device", "backend", "meta"))
    of_dtype = "type" in error  # "dtype", "scalar type"
    own = [*layer.parameters(), *layer.buffers()]
    devices = {tensor.device for tensor in own}
    dtypes = {tensor.dtype for tensor in layer.parameters()}
    tensors = {key: value for key, value in given.items() if isinstance(value, torch.Tensor)}
    for key, tensor in tensors.items():
        if of_device and devices and tensor.device not in devices:
            where = ", ".join(map(str, devices))
            raise ValueError(
                f"{name}: {key} is on {tensor.device} and the layer on {where}; move one of them"
            )
        autocast = not tensor.is_meta and torch.is_autocast_enabled(tensor.device.type)
        if of_dtype and dtypes and tensor.is_floating_point() and tensor.dtype not in dtypes and not autocast:
            kinds = ", ".join(map(str, dtypes))
            raise TypeError(
                f"{name}: {key} has dtype {tensor.dtype} and the layer {kinds}; convert one of them, as by"
                f" .to({tensor.dtype})"
            )


def _checked(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def run(*args: Any, **options: Any) -> None:
        _check_kinds(init, args, options)
        active = torch.is_inference_mode_enabled()
        with torch.inference_mode(False) if active else contextlib.nullcontext():
            init(*args, **options)

    return run


class ConstantBuffers(Layer):
    """A module with buffers that start with values computed from its arguments.

    A state_dict does not have these buffers. After a move from the meta device, for example by ``to_empty``,
    the module computes them again.

    The module also knows the dtype that its model was cast to. Decoding returns vectors in this dtype.
    """

    _model_dtype: torch.dtype

    def _constants(self, device: torch.device | None = None) -> dict[str, torch.Tensor | None]:
        """Return the buffers by name, on a device or on the default device."""
        raise NotImplementedError

    def _register_constants(self) -> None:
        self._model_dtype = torch.get_default_dtype()
        self._exact: dict[tuple[str, torch.device], torch.Tensor] = {}
        for name, value in self._constants().items():
            self.register_buffer(name, value, persistent=False)

    def _constant(self, name: str) -> torch.Tensor:
        """Return a buffer of integers as it was made.

        ``AveragedModel(use_buffers=True)`` rounds integers down when it averages them, as 0.9 * 3 + 0.1 * 3.
        So nothing reads the values of the buffer. A graph computes them.
        """
        buffer = self._buffers[name]
        assert buffer is not None
        traced = torch.compiler.is_compiling() or torch._C._is_tracing()
        if traced or buffer.is_meta or isinstance(buffer, FakeTensor):
            return cast(torch.Tensor, self._constants(buffer.device)[name])
        key = name, buffer.device
        if key not in self._exact:
            with torch.inference_mode(False):
                self._exact[key] = cast(torch.Tensor, self._constants(buffer.device)[name])
        return self._exact[key]

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> ConstantBuffers:
        absent = [name for name, buffer in self._buffers.items() if buffer is not None and buffer.is_meta]
        super()._apply(fn, recurse)
        self._model_dtype = fn(torch.empty(0, dtype=self._model_dtype)).dtype  # fn may be a cast
        for name, value in self._constants().items() if absent else ():
            buffer = self._buffers[name]
            if name in absent and value is not None and buffer is not None and not buffer.is_meta:
                self._buffers[name] = value.to(buffer)
        return self

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, local_metadata: Any, *args: Any
    ) -> None:
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)
        if local_metadata.get("assign_to_params_buffers", False):
            found = [v.device for v in state_dict.values() if isinstance(v, torch.Tensor) and not v.is_meta]
            device = found[0] if found else torch.get_default_device()
            for name, value in self._constants().items():
                buffer = self._buffers[name]
                if value is not None and buffer is not None and buffer.is_meta:
                    self._buffers[name] = value.to(device, buffer.dtype)


class ParametersToCall(nn.ParameterList):
    """Parameters that a layer reads by a call of this module.

    Then the hooks of a call run, such as the hooks of offloading that load the parameters for the call.
    """

    __call__ = nn.Module.__call__  # the __call__ of ParameterList raises an error

    def forward(self) -> list[torch.Tensor]:
        """Return the parameters."""
        return list(self)


_Method = TypeVar("_Method", bound=Callable[..., torch.Tensor])


class MethodCall(functools.partial[Any]):
    """A method of a layer, with arguments, that ``forward`` of the layer runs instead of its own code."""


def in_a_call(method: _Method) -> _Method:
    """Run a method by a call of its layer if tensors of the layer are on another device than the indices.

    Then the hooks of a call run, such as the hooks of offloading that load the tensors for the call. The
    first argument of ``forward`` is a :class:`MethodCall`.
    """

    @functools.wraps(method)
    def run(self: nn.Module, indices: Any, *args: Any, **options: Any) -> torch.Tensor:
        own = [*self._parameters.values(), *self._buffers.values()]
        device = getattr(indices, "device", None)
        if device is None or all(tensor is None or tensor.device == device for tensor in own):
            return method(self, indices, *args, **options)
        result: torch.Tensor = self(MethodCall(method, self, indices, *args, **options))
        return result

    return cast(_Method, run)


class Float32Module(Layer):
    """A module that stays float32 when the model around it is cast to half precision.

    The 8 bits of bfloat16 are too few for the small steps of averages, and the ops take float32 codewords
    with half-precision input. Casts to float64 and moves between devices work as in every module.
    """

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Float32Module:
        def keep(tensor: torch.Tensor) -> torch.Tensor:
            moved = fn(tensor)
            reduced = tensor.dtype == torch.float32 and moved.dtype in HALF
            return tensor.to(moved.device) if reduced else moved

        super()._apply(keep, recurse)
        return self


# --- gradients of codewords that another search than ``vq`` has chosen ---------------------------


def differentiable(loss: torch.Tensor) -> torch.Tensor:
    """Return a loss that can run ``backward``, as in the peer, even if no input of it has a gradient."""
    if (
        not torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or torch._C._functorch.peek_interpreter_stack() is not None
    ):
        return loss
    return loss.detach().requires_grad_()


def straight_through(x: torch.Tensor, codewords: torch.Tensor) -> torch.Tensor:
    """Return the codeword exactly.

    Its gradient goes to x unchanged.
    """
    return codewords.detach() + (x - x.detach())


def rotate(x: torch.Tensor, codewords: torch.Tensor) -> torch.Tensor:
    """Return the codeword.

    The gradient goes to x, rotated and scaled (Fifty et al. 2024, section 4.2). Vectors are in the last
    dimension.
    """
    length, target = x.norm(dim=-1, keepdim=True), codewords.norm(dim=-1, keepdim=True)
    u, q = (x / length.clamp(min=1e-6)).detach(), (codewords / target.clamp(min=1e-6)).detach()
    w = F.normalize(u + q, dim=-1, eps=1e-6)
    turned = x - 2 * (x * w).sum(-1, keepdim=True) * w + 2 * (x * u).sum(-1, keepdim=True) * q
    result: torch.Tensor = turned * (target / length.clamp(min=1e-6)).detach()
    return result


def directional(x: torch.Tensor, codewords: torch.Tensor, variance: float) -> torch.Tensor:
    """Add to x a step of the length of its distance to the codeword, nearly in the direction of the codeword.

    x and the codeword get a gradient (DiVeQ, figure 1).
    """
    error = codewords - x
    noised = error + variance**0.5 * torch.randn_like(error, memory_format=torch.contiguous_format)
    result: torch.Tensor = x + F.normalize(noised, dim=-1, eps=1e-6).detach() * error.norm(
        dim=-1, keepdim=True
    )
    return result
