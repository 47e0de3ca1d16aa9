"""A package that is there and broken is told from one that is absent, whatever its import does."""

from __future__ import annotations

from pathlib import Path

import pytest

from pom_edge import importable, inspection
from pom_edge.importable import NOT_INSTALLED, import_faults
from pom_edge.runtimes.coreml_library import REINSTALL


def test_what_an_import_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = {
        "works_here": "import json",
        "lacks_a_library": "raise ImportError('libcublas.so.12: not found')",
        "ends_the_process": "import os; os.kill(os.getpid(), 11)",
        "leaves": "import os; os._exit(3)",
        "takes_ages": "import time; time.sleep(60)",
    }
    for name, text in sources.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(importable, "TIMEOUT_S", 2)
    assert import_faults([*sources, "nobody_has_this", "works_here"]) == {
        "works_here": "",
        "lacks_a_library": "lacks_a_library is installed, but importing it fails (ImportError: libcublas.so.12: not found); "
        "install it anew",
        "ends_the_process": "ends_the_process is installed, but importing it fails (signal 11); install it anew",
        "leaves": "leaves is installed, but importing it fails (exit code 3); install it anew",
        "takes_ages": "takes_ages is installed, but importing it takes more than 2 s",
        "nobody_has_this": NOT_INSTALLED,
    }


def test_a_file_here_does_not_stand_in_for_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "onnx.py").write_text("raise RuntimeError('not the package')")
    monkeypatch.chdir(tmp_path)
    assert import_faults(["onnx"]) == {"onnx": ""}


def test_core_ml_names_what_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the words of an export that needs it."""
    (tmp_path / "coremltools").mkdir()
    (tmp_path / "coremltools" / "__init__.py").write_text("raise OSError('libmilstoragepython.so: wrong ELF class')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (said,) = import_faults(["coremltools"]).values()
    assert said.startswith(
        "coremltools is installed, but importing it fails (OSError: libmilstoragepython.so: wrong ELF class). "
    )
    assert said.endswith(REINSTALL)


def test_doctor_tells_broken_from_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"torch": "torch is installed, but importing it fails (signal 4); install it anew", "coremltools": NOT_INSTALLED}
    monkeypatch.setattr(inspection, "import_faults", lambda modules, _: {name: said.get(name, "") for name in modules})
    steps = inspection.diagnose()["can do"]
    assert steps["export"] == said["torch"] and steps["run and check (ort)"] == "ready"
    assert steps["coreml"] == f"{said['torch']}; missing coremltools; run: pip install 'pom-edge[export,coreml]'"
