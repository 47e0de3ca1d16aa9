"""Engines for a bundle, from the ONNX artifacts that it holds: in place, in one step, without torch and onnx.

    select -> legal? -> shapes -> build (in a process of its own) -> check against the golden data -> exchange

What cannot be made here (no compiler, no GPU) is no error: it is listed with the command that makes it elsewhere.
"""

from __future__ import annotations

import os
import shlex
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any

from pom_edge.bundle import GOLDEN, Artifact, Bundle, StreamSpec, extend_bundle
from pom_edge.engine_sizes import choose_sizes, engine_spec, profile
from pom_edge.errors import GateError, InputError, MissingToolError
from pom_edge.export.engine_census import require_precision
from pom_edge.export.engine_process import build_in_process
from pom_edge.export.tensorrt_engine import EngineJob
from pom_edge.extent import Extent
from pom_edge.jetson import find_jetson, known_bad
from pom_edge.runtimes.cuda_device import find_gpus
from pom_edge.runtimes.tensorrt_library import MODULES, short_version
from pom_edge.system import human_bytes, memory_bytes

COMPILED = ("trt", "rtx")
DEFAULT_PRECISION = "fp16"
DEFAULT_CAPABILITIES = ("86", "89")  # the RTX 30 and 40 series, where no GPU is at hand to ask
BUILT = "built, not run"
OPT_IN = ("refit", "version_compatible", "hardware_compatible")
REPORTS = "reports"
MISSING = {
    "trt": "TensorRT is not installed here. It comes with JetPack on a Jetson; engines are built on the device that runs them",
    "rtx": "TensorRT-RTX is not installed here",
}
INSTALL = {"trt": "", "rtx": "pip install 'pom-edge[rtx]' && "}
Step = Callable[[str], None]

__all__ = ["COMPILED", "Compiled", "EngineOptions", "compile_bundle"]


@dataclass(frozen=True)
class EngineOptions:
    """How to build, as on the command line (docs/tensorrt.md)."""

    precisions: Sequence[str] = ()  # empty: fp16
    form: str | None = None
    tokens: str | int | None = None
    batch: str | int | None = None
    compute_capability: Sequence[str] = ()
    workspace: int | None = None
    optimization_level: int | None = None
    refit: bool = False
    version_compatible: bool = False
    hardware_compatible: bool = False

    def command(self, target: str) -> str:
        """The arguments that ask for the same on another machine."""
        parts = ["--target", target]
        for name in ("precisions", "compute_capability"):
            for value in getattr(self, name):
                parts += [f"--{'precision' if name == 'precisions' else 'compute-capability'}", str(value)]
        for option, value in (("--tokens", self.tokens), ("--batch", self.batch), ("--workspace", self.workspace)):
            parts += [] if value is None else [option, str(value)]
        if self.optimization_level is not None:
            parts += ["--optimization-level", str(self.optimization_level)]
        parts += [f"--{name.replace('_', '-')}" for name in OPT_IN if getattr(self, name)]
        return " ".join(map(shlex.quote, parts))


