"""Input checks that the ops share.

Each message names the fault, the expected value and a remedy.
"""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

from ._kmeans_checks import METRICS, unknown
from ._numbers import as_integer

PRECISIONS = ("exact", "fast")
_TODO = {
    "ndarray": "; torch.from_numpy makes it one",
    "list": "; torch.tensor makes it one",
    "Proxy": "; a Tracer of torch.fx must treat this as a leaf (is_leaf_module), or use torch.export",
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_tensor(op: str, name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...] = DTYPES) -> None:
    """Raise TypeError unless this is a dense tensor of an allowed dtype.

    Raise ValueError on a device without float64.
    """
    check_dense(op, name, tensor, dtypes)
    if tensor.device.type == "mps":
        raise ValueError(f"{op}: {name} is on {tensor.device}, which has no float64; move it to the CPU")


def check_dense(op: str, name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...] = DTYPES) -> None:
    """Raise TypeError unless this is a dense tensor of an allowed dtype."""
    if not isinstance(tensor, torch.Tensor):
        kind = type(tensor).__name__
        todo = _TODO.get(kind, "")
        raise TypeError(f"{op}: {name} must be a torch.Tensor, got {kind}{todo}")
    masked = type(tensor).__name__ == "MaskedTensor"
    if tensor.layout != torch.strided or tensor.is_nested or masked:
        kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        todo = "give its rows as one tensor" if tensor.is_nested else "call to_dense() on it"
        if masked:
            kind, todo = "masked", "leave out those rows, or fill them by to_tensor(value)"
        raise TypeError(f"{op}: {name} is a {kind} tensor, expected a dense one; {todo}")
    if tensor.is_quantized:
        raise TypeError(f"{op}: {name} is a quantized tensor; call dequantize() on it")
    if tensor.dtype not in dtypes:
        *others, last = (str(dtype).removeprefix("torch.") for dtype in dtypes)
        expected = f"{', '.join(others)} or {last}" if others else last
        raise TypeError(
            f"{op}: {name} has dtype {tensor.dtype}, expected {expected}; convert it, as by .to({dtypes[0]})"
        )


