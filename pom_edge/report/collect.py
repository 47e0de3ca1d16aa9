"""``pom-edge report``: what a bundle says of itself, and what it does here, gathered for one page (page.py).

Needs no torch and no onnx: parity, ranges and tools are in the manifest, times and memory are measured as ``pom-edge bench``
and ``pom-edge memory`` measure them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from pom_edge.bundle import MANIFEST, Artifact, Bundle, Manifest
from pom_edge.errors import InputError
from pom_edge.exchange import writing_errors
from pom_edge.inspection import machine_facts
from pom_edge.report.peers import Peers
from pom_edge.runtimes.bench import ROUNDS, TOKENS, BenchReport, BenchRow, bench, smallest_batch
from pom_edge.runtimes.measuring import PeakMemory, measure_opened
from pom_edge.runtimes.memory import SizeError, predict_run, token_count
from pom_edge.runtimes.session import BATCH

GENERATOR = "pom-edge report"  # in the head of every page: a file that says so may be replaced by the next one

__all__ = ["GENERATOR", "MemoryRow", "Report", "bound_ms", "check_place", "collect", "labels"]


@dataclass(frozen=True)
class MemoryRow:
    """One artifact at one length, in bytes.

    Attributes:
        io, activations: predicted from the graph; None where ``why`` says why not.
        opened: runtime and weights, measured in a fresh process; None: nothing was opened.
        measured: the whole process in a run of its own; None: not measured.
    """

    file: str
    tokens: int | None
    batch: int
    io: int | None
    activations: int | None
    opened: PeakMemory | None
    measured: int | None
    why: str = ""

    @property
    def predicted(self) -> int | None:
        """Of the whole process; None where a part is not known."""
        if self.opened is None or self.io is None or self.activations is None:
            return None
        return self.opened.base_bytes + self.opened.weights_bytes + self.io + self.activations


@dataclass(frozen=True)
class Report:
    """Everything that the page shows.

    Attributes:
        bench: times and memory of this machine; None where ``unmeasured`` says why not.
        memory: one row for each artifact and length.
        budget: bytes that a run may take; None: none was given.
        peers: a mixer beside its peers, from a benchmark; None: none was given.
        created: when, in UTC.
        threads: that the runtime was given; None: its own choice.
    """

    manifest: Manifest
    bench: BenchReport | None
    unmeasured: str
    memory: list[MemoryRow]
    budget: int | None
    peers: Peers | None
    machine: dict[str, str]
    created: str
    threads: int | None = None

    @property
    def artifacts(self) -> list[Artifact]:
        """Of the bundle, in its order."""
        return self.manifest.artifacts

    def is_one_size(self, file: str) -> bool:
        """Whether an artifact's inputs have one size, which does not say how many tokens it is."""
        return _is_one_size(next(artifact for artifact in self.artifacts if artifact.file == file))


def collect(
    path: Path,
    tokens: Sequence[int] | None = None,
    batch: int | None = None,
    *,
    threads: int | None = None,
    rounds: int = ROUNDS,
    measured: bool = True,
    budget: int | None = None,
    peers: Peers | None = None,
    progress: Callable[[str], None] | None = None,
) -> Report:
    """Gather the facts of a bundle, and measure it.

    Args:
        path: the ``.pom`` folder.
        tokens: lengths to time and to predict; None: those that its artifacts have, or 256, 1,024 and 4,096 as far as they
            are taken.
        batch: sequences; None: the smallest that the artifacts take.
        threads, rounds: as in :func:`pom_edge.runtimes.bench.bench`.
        measured: time the artifacts here; otherwise only what the manifest says.
        budget: bytes of the whole process, to be drawn beside the memory.
        peers: from :func:`pom_edge.report.peers.read_peers`.
        progress: called with the name of each step.

    Raises:
        BundleError: not an intact bundle.
        InputError: no artifact takes any of the lengths; MissingExtraError: measuring needs onnxruntime.
    """
    bundle, step = Bundle.open(path), progress or (lambda _: None)
    artifacts = bundle.manifest.artifacts
    runs = [a for a in artifacts if a.file.endswith(".onnx") and "not run" not in a.verified]
    lengths = list(dict.fromkeys(tokens)) if tokens is not None else _lengths(runs)
    if min(lengths, default=1) < 1 or (batch is not None and batch < 1):
        raise InputError(f"tokens {lengths}, batch {batch}: expected at least 1 of each")
    batch = smallest_batch(runs) if batch is None else batch
    timed, why = None, "the report was asked for without (--no-bench)"
    if measured and not runs:
        why = "no artifact of the bundle runs in ONNX Runtime"
    elif measured:
        timed = bench(path, lengths, batch, threads=threads, rounds=rounds, machine=machine_facts(), progress=progress)
    memory = []
    for artifact in runs:
        opened = None
        if timed is not None:
            step(f"open {artifact.file} in a fresh process")
            opened = _opened(path, artifact.file, threads)
        memory += [_memory(artifact, length, batch, opened, timed) for length in lengths]
    return Report(
        bundle.manifest,
        timed,
        "" if timed is not None else why,
        [row for row in memory if row.io is not None or row.measured is not None or row.why],
        budget,
        peers,
        machine_facts(),
        datetime.now(timezone.utc).isoformat(timespec="seconds"),
        threads,
    )


