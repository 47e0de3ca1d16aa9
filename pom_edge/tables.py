"""Rotary tables of published layers: what base they were made with.

The published rotary class stores cos and sin of position * theta_k, theta_k = base^(-k / q), k = 0..q-1, for positions up to
some length. We compute angles instead, so a table is only asked one thing, its base, and that is read from row 1, where the
angles are the frequencies themselves. All other rows must then agree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from pom_edge.errors import CheckpointError
from pom_edge.rotary import Rotary

# name of the tables, cos then sin, of each axis of a rotation
TABLES: dict[Rotary, tuple[tuple[str, str], ...]] = {
    "1d": (("freqs_cos", "freqs_sin"),),
    "2d": (("row_cos", "row_sin"), ("col_cos", "col_sin")),
}
TABLE_NAMES = frozenset(name for axes in TABLES.values() for pair in axes for name in pair)
ANY_BASE = 10000.0  # with a single frequency theta_0 = 1 whatever the base

__all__ = ["TABLES", "TABLE_NAMES", "read_base", "rotary_of"]


def rotary_of(names: set[str]) -> Rotary | None:
    """Which rotation a layer with these tensor names has.

    Raises:
        CheckpointError: some of the tables of a rotation are missing, or tables of both are there.
    """
    found = names & TABLE_NAMES
    if not found:
        return None
    for rotary, axes in TABLES.items():
        if found == {name for pair in axes for name in pair}:
            return rotary
    raise CheckpointError(
        f"found rotary tables {', '.join(sorted(found))}; expected freqs_cos and freqs_sin (1-D), or row_cos, row_sin, col_cos "
        "and col_sin (2-D)"
    )


def read_base(tables: Mapping[str, Tensor], rotary: Rotary, hidden: int) -> float:
    """The base of a layer's rotary tables.

    Args:
        tables: at least the layer's tables, (positions, q) each, any number of positions.
        rotary: which tables to read.
        hidden: D, for the expected width q = D/2 (1-D) or D/4 (2-D).

    Returns:
        The base; round numbers (10000.0, 500000.0) come out exactly.

    Raises:
        CheckpointError: wrong width, a single row (the base cannot be read), or rows that no base explains, as with scaled
            or interpolated positions.
    """
    q = hidden // (2 * len(TABLES[rotary]))
    axes = []
    for names in TABLES[rotary]:
        cos, sin = (tables[name] for name in names)
        if cos.ndim != 2 or cos.shape[-1] != q or sin.shape != cos.shape:
            raise CheckpointError(
                f"{names[0]} has shape {tuple(cos.shape)} and {names[1]} {tuple(sin.shape)}; expected (positions, {q}) for "
                f"{rotary} rotary over {hidden} channels"
            )
        axes.append((names, cos, sin))
    long_enough = [(cos, sin) for _, cos, sin in axes if cos.shape[0] > 1]
    if q == 1:
        base = ANY_BASE
    elif long_enough:
        base = _base_from_row(*long_enough[0])
    else:
        raise CheckpointError(
            f"the rotary tables have {axes[0][1].shape[0]} row(s), and the base is read from row 1; save the layer with "
            "max_seq_len (max_h, max_w) of at least 2"
        )
    for names, cos, sin in axes:
        _check_rows(names, cos, sin, base)
    return base


def _base_from_row(cos: Tensor, sin: Tensor) -> float:
    """Least squares of log theta_k = -(k / q) log base over row 1, then the roundest number that fits it as well."""
    theta = torch.atan2(sin[1].double(), cos[1].double())
    q = theta.shape[0]
    usable = [(k / q, math.log(float(theta[k]))) for k in range(1, q) if theta[k] > 0]
    if not usable:
        raise CheckpointError("row 1 of the rotary tables holds no angle that fits any base; are these rotary tables?")
    estimate = math.exp(-sum(x * y for x, y in usable) / sum(x * x for x, _ in usable))
    for digits in range(1, 7):
        rounded = float(f"{estimate:.{digits - 1}e}")
        if rounded > 0 and _worst_row(cos[:2], sin[:2], rounded) <= 1.0:
            return rounded
    return estimate


def _check_rows(names: tuple[str, str], cos: Tensor, sin: Tensor, base: float) -> None:
    if cos.shape[0] and not _worst_row(cos, sin, base) <= 1.0:
        raise CheckpointError(
            f"{names[0]} and {names[1]} do not hold cos and sin of position * base^(-k/{cos.shape[1]}) for any base (row 1 "
            f"suggests {base:g}): scaled or interpolated positions are not supported. Load the layer where it was made, and "
            "export it with --factory"
        )


def _worst_row(cos: Tensor, sin: Tensor, base: float) -> float:
    """Largest error of the tables in units of what rounding explains; NaN where they hold NaN.

    A table is rounded once (half a unit in the last place of its dtype), and its FP32 angles are wrong by a few 1e-7 of
    themselves, which grows with the position.
    """
    rows, q = cos.shape
    theta = torch.pow(torch.tensor(base, dtype=torch.float64), -torch.arange(q, dtype=torch.float64) / q)
    position = torch.arange(rows, dtype=torch.float64).unsqueeze(-1)
    angles = position * theta  # (rows, q)
    allowed = torch.finfo(cos.dtype).eps + 4e-7 * (1 + angles)
    error = torch.maximum((cos.double() - angles.cos()).abs(), (sin.double() - angles.sin()).abs())
    return float((error / allowed).max())
