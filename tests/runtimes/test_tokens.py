"""Files of tokens when the disk is full, and after a run that was killed: really full, really killed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from pom_edge import build_model, export_bundle, open_session
from pom_edge.cli import app
from pom_edge.errors import InputError
from pom_edge.models import ModelConfig

TOKENS, DIM, KIB = 4096, 16, 1 << 10  # 256 KiB of tokens


@pytest.fixture(scope="module")
def streamed_pom(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With its input beside it."""
    folder = tmp_path_factory.mktemp("tokens")
    torch.manual_seed(0)
    model = build_model(ModelConfig("encoder", dim=DIM, depth=2, input_dim=6))
    np.save(folder / "x.npy", np.random.default_rng(0).standard_normal((1, TOKENS, 6)).astype(np.float32))
    return export_bundle(
        model, form="streamed", chunk=256, example_inputs={"x": torch.randn(1, 24, 6)}, out=folder / "a.pom"
    ).bundle


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 400 KiB."""
    mount, folder = shutil.which("mount"), tmp_path / "disk"
    folder.mkdir()
    command = [mount or "mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(folder)]
    if mount is None or os.geteuid() != 0 or subprocess.run(command, check=False, capture_output=True).returncode:  # noqa: S603
        pytest.skip("needs the right to mount a tmpfs")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)  # noqa: S603, S607


def test_a_disk_that_fills_up_while_tokens_are_spilled(streamed_pom: Path, small_disk: Path) -> None:
    """It had room when the pass began; somebody else took it after the first chunk."""
    x, filler = np.load(streamed_pom.parent / "x.npy"), small_disk / "filler"

    def fill(done: int, _: int) -> None:
        if done > TOKENS and not filler.exists():  # the first pass stores nothing
            filler.write_bytes(bytes(shutil.disk_usage(small_disk).free))

    with open_session(streamed_pom, spill=small_disk) as session:
        session.progress = fill
        with pytest.raises(InputError, match=f"cannot write {small_disk}: the disk is full; free some space"):
            session.run(x)
        filler.unlink()
        assert not list(small_disk.iterdir()) and shutil.disk_usage(small_disk).used == 0
        session.progress = None
        assert np.asarray(session.run(x)).shape == (1, TOKENS, DIM)


def test_a_disk_that_is_too_small_for_tokens_and_output(streamed_pom: Path, small_disk: Path) -> None:
    """One message, exit 2, nothing left: at the start for the tokens alone, later for what comes beside them."""
    arguments = ["run", str(streamed_pom), "--input", str(streamed_pom.parent / "x.npy"), "--spill", str(small_disk)]
    result = CliRunner().invoke(app, [*arguments, "--output", str(small_disk / "y.npy")])
    assert result.exit_code == 2 and not list(small_disk.iterdir())
    assert result.stderr.splitlines()[-1].startswith(f"error: cannot write {small_disk / 'y.npy'}: the disk is full")
    (small_disk / "filler").write_bytes(bytes(300 * KIB))
    result = CliRunner().invoke(app, [*arguments, "--output", str(streamed_pom.parent / "y.npy")])
    assert result.exit_code == 2 and "the tokens take" in result.stderr.splitlines()[-1]
    assert [file.name for file in small_disk.iterdir()] == ["filler"]
    assert sorted(file.name for file in streamed_pom.parent.iterdir()) == ["a.pom", "x.npy"]


def test_a_run_after_one_that_was_killed(streamed_pom: Path, tmp_path: Path) -> None:
    """Killed within its last pass, when tokens and a part of the output are written."""
    script = (
        "import os, signal, sys; from pathlib import Path; from pom_edge import open_session\n"
        "s = open_session(sys.argv[1], spill=sys.argv[3])\n"
        "s.progress = lambda done, total: os.kill(os.getpid(), signal.SIGKILL) if done > total - 300 else None\n"
        "s.run_file(Path(sys.argv[2]), Path(sys.argv[3]) / 'y.npy')"
    )
    source = streamed_pom.parent / "x.npy"
    command = [sys.executable, "-c", script, str(streamed_pom), str(source), str(tmp_path)]
    assert subprocess.run(command, check=False).returncode == -9  # noqa: S603
    assert not (tmp_path / "y.npy").exists()
    with open_session(streamed_pom, spill=tmp_path) as session:
        session.run_file(source, tmp_path / "y.npy")
        np.testing.assert_array_equal(session.run(np.load(source)), np.load(tmp_path / "y.npy"))
    assert [file.name for file in tmp_path.iterdir()] == ["y.npy"]
