"""Opening, running and checking a bundle in ONNX Runtime, without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pom_edge
from pom_edge.bundle import MANIFEST, seal
from pom_edge.errors import BundleError, InputError, MissingToolError
from pom_edge.runtimes import check_bundle, open_session
from pom_edge.runtimes.onnxruntime_session import native_session
from tests.bundles import WIDTH, make_bundle, make_inputs, weights


@pytest.fixture
def path(tmp_path: Path) -> Path:
    make_bundle(tmp_path / "tiny.pom")
    return tmp_path / "tiny.pom"


def test_run_by_position_and_by_name(path: Path) -> None:
    x = make_inputs()["x"]
    with pom_edge.open_session(path) as session:
        y = session.run(x)
        assert np.allclose(y, np.tanh(x @ weights()), atol=1e-6)
        assert np.array_equal(session.run(x=x), y)
        assert session.run_named({"x": x}).keys() == {"y"}
        assert session.runtime.startswith("onnxruntime ")


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"z": np.zeros((1, 2, WIDTH), np.float32)}, "unknown: z.*expected x float32"),
        ({}, "missing: x"),
        ({"x": np.zeros((1, 2, WIDTH), np.int64)}, "is int64; expected x float32"),
        ({"x": np.zeros((2, WIDTH), np.float32)}, r"shape \(2, 6\); expected x float32 \(batch, tokens, 6\)"),
        ({"x": np.zeros((1, 2, WIDTH + 1), np.float32)}, "has 7 along axis 2"),
        ({"x": np.zeros((1, 0, WIDTH), np.float32)}, "is empty along tokens"),
        ({"x": np.zeros((1, 65, WIDTH), np.float32)}, "tokens is 65; this artifact takes 1 to 64"),
        ({"x": np.array([["a"]])}, "expected x float32"),
    ],
)
def test_wrong_inputs(path: Path, inputs: dict[str, Any], message: str) -> None:
    with open_session(path) as session, pytest.raises(InputError, match=message):
        session.run(**inputs)


def test_doubles_and_halves_are_accepted(path: Path) -> None:
    x = make_inputs()["x"]
    with open_session(path) as session:
        assert np.array_equal(session.run(x.astype(np.float64)), session.run(x))
        assert np.allclose(session.run(x.astype(np.float16)), session.run(x), atol=1e-2)


def test_unknown_runtime_and_artifact(path: Path) -> None:
    with pytest.raises(InputError, match="unknown runtime 'tpu'; this version has ort"):
        open_session(path, runtime="tpu")
    with pytest.raises(InputError, match=r"no artifact 'other.onnx'; it holds parallel.fp32.onnx"):
        open_session(path, artifact="other.onnx")


def test_closed_session(path: Path) -> None:
    session = open_session(path)
    session.close()
    with pytest.raises(InputError, match="closed"):
        session.run(make_inputs()["x"])


def test_an_artifact_the_runtime_cannot_load(tmp_path: Path) -> None:
    """Hashes fit, the content is no model: the native error arrives as one message with the version."""
    from pom_edge import bundle as bundle_module

    path = tmp_path / "tiny.pom"
    make_bundle(path)
    (path / "parallel.fp32.onnx").write_bytes(b"no model")
    manifest = json.loads((path / MANIFEST).read_text())
    for entry in manifest["files"]:
        file = path / entry["path"]
        entry |= {"sha256": bundle_module.sha256_of(file), "bytes": file.stat().st_size}
    (path / MANIFEST).write_text(seal(manifest))
    with pytest.raises(BundleError, match=r"ONNX Runtime [\d.]+ cannot load parallel.fp32.onnx"):
        open_session(path)


def test_a_silent_change_of_provider_is_an_error(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    import onnxruntime

    monkeypatch.setattr(onnxruntime.InferenceSession, "get_providers", lambda self: ["OtherExecutionProvider"])
    with pytest.raises(InputError, match="runs on OtherExecutionProvider, asked for CPUExecutionProvider"):
        native_session(str(path / "parallel.fp32.onnx"))


@pytest.mark.parametrize("threads", [0, -1, 100_000])
def test_no_number_of_threads_stops_the_machine(path: Path, threads: int) -> None:
    with pytest.raises(InputError, match=f"threads is {threads:,}; expected 1 to "):
        open_session(path, threads=threads)


def test_check_passes_and_reports(path: Path) -> None:
    report = check_bundle(path)
    content = report.to_dict()
    assert report.passed and content["passed"]
    (artifact,) = content["artifacts"]
    assert artifact["file"] == "parallel.fp32.onnx" and artifact["gate_db"] == 90
    assert artifact["outputs"]["y"]["snr_db"] > 120 and artifact["outputs"]["y"]["nonfinite"] == 0
    assert [v["caught"] for v in artifact["vacuity"]] == [True, True]
    json.dumps(content)


def test_check_fails_an_artifact_that_is_not_the_model(tmp_path: Path) -> None:
    make_bundle(tmp_path / "wrong.pom", scale=1.001)
    report = check_bundle(tmp_path / "wrong.pom", layers=True)
    assert not report.passed
    assert report.artifacts[0].diverges == "mixer"
    assert report.artifacts[0].layers["mixer"].snr_db == pytest.approx(60, abs=0.1)


def test_check_layers_of_a_good_artifact(path: Path) -> None:
    report = check_bundle(path, layers=True)
    assert report.passed and report.artifacts[0].diverges is None
    assert report.artifacts[0].layers["mixer"].snr_db > 120


def test_a_bundle_without_golden_data_is_not_passed(path: Path) -> None:
    content = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(seal(content | {"golden": []}))
    with pytest.raises(BundleError, match="no golden data"):
        check_bundle(path)


def test_a_gpu_provider_is_not_quietly_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wheel has no such provider; or it has, and ONNX Runtime replaces it without a word (onnxruntime#23372)."""
    import onnxruntime

    make_bundle(tmp_path / "a.pom")
    for runtime, provider in (("ort-cuda", "CUDAExecutionProvider"), ("ort-trt", "TensorrtExecutionProvider")):
        monkeypatch.undo()
        with pytest.raises(MissingToolError, match=f"has no {provider}.*onnxruntime-gpu"):
            open_session(tmp_path / "a.pom", runtime=runtime)
        available = [provider, "CPUExecutionProvider"]
        monkeypatch.setattr(onnxruntime, "get_available_providers", lambda available=available: available)
        with (
            pytest.warns(UserWarning, match="not in available provider names"),
            pytest.raises(MissingToolError, match=f"runs on CPUExecutionProvider, asked for {provider}"),
        ):
            open_session(tmp_path / "a.pom", runtime=runtime)
