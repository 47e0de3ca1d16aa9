"""A mixer beside its peers: figures of a benchmark, read from a file that somebody gave."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pom_edge.errors import InputError
from pom_edge.system import human_bytes

NAMES = {"ours": "ours", "published": "published form", "attention": "fused attention", "gemm": "unavoidable GEMM"}
MOST_ROWS, MOST_BYTES = 500, 16 << 20
EXPECTED = (
    'expected {"machine": ..., "rows": [{"what": "ours", "tokens": 4096, "ms": 24.2, "p90_ms": 25.0}, ...]}, with "what" one '
    "of ours, published, attention, gemm, or a name of your own; numbers above 0 and below 1e15"
)
RATIOS = (
    'expected "against": NAME with "ratio": NUMBER, and if you like "ratio_middle_half": [LOW, HIGH] and "cores": {STATE: '
    '{"rounds": N, "ms": NUMBER, "ratio": NUMBER}}'
)

__all__ = ["NAMES", "InState", "PeerRow", "Peers", "read_peers"]


@dataclass(frozen=True)
class InState:
    """The rounds in one state of the cores: how many, the median in milliseconds, and the median of their ratios."""

    rounds: int
    ms: float
    ratio: float


@dataclass(frozen=True)
class PeerRow:
    """One peer at one length.

    Attributes:
        ms, p90_ms: median and 90th percentile of a run.
        against, ratio: whose time, in the same round, its time was divided by; the median of that. None: not said.
        middle_half: the ends of the middle half of the rounds' ratios.
        cores: state of the cores -> the rounds in it (benchmarks/cores.py).
    """

    what: str
    tokens: int
    ms: float
    p90_ms: float | None
    against: str | None = None
    ratio: float | None = None
    middle_half: tuple[float, float] | None = None
    cores: dict[str, InState] = field(default_factory=dict)


@dataclass(frozen=True)
class Peers:
    """Rows of one run of a benchmark, the machine that it names ("": none), and what it ran (width, degree, rounds..)."""

    source: str
    machine: str
    rows: list[PeerRow]
    settings: dict[str, str] = field(default_factory=dict)

    def ms(self, what: str) -> dict[int, float]:
        """Tokens -> median, in ascending order."""
        return {row.tokens: row.ms for row in sorted(self.rows, key=lambda r: r.tokens) if row.what == what}

    @property
    def names(self) -> list[str]:
        """What was measured, each once: those of :data:`NAMES` first."""
        found = dict.fromkeys(row.what for row in self.rows)
        return [name for name in NAMES if name in found] + [name for name in found if name not in NAMES]

    @property
    def states(self) -> list[str]:
        """States of the cores that rows tell apart, each once; none where there is nothing to tell."""
        found = list(dict.fromkeys(state for row in self.rows for state in row.cores))
        return found if set(found) - {"any", "unknown"} else []

    @property
    def contradictions(self) -> list[tuple[PeerRow, PeerRow]]:
        """Pairs of one length, the faster by its ratio first, whose medians say the opposite."""
        found = []
        for one, other in itertools.combinations(self.rows, 2):
            if one.tokens == other.tokens and one.against == other.against and one.ratio and other.ratio:
                fast, slow = sorted((one, other), key=lambda row: row.ratio or 0.0)
                if fast.ratio != slow.ratio and fast.ms > slow.ms:
                    found.append((fast, slow))
        return found


def read_peers(path: Path) -> Peers:
    """Read what a benchmark wrote.

    Args:
        path: JSON, an object with ``rows``, ``machine`` and ``settings`` (an object; may be absent), or the rows alone. A row
            has ``what``, ``tokens``, ``ms`` (or ``median_ms``) and, if it likes, ``p90_ms``, ``against``, ``ratio``,
            ``ratio_middle_half`` and ``cores`` (see :class:`PeerRow`); further keys are its own.

    Raises:
        InputError: not such a file; says what was found.
    """
    try:
        if path.exists() and not path.is_file():
            raise InputError(f"--peers {path} is not a file; {EXPECTED}")
        if path.stat().st_size > MOST_BYTES:
            raise InputError(f"--peers {path} has {human_bytes(path.stat().st_size)}, too much for a benchmark's; {EXPECTED}")
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"--peers {path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"--peers {path} is not JSON ({error}); {EXPECTED}") from error
    whole = content if isinstance(content, Mapping) else {"rows": content}
    rows, settings = whole.get("rows"), whole.get("settings")
    if not isinstance(rows, list) or not rows:
        raise InputError(f"--peers {path} holds no rows; {EXPECTED}")
    if len(rows) > MOST_ROWS:
        raise InputError(f"--peers {path} holds {len(rows):,} rows; expected {MOST_ROWS} at most, which a page can show")
    if settings is not None and not isinstance(settings, Mapping):
        raise InputError(
            f'--peers {path}: settings is {_shown(settings)}; expected an object of names and values, for example {{"d": 384}}'
        )
    made = [_row(row, index, path) for index, row in enumerate(rows)]
    said = {str(key): _said(value) for key, value in (settings or {}).items() if value is not None}
    return Peers(path.name, _machine(whole.get("machine")), made, said)


def _row(row: object, index: int, path: Path) -> PeerRow:
    if isinstance(row, Mapping):
        what, tokens, ms, p90 = row.get("what"), row.get("tokens"), row.get("ms", row.get("median_ms")), row.get("p90_ms")
        if isinstance(what, str) and what and isinstance(tokens, int) and _positive(tokens) and _positive(ms):
            p90_ms = float(p90) if p90 is not None and _positive(p90) else None
            try:
                return PeerRow(_known(what), tokens, float(ms), p90_ms, *_ratios(row))
            except (KeyError, TypeError, ValueError):
                raise InputError(f"--peers {path}: the ratios of row {index} are {_shown(_about(row))}; {RATIOS}") from None
    raise InputError(f"--peers {path}: row {index} is {_shown(row)}; {EXPECTED}")


def _ratios(row: Mapping[str, Any]) -> tuple[str | None, float | None, tuple[float, float] | None, dict[str, InState]]:
    """Against, ratio, middle half and states of the cores.

    Raises:
        KeyError, TypeError, ValueError: they are not what is expected, or a part is there without what it belongs to.
    """
    about = _about(row)
    if not about:
        return None, None, None, {}
    against = about["against"] if isinstance(about.get("against"), str) else ""
    if not against or "ratio" not in about:
        raise ValueError
    half = about.get("ratio_middle_half")
    low_high = None
    if half is not None:
        low, high = map(_number, half)
        if low > high:
            raise ValueError
        low_high = (low, high)
    cores = about.get("cores") or {}
    if not isinstance(cores, Mapping):
        raise TypeError
    states = {str(name): _in_state(found) for name, found in cores.items()}
    return _known(against), _number(about["ratio"]), low_high, states


def _in_state(found: Any) -> InState:
    if not isinstance(found["rounds"], int):
        raise TypeError
    return InState(int(_number(found["rounds"])), _number(found["ms"]), _number(found["ratio"]))


def _about(row: Mapping[str, Any]) -> dict[str, Any]:
    keys = ("against", "ratio", "ratio_middle_half", "cores")
    return {key: row[key] for key in keys if row.get(key) is not None}


def _number(value: Any) -> float:
    if not _positive(value):
        raise ValueError
    return float(value)


def _positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 1e15


def _known(what: str) -> str:
    return what.lower() if what.lower() in NAMES else what


def _shown(found: object) -> str:
    return json.dumps(found)[:200]


def _said(value: object) -> str:
    """A setting as text: lists as their members, text as it is."""
    if isinstance(value, list):
        return ", ".join(map(_said, value))
    return value if isinstance(value, str) else json.dumps(value)


def _machine(found: object) -> str:
    if isinstance(found, Mapping):
        return ", ".join(f"{key} {value}" for key, value in found.items())
    return "" if found is None else str(found)
