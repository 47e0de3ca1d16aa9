"""Core ML beside other targets, INT8 held against PyTorch's quantized model, and what a user gets wrong."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from pom_edge.bundle import Bundle, seal
from pom_edge.cli import app
from pom_edge.errors import BundleError, GateError, InputError
from pom_edge.inspection import describe
from pom_edge.mixer import PoM
from pom_edge.models import ModelConfig, build_model
from pom_edge.pipeline import ExportOptions, export_bundle
from pom_edge.runtimes import open_session
from pom_edge.runtimes.bench import bench
from pom_edge.runtimes.checking import check_bundle
from pom_edge.runtimes.coreml_session import EVALUATED
from tests.mixers import lively

pytest.importorskip("coremltools", reason="needs pip install 'pom-edge[coreml]'")


@pytest.mark.parametrize(("targets", "code"), [(("coreml",), 2), (("onnx", "coreml"), 3)])
def test_missing_coremltools_is_said(targets: tuple[str, ...], code: int, tmp_path: Path, monkeypatch: Any) -> None:
    from typer.testing import CliRunner

    monkeypatch.setattr("pom_edge.coreml.find_spec", lambda name: None)
    torch.manual_seed(0)
    torch.save(lively(PoM(8, 2, 2)).state_dict(), tmp_path / "layer.pt")
    flags = [flag for target in targets for flag in ("--target", target)]
    result = CliRunner().invoke(app, ["export", str(tmp_path / "layer.pt"), *flags, "--json"], catch_exceptions=False)
    assert result.exit_code == code, result.output
    assert "pom-edge[coreml]" in result.stdout
    assert (tmp_path / "layer.pom").exists() is (code == 3)


@pytest.mark.parametrize(("targets", "code"), [(("coreml",), 2), (("onnx", "coreml"), 3)])
def test_a_broken_coremltools_is_said(
    targets: tuple[str, ...], code: int, tmp_path: Path, put_coremltools: Callable[[str], None]
) -> None:
    """Before any work, with the exit code of a missing one."""
    torch.manual_seed(0)
    torch.save(lively(PoM(8, 2, 2)).state_dict(), tmp_path / "layer.pt")
    put_coremltools("raise OSError('libmil.so: cannot open shared object file')")
    flags = [flag for target in targets for flag in ("--target", target)]
    result = CliRunner().invoke(app, ["export", str(tmp_path / "layer.pt"), *flags, "--json"], catch_exceptions=False)
    assert result.exit_code == code, result.output
    answer = json.loads(result.stdout)
    told = answer["error"] if code == 2 else " ".join(answer["missing"][0].values())
    assert "importing it fails (OSError: libmil.so: cannot open shared object file)" in told
    assert "pip install --force-reinstall --no-cache-dir 'pom-edge[coreml]'" in told
    assert (tmp_path / "layer.pom").exists() is (code == 3)


def test_beside_graphs_every_artifact_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each target in its own precision, each artifact in its own runtime."""
    torch.manual_seed(0)
    model = build_model(ModelConfig(kind="encoder", dim=16, depth=1, input_dim=16, n_sel_heads=4, rotary="1d"))
    out = tmp_path / "both.pom"
    report = export_bundle(model, ["onnx", "coreml"], example_inputs={"x": torch.randn(1, 16, 16)}, out=out)
    graph, package = "parallel.fp32.onnx", "parallel.fp16.mlpackage"
    assert [each.file for each in report.artifacts] == [graph, package]
    checks = {each.file: each for each in check_bundle(out).artifacts}
    assert list(checks) == [graph, package] and all(each.passed for each in checks.values())
    assert checks[graph].runtime.startswith("onnxruntime") and EVALUATED in checks[package].runtime
    assert set(checks[package].cases) < set(checks[graph].cases), "a package runs what was recorded for its sizes"
    assert [each.file for each in check_bundle(out, runtime="coreml", layers=True).artifacts] == [package]
    of_graph, of_package = describe(out)["artifacts"]
    assert of_package["deployment_target"] == "iOS17" and "deployment_target" not in of_graph
    assert of_graph["remainder"] == "fp32" and "remainder" not in of_package
    assert of_graph["notes"] == [] and [note[:25] for note in of_package["notes"]] == ["coreml: fixed at 16 token"]
    with open_session(out) as session:
        assert session.artifact.file == graph
    with open_session(out, artifact=package) as session:
        assert EVALUATED in session.runtime
    monkeypatch.setitem(sys.modules, "coremltools", None)
    without = check_bundle(out)
    assert [each.file for each in without.artifacts] == [graph]
    assert list(without.skipped) == [package] and "pom-edge[coreml]" in without.skipped[package]


