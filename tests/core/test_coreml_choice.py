"""Which weights stay floats: as few bytes as the gate allows."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from pom_edge.coreml_choice import cheapest, choose
from pom_edge.errors import GateError
from pom_edge.runtimes.parity import Metrics

LIMIT = 1e-4  # 40 dB


def test_nothing_is_kept_where_all_integers_hold() -> None:
    assert cheapest(np.array([1e-6]), {"a": np.array([5e-5]), "b": np.array([4e-5])}, {"a": 1, "b": 1}, LIMIT) == []


def test_the_noise_of_every_value_counts_and_bytes_decide() -> None:
    none = np.array([1e-6, 1e-6])
    extra = {"large": np.array([9e-5, 0]), "small": np.array([8e-5, 0]), "other": np.array([0, 2e-4])}
    assert sorted(cheapest(none, extra, {"large": 1000, "small": 10, "other": 10}, LIMIT)) == ["other", "small"]


def test_what_a_later_choice_makes_superfluous_is_an_integer_again() -> None:
    """The one that is worth most for its bytes is not enough, and what is enough contains its share."""
    extra = {"cheap": np.array([6e-5]), "dear": np.array([2e-4])}
    assert cheapest(np.array([1e-6]), extra, {"cheap": 1, "dear": 100}, LIMIT) == ["dear"]


def test_a_choice_is_near_the_best_of_all() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        names = [str(i) for i in range(8)]
        extra = {name: rng.exponential(5e-5, 3) for name in names}
        costs = {name: int(rng.integers(100, 1000)) for name in names}
        fits = [
            sum(costs[name] for name in kept)
            for size in range(9)
            for kept in itertools.combinations(names, size)
            if (1e-6 + sum((extra[name] for name in names if name not in kept), np.zeros(3)) <= LIMIT).all()
        ]
        kept = cheapest(np.full(3, 1e-6), extra, costs, LIMIT)
        assert (1e-6 + sum((extra[name] for name in names if name not in kept), np.zeros(3)) <= LIMIT).all()
        assert sum(costs[name] for name in kept) <= 1.5 * min(fits)


class _Noisy:
    """Three weights whose errors, beside adding, amplify each other."""

    noise = {"a": 3e-5, "b": 4e-5, "c": 5e-5}
    elements = {"a": 100, "b": 100, "c": 100}

    def __init__(self, floats: float = 1e-6, together: float = 1.0) -> None:
        self.floats, self.together, self.kept = floats, together, set[str]()

    def keep(self, kept: object) -> None:
        self.kept = set(kept)  # type: ignore[call-overload]

    def evaluate(self) -> dict[str, Metrics]:
        left = [noise for name, noise in self.noise.items() if name not in self.kept]
        noise = self.floats + sum(left) * (self.together if len(left) > 1 else 1)
        return {"y": Metrics(-10 * np.log10(noise), 1.0, 0.0, 0)}


@pytest.mark.parametrize(("together", "integers"), [(1.0, 2), (1.3, 2), (3.0, 1)])
def test_the_whole_choice_is_evaluated_and_not_only_added_up(together: float, integers: int) -> None:
    noisy, said = _Noisy(together=together), list[str]()
    kept = choose(noisy, noisy.evaluate, 40, "w8", said.append)  # type: ignore[arg-type]
    noisy.keep(kept)
    assert len(noisy.elements) - len(kept) == integers and noisy.evaluate()["y"].snr_db >= 40
    assert said == [f"store each weight alone: weight {i} of 3" for i in (1, 2, 3)]


class _Cancelling(_Noisy):
    """The errors of ``b`` and ``c`` are the same with opposite signs."""

    noise = {"a": 1.2e-4, "b": 6e-5, "c": 6e-5}

    def evaluate(self) -> dict[str, Metrics]:
        left = {name for name in self.noise if name not in self.kept}
        noise = self.floats + sum(self.noise[name] for name in (left - {"b", "c"} if {"b", "c"} <= left else left))
        return {"y": Metrics(-10 * np.log10(noise), 1.0, 0.0, 0)}


def test_what_turns_out_not_to_be_needed_is_an_integer_again() -> None:
    noisy = _Cancelling()
    assert cheapest(np.array([1e-6]), {k: np.array([v]) for k, v in noisy.noise.items()}, noisy.elements, LIMIT) == ["a", "b"]
    assert choose(noisy, noisy.evaluate, 40, "w8", print) == ["a"]  # type: ignore[arg-type]


def test_where_floats_miss_it_too_the_message_says_so() -> None:
    noisy = _Noisy(floats=2e-4)
    with pytest.raises(GateError, match="w4 misses its gate of 40 dB whatever stays in float .y has 37.0 dB"):
        choose(noisy, noisy.evaluate, 40, "w4", print)  # type: ignore[arg-type]
