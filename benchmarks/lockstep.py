"""Models timed in turn, each in a process of its own: one that spins or keeps memory cannot disturb the next.

In every round each model has its turn, after a pause in which the threads of the last one go to sleep: runs that wake its own,
then the mean of runs for a tenth of a second (benchmarks/runners.py). Threads spin or sleep as the runtime has it by itself.
Times are medians over the rounds, ratios medians of the ratios within a round: a busy machine disturbs all alike. Beside the
clock stands the processor time of all threads together, which does not count what other programs took. Before and after every
round it is measured how far apart the cores are (benchmarks/cores.py), for ratios differ by that.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cores import APART_NS, Cores
from pom_edge.runtimes.timing import p90
from pom_edge.system import usable_cores
from pom_edge.words import counted

PAUSE_S = 0.02
WARM_UPS = 3
TOGETHER, APART, MOVED, UNKNOWN = "together", "apart", "moved", "unknown"
FEWEST_ROUNDS = 3  # of one state of the cores, for figures of its own

__all__ = [
    "Model",
    "Taken",
    "add_threads",
    "arguments_of",
    "by_cores",
    "check",
    "described",
    "machine",
    "measure",
    "not_negative",
    "positive",
    "ratio",
    "rows",
    "spread",
    "writable",
    "write_json",
]


def arguments_of(document: str | None) -> argparse.ArgumentParser:
    """A command line that says what the benchmark is, and the default of every option."""
    description = (document or "").splitlines()[0]
    return argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)


def positive(text: str) -> int:
    """An argument of 1 or more."""
    if (number := int(text)) < 1:
        raise ValueError
    return number


def not_negative(text: str) -> int:
    """An argument of 0 or more."""
    if (number := int(text)) < 0:
        raise ValueError
    return number


def add_threads(parser: argparse.ArgumentParser) -> None:
    """``--threads``, no more than there are cores to run them: more would measure the system's scheduler."""
    parser.add_argument("--threads", type=threads, default="2", help="of each runtime")


def threads(text: str) -> int:
    """An argument of 1 or more, up to the cores; argparse says this function's name."""
    number, cores = positive(text), usable_cores()
    if number > cores:
        raise argparse.ArgumentTypeError(f"{number} threads, and this process may use {counted(cores, 'core')}")
    return number


def writable(text: str) -> Path:
    """A file to write, known to have its folder before anything is measured."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a folder; give a file in it")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{path} cannot be written")
    return path


@dataclass(frozen=True)
class Model:
    """What is timed: a file, and the runtime that executes it (see :mod:`benchmarks.runners`)."""

    kind: str
    file: Path


@dataclass
class Taken:
    """Seconds of each round: on the clock, and of the processors."""

    clock: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)
    cores: list[str] = field(default_factory=list)  # TOGETHER, APART, MOVED within the round, or UNKNOWN

    def __iadd__(self, other: Taken) -> Taken:
        self.clock += other.clock
        self.processor += other.processor
        self.cores += other.cores
        return self

    def where(self, cores: str) -> Taken:
        """The rounds of one state of the cores."""
        kept = [at for at, state in enumerate(self.cores) if state == cores]
        return Taken([self.clock[at] for at in kept], [self.processor[at] for at in kept], [cores] * len(kept))

    @property
    def ms(self) -> float:
        """Median on the clock."""
        return 1e3 * statistics.median(self.clock)


class _Child:
    """A runner, and how to talk to it."""

    def __init__(self, model: Model, tokens: int, dim: int, threads: int, errors: Path) -> None:
        arguments = [model.kind, str(model.file), str(tokens), str(dim), str(threads)]
        self._errors = errors
        with errors.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.runners", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self._answer()

    def ask(self, command: str) -> list[str]:
        """Send a line and wait for the words of the answer."""
        assert self._process.stdin is not None
        print(command, file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> list[str]:
        assert self._process.stdout is not None
        for line in self._process.stdout:  # libraries print on stdout too
            if line.startswith("answer "):
                return line.split()[1:]
        raise RuntimeError(f"a runner ended: {self._errors.read_text()[-2000:]}")

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@contextmanager
def _children(models: Mapping[str, Model], tokens: int, dim: int, threads: int) -> Iterator[dict[str, _Child]]:
    with ExitStack() as stack:
        made = {}
        for name, model in models.items():
            errors = model.file.with_name(f"{name.replace(' ', '-').replace(',', '')}.{tokens}.log")
            made[name] = _Child(model, tokens, dim, threads, errors)
            stack.callback(made[name].close)
        yield made


def measure(models: Mapping[str, Model], tokens: int, dim: int, threads: int, rounds: int) -> dict[str, Taken]:
    """Every round, after some that do not count."""
    found = {name: Taken() for name in models}
    with _children(models, tokens, dim, threads) as children, Cores() as cores:
        for number in range(rounds + WARM_UPS):
            if sys.stderr.isatty():
                print(f"\r{tokens} tokens, round {number + 1} of {rounds + WARM_UPS} ", end="\r", file=sys.stderr, flush=True)
            before, times = cores.round_trip_ns(), {}
            for name, child in children.items():
                time.sleep(PAUSE_S)
                times[name] = [float(word) for word in child.ask("run")]
            state = _state(before, cores.round_trip_ns())
            for name, (clock, used) in times.items() if number >= WARM_UPS else ():
                found[name] += Taken([clock], [used], [state])
    return found


def _state(before_ns: float, after_ns: float) -> str:
    if math.isnan(before_ns):
        return UNKNOWN
    apart = before_ns >= APART_NS, after_ns >= APART_NS
    return APART if all(apart) else MOVED if any(apart) else TOGETHER


def by_cores(found: Mapping[str, Taken]) -> dict[str, dict[str, Taken]]:
    """State of the cores -> the rounds in it; all rounds as "any" where no state has enough."""
    states = next(iter(found.values())).cores
    many = [state for state in (TOGETHER, APART, UNKNOWN) if states.count(state) >= FEWEST_ROUNDS]
    return {state: {name: taken.where(state) for name, taken in found.items()} for state in many} or {"any": dict(found)}


def check(models: Mapping[str, Model], tokens: int, dim: int, threads: int, folder: Path, least_db: float = 90) -> None:
    """All of them compute the same function: the first one is the measure.

    Raises:
        RuntimeError: one does not.
    """
    with _children(models, tokens, dim, threads) as children:
        outputs = {}
        for name, child in children.items():
            child.ask(f"write {folder / 'output.npy'}")
            outputs[name] = np.load(folder / "output.npy").astype(np.float64)
    expected = next(iter(outputs.values()))
    for name, found in outputs.items():
        error = float(np.square(found - expected).sum())
        snr_db = 10 * np.log10(np.square(expected).sum() / error) if error else np.inf
        if not snr_db >= least_db:
            raise RuntimeError(f"{name} computes another function: {snr_db:.1f} dB")


def spread(above: list[float], below: list[float]) -> tuple[float, float, float]:
    """Median of the rounds' ratios, and the ends of their middle half."""
    ratios = sorted(a / b for a, b in zip(above, below, strict=True))
    return statistics.median(ratios), ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]


