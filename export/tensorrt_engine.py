"""An ONNX file to an engine, with TensorRT 10.3 to 11 or TensorRT-RTX 1.7. Imports neither torch nor onnx: devices build.

Precision lives in the graph (typed casts, Q/DQ), so the network is strongly typed: what it says is what is built. TensorRT
below 10.12, where strong typing is not complete, gets builder flags instead, FP32 islands pinned layer by layer; which of the
two it was stands in the facts of the engine.

Runs in a process of its own (:mod:`pom_edge.export.engine_process`): native code that crashes, or is killed for want of memory,
must not take the export with it.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pom_edge.errors import GateError, InputError, MissingToolError, PomError
from pom_edge.export.engine_census import gemm_census, require_precision
from pom_edge.export.timing_cache import TimingCache
from pom_edge.runtimes.cuda_device import GpuState, find_gpus
from pom_edge.runtimes.tensorrt_library import NAMES, library_path, load_tensorrt, logger_of, starting, version_tuple
from pom_edge.system import human_bytes

STRONG_FROM = (10, 12)  # NVIDIA calls strong typing fully available from here
MAX_ERRORS = 8
SAY_SECONDS = 1.0
INSPECTED = {"fp16": ("half", "fp16"), "bf16": ("bf16", "bfloat16"), "int8": ("int8",)}  # as inspectors spell types

__all__ = ["EngineJob", "build_engine", "explain_failure", "remedies"]


@dataclass(frozen=True)
class EngineJob:
    """What to build.

    Attributes:
        target: ``"trt"`` or ``"rtx"``.
        onnx: path of the graph; external weights lie beside it.
        engine: where the engine goes.
        precision: what must be found in it; empty for a part of a model, which need not hold a GEMM.
        weak_flags: builder flags for TensorRT without strong typing, as the export chose them.
        profile: for every input with free axes its shortest, usual and longest shape.
        workspace: bytes for scratch memory of kernels; None leaves it to the library.
        tactic_memory: bytes that trying kernels may take; None leaves it to the library.
        compute_capabilities: TensorRT-RTX: ``("86", "89")``.
        optimization_level: 0 to 5; None leaves it to the library.
        refit, version_compatible, hardware_compatible: opt-in, each costs speed.
        timing_cache: folder for measured kernels; None keeps none.
        cache_key: names the graph in there.
        inspect: also write the inspector's report beside the engine.
    """

    target: str
    onnx: str
    engine: str
    precision: str
    weak_flags: tuple[str, ...] = ()
    profile: dict[str, tuple[list[int], list[int], list[int]]] = field(default_factory=dict)
    workspace: int | None = None
    tactic_memory: int | None = None
    compute_capabilities: tuple[str, ...] = ()
    optimization_level: int | None = None
    refit: bool = False
    version_compatible: bool = False
    hardware_compatible: bool = False
    timing_cache: str | None = None
    cache_key: str = ""
    inspect: bool = True

    def to_json(self) -> str:
        """For the process that builds."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> EngineJob:
        """The other way."""
        fields: dict[str, Any] = json.loads(text)  # JSON has lists alone
        fields = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
        fields["profile"] = {name: tuple(shapes) for name, shapes in fields["profile"].items()}
        return cls(**fields)


