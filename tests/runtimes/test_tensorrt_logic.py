"""The session's bookkeeping (shapes, addresses, state, captured graphs) on a device made of host memory.

Stands in for the hardware, not for TensorRT's mathematics: it shows that every byte goes where it should, and that a stream
survives what may happen between two of its steps. Nothing here is called a run on a device.
"""

from __future__ import annotations

import ctypes
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from pom_edge.bundle import GOLDEN, Artifact, Bundle, Manifest, TensorSpec
from pom_edge.errors import GateError, InputError
from pom_edge.runtimes import cuda_memory, tensorrt_session
from pom_edge.runtimes.cuda_device import Gpu, GpuState
from pom_edge.runtimes.tensorrt_session import TensorRTSession

WIDTH = 3
OK = 0


class HostCuda:
    """cuda-python's runtime API on host memory; a capture records what is queued, and a launch runs it."""

    cudaMemcpyKind = types.SimpleNamespace(cudaMemcpyHostToDevice=1, cudaMemcpyDeviceToHost=2, cudaMemcpyDeviceToDevice=3)
    cudaStreamCaptureMode = types.SimpleNamespace(cudaStreamCaptureModeThreadLocal=1)

    def __init__(self) -> None:
        self.blocks: dict[int, Any] = {}
        self.recording: list[Callable[[], None]] | None = None
        self.launched = self.executed = 0
        self.graphs: list[list[Callable[[], None]]] = []

    def cudaStreamCreate(self) -> tuple[int, int]:
        return OK, 7

    def cudaStreamDestroy(self, stream: int) -> tuple[int]:
        return (OK,)

    def cudaStreamSynchronize(self, stream: int) -> tuple[int]:
        return (OK,)

    def cudaMalloc(self, size: int) -> tuple[int, int]:
        block = ctypes.create_string_buffer(size)
        self.blocks[ctypes.addressof(block)] = block
        return OK, ctypes.addressof(block)

    def cudaFree(self, address: int) -> tuple[int]:
        del self.blocks[address]
        return (OK,)

    def cudaMemcpyAsync(self, target: int, source: int, size: int, kind: int, stream: int) -> tuple[int]:
        assert self.recording is None, "copies stay outside of captured graphs"
        for side, address in ((2, source), (1, target)):
            if kind in (side, 3):
                assert address in self.blocks and size <= len(self.blocks[address]), "outside of what was allocated"
        ctypes.memmove(target, source, size)
        return (OK,)

    def queue(self, work: Callable[[], None]) -> None:
        if self.recording is not None:
            self.recording.append(work)
        else:
            self.executed += 1
            work()

    def cudaStreamBeginCapture(self, stream: int, mode: int) -> tuple[int]:
        self.recording = []
        return (OK,)

    def cudaStreamEndCapture(self, stream: int) -> tuple[int, Any]:
        graph, self.recording = self.recording, None
        return OK, graph

    def cudaGraphInstantiate(self, graph: Any, flags: int) -> tuple[int, Any]:
        self.graphs.append(graph)
        return OK, graph

    def cudaGraphDestroy(self, graph: Any) -> tuple[int]:
        return (OK,)

    def cudaGraphExecDestroy(self, graph: Any) -> tuple[int]:
        self.graphs.remove(graph)
        return (OK,)

    def cudaGraphLaunch(self, graph: Any, stream: int) -> tuple[int]:
        self.launched += 1
        for work in graph:
            work()
        return (OK,)


