"""How long work says where it is: a function that is told each step. Imports nothing of the project."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

Step = Callable[[str], None]

__all__ = ["Step", "numbered"]


def numbered(items: Sequence[str], step: Step, what: str) -> Iterator[str]:
    """The items, one after the other, while ``step`` is told about each tenth which one it is: ``what 7 of 43``."""
    every = max(1, len(items) // 10)
    for index, item in enumerate(items):
        if index % every == 0:
            step(f"{what} {index + 1} of {len(items)}")
        yield item
