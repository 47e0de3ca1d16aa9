"""Builder and runtime with the real bindings of one version of TensorRT: run by tests/test_tensorrt_bindings.py in a process.

    python tests/real_bindings.py     with `tensorrt_bindings` on the path, and stubs for its native libraries

Modules, enums, the classes that we derive from and the errors are the bindings' own. Objects that only the native library can
make are ours, behind a check: a name that the real class lacks is not there, a property that it does not let set cannot be set,
and a call must agree with a signature in its docstring. Nothing is built, and nothing runs on a device.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pom_edge.errors import GateError, MissingToolError
from pom_edge.export import tensorrt_engine
from pom_edge.export.tensorrt_engine import EngineJob, build_engine
from pom_edge.runtimes.cuda_device import Gpu, GpuState
from pom_edge.runtimes.engine_file import deserialise
from pom_edge.runtimes.tensorrt_library import load_tensorrt, logger_of, starting, version_tuple
from tests.data.tensorrt_api.describe import fits, signatures
from tests.runtimes.test_tensorrt_logic import HostCuda, RunningMean, open_on_host

ORIN = GpuState([Gpu("Orin", "8.7", True)], "12.6", "")
LAYERS = json.dumps({"Layers": ["half gemm"]})


class Checked:
    """One of our objects in place of one of the library's."""

    def __init__(self, kind: type, inner: Any) -> None:
        self.__dict__.update(_kind=kind, _inner=inner)

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._kind, name)  # an AttributeError names the class
        value = getattr(self._inner, name)
        if isinstance(member, property):
            return value
        return partial(self._call, signatures(member), name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        member = getattr(self._kind, name)
        if not isinstance(member, property) or member.fset is None:
            raise AttributeError(f"{self._kind.__name__}.{name} cannot be set")
        setattr(self._inner, name, value)

    def _call(self, overloads: list[str], name: str, value: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if not any(fits(signature.split(), len(args), list(kwargs)) for signature in overloads):
            raise TypeError(f"{self._kind.__name__}.{name} takes ({' | '.join(overloads)})")
        return value(*args, **kwargs)


class Inner:
    """Attributes with values; every other name is a method that is remembered and answers None."""

    def __init__(self, **values: Any) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.__dict__.update(values)

    def __getattr__(self, name: str) -> Callable[..., None]:
        def method(*args: Any, **kwargs: Any) -> None:
            self.calls.append((name, *args, *kwargs.values()))

        return method


class Plan(bytes):
    """IHostMemory: a buffer, which in Python nothing but bytes can be."""

    @property
    def nbytes(self) -> int:
        return len(self)


class Library:
    """The real module, with factories in place of what the native library makes.

    Attributes:
        config, network: what the last build was given.
        opened: the engine that every file holds.
        accepts, builds, report: what the parser, the builder and the inspector answer.
    """

    def __init__(self, trt: Any) -> None:
        self._trt, self.accepts, self.builds = trt, True, True
        self.config, self.network, self.opened, self.report = Inner(), Inner(), Inner(), LAYERS

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._trt, name)
        if name == "IStreamReaderV2" and version_tuple(self._trt.__version__) >= (10, 13):
            return type(name, (), {})  # from here on even a reader needs a driver: "Failed to open cuda driver"
        made = {"Builder": self._builder, "OnnxParser": self._parser, "Runtime": self._runtime}.get(name)
        return value if made is None else partial(self._made, value, made)

    def _made(self, kind: type, make: Callable[[], Inner], *args: Any) -> Checked:
        assert any(fits(text.split(), len(args), []) for text in signatures(kind.__init__)), (kind, args)  # type: ignore[misc]
        return Checked(kind, make())

    def _builder(self) -> Inner:
        trt = self._trt

        def build(network: Any, config: Any) -> Plan | None:
            assert hasattr(trt.IHostMemory, "nbytes")
            monitor = self.config.progress_monitor
            assert isinstance(monitor, trt.IProgressMonitor)
            monitor.phase_start("Building", None, 2)
            assert monitor.step_complete("Building", 1) is True
            monitor.phase_finish("Building")
            return Plan(b"plan") if self.builds else None

        def make_cache(data: bytes) -> Checked:
            return Checked(trt.ITimingCache, Inner(serialize=lambda: b"measured", combine=lambda *_: True))

        self.config = Inner(
            add_optimization_profile=lambda profile: 0,
            create_timing_cache=make_cache,
            get_timing_cache=partial(make_cache, b""),
            set_timing_cache=lambda cache, ignore_mismatch: True,
        )
        return Inner(
            create_network=self._network,
            create_builder_config=lambda: Checked(trt.IBuilderConfig, self.config),
            create_optimization_profile=lambda: Checked(trt.IOptimizationProfile, Inner()),
            build_serialized_network=build,
        )

    def _network(self, flags: int) -> Checked:
        """x (FP16) @ w -> y (FP16) -> Cast -> z (FP32)."""
        trt = self._trt

        def tensor(name: str, dtype: Any) -> Checked:
            return Checked(trt.ITensor, Inner(name=name, dtype=dtype))

        x, w, y = (tensor(name, trt.DataType.HALF) for name in "xwy")
        z, m = (tensor(name, trt.DataType.FLOAT) for name in "zm")
        self.layers = [
            self._layer(trt.LayerType.MATRIX_MULTIPLY, [x, w], y),
            self._layer(trt.LayerType.CAST, [y], z),
            self._layer(trt.LayerType.REDUCE, [z], m),
        ]
        self.network = Inner(flags=flags, num_layers=3, get_layer=lambda index: self.layers[index])
        return Checked(trt.INetworkDefinition, self.network)

    def _layer(self, kind: Any, inputs: list[Checked], output: Checked) -> Checked:
        facts = {"type": kind, "num_inputs": len(inputs), "num_outputs": 1}
        methods = {"get_input": lambda index: inputs[index], "get_output": lambda index: output}
        return Checked(self._trt.ILayer, Inner(**facts, **methods, pinned=[], precision=None))

    def _parser(self) -> Inner:
        facts = {"node_name": lambda: "blocks.0/Mul_1", "node_operator": lambda: "Mul", "desc": lambda: "no\nsuch  type"}
        error = Checked(self._trt.ParserError, Inner(**facts))
        return Inner(parse_from_file=lambda model: self.accepts, num_errors=1, get_error=lambda index: error)

    def _runtime(self) -> Inner:
        def load(data: Any) -> Checked:
            if not isinstance(data, bytes):  # a reader: TensorRT asks for the header, goes back, and reads the whole
                head = data.read(4, 0)
                data.seek(0, self._trt.SeekPosition.SET)
                assert data.read(4, 0) == head
            return Checked(self._trt.ICudaEngine, self.opened)

        return Inner(deserialize_cuda_engine=load)


def the_check_refuses_what_the_class_lacks(trt: Any) -> None:
    config = Checked(trt.IBuilderConfig, Inner(progress_monitor=None, num_optimization_profiles=0))
    for wrong, kind in (
        (lambda: config.set_memory_pool(trt.MemoryPoolType.WORKSPACE, 1), AttributeError),
        (lambda: config.set_memory_pool_limit(1), TypeError),
        (lambda: config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, size=1), TypeError),
        (lambda: setattr(config, "progress", None), AttributeError),
        (lambda: setattr(config, "num_optimization_profiles", 1), AttributeError),
    ):
        with pytest.raises(kind):
            wrong()
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, pool_size=1)