def build_engine(job: EngineJob, say: Any = None) -> dict[str, Any]:
    """Parse, configure, build and write.

    Args:
        job: what to build.
        say: called with a line of progress.

    Returns:
        Facts for the manifest: version, typing, GPU, census, seconds, bytes.

    Raises:
        MissingToolError: no TensorRT, one that is too old, or no GPU for it.
        InputError: GPUs that this version does not build for.
        GateError: the graph is refused, cannot be built, or lacks the precision that was asked for.
    """
    trt = load_tensorrt(job.target)
    gpu = _gpu_for(job)
    logger = logger_of(trt)
    with starting(trt, job.target):
        builder = trt.Builder(logger)
    strong = job.target == "rtx" or version_tuple(trt.__version__) >= STRONG_FROM
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED) if strong else 0)
    _parse(trt, network, logger, job)
    census = gemm_census(network)
    if strong and job.precision:
        require_precision(
            job.precision, census, f"the network that {NAMES[job.target]} {trt.__version__} made of {Path(job.onnx).name}"
        )
    config = builder.create_builder_config()
    config.clear_flag(trt.BuilderFlag.TF32)  # on by default; FP32 in the graph means FP32
    if not strong:
        _type_weakly(trt, config, network, job.weak_flags)
    _configure(trt, config, job)
    _add_profile(builder, config, job)
    config.progress_monitor = monitor = _monitor(trt, say)
    timing = TimingCache(config, _timing_file(trt, job, gpu))
    start = time.perf_counter()
    with timing:
        serialized = builder.build_serialized_network(network, config)
    if serialized is None:
        raise GateError(explain_failure(job.target, trt.__version__, logger.lines, job.workspace))
    seconds = time.perf_counter() - start
    Path(job.engine).write_bytes(serialized)
    facts = {
        "compiler": NAMES[job.target],
        "version": trt.__version__,
        "library": library_path(trt),
        "typing": "strong" if strong else f"weak, with {', '.join(job.weak_flags) or 'no flags'} (TensorRT below 10.12)",
        "gpu": None if gpu is None or not gpu.gpus else asdict(gpu.gpus[0]),
        "cuda_driver": None if gpu is None else gpu.cuda,
        "compute_capabilities": list(job.compute_capabilities),
        "layers": network.num_layers,
        "census": census,
        "bytes": serialized.nbytes,
        "seconds": round(seconds, 3),
        "peak_bytes": _peak_bytes(),
        "timing_cache": timing.what,
        "steps": monitor.steps,
        "warnings": logger.warnings(),
    }
    facts.update(_read_back(trt, logger, job, serialized, strong))
    return facts


def _gpu_for(job: EngineJob) -> GpuState | None:
    """TensorRT measures its kernels on the GPU that will run them; TensorRT-RTX builds for GPUs that are not here."""
    if job.target == "rtx":
        return None
    found = find_gpus()
    if not found.gpus:
        raise MissingToolError(f"TensorRT is installed, but there is no GPU to build for: {found.reason}")
    return found


def _parse(trt: Any, network: Any, logger: Any, job: EngineJob) -> None:
    """From the file, so that weights beside it are found.

    Raises:
        GateError: every error with its node and module path.
    """
    parser = trt.OnnxParser(network, logger)
    if parser.parse_from_file(job.onnx):
        return
    listed = []
    for index in range(parser.num_errors):
        error = parser.get_error(index)
        listed.append(_parser_line(error.node_name(), error.node_operator(), error.desc()))
    more = f"\n  and {len(listed) - MAX_ERRORS} more" if len(listed) > MAX_ERRORS else ""
    reasons = listed[:MAX_ERRORS] or logger.errors()[:MAX_ERRORS] or ["no reason given"]
    raise GateError(
        f"{NAMES[job.target]} {trt.__version__} does not take {Path(job.onnx).name}:\n  " + "\n  ".join(reasons) + more
    )


def _parser_line(node: str, operator: str, reason: str) -> str:
    """One parser error: what failed, where in the model, and why."""
    path = node.rpartition("/")[0]
    where = f"{node} ({operator})" if operator else node
    inside = f" in module {path}" if path else ""
    return f"{where or 'graph'}{inside}: {' '.join(reason.split())}"


