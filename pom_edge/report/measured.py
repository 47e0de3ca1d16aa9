"""The sections about cost: times and memory."""

from __future__ import annotations

from pom_edge.report import parts
from pom_edge.report.collect import Report, bound_ms, labels
from pom_edge.report.figures import draw_latency, draw_memory, draw_peers
from pom_edge.report.markup import Html, element
from pom_edge.report.peers import NAMES, Peers
from pom_edge.system import human_bytes
from pom_edge.words import counted, say_settings

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
        h("p", f"{say_settings(report.bench.settings)}.", class_="quiet"),
        *_left_out(report),
    ]
    return [parts.pair(text, figure), parts.details("Times as a table", parts.table(headers, rows, numeric=set(range(1, 7))))]


def _left_out(report: Report) -> list[Html]:
    notes = [] if report.bench is None else report.bench.notes
    if not notes:
        return []
    return [h("p", "Left out:"), h("ul", *(h("li", note) for note in notes))]


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
    absent = [NAMES[name] for name in NAMES if name not in peers.names]
    text = [
        h("p", "The median time of a run of one mixer, not of this bundle's model, beside what could stand in its place."),
        h(
            "p",
            f"From {peers.source}, {f'measured on {peers.machine}' if peers.machine else 'which names no machine'}. ",
            f"Not measured there: {', '.join(absent)}." if absent else None,
        ),
        parts.facts(peers.settings.items()) if peers.settings else None,
        *_what_counts(peers),
    ]
    table = _ratio_table(peers) if any(row.ratio for row in peers.rows) else _median_table(peers)
    return [parts.pair(text, draw_peers(report)), parts.details("Peers as a table", table)]


def _what_counts(peers: Peers) -> list[Html]:
    """Which of two figures to believe, and where they disagree."""
    if not any(row.ratio for row in peers.rows):
        return []
    said = [
        h(
            "p",
            "Lines are medians over all rounds. What counts between two of them is the ratio of their times within a round, in "
            "the table with its spread: whatever slows the machine for a while slows both, and medians may fall into "
            "different times.",
        )
    ]
    said += [
        h(
            "p",
            f"At {counted(fast.tokens, 'token')} the medians are in the wrong order: within the rounds {_name(fast.what)} is "
            f"faster than {_name(slow.what)} ({fast.ratio:.2f} and {slow.ratio:.2f} times {_name(fast.against or '')}).",
        )
        for fast, slow in peers.contradictions
    ]
    if peers.states:
        states = " Together: the cores share a cache; apart: they do not." if {*peers.states} & {"together", "apart"} else ""
        said.append(h("p", f"Ratios differ by the state of the cores, so each has its own.{states}"))
    return said


def _name(what: str) -> str:
    return NAMES.get(what, what)


def _median_table(peers: Peers) -> Html:
    values = {name: peers.ms(name) for name in peers.names}
    rows = [[f"{n:,}", *(parts.ms(of.get(n)) for of in values.values())] for n in sorted({row.tokens for row in peers.rows})]
    return parts.table(["tokens", *map(_name, values)], rows, numeric=set(range(1, len(values) + 1)))


def _ratio_table(peers: Peers) -> Html:
    """One row for each peer and length, its time over that of what it is compared with; what no row has is no column."""
    halves, p90 = any(row.middle_half for row in peers.rows), any(row.p90_ms for row in peers.rows)
    headers = ["tokens", "what", "median", "p90", "compared with", "ratio", "middle half"]
    headers += [f"ratio, cores {state}" for state in peers.states]
    kept = [at for at in range(len(headers)) if (at != 3 or p90) and (at != 6 or halves)]
    order = {name: place for place, name in enumerate(peers.names)}
    rows = []
    for row in sorted(peers.rows, key=lambda r: (r.tokens, order[r.what])):
        own = [
            f"{row.tokens:,}",
            _name(row.what),
            parts.ms(row.ms),
            parts.ms(row.p90_ms),
            parts.NONE if row.against is None else _name(row.against),
            parts.NONE if row.ratio is None else f"{row.ratio:.2f}",
            parts.NONE if row.middle_half is None else "{:.2f} to {:.2f}".format(*row.middle_half),
        ]
        found = [row.cores.get(state) for state in peers.states]
        own += [parts.NONE if part is None else f"{part.ratio:.2f} ({counted(part.rounds, 'round')})" for part in found]
        rows.append([own[at] for at in kept])
    return parts.table([headers[at] for at in kept], rows, {new for new, old in enumerate(kept) if old not in (0, 1, 4)})


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
            length = "" if row.tokens is None else f" at {counted(row.tokens, 'token')}"
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
