"""Engines beside the graphs of a bundle: one that is damaged, fails, or does not fit stops nothing else, and is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pom_edge import compiling
from pom_edge.bundle import MANIFEST, Bundle
from pom_edge.cli import app
from pom_edge.compiling import EngineOptions, compile_bundle
from pom_edge.errors import BundleError, GateError
from pom_edge.export.tensorrt_engine import EngineJob
from pom_edge.runtimes import check_bundle
from pom_edge.runtimes.engine_file import check_facts
from tests.bundles import make_bundle
from tests.engines import add_engine, edit_manifest


def _run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(map(str, arguments)))
    return result.exit_code, result.stdout, " ".join(result.stderr.split())


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    make_bundle(tmp_path / "a.pom")
    return tmp_path / "a.pom"


def _builds(monkeypatch: pytest.MonkeyPatch, failing: str = "") -> list[EngineJob]:
    """A stand-in for the builder; what it is asked for."""
    jobs: list[EngineJob] = []

    def build(job: EngineJob, say: Any) -> dict[str, Any]:
        jobs.append(job)
        if job.precision == failing:
            raise GateError(f"TensorRT-RTX crashed on {job.precision}")
        Path(job.engine).write_bytes(b"plan")
        facts: dict[str, Any] = dict.fromkeys(("library", "gpu", "cuda_driver"))
        facts |= {"compiler": "TensorRT-RTX", "version": "1.7.1", "compute_capabilities": list(job.compute_capabilities)}
        facts |= {"typing": "strong", "layers": 1, "census": {}, "seconds": 1.0, "peak_bytes": 0, "warnings": []}
        return facts | {"timing_cache": "none"}

    monkeypatch.setattr(compiling, "find_spec", lambda name: object())
    monkeypatch.setattr(compiling, "build_in_process", build)
    return jobs


@pytest.mark.parametrize("damage", [lambda path: path.write_bytes(b"eng"), lambda path: path.unlink()], ids=["cut", "gone"])
def test_a_damaged_engine_stops_nothing_else(damage: Any, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = add_engine(bundle)
    damage(bundle / engine)
    code, out, _ = _run("check", bundle, "--json")
    facts = json.loads(out)
    assert code == 1 and list(facts["damaged"]) == [engine] and facts["artifacts"][0]["passed"], "the graph is checked"
    assert _run("check", bundle, "--artifact", "parallel.fp32.onnx")[0] == 0
    code, _, told = _run("check", bundle, "--runtime", "rtx")
    assert code == 2 and engine in told and "pom-export a.pom --target rtx --precision fp32" in told
    code, out, _ = _run("info", bundle, "--json")
    assert code == 0 and engine in json.loads(out)["artifacts"][1]["damaged"]
    _builds(monkeypatch)
    compile_bundle(bundle, ["rtx"], EngineOptions(("fp32",), compute_capability=("8.6",)), lambda _: None)
    assert list(Bundle.open(bundle).damaged) == [engine], "another engine is added, and this one still told"
    compile_bundle(bundle, ["rtx"], EngineOptions(("fp32",)), lambda _: None)
    assert not Bundle.open(bundle).damaged and (bundle / engine).read_bytes() == b"plan"


def test_a_damaged_graph_is_still_refused(bundle: Path) -> None:
    add_engine(bundle)
    (bundle / "parallel.fp32.onnx").write_bytes(b"")
    with pytest.raises(BundleError, match=r"parallel\.fp32\.onnx has 0 bytes"):
        Bundle.open(bundle)


def test_one_precision_that_fails_leaves_the_others(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def second(content: dict[str, Any]) -> None:  # the same graph under another precision
        content["artifacts"].append({**content["artifacts"][0], "precision": "w4"})

    edit_manifest(bundle, second)
    _builds(monkeypatch, failing="w4")
    with pytest.raises(GateError) as caught:
        compile_bundle(bundle, ["rtx"], EngineOptions(("w4", "fp32")), lambda _: None)
    assert "crashed on w4" in str(caught.value) and "Built and put into a.pom all the same: parallel.fp32.rtx" in str(
        caught.value
    )
    assert [each.precision for each in Bundle.open(bundle).manifest.artifacts if each.engine] == ["fp32"]
    before = (bundle / MANIFEST).read_bytes()
    with pytest.raises(GateError, match="^TensorRT-RTX crashed on w4$"):
        compile_bundle(bundle, ["rtx"], EngineOptions(("fp32", "w4")), lambda _: None, whole=True)
    assert (bundle / MANIFEST).read_bytes() == before


def test_default_shapes_are_those_of_the_export(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit_manifest(bundle, lambda content: content["artifacts"][0]["inputs"][0].update(usual={"tokens": 32}))
    jobs = _builds(monkeypatch)
    (made,) = compile_bundle(bundle, ["rtx"], EngineOptions(("fp32",)), lambda _: None).artifacts
    assert jobs[0].profile == {"x": ([1, 1, 6], [1, 32, 6], [1, 64, 6])}
    assert (
        made.engine is not None and made.engine["shapes"]["tokens"] == [1, 32, 64] and made.inputs[0].shape == [1, "tokens", 6]
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"compiler": "TensorRT"}, "built by TensorRT, and rtx is TensorRT-RTX"),
        ({"version": None}, "does not say which version of TensorRT-RTX built it"),
        ({"source_sha256": "0" * 64}, r"not built from the parallel\.fp32\.onnx that the bundle holds"),
        ({"source_sha256": None}, "not built from"),
        ({"compute_capabilities": None}, "which GPUs"),
        ({"shapes": {"tokens": [64, 1, 1]}}, r"tokens of \[64, 1, 1\] is no MIN, OPT, MAX"),
        ({"shapes": {"tokens": [1, 1, 8]}}, r"'x' and the engine differ in tokens: \(1, 64\) and \[1, 1, 8\]"),
        ({"shapes": None}, "for which shapes"),
    ],
)
def test_facts_that_do_not_fit_are_seen_without_a_gpu(change: dict[str, Any], message: str, bundle: Path) -> None:
    """Its hashes are right: somebody edited the manifest and sealed it, or copied an engine from another bundle."""
    add_engine(bundle)
    edit_manifest(bundle, lambda content: content["artifacts"][1]["engine"].update(change))
    opened = Bundle.open(bundle)
    with pytest.raises(BundleError, match=message) as caught:
        check_facts(opened, opened.manifest.artifacts[1])
    assert "build it again: pom-export a.pom --target rtx --precision fp32" in str(caught.value)
    assert _run("check", bundle, "--runtime", "rtx")[0] == 2


def test_whose_package_is_missing_does_not_stop_the_others(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """BF16 is evaluated with the onnx package, which a device does not have."""
    import sys

    def half(content: dict[str, Any]) -> None:
        content["artifacts"].append({**content["artifacts"][0], "precision": "bf16", "file": "parallel.bf16.onnx"})
        entry = next(each for each in content["files"] if each["path"] == "parallel.fp32.onnx")
        content["files"].append({**entry, "path": "parallel.bf16.onnx"})

    (bundle / "parallel.bf16.onnx").write_bytes((bundle / "parallel.fp32.onnx").read_bytes())
    edit_manifest(bundle, half)
    monkeypatch.setitem(sys.modules, "onnx", None)
    report = check_bundle(bundle)
    assert report.passed and list(report.skipped) == ["parallel.bf16.onnx"] and "onnx is not installed" in str(report.skipped)
    assert _run("check", bundle, "--artifact", "parallel.bf16.onnx")[0] == 2, "what is named is not skipped"


@pytest.mark.parametrize(("runtime", "install"), [("ort", "pip install 'pom-edge[ort]'"), ("ort-trt", "onnxruntime-gpu")])
def test_the_line_that_installs_a_runtime(runtime: str, install: str, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from pom_edge.runtimes import onnxruntime_session

    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    monkeypatch.setattr(onnxruntime_session, "find_spec", lambda name: None)
    code, _, told = _run("check", bundle, "--runtime", runtime)
    assert code == 2 and install in told and "[export]" not in told


def test_golden_data_can_be_read_by_whoever_reads_the_rest(bundle: Path) -> None:
    assert (bundle / "golden.safetensors").stat().st_mode == (bundle / "parallel.fp32.onnx").stat().st_mode
