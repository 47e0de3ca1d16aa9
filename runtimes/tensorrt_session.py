"""TensorRT and TensorRT-RTX engines: cuda-python for memory, one stream, no torch.

state      recurrent form: stays on the device from step to step; save_state() and tokens_seen bring it back
scratch    one arena for all passes of the streamed form (and for the one graph of the others)
graphs     the second run with the same shapes is captured as a CUDA graph, the third and later ones launch it
outputs    fresh arrays, the caller's own: nothing in them changes with the next run
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from pom_edge.bundle import Artifact, Bundle
from pom_edge.engine_options import rebuild_command
from pom_edge.errors import GateError, InputError
from pom_edge.runtimes.cuda_device import Gpu, find_gpus
from pom_edge.runtimes.cuda_memory import Cuda, DeviceBuffer
from pom_edge.runtimes.engine_file import check_binding, check_facts, deserialise
from pom_edge.runtimes.session import Session
from pom_edge.runtimes.stepping import COUNT, NEXT, STATE, Arrays, empty_state, is_state
from pom_edge.runtimes.tensorrt_library import NAMES, load_tensorrt, logger_of, starting

__all__ = ["TensorRTSession"]


class TensorRTSession(Session):
    """An engine of a bundle.

    Args:
        bundle, artifact: what to run.
        spill: streamed form: folder for the tokens between passes.
        self_check: compare with the golden data when an engine is opened on this machine for the first time.

    Raises:
        MissingToolError: no TensorRT, no cuda-python, no GPU, or a driver that is too old.
        BundleError: built for another version or GPU, or not to be opened.
        GateError: it does not give the model's answers.
    """

    extension = ".engine"

    def __init__(self, bundle: Bundle, artifact: Artifact, spill: Path | None = None, self_check: bool = True) -> None:
        super().__init__(bundle, artifact, spill)
        check_facts(bundle, artifact)
        facts = artifact.engine or {}
        self._rebuild = rebuild_command(bundle.path.name, artifact.target, artifact.form, artifact.precision, facts, False)
        trt = load_tensorrt(artifact.target)
        gpus = find_gpus().gpus
        check_binding(artifact.target, facts, self._rebuild, trt.__version__, gpus)
        self._version, self._gpu = trt.__version__, gpus[0]
        logger = logger_of(trt)
        with starting(trt, artifact.target):
            self._library = trt.Runtime(logger)
        if facts.get("version_compatible"):  # such an engine brings the runtime that it was built with
            self._library.engine_host_code_allowed = True
        self._cuda = Cuda()
        self._arena = DeviceBuffer(self._cuda)
        self._graphs: list[_Graph] = []
        self._on_device = False
        try:
            files = [artifact.file] if artifact.stream is None else [step.file for step in artifact.stream.passes]
            for file in files:
                engine = deserialise(trt, artifact.target, logger, self._library, bundle.path / file)
                self._graphs.append(_Graph(trt, engine, self._cuda, self._arena, file))
            if self_check:
                self._check_once()
        except BaseException:
            self.close()
            raise

    @property
    def runtime(self) -> str:
        return f"{NAMES[self.artifact.target]} {self._version} on {self._gpu.name}"

    @property
    def device_bytes(self) -> int:
        """Scratch memory on the device so far: without weights and the CUDA context."""
        return self._arena.size

    def _run_graph(self, index: int, names: list[str], inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        if self._on_device:  # a run of its own, whose state takes the place of the stream's
            self._fetch()
        outputs = self._graph(index).run(inputs)
        return {name: outputs[name] for name in names}

    def _graph(self, index: int) -> _Graph:
        if not self._graphs:
            raise InputError("this session is closed; open another one")
        return self._graphs[index]

    def step(self, x: np.ndarray | None = None, /, **inputs: np.ndarray) -> np.ndarray | dict[str, np.ndarray]:
        """As :meth:`Session.step`; the state stays on the device.

        It is not looked at between steps: NaN shows in the outputs, and the stream is then left where it was.
        """
        self._must_be_recurrent("step")
        chunk = self._chunk(x, inputs)
        graph = self._graph(0)
        if not self._on_device:
            state = self._state or empty_state(self.artifact.inputs, self._batch(chunk))
            graph.put(state)
            self._on_device, self._state = True, state
        outputs = graph.run(chunk, self._state)
        if not all(np.isfinite(array).all() for array in outputs.values() if array.dtype.kind == "f"):
            raise InputError("the chunk drives the stream to NaN or infinity; the stream is unchanged")
        graph.keep(self._state or {})
        return self._answer(outputs)

    def reset(self) -> None:
        """Forget the stream."""
        super().reset()
        self._on_device = False

    @property
    def tokens_seen(self) -> list[int]:
        """As :attr:`Session.tokens_seen`; reads the count from the device."""
        if self._state is not None and self._on_device:
            self._state |= self._graph(0).get({COUNT: self._state[COUNT]})
        return super().tokens_seen

    def save_state(self, path: str | os.PathLike[str]) -> None:
        """As :meth:`Session.save_state`."""
        if self._on_device:
            self._fetch()
        super().save_state(path)

    def _fetch(self) -> None:
        """The stream's state back to this side; the next step takes it there again."""
        self._state = self._graph(0).get(self._state or {})
        self._on_device = False

    def load_state(self, path: str | os.PathLike[str]) -> None:
        """As :meth:`Session.load_state`."""
        super().load_state(path)
        self._on_device = False

    def close(self) -> None:
        for graph in self._graphs:
            graph.close()
        self._graphs = []
        self._arena.close()
        self._cuda.close()

    def _check_once(self) -> None:
        """Known-bad builds give wrong answers without a word (10.3 on ViTs), so a first run is never trusted."""
        mark = _mark(self.bundle.sha256(self.artifact.file), self._gpu, self._version)
        if mark.exists():
            return
        report = self.check().artifacts[0]
        if not report.passed:
            listed = ", ".join(f"{name} {m.snr_db:.1f} dB ({m.nonfinite} NaN/Inf)" for name, m in report.outputs.items())
            raise GateError(
                f"{self.artifact.file} on {self.runtime} does not give the model's answers: {listed}; the gate is "
                f"{report.gate_db:g} dB. Build it again: {self._rebuild}"
            )
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()


