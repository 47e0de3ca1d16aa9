"""What a person sees: progress on stderr, tables on stdout. rich on a terminal, plain lines elsewhere."""

from __future__ import annotations

import shlex
import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.status import Status

from pom_edge.engine_options import COMPILED
from pom_edge.grid import print_grid
from pom_edge.system import human_bytes
from pom_edge.words import counted, say_settings

if TYPE_CHECKING:
    from pom_edge.outcome import ExportReport
    from pom_edge.runtimes.bench import BenchReport
    from pom_edge.runtimes.checking import CheckReport
    from pom_edge.runtimes.memory import MemoryReport

__all__ = [
    "Progress",
    "TokenProgress",
    "print_bench",
    "print_check",
    "print_doctor",
    "print_export",
    "print_info",
    "print_memory",
]


class Progress:
    """Names the running step: a spinner on a terminal, one line a step elsewhere, nothing when quiet."""

    def __init__(self, quiet: bool = False) -> None:
        self._console = Console(stderr=True)
        self._quiet = quiet
        self._status: Status | None = None
        self._start = time.perf_counter()

    def __enter__(self) -> Progress:
        if not self._quiet and self._console.is_terminal:
            self._status = self._console.status("start")
            self._status.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._status is not None:
            self._status.stop()

    def step(self, name: str) -> None:
        """A step begins."""
        if self._status is not None:
            self._status.update(name)
        elif not self._quiet:
            print(f"[{time.perf_counter() - self._start:6.1f} s] {name}", file=sys.stderr, flush=True)


class TokenProgress:
    """Tokens a second and the time that is left: a bar on a terminal, a line each tenth elsewhere, nothing when quiet."""

    def __init__(self, quiet: bool = False) -> None:
        self._console = Console(stderr=True)
        self._quiet, self._said = quiet, 0
        self._bar: Bar | None = None
        self._start = time.perf_counter()

    def __enter__(self) -> TokenProgress:
        if not self._quiet and self._console.is_terminal:
            columns = (BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[rate]}"), TimeRemainingColumn())
            self._bar = Bar(*columns, console=self._console)
            self._task = self._bar.add_task("", rate="")
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, done: int, total: int) -> None:
        """So many of all tokens are done, counted over all passes."""
        seconds = max(time.perf_counter() - self._start, 1e-9)
        rate = f"{done / seconds:,.0f} tokens/s"
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total, rate=rate)
        elif not self._quiet and done * 10 // total > self._said:
            self._said = done * 10 // total
            left = seconds * (total - done) / done
            print(
                f"[{seconds:6.1f} s] {done:,} of {total:,} token passes, {rate}, {left:.0f} s left", file=sys.stderr, flush=True
            )


def print_memory(report: MemoryReport) -> None:
    """Prediction beside measurement, line by line."""
    print(f"{report.file}: {_tokens(report.tokens)}, batch {report.batch}")
    found, rows = report.to_dict(), []
    for name in ("runtime", "weights", "io", "activations", "total"):
        measured = found["measured_bytes"]
        rows.append(
            [name, human_bytes(found["predicted_bytes"][name]), human_bytes(measured[name]) if measured else "not measured"]
        )
    print_grid(_console(), ["", "predicted", "measured"], rows, text={0})
    if report.unmeasured:
        print(f"not measured: {report.unmeasured}")
    if report.budget is not None:
        by = f", enforced by {report.enforced}" if report.enforced else "" if report.measured else ", by prediction"
        print(f"{'within' if report.passed else 'over'} the budget of {human_bytes(report.budget)} for the whole process{by}")
    if report.exceeded:
        print(f"the run was stopped: {report.exceeded}")


def _console() -> Console:
    # Without a terminal rich assumes 80 columns and wraps file names; logs have room.
    width = None if sys.stdout.isatty() else 140
    return Console(width=width, highlight=width is None, markup=False, emoji=False)  # names may look like markup: [red]


