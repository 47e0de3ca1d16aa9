"""Engines really built, on the CPU alone: TensorRT-RTX needs neither GPU nor driver for that. What TensorRT itself would add is
held as far as it goes without it: calls (tests/test_tensorrt_api.py), messages, exit codes."""

from __future__ import annotations

import dataclasses
import errno
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from safetensors import safe_open
from typer.testing import CliRunner

from pom_edge import compiling, pipeline
from pom_edge.bundle import Bundle
from pom_edge.cli import app
from pom_edge.compiling import EngineOptions, compile_bundle
from pom_edge.engines import after_export
from pom_edge.errors import BundleError, GateError, InputError, MissingToolError
from pom_edge.export import engine_process, tensorrt_engine
from pom_edge.export.engine_census import gemm_census
from pom_edge.export.engine_process import build_in_process
from pom_edge.export.onnx_graph import Graph
from pom_edge.export.tensorrt_engine import EngineJob, explain_failure
from pom_edge.export.tensorrt_lint import find_illegal
from pom_edge.models import ModelConfig, build_model
from pom_edge.pipeline import ExportOptions, export_bundle, export_file
from pom_edge.quantize.weights import weight_only
from pom_edge.runtimes import check_bundle
from pom_edge.runtimes.cuda_device import GpuState
from tests.bundles import make_bundle
from tests.engines import Graphs, edit_manifest, small_bundle, write_graphs
from tests.golden import FOLDER, read

ROOT = Path(__file__).parents[2]
rtx = pytest.mark.skipif(
    compiling.find_spec("tensorrt_rtx") is None, reason="tensorrt_rtx has wheels for x86-64 Linux and Windows"
)


