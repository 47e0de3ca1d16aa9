"""What every MIL operator of our graphs computes, in numpy.

Semantics are those of coremltools' operator reference (converters/mil/mil/ops/defs). Floats come and go as FP32; the caller
rounds a result that the program types as FP16. So products accumulate in FP32, as on the Neural Engine's wide accumulators; a
sum that a program leaves in FP16 is rounded once, at its end.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

Array: TypeAlias = Any  # numpy arrays, and numbers of its types
Operator = Callable[..., Any]

DTYPES = {
    "fp16": np.float32,  # on the FP16 grid: see the module's docstring
    "fp32": np.float32,
    "int8": np.int8,
    "uint8": np.uint8,
    "int16": np.int16,
    "uint16": np.uint16,
    "int32": np.int32,
    "uint32": np.uint32,
    "bool": np.bool_,
}
MOVING = frozenset(  # they change no value, so there is nothing to round
    {
        *("concat", "const", "expand_dims", "gather", "gather_along_axis", "identity", "read_state", "reshape", "select"),
        *("slice_by_index", "slice_by_size", "split", "squeeze", "stack", "tile", "transpose"),
    }
)
ERF_STEP, ERF_END = 1 / 512, 6.0

__all__ = ["DTYPES", "MOVING", "OPERATORS", "Operator"]


def _unary(function: Any) -> Operator:
    return lambda x: function(x)


def _binary(function: Any) -> Operator:
    return lambda x, y: function(x, y)


def _reduce(function: Any) -> Operator:
    def run(x: Array, axes: Array | None = None, keep_dims: Any = False) -> Any:
        over = tuple(range(x.ndim)) if axes is None else tuple(int(axis) for axis in np.atleast_1d(axes))
        return function(x, axis=over, keepdims=bool(keep_dims))

    return run


@functools.cache
def _erf_table() -> tuple[Array, Array]:
    points = np.arange(0.0, ERF_END + 2 * ERF_STEP, ERF_STEP)
    return np.array([math.erf(p) for p in points]), 2 / math.sqrt(math.pi) * np.exp(-(points**2)) * ERF_STEP


def erf(x: Array) -> Array:
    """Cubic Hermite interpolation of exact values and slopes, h = 1/512: error below 1e-12."""
    values, slopes = _erf_table()
    wide = np.nan_to_num(np.minimum(np.abs(x.astype(np.float64)), ERF_END), nan=ERF_END) / ERF_STEP
    index = wide.astype(np.int64)
    t = wide - index
    a, b, da, db = values[index], values[index + 1], slopes[index], slopes[index + 1]
    found = a + t * (da + t * (3 * (b - a) - 2 * da - db + t * (da + db - 2 * (b - a))))
    return np.where(np.isnan(x), np.nan, np.copysign(found, x)).astype(np.float32)


def _gelu(x: Array, mode: str = "EXACT") -> Array:
    if mode == "EXACT":
        return x * np.float32(0.5) * (1 + erf(x * np.float32(math.sqrt(0.5))))
    if mode == "TANH_APPROXIMATION":
        return x * np.float32(0.5) * (1 + np.tanh(np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x**3)))
    return x * _sigmoid(np.float32(1.702) * x)


def _sigmoid(x: Array) -> Array:
    return np.float32(0.5) * (1 + np.tanh(np.float32(0.5) * x))


def _softmax(x: Array, axis: int = -1) -> Array:
    e = np.exp(x - x.max(axis=int(axis), keepdims=True))
    return e / e.sum(axis=int(axis), keepdims=True)


def _layer_norm(
    x: Array, axes: Array | None = None, gamma: Array | None = None, beta: Array | None = None, epsilon: float = 1e-5
) -> Array:
    over = tuple(range(x.ndim)) if axes is None else tuple(int(axis) for axis in axes)
    centred = x - x.mean(axis=over, keepdims=True)
    y = centred / np.sqrt(np.square(centred).mean(axis=over, keepdims=True) + np.float32(epsilon))
    y = y if gamma is None else y * gamma
    return y if beta is None else y + beta


def _batch_norm(
    x: Array,
    mean: Array,
    variance: Array,
    gamma: Array | None = None,
    beta: Array | None = None,
    epsilon: float = 1e-5,
) -> Array:
    shape = (1, -1, *(1 for _ in x.shape[2:]))
    y = (x - mean.reshape(shape)) / np.sqrt(variance.reshape(shape) + np.float32(epsilon))
    y = y if gamma is None else y * gamma.reshape(shape)
    return y if beta is None else y + beta.reshape(shape)


def _matmul(x: Array, y: Array, transpose_x: Any = False, transpose_y: Any = False) -> Array:
    x = np.swapaxes(x, -1, -2) if transpose_x else x
    y = np.swapaxes(y, -1, -2) if transpose_y else y
    return np.asarray(np.matmul(x, y))


def _linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    y = np.matmul(x, weight.T)
    return np.asarray(y if bias is None else y + bias)


def _conv(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    strides: Array | None = None,
    pad_type: str = "valid",
    pad: Array | None = None,
    dilations: Array | None = None,
    groups: int = 1,
) -> Array:
    """x (B, G c, *in), weight (G o, c, *kernel) -> (B, G o, *out)."""
    rank = x.ndim - 2
    strides, dilations = ([1] * rank if a is None else [int(n) for n in a] for a in (strides, dilations))
    extents = [(k - 1) * d + 1 for k, d in zip(weight.shape[2:], dilations, strict=True)]
    x = np.pad(x, [(0, 0), (0, 0), *_conv_padding(pad_type, pad, x.shape[2:], extents, strides)])
    axes = tuple(range(2, 2 + rank))
    windows = sliding_window_view(x, extents, axis=axes)  # (B, G c, *positions, *extent)
    step = [slice(None, None, s) for s in strides]
    inside = [slice(None, None, d) for d in dilations]
    windows = windows[(slice(None), slice(None), *step, *inside)]
    out, g = windows.shape[2 : 2 + rank], int(groups)
    split = windows.reshape(x.shape[0], g, -1, *out, *weight.shape[2:])
    columns = np.moveaxis(split, 2, 2 + rank).reshape(x.shape[0], g, math.prod(out), -1)  # (B, G, out, c kernel)
    rows = weight.reshape(g, weight.shape[0] // g, -1)  # (G, o, c kernel)
    y = np.matmul(rows, np.swapaxes(columns, -1, -2)).reshape(x.shape[0], weight.shape[0], *out)
    return y if bias is None else y + bias.reshape(-1, *[1] * rank)


def _conv_padding(
    pad_type: str, pad: Array | None, lengths: tuple[int, ...], extents: list[int], strides: list[int]
) -> list[tuple[int, int]]:
    if pad_type == "valid":
        return [(0, 0)] * len(lengths)
    if pad_type == "custom":
        numbers = [0] * (2 * len(lengths)) if pad is None else [int(n) for n in pad]
        return list(zip(numbers[::2], numbers[1::2], strict=True))
    total = [max(0, (-(-n // s) - 1) * s + k - n) for n, k, s in zip(lengths, extents, strides, strict=True)]
    half = [(n // 2, n - n // 2) for n in total]
    return half if pad_type == "same" else [(after, before) for before, after in half]


def _reshape(x: Array, shape: Array) -> Array:
    return x.reshape([n if n else x.shape[i] for i, n in enumerate(int(n) for n in shape)])


def _slice_by_index(
    x: Array,
    begin: Array,
    end: Array,
    stride: Array | None = None,
    begin_mask: Array | None = None,
    end_mask: Array | None = None,
    squeeze_mask: Array | None = None,
) -> Array:
    def flag(mask: Array | None, axis: int) -> bool:
        return mask is not None and bool(mask[axis])

    index: list[slice | int] = []
    for axis in range(x.ndim):
        start, stop = int(begin[axis]), int(end[axis])
        step = 1 if stride is None else int(stride[axis])
        if flag(squeeze_mask, axis):
            index.append(start)
            continue
        index.append(
            slice(None if flag(begin_mask, axis) else start, None if flag(end_mask, axis) else stop, step),
        )
    return x[tuple(index)]


def _slice_by_size(x: Array, begin: Array, size: Array) -> Array:
    starts = [int(b) + (n if b < 0 else 0) for b, n in zip(begin, x.shape, strict=True)]
    ends = [n if s == -1 else b + int(s) for b, s, n in zip(starts, size, x.shape, strict=True)]
    return x[tuple(slice(b, e) for b, e in zip(starts, ends, strict=True))]


def _split(x: Array, axis: int, num_splits: int | None = None, split_sizes: Array | None = None) -> list[Array]:
    if split_sizes is None:
        return np.split(x, int(num_splits or 1), axis=int(axis))
    return np.split(x, np.cumsum(split_sizes)[:-1].astype(int), axis=int(axis))


def _gather(x: Array, indices: Array, axis: int = 0, batch_dims: int = 0, **_: Any) -> Array:
    if batch_dims:
        rows = [_gather(a, i, int(axis) - 1, int(batch_dims) - 1) for a, i in zip(x, indices, strict=True)]
        return np.stack(rows)
    return np.asarray(np.take(x, indices, axis=int(axis)))


def _gather_along_axis(x: Array, indices: Array, axis: int = 0, **_: Any) -> Array:
    return np.asarray(np.take_along_axis(x, indices.astype(np.int64), axis=int(axis)))


def _pad(x: Array, pad: Array, mode: str = "constant", constant_val: float = 0.0) -> Array:
    numbers = [int(n) for n in pad]
    widths = list(zip(numbers[::2], numbers[1::2], strict=True))
    widths = [(0, 0)] * (x.ndim - len(widths)) + widths
    if mode == "constant":
        return np.pad(x, widths, constant_values=np.asarray(constant_val).astype(x.dtype))
    return np.pad(x, widths, mode="edge" if mode == "replicate" else "reflect")


def _cumsum(x: Array, axis: int = 0, exclusive: Any = False, reverse: Any = False) -> Array:
    axis = int(axis)
    x = np.flip(x, axis) if reverse else x
    total = np.cumsum(x, axis=axis, dtype=x.dtype)
    total = total - x if exclusive else total
    return np.flip(total, axis) if reverse else total


def _squeeze(x: Array, axes: Array | None = None) -> Array:
    return np.squeeze(x, None if axes is None else tuple(int(axis) for axis in axes))


def _concat(values: list[Array], axis: int, interleave: Any = False) -> Array:
    if interleave:
        stacked = np.stack(values, axis=int(axis) % values[0].ndim + 1)
        shape = list(values[0].shape)
        shape[int(axis)] *= len(values)
        return stacked.reshape(shape)
    return np.concatenate([np.atleast_1d(value) for value in values], axis=int(axis))


def _cast(x: Array, dtype: str) -> Array:
    kind = np.dtype(DTYPES[dtype])
    with np.errstate(invalid="ignore"):
        return x.astype(kind)


def _along(parameter: Array, x: Array, axis: int | None) -> Array:
    """A scale or zero point for each channel, so that it broadcasts."""
    if parameter.ndim != 1 or parameter.size == 1 or axis is None:
        return parameter
    shape = [1] * x.ndim
    shape[int(axis)] = -1
    return parameter.reshape(shape)


def _quantize(
    input: Array,  # the operator's name for it
    scale: Array,
    output_dtype: str,
    zero_point: Array | None = None,
    axis: int | None = None,
) -> Array:
    limits = np.iinfo(DTYPES[output_dtype])
    shift = np.int32(0) if zero_point is None else _along(np.asarray(zero_point), input, axis).astype(np.int32)
    levels = np.rint(input / _along(np.asarray(scale), input, axis)) + shift
    return np.clip(levels, limits.min, limits.max).astype(DTYPES[output_dtype])


def _dequantize(
    input: Array,
    scale: Array,
    zero_point: Array | None = None,
    axis: int | None = None,
) -> Array:
    levels = input.astype(np.float32)
    if zero_point is not None:
        levels = levels - _along(np.asarray(zero_point), input, axis).astype(np.float32)
    return np.asarray(levels * _along(np.asarray(scale), input, axis))


def _affine_dequantize(quantized_data: Array, zero_point: Array, scale: Array, axis: int) -> Array:
    return _dequantize(quantized_data, np.atleast_1d(scale), np.atleast_1d(zero_point), int(axis))


def _lut_to_dense(indices: Array, lut: Array, shape: Array | None = None, **_: Any) -> Array:
    if shape is not None:  # iOS 16: indices are a stream of bits
        bits = round(math.log2(lut.size))
        stream = np.unpackbits(indices.view(np.uint8), bitorder="little")
        count = math.prod(int(n) for n in shape)
        levels = (stream[: count * bits].reshape(count, bits) << np.arange(bits)).sum(1)
        return np.asarray(lut.ravel()[levels].reshape([int(n) for n in shape]))
    if lut.shape[-1] != 1:
        raise NotImplementedError("a palette of vectors")
    blocks = lut.shape[: indices.ndim]
    table = lut
    for axis, n in enumerate(blocks):
        table = np.repeat(table, indices.shape[axis] // n, axis=axis)
    return np.take_along_axis(table[..., 0], indices[..., None].astype(np.int64), axis=-1)[..., 0]


def _blockwise_shift_scale(data: Array, scale: Array, offset: Array | None = None) -> Array:
    def spread(parameter: Array) -> Array:
        for axis, n in enumerate(parameter.shape):
            parameter = np.repeat(parameter, data.shape[axis] // n, axis=axis)
        return parameter

    levels = data.astype(np.float32)
    levels = levels if offset is None else levels - spread(offset).astype(np.float32)
    return np.asarray(levels * spread(scale))


def _divide(x: Array, y: Array) -> Array:
    if np.issubdtype(np.asarray(x).dtype, np.integer):
        return np.asarray(np.trunc(x / y)).astype(x.dtype)
    return np.asarray(x / y)


def _clip(x: Array, alpha: Array, beta: Array) -> Array:
    return np.minimum(np.maximum(x, alpha), beta)


def _range(end: Array, start: Array, step: Array) -> Array:
    return np.arange(start, end, step, dtype=np.asarray(start).dtype)


OPERATORS: dict[str, Operator] = {
    **{
        name: _binary(function)
        for name, function in {
            "add": np.add,
            "sub": np.subtract,
            "mul": np.multiply,
            "real_div": _divide,
            "floor_div": np.floor_divide,
            "mod": np.mod,
            "pow": np.power,
            "maximum": np.maximum,
            "minimum": np.minimum,
            "equal": np.equal,
            "not_equal": np.not_equal,
            "greater": np.greater,
            "greater_equal": np.greater_equal,
            "less": np.less,
            "less_equal": np.less_equal,
            "logical_and": np.logical_and,
            "logical_or": np.logical_or,
            "logical_xor": np.logical_xor,
        }.items()
    },
    **{
        name: _unary(function)
        for name, function in {
            "abs": np.abs,
            "ceil": np.ceil,
            "cos": np.cos,
            "erf": erf,
            "exp": np.exp,
            "floor": np.floor,
            "identity": np.asarray,
            "logical_not": np.logical_not,
            "relu": lambda x: np.maximum(x, 0),
            "round": np.rint,
            "sigmoid": _sigmoid,
            "sign": np.sign,
            "silu": lambda x: x * _sigmoid(x),
            "sin": np.sin,
            "softplus": lambda x: np.logaddexp(x, np.float32(0)),
            "sqrt": np.sqrt,
            "square": np.square,
            "tanh": np.tanh,
        }.items()
    },
    **{
        f"reduce_{name}": _reduce(function)
        for name, function in {
            "mean": np.mean,
            "sum": np.sum,
            "max": np.max,
            "min": np.min,
            "prod": np.prod,
            "sum_square": lambda x, **how: np.sum(np.square(x), **how),
            "l2_norm": lambda x, **how: np.sqrt(np.sum(np.square(x), **how)),
        }.items()
    },
    "band_part": lambda x, lower=-1, upper=-1: _band(x, int(lower), int(upper)),
    "batch_norm": _batch_norm,
    "cast": _cast,
    "clip": _clip,
    "concat": _concat,
    "constexpr_affine_dequantize": _affine_dequantize,
    "constexpr_blockwise_shift_scale": _blockwise_shift_scale,
    "constexpr_lut_to_dense": _lut_to_dense,
    "conv": _conv,
    "cumsum": _cumsum,
    "dequantize": _dequantize,
    "expand_dims": lambda x, axes: np.expand_dims(x, tuple(int(axis) for axis in axes)),
    "fill": lambda shape, value=0.0: np.full([int(n) for n in shape], value),
    "gather": _gather,
    "gather_along_axis": _gather_along_axis,
    "gelu": _gelu,
    "inverse": lambda x, epsilon=1e-4: 1 / (x + np.float32(epsilon)),
    "layer_norm": _layer_norm,
    "leaky_relu": lambda x, alpha=0.01: np.where(x >= 0, x, np.asarray(alpha, x.dtype) * x),
    "linear": _linear,
    "log": lambda x, epsilon=1e-45: np.log(x + np.float32(epsilon)),
    "matmul": _matmul,
    "pad": _pad,
    "quantize": _quantize,
    "range_1d": _range,
    "reshape": _reshape,
    "rsqrt": lambda x, epsilon=1e-12: 1 / np.sqrt(x + np.float32(epsilon)),
    "select": lambda cond, a, b: np.where(cond, a, b),
    "shape": lambda x: np.array(x.shape, np.int32),
    "sigmoid_hard": lambda x, alpha=0.2, beta=0.5: np.clip(np.asarray(alpha, x.dtype) * x + np.asarray(beta, x.dtype), 0, 1),
    "slice_by_index": _slice_by_index,
    "slice_by_size": _slice_by_size,
    "softmax": _softmax,
    "split": _split,
    "squeeze": _squeeze,
    "stack": lambda values, axis: np.stack(values, axis=int(axis)),
    "tile": lambda x, reps: np.tile(x, [int(n) for n in reps]),
    "transpose": lambda x, perm: np.transpose(x, [int(axis) for axis in perm]),
}


def _band(x: Array, lower: int, upper: int) -> Array:
    rows, columns = x.shape[-2:]
    distance = np.arange(rows)[:, None] - np.arange(columns)  # row - column
    kept = ((lower < 0) | (distance <= lower)) & ((upper < 0) | (-distance <= upper))
    return np.where(kept, x, np.zeros((), x.dtype))