def a_machine_without_a_gpu(job: EngineJob) -> None:
    with pytest.raises(MissingToolError, match="TensorRT is installed, but there is no GPU to build for: no NVIDIA driver"):
        build_engine(job)


def a_library_that_does_not_start(trt: Any, job: EngineJob) -> None:
    """Our stub answers NULL, as TensorRT does with a driver that is too old: the bindings raise, and we say what it means."""
    with pytest.raises(MissingToolError, match=rf"TensorRT {trt.__version__} does not start here.*nullptr"):
        build_engine(job)
    with pytest.raises(MissingToolError, match="does not start here"), starting(trt, "trt"):
        trt.Runtime(logger_of(trt))
    with pytest.raises(TypeError, match="incompatible"), starting(trt, "trt"):
        trt.Runtime(None, None)  # a mistake of ours is no missing driver


def a_build(library: Library, job: EngineJob, folder: Path) -> None:
    trt, said = library._trt, list[str]()
    strong = version_tuple(trt.__version__) >= (10, 12)
    inspector = Checked(trt.EngineInspector, Inner(get_engine_information=lambda format: library.report))
    library.opened = Inner(device_memory_size_v2=512, create_engine_inspector=lambda: inspector)
    facts = build_engine(job, said.append)
    assert Path(job.engine).read_bytes() == b"plan" and facts["device_memory_bytes"] == 512 and facts["steps"] == 1
    assert facts["census"] == {"float16": 1.0} and facts["timing_cache"] == "new"
    flag = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    assert library.network.flags == (flag if strong else 0) and facts["typing"].startswith("strong" if strong else "weak")
    flags = [call[1] for call in library.config.calls if call[0] == "set_flag"]
    weak = [] if strong else [trt.BuilderFlag.FP16, trt.BuilderFlag.OBEY_PRECISION_CONSTRAINTS]
    assert flags == [*weak, trt.BuilderFlag.REFIT, trt.BuilderFlag.VERSION_COMPATIBLE]
    assert ("clear_flag", trt.BuilderFlag.TF32) in library.config.calls
    limits = {call[1]: call[2] for call in library.config.calls if call[0] == "set_memory_pool_limit"}
    assert limits == {trt.MemoryPoolType.WORKSPACE: 1 << 28, trt.MemoryPoolType.TACTIC_DRAM: 1 << 27}
    pinned = [layer for layer in library.layers if layer._inner.precision == trt.DataType.FLOAT]
    assert pinned == ([] if strong else [library.layers[2]]), "weak typing pins the mean to FP32, and the GEMM stays free"
    assert build_engine(job)["timing_cache"] == "8 bytes from earlier builds"
    if not strong:  # a builder that may use FP16 need not: the engine itself is asked
        library.report = json.dumps({"Layers": ["float gemm"]})
        with pytest.raises(GateError, match="fp16 was asked for, and no layer of the built engine is of type half"):
            build_engine(job)
        library.report = LAYERS
    library.accepts = False
    with pytest.raises(GateError, match=r"does not take a.onnx:\s+blocks.0/Mul_1 \(Mul\) in module blocks.0: no such type"):
        build_engine(job)
    library.accepts, library.builds = True, False
    with pytest.raises(GateError, match=f"TensorRT {trt.__version__} built nothing"):
        build_engine(job)