def _no_step(_: str) -> None:
    return None


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Never changed by a test."""
    return small_bundle(tmp_path_factory.mktemp("source"))


@pytest.fixture
def small(source: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(source, tmp_path / "small.pom"))


def _export(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["export", *map(str, arguments)])


@rtx
@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{}, {"tokens": "1:16:512", "batch": "1:1:4"}], ids=["static", "dynamic"])
def test_every_precision_is_built_in_place(small: Path, sizes: dict[str, str]) -> None:
    before = {path.name: path.read_bytes() for path in small.glob("*.onnx")}
    options = EngineOptions(("fp32", "fp16", "int8"), **sizes)  # type: ignore[arg-type]
    made = compile_bundle(small, ["rtx"], options, _no_step)
    assert not made.missing and [each.precision for each in made.artifacts] == ["fp32", "fp16", "int8"]
    opened = Bundle.open(small)  # hashes, the manifest's own included
    assert {path.name: path.read_bytes() for path in small.glob("*.onnx")} == before
    engines = {each.precision: each for each in opened.manifest.artifacts if each.target == "rtx"}
    assert {name: max(each.census, key=lambda key: each.census[key]) for name, each in engines.items()} == {
        "fp32": "float32",
        "fp16": "float16",
        "int8": "int8",
    }
    for each in engines.values():
        assert (
            each.engine is not None
            and each.engine["typing"] == "strong"
            and each.engine["compute_capabilities"] == ["86", "89"]
        )
        assert each.verified == "built, not run" and each.parity is None
        assert "/" not in str(each.engine["library"]), "no local path inside"
        x = next(spec for spec in each.inputs if spec.name == "x")
        assert x.shape == (["batch", "tokens", 12] if sizes else [1, 16, 12])
        assert x.bounds == ({"batch": (1, 4), "tokens": (1, 512)} if sizes else {})
        assert (small / each.file).read_bytes()[:4] != b"", each.file
    assert len(opened.manifest.artifacts) == 6 and len({each.file for each in opened.manifest.artifacts}) == 6


@rtx
@pytest.mark.slow
def test_from_model_to_engine(tmp_path: Path) -> None:
    """The sentence that people type, on the demo: FP16 by default, an engine beside its graph, exit 0."""
    out, model = tmp_path / "digits.pom", ROOT / "demos" / "digits" / "model.pt"
    result = _export(model, "--target", "rtx", "--out", out, "--json", "--compute-capability", "8.9")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    graph, engine = report["artifacts"]
    assert (graph["target"], graph["precision"], engine["target"], engine["precision"]) == ("onnx", "fp16", "rtx", "fp16")
    assert engine["file"] == "parallel.fp16.rtx-sm89.engine" and (out / engine["file"]).stat().st_size == engine["bytes"]
    assert engine["verified"] == "built, not run" and engine["parity"] is None and report["missing"] == []


@rtx
@pytest.mark.slow
def test_the_digits_model_in_every_precision(tmp_path: Path) -> None:
    from demos.digits.images import load_digits, model_input
    from pom_edge import load

    x = model_input(load_digits(ROOT / "demos" / "digits" / "test_images.npz").images)[:32]
    graphs = write_graphs(load(ROOT / "demos" / "digits" / "model.pt"), {"x": torch.from_numpy(x)}, tmp_path)
    for sizes in ({"batch": (1, 1, 1)}, {"batch": (1, 1, 8)}):
        _build_all(graphs, sizes, tmp_path)


@rtx
@pytest.mark.slow
def test_graph_and_engine_of_a_recurrent_model_share_a_bundle(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = build_model(ModelConfig(kind="lm", vocab_size=20, dim=16, depth=1))
    report = export_bundle(model, ["onnx", "rtx"], ["fp32", "fp16"], form="recurrent", out=tmp_path / "text.pom")
    opened = Bundle.open(report.bundle)
    assert [(each.target, each.precision, each.form) for each in opened.manifest.artifacts] == [
        (target, precision, "recurrent") for target in ("onnx", "rtx") for precision in ("fp32", "fp16")
    ]
    engine = opened.manifest.artifacts[-1]
    assert engine.token_axes and next(spec for spec in engine.inputs if spec.name == "state.count").shape == [1]
    assert next(spec for spec in engine.inputs if spec.name == "x").bounds["tokens"][0] == 1
    made = compile_bundle(report.bundle, ["rtx"], EngineOptions(("fp16",), tokens=1, overwrite=True), _no_step)
    assert next(spec for spec in made.artifacts[0].inputs if spec.name == "x").shape == [1, 1]
    assert check_bundle(report.bundle, artifact="recurrent.fp16.onnx").passed, "the graphs run as before"


@rtx
@pytest.mark.slow
def test_graphs_and_engines_of_a_streamed_encoder_share_a_bundle(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = build_model(ModelConfig(kind="encoder", dim=16, depth=1, input_dim=6, n_sel_heads=2))
    options: dict[str, Any] = {"form": "streamed", "chunk": 8, "compute_capability": ["86"], "calibration": [_tokens(4, 16)]}
    precisions = ["fp32", "fp16", "int8"]
    report = export_bundle(model, ["onnx", "rtx"], precisions, example_inputs=_tokens(1, 12), out=tmp_path / "s.pom", **options)
    artifacts = Bundle.open(report.bundle).manifest.artifacts
    assert [(each.target, each.precision) for each in artifacts] == [
        (target, precision) for target in ("onnx", "rtx") for precision in precisions
    ]
    for engine in artifacts[3:]:
        assert engine.stream is not None and [each.file for each in engine.stream.passes] == engine.files
        assert engine.files == [
            f"streamed.{engine.precision}.rtx-sm86/pass-{index}.engine" for index in range(len(engine.files))
        ]
        assert len(engine.files) >= 2 and all((report.bundle / file).stat().st_size > 0 for file in engine.files)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s.pom"], "nothing is left beside it"


def _tokens(batch: int, tokens: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(batch, tokens, 6, generator=torch.Generator().manual_seed(tokens))}


def test_an_engine_that_fails_leaves_the_bundle_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graphs of the new export are made by then, and must not take the place of the old bundle."""
    torch.manual_seed(0)
    model = build_model(ModelConfig(kind="encoder", dim=16, depth=1, input_dim=6, n_sel_heads=2))
    out = tmp_path / "a.pom"
    make_bundle(out)
    before = (out / "manifest.json").read_bytes()

    def refuse(job: EngineJob, say: Any) -> dict[str, Any]:
        raise GateError("TensorRT-RTX built nothing")

    monkeypatch.setattr(compiling, "build_in_process", refuse)
    monkeypatch.setattr(compiling, "find_spec", lambda name: object())
    with pytest.raises(
        GateError, match=r"built nothing\na\.pom is as it was\. To keep the graphs .* --target onnx --precision fp16"
    ):
        export_bundle(model, "rtx", example_inputs=_tokens(1, 12), out=out, overwrite=True)
    assert (out / "manifest.json").read_bytes() == before and [path.name for path in tmp_path.iterdir()] == ["a.pom"]

    def interrupt(job: EngineJob, say: Any) -> dict[str, Any]:
        raise KeyboardInterrupt

    monkeypatch.setattr(compiling, "build_in_process", interrupt)
    with pytest.raises(KeyboardInterrupt):
        export_bundle(model, "rtx", example_inputs=_tokens(1, 12), out=tmp_path / "fresh.pom")
    assert [path.name for path in tmp_path.iterdir()] == ["a.pom"], "`interrupted; nothing was changed` is true"
    monkeypatch.setattr(compiling, "find_spec", lambda name: None)
    report = export_bundle(model, "rtx", example_inputs=_tokens(1, 12), out=out, overwrite=True)
    assert report.missing[0]["run"] == "pip install 'pom-edge[rtx]' && pom-export a.pom --target rtx --precision fp16"
    assert [each.precision for each in Bundle.open(report.bundle).manifest.artifacts] == ["fp16"] and report.bundle == out
    assert [path.name for path in tmp_path.iterdir()] == ["a.pom"], "complete up to the engine, and nothing beside it"