def ratio(above: Taken, below: Taken) -> str:
    """Of the clock with its spread; of processor time."""
    middle, low, high = spread(above.clock, below.clock)
    return f"{middle:.2f} ({low:.2f}-{high:.2f}) {spread(above.processor, below.processor)[0]:.2f}"


def rows(found: Mapping[str, Taken], tokens: int, against: str) -> list[dict[str, Any]]:
    """One row for each model, for --json; ``ratio`` is its time over that of ``against``."""
    made, states = [], by_cores(found)
    for name, taken in found.items():
        middle, low, high = spread(taken.clock, found[against].clock)
        made.append(
            {
                "what": name,
                "tokens": tokens,
                "ms": round(taken.ms, 3),
                "p90_ms": round(1e3 * p90(taken.clock), 3),
                "best_ms": round(1e3 * min(taken.clock), 3),
                "against": against,
                "ratio": round(middle, 3),
                "ratio_middle_half": [round(low, 3), round(high, 3)],
                "processor_ratio": round(spread(taken.processor, found[against].processor)[0], 3),
                "cores": {state: _in_state(part[name], part[against]) for state, part in states.items()},
            }
        )
    return made


def _in_state(taken: Taken, against: Taken) -> dict[str, float]:
    return {
        "rounds": len(taken.clock),
        "ms": round(taken.ms, 3),
        "ratio": round(spread(taken.clock, against.clock)[0], 3),
    }


def described(threads: int | None = None) -> str:
    """The machine in one line."""
    return ", ".join(f"{name} {value}" for name, value in machine(threads).items())


def machine(threads: int | None) -> dict[str, Any]:
    """Where it was measured."""
    from importlib.metadata import PackageNotFoundError, version

    facts: dict[str, Any] = {"system": platform.system(), "machine": platform.machine(), "python": platform.python_version()}
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    facts |= {"cpu": names[0] if names else platform.processor(), "cores": usable_cores()}
    facts |= {} if threads is None else {"threads": threads}
    for package in ("onnxruntime", "torch", "openvino", "executorch"):
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            continue
    return facts


def write_json(path: Path | None, threads: int | None, made: list[dict[str, Any]], **settings: Any) -> None:
    """For ``pom-edge report --peers`` and for other programs; ``settings`` say what was measured, and how."""
    if path is not None:
        content = {"machine": machine(threads), "settings": settings, "rows": made}
        path.write_text(json.dumps(content, indent=2) + "\n")
