"""The task metric: a number of the user's, compared before and after."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from pom_edge.bundle import Bundle
from pom_edge.cli import app
from pom_edge.errors import GateError, InputError
from pom_edge.metric import Metric
from pom_edge.models import ModelConfig, build_model
from pom_edge.pipeline import export_bundle
from pom_edge.runtimes.checking import check_bundle

X = np.random.default_rng(0).standard_normal((4, 9, 6)).astype(np.float32)


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return build_model(ModelConfig(kind="encoder", dim=8, depth=1, input_dim=6, degree=2, expand=1))


def energy(run: Any) -> float:
    return float(np.linalg.norm(run(X)))


def test_a_metric_is_recorded_and_checked_again_without_torch(tmp_path: Path) -> None:
    net = model()
    report = export_bundle(net, example_inputs={"x": torch.from_numpy(X)}, out=tmp_path / "m.pom", metric=energy)
    with torch.no_grad():
        expected = float(net(torch.from_numpy(X)).double().norm())
    found = Bundle.open(report.bundle).manifest.artifacts[0].parity["metric"]  # type: ignore[index]
    assert found["name"] == "test_metric:energy"
    assert found["pytorch"] == pytest.approx(expected, rel=1e-5)
    assert found["passed"] and abs(found["drop"]) < 1e-4
    checked = check_bundle(report, metric=Metric.named(energy))
    assert checked.passed and checked.artifacts[0].metric is not None
    worse = Metric("test_metric:energy", lambda run: energy(run) - 0.6)
    assert not check_bundle(report, metric=worse).passed

    (tmp_path / "test_metric.py").write_text("def energy(run):\n    return 1.0\n\ndef other(run):\n    return 1.0\n")
    result = CliRunner().invoke(app, ["check", str(report.bundle), "--metric", f"{tmp_path}/test_metric.py:other"])
    assert result.exit_code == 2 and "does not know what PyTorch scores on test_metric:other" in result.output
    result = CliRunner().invoke(app, ["check", str(report.bundle), "--max-drop", "1", "--json"])
    assert result.exit_code == 2 and json.loads(result.stdout)["exit_code"] == 2


def test_a_lower_metric_fails_the_export_and_leaves_nothing(tmp_path: Path) -> None:
    calls: list[float] = []

    def falling(run: Any) -> float:
        calls.append(energy(run))
        return calls[-1] - (5 if len(calls) == 3 else 0)  # the artifact

    with pytest.raises(GateError, match=r"falling drops from .* to .* points in parallel.fp32.onnx, more than 0.5"):
        export_bundle(model(), example_inputs={"x": X}, out=tmp_path / "m.pom", metric=falling)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("function", "kind", "message"),
    [
        (
            lambda run: 50.0 if run(X).any() else 49.8,
            GateError,
            "is vacuous: PyTorch's model has 50 points, outputs of zeros 49.8",
        ),
        (lambda run: -energy(run), GateError, "is vacuous"),
        (lambda run: 50.0, InputError, "never called the model"),
        (lambda run: float(run(X).sum() * np.nan), InputError, "finite number"),
        (lambda run: run(X), InputError, "returned ndarray; expected one number"),
        (lambda run: run(X).size * 10**400, InputError, "returned int; expected one number"),
        (lambda run: bool(run(X).any()), InputError, "returned True; expected a finite number"),
        (lambda run: float(run(X).any()), InputError, "gives PyTorch's model 1 points, of which 0.5 could be lost"),
        (lambda run: run(X)["logits"], InputError, r"IndexError.*run gave one array \(4, 9, 8\)"),
        (lambda: 1.0, InputError, "cannot be called as metric"),
        (5, InputError, "metric is 5; expected"),
        (lambda run: [][0], InputError, r"raised IndexError: list index out of range \(.*line"),
        (lambda run: run(context=X), InputError, "gave inputs that do not fit: inputs context are unknown; expected x"),
        (lambda run: run(X[0]), InputError, "features have shape"),
    ],
)
def test_metrics_that_prove_nothing_are_refused(tmp_path: Path, function: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        export_bundle(model(), example_inputs={"x": X}, out=tmp_path / "m.pom", metric=function)
    assert not list(tmp_path.iterdir())


def test_a_metric_that_changes_with_every_call_is_not_blamed_on_the_artifact(tmp_path: Path) -> None:
    calls: list[int] = []

    def fading(run: Any) -> float:
        calls.append(1)
        return float(np.abs(run(X)).mean() > 0) * 100 - len(calls)

    with pytest.raises(InputError, match="is not repeatable: PyTorch's model had 99 points and now 96"):
        export_bundle(model(), example_inputs={"x": X}, out=tmp_path / "m.pom", metric=fading)


def test_a_metric_may_change_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def wandering(run: Any) -> float:
        os.chdir("/")
        return 100 + energy(run)

    export_bundle(model(), example_inputs={"x": X}, out="m.pom", metric=wandering, max_drop=0.01)
    assert (tmp_path / "m.pom" / "manifest.json").is_file()


def test_wrong_options(tmp_path: Path) -> None:
    for options, message in (({"max_drop": 1.0}, "needs --metric"), ({"metric": energy, "max_drop": -1.0}, "0 or more")):
        with pytest.raises(InputError, match=message):
            export_bundle(model(), example_inputs={"x": X}, out=tmp_path / "m.pom", **options)
    with pytest.raises(InputError, match="no module 'nothing'"):
        export_bundle(model(), example_inputs={"x": X}, out=tmp_path / "m.pom", metric="nothing:here")


def test_the_demos_own_metrics(tmp_path: Path) -> None:
    from demos.digits.metric import accuracy
    from demos.text.metric import bits

    assert accuracy(lambda x: np.eye(10)[np.zeros(len(x), int)]) == pytest.approx(9.8, abs=2)  # every tenth digit is a zero
    assert bits(lambda x: np.zeros((*x.shape, 256))) == pytest.approx(-8)
