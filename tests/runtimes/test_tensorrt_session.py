"""What of the engine runtime can be held without a GPU: what it says when an engine cannot be opened, and which golden cases
an engine of fixed sizes runs. Running an engine is tested where there is a device (`device`)."""

from __future__ import annotations

import contextlib
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from pom_edge.bundle import Artifact, Bundle, GoldenCase, TensorSpec
from pom_edge.cli import app
from pom_edge.compiling import EngineOptions, compile_bundle, find_spec
from pom_edge.errors import BundleError, InputError, MissingToolError
from pom_edge.runtimes import cuda_memory, tensorrt_session
from pom_edge.runtimes.cuda_device import Gpu, GpuState, find_gpus
from pom_edge.runtimes.cuda_memory import _checked
from pom_edge.runtimes.engine_file import check_binding, deserialise
from pom_edge.runtimes.fitting import run_fitting
from pom_edge.runtimes.session import open_session
from pom_edge.runtimes.tensorrt_library import load_tensorrt, logger_of, short_version, version_tuple
from tests.engines import edit_manifest, small_bundle
from tests.runtimes.test_tensorrt_logic import HostCuda

GPU = Gpu("NVIDIA GeForce RTX 3060", "8.6", False)
rtx = pytest.mark.skipif(find_spec("tensorrt_rtx") is None, reason="tensorrt_rtx has wheels for x86-64 Linux and Windows")
no_gpu = pytest.mark.skipif(bool(find_gpus().gpus), reason="says what happens without a GPU")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With an FP16 engine for TensorRT-RTX."""
    bundle = small_bundle(tmp_path_factory.mktemp("source"))
    compile_bundle(bundle, ["rtx"], EngineOptions(("fp16",)), lambda _: None)
    return bundle


@pytest.fixture
def small(source: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(source, tmp_path / "small.pom"))


def _facts(**changes: Any) -> dict[str, Any]:
    return {"version": "1.7.1", "gpu": None, "compute_capabilities": ["86", "89"], **changes}


def test_an_engine_is_bound_to_version_and_gpu() -> None:
    check_binding("rtx", _facts(), "a.pom", "1.7.1", [GPU])
    for facts, version, gpus, kind, message in (
        (_facts(), "1.8.0", [GPU], BundleError, "built by TensorRT-RTX 1.7.1, and here is TensorRT-RTX 1.8.0"),
        (_facts(), "1.7.1", [], MissingToolError, "needs an NVIDIA GPU"),
        (
            _facts(compute_capabilities=["87"], gpu="Orin"),
            "1.7.1",
            [GPU],
            BundleError,
            r"capability 87 \(Orin\), and here is NVIDIA GeForce RTX 3060 with 86",
        ),
    ):
        with pytest.raises(kind, match=message) as caught:
            check_binding("rtx", facts, "pom-export a.pom --target rtx", version, gpus)
        mends = "pom-export a.pom --target rtx" if gpus else "copy the bundle to a machine that has one"
        assert mends in str(caught.value), "nothing is wrong with an engine that lacks a GPU"


def test_what_an_engine_was_opted_into_widens_where_it_runs() -> None:
    """Version-compatible: the same major version, and no older one. Hardware-compatible: Ampere and later."""
    portable = {"version": "10.3.0", "version_compatible": True, "compute_capabilities": ["86"], "gpu": None}
    for version, runs in (("10.3.0", True), ("10.13.3.9", True), ("10.2.0", False), ("11.4.0.106", False)):
        with contextlib.nullcontext() if runs else pytest.raises(BundleError, match="built by TensorRT 10.3.0"):
            check_binding("trt", portable, "a.pom", version, [GPU])
    wide = {"version": "10.3.0", "hardware_compatible": True, "compute_capabilities": ["86"], "gpu": None}
    for capability, runs in (("8.0", True), ("12.0", True), ("7.5", False)):
        with contextlib.nullcontext() if runs else pytest.raises(BundleError, match="built for compute capability 86"):
            check_binding("trt", wide, "a.pom", "10.3.0", [Gpu("A", capability, False)])


@rtx
@no_gpu
def test_what_the_real_library_answers_without_a_driver(small: Path) -> None:
    """It answers None and writes `cudaError 35`: the message says driver, library and its path."""
    trt = load_tensorrt("rtx")
    logger = logger_of(trt)
    artifact = next(each for each in Bundle.open(small).manifest.artifacts if each.target == "rtx")
    with pytest.raises(
        MissingToolError, match=r"TensorRT-RTX 1\.\S+ \(.*libtensorrt_rtx.*\) cannot open .*driver is missing or too old"
    ):
        deserialise(trt, "rtx", logger, trt.Runtime(logger), small / artifact.file)


class _Refusing:
    """A library that refuses with the words of its log, as TensorRT does."""

    __name__, __version__ = "tensorrt", "10.3.0"

    def __init__(self, *words: str) -> None:
        self.lines: list[tuple[str, str]] = []
        self._words = words

    def errors(self) -> list[str]:
        return list(self._words)

    def deserialize_cuda_engine(self, data: bytes) -> None:
        assert data == b"engine"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "The engine plan file is not compatible with this version of TensorRT, expecting library version 10.3",
            "another version built it",
        ),
        (
            "The engine plan file is generated on an incompatible device, expecting compute capability 8.7 got compute 8.6",
            "another GPU",
        ),
        ("Serialization assertion magicTagRead == kMAGIC_TAG failed. Magic tag does not match", "no whole engine"),
        ("something new", "It says: something new"),
    ],
)
def test_a_refusal_is_explained(words: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.engine").write_bytes(b"engine")
    library = _Refusing(words)
    with pytest.raises(BundleError, match=message) as caught:
        deserialise(library, "trt", library, library, tmp_path / "a.engine")
    assert "TensorRT 10.3.0" in str(caught.value) and words in str(caught.value)


@rtx
@no_gpu
def test_the_command_line_without_a_gpu(small: Path) -> None:
    result = CliRunner().invoke(app, ["check", str(small), "--runtime", "rtx"])
    assert result.exit_code == 3 and "needs an NVIDIA GPU" in result.stderr and "Traceback" not in result.output
    result = CliRunner().invoke(app, ["check", str(small), "--runtime", "trt"])
    assert result.exit_code == 2 and re.search(r"no TRT engine; .*\.engine \(--runtime rtx\)", " ".join(result.stderr.split()))
    result = CliRunner().invoke(app, ["check", str(small), "--runtime", "rtx", "--artifact", "parallel.fp16.onnx"])
    assert result.exit_code == 2 and "parallel.fp16.onnx is for --runtime ort" in result.stderr
    assert open_session(small, artifact="parallel.fp16.onnx").check().passed, "the graph beside it runs as before"


def _of_version(content: dict[str, Any]) -> None:
    content["artifacts"][-1]["engine"]["version"] = "1.6.0"


def _of_gpu(content: dict[str, Any]) -> None:
    content["artifacts"][-1]["engine"].update(compute_capabilities=["120"], gpu=None)


def _of_tensorrt(content: dict[str, Any]) -> None:
    content["artifacts"][-1]["target"] = "trt"
    content["artifacts"][-1]["engine"]["compiler"] = "TensorRT"


@rtx
@no_gpu
@pytest.mark.parametrize(
    ("change", "runtime", "exit_code", "message"),
    [
        (None, "rtx", 3, r"the NVIDIA driver is missing or too old; update it\. It says: .*cuda"),
        (
            _of_version,
            "rtx",
            2,
            r"built by TensorRT-RTX 1\.6\.0, and here is TensorRT-RTX 1.*pom-export small.pom",
        ),
        (_of_gpu, "rtx", 2, r"capability 120 .*GeForce RTX 3060 with 86.*pom-export small.pom"),
        (_of_tensorrt, "trt", 3, r"TensorRT cannot be imported here \(tensorrt: "),
    ],
    ids=["driver", "version", "gpu", "tensorrt"],
)
def test_exit_codes_where_there_is_a_gpu(
    change: Any, runtime: str, exit_code: int, message: str, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU whose driver does not start: the bundle, its hashes, the real library and its answer are real, the GPU is not."""
    monkeypatch.setattr(tensorrt_session, "find_gpus", lambda: GpuState([GPU], "12.0", ""))
    monkeypatch.setattr(cuda_memory, "_import", HostCuda)
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    if change is not None:
        edit_manifest(small, change)
    result = CliRunner().invoke(app, ["check", str(small), "--runtime", runtime])
    told = " ".join(result.stderr.split())
    assert result.exit_code == exit_code and re.search(message, told), result.output
    assert "Traceback" not in result.output