def print_export(report: ExportReport) -> None:
    """The closing table and the next commands."""
    rows = []
    for artifact in report.artifacts:
        parity, mixer = artifact.parity or {}, (artifact.parity or {}).get("worst_mixer")
        rows.append(
            [
                artifact.file,
                artifact.target,
                artifact.precision,
                human_bytes(artifact.bytes),
                f"{parity['snr_db']:.1f} dB (gate {parity['gate_db']:g})" if parity else "none",
                f"{mixer['snr_db']:.1f} dB" if mixer else "-",
                human_bytes(artifact.memory["total_bytes"]) if artifact.memory else "not measured",
                "not run" if artifact.run_ms is None else f"{artifact.run_ms:.1f} ms",
                _speed(artifact.speedup),
            ]
        )
    headers = ["file", "target", "precision", "size", "parity", "worst mixer", "memory", "time", "against fp32"]
    if rows:
        print_grid(_console(), headers, rows, text={0}, title=str(report.bundle))
    for artifact in report.artifacts:
        if artifact.run_ms is None:
            print(f"{artifact.file}: {artifact.verified}")
        else:
            print(f"{artifact.file}: memory (whole process) and time of one run of {artifact.run_inputs}, {artifact.runtime}")
        if (artifact.parity or {}).get("metric"):
            print(say_metric((artifact.parity or {})["metric"]))
    for warning in report.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    for note in report.notes:
        print(f"note: {note}", file=sys.stderr)
    for entry in report.missing:
        place = _where(entry["target"], entry["reason"]).format(report.bundle.name)
        print(f"not made: {entry['target']}: {entry['reason']}. {place}:\n  {entry['run']}")
    bundle = shlex.quote(str(report.bundle) if not str(report.bundle).startswith("-") else f"./{report.bundle}")
    if not report.artifacts:
        return
    print(f"exported in {report.seconds:.1f} s. Next:")
    runtimes = {artifact.target for artifact in report.artifacts}
    engines = f" --runtime {min(runtimes)}" if runtimes <= set(COMPILED) else ""  # graphs may have no runtime here
    print(f"  pom-edge check {bundle}{engines}")
    print(f"  pom-edge run {bundle}{engines} --input inputs.npz --output outputs.npz")


def _where(target: str, reason: str) -> str:
    """Where what is missing can be made."""
    if target == "rtx" and "not installed" in reason:
        return "Here, or where a copy of {} lies on another x86-64 machine, run"
    return "On a machine that has it, where a copy of {} lies, run" if target in COMPILED else "To make it"


def _speed(speedup: float | None) -> str:
    if speedup is None:
        return "-"
    return f"{speedup:.2f}x the speed" if speedup >= 1 else f"slower here: {speedup:.2f}x"


def say_metric(entry: dict[str, Any]) -> str:
    """A task metric before and after, in one line."""
    verdict = "ok" if entry["passed"] else "FAILED"
    return (
        f"{entry['name']}: {entry['artifact']:g} points, PyTorch {entry['pytorch']:g}; "
        f"lost {entry['drop']:g}, allowed {entry['max_drop']:g}: {verdict}"
    )


def print_check(report: CheckReport) -> None:
    """One row for each output, and for each layer when they were compared."""
    rows = [
        [
            artifact.file,
            artifact.runtime,
            name,
            f"{metrics.snr_db:.1f} dB",
            f"{artifact.gate_db:g} dB",
            f"{metrics.max_rel:.1e}",
            str(metrics.nonfinite),
            "ok" if metrics.passes(artifact.gate_db) else "FAILED",
        ]
        for artifact in report.artifacts
        for name, metrics in [*artifact.outputs.items(), *artifact.layers.items()]
    ]
    headers = ["artifact", "runtime", "value", "SNR", "gate", "max rel", "NaN/Inf", ""]
    print_grid(_console(), headers, rows, text={0, 1, 2}, title=report.bundle)
    for artifact in report.artifacts:
        if artifact.metric is not None:
            print(say_metric(artifact.metric))
        if artifact.plan is not None:
            print(f"{artifact.file}, {artifact.runtime}: {_plan(artifact.plan)}")
        if artifact.diverges:
            print(f"first layer that diverges: {artifact.diverges}")
        for test in artifact.vacuous:
            print(f"the gate is vacuous: it does not notice {test}")
    for file, reason in report.skipped.items():
        print(f"not checked: {file}: {reason}")
    for file, reason in report.damaged.items():
        print(f"damaged: {file}: {reason}")
    print("passed" if report.passed else "failed")


def _plan(plan: dict[str, Any]) -> str:
    """neural_engine 180, cpu 30; not on the Neural Engine: cumsum 2, real_div 1."""
    if "unavailable" in plan:
        return str(plan["unavailable"])
    devices, others = (", ".join(f"{name} {count}" for name, count in plan[key].items()) for key in plan)
    return devices + (f"; not on the Neural Engine: {others}" if others else "")


def print_info(facts: dict[str, Any]) -> None:
    """Facts about a bundle or a checkpoint, one a line."""
    for key, value in facts.items():
        if key == "measurements":
            for each in value:
                print(f"{'measured memory':18} {_measurement(each)}")
        elif key != "artifacts":
            print(f"{key:18} {_inline(value)}")
    for artifact in facts.get("artifacts", []):
        print(f"\n{artifact['file']}")
        for key, value in artifact.items():
            if key not in ("file", "ranges", "quantization") and value not in (None, {}, []):
                shown = {k: v for k, v in value.items() if k != "mixers"} if key == "parity" else value  # the worst says it
                print(f"  {key:16} {_inline(shown)}")
        if artifact.get("quantization"):
            print_quantization(artifact["quantization"])
        if artifact.get("ranges"):
            print_ranges(artifact["ranges"])


