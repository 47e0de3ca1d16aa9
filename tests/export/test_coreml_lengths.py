"""Token counts of Core ML packages: a list of lengths, each of them run, and ranges; what neither goes with is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import pom_edge
from pom_edge.bundle import Bundle
from pom_edge.cli import app
from pom_edge.coreml import coreml_options
from pom_edge.coreml_shapes import shape_notes
from pom_edge.errors import InputError
from pom_edge.extent import Extent, cut
from pom_edge.models import ModelConfig, build_model
from pom_edge.pipeline import ExportOptions, export_bundle
from pom_edge.runtimes import open_session
from pom_edge.runtimes.checking import check_bundle
from pom_edge.runtimes.mil_program import model_file
from pom_edge.runtimes.parity import measure
from pom_edge.subject import subject_from_model

pytest.importorskip("coremltools", reason="needs pip install 'pom-edge[coreml]'")


def _language_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return build_model(ModelConfig(kind="lm", dim=16, depth=1, vocab_size=40, n_sel_heads=4, rotary="1d")).eval()


def _input(bundle: Path, name: str) -> Any:
    """How the package itself describes an input."""
    from coremltools.proto import Model_pb2

    (artifact,) = Bundle.open(bundle).manifest.artifacts
    spec = Model_pb2.Model()
    spec.ParseFromString(model_file(bundle / artifact.file).read_bytes())
    return next(each for each in spec.description.input if each.name == name).type.multiArrayType


@pytest.mark.slow
def test_each_listed_length_runs_and_no_other(tmp_path: Path) -> None:
    model, out = _language_model(), tmp_path / "a.pom"
    export_bundle(model, "coreml", example_inputs={"x": torch.randint(0, 40, (1, 24))}, tokens="48,16,24", out=out)
    shapes = _input(out, "x")
    assert [list(each.shape) for each in shapes.enumeratedShapes.shapes] == [[1, 16], [1, 24], [1, 48]]
    assert list(shapes.shape) == [1, 16]
    (check,) = check_bundle(out).artifacts
    assert check.passed and sorted(check.cases) == ["tokens-16", "tokens-24", "tokens-48"]
    with open_session(out) as session:
        for length in (16, 24, 48):
            x = np.random.default_rng(length).integers(0, 40, (1, length))
            with torch.no_grad():
                truth = model(torch.from_numpy(x)).numpy()
            assert measure(truth, np.asarray(session.run(x))).snr_db >= 45
        with pytest.raises(InputError, match="tokens is 30; this artifact takes 16, 24 or 48"):
            session.run(np.zeros((1, 30), np.int64))


@pytest.mark.slow
def test_prefill_and_decode_are_one_recurrent_package(tmp_path: Path) -> None:
    model, out = _language_model(), tmp_path / "a.pom"
    example = {"x": torch.randint(0, 40, (1, 24))}
    export_bundle(model, "coreml", form="recurrent", example_inputs=example, tokens="1,16", out=out)
    (case,) = Bundle.open(out).manifest.golden
    assert case.chunks == [16, 1, 1, 16], "both lengths, in both orders"
    x = np.random.default_rng(0).integers(0, 40, (1, 37))
    with torch.no_grad():
        truth = model(torch.from_numpy(x)).numpy()
    with open_session(out) as session:
        assert measure(truth, np.asarray(session.run(x))).snr_db >= 45  # 16 + 16 + 1 + 1 + 1 + 1 + 1
        steps = [session.step(x[:, :1]), session.step(x[:, 1:17]), session.step(x[:, 17:33])]
        assert measure(truth[:, :33], np.concatenate(steps, axis=1)).snr_db >= 45
        with pytest.raises(InputError, match="tokens is 5; this artifact takes 1 or 16"):
            session.step(x[:, :5])


@pytest.mark.slow
@pytest.mark.parametrize(
    "tokens", ["8:24:64", "2:3:5"]
)  # the second is narrow: fewer tokens than the running sum has in a block
def test_a_causal_model_has_a_range(tokens: str, tmp_path: Path) -> None:
    out = tmp_path / "a.pom"
    export_bundle(_language_model(), "coreml", example_inputs={"x": torch.randint(0, 40, (1, 24))}, tokens=tokens, out=out)
    low, usual, high = map(int, tokens.split(":"))
    assert list(_input(out, "x").shape) == [1, usual]
    assert [(each.lowerBound, each.upperBound) for each in _input(out, "x").shapeRange.sizeRanges] == [(1, 1), (low, high)]
    (check,) = check_bundle(out).artifacts
    assert check.passed and len(check.cases) >= 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": "8,16", "targets": ("coreml", "onnx")}, "only --target coreml takes a list"),
        ({"tokens": "8,16", "targets": ("onnx",)}, "a list of lengths is for --target coreml"),
        ({"tokens": "8,16", "form": "streamed"}, "take any length"),
        ({"tokens": "8,16", "batch": "1:2:4"}, "found --batch 1:2:4"),
        ({"tokens": "8,16", "form": "recurrent", "stateful": True, "deployment_target": "iOS18"}, "with --tokens 8,16, a list"),
        ({"tokens": "64,32,64"}, "lists 64 more than once"),
        ({"tokens": ",".join(map(str, range(1, 131)))}, "lists 130 lengths; Core ML takes 128"),
        ({"tokens": "8,,16"}, "--tokens takes N or MIN:OPT:MAX"),
        ({"tokens": "0,16"}, "--tokens takes N or MIN:OPT:MAX"),
    ],
)
def test_what_a_list_does_not_go_with(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ExportOptions(**{"targets": ("coreml",), **options}).check()


def _notes(model: torch.nn.Module, example: dict[str, torch.Tensor], **given: Any) -> list[str]:
    options = ExportOptions(**{"targets": ("coreml",), "form": "parallel", "example": example, **given})
    subject = subject_from_model(model, options)
    return shape_notes(options, coreml_options(options, subject), subject)


PARTS = ", and a session takes any number, one part after the other"
LM = {"x": torch.zeros(1, 24, dtype=torch.int64)}
MASKED = {"x": torch.zeros(1, 12, 8), "mask": torch.ones(1, 12)}


@pytest.mark.parametrize(
    ("given", "note"),
    [
        (
            {},
            "fixed at 24 tokens (as in the example) and 1 sequence; --tokens N, a list (64,256) or MIN:OPT:MAX chooses others, "
            "--batch N more sequences",
        ),
        ({"batch": 2}, "fixed at 24 tokens (as in the example); --tokens N, a list (64,256) or MIN:OPT:MAX chooses others"),
        (
            {"form": "recurrent"},
            "fixed at 1 token a step and 1 sequence; --tokens N or a list (1,64) chooses others, --batch N more sequences",
        ),
        (
            {"form": "recurrent", "stateful": True},
            "fixed at 1 token a step and 1 sequence; --tokens N chooses others, --batch N more sequences",
        ),
        (
            {"targets": ("onnx", "coreml"), "batch": 1},
            "fixed at 24 tokens (as in the example); --tokens N or MIN:OPT:MAX chooses others, for every target",
        ),
        ({"tokens": 24}, f"fixed at a batch of 1; --batch N chooses another{PARTS}"),
        ({"tokens": "8:16:24", "batch": 1}, None),
        ({"tokens": "1,24", "form": "recurrent"}, "fixed at a batch of 1; --batch N chooses another"),
        ({"form": "streamed"}, None),
    ],
)
def test_what_was_fixed_unasked_is_said_with_what_chooses_otherwise(given: dict[str, Any], note: str | None) -> None:
    assert _notes(_language_model(), LM, **given) == ([] if note is None else [f"coreml: {note}"])


def test_a_mask_and_an_image_in_the_note() -> None:
    encoder = build_model(ModelConfig(kind="encoder", dim=16, depth=1, input_dim=8, n_sel_heads=4))
    assert (
        "12 tokens (as in the example) and 1 sequence; --tokens N, a list (64,256; from iOS18 on)" in _notes(encoder, MASKED)[0]
    )
    subject = subject_from_model(encoder, ExportOptions(targets=("coreml",), example=MASKED))
    subject.info["config"] = {}  # as of a checkpoint, whose example is made up
    options = ExportOptions(targets=("coreml",), form="parallel")
    assert "12 tokens (the default length)" in shape_notes(options, coreml_options(options, subject), subject)[0]
    digits = pom_edge.load("demos/digits/model.pt")
    assert _notes(digits, {"x": torch.zeros(1, 1, 28, 28)}) == [
        f"coreml: fixed at a batch of 1; --batch N chooses another{PARTS}"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("free", [True, False])
def test_a_program_of_free_length_is_fixed_and_says_so(free: bool, tmp_path: Path) -> None:
    encoder = build_model(ModelConfig(kind="encoder", dim=16, depth=1, input_dim=8, n_sel_heads=4)).eval()
    shapes = {"x": {1: torch.export.Dim.DYNAMIC} if free else {}}
    torch.export.save(torch.export.export(encoder, (torch.zeros(2, 24, 8),), dynamic_shapes=shapes), tmp_path / "a.pt2")
    result = CliRunner().invoke(app, ["export", str(tmp_path / "a.pt2"), "--target", "coreml"], catch_exceptions=False)
    said = "coreml: fixed at 24 tokens (as in the example); a .pt2 takes no --tokens: give an --example of another length"
    assert result.exit_code == 0 and (said in " ".join(result.stderr.split())) is free
    (artifact,) = Bundle.open(tmp_path / "a.pom").manifest.artifacts
    assert any(note.startswith(said) for note in artifact.notes) is free
    assert not any("linear-cost" in note for note in artifact.notes), "a rule of ONNX graphs"


def test_two_inputs_of_listed_lengths_need_ios18(tmp_path: Path) -> None:
    model = build_model(ModelConfig(kind="encoder", dim=16, depth=1, input_dim=8, n_sel_heads=4))
    example = {"x": torch.randn(1, 12, 8), "mask": torch.ones(1, 12)}
    with pytest.raises(InputError, match="x, mask have these lengths together, which needs iOS18"):
        export_bundle(model, "coreml", example_inputs=example, tokens="8,12", out=tmp_path / "a.pom")
    assert list(tmp_path.iterdir()) == []


def test_a_batch_has_no_list() -> None:
    with pytest.raises(InputError, match="--batch takes N or MIN:OPT:MAX"):
        Extent.parse("1,2,4", "--batch")


@pytest.mark.parametrize(
    ("total", "lengths", "expected"),
    [
        (37, (1, 16), [16, 16, 1, 1, 1, 1, 1]),
        (9, (3, 5), [3, 3, 3]),  # the longest first would leave one token
        (7, (3, 5), []),
        (7, (2, 4), []),
        (100_003, (4, 6, 9), None),
    ],
)
def test_a_sequence_in_pieces_of_listed_lengths(total: int, lengths: tuple[int, ...], expected: list[int] | None) -> None:
    found = cut(total, lengths)
    assert expected is None or found == expected
    assert not found or (sum(found) == total and set(found) <= set(lengths))
