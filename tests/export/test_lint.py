"""Every rule of the lint, seen to fire on a graph that breaks it and to stay silent on one that does not."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from pom_edge.errors import GateError
from pom_edge.export.lint import GraphContext, find_faults, lint
from pom_edge.export.onnx_graph import Graph

Shape = Sequence[int | str]


def _value(name: str, shape: Shape, dtype: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, list(shape))


def _graph(
    nodes: list[onnx.NodeProto],
    *,
    x: Shape = ("batch", "tokens", 8),
    y: Shape = ("batch", "tokens", 8),
    values: Sequence[onnx.ValueInfoProto] = (),
    constants: dict[str, np.ndarray] | None = None,
    dtype: int = TensorProto.FLOAT,
    opset: int = 18,
    ir_version: int = 10,
    mixers: Sequence[str] = ("mixer",),
    layer_norms: Sequence[str] = (),
    extra_inputs: Sequence[onnx.ValueInfoProto] = (),
) -> GraphContext:
    inits = [numpy_helper.from_array(array, name) for name, array in (constants or {}).items()]
    inputs = [_value("x", x, dtype), *extra_inputs]
    graph = helper.make_graph(nodes, "g", inputs, [_value("y", y, dtype)], inits, value_info=list(values))
    domains = {node.domain for node in nodes if node.domain}
    imports = [helper.make_opsetid("", opset), *(helper.make_opsetid(domain, 1) for domain in domains)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=ir_version)
    return GraphContext(Graph(ir.from_proto(model), ["y"], layer_norms=list(layer_norms), mixers=list(mixers)))


def _rules(context: GraphContext) -> set[str]:
    return {finding.rule for finding in find_faults(context)}


def _node(op: str, inputs: list[str], outputs: list[str], name: str = "mixer/n", **attributes: object) -> onnx.NodeProto:
    return helper.make_node(op, inputs, outputs, name=name, **attributes)


RELU = _node("Relu", ["x"], ["y"])


def test_a_plain_graph_passes() -> None:
    assert lint(_graph([RELU])) == []


def test_custom_operator() -> None:
    context = _graph([helper.make_node("FusedMatMul", ["x", "x"], ["y"], name="mixer/f", domain="com.microsoft")])
    found = find_faults(context)
    assert {finding.rule for finding in found} == {"standard-domain"}
    assert any("com.microsoft::FusedMatMul" in finding.message and finding.where == "mixer/f" for finding in found)


@pytest.mark.parametrize(("opset", "ir_version", "rule"), [(17, 10, "opset"), (18, 11, "ir-version")])
def test_versions(opset: int, ir_version: int, rule: str) -> None:
    assert _rules(_graph([RELU], opset=opset, ir_version=ir_version)) == {rule}


def test_control_flow_and_data_dependent_shapes() -> None:
    context = _graph([_node("NonZero", ["x"], ["i"]), RELU], values=[_value("i", (3, "n"), TensorProto.INT64)])
    assert "control-flow" in _rules(context)


def test_half_pow() -> None:
    two = {"two": np.array(2, np.float16)}
    half = _graph([_node("Pow", ["x", "two"], ["y"])], constants=two, dtype=TensorProto.FLOAT16)
    assert _rules(half) == {"half-pow"}
    assert _rules(_graph([_node("Pow", ["x", "two"], ["y"])], constants={"two": np.array(2, np.float32)})) == set()


@pytest.mark.parametrize(("constant", "fires"), [(np.float16(-np.inf), True), (np.float16(65504), False)])
def test_half_constants(constant: np.float16, fires: bool) -> None:
    context = _graph([_node("Add", ["x", "c"], ["y"])], constants={"c": np.array(constant)}, dtype=TensorProto.FLOAT16)
    assert _rules(context) == ({"half-constant"} if fires else set())


@pytest.mark.parametrize("operator", ["ReduceMean", "ReduceSum"])
def test_half_sums(operator: str) -> None:
    axes = {"axes": np.array([1])}
    node, shape = _node(operator, ["x", "axes"], ["y"]), ("batch", 1, 8)
    assert _rules(_graph([node], constants=axes, y=shape, dtype=TensorProto.FLOAT16)) == {"half-sum"}
    assert _rules(_graph([node], constants=axes, y=shape)) == set()


def test_half_constants_that_the_graph_makes() -> None:
    half = _value("h", (), TensorProto.FLOAT16)
    cast = _node("Cast", ["c"], ["h"], to=TensorProto.FLOAT16)
    add = _node("Add", ["x", "h"], ["y"], "mixer/a")
    for constant, fires in ((1e9, True), (1e4, False)):
        constants = {"c": np.array(constant, np.float32)}
        context = _graph([cast, add], constants=constants, values=[half], dtype=TensorProto.FLOAT16)
        assert _rules(context) == ({"half-constant"} if fires else set())
    filled = numpy_helper.from_array(np.array([np.inf], np.float16))
    made = _node("ConstantOfShape", ["s"], ["h"], value=filled)
    context = _graph([made, add], constants={"s": np.array([1])}, values=[_value("h", (1,), TensorProto.FLOAT16)], dtype=10)
    assert _rules(context) == {"half-constant"}


def test_a_pair_with_two_scales() -> None:
    nodes = [_node("QuantizeLinear", ["x", "s", "z"], ["q"], "mixer/q"), _node("DequantizeLinear", ["q", "t", "z"], ["y"])]
    constants = {"s": np.array(0.1, np.float32), "t": np.array(0.2, np.float32), "z": np.array(0, np.int8)}
    context = _graph(nodes, constants=constants, values=[_value("q", ("batch", "tokens", 8), TensorProto.INT8)])
    assert _rules(context) == {"int8-scale"}


def test_cumsum() -> None:
    axis = {"axis": np.array(1), "other": np.array(2)}
    forward = _graph([_node("CumSum", ["x", "axis"], ["y"])], constants={"axis": np.array(1)})
    assert _rules(forward) == {"cumsum"}  # meant for TensorRT too, as every graph by default
    forward.for_tensorrt = False
    assert _rules(forward) == set()
    for attributes in ({"reverse": 1}, {"exclusive": 1}):
        context = _graph([_node("CumSum", ["x", "axis"], ["y"], **attributes)], constants={"axis": np.array(1)})
        context.for_tensorrt = False
        assert _rules(context) == {"cumsum"}
    two = [_node("CumSum", ["x", "axis"], ["t"]), _node("CumSum", ["t", "other"], ["y"])]
    context = _graph(two, constants=axis, values=[_value("t", ("batch", "tokens", 8))])
    context.for_tensorrt = False
    assert _rules(context) == {"cumsum"}


@pytest.mark.parametrize(
    ("zero", "fires"),
    [(np.int8(0), False), (np.int8(3), True), (np.uint8(0), True), (None, True)],
)
def test_int8_zero_point(zero: np.generic | None, fires: bool) -> None:
    names = ["x", "scale"] + ([] if zero is None else ["zero"])
    nodes = [_node("QuantizeLinear", names, ["q"]), _node("DequantizeLinear", ["q", *names[1:]], ["y"])]
    constants: dict[str, np.ndarray] = {"scale": np.array(0.1, np.float32)}
    if zero is not None:
        constants["zero"] = np.array(zero)
    kind = TensorProto.INT8 if zero is not None and zero.dtype == np.int8 else TensorProto.UINT8
    context = _graph(nodes, constants=constants, values=[_value("q", ("batch", "tokens", 8), kind)])
    assert ("int8-zero-point" in _rules(context)) == fires and bool(_rules(context)) == fires


def test_decomposed_layer_norm() -> None:
    context = _graph([_node("Sqrt", ["x"], ["y"], name="blocks.0.norm/Sqrt_0")], layer_norms=["blocks.0.norm"])
    assert _rules(context) == {"layer-norm"}


def test_local_metadata() -> None:
    context = _graph([RELU])
    next(iter(context.model.graph)).metadata_props["pkg.torch.onnx.stack_trace"] = "File somewhere"
    assert _rules(context) == {"local-metadata"}


def test_output_that_lost_its_batch_axis() -> None:
    assert _rules(_graph([RELU], y=(2, "tokens", 8))) == {"free-axes"}


def _square(name: str) -> list[onnx.NodeProto]:
    return [
        _node("Transpose", ["x"], ["t"], perm=[0, 2, 1]),
        _node("MatMul", ["x", "t"], ["s"], name=name),
        _node("MatMul", ["s", "x"], ["y"], name=name + "b"),
    ]


SQUARE_VALUES = [_value("t", ("batch", 8, "tokens")), _value("s", ("batch", "tokens", "tokens"))]


def test_square_tensor_inside_a_mixer_is_ours() -> None:
    found = find_faults(_graph(_square("blocks.0.mixer/MatMul_0"), values=SQUARE_VALUES, mixers=["blocks.0.mixer"]))
    assert {finding.rule for finding in found} >= {"square-tensor"}
    assert any(finding.where == "blocks.0.mixer/MatMul_0" for finding in found)


def test_square_tensor_of_attention_beside_a_mixer_is_the_models() -> None:
    context = _graph(_square("blocks.1.attention/MatMul_0"), values=SQUARE_VALUES, mixers=["blocks.0.mixer"])
    assert find_faults(context) == []
    assert any("blocks.1.attention" in note for note in context.notes)


def test_a_mask_for_each_query_is_the_callers() -> None:
    mask = _value("mask", ("batch", "tokens", "tokens"))
    context = _graph(_square("mixer/MatMul_0"), values=SQUARE_VALUES, extra_inputs=[mask])
    assert find_faults(context) == [] and len(context.notes) == 2


def test_cost_that_grows_faster_than_tokens() -> None:
    """tokens^1.5 through a (tokens x 8 sqrt) stand-in: not an N x N tensor, yet more than linear."""
    wide = [_value("w", ("batch", "tokens", "tokens // 64"))]
    nodes = [_node("MatMul", ["x", "k"], ["w"]), _node("MatMul", ["w", "k2"], ["y"])]
    extra = [_value("k", (8, "tokens // 64")), _value("k2", ("tokens // 64", 8))]
    context = _graph(nodes, values=wide, extra_inputs=extra)
    assert "linear-cost" in _rules(context)


def test_lint_names_node_and_rule() -> None:
    with pytest.raises(GateError, match=r"int8-zero-point: blocks\.0\.mixer/Q: QuantizeLinear has no zero point"):
        lint(
            _graph(
                [
                    _node("QuantizeLinear", ["x", "scale"], ["q"], name="blocks.0.mixer/Q"),
                    _node("DequantizeLinear", ["q", "scale"], ["y"]),
                ],
                constants={"scale": np.array(0.1, np.float32)},
                values=[_value("q", ("batch", "tokens", 8), TensorProto.UINT8)],
            )
        )
