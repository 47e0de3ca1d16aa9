"""Whether optional packages can be imported: each is asked in a process of its own, which a broken library may end."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from importlib.util import find_spec

from pom_edge.progress import Step

NOT_INSTALLED = "not installed"
TIMEOUT_S = 120  # a first import after the installation compiles thousands of files, on a slow card
_NOT_FROM_HERE = "import sys\nsys.path = [each for each in sys.path if each]\n"  # a file of that name in the current folder
# What is tried where the name alone is not what a step needs; it says by itself what to do.
_CODE = {
    "coremltools": (
        "from pom_edge.errors import PomError\nfrom pom_edge.runtimes.coreml_library import load_coremltools\n"
        "try:\n    load_coremltools()\nexcept PomError as error:\n    sys.exit(str(error))"
    )
}

__all__ = ["NOT_INSTALLED", "import_faults"]


def import_faults(modules: Iterable[str], step: Step = lambda _: None) -> dict[str, str]:
    """What each module is found to be: ``NOT_INSTALLED``, a sentence on why its import fails, or empty where it works.

    One after the other: two of them at once take the memory of both, and an interrupt ends the one that is running.
    """
    return {module: _fault(module, step) for module in dict.fromkeys(modules)}


def _fault(module: str, step: Step) -> str:
    if find_spec(module) is None:
        return NOT_INSTALLED
    step(f"import {module}")
    command = [sys.executable, "-c", _NOT_FROM_HERE + _CODE.get(module, f"import {module}")]
    try:
        done = subprocess.run(  # noqa: S603  # our own interpreter, names of our own
            command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"{module} is installed, but importing it takes more than {TIMEOUT_S} s"
    if done.returncode == 0:
        return ""
    ended = f"signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
    said = [line.strip() for line in done.stderr.splitlines() if line.strip()] if done.returncode == 1 else []
    if said and module in _CODE:
        return said[-1]
    return f"{module} is installed, but importing it fails ({said[-1] if said else ended}); install it anew"
