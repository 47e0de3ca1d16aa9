"""Memory as a contract: sizes as people write them, predictions beside measurements, and limits that hold."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from pom_edge import PoM, build_model, export_bundle
from pom_edge.bundle import Bundle
from pom_edge.cli import app
from pom_edge.errors import GateError, InputError
from pom_edge.models import ModelConfig
from pom_edge.runtimes.memory import Arena, check_budget, make_arrays, measure_peak, parse_size, predict

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
    assert arena.total == 1024 + 3072  # in steps of 256
    arena.give(two)
    assert arena.take(1500)[0] == 1536 and arena.total == 4096  # from the freed piece, which is split
    arena.give(one)
    arena.take(1024)
    assert arena.total == 4096
    arena.take(2000)  # 1536 are left of the second region: too small
    assert arena.total == 4096 + 2048


def test_a_plan_is_run_at_any_size() -> None:
    events = ["+0 4*batch*tokens*8", "+1 4*(tokens//2 + 1)", "-0", "+2 4*batch*tokens*8", "-2"]
    arena = Arena()
    arena.run(events, {"batch": 2, "tokens": 64})
    assert arena.total == 4096 + 256
    arena.run(events, {"batch": 2, "tokens": 64})  # everything is given back
    assert arena.total == 4096 + 256


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("bundles")
    encoder = build_model(ModelConfig("encoder", dim=128, depth=2, input_dim=32, n_sel_heads=4))
    inputs = {"x": torch.randn(1, 24, 32)}

    def make(name: str, model: nn.Module, **options: object) -> Path:
        return export_bundle(model, out=folder / f"{name}.pom", **options).bundle  # type: ignore[arg-type]

    return {
        "parallel": make("parallel", encoder, example_inputs=inputs),
        "streamed": make("streamed", encoder, example_inputs=inputs, form="streamed", chunk=2048),
        "recurrent": make("recurrent", PoM(128, 3, 2, n_sel_heads=4), form="recurrent", mask="causal"),
        "causal": make("causal", PoM(128, 3, 2), mask="causal"),
    }


@linux
@pytest.mark.parametrize(
    ("name", "tokens", "batch"),
    [
        ("parallel", 4096, 1), ("parallel", 16384, 1), ("parallel", 4096, 4), ("causal", 16384, 1), ("causal", 8192, 2),
        ("recurrent", 4096, 2), ("streamed", 32768, 1),
    ],
)  # fmt: skip
def test_predictions_are_near_measurements(bundles: dict[str, Path], name: str, tokens: int, batch: int) -> None:
    path = bundles[name]
    predicted = predict(path, tokens, batch)
    measured = measure_peak(path, None, make_arrays(Bundle.open(path).manifest.artifacts[0], tokens, batch))
    assert measured is not None
    assert abs(predicted.total / measured.total_bytes - 1) < 0.15
    slack = 0.15 * measured.activations_bytes + 4 * MIB  # the system's own allocator gives and takes some MiB between two runs
    assert abs(predicted.activations - measured.activations_bytes) < slack


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
    for budget, message in (("12MB", "below what the runtime alone takes"), ("12M", "expected a size")):
        code, report, error = run("--budget", budget)
        assert code == 2 and message in error
    code, report, error = run("--enforce")
    assert code == 2 and "--enforce needs --budget" in error


@linux
def test_an_export_within_a_budget(tmp_path: Path) -> None:
    """The fastest form that fits: parallel, else streamed; else the smallest budget is named."""
    torch.manual_seed(0)
    model = nn.Sequential(PoM(64, 2, 4), PoM(64, 2, 4))
    options = {"example_inputs": {"input": torch.randn(1, 24, 64)}, "tokens": 32768, "batch": 1}
    report = export_bundle(model, out=tmp_path / "a.pom", memory_budget=1 << 30, **options)
    assert report.artifacts[0].form == "parallel" and any("memory predicted" in note for note in report.notes)
    report = export_bundle(model, out=tmp_path / "b.pom", memory_budget=128 * MIB, **options)
    assert report.artifacts[0].form == "streamed"
    peak = measure_peak(report.bundle, None, {"input": np.zeros((1, 32768, 64), np.float32)})
    assert peak is not None and peak.total_bytes < 128 * MIB
    with pytest.raises(
        GateError, match=r"no form keeps the budget of 44\.0 MiB; the smallest is \d+\.\d MiB: streamed in chunks"
    ):
        export_bundle(model, out=tmp_path / "c.pom", memory_budget=44 * MIB, **options)
    with pytest.raises(InputError, match="the runtime alone takes"):
        export_bundle(model, out=tmp_path / "c.pom", memory_budget=12, **options)
    with pytest.raises(InputError, match="needs --tokens N"):
        export_bundle(model, out=tmp_path / "c.pom", memory_budget=1 << 30)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pom", "b.pom"]
