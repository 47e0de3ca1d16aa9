"""``pom-edge bench``: every artifact of a bundle that runs here, timed in turn, at one length after the other.

Each round runs every artifact, so that a busy machine disturbs all alike; memory is that of one run in a fresh process.
The bound beside a time is its matrix products at the rate of this processor, measured in the same rounds.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from pom_edge.bundle import Artifact, Bundle
from pom_edge.errors import InputError
from pom_edge.formula import evaluate
from pom_edge.runtimes.memory import free_sizes, make_arrays, measure_peak
from pom_edge.runtimes.product import Product
from pom_edge.runtimes.session import BATCH, RUNTIMES, Session, fitting_artifacts, open_session, runtime_of
from pom_edge.runtimes.timing import p90, timed
from pom_edge.words import counted

TOKENS = (256, 1024, 4096)
ROUNDS, WARM_UPS = 15, 1
ENGINES = ("trt", "rtx")  # made by a compiler, maybe elsewhere: "not run" until now, and run here if it can be

PACKAGES = {"coreml": ("coremltools",), "trt": ("tensorrt",), "rtx": ("tensorrt-rtx",)}  # that run artifacts; else:
ONNX_RUNTIME = ("onnxruntime", "onnxruntime-gpu")

__all__ = ["BenchReport", "BenchRow", "LeftOut", "bench", "smallest_batch"]


@dataclass(frozen=True)
class BenchRow:
    """One artifact at one length.

    Attributes:
        median_ms, p90_ms: of a run of the whole sequence.
        peak_bytes: of the process, in a run of its own; None: not measured.
        tokens_per_s: of all sequences together.
        gemm_share: the time that its matrix products take at the processor's own rate, over that of the run, the median of
            the rounds' ratios; None where it has no formula for them, or does not run on the processor.
        against_gemm: the same the other way round: how many times as long as the products that cannot be avoided.
        against_fp32: time of the FP32 artifact over this one's, the median of the rounds' ratios; None without one.
        snr_db: of the artifact's check against PyTorch.
    """

    runtime: str
    file: str
    precision: str
    form: str
    tokens: int
    batch: int
    median_ms: float
    p90_ms: float
    peak_bytes: int | None
    tokens_per_s: float
    gemm_share: float | None
    against_gemm: float | None
    against_fp32: float | None
    snr_db: float | None


@dataclass(frozen=True)
class LeftOut:
    """An artifact that was not timed: at one length, or (``tokens`` None) at any."""

    file: str
    tokens: int | None
    why: str


@dataclass
class BenchReport:
    """All rows, how they were taken, and the machine they are from.

    Attributes:
        machine: facts, see :func:`pom_edge.inspection.machine_facts`.
        settings: runtime, threads (None: the runtime's own choice), batch, rounds and those before them that do not count,
            versions of the packages that run artifacts here.
        gflops: FP32 matrix products of this processor in ONNX Runtime, with these threads, 10^9 operations a second; None
            where nothing ran on it.
        failed: floors that a row misses, one sentence each.
    """

    machine: dict[str, Any]
    gflops: float | None
    rows: list[BenchRow]
    failed: list[str]
    settings: dict[str, Any] = field(default_factory=dict)
    left_out: list[LeftOut] = field(default_factory=list)

    @property
    def notes(self) -> list[str]:
        """What was not timed, one sentence for each artifact and reason."""
        found: dict[tuple[str, str], list[int]] = {}
        for each in self.left_out:
            found.setdefault((each.file, each.why), []).extend([] if each.tokens is None else [each.tokens])
        return [
            f"{file} was not timed{f' at {_listed(lengths)}' if lengths else ''}: {why}"
            for (file, why), lengths in found.items()
        ]

    @property
    def passed(self) -> bool:
        """Every row keeps the floors; no row is no pass."""
        return bool(self.rows) and not self.failed

    def to_dict(self) -> dict[str, Any]:
        """As JSON values (docs/cli.md)."""
        rows = [asdict(row) for row in self.rows]
        left_out = [asdict(each) for each in self.left_out]
        about = {"machine": self.machine, "settings": self.settings, "gflops": self.gflops}
        return {"passed": self.passed, **about, "rows": rows, "left_out": left_out, "failed": self.failed}


def bench(
    path: str | PathLike[str],
    tokens: Sequence[int] | None = None,
    batch: int | None = None,
    *,
    runtime: str = "ort",
    threads: int | None = None,
    rounds: int = ROUNDS,
    floor: Mapping[str, float] | None = None,
    machine: dict[str, Any] | None = None,
    progress: Callable[[str], None] | None = None,
) -> BenchReport:
    """Time every artifact of a bundle that runs here.

    Args:
        path: the ``.pom`` folder.
        tokens: lengths; those that an artifact does not take are left out for it, and the report says so. None: 256, 1024 and
            4096, and the lengths at which artifacts are fixed.
        batch: sequences; None: the smallest that an artifact takes.
        runtime, threads: as in :func:`pom_edge.runtimes.open_session`.
        rounds: timed; one more warms up.
        floor: smallest ``snr`` (dB) and ``ratio`` (``against_fp32``) that a row may have.
        machine: facts for the report.
        progress: called with the name of each step.

    Raises:
        InputError: no artifact takes any of the lengths, or an unknown floor.
    """
    if runtime not in RUNTIMES:
        raise InputError(f"unknown runtime {runtime!r}; this version has {', '.join(RUNTIMES)}")
    unknown = sorted(set(floor or {}) - {"snr", "ratio"})
    if any(math.isnan(least) for least in (floor or {}).values()):
        raise InputError("--floor holds nan, below which nothing is; expected a number")
    if unknown or rounds < 1 or min(TOKENS if tokens is None else tokens, default=0) < 1 or (batch is not None and batch < 1):
        raise InputError(
            f"--floor {', '.join(unknown)} is unknown; expected snr=DB, ratio=TIMES"
            if unknown
            else f"tokens {list(tokens or [])}, batch {batch}, rounds {rounds}: expected at least 1 of each"
        )
    step = progress or (lambda _: None)
    bundle = Bundle.open(Path(path))
    fitting = fitting_artifacts(bundle, runtime)
    rows: list[BenchRow] = []
    rates: list[float] = []
    left_out: list[LeftOut] = []
    with ExitStack() as stack:
        processor = Product(threads) if runtime == "ort" else None
        sessions = {
            artifact.file: stack.enter_context(open_session(bundle.path, runtime, artifact.file, threads))
            for artifact in bundle.manifest.artifacts
            if artifact.file in fitting and (runtime in ENGINES or "not run" not in artifact.verified)
        }
        if not sessions:
            raise InputError(
                f"{bundle.path.name} holds nothing that is timed with --runtime {runtime}; it holds {_held(bundle)}"
            )
        batch = smallest_batch(session.artifact for session in sessions.values()) if batch is None else batch
        lengths = _default_lengths(session.artifact for session in sessions.values()) if tokens is None else tokens
        for length in dict.fromkeys(lengths):
            inputs = {}
            for file, session in sessions.items():
                arrays = _fitting(session, length, batch)
                if isinstance(arrays, str):
                    left_out.append(LeftOut(file, length, arrays))
                else:
                    inputs[file] = arrays
            if not inputs:
                continue
            step(f"time {counted(len(inputs), 'artifact')} at {counted(length, 'token')}")
            seconds, found = _rounds({file: sessions[file] for file in inputs}, inputs, rounds, processor)
            rates += found
            for file, taken in seconds.items():
                step(f"measure the memory of {file}")
                peak = measure_peak(bundle.path, file, inputs[file], runtime, threads)
                rows.append(
                    _row(sessions[file], length, batch, taken, seconds, None if peak is None else peak.total_bytes, found)
                )
    if not rows:
        usual = ", ".join(map(str, _default_lengths(session.artifact for session in sessions.values())))
        least = smallest_batch(session.artifact for session in sessions.values())
        why = "; ".join(dict.fromkeys(each.why for each in left_out))
        raise InputError(
            f"no artifact of {bundle.path.name} runs here with {', '.join(map(str, lengths))} tokens and batch {batch}; "
            f"what it takes by itself: --tokens {usual} --batch {least} ({why})"
        )
    gflops = round(statistics.median(rates) / 1e9, 1) if rates else None
    settings = _settings(runtime, threads, batch, rounds)
    left_out = [*_never_run(bundle, runtime, sessions), *left_out]
    return BenchReport(machine or {}, gflops, rows, _missed(rows, floor or {}), settings, left_out)


def _settings(runtime: str, threads: int | None, batch: int, rounds: int) -> dict[str, Any]:
    versions = {}
    for package in (*PACKAGES.get(runtime, ONNX_RUNTIME), "numpy"):
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    how = {"runtime": runtime, "threads": threads, "batch": batch, "rounds": rounds, "warm_up_rounds": WARM_UPS}
    return {**how, "versions": versions}


def _listed(lengths: Sequence[int]) -> str:
    *most, last = lengths
    return f"{', '.join(f'{length:,}' for length in most)}{' and ' if most else ''}{counted(last, 'token')}"


def _never_run(bundle: Bundle, runtime: str, sessions: Mapping[str, Session]) -> list[LeftOut]:
    """Artifacts that this runtime has not opened at all."""
    fitting = fitting_artifacts(bundle, runtime)
    found = []
    for artifact in bundle.manifest.artifacts:
        if artifact.file not in sessions:
            why = artifact.verified if artifact.file in fitting else f"--runtime {runtime} does not take it"
            found.append(LeftOut(artifact.file, None, bundle.damaged.get(artifact.file, why)))
    return found


def _held(bundle: Bundle) -> str:
    artifacts = bundle.manifest.artifacts
    listed = [f"{each.file} (--runtime {runtime_of(bundle, each.file)}, {each.verified})" for each in artifacts]
    return ", ".join(listed)


def smallest_batch(artifacts: Iterable[Artifact]) -> int:
    """The smallest that one of them takes."""
    specs = [artifact.inputs[0] for artifact in artifacts if artifact.inputs]
    sizes = [dim if isinstance(dim := spec.shape[0], int) else spec.bounds.get(BATCH, (1, None))[0] for spec in specs]
    return max(min(sizes, default=1), 1)


def _default_lengths(artifacts: Iterable[Artifact]) -> list[int]:
    """What is usual, cut to what artifacts take, and their own number where they have one."""
    found: set[int] = set()
    for artifact in artifacts:
        own = [artifact.tokens] if artifact.tokens else _fixed(artifact)
        highs = [high for spec in artifact.inputs for dim, (_, high) in spec.bounds.items() if dim == "tokens" and high]
        found |= set(own or ({min(length, *highs) for length in TOKENS} if highs else TOKENS))
    return sorted(found or TOKENS)


def _fixed(artifact: Artifact) -> list[int]:
    """The token count of an export with --tokens N; a recurrent chunk's length says nothing about a run's."""
    if artifact.form != "parallel":
        return []
    first = artifact.inputs[0]
    return [n for n in first.shape[1:2] if isinstance(n, int) and len(first.shape) < 4]


def _fitting(session: Session, tokens: int, batch: int) -> dict[str, np.ndarray] | str:
    """Random inputs of that length, or why the artifact does not take it."""
    if session.artifact.tokens not in (None, tokens):
        return f"it has {counted(session.artifact.tokens or 0, 'token')} in every run"
    try:
        arrays = make_arrays(session.artifact, tokens, batch)
        session.run_named(arrays)
    except InputError as error:
        return str(error)
    return arrays


def _rounds(
    sessions: Mapping[str, Session],
    inputs: Mapping[str, dict[str, np.ndarray]],
    rounds: int,
    processor: Product | None,
) -> tuple[dict[str, list[float]], list[float]]:
    """Seconds of each artifact in each round, and the processor's operations a second in each round."""
    seconds: dict[str, list[float]] = {file: [] for file in sessions}
    rates = []
    for _ in range(rounds + WARM_UPS):
        if processor is not None:
            rates.append(processor.operations / timed(processor.run))
        for file, session in sessions.items():
            seconds[file].append(timed(functools.partial(session.run_named, inputs[file])))
    return {file: taken[WARM_UPS:] for file, taken in seconds.items()}, rates[WARM_UPS:]


def _row(
    session: Session,
    tokens: int,
    batch: int,
    taken: list[float],
    everything: Mapping[str, list[float]],
    peak: int | None,
    rates: list[float],
) -> BenchRow:
    artifact, median = session.artifact, statistics.median(taken)
    others = [a for a in session.bundle.manifest.artifacts if a.precision == "fp32" and a.form == artifact.form]
    base = next((everything[a.file] for a in others if a.file in everything and a.file != artifact.file), None)
    operations = gemm_operations(artifact, tokens, batch)
    share = None
    if operations and rates:
        share = statistics.median(operations / rate / run for rate, run in zip(rates, taken, strict=True))
    return BenchRow(
        session.runtime,
        artifact.file,
        artifact.precision,
        artifact.form,
        tokens,
        batch,
        round(1e3 * median, 3),
        round(1e3 * p90(taken), 3),
        peak,
        round(tokens * batch / median, 1),
        None if share is None else round(share, 3),
        None if share is None else round(1 / share, 3),
        None if base is None else round(statistics.median(a / b for a, b in zip(base, taken, strict=True)), 3),
        (artifact.parity or {}).get("snr_db"),
    )


def gemm_operations(artifact: Artifact, tokens: int, batch: int) -> float | None:
    """Floating-point operations of an artifact's matrix products in a run; None where the bundle does not say."""
    if not artifact.gemm_flops:
        return None
    sizes = free_sizes(artifact, tokens, batch)
    if artifact.stream is None:
        return float(evaluate(artifact.gemm_flops[0], sizes))
    chunks = -(-tokens // artifact.stream.chunk)
    passes = zip(artifact.stream.passes, artifact.gemm_flops, strict=True)
    return float(sum(evaluate(formula, sizes) * (chunks if step.looped else 1) for step, formula in passes))


def _missed(rows: list[BenchRow], floor: Mapping[str, float]) -> list[str]:
    failed = []
    if "ratio" in floor and not any(row.precision != "fp32" for row in rows):
        failed.append("ratio: nothing but FP32 was timed; export another precision too")
    for row in rows:
        where = f"{row.file} at {counted(row.tokens, 'token')}"
        if "snr" in floor and (row.snr_db is None or row.snr_db < floor["snr"]):
            failed.append(f"{where}: snr {row.snr_db}, the floor is {floor['snr']:g}")
        if "ratio" in floor and row.precision != "fp32":
            if row.against_fp32 is None:
                failed.append(
                    f"{where}: ratio: there is no FP32 artifact of its form to compare with; export with --precision fp32 too"
                )
            elif row.against_fp32 < floor["ratio"]:
                failed.append(f"{where}: ratio {row.against_fp32}, the floor is {floor['ratio']:g}")
    return failed
