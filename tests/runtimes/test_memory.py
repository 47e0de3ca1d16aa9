"""Peak memory of a run, measured in a fresh process."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from pom_edge.bundle import Artifact, TensorSpec, finish_bundle, write_bundle
from pom_edge.errors import InputError
from pom_edge.runtimes import measuring
from pom_edge.runtimes.memory import PeakMemory, measure_peak

WIDTH, HIDDEN = 8, 128
ROWS = 1 << 16
HIDDEN_BYTES = ROWS * HIDDEN * 4  # 32 MiB: what the run must hold between the two products

linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="RssAnon is a Linux gauge")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """x (rows, 8) -> hidden (rows, 128) -> y (rows, 8): narrow at both ends, so that activations dominate."""
    path = tmp_path_factory.mktemp("memory") / "wide.pom"
    free = ["batch", WIDTH]
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "a"], ["hidden"]),
            helper.make_node("Tanh", ["hidden"], ["bent"]),
            helper.make_node("MatMul", ["bent", "b"], ["y"]),
        ],
        "wide",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, free)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, free)],
        [
            numpy_helper.from_array(np.ones((WIDTH, HIDDEN), np.float32), "a"),
            numpy_helper.from_array(np.ones((HIDDEN, WIDTH), np.float32), "b"),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    artifact = Artifact(
        target="onnx",
        form="parallel",
        precision="fp32",
        file="parallel.fp32.onnx",
        files=["parallel.fp32.onnx"],
        inputs=[TensorSpec(name="x", dtype="float32", shape=free)],
        outputs=[TensorSpec(name="y", dtype="float32", shape=free)],
        verified="test",
    )
    fields = {"name": "wide", "created": "", "producer": "test", "tools": {}, "model": {}, "config_hash": "0"}
    with write_bundle(path, overwrite=False) as folder:
        onnx.save(model, str(folder / artifact.file))
        finish_bundle(folder, {**fields, "artifacts": [artifact], "golden": []}, {"none": np.zeros(1, np.float32)})
    return path


@linux
def test_activations_are_seen_and_the_parts_sum_to_the_total(path: Path) -> None:
    peak = measure_peak(path, "parallel.fp32.onnx", {"x": np.ones((ROWS, WIDTH), np.float32)}, threads=1)
    assert peak is not None
    assert peak.io_bytes == 2 * ROWS * WIDTH * 4
    assert 0.9 * HIDDEN_BYTES < peak.activations_bytes < 2.5 * HIDDEN_BYTES  # one or two of them live at a time
    assert peak.base_bytes + peak.weights_bytes + peak.io_bytes + peak.activations_bytes == peak.total_bytes
    assert peak.resident_bytes > peak.total_bytes * 0.9  # counts files on top, at the same moment
    json.dumps(peak.to_dict())


@linux
def test_a_small_run_needs_little_even_after_a_large_allocation_here(path: Path) -> None:
    """A fresh process: what this one holds does not count."""
    ballast = np.ones(HIDDEN_BYTES, np.uint8)
    peak = measure_peak(path, None, {"x": np.ones((1, WIDTH), np.float32)}, threads=1)
    assert peak is not None and peak.activations_bytes < HIDDEN_BYTES // 4
    assert ballast.all()


@linux
def test_inputs_from_a_file(path: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "in.npz", x=np.ones((4, WIDTH), np.float32))
    peak = measure_peak(path, None, tmp_path / "in.npz")
    assert isinstance(peak, PeakMemory) and peak.io_bytes == 2 * 4 * WIDTH * 4


@linux
def test_what_the_session_refuses_arrives_as_one_message(path: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="unknown: z"):
        measure_peak(path, None, {"z": np.ones((4, WIDTH), np.float32)})
    with pytest.raises(InputError, match="does not exist"):
        measure_peak(tmp_path / "none.pom", None, {"x": np.ones((4, WIDTH), np.float32)})
    with pytest.raises(InputError, match="no artifact 'other'"):
        measure_peak(path, "other", {"x": np.ones((4, WIDTH), np.float32)})


def test_where_there_is_no_gauge_nothing_is_invented(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(_field: str) -> int:
        raise FileNotFoundError("/proc/self/status")

    monkeypatch.setattr(measuring, "_status_bytes", absent)
    assert measure_peak(path, None, {"x": np.ones((1, WIDTH), np.float32)}) is None
