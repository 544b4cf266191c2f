"""Dropouts that are put before modules of a model for the time of a call; the model itself stays as it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn


def insertions(model: nn.Module, insert: float | Mapping[str, float] | None) -> dict[nn.Module, float]:
    """The rates of the dropouts that are put before modules; or an error."""
    named = dict(model.named_modules())
    if insert is None:
        return {}
    if not isinstance(insert, Mapping):
        linears = [name for name, module in named.items() if isinstance(module, nn.Linear)]
        if not linears:
            raise ValueError("MCDropout: the model has no nn.Linear to put a dropout before; name a module: insert={name: rate}")
        insert = {linears[-1]: insert}
    for name, rate in insert.items():
        if name not in named:
            raise ValueError(f"MCDropout: insert names {name!r}, which is no module of the model, expected one of {', '.join(named)[2:]}")
        if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 < rate < 1:
            raise ValueError(f"MCDropout: insert must be a rate in (0, 1), or {{name: rate}}, got {rate!r}")
    return {named[name]: rate for name, rate in insert.items()}


def not_called(model: nn.Module, module: nn.Module) -> str:
    """Why no dropout is before a module."""
    name = next(name for name, other in model.named_modules() if other is module)
    return (
        f"MCDropout: the model never calls {type(module).__name__} {name!r} with a tensor as its first argument, so no dropout can be put "
        "before it; name another module: insert={name: rate}"
    )


@contextmanager
def inserted_before(model: nn.Module, rates: Mapping[nn.Module, float]) -> Iterator[None]:
    """Dropouts before modules of a model that runs as it is, not as the parts of a cut."""
    called = set()

    def drop(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        called.update([module] if args else [])
        return tuple(nn.functional.dropout(value, rates[module]) if i == 0 else value for i, value in enumerate(args))

    handles = [module.register_forward_pre_hook(drop) for module in rates]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    for module in rates:
        if module not in called:
            raise RuntimeError(not_called(model, module))
