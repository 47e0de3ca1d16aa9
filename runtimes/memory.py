"""How much memory a run takes: predicted from the graph, measured in a fresh process, enforced by the system.

Prediction: opening the artifact in a fresh process gives the runtime's base and the weights; what a run needs beyond them is
simulated, tensor by tensor, as ONNX Runtime's arena gives and takes memory.

Measurement, in a fresh process, where nothing else has left its mark:

Two gauges side by side (Linux):

    RssAnon   private anonymous memory, sampled every millisecond: what the process itself asks for
    VmHWM     the kernel's own high-water mark: misses no peak, but counts mapped files (libraries, weights) too

Elsewhere there is no such figure, and the answer is None: not measured.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pom_edge.arrays import read_arrays
from pom_edge.bundle import Artifact, Bundle, PassSpec, StreamSpec, TensorSpec
from pom_edge.errors import InputError
from pom_edge.formula import evaluate
from pom_edge.runtimes.session import open_session, select_artifact
from pom_edge.runtimes.stepping import is_state

SAMPLE_SECONDS = 1e-3
SPARE_THREADS = 1  # the sampler's stack of 8 MiB is reserved, and hardly used
NATIVE = {"ort": "onnxruntime"}  # runtime -> module whose import belongs to the base, not to the model

__all__ = [
    "Arena",
    "MemoryReport",
    "PeakMemory",
    "Prediction",
    "check_budget",
    "make_arrays",
    "measure_peak",
    "parse_size",
    "predict",
]


def parse_size(text: str, option: str) -> int:
    """Bytes of ``512MiB``, ``1.5 GB`` or ``1000000``: KB, MB and GB are powers of 1000, KiB, MiB and GiB of 1024.

    Raises:
        InputError: not of that form, or not above 0.
    """
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?i?B?)\s*", text, re.IGNORECASE)
    unit = "" if found is None else found[2].upper().removesuffix("B")
    expected = f"{option} is {text!r}; expected a size, for example 512MiB (1024 x 1024), 512MB (1000 x 1000) or 536870912"
    if found is None or (unit and unit[0] == "I") or (unit and not found[2].upper().endswith("B")):
        raise InputError(expected)
    size = int(float(found[1]) * (1024 if unit.endswith("I") else 1000) ** ("KMGT".index(unit[0]) + 1 if unit else 0))
    if size < 1:
        raise InputError(expected)
    return size


class Arena:
    """ONNX Runtime's arena (best fit with coalescing, growing by what is asked for): how much memory it takes and keeps.

    A freed piece is joined with its free neighbours, and split for a smaller tensor if that leaves half of it or more.
    """

    ALIGN = 256
    MAX_DEAD = 128 << 20  # bytes of a piece that may be left unused

    def __init__(self) -> None:
        self.total = 0
        self._regions = 0
        self._free: list[tuple[int, int, int]] = []  # size, region, offset

    def take(self, size: int) -> tuple[int, int, int]:
        """A piece of at least so many bytes."""
        size = max(-(-size // self.ALIGN), 1) * self.ALIGN
        fitting = [piece for piece in self._free if piece[0] >= size]
        if not fitting:
            self.total += size
            self._regions += 1
            return size, self._regions, 0
        piece = min(fitting)
        self._free.remove(piece)
        whole, region, offset = piece
        if whole >= 2 * size or whole - size >= self.MAX_DEAD:
            self._free.append((whole - size, region, offset + size))
            return size, region, offset
        return piece

    def give(self, piece: tuple[int, int, int]) -> None:
        """Free a piece."""
        size, region, offset = piece
        for other in [free for free in self._free if free[1] == region]:
            if other[2] + other[0] == offset or offset + size == other[2]:
                self._free.remove(other)
                size, offset = size + other[0], min(offset, other[2])
        self._free.append((size, region, offset))

    def run(self, events: Sequence[str], sizes: Mapping[str, int]) -> None:
        """One run of a graph (see ``Artifact.arena``); its outputs are freed in the end."""
        held: dict[str, tuple[int, int, int]] = {}
        for event in events:
            index, _, formula = event[1:].partition(" ")
            if event[0] == "+":
                held[index] = self.take(evaluate(formula, sizes))
            elif index in held:
                self.give(held.pop(index))
        for piece in held.values():
            self.give(piece)


@dataclass(frozen=True)
class Prediction:
    """Bytes that a run will take; ``runtime + weights + io + activations == total``."""

    runtime: int
    weights: int
    io: int
    activations: int

    @property
    def total(self) -> int:
        """Of the process."""
        return self.runtime + self.weights + self.io + self.activations

    def to_dict(self) -> dict[str, int]:
        """As JSON values (docs/cli.md)."""
        return {**asdict(self), "total": self.total}


def predict(
    path: str | os.PathLike[str],
    tokens: int,
    batch: int = 1,
    artifact: str | None = None,
    runtime: str = "ort",
    spill: bool = False,
    threads: int | None = None,
) -> Prediction:
    """Predict the memory of one run.

    Args:
        path: the bundle.
        tokens: N (of a chunk in the recurrent form). Other free axes are taken to be as long.
        batch: B.
        artifact, runtime, threads: as in :func:`pom_edge.runtimes.open_session`.
        spill: streamed form: the tokens between passes, inputs and outputs are in files.

    Raises:
        InputError: the artifact carries no memory plan, or this system has no gauge for the base.
    """
    bundle = Bundle.open(Path(path))
    chosen = select_artifact(bundle, ".onnx", artifact)
    if not chosen.arena or any(plan is None for plan in chosen.arena):
        raise InputError(f"{chosen.file} carries no memory plan: the size of one of its tensors is not known from its inputs")
    opened = _in_fresh_process({**_job(path, artifact, runtime, threads), "inputs": None})
    sizes = free_sizes(chosen, tokens, batch)
    spill = spill and _from_file_to_file(chosen)
    arena = Arena()
    for plan in chosen.arena:
        arena.run(plan or (), sizes)
    inputs = sum(math.prod(shape) * np.dtype(dtype).itemsize for _, dtype, shape in _shapes(chosen, chosen.inputs, sizes))
    outputs = sum(math.prod(shape) * np.dtype(dtype).itemsize for _, dtype, shape in _shapes(chosen, chosen.outputs, sizes))
    activations, io = arena.total, inputs + outputs
    stream = chosen.stream
    if stream is None:
        activations = max(activations - outputs, 0)  # the runtime hands its own memory out as the answer
    else:
        # From files every chunk is an array of its own; in memory it is a part of what is there.
        activations += max(_chunk_bytes(stream, step) for step in stream.passes) if spill else _stored_bytes(stream, tokens)
        io = 0 if spill else io
    return Prediction(opened["base_bytes"], opened["weights_bytes"], io, activations)


@dataclass(frozen=True)
class MemoryReport:
    """A prediction beside a measurement, and whether both keep a budget.

    Attributes:
        budget: bytes of the whole process; None where none was given.
        exceeded: the system stopped a run that was to keep the budget; what it said.
    """

    file: str
    form: str
    tokens: int
    batch: int
    predicted: Prediction
    measured: PeakMemory | None
    budget: int | None
    enforced: bool
    exceeded: str | None = None

    @property
    def passed(self) -> bool:
        """Whether the budget holds: by measurement where there is one, else by prediction."""
        if self.exceeded is not None:
            return False
        total = self.predicted.total if self.measured is None else self.measured.total_bytes
        return self.budget is None or total <= self.budget

    def to_dict(self) -> dict[str, Any]:
        """As JSON values (docs/cli.md)."""
        measured = self.measured
        return {
            "passed": self.passed,
            "file": self.file,
            "form": self.form,
            "tokens": self.tokens,
            "batch": self.batch,
            "budget_bytes": self.budget,
            "enforced": "RLIMIT_DATA" if self.enforced else None,
            "exceeded": self.exceeded,
            "predicted_bytes": self.predicted.to_dict(),
            "measured_bytes": None
            if measured is None
            else {
                "runtime": measured.base_bytes,
                "weights": measured.weights_bytes,
                "io": measured.io_bytes,
                "activations": measured.activations_bytes,
                "total": measured.total_bytes,
                "resident": measured.resident_bytes,
            },
        }


def check_budget(
    path: str | os.PathLike[str],
    tokens: int,
    batch: int = 1,
    *,
    budget: int | None = None,
    enforce: bool = False,
    artifact: str | None = None,
    runtime: str = "ort",
    spill: str | None = None,
    threads: int | None = None,
) -> MemoryReport:
    """Predict and measure one run on random inputs of the given size.

    Args:
        path, artifact, runtime, threads: as in :func:`pom_edge.runtimes.open_session`.
        tokens, batch: size of the run.
        budget: bytes of the whole process.
        enforce: measure under a limit of the system at the budget; a run that needs more fails.
        spill: streamed form: a folder for the tokens, the inputs and the outputs.

    Raises:
        InputError: a budget below what the runtime and the weights take, or as :func:`predict`.
    """
    predicted = predict(path, tokens, batch, artifact, runtime, spill is not None, threads)
    if budget is not None:
        for least, what in (
            (predicted.runtime, "the runtime alone"),
            (predicted.runtime + predicted.weights, "runtime and weights"),
        ):
            if budget < least:
                raise InputError(
                    f"the budget of {budget / 2**20:.1f} MiB is below what {what} takes, {least / 2**20:.1f} MiB; no form "
                    "and no chunk "
                    "can keep it"
                )
    chosen = select_artifact(Bundle.open(Path(path)), ".onnx", artifact)
    arrays = make_arrays(chosen, tokens, batch)
    measured, exceeded = None, None
    with tempfile.TemporaryDirectory(dir=spill) as folder:
        inputs: Any = arrays
        if spill is not None and _from_file_to_file(chosen):
            inputs = Path(folder) / "inputs.npy"
            np.save(inputs, next(iter(arrays.values())))
        del arrays
        try:
            measured = measure_peak(path, artifact, inputs, runtime, threads, spill, budget if enforce else None)
        except InputError as error:
            if not enforce:
                raise
            exceeded = str(error)
    return MemoryReport(chosen.file, chosen.form, tokens, batch, predicted, measured, budget, enforce, exceeded)


def free_sizes(artifact: Artifact, tokens: int, batch: int) -> dict[str, int]:
    """Lengths of all free axes of an artifact.

    Raises:
        InputError: its batch is fixed at another number.
    """
    fixed = artifact.inputs[0].shape[0]
    if isinstance(fixed, int) and fixed != batch:
        raise InputError(f"{artifact.file} takes batches of {fixed}, found --batch {batch}")
    names = {dim for spec in (*artifact.inputs, *artifact.outputs) for dim in spec.shape if isinstance(dim, str)}
    return {
        "batch": batch,
        "tokens": tokens,
        **{name: batch if name == "batch" else tokens for name in names if name.isidentifier()},
    }


def make_arrays(artifact: Artifact, tokens: int, batch: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Random inputs of the given size: normal floats, integers within their table, positions that count."""
    generator = np.random.default_rng(seed)
    made: dict[str, np.ndarray] = {}
    values = {spec.name: spec.values or (0, 1) for spec in artifact.inputs}
    for name, dtype, shape in _shapes(
        artifact, [s for s in artifact.inputs if not is_state(s.name)], free_sizes(artifact, tokens, batch)
    ):
        if "positions" in name:
            made[name] = np.zeros(shape, dtype) + np.arange(shape[0], dtype=dtype).reshape(-1, *[1] * (len(shape) - 1))
        elif "mask" in name:
            made[name] = np.ones(shape, dtype)
        elif np.dtype(dtype).kind == "f":
            made[name] = generator.standard_normal(shape).astype(dtype)
        else:
            made[name] = generator.integers(values[name][0], values[name][1] + 1, shape).astype(dtype)
    return made


