"""The figures of a report, by matplotlib: SVG with real text, in the colours of the page, light or dark.

A figure is drawn 432 units wide: what a phone shows at about four fifths, and half of a wide window at full size. Colours
are drawn as placeholders and then named after the page's CSS variables, so that one figure fits both themes.
"""

from __future__ import annotations

import io
import warnings
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pom_edge.errors import require
from pom_edge.gates import STAGES
from pom_edge.markup import Html, plain
from pom_edge.report import Report, bound_ms, labels
from pom_edge.report_peers import NAMES
from pom_edge.runtimes.parity import GATES_DB

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 6.0  # inches of 72 units
ROW = 0.27  # of one bar, with its distance to the next
FP16_LIMIT = 65504.0
SHOWN_DB = 160.0  # bars end here: arrays that are equal bit for bit score 300 dB
SHOWN_MODULES = 24
SVG = "http://www.w3.org/2000/svg"
LINK = "{http://www.w3.org/1999/xlink}href"
# placeholder -> variable of report.css; matplotlib writes black as no colour at all, so none is black
COLOURS = {
    "#010101": "--ink",
    "#020202": "--muted",
    "#030303": "--line",
    "#040404": "--gate",
    "#050505": "--paper",
    **{f"#0a0a0{number}": f"--s{number}" for number in range(1, 7)},
}
INK, MUTED, LINE, GATE, PAPER, *SERIES = COLOURS
MARKERS = "osD^vP"
STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "pom-edge",
    "text.parse_math": False,  # a dollar sign in a name is a dollar sign
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same layout everywhere
    "font.size": 12,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": MUTED,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.labelsize": 12,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "grid.color": LINE,
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "legend.fontsize": 12,
    "lines.linewidth": 1.8,
    "lines.markersize": 6,
}
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
    "check_library",
    "draw_latency",
    "draw_memory",
    "draw_mixers",
    "draw_peers",
    "draw_ranges",
    "draw_waterfall",
    "largest_modules",
    "stage_gate",
    "stages_of",
]


def check_library() -> None:
    """Refuse to begin where there is nothing to draw with.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    require("matplotlib", "report")


def stages_of(parity: Mapping[str, Any]) -> dict[str, float]:
    """SNR in dB of each stage that an artifact went through, in the order in which it did: a manifest sorts its keys."""
    found = parity.get("stages") or {}
    order = list(STAGES)
    return dict(sorted(found.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order)))


def stage_gate(stage: str, gate_db: float) -> float:
    """What a stage is held against: both that come before a precision, against FP32's gate."""
    return max(gate_db, GATES_DB["fp32"]) if stage in ("lowered", "onnx") else gate_db


def draw_waterfall(report: Report) -> Html | None:
    """What is left after each stage, artifact by artifact, with the gate of each; None where no artifact was compared."""
    compared = [a for a in report.artifacts if a.parity and a.parity.get("stages")]
    if not compared:
        return None
    names = labels(report.artifacts)
    rows: list[tuple[str, float | None, float, str]] = []  # name, dB, gate, colour
    for artifact in compared:
        colour, parity = _colours(report)[artifact.file], artifact.parity or {}
        rows.append((names[artifact.file], None, 0.0, INK))
        rows += [
            (SHORT.get(stage, stage), snr_db, stage_gate(stage, parity["gate_db"]), colour)
            for stage, snr_db in stages_of(parity).items()
        ]
    with _styled():
        figure, axes = _figure(ROW * len(rows) + 0.85)
        for y, (_, snr_db, gate_db, colour) in enumerate(rows):
            if snr_db is None:
                continue
            axes.barh(y, min(max(snr_db, 0.0), SHOWN_DB), height=0.62, color=colour)
            axes.plot([gate_db, gate_db], [y - 0.42, y + 0.42], color=GATE, linewidth=2.2, solid_capstyle="butt")
            said = f"{snr_db:.1f}" if snr_db < SHOWN_DB else "equal"
            axes.text(max(min(snr_db, SHOWN_DB), gate_db) + 2, y, said, va="center")
        axes.set_yticks(range(len(rows)), [plain(name) for name, *_ in rows])
        for tick, (_, snr_db, *_) in zip(axes.get_yticklabels(), rows, strict=True):
            tick.set_fontweight("bold" if snr_db is None else "normal")
        _rows_down(axes, len(rows))
        axes.set_xlim(0, max(min(max(r[1] or 0.0, r[2]), SHOWN_DB) for r in rows) * 1.17)
        axes.set_xlabel("SNR against PyTorch, dB")
        axes.plot([], [], color=GATE, linewidth=2.2, label="gate")
        figure.legend(loc="outside upper right")
        return _svg(figure, "waterfall", "Parity by stage: signal-to-noise ratio against PyTorch in dB, with gates")


