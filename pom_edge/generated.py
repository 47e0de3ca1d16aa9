"""Random inputs that a device makes again, bit for bit, from a few numbers: golden data too long to travel in a bundle.

NumPy keeps the raw words of its PCG64 the same for ever, but not what its distributions make of them. So the distributions
here are exact integer arithmetic on those words, the same on every machine and in every version.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

_WORDS = 1 << 20  # words drawn at a time: the memory this takes beside the array itself stays at 40 MiB
_SPREAD = 65536 * math.sqrt(4 / 12)  # of the sum of four uniform 16-bit integers

Kind = Literal["floats", "integers", "weights", "positions"]

__all__ = ["Recipe", "generate", "recipe_like"]


class Recipe(BaseModel):
    """How one input is made.

    Attributes:
        kind: ``floats`` of about normal distribution, ``integers`` of uniform distribution, ``weights`` of a mask (most of
            them 1 or within 0.1..1, the rest 0, the first never), ``positions`` that count upwards (1-D) or over a grid (2-D).
        dtype: of NumPy.
        shape: of the array.
        seed: of the words.
        mean, spread: of floats.
        low, high: of integers, both included.
        graded: weights between 0.1 and 1, where others are 1.
        width: of the grid.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    kind: Kind
    dtype: str
    shape: list[int]
    seed: int = 0
    mean: float = 0.0
    spread: float = 1.0
    low: int = 0
    high: int = 1
    graded: bool = False
    width: int = 1


def recipe_like(name: str, example: np.ndarray, shape: Sequence[int], seed: int) -> Recipe:
    """The recipe for values like an example's, of another shape.

    Args:
        name: of the input; says what it means (``mask``, ``positions``), and gives each input words of its own.
        example: at least one value.
        shape: wanted.
        seed: wanted.
    """
    kind: Kind
    settings: dict[str, Any] = {}
    if "positions" in name:
        kind, settings = "positions", {"width": int(example[:, 1].max()) + 1 if example.ndim == 2 else 1}
    elif "mask" in name:
        kind, settings = "weights", {"graded": example.dtype.kind == "f" and not ((example == 0) | (example == 1)).all()}
    elif example.dtype.kind == "f":
        wide = example.astype(np.float64)
        kind, settings = "floats", {"mean": float(wide.mean()), "spread": float(wide.std()) or 1.0}
    else:
        kind, settings = "integers", {"low": int(example.min()), "high": int(example.max())}
    seed = (seed << 32) + zlib.crc32(name.encode())
    return Recipe(kind=kind, dtype=str(example.dtype), shape=list(shape), seed=seed, **settings)


def generate(recipe: Recipe) -> np.ndarray:
    """The array that a recipe describes."""
    if recipe.kind == "positions":
        index = np.arange(recipe.shape[0])
        grid = index if len(recipe.shape) == 1 else np.stack((index // recipe.width, index % recipe.width), axis=-1)
        return grid.astype(recipe.dtype)
    made = np.empty(recipe.shape, recipe.dtype)
    flat = made.reshape(-1)
    bits = np.random.PCG64(recipe.seed)
    for start in range(0, flat.size, _WORDS):
        part = flat[start : start + _WORDS]
        part[:] = _values(recipe, np.asarray(bits.random_raw(part.size), dtype="<u8"))
    if recipe.kind == "weights":
        made[..., 0] = 1  # every row admits a token
    return made


def _values(recipe: Recipe, words: np.ndarray) -> Any:
    """One value for each 64-bit word."""
    if recipe.kind == "floats":
        centred = words.view("<u2").reshape(-1, 4).sum(axis=1, dtype=np.int64) - 2 * 65535
        return recipe.mean + centred * (recipe.spread / _SPREAD)
    uniform = (words >> np.uint64(11)) * 2.0**-53  # [0, 1)
    if recipe.kind == "integers":
        return np.minimum(recipe.low + np.floor(uniform * (recipe.high + 1 - recipe.low)), recipe.high)
    grade = 0.1 + 0.9 * uniform / 0.7 if recipe.graded else 1.0
    return np.where(uniform < 0.7, grade, 0.0)
