"""Facts about this machine's memory and cores, without any dependency."""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_DIGITS = {"B": 0, "KiB": 1, "MiB": 1}  # after the point; 2 beyond

__all__ = ["human_bytes", "memory_bytes", "trim_heap", "usable_cores"]


def memory_bytes() -> tuple[int, int] | None:
    """Total and available bytes of memory: the machine's, or those of the container where it has less. None: unknown."""
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        total, available = (int(fields[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
    except (OSError, KeyError, ValueError, IndexError):
        return None
    limit, used = _number(_CGROUP / "memory.max"), _number(_CGROUP / "memory.current")
    if limit is not None and used is not None:
        total, available = min(total, limit), min(available, max(limit - used, 0))
    return total, available


def usable_cores() -> int:
    """Cores that this process may use: those it is bound to (taskset, a container's cpuset), where the system says so."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS and Windows
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def human_bytes(count: int) -> str:
    """Bytes in binary units: 12 -> 12 B, 1536 -> 1.5 KiB."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if size < 1024:
            return f"{size:.{_DIGITS.get(unit, 2)}f} {unit}"
        size /= 1024
    return f"{size:,.2f} EiB"


def trim_heap() -> None:
    """Give pages that were freed back to the system, which glibc does not do by itself. Elsewhere nothing happens."""
    with contextlib.suppress(OSError, AttributeError, TypeError):  # no C library of that name, or not glibc
        ctypes.CDLL(None).malloc_trim(0)


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such file outside Linux, and "max" means no limit
        return None