def _configure(trt: Any, config: Any, job: EngineJob) -> None:
    if job.workspace is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, job.workspace)
    if job.tactic_memory is not None:  # 75 % of all memory by default on devices, and not reachable from trtexec
        config.set_memory_pool_limit(trt.MemoryPoolType.TACTIC_DRAM, job.tactic_memory)
    if job.optimization_level is not None:
        config.builder_optimization_level = job.optimization_level
    if job.refit:
        config.set_flag(trt.BuilderFlag.REFIT)
    if job.version_compatible:
        config.set_flag(trt.BuilderFlag.VERSION_COMPATIBLE)
    if job.hardware_compatible:
        config.hardware_compatibility_level = trt.HardwareCompatibilityLevel.AMPERE_PLUS
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED  # node names in the inspector's report
    if job.compute_capabilities and hasattr(config, "set_compute_capability"):
        known = trt.ComputeCapability.__members__ if hasattr(trt, "ComputeCapability") else {}
        unknown = [each for each in job.compute_capabilities if f"SM{each}" not in known]
        if unknown:
            listed = ", ".join(name.removeprefix("SM") for name in known if name.startswith("SM"))
            raise InputError(
                f"{NAMES[job.target]} {trt.__version__} does not build for SM {', '.join(unknown)}; it has {listed}"
            )
        if hasattr(config, "num_compute_capabilities"):
            config.num_compute_capabilities = len(job.compute_capabilities)
        for index, each in enumerate(job.compute_capabilities):
            config.set_compute_capability(known[f"SM{each}"], index)


def _add_profile(builder: Any, config: Any, job: EngineJob) -> None:
    if not job.profile:
        return
    profile = builder.create_optimization_profile()
    for name, (low, usual, high) in job.profile.items():
        profile.set_shape(name, low, usual, high)
    if config.add_optimization_profile(profile) < 0:
        raise GateError(f"{NAMES[job.target]} refuses the shapes {job.profile}; expected MIN <= OPT <= MAX for every axis")


def _type_weakly(trt: Any, config: Any, network: Any, flags: tuple[str, ...]) -> None:
    """TensorRT below 10.12: allow the types that the graph uses, and pin to FP32 every layer that the graph keeps there.

    Without the pins a builder that may use FP16 uses it for the means and sums as well, where it overflows.
    """
    for name in flags:
        if name not in trt.BuilderFlag.__members__:
            raise GateError(f"TensorRT {trt.__version__} has no builder flag {name}, which this precision needs here")
        config.set_flag(trt.BuilderFlag.__members__[name])
    if flags and "OBEY_PRECISION_CONSTRAINTS" in trt.BuilderFlag.__members__:
        config.set_flag(trt.BuilderFlag.__members__["OBEY_PRECISION_CONSTRAINTS"])
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        if layer.num_outputs == 0 or str(layer.type).rpartition(".")[2] in (
            "CONSTANT",
            "SHAPE",
            "CAST",
            "QUANTIZE",
            "DEQUANTIZE",
        ):
            continue
        if layer.get_output(0).dtype == trt.DataType.FLOAT and hasattr(layer, "precision"):
            layer.precision = trt.DataType.FLOAT
            if hasattr(layer, "set_output_type"):
                layer.set_output_type(0, trt.DataType.FLOAT)


def _read_back(trt: Any, logger: Any, job: EngineJob, serialized: Any, strong: bool) -> dict[str, Any]:
    """What the engine itself says, where this machine can open it; TensorRT-RTX without a driver cannot."""
    before = len(logger.lines)
    if not find_gpus().gpus:
        return {"opened": False}
    runtime = trt.Runtime(logger)
    if job.version_compatible:
        runtime.engine_host_code_allowed = True
    engine = runtime.deserialize_cuda_engine(serialized)
    del logger.lines[before:]
    if engine is None:
        return {"opened": False}
    inspector = engine.create_engine_inspector()
    report = inspector.get_engine_information(trt.LayerInformationFormat.JSON)
    if job.inspect:
        Path(job.engine).with_suffix(".layers.json").write_text(report)
    wanted = INSPECTED.get(job.precision, ())
    if not strong and wanted and not any(name in report.lower() for name in wanted):
        raise GateError(f"{job.precision} was asked for, and no layer of the built engine is of type {' or '.join(wanted)}")
    return {"opened": True, "device_memory_bytes": engine.device_memory_size_v2}