STATIC = {"batch": (1, 1, 1), "tokens": (64, 64, 64)}
DYNAMIC = {"batch": (1, 1, 8), "tokens": (1, 64, 512)}
STEP = {"batch": (1, 1, 1), "tokens": (1, 1, 1)}
CHUNKS = {"batch": (1, 1, 4), "tokens": (1, 1, 64)}
GEMMS = {"fp32": "float32", "fp16": "float16", "int8": "int8"}  # what most GEMMs compute in


def _build_all(graphs: Graphs, sizes: dict[str, tuple[int, int, int]], folder: Path) -> dict[str, dict[str, Any]]:
    """Facts by precision."""
    found = {}
    for precision, file in graphs.files.items():
        engine = folder / f"{precision}.engine"
        job = EngineJob("rtx", str(file), str(engine), precision, profile=graphs.profile(sizes), compute_capabilities=("89",))
        found[precision] = build_in_process(job)
        assert engine.stat().st_size == found[precision]["bytes"] and not found[precision]["warnings"]
    assert {name: max(facts["census"], key=facts["census"].__getitem__) for name, facts in found.items()} == GEMMS
    return found


@rtx
@pytest.mark.slow
def test_a_deep_encoder(tmp_path: Path) -> None:
    """12 blocks, d = 384: every precision, fixed and free shapes, in less than 1 GiB each."""
    torch.manual_seed(0)
    model = build_model(ModelConfig(kind="encoder", dim=384, depth=12, input_dim=64, n_sel_heads=6))
    graphs = write_graphs(model, {"x": torch.randn(2, 64, 64)}, tmp_path)
    for sizes in (STATIC, DYNAMIC):
        facts = _build_all(graphs, sizes, tmp_path)
        assert all(each["layers"] > 100 and each["peak_bytes"] < 1 << 30 for each in facts.values())
        assert facts["int8"]["bytes"] < facts["fp16"]["bytes"] < facts["fp32"]["bytes"]