def draw_mixers(report: Report) -> Html | None:
    """Every mixer's own output against PyTorch's; None where no manifest says it."""
    found = {a.file: a.parity["mixers"] for a in report.artifacts if a.parity and a.parity.get("mixers")}
    if not found:
        return None
    mixers = list(dict.fromkeys(name for values in found.values() for name in values))
    colours, names, drawn = _colours(report), labels(report.artifacts), set()
    with _styled():
        figure, axes = _figure(ROW * len(mixers) + 1.15)
        for index, artifact in enumerate(report.artifacts):
            values = found.get(artifact.file, {})
            ys = [y for y, name in enumerate(mixers) if name in values]
            xs = [min(max(values[mixers[y]], 0.0), SHOWN_DB) for y in ys]
            colour, gate_db = colours[artifact.file], (artifact.parity or {}).get("gate_db", 0.0)
            if not values:
                continue
            axes.plot(xs, ys, MARKERS[index % 6], color=colour, label=plain(names[artifact.file]))
            if gate_db not in drawn:
                axes.axvline(gate_db, color=GATE, linewidth=1.4, linestyle=(0, (5, 3)), label=None if drawn else "gate")
                drawn.add(gate_db)
        axes.set_yticks(range(len(mixers)), [_shortened(name) for name in mixers])
        _rows_down(axes, len(mixers))
        axes.set_xlim(left=0)
        axes.set_xlabel("SNR of the mixer's own output, dB")
        _legend(figure)
        return _svg(figure, "mixers", "Signal-to-noise ratio of every mixer's own output, in dB, with gates")


def draw_latency(report: Report) -> Html | None:
    """Median time against tokens, with the time of the matrix products alone; bars where there is one length only."""
    rows = report.bench.rows if report.bench is not None else []
    if not rows:
        return None
    names, colours = labels(report.artifacts), _colours(report)
    files = list(dict.fromkeys(row.file for row in rows))
    title = "Median time of a run, in milliseconds, beside the time of its matrix products alone"
    with _styled():
        if len({row.tokens for row in rows}) == 1:
            figure, axes = _figure(ROW * 1.5 * len(rows) + 1.0)
            _bars(axes, [(names[r.file], r.median_ms, bound_ms(report, r), colours[r.file]) for r in rows], "{:,.3g} ms")
            axes.set_xlabel("median time of a run, ms")
            axes.plot([], [], color=GATE, linewidth=2.2, label="its matrix products alone")
        else:
            figure, axes = _figure(3.5)
            for index, file in enumerate(files):
                mine = [row for row in rows if row.file == file]
                x, colour, y = [r.tokens for r in mine], colours[file], [r.median_ms for r in mine]
                axes.fill_between(x, y, [r.p90_ms for r in mine], color=colour, alpha=0.25, linewidth=0)
                axes.plot(x, y, f"{MARKERS[index % 6]}-", color=colour, label=plain(names[file]))
            base = [(r.tokens, bound_ms(report, r)) for r in rows if r.file == files[0]]
            if all(ms is not None for _, ms in base):
                axes.plot(*zip(*base, strict=True), color=GATE, linestyle=(0, (5, 3)), label="matrix products alone")
            _against_tokens(axes, {row.tokens for row in rows}, "ms")
        _legend(figure)
        return _svg(figure, "latency", title)


