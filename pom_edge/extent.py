"""How long a free axis may be, as on the command line. Imports nothing heavy: devices compile with it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pom_edge.errors import InputError

MAX_LENGTH = 2**31 - 1

__all__ = ["MAX_LENGTH", "Extent", "cut"]


@dataclass(frozen=True)
class Extent:
    """How long an axis may be: fixed, or between a minimum and a maximum (None: no bound).

    Attributes:
        lengths: the only ones there are, in order; empty: every one between the two.
    """

    minimum: int = 1
    optimum: int | None = None
    maximum: int | None = None
    lengths: tuple[int, ...] = ()

    @property
    def fixed(self) -> bool:
        """One length only."""
        return self.maximum is not None and self.minimum == self.maximum

    def admits(self, length: int) -> bool:
        """Whether the axis may be ``length`` long."""
        if self.lengths:
            return length in self.lengths
        return self.minimum <= length and (self.maximum is None or length <= self.maximum)

    @classmethod
    def parse(cls, text: str | int | None, option: str) -> Extent:
        """``"64"`` fixes the axis, ``"1:64:4096"`` bounds it, ``"64,128"`` lists its lengths, None leaves it free.

        Raises:
            InputError: not of that form, or lengths below 1 or out of order.
        """
        if text is None:
            return cls()
        parts = str(text).split("," if "," in str(text) else ":")
        expected = f"{option} takes N or MIN:OPT:MAX with 1 <= MIN <= OPT <= MAX, for example 64 or 1:64:4096"
        if option == "--tokens":
            expected += "; for Core ML also a list, for example 64,128"
        try:
            numbers = [int(part) for part in parts]
        except ValueError:
            raise InputError(f"{option} is {text!r}; {expected}") from None
        listed = "," in str(text)
        twice = [number for number in dict.fromkeys(numbers) if numbers.count(number) > 1]
        if listed and twice and option == "--tokens":
            raise InputError(f"{option} is {text!r}, which lists {twice[0]} more than once; expected each length once")
        numbers = sorted(numbers) if listed else numbers
        counted = option == "--tokens" if listed else len(numbers) in (1, 3)
        if not counted or numbers[0] < 1 or numbers != sorted(numbers):
            raise InputError(f"{option} is {text!r}; {expected}")
        if numbers[-1] > MAX_LENGTH:
            raise InputError(f"{option} is {text!r}; expected at most {MAX_LENGTH}, the longest axis that runtimes index")
        return cls(numbers[0], numbers[len(numbers) // 2], numbers[-1], tuple(numbers) if listed and numbers[1:] else ())


def cut(total: int, lengths: Sequence[int]) -> list[int]:
    """Pieces of the given lengths (in order) that make up ``total``, as many of the longest as there can be; none: empty."""
    if total % math.gcd(*lengths):
        return []
    *shorter, longest = lengths
    for count in range(total // longest, -1, -1):
        rest = total - count * longest
        others = cut(rest, shorter) if rest and shorter else []
        if others or not rest:
            return [longest] * count + others
    return []
