"""A small real bundle, made without torch: one ONNX graph, y = tanh(x W), with its golden data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from pom_edge.bundle import Artifact, Manifest, TensorSpec, finish_bundle, write_bundle

WIDTH = 6


def weights() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((WIDTH, WIDTH)).astype(np.float32)


def make_inputs(batch: int = 2, tokens: int = 5) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(1).standard_normal((batch, tokens, WIDTH)).astype(np.float32)}


def make_bundle(path: Path, overwrite: bool = False, scale: float = 1.0) -> Manifest:
    """Write a bundle; ``scale`` other than 1 makes an artifact that is not the model."""
    with write_bundle(path, overwrite) as folder:
        return fill(folder, path.stem, scale)


def fill(folder: Path, name: str = "tiny", scale: float = 1.0) -> Manifest:
    free = ["batch", "tokens", WIDTH]
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["mixed"], name="mixer/MatMul_0"),
        helper.make_node("Tanh", ["mixed"], ["y"], name="Tanh_0"),
    ]
    graph = helper.make_graph(
        nodes,
        "pom_edge",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, free)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, free)],
        [numpy_helper.from_array(weights() * np.float32(scale), "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.save(model, str(folder / "parallel.fp32.onnx"))
    inputs = make_inputs()
    mixed = inputs["x"] @ weights()
    golden = {"a.in.x": inputs["x"], "a.out.y": np.tanh(mixed), "a.tap.mixer": mixed}
    artifact = Artifact(
        target="onnx",
        form="parallel",
        precision="fp32",
        file="parallel.fp32.onnx",
        files=["parallel.fp32.onnx"],
        inputs=[TensorSpec(name="x", dtype="float32", shape=free, bounds={"tokens": (1, 64)})],
        outputs=[TensorSpec(name="y", dtype="float32", shape=free)],
        mixers={"mixer": "mixed"},
        verified="test",
        tensorrt={"findings": [], "weak_flags": [], "opset": 18, "note": ""},
    )
    fields = {
        "name": name,
        "created": "2026-01-01T00:00:00+00:00",
        "producer": "test",
        "tools": {},
        "model": {},
        "config_hash": "0",
        "artifacts": [artifact],
        "golden": [
            {
                "name": "a",
                "kind": "random",
                "description": "x 2x5x6",
                "inputs": {"x": "a.in.x"},
                "outputs": {"y": "a.out.y"},
                "taps": {"mixer": "a.tap.mixer"},
            }
        ],
    }
    return finish_bundle(folder, fields, golden)
