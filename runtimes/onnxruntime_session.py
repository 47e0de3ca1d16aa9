"""ONNX Runtime on the CPU, or on a GPU by its CUDA or TensorRT provider."""

from __future__ import annotations

import functools
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from pom_edge.bundle import Artifact, Bundle
from pom_edge.errors import BundleError, InputError, MissingExtraError, MissingToolError, PomError, require
from pom_edge.runtimes.processor import int8_saturates
from pom_edge.runtimes.session import Session
from pom_edge.system import human_bytes, trim_heap, usable_cores
from pom_edge.words import counted

PROVIDER = "CPUExecutionProvider"
PROVIDERS = {"ort": PROVIDER, "ort-cuda": "CUDAExecutionProvider", "ort-trt": "TensorrtExecutionProvider"}
# Rewrites that cost time on the CPU (1.32, docs/performance.md): Add and LayerNormalization take an eighth of what the fused
# operator takes; a sum over tokens takes twice what it and the Transpose before it take, once that is moved behind it.
SLOW_REWRITES = ["SkipLayerNormFusion", "TransposeOptimizer", "TransposeOptimizer_CPUExecutionProvider"]

MAX_THREADS = 64  # on a machine of fewer cores: each takes memory, and 100,000 of them stop the machine

__all__ = ["SLOW_REWRITES", "OnnxRuntimeSession", "native_session"]


def _library(provider: str) -> Any:
    """The module, which two wheels share.

    Raises:
        MissingExtraError: neither is installed; names the one that has the provider.
    """
    if provider != PROVIDER and find_spec("onnxruntime") is None:
        raise MissingExtraError(
            f"onnxruntime-gpu is not installed, and {provider} is part of it. Run: pip install onnxruntime-gpu"
        )
    return require("onnxruntime", "ort")


@functools.cache
def _register_arena() -> None:
    """One arena for all sessions of this process: each would keep a peak of its own otherwise.

    It grows by what is asked for, not to the next power of two.
    """
    ort = require("onnxruntime", "ort")
    place = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
    ort.create_and_register_allocator(place, ort.OrtArenaCfg({"arena_extend_strategy": 1}))


def native_session(
    model: str | bytes,
    threads: int | None = None,
    weights_folder: Path | None = None,
    optimize: bool = True,
    provider: str = PROVIDER,
    in_turn: bool = False,
) -> Any:
    """An ``onnxruntime.InferenceSession`` with our options.

    The memory pattern is off: a third less peak memory at no cost in time (measured), and lengths vary here. So is the
    planner's reuse of buffers (allocation_planner.cc, FindReusableTensor): it sets a dead tensor's buffer aside for the next
    tensor of the same symbolic shape, where the arena could give it to any; it took up to a third more memory and no less
    time (docs/performance.md), and without it the arena does exactly what :mod:`pom_edge.runtimes.memory` simulates.

    Args:
        model: path of a file, or a serialized graph.
        threads: None leaves the choice to ONNX Runtime.
        weights_folder: where the external weights of a serialized graph lie.
        optimize: rewrite the graph for speed.
        in_turn: one of several that run in turn. Its threads go to sleep with each run: those that spun on would take the
            cores from the next one, which then takes up to twice as long.
        provider: what executes it. What it cannot execute ONNX Runtime leaves to the CPU, node by node.

    Raises:
        MissingExtraError: onnxruntime is not installed.
        MissingToolError: the wheel that is installed has no such provider.
        InputError: no number of threads, or the provider that runs is not the one asked for.
    """
    cores = usable_cores()
    most = max(MAX_THREADS, cores)
    if threads is not None and not 1 <= threads <= most:
        raise InputError(f"threads is {threads:,}; expected 1 to {most}: this process may use {counted(cores, 'core')}")
    ort = _library(provider)
    options = ort.SessionOptions()
    options.enable_mem_pattern = False
    options.enable_mem_reuse = False
    _register_arena()
    options.add_session_config_entry("session.use_env_allocators", "1")
    options.log_severity_level = 4  # errors arrive as exceptions, with our message
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")  # w8, w4: arithmetic in FP32, as written
    if in_turn:
        options.add_session_config_entry("session.force_spinning_stop", "1")
    if int8_saturates():
        options.add_session_config_entry("session.x64quantprecision", "1")  # exact sums: what is measured is what the file says
    if not optimize:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    if threads is not None:
        options.intra_op_num_threads = threads
    if weights_folder is not None:
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(weights_folder))
    if provider not in ort.get_available_providers():
        raise MissingToolError(
            f"this ONNX Runtime {ort.__version__} has no {provider} (it has {', '.join(ort.get_available_providers())}); on a "
            "machine with a GPU install onnxruntime-gpu in place of onnxruntime: the two share a folder and must not be mixed"
        )
    session = ort.InferenceSession(
        model,
        options,
        providers=list(dict.fromkeys([provider, PROVIDER])),
        disabled_optimizers=SLOW_REWRITES if provider == PROVIDER else None,
    )
    active = session.get_providers()[0]
    if active != provider:  # onnxruntime#23372: a provider that cannot load is replaced without a word
        if provider == PROVIDER:
            raise InputError(f"ONNX Runtime runs on {active}, asked for {provider}")
        raise MissingToolError(f"ONNX Runtime runs on {active}, asked for {provider}: its libraries, driver or GPU are missing")
    return session


