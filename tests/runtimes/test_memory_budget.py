"""Memory as a contract: sizes as people write them, predictions beside measurements, and limits that hold."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner, Result

from pom_edge import PoM, build_model, export_bundle, open_session
from pom_edge.bundle import MANIFEST, Bundle
from pom_edge.cli import app
from pom_edge.errors import GateError, InputError
from pom_edge.models import ModelConfig
from pom_edge.runtimes.arena import Arena
from pom_edge.runtimes.memory import (
    Prediction,
    SizeError,
    check_budget,
    make_arrays,
    measure_peak,
    parse_size,
    predict,
    predict_run,
)

MIB = 1 << 20
linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="RssAnon is a Linux gauge")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("12", 12), ("12MiB", 12 << 20), ("12MB", 12_000_000), ("1.5 GiB", 3 << 29), ("2kb", 2000), ("1 KiB", 1024), ("7b", 7),
        ("1TB", 10**12),
    ],
)  # fmt: skip
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text, "--budget") == size


@pytest.mark.parametrize("text", ["", "0", "-5MB", "12M", "12Mi", "MB", "12 XB", "1e9", "many"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(InputError, match=r"--budget is .*512MiB \(1024 x 1024\), 512MB \(1000 x 1000\)"):
        parse_size(text, "--budget")


def test_an_arena_joins_and_splits_what_is_freed() -> None:
    arena = Arena()
    one, two = arena.take(1000), arena.take(3000)
    assert arena.total == (1024 + 3072) * 33 // 32  # in steps of 256, with 8 bytes of bookkeeping for each
    arena.give(two)
    assert arena.take(1500)[0] == 1536 and arena.total == 4224  # from the freed piece, which is split
    arena.give(one)
    arena.take(1024)
    assert arena.total == 4224
    arena.take(2000)  # 1536 are left of the second region: too small
    assert arena.total == 4224 + 2112


def test_a_plan_is_run_at_any_size() -> None:
    events = ["+0 4*batch*tokens*8", "+1 4*(tokens//2 + 1)", "-0", "+2 4*batch*tokens*8", "=2 y"]
    arena = Arena()
    held = arena.run(events, {"batch": 2, "tokens": 64})
    taken = (4096 + 256) * 33 // 32
    assert held.keys() == {"y"} and arena.total == taken
    arena.give(held["y"])
    arena.run(events, {"batch": 2, "tokens": 64})
    assert arena.total == taken + 256 * 33 // 32  # "-1" is missing: that piece was never given back


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("bundles")
    encoder = build_model(ModelConfig("encoder", dim=128, depth=2, input_dim=32, n_sel_heads=4))
    inputs = {"x": torch.randn(1, 24, 32)}
    hybrid = build_model(ModelConfig("lm", dim=128, depth=2, vocab_size=64, blocks=("pom", "local"), window=32))

    dense = build_model(ModelConfig("dense", dim=64, depth=1, channels=3, patch_size=3, num_classes=5, rotary="2d"))
    settings = {"patch_size": 4, "image_size": 28, "channels": 1, "num_classes": 10}
    classifier = build_model(ModelConfig("classifier", dim=32, depth=1, **settings))  # type: ignore[arg-type]

    def make(name: str, model: nn.Module, **options: object) -> Path:
        return export_bundle(model, out=folder / f"{name}.pom", **options).bundle  # type: ignore[arg-type]

    return {
        "parallel": make("parallel", encoder, example_inputs=inputs),
        "streamed": make("streamed", encoder, example_inputs=inputs, form="streamed", chunk=2048),
        "recurrent": make("recurrent", PoM(128, 3, 2, n_sel_heads=4), form="recurrent", mask="causal"),
        "causal": make("causal", PoM(128, 3, 2), mask="causal"),
        "hybrid": make("hybrid", hybrid, form="recurrent"),
        "half": make("half", PoM(128, 3, 2, n_sel_heads=4), precision="fp16"),
        "image": make("image", dense, form="streamed", chunk=2048, batch=2),
        "fixed image": make("fixed", dense, example_inputs={"x": torch.randn(1, 3, 192, 192)}),
        "classifier": make("classifier", classifier, form="streamed"),
    }


@linux
@pytest.mark.parametrize(
    ("name", "tokens", "batch"),
    [
        ("parallel", 4096, 1), ("parallel", 16384, 1), ("parallel", 4096, 4), ("causal", 16384, 1), ("causal", 8192, 2),
        ("recurrent", 4096, 2), ("recurrent", 10000, 3), ("hybrid", 2048, 1), ("hybrid", 20000, 1), ("streamed", 32768, 1),
        ("half", 16384, 1), ("image", 9000, 2), ("image", 500, 2), ("fixed image", 4096, 2),
    ],
)  # fmt: skip
def test_predictions_are_near_measurements(bundles: dict[str, Path], name: str, tokens: int, batch: int) -> None:
    path = bundles[name]
    predicted = predict(path, tokens, batch)
    measured = measure_peak(path, None, make_arrays(Bundle.open(path).manifest.artifacts[0], tokens, batch))
    assert measured is not None
    assert measured.activations_bytes > 8 * MIB  # less is near what the interpreter itself takes and gives
    assert abs(predicted.total / measured.total_bytes - 1) < 0.05
    assert abs(predicted.activations / measured.activations_bytes - 1) < 0.05  # 15 % is promised


def test_a_run_of_any_length_is_predicted(bundles: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks beyond those simulated: the same per chunk as a simulation of all of them; and lengths that nothing could hold."""
    (artifact,) = Bundle.open(bundles["recurrent"]).manifest.artifacts
    tokens = 100 * 4096
    short = predict_run(artifact, tokens)[1]
    monkeypatch.setattr("pom_edge.runtimes.memory.SIMULATED", 1000)
    assert predict_run(artifact, tokens)[1] == pytest.approx(short, rel=0.03)
    assert predict_run(artifact, 10**12)[0] == 2 * 10**12 * 128 * 4
    with pytest.raises(InputError, match="expected at most 9223372036854775807"):
        predict_run(artifact, 10**20)


