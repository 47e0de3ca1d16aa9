"""How far apart two cores of the machine are at the moment: the time that a byte takes there and back.

    python -m benchmarks.cores [--seconds 60]

A virtual machine's processors lie at times on cores with one L3 cache and at times on cores with two, and move within seconds.
Apart, every operator of two threads starts later, and what one thread has written is far from the other: a mixer of 41
operators takes 1.4 times as long at 256 tokens while one large product takes as long as before. A ratio of two models is worth
nothing where one was timed here and the other there.
"""

from __future__ import annotations

import math
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from types import TracebackType

APART_NS = 290  # this benchmark's own machine: 165 to 245 with one cache, 330 to 360 with two; Python takes part of both
BLOCKS, TRIPS = 20, 100

__all__ = ["APART_NS", "Cores"]


class Cores:
    """The first two cores that this process may use; the other one's end is a process that sleeps between two questions."""

    def __enter__(self) -> Cores:
        self._home = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
        self._pair = sorted(self._home)[:2]
        if len(self._pair) == 2:
            self._file = tempfile.NamedTemporaryFile()
            self._file.write(bytes(mmap.PAGESIZE))
            self._file.flush()
            self._cell = mmap.mmap(self._file.fileno(), mmap.PAGESIZE)
            command = [sys.executable, "-m", "benchmarks.cores", "--partner", self._file.name, str(self._pair[1])]
            self._partner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            assert self._partner.stdout is not None
            if not self._partner.stdout.readline():
                raise RuntimeError("the process on the other core did not start")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if len(self._pair) == 2:
            self._partner.kill()  # where this process was interrupted, it waits for a byte that never comes
            self._partner.communicate()
            self._cell.close()
            self._file.close()

    def round_trip_ns(self) -> float:
        """Lower quartile of blocks of round trips; nan: there is one core, or no way to choose one."""
        if len(self._pair) < 2:
            return math.nan
        assert self._partner.stdin is not None
        self._partner.stdin.write(b"\n")
        self._partner.stdin.flush()
        os.sched_setaffinity(0, self._pair[:1])
        try:
            with memoryview(self._cell) as cell:
                blocks = [_block(cell) for _ in range(BLOCKS)]
        finally:
            os.sched_setaffinity(0, self._home)
        return statistics.quantiles(blocks, n=4)[0]


def _block(cell: memoryview) -> float:
    start = time.perf_counter_ns()
    for _ in range(TRIPS):
        cell[0] = 1
        while cell[0]:
            pass
    return (time.perf_counter_ns() - start) / TRIPS


def partner(path: str, core: int) -> None:
    """The other end, until the input ends: puts the byte back."""
    os.sched_setaffinity(0, [core])
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), mmap.PAGESIZE) as whole, memoryview(whole) as cell:
        print("ready", flush=True)
        for _ in sys.stdin:
            for _ in range(BLOCKS * TRIPS):
                while not cell[0]:
                    pass
                cell[0] = 0


def main() -> None:
    """Print it once a second."""
    if sys.argv[1:2] == ["--partner"]:
        return partner(sys.argv[2], int(sys.argv[3]))
    from benchmarks.lockstep import arguments_of, positive  # which itself measures by this module

    parser = arguments_of(__doc__)
    parser.add_argument("--seconds", type=positive, default=60, help="how long")
    seconds = parser.parse_args().seconds
    with Cores() as cores:
        if math.isnan(cores.round_trip_ns()):
            parser.error("it takes two cores, and this process may use one, or the system does not say which")
        for second in range(seconds):
            taken = cores.round_trip_ns()
            print(f"{second:4} s  {taken:6.0f} ns  {'apart' if taken >= APART_NS else 'together'}", flush=True)
            time.sleep(1)


if __name__ == "__main__":
    main()
