"""Which axes are free, and inputs of any size."""

from __future__ import annotations

import pytest
import torch

from pom_edge.errors import InputError
from pom_edge.export.inputs import Extent, axis_sizes, check_example, make_inputs, plan_axes

FREE = Extent()


@pytest.mark.parametrize(
    ("text", "expected"),
    [(None, Extent()), ("64", Extent(64, 64, 64)), ("1:64:4096", Extent(1, 64, 4096)), (8, Extent(8, 8, 8))],
)
def test_extent(text: str | int | None, expected: Extent) -> None:
    assert Extent.parse(text, "--tokens") == expected


@pytest.mark.parametrize("text", ["0", "-3", "4:2:8", "1:2", "many", "", "1:2:3:4", "1.5"])
def test_bad_extents(text: str) -> None:
    with pytest.raises(InputError, match="--tokens is .*MIN:OPT:MAX"):
        Extent.parse(text, "--tokens")


def test_self_mixing_shares_the_token_axis() -> None:
    axes = plan_axes({"x": torch.zeros(2, 5, 8), "mask": torch.ones(2, 5)}, FREE, FREE)
    assert axes == {"x": ["batch", "tokens", 8], "mask": ["batch", "tokens"]}


def test_cross_context_has_its_own_axis() -> None:
    example = {"x": torch.zeros(2, 5, 8), "context": torch.zeros(2, 5, 8), "mask": torch.ones(2, 5, 5)}
    axes = plan_axes(example, FREE, FREE)
    assert axes["context"] == ["batch", "context_tokens", 8]
    assert axes["mask"] == ["batch", "tokens", "context_tokens"]


def test_images_free_only_the_batch() -> None:
    assert plan_axes({"x": torch.zeros(2, 3, 32, 32)}, FREE, FREE) == {"x": ["batch", 3, 32, 32]}


def test_token_ids_and_a_second_input_of_the_same_length() -> None:
    example = {"input_ids": torch.zeros(2, 7, dtype=torch.long), "attention_mask": torch.ones(2, 7, dtype=torch.long)}
    axes = plan_axes(example, FREE, FREE)
    assert axes == {"input_ids": ["batch", "tokens"], "attention_mask": ["batch", "tokens"]}


def test_positions() -> None:
    example = {"x": torch.zeros(2, 6, 8), "positions": torch.zeros(6, 2, dtype=torch.long)}
    assert plan_axes(example, FREE, FREE)["positions"] == ["tokens", 2]


def test_fixed_extents_become_numbers() -> None:
    axes = plan_axes({"x": torch.zeros(2, 5, 8)}, Extent.parse("1", "--batch"), Extent.parse("64", "--tokens"))
    assert axes == {"x": [1, 64, 8]}


def test_made_inputs_have_the_asked_sizes_and_kinds() -> None:
    example = {
        "x": torch.randint(3, 9, (2, 5)),
        "mask": torch.ones(2, 5, dtype=torch.bool),
        "positions": torch.stack((torch.arange(5) // 2, torch.arange(5) % 2), -1),
    }
    axes = plan_axes(example, FREE, FREE)
    assert axis_sizes(example, axes) == {"batch": 2, "tokens": 5}
    made = make_inputs(example, axes, {"batch": 3, "tokens": 11}, seed=1)
    assert made["x"].shape == (3, 11) and made["x"].min() >= 3 and made["x"].max() < 9
    assert made["mask"].dtype == torch.bool and made["mask"].any(-1).all() and not made["mask"].all()
    assert made["positions"].tolist()[:3] == [[0, 0], [0, 1], [1, 0]]
    again = make_inputs(example, axes, {"batch": 3, "tokens": 11}, seed=1)
    assert all(torch.equal(made[name], again[name]) for name in made)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "no inputs"),
        ({"x": torch.zeros(0, 3)}, "empty"),
        ({"x": torch.tensor([float("nan")])}, "NaN"),
    ],
)
def test_bad_examples(inputs: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_example(inputs)
