"""The recordings of the published module through the command line: bare state dict in, verified bundle out."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from pom_edge.bundle import Bundle
from pom_edge.cli import app
from pom_edge.runtimes import open_session
from tests.golden import PARALLEL, read
from tests.oracle import relative_error

pytestmark = pytest.mark.slow

RELATIVE_ERROR = 1e-5
GATES_DB = {"fp32": 90, "fp16": 45, "bf16": 30, "int8": 20}


@pytest.mark.parametrize("name", PARALLEL)
def test_recording_survives_the_export(name: str, tmp_path: Path) -> None:
    recording = read(name)
    case = recording.case
    torch.save({key: torch.from_numpy(value.copy()) for key, value in case.params.items()}, tmp_path / "layer.pt")
    inputs = {key: value.astype(np.float32) if key == "mask" else value for key, value in case.inputs.items()}
    np.savez(tmp_path / "example.npz", **inputs)
    arguments = ["export", str(tmp_path / "layer.pt"), "--example", str(tmp_path / "example.npz"), "--json"]
    arguments += ["--calibration", str(tmp_path / "example.npz")]
    for precision in GATES_DB:
        arguments += ["--precision", precision]
    if case.causal:
        arguments += ["--mask", "causal"]
    if case.config["rotary"] is not None:
        return _with_tables(name, arguments, tmp_path)
    _run_and_compare(name, arguments, tmp_path)


def _with_tables(name: str, arguments: list[str], tmp_path: Path) -> None:
    """Rotary layers are recognised by their tables, which the recording holds beside the parameters."""
    from safetensors import safe_open

    from tests.golden import FOLDER

    with safe_open(FOLDER / f"{name}.safetensors", "pt") as file:
        keys = [key for key in file.keys() if key.startswith("param.")]  # noqa: SIM118 - safe_open is no dict
        torch.save({key.removeprefix("param."): file.get_tensor(key) for key in keys}, tmp_path / "layer.pt")
    _run_and_compare(name, arguments, tmp_path)


def _run_and_compare(name: str, arguments: list[str], tmp_path: Path) -> None:
    recording = read(name)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["passed"]
    for artifact, (precision, gate_db) in zip(report["artifacts"], GATES_DB.items(), strict=True):
        parity = artifact["parity"]
        assert artifact["precision"] == precision and parity["snr_db"] >= parity["gate_db"] == gate_db
        assert parity["nonfinite"] == 0 and all(entry["caught"] is not False for entry in parity["vacuity"])
    with open_session(tmp_path / "layer.pom") as session:
        y = session.run_named(recording.case.inputs)["y"]
    assert relative_error(y, recording.y.astype(np.float64)) <= RELATIVE_ERROR
    manifest = Bundle.open(tmp_path / "layer.pom").manifest
    assert manifest.published_layout is not None and manifest.artifacts[0].opset == 18
