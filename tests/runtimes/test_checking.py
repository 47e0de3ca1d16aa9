"""What a check may call passed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pom_edge.runtimes import check_bundle
from tests import bundles


def test_answers_that_are_all_zero_prove_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundles, "weights", lambda: np.zeros((bundles.WIDTH, bundles.WIDTH), np.float32))
    bundles.make_bundle(tmp_path / "zero.pom")
    report = check_bundle(tmp_path / "zero.pom")
    assert not report.passed
    assert "all zero" in report.artifacts[0].vacuity[0].note
