"""Calibration data: every way to give it, and one clear refusal for each way to give it wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pom_edge.arrays import write_arrays
from pom_edge.errors import InputError
from pom_edge.export.inputs import Axes
from pom_edge.quantize.calibration import load_calibration

EXAMPLE = {"x": torch.zeros(2, 5, 4), "mask": torch.ones(2, 5)}
AXES: Axes = {"x": ["batch", "tokens", 4], "mask": ["batch", "tokens"]}


def _good(batch: int = 9, tokens: int = 7) -> dict[str, np.ndarray]:
    x = np.random.default_rng(0).standard_normal((batch, tokens, 4)).astype(np.float32)
    return {"x": x, "mask": np.ones((batch, tokens), np.float32)}


def _load(source: Any) -> Any:
    return load_calibration(source, EXAMPLE, AXES)


@pytest.mark.parametrize("name", ["data.npz", "data.safetensors"])
def test_files_and_a_folder_of_them(tmp_path: Path, name: str) -> None:
    write_arrays(tmp_path / name, _good())
    found = _load(tmp_path / name)
    assert (found.source, found.samples, found.warnings) == (name, 9, [])
    write_arrays(tmp_path / "more.npz", _good(3, 11))
    assert _load(str(tmp_path)).samples == 12


def test_a_padding_mask_may_be_left_out_where_the_model_has_one_of_its_own() -> None:
    x, own = _good()["x"], np.ones((9, 7), np.float32)
    own[:, 3:] = 0
    for given, expected in (({"x": x}, np.ones((9, 7))), ({"x": x, "mask": own}, own)):
        (batch,) = load_calibration(given, EXAMPLE, AXES, ["mask"]).batches
        assert batch["mask"].dtype == EXAMPLE["mask"].dtype
        np.testing.assert_array_equal(batch["mask"], expected)
    with pytest.raises(InputError, match="has the arrays 'x'; expected 'x', 'mask'"):
        _load({"x": x})


def test_npy_is_the_first_input(tmp_path: Path) -> None:
    write_arrays(tmp_path / "x.npy", {"anything": _good()["x"]})
    found = load_calibration(tmp_path / "x.npy", {"features": EXAMPLE["x"]}, {"features": AXES["x"]})
    assert list(found.batches[0]) == ["features"]


def test_a_callable_that_yields(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_data.py").write_text(
        "import numpy as np\n"
        "def batches():\n"
        "    for i in range(1, 6):\n"
        "        yield {'x': np.full((2, i, 4), i, 'f'), 'mask': np.ones((2, i), bool)}\n"
        "def broken():\n"
        "    yield {'x': np.ones((2, 3, 4), 'f'), 'mask': np.ones((2, 3), 'f')}\n"
        "    raise OSError('disk gone')\n"
    )
    monkeypatch.chdir(tmp_path)
    found = _load("my_data:batches")
    assert (found.source, found.samples, len(found.batches)) == ("my_data:batches", 10, 5)
    with pytest.raises(InputError, match="batch 1 raised OSError: disk gone"):
        _load("my_data.py:broken")


def _changed(**arrays: Any) -> dict[str, Any]:
    return _good() | arrays


def _endless() -> Iterator[dict[str, np.ndarray]]:
    while True:
        yield _good(1, 1)


BAD = [
    (_changed(x=np.ones((9, 7, 3), np.float32)), r"'x' has the shape \(9, 7, 3\); expected \(batch, tokens, 4\)"),
    (_changed(x=np.ones((9, 4), np.float32)), "has the shape"),
    (_changed(x=np.ones((9, 8, 4), np.float32)), "'mask' has 7 tokens, 'x' has 8"),
    ({"x": _good()["x"]}, "has the arrays 'x'; expected 'x', 'mask'"),
    (_changed(y=np.ones(3)), "has the arrays 'x', 'mask', 'y'"),
    (_changed(x=np.ones((9, 7, 4), np.int32)), "'x' holds int64, the model takes float32"),
    (_changed(x=np.array([["a"]])), "expected a tensor or a numeric array"),
    (_changed(x=np.full((9, 7, 4), np.nan, np.float32)), "NaN or Inf"),
    (_changed(x=np.ones((0, 7, 4), np.float32), mask=np.ones((0, 7), np.float32)), "is empty"),
    (_changed(x=np.zeros((9, 7, 4), np.float32)), "zero throughout, so its INT8 scale would be 0"),
    ([], "holds no data"),
    ([3], "batch 0 is a int"),
    (7, "gave a int; expected batches"),
    ("missing.npz", "does not exist"),
    ("missing_module:batches", "there is no module 'missing_module'"),
]


@pytest.mark.parametrize(("source", "message"), BAD)
def test_bad_data_is_refused(source: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        _load(source)


def test_a_folder_without_data_and_an_endless_source(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds no file of \.npz"):
        _load(tmp_path)
    with pytest.raises(InputError, match="more than 4096 batches"):
        _load(_endless())


def test_warnings() -> None:
    assert "1 sample:" in _load(_good(1)).warnings[0]
    wild = _good(9, 200)
    wild["x"][0, 0, 0] = 1e9
    assert "outliers" in _load(wild).warnings[0]
