"""Check an artifact against the PyTorch answers in its bundle: no torch needed."""

from __future__ import annotations

from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from pom_edge.bundle import Bundle
from pom_edge.engine_options import COMPILED
from pom_edge.errors import BundleError, InputError, MissingExtraError
from pom_edge.metric import Metric
from pom_edge.runtimes.fitting import run_fitting
from pom_edge.runtimes.layers import first_divergence
from pom_edge.runtimes.parity import GATES_DB, Metrics, Vacuity, compare, prove_not_vacuous, summarise, worst
from pom_edge.runtimes.session import Session, fitting_artifacts, open_session

ANYWHERE = ("ort", "coreml")  # what runs on any machine

__all__ = ["ArtifactCheck", "CheckReport", "check_bundle", "check_session"]


@dataclass
class ArtifactCheck:
    """One artifact against its golden data: the worst figures over all cases."""

    file: str
    runtime: str
    precision: str
    gate_db: float
    outputs: dict[str, Metrics] = field(default_factory=dict)
    cases: list[str] = field(default_factory=list)
    vacuity: list[Vacuity] = field(default_factory=list)
    diverges: str | None = None
    layers: dict[str, Metrics] = field(default_factory=dict)
    metric: dict[str, Any] | None = None
    plan: dict[str, Any] | None = None  # which devices its operations run on, where the runtime says so

    @property
    def vacuous(self) -> list[str]:
        """Tests that should have failed the gate and did not."""
        return [result.test for result in self.vacuity if result.caught is False]

    @property
    def passed(self) -> bool:
        """Every output (and layer, if asked for) holds the gate, and the gate can fail."""
        values = [*self.outputs.values(), *self.layers.values()]
        proved = any(result.caught for result in self.vacuity)  # answers that are all zero prove nothing
        task = self.metric is None or self.metric["passed"]
        return bool(self.outputs) and all(m.passes(self.gate_db) for m in values) and proved and not self.vacuous and task

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "file": self.file,
            "runtime": self.runtime,
            "precision": self.precision,
            "outputs": {name: metrics.to_dict() for name, metrics in self.outputs.items()},
            "gate_db": self.gate_db,
            "cases": self.cases,
            "vacuity": [{"test": v.test, "caught": v.caught, "note": v.note} for v in self.vacuity],
            "layers": {name: metrics.to_dict() for name, metrics in self.layers.items()},
            "diverges": self.diverges,
            "metric": self.metric,
            "plan": self.plan,
            "passed": self.passed,
        }


@dataclass
class CheckReport:
    """The result of a check.

    Attributes:
        damaged: engines of which a file is missing or changed, and what is wrong.
        skipped: artifacts that a package missing here would run, and the line that installs it.
    """

    bundle: str
    artifacts: list[ArtifactCheck]
    damaged: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Every artifact passed and none is damaged; checking none is no pass."""
        return bool(self.artifacts) and all(artifact.passed for artifact in self.artifacts) and not self.damaged

    def to_dict(self) -> dict[str, Any]:
        """As JSON values (docs/cli.md)."""
        artifacts = [artifact.to_dict() for artifact in self.artifacts]
        return {"passed": self.passed, "artifacts": artifacts, "damaged": self.damaged, "skipped": self.skipped}


def check_session(session: Session, layers: bool = False, metric: Metric | None = None) -> CheckReport:
    """Run every golden case through an open session.

    Args:
        session: of the artifact.
        layers: compare every mixer too.
        metric: compare its points with those that PyTorch had when the bundle was made.

    Raises:
        BundleError: the bundle carries no golden data.
        InputError: the bundle does not know this metric of PyTorch.
    """
    gate_db = GATES_DB[session.artifact.precision]
    check = ArtifactCheck(session.artifact.file, session.runtime, session.artifact.precision, gate_db)
    found: dict[str, list[Metrics]] = {}
    for case, inputs, reference in session.bundle.cases():
        outputs = run_fitting(session.execute, session.artifact, case, inputs)
        if outputs is None:  # an artifact of fixed sizes does not run every case
            continue
        comparison = compare(reference, case.sampled(outputs), gate_db)
        for name, metrics in comparison.values.items():
            found.setdefault(name, []).append(metrics)
        check.cases.append(case.name)
        check.vacuity += prove_not_vacuous(reference, gate_db)
    if not found:
        raise BundleError(f"{session.bundle.path.name} carries no golden data that this artifact runs: nothing can be checked")
    check.vacuity = summarise(check.vacuity)
    check.outputs = {name: worst(metrics) for name, metrics in found.items()}
    check.plan = session.plan()
    if metric is not None:
        check.metric = _compare_metric(metric, session)
    if layers:
        check.layers = first_divergence(session.bundle, session.artifact)
        check.diverges = next((name for name, m in check.layers.items() if not m.passes(gate_db)), None)
    return CheckReport(session.bundle.path.name, [check])


def _compare_metric(metric: Metric, session: Session) -> dict[str, Any]:
    known = (session.artifact.parity or {}).get("metric")
    if known is None or known["name"] != metric.name:
        found = known["name"] if known else "none"
        raise InputError(
            f"{session.bundle.path.name} does not know what PyTorch scores on {metric.name} (metric recorded: {found}); export "
            f"with --metric {metric.name}, so that there is something to compare with"
        )
    return metric.compare(known["pytorch"], metric.of(session.run))


def check_bundle(
    path: str | PathLike[str],
    runtime: str | None = None,
    artifact: str | None = None,
    layers: bool = False,
    threads: int | None = None,
    metric: Metric | None = None,
) -> CheckReport:
    """Open and check a bundle; arguments as in :func:`open_session` and :func:`check_session`.

    Every artifact that the runtime could execute is checked, unless one is named; without a runtime, every graph and package.
    Engines belong to one kind of GPU: they are checked where their runtime is named. An engine
    that is damaged is reported beside what else was checked, and so is an artifact whose runtime takes a
    package that is missing here.
    """
    files: list[str | None] = [artifact]
    damaged: dict[str, str] = {}
    if artifact is None:
        bundle = Bundle.open(Path(path))
        targets = COMPILED if runtime is None else (runtime,)
        broken = [a for a in bundle.manifest.artifacts if a.file in bundle.damaged and a.target in targets]
        damaged = {each.file: bundle.damaged[each.file] for each in broken}
        runtimes = ANYWHERE if runtime is None else (runtime,)
        files = [file for name in runtimes for file in fitting_artifacts(bundle, name)] or files  # none: the session says why
    reports, skipped = [], dict[str, MissingExtraError]()
    for file in files:
        try:
            with open_session(Path(path), runtime=runtime, artifact=file, threads=threads) as session:
                reports += [check_session(each, layers=layers, metric=metric) for each in session.variants()]
        except MissingExtraError as error:
            if file is None or file == artifact:
                raise
            skipped[file] = error
    if not reports:
        raise next(iter(skipped.values()))
    checks = [each for report in reports for each in report.artifacts]
    return CheckReport(reports[0].bundle, checks, damaged, {file: str(error) for file, error in skipped.items()})