class RunningMean:
    """An engine and its context at once: y = x + mean of all tokens so far, as a recurrent artifact computes it."""

    names = ("x", "state.count", "state.0.mean", "y", "next.count", "next.0.mean")
    num_io_tensors = len(names)
    device_memory_size_v2 = 512

    def __init__(self, cuda: HostCuda) -> None:
        self.cuda, self.shapes, self.addresses = cuda, dict[str, tuple[int, ...]](), dict[str, int]()

    def create_execution_context(self, strategy: str) -> RunningMean:
        assert strategy == "USER_MANAGED"
        return self

    def get_tensor_name(self, index: int) -> str:
        return self.names[index]

    def get_tensor_mode(self, name: str) -> str:
        return "INPUT" if name == "x" or name.startswith("state.") else "OUTPUT"

    def get_tensor_location(self, name: str) -> str:
        return "DEVICE"

    def get_tensor_dtype(self, name: str) -> Any:
        return self.numpy_type(name)

    def numpy_type(self, name: str) -> type:
        return np.int64 if name.endswith("count") else np.float32

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.shapes[name] = shape
        return name != "x" or shape[1] <= 8

    def infer_shapes(self) -> list[str]:
        return []

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return self.shapes["x" if name == "y" else name.replace("next.", "state.")]

    def set_tensor_address(self, name: str, address: int) -> None:
        assert address in self.cuda.blocks
        self.addresses[name] = address

    def update_device_memory_size_for_shapes(self) -> int:
        return 300

    def set_device_memory(self, address: int, size: int) -> None:
        assert address in self.cuda.blocks and 300 <= size <= len(self.cuda.blocks[address])

    def execute_async_v3(self, handle: int) -> bool:
        assert handle == 7
        self.cuda.queue(self._work)
        return True

    def _at(self, name: str) -> np.ndarray:
        shape = self.get_tensor_shape(name) if name not in self.shapes else self.shapes[name]
        block = self.cuda.blocks[self.addresses[name]]
        return np.frombuffer(block, self.numpy_type(name), int(np.prod(shape))).reshape(shape)

    def _work(self) -> None:
        x, count, mean = self._at("x"), self._at("state.count"), self._at("state.0.mean")
        total = count[:, None, None] + x.shape[1]
        following = mean + (x.mean(1, keepdims=True) - mean) * x.shape[1] / total
        self._at("y")[:] = x + following
        self._at("next.count")[:] = count + x.shape[1]
        self._at("next.0.mean")[:] = following


@pytest.fixture
def cuda() -> HostCuda:
    return HostCuda()