def packed(op: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return the contiguous tensor, or raise RuntimeError in one line if memory is too small for the copy."""
    if torch.compiler.is_compiling() or tensor.is_contiguous():
        return tensor.contiguous()
    try:
        return tensor.contiguous()
    except RuntimeError as error:
        size = tensor.numel() * tensor.element_size()
        reason = str(error).partition("\n")[0]
        raise type(error)(
            f"{op}: a contiguous copy of {name} {list(tensor.shape)} takes {size:,} bytes; give fewer rows"
            f" ({reason})"
        ) from None


def check_reverse_mode(op: str, *tensors: torch.Tensor | None) -> None:
    """Raise RuntimeError for tensors of forward-mode differentiation and of ``torch.func.grad``.

    The ops would lose their derivatives.
    """
    if torch.compiler.is_compiling():
        return
    if forward_ad._current_level < 0 and torch._C._functorch.peek_interpreter_stack() is None:
        return  # outside of both
    given = [tensor for tensor in tensors if tensor is not None]
    refuse_forward_mode(op, *given)
    if any(map(torch._C._functorch.is_gradtrackingtensor, given)):
        raise RuntimeError(
            f"{op}: torch.func.grad and similar transforms do not support this op; use torch.autograd.grad"
            " or backward()"
        )


def refuse_forward_mode(op: str, *tensors: torch.Tensor) -> None:
    """Raise RuntimeError for tensors of forward-mode differentiation."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return
    if any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
        raise RuntimeError(
            f"{op}: has no forward-mode derivative; use reverse mode, or compose the op from plain PyTorch"
        )


def needs_gradient(*tensors: torch.Tensor, traced: bool = False) -> bool:
    """Return True if a tensor requires a gradient, which the wrapper of ``vmap`` does not tell.

    ``traced``, not in a compiled graph: also in ``torch.jit.trace``, whose check has no gradients and must
    find the same graph.
    """
    if traced and torch._C._is_tracing():
        return True
    if not torch.is_grad_enabled():
        return False
    for tensor in tensors:  # noqa: SIM110  a generator calls a function more for each tensor
        if tensor.requires_grad or _unwrapped(tensor).requires_grad:
            return True
    return False


def needs_gradient_without_vmap(op: str, tensor: torch.Tensor) -> bool:
    """Return ``needs_gradient``, or raise RuntimeError where ``vmap`` would lose the gradient."""
    needed = needs_gradient(tensor)
    if needed and not tensor.requires_grad:
        raise RuntimeError(
            f"{op}: has no gradient under torch.func.vmap; call it for each element, or detach the input"
        )
    return needed


def _unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    if torch.compiler.is_compiling():
        return tensor
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def check_weights(op: str, **weights: float) -> None:
    """Raise ValueError for a weight of a loss that is not a finite number."""
    for name, weight in weights.items():
        if not isinstance(weight, (int, float, torch.SymFloat)) or not -torch.inf < weight < torch.inf:
            raise ValueError(f"{op}: {name} must be a finite number, got {weight!r}")


def check_search(op: str, x: torch.Tensor, codebook: torch.Tensor, metric: str, precision: str) -> None:
    """Validate the arguments of a search, or raise TypeError or ValueError before any work."""
    check_tensor(op, "x", x)
    check_tensor(op, "codebook", codebook)
    if not isinstance(metric, str) or metric not in METRICS:
        raise unknown(op, "metric", metric, METRICS)
    if not isinstance(precision, str) or precision not in PRECISIONS:
        raise unknown(op, "precision", precision, PRECISIONS)
    if x.device != codebook.device:
        raise ValueError(f"{op}: x is on {x.device} and codebook on {codebook.device}; move one of them")
    if x.dim() < 1:
        raise ValueError(f"{op}: x must have shape [..., D], got a scalar")
    if codebook.dim() not in (2, 3):
        raise ValueError(f"{op}: codebook must have shape [K, d] or [S, K, d], got {list(codebook.shape)}")
    k, d = codebook.shape[-2:]
    if k == 0 or d == 0:
        raise ValueError(
            f"{op}: codebook {list(codebook.shape)} is empty; it needs at least one codeword of one element"
        )
    dim = x.shape[-1]
    if codebook.dim() == 3:
        s = codebook.shape[0]
        if s == 0 or s * d != dim:
            raise ValueError(
                f"{op}: codebook {list(codebook.shape)} has {s} segments of {d}, which needs x [...,"
                f" {s * d}], got [..., {dim}]"
            )
    elif dim == 0 or dim % d != 0:
        raise ValueError(
            f"{op}: x [..., {dim}] cannot be cut into segments of the codeword length {d}; make D a multiple"
            " of d"
        )


def check_transition(
    op: str,
    logits: torch.Tensor,
    log_transition: torch.Tensor,
    groups: torch.Tensor | None,
    log_marginal: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Validate arguments of the transition ops.

    Return the matrix as [G, M, K] and its column sums as [G, K], both in log space.
    """
    _check_logits(op, logits, "B")
    k = logits.shape[1]
    _check_constant(op, "log_transition", log_transition, logits)
    shape = list(log_transition.shape)
    if log_transition.dim() not in (2, 3) or shape[-1] != k or 0 in shape:
        raise ValueError(
            f"{op}: log_transition must have shape [M, {k}] or [G, M, {k}] for logits {list(logits.shape)},"
            f" got {shape}"
        )
    if (log_transition.dim() == 3) != (groups is not None):
        wanted = "groups [B], the group of each row" if groups is None else "no groups"
        raise ValueError(f"{op}: log_transition {shape} needs {wanted}")
    if groups is not None:
        _check_of_rows(op, "groups", groups, logits)
    matrix = log_transition if log_transition.dim() == 3 else log_transition.unsqueeze(0)
    if log_marginal is None:
        return matrix, matrix.logsumexp(1)
    _check_constant(op, "log_marginal", log_marginal, logits)
    expected = [*shape[:-2], k]
    if list(log_marginal.shape) != expected:
        raise ValueError(
            f"{op}: log_marginal must have shape {expected} for log_transition {shape}, got"
            f" {list(log_marginal.shape)}"
        )
    return matrix, log_marginal if log_marginal.dim() == 2 else log_marginal.unsqueeze(0)


def check_targets(op: str, targets: torch.Tensor, ignore_index: int, logits: torch.Tensor) -> int:
    """Validate the targets of the transition losses, and return ``ignore_index`` as an int of Python."""
    _check_of_rows(op, "targets", targets, logits)
    number = ignore_index if type(ignore_index) is int else as_integer(ignore_index)
    if number is None or not -(2**63) <= number < 2**63:
        raise TypeError(f"{op}: ignore_index must be an int of at most 64 bits, got {ignore_index!r}")
    return number


def check_sets(logits: torch.Tensor, offsets: torch.Tensor, proportions: torch.Tensor) -> None:
    """Validate the arguments of ``set_proportion_loss``."""
    op = "set_proportion_loss"
    _check_logits(op, logits, "N")
    _check_index(op, "offsets", offsets, logits)
    _check_constant(op, "proportions", proportions, logits)
    if offsets.dim() != 1 or offsets.shape[0] < 2:
        raise ValueError(
            f"{op}: offsets must have shape [S + 1] with at least one set, got {list(offsets.shape)}"
        )
    expected = [offsets.shape[0] - 1, logits.shape[1]]
    if list(proportions.shape) != expected:
        sizes = proportions.dim() == 2 and len(proportions) == len(offsets)
        what = "; offsets are the first rows of the sets and the end of the last set, not the set sizes"
        todo = what if sizes else ""
        raise ValueError(
            f"{op}: proportions must have shape {expected}, sets by classes, got"
            f" {list(proportions.shape)}{todo}"
        )


def _check_logits(op: str, logits: torch.Tensor, rows: str) -> None:
    check_tensor(op, "logits", logits)
    check_reverse_mode(op, logits)
    if logits.dim() != 2 or logits.shape[1] == 0:
        raise ValueError(
            f"{op}: logits must have shape [{rows}, K] with at least one class, got {list(logits.shape)}"
        )


def _check_constant(op: str, name: str, tensor: torch.Tensor, logits: torch.Tensor) -> None:
    check_tensor(op, name, tensor, (torch.float32, torch.float64))
    _check_device(op, name, tensor, logits)
    if tensor.requires_grad:
        raise ValueError(
            f"{op}: {name} requires a gradient, but the op treats it as a constant; detach it, or compose"
            " the op from plain PyTorch"
        )


def _check_of_rows(op: str, name: str, index: torch.Tensor, logits: torch.Tensor) -> None:
    _check_index(op, name, index, logits)
    if index.shape != logits.shape[:1]:
        raise ValueError(
            f"{op}: {name} must have shape [{len(logits)}], one for each row of logits, got"
            f" {list(index.shape)}"
        )


def _check_index(op: str, name: str, index: torch.Tensor, logits: torch.Tensor) -> None:
    check_tensor(op, name, index, (torch.int64,))
    _check_device(op, name, index, logits)


def _check_device(op: str, name: str, tensor: torch.Tensor, logits: torch.Tensor) -> None:
    if tensor.device != logits.device:
        raise ValueError(
            f"{op}: logits is on {logits.device} and {name} on {tensor.device}; move one of them"
        )
