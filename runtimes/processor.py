"""What this processor does with INT8."""

from __future__ import annotations

import functools
import platform
from pathlib import Path

__all__ = ["int8_saturates"]


@functools.cache
def int8_saturates() -> bool:
    """Whether INT8 kernels add pairs of products in 16 bits, and so give wrong sums for large weights (vpmaddubsw).

    x86 without VNNI does: 2.6e-2 of error was seen on files whose exact value is 5e-3. Where nothing is known of an x86
    processor it is assumed; others (ARM) add in 32 bits.
    """
    if platform.machine().lower() not in ("x86_64", "amd64", "i686"):
        return False
    try:
        flags = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags"))
    except (OSError, StopIteration):
        return True
    return "vnni" not in flags
