"""The INT8 rules of the lint: a sound Q/DQ graph passes, and each planted fault is caught by name."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from pom_edge.export.lint import GraphContext, find_faults
from pom_edge.export.onnx_graph import Graph

K, N = 8, 6


@dataclass
class Planted:
    """y = DQ(Q(x)) DQ(W), and what is wrong with it."""

    scale: np.ndarray = field(default_factory=lambda: np.array(0.05, np.float32))
    zero: np.ndarray | None = field(default_factory=lambda: np.array(0, np.int8))
    weight: np.ndarray = field(default_factory=lambda: np.arange(K * N, dtype=np.int8).reshape(K, N))
    weight_scale: np.ndarray = field(default_factory=lambda: np.full(N, 0.01, np.float32))
    axis: int = 1
    bias: bool = False
    weight_first: bool = False
    block: int = 0

    def context(self) -> GraphContext:
        constants = {
            "s": self.scale,
            "w": self.weight,
            "ws": self.weight_scale,
            "wz": np.zeros(self.weight_scale.shape, np.int8),
        }
        quantizer = ["s"]
        if self.zero is not None:
            constants["z"], quantizer = self.zero, ["s", "z"]
        attributes = {"axis": self.axis} | ({"block_size": self.block} if self.block else {})
        order = ["wf", "xf"] if self.weight_first else ["xf", "wf"]
        nodes = [
            helper.make_node("QuantizeLinear", ["x", *quantizer], ["q"], name="m/Q"),
            helper.make_node("DequantizeLinear", ["q", *quantizer], ["xf"], name="m/DQ"),
            helper.make_node("DequantizeLinear", ["w", "ws", "wz"], ["wf"], name="m/W", **attributes),
            helper.make_node("MatMul", order, ["p"], name="m/MatMul"),
        ]
        if self.bias:
            constants |= {"b": np.zeros(N, np.int32), "bs": np.array(0.01, np.float32)}
            nodes += [
                helper.make_node("DequantizeLinear", ["b", "bs"], ["bf"], name="m/B"),
                helper.make_node("Add", ["p", "bf"], ["y"], name="m/Add"),
            ]
        else:
            nodes.append(helper.make_node("Identity", ["p"], ["y"], name="m/I"))
        kind = TensorProto.UINT8 if self.zero is None or self.zero.dtype == np.uint8 else TensorProto.INT8
        x, y = (("batch", K), ("batch", N)) if not self.weight_first else ((N, "batch"), (K, "batch"))
        graph = helper.make_graph(
            nodes,
            "g",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, x)],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, y)],
            [numpy_helper.from_array(array, name) for name, array in constants.items()],
            value_info=[helper.make_tensor_value_info("q", kind, x)],
        )
        opset = 21 if self.block else 18
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
        model = onnx.shape_inference.infer_shapes(model)
        return GraphContext(Graph(ir.from_proto(model), ["y"]), opset=opset)


SOUND = Planted()
FAULTS = [
    ("int8-zero-point", {"zero": np.array(0, np.uint8)}),
    ("int8-zero-point", {"zero": None}),
    ("int8-zero-point", {"zero": np.array(3, np.int8)}),
    ("int8-type", {"bias": True}),
    ("int8-scale", {"scale": np.array(0, np.float32)}),
    ("int8-scale", {"scale": np.array(-0.1, np.float32)}),
    ("int8-scale", {"scale": np.array(np.inf, np.float32)}),
    ("int8-scale", {"weight_scale": np.array([0.1] * (N - 1) + [np.nan], np.float32)}),
    ("int8-scale", {"scale": np.full(K, 0.05, np.float32), "zero": np.zeros(K, np.int8)}),
    ("int8-axis", {"axis": 0, "weight_scale": np.full(K, 0.01, np.float32)}),
    ("int8-axis", {"axis": 0}),
    ("int8-axis", {"block": 4, "axis": 1, "weight_scale": np.full((K, 2), 0.01, np.float32)}),
    ("int8-axis", {"block": 4, "axis": 0, "weight_scale": np.full((K, N), 0.01, np.float32)}),
    ("int8-operand", {"weight_first": True, "axis": 0, "weight_scale": np.full(K, 0.01, np.float32)}),
]


def test_a_sound_graph_passes() -> None:
    assert find_faults(SOUND.context()) == []
    blocks = replace(SOUND, block=4, axis=0, weight_scale=np.full((2, N), 0.01, np.float32))
    assert find_faults(blocks.context()) == []


@pytest.mark.parametrize(("rule", "fault"), FAULTS)
def test_each_planted_fault_is_caught(rule: str, fault: dict[str, object]) -> None:
    found = find_faults(replace(SOUND, **fault).context())
    assert rule in {finding.rule for finding in found} and all(finding.rule.startswith("int8") for finding in found)
