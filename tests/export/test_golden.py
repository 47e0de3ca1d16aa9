"""Golden cases: real samples first, several sizes, a budget, and what PyTorch refuses is said."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pom_edge.errors import InputError
from pom_edge.export.golden import MAX_GOLDEN_BYTES, golden_cases, record, store, stream_cases
from pom_edge.export.inputs import Extent, plan_axes
from pom_edge.export.reference import TorchSession
from pom_edge.generated import generate

FREE = Extent()
EXAMPLE = {"x": torch.randn(2, 24, 8)}
AXES = plan_axes(EXAMPLE, FREE, FREE)


def test_short_odd_and_long_in_several_batches() -> None:
    shapes = {case.name: case.inputs["x"].shape for case in golden_cases(EXAMPLE, AXES, FREE, FREE)}
    assert shapes == {"example": (2, 24, 8), "short": (1, 2, 8), "odd": (3, 7, 8), "long": (2, 257, 8)}


def test_extents_are_kept() -> None:
    tokens, batch = Extent.parse("4:8:16", "--tokens"), Extent.parse("2", "--batch")
    axes = plan_axes(EXAMPLE, batch, tokens)
    shapes = {case.inputs["x"].shape for case in golden_cases(EXAMPLE, axes, batch, tokens)}
    assert shapes == {(2, 16, 8), (2, 4, 8), (2, 7, 8)}


def test_where_every_run_is_long_one_case_is_enough() -> None:
    tokens = Extent.parse("5000", "--tokens")
    shapes = {
        case.name: case.inputs["x"].shape for case in golden_cases(EXAMPLE, plan_axes(EXAMPLE, FREE, tokens), FREE, tokens)
    }
    assert shapes == {"example": (2, 5000, 8)}
    (case,) = stream_cases(EXAMPLE, AXES, tokens)
    assert case.chunks == [5000, 5000] and case.inputs["x"].shape == (1, 10000, 8)


def test_real_samples_come_first_and_stay_small() -> None:
    samples = {"x": torch.randn(100, 256, 256)}  # 256 KiB a row
    axes = plan_axes(samples, FREE, FREE)
    first = golden_cases({"x": samples["x"][:2]}, axes, FREE, FREE, samples)[0]
    assert first.kind == "real" and torch.equal(torch.from_numpy(first.inputs["x"]), samples["x"][:16])
    assert first.nbytes <= MAX_GOLDEN_BYTES // 4


class _AtMost(nn.Module):
    def __init__(self, longest: int) -> None:
        super().__init__()
        self.longest = longest

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > self.longest:
            raise ValueError(f"too long: {x.shape[1]}")
        return x / x.abs().sum()


def test_a_size_the_model_refuses_is_left_out_and_said() -> None:
    kept, notes = record(golden_cases(EXAMPLE, AXES, FREE, FREE), TorchSession(_AtMost(100)))
    assert [case.name for case in kept] == ["example", "short", "odd"]
    assert notes == ["long (x 2x257x8) left out: the model refuses it (ValueError: too long: 257)"]


def test_long_cases_travel_as_recipes_and_rows() -> None:
    tokens = Extent.parse("60000", "--tokens")
    axes = plan_axes(EXAMPLE, FREE, tokens)
    kept, notes = record(
        golden_cases({"x": torch.randn(1, 24, 64)}, axes | {"x": ["batch", 60000, 64]}, FREE, tokens), _Twice()
    )
    arrays, entries = store(kept)
    assert sum(array.nbytes for array in arrays.values()) < MAX_GOLDEN_BYTES and not notes
    entry = entries[0]
    case = next(case for case in kept if case.name == entry.name)
    assert entry.generated and not entry.inputs and entry.rows["y"][0] == 0 and entry.rows["y"][-1] == 59_999
    again = generate(entry.generated["x"])
    np.testing.assert_array_equal(again, case.inputs["x"])
    found = entry.sampled({"y": 2 * again})["y"]
    np.testing.assert_array_equal(found, arrays[entry.outputs["y"]])
    assert found.shape == (len(again), 64, 64)


class _Twice(TorchSession):
    def __init__(self) -> None:
        super().__init__(nn.Identity())

    def run(self, inputs: dict[str, np.ndarray], zeroed: str | None = None) -> Any:
        return {"y": 2 * inputs["x"]}, {}


def test_an_example_the_model_refuses_is_an_error() -> None:
    with pytest.raises(InputError, match="does not accept the inputs x 2x24x8: ValueError: too long"):
        record(golden_cases(EXAMPLE, AXES, FREE, FREE), TorchSession(_AtMost(10)))


class _Nan(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * float("nan")


def test_a_model_that_answers_nan() -> None:
    with pytest.raises(InputError, match="PyTorch itself returns NaN"):
        record(golden_cases(EXAMPLE, AXES, FREE, FREE), TorchSession(_Nan()))
