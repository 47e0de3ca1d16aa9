"""pom-edge bench: rows for what runs, floors that can be missed, operations that agree with an independent count."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from typer.testing import CliRunner

from pom_edge.bundle import Bundle, TensorSpec
from pom_edge.cli import app
from pom_edge.errors import InputError
from pom_edge.models import ModelConfig, build_model
from pom_edge.pipeline import export_bundle
from pom_edge.runtimes.bench import BenchReport, LeftOut, _default_lengths, _missed, bench, gemm_operations
from pom_edge.runtimes.timing import p90
from tests.bundles import make_bundle


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = build_model(ModelConfig(kind="encoder", dim=32, depth=2, input_dim=12, n_sel_heads=4))
    out = tmp_path_factory.mktemp("bench") / "m.pom"
    example = {"x": torch.randn(2, 24, 12)}
    return export_bundle(model, precision=["fp32", "fp16", "bf16"], example_inputs=example, out=out).bundle


def test_every_artifact_that_runs_has_a_row_for_each_length(bundle: Path) -> None:
    result = CliRunner().invoke(app, ["bench", str(bundle), "--tokens", "16,64", "--rounds", "3", "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert [(row["precision"], row["tokens"]) for row in report["rows"]] == [
        ("fp32", 16), ("fp16", 16), ("fp32", 64), ("fp16", 64)
    ]  # fmt: skip
    for row in report["rows"]:
        assert {"runtime", "file", "precision", "tokens", "batch", "median_ms", "p90_ms", "peak_bytes"} <= row.keys()
        assert (
            0 < row["median_ms"] <= row["p90_ms"]
            and row["gemm_share"] > 0
            and abs(row["gemm_share"] * row["against_gemm"] - 1) < 0.05
            and row["snr_db"] > 45
        )
        assert (row["against_fp32"] is None) == (row["precision"] == "fp32")
    assert int(report["machine"]["cores"]) >= 1 and report["gflops"] > 0


def test_default_lengths_are_what_artifacts_take(tmp_path: Path) -> None:
    make_bundle(tmp_path / "a.pom")
    (artifact,) = Bundle.open(tmp_path / "a.pom").manifest.artifacts
    assert [row.tokens for row in bench(tmp_path / "a.pom", rounds=1).rows] == [64], "its longest"
    image = artifact.model_copy(update={"tokens": 49})
    free = artifact.model_copy(update={"inputs": [artifact.inputs[0].model_copy(update={"bounds": {}})]})
    assert _default_lengths([image]) == [49] and _default_lengths([image, free]) == [49, 256, 1024, 4096]
    fixed = artifact.model_copy(update={"inputs": [TensorSpec(name="x", dtype="float32", shape=["batch", 12, 6])]})
    assert _default_lengths([fixed]) == [12]


def test_p90_is_never_below_the_median() -> None:
    assert [p90([3.0, 1.0][:n]) for n in (1, 2)] == [3.0, 3.0]
    assert p90([float(n) for n in range(1, 11)]) == 9.0 and p90([float(n) for n in range(1, 16)]) == 14.0


def test_a_ratio_needs_something_to_compare_with(bundle: Path) -> None:
    rows = bench(bundle, [16], rounds=1).rows
    full, half = (next(row for row in rows if row.precision == precision) for precision in ("fp32", "fp16"))
    alone = dataclasses.replace(half, file="streamed.fp16", form="streamed", against_fp32=None)
    assert _missed([full, half], {"ratio": 1e-6}) == []
    assert "nothing but FP32" in _missed([full], {"ratio": 1e-6})[0]
    (sentence,) = _missed([full, half, alone], {"ratio": 1e-6})
    assert sentence.startswith("streamed.fp16 at 16 tokens: ratio: there is no FP32 artifact of its form")


def test_floors(bundle: Path) -> None:
    assert bench(bundle, [16], rounds=2, floor={"snr": 45, "ratio": 1e-6}).passed
    report = bench(bundle, [16], rounds=2, floor={"snr": 100, "ratio": 1e6})
    assert not report.passed
    assert [sentence.split(" at ")[0] for sentence in report.failed] == ["parallel.fp16.onnx"] * 2
    result = CliRunner().invoke(app, ["bench", str(bundle), "--tokens", "16", "--rounds", "1", "--floor", "snr=100"])
    assert result.exit_code == 1 and "below the floor: parallel.fp16.onnx at 16 tokens: snr" in result.output


def test_operations_are_those_of_the_graphs_products(bundle: Path) -> None:
    """By onnx's own shape inference at fixed sizes, not by the formulas."""
    artifact = Bundle.open(bundle).manifest.artifacts[0]
    model = onnx.load(str(bundle / artifact.file))
    del model.graph.value_info[:]
    for value, dims in ((model.graph.input[0], (3, 40, 12)),):
        for dim, size in zip(value.type.tensor_type.shape.dim, dims, strict=True):
            dim.dim_value = size
    for output in model.graph.output:
        for dim in output.type.tensor_type.shape.dim:
            dim.Clear()
    inferred = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in (*inferred.value_info, *inferred.input)}
    shapes |= {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in inferred.output}
    shapes |= {w.name: list(w.dims) for w in model.graph.initializer}
    total = 0
    for node in model.graph.node:
        if node.op_type == "MatMul":
            product = 2 * shapes[node.input[0]][-1]
            for size in shapes[node.output[0]]:
                product *= size
            total += product
    assert total > 0 and gemm_operations(artifact, 40, 3) == total


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "0"], "expected at least 1 of each"),
        (["--tokens", "ten"], "--tokens holds 'ten'"),
        (["--floor", "speed=2"], "--floor speed is unknown; expected snr=DB, ratio=TIMES"),
        (["--floor", "snr"], "--floor is 'snr'; expected"),
        (["--floor", ""], "--floor is ''; expected"),
        (["--floor", "snr=1,snr=2"], "each once"),
        (["--floor", "snr=nan"], "below which nothing is"),
        (["--runtime", "foo"], "unknown runtime 'foo'; this version has ort"),
        (["--floor", "snr=high"], "--floor snr holds 'high'"),
    ],
)
def test_bad_input(bundle: Path, arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["bench", str(bundle), *arguments])
    assert result.exit_code == 2 and message in result.output


