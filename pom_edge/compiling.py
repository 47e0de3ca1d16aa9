"""Engines for a bundle, from the ONNX artifacts that it holds: in place, in one step, without torch and onnx.

    select -> legal? -> shapes -> build (in a process of its own) -> check against the golden data -> exchange

What cannot be made here (no compiler, no GPU) is no error: it is listed with the command that makes it elsewhere.
"""

from __future__ import annotations

import os
import shlex
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any

from pom_edge.bundle import GOLDEN, Artifact, Bundle, StreamSpec, check_extendable, extend_bundle
from pom_edge.engine_options import COMPILED, DEFAULT_CAPABILITIES, OPT_IN, EngineOptions, rebuild_command
from pom_edge.engine_sizes import choose_sizes, engine_spec, profile
from pom_edge.errors import GateError, InputError, MissingToolError
from pom_edge.export.engine_census import require_precision
from pom_edge.export.engine_process import build_in_process
from pom_edge.export.tensorrt_engine import EngineJob
from pom_edge.extent import Extent
from pom_edge.jetson import find_jetson, known_bad
from pom_edge.progress import Step
from pom_edge.runtimes.cuda_device import find_gpus
from pom_edge.runtimes.cuda_memory import cuda_missing
from pom_edge.runtimes.tensorrt_library import MODULES, short_version
from pom_edge.system import human_bytes, memory_bytes

DEFAULT_PRECISION = "fp16"
BUILT = "built, not run"
REPORTS = "reports"
MISSING = {
    "trt": "TensorRT is not installed here. It comes with JetPack on a Jetson; engines are built on the device that runs them",
    "rtx": "TensorRT-RTX is not installed here",
}
INSTALL = {"trt": "", "rtx": "pip install 'pom-edge[rtx]' && "}

__all__ = ["COMPILED", "Compiled", "EngineOptions", "compile_bundle"]