def _shapes(artifact: Artifact, specs: Sequence[TensorSpec], sizes: Mapping[str, int]) -> Iterator[tuple[str, str, list[int]]]:
    """Name, dtype and shape of tensors at these sizes."""
    for spec in specs:
        shape = [dim if isinstance(dim, int) else evaluate(dim, sizes) for dim in spec.shape]
        if artifact.stream is not None and spec.name not in artifact.stream.token_axes:
            shape = artifact.stream.shapes.get(spec.name, shape)
        yield spec.name, spec.dtype, shape


def _from_file_to_file(artifact: Artifact) -> bool:
    """Whether inputs and outputs of a spilled run stay in files: one of each, with a row for each token."""
    stream = artifact.stream
    return (
        stream is not None
        and len(artifact.inputs) == len(artifact.outputs) == 1
        and artifact.outputs[0].name in stream.token_axes
    )


def _chunk_bytes(stream: StreamSpec, step: PassSpec) -> int:
    """The arrays that go into one run of a pass; what comes out is the runtime's own memory."""
    names = {*step.inputs} & stream.shapes.keys()
    return sum(math.prod(stream.shapes[name]) * np.dtype(stream.dtypes[name]).itemsize for name in names)


def _stored_bytes(stream: StreamSpec, tokens: int) -> int:
    """The buffer between passes, in memory; values of equal kind take over each other's place."""
    widths: dict[tuple[Any, ...], int] = {}
    for step in stream.passes:
        for kind in {(tuple(stream.shapes[n]), stream.token_axes[n], stream.dtypes[n]) for n in step.stores}:
            shape, axis, dtype = kind
            count = sum((tuple(stream.shapes[n]), stream.token_axes[n], stream.dtypes[n]) == kind for n in step.stores)
            row = math.prod(n for i, n in enumerate(shape) if i != axis) * np.dtype(dtype).itemsize
            widths[kind] = max(widths.get(kind, 0), row * count)
    return sum(widths.values()) * tokens


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
    limit: int | None = None,
) -> PeakMemory | None:
    """Run an artifact once in a fresh process and measure its peak.

    Args:
        bundle_path: the ``.pom`` folder.
        artifact: file name inside it; None where the runtime fits only one.
        inputs: arrays by tensor name, or a file of them (.npz, .npy, .safetensors).
        runtime: as in :func:`pom_edge.runtimes.open_session`.
        threads: for the runtime; None leaves the choice to it.
        spill: streamed form: a folder for the tokens; inputs that are a ``.npy`` file are read, and outputs written, in pieces.
        limit: bytes that the process may take in all; the system refuses more (RLIMIT_DATA).

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
        job = {**_job(bundle_path, artifact, runtime, threads), "inputs": str(file), "spill": spill, "limit": limit}
        answer = _in_fresh_process(job)
    return PeakMemory(**answer)


def _job(path: str | os.PathLike[str], artifact: str | None, runtime: str, threads: int | None) -> dict[str, Any]:
    return {"bundle": os.fspath(path), "artifact": artifact, "runtime": runtime, "threads": threads}


def _in_fresh_process(job: dict[str, Any]) -> dict[str, int]:
    # the package may be a bare checkout that only this process's sys.path knows
    root = str(Path(sys.modules["pom_edge"].__file__ or "").resolve().parents[1])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    done = subprocess.run(  # noqa: S603  # our own interpreter, our own module
        [sys.executable, "-m", __name__, json.dumps(job)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = done.stdout.splitlines()
    if done.returncode == InputError.exit_code and lines:
        raise InputError(json.loads(lines[-1])["error"])
    if done.returncode != 0:
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
        raise InputError(f"opening the model takes {taken / 2**20:.1f} MiB already, more than the budget")
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