@linux
def test_what_cannot_be_run_here_is_predicted(bundles: dict[str, Path], tmp_path: Path) -> None:
    over = check_budget(bundles["parallel"], 10**12, budget=1 << 30, enforce=True)
    assert not over.passed and over.measured is None and over.enforced is None
    assert over.unmeasured is not None and "PiB" in over.unmeasured
    within = check_budget(bundles["streamed"], 10**12, budget=1 << 30, spill=str(tmp_path))
    assert within.passed and within.measured is None and within.unmeasured is not None
    with pytest.raises(InputError, match="--enforce needs a run, and this one cannot be made here"):
        check_budget(bundles["streamed"], 10**12, budget=1 << 30, spill=str(tmp_path), enforce=True)


@linux
def test_a_limit_kills_what_exceeds_it_and_lets_pass_what_does_not(bundles: dict[str, Path], tmp_path: Path) -> None:
    parallel, streamed = predict(bundles["parallel"], 65536), predict(bundles["streamed"], 65536, spill=True)
    budget = parallel.total // 2
    assert streamed.total < budget
    over = check_budget(bundles["parallel"], 65536, budget=budget, enforce=True)
    assert not over.passed and over.exceeded is not None and over.measured is None
    within = check_budget(bundles["streamed"], 65536, budget=budget, enforce=True, spill=str(tmp_path))
    assert within.passed and within.measured is not None and within.measured.total_bytes <= budget
    assert not list(tmp_path.iterdir())


@linux
def test_a_fixed_number_of_tokens_is_the_only_one(bundles: dict[str, Path]) -> None:
    """28 x 28 pixels in patches of 4: 49, also as the chunk, and whatever is asked for."""
    (artifact,) = Bundle.open(bundles["classifier"]).manifest.artifacts
    assert artifact.tokens == 49 and artifact.stream is not None and artifact.stream.chunk == 49
    assert predict_run(artifact, None) == predict_run(artifact, 49)
    (image,) = Bundle.open(bundles["fixed image"]).manifest.artifacts
    for found, count in ((artifact, 49), (image, 4096)):
        with pytest.raises(SizeError, match=f"--tokens is 10000; .* has {count} tokens in every run"):
            predict_run(found, 10000)
    with pytest.raises(SizeError, match="any length .*--tokens N"):
        predict(bundles["parallel"], None)


def test_a_place_to_spill_into_that_is_none(bundles: dict[str, Path], tmp_path: Path) -> None:
    for act in (
        lambda: check_budget(bundles["streamed"], 100, spill=str(tmp_path / "absent")),
        lambda: open_session(bundles["streamed"], spill=tmp_path / "absent"),
    ):
        with pytest.raises(InputError, match=r"--spill .*absent is not a folder"):
            act()


def test_a_budget_that_is_used_up_before_a_run_begins() -> None:
    predicted = Prediction(30 * MIB, 8 * MIB, 0, 0)
    predicted.check_possible(38 * MIB)
    with pytest.raises(InputError, match=r"39,845,887 B is below what runtime and weights take, 39,845,888 B"):
        predicted.check_possible(38 * MIB - 1)


def test_a_batch_that_the_artifact_does_not_take(bundles: dict[str, Path]) -> None:
    with pytest.raises(InputError, match="takes batches of 1, found --batch 3"):
        check_budget(bundles["streamed"], 100, 3)


