"""What values a graph can hold, without running it: interval arithmetic over its nodes.

Every value gets bounds that hold for each input within the stated limits, so they are a proof and not a sample. The mixer's are
known from its weights alone (a in [-0.1, 6], so |f| <= sum |c_p| 6^p); LayerNorm starts every block afresh, whatever came
before: |n_i| <= sqrt(d), and a product with a weight row w is at most sqrt(d) ||w gamma||_2 (Cauchy-Schwarz).

Bounds are arrays that broadcast to their value: of length 1 along tokens and batch, of full length along channels where that
pays. Means over tokens are convex combinations, so they keep the bounds of what they average, for any number of tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from pom_edge.export.cost import graph_nodes

MAX_TOKENS = 1_000_000  # of sums over an axis without a stated limit
STATE_ROUNDS = 4  # a state that still grows after so many steps has no bound
# Modules of ours, found by names that no model of a user has: what averages features over tokens (see
# pom_edge.export.lowering.Aggregate), and what computes rotary angles.
AGGREGATE, TABLES = "pom_mean", "pom_angles"
Array = np.ndarray

__all__ = ["AGGREGATE", "TABLES", "Range", "find_ranges", "in_scope", "is_float", "is_positional"]


@dataclass(frozen=True)
class Ball:
    """x = scale * n + shift along one axis, with ||n||_2 <= radius: what LayerNorm makes."""

    axis: int
    scale: Array
    shift: Array
    radius: float


@dataclass(frozen=True)
class Range:
    """Bounds of a value; ``rows_sum`` says that its last axis holds weights that sum to 1 (a softmax)."""

    low: Array
    high: Array
    ball: Ball | None = None
    rows_sum: bool = False

    @classmethod
    def of(cls, low: float, high: float) -> Range:
        """The same bounds for every element."""
        return cls(np.array(low, np.float64), np.array(high, np.float64))

    @property
    def largest(self) -> float:
        """Of the magnitude; infinite where nothing is known."""
        largest = float(np.maximum(np.abs(self.low), np.abs(self.high)).max(initial=0.0))
        return math.inf if math.isnan(largest) else largest

    @property
    def magnitude(self) -> Array:
        """Of each element."""
        return np.asarray(np.maximum(np.abs(self.low), np.abs(self.high)))

    def map(self, function: Callable[[Array], Array]) -> Range:
        """A monotone function, or one that moves elements, of both ends."""
        return Range(function(self.low), function(self.high))

    def flat(self) -> Range:
        """The same bounds for every element."""
        return Range.of(float(self.low.min(initial=math.inf)), float(self.high.max(initial=-math.inf)))


UNKNOWN = Range.of(-math.inf, math.inf)


def is_float(value: ir.Value | None) -> bool:
    """Whether a value is one whose type a precision decides."""
    return value is not None and value.dtype in (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def in_scope(node: ir.Node, name: str) -> bool:
    """Whether a module of that name made the node."""
    return name in str(node.name).rpartition("/")[0].split(".")


def is_positional(node: ir.Node, known: Mapping[str, bool]) -> bool:
    """Whether a node computes from indices and masks alone: angles, counts, weights. ``known`` says it of its inputs."""
    if in_scope(node, TABLES) or node.op_type in ("Shape", "Size"):
        return True
    if node.op_type == "Gather" and node.inputs[0] is not None and node.inputs[0].const_value is not None:
        return False  # an embedding: data, looked up by index
    return all(v is None or v.const_value is not None or known.get(str(v.name), False) for v in node.inputs)


def find_ranges(model: ir.Model, inputs: Mapping[str, Range], tokens: int = MAX_TOKENS) -> dict[str, Range]:
    """Bounds of every floating-point value of a graph.

    Args:
        model: the graph in FP32.
        inputs: bounds of its inputs; state (``state.*``) is found by following its ``next.*`` until it grows no further.
        tokens: longest sequence.

    Returns:
        By value name; :data:`UNKNOWN` where nothing can be said.
    """
    states = [str(v.name) for v in model.graph.inputs if str(v.name).startswith("state.") and is_float(v)]
    known = {**inputs, **{name: Range.of(0.0, 0.0) for name in states if name not in inputs}}
    for _ in range(STATE_ROUNDS):
        found = _propagate(model, known, tokens)
        grown = {}
        for name in states:
            following = found.get("next." + name.removeprefix("state."), UNKNOWN).flat()
            if following.low < known[name].low.min() or following.high > known[name].high.max():
                grown[name] = _hull([following, known[name].flat()])
        if not grown:
            return found
        known |= grown
    return _propagate(model, known | dict.fromkeys(grown, UNKNOWN), tokens)


def _propagate(model: ir.Model, inputs: Mapping[str, Range], tokens: int) -> dict[str, Range]:
    found: dict[str, Range] = {str(v.name): inputs.get(str(v.name), UNKNOWN) for v in model.graph.inputs}
    positional = {str(v.name): not is_float(v) or "mask" in str(v.name) for v in model.graph.inputs}
    graph = _Rules(found, tokens)
    means: dict[str, Range] = {}  # of the features that each aggregation averages
    for node in graph_nodes(model):
        angles = is_positional(node, positional)
        positional |= {str(v.name): angles for v in node.outputs}
        if in_scope(node, AGGREGATE) and not angles:
            scope = str(node.name).rpartition("/")[0]
            for value in node.inputs:
                if value is not None and _enters(value, scope) and not positional.get(str(value.name), False):
                    means.setdefault(scope, _hull([graph.range_of(value), Range.of(0.0, 0.0)]))  # 0: of no token at all
            results = [means.get(scope, UNKNOWN) if _leaves(v, scope) else UNKNOWN for v in node.outputs]
        else:
            results = graph.apply(node)
            if in_scope(node, TABLES):  # sums of products of cosines and sines are cosines and sines again
                results = [Range.of(-1.0, 1.0) if math.isfinite(each.largest) else each for each in results]
        found |= {str(v.name): result for v, result in zip(node.outputs, results, strict=True)}
    return found


def _enters(value: ir.Value, scope: str) -> bool:
    """Whether a value comes into a module from outside, other than as a constant or a state."""
    producer = value.producer()
    if producer is None:
        return not value.is_initializer() and not str(value.name).startswith("state.")
    return not str(producer.name).startswith(scope + "/") and producer.op_type != "Constant"


def _leaves(value: ir.Value, scope: str) -> bool:
    """Whether a value is seen outside of the module that makes it; what is inside are sums, which grow with the tokens."""
    return value.is_graph_output() or any(not str(user.name).startswith(scope + "/") for user, _ in value.uses())


def _hull(ranges: Iterable[Range]) -> Range:
    flat = [each.flat() for each in ranges]
    return Range.of(min(float(r.low) for r in flat), max(float(r.high) for r in flat))


class _Rules:
    """What each operator does to bounds."""

    def __init__(self, found: dict[str, Range], tokens: int) -> None:
        self._found, self._tokens = found, tokens

    def range_of(self, value: ir.Value | None) -> Range:
        """The bounds of an input of a node."""
        if value is None:
            return UNKNOWN
        if value.const_value is not None:
            array = value.const_value.numpy()
            wide = array.astype(np.float64) if array.dtype.kind in "fiu" else None
            return UNKNOWN if wide is None else Range(wide, wide)
        return self._found.get(str(value.name), UNKNOWN)

    def apply(self, node: ir.Node) -> list[Range]:
        """The bounds of a node's outputs."""
        with np.errstate(all="ignore"):
            if node.op_type in _SAME:
                result = self.range_of(node.inputs[0])
            elif node.op_type in _HULL:
                positions = _HULL[node.op_type]
                chosen = [v for i, v in enumerate(node.inputs) if v is not None and (positions is None or i in positions)]
                result = _hull(self.range_of(value) for value in chosen)
            elif node.op_type in _MONOTONE:
                x = self.range_of(node.inputs[0])
                result = x.map(lambda end: _MONOTONE[node.op_type](end, node))
            elif node.op_type in _FIXED:
                result = Range.of(*_FIXED[node.op_type])
            else:
                rule: Callable[[ir.Node], Range] | None = getattr(self, f"_{node.op_type.lower()}", None)
                result = UNKNOWN if rule is None else rule(node)
        if np.isnan(result.low).any() or np.isnan(result.high).any():
            result = UNKNOWN
        return [result] * len(node.outputs)

    def _pair(self, node: ir.Node) -> tuple[Range, Range]:
        return self.range_of(node.inputs[0]), self.range_of(node.inputs[1])

    def _add(self, node: ir.Node) -> Range:
        a, b = self._pair(node)
        return Range(a.low + b.low, a.high + b.high)

    def _sub(self, node: ir.Node) -> Range:
        a, b = self._pair(node)
        return Range(a.low - b.high, a.high - b.low)

    def _mul(self, node: ir.Node) -> Range:
        a, b = self._pair(node)
        products = _corners(a, b)
        low = np.zeros(()) if node.inputs[0] is node.inputs[1] else products.min(0)
        return Range(low, products.max(0))

    def _div(self, node: ir.Node) -> Range:
        a, b = self._pair(node)
        if ((b.low <= 0) & (b.high >= 0)).any():
            return UNKNOWN
        quotients = _corners(a, Range(1 / b.high, 1 / b.low))
        return Range(quotients.min(0), quotients.max(0))

    def _pow(self, node: ir.Node) -> Range:
        x, power = self._pair(node)
        if power.low.size != 1 or power.low.min() != power.high.min():
            return UNKNOWN
        p = float(power.low.min())
        if p == int(p) and p > 0:
            ends = np.stack(np.broadcast_arrays(x.low**p, x.high**p))
            return Range(np.minimum(ends.min(0), 0.0) if p % 2 else np.zeros(()), ends.max(0))
        return Range(x.low**p, x.high**p) if p > 0 and (x.low >= 0).all() else UNKNOWN

    def _sqrt(self, node: ir.Node) -> Range:
        x = self.range_of(node.inputs[0])
        return Range(np.sqrt(np.maximum(x.low, 0)), np.sqrt(np.maximum(x.high, 0)))

    def _reciprocal(self, node: ir.Node) -> Range:
        x = self.range_of(node.inputs[0])
        return UNKNOWN if ((x.low <= 0) & (x.high >= 0)).any() else Range(1 / x.high, 1 / x.low)

    def _cast(self, node: ir.Node) -> Range:
        source = node.inputs[0]
        return Range.of(0.0, 1.0) if source is not None and source.dtype == ir.DataType.BOOL else self.range_of(source)

    def _trilu(self, node: ir.Node) -> Range:
        return _hull([self.range_of(node.inputs[0]), Range.of(0.0, 0.0)])

    def _pad(self, node: ir.Node) -> Range:
        filled = node.inputs[2] if len(node.inputs) > 2 else None
        return _hull([self.range_of(node.inputs[0]), Range.of(0.0, 0.0) if filled is None else self.range_of(filled)])

    def _neg(self, node: ir.Node) -> Range:
        x = self.range_of(node.inputs[0])
        return Range(-x.high, -x.low)

    def _abs(self, node: ir.Node) -> Range:
        return Range(np.zeros(()), self.range_of(node.inputs[0]).magnitude)

    def _gelu(self, node: ir.Node) -> Range:
        x = self.range_of(node.inputs[0])
        return Range(np.clip(x.low, -0.171, 0.0), np.maximum(x.high, 0.0))

    def _clip(self, node: ir.Node) -> Range:
        x = self.range_of(node.inputs[0])
        limits = [self.range_of(v) if v is not None else None for v in (*node.inputs[1:], None, None)][:2]
        low = x.low if limits[0] is None else np.maximum(x.low, limits[0].low)
        high = x.high if limits[1] is None else np.minimum(x.high, limits[1].high)
        return Range(np.minimum(low, high), np.maximum(low, high))

    def _min(self, node: ir.Node) -> Range:
        parts = [self.range_of(value) for value in node.inputs]
        return Range(np.minimum.reduce([p.low for p in parts]), np.minimum.reduce([p.high for p in parts]))

    def _max(self, node: ir.Node) -> Range:
        parts = [self.range_of(value) for value in node.inputs]
        return Range(np.maximum.reduce([p.low for p in parts]), np.maximum.reduce([p.high for p in parts]))

    def _softmax(self, node: ir.Node) -> Range:
        axis = node.attributes.get_int("axis", -1)
        rank = len(node.inputs[0].shape or ()) if node.inputs[0] is not None else 0
        return Range(np.zeros(()), np.ones(()), rows_sum=axis in (-1, rank - 1))

    def _transpose(self, node: ir.Node) -> Range:
        x, rank = self.range_of(node.inputs[0]), _rank(node.inputs[0])
        order = list(node.attributes.get_ints("perm", list(range(rank))[::-1]))
        low, high = (_full_rank(end, rank).transpose(order) for end in (x.low, x.high))
        ball = x.ball and Ball(order.index(x.ball.axis), x.ball.scale, x.ball.shift, x.ball.radius)
        return Range(low, high, ball)

    def _unsqueeze(self, node: ir.Node) -> Range:
        x, rank = self.range_of(node.inputs[0]), _rank(node.outputs[0])
        axes = self._axes(node, rank)
        if x.low.size == 1 or axes is None:
            return x.flat()
        inner = rank - len(axes)
        return x.map(lambda end: np.expand_dims(_full_rank(end, inner), tuple(axes)))

    def _squeeze(self, node: ir.Node) -> Range:
        x, rank = self.range_of(node.inputs[0]), _rank(node.inputs[0])
        axes = self._axes(node, rank)
        if x.low.size == 1 or axes is None:
            return x.flat()
        return x.map(lambda end: _full_rank(end, rank).squeeze(tuple(axes)))

    def _reducemean(self, node: ir.Node) -> Range:
        return self._reduced(node, mean=True)

    def _reducesum(self, node: ir.Node) -> Range:
        return self._reduced(node, mean=False)

    def _reduced(self, node: ir.Node, mean: bool) -> Range:
        x = self.range_of(node.inputs[0]).flat()
        if mean:
            return x
        rank = _rank(node.inputs[0])
        shape = node.inputs[0].shape if node.inputs[0] is not None else None
        axes = self._axes(node, rank)
        if shape is None or axes is None:
            return UNKNOWN
        count = math.prod(dim if isinstance(dim, int) else self._tokens for dim in (shape[axis] for axis in axes))
        return Range(np.minimum(x.low * count, x.low), np.maximum(x.high * count, x.high))

    def _cumsum(self, node: ir.Node) -> Range:
        x = self.range_of(node.inputs[0]).flat()
        return Range(np.minimum(x.low * self._tokens, x.low), np.maximum(x.high * self._tokens, x.high))

    def _axes(self, node: ir.Node, rank: int) -> list[int] | None:
        given = node.inputs[1] if len(node.inputs) > 1 else None
        if given is None:
            return list(range(rank))
        return None if given.const_value is None else [int(a) % rank for a in given.const_value.numpy().reshape(-1)]

    def _layernormalization(self, node: ir.Node) -> Range:
        x = node.inputs[0]
        width = x.shape[-1] if x is not None and x.shape is not None else None
        if not isinstance(width, int) or node.attributes.get_int("axis", -1) not in (-1, _rank(x) - 1):
            return UNKNOWN
        scale, nothing = self.range_of(node.inputs[1]), np.zeros(width)
        given = len(node.inputs) > 2 and node.inputs[2] is not None
        shift = self.range_of(node.inputs[2]) if given else Range(nothing, nothing)
        reach = scale.magnitude * math.sqrt(width)
        constant = _constant(scale) and _constant(shift)  # computed from data, they are no ball
        ball = Ball(_rank(x) - 1, scale.low, shift.low, math.sqrt(width)) if constant else None
        return Range(shift.low - reach, shift.high + reach, ball)

    def _conv(self, node: ir.Node) -> Range:
        x, weight = self._pair(node)
        if not _constant(weight):
            return UNKNOWN
        reach = np.abs(weight.low).reshape(weight.low.shape[0], -1).sum(1) * x.largest
        bias = self.range_of(node.inputs[2]) if len(node.inputs) > 2 and node.inputs[2] is not None else Range.of(0.0, 0.0)
        shape = (-1, *[1] * (weight.low.ndim - 2))
        return Range((bias.low - reach).reshape(shape), (bias.high + reach).reshape(shape))

    def _gemm(self, node: ir.Node) -> Range:
        a, b = self._pair(node)
        if node.attributes.get_int("transA", 0):
            a = _transposed(a)
        if node.attributes.get_int("transB", 0):
            b = _transposed(b)
        product = self._product(a, b, _inner(node))
        alpha, beta = node.attributes.get_float("alpha", 1.0), node.attributes.get_float("beta", 1.0)
        if len(node.inputs) < 3 or node.inputs[2] is None:
            return Range(product.low * alpha, product.high * alpha)
        c = self.range_of(node.inputs[2])
        return Range(product.low * alpha + c.low * beta, product.high * alpha + c.high * beta)

    def _matmul(self, node: ir.Node) -> Range:
        return self._product(*self._pair(node), _inner(node), [_rank(value) for value in node.inputs])

    def _product(self, a: Range, b: Range, inner: int | None, ranks: list[int] | None = None) -> Range:
        """sum_k a_ik b_kj over ``inner`` terms (None: as many as tokens)."""
        if a.rows_sum:  # weights that sum to 1
            return b.flat()
        length = self._tokens if inner is None else inner
        if inner is None or (a.low.size == 1 and b.low.size == 1):
            corners = _corners(a.flat(), b.flat())
            low, high = float(corners.min()) * length, float(corners.max()) * length
            result = Range.of(min(low, 0.0), max(high, 0.0))
        else:
            result = self._exact_product(a, b, inner)
        if ranks is not None and inner is not None:
            for ball, weight, first in ((a.ball, b, True), (b.ball, a, False)):
                if ball is not None and ball.axis == (ranks[0] - 1 if first else ranks[1] - 2) and _constant(weight):
                    result = _tighter(result, _ball_product(ball, weight.low, first))
        return result

    @staticmethod
    def _exact_product(a: Range, b: Range, inner: int) -> Range:
        left = a.map(lambda end: _with_axis(end, -1, inner))  # (.., m or 1, K)
        right = b.map(lambda end: _with_axis(end, -2, inner))  # (.., K, n or 1)
        if _constant(b):
            positive, negative = np.maximum(right.low, 0), np.minimum(right.low, 0)
            return _finite_product(left.low @ positive + left.high @ negative, left.high @ positive + left.low @ negative)
        if _constant(a):
            positive, negative = np.maximum(left.low, 0), np.minimum(left.low, 0)
            return _finite_product(positive @ right.low + negative @ right.high, positive @ right.high + negative @ right.low)
        reach = left.magnitude @ right.magnitude
        return _finite_product(-reach, reach)


