"""A mixer beside its peers: figures of a benchmark, read from a file that somebody gave."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pom_edge.errors import InputError

NAMES = {"ours": "ours", "published": "published form", "attention": "fused attention", "gemm": "unavoidable GEMM"}
EXPECTED = (
    'expected {"machine": ..., "rows": [{"what": "ours", "tokens": 4096, "ms": 24.2, "p90_ms": 25.0}, ...]}, with "what" one '
    "of ours, published, attention, gemm, or a name of your own"
)

__all__ = ["NAMES", "PeerRow", "Peers", "read_peers"]


@dataclass(frozen=True)
class PeerRow:
    """One peer at one length: median and 90th percentile of a run, in milliseconds."""

    what: str
    tokens: int
    ms: float
    p90_ms: float | None


@dataclass(frozen=True)
class Peers:
    """Rows of one run of a benchmark, and the machine that it names ("": it names none)."""

    source: str
    machine: str
    rows: list[PeerRow]

    def ms(self, what: str) -> dict[int, float]:
        """Tokens -> median, in ascending order."""
        return {row.tokens: row.ms for row in sorted(self.rows, key=lambda r: r.tokens) if row.what == what}

    @property
    def names(self) -> list[str]:
        """What was measured, each once: those of :data:`NAMES` first."""
        found = dict.fromkeys(row.what for row in self.rows)
        return [name for name in NAMES if name in found] + [name for name in found if name not in NAMES]


def read_peers(path: Path) -> Peers:
    """Read what a benchmark wrote.

    Args:
        path: JSON, an object with ``rows`` and ``machine``, or the rows alone. A row has ``what``, ``tokens``, ``ms`` (or
            ``median_ms``) and, if it likes, ``p90_ms``; further keys are its own.

    Raises:
        InputError: not such a file; says what was found.
    """
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"--peers {path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"--peers {path} is not JSON ({error}); {EXPECTED}") from error
    whole = content if isinstance(content, Mapping) else {"rows": content}
    rows = whole.get("rows")
    if not isinstance(rows, list) or not rows:
        raise InputError(f"--peers {path} holds no rows; {EXPECTED}")
    return Peers(path.name, _machine(whole.get("machine")), [_row(row, index, path) for index, row in enumerate(rows)])


def _row(row: object, index: int, path: Path) -> PeerRow:
    if isinstance(row, Mapping):
        what, tokens, ms, p90 = row.get("what"), row.get("tokens"), row.get("ms", row.get("median_ms")), row.get("p90_ms")
        if isinstance(what, str) and what and isinstance(tokens, int) and _positive(tokens) and _positive(ms):
            known = what.lower() if what.lower() in NAMES else what
            return PeerRow(known, tokens, float(ms), float(p90) if p90 is not None and _positive(p90) else None)
    raise InputError(f"--peers {path}: row {index} is {json.dumps(row)[:200]}; {EXPECTED}")


def _positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def _machine(found: object) -> str:
    if isinstance(found, Mapping):
        return ", ".join(f"{key} {value}" for key, value in found.items())
    return "" if found is None else str(found)
