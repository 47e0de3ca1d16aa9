"""The figures of a report, each from its facts; None where there is nothing to show."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pom_edge.gates import STAGES
from pom_edge.report import plots
from pom_edge.report.collect import MemoryRow, Report, bound_ms, labels
from pom_edge.report.markup import Html, plain
from pom_edge.report.peers import NAMES
from pom_edge.report.plots import GATE, MARKERS, MUTED, PAPER, ROW, SERIES
from pom_edge.runtimes.parity import GATES_DB

FP16_LIMIT = 65504.0
MIB = 2**20
SHOWN_DB = 160.0  # bars end here: arrays that are equal bit for bit score 300 dB
SHOWN_MODULES = 24
BASE = ("lowered", "onnx")  # stages that come before a precision
SHORT = {
    "lowered": "lowered",
    "onnx": "graph",
    "typed": "typed graph",
    "rounded": "each operator rounded",
    "eager": "quantized, in PyTorch",
    "quantized": "quantized graph",
    "coreml": "Core ML program",
}

__all__ = [
    "SHORT",
    "SHOWN_MODULES",
    "draw_latency",
    "draw_memory",
    "draw_mixers",
    "draw_peers",
    "draw_ranges",
    "draw_waterfall",
    "waterfall",
]


def stages_of(parity: Mapping[str, Any]) -> dict[str, float]:
    """SNR in dB of each stage that an artifact went through, in the order in which it did: a manifest sorts its keys."""
    found = parity.get("stages") or {}
    order = list(STAGES)
    return dict(sorted(found.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order)))


def stage_gate(stage: str, gate_db: float) -> float:
    """What a stage is held against: both that come before a precision, against FP32's gate."""
    return max(gate_db, GATES_DB["fp32"]) if stage in BASE else gate_db


def waterfall(report: Report) -> list[tuple[str, str, dict[str, tuple[float, float]]]]:
    """Name, colour and stages (dB, gate) of what was compared: what several artifacts share comes first, and once.

    Artifacts of one form are made from one FP32 graph, so they have their first stages in common.
    """
    names, colours = labels(report.artifacts), _colours(report)
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for artifact in report.artifacts:
        parity = artifact.parity or {}
        stages = {stage: (db, stage_gate(stage, parity["gate_db"])) for stage, db in stages_of(parity).items()}
        if stages:
            found[artifact.file] = stages
    forms = {a.file: a.form for a in report.artifacts}
    groups: list[tuple[str, str, dict[str, tuple[float, float]]]] = []
    for form in dict.fromkeys(forms[file] for file in found):
        files = [file for file in found if forms[file] == form]
        base = {stage: value for stage, value in found[files[0]].items() if stage in BASE}
        shared = len(files) > 1 and bool(base) and all(base.items() <= found[file].items() for file in files)
        if shared:
            groups.append((f"FP32{'' if len(set(forms.values())) == 1 else f' {form}'}, base of all", MUTED, base))
        for file in files:
            own = {stage: value for stage, value in found[file].items() if not (shared and stage in base)}
            if own:
                groups.append((names[file], colours[file], own))
    return groups


def draw_waterfall(report: Report) -> Html | None:
    """What is left after each stage, with the gate of each; None where no artifact was compared."""
    groups = waterfall(report)
    if not groups:
        return None
    names: list[str] = []
    with plots.styled():
        figure, axes = plots.new_figure(ROW * sum(len(stages) + 1 for *_, stages in groups) + 1.1)
        for name, colour, stages in groups:
            names.append(name)
            for stage, (snr_db, gate_db) in stages.items():
                y, shown = len(names), min(max(snr_db, 0.0), SHOWN_DB)
                names.append(SHORT.get(stage, stage))
                axes.barh(y, shown, height=0.62, color=colour)
                plots.mark(axes, gate_db, y, 0.42)
                plots.beside(axes, max(shown, gate_db), y, f"{snr_db:.1f}" if snr_db < SHOWN_DB else "equal")
        axes.set_yticks(range(len(names)), [plots.shortened(name) for name in names])
        headings = {index for index, name in enumerate(names) if name in {group for group, *_ in groups}}
        for index, tick in enumerate(axes.get_yticklabels()):
            tick.set_fontweight("bold" if index in headings else "normal")
        plots.rows_down(axes, len(names))
        largest = max(max(pair) for *_, stages in groups for pair in stages.values())
        plots.room_beside(axes, min(largest, SHOWN_DB))
        axes.set_xlabel("SNR against PyTorch, dB", loc="right")
        plots.mark_label(axes, "gate")
        plots.legend(figure)
        return plots.to_svg(figure, "waterfall", "Parity by stage: signal-to-noise ratio against PyTorch in dB, with gates")


