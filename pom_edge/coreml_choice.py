"""Which weights of a Core ML package stay floats where integers in all of them miss the gate: as few bytes as will do.

    noise of a value, over its signal:  e = e_float + sum over weights stored as integers of (e_weight alone - e_float)

Each weight is tried alone; errors of different weights are taken to be independent, so that their powers add. While the sum is
above the gate, the weight that takes most of the excess away for its bytes goes back to float. The choice is then evaluated
whole, for the sum is a model: stricter until the gate holds, and then without each weight that is not needed. Trials write no
package: constants of the evaluated program are exchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping

import numpy as np

from pom_edge.errors import GateError
from pom_edge.export.coreml_weights import STORED
from pom_edge.gates import Stage, missed
from pom_edge.progress import Step, numbered
from pom_edge.runtimes.mil_program import MilProgram

STRICTER = 0.8  # of the noise that the sum may have, each time that the whole choice misses the gate: 1 dB

__all__ = ["Exchange", "cheapest", "choose"]


class Exchange:
    """The programs of a form whose weights change between floats and integers in place.

    Args:
        floats: with every weight in floats.
        integers: the same programs, with every weight that can be as integers.
        names: of weights in ``floats``; those that stay floats in ``integers`` too are left out.
    """

    def __init__(self, floats: list[MilProgram], integers: list[MilProgram], names: Collection[str]) -> None:
        self._values: dict[str, list[tuple[MilProgram, np.ndarray, np.ndarray]]] = {}
        for one, other in zip(floats, integers, strict=True):
            for name in names:
                stored = next((name + suffix for suffix in STORED if name + suffix in other.constants), None)
                if stored is not None and name in one.constants:
                    pair = one.constants[name].copy(), other.constants[stored]
                    self._values.setdefault(name, []).append((one, *pair))

    @property
    def elements(self) -> dict[str, int]:
        """How many each weight has; several passes that hold it store it several times."""
        return {name: sum(found.size for _, found, _ in each) for name, each in self._values.items()}

    def keep(self, kept: Collection[str]) -> None:
        """These in floats, all others as integers."""
        for name, each in self._values.items():
            for program, found, stored in each:
                program.replace(name, found if name in kept else stored)


def choose(exchange: Exchange, evaluate: Callable[[], Stage], gate_db: float, precision: str, step: Step) -> list[str]:
    """Names of the weights that stay floats.

    Args:
        exchange: the programs.
        evaluate: all values of all cases, by those programs as they are.
        gate_db: to be held.
        precision: the integers'.
        step: told how far it is.

    Raises:
        GateError: it is missed with floats alone, or no integer is left.
    """

    def tried(kept: Collection[str]) -> Stage:
        exchange.keep(kept)
        return evaluate()

    costs = exchange.elements
    floats = tried(costs)
    if not missed(floats, gate_db):
        none = _noise(floats)
        each = numbered([*costs], step, "store each weight alone: weight")
        extra = {name: np.maximum(_noise(tried(set(costs) - {name})) - none, 0) for name in each}
        limit = 10 ** (-gate_db / 10)
        while len(kept := cheapest(none, extra, costs, limit)) < len(costs):
            if not missed(tried(kept), gate_db):
                for name in sorted(kept, key=lambda each: -costs[each]):  # errors can cancel: some are not needed after all
                    fewer = [other for other in kept if other != name]
                    kept = kept if missed(tried(fewer), gate_db) else fewer
                return kept
            limit *= STRICTER
    worst = min(floats, key=lambda name: floats[name].snr_db)
    others = " or ".join(other for other in ("w8", "p8", "fp16") if other != precision)
    raise GateError(
        f"{precision} misses its gate of {gate_db:g} dB whatever stays in float ({worst} has {floats[worst].snr_db:.1f} dB "
        f"with float weights alone); use --precision {others}"
    )


def cheapest(none: np.ndarray, extra: Mapping[str, np.ndarray], costs: Mapping[str, int], limit: float) -> list[str]:
    """A greedy choice of what to keep, so that no value's noise is above the limit.

    Args:
        none: noise of each value with nothing stored as integers, (values).
        extra: what each weight adds to it, (values).
        costs: of keeping each.
        limit: the noise that a value may have.
    """
    total = none + sum(extra.values())
    kept: list[str] = []
    while (over := total > limit).any() and len(kept) < len(costs):
        excess = (total - limit)[over]
        gains = {name: np.minimum(extra[name][over], excess).sum() / costs[name] for name in costs if name not in kept}
        kept.append(max(gains, key=lambda name: gains[name]))
        total = total - extra[kept[-1]]
    for name in sorted(kept, key=lambda each: -costs[each]):  # what later choices have made superfluous
        if (total + extra[name] <= limit).all():
            total = total + extra[name]
            kept.remove(name)
    return kept


def _noise(stage: Stage) -> np.ndarray:
    """Power of each value's error over that of the value; infinite where it is not a number."""
    return np.array([10 ** (-m.snr_db / 10) if m.nonfinite == 0 else math.inf for m in stage.values()])