@rtx
@pytest.mark.slow
def test_the_language_model_in_every_precision(tmp_path: Path) -> None:
    """Recurrent: single steps, and chunks of 1 to 64 tokens."""
    from pom_edge import load

    model = load(ROOT / "demos" / "text" / "model.pt")
    graphs = write_graphs(model, {"x": torch.randint(0, 60, (2, 24))}, tmp_path, "recurrent")
    for sizes in (STEP, CHUNKS):
        _build_all(graphs, sizes, tmp_path)


GOLDEN_SAMPLE = [  # every mode with every kind of positions that it was recorded with
    "037-pom-none-d1-k2-g1-h0",
    "004-rope1d-none-d4-k3-g2-h8",
    "055-rope2d-none-d4-k3-g4-h1",
    "018-pom-padding-d4-k2-g1-h4",
    "033-rope1d-padding-d2-k1-g1-h2",
    "041-rope2d-padding-d4-k2-g1-h4",
    "006-pom-causal-d3-k2-g4-h1",
    "044-rope1d-causal-d1-k3-g4-h4",
    "008-rope2d-causal-d1-k4-g1-h8",
    "024-pom-cross-d4-k3-g2-h2",
    "039-rope1d-cross-d4-k1-g1-h4",
    "014-pom-cross_mask-d3-k2-g2-h8",
]


@rtx
@pytest.mark.slow
@pytest.mark.parametrize("name", GOLDEN_SAMPLE)
def test_published_layers(name: str, tmp_path: Path) -> None:
    """Two recordings of each mode: FP32, FP16 and INT8 of fixed size, and one of the three with a free batch and length."""
    case = read(name).case
    with safe_open(FOLDER / f"{name}.safetensors", "pt") as file:  # with its rotary tables
        keys = [key for key in file.keys() if key.startswith("param.")]  # noqa: SIM118 - safe_open is no dict
        torch.save({key.removeprefix("param."): file.get_tensor(key) for key in keys}, tmp_path / "layer.pt")
    inputs = {key: value.astype(np.float32) if key == "mask" else value for key, value in case.inputs.items()}
    example = str(tmp_path / "example.npz")
    np.savez(example, **inputs)
    options = ExportOptions(
        ("rtx",), tuple(GEMMS), mask="causal" if case.causal else "none", example=example, calibration=example
    )
    report = export_file(tmp_path / "layer.pt", options)
    made = [artifact for artifact in report.artifacts if artifact.target == "rtx"]
    assert [artifact.precision for artifact in made] == list(GEMMS) and report.missing == []
    precision = list(GEMMS)[GOLDEN_SAMPLE.index(name) % 3]
    asked = EngineOptions((precision,), batch="1:2:4", tokens="1:8:32", overwrite=True)
    free = compile_bundle(report.bundle, ["rtx"], asked, _no_step)
    (engine,) = free.artifacts
    assert engine.inputs[0].bounds["tokens"] == (1, 32) and engine.inputs[0].bounds["batch"] == (1, 4)


@rtx
def test_parser_errors_name_node_and_module(small: Path, tmp_path: Path) -> None:
    """Two operators that no TensorRT has, planted in a real graph."""
    model = onnx.load(str(small / "parallel.fp32.onnx"))
    node = next(each for each in model.graph.node if each.op_type == "MatMul" and each.name.startswith("blocks.1"))
    node.op_type, node.domain = "Bernoulli", ""
    del node.input[1:]
    onnx.save(model, str(tmp_path / "bad.onnx"))
    with pytest.raises(GateError) as caught:
        build_in_process(EngineJob("rtx", str(tmp_path / "bad.onnx"), str(tmp_path / "e"), "fp32"))
    message = str(caught.value)
    assert "TensorRT-RTX 1." in message and "does not take bad.onnx" in message
    assert node.name in message and "Bernoulli" in message and f"in module {node.name.rpartition('/')[0]}" in message
    assert not (tmp_path / "e").exists()


