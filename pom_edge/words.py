"""Counts and settings in words, and lists of numbers out of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pom_edge.errors import InputError

__all__ = ["counted", "parse_lengths", "say_settings"]


def counted(count: int, noun: str) -> str:
    """A count with its noun: 1 artifact, 2 artifacts, 1,024 tokens.

    Args:
        count: how many.
        noun: of one; its plural ends in s.
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def say_settings(settings: Mapping[str, Any]) -> str:
    """How a benchmark was run, in one line: the ``settings`` of :class:`pom_edge.runtimes.bench.BenchReport`."""
    threads = settings["threads"]
    said = "threads of the runtime's own choice" if threads is None else counted(threads, "thread")
    rounds = f"{counted(settings['rounds'], 'round')} after {counted(settings['warm_up_rounds'], 'round')} of warm-up"
    versions = [f"{package} {number}" for package, number in settings["versions"].items()]
    return ", ".join([rounds, f"batch {settings['batch']}", said, *versions])


def parse_lengths(text: str, option: str) -> list[int]:
    """Numbers with commas between them: "49,256" is [49, 256].

    Raises:
        InputError: a part that is no number, or none at all; says which.
    """
    parts = [part.strip() for part in text.split(",")]
    expected = "expected numbers with commas between them, for example 64,256"
    if not any(parts):
        raise InputError(f"{option} is {text!r}, which holds no number; {expected}")
    for index, part in enumerate(parts):
        if not part:
            where = "before it" if index == 0 else "after it" if index == len(parts) - 1 else "before the next"
            raise InputError(f"{option} is {text!r}: a comma with nothing {where}; {expected}")
        try:
            int(part)
        except ValueError:
            raise InputError(f"{option} holds {part!r}; {expected}") from None
    return [int(part) for part in parts]
