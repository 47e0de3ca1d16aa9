"""The memory of one run, measured in a fresh process, where nothing else has left its mark.

Two gauges side by side (Linux):

    RssAnon   private anonymous memory, sampled every millisecond: what the process itself asks for
    VmHWM     the kernel's own high-water mark: misses no peak, but counts mapped files (libraries, weights) too

Elsewhere there is no such figure, and the answer is None: not measured.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pom_edge.arrays import read_arrays
from pom_edge.bundle import Bundle
from pom_edge.errors import InputError
from pom_edge.runtimes.limits import RLIMIT, Limit
from pom_edge.runtimes.session import open_session
from pom_edge.system import human_bytes

SAMPLE_SECONDS = 1e-3
SPARE_THREADS = 1  # the sampler's stack of 8 MiB is reserved, and hardly used
NATIVE = {"ort": "onnxruntime"}  # runtime -> module whose import belongs to the base, not to the model

__all__ = ["PeakMemory", "measure_opened", "measure_peak"]


@dataclass(frozen=True)
class PeakMemory:
    """Bytes of one run; ``base + weights + io + activations == total``.

    Attributes:
        base_bytes: interpreter, libraries and the runtime, before a model is opened.
        weights_bytes: what opening the model added: weights and the runtime's plans for them.
        io_bytes: inputs and outputs, by their shapes.
        activations_bytes: what the run needed beyond these, at its peak.
        total_bytes: highest RssAnon that was sampled.
        resident_bytes: VmHWM of the whole process.
        samples: how often RssAnon was read during the run; few samples can miss a short peak.
    """

    base_bytes: int
    weights_bytes: int
    io_bytes: int
    activations_bytes: int
    total_bytes: int
    resident_bytes: int
    samples: int

    def to_dict(self) -> dict[str, int]:
        """As JSON values."""
        return asdict(self)


def measure_peak(
    bundle_path: str | os.PathLike[str],
    artifact: str | None,
    inputs: Mapping[str, np.ndarray] | str | os.PathLike[str],
    runtime: str = "ort",
    threads: int | None = None,
    spill: str | None = None,
    limit: Limit | None = None,
) -> PeakMemory | None:
    """Run an artifact once in a fresh process and measure its peak.

    Args:
        bundle_path: the ``.pom`` folder.
        artifact: file name inside it; None where the runtime fits only one.
        inputs: arrays by tensor name, or a file of them (.npz, .npy, .safetensors).
        runtime: as in :func:`pom_edge.runtimes.open_session`.
        threads: for the runtime; None leaves the choice to it.
        spill: streamed form: a folder for the tokens; inputs that are a ``.npy`` file are read, and outputs written, in pieces.
        limit: what the process may take in all (see :func:`pom_edge.runtimes.limits.memory_limit`).

    Returns:
        The peak, or None where the system has no such gauge: not measured.

    Raises:
        InputError: whatever the session refuses (names, shapes, a damaged bundle), or a process that died.

    Example:
        >>> peak = measure_peak("model.pom", None, {"x": x})
        >>> peak.total_bytes if peak else "not measured"
    """
    if not _has_gauge():
        return None
    with tempfile.TemporaryDirectory() as folder:
        if isinstance(inputs, (str, os.PathLike)):
            file = Path(inputs)
        else:
            file = Path(folder) / "inputs.npz"
            np.savez(file, **inputs)  # type: ignore[arg-type]  # numpy types its allow_pickle flag into **kwds
        job = {**_job(bundle_path, artifact, runtime, threads), "inputs": str(file), "spill": spill}
        answer = _in_fresh_process(job, limit)
    return PeakMemory(**answer)


def measure_opened(path: str | os.PathLike[str], artifact: str | None, runtime: str, threads: int | None) -> PeakMemory:
    """Open an artifact in a fresh process and run nothing: runtime and weights.

    Raises:
        InputError: as :func:`measure_peak`, or this system has no gauge.
    """
    if not _has_gauge():
        raise InputError(
            "a prediction starts from what opening the model takes, and this system has no gauge for that; expected Linux"
        )
    return PeakMemory(**_in_fresh_process({**_job(path, artifact, runtime, threads), "inputs": None}))


def _job(path: str | os.PathLike[str], artifact: str | None, runtime: str, threads: int | None) -> dict[str, Any]:
    return {"bundle": os.fspath(path), "artifact": artifact, "runtime": runtime, "threads": threads}


def _in_fresh_process(job: dict[str, Any], limit: Limit | None = None) -> dict[str, int]:
    # the package may be a bare checkout that only this process's sys.path knows
    root = str(Path(sys.modules["pom_edge"].__file__ or "").resolve().parents[1])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    if limit is not None and limit.kind == RLIMIT:
        job = {**job, "limit": limit.total}
    with contextlib.nullcontext() if limit is None else limit.entering() as enter:
        done = subprocess.run(  # noqa: S603  # our own interpreter, our own module
            [sys.executable, "-m", __name__, json.dumps(job)],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
            preexec_fn=enter,  # one write to an open file, so that nothing of the child escapes the limit
        )
    lines = done.stdout.splitlines()
    if done.returncode == InputError.exit_code and lines:
        raise InputError(json.loads(lines[-1])["error"])
    if done.returncode != 0:
        if limit is not None and limit.killed:
            raise InputError(f"the system killed it at {human_bytes(limit.total)}")
        reason = done.stderr.strip().splitlines()[-1:] or ["no message"]
        killed = "; killed by the system, probably out of memory" if done.returncode == -9 else ""
        raise InputError(f"the measuring process ended with {done.returncode}{killed}: {reason[0]}")
    answer: dict[str, int] = json.loads(lines[-1])
    return answer


class _Sampler:
    """Highest RssAnon while the context lasts. Runtimes release the GIL, so a thread sees their peaks."""

    def __init__(self) -> None:
        self.peak, self.samples = 0, 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> _Sampler:
        self._sample()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._sample()  # an arena keeps what it took, so this one counts even after a run shorter than the interval
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            self._sample()

    def _sample(self) -> None:
        self.peak = max(self.peak, _status_bytes("RssAnon"))
        self.samples += 1


def _measure(job: dict[str, Any]) -> PeakMemory:
    """The fresh process's part: base, then the model, then one run."""
    Bundle.open(Path(job["bundle"]))
    if job["runtime"] in NATIVE:
        importlib.import_module(NATIVE[job["runtime"]])
    base = _status_bytes("RssAnon")
    with open_session(job["bundle"], job["runtime"], job["artifact"], job["threads"], job.get("spill")) as session:
        loaded = _status_bytes("RssAnon")
        if job["inputs"] is None:
            return PeakMemory(base, max(loaded - base, 0), 0, 0, loaded, _status_bytes("VmHWM"), 1)
        source = Path(job["inputs"])
        if job.get("limit"):  # now that threads have their stacks and weights are loaded: see _limit
            _limit(job["limit"])
        if job.get("spill") and source.suffix == ".npy":
            with _Sampler() as sampler:
                session.run_file(source, Path(job["spill"]) / f".pom-edge-output-{os.getpid()}.npy")
            io_bytes = 0
            (Path(job["spill"]) / f".pom-edge-output-{os.getpid()}.npy").unlink()
        else:
            inputs = read_arrays(source)
            with _Sampler() as sampler:
                outputs = session.run_named(inputs)
            io_bytes = sum(array.nbytes for array in (*inputs.values(), *outputs.values()))
    weights = max(loaded - base, 0)
    activations = max(sampler.peak - base - weights - io_bytes, 0)
    return PeakMemory(
        # pages given back between two readings would break the sum; the difference belongs to the base
        base_bytes=max(sampler.peak - weights - io_bytes - activations, 0),
        weights_bytes=weights,
        io_bytes=io_bytes,
        activations_bytes=activations,
        total_bytes=sampler.peak,
        resident_bytes=_status_bytes("VmHWM"),
        samples=sampler.samples,
    )