@linux
def test_memory_on_the_command_line(bundles: dict[str, Path]) -> None:
    def run(*arguments: str) -> tuple[int, dict[str, object], str]:
        result = CliRunner().invoke(app, ["memory", str(bundles["parallel"]), "--tokens", "1024", *arguments, "--json"])
        return result.exit_code, json.loads(result.stdout), result.stderr

    code, report, _ = run()
    assert code == 0 and report["passed"] and report["form"] == "parallel" and report["budget_bytes"] is None
    assert report["predicted_bytes"].keys() >= {"weights", "activations", "io", "runtime", "total"}  # type: ignore[attr-defined]
    assert report["measured_bytes"].keys() >= {"activations", "total"}  # type: ignore[attr-defined]
    code, report, _ = run("--budget", "40MiB")
    assert code == 1 and not report["passed"] and report["budget_bytes"] == 40 * MIB
    for budget, message in (("12", "budget of 12 B is below what the runtime alone takes"), ("12M", "expected a size")):
        code, report, error = run("--budget", budget)
        assert code == 2 and message in error
    code, report, error = run("--enforce")
    assert code == 2 and "--enforce needs --budget" in error


@linux
def test_measurements_travel_in_the_bundle(bundles: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "copy.pom"
    shutil.copytree(bundles["causal"], path)
    before = json.loads((path / MANIFEST).read_text())

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(app, [*arguments])

    def record(tokens: int) -> None:
        assert run("memory", str(path), "--tokens", str(tokens), "--record").exit_code == 0

    for tokens in (1024, 2048, 1024):
        record(tokens)
    after = json.loads((path / MANIFEST).read_text())
    found = after["measurements"]
    assert [each["tokens"] for each in found] == [2048, 1024]  # the same run again takes the place of the first
    assert found[0]["runtime"].startswith("onnxruntime ") and found[0]["machine"]["cores"]
    assert found[0]["measured"]["total"] > found[1]["measured"]["total"] > 0
    changed = {"measurements", "digest"}
    assert {k: v for k, v in after.items() if k not in changed} == {k: v for k, v in before.items() if k not in changed}
    assert sorted(file.name for file in path.iterdir()) == sorted(file.name for file in bundles["causal"].iterdir())
    assert json.loads(run("info", str(path), "--json").stdout)["measurements"] == found
    assert "measured memory" in run("info", str(path)).stdout
    text = (path / MANIFEST).read_text()
    (path / MANIFEST).write_text(text.replace(f'"total": {found[0]["measured"]["total"]}', '"total": 1'))
    result = run("info", str(path))
    assert result.exit_code == 2 and "was changed after the export" in result.stderr
    refused = run("memory", str(bundles["parallel"]), "--tokens", str(10**12), "--record")
    assert refused.exit_code == 2 and "has nothing to record" in refused.stderr


@linux
def test_an_export_within_a_budget(tmp_path: Path) -> None:
    """The fastest form that fits: parallel, else streamed; else the smallest budget is named."""
    torch.manual_seed(0)
    model = nn.Sequential(PoM(64, 2, 4), PoM(64, 2, 4))
    options = {"example_inputs": {"input": torch.randn(1, 24, 64)}, "tokens": 32768, "batch": 1}
    report = export_bundle(model, out=tmp_path / "a.pom", memory_budget=1 << 30, **options)
    assert report.artifacts[0].form == "parallel" and any("memory predicted" in note for note in report.notes)
    steps: list[str] = []
    report = export_bundle(model, out=tmp_path / "b.pom", memory_budget=128 * MIB, progress=steps.append, **options)
    assert report.artifacts[0].form == "streamed"
    assert steps.count("trace and translate") == 2 and steps.count("record PyTorch's answers") == 1  # parallel: predicted only
    peak = measure_peak(report.bundle, None, {"input": np.zeros((1, 32768, 64), np.float32)})
    assert peak is not None and peak.total_bytes < 128 * MIB
    with pytest.raises(
        GateError, match=r"no form keeps the budget of 44\.0 MiB; the smallest is \d+\.\d MiB: streamed in chunks"
    ):
        export_bundle(model, out=tmp_path / "c.pom", memory_budget=44 * MIB, **options)
    with pytest.raises(InputError, match="the runtime alone takes"):
        export_bundle(model, out=tmp_path / "c.pom", memory_budget=12, **options)
    with pytest.raises(InputError, match="needs --tokens N"):
        export_bundle(model, out=tmp_path / "c.pom", memory_budget=1 << 30, example_inputs=options["example_inputs"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pom", "b.pom"]


@linux
def test_a_form_that_cannot_run_so_many_tokens_is_passed_over(tmp_path: Path) -> None:
    """A dense predictor's parallel form has the example's size; its streamed form takes any."""
    settings = {"dim": 32, "depth": 1, "channels": 3, "patch_size": 4, "num_classes": 5}
    model = build_model(ModelConfig("dense", **settings))  # type: ignore[arg-type]
    report = export_bundle(model, out=tmp_path / "a.pom", memory_budget=200 * MIB, tokens=900)
    assert report.artifacts[0].form == "streamed"
    model = build_model(ModelConfig("classifier", image_size=28, **settings))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="--tokens is 900; .* this model has 49 tokens"):
        export_bundle(model, out=tmp_path / "b.pom", memory_budget=200 * MIB, tokens=900)