def print_quantization(found: dict[str, Any]) -> None:
    """What became of each layer or weight, and what it costs alone."""
    if "layers" in found:
        data = f"{counted(found['samples'], 'sample')} ({found['calibration']})"
        said = f"calibrated on {data}, {found['observer']}, {found['weights']} weights"
        rows = [(r["layer"], r["why"] or _KINDS[r["kind"]], r["snr_db"]) for r in found["layers"]]
    else:
        said, floats = "weights alone as integers", found.get("kept_float", [])
        rows = [(r["name"], f"{r['bits']} bits", r["snr_db_alone"]) for r in found["weights"]]
        rows += [(name, "kept in float", None) for name in floats]
    cells = [[layer, kept, "-" if alone is None else f"{alone:.1f} dB"] for layer, kept, alone in rows]
    print_grid(_console(), ["layer", "kept as", "SNR alone"], cells, text={0, 1}, title=said)


_KINDS = {"gemm": "INT8", "weight": "INT8 weight", "float": "kept in float"}


def print_bench(report: BenchReport) -> None:
    """One row for each artifact and length."""
    rate = None if report.gflops is None else f"FP32 matrix products of this processor: {report.gflops:,.1f} GFLOP/s"
    rows = [
        [
            row.file,
            f"{row.tokens:,}",
            str(row.batch),
            f"{row.median_ms:.2f} ms",
            f"{row.p90_ms:.2f} ms",
            f"{row.tokens_per_s:,.0f}",
            "-" if row.gemm_share is None else f"{row.gemm_share:.0%}",
            "-" if row.against_gemm is None else f"{row.against_gemm:.2f}x",
            _speed(row.against_fp32),
            "not measured" if row.peak_bytes is None else human_bytes(row.peak_bytes),
            "-" if row.snr_db is None else f"{row.snr_db:.1f} dB",
        ]
        for row in report.rows
    ]
    headers = ["artifact", "tokens", "batch", "median", "p90", "tokens/s", "of GEMM rate", "times GEMM", "against fp32"]
    print_grid(_console(), [*headers, "memory", "SNR"], rows, text={0}, title=rate)
    if any((row.gemm_share or 0) > 1 for row in report.rows):
        print("over 100 % of the GEMM rate: products in INT8 or of small matrices, or a machine that was busy")
    print(say_settings(report.settings))
    print(", ".join(f"{key} {_inline(value)}" for key, value in report.machine.items()))
    for sentence in report.failed:
        print(f"below the floor: {sentence}")


def print_ranges(ranges: dict[str, Any]) -> None:
    """How large the values of a half-precision artifact get, module by module, and what stays in FP32."""
    limits = ", ".join(f"|{name}| <= {limit:g}" for name, limit in ranges["assumed_inputs"].items()) or "all inputs"
    rows = []
    for row in ranges["modules"]:
        reasons: dict[str, list[str]] = {}
        for operator, reason in row["fp32"].items():
            reasons.setdefault(reason, []).append(operator)
        listed = "; ".join(f"{', '.join(operators)} ({reason})" for reason, operators in reasons.items())
        rows.append([row["module"] or "(model)", f"{row['largest']:.4g}", row["basis"], listed])
    headers = ["module", "largest", "basis", "in FP32"]
    print_grid(_console(), headers, rows, text={0, 2, 3}, title=f"ranges for {limits}")
    print(f"{ranges['half_nodes']} of {ranges['nodes']} floating-point nodes compute in half precision")


def _measurement(entry: dict[str, Any]) -> str:
    parts = ", ".join(
        f"{name} {human_bytes(entry['measured'][name])} (predicted {human_bytes(entry['predicted'][name])})"
        for name in ("total", "activations")
    )
    run = f"{_tokens(entry['tokens'])}, batch {entry['batch']}{', spilled' if entry['spill'] else ''}"
    return f"{entry['file']}, {run}: {parts}; {entry['runtime']}, {_inline(entry['machine'])}, {entry['recorded']}"


def _tokens(count: int | None) -> str:
    return "inputs of one size" if count is None else counted(count, "token")


def print_doctor(facts: dict[str, Any]) -> None:
    """What this machine can do, one fact a line."""
    for section, values in facts.items():
        print(section)
        for key, value in values.items():
            print(f"  {key:22} {_inline(value)}")


def _inline(value: Any) -> str:
    if value is None or value == []:
        return "-"
    if isinstance(value, dict):
        return ", ".join(f"{key}={_inline(item)}" for key, item in value.items())
    if isinstance(value, list):
        return "; ".join(_inline(item) for item in value)
    return f"{value:.6g}" if isinstance(value, float) else str(value)