def _limit(total: int) -> None:
    """Let the system refuse memory beyond ``total``: RLIMIT_DATA counts what is reserved, so that is added which is never used.

    (RLIMIT_RSS does nothing on Linux, and RLIMIT_AS breaks the creation of threads.)
    """
    import resource

    taken = _status_bytes("RssAnon")
    if taken > total:
        raise InputError(f"opening the model takes {human_bytes(taken)} already, more than the budget")
    unused = _status_bytes("VmData") - taken + (SPARE_THREADS << 23)
    resource.setrlimit(resource.RLIMIT_DATA, (total + unused, total + unused))


def _has_gauge() -> bool:
    try:
        return _status_bytes("RssAnon") > 0
    except (OSError, KeyError):
        return False


def _status_bytes(field: str) -> int:
    """A memory field of /proc/self/status, in bytes.

    Raises:
        OSError, KeyError: not Linux, or a kernel without this field.
    """
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        for line in file:
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024  # the kernel says kB and means KiB
    raise KeyError(field)


def _main(argument: str) -> int:
    try:
        print(json.dumps(_measure(json.loads(argument)).to_dict()))
    except (InputError, MemoryError) as error:
        print(json.dumps({"error": str(error) or "not enough memory"}))
        return InputError.exit_code
    except RuntimeError as error:
        if "can't start new thread" not in str(error):  # what Python says when there is no room for its stack
            raise
        print(json.dumps({"error": "not enough memory for another thread"}))
        return InputError.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1]))