@rtx
def test_a_precision_that_is_not_there_is_an_error(small: Path, tmp_path: Path) -> None:
    shape = {"x": ([1, 16, 12],) * 3, "mask": ([1, 16],) * 3}
    with pytest.raises(GateError, match="int8 was asked for, and the network .* computes its GEMMs in float32 100%"):
        build_in_process(EngineJob("rtx", str(small / "parallel.fp32.onnx"), str(tmp_path / "e"), "int8", profile=shape))


@rtx
@pytest.mark.parametrize("kind", [np.float32, np.float16])
def test_blocks_of_int4_on_the_left_build(kind: type, tmp_path: Path) -> None:
    """TensorRT-RTX 1.7.1 ends with SIGSEGV without the Cast that `quantize.weights` writes."""
    element = helper.np_dtype_to_tensor_dtype(np.dtype(kind))
    weight = numpy_helper.from_array(np.random.default_rng(0).standard_normal((128, 64)).astype(kind), "w")
    x, y = (helper.make_tensor_value_info(name, element, [1, rows, 49]) for name, rows in (("x", 64), ("y", 128)))
    graph = helper.make_graph([helper.make_node("MatMul", ["w", "x"], ["y"], name="mix/MatMul_0")], "g", [x], [y], [weight])
    model = ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10))
    weight_only(model, 4)
    ir.save(model, tmp_path / "a.onnx")
    facts = build_in_process(
        EngineJob("rtx", str(tmp_path / "a.onnx"), str(tmp_path / "e"), "w4", compute_capabilities=("89",))
    )
    assert facts["census"] == {"int4 weights": 1.0}