class OnnxRuntimeSession(Session):
    """An ONNX artifact in ONNX Runtime."""

    extension = ".onnx"

    def __init__(
        self,
        bundle: Bundle,
        artifact: Artifact,
        threads: int | None = None,
        spill: Path | None = None,
        runtime: str = "ort",
    ) -> None:
        super().__init__(bundle, artifact, spill)
        self._provider = PROVIDERS[runtime]
        self._version = _library(self._provider).__version__
        files = [artifact.file] if artifact.stream is None else [step.file for step in artifact.stream.passes]
        self._natives: list[Any] = []
        for file in files:
            try:
                self._natives.append(self._open(bundle.path / file, threads, in_turn=len(files) > 1))
            except PomError:
                raise
            except Exception as error:  # onnxruntime raises its own family of exceptions
                raise BundleError(f"ONNX Runtime {self._version} cannot load {file}: {error}") from error
        trim_heap()  # parsing and optimising leave megabytes of freed pages behind

    def _open(self, path: Path, threads: int | None, in_turn: bool) -> Any:
        if self.artifact.precision != "bf16":
            return native_session(str(path), threads, provider=self._provider, in_turn=in_turn)
        if self._provider != PROVIDER:
            raise InputError(f"{path.name} is BF16, which is evaluated on the CPU only; use --runtime ort, or an engine")
        from pom_edge.runtimes.rounding import rounded_session

        return rounded_session(path, threads)

    @property
    def runtime(self) -> str:
        if self._provider != PROVIDER:
            return f"onnxruntime {self._version} ({self._provider.removesuffix('ExecutionProvider')})"
        how = "CPU"
        if self.artifact.precision == "bf16":
            how = "evaluated, rounded to BF16"
        elif self.artifact.precision == "int8":
            how = "CPU without VNNI, exact INT8 sums" if int8_saturates() else "CPU"
        return f"onnxruntime {self._version} ({how})"

    def _run_graph(self, index: int, names: list[str], inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        if not self._natives:
            raise InputError("this session is closed; open another one")
        try:
            return dict(zip(names, self._natives[index].run(names, inputs), strict=True))
        except Exception as error:
            shapes = ", ".join(f"{name} {array.shape}" for name, array in inputs.items())
            wanted = re.search(r"Failed to allocate memory for requested buffer of size (\d+)", str(error))
            if wanted is not None:
                raise InputError(
                    f"not enough memory to run {self.artifact.file} on {shapes}: ONNX Runtime asked for "
                    f"{human_bytes(int(wanted[1]))} more"
                ) from error
            raise InputError(f"ONNX Runtime {self._version} cannot run {self.artifact.file} on {shapes}: {error}") from error

    def close(self) -> None:
        self._natives = []