def test_no_artifact_of_that_length(tmp_path: Path) -> None:
    model = build_model(ModelConfig(kind="encoder", dim=8, depth=1, input_dim=4))
    report = export_bundle(model, example_inputs={"x": torch.randn(2, 8, 4)}, tokens=8, out=tmp_path / "m.pom")
    with pytest.raises(
        InputError, match=r"no artifact of m.pom runs here with 16 tokens and batch 1; what it takes by itself: --tokens \d+"
    ):
        bench(report, [16])


def test_the_batch_is_the_one_that_artifacts_have(tmp_path: Path) -> None:
    model = build_model(ModelConfig(kind="encoder", dim=8, depth=1, input_dim=4))
    report = export_bundle(model, example_inputs={"x": torch.randn(2, 8, 4)}, tokens=8, batch=3, out=tmp_path / "m.pom")
    assert [(row.tokens, row.batch) for row in bench(report, rounds=1).rows] == [(8, 3)]
    with pytest.raises(
        InputError, match=r"batch 2; .* --tokens 8 --batch 3 \(parallel.fp32.onnx takes batches of 3, found --batch 2\)"
    ):
        bench(report, batch=2)


def test_what_is_not_timed_is_said_and_why(bundle: Path, tmp_path: Path) -> None:
    """Of every artifact: a length that it does not take, and one that this runtime does not run at all."""
    make_bundle(tmp_path / "a.pom")  # takes 1 to 64 tokens
    arguments = ["bench", str(tmp_path / "a.pom"), "--tokens", "64,100,200", "--rounds", "1", "--floor", "ratio=1", "--json"]
    result = CliRunner().invoke(app, arguments)
    report = json.loads(result.stdout)
    assert [row["tokens"] for row in report["rows"]] == [64]
    assert [(each["file"], each["tokens"]) for each in report["left_out"]] == [("parallel.fp32.onnx", n) for n in (100, 200)]
    assert all("64" in each["why"] for each in report["left_out"])
    assert "note: parallel.fp32.onnx was not timed at 100 tokens: " in result.stderr
    assert result.exit_code == 1 and report["failed"] != [], "a floor is held on what ran, and the notes are printed too"
    (bf16,) = bench(bundle, [16], rounds=1).left_out
    assert (bf16.file, bf16.tokens) == ("parallel.bf16.onnx", None) and "not run" in bf16.why


def test_one_note_for_one_reason() -> None:
    left_out = [LeftOut("a", 7, "no"), LeftOut("b", None, "never"), LeftOut("a", 1024, "no"), LeftOut("a", 2, "why")]
    assert BenchReport({}, None, [], [], left_out=[LeftOut("c", 1, "no")]).notes == ["c was not timed at 1 token: no"]
    assert BenchReport({}, None, [], [], left_out=left_out).notes == [
        "a was not timed at 7 and 1,024 tokens: no", "b was not timed: never", "a was not timed at 2 tokens: why"
    ]  # fmt: skip


def test_it_says_how_it_was_run(bundle: Path) -> None:
    arguments = ["bench", str(bundle), "--tokens", "16", "--rounds", "3", "--threads", "1"]
    settings = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)["settings"]
    versions = {"onnxruntime": onnxruntime.__version__, "numpy": np.__version__}
    assert settings == {
        "runtime": "ort", "threads": 1, "batch": 1, "rounds": 3, "warm_up_rounds": 1, "versions": versions
    }  # fmt: skip
    said = f"3 rounds after 1 round of warm-up, batch 1, 1 thread, onnxruntime {onnxruntime.__version__}, numpy"
    assert said in CliRunner().invoke(app, arguments).stdout


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system does not bind processes to cores")
def test_cores_are_those_that_the_process_may_use() -> None:
    code = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
    code += "from pom_edge.inspection import machine_facts; print(machine_facts()['cores'])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "1\n"
