"""Inputs that a device makes again: the same bits everywhere, distributed like the example."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest

from pom_edge.generated import Recipe, generate, recipe_like

EXAMPLES: dict[str, np.ndarray] = {
    "x": np.array([[-2.0, 0.0, 5.0]], np.float32),
    "ids": np.array([[3, 250, 9]]),
    "flags": np.array([[True, False]]),
    "mask": np.array([[1.0, 0.0]], np.float32),
    "graded mask": np.array([[0.3, 1.0]], np.float32),
    "positions": np.array([0, 1]),
    "grid positions": np.array([[0, 0], [0, 6]]),
}
# sha256 of the bytes of 7 x 5 values (7, or 7 x 2, positions): recorded once, on x86-64 with NumPy 2
DIGESTS = {
    "x": "1f7619f79cf90e03",
    "ids": "eb299cd4b90a8488",
    "flags": "97e832d2476eaf67",
    "mask": "60f57fdc11777270",
    "graded mask": "7609818d19e2bb58",
    "positions": "81845a01dafa45c9",
    "grid positions": "61d60ca2508bb9ef",
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_bits_never_change(name: str) -> None:
    example = EXAMPLES[name]
    shape = (7, 5) if "positions" not in name else (7, *example.shape[1:])
    recipe = recipe_like(name, example, shape, seed=3)
    made = generate(Recipe.model_validate_json(recipe.model_dump_json()))  # as it travels
    assert made.shape == shape and made.dtype == example.dtype
    assert hashlib.sha256(made.tobytes()).hexdigest()[:16] == DIGESTS[name], made


def test_floats_look_normal() -> None:
    example = np.random.default_rng(0).normal(3.0, 2.0, 4096).astype(np.float32)
    made = generate(recipe_like("x", example, (3, 1 << 19), 0)).astype(np.float64)  # across the blocks of words
    z = (made - example.mean()) / example.std()
    assert abs(z.mean()) < 0.005 and abs(z.std() - 1) < 0.005 and abs((z**3).mean()) < 0.01
    assert abs((z**4).mean() - 2.7) < 0.02  # 3 - 6 / (5 * 4) for a sum of four uniforms, 3 for a normal
    correlation = float(np.corrcoef(made[0], made[1])[0, 1])
    assert abs(correlation) < 0.01 and len(np.unique(made)) > 100_000


def test_other_inputs_and_seeds_are_other_values() -> None:
    made = [generate(recipe_like(n, EXAMPLES["x"], (4, 8), s)) for n, s in (("x", 0), ("x", 1), ("context", 0))]
    assert not any(np.allclose(a, b) for a, b in ((made[0], made[1]), (made[0], made[2]), (made[1], made[2])))


@pytest.mark.parametrize(
    ("name", "expected"),
    [("ids", set(range(3, 251))), ("flags", {0, 1}), ("mask", {0.0, 1.0})],
)
def test_every_value_is_met(name: str, expected: set[Any]) -> None:
    assert set(generate(recipe_like(name, EXAMPLES[name], (200, 100), 0)).ravel().tolist()) == expected


def test_masks_admit_a_token_in_every_row() -> None:
    made = generate(recipe_like("mask", EXAMPLES["graded mask"], (500, 6), 0))
    assert (made[:, 0] == 1).all() and 0.6 < (made[:, 1:] > 0).mean() < 0.8
    assert made[made > 0].min() >= 0.1 and made.max() <= 1


def test_positions() -> None:
    assert generate(recipe_like("positions", EXAMPLES["positions"], (4,), 0)).tolist() == [0, 1, 2, 3]
    assert generate(recipe_like("positions", EXAMPLES["grid positions"], (9, 2), 0))[7:].tolist() == [[1, 0], [1, 1]]
