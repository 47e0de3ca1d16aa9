"""A second implementation of the mixer in float64 numpy, written from the formulas as plain loops.

It shares no code and no trick with pom_edge: powers are powers, every query averages its own tokens, a rotation turns one
pair of channels after another, groups and heads are blocks cut out one by one. Slow, and hard to get wrong; the module,
the lowered layers and the exported graphs are all held against it.

    a_n = clip(leaky_relu(W_po x_n, 0.01), -0.1, 6)
    f_n = sum_p c_p a_n^p                               then rotated by position n
    h_t = sum_n w_tn f_n / sum_n w_tn                   zero where no token is admitted
    s_t = clip((W_se x_t + b_se) / 6 + 1/2, 0, 1)       then rotated by position t
    y_t = W_ag (s_t * h_t) + b_ag

Shapes: B batch, T queries, N context tokens, d width, D hidden width, H heads, k degree. Imports numpy only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Arrays = dict[str, NDArray[Any]]
Config = dict[str, Any]

MODES = (
    "none",
    "padding",
    "per_query",
    "causal",
    "causal_padding",
    "cross",
    "cross_padding",
    "cross_per_query",
)

__all__ = [
    "MODES",
    "Case",
    "admitted",
    "admitted_by_frames",
    "evaluate",
    "evaluate_cumulative",
    "means",
    "mix",
    "random_case",
    "random_params",
    "relative_error",
    "resume",
    "snr_db",
]


@dataclass(frozen=True)
class Case:
    """One configuration of the mixer with parameters and inputs.

    Attributes:
        config: the constructor's keyword arguments.
        params: state dict under the published names, float32.
        inputs: x, and where the mode has them context, mask, positions, context_positions.
        mode: one of :data:`MODES`, or "frames".
        frames: lengths of the frames of mode "frames": a token sees its whole frame and every frame before it.
        note: where the case came from; shown by ``str``.
    """

    config: Config
    params: Arrays
    inputs: Arrays
    mode: str = "none"
    frames: tuple[int, ...] = ()
    note: str = ""

    @property
    def causal(self) -> bool:
        return self.mode.startswith("causal")

    def __str__(self) -> str:
        settings = " ".join(f"{key}={value}" for key, value in self.config.items())
        shapes = " ".join(f"{name}{list(value.shape)}" for name, value in self.inputs.items())
        return f"{self.note} {self.mode}: {settings}; {shapes}"


# ---- the formulas ---------------------------------------------------------------------------------------------------


def evaluate(case: Case) -> Array:
    """y (B, T, d) of a case, float64."""
    x = case.inputs["x"]
    context = case.inputs.get("context", x)
    if case.frames:
        weights = admitted_by_frames(case.frames, x.shape[0])
    else:
        weights = admitted(case.mode, case.inputs.get("mask"), x.shape[0], x.shape[1], context.shape[1])
    positions = case.inputs.get("positions")
    context_positions = case.inputs.get("context_positions", positions if "context" not in case.inputs else None)
    return mix(case.config, case.params, x, context, weights, positions, context_positions)


def mix(
    config: Config,
    params: Arrays,
    x: NDArray[Any],
    context: NDArray[Any],
    weights: Array,
    positions: NDArray[Any] | None = None,
    context_positions: NDArray[Any] | None = None,
) -> Array:
    """y (B, T, d) for x (B, T, d), context (B, N, d) and the weight (B, T, N) of each context token for each query.

    Positions are (T,) or (T, 2), the same for every sequence; None counts from 0.
    """
    h = means(config, params, context, weights, context_positions)  # (B, T, D)
    y = np.zeros(x.shape, np.float64)
    for b in range(x.shape[0]):
        gate = _gate(config, params, x[b].astype(np.float64), positions)  # (T, D)
        for t in range(x.shape[1]):
            y[b, t] = params["ag_proj.weight"].astype(np.float64) @ (gate[t] * h[b, t])
            if "ag_proj.bias" in params:
                y[b, t] += params["ag_proj.bias"]
    return y


def means(
    config: Config, params: Arrays, context: NDArray[Any], weights: Array, positions: NDArray[Any] | None = None
) -> Array:
    """h (B, T, D): every query's own weighted mean of the features."""
    batch, queries, _ = weights.shape
    h = np.zeros((batch, queries, _hidden(config)), np.float64)
    for b in range(batch):
        f = _features(config, params, context[b].astype(np.float64), positions)  # (N, D)
        for t in range(queries):
            row = weights[b, t]
            if t > 0 and np.array_equal(row, weights[b, t - 1]):
                h[b, t] = h[b, t - 1]
            elif row.sum() > 0:
                h[b, t] = (row[:, None] * f).sum(0) / row.sum()
    return h


