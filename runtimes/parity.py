"""Is this artifact the model? Metrics, gates, and the proof that a gate can fail.

Everything is widened to float64 before it is subtracted. A gate is scale-aware (SNR in dB): fresh PoM weights give
outputs near 1e-4, where an absolute tolerance passes on an all-zero answer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from pom_edge.errors import InputError

Arrays = Mapping[str, np.ndarray]

GATES_DB: dict[str, float] = {
    "fp32": 90.0,
    "fp16": 45.0,
    "bf16": 30.0,
    "int8": 20.0,
    "w8": 40.0,
    "w4": 20.0,
    "w8a8": 20.0,  # as int8: the same, under its name on Core ML
    "p8": 40.0,
    "p6": 20.0,
    "p4": 20.0,
}
MAX_SNR_DB = 300.0  # identical arrays; a number, since JSON has no infinity

__all__ = [
    "GATES_DB",
    "MAX_SNR_DB",
    "Comparison",
    "Metrics",
    "Vacuity",
    "compare",
    "measure",
    "prove_not_vacuous",
    "summarise",
    "worst",
]


@dataclass(frozen=True)
class Metrics:
    """How far an output is from its reference.

    Attributes:
        snr_db: 10 log10(sum ref^2 / sum (out - ref)^2); 0 dB is what an all-zero answer gets.
        cosine: of the angle between the two.
        max_rel: largest error over the largest magnitude of the reference.
        nonfinite: NaN or infinity where the reference has none.
        top1: share of rows whose largest entry is in the same place (rank >= 2 outputs), or None.
    """

    snr_db: float
    cosine: float
    max_rel: float
    nonfinite: int
    top1: float | None = None

    def passes(self, gate_db: float) -> bool:
        """Whether the gate holds; NaN and infinity never pass."""
        return self.nonfinite == 0 and self.snr_db >= gate_db

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class Vacuity:
    """One way to break an answer that the gate must notice: ``caught`` is None where the test is undefined."""

    test: str
    caught: bool | None
    note: str = ""


@dataclass
class Comparison:
    """A set of outputs against its reference."""

    gate_db: float
    values: dict[str, Metrics] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether every value holds the gate; comparing nothing is no pass."""
        return bool(self.values) and all(metrics.passes(self.gate_db) for metrics in self.values.values())

    @property
    def failed(self) -> list[str]:
        """Names that miss the gate, in order."""
        return [name for name, metrics in self.values.items() if not metrics.passes(self.gate_db)]


def measure(reference: np.ndarray, output: np.ndarray) -> Metrics:
    """Compare one output with its reference.

    Raises:
        InputError: shapes differ, or the arrays are empty.
    """
    if reference.shape != output.shape:
        raise InputError(f"the output has shape {output.shape}, the reference {reference.shape}: not the same model or inputs")
    if reference.size == 0:
        raise InputError("nothing to compare: the output is empty")
    ref, out = reference.astype(np.float64), output.astype(np.float64)
    finite = np.isfinite(ref)
    nonfinite = int((~np.isfinite(out) & finite).sum())
    if nonfinite or not finite.all():
        good = finite & np.isfinite(out)
        ref, out = np.where(good, ref, 0.0), np.where(good, out, 0.0)
    error, signal = float(np.square(out - ref).sum()), float(np.square(ref).sum())
    norms = math.sqrt(signal) * math.sqrt(float(np.square(out).sum()))
    largest = float(np.abs(ref).max())
    return Metrics(
        snr_db=_snr_db(signal, error),
        cosine=float((ref * out).sum() / norms) if norms else float(error == 0),
        max_rel=float(np.abs(out - ref).max() / largest) if largest else float(error != 0),
        nonfinite=nonfinite,
        top1=_top1(ref, out),
    )


def _snr_db(signal: float, error: float) -> float:
    if error == 0:
        return MAX_SNR_DB
    if signal == 0:
        return -MAX_SNR_DB  # the reference is all zero and the output is not
    return float(np.clip(10 * math.log10(signal / error), -MAX_SNR_DB, MAX_SNR_DB))


def _top1(ref: np.ndarray, out: np.ndarray) -> float | None:
    if ref.ndim < 2 or ref.shape[-1] < 2:
        return None
    return float((ref.argmax(-1) == out.argmax(-1)).mean())


def compare(reference: Arrays, output: Arrays, gate_db: float) -> Comparison:
    """Compare outputs by name.

    Raises:
        InputError: a reference has no output of its name, or there is nothing to compare.
    """
    if not reference:
        raise InputError("no output was compared: the reference is empty")
    missing = [name for name in reference if name not in output]
    if missing:
        raise InputError(f"outputs {', '.join(missing)} are missing; found {', '.join(output) or 'none'}")
    return Comparison(gate_db, {name: measure(reference[name], output[name]) for name in reference})


def worst(metrics: list[Metrics]) -> Metrics:
    """The worst of each figure."""
    top1 = [m.top1 for m in metrics if m.top1 is not None]
    return Metrics(
        snr_db=min(m.snr_db for m in metrics),
        cosine=min(m.cosine for m in metrics),
        max_rel=max(m.max_rel for m in metrics),
        nonfinite=sum(m.nonfinite for m in metrics),
        top1=min(top1) if top1 else None,
    )


def prove_not_vacuous(reference: Arrays, gate_db: float) -> list[Vacuity]:
    """Break the recorded answers in two ways; the gate must notice both.

    Zeroed: every output replaced by zeros. Permuted: tokens in another order (two or more tokens), else the rows of the
    batch, on values centred over what is permuted, so that a large common mean cannot hide the difference.

    Args:
        reference: recorded outputs, (B, N, ...) or (B, ...).
        gate_db: the gate under test.

    Returns:
        One entry for each test and output; undefined tests say why.
    """
    results = []
    for name, value in reference.items():
        ref = value.astype(np.float64)
        if not ref.any():
            results.append(Vacuity(f"zeroed {name}", None, "the reference itself is all zero"))
        else:
            results.append(Vacuity(f"zeroed {name}", not measure(ref, np.zeros_like(ref)).passes(gate_db)))
        results.append(_permuted(name, ref, gate_db))
    return results


def summarise(results: list[Vacuity]) -> list[Vacuity]:
    """One entry for each test over several cases: caught only if every case that defines it caught it."""
    merged: dict[str, Vacuity] = {}
    for result in results:
        known = merged.get(result.test)
        if known is None or known.caught is None or result.caught is False:
            merged[result.test] = result
    return list(merged.values())


def _permuted(name: str, ref: np.ndarray, gate_db: float) -> Vacuity:
    axis = 1 if ref.ndim >= 3 and ref.shape[1] >= 2 else 0
    what = "tokens" if axis == 1 else "batch"
    if ref.ndim < 2 or ref.shape[axis] < 2:
        return Vacuity(f"permuted {name} ({what})", None, f"one row only along the {what} axis")
    centred = ref - ref.mean(axis=axis, keepdims=True)
    if not centred.any():
        return Vacuity(f"permuted {name} ({what})", None, f"all rows along the {what} axis are equal")
    return Vacuity(f"permuted {name} ({what})", not measure(centred, np.roll(centred, 1, axis=axis)).passes(gate_db))