@rtx
def test_a_truncated_engine_never_reaches_the_parser(small: Path) -> None:
    engine = next(small.glob("*.engine"))
    engine.write_bytes(engine.read_bytes()[:1000])
    result = CliRunner().invoke(app, ["check", str(small), "--runtime", "rtx"])
    told = " ".join(result.stderr.split())
    assert result.exit_code == 2 and re.search(
        r"has 1000 bytes, expected \d+: it was cut short, changed or is of another export", told
    ), told


def _artifact(tokens: int | str, batch: int | str, form: str = "parallel", high: int = 8) -> Artifact:
    bounds = {"tokens": (1, high)} if isinstance(tokens, str) else {}
    return Artifact(
        target="rtx",
        form=form,
        precision="fp16",
        file="a.engine",
        files=[],
        inputs=[TensorSpec(name="x", dtype="float32", shape=[batch, tokens, 3], bounds=bounds)],
        outputs=[TensorSpec(name="y", dtype="float32", shape=[batch, tokens, 3])],
        token_axes={"x": 1, "y": 1} if form == "recurrent" else {},
        verified="",
        engine={"version": "1"},
    )


def _case(chunks: list[int] | None = None) -> GoldenCase:
    return GoldenCase(name="a", kind="random", description="", inputs={}, outputs={}, chunks=chunks or [])