def admitted(mode: str, mask: NDArray[Any] | None, batch: int, queries: int, tokens: int) -> Array:
    """Weight (B, T, N) of each context token for each query, whatever the kind of mask."""
    weights = np.ones((batch, queries, tokens), np.float64)
    for b in range(batch):
        for t in range(queries):
            if mode.startswith("causal"):
                weights[b, t, t + 1 :] = 0
            if mask is not None and mask.ndim == 2:
                weights[b, t] *= mask[b].astype(np.float64)
            if mask is not None and mask.ndim == 3:
                weights[b, t] *= mask[b if mask.shape[0] > 1 else 0, t].astype(np.float64)
    return weights


def admitted_by_frames(frames: Sequence[int], batch: int) -> Array:
    """Block-causal weights (B, T, T): a token sees its whole frame and every frame before it."""
    tokens = sum(frames)
    weights = np.zeros((batch, tokens, tokens), np.float64)
    end = 0
    for length in frames:
        start, end = end, end + length
        weights[:, start:end, :end] = 1
    return weights


def resume(
    config: Config,
    params: Arrays,
    chunk: NDArray[Any],
    mean: NDArray[Any],
    count: NDArray[Any],
    frame: bool = False,
    mask: NDArray[Any] | None = None,
    positions: NDArray[Any] | None = None,
) -> tuple[Array, Array, NDArray[np.int64]]:
    """Streaming: what a chunk (B, T, d) gives after ``count`` (B,) tokens whose features had the mean ``mean`` (B, D).

    The sum of the past is mean * count; tokens are added one by one. ``frame`` lets every token see the whole chunk. Tokens
    that ``mask`` (B, T) leaves out are neither added nor counted. 1-D positions default to the number of tokens counted.

    Returns:
        y (B, T, d), the new mean (B, D) and the new count (B,).
    """
    y, new_mean, new_count = np.zeros(chunk.shape), mean.astype(np.float64), count.astype(np.int64)
    for b in range(chunk.shape[0]):
        keep = np.ones(chunk.shape[1], bool) if mask is None else mask[b].astype(bool)
        where = positions
        if where is None and config.get("rotary") == "1d":
            where = np.array([count[b] + keep[:t].sum() for t in range(len(keep))])
        tokens = chunk[b].astype(np.float64)
        f, gate = _features(config, params, tokens, where), _gate(config, params, tokens, where)
        total, seen = mean[b].astype(np.float64) * count[b], int(count[b])
        h = np.zeros_like(f)
        for t in range(len(keep)):
            if keep[t]:
                total, seen = total + f[t], seen + 1
            h[t] = total / max(seen, 1)
        for t in range(len(keep)):
            y[b, t] = params["ag_proj.weight"].astype(np.float64) @ (gate[t] * h[-1 if frame else t])
            if "ag_proj.bias" in params:
                y[b, t] += params["ag_proj.bias"]
        new_mean[b], new_count[b] = h[-1], seen
    return y, new_mean, new_count


