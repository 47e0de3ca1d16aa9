"""INT8 and integer weights through the whole pipeline: what is asked for is in the file, and every gate holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from typer.testing import CliRunner

from pom_edge.building import Builder, UnlikeEagerError
from pom_edge.bundle import Artifact, Bundle
from pom_edge.cli import app
from pom_edge.errors import GateError, InputError
from pom_edge.models import ModelConfig, build_model
from pom_edge.pipeline import export_bundle
from pom_edge.runtimes import open_session
from pom_edge.runtimes.layers import open_tapped
from pom_edge.runtimes.parity import measure
from tests.mixers import lively

ROOT = Path(__file__).parents[2]
RNG = np.random.default_rng(0)


def _encoder(dim: int = 32) -> torch.nn.Module:
    from pom_edge.mixer import PoM

    torch.manual_seed(0)
    model = build_model(ModelConfig(kind="encoder", dim=dim, depth=3, input_dim=12, n_sel_heads=4))
    for index, layer in enumerate(m for m in model.modules() if isinstance(m, PoM)):
        lively(layer, index)
    return model


EXAMPLE = {"x": torch.randn(2, 24, 12, generator=torch.Generator().manual_seed(0))}
DATA = RNG.standard_normal((32, 24, 12)).astype(np.float32)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("int8") / "m.pom"
    kinds = ["fp32", "int8", "w8", "w4"]
    return export_bundle(_encoder(), precision=kinds, calibration={"x": DATA}, example_inputs=EXAMPLE, out=out).bundle


def _artifact(bundle: Path, precision: str) -> Artifact:
    return next(a for a in Bundle.open(bundle).manifest.artifacts if a.precision == precision)


def test_what_was_asked_for_is_in_the_file(bundle: Path) -> None:
    kinds = {"int8": onnx.TensorProto.INT8, "w8": onnx.TensorProto.INT8, "w4": onnx.TensorProto.INT4}
    sizes = {"fp32": (bundle / _artifact(bundle, "fp32").file).stat().st_size}
    for precision, kind in kinds.items():
        artifact = _artifact(bundle, precision)
        model = onnx.load(str(bundle / artifact.file))
        assert sum(np.prod(w.dims) for w in model.graph.initializer if w.data_type == kind) > 5000
        assert artifact.census[{"int8": "int8", "w8": "int8", "w4": "int4"}[precision]] > 0.5
        operators = {node.op_type for node in model.graph.node}
        assert "DequantizeLinear" in operators and ("QuantizeLinear" in operators) == (precision == "int8")
        sizes[precision] = (bundle / artifact.file).stat().st_size
    assert sizes["int8"] < sizes["fp32"] / 2 and sizes["w4"] < sizes["w8"] < sizes["fp32"] / 2
    assert _artifact(bundle, "w4").opset == 21 and _artifact(bundle, "int8").opset == 18


def test_every_gate_is_held_and_said(bundle: Path) -> None:
    entry = _artifact(bundle, "int8")
    assert entry.parity is not None and entry.quantization is not None
    assert entry.parity["snr_db"] >= 20 and entry.parity["snr_db_eager"] >= 40
    assert sorted(entry.parity["stages"]) == ["eager", "lowered", "onnx", "quantized"]
    assert entry.quantization["samples"] == 32 and entry.quantization["calibration"] == "given arrays"
    layers = {row["layer"]: row for row in entry.quantization["layers"]}
    modules = dict(_encoder().named_modules())
    assert all(path in modules or path.rpartition(".")[0] in modules for path in layers)
    assert all(row["snr_db"] > 20 for row in layers.values())
    for precision in ("int8", "w8", "w4"):
        with open_session(bundle, artifact=_artifact(bundle, precision).file) as session:
            assert session.check().passed


def test_a_flipped_weight_in_any_mixer_misses_the_gate(bundle: Path) -> None:
    artifact = _artifact(bundle, "int8")
    opened = Bundle.open(bundle)
    case, inputs, _ = next(opened.cases())
    taps = opened.taps(case)
    for name, value in artifact.mixers.items():
        model = onnx.load(str(bundle / artifact.file))
        weight = next(w for w in model.graph.initializer if w.name.startswith(f"{name}.weight_int8"))
        array = onnx.numpy_helper.to_array(weight).copy()
        array[:, :4] = -array[:, :4]
        weight.CopyFrom(onnx.numpy_helper.from_array(array, weight.name))
        onnx.save(model, str(bundle.parent / "broken.onnx"))
        found = open_tapped(bundle.parent / "broken.onnx", {name: value})(inputs)[name]
        assert not measure(taps[name], found).passes(20), name


def test_the_most_sensitive_layers_go_back_to_float(tmp_path: Path) -> None:
    """A higher gate costs layers: those with the lowest SNR alone, in that order."""
    report = export_bundle(
        _encoder(), precision="int8", calibration={"x": DATA}, example_inputs=EXAMPLE, snr_db=38.0, out=tmp_path / "m.pom"
    )
    (artifact,) = Bundle.open(report.bundle).manifest.artifacts
    assert artifact.quantization is not None and artifact.parity is not None
    kept, rows = artifact.quantization["kept_float"], artifact.quantization["layers"]
    assert kept and artifact.parity["snr_db"] >= 38
    alone = {row["layer"]: row["snr_db"] for row in rows}
    assert kept == sorted(alone, key=lambda path: alone[path])[: len(kept)]
    assert {row["layer"] for row in rows if row["kind"] == "float"} == set(kept)
    assert any("kept in float, so that every gate holds" in note for note in report.notes)
    with pytest.raises(GateError, match="misses its gate of 89 dB whatever stays in float"):
        export_bundle(
            _encoder(), precision="int8", calibration={"x": DATA}, example_inputs=EXAMPLE, snr_db=89, out=tmp_path / "n.pom"
        )
    assert not (tmp_path / "n.pom").exists()


def test_a_mixer_that_is_unlike_pytorchs_quantized_model_goes_back_to_float(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A value between two integers is rounded the other way, until the mixer's layers are in float; or everywhere: an error."""
    measured, unlike = Builder.hold_eager, {"blocks.1.mixer"}

    def hold(self: Builder, exact: Any, eager: Any, what: str, gated: bool = True) -> float:
        if unlike:
            raise UnlikeEagerError(what, next(iter(unlike)), 36.9)
        return measured(self, exact, eager, what, gated)

    steps: list[str] = []

    def step(text: str) -> None:
        steps.append(text)
        if "back to float: blocks.1.mixer is at 36.9 dB" in text:
            unlike.clear()

    monkeypatch.setattr(Builder, "hold_eager", hold)
    options: dict[str, Any] = {"precision": "int8", "calibration": {"x": DATA}, "example_inputs": EXAMPLE}
    report = export_bundle(_encoder(), **options, out=tmp_path / "m.pom", progress=step)
    kept = _artifact(report.bundle, "int8").quantization["kept_float"]  # type: ignore[index]
    assert kept and kept[-1].startswith("blocks.1.mixer."), "the one that is unlike, whatever costs more alone"
    said = [text for text in steps if "layer alone" in text]
    layers = len(_artifact(report.bundle, "int8").quantization["layers"])  # type: ignore[index,arg-type]
    every = max(1, layers // 10)
    assert said == [f"quantize each layer alone: layer {n} of {layers}" for n in range(1, layers + 1, every)] and layers > 10
    unlike.add("blocks.1.mixer")
    with pytest.raises(GateError, match=r"not the quantized model of PyTorch: blocks.1.mixer 36.9 dB; the gate is 40 dB"):
        export_bundle(_encoder(), **options, out=tmp_path / "n.pom")
    assert not (tmp_path / "n.pom").exists()


def test_the_metric_decides_too(tmp_path: Path) -> None:
    """A metric that sees the rounding of one layer brings that layer back to float."""
    model = _encoder()
    with torch.no_grad():
        truth = model(torch.from_numpy(DATA)).numpy()

    def closeness(run: Any) -> float:
        return measure(truth, run(DATA)).snr_db

    report = export_bundle(
        model,
        precision="int8",
        calibration={"x": DATA},
        example_inputs=EXAMPLE,
        metric=closeness,
        max_drop=262.0,  # PyTorch has the 300 dB of equal arrays: 38 dB must be left
        out=tmp_path / "m.pom",
    )
    (artifact,) = report.artifacts
    assert artifact.parity is not None and artifact.parity["metric"]["drop"] <= 262
    assert Bundle.open(report.bundle).manifest.artifacts[0].quantization["kept_float"]  # type: ignore[index]


def test_two_exports_are_alike(tmp_path: Path) -> None:
    files = []
    for name in ("a", "b"):
        export_bundle(
            _encoder(), precision="int8", calibration={"x": DATA}, example_inputs=EXAMPLE, out=tmp_path / name / "m.pom"
        ) if (tmp_path / name).mkdir() is None else None
        files.append((tmp_path / name / "m.pom" / "parallel.int8.onnx").read_bytes())
    assert files[0] == files[1]


@pytest.mark.slow
def test_the_remainder_in_fp16(tmp_path: Path) -> None:
    for precision in ("int8", "w8"):
        options: dict[str, Any] = {"calibration": {"x": DATA}} if precision == "int8" else {}
        report = export_bundle(
            _encoder(),
            precision=precision,
            remainder="fp16",
            example_inputs=EXAMPLE,
            out=tmp_path / f"{precision}.pom",
            **options,
        )
        (artifact,) = Bundle.open(report.bundle).manifest.artifacts
        graphs = [path.name for path in report.bundle.glob("*.onnx")]
        assert graphs == [artifact.file]  # what was made on the way is not left in the bundle
        assert artifact.file == f"parallel.{precision}.fp16.onnx" and artifact.remainder == "fp16"
        assert artifact.census["int8"] > 0.5 and artifact.census["float16"] > 0
        assert artifact.opset == 19 and artifact.ranges is not None
        with open_session(report.bundle) as session:
            assert session.check().passed


@pytest.mark.slow
@pytest.mark.parametrize("form", ["recurrent", "streamed"])
def test_the_other_forms_too(form: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    if form == "recurrent":
        config = ModelConfig(kind="lm", vocab_size=40, dim=32, depth=2, n_heads=2, window=8, blocks=("pom", "local"))
        ids = RNG.integers(0, 40, (16, 40))
        model, example, data = build_model(config), {"x": torch.from_numpy(ids[:2])}, {"x": ids}
        options: dict[str, Any] = {}
    else:
        model, example, data, options = _encoder(), EXAMPLE, {"x": DATA}, {"chunk": 16}
    report = export_bundle(
        model,
        precision=["int8", "w8"],
        form=form,
        calibration=data,
        example_inputs=example,
        out=tmp_path / "m.pom",
        **options,
    )
    for artifact in Bundle.open(report.bundle).manifest.artifacts:
        assert artifact.census["int8"] > 0.1 and artifact.parity is not None and artifact.parity["passed"]
    assert {a.precision: a.speedup is not None for a in report.artifacts} == {"int8": True, "w8": True}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"INT8 needs calibration data.*numpy.savez\('calibration.npz', x=batch\)"),
        ({"calibration": {"y": DATA}}, "has the arrays 'y'; expected 'x'"),
        ({"calibration": {"x": DATA[..., :5]}}, r"has the shape \(32, 24, 5\); expected \(batch, tokens, 12\)"),
        ({"calibration": {"x": DATA * np.nan}}, "NaN"),
        ({"calibration": {"x": DATA[:0]}}, "is empty"),
        ({"calibration": {"x": DATA * 0}}, "is zero throughout"),
        ({"calibration": "absent.npz"}, "absent.npz"),
        ({"calibration": "golden"}, "the checkpoint carries none"),
        ({"calibration": {"x": DATA}, "observer": "median"}, "unknown observer 'median'.*percentile"),
        ({"calibration": {"x": DATA}, "int8_weights": "6bit"}, "unknown width of INT8 weights '6bit'.*8bit, 7bit"),
        ({"calibration": {"x": DATA}, "precision": "w8"}, "--calibration is for --precision int8"),
        ({"precision": "fp16", "remainder": "fp16"}, "--remainder is what is not INT8"),
        ({"precision": "int4"}, "unknown precision 'int4'.*int8, w8, w4"),
    ],
)
def test_bad_input(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        export_bundle(_encoder(), example_inputs=EXAMPLE, out=tmp_path / "m.pom", **{"precision": "int8", **options})
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_digits_through_the_command_line(tmp_path: Path) -> None:
    """The checkpoint's own samples calibrate; all of the test set is within half a point."""
    arguments = ["export", str(ROOT / "demos/digits/model.pt"), "--out", str(tmp_path / "d.pom"), "--precision", "int8"]
    arguments += ["--metric", str(ROOT / "demos/digits/metric.py") + ":accuracy", "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    (artifact,) = json.loads(result.stdout)["artifacts"]
    assert artifact["parity"]["metric"]["drop"] <= 0.5 and artifact["parity"]["metric"]["pytorch"] == 98.2
    facts = json.loads(CliRunner().invoke(app, ["info", str(tmp_path / "d.pom"), "--json"]).stdout)
    assert facts["artifacts"][0]["quantization"]["calibration"] == "the checkpoint's own samples"