def _model(kind: str) -> tuple[torch.nn.Module, dict[str, torch.Tensor], dict[str, Any]]:
    """A model, its example, and data for INT8."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    if kind == "lm":
        model = build_model(ModelConfig(kind="lm", dim=32, depth=1, vocab_size=40, n_sel_heads=4))
        return model, {"x": torch.randint(0, 40, (1, 16))}, {"x": rng.integers(0, 40, (16, 16))}
    model = build_model(ModelConfig(kind="encoder", dim=32, depth=1, input_dim=12, n_sel_heads=4))
    for layer in (m for m in model.modules() if isinstance(m, PoM)):
        lively(layer)
    return model, {"x": torch.randn(1, 16, 12)}, {"x": rng.standard_normal((16, 16, 12)).astype(np.float32)}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "form"), [("encoder", "parallel"), ("lm", "recurrent")])
def test_three_targets_in_int8_and_weights_alone(kind: str, form: str, tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="needs pip install 'pom-edge[rtx]'")
    model, example, data = _model(kind)
    out = tmp_path / "a.pom"
    report = export_bundle(
        model, ["onnx", "coreml", "rtx"], ["w8a8", "w8"], form=form, example_inputs=example, calibration=data, out=out
    )
    made = {(each.target, each.precision) for each in report.artifacts}
    names = {"onnx": "int8", "coreml": "w8a8", "rtx": "int8"}  # one thing, under the name that each target has for it
    assert made == {(target, precision) for target, name in names.items() for precision in (name, "w8")}
    checks = {each.file: each for each in check_bundle(out).artifacts}
    assert set(checks) == {f"{form}.{name}" for name in ("int8.onnx", "w8.onnx", "w8a8.mlpackage", "w8.mlpackage")}
    assert all(each.passed for each in checks.values())
    package = next(each for each in Bundle.open(out).manifest.artifacts if each.file.endswith("w8a8.mlpackage"))
    assert package.census["int8"] > 0.8 and package.parity is not None and package.parity["snr_db_eager"] > 20
    one_row = form == "recurrent"  # a token at a time: weights alone
    assert ("quantize" in package.parity["operators"]) is not one_row
    assert any("coreml w8a8: no activation is INT8" in note for note in report.notes) is one_row


def _scales(package: Path) -> list[tuple[int, int]]:
    """Of each weight in integers, read back from the program: how many scales it has, and how many output channels."""
    from coremltools.proto import Model_pb2

    from pom_edge.runtimes.mil_program import model_file

    spec = Model_pb2.Model()
    spec.ParseFromString(model_file(package).read_bytes())
    (block,) = spec.mlProgram.functions["main"].block_specializations.values()
    found = []
    for operation in block.operations:
        if operation.type == "constexpr_affine_dequantize":
            axis = operation.attributes["axis"].immediateValue.tensor.ints.values[0]
            weight, scale = (
                [dim.constant.size for dim in operation.attributes[name].type.tensorType.dimensions]
                for name in ("quantized_data", "scale")
            )
            found.append((scale[0] if scale else 1, weight[axis]))
    return found


def test_int8_is_weights_alone_on_core_ml_and_activations_too_beside_it(tmp_path: Path) -> None:
    model, example, data = _model("encoder")
    report = export_bundle(
        model, ["onnx", "coreml"], ["int8", "w8", "fp16"], example_inputs=example, calibration=data, out=tmp_path / "a.pom"
    )
    graphs, (package, half) = report.artifacts[:-2], report.artifacts[-2:]
    assert [each.file for each in graphs] == ["parallel.int8.onnx", "parallel.w8.onnx", "parallel.fp16.onnx"]
    assert (package.file, package.precision) == ("parallel.w8.mlpackage", "w8"), "int8 and w8 are one package"
    held = {each.file: each for each in Bundle.open(report.bundle).manifest.artifacts}
    assert held["parallel.int8.onnx"].quantization and not held[package.file].quantization
    assert package.parity is not None and package.parity["gate_db"] == 40
    assert not {"quantize", "dequantize"} & set(package.parity["operators"])
    scales = _scales(tmp_path / "a.pom" / package.file)
    channels = {"aggregation": 32, "projection": 64, "wide": 128, "narrow": 32}  # the other weights have less than 512 elements
    assert sorted(scales) == sorted((count, count) for count in channels.values())
    said = [note for note in report.notes if "--precision int8 is w8 here" in note]
    assert len(said) == 1 and "--precision w8a8" in said[0] and "iOS17" in said[0]
    assert [file for file, artifact in held.items() if said[0] in artifact.notes] == [package.file], "it is about no other"
    assert half.precision == "fp16"
    assert all(each.passed for each in check_bundle(report).artifacts)


@pytest.mark.parametrize(("form", "options"), [("parallel", {"target": "iOS16"}), ("recurrent", {"target": "iOS18"})])
def test_int8_takes_no_data_from_ios16_on_and_with_states(form: str, options: dict[str, str], tmp_path: Path) -> None:
    model, example, _ = _model("lm")
    report = export_bundle(
        model, "coreml", ["int8", "w8"], form=form, stateful=form == "recurrent", deployment_target=options["target"],
        example_inputs=example, out=tmp_path / "a.pom",
    )  # fmt: skip
    (artifact,) = report.artifacts
    assert artifact.precision == "w8" and artifact.parity is not None and artifact.parity["passed"]
    assert Bundle.open(report.bundle).manifest.artifacts[0].census["int8"] > 0.5


@pytest.mark.parametrize(
    ("targets", "asked", "made"),
    [
        (("coreml",), ("int8",), ("w8",)),
        (("coreml",), ("w8", "int8", "w8a8"), ("w8", "w8a8")),
        (("onnx",), ("w8a8", "fp32", "int8"), ("int8", "fp32")),
        (("trt",), ("w8a8",), ("int8",)),
        (("rtx",), ("int8",), ("int8",)),
        (("onnx", "coreml"), ("w8a8",), ("int8", "w8a8")),
        (("onnx", "coreml"), (), ("fp32", "fp16")),
    ],
)
def test_each_target_has_its_own_name(targets: tuple[str, ...], asked: tuple[str, ...], made: tuple[str, ...]) -> None:
    options = ExportOptions(targets=targets, precisions=asked)
    assert options.precisions_of(*targets) == made
    assert options.calibrated is bool({"int8", "w8a8"} & set(made))


@pytest.mark.parametrize("given", [{"calibration": "golden"}, {"observer": "mse"}, {"int8_weights": "7bit"}])
def test_data_is_for_activations(given: dict[str, Any]) -> None:
    option = f"--{next(iter(given)).replace('_', '-')}"
    with pytest.raises(InputError, match=rf"^{option} is for activations in INT8, found .*; int8 is weights alone.*w8a8, or"):
        ExportOptions(targets=("coreml",), precisions=("int8",), **given).check()
    with pytest.raises(InputError, match=f"{option} is for .*found --target coreml and its default, --precision fp16: give"):
        ExportOptions(targets=("coreml",), **given).check()
    ExportOptions(targets=("coreml", "onnx"), precisions=("int8",), **given).check()
    ExportOptions(targets=("coreml",), precisions=("int8", "w8a8"), **given).check()


def test_w8a8_asks_for_data(tmp_path: Path) -> None:
    model, example, _ = _model("encoder")
    with pytest.raises(InputError, match="INT8 needs calibration data"):
        export_bundle(model, "coreml", "w8a8", example_inputs=example, out=tmp_path / "a.pom")


@pytest.mark.slow
def test_a_bundle_that_calls_it_int8_is_checked(tmp_path: Path) -> None:
    """As it was written before the name w8a8."""
    model, example, data = _model("encoder")
    out = tmp_path / "a.pom"
    export_bundle(model, "coreml", "w8a8", example_inputs=example, calibration=data, out=out)
    (out / "parallel.w8a8.mlpackage").rename(out / "parallel.int8.mlpackage")
    manifest = out / "manifest.json"
    content = json.loads(manifest.read_text().replace("parallel.w8a8.mlpackage", "parallel.int8.mlpackage"))
    content["artifacts"][0]["precision"] = "int8"
    manifest.write_text(seal(content))
    (check,) = check_bundle(out).artifacts
    assert (check.passed, check.precision, check.gate_db) == (True, "int8", 20)
    assert describe(out)["artifacts"][0]["precision"] == "int8"
    with pytest.raises(InputError, match=r"nothing that is timed with --runtime coreml; it holds parallel\.int8\.mlpackage"):
        bench(out, runtime="coreml", rounds=1)  # read, and left out: it was evaluated, not run


@pytest.mark.slow
def test_w8a8_is_held_against_the_quantized_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scale that is wrong by 2 % is within the 20 dB against FP32."""
    from pom_edge.runtimes import mil_operators

    model, example, data = _model("encoder")
    real = mil_operators.OPERATORS["quantize"]
    monkeypatch.setitem(mil_operators.OPERATORS, "quantize", lambda input, scale, **rest: real(input, scale * 1.02, **rest))  # noqa: A006
    with pytest.raises(GateError, match="the Core ML program is not the quantized model of PyTorch"):
        export_bundle(model, "coreml", "w8a8", example_inputs=example, calibration=data, out=tmp_path / "a.pom")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"remainder": "fp16", "precisions": ("int8",)}, "--remainder fp16 is for the other targets"),
        ({"remainder": "fp16", "precisions": ("w8a8",)}, "--remainder fp16 is for the other targets"),
        (
            {"precisions": ("p6",), "targets": ("coreml", "onnx")},
            "--precision p6, a palette of weights, is for --target coreml alone",
        ),
        ({"precisions": ("p4",), "targets": ("trt",)}, "is for --target coreml alone"),
    ],
)
def test_what_does_not_go_together(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ExportOptions(**{"targets": ("coreml",), **options}).check()


@pytest.mark.parametrize(("version", "refused"), [("2.7.1+cpu", True), ("2.14.0", False)])
def test_another_torch_is_named_with_the_tested_one(version: str, refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from pom_edge.coreml import check_torch

    assert check_torch() == []
    monkeypatch.setattr("torch.__version__", version)
    if refused:
        with pytest.raises(InputError, match=r"torch 2\.7\.1\+cpu is too old.*2\.8 is the oldest, 2\.13 is tested"):
            check_torch()
    else:
        assert "torch 2.14.0 is not tested with coremltools, 2.13 is" in check_torch()[0]


@pytest.mark.slow
def test_metadata_and_warnings_reach_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import logging
    import warnings

    import coremltools
    from coremltools.proto import Model_pb2

    from pom_edge.runtimes.mil_program import model_file

    real = coremltools.convert

    def convert(*args: Any, **kwargs: Any) -> Any:
        warnings.warn("overflow encountered in cast", RuntimeWarning, stacklevel=1)
        warnings.warn("old call", DeprecationWarning, stacklevel=1)
        logging.getLogger("coremltools").warning("Saving value type of int64\n into a builtin type of int32")
        return real(*args, **kwargs)

    monkeypatch.setattr(coremltools, "convert", convert)
    model, example, _ = _model("encoder")
    out = tmp_path / "a.pom"
    report = export_bundle(model, "coreml", example_inputs=example, out=out, author="A. Author", license="MIT")
    said = [note for note in report.notes if "coremltools says" in note]
    assert said == [
        f"coreml fp16: coremltools says: {text}"
        for text in ("Saving value type of int64 into a builtin type of int32", "overflow encountered in cast")
    ]
    (artifact,) = Bundle.open(out).manifest.artifacts
    spec = Model_pb2.Model()
    spec.ParseFromString(model_file(out / artifact.file).read_bytes())
    metadata = spec.description.metadata
    assert (metadata.author, metadata.license) == ("A. Author", "MIT")
    assert metadata.shortDescription == "parallel form in fp16, by pom-edge" and metadata.versionString
    assert {"producer", "form", "precision", "config_hash", "version"} <= set(metadata.userDefined)


@pytest.mark.slow
def test_a_package_of_another_model_does_not_open(tmp_path: Path) -> None:
    import shutil

    model, example, _ = _model("encoder")
    torch.nn.init.normal_(next(m for m in model.modules() if isinstance(m, PoM)).po_coeff)
    for name in ("a", "b"):
        export_bundle(model, "coreml", "fp32", example_inputs=example, out=tmp_path / f"{name}.pom")
        with torch.no_grad():
            next(model.parameters()).mul_(2)
    package = Path("parallel.fp32.mlpackage")
    shutil.rmtree(tmp_path / "a.pom" / package)
    shutil.copytree(tmp_path / "b.pom" / package, tmp_path / "a.pom" / package)
    result = CliRunner().invoke(app, ["check", str(tmp_path / "a.pom"), "--json"])
    assert result.exit_code == 2 and "parallel.fp32.mlpackage" in json.loads(result.stdout)["error"]
    with pytest.raises(BundleError, match=r"parallel\.fp32\.mlpackage"):
        open_session(tmp_path / "a.pom")


@pytest.mark.slow
def test_a_program_of_a_fixed_batch_keeps_it(tmp_path: Path) -> None:
    model, _, _ = _model("encoder")
    program = torch.export.export(model.eval(), (torch.randn(2, 12, 12),))
    torch.export.save(program, tmp_path / "a.pt2")
    flags = ["--target", "coreml", "--out", str(tmp_path / "a.pom"), "--json"]
    result = CliRunner().invoke(app, ["export", str(tmp_path / "a.pt2"), *flags], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    (artifact,) = Bundle.open(tmp_path / "a.pom").manifest.artifacts
    assert artifact.inputs[0].shape == [2, 12, 12]