def draw_mixers(report: Report) -> Html | None:
    """Every mixer's own output against PyTorch's; None where no manifest says it."""
    found = {a.file: a.parity["mixers"] for a in report.artifacts if a.parity and a.parity.get("mixers")}
    if not found:
        return None
    mixers = list(dict.fromkeys(name for values in found.values() for name in values))
    colours, names = _colours(report), labels(report.artifacts)
    with plots.styled():
        figure, axes = plots.new_figure(ROW * len(mixers) + 1.0)
        for index, artifact in enumerate(report.artifacts):
            values = found.get(artifact.file, {})
            points = [(min(max(values[name], 0.0), SHOWN_DB), y) for y, name in enumerate(mixers) if name in values]
            if points:
                marker, label = MARKERS[index % 6], plain(names[artifact.file])
                axes.plot(*zip(*points, strict=True), marker, color=colours[artifact.file], label=label)
        gates = {a.parity["gate_db"] for a in report.artifacts if a.parity and a.file in found}
        for index, gate_db in enumerate(sorted(gates)):
            plots.limit(axes.axvline, gate_db, "gate" if index == 0 else None)
        axes.set_yticks(range(len(mixers)), [plots.shortened(name) for name in mixers])
        plots.rows_down(axes, len(mixers))
        axes.set_xlim(0, 1.05 * max(*gates, *(min(db, SHOWN_DB) for values in found.values() for db in values.values())))
        axes.set_xlabel("SNR of the mixer's own output, dB", loc="right")
        plots.legend(figure)
        return plots.to_svg(figure, "mixers", "Signal-to-noise ratio of every mixer's own output, in dB, with gates")


def draw_latency(report: Report) -> Html | None:
    """Median time against tokens, with the time of the matrix products alone; bars where there is one length only."""
    rows = report.bench.rows if report.bench is not None else []
    if not rows:
        return None
    names, colours = labels(report.artifacts), _colours(report)
    files = list(dict.fromkeys(row.file for row in rows))
    title = "Median time of a run, in milliseconds, beside the time of its matrix products alone"
    with plots.styled():
        if len({row.tokens for row in rows}) == 1:
            figure, axes = plots.new_figure(ROW * 1.5 * len(rows) + 1.0)
            plots.bars(axes, [(names[r.file], r.median_ms, bound_ms(r), colours[r.file]) for r in rows], "{:,.3g} ms")
            axes.set_xlabel("median time of a run, ms", loc="right")
            plots.mark_label(axes, "its matrix products alone")
        else:
            figure, axes = plots.new_figure(3.0)
            for index, file in enumerate(files):
                mine = [row for row in rows if row.file == file]
                x, colour, y = [r.tokens for r in mine], colours[file], [r.median_ms for r in mine]
                axes.fill_between(x, y, [r.p90_ms for r in mine], color=colour, alpha=0.25, linewidth=0)
                axes.plot(x, y, f"{MARKERS[index % 6]}-", color=colour, label=plain(names[file]))
            base = [(r.tokens, bound_ms(r)) for r in rows if r.file == files[0]]
            if all(ms is not None for _, ms in base):
                axes.plot(*zip(*base, strict=True), color=GATE, linestyle=(0, (5, 3)), label="matrix products alone")
            plots.against_tokens(axes, {row.tokens for row in rows}, "ms")
        plots.legend(figure)
        return plots.to_svg(figure, "latency", title)


def draw_peers(report: Report) -> Html | None:
    """One mixer beside the published form, attention and the product that no form avoids; None where no file was given."""
    if report.peers is None:
        return None
    with plots.styled():
        figure, axes = plots.new_figure(3.0)
        for index, name in enumerate(report.peers.names):
            points = report.peers.ms(name)
            colour, line = (GATE, (0, (5, 3))) if name == "gemm" else (SERIES[index % 6], "-")
            marker = None if name == "gemm" else MARKERS[index % 6]
            axes.plot(*zip(*points.items(), strict=True), color=colour, linestyle=line, marker=marker,
                      label=plots.shortened(NAMES.get(name, name)))  # fmt: skip
        plots.against_tokens(axes, {row.tokens for row in report.peers.rows}, "ms")
        plots.legend(figure)
        return plots.to_svg(figure, "peers", "Time of one mixer and of its peers against the number of tokens, in milliseconds")


