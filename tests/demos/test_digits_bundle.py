"""The demo's promise: the bundle answers as PyTorch does, image by image."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from demos.digits.images import load_digits, model_input
from pom_edge.checkpoint import load
from pom_edge.pipeline import ExportOptions, export_file
from pom_edge.runtimes import open_session
from pom_edge.runtimes.parity import measure

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "demos" / "digits" / "model.pt"


@pytest.mark.slow
def test_onnx_runtime_names_every_digit_as_pytorch_does(tmp_path: Path) -> None:
    report = export_file(MODEL, ExportOptions(), out=tmp_path / "digits.pom")
    assert (report.artifacts[0].parity or {})["snr_db"] >= 90
    digits = load_digits(ROOT / "demos" / "digits" / "test_images.npz")
    x = model_input(digits.images)
    with torch.no_grad():
        expected = load(MODEL)(torch.from_numpy(x)).numpy()
    with open_session(report) as session:
        found = session.run(x)
    assert isinstance(found, np.ndarray)
    assert np.array_equal(found.argmax(-1), expected.argmax(-1))
    assert measure(expected, found).snr_db >= 90
    assert (found.argmax(-1) == digits.labels).mean() >= 0.97
