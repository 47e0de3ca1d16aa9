"""The hand-over to trtexec: every flag is said, and the raw files are the golden data."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from pom_edge.bundle import Bundle
from pom_edge.cli import app
from pom_edge.errors import InputError
from pom_edge.trtexec import trtexec_lines
from tests.bundles import make_bundle, make_inputs


def test_command_lines_and_raw_data(tmp_path: Path) -> None:
    make_bundle(tmp_path / "a.pom")
    result = CliRunner().invoke(app, ["info", str(tmp_path / "a.pom"), "--trtexec", "--raw", str(tmp_path / "raw"), "--json"])
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    ten, eleven = facts["TensorRT 10"].split(), facts["TensorRT 11"].split()
    assert set(ten) - set(eleven) == {"--stronglyTyped"} and set(eleven) < set(ten)
    assert {"--onnx=parallel.fp32.onnx", "--noTF32", "--minShapes=x:1x5x6", "--maxShapes=x:1x5x6", "--useCudaGraph"} <= set(
        eleven
    )
    listed = json.loads((tmp_path / "raw" / "raw.json").read_text())
    assert listed["a.x.bin"] == {
        "case": "a",
        "tensor": "x",
        "kind": "input",
        "dtype": "float32",
        "shape": [2, 5, 6],
        "fits": True,
    }
    assert np.array_equal(np.fromfile(tmp_path / "raw" / "a.x.bin", np.float32).reshape(2, 5, 6), make_inputs()["x"])
    assert listed["a.y.bin"]["kind"] == "output" and set(facts["raw"]) == {"a.x.bin", "a.y.bin", "raw.json"}


def test_what_trtexec_cannot_run_is_refused(tmp_path: Path) -> None:
    make_bundle(tmp_path / "a.pom")
    for arguments, message in (
        (["--trtexec", "--artifact", "b.onnx"], "has no artifact b.onnx"),
        (["--raw", "x"], "--trtexec"),
    ):
        result = CliRunner().invoke(app, ["info", str(tmp_path / "a.pom"), *arguments])
        assert result.exit_code == 2 and message in result.stderr
    opened = Bundle.open(tmp_path / "a.pom")
    streamed = opened.manifest.artifacts[0].model_copy(update={"stream": object()})
    with pytest.raises(InputError, match="one of several passes"):
        trtexec_lines(opened, streamed)
