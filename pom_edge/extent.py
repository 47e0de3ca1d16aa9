"""How long a free axis may be, as on the command line. Imports nothing heavy: devices compile with it."""

from __future__ import annotations

from dataclasses import dataclass

from pom_edge.errors import InputError

MAX_LENGTH = 2**31 - 1

__all__ = ["MAX_LENGTH", "Extent"]


@dataclass(frozen=True)
class Extent:
    """How long an axis may be: fixed, or between a minimum and a maximum (None: no bound)."""

    minimum: int = 1
    optimum: int | None = None
    maximum: int | None = None

    @property
    def fixed(self) -> bool:
        """One length only."""
        return self.maximum is not None and self.minimum == self.maximum

    def admits(self, length: int) -> bool:
        """Whether the axis may be ``length`` long."""
        return self.minimum <= length and (self.maximum is None or length <= self.maximum)

    @classmethod
    def parse(cls, text: str | int | None, option: str) -> Extent:
        """``"64"`` fixes the axis, ``"1:64:4096"`` bounds it, None leaves it free.

        Raises:
            InputError: not of that form, or lengths below 1 or out of order.
        """
        if text is None:
            return cls()
        parts = str(text).split(":")
        expected = f"{option} takes N or MIN:OPT:MAX with 1 <= MIN <= OPT <= MAX, for example 64 or 1:64:4096"
        try:
            numbers = [int(part) for part in parts]
        except ValueError:
            raise InputError(f"{option} is {text!r}; {expected}") from None
        if len(numbers) not in (1, 3) or numbers[0] < 1 or numbers != sorted(numbers):
            raise InputError(f"{option} is {text!r}; {expected}")
        if numbers[-1] > MAX_LENGTH:
            raise InputError(f"{option} is {text!r}; expected at most {MAX_LENGTH}, the longest axis that runtimes index")
        return cls(numbers[0], numbers[len(numbers) // 2], numbers[-1])
