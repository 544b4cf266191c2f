"""The definition of ``ema_update``: the formulas in float64, rounded once."""

from __future__ import annotations

from . import composed


def ema_update(given: composed.Arguments) -> composed.Result:
    """Return the new sizes, averages and codewords."""
    dtype = given.averages.dtype
    wide = given._replace(
        sizes=given.sizes.double(),
        averages=given.averages.double(),
        codewords=given.codewords.double(),
        weights=None if given.weights is None else given.weights.double(),
    )
    sizes, averages, codewords = composed.ema_update(wide)
    return sizes.to(dtype), averages.to(dtype), codewords.to(dtype)
