"""``mc_dropout_mlp`` and its masks in Triton.

Small cases gave correct results on an H100; no times were measured.

A head of at most one layer and 256 classes takes one launch: a program takes ROWS rows through all passes. In
each pass, the program draws masks of UNITS units at a time, multiplies kept units by the weights, and adds
the probabilities to statistics in registers. Other heads take a launch for each layer and pass, and one
launch to add a pass to the statistics. Memory then holds the hidden units of one pass. No kernel stores masks
or the predictions of all passes.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# No postponed annotations here: Triton reads the types of the arguments.
import torch
import triton
import triton.language as tl

from . import composed

_ROWS, _UNITS = 64, 32  # rows of a program, units of a step: a multiple of 8
_COLUMNS = 64  # outputs of a program, or classes of a step
_FEW_ROWS = 16  # rows of a program that adds a pass to the statistics; more rows spill registers
_MOST_CLASSES = 256
_PROGRAMS = {"num_warps": 4}
# Arguments without specialization: another number of rows or passes does not recompile. Widths and strides
# are specialized, because they decide the loads.
_RUN = ["rows", "passes", "pass_", "stream", "threshold", "logit_threshold"]


@triton.jit
def _bits(seed, row, column, pass_, stream):
    """Return 16 random bits for each unit, as ``composed.py`` draws them.

    Row and column broadcast, and are words of 32 bits in the counter.
    """
    zero = (row * 0 + column * 0).to(tl.int32)
    block = zero + (column // 8).to(tl.int32)
    word0, word1, word2, word3 = tl.philox(
        seed, (zero + pass_).to(tl.int32), zero + row.to(tl.int32), (zero + stream).to(tl.int32), block
    )
    which = column % 8 // 2
    low = tl.where(which == 0, word0, word1)
    high = tl.where(which == 2, word2, word3)
    word = tl.where(which < 2, low, high).to(tl.uint32, bitcast=True)
    return (word >> (column % 2 * 16).to(tl.uint32)) & 0xFFFF


@triton.jit
def _tile(rows, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return rows [ROWS, 1] and columns [1, COLUMNS], int64, of a program.

    The grid has one dimension, because the other dimensions are limited to 65535.
    """
    blocks, program = tl.cdiv(rows, ROWS), tl.program_id(0).to(tl.int64)
    return (program % blocks * ROWS + tl.arange(0, ROWS))[:, None], (
        program // blocks * COLUMNS + tl.arange(0, COLUMNS)
    )[None, :]


@triton.jit(do_not_specialize=[*_RUN, "columns"])
def _mask(
    seed,
    keep,
    rows: tl.int64,
    columns: tl.int64,
    pass_: tl.int64,
    stream: tl.int64,
    threshold: tl.int32,
    CONSISTENT: tl.constexpr,
    ROWS: tl.constexpr,
    UNITS: tl.constexpr,
):
    row, column = _tile(rows, ROWS, UNITS)
    bits = _bits(tl.load(seed), row * 0 if CONSISTENT else row, column, pass_, stream)
    inside = (row < rows) & (column < columns)
    tl.store(keep + row * columns + column, bits >= threshold, mask=inside)


@triton.jit
def _product(
    x, weights, bias, key, row, counter, column, rows, inputs, classes, row_stride, column_stride,
    pass_, threshold, scale, ROWS: tl.constexpr, UNITS: tl.constexpr, CLASSES: tl.constexpr,
):  # fmt: skip
    """Return the logits [ROWS, CLASSES] of one layer: the kept inputs by the weights, plus the bias."""
    unit = tl.arange(0, UNITS)
    is_class = column < classes
    logits = tl.zeros((ROWS, CLASSES), tl.float32) + tl.load(bias + column, mask=is_class, other=0.0)
    for start in range(0, inputs, UNITS):
        at = start + unit
        there = (row < rows) & (at[None, :] < inputs)
        value = tl.load(
            x + row * row_stride + at[None, :].to(tl.int64) * column_stride, mask=there, other=0.0
        ).to(tl.float32)
        if threshold > 0:
            value = tl.where(_bits(key, counter, at[None, :], pass_, 0) >= threshold, value * scale, 0.0)
        weight = tl.load(
            weights + column.to(tl.int64) * inputs + at[:, None],
            mask=is_class & (at[:, None] < inputs),
            other=0.0,
        )
        logits = tl.dot(value, weight, logits, input_precision="ieee")
    return logits