def a_session(library: Library, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """A stream through an engine that is opened from its file, with every call checked and every answer right."""
    trt = library._trt

    class Engine(RunningMean):
        def create_execution_context(self, strategy: Any) -> Any:
            assert strategy == trt.ExecutionContextAllocationStrategy.USER_MANAGED
            return Checked(trt.IExecutionContext, self)

        def get_tensor_mode(self, name: str) -> Any:
            return trt.TensorIOMode.__members__[super().get_tensor_mode(name)]

        def get_tensor_location(self, name: str) -> Any:
            return trt.TensorLocation.DEVICE

        def update_device_memory_size_for_shapes(self) -> int:
            return 0  # unknown: the engine's own figure counts

        def get_tensor_dtype(self, name: str) -> Any:
            return trt.DataType.INT64 if name.endswith("count") else trt.DataType.FLOAT

    cuda = HostCuda()
    library.opened = Engine(cuda)  # type: ignore[assignment]
    (folder / "a.engine").write_bytes(b"plan")
    session = open_on_host(library, cuda, folder, patch, [], self_check=False)
    x = np.random.default_rng(0).standard_normal((1, 5, 3)).astype(np.float32)
    for end in range(1, 6):
        y = np.asarray(session.step(x[:, end - 1 : end]))
        assert np.allclose(y, x[:, end - 1 : end] + x[:, :end].mean(1, keepdims=True), atol=1e-5)
    assert cuda.launched == 4, "plain, captured, launched"
    assert np.allclose(np.asarray(session.run(x)), x + x.mean(1, keepdims=True), atol=1e-5)
    session.close()


def a_file_that_is_refused(library: Library, folder: Path) -> None:
    """From 10.13 on the real reader raises without a driver; the message says driver."""
    trt = library._trt
    if version_tuple(trt.__version__) >= (10, 13):
        with pytest.raises(MissingToolError, match="driver is missing or too old"):
            deserialise(trt, "trt", logger_of(trt), None, folder / "a.engine")


def main() -> None:
    """Every scenario; an exception is a failure."""
    import tensorrt_bindings

    sys.modules["tensorrt"] = tensorrt_bindings  # what the `tensorrt` package does
    trt = load_tensorrt("trt")
    the_check_refuses_what_the_class_lacks(trt)
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = EngineJob(
            "trt", "a.onnx", str(folder / "built"), "fp16", ("FP16",), {"x": ([1, 4], [2, 4], [8, 4])}, 1 << 28, 1 << 27,
            ("87",), 3, True, True, True, str(folder / "timing"), "0123456789abcdef",
        )  # fmt: skip
        patch.setattr(tensorrt_engine, "find_gpus", lambda: GpuState([], None, "no NVIDIA driver"))
        a_machine_without_a_gpu(job)
        patch.setattr(tensorrt_engine, "find_gpus", lambda: ORIN)
        a_library_that_does_not_start(trt, job)
        library = Library(trt)
        patch.setattr(tensorrt_engine, "load_tensorrt", lambda target: library)
        a_build(library, job, folder)
        a_session(library, folder, patch)
        a_file_that_is_refused(library, folder)
    print(trt.__version__)


if __name__ == "__main__":
    main()