def test_an_engine_of_fixed_sizes_runs_what_fits() -> None:
    x = np.arange(60, dtype=np.float32).reshape(4, 5, 3)
    seen: list[tuple[int, ...]] = []

    def double(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        seen.append(inputs["x"].shape)
        return {"y": 2 * inputs["x"]}

    for artifact, shapes in (
        (_artifact(5, 1), [(1, 5, 3)] * 4),
        (_artifact(5, 2), [(2, 5, 3)] * 2),
        (_artifact("tokens", "batch"), [(4, 5, 3)]),
        (_artifact(5, 3), None),
        (_artifact(6, 1), None),
        (_artifact("tokens", 1, high=4), None),
    ):
        seen.clear()
        outputs = run_fitting(double, artifact, _case(), {"x": x})
        assert (outputs is None) == (shapes is None)
        if outputs is not None:
            assert seen == shapes and np.array_equal(outputs["y"], 2 * x)


def test_a_stream_is_cut_into_chunks_that_the_engine_takes() -> None:
    x = np.arange(21, dtype=np.float32).reshape(1, 7, 3)
    seen: list[int] = []

    def double(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        seen.append(inputs["x"].shape[1])
        return {"y": 2 * inputs["x"]}

    for artifact, chunks in (
        (_artifact("tokens", 1, "recurrent"), [5, 2]),
        (_artifact("tokens", 1, "recurrent", high=3), [3, 3, 1]),
        (_artifact(1, 1, "recurrent"), [1] * 7),
        (_artifact(3, 1, "recurrent"), None),
    ):
        seen.clear()
        outputs = run_fitting(double, artifact, _case([5, 2]), {"x": x})
        assert (outputs is None) == (chunks is None)
        if outputs is not None:
            assert seen == chunks and np.array_equal(outputs["y"], 2 * x)


def test_versions() -> None:
    assert version_tuple("10.13.3.9") == (10, 13, 3, 9) and version_tuple("10.0rc1") == (10,)
    assert short_version("11.4.0.106") == "11.4.0"


def test_a_tensorrt_that_is_too_old_or_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tensorrt").mkdir()
    module = tmp_path / "tensorrt" / "__init__.py"
    monkeypatch.syspath_prepend(tmp_path)
    for text, message in (
        ("__version__ = '8.6.2'", r"TensorRT 8.6.2 is too old; expected 10.3"),
        ("raise RuntimeError('could not download tensorrt_libs')", "cannot be imported here .*could not download"),
        ("raise OSError('libnvinfer.so.10: cannot open shared object file')", "libnvinfer.so.10"),
    ):
        module.write_text(text)
        monkeypatch.delitem(sys.modules, "tensorrt", raising=False)
        shutil.rmtree(tmp_path / "tensorrt" / "__pycache__", ignore_errors=True)
        with pytest.raises(MissingToolError, match=message):
            load_tensorrt("trt")
    monkeypatch.delitem(sys.modules, "tensorrt", raising=False)


class _Status(int):
    """As cuda-python's cudaError_t: a number with a name."""

    name = ""


def _status(code: int, name: str) -> _Status:
    status = _Status(code)
    status.name = name
    return status


def test_what_cuda_reports() -> None:
    assert _checked((_status(0, "cudaSuccess"), 7)) == 7 and _checked((_status(0, "cudaSuccess"),)) is None
    with pytest.raises(InputError, match=r"no memory for 2.00 GiB: .*--form streamed"):
        _checked((_status(2, "cudaErrorMemoryAllocation"), None), 2 << 30)
    with pytest.raises(MissingToolError, match="driver that is too old"):
        _checked((_status(35, "cudaErrorInsufficientDriver"), None))
    with pytest.raises(InputError, match="cudaErrorLaunchFailure"):
        _checked((_status(719, "cudaErrorLaunchFailure"),))


@pytest.mark.device
@pytest.mark.skipif(not find_gpus().gpus, reason="runs an engine: needs a GPU")
def test_an_engine_gives_the_models_answers(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not run on a device yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compile_bundle(small, ["rtx"], EngineOptions(("fp32", "fp16")), lambda _: None)
    for precision in ("fp32", "fp16"):
        file = next(a.file for a in Bundle.open(small).manifest.artifacts if a.target == "rtx" and a.precision == precision)
        with open_session(small, runtime="rtx", artifact=file) as session:
            assert session.check().passed
            _, inputs, _ = next(iter(session.bundle.cases()))
            first = session.run_named({name: array[:1] for name, array in inputs.items()})
            for _ in range(3):  # plain, captured, launched
                again = session.run_named({name: array[:1] for name, array in inputs.items()})
                assert all(np.array_equal(first[name], again[name]) for name in first)