def evaluate_cumulative(params: Arrays, degree: int, x: NDArray[Any], weights: Array) -> Array:
    """The 2025-02 mathematics: products of gelu branches, sigmoid gate. x (B, T, d) mixes with itself."""
    p = {name: value.astype(np.float64) for name, value in params.items()}
    y = np.zeros(x.shape, np.float64)
    for b in range(x.shape[0]):
        tokens = x[b].astype(np.float64)
        z = tokens @ p["po_proj.weight"].T + p.get("po_proj.bias", 0.0)  # (T, kD)
        g = z * 0.5 * (1.0 + np.vectorize(math.erf)(z / math.sqrt(2.0)))
        width = g.shape[1] // degree
        f = np.zeros_like(g)
        for i in range(degree):
            product = np.ones((len(tokens), width))
            for j in range(i + 1):
                product = product * g[:, j * width : (j + 1) * width]
            f[:, i * width : (i + 1) * width] = product
        gate = 1.0 / (1.0 + np.exp(-(tokens @ p["se_proj.weight"].T + p.get("se_proj.bias", 0.0))))
        for t in range(len(tokens)):
            row = weights[b, t]
            h = (row[:, None] * f).sum(0) / row.sum() if row.sum() > 0 else np.zeros(f.shape[1])
            y[b, t] = p["ag_proj.weight"] @ (gate[t] * h) + p.get("ag_proj.bias", 0.0)
    return y


def _hidden(config: Config) -> int:
    return int(config["dim"] * config["expand"])


