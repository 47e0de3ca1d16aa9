"""The sections about cost: times and memory."""

from __future__ import annotations

from pom_edge.report import parts
from pom_edge.report.collect import Report, bound_ms, labels
from pom_edge.report.figures import draw_latency, draw_memory, draw_peers
from pom_edge.report.markup import Html, element
from pom_edge.report.peers import NAMES
from pom_edge.system import human_bytes

h = element
LOOSE = (
    "A run is faster than that here: products in INT8 or of small matrices can be, or the machine was busy with something else."
)

__all__ = ["tell_latency", "tell_memory"]


def tell_latency(report: Report) -> list[Html | None]:
    return [*_times(report), h("h3", "One mixer beside its peers"), *_beside(report)]


def _times(report: Report) -> list[Html | None]:
    if report.bench is None:
        return [h("p", f"Not measured: {report.unmeasured}.")]
    names, figure = labels(report.artifacts), draw_latency(report)
    rows = [
        [
            names[row.file],
            "one size" if report.is_one_size(row.file) else f"{row.tokens:,}",
            parts.ms(row.median_ms),
            parts.ms(row.p90_ms),
            parts.NONE if report.is_one_size(row.file) else f"{row.tokens_per_s:,.0f}",
            parts.ms(bound_ms(row)),
            f"{row.against_fp32:.2f}x" if row.against_fp32 is not None else parts.NONE,
        ]
        for row in report.bench.rows
    ]
    headers = ["artifact", "tokens", "median", "p90", "tokens/s", "products alone", "speed against FP32"]
    batch = report.bench.rows[0].batch
    several = len({row.tokens for row in report.bench.rows}) > 1
    text = [
        h(
            "p",
            f"Every artifact in turn, round by round, in ONNX Runtime on this machine, batch {batch}: the median of a run"
            f"{', shaded up to the 90th percentile' if several else ''}.",
        ),
        h(
            "p",
            "The bound is what cannot be avoided: the matrix products of the graph, at the rate of one large FP32 product in "
            f"the same rounds ({report.bench.gflops:,.1f} GFLOP/s).",
        )
        if report.bench.gflops is not None
        else None,
        h("p", LOOSE) if _loose(report) else None,
        *_growth(report),
    ]
    return [parts.pair(text, figure), parts.details("Times as a table", parts.table(headers, rows, numeric=set(range(1, 7))))]


def _loose(report: Report) -> bool:
    """Whether a run is faster than its bound: then the bound is none."""
    rows = report.bench.rows if report.bench is not None else []
    return any((bound_ms(row) or 0.0) > row.median_ms for row in rows)


def _growth(report: Report) -> list[Html]:
    """How time grows with the number of tokens, in words."""
    said = []
    for file, name in labels(report.artifacts).items():
        rows = [row for row in report.bench.rows if row.file == file] if report.bench is not None else []
        first, last = (end(rows, key=lambda r: r.tokens, default=None) for end in (min, max))
        if first is not None and last is not None and last.tokens > first.tokens:
            more, longer = last.tokens / first.tokens, last.median_ms / first.median_ms
            said.append(h("p", h("strong", name), f": {more:.3g} times the tokens take {longer:.3g} times the time."))
    return said


def _beside(report: Report) -> list[Html | None]:
    peers = report.peers
    if peers is None:
        return [
            h(
                "p",
                "The published form and attention were not measured for this report. ",
                h("code", "pom-edge report --peers FILE.json", class_="line"),
                " shows the figures of a benchmark.",
            )
        ]
    lengths = sorted({row.tokens for row in peers.rows})
    values = {name: peers.ms(name) for name in peers.names}
    rows = [[f"{n:,}", *(parts.ms(of.get(n)) for of in values.values())] for n in lengths]
    absent = [NAMES[name] for name in NAMES if name not in values]
    text = [
        h("p", "The median time of a run of one mixer, not of this bundle's model, beside what could stand in its place."),
        h(
            "p",
            f"From {peers.source}, {f'measured on {peers.machine}' if peers.machine else 'which names no machine'}. ",
            f"Not measured there: {', '.join(absent)}." if absent else None,
        ),
    ]
    table = parts.table(["tokens", *(NAMES.get(n, n) for n in values)], rows, numeric=set(range(1, len(values) + 1)))
    return [parts.pair(text, draw_peers(report)), parts.details("Peers as a table", table)]


def tell_memory(report: Report) -> list[Html | None]:
    names, figure = labels(report.artifacts), draw_memory(report)
    recorded = _recorded(report)
    why = [h("p", f"Not predicted: {text}.") for text in sorted({row.why for row in report.memory if row.why})]
    if figure is None:
        return [*(why or [h("p", "Not predicted: no artifact carries a plan of its memory.")]), recorded]
    rows = []
    for row in report.memory:
        opened = row.opened
        sizes = [
            None if opened is None else opened.base_bytes,
            None if opened is None else opened.weights_bytes,
            row.io,
            row.activations,
            row.predicted,
            row.measured,
        ]
        tokens = "one size" if row.tokens is None else f"{row.tokens:,}"
        rows.append([names[row.file], tokens, *(parts.NONE if size is None else human_bytes(size) for size in sizes)])
    headers = ["artifact", "tokens", "runtime", "weights", "in and out", "activations", "predicted", "measured"]
    what = (
        "Predicted: runtime and weights from opening the artifact in a fresh process, the rest from the graph. Measured: the "
        "highest private memory of a run in a fresh process."
        if any(row.opened is not None for row in report.memory)
        else "Predicted from the graph alone; nothing was run, so the runtime and the weights are not counted."
    )
    return [
        parts.pair([_budget(report), h("p", what), *why], figure),
        parts.details("Memory as a table", parts.table(headers, rows, numeric=set(range(1, 8)))),
        recorded,
    ]


def _budget(report: Report) -> Html | None:
    """Whether every run keeps the budget: by measurement where there is one, else by prediction."""
    if report.budget is None:
        return None
    names = labels(report.artifacts)
    runs = []
    for row in report.memory:
        total = row.predicted if row.measured is None else row.measured
        if total is not None:
            length = "" if row.tokens is None else f" at {row.tokens:,} tokens"
            how = "predicted" if row.measured is None else "measured"
            runs.append((total, f"{names[row.file]}{length}: {human_bytes(total)} {how}"))
    said = f"Budget {human_bytes(report.budget)} for the whole process: "
    over = [words for total, words in runs if total > report.budget]
    if not runs:
        return h("p", said, "nothing was run, so nothing is held against it.")
    if over:
        return h("p", said, h("span", "over", class_="bad"), f". {'; '.join(over)}.")
    return h("p", said, h("span", "held", class_="good"), f". The largest run, {max(runs)[1]}.")


def _recorded(report: Report) -> Html | None:
    rows = [
        [
            h("code", m.file),
            parts.NONE if m.tokens is None else f"{m.tokens:,}",
            human_bytes(m.predicted["total"]),
            human_bytes(m.measured["total"]),
            f"{m.runtime}, {', '.join(m.machine.values())}, {parts.moment(m.recorded)}{', spilled' if m.spill else ''}",
        ]
        for m in report.manifest.measurements
    ]
    if not rows:
        return None
    headers = ["file", "tokens", "predicted", "measured", "where and when"]
    return h("div", h("h3", "Recorded in the bundle"), parts.table(headers, rows, numeric={1, 2, 3}))