@triton.jit(do_not_specialize=_RUN)
def _statistics(
    x, weights, bias, seed, mean_out, entropy_out, variance_out,
    rows: tl.int64, inputs, classes, row_stride: tl.int64, column_stride: tl.int64,
    passes, threshold, logit_threshold, scale, logit_scale,
    CONSISTENT: tl.constexpr, LAYERS: tl.constexpr,
    ROWS: tl.constexpr, UNITS: tl.constexpr, CLASSES: tl.constexpr,
):  # fmt: skip
    """Write the statistics of the passes of ROWS rows through one layer, or through a dropout of logits."""
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    counter = row * 0 if CONSISTENT else row
    column = tl.arange(0, CLASSES)[None, :]
    key = tl.load(seed)
    is_class = column < classes
    inside = (row < rows) & is_class
    mean = tl.zeros((ROWS, CLASSES), tl.float32)
    moment = tl.zeros((ROWS, CLASSES), tl.float32)
    entropy = tl.zeros((ROWS, 1), tl.float32)
    for t in range(passes):
        if LAYERS == 1:
            logits = _product(
                x, weights, bias, key, row, counter, column, rows, inputs, classes, row_stride, column_stride,
                t, threshold, scale, ROWS, UNITS, CLASSES,
            )  # fmt: skip
        else:
            logits = tl.load(
                x + row * row_stride + column.to(tl.int64) * column_stride, mask=inside, other=0.0
            ).to(tl.float32)
        if logit_threshold > 0:
            logits = tl.where(
                _bits(key, counter, column, t, LAYERS) >= logit_threshold, logits * logit_scale, 0.0
            )
        logits = tl.where(is_class, logits, float("-inf"))
        below = logits - tl.max(logits, 1, keep_dims=True)
        powers = tl.exp(below)
        total = tl.sum(powers, 1, keep_dims=True)
        probs = powers / total
        entropy += tl.log(total) - tl.sum(tl.where(powers != 0, probs * below, 0.0), 1, keep_dims=True)
        deviation = probs - mean
        mean += deviation / (t + 1)
        moment += deviation * (probs - mean)
    place = row * classes + column
    tl.store(mean_out + place, mean, mask=inside)
    tl.store(variance_out + place, moment / passes, mask=inside)
    tl.store(entropy_out + row, entropy / passes, mask=row < rows)


@triton.jit
def _activate(value, ACTIVATION: tl.constexpr):
    if ACTIVATION == "gelu":
        value = 0.5 * value * (1 + tl.erf(value * 0.7071067811865476))
    if ACTIVATION == "relu":
        value = tl.where(value < 0, 0.0, value)  # NaN stays
    if ACTIVATION == "silu":
        value = value / (1 + tl.exp(-value))
    if ACTIVATION == "tanh":
        value = 2 / (1 + tl.exp(-2 * value)) - 1
    return value