@rtx
def test_what_is_refused_leaves_the_bundle(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it is listed in tests/core/test_engine_options.py."""
    monkeypatch.setattr(compiling, "find_gpus", lambda: GpuState([], None, "none"))
    with pytest.raises(InputError, match="does not build for SM 87"):
        compile_bundle(small, ["rtx"], EngineOptions(("fp16",), compute_capability=["8.7"]), _no_step)
    missing = compile_bundle(small, ["rtx"], EngineOptions(("fp16",), refit=True), _no_step).missing
    assert missing[0]["reason"].startswith("--refit: TensorRT-RTX needs a GPU") and "--refit" in missing[0]["run"]
    assert [each.target for each in Bundle.open(small).manifest.artifacts] == ["onnx"] * 3


def test_without_tensorrt_the_bundle_is_complete_up_to_there(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "find_spec", lambda name: None)
    for target, install in (("trt", ""), ("rtx", "pip install 'pom-edge[rtx]' && ")):
        result = _export(small, "--target", target, "--tokens", "1:16:64", "--json")
        assert result.exit_code == 3, result.output
        (entry,) = json.loads(result.stdout)["missing"]
        assert entry["target"] == target and "not installed here" in entry["reason"]
        assert entry["run"] == f"{install}pom-export small.pom --target {target} --precision fp16 --tokens 1:16:64"
    assert Bundle.open(small).manifest.artifacts[-1].target == "onnx"


def test_tensorrt_without_a_gpu_is_missing_too(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package is there, and the process that builds finds no GPU."""
    monkeypatch.setattr(compiling, "find_spec", lambda name: object())

    def no_gpu(job: EngineJob, say: Any) -> dict[str, Any]:
        raise MissingToolError("TensorRT is installed, but there is no GPU to build for: no NVIDIA driver")

    monkeypatch.setattr(compiling, "build_in_process", no_gpu)
    made = compile_bundle(small, ["trt"], EngineOptions(("fp16",)), _no_step)
    assert made.artifacts == [] and "no GPU to build for" in made.missing[0]["reason"]


def test_what_the_inspector_says_and_what_was_opted_into_is_kept(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for a build on a device: what it leaves beside the engine goes into the bundle, and stays there."""
    monkeypatch.setattr(compiling, "find_spec", lambda name: object())
    jobs: list[EngineJob] = []

    def build(job: EngineJob, say: Any) -> dict[str, Any]:
        jobs.append(job)
        Path(job.engine).write_bytes(b"plan")
        Path(job.engine).with_suffix(".layers.json").write_text('{"Layers": []}')
        facts: dict[str, Any] = dict.fromkeys(("compiler", "library", "cuda_driver", "timing_cache"))
        facts |= {"version": "10.3.0", "gpu": {"name": "Orin", "compute_capability": "8.7"}, "compute_capabilities": []}
        return facts | {"typing": "weak", "layers": 1, "census": {}, "seconds": 1.0, "peak_bytes": 0, "warnings": []}

    monkeypatch.setattr(compiling, "build_in_process", build)
    monkeypatch.setattr(compiling, "find_gpus", lambda: GpuState([], None, "none"))
    options = EngineOptions(("fp16",), hardware_compatible=True, workspace=1 << 20)
    (made,) = compile_bundle(small, ["trt"], options, _no_step).artifacts
    assert made.files == ["parallel.fp16.orin-trt10.3.0.engine", "reports/parallel.fp16.orin-trt10.3.0.layers.json"]
    assert made.engine is not None and made.engine["hardware_compatible"] is True and "refit" not in made.engine
    assert jobs[0].workspace == 1 << 20 and jobs[0].hardware_compatible
    compile_bundle(small, ["trt"], EngineOptions(("fp32",)), _no_step)
    assert [(small / file).exists() for file in made.files] == [True, True] and len(Bundle.open(small).manifest.artifacts) == 5


def test_the_budget_bounds_the_memory_of_kernels() -> None:
    options = ExportOptions(memory_budget=1 << 30, tokens="64")
    assert after_export(options, ["rtx"], {"parallel"}).workspace == 1 << 30
    streamed = after_export(dataclasses.replace(options, workspace=1 << 20), ["rtx"], {"streamed"})
    assert streamed.workspace == 1 << 20 and streamed.tokens is None, "passes have one size"


def test_a_missing_precision_gives_the_command(small: Path) -> None:
    result = _export(small, "--target", "trt", "--precision", "bf16")
    assert result.exit_code == 2
    assert "pom-export model.pt --precision bf16 --form parallel --target trt --out small.pom --overwrite" in result.stderr


def test_options_of_an_export_are_refused_for_a_bundle(small: Path, tmp_path: Path) -> None:
    for arguments, message in (
        (["--target", "trt", "--degree", "2"], "--degree belongs to the export of a model"),
        (["--target", "trt", "--out", str(tmp_path / "b.pom")], "gets its engines in place"),
        ([], "is a bundle already"),
        (["--target", "trt", "--optimization-level", "9"], "expected 0 to 5"),
    ):
        result = _export(small, *arguments)
        assert result.exit_code == 2 and message in result.stderr, result.output


def test_a_process_that_dies_is_a_message(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed for want of memory, crashed, or ended without an answer: each is told, and the library's last words with it."""
    job = EngineJob("trt", str(small / "parallel.fp16.onnx"), str(tmp_path / "e"), "fp16")
    for name, code, message in (
        (
            "killed",
            "import os, signal, sys; print('low', file=sys.stderr); os.kill(os.getpid(), signal.SIGKILL)",
            "memory runs out",
        ),
        ("crashed", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", r"crashed while it built \(SIGSEGV\)"),
        ("silent", "print('not JSON'); print('[1]')", "ended with 0 and no answer"),
    ):
        (tmp_path / f"{name}_builder.py").write_text(code)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        with pytest.raises(GateError, match=message) as caught:
            build_in_process(job, module=f"{name}_builder")
        assert name != "killed" or ("--workspace" in str(caught.value) and "low" in str(caught.value))
    with pytest.raises(GateError, match="memory runs out") as caught:
        build_in_process(dataclasses.replace(job, target="rtx"), module="killed_builder")
    assert "timing cache" not in str(caught.value), "TensorRT-RTX has none"
    with pytest.raises((MissingToolError, GateError), match="TensorRT"):
        engine_process.build_in_process(job)  # no tensorrt here: an answer all the same


def test_running_out_of_memory_is_explained() -> None:
    lines = [
        ("WARNING", "Tactic Device request: 143MB Available: 112MB. Device memory is insufficient to use tactic."),
        ("ERROR", "Error Code 10: Internal Error (Could not find any implementation for node {ForeignNode[x]}.)"),
    ]
    message = explain_failure("trt", "10.3.0", lines)
    assert "143MB" in message and "ForeignNode" in message and "swap file instead of zram" in message
    assert "swap" not in explain_failure("trt", "10.3.0", [("ERROR", "something else")])
    assert "JetPack" in explain_failure("trt", "10.13.3", [("ERROR", "Target GPU SM 87 is not supported")])
    rtx_message = explain_failure("rtx", "1.7.1", lines, workspace=2 << 20)
    assert "timing cache" not in rtx_message and "Kernels could take 2.0 MiB (--workspace" in rtx_message


def test_a_full_scratch_folder_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def full(job: EngineJob, say: Any) -> dict[str, Any]:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/tmp/0.engine")

    monkeypatch.setattr(tensorrt_engine, "build_engine", full)
    monkeypatch.setattr(sys, "stdin", io.StringIO(EngineJob("rtx", "a", "/scratch/0.engine", "fp16").to_json()))
    assert tensorrt_engine.main() == 2
    message = json.loads(capsys.readouterr().out)["value"]["message"]
    assert "cannot write /tmp/0.engine: No space left" in message and "built in /scratch: free some space there" in message


def test_findings_of_the_lint_stop_a_build(small: Path) -> None:
    def plant(content: dict[str, Any]) -> None:
        content["artifacts"][1]["tensorrt"]["findings"] = ["trt-types: blocks.0.mixer/Mul_0: Mul mixes FLOAT and FLOAT16"]

    edit_manifest(small, plant)
    result = _export(small, "--target", "rtx")
    assert (
        result.exit_code == 1
        and "TensorRT does not take parallel.fp16.onnx" in result.stderr
        and "blocks.0.mixer/Mul_0" in result.stderr
    )


def test_a_bundle_that_changed_meanwhile_is_left_alone(small: Path, tmp_path: Path) -> None:
    from pom_edge.bundle import extend_bundle

    opened = Bundle.open(small)
    edit_manifest(small, lambda content: content.update(created="2026-02-02T00:00:00+00:00"))
    with pytest.raises(BundleError, match="changed by another process"):
        extend_bundle(opened, [], tmp_path)


def test_weak_typing_is_decided_at_export(source: Path) -> None:
    facts = {each.precision: each.tensorrt for each in Bundle.open(source).manifest.artifacts}
    assert {name: found and found["weak_flags"] for name, found in facts.items()} == {
        "fp32": [],
        "fp16": ["FP16"],
        "int8": ["INT8"],
    }
    assert all(found is not None and found["findings"] == [] and not found["note"] for found in facts.values())


def _graph(nodes: list[Any], constants: dict[str, np.ndarray], opset: int = 18, half: bool = False) -> Graph:
    """y (2, 4) of x (2, 8), and h (2, 8) in FP16."""
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 8])]
    inputs += [helper.make_tensor_value_info("h", TensorProto.FLOAT16, [2, 8])] if half else []
    tensors = [numpy_helper.from_array(value, name) for name, value in constants.items()]
    output = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    model = helper.make_model(
        helper.make_graph(nodes, "g", inputs, output, tensors), opset_imports=[helper.make_opsetid("", opset)]
    )
    model.ir_version = 10
    return Graph(ir.from_proto(model), ["y"])


