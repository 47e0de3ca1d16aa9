"""Builder and runtime run with TensorRT's real bindings of each version, on stubs for their native libraries. No build, no GPU.

The bindings come by `make test` (tests/fetch_bindings.py) into the environment's `bindings` folder, outside of its path.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from tests.fetch_bindings import locked
from tests.stub_library import MACHINES, write_stub
from tests.test_tensorrt_api import DATA, VERSIONS

ROOT = Path(__file__).parent.parent
FUNCTIONS = (  # what `nm -D --undefined-only tensorrt.so` asks of TensorRT, the same in all versions
    "createInferBuilder_INTERNAL", "createInferRefitter_INTERNAL", "createInferRuntime_INTERNAL", "createNvOnnxParser_INTERNAL",
    "createNvOnnxParserRefitter_INTERNAL", "getBuilderPluginRegistry", "getNvOnnxParserVersion", "getPluginRegistry",
    "initLibNvInferPlugins",
)  # fmt: skip
LIBRARIES = ("libnvinfer", "libnvonnxparser", "libnvinfer_plugin")
on_linux = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in MACHINES, reason="writes an ELF file for x86-64 or aarch64"
)


@pytest.fixture(scope="module")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stubs")
    for name in (f"{library}.so.{major}" for library in LIBRARIES for major in (10, 11)):
        write_stub(folder / name, FUNCTIONS, platform.machine())
    return folder


def _with_bindings(version: str, stubs: Path, *command: str) -> str:
    bindings = Path(sys.prefix) / "bindings" / version
    if not bindings.exists():
        reason = f"no bindings of TensorRT {version}; run: python tests/fetch_bindings.py {bindings.parent}"
        warnings.warn(reason, stacklevel=1)
        pytest.skip(reason)
    env = {**os.environ, "LD_LIBRARY_PATH": str(stubs), "PYTHONPATH": os.pathsep.join([str(bindings), str(ROOT)])}
    done = subprocess.run([sys.executable, *command], env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@on_linux
def test_a_stub_is_a_library_whose_functions_answer_0(stubs: Path) -> None:
    library = ctypes.CDLL(str(stubs / "libnvinfer.so.10"))
    for name in FUNCTIONS:
        function = getattr(library, name)
        function.restype = ctypes.c_void_p
        assert function() is None
    with pytest.raises(AttributeError):
        _ = library.createInferBuilder


def test_the_lock_has_every_version_that_is_written_down() -> None:
    assert set(locked()) == {version for version in VERSIONS if not version.startswith("rtx")}


@on_linux
@pytest.mark.parametrize("version", locked())
def test_what_is_written_down_is_what_the_bindings_say(version: str, stubs: Path) -> None:
    said = _with_bindings(version, stubs, "tests/data/tensorrt_api/describe.py", "tensorrt_bindings")
    assert json.loads(said) == json.loads((DATA / f"{version}.json").read_text())


@on_linux
@pytest.mark.parametrize("version", locked())
def test_builder_and_runtime_run_with_the_bindings(version: str, stubs: Path) -> None:
    assert _with_bindings(version, stubs, "tests/real_bindings.py").strip() == version


def test_what_is_written_down_is_what_tensorrt_rtx_says(tmp_path: Path) -> None:
    module = pytest.importorskip("tensorrt_rtx", reason="has wheels for x86-64 Linux and Windows")
    written = DATA / f"rtx-{module.__version__}.json"
    if not written.exists():
        pytest.skip(f"TensorRT-RTX {module.__version__} is not written down; requirements-dev.lock has another one")
    command = [sys.executable, DATA / "describe.py", "tensorrt_rtx"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert json.loads(said) == json.loads(written.read_text())