def _lengths(artifacts: list[Artifact]) -> list[int]:
    """Those that an artifact has, or the usual ones within its bounds; 1 stands for inputs of one size."""
    found: set[int] = set()
    for artifact in artifacts:
        try:
            found.add(token_count(artifact, None) or 1)
        except SizeError:  # of any length
            specs = [] if artifact.form == "recurrent" else artifact.inputs  # whose bounds are those of a chunk
            bounds = [b for spec in specs for axis, b in spec.bounds.items() if axis != BATCH]
            low, high = max((b[0] for b in bounds), default=1), min((b[1] or max(TOKENS) for b in bounds), default=max(TOKENS))
            found |= {length for n in TOKENS if _takes(artifact, length := min(max(n, low), max(high, low)))}
    return sorted(found)


def _takes(artifact: Artifact, tokens: int) -> bool:
    try:
        token_count(artifact, tokens)
    except SizeError:
        return False
    return True


def _is_one_size(artifact: Artifact) -> bool:
    try:
        return token_count(artifact, None) is None
    except SizeError:  # of any length
        return False


def _opened(path: Path, file: str, threads: int | None) -> PeakMemory | None:
    try:
        return measure_opened(path, file, "ort", threads)
    except InputError:  # this system has no gauge
        return None


def _memory(artifact: Artifact, tokens: int, batch: int, opened: PeakMemory | None, timed: BenchReport | None) -> MemoryRow:
    rows = [] if timed is None else timed.rows
    measured = next((r.peak_bytes for r in rows if (r.file, r.tokens, r.batch) == (artifact.file, tokens, batch)), None)
    count = None if _is_one_size(artifact) else tokens
    try:
        io, activations = predict_run(artifact, count, batch)
    except SizeError as error:
        why = str(error) if count is None or _takes(artifact, tokens) else ""  # another length is another artifact's
        return MemoryRow(artifact.file, count, batch, None, None, opened, measured, why)
    return MemoryRow(artifact.file, count, batch, io, activations, opened, measured)


def bound_ms(row: BenchRow) -> float | None:
    """The time of a run's matrix products alone, at the rate measured in the same rounds; None where the bundle names none."""
    return None if row.gemm_share is None else row.gemm_share * row.median_ms


def labels(artifacts: Sequence[Artifact]) -> dict[str, str]:
    """A short name for each artifact's file: its precision, and what else tells it from the others."""
    names = {a.file: a.precision.upper() for a in artifacts}
    for part in ("form", "target"):
        for artifact in artifacts if len({getattr(a, part) for a in artifacts}) > 1 else ():
            names[artifact.file] += f" {getattr(artifact, part)}"
    taken = list(names.values())
    return {file: name if taken.count(name) == 1 else file for file, name in names.items()}


def check_place(out: Path, bundle: Path) -> None:
    """Refuse a place before anything is measured: a folder, a bundle's inside, a file that is no report, no file at all.

    Raises:
        InputError: any of these.
    """
    target = out.resolve()
    if any((folder / MANIFEST).is_file() for folder in (target, *target.parents)):
        what = "is a bundle" if (target / MANIFEST).is_file() else "lies inside a bundle"
        example = bundle.resolve().with_suffix(".html")
        raise InputError(f"--out {out} {what}, whose files are hashed; expected a file outside, for example {example}")
    if out.is_dir():
        raise InputError(f"--out {out} is a folder; expected the name of a file, for example {out / 'report.html'}")
    if not target.parent.is_dir():
        raise InputError(f"--out {out}: the folder {out.parent} does not exist; create it first")
    if out.exists() and not _is_report(out):
        raise InputError(f"--out {out} exists and is not a report of pom-edge; choose another name, or remove it first")
    with writing_errors(out), tempfile.NamedTemporaryFile(prefix=f".{out.name}.", dir=target.parent):
        pass  # as the page will be written


def _is_report(path: Path) -> bool:
    if not path.is_file():
        return False
    with writing_errors(path), open(path, "rb") as file:
        head = file.read(2000)
    return f'content="{GENERATOR}'.encode() in head
