"""Half precision: finite where a naive cast is not, within its gate or kept in FP32, and read back from the file."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

from pom_edge.bundle import Bundle
from pom_edge.errors import GateError
from pom_edge.export import forms
from pom_edge.export.golden import golden_cases, record
from pom_edge.export.inputs import Extent
from pom_edge.export.made import Single
from pom_edge.export.onnx_graph import Graph, save_graph, trace_graph
from pom_edge.export.precision import to_half
from pom_edge.export.ranges import Range
from pom_edge.export.typed import look, typed
from pom_edge.mixer import PoM
from pom_edge.models import ModelConfig, build_model
from pom_edge.pipeline import export_bundle
from pom_edge.runtimes import check_bundle, open_session
from pom_edge.runtimes.layers import open_tapped
from pom_edge.runtimes.parity import measure
from pom_edge.runtimes.rounding import open_rounded
from tests.export.test_ranges import Attending


def _single(model: torch.nn.Module, example: dict[str, torch.Tensor]) -> tuple[Single, list[Any]]:
    plan = forms.parallel(model.eval(), example, Extent(), Extent())
    traced = trace_graph(plan.model, plan.mixers, plan.example, plan.axes)
    cases, _ = record(golden_cases(example, plan.axes, Extent(), Extent(), None), plan.reference)
    return Single(plan, traced, Extent(), Extent()), cases


def _layer(degree: int, scale: float, **settings: Any) -> torch.nn.Module:
    torch.manual_seed(degree)
    layer = PoM(16, degree, 2, **settings)
    torch.nn.init.normal_(layer.po_coeff, std=scale)
    with torch.no_grad():
        layer.projection()[0].mul_(8)
    return forms.LayerModel(layer)


def _types(graph: Graph) -> dict[str, set[ir.DataType]]:
    found: dict[str, set[ir.DataType]] = {}
    for node in graph.model.graph:
        found.setdefault(node.op_type, set()).add(node.outputs[0].dtype or ir.DataType.UNDEFINED)
    return found


@pytest.mark.parametrize(("degree", "scale"), [(2, 1e-3), (3, 1.0), (4, 300.0), (5, 40.0), (8, 0.5), (8, 1e4)])
def test_no_degree_and_no_coefficient_overflows(degree: int, scale: float, tmp_path: Path) -> None:
    x = torch.randn(2, 24, 16) * 3
    made, cases = _single(_layer(degree, scale, n_sel_heads=4), {"x": x})
    facts = look(made, cases, None)
    half, table = typed(made, "fp16", facts)
    save_graph(half.graphs[0].model, tmp_path / "half.onnx", {})
    y = open_tapped(tmp_path / "half.onnx", {"y": "y"})({"x": x.numpy()})["y"]
    with torch.no_grad():
        expected = made.plan.reference.model.double()(x.double()).numpy()  # type: ignore[attr-defined]
    metrics = measure(expected, y)
    assert metrics.nonfinite == 0
    assert metrics.snr_db >= 45
    polynomial = next(row for row in table["modules"] if row["module"] == "layer")
    assert polynomial["basis"] == "proved" and np.isfinite(polynomial["largest"])
    assert bool(polynomial["fp32"].get("Add")) == (polynomial["largest"] > 65504)


def test_a_naive_cast_does_overflow() -> None:
    """What the islands are for: the same layer with every tensor in FP16."""
    layer = _layer(4, 300.0, n_sel_heads=4).layer
    x = torch.randn(2, 24, 16) * 3
    with torch.no_grad():
        assert not torch.isfinite(layer.half()(x.half())).all()


@pytest.mark.slow
def test_a_million_tokens_in_fp16() -> None:
    torch.manual_seed(0)
    layer = PoM(8, 5, 1, n_sel_heads=2)
    torch.nn.init.uniform_(layer.po_coeff, 0.5, 2.0)  # all of one sign: the sum over tokens reaches 1e9 and more
    made, cases = _single(forms.LayerModel(layer), {"x": torch.randn(2, 24, 8)})
    half, _ = typed(made, "fp16", look(made, cases, None))
    x = torch.randn(1, 1_000_000, 8)
    with torch.no_grad():
        expected = layer.double()(x.double())[:, ::997].numpy()
    from pom_edge.runtimes.onnxruntime_session import native_session

    (y,) = native_session(ir.to_proto(half.graphs[0].model).SerializeToString()).run(None, {"x": x.numpy()})
    metrics = measure(expected, y[:, ::997])
    assert metrics.nonfinite == 0 and metrics.snr_db >= 45


def test_users_norms_and_powers_are_islands(tmp_path: Path) -> None:
    made, cases = _single(Attending(), {"x": torch.randn(2, 9, 12)})
    for precision, kind in (("fp16", ir.DataType.FLOAT16), ("bf16", ir.DataType.BFLOAT16)):
        half, _ = typed(made, precision, look(made, cases, None))
        half.lint()
        types = _types(half.graphs[0])
        for operator in ("Pow", "ReduceMean"):
            assert types[operator] == {ir.DataType.FLOAT}, operator
        assert kind in types["MatMul"] and kind in types["Softmax"] and kind in types["Tanh"]
        save_graph(half.graphs[0].model, tmp_path / "g.onnx", {})
        onnx.checker.check_model(str(tmp_path / "g.onnx"), full_check=True)
        execute = (open_tapped if precision == "fp16" else open_rounded)(tmp_path / "g.onnx", {"y": "y"})
        for case in cases:
            assert measure(case.outputs["y"], execute(case.inputs)["y"]).passes({"fp16": 45, "bf16": 30}[precision])


def test_a_constant_beyond_fp16_keeps_its_node_in_fp32() -> None:
    class Sentinel(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mixer = PoM(8, 2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.mixer(x) + torch.where(x > 1e9, 1e9, x * 1e-7)

    made, cases = _single(Sentinel(), {"x": torch.randn(2, 9, 8)})
    half, table = typed(made, "fp16", look(made, cases, None))
    half.lint()  # no FP16 constant beyond 65504
    reasons = {reason for row in table["modules"] for reason in row["fp32"].values()}
    assert any("too small for fp16" in reason for reason in reasons)  # 1e-7 is a subnormal
    assert _types(half.graphs[0])["Where"] == {ir.DataType.FLOAT}


def test_bf16_is_rounded_after_every_operator(tmp_path: Path) -> None:
    """The evaluator against numpy and ml_dtypes, bit for bit: y = bf16(bf16(x w) + b)."""
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([4, 8]))
    rng = np.random.default_rng(0)
    w, b = (rng.standard_normal(n).astype(np.float32) for n in (8, 8))
    graph = ir.from_onnx_text(
        """<ir_version: 10, opset_import: ["" : 18]>
        g (float[4,8] x) => (float[4,8] y) <float[8] w, float[8] b> { m = Mul(x, w)  y = Add(m, b) }"""
    )
    del x
    for name, array in (("w", w), ("b", b)):
        value = next(v for n in graph.graph for v in n.inputs if v is not None and v.name == name)
        value.const_value = ir.tensor(array, name=name)
        graph.graph.initializers[name] = value
    for node in graph.graph:
        node.outputs[0].type, node.outputs[0].shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape([4, 8])
    to_half(graph, "bf16", {"x": Range.of(-9, 9), "m": Range.of(-99, 99), "y": Range.of(-99, 99)}, {}, [])
    save_graph(graph, tmp_path / "g.onnx", {})
    values = rng.standard_normal((4, 8)).astype(np.float32)

    def rounded(array: np.ndarray) -> np.ndarray:
        return array.astype(ml_dtypes.bfloat16).astype(np.float32)

    expected = rounded(rounded(rounded(values) * rounded(w)) + rounded(b))
    found = open_rounded(tmp_path / "g.onnx", {"y": "y"})({"x": values})["y"]
    assert (found == expected).all() and not (found == values * w + b).all()


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = build_model(ModelConfig(kind="encoder", dim=32, depth=3, input_dim=12, n_sel_heads=4))
    folder = tmp_path_factory.mktemp("halves")
    x = {"x": torch.randn(2, 24, 12)}
    return export_bundle(model, precision=["fp32", "fp16", "bf16"], example_inputs=x, out=folder / "m.pom").bundle


def test_one_bundle_holds_several_precisions(halves: Path) -> None:
    artifacts = {artifact.precision: artifact for artifact in Bundle.open(halves).manifest.artifacts}
    assert list(artifacts) == ["fp32", "fp16", "bf16"]
    assert artifacts["fp16"].census["float16"] > 0.9 and artifacts["bf16"].census["bfloat16"] > 0.9
    assert artifacts["fp16"].ranges is not None and artifacts["fp32"].ranges is None
    assert "not run" in artifacts["bf16"].verified
    x = np.random.default_rng(1).standard_normal((1, 50, 12)).astype(np.float32)
    answers = {}
    for precision, artifact in artifacts.items():
        assert artifact.parity is not None and artifact.parity["snr_db"] >= artifact.parity["gate_db"]
        assert list(artifact.parity["stages"])[-1] == ("onnx" if precision == "fp32" else "typed")
        assert {str(spec.dtype) for spec in (*artifact.inputs, *artifact.outputs)} == {"float32"}
        with open_session(halves, artifact=artifact.file) as session:
            assert session.check().passed
            answers[precision] = session.run(x)
    assert 45 < measure(answers["fp32"], answers["fp16"]).snr_db < 90  # type: ignore[arg-type]
    assert 30 < measure(answers["fp32"], answers["bf16"]).snr_db < 60  # type: ignore[arg-type]


def test_check_looks_at_every_artifact(halves: Path) -> None:
    report = check_bundle(halves)
    assert [artifact.precision for artifact in report.artifacts] == ["fp32", "fp16", "bf16"] and report.passed


def test_inputs_beyond_the_proof_are_said(halves: Path) -> None:
    x = np.full((1, 5, 12), 1e6, np.float32)
    with open_session(halves, artifact="parallel.fp16.onnx") as session:
        with pytest.warns(RuntimeWarning, match=r"bounded for \|x\| <= .*values may overflow"):
            session.run(x)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            session.run(x)  # once is enough
    with warnings.catch_warnings(), open_session(halves, artifact="parallel.fp32.onnx") as session:
        warnings.simplefilter("error")
        session.run(x)


def test_a_flipped_weight_in_any_mixer_misses_the_gate(halves: Path) -> None:
    artifact = next(a for a in Bundle.open(halves).manifest.artifacts if a.precision == "fp16")
    with open_session(halves, artifact=artifact.file) as session:
        case, inputs, _ = next(session.bundle.cases())
        taps = session.bundle.taps(case)
    for name, value in artifact.mixers.items():
        model = onnx.load(str(halves / artifact.file))
        weight = next(w for w in model.graph.initializer if w.name.startswith(f"model.{name}.po_weight"))
        array = onnx.numpy_helper.to_array(weight).copy()
        array[0] = -array[0]
        weight.CopyFrom(onnx.numpy_helper.from_array(array, weight.name))
        broken = halves.parent / f"{name}.onnx"
        onnx.save(model, str(broken))
        assert not measure(taps[name], open_tapped(broken, {name: value})(inputs)[name]).passes(45), name


def test_mixers_below_the_gate_stay_fp32(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = build_model(ModelConfig(kind="encoder", dim=32, depth=3, input_dim=12, n_sel_heads=4))
    x = {"x": torch.randn(2, 24, 12)}
    report = export_bundle(model, precision="fp16", example_inputs=x, snr_db=60.0, out=tmp_path / "m.pom")
    (artifact,) = Bundle.open(report.bundle).manifest.artifacts
    assert artifact.ranges is not None and artifact.parity is not None
    assert artifact.ranges["kept_fp32"] and artifact.parity["snr_db"] >= 60
    assert any("kept in FP32, below the gate of 60 dB" in note for note in report.notes)
    with pytest.raises(GateError, match="typed graph is not the model"):
        export_bundle(model, precision="fp16", example_inputs=x, snr_db=89.0, out=tmp_path / "n.pom")
    assert not (tmp_path / "n.pom").exists()


@pytest.mark.slow
@pytest.mark.parametrize("form", ["recurrent", "streamed"])
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_the_other_forms_are_typed_too(form: str, precision: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    if form == "recurrent":
        config = ModelConfig(
            kind="lm", vocab_size=40, dim=32, depth=2, n_heads=2, window=8, blocks=("pom", "local"), rotary="1d"
        )
        example, options = {"x": torch.randint(0, 40, (2, 24))}, {}
    else:
        config = ModelConfig(kind="encoder", dim=32, depth=2, input_dim=12, n_sel_heads=4)
        example, options = {"x": torch.randn(2, 24, 12)}, {"chunk": 16}
    report = export_bundle(
        build_model(config), precision=precision, form=form, example_inputs=example, out=tmp_path / "m.pom", **options
    )
    (artifact,) = Bundle.open(report.bundle).manifest.artifacts
    assert {spec.dtype for spec in (*artifact.inputs, *artifact.outputs)} <= {"float32", "int64"}
    assert artifact.parity is not None and artifact.parity["passed"]
    if form == "streamed":
        assert artifact.ranges is not None
        known = [row for row in artifact.ranges["modules"] if row["module"].startswith("blocks.1.mixer")]
        assert known and all(row["basis"] == "proved" for row in known)  # bounds are carried from pass to pass
