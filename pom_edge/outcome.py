"""What an export made, artifact by artifact: checked as a device would, timed and measured once. Imports no torch."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pom_edge.errors import GateError
from pom_edge.progress import Step
from pom_edge.runtimes.checking import CheckReport, check_session
from pom_edge.runtimes.memory import measure_peak
from pom_edge.runtimes.session import open_session

if TYPE_CHECKING:
    from pom_edge.building import Built

EVALUATED = "evaluated, every operator rounded to BF16; not run"

__all__ = ["EVALUATED", "ArtifactReport", "ExportReport", "check_artifact", "size_of"]


@dataclass
class ArtifactReport:
    """One artifact that was made."""

    target: str
    form: str
    precision: str
    file: str
    bytes: int
    verified: str
    parity: dict[str, Any] | None
    nodes: int
    run_ms: float | None
    run_inputs: str
    memory: dict[str, int] | None
    speedup: float | None = None
    runtime: str = ""  # what ran it, and how: exact INT8 sums on processors whose own are not


@dataclass
class ExportReport(os.PathLike[str]):
    """What an export made; usable wherever a path to the bundle is."""

    bundle: Path
    artifacts: list[ArtifactReport]
    missing: list[dict[str, str]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Every artifact held its gates (an export that misses one raises instead)."""
        return bool(self.artifacts)

    def __fspath__(self) -> str:
        return str(self.bundle)

    def to_dict(self) -> dict[str, Any]:
        """As JSON values (docs/cli.md)."""
        return {
            "bundle": str(self.bundle),
            "passed": self.passed,
            "artifacts": [vars(artifact) for artifact in self.artifacts],
            "missing": self.missing,
            "warnings": self.warnings,
            "notes": self.notes,
            "seconds": round(self.seconds, 2),
        }


def check_artifact(folder: Path, built: Built, step: Step) -> ArtifactReport:
    """Open the finished folder as a device would and check it; then time (ms) and measure one run of its largest case.

    The figures go into the report and not into the manifest: they would make two exports of the same model differ.
    """
    made = built.made
    with open_session(folder, artifact=made.file) as session:
        report: CheckReport = check_session(session)
        if not report.passed:
            failed = [f"{name} {m.snr_db:.1f} dB" for name, m in report.artifacts[0].outputs.items()]
            raise GateError(
                f"the written bundle does not hold its gate of {report.artifacts[0].gate_db:g} dB: {', '.join(failed)}"
            )
        verified = session.artifact.verified
        fitting = [found for found in session.bundle.cases() if found[0].name in report.artifacts[0].cases]
        case, inputs, _ = max(fitting, key=lambda found: sum(array.nbytes for array in found[1].values()))
        start = time.perf_counter()
        session.run_named(inputs)
        run_ms = round(1e3 * (time.perf_counter() - start), 3)
    if made.target != "onnx" or verified == EVALUATED:
        timed, peak = None, None  # those of the evaluator are not the artifact's
    else:
        step("measure its memory")
        timed, peak = run_ms, measure_peak(folder, made.file, inputs)
    return ArtifactReport(
        made.target,
        made.plan.form,
        made.precision,
        made.file,
        size_of(folder, built.files),
        verified,
        built.parity,
        made.nodes,
        timed,
        case.description,
        None if peak is None else peak.to_dict(),
        built.speedup,
        session.runtime,
    )


def size_of(folder: Path, files: list[str]) -> int:
    """Bytes of these files."""
    return sum((folder / file).stat().st_size for file in files)