def draw_peers(report: Report) -> Html | None:
    """One mixer beside the published form, attention and the product that no form avoids; None where no file was given."""
    if report.peers is None:
        return None
    with _styled():
        figure, axes = _figure(3.6)
        for index, name in enumerate(report.peers.names):
            points = report.peers.ms(name)
            colour, line = (GATE, (0, (5, 3))) if name == "gemm" else (SERIES[index % 6], "-")
            marker = None if name == "gemm" else MARKERS[index % 6]
            axes.plot(*zip(*points.items(), strict=True), color=colour, linestyle=line, marker=marker,
                      label=_shortened(NAMES.get(name, name)))  # fmt: skip
        _against_tokens(axes, {row.tokens for row in report.peers.rows}, "ms")
        _legend(figure)
        return _svg(figure, "peers", "Time of one mixer and of its peers against the number of tokens, in milliseconds")


def draw_memory(report: Report) -> Html | None:
    """The memory of a run, predicted and measured, of the whole process where that was opened, against the budget."""
    rows = [row for row in report.memory if row.activations is not None]
    if not rows:
        return None
    opened = all(row.predicted is not None for row in rows)
    names, colours = labels(report.artifacts), _colours(report)
    files = list(dict.fromkeys(row.file for row in rows))
    unit = 2**20
    what = "whole process, MiB" if opened else "activations, inputs and outputs, MiB"

    def size(row: Any) -> float:
        return (row.predicted if opened else row.io + row.activations) / unit

    with _styled():
        if len({row.tokens for row in rows}) == 1:
            figure, axes = _figure(ROW * 1.5 * len(rows) + 1.0)
            measured = [r.measured / unit if opened and r.measured is not None else None for r in rows]
            bars = [(names[r.file], size(r), m, colours[r.file]) for r, m in zip(rows, measured, strict=True)]
            _bars(axes, bars, "{:,.1f} MiB")
            axes.set_xlabel(f"predicted: {what}")
            if any(m is not None for m in measured):
                axes.plot([], [], color=GATE, linewidth=2.2, label="measured")
            draw_budget = axes.axvline
        else:
            figure, axes = _figure(3.5)
            for index, file in enumerate(files):
                mine, colour = [row for row in rows if row.file == file], colours[file]
                axes.plot(
                    [r.tokens for r in mine], [size(r) for r in mine], color=colour, label=f"{plain(names[file])}, predicted"
                )
                points = [(r.tokens, r.measured / unit) for r in mine if opened and r.measured is not None]
                if points:
                    axes.plot(*zip(*points, strict=True), MARKERS[index % 6], color=colour, label="measured")
            _against_tokens(axes, {row.tokens for row in rows if row.tokens is not None}, what, log=False)
            draw_budget = axes.axhline
        if report.budget is not None and opened:
            draw_budget(report.budget / unit, color=GATE, linewidth=1.4, linestyle=(0, (5, 3)), label="budget")
        _legend(figure)
        return _svg(figure, "memory", f"Memory of a run, predicted and measured: {what}")


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
    with _styled():
        figure, axes = _figure(ROW * len(rows) + 1.0)
        for proved, marker, label in ((True, "o", "proved"), (False, "D", "observed, not proved")):
            points = [(row["largest"], y) for y, row in enumerate(rows) if (row["basis"] == "proved") == proved]
            if points:
                axes.plot(*zip(*points, strict=True), marker, color=SERIES[0], markerfacecolor=SERIES[0] if proved else PAPER,
                          label=label)  # fmt: skip
        if precision != "bf16":
            axes.axvline(FP16_LIMIT, color=GATE, linewidth=1.4, linestyle=(0, (5, 3)), label="largest FP16 value, 65,504")
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}")
        axes.xaxis.set_minor_formatter(lambda *_: "")
        axes.set_yticks(range(len(rows)), [_shortened(row["module"] or "(model)") for row in rows])
        _rows_down(axes, len(rows))
        axes.set_xlabel("largest magnitude")
        _legend(figure)
        return _svg(figure, key, f"Largest value of each module, {precision.upper()}")