def _monitor(trt: Any, say: Any) -> Any:
    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        """Names the phase that runs, once a second at most: there are thousands of steps, from several threads."""

        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.steps, self._said = 0, time.monotonic()
            self._total: dict[str, int] = {}

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:  # noqa: ARG002
            self._total[phase_name] = num_steps

        def phase_finish(self, phase_name: str) -> None:
            self._total.pop(phase_name, None)

        def step_complete(self, phase_name: str, step: int) -> bool:
            self.steps += 1
            if say is not None and time.monotonic() - self._said > SAY_SECONDS:
                self._said = time.monotonic()
                say(f"{phase_name} {step + 1}/{self._total.get(phase_name, step + 1)}")
            return True

    return Monitor()


def _timing_file(trt: Any, job: EngineJob, gpu: GpuState | None) -> Path | None:
    """By graph, version, GPU and flags. None: no cache; TensorRT-RTX measures nothing ahead of time and has none."""
    if job.target != "trt" or job.timing_cache is None or gpu is None:
        return None
    flags = f"{job.precision}-{job.optimization_level}-{job.refit}-{job.version_compatible}-{job.hardware_compatible}"
    return Path(job.timing_cache) / f"{job.cache_key[:16]}-{gpu.gpus[0].slug}-trt{trt.__version__}-{flags}.cache"


def remedies(target: str) -> str:
    """What helps against want of memory."""
    common = "What helps: a smaller --workspace; --optimization-level 2; closing other programs"
    if target == "rtx":
        return f"{common}; a swap file"
    return (
        f"{common} and the desktop (a Jetson runs headless with `sudo systemctl isolate multi-user.target`); a swap file "
        "instead of zram; building again, since the timing cache keeps what was measured already"
    )


def explain_failure(target: str, version: str, lines: list[tuple[str, str]], workspace: int | None = None) -> str:
    """Why a build gave nothing, from the library's log.

    Args:
        target: ``"trt"`` or ``"rtx"``.
        version: of the library.
        lines: the log, as (severity, text).
        workspace: bytes that kernels could take; None where that was not limited.
    """
    name = NAMES[target]
    texts = [" ".join(text.split()) for _, text in lines]
    errors = [" ".join(text.split()) for kind, text in lines if kind != "WARNING"][-MAX_ERRORS:]
    memory = [
        text for text in texts if "Tactic Device request" in text or "OutOfMemory" in text or "out of memory" in text.lower()
    ]
    told = "\n  ".join([*memory[:2], *errors]) or "no reason given"
    message = f"{name} {version} built nothing:\n  {told}"
    if memory or any("Could not find any implementation" in text for text in texts):
        message += f"\nThis is how it looks when the builder runs out of memory. {remedies(target)}"
    if workspace is not None:
        message += f"\nKernels could take {human_bytes(workspace)} (--workspace, or the memory budget): more of it may help"
    if any("SM 87 is not supported" in text or "Target GPU SM" in text for text in texts):
        message += (
            "\nThis TensorRT does not build for this GPU (10.13.3 on Orin does not): use the TensorRT of the board's JetPack"
        )
    return message


def _peak_bytes() -> int | None:
    try:
        text = Path("/proc/self/status").read_text()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("VmHWM:")), None)


def main() -> int:
    """The process that builds: a job as JSON on stdin, events as JSON lines on stdout."""

    def tell(event: str, value: Any) -> None:
        print(json.dumps({"pom_edge": event, "value": value}), flush=True)

    job = EngineJob.from_json(sys.stdin.read())
    try:
        facts = build_engine(job, lambda text: tell("progress", text))
    except OSError as failure:  # the scratch folder is what a build writes into
        where = f"cannot write {failure.filename or 'the engine'}: {failure.strerror or failure}"
        message = f"{where}; engines are built in {Path(job.engine).parent}: free some space there, or set TMPDIR"
        tell("error", {"kind": "InputError", "message": message})
        return InputError.exit_code
    except PomError as failure:
        tell("error", {"kind": type(failure).__name__, "message": str(failure)})
        return failure.exit_code
    tell("done", facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
