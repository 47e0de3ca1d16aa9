"""`pom-edge info` and `pom-edge doctor`: facts, gathered without importing here what is heavy."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pom_edge.bundle import Artifact, Bundle, is_bundle
from pom_edge.errors import InputError, MissingToolError
from pom_edge.importable import NOT_INSTALLED, import_faults
from pom_edge.jetson import find_jetson, known_bad
from pom_edge.progress import Step
from pom_edge.runtimes.cuda_device import GpuState, find_gpus
from pom_edge.runtimes.cuda_memory import cuda_missing
from pom_edge.runtimes.tensorrt_library import MODULES, NAMES, library_path, load_tensorrt
from pom_edge.system import memory_bytes, usable_cores

# what each target needs here, and the line that installs it
NEEDS = {
    "export": (("torch", "onnx", "onnxscript", "onnxruntime"), "pip install 'pom-edge[export]'"),
    "run and check (ort)": (("onnxruntime",), "pip install 'pom-edge[ort]'"),
    "report": (("matplotlib", "onnxruntime"), "pip install 'pom-edge[report]'"),
    "coreml": (("torch", "coremltools"), "pip install 'pom-edge[export,coreml]'"),
    "check --layers": (("onnx", "onnxruntime"), "pip install 'pom-edge[export]'"),
}
ENGINES = {  # target, and the line that installs its compiler
    "engines for RTX GPUs (rtx)": ("rtx", "pip install 'pom-edge[rtx]'"),
    "engines (trt)": ("trt", "JetPack's python3-libnvinfer on a Jetson, else pip install 'pom-edge[trt]'"),
}

__all__ = ["describe", "diagnose", "machine_facts"]


def describe(path: Path, ranges: bool = False) -> dict[str, Any]:
    """What a bundle or a checkpoint holds; ``ranges`` adds the range tables of half-precision artifacts.

    Raises:
        InputError: neither; or a checkpoint where torch is not installed.
    """
    if not path.exists():
        raise InputError(f"{path} does not exist; expected a .pom bundle or a checkpoint")
    if path.is_dir():
        return _describe_bundle(path, ranges)
    from pom_edge.pipeline import load_torch

    load_torch()
    from pom_edge.checkpoint import load_checkpoint

    loaded = load_checkpoint(path)
    model = loaded.model
    parameters = sum(p.numel() for p in model.parameters()) if model is not None else None
    return {
        "name": path.stem,
        "format": loaded.format,
        "model": loaded.config.to_dict() if loaded.config is not None else repr(loaded.layer or type(model).__name__),
        "parameters": parameters,
        "published_layout": loaded.published_layout,
        "class_names": loaded.class_names,
        "samples": {name: list(tensor.shape) for name, tensor in loaded.samples.items()},
        "warnings": loaded.warnings,
        "artifacts": [],
    }


def _describe_bundle(path: Path, ranges: bool) -> dict[str, Any]:
    if not is_bundle(path):
        raise InputError(f"{path} is a folder without manifest.json; expected a .pom bundle or a checkpoint file")
    bundle = Bundle.open(path)
    manifest = bundle.manifest
    tokens = next((s for a in manifest.artifacts for i in a.inputs for s in i.shape if s == "tokens"), None)
    return {
        "name": manifest.name,
        "format": f"{manifest.format} {manifest.version}",
        "producer": manifest.producer,
        "created": manifest.created,
        "tools": manifest.tools,
        "model": manifest.model,
        "tokens": "free" if tokens else "fixed",
        "published_layout": manifest.published_layout,
        "class_names": manifest.class_names,
        "golden": [f"{case.name} ({case.kind}): {case.description}" for case in manifest.golden],
        "warnings": manifest.warnings,
        "bytes": sum(entry.bytes for entry in manifest.files),
        "measurements": [each.model_dump(mode="json") for each in manifest.measurements],
        "artifacts": [
            {
                "file": artifact.file,
                "target": artifact.target,
                "form": artifact.form,
                "precision": artifact.precision,
                "verified": artifact.verified,
                "inputs": [str(spec) for spec in artifact.inputs],
                "outputs": [str(spec) for spec in artifact.outputs],
                "opset": artifact.opset,
                "ir_version": artifact.ir_version,
                "weights": artifact.census,
                "mixers": list(artifact.mixers),
                "parity": artifact.parity,
                **({"ranges": artifact.ranges} if ranges else {}),
                **_of_target(artifact),
                "quantization": artifact.quantization,
                **({} if artifact.engine is None else {"engine": artifact.engine}),
                **({"damaged": bundle.damaged[artifact.file]} if artifact.file in bundle.damaged else {}),
                "notes": artifact.notes,
            }
            for artifact in manifest.artifacts
        ],
    }


def _of_target(artifact: Artifact) -> dict[str, Any]:
    """What only some targets have: Core ML has no remainder (what is not INT8 computes in FP16), others no oldest system."""
    if artifact.target != "coreml":
        return {"remainder": artifact.remainder}
    return {"deployment_target": artifact.deployment_target}


def describe_trtexec(path: Path, artifact: str | None, raw: Path | None) -> dict[str, Any]:
    """The trtexec command lines of an artifact, and with ``raw`` the golden data as raw files.

    Raises:
        InputError: no such artifact; BundleError: no bundle.
    """
    from pom_edge.trtexec import trtexec_lines, write_raw

    bundle = Bundle.open(path)
    fitting = [each for each in bundle.manifest.artifacts if each.target in ("onnx", "trt") and each.file not in bundle.damaged]
    found = [each for each in fitting if artifact in (None, each.file)]
    if not found:
        listed = ", ".join(each.file for each in fitting) or "none"
        raise InputError(f"{path.name} has no artifact {artifact or 'for trtexec'}; trtexec takes {listed}")
    trtexec_lines(bundle, found[0])  # what it does not take is told before anything is written
    facts: dict[str, Any] = {"name": bundle.manifest.name, "artifact": found[0].file}
    files, loaded = ([], "") if raw is None else write_raw(bundle, found[0], raw)
    facts.update({f"TensorRT {version}": line for version, line in trtexec_lines(bundle, found[0], loaded).items()})
    return facts if raw is None else {**facts, "raw": files, "loads": loaded or "no golden case fits these shapes as it is"}


def diagnose(step: Step = lambda _: None) -> dict[str, dict[str, Any]]:
    """Facts about this machine: versions, processor, memory, and what each step is missing."""
    runtimes = ("onnxruntime", "onnxruntime-gpu", "coremltools", "cuda-python")
    packages = ("pom-edge", "torch", "onnx", "onnxscript", *runtimes, "numpy")
    jetson, found = find_jetson(), find_gpus()
    libraries = {target: _library(target) for target in NAMES}
    faults = import_faults((module for modules, _ in NEEDS.values() for module in modules), step)
    return {
        "machine": {
            **machine_facts(),
            "vector units": _vector_units(),
            "memory": _memory(),
            "free disk here": f"{shutil.disk_usage('.').free / 2**30:.1f} GiB",
        },
        "GPU": _gpu_facts(found, libraries),
        **({} if jetson is None else {"Jetson": jetson.to_dict()}),
        "packages": {name: _version(name) for name in packages},
        "can do": {
            **{step: _missing({name: faults[name] for name in modules}, line) for step, (modules, line) in NEEDS.items()},
            **_engine_steps(found, libraries),
        },
    }


def machine_facts() -> dict[str, str]:
    """What a figure measured here depends on, and nothing that names the machine; cores are those of this process."""
    return {
        "system": platform.platform(),
        "python": platform.python_version(),
        "processor": _processor(),
        "cores": str(usable_cores()),
    }


def _gpu_facts(found: GpuState, libraries: Mapping[str, Any]) -> dict[str, str]:
    """The driver's answer, and every TensorRT: version, library path, and whether it is one that is known to fail."""
    gpus = [f"{gpu.name}, compute capability {gpu.compute_capability}" for gpu in found.gpus]
    facts = {"GPU": "; ".join(gpus) or f"none: {found.reason}", "CUDA of the driver": found.cuda or "none"}
    for target, trt in libraries.items():
        if isinstance(trt, str):
            facts[NAMES[target]] = trt
            continue
        bad = known_bad(trt.__version__, found.gpus[0].name if found.gpus else None) if target == "trt" else None
        facts[NAMES[target]] = f"{trt.__version__}, {library_path(trt) or 'library not found'}{f'; {bad}' if bad else ''}"
    return facts