def draw_memory(report: Report) -> Html | None:
    """The memory of a run, predicted and measured, of the whole process where that was opened, against the budget."""
    rows = [row for row in report.memory if row.activations is not None]
    if not rows:
        return None
    opened = all(row.predicted is not None for row in rows)
    names, colours = labels(report.artifacts), _colours(report)
    files = list(dict.fromkeys(row.file for row in rows))
    what = "whole process, MiB" if opened else "activations, in and out, MiB"
    measured = {(r.file, r.tokens): r.measured / MIB for r in rows if opened and r.measured is not None}

    def size(row: MemoryRow) -> float:
        return ((row.predicted if opened else None) or (row.io or 0) + (row.activations or 0)) / MIB

    largest = max([*(size(row) for row in rows), *measured.values()])
    # a budget far beyond would leave nothing to see; the words beside the figure say how it stands
    budget = None if not opened or report.budget is None or report.budget > 4 * largest * MIB else report.budget / MIB
    with plots.styled():
        if len({row.tokens for row in rows}) == 1:
            figure, axes = plots.new_figure(ROW * 1.5 * len(rows) + 1.0)
            bars = [(names[r.file], size(r), measured.get((r.file, r.tokens)), colours[r.file]) for r in rows]
            plots.bars(axes, bars, "{:,.1f} MiB")
            axes.set_xlim(0, max(axes.get_xlim()[1], 1.05 * (budget or 0.0)))
            axes.set_xlabel(f"predicted: {what}", loc="right")
            if measured:
                plots.mark_label(axes, "measured")
        else:
            figure, axes = plots.new_figure(3.0)
            for index, file in enumerate(files):
                mine, colour = [row for row in rows if row.file == file], colours[file]
                axes.plot([r.tokens or 1 for r in mine], [size(r) for r in mine], color=colour, label=plain(names[file]))
                points = [(r.tokens or 1, measured[file, r.tokens]) for r in mine if (file, r.tokens) in measured]
                if points:
                    axes.plot(*zip(*points, strict=True), MARKERS[index % 6], color=colour)
            plots.against_tokens(axes, {row.tokens for row in rows if row.tokens is not None}, what, log=False)
            axes.set_ylim(0, 1.08 * max(largest, budget or 0.0))
            if measured:
                axes.plot([], [], "o", color=MUTED, label="measured")
        if budget is not None:
            plots.limit(axes.axvline if len({row.tokens for row in rows}) == 1 else axes.axhline, budget, "budget")
        plots.legend(figure)
        return plots.to_svg(figure, "memory", f"Memory of a run, predicted and measured: {what}")


def largest_modules(ranges: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The modules that a figure shows: those with the largest values, in the model's order."""
    modules: list[dict[str, Any]] = ranges["modules"]
    kept = sorted(range(len(modules)), key=lambda i: -modules[i]["largest"])[:SHOWN_MODULES]
    return [modules[i] for i in sorted(kept)]


def draw_ranges(ranges: Mapping[str, Any], precision: str, key: str) -> Html | None:
    """How large the values of each module can get, on a logarithmic scale, beside what half precision holds."""
    rows = largest_modules(ranges)
    if not rows:
        return None
    with plots.styled():
        figure, axes = plots.new_figure(ROW * len(rows) + 1.0)
        for proved, marker, label in ((True, "o", "proved"), (False, "D", "observed, not proved")):
            points = [(row["largest"], y) for y, row in enumerate(rows) if (row["basis"] == "proved") == proved]
            if points:
                axes.plot(*zip(*points, strict=True), marker, color=SERIES[0], markerfacecolor=SERIES[0] if proved else PAPER,
                          label=label)  # fmt: skip
        if precision != "bf16":
            plots.limit(axes.axvline, FP16_LIMIT, "largest FP16 value, 65,504")
        axes.set_yticks(range(len(rows)), [plots.shortened(row["module"] or "(model)") for row in rows])
        plots.rows_down(axes, len(rows))
        plots.powers_of_ten(axes)
        axes.set_xlabel("largest magnitude", loc="right")
        plots.legend(figure)
        return plots.to_svg(figure, key, f"Largest value of each module, {precision.upper()}")


def _colours(report: Report) -> dict[str, str]:
    return {artifact.file: SERIES[index % len(SERIES)] for index, artifact in enumerate(report.artifacts)}
