"""What an engine may be asked for is decided before anything is exported or built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pom_edge import pipeline
from pom_edge.bundle import Bundle
from pom_edge.cli import app
from pom_edge.compiling import compile_bundle
from pom_edge.engine_options import EngineOptions, rebuild_command
from pom_edge.errors import InputError
from pom_edge.pipeline import ExportOptions
from tests.bundles import make_bundle
from tests.engines import add_engine, edit_manifest

DIGITS = Path(__file__).parents[2] / "demos" / "digits" / "model.pt"
REFUSED = (
    (("rtx",), {"compute_capability": ("8.7",)}, "does not build for SM 87; it has 75, 80, 86"),
    (("rtx",), {"compute_capability": ("ampere",)}, "expected a number as 8.6"),
    (("trt",), {"compute_capability": ("8.9",)}, "--compute-capability is for --target rtx"),
    (("rtx",), {"version_compatible": True}, "--version-compatible is for --target trt"),
    (("rtx",), {"hardware_compatible": True}, "--hardware-compatible is for --target trt"),
    (("rtx",), {"refit": True, "compute_capability": ("8.6", "8.9")}, "one GPU only; give one --compute-capability"),
    (("rtx",), {"tokens": "1:2"}, "takes N or MIN:OPT:MAX"),
    (("rtx",), {"workspace": 12}, "--workspace is 12 bytes; expected 1MiB or more"),
    (("trt",), {"optimization_level": 9}, "expected 0 to 5"),
    (("onnx",), {"workspace": 1 << 30}, "--workspace is for --target trt or rtx"),
    (("onnx", "coreml"), {"refit": True}, "--refit is for --target trt or rtx"),
    (("onnx",), {"deployment_target": "iOS18"}, "--minimum-deployment-target is for --target coreml"),
    (("onnx",), {"deployment_target": "iOS17"}, "--minimum-deployment-target is for --target coreml"),  # the default, too
    (("onnx",), {"observer": "mse"}, "--observer is for --precision int8: leave it out"),
)


@pytest.mark.parametrize(("targets", "options", "message"), REFUSED)
def test_what_needs_no_graph_is_refused_before_the_export(targets: tuple[str, ...], options: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        ExportOptions(targets=targets, **options).check()


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["--snr", "90"], "snr"),
        (["--mask", "padding"], "mask"),
        (["--remainder", "fp16"], "remainder"),
        (["--unsafe-pickle"], "unsafe-pickle"),
        (["--stateful"], "stateful"),
        (["--minimum-deployment-target", "iOS18"], "minimum-deployment-target"),
        (["--max-drop", "1"], "max-drop"),
        (["--memory-budget", "512MiB"], "memory-budget"),
    ],
)
def test_in_place_every_option_of_an_export_is_refused(arguments: list[str], option: str, tmp_path: Path) -> None:
    make_bundle(tmp_path / "a.pom")
    result = CliRunner().invoke(app, ["export", str(tmp_path / "a.pom"), "--target", "rtx", *arguments])
    assert result.exit_code == 2 and f"--{option} belongs to the export of a model" in " ".join(result.stderr.split())


def test_bounds_that_a_model_of_one_size_has_no_axis_for(tmp_path: Path) -> None:
    """Told after reading the model, not after exporting it."""
    arguments = ["--target", "rtx", "--tokens", "1:64:512", "--out", str(tmp_path / "d.pom")]
    result = CliRunner().invoke(app, ["export", str(DIGITS), *arguments])
    assert result.exit_code == 2 and "this model has 49 tokens, whatever the engine" in " ".join(result.stderr.split())
    assert "lint" not in result.stderr and not list(tmp_path.iterdir())


def test_sizes_of_passes_are_refused(tmp_path: Path) -> None:
    make_bundle(tmp_path / "a.pom")

    def streamed(content: dict[str, Any]) -> None:
        stream = {"chunk": 8, "shapes": {}, "dtypes": {}, "token_axes": {}, "passes": []}
        content["artifacts"][0].update(form="streamed", stream=stream)

    edit_manifest(tmp_path / "a.pom", streamed)
    for asked in ({"tokens": "128"}, {"batch": "1:1:4"}):
        with pytest.raises(InputError, match=f"--{next(iter(asked))}: the passes of .* have fixed shapes"):
            compile_bundle(tmp_path / "a.pom", ["rtx"], EngineOptions(("fp32",), **asked), lambda _: None)  # type: ignore[arg-type]


def test_the_rebuild_command_says_all_that_the_manifest_knows() -> None:
    facts = {"shapes": {"batch": [1, 1, 1], "tokens": [1, 16, 512]}, "compute_capabilities": ["86", "89"], "refit": True}
    command = rebuild_command("a b.pom", "rtx", "parallel", "int8", facts)
    assert command == (
        "pom-export 'a b.pom' --target rtx --precision int8 --form parallel --compute-capability 86 --compute-capability 89 "
        "--tokens 1:16:512 --batch 1 --refit"
    )
    assert "--compute-capability" not in rebuild_command("a.pom", "rtx", "parallel", "int8", facts, for_gpu=False)
    other = rebuild_command("a.pom", "trt", "recurrent", "fp16", {**facts, "workspace": 1 << 20, "optimization_level": 2})
    assert "--compute-capability" not in other and "--workspace 1048576 --optimization-level 2" in other


def test_an_engine_of_other_shapes_is_not_replaced_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default shapes are those that the export bounded; others replace an engine only with --overwrite."""
    from pom_edge import compiling

    bundle = tmp_path / "a.pom"
    make_bundle(bundle)
    add_engine(bundle, shapes={"batch": [1, 1, 1], "tokens": [1, 16, 32]})
    monkeypatch.setattr(compiling, "find_spec", lambda name: None)
    with pytest.raises(InputError) as caught:
        compile_bundle(bundle, ["rtx"], EngineOptions(("fp32",)), lambda _: None)
    told = str(caught.value)
    assert "for batch 1:1:1, tokens 1:16:32" in told and "would be for batch 1:1:1, tokens 1:5:64" in told
    assert "--overwrite replaces it" in told and "--tokens 1:16:32 --batch 1" in told
    for options in (
        EngineOptions(("fp32",), overwrite=True),
        EngineOptions(("fp32",), tokens="1:16:32"),
        EngineOptions(("fp32",), compute_capability=("8.6",)),
    ):
        assert compile_bundle(bundle, ["rtx"], options, lambda _: None).missing, "nothing is in the way but the compiler"


def test_where_no_bundle_can_be_written_nothing_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_bundle(tmp_path / "a.pom")
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(InputError, match="no permission to write there; copy the bundle to a folder that can be written"):
        pipeline.export_file(tmp_path / "a.pom", ExportOptions(targets=("rtx",), precisions=("fp32",)))
    assert len(Bundle.open(tmp_path / "a.pom").manifest.artifacts) == 1


def test_w8a8_is_int8_for_engines(tmp_path: Path) -> None:
    make_bundle(tmp_path / "a.pom")
    with pytest.raises(InputError, match=r"holds no parallel graph in int8 to compile .*--precision int8 --form"):
        pipeline.export_file(tmp_path / "a.pom", ExportOptions(targets=("rtx",), precisions=("w8a8",)))
