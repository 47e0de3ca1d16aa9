"""The command line as a user meets it: one clear message, the right exit code, nothing lost, nothing half-written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from torch import nn
from typer.testing import CliRunner, Result

from pom_edge import cli, inspection, pipeline
from pom_edge.bundle import Bundle
from pom_edge.checkpoint import save_checkpoint
from pom_edge.cli import app
from pom_edge.mixer import PoM
from pom_edge.models import ModelConfig, build_model
from pom_edge.runtimes.cuda_device import Gpu, GpuState
from tests.bundles import make_bundle, make_inputs
from tests.golden import read

CONFIG = ModelConfig(kind="encoder", dim=16, depth=1, input_dim=6, n_sel_heads=2)


def _run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def _process(program: str, *arguments: object, stdout: Any = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    """The installed program itself."""
    command = [str(Path(sys.executable).with_name(program)), *map(str, arguments)]
    return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False)  # noqa: S603


def _refused(result: Result, *parts: str, code: int = 2) -> None:
    assert result.exit_code == code, (result.output, result.exception)
    assert result.stderr.count("error: ") == 1 and "Traceback" not in result.output
    for part in parts:
        assert part in result.stderr, result.stderr


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model") / "model.pt"
    save_checkpoint(path, build_model(CONFIG), CONFIG, samples={"x": torch.randn(4, 9, 6), "mask": torch.ones(4, 9)})
    return path


def _state() -> dict[str, torch.Tensor]:
    params = read("018-pom-padding-d4-k2-g1-h4").case.params
    return {name: torch.from_numpy(value.copy()) for name, value in params.items()}


def _write(make: Callable[[Path], Any]) -> Callable[[Path], Path]:
    def at(folder: Path) -> Path:
        path = folder / "model.pt"
        make(path)
        return path

    return at


def _broken(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], Path]:
    def make(path: Path) -> None:
        state = _state()
        change(state)
        torch.save(state, path)

    return _write(make)


BAD_FILES: dict[str, tuple[Callable[[Path], Path], tuple[str, ...]]] = {
    "missing": (lambda folder: folder / "none.pt", ("does not exist",)),
    "a folder": (lambda folder: folder, ("is a ",)),
    "empty": (_write(lambda p: p.write_bytes(b"")), ("is empty (0 bytes)",)),
    "text": (_write(lambda p: p.write_text("hello, I am no model\n" * 20)), ("text",)),
    "truncated": (_write(lambda p: (torch.save(_state(), p), os.truncate(p, p.stat().st_size // 2))), ("truncated",)),
    "something else": (_write(lambda p: torch.save(nn.Linear(3, 3).state_dict(), p)), ("without a PoM layer", "--factory")),
    "a whole model": (
        _write(lambda p: torch.save(build_model(CONFIG).state_dict(), p)),
        ("a whole model", "--factory", "--example"),
    ),
    "pickled": (_write(lambda p: torch.save(nn.Linear(3, 3), p)), ("pickled", "--unsafe-pickle")),
    "NaN": (_broken(lambda s: s["po_coeff"].view(-1)[3].fill_(float("nan"))), ("po_coeff", "1 NaN")),
    "Inf": (_broken(lambda s: s["ag_proj.weight"].view(-1)[0].fill_(float("inf"))), ("ag_proj.weight", "1 Inf")),
    "mismatched": (_broken(lambda s: s.update(po_coeff=torch.zeros(7, 4))), ("po_coeff has shape (7, 4)", "expected")),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_model_files(name: str, tmp_path: Path) -> None:
    make, parts = BAD_FILES[name]
    path = make(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    _refused(_run("export", path), *parts)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--target", "tensorrt"], ["unknown target 'tensorrt'; this version makes: onnx"]),
        (["--precision", "fp8"], ["unknown precision 'fp8'; this version makes: fp32"]),
        (["--form", "x"], ["unknown form 'x'; this version makes: parallel"]),
        (["--tokens", "0"], ["--tokens is '0'", "MIN:OPT:MAX"]),
        (["--batch", "8:1:2"], ["--batch is '8:1:2'"]),
        (["--mask", "causal"], ["--mask is for bare published layers"]),
        (["--example", "nowhere.npz"], ["nowhere.npz", "does not exist"]),
        (["--factory", "nowhere:build"], ["--factory"]),
        (["--layout", "current"], ["--layout"]),
        (["--snr", "20"], ["can only be raised"]),
        (["--snr", "nan"], ["--snr is nan; expected 90 to 300 dB"]),
        (["--tokens", "1:16:huge"], ["--tokens is '1:16:huge'"]),
        (["--tokens", "99999999999999999999"], ["expected at most 2147483647"]),
        (["--tokens", "2000000000"], ["takes", "GiB", "fewer --tokens"]),
    ],
)
def test_bad_arguments(arguments: list[str], parts: list[str], checkpoint: Path, tmp_path: Path) -> None:
    _refused(_run("export", checkpoint, "--out", tmp_path / "a.pom", *arguments), *parts)
    assert list(tmp_path.iterdir()) == []


def test_places_that_cannot_be_written(checkpoint: Path, tmp_path: Path) -> None:
    _refused(_run("export", checkpoint, "--out", tmp_path / "none" / "a.pom"), "does not exist; create it first")
    (tmp_path / "file").write_text("")
    _refused(_run("export", checkpoint, "--out", tmp_path / "file"), "is not a bundle; it is left alone")


def test_existing_bundle_without_overwrite(checkpoint: Path, tmp_path: Path) -> None:
    make_bundle(tmp_path / "a.pom")
    before = {file.name: file.read_bytes() for file in (tmp_path / "a.pom").iterdir()}
    _refused(_run("export", checkpoint, "--out", tmp_path / "a.pom"), "--overwrite")
    assert {file.name: file.read_bytes() for file in (tmp_path / "a.pom").iterdir()} == before


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (KeyboardInterrupt(), 130, "interrupted; nothing was changed"),
        (OSError(28, "No space left on device"), 2, "the disk is full"),
    ],
)
def test_an_end_in_the_middle_keeps_the_previous_bundle(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, message: str
) -> None:
    make_bundle(tmp_path / "a.pom")
    before = {file.name: file.read_bytes() for file in (tmp_path / "a.pom").iterdir()}

    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr("pom_edge.bundle.save_file", fail)
    result = _run("export", checkpoint, "--out", tmp_path / "a.pom", "--overwrite", "--json")
    assert result.exit_code == code and message in result.stderr
    assert json.loads(result.stdout)["exit_code"] == code
    assert {file.name: file.read_bytes() for file in (tmp_path / "a.pom").iterdir()} == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.pom"]


def test_a_failed_gate_is_exit_1(checkpoint: Path, tmp_path: Path) -> None:
    _refused(
        _run("export", checkpoint, "--out", tmp_path / "a.pom", "--snr", "280"),
        "--snr 280 asks for more than FP32 rounding leaves here",
        code=1,
    )
    assert list(tmp_path.iterdir()) == []


def test_export_check_run_info(checkpoint: Path, tmp_path: Path) -> None:
    """The way through: every command once, JSON alone on stdout, the real samples as golden data."""
    bundle = tmp_path / "a.pom"
    exported = _run("export", checkpoint, "--out", bundle, "--json")
    assert exported.exit_code == 0, exported.output
    report = json.loads(exported.stdout)
    assert report["passed"] and report["missing"] == []
    assert report["artifacts"][0]["parity"]["worst_mixer"]["name"] == "blocks.0.mixer"

    checked = _run("check", bundle, "--layers", "--json")
    assert checked.exit_code == 0 and json.loads(checked.stdout)["passed"]
    shown = _run("check", bundle)
    assert shown.exit_code == 0 and shown.stdout.rstrip().endswith("passed")

    np.savez(tmp_path / "in.npz", x=np.random.default_rng(0).standard_normal((2, 5, 6)), mask=np.ones((2, 5), bool))
    ran = _run("run", bundle, "--input", tmp_path / "in.npz", "--output", tmp_path / "out.safetensors")
    assert ran.exit_code == 0 and "y 2x5x16" in ran.stdout and (tmp_path / "out.safetensors").is_file()

    facts = json.loads(_run("info", bundle, "--json").stdout)
    assert facts["tokens"] == "free" and facts["golden"][0].startswith(("samples (real)", "short"))
    assert any(entry.startswith("samples (real)") for entry in facts["golden"])
    assert json.loads(_run("info", checkpoint, "--json").stdout)["format"] == "pom-edge checkpoint"
    again = _run("export", bundle)
    _refused(again, "is a bundle already")


def test_bare_weights_are_exported_with_their_settings(tmp_path: Path) -> None:
    """Our rotary PoM keeps no tables: without its settings the weights would look like a layer without rotary."""
    torch.save(PoM(8, 2, 2, n_sel_heads=4, rotary="1d").state_dict(), tmp_path / "layer.pt")
    result = _run("export", tmp_path / "layer.pt", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["warnings"] == []
    manifest = Bundle.open(tmp_path / "layer.pom").manifest
    assert manifest.model["rotary"] == "1d"


def test_the_table_names_the_next_commands(checkpoint: Path, tmp_path: Path) -> None:
    result = _run("export", checkpoint, "--out", tmp_path / "with space.pom")
    assert result.exit_code == 0, result.output
    assert "parallel.fp32.onnx" in result.stdout and "dB (gate 90)" in result.stdout
    assert f"pom-edge check '{tmp_path}/with space.pom'" in result.stdout
    assert "trace and translate" in result.stderr  # plain progress lines where there is no terminal


def test_run_with_wrong_inputs(tmp_path: Path) -> None:
    make_bundle(tmp_path / "a.pom")
    good = make_inputs()["x"]
    for name, arrays, message in (
        ("name", {"z": good}, "unknown: z"),
        ("dtype", {"x": good.astype(np.int64)}, "is int64; expected x float32"),
        ("shape", {"x": good[..., :-1]}, "has 5 along axis 2"),
    ):
        np.savez(tmp_path / f"{name}.npz", **arrays)
        _refused(_run("run", tmp_path / "a.pom", "--input", tmp_path / f"{name}.npz", "--output", tmp_path / "o.npz"), message)
    (tmp_path / "bad.npz").write_bytes(b"no zip")
    _refused(_run("run", tmp_path / "a.pom", "--input", tmp_path / "bad.npz", "--output", tmp_path / "o.npz"), "cannot be read")
    assert not (tmp_path / "o.npz").exists()


def test_run_keeps_its_inputs_and_the_bundle(tmp_path: Path) -> None:
    make_bundle(tmp_path / "a.pom")
    source = tmp_path / "in.npz"
    np.savez(source, **make_inputs())  # type: ignore[arg-type]
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    (tmp_path / "link").symlink_to(tmp_path / "a.pom")
    for output, message in (
        (source, "is the input file"),
        (tmp_path / "." / "in.npz", "is the input file"),
        (tmp_path / "a.pom" / "golden.safetensors", "inside a bundle"),
        (tmp_path / "link" / "new.npz", "inside a bundle"),
    ):
        _refused(_run("run", tmp_path / "a.pom", "--input", source, "--output", output), message)
    assert {file: file.read_bytes() for file in before} == before
    np.savez(source, x=np.full((1, 5, 6), np.nan, np.float32))
    result = _run("run", tmp_path / "a.pom", "--input", source, "--output", tmp_path / "out.npz")
    assert result.exit_code == 0 and "input 'x' contains NaN" in result.stderr
    assert "output 'y' holds 30 NaN or infinity of 30 values" in result.stderr


@pytest.mark.parametrize(
    ("program", "arguments", "message"),
    [
        ("pom-export", ["m.pt", "--tokns", "3"], "No such option: --tokns"),
        ("pom-export", ["m.pt", "--snr", "many"], "Invalid value for '--snr'"),
        ("pom-edge", ["chekc"], "Did you mean 'check'?"),
        ("pom-edge", ["run", "a.pom"], "Missing option '--input'"),
    ],
)
def test_usage_errors_look_like_all_others(program: str, arguments: list[str], message: str) -> None:
    done = _process(program, *arguments, "--json")
    assert done.returncode == 2 and done.stderr.startswith("error: ") and message in done.stderr
    assert message in json.loads(done.stdout)["error"] and f"{program}" in done.stderr and "--help" in done.stderr
    assert _process(program, *arguments).stdout == ""


def test_help_and_version() -> None:
    for program in ("pom-export", "pom-edge"):
        assert "Usage" in _process(program).stdout + _process(program).stderr
        assert _process(program, "--version").stdout.startswith("pom-edge ")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux's full disk")
@pytest.mark.parametrize("arguments", [["--json"], []])
def test_output_to_a_full_disk(tmp_path: Path, arguments: list[str]) -> None:
    make_bundle(tmp_path / "a.pom")
    with open("/dev/full", "w") as full:
        done = _process("pom-edge", "info", tmp_path / "a.pom", *arguments, stdout=full)
    assert done.returncode == 2 and done.stderr == "error: the output cannot be written: No space left on device\n"


def test_names_that_look_like_markup(tmp_path: Path) -> None:
    make_bundle(tmp_path / "[red]a[bold].pom")
    assert "[red]a[bold].pom" in _run("check", tmp_path / "[red]a[bold].pom").stdout


def test_check_of_a_wrong_artifact_is_exit_1(tmp_path: Path) -> None:
    make_bundle(tmp_path / "a.pom", scale=1.01)
    result = _run("check", tmp_path / "a.pom", "--layers")
    assert result.exit_code == 1
    assert "first layer that diverges: mixer" in result.stdout and result.stdout.rstrip().endswith("failed")


def test_tampered_bundle(tmp_path: Path) -> None:
    make_bundle(tmp_path / "a.pom")
    artifact = tmp_path / "a.pom" / "parallel.fp32.onnx"
    data = bytearray(artifact.read_bytes())
    data[50] ^= 1
    artifact.write_bytes(data)
    _refused(_run("check", tmp_path / "a.pom"), "was changed after the export")


def test_without_the_export_extra(monkeypatch: pytest.MonkeyPatch, checkpoint: Path) -> None:
    def absent(module: str, extra: str) -> None:
        raise pipeline.InputError(f"{module} is not installed. Run: pip install 'pom-edge[{extra}]'")

    monkeypatch.setattr(pipeline, "require", absent)
    _refused(_run("export", checkpoint), "pip install 'pom-edge[export]'")


def test_doctor() -> None:
    facts = json.loads(_run("doctor", "--json").stdout)
    assert facts["packages"]["torch"] == torch.__version__ and facts["can do"]["export"] == "ready"
    assert _run("doctor").exit_code == 0


def _steps(monkeypatch: pytest.MonkeyPatch, libraries: dict[str, object], gpus: list[Gpu], cuda: str = "") -> dict[str, str]:
    monkeypatch.setattr(inspection, "_library", libraries.__getitem__)
    monkeypatch.setattr(inspection, "find_gpus", lambda: GpuState(gpus, None, "" if gpus else "no NVIDIA driver"))
    monkeypatch.setattr(inspection, "cuda_missing", lambda: cuda)
    monkeypatch.setattr(inspection, "import_faults", lambda modules, _: dict.fromkeys(modules, ""))
    return inspection.diagnose()["can do"]


def test_doctor_says_ready_only_where_everything_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, library = Gpu("Orin", "8.7", True), types.SimpleNamespace(__version__="10.3.0", __name__="tensorrt")
    broken = "TensorRT cannot be imported here (tensorrt: libnvinfer.so.10)"
    none = {"trt": inspection.NOT_INSTALLED, "rtx": inspection.NOT_INSTALLED}
    steps = _steps(monkeypatch, {"trt": broken, "rtx": library}, [])
    assert steps["engines (trt)"] == broken and steps["engines for RTX GPUs (rtx)"] == "ready", "RTX builds without a GPU"
    assert steps["run engines"] == "no GPU: no NVIDIA driver"
    assert _steps(monkeypatch, {**none, "trt": library}, [])["engines (trt)"] == "no GPU: no NVIDIA driver"
    assert _steps(monkeypatch, none, [gpu])["run engines"] == "no TensorRT that can be imported"
    steps = _steps(monkeypatch, {**none, "trt": library}, [gpu], "cuda-python is not installed")
    assert steps["engines (trt)"] == "ready" and steps["run engines"] == "cuda-python is not installed"
    assert _steps(monkeypatch, {**none, "trt": library}, [gpu])["run engines"] == "ready (TensorRT)"
    assert _steps(monkeypatch, none, [gpu])["engines for RTX GPUs (rtx)"].endswith("pip install 'pom-edge[rtx]'")


def test_ctrl_c_before_a_command_begins() -> None:
    """In the middle of the imports, which take most of a second; and while click reads the arguments."""
    code = (
        "import os, signal, sys\nimport pom_edge.entry as entry\n"
        "class Finder:\n    def find_spec(self, name, *_):\n"
        "        if name == 'typer': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\nsys.argv = ['pom-edge', 'doctor', '--json']\nentry.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 130 and done.stderr == "error: interrupted; nothing was changed\n"
    assert json.loads(done.stdout)["exit_code"] == 130

    def abort(**_: object) -> None:
        raise typer.Abort

    with pytest.raises(SystemExit) as caught:
        cli._run(abort, "pom-edge")  # type: ignore[arg-type]
    assert caught.value.code == 130


def test_json_stays_alone_on_stdout(tmp_path: Path) -> None:
    """Whatever a factory prints; and one that leaves is a factory that failed."""
    script = tmp_path / "net.py"
    script.write_text(
        "import torch\nfrom pom_edge import PoM\n"
        "def build():\n    print('hello')\n    torch.manual_seed(0)\n    return torch.nn.Sequential(PoM(8, 2, 2))\n"
        "def leave():\n    raise SystemExit(3)\n"
        "def example():\n    return {'input': torch.randn(2, 5, 8)}\n"
    )
    torch.save(nn.Sequential(PoM(8, 2, 2)).state_dict(), tmp_path / "m.pt")
    arguments = ["export", tmp_path / "m.pt", "--example", f"{script}:example", "--json"]
    result = _run(*arguments, "--factory", f"{script}:build")
    assert json.loads(result.stdout)["passed"] and "hello" in result.stderr
    result = _run(*arguments, "--factory", f"{script}:leave", "--overwrite")
    assert result.exit_code == 2 and "raised SystemExit" in json.loads(result.stdout)["error"]


def test_a_ctrl_c_that_torch_wrapped_is_still_one(monkeypatch: pytest.MonkeyPatch, checkpoint: Path) -> None:
    def fail(*_: object, **__: object) -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            raise pipeline.InputError("torch.export cannot trace the model") from error

    monkeypatch.setattr(pipeline, "export_subject", fail)
    _refused(_run("export", checkpoint, "--overwrite"), "interrupted; nothing was changed", code=130)


def test_an_npy_file_has_no_names(tmp_path: Path) -> None:
    make_bundle(tmp_path / "a.pom")
    np.save(tmp_path / "in.npy", make_inputs()["x"])
    result = _run("run", tmp_path / "a.pom", "--input", tmp_path / "in.npy", "--output", tmp_path / "out.npy")
    assert result.exit_code == 0 and np.load(tmp_path / "out.npy").shape == (2, 5, 6)


def test_sigterm_leaves_nothing_behind(checkpoint: Path) -> None:
    """As Ctrl-C, at the moment when the bundle is half written."""
    command = [sys.executable, "-m", "pom_edge.cli", "export", str(checkpoint), "--out", str(checkpoint.with_name("t.pom"))]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)  # noqa: S603
    while process.poll() is None and not list(checkpoint.parent.glob(".t.pom.new-*")):
        time.sleep(0.005)
    process.terminate()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 143 and "error: interrupted; nothing was changed" in errors
    assert not [path for path in checkpoint.parent.iterdir() if "t.pom" in path.name]