PLANTED: dict[str, tuple[list[Any], dict[str, np.ndarray], int]] = {
    "trt-operator": ([helper.make_node("Unique", ["x"], ["y"], name="a/N")], {}, 18),
    "trt-types": ([helper.make_node("Add", ["x", "h"], ["y"], name="a/N")], {}, 18),
    "trt-constant": (
        [helper.make_node("Clip", ["x", "m"], ["y"], name="a/N"), helper.make_node("ReduceMin", ["x"], ["m"])],
        {},
        18,
    ),
    "trt-scale-type": (
        [helper.make_node("QuantizeLinear", ["h", "s", "z"], ["y"], name="a/N")],
        {"s": np.array(0.1, np.float16), "z": np.array(0, np.int8)},
        18,
    ),
    "trt-bias": (
        [
            helper.make_node("DequantizeLinear", ["b", "s", "z"], ["bias"]),
            helper.make_node("Gemm", ["x", "w", "bias"], ["y"], name="a/N"),
        ],
        {
            "b": np.ones(4, np.int8),
            "s": np.array(0.1, np.float32),
            "z": np.array(0, np.int8),
            "w": np.ones((8, 4), np.float32),
        },
        18,
    ),
    "trt-opset": ([helper.make_node("Relu", ["x"], ["y"], name="a/N")], {}, 8),
    "cumsum": ([helper.make_node("CumSum", ["x", "a"], ["y"], name="a/N")], {"a": np.array(1, np.int64)}, 18),
}  # fmt: skip