def _transposed(x: Range) -> Range:
    low = _full_rank(x.low, 2).T
    return Range(low, low if _constant(x) else _full_rank(x.high, 2).T)


def _finite_product(low: Array, high: Array) -> Range:
    """inf * 0 is NaN in a product with an unbounded operand."""
    return UNKNOWN if np.isnan(low).any() or np.isnan(high).any() else Range(low, high)


def _ball_product(ball: Ball, weight: Array, first: bool) -> Range:
    """(scale n + shift) W for W (K, n), or W x for W (m, K)."""
    shape = (-1, 1) if first else (1, -1)
    axis = -2 if first else -1
    scaled = weight * np.broadcast_to(ball.scale, (weight.shape[axis],)).reshape(shape)
    reach = ball.radius * np.sqrt(np.square(scaled).sum(axis, keepdims=True))
    middle = (weight * np.broadcast_to(ball.shift, (weight.shape[axis],)).reshape(shape)).sum(axis, keepdims=True)
    return Range(middle - reach, middle + reach)


def _tighter(a: Range, b: Range) -> Range:
    return Range(np.maximum(a.low, b.low), np.minimum(a.high, b.high))


def _constant(x: Range) -> bool:
    return x.low is x.high


def _corners(a: Range, b: Range) -> Array:
    """Products of the ends; an end of zero times an infinite one counts as zero: the other corners carry infinity."""
    products = np.broadcast_arrays(*(x * y for x in (a.low, a.high) for y in (b.low, b.high)))
    return np.asarray(np.nan_to_num(np.stack(products), nan=0.0, posinf=np.inf, neginf=-np.inf))