def _features(config: Config, params: Arrays, tokens: Array, positions: NDArray[Any] | None) -> Array:
    """f (N, D) of tokens (N, d)."""
    projected = _project(config, params, tokens)
    a = np.where(projected >= 0, projected, 0.01 * projected)
    clamp_max = config.get("clamp_max", 6.0)
    if clamp_max is not None:
        a = np.minimum(np.maximum(a, -0.1), clamp_max)
    f = np.zeros_like(a)
    for p in range(config["degree"]):
        f = f + params["po_coeff"][:, p].astype(np.float64) * a ** (p + config.get("first_power", 1))
    hidden = _hidden(config)
    columns = {"1d": hidden // 2, "2d": hidden // 4}.get(config.get("rotary") or "", 0)
    return _turn(config, f, positions, list(range(columns)))


def _project(config: Config, params: Arrays, tokens: Array) -> Array:
    """W_po x, group by group: (N, d) -> (N, D)."""
    hidden, dim, groups = _hidden(config), config["dim"], config.get("n_groups", 1)
    if groups == 1:
        return np.asarray(tokens @ params["qc_proj.weight"][:hidden].astype(np.float64).T)
    out = np.zeros((len(tokens), hidden), np.float64)
    for g in range(groups):
        rows = slice(g * hidden // groups, (g + 1) * hidden // groups)
        columns = slice(g * dim // groups, (g + 1) * dim // groups)
        out[:, rows] = tokens[:, columns] @ params["po_proj.weight"][rows, :, 0].astype(np.float64).T
        if "po_proj.bias" in params:
            out[:, rows] += params["po_proj.bias"][rows]
    return out


def _gate(config: Config, params: Arrays, tokens: Array, positions: NDArray[Any] | None) -> Array:
    """s (T, D) of tokens (T, d), a head's value repeated over its block of channels."""
    hidden, heads = _hidden(config), max(config.get("n_sel_heads", 1), 1)
    if config.get("n_groups", 1) == 1:
        weight, bias = params["qc_proj.weight"][hidden:], params["se_bias"]
    else:
        weight, bias = params["se_proj.weight"], params["se_proj.bias"]
    logits = tokens @ weight.astype(np.float64).T + bias.astype(np.float64)  # (T, H or D)
    if config.get("gate", "hardsigmoid") == "sigmoid":
        s = 1.0 / (1.0 + np.exp(-logits))
    else:
        s = np.minimum(np.maximum(logits / 6.0 + 0.5, 0.0), 1.0)
    if heads == 1:
        columns = {"1d": hidden // 2, "2d": hidden // 4}.get(config.get("rotary") or "", 0)
        return _turn(config, s, positions, list(range(columns)))
    width = hidden // heads
    pairs, stride = {"1d": (heads // 2, width // 2), "2d": (heads // 4, width)}.get(config.get("rotary") or "", (0, 0))
    s = _turn(config, s, positions, [pair * stride for pair in range(pairs)])
    out = np.zeros((len(tokens), hidden), np.float64)
    for head in range(heads):
        for channel in range(head * width, (head + 1) * width):
            out[:, channel] = s[:, head]
    return out


def _turn(config: Config, values: Array, positions: NDArray[Any] | None, columns: list[int]) -> Array:
    """Rotary: turn pair after pair of ``values`` (N, C). Pair i uses the frequency base^(-columns[i] / columns in all)."""
    rotary = config.get("rotary")
    if rotary is None:
        return values
    tokens, hidden, base = len(values), _hidden(config), config.get("rotary_base", 10000.0)
    if positions is None:
        positions = np.arange(tokens)
    coordinates = positions.reshape(tokens, 1 if rotary == "1d" else 2).astype(np.float64)
    table_columns = hidden // 2 if rotary == "1d" else hidden // 4
    out = np.zeros_like(values)
    half = len(columns)
    for axis in range(coordinates.shape[1]):  # one axis, or row then column, each with its own block of channels
        start = axis * 2 * half
        for pair, column in enumerate(columns):
            angle = coordinates[:, axis] * base ** (-column / table_columns)
            first, second = values[:, start + pair], values[:, start + half + pair]
            out[:, start + pair] = np.cos(angle) * first - np.sin(angle) * second
            out[:, start + half + pair] = np.sin(angle) * first + np.cos(angle) * second
    return out


# ---- comparing ------------------------------------------------------------------------------------------------------


def relative_error(found: NDArray[Any], expected: NDArray[Any]) -> float:
    """||found - expected|| / ||expected||, in float64; 0 where both are zero, infinite where only ``expected`` is."""
    found, expected = found.astype(np.float64), expected.astype(np.float64)
    if found.shape != expected.shape:
        raise AssertionError(f"shapes differ: found {found.shape}, expected {expected.shape}")
    error, scale = float(np.linalg.norm(found - expected)), float(np.linalg.norm(expected))
    if scale == 0:
        return 0.0 if error == 0 else math.inf
    return error / scale if math.isfinite(error) else math.inf


def snr_db(found: NDArray[Any], expected: NDArray[Any]) -> float:
    """Signal to noise in decibels, infinite where the two are equal."""
    error = relative_error(found, expected)
    return math.inf if error == 0 else -20.0 * math.log10(error)


# ---- drawing --------------------------------------------------------------------------------------------------------


def random_case(
    seed: int,
    modes: tuple[str, ...] = MODES,
    rotary: tuple[str | None, ...] = (None, None, "1d", "2d"),
    published_only: bool = True,
    max_tokens: int = 300,
) -> Case:
    """A case drawn from a seed: degree 1-8, expand 1-4, groups, heads, bias, rotary, masks, lengths, batch 1-4.

    Args:
        seed: everything follows from it.
        modes: kinds of mask to draw from.
        rotary: kinds of position to draw from.
        published_only: keep the published activation and gate; False also draws sigmoid gates, other clamps, powers from 0.
        max_tokens: longest sequence.
    """
    rng = np.random.default_rng([seed, 20260404])
    config = _random_config(rng, rotary)
    if not published_only:
        config |= {
            "clamp_max": [6.0, 1.0, None][rng.integers(3)],
            "gate": ["hardsigmoid", "sigmoid"][rng.integers(2)],
            "first_power": int(rng.integers(2)),
        }
    mode = modes[rng.integers(len(modes))]
    inputs = _random_inputs(rng, config, mode, max_tokens)
    return Case(config, random_params(rng, config), inputs, mode, note=f"seed {seed}")


def random_params(rng: np.random.Generator, config: Config) -> Arrays:
    """Lively parameters: every branch of the activation and of the gate is used, and every power contributes alike.

    Fresh weights would not do: their coefficients are near 0.001, and an output of 1e-4 passes any absolute tolerance.
    """
    dim, hidden, groups = config["dim"], _hidden(config), config["n_groups"]
    gates = config["n_sel_heads"] if config["n_sel_heads"] > 1 else hidden

    def normal(scale: float, *shape: int) -> NDArray[np.float32]:
        return (rng.standard_normal(shape) * scale).astype(np.float32)

    projection, selection = 3.0 / math.sqrt(dim // groups), 2.0 / math.sqrt(dim)
    powers = np.arange(config["degree"]) + config.get("first_power", 1)
    params: Arrays = {
        "po_coeff": (rng.standard_normal((hidden, config["degree"])) / 3.0**powers).astype(np.float32),
        "ag_proj.weight": normal(1.0 / math.sqrt(hidden), dim, hidden),
    }
    if config["bias"]:
        params["ag_proj.bias"] = normal(0.3, dim)
    if groups == 1:
        weight = np.concatenate([normal(projection, hidden, dim), normal(selection, gates, dim)])
        return params | {"qc_proj.weight": weight, "se_bias": normal(1.0, gates)}
    if config["bias"]:
        params["po_proj.bias"] = normal(1.0, hidden)
    return params | {
        "po_proj.weight": normal(projection, hidden, dim // groups, 1),
        "se_proj.weight": normal(selection, gates, dim),
        "se_proj.bias": normal(1.0, gates),
    }


def _random_config(rng: np.random.Generator, rotary: tuple[str | None, ...]) -> Config:
    kind = rotary[rng.integers(len(rotary))]
    dim, expand = int(rng.choice([8, 16, 24, 32])), int(rng.integers(1, 5))
    multiple = {None: 1, "1d": 2, "2d": 4}[kind]
    fitting = [h for h in (2, 3, 4, 6, 8, 16) if dim * expand % h == 0 and h % multiple == 0 and dim * expand // h >= multiple]
    heads = [-1, 0, 1, *fitting, *fitting]
    return {
        "dim": dim,
        "degree": int(rng.integers(1, 9)),
        "expand": expand,
        "n_groups": int(rng.choice([1, 1, 2, 4])),
        "n_sel_heads": int(heads[rng.integers(len(heads))]),
        "bias": bool(rng.integers(2)),
        "rotary": kind,
    }


def _random_length(rng: np.random.Generator, longest: int) -> int:
    """From 1 to ``longest``, short lengths as likely as long ones."""
    return int(math.exp(rng.uniform(0, math.log(longest + 1))))


def _random_inputs(rng: np.random.Generator, config: Config, mode: str, longest: int) -> Arrays:
    batch, queries = int(rng.integers(1, 5)), _random_length(rng, longest)
    cross = mode.startswith("cross")
    tokens = _random_length(rng, longest) if cross else queries
    inputs: Arrays = {"x": rng.standard_normal((batch, queries, config["dim"])).astype(np.float32)}
    if cross:
        inputs["context"] = rng.standard_normal((batch, tokens, config["dim"])).astype(np.float32)
    if mode.endswith("padding"):
        inputs["mask"] = _random_mask(rng, (batch, tokens))
    if mode.endswith("per_query"):
        inputs["mask"] = _random_mask(rng, (batch if rng.random() < 0.7 else 1, queries, tokens))
    return inputs | _random_positions(rng, config["rotary"], queries, tokens if cross else None)


def _random_mask(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[Any]:
    """Weights, 0/1 in float, int or bool; holes anywhere, and now and then a row that admits nothing."""
    keep = rng.random(shape) < rng.uniform(0.3, 1.0)
    if shape[0] > 1 and rng.random() < 0.4:
        keep[-1, ..., :] = False
    keep[0, ..., -1] = True  # something is admitted somewhere, so that the answer is not all zero
    kind = rng.integers(4)
    if kind == 0:
        return np.asarray(keep * rng.uniform(0.05, 3.0, shape)).astype(np.float32)
    dtypes: list[Any] = [np.bool_, np.float32, np.int64]
    return keep.astype(dtypes[kind - 1])


def _random_positions(rng: np.random.Generator, rotary: str | None, queries: int, tokens: int | None) -> Arrays:
    """Positions for x and (cross) for the context: 1-D ones are often left to their default."""
    if rotary is None or (rotary == "1d" and rng.random() < 0.5):
        return {}
    highest = int(10 ** rng.uniform(1, 6))
    names = {"positions": queries} | ({} if tokens is None else {"context_positions": tokens})
    return {name: rng.integers(0, highest, (n,) if rotary == "1d" else (n, 2)) for name, n in names.items()}