@dataclass
class Compiled:
    """What came of it."""

    artifacts: list[Artifact] = field(default_factory=list)
    missing: list[dict[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def compile_bundle(path: Path, targets: Sequence[str], options: EngineOptions, step: Step) -> Compiled:
    """Build engines and put them into the bundle.

    Args:
        path: the ``.pom`` folder.
        targets: ``"trt"``, ``"rtx"``.
        options: how.
        step: called with the name of each step.

    Returns:
        The new artifacts, and what is missing here. Where something is missing the bundle is complete up to there.

    Raises:
        InputError: the bundle lacks what was asked for; says how to export it again.
        GateError: TensorRT does not take the graph, or the engine is not the model.
    """
    bundle = Bundle.open(path)
    result = Compiled()
    with tempfile.TemporaryDirectory(prefix="pom-edge-") as scratch:
        for target in targets:
            if target == "rtx":
                _check_rtx(options)
            sources = _sources(bundle, target, options)
            for source in sources:
                _check_legal(source)
            reason = _not_here(target, options)
            if reason is None:
                try:
                    result.artifacts += [
                        _compile(bundle, source, target, options, Path(scratch), step, result) for source in sources
                    ]
                except MissingToolError as error:
                    reason = str(error)
            if reason is not None:
                run = f"{INSTALL[target]}pom-export {shlex.quote(bundle.path.resolve().name)} {options.command(target)}"
                result.missing.append({"target": target, "reason": reason, "run": run})
        if result.artifacts:
            step("put the engines into the bundle")
            extend_bundle(bundle, result.artifacts, Path(scratch))
    return result


def _check_rtx(options: EngineOptions) -> None:
    """What TensorRT-RTX 1.7 takes, answers with a warning or an assertion, and does not do (seen).

    Raises:
        InputError: naming the option.
    """
    for name in ("version_compatible", "hardware_compatible"):
        if getattr(options, name):
            raise InputError(
                f"--{name.replace('_', '-')} is for --target trt; a TensorRT-RTX engine is for the version that built it and "
                "the GPUs of --compute-capability"
            )
    if options.refit and len(_capabilities(options)) > 1:
        raise InputError("--refit: TensorRT-RTX builds such an engine for one GPU only; give one --compute-capability")


def _not_here(target: str, options: EngineOptions) -> str | None:
    if find_spec(MODULES[target]) is None:
        return MISSING[target]
    if target == "rtx" and options.refit and not find_gpus().gpus:
        return "with --refit TensorRT-RTX needs a GPU to build, and there is none here"
    return None


def _sources(bundle: Bundle, target: str, options: EngineOptions) -> list[Artifact]:
    """The ONNX artifacts to compile.

    Raises:
        InputError: there is none in a precision, or the form, that was asked for.
    """
    graphs = [each for each in bundle.manifest.artifacts if each.target == "onnx" and options.form in (None, each.form)]
    held = ", ".join(
        sorted({f"{each.form} in {each.precision}" for each in bundle.manifest.artifacts if each.target == "onnx"})
    )
    found = []
    for precision in options.precisions or (DEFAULT_PRECISION,):
        fitting = [each for each in graphs if each.precision == precision]
        if not fitting:
            form = options.form or (graphs[0].form if graphs else "parallel")
            name, wanted = bundle.path.name, f"--precision {precision} --form {form} --target {target}"
            raise InputError(
                f"{name} holds no {form} graph in {precision} to compile (it holds {held or 'none'}); precision is made from "
                f"the model: pom-export model.pt {wanted} --out {name} --overwrite"
            )
        found += fitting
    return found


def _check_legal(source: Artifact) -> None:
    """What the export found out about TensorRT's rules; see export/tensorrt_lint.py.

    Raises:
        GateError: the graph breaks some.
        InputError: the bundle does not say.
    """
    if source.tensorrt is None:
        raise InputError(f"{source.file} was exported without the checks that TensorRT needs; export the model again")
    findings = source.tensorrt["findings"]
    if findings:
        more = f"\n  and {len(findings) - 8} more" if len(findings) > 8 else ""
        raise GateError(f"TensorRT does not take {source.file}:\n  " + "\n  ".join(findings[:8]) + more)


def _compile(
    bundle: Bundle, source: Artifact, target: str, options: EngineOptions, scratch: Path, step: Step, result: Compiled
) -> Artifact:
    """One artifact: all of its graphs, built and checked."""
    sizes, note = choose_sizes(bundle, source, options.tokens, options.batch)
    graphs = [source.file] if source.stream is None else [each.file for each in source.stream.passes]
    capabilities = _capabilities(options) if target == "rtx" else ()
    workspace, tactic = _memory(options)
    facts: list[dict[str, Any]] = []
    for index, graph in enumerate(graphs):
        step(f"build {target} of {graph}")
        job = EngineJob(
            target=target,
            onnx=str(bundle.path.resolve() / graph),
            engine=str(scratch / f"{index}.engine"),
            precision=source.precision if source.stream is None else "",
            weak_flags=tuple((source.tensorrt or {}).get("weak_flags", ())),
            profile={} if source.stream is not None else profile(source.inputs, sizes),
            workspace=workspace,
            tactic_memory=tactic,
            compute_capabilities=capabilities,
            optimization_level=options.optimization_level,
            refit=options.refit,
            version_compatible=options.version_compatible,
            hardware_compatible=options.hardware_compatible,
            timing_cache=str(_cache_folder()),
            cache_key=bundle.sha256(graph),
        )
        facts.append(build_in_process(job, lambda text, graph=graph: step(f"build {graph}: {text}")))  # type: ignore[misc]
    if source.stream is not None:
        require_precision(source.precision, _mean([each["census"] for each in facts]), f"the passes of {source.file}")
    variant = _variant(target, capabilities, facts[0])
    files = [_name(graph, variant) for graph in graphs]
    for index, file in enumerate(files):
        (scratch / file).parent.mkdir(exist_ok=True)
        os.replace(scratch / f"{index}.engine", scratch / file)
    artifact = _artifact(bundle, source, target, files, sizes, facts, options)
    artifact = artifact.model_copy(update={"files": [*files, *_reports(scratch, files)]})
    result.notes += [note] if note else []
    result.notes.append(_built(artifact))
    result.notes += [f"{artifact.file}: {text}" for text in artifact.notes]
    return _verified(bundle, artifact, scratch, step, result)


def _reports(scratch: Path, files: list[str]) -> list[str]:
    """What the inspector said of each engine, where this machine could open it: into the bundle's folder of reports."""
    names = []
    for index, file in enumerate(files):
        written = scratch / f"{index}.layers.json"
        if written.exists():
            names.append(f"{REPORTS}/{file.removesuffix('.engine')}.layers.json")
            (scratch / names[-1]).parent.mkdir(parents=True, exist_ok=True)
            os.replace(written, scratch / names[-1])
    return names


def _built(artifact: Artifact) -> str:
    engine = artifact.engine or {}
    peak = max(engine["peak_bytes"] or [0])
    memory = human_bytes(peak) if peak else "not measured"
    seconds = sum(engine["seconds"])
    return f"{artifact.file}: built in {seconds:.1f} s, peak memory {memory}, {engine['typing']} typing"


def _artifact(
    bundle: Bundle,
    source: Artifact,
    target: str,
    files: list[str],
    sizes: dict[str, Extent],
    facts: list[dict[str, Any]],
    options: EngineOptions,
) -> Artifact:
    first = facts[0]
    gpu = first["gpu"] or {}
    jetson = find_jetson()
    warnings = list(dict.fromkeys(text for each in facts for text in each["warnings"]))
    bad = known_bad(first["version"], gpu.get("name")) if target == "trt" else None
    engine = {
        "compiler": first["compiler"],
        "version": first["version"],
        "library": None if first["library"] is None else PurePosixPath(first["library"]).name,
        "typing": first["typing"],
        "gpu": gpu.get("name"),
        "compute_capabilities": first["compute_capabilities"] or [gpu.get("compute_capability", "").replace(".", "")],
        "cuda_driver": first["cuda_driver"],
        "jetpack": None if jetson is None else jetson.jetpack,
        "source": source.file,
        "source_sha256": bundle.sha256(source.file),
        "shapes": {axis: [extent.minimum, extent.optimum, extent.maximum] for axis, extent in sizes.items()},
        "seconds": [each["seconds"] for each in facts],
        "peak_bytes": [each["peak_bytes"] for each in facts if each["peak_bytes"]],
        "device_memory_bytes": [each["device_memory_bytes"] for each in facts if "device_memory_bytes" in each],
        "layers": [each["layers"] for each in facts],
        "timing_cache": first["timing_cache"],
        **{name: True for name in OPT_IN if getattr(options, name)},
    }
    return source.model_copy(
        update={
            "target": target,
            "file": files[0],
            "files": files,
            "inputs": [engine_spec(spec, sizes) for spec in source.inputs],
            "outputs": [engine_spec(spec, sizes) for spec in source.outputs],
            "stream": None if source.stream is None else _stream(source.stream, files),
            "census": _mean([each["census"] for each in facts]),
            "mixers": {},
            "arena": [],
            "tensorrt": None,
            "engine": engine,
            "notes": [*([bad] if bad else []), *warnings],
            "verified": BUILT,
            "parity": None,
            "ranges": None,
            "quantization": None,
        }
    )


def _verified(bundle: Bundle, artifact: Artifact, scratch: Path, step: Step, result: Compiled) -> Artifact:
    """The artifact with what a run said; as it is where this machine cannot run it.

    Raises:
        GateError: the engine is not the model.
    """
    gpus = find_gpus()
    if not gpus.gpus or find_spec("cuda") is None:
        why = gpus.reason or "cuda-python is not installed (pip install 'pom-edge[trt]')"
        result.notes.append(f"{artifact.file}: {BUILT}: {why}")
        return artifact
    from pom_edge.runtimes.checking import check_session
    from pom_edge.runtimes.tensorrt_session import TensorRTSession

    step(f"check {artifact.file}")
    if not (scratch / GOLDEN).exists():
        (scratch / GOLDEN).symlink_to(bundle.path.resolve() / GOLDEN)
    with TensorRTSession(Bundle(scratch, bundle.manifest), artifact, self_check=False) as session:
        check = check_session(session).artifacts[0]
        runtime = session.runtime
    if not check.passed:
        failed = ", ".join(f"{name} {m.snr_db:.1f} dB ({m.nonfinite} NaN/Inf)" for name, m in check.outputs.items())
        raise GateError(
            f"the engine is not the model: {failed}; the gate is {check.gate_db:g} dB. Nothing was added to the bundle"
        )
    lowest = min(check.outputs.values(), key=lambda m: m.snr_db)
    parity = {
        "snr_db": round(lowest.snr_db, 2),
        "gate_db": check.gate_db,
        "snr_db_eager": None,
        "worst_mixer": None,
        "cosine": lowest.cosine,
        "max_rel": lowest.max_rel,
        "nonfinite": lowest.nonfinite,
        "cases": check.cases,
        "passed": True,
    }
    return artifact.model_copy(update={"verified": runtime, "parity": parity})


def _stream(stream: StreamSpec, files: list[str]) -> StreamSpec:
    passes = [each.model_copy(update={"file": file, "mixers": {}}) for each, file in zip(stream.passes, files, strict=True)]
    return stream.model_copy(update={"passes": passes})


def _mean(censuses: list[dict[str, float]]) -> dict[str, float]:
    names = sorted({name for census in censuses for name in census})
    return {name: round(sum(census.get(name, 0.0) for census in censuses) / len(censuses), 4) for name in names}


def _variant(target: str, capabilities: Sequence[str], facts: Mapping[str, Any]) -> str:
    """``rtx-sm86-sm89``, ``orin-trt10.3.0``."""
    if target == "rtx":
        return "-".join(["rtx", *(f"sm{each}" for each in capabilities)])
    name = "".join(c if c.isalnum() else " " for c in facts["gpu"]["name"].lower())
    return f"{'-'.join(name.split()) or 'gpu'}-trt{short_version(facts['version'])}"


def _name(graph: str, variant: str) -> str:
    """``parallel.fp16.onnx`` -> ``parallel.fp16.<variant>.engine``; a folder of passes is renamed likewise."""
    folder, _, name = graph.rpartition("/")
    stem = name.removesuffix(".onnx")
    return f"{folder}.{variant}/{stem}.engine" if folder else f"{stem}.{variant}.engine"


def _capabilities(options: EngineOptions) -> tuple[str, ...]:
    """``8.6``, ``sm86`` and ``86`` are the same; the GPU of this machine where none is named.

    Raises:
        InputError: not of that form.
    """
    wanted = []
    for text in options.compute_capability:
        number = str(text).lower().removeprefix("sm").replace(".", "").replace("_", "")
        if not number.isdigit():
            raise InputError(f"--compute-capability is {text!r}; expected a number as 8.6, 86 or sm86 (repeatable)")
        wanted.append(number)
    here = [gpu.compute_capability.replace(".", "") for gpu in find_gpus().gpus]
    return tuple(dict.fromkeys(wanted or here[:1] or DEFAULT_CAPABILITIES))


def _memory(options: EngineOptions) -> tuple[int | None, int | None]:
    """Workspace and tactic memory: as asked for; on a board whose GPU shares memory, half of what is available."""
    unified = find_jetson() is not None or any(gpu.integrated for gpu in find_gpus().gpus)
    available = memory_bytes()
    if options.workspace is not None:
        return options.workspace, options.workspace if unified else None
    if not unified or available is None:
        return None, None  # the library's own choice is all device memory, which is another memory
    return available[1] // 2, available[1] // 2


def _cache_folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "pom-edge" / "timing"