def _full_rank(array: Array, rank: int) -> Array:
    return array.reshape((1,) * (rank - array.ndim) + array.shape)


def _with_axis(array: Array, axis: int, length: int) -> Array:
    """At least 2-D, with that axis in full."""
    array = _full_rank(array, max(array.ndim, 2))
    shape = list(array.shape)
    shape[axis] = length
    return np.broadcast_to(array, shape)


def _rank(value: ir.Value | None) -> int:
    return 0 if value is None or value.shape is None else len(value.shape)


def _inner(node: ir.Node) -> int | None:
    """K of a product, where one of the operands says it."""
    a, b = node.inputs[0], node.inputs[1]
    candidates = []
    for value, axis, flag in ((a, -1, "transA"), (b, -2, "transB")):
        if value is not None and value.shape is not None and len(value.shape):
            turned = node.attributes.get_int(flag, 0)
            place = {-1: -2, -2: -1}[axis] if turned else axis
            candidates.append(value.shape[max(place, -len(value.shape))])
    return next((dim for dim in candidates if isinstance(dim, int)), None)


def _number(node: ir.Node, name: str, default: float) -> float:
    return float(node.attributes.get_float(name, default) or 0.0)


_SAME = {"Identity", "Dropout"}
# inputs whose values can appear in the output; None: all of them
_HULL: dict[str, tuple[int, ...] | None] = {
    "Concat": None,
    "DepthToSpace": (0,),
    "Expand": (0,),
    "Flatten": (0,),
    "Gather": (0,),
    "GatherElements": (0,),
    "GatherND": (0,),
    "Reshape": (0,),
    "ReduceMax": (0,),
    "ReduceMin": (0,),
    "MaxPool": (0,),
    "AveragePool": (0,),
    "GlobalAveragePool": (0,),
    "Slice": (0,),
    "SpaceToDepth": (0,),
    "Split": (0,),
    "Tile": (0,),
    "Where": (1, 2),
}
_MONOTONE: dict[str, Callable[[Array, ir.Node], Array]] = {
    "Erf": lambda x, _: np.asarray(np.vectorize(math.erf, otypes=[np.float64])(x)),
    "Exp": lambda x, _: np.exp(x),
    "Floor": lambda x, _: np.floor(x),
    "HardSigmoid": lambda x, n: np.clip(_number(n, "alpha", 0.2) * x + _number(n, "beta", 0.5), 0.0, 1.0),
    "LeakyRelu": lambda x, n: np.where(x < 0, _number(n, "alpha", 0.01) * x, x),
    "Relu": lambda x, _: np.maximum(x, 0.0),
    "Sigmoid": lambda x, _: 1 / (1 + np.exp(-x)),
    "Tanh": lambda x, _: np.tanh(x),
}
_FIXED = {"Cos": (-1.0, 1.0), "Sin": (-1.0, 1.0), "HardSwish": (-0.375, math.inf)}