@contextmanager
def _styled() -> Iterator[None]:
    import matplotlib

    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)  # only its width is guessed: text stays text
        yield


def _figure(height: float) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure  # without pyplot: no state, no window

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.add_subplot()
    axes.set_axisbelow(True)
    return figure, axes


def _colours(report: Report) -> dict[str, str]:
    return {artifact.file: SERIES[index % len(SERIES)] for index, artifact in enumerate(report.artifacts)}


def _shortened(name: str, limit: int = 28) -> str:
    """The end of a long path says more than its beginning."""
    name = plain(name)
    return name if len(name) <= limit else f"…{name[1 - limit :]}"


def _rows_down(axes: Axes, count: int) -> None:
    axes.set_ylim(count - 0.4, -0.6)
    axes.grid(axis="x")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def _bars(axes: Axes, rows: Sequence[tuple[str, float, float | None, str]], form: str) -> None:
    """Name, value, mark and colour of each bar."""
    for y, (_, value, mark, colour) in enumerate(rows):
        axes.barh(y, value, height=0.55, color=colour)
        if mark is not None:
            axes.plot([mark, mark], [y - 0.36, y + 0.36], color=GATE, linewidth=2.2, solid_capstyle="butt")
        axes.text(max(value, mark or 0.0), y, f"  {form.format(value)}", va="center")
    axes.set_yticks(range(len(rows)), [_shortened(name) for name, *_ in rows])
    _rows_down(axes, len(rows))
    axes.set_xlim(0, max(max(value, mark or 0.0) for _, value, mark, _ in rows) * 1.3)


def _against_tokens(axes: Axes, lengths: Iterable[int], unit: str, log: bool = True) -> None:
    ticks = _spread(sorted(lengths))
    axes.set_xscale("log")
    axes.set_xticks(ticks, [f"{n:,}" for n in ticks])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("tokens")
    axes.set_ylabel(unit)
    if log:
        axes.set_yscale("log")
        axes.yaxis.set_minor_formatter(lambda *_: "")
    else:
        axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.6g}")
    axes.grid(axis="y")


def _spread(lengths: list[int], most: int = 6) -> list[int]:
    """As many of the lengths as have room on an axis, the last one among them."""
    step = -(-len(lengths) // most)
    return lengths[::-1][::step][::-1]


def _legend(figure: Figure) -> None:
    figure.legend(loc="outside upper left", ncols=2, columnspacing=1.4, handlelength=1.8)


def _svg(figure: Figure, key: str, title: str) -> Html:
    """The figure as an element of the page.

    Names of parts are made unique by ``key``: two figures of one page would share them otherwise.
    """
    text = io.StringIO()
    figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    ET.register_namespace("", SVG)
    root = ET.fromstring(text.getvalue())  # noqa: S314  # made in the line above
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in (f"{{{SVG}}}metadata", f"{{{SVG}}}style"):  # a style of a figure would be one of the page
                parent.remove(child)
    for node in root.iter():
        _name_parts(node, key)
    root.set("style", "stroke-linejoin: round; stroke-linecap: butt")
    del root.attrib["width"], root.attrib["height"]  # the page decides
    root.set("role", "img")
    root.set("aria-labelledby", f"{key}-title")
    label = ET.Element(f"{{{SVG}}}title", {"id": f"{key}-title"})
    label.text = title
    root.insert(0, label)
    return Html(ET.tostring(root, encoding="unicode"))


def _name_parts(node: ET.Element, key: str) -> None:
    for name, value in list(node.attrib.items()):
        if name == "id":
            node.set(name, f"{key}-{value}")
        elif name == LINK:
            del node.attrib[name]
            node.set("href", f"#{key}-{value[1:]}")
        else:
            value = value.replace("url(#", f"url(#{key}-")
            for placeholder, variable in COLOURS.items():
                value = value.replace(placeholder, f"var({variable})")
            node.set(name, value)
