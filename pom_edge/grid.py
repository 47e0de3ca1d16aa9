"""Tables that fit: headers take lines before names are folded, names before columns become lines. A figure is never cut."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

FOLDED = 12  # columns that a name keeps at least
_HARD = "\N{NO-BREAK SPACE}"  # holds a name and its figure together while lines are filled

__all__ = ["print_grid"]


def print_grid(
    console: Console, headers: Sequence[str], rows: Sequence[Sequence[str]], text: set[int], title: str | None = None
) -> None:
    """Print rows as wide as there is room.

    Args:
        console: where, and how wide.
        headers: of the columns.
        rows: cells, one for each header.
        text: columns that are names or words, which may be folded; all others are figures, on the right.
        title: above.
    """
    cells = [max((cell_len(row[at]) for row in rows), default=0) for at in range(len(headers))]
    room = console.width - 3 * len(headers) - 1  # of a cell: a border and two spaces
    whole = [max(width, cell_len(name)) for width, name in zip(cells, headers, strict=True)]
    broken = [max(width, *map(cell_len, name.split() or [""])) for width, name in zip(cells, headers, strict=True)]
    widths = whole if sum(whole) <= room else _fold(broken, headers, text, room)
    if widths is None:
        _print_lines(console, headers, rows, title)
        return
    table = Table(title=title, title_justify="left")
    for at, name in enumerate(headers):
        table.add_column(name, width=widths[at], overflow="fold", justify="left" if at in text else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _fold(widths: list[int], headers: Sequence[str], text: set[int], room: int) -> list[int] | None:
    """The widest names give way, down to what keeps them readable; None where that is not enough."""
    widths = list(widths)
    least = {at: min(widths[at], max([FOLDED, *map(cell_len, headers[at].split())])) for at in text}
    while sum(widths) > room:
        wide = [at for at in text if widths[at] > least[at]]
        if not wide:
            return None
        widths[max(wide, key=lambda at: widths[at])] -= 1
    return widths


def _print_lines(console: Console, headers: Sequence[str], rows: Sequence[Sequence[str]], title: str | None) -> None:
    """A heading for each row, which is its first cell, and the others by name below it."""
    if title:
        console.print(title, soft_wrap=True)
    for first, *others in rows:
        console.print(first, soft_wrap=True)
        pairs = [
            f"{name} {value}".strip().replace(" ", _HARD) for name, value in zip(headers[1:], others, strict=True) if value
        ]
        lines = textwrap.wrap(", ".join(pairs), max(console.width - 2, 20), break_on_hyphens=False, break_long_words=False)
        for line in lines:
            console.print(f"  {line.replace(_HARD, ' ')}", soft_wrap=True)
