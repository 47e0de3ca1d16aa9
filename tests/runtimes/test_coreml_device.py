"""The macOS side of Core ML sessions, as far as Linux allows: every call against the signatures of the real classes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pom_edge.errors import BundleError, InputError
from pom_edge.models import ModelConfig, build_model
from pom_edge.pipeline import export_bundle
from pom_edge.runtimes import open_session
from pom_edge.runtimes.checking import check_bundle
from pom_edge.runtimes.coreml_device import CoreMLModel

ct = pytest.importorskip("coremltools", reason="needs pip install 'pom-edge[coreml]'")
pytestmark = pytest.mark.slow


@pytest.fixture
def apple(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A Mac, as far as the sessions can tell."""
    from tests.runtimes.coreml_fake import fake_coremltools

    library = fake_coremltools()
    monkeypatch.setattr("pom_edge.runtimes.coreml_device.load_coremltools", lambda: library)
    monkeypatch.setattr("pom_edge.runtimes.coreml_session.on_apple", lambda: True)
    monkeypatch.setattr("pom_edge.runtimes.coreml_session.platform.mac_ver", lambda: ("15.5", ("", "", ""), "arm64"))
    return library


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A parallel model with a mask, and a stream whose state the package keeps."""
    folder = tmp_path_factory.mktemp("device")
    torch.manual_seed(0)
    encoder = build_model(ModelConfig(kind="encoder", dim=16, depth=1, input_dim=8, n_sel_heads=4))
    mask = torch.ones(1, 12)
    mask[0, 9:] = 0
    export_bundle(encoder, "coreml", example_inputs={"x": torch.randn(1, 12, 8), "mask": mask}, out=folder / "encoder.pom")
    text = build_model(ModelConfig(kind="lm", dim=16, depth=1, vocab_size=40, n_sel_heads=4))
    ids = {"x": torch.randint(0, 40, (1, 12))}
    kept = {"form": "recurrent", "stateful": True, "deployment_target": "iOS18"}
    export_bundle(text, "coreml", example_inputs=ids, out=folder / "text.pom", **kept)
    return {name: folder / f"{name}.pom" for name in ("encoder", "text")}


def test_a_check_runs_every_compute_unit_and_reports_the_plan(bundles: dict[str, Path], apple: SimpleNamespace) -> None:
    report = check_bundle(bundles["encoder"])
    assert report.passed
    units = ["ALL", "CPU_ONLY", "CPU_AND_GPU", "CPU_AND_NE"]
    assert [each.runtime for each in report.artifacts] == [f"Core ML on macOS 15.5 ({name})" for name in units]
    assert apple.models.MLModel.loaded == [getattr(ct.ComputeUnit, name) for name in units]
    for each in report.artifacts:
        assert each.plan is not None and list(each.plan["off_neural_engine"]) == ["cast"]
        assert each.plan["operations"]["neural_engine"] > 10
        assert each.plan["operations"]["cpu"] == each.plan["off_neural_engine"]["cast"]


def test_the_state_of_a_package_goes_in_and_out(bundles: dict[str, Path], apple: SimpleNamespace) -> None:  # noqa: ARG001
    x = np.random.default_rng(0).integers(0, 40, (1, 30))
    with open_session(bundles["text"], units="CPU_AND_NE") as session:
        assert session.runtime.endswith("(CPU_AND_NE)")
        apples = [session.step(x[:, i : i + 1]) for i in range(30)]
        assert session.tokens_seen == [30]
    found = np.concatenate(apples, axis=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pom_edge.runtimes.coreml_session.on_apple", lambda: False)
        with open_session(bundles["text"]) as session:
            np.testing.assert_array_equal(found, session.run(x))


def test_what_a_mac_refuses_is_said(bundles: dict[str, Path], apple: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="compute units 'NPU' are unknown; expected one of ALL"):
        open_session(bundles["encoder"], units="NPU")

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("error code -5")

    monkeypatch.setattr(apple.models.MLModel, "predict", fails)
    with open_session(bundles["encoder"]) as session, pytest.raises(InputError, match="cannot run parallel.*error code -5"):
        session.run(np.zeros((1, 12, 8), np.float32), mask=np.ones((1, 12), np.float32))
    monkeypatch.setattr(apple.models.compute_plan.MLComputePlan, "load_from_path", fails)
    with open_session(bundles["encoder"]) as session:
        assert "no compute plan" in (session.plan() or {})["unavailable"]
    monkeypatch.setattr(apple.models.MLModel, "__init__", fails)
    with pytest.raises(BundleError, match="cannot load parallel.fp16.mlpackage for ALL: error code -5"):
        open_session(bundles["encoder"])


def test_a_misspelt_argument_fails_here_too(bundles: dict[str, Path], apple: SimpleNamespace) -> None:
    """The fake is worth something."""
    with pytest.raises(TypeError, match="compute_unit"):
        apple.models.MLModel(str(bundles["encoder"] / "parallel.fp16.mlpackage"), compute_unit=ct.ComputeUnit.ALL)
    model = CoreMLModel(bundles["encoder"] / "parallel.fp16.mlpackage", "ALL")
    with pytest.raises(InputError, match="cannot run"):
        model.run({"x": np.zeros((1, 12, 8))}, {"y": "y"}, {})


def test_compute_units_are_core_mls(tmp_path: Path) -> None:
    from tests.bundles import make_bundle

    make_bundle(tmp_path / "a.pom")
    with pytest.raises(InputError, match="compute units are Core ML's, and parallel.fp32.onnx runs in ort"):
        open_session(tmp_path / "a.pom", units="ALL")