@dataclass
class Compiled:
    """What came of it."""

    artifacts: list[Artifact] = field(default_factory=list)
    missing: list[dict[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def compile_bundle(path: Path, targets: Sequence[str], options: EngineOptions, step: Step, whole: bool = False) -> Compiled:
    """Build engines and put them into the bundle.

    Args:
        path: the ``.pom`` folder.
        targets: ``"trt"``, ``"rtx"``.
        options: how.
        step: called with the name of each step.
        whole: stop at the first engine that fails; otherwise the others are built and put into the bundle.

    Returns:
        The new artifacts, and what is missing here. Where something is missing the bundle is complete up to there.

    Raises:
        InputError: the bundle lacks what was asked for; says how to export it again.
        GateError: TensorRT does not take the graph, or the engine is not the model. Engines that were built beside one that
            failed are in the bundle.
    """
    options.check(targets)
    check_extendable(path)
    bundle = Bundle.open(path)
    result = Compiled()
    plans = []
    for target in dict.fromkeys(targets):  # all that can be refused, before the first engine is built
        sources = _sources(bundle, target, options)
        sizes = {source.file: choose_sizes(bundle, source, options.tokens, options.batch) for source in sources}
        for source in sources:
            _check_legal(source)
            _check_replaced(bundle, source, target, sizes[source.file][0], options)
        plans.append((target, sources, sizes))
    failed: list[str] = []
    with _scratch() as scratch:
        for target, sources, sizes in plans:
            reason = _not_here(target, options)
            for source in sources if reason is None else []:
                try:
                    result.artifacts.append(
                        _compile(bundle, source, target, options, sizes[source.file], scratch, step, result)
                    )
                except MissingToolError as error:
                    reason = str(error)
                    break
                except GateError as error:
                    if whole:
                        raise
                    failed.append(str(error))
            if reason is not None:
                run = f"{INSTALL[target]}pom-export {shlex.quote(bundle.path.resolve().name)} {options.command(target)}"
                result.missing.append({"target": target, "reason": reason, "run": run})
        if result.artifacts:
            step("put the engines into the bundle")
            extend_bundle(bundle, result.artifacts, scratch)
    if failed:
        made = ", ".join(artifact.file for artifact in result.artifacts)
        raise GateError("\n".join(failed) + (f"\nBuilt and put into {bundle.path.name} all the same: {made}" if made else ""))
    return result


@contextmanager
def _scratch() -> Iterator[Path]:
    """A folder for what is half done.

    Raises:
        InputError: there is no place for temporary files.
    """
    try:
        folder = tempfile.TemporaryDirectory(prefix="pom-edge-")
    except OSError as error:
        raise InputError(f"there is no place for temporary files ({error.strerror}); free some space, or set TMPDIR") from error
    with folder as name:
        yield Path(name)


def _not_here(target: str, options: EngineOptions) -> str | None:
    if find_spec(MODULES[target]) is None:
        return MISSING[target]
    if target == "rtx" and options.refit and not find_gpus().gpus:
        return (
            "--refit: TensorRT-RTX needs a GPU to build an engine whose weights can be replaced, and there is none here; leave "
            "--refit out, or build where the GPU is"
        )
    return None


def _check_replaced(bundle: Bundle, source: Artifact, target: str, sizes: Mapping[str, Extent], options: EngineOptions) -> None:
    """An engine of other shapes is not replaced unasked.

    Raises:
        InputError: there is one for the same GPUs; says both shapes.
    """
    here = find_gpus().gpus
    for found in bundle.manifest.artifacts:
        facts = found.engine or {}
        if found.target != target or facts.get("source") != source.file or options.overwrite or found.file in bundle.damaged:
            continue
        if target == "rtx" and list(facts.get("compute_capabilities", ())) != list(_capabilities(options)):
            continue  # another file
        if target == "trt" and (not here or facts.get("gpu") != here[0].name):
            continue
        if facts.get("shapes") != _shapes(sizes):
            again = rebuild_command(bundle.path.name, target, found.form, found.precision, facts)
            raise InputError(
                f"{bundle.path.name} holds {found.file} for {_say(facts.get('shapes'))}, and this one would be for "
                f"{_say(_shapes(sizes))}; --overwrite replaces it, and the same shapes again are: {again}"
            )


def _shapes(sizes: Mapping[str, Extent]) -> dict[str, list[int | None]]:
    return {axis: [extent.minimum, extent.optimum, extent.maximum] for axis, extent in sizes.items()}


def _say(shapes: Any) -> str:
    listed = [f"{axis} {':'.join(map(str, lengths))}" for axis, lengths in (shapes or {}).items()]
    return ", ".join(listed) or "sizes of the graph"


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
    for precision in dict.fromkeys(options.precisions or (DEFAULT_PRECISION,)):
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
    bundle: Bundle,
    source: Artifact,
    target: str,
    options: EngineOptions,
    chosen: tuple[dict[str, Extent], str],
    scratch: Path,
    step: Step,
    result: Compiled,
) -> Artifact:
    """One artifact: all of its graphs, built and checked."""
    sizes, note = chosen
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
        "shapes": _shapes(sizes),
        "seconds": [each["seconds"] for each in facts],
        "peak_bytes": [each["peak_bytes"] for each in facts if each["peak_bytes"]],
        "device_memory_bytes": [each["device_memory_bytes"] for each in facts if "device_memory_bytes" in each],
        "layers": [each["layers"] for each in facts],
        "timing_cache": first["timing_cache"],
        **{name: True for name in OPT_IN if getattr(options, name)},
        **{name: value for name in ("workspace", "optimization_level") if (value := getattr(options, name)) is not None},
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
    why = gpus.reason or cuda_missing()
    if why:
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
    """Those of --compute-capability; else the GPU of this machine, else the two most common generations."""
    here = [gpu.compute_capability.replace(".", "") for gpu in find_gpus().gpus]
    return options.capabilities() or tuple(here[:1]) or DEFAULT_CAPABILITIES


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
