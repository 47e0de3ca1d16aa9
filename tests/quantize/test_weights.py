"""w8 and w4: weights as integers in the ONNX graph, standard operators alone, run by ONNX Runtime."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from pom_edge.errors import InputError
from pom_edge.export.lint import GraphContext, find_faults
from pom_edge.export.onnx_graph import Graph
from pom_edge.export.tensorrt_lint import find_illegal
from pom_edge.quantize.weights import W4_OPSET, StoredWeight, weight_only
from tests.oracle import snr_db

RNG = np.random.default_rng(0)
WEIGHTS = {
    "second": RNG.standard_normal((64, 48)).astype(np.float32),  # MatMul(x, W)
    "first": RNG.standard_normal((64, 48)).astype(np.float32),  # MatMul(W, x^T), reduced along the last axis
    "grouped": RNG.standard_normal((4, 8, 16)).astype(np.float32) * np.arange(1, 33, dtype=np.float32).reshape(4, 8, 1),
    "narrow": RNG.standard_normal((32, 24)).astype(np.float32),  # 24 do not fill a block where they are added up
}


def _model() -> ir.Model:
    """x (batch, 64) through GEMMs of every layout; a bias and a short table stay as they are."""
    nodes = [
        helper.make_node("MatMul", ["x", "second"], ["a"], name="up/MatMul_0"),  # (batch, 48)
        helper.make_node("Transpose", ["a"], ["at"], name="up/T", perm=[1, 0]),
        helper.make_node("MatMul", ["first", "at"], ["b"], name="down/MatMul_0"),  # (64, batch)
        helper.make_node("Reshape", ["b", "groups"], ["g"], name="mix/R"),  # (4, 16, batch)
        helper.make_node("MatMul", ["grouped", "g"], ["c"], name="mix/MatMul_0"),  # (4, 8, batch)
        helper.make_node("Reshape", ["c", "flat"], ["d"], name="mix/R2"),  # (32, batch)
        helper.make_node("Gemm", ["d", "narrow", "bias"], ["y"], name="head/Gemm_0", transA=1),
    ]
    constants = WEIGHTS | {
        "groups": np.array([4, 16, -1]),
        "flat": np.array([32, -1]),
        "bias": np.ones(24, np.float32),
    }
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 64])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 24])],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    return ir.from_proto(onnx.shape_inference.infer_shapes(model))


def _stored(bits: int, clip: bool, path: Path) -> tuple[list[StoredWeight], np.ndarray]:
    model = _model()
    report = weight_only(model, bits, clip)  # type: ignore[arg-type]
    ir.save(model, path)
    onnx.checker.check_model(str(path), full_check=True)
    opset = W4_OPSET if bits == 4 else 18
    assert not [fault for fault in find_faults(GraphContext(Graph(model, ["y"]), opset=opset)) if fault.rule != "shape"]
    return report, _run(path)


def _run(path: Path) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    x = np.random.default_rng(1).standard_normal((5, 64)).astype(np.float32)
    return session.run(["y"], {"x": x})[0]  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    path = tmp_path_factory.mktemp("float") / "model.onnx"
    ir.save(_model(), path)
    return _run(path)


@pytest.mark.parametrize(("bits", "gate"), [(8, 35.0), (4, 12.0)])  # four layers of 42 and 20 dB in a row
def test_answers_and_types(bits: int, gate: float, tmp_path: Path, truth: np.ndarray) -> None:
    report, found = _stored(bits, True, tmp_path / "model.onnx")
    assert snr_db(found, truth) > gate
    assert {entry.name for entry in report} == set(WEIGHTS)
    kinds = Counter(i.data_type for i in onnx.load(str(tmp_path / "model.onnx")).graph.initializer)
    wide = {name for name, length in {"second": 64, "first": 48, "grouped": 16, "narrow": 32}.items() if length % 32 == 0}
    assert kinds[TensorProto.INT4] == (len(wide) if bits == 4 else 0)
    assert kinds[TensorProto.INT4] + kinds[TensorProto.INT8] == len(WEIGHTS)
    for entry in report:
        assert entry.bits == (4 if bits == 4 and entry.name in wide else 8)
        assert bool(entry.note) == (entry.bits != bits)


def test_reported_snr_is_that_of_the_stored_weight(tmp_path: Path) -> None:
    report, _ = _stored(4, True, tmp_path / "model.onnx")
    model = onnx.load(str(tmp_path / "model.onnx"))
    arrays = {i.name: numpy_helper.to_array(i) for i in model.graph.initializer}
    again = arrays["second_int4"].astype(np.float32) * np.repeat(arrays["second_scale"], 32, axis=0)
    entry = next(entry for entry in report if entry.name == "second")
    assert snr_db(again, WEIGHTS["second"]) == pytest.approx(entry.snr_db, abs=0.02)


def test_clipping_errs_less(tmp_path: Path) -> None:
    clipped = {entry.name: entry.snr_db for entry in _stored(4, True, tmp_path / "a.onnx")[0]}
    plain = {entry.name: entry.snr_db for entry in _stored(4, False, tmp_path / "b.onnx")[0]}
    assert all(clipped[name] >= plain[name] for name in plain) and clipped["second"] > plain["second"] + 0.5


def test_grouped_rows_have_scales_of_their_own(tmp_path: Path) -> None:
    """Rows that differ 32-fold: one scale for a group would cost 20 dB."""
    report, _ = _stored(8, False, tmp_path / "model.onnx")
    assert next(entry.snr_db for entry in report if entry.name == "grouped") > 42


def test_refusals() -> None:
    with pytest.raises(InputError, match="weights of 3 bits"):
        weight_only(_model(), 3)  # type: ignore[arg-type]
    empty = _model()
    for node in list(empty.graph):
        if node.op_type in ("MatMul", "Gemm"):
            node.op_type = "Sub"
    with pytest.raises(InputError, match="no layer with a weight"):
        weight_only(empty)


@pytest.mark.parametrize("kind", [np.float32, np.float16])
def test_blocks_on_the_left_of_a_product_are_cast(kind: type) -> None:
    """Without the Cast TensorRT-RTX 1.7 crashes; the lint finds graphs that lack it."""
    element = helper.np_dtype_to_tensor_dtype(np.dtype(kind))
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["w", "x"], ["y"], name="mix/MatMul_0")],
        "g",
        [helper.make_tensor_value_info("x", element, [64, 5])],
        [helper.make_tensor_value_info("y", element, [32, 5])],
        [numpy_helper.from_array(RNG.standard_normal((32, 64)).astype(kind), "w")],
    )
    model = ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10))
    weight_only(model, 4)
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    assert [node.op_type for node in model.graph] == ["DequantizeLinear", "Cast", "MatMul"]
    assert not find_illegal(Graph(model, ["y"]))
    product, dequantized = model.graph[2], model.graph[0].outputs[0]
    product.replace_input_with(0, dequantized)
    assert "trt-int4-left" in {finding.rule for finding in find_illegal(Graph(model, ["y"]))}
