"""What the README tells people to type, typed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the commands run: the demos are in reach, what is written stays here."""
    (tmp_path / "demos").symlink_to(ROOT / "demos")
    return tmp_path


def _environment() -> dict[str, str]:
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def test_python_block(folder: Path) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    run = subprocess.run([sys.executable, "-c", block], cwd=folder, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "True"


def test_console_block(folder: Path) -> None:
    (block,) = re.findall(r"```console\n(.*?)```", README, re.DOTALL)
    commands = [line.removeprefix("$ ") for line in block.splitlines() if line.startswith("$ ")]
    assert len(commands) == 4
    for command in commands:
        run = subprocess.run(command, shell=True, cwd=folder, env=_environment(), capture_output=True, text=True, timeout=300)
        assert run.returncode == 0, (command, run.stderr)
    assert "torch imported: no" in run.stdout


def test_links_lead_somewhere() -> None:
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
