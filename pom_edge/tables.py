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
    _, cos, sin = max(axes, key=lambda axis: axis[1].shape[0])
    if q > 1 and cos.shape[0] < 2:
        raise CheckpointError(
            f"the rotary tables have {cos.shape[0]} row(s), and the base is read from row 1; save the layer with max_seq_len "
            "(max_h, max_w) of at least 2"
        )
    base = ANY_BASE if q == 1 else _fit_base(cos, sin)
    for names, cos, sin in axes:
        _check_rows(names, cos, sin, base)
    return base


def _fit_base(cos: Tensor, sin: Tensor) -> float:
    """The roundest base that explains the rows.

    Row 1 holds the frequencies themselves. In a table that was rounded to BF16 they are known to 1 part in 256 only, so rows
    2, 4, 8.. refine them: the error of an angle stays, what it says of the frequency is divided by the position.
    """
    base = _regress_base(torch.atan2(sin[1].double(), cos[1].double()), torch.ones(cos.shape[1], dtype=torch.float64))
    rows = [*(2**i for i in range(1, 24) if 2**i < cos.shape[0]), cos.shape[0] - 1]
    for row in rows:
        expected = row * _theta(base, cos.shape[1])
        measured = torch.atan2(sin[row].double(), cos[row].double())
        off = torch.remainder(measured - expected + math.pi, 2 * math.pi) - math.pi  # the turn that is nearest
        base = _regress_base((expected + off) / row, expected.clamp(min=1.0))
    for digits in range(1, 8):
        rounded = float(f"{base:.{digits - 1}e}")
        if rounded > 0 and all(_worst_row(cos, sin, rounded, some) <= 1.0 for some in ([1, *rows], _all_rows(cos))):
            return rounded  # a few rows refuse most candidates, which saves forming all angles for each
    return base


def _regress_base(theta: Tensor, weight: Tensor) -> float:
    """Least squares of log theta_k = -(k / q) log base."""
    q = theta.shape[0]
    x = torch.arange(q, dtype=torch.float64) / q
    usable = torch.isfinite(theta) & (theta > 0) & (x > 0)
    x, y, w = x[usable], theta[usable].log(), weight[usable].square()
    if not x.numel():
        raise CheckpointError("row 1 of the rotary tables holds no angle that fits any base; are these rotary tables?")
    return math.exp(min(700.0, -float((w * x * y).sum() / (w * x * x).sum())))


def _check_rows(names: tuple[str, str], cos: Tensor, sin: Tensor, base: float) -> None:
    if cos.shape[0] and not _worst_row(cos, sin, base, _all_rows(cos), lenient=True) <= 1.0:
        raise CheckpointError(
            f"{names[0]} and {names[1]} do not hold cos and sin of position * base^(-k/{cos.shape[1]}) for any base (row 1 "
            f"suggests {base:g}): scaled or interpolated positions are not supported. Load the layer where it was made, and "
            "export it with --factory"
        )


def _worst_row(cos: Tensor, sin: Tensor, base: float, rows: list[int], lenient: bool = False) -> float:
    """Largest error of these rows in units of what rounding explains; infinite where they hold NaN.

    A table is rounded once (to its dtype), and its FP32 angles are wrong by a few 1e-7 of themselves. ``lenient`` leaves
    room for a base that is itself an estimate, from a table in half precision.
    """
    info = torch.finfo(_stored_as(cos, sin))
    least = 4 * info.eps if lenient else info.tiny * info.eps
    worst = 0.0
    for start in range(0, len(rows), 1024):  # float64 angles of a whole table would take hundreds of MB
        part = torch.tensor(rows[start : start + 1024])
        angles = part.double().unsqueeze(-1) * _theta(base, cos.shape[1])  # (rows, q)
        for table, exact in ((cos, angles.cos()), (sin, angles.sin())):
            allowed = info.eps * exact.abs() + least + 5e-7 * angles
            worst = max(worst, float(((table[part].double() - exact).abs() / allowed).nan_to_num(torch.inf).max()))
    return worst


def _stored_as(cos: Tensor, sin: Tensor) -> torch.dtype:
    """The coarsest type that holds the values: a half-precision model that was widened keeps its rounding."""
    for dtype in (torch.bfloat16, torch.float16):
        if all(torch.equal(table.to(dtype).to(table.dtype), table) for table in (cos, sin)):
            return dtype
    return cos.dtype


def _all_rows(table: Tensor) -> list[int]:
    return list(range(table.shape[0]))


def _theta(base: float, q: int) -> Tensor:
    return torch.pow(torch.tensor(base, dtype=torch.float64), -torch.arange(q, dtype=torch.float64) / q)