def _library(target: str) -> Any:
    """The module, or why there is none."""
    if find_spec(MODULES[target]) is None:
        return NOT_INSTALLED
    try:
        return load_tensorrt(target)
    except MissingToolError as error:
        return str(error)


def _engine_steps(found: GpuState, libraries: Mapping[str, Any]) -> dict[str, str]:
    """Building and running engines: ready where library, driver, GPU and cuda-python answered; being listed is not enough."""
    why = dict.fromkeys(libraries, "")
    for target, line in ENGINES.values():
        found_library = libraries[target]
        if isinstance(found_library, str):
            why[target] = f"missing {MODULES[target]}; run: {line}" if found_library == NOT_INSTALLED else found_library
    gpu = "" if found.gpus else f"no GPU: {found.reason}"
    steps = {}
    for step, (target, _) in ENGINES.items():
        reason = why[target] or (gpu if target == "trt" else "")  # TensorRT-RTX builds without one
        steps[step] = reason or "ready"
    usable = [NAMES[target] for target, reason in why.items() if not reason]
    lacking = [reason for reason in ("" if usable else "no TensorRT that can be imported", gpu, cuda_missing()) if reason]
    steps["run engines"] = "; ".join(lacking) or f"ready ({', '.join(usable)})"
    return steps


def _missing(faults: Mapping[str, str], install: str) -> str:
    """What a step lacks; being listed is not enough: a module is there where it can be imported."""
    absent = [name for name, fault in faults.items() if fault == NOT_INSTALLED]
    lacking = [fault for fault in faults.values() if fault not in ("", NOT_INSTALLED)]
    lacking += [f"missing {', '.join(absent)}; run: {install}"] if absent else []
    return "; ".join(lacking) or "ready"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _cpu_field(name: str) -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), None)


def _processor() -> str:
    return _cpu_field("model name") or platform.processor() or platform.machine()


def _vector_units() -> str:
    """The extensions that decide speed, and whether INT8 kernels without VNNI saturate."""
    flags = set((_cpu_field("flags") or _cpu_field("Features") or "").split())
    known = ("avx2", "avx512f", "avx_vnni", "avx512_vnni", "amx_int8", "asimd", "asimddp", "i8mm")
    return ", ".join(flag for flag in known if flag in flags) or "unknown"


def _memory() -> str:
    found = memory_bytes()
    return "unknown" if found is None else f"{found[0] / 2**30:.1f} GiB, {found[1] / 2**30:.1f} GiB available"