@pytest.fixture
def session(cuda: HostCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TensorRTSession:
    return _open(cuda, tmp_path, monkeypatch, [], self_check=False)


def _open(
    cuda: HostCuda, folder: Path, monkeypatch: pytest.MonkeyPatch, golden: list[Any], self_check: bool
) -> TensorRTSession:
    enum = types.SimpleNamespace
    trt = types.ModuleType("tensorrt")
    trt.__dict__.update(
        __version__="10.3.0",
        ILogger=type("ILogger", (), {}),
        Runtime=lambda logger: object(),
        ExecutionContextAllocationStrategy=enum(USER_MANAGED="USER_MANAGED"),
        TensorIOMode=enum(INPUT="INPUT"),
        TensorLocation=enum(HOST="HOST"),
        nptype=lambda dtype: dtype,
    )
    monkeypatch.setattr(tensorrt_session, "deserialise", lambda *_: RunningMean(cuda))
    return open_on_host(trt, cuda, folder, monkeypatch, golden, self_check)


def open_on_host(
    trt: Any, cuda: HostCuda, folder: Path, monkeypatch: pytest.MonkeyPatch, golden: list[Any], self_check: bool
) -> TensorRTSession:
    """A session of a recurrent artifact with this TensorRT and this memory; `tests/real_bindings.py` gives other ones."""
    monkeypatch.setattr(tensorrt_session, "load_tensorrt", lambda target: trt)
    monkeypatch.setattr(tensorrt_session, "find_gpus", lambda: GpuState([Gpu("Orin", "8.7", True)], "12.6", ""))
    monkeypatch.setattr(cuda_memory, "_import", lambda: cuda)
    free = ["batch", "tokens", WIDTH]
    state = [("count", "int64", ["batch"]), ("0.mean", "float32", ["batch", 1, WIDTH])]
    artifact = Artifact(
        target="trt",
        form="recurrent",
        precision="fp16",
        file="a.engine",
        files=["a.engine"],
        inputs=[
            TensorSpec(name="x", dtype="float32", shape=free, bounds={"tokens": (1, 8)}),
            *(TensorSpec(name=f"state.{name}", dtype=dtype, shape=shape) for name, dtype, shape in state),
        ],
        outputs=[
            TensorSpec(name="y", dtype="float32", shape=free),
            *(TensorSpec(name=f"next.{name}", dtype=dtype, shape=shape) for name, dtype, shape in state),
        ],
        token_axes={"x": 1, "y": 1},
        verified="",
        engine={
            "compiler": "TensorRT",
            "version": trt.__version__,
            "compute_capabilities": ["87"],
            "gpu": "Orin",
            "shapes": {"tokens": [1, 1, 8]},
        },
    )
    about: dict[str, Any] = {"name": "a", "created": "", "producer": "", "tools": {}, "model": {}, "config_hash": ""}
    files = [{"path": "a.engine", "sha256": "0" * 64, "bytes": 0}]
    manifest = Manifest(**about, artifacts=[artifact], golden=golden, files=files)  # type: ignore[arg-type]
    return TensorRTSession(Bundle(folder, manifest), artifact, self_check=self_check)


def _expected(x: np.ndarray, lengths: list[int]) -> np.ndarray:
    """In float64: every token of a chunk gets the mean up to the end of its chunk."""
    out, seen = x.astype(np.float64), 0
    for length in lengths:
        out[:, seen : seen + length] += x[:, : seen + length].astype(np.float64).mean(1, keepdims=True)
        seen += length
    return out


def _cut(x: np.ndarray, lengths: list[int]) -> list[np.ndarray]:
    return np.split(x, np.cumsum(lengths)[:-1], axis=1)


def test_a_stream_keeps_its_state_on_the_device(session: TensorRTSession, cuda: HostCuda, tmp_path: Path) -> None:
    lengths = [4, 1, 1, 1, 1, 3]
    x = np.random.default_rng(0).standard_normal((2, sum(lengths), WIDTH)).astype(np.float32)
    answers = [np.asarray(session.step(part)) for part in _cut(x, lengths)]
    assert np.allclose(np.concatenate(answers, 1), _expected(x, lengths), atol=1e-5)
    assert session.tokens_seen == [11, 11]
    assert cuda.launched == 3 and cuda.executed == 3 and not cuda.graphs, "4 | 1 captured 1 1 | 3: a graph for what repeats"
    session.save_state(tmp_path / "s.safetensors")
    session.reset()
    assert session.tokens_seen == []
    session.load_state(tmp_path / "s.safetensors")
    more = np.ones((2, 2, WIDTH), np.float32)
    whole = np.concatenate([x, more], 1)
    assert np.allclose(np.asarray(session.step(more)), _expected(whole, [*lengths, 2])[:, -2:], atol=1e-5)
    session.close()
    assert not cuda.blocks, "everything is given back"
    with pytest.raises(InputError, match="closed"):
        session.step(more)


def test_a_run_leaves_the_stream_where_it_is(session: TensorRTSession) -> None:
    x = np.random.default_rng(1).standard_normal((1, 9, WIDTH)).astype(np.float32)
    session.step(x[:, :4])
    alone = np.asarray(session.run(x))  # in chunks of 8 and 1
    assert np.allclose(alone, _expected(x, [8, 1]), atol=1e-5)
    assert np.allclose(np.asarray(session.step(x[:, 4:])), _expected(x, [4, 5])[:, 4:], atol=1e-5)
    assert session.tokens_seen == [9]


def test_outputs_belong_to_the_caller(session: TensorRTSession) -> None:
    x = np.ones((1, 2, WIDTH), np.float32)
    first = np.asarray(session.run(x))
    kept = first.copy()
    session.run(5 * x)
    assert np.array_equal(first, kept)


def test_a_chunk_that_breaks_the_stream_leaves_it_unchanged(session: TensorRTSession) -> None:
    x = np.ones((1, 2, WIDTH), np.float32)
    session.step(x)
    with pytest.raises(InputError, match="NaN or infinity; the stream is unchanged"):
        session.step(np.full((1, 2, WIDTH), 3e38, np.float32))
    assert session.tokens_seen == [2] and np.allclose(np.asarray(session.step(x)), 2.0)


def test_lengths_outside_of_the_profile_are_refused(session: TensorRTSession) -> None:
    with pytest.raises(InputError, match="tokens is 9; this artifact takes 1 to 8"):
        session.step(np.ones((1, 9, WIDTH), np.float32))


def test_the_first_opening_compares_with_the_golden_data(
    cuda: HostCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine of the right hash and another model is refused; one that was checked here is not checked again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    x = np.random.default_rng(2).standard_normal((2, 11, WIDTH)).astype(np.float32)
    golden = {"name": "a", "kind": "random", "description": "", "inputs": {"x": "x"}, "outputs": {"y": "y"}, "chunks": [4, 7]}
    right = _expected(x, [4, 7]).astype(np.float32)
    save_file({"x": x, "y": right[:, ::-1].copy()}, tmp_path / GOLDEN)
    with pytest.raises(GateError, match=r"a.engine on TensorRT 10.3.0 on Orin does not give the model's answers: y .* dB"):
        _open(cuda, tmp_path, monkeypatch, [golden], self_check=True)
    assert not cuda.blocks and not (tmp_path / "cache").exists()
    save_file({"x": x, "y": right}, tmp_path / GOLDEN)
    _open(cuda, tmp_path, monkeypatch, [golden], self_check=True).close()
    executed = cuda.executed
    _open(cuda, tmp_path, monkeypatch, [golden], self_check=True).close()
    assert cuda.executed == executed
