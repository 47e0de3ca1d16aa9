"""The time of one run as a user has it who runs again and again: threads awake, caches warm."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

PAUSE_S = 0.03  # until the threads of whatever ran before are asleep: ONNX Runtime's go on spinning for some milliseconds
WARM_S = 0.05  # until one's own are awake, each on a core of its own

__all__ = ["p90", "timed"]


def p90(taken: Sequence[float]) -> float:
    """The smallest that nine of ten do not exceed (nearest rank): never below the median."""
    return sorted(taken)[math.ceil(0.9 * len(taken)) - 1]


def timed(run: Callable[[], Any]) -> float:
    """Seconds of one run, after a pause and after others that do not count.

    Several sessions of one process may be timed in turn like this. Without the pause, threads that still spin take a core from
    the next one; if they sleep between runs instead, the system may wake two of a session on one core: a run takes up to twice
    as long either way (docs/performance.md).
    """
    time.sleep(PAUSE_S)
    start = time.perf_counter()
    run()
    while time.perf_counter() - start < WARM_S:
        run()
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