class _Graph:
    """One engine with its execution context, inputs and outputs."""

    def __init__(self, trt: Any, engine: Any, cuda: Cuda, arena: DeviceBuffer, file: str) -> None:
        self._trt, self._engine, self._cuda, self._arena, self._file = trt, engine, cuda, arena, file
        self._context = engine.create_execution_context(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        if self._context is None:
            raise InputError(f"TensorRT cannot make an execution context for {file}: not enough device memory")
        names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        self._inputs = [name for name in names if engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT]
        self._outputs = [name for name in names if name not in self._inputs]
        self._buffers = {name: DeviceBuffer(cuda) for name in names}
        self._key: tuple[Any, ...] = ()
        self._runs = 0
        self._captured: Any = None
        self._on_host = {name for name in names if engine.get_tensor_location(name) == trt.TensorLocation.HOST}  # shapes
        self._hosted: Arrays = {}

    def run(self, inputs: Arrays, on_device: Arrays | None = None) -> Arrays:
        """Run once.

        Args:
            inputs: by name.
            on_device: inputs that are there already, for their shapes; outputs that carry state stay there too.

        Returns:
            The other outputs.
        """
        state = on_device or {}
        shapes = {name: (inputs.get(name) if name in inputs else state[name]).shape for name in self._inputs}  # type: ignore[union-attr]
        self._hosted = {name: np.ascontiguousarray(inputs[name]) for name in self._on_host if name in inputs}
        outputs = self._shaped(shapes)
        for name, array in inputs.items():
            if name not in self._on_host:
                self._cuda.upload(self._buffers[name].address, array)
        self._enqueue()
        wanted = {name: array for name, array in outputs.items() if not (state and is_state(name))}
        for name, array in wanted.items():
            self._cuda.download(array, self._buffers[name].address)
        self._cuda.wait()
        return wanted

    def put(self, state: Arrays) -> None:
        """State to the device."""
        for name, array in state.items():
            self._buffers[name].reserve(array.nbytes)
            self._cuda.upload(self._buffers[name].address, np.ascontiguousarray(array))
        self._cuda.wait()

    def keep(self, state: Arrays) -> None:
        """The new state takes the place of the old one, on the device."""
        for name, array in state.items():
            self._cuda.copy(self._buffers[name].address, self._buffers[NEXT + name.removeprefix(STATE)].address, array.nbytes)
        self._cuda.wait()

    def get(self, state: Arrays) -> Arrays:
        """State from the device, in arrays of these shapes."""
        found = {name: np.empty_like(array) for name, array in state.items()}
        for name, array in found.items():
            self._cuda.download(array, self._buffers[name].address)
        self._cuda.wait()
        return found

    def close(self) -> None:
        self._forget()
        self._context = None
        self._engine = None
        for buffer in self._buffers.values():
            buffer.close()

    def _shaped(self, shapes: dict[str, tuple[int, ...]]) -> Arrays:
        """Tell the context the shapes, give every tensor its memory, and return empty outputs of the shapes that follow."""
        context, engine = self._context, self._engine
        for name, shape in shapes.items():
            if not context.set_input_shape(name, shape):
                raise InputError(f"input {name!r} has shape {shape}, which {self._file} was not built for")
            itemsize = np.dtype(self._trt.nptype(engine.get_tensor_dtype(name))).itemsize
            size = int(np.prod(shape, dtype=np.int64)) * itemsize
            hosted = self._hosted.get(name)
            context.set_tensor_address(name, self._buffers[name].reserve(size) if hosted is None else hosted.ctypes.data)
        missing = context.infer_shapes()
        if missing:
            raise InputError(f"{self._file}: TensorRT cannot infer shapes, these inputs are not known: {', '.join(missing)}")
        outputs: Arrays = {}
        for name in self._outputs:  # asked anew: an output is not always as large as it may get (TensorRT#4035)
            shape = tuple(context.get_tensor_shape(name))
            outputs[name] = np.empty(shape, self._trt.nptype(engine.get_tensor_dtype(name)))
            context.set_tensor_address(name, self._buffers[name].reserve(outputs[name].nbytes))
        scratch = context.update_device_memory_size_for_shapes() or engine.device_memory_size_v2
        context.set_device_memory(self._arena.reserve(scratch), self._arena.size)
        addresses = (self._arena.address, *(buffer.address for buffer in self._buffers.values()))
        key = (*sorted(shapes.items()), addresses)
        if key != self._key:
            self._forget()
            self._key, self._runs = key, 0
        return outputs

    def _forget(self) -> None:
        if self._captured is not None:
            self._cuda.release(self._captured)
            self._captured = None

    def _enqueue(self) -> None:
        """The first run with these shapes is plain (it may allocate), the second is captured, later ones are launched."""
        self._runs += 1
        context = self._context
        capturable = not hasattr(context, "is_stream_capturable") or context.is_stream_capturable(self._cuda.handle)
        if self._runs == 2 and capturable and not self._on_host:
            self._captured = self._cuda.capture(self._execute)
        if self._captured is not None:
            self._cuda.launch(self._captured)
        else:
            self._execute()

    def _execute(self) -> None:
        if not self._context.execute_async_v3(self._cuda.handle):
            raise InputError(f"TensorRT cannot run {self._file}; its log has the reason")


def _mark(sha256: str, gpu: Gpu, version: str) -> Path:
    """The file that says that an engine was checked here."""
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "pom-edge" / "checked" / f"{sha256[:32]}-{gpu.slug}-{version}"
