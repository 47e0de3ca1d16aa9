"""The hand-over to trtexec: every flag is said, and the raw files are the golden data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from pom_edge.bundle import Bundle
from pom_edge.cli import app
from pom_edge.errors import InputError
from pom_edge.inspection import describe_trtexec
from pom_edge.trtexec import trtexec_lines, write_raw
from tests.bundles import make_bundle, make_inputs
from tests.engines import add_engine, edit_manifest


def test_command_lines_and_raw_data(tmp_path: Path) -> None:
    make_bundle(tmp_path / "a.pom")
    result = CliRunner().invoke(app, ["info", str(tmp_path / "a.pom"), "--trtexec", "--raw", str(tmp_path / "raw"), "--json"])
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    ten, eleven = facts["TensorRT 10"].split(), facts["TensorRT 11"].split()
    assert set(ten) - set(eleven) == {"--stronglyTyped"} and set(eleven) < set(ten)
    assert "--maxShapes=x:1x64x6" in ten, "as the export bounded it"
    assert {"--onnx=parallel.fp32.onnx", "--noTF32", "--minShapes=x:1x1x6", "--optShapes=x:1x5x6", "--useCudaGraph"} <= set(
        eleven
    )
    listed = json.loads((tmp_path / "raw" / "raw.json").read_text())
    assert listed["a.x.bin"] == {
        "case": "a",
        "tensor": "x",
        "kind": "input",
        "dtype": "float32",
        "shape": [2, 5, 6],
        "fits": False,
    }
    assert facts["loads"].startswith("no golden case fits"), "two sequences, and the profile takes one"
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


def test_a_case_that_fits_is_loaded(tmp_path: Path) -> None:
    bundle, raw = tmp_path / "a.pom", tmp_path / "raw"
    make_bundle(bundle)
    edit_manifest(
        bundle, lambda content: content["artifacts"][0]["inputs"][0].update(bounds={"batch": [1, 2], "tokens": [1, 64]})
    )
    facts = describe_trtexec(bundle, None, raw)
    flags = f"--shapes=x:2x5x6 --loadInputs=x:{raw.resolve()}/a.x.bin"
    assert flags in facts["TensorRT 10"] and flags in facts["TensorRT 11"] and facts["loads"] == flags
    assert all(each["fits"] for each in json.loads((raw / "raw.json").read_text()).values())
    with pytest.raises(InputError, match="lies inside a bundle"):
        describe_trtexec(bundle, None, bundle / "raw")
    with pytest.raises(InputError, match="lies inside a bundle"):
        describe_trtexec(bundle, None, bundle)
    assert not (bundle / "raw").exists() and Bundle.open(bundle)


def test_an_engine_has_shapes_of_its_own(tmp_path: Path) -> None:
    make_bundle(tmp_path / "a.pom")
    add_engine(tmp_path / "a.pom", shapes={"batch": [1, 2, 4], "tokens": [5, 5, 5]})
    opened = Bundle.open(tmp_path / "a.pom")
    engine = opened.manifest.artifacts[1]
    assert " --shapes=x:2x5x6 " in trtexec_lines(opened, engine)["10"]
    _, loads = write_raw(opened, engine, tmp_path / "raw")
    assert loads.startswith("--shapes=x:2x5x6 ")


def test_a_stream_is_loaded_as_its_first_chunk(tmp_path: Path) -> None:
    """With the empty state that goes in; trtexec knows of no step before."""
    bundle = tmp_path / "a.pom"
    make_bundle(bundle)

    def recurrent(content: dict[str, Any]) -> None:
        state = {"name": "state.0.mean", "dtype": "float32", "shape": ["batch", 1, 6]}
        content["artifacts"][0].update(form="recurrent", token_axes={"x": 1, "y": 1})
        content["artifacts"][0]["inputs"][0]["bounds"] = {"batch": [1, 2], "tokens": [1, 64]}
        content["artifacts"][0]["inputs"].append(state)
        content["golden"][0]["chunks"] = [3, 2]

    edit_manifest(bundle, recurrent)
    facts = describe_trtexec(bundle, None, tmp_path / "raw")
    place = (tmp_path / "raw").resolve()
    assert facts["loads"] == (
        f"--shapes=x:2x3x6,state.0.mean:2x1x6 --loadInputs=x:{place}/a.x.bin,state.0.mean:{place}/a.state.0.mean.bin"
    )
    assert np.array_equal(np.fromfile(place / "a.x.bin", np.float32).reshape(2, 3, 6), make_inputs()["x"][:, :3])
    assert not np.fromfile(place / "a.state.0.mean.bin", np.float32).any()
    assert json.loads((place / "raw.json").read_text())["a.y.bin"]["shape"] == [2, 3, 6]