@triton.jit(do_not_specialize=_RUN)
def _layer(
    x,
    weights,
    bias,
    seed,
    out,
    rows: tl.int64,
    inputs,
    outputs,
    row_stride: tl.int64,
    column_stride: tl.int64,
    pass_,
    stream,
    threshold,
    scale,
    ACTIVATION: tl.constexpr,
    CONSISTENT: tl.constexpr,
    ROWS: tl.constexpr,
    UNITS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write out [rows, outputs]: activation, dropout and product of one layer in one pass."""
    row, column = _tile(rows, ROWS, COLUMNS)
    counter = row * 0 if CONSISTENT else row
    unit = tl.arange(0, UNITS)
    key = tl.load(seed)
    there = column < outputs
    sums = tl.zeros((ROWS, COLUMNS), tl.float32) + tl.load(bias + column, mask=there, other=0.0)
    for start in range(0, inputs, UNITS):
        at = start + unit
        inside = (row < rows) & (at[None, :] < inputs)
        value = tl.load(
            x + row * row_stride + at[None, :].to(tl.int64) * column_stride, mask=inside, other=0.0
        ).to(tl.float32)
        value = _activate(value, ACTIVATION)
        if threshold > 0:
            value = tl.where(_bits(key, counter, at[None, :], pass_, stream) >= threshold, value * scale, 0.0)
        weight = tl.load(
            weights + column * inputs + at[:, None], mask=there & (at[:, None] < inputs), other=0.0
        )
        sums = tl.dot(value, weight, sums, input_precision="ieee")
    tl.store(out + row * outputs + column, sums, mask=(row < rows) & there)


@triton.jit
def _logits(
    source, key, row, column, rows, classes, pass_, stream, threshold, scale, CONSISTENT: tl.constexpr
):
    inside = (row < rows) & (column < classes)
    logits = tl.load(source + row * classes + column, mask=inside, other=0.0)
    if threshold > 0:
        bits = _bits(key, row * 0 if CONSISTENT else row, column, pass_, stream)
        logits = tl.where(bits >= threshold, logits * scale, 0.0)
    return tl.where(column < classes, logits, float("-inf"))


@triton.jit(do_not_specialize=_RUN)
def _accumulate(
    source,
    seed,
    mean_out,
    entropy_out,
    moment_out,
    rows: tl.int64,
    classes,
    pass_,
    stream,
    threshold,
    scale,
    CONSISTENT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Add the pass with these logits [rows, classes] to the statistics."""
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    lane = tl.arange(0, COLUMNS)[None, :]
    key = tl.load(seed)
    most = tl.full((ROWS, 1), float("-inf"), tl.float32)
    for start in range(0, classes, COLUMNS):
        logits = _logits(
            source, key, row, start + lane, rows, classes, pass_, stream, threshold, scale, CONSISTENT
        )
        most = tl.maximum(most, tl.max(logits, 1, keep_dims=True))
    total, weighted = tl.zeros((ROWS, 1), tl.float32), tl.zeros((ROWS, 1), tl.float32)
    for start in range(0, classes, COLUMNS):
        below = (
            _logits(
                source, key, row, start + lane, rows, classes, pass_, stream, threshold, scale, CONSISTENT
            )
            - most
        )
        powers = tl.exp(below)
        total += tl.sum(powers, 1, keep_dims=True)
        weighted += tl.sum(tl.where(powers != 0, powers * below, 0.0), 1, keep_dims=True)
    before = tl.load(entropy_out + row, mask=row < rows, other=0.0)
    tl.store(entropy_out + row, before + (tl.log(total) - weighted / total), mask=row < rows)
    for start in range(0, classes, COLUMNS):
        column = start + lane
        logits = _logits(source, key, row, column, rows, classes, pass_, stream, threshold, scale, CONSISTENT)
        probs = tl.exp(logits - most) / total
        place = row * classes + column
        inside = (row < rows) & (column < classes)
        mean = tl.load(mean_out + place, mask=inside, other=0.0)
        deviation = probs - mean
        mean += deviation / (pass_ + 1)
        tl.store(mean_out + place, mean, mask=inside)
        moment = tl.load(moment_out + place, mask=inside, other=0.0)
        tl.store(moment_out + place, moment + deviation * (probs - mean), mask=inside)


def dropout_mask(given: composed.Mask) -> torch.Tensor:
    """Return bool ``[rows, columns]``."""
    seed, rows, columns, pass_, stream, p, consistent = given
    keep = torch.empty(rows, columns, dtype=torch.bool, device=seed.device)
    if keep.numel() > 0:
        grid = (triton.cdiv(rows, _ROWS) * triton.cdiv(columns, _UNITS),)
        with torch.cuda.device_of(seed):
            _mask[grid](
                seed,
                keep,
                rows,
                columns,
                pass_,
                stream,
                composed.threshold(p),
                consistent,
                _ROWS,
                _UNITS,
                **_PROGRAMS,
            )
    return keep


def mc_dropout_mlp(given: composed.Arguments) -> composed.Result:
    """Return the mean, the expected entropy and the variance."""
    x, parameters, widths, p, passes, _, consistent, seed = given
    head, classes = composed.layers(parameters, widths), widths[-1]
    if len(head) > 1 or classes > _MOST_CLASSES:
        return _by_layers(given, head)
    rows, inputs = x.shape
    mean, variance = (torch.empty(rows, classes, device=x.device) for _ in range(2))
    entropy = torch.empty(rows, device=x.device)
    if rows > 0:
        weights, bias = head[0] if head else (parameters, parameters)  # a head without layers reads neither
        with torch.cuda.device_of(x):
            _statistics[(triton.cdiv(rows, _ROWS),)](
                x,
                weights,
                bias,
                seed,
                mean,
                entropy,
                variance,
                rows,
                inputs,
                classes,
                *x.stride(),
                passes,
                composed.threshold(p[0]) if head else 0,
                composed.threshold(p[-1]),
                composed.scale(p[0]),
                composed.scale(p[-1]),
                consistent,
                len(head),
                _ROWS,
                _UNITS,
                max(16, triton.next_power_of_2(classes)),
                **_PROGRAMS,
            )
    return mean, entropy, variance


def _by_layers(given: composed.Arguments, head: list[tuple[torch.Tensor, torch.Tensor]]) -> composed.Result:
    """Launch a kernel for each layer of a pass."""
    x, _, widths, p, passes, activation, consistent, seed = given
    classes = widths[-1]
    rows = len(x)
    hidden = [x, *(torch.empty(rows, len(bias), device=x.device) for _, bias in head)]
    if not head:
        hidden = [x.float().contiguous()]
    mean, moment = (torch.zeros(rows, classes, device=x.device) for _ in range(2))
    entropy = torch.zeros(rows, device=x.device)
    blocks = triton.cdiv(rows, _ROWS)
    for t in range(passes if rows > 0 else 0):
        with torch.cuda.device_of(x):
            for i, (weight, bias) in enumerate(head):
                _layer[(blocks * triton.cdiv(len(bias), _COLUMNS),)](
                    hidden[i],
                    weight,
                    bias,
                    seed,
                    hidden[i + 1],
                    rows,
                    *weight.shape[::-1],
                    *hidden[i].stride(),
                    t,
                    i,
                    composed.threshold(p[i]),
                    composed.scale(p[i]),
                    activation if i > 0 else "none",
                    consistent,
                    _ROWS,
                    _UNITS,
                    _COLUMNS,
                    **_PROGRAMS,
                )
            _accumulate[(triton.cdiv(rows, _FEW_ROWS),)](
                hidden[-1],
                seed,
                mean,
                entropy,
                moment,
                rows,
                classes,
                t,
                len(head),
                composed.threshold(p[-1]),
                composed.scale(p[-1]),
                consistent,
                _FEW_ROWS,
                _COLUMNS,
                **_PROGRAMS,
            )
    return mean, entropy / passes, moment / passes
