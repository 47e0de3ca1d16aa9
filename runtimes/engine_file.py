"""From an engine's file to an engine that runs, or to a message that says why not.

TensorRT answers every failure with None and a line in its log; what the line means, and what to do, is said here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pom_edge.bundle import Artifact, Bundle
from pom_edge.engine_options import rebuild_command
from pom_edge.errors import BundleError, MissingToolError
from pom_edge.runtimes.cuda_device import Gpu
from pom_edge.runtimes.tensorrt_library import NAMES, library_path, version_tuple

AMPERE = 80  # hardware-compatible engines are built for this compute capability and all later ones

__all__ = ["check_binding", "check_facts", "deserialise"]


def check_facts(bundle: Bundle, artifact: Artifact) -> None:
    """What the manifest says of an engine must fit the bundle: seen without a library and without a GPU.

    Raises:
        BundleError: built by another compiler, from another graph or from none that is known, or in shapes that are none.
    """
    facts, name = artifact.engine, NAMES[artifact.target]
    if facts is None:
        raise BundleError(f"{artifact.file}: the manifest does not say what built it; build it again")
    wrong = _first_wrong(bundle, artifact, facts, name)
    if wrong:
        command = rebuild_command(bundle.path.name, artifact.target, artifact.form, artifact.precision, facts)
        raise BundleError(f"{artifact.file}: {wrong}; build it again: {command}")


def _first_wrong(bundle: Bundle, artifact: Artifact, facts: Mapping[str, Any], name: str) -> str | None:
    if facts.get("compiler") != name:
        return f"it was built by {facts.get('compiler') or 'an unknown compiler'}, and {artifact.target} is {name}"
    if not version_tuple(str(facts.get("version") or "")):
        return f"the manifest does not say which version of {name} built it"
    if not isinstance(facts.get("compute_capabilities"), list):
        return "the manifest does not say which GPUs it was built for"
    source = str(facts.get("source"))
    if any(each.file == source for each in bundle.manifest.artifacts) and facts.get("source_sha256") != bundle.sha256(source):
        return f"it was not built from the {source} that the bundle holds"
    shapes = facts.get("shapes")
    if not isinstance(shapes, Mapping):
        return "the manifest does not say for which shapes it was built"
    for axis, lengths in shapes.items():
        if not _is_extent(lengths):
            return f"{axis} of {lengths!r} is no MIN, OPT, MAX"
        for spec in artifact.inputs:
            if axis in spec.shape and tuple(spec.bounds.get(axis, ())) != (lengths[0], lengths[2]):
                return f"input {spec.name!r} and the engine differ in {axis}: {spec.bounds.get(axis)} and {lengths}"
    return None


def _is_extent(lengths: Any) -> bool:
    return (
        isinstance(lengths, list)
        and len(lengths) == 3
        and all(type(each) is int and each >= 1 for each in lengths)
        and lengths == sorted(lengths)
    )


def check_binding(target: str, facts: Mapping[str, Any], rebuild: str, version: str, gpus: Sequence[Gpu]) -> None:
    """An engine belongs to a version and a GPU: look before a native parser sees it (ultralytics#18730, TensorRT#2195).

    Args:
        target: ``"trt"`` or ``"rtx"``.
        facts: the manifest's facts.
        rebuild: the command that builds the same for the machine where it runs.
        version: of the library here.
        gpus: of this machine.

    Raises:
        BundleError: it was built for another version or GPU.
        MissingToolError: there is no GPU.
    """
    name, mend = NAMES[target], f"build it for this machine: {rebuild}"
    built = ", ".join(facts["compute_capabilities"])
    if facts["version"] != version and not (facts.get("version_compatible") and _is_later(version, facts["version"])):
        raise BundleError(f"the engine was built by {name} {facts['version']}, and here is {name} {version}; {mend}")
    if not gpus:
        raise MissingToolError(
            f"the engine needs an NVIDIA GPU of compute capability {built} ({facts['gpu'] or 'no GPU in particular'}), and "
            "there is none here; copy the bundle to a machine that has one"
        )
    here = gpus[0].compute_capability.replace(".", "")
    if here not in facts["compute_capabilities"] and not (facts.get("hardware_compatible") and int(here) >= AMPERE):
        raise BundleError(
            f"the engine was built for compute capability {built} ({facts['gpu'] or 'no GPU in particular'}), and here is "
            f"{gpus[0].name} with {here}; {mend}"
        )


def _is_later(version: str, built: str) -> bool:
    """Whether a version-compatible engine runs there: the same major version, and not an older one."""
    here, there = version_tuple(version), version_tuple(built)
    return here[:1] == there[:1] and here >= there


def deserialise(trt: Any, target: str, logger: Any, runtime: Any, path: Path) -> Any:
    """The engine.

    Args:
        trt: the module.
        target: ``"trt"`` or ``"rtx"``.
        logger: the process's, see :func:`pom_edge.runtimes.tensorrt_library.logger_of`.
        runtime: ``trt.Runtime``; must outlive the engine.
        path: of the file.

    Raises:
        BundleError: it cannot be opened; says why.
        MissingToolError: the driver is missing or too old.
    """
    logger.lines.clear()
    raised = []
    try:
        if hasattr(trt, "IStreamReaderV2"):  # no second copy of the plan in memory
            with _reader(trt, path) as reader:
                engine = runtime.deserialize_cuda_engine(reader)
        else:
            engine = runtime.deserialize_cuda_engine(path.read_bytes())
    except RuntimeError as error:  # TensorRT-RTX 1.7 raises where it reads from a stream, and answers None where it does not
        engine, raised = None, [str(error)]
    if engine is None:
        raise _why(trt, target, path.name, [*raised, *logger.errors()])
    return engine


def _why(trt: Any, target: str, file: str, errors: list[str]) -> BundleError | MissingToolError:
    """The exception that an empty answer stands for."""
    name, told = NAMES[target], " | ".join(errors[:3]) or "no reason given"
    where = f"{name} {trt.__version__} ({library_path(trt) or 'library not found'})"
    text = " ".join(errors).lower()
    if any(words in text for words in ("cudaerror 35", "driver version is insufficient", "open cuda driver")):
        return MissingToolError(
            f"{where} cannot open {file}: the NVIDIA driver is missing or too old; update it. It says: {told}"
        )
    if "not compatible with this version" in text or "version tag" in text:
        return BundleError(
            f"{where} cannot open {file}: another version built it; build it again with this one. It says: {told}"
        )
    if "compute capability" in text or "different gpu" in text or "target gpu" in text:
        return BundleError(f"{where} cannot open {file}: it was built for another GPU; build it on this one. It says: {told}")
    if "magic tag" in text or "serialization" in text or "header" in text:
        return BundleError(
            f"{where} cannot open {file}: it is no whole engine; copy the bundle again, or build it again. {told}"
        )
    return BundleError(f"{where} cannot open {file}. It says: {told}")


def _reader(trt: Any, path: Path) -> Any:
    class Reader(trt.IStreamReaderV2):  # type: ignore[misc]
        """The file, as it is asked for. A context manager: TensorRT keeps no handle of its own."""

        def __init__(self) -> None:
            trt.IStreamReaderV2.__init__(self)
            self._file = open(path, "rb")  # noqa: SIM115  # closed on leaving

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None:
            self._file.close()

        def read(self, num_bytes: int, stream: int) -> bytes:  # noqa: ARG002  # the base class's signature
            return self._file.read(num_bytes)

        def seek(self, offset: int, where: Any) -> bool:
            self._file.seek(offset, (os.SEEK_SET, os.SEEK_CUR, os.SEEK_END)[int(where)])
            return True

    return Reader()
