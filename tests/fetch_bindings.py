"""Bring TensorRT's Python bindings, each version into a folder of its own: python tests/fetch_bindings.py FOLDER.

They exclude each other in one environment. Nothing of them is imported here, and they stay outside of the path: a test puts one
of them there, in a process. What is there already is kept. Ends with 0 where every version is there or has no wheel for this
Python, with 1 where the package index did not answer; then the tests that need them are skipped, and say so.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

LOCK = Path(__file__).parent / "data" / "tensorrt_api" / "bindings.lock"


def locked() -> dict[str, str]:
    """Requirement with its hashes by version."""
    lines = [line for line in LOCK.read_text().splitlines() if not line.startswith("#")]
    return {line.split("==")[1].split()[0]: line for line in lines}


def fetch(requirement: str, target: Path) -> str:
    """Install one version; returns what is wrong, empty where nothing is."""
    with tempfile.TemporaryDirectory() as scratch:
        asked = Path(scratch) / "requirement.txt"
        asked.write_text(requirement)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--retries", "1"]
        flags = ["--no-deps", "--only-binary=:all:", "--require-hashes", "--target", f"{scratch}/new"]
        done = subprocess.run([*pip, *flags, "--requirement", asked], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(f"{scratch}/new", target)
    return "" if done.returncode == 0 else done.stderr.strip()


def main(folder: Path) -> int:
    """All of the lock."""
    for version, requirement in locked().items():
        target = folder / version
        wrong = "" if target.exists() else fetch(requirement, target)
        if wrong:
            print(f"TensorRT's bindings {version} could not be had; the tests with them are skipped:\n{wrong}", file=sys.stderr)
            if "from versions: none" in wrong or "from versions:" not in wrong:
                return 1  # no index, or not the locked file; where other versions are listed, this Python has no wheel
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