@pytest.mark.parametrize("rule", PLANTED)
def test_the_lint_finds_what_is_planted(rule: str) -> None:
    nodes, constants, opset = PLANTED[rule]
    found = find_illegal(_graph(nodes, constants, opset, half=True))
    assert [each.rule for each in found] == [rule], [str(each) for each in found]
    assert rule == "trt-opset" or found[0].where == "a/N"


def test_the_census_reads_operands_through_reshapes() -> None:
    """Both operands dequantized: INT8. One: INT8 weights. As TensorRT sees it."""

    class Type(str):
        pass

    class Thing:
        def __init__(self, **facts: Any) -> None:
            self.__dict__.update(facts)

    def tensor(name: str, dtype: str) -> Any:
        return Thing(name=name, dtype=Type(f"DataType.{dtype}"))

    def layer(kind: str, inputs: list[Any], output: Any) -> Any:
        return Thing(
            type=Type(f"LayerType.{kind}"),
            num_inputs=len(inputs),
            num_outputs=1,
            get_input=lambda i: inputs[i],
            get_output=lambda i: output,
        )

    q, w = tensor("q", "INT8"), tensor("w", "INT8")
    a, b, c, y, z = (tensor(name, "HALF") for name in "abcyz")
    layers = [
        layer("DEQUANTIZE", [q], a),
        layer("DEQUANTIZE", [w], b),
        layer("SHUFFLE", [b], c),
        layer("MATRIX_MULTIPLY", [a, c], y),
        layer("MATRIX_MULTIPLY", [y, c], z),
        layer("MATRIX_MULTIPLY", [y, z], tensor("o", "HALF")),
    ]
    network = Thing(num_layers=len(layers), get_layer=lambda i: layers[i])
    assert gemm_census(network) == {"float16": 0.3333, "int8": 0.3333, "int8 weights": 0.3333}


def test_the_builder_imports_neither_torch_nor_onnx(tmp_path: Path) -> None:
    modules = "pom_edge.export.tensorrt_engine, pom_edge.compiling, pom_edge.pipeline, pom_edge.runtimes.tensorrt_session"
    code = f"import sys, {modules}; print({{'torch', 'onnx'}} & {{*sys.modules}})"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_engines_default_to_fp16() -> None:
    assert pipeline.ExportOptions().precisions_of("onnx") == ("fp32",)
    assert pipeline.ExportOptions().precisions_of("rtx") == ("fp16",)
    assert pipeline.ExportOptions().precisions_of("onnx", "trt", "coreml") == ("fp32", "fp16")
    assert pipeline.ExportOptions(precisions=("int8",)).precisions_of("onnx", "trt") == ("int8",)
