"""A report as one HTML file: no script, no request, light and dark, readable on a phone and without a mouse."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from typing import Any

from pom_edge.building import EAGER_GATE_DB
from pom_edge.bundle import Artifact
from pom_edge.markup import Html, element, plain
from pom_edge.report import GENERATOR, Report, bound_ms, labels
from pom_edge.report_peers import NAMES
from pom_edge.report_plots import (
    SHORT,
    SHOWN_MODULES,
    draw_latency,
    draw_memory,
    draw_mixers,
    draw_peers,
    draw_ranges,
    draw_waterfall,
    stage_gate,
    stages_of,
)
from pom_edge.runtimes.bench import BenchRow
from pom_edge.system import human_bytes

NONE = "-"
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"  # whatever a name may hold, nothing is loaded or run

h = element

__all__ = ["render"]


def render(report: Report) -> str:
    """The page, complete in itself."""
    sections = {
        "summary": ("Summary", _summary),
        "parity": ("Parity", _parity),
        "mixers": ("Layers", _mixers),
        "latency": ("Latency", _latency),
        "memory": ("Memory", _memory),
        "ranges": ("Ranges", _ranges),
        "environment": ("Environment", _environment),
    }
    name = report.manifest.name
    links = [h("li", h("a", title, href=f"#{key}")) for key, (title, _) in sections.items()]
    style = Html((files("pom_edge") / "report.css").read_text(encoding="utf-8"))
    head = h(
        "head",
        h("meta", charset="utf-8"),
        h("meta", name="viewport", content="width=device-width, initial-scale=1"),
        h("meta", name="generator", content=GENERATOR),
        h("meta", http_equiv="Content-Security-Policy", content=POLICY),
        h("link", rel="icon", href="data:,"),
        h("title", f"{name}: report"),
        h("style", style),
    )
    body = h(
        "body",
        h("a", "Skip to the content", class_="skip", href="#summary"),
        h("header", h("h1", name), h("p", _subtitle(report), class_="quiet"), h("nav", h("ul", *links), aria_label="Sections")),
        h("main", *(_section(key, title, make(report)) for key, (title, make) in sections.items())),
        h("footer", f"Made by {report.manifest.producer.split()[0]} report, {_moment(report.created)}. One file, no script."),
    )
    return f"<!doctype html>\n{h('html', head, body, lang='en')}\n"


def _section(key: str, title: str, children: Iterable[Html | None]) -> Html:
    return h("section", h("h2", title, id=f"{key}-heading"), *children, id=key, aria_labelledby=f"{key}-heading", tabindex="-1")


def _subtitle(report: Report) -> str:
    model = report.manifest.model
    kind = model.get("class") or model.get("kind") or "model"
    return f"{kind}, exported {_moment(report.manifest.created)} by {report.manifest.producer}"


def _moment(text: str) -> str:
    return text.replace("T", " ").replace("+00:00", " UTC")


# ---- summary


def _summary(report: Report) -> list[Html | None]:
    compared = [a for a in report.artifacts if a.parity]
    held = [a for a in compared if a.parity and a.parity.get("passed")]
    rest = len(report.artifacts) - len(held)
    verdict: list[object] = [
        h("span", f"{len(held)} of {len(report.artifacts)} artifacts", class_="good" if held else "bad"),
        " give PyTorch's answers within the gate of their precision, output by output and mixer by mixer.",
    ]
    if rest:
        verdict += [" ", h("span", f"{rest} {'was' if rest == 1 else 'were'} not compared", class_="bad"), ": see the table."]
    tests = [test for a in compared for test in (a.parity or {}).get("vacuity", [])]
    caught = sum(test["caught"] is True for test in tests)
    proof = f"{caught} answers were broken on purpose to prove that the gates can fail: all were caught." if caught else None
    facts = [("Warning", text) for text in report.manifest.warnings]
    names = labels(report.artifacts)
    facts += [(names[a.file], note) for a in report.artifacts for note in a.notes]
    notes = h("details", h("summary", f"Notes of the export ({len(facts)})"), _facts(facts)) if facts else None
    return [
        h("p", *verdict, class_="verdict"),
        h("p", proof) if proof else None,
        _tiles(report),
        _table(
            ["artifact", "file", "form", "size", "output SNR", "worst mixer", "gate", "task metric", "ran in"],
            [_artifact_row(report, artifact) for artifact in report.artifacts],
            numeric={3, 4, 5, 6, 7},
        ),
        notes,
    ]


def _artifact_row(report: Report, artifact: Artifact) -> list[object]:
    parity, sizes = artifact.parity or {}, {entry.path: entry.bytes for entry in report.manifest.files}
    own = [size for path, size in sizes.items() if path in artifact.files or path.startswith(f"{artifact.file}/")]
    worst, metric = parity.get("worst_mixer"), parity.get("metric")
    return [
        labels(report.artifacts)[artifact.file],
        h("code", artifact.file),
        artifact.form,
        human_bytes(sum(own)),
        _db(parity.get("snr_db")),
        _db(worst["snr_db"] if worst else None),
        _db(parity.get("gate_db"), digits=0),
        f"{metric['artifact']:g} (PyTorch {metric['pytorch']:g})" if metric else NONE,
        artifact.verified,
    ]


def _tiles(report: Report) -> Html | None:
    tiles = [tile for tile in (_closest(report), _metric(report), _fastest(report), _smallest(report)) if tile]
    made = [h("div", h("dt", name), h("dd", value), h("dd", note, class_="note")) for name, value, note in tiles]
    return h("dl", *made, class_="tiles") if made else None


Tile = tuple[str, str, str]


def _closest(report: Report) -> Tile | None:
    margins = []
    for artifact in report.artifacts:
        parity = artifact.parity or {}
        mixers = [parity["worst_mixer"]] if parity.get("worst_mixer") else []
        margins += [
            (found["snr_db"] - parity["gate_db"], found["name"], artifact)
            for found in [*mixers, {"name": "output", "snr_db": parity.get("snr_db")}]
            if found["snr_db"] is not None and "gate_db" in parity
        ]
    if not margins:
        return None
    margin, name, artifact = min(margins, key=lambda item: item[0])
    return "Smallest margin to a gate", f"{margin:.1f} dB", f"{labels(report.artifacts)[artifact.file]}, {name}"


def _metric(report: Report) -> Tile | None:
    found = [(a, a.parity["metric"]) for a in report.artifacts if a.parity and a.parity.get("metric")]
    if not found:
        return None
    artifact, metric = max(found, key=lambda item: item[1]["drop"])
    said = f"{labels(report.artifacts)[artifact.file]}, {metric['name'].rpartition(':')[2]}, allowed {metric['max_drop']:g}"
    return "Largest loss in the task", f"{metric['drop']:g} points", said


def _fastest(report: Report) -> Tile | None:
    if report.bench is None:
        return None
    longest = max(row.tokens for row in report.bench.rows)
    row = min((r for r in report.bench.rows if r.tokens == longest), key=lambda r: r.median_ms)
    return "Fastest run here", f"{_ms(row.median_ms)}", f"{labels(report.artifacts)[row.file]}, {_run(report, row)}"


def _smallest(report: Report) -> Tile | None:
    rows = [row for row in report.bench.rows if row.peak_bytes is not None] if report.bench is not None else []
    if not rows:
        return None
    longest = max(row.tokens for row in rows)
    row = min((r for r in rows if r.tokens == longest), key=lambda r: r.peak_bytes or 0)
    said = f"{labels(report.artifacts)[row.file]}, {_run(report, row)}, whole process"
    return "Least memory here", human_bytes(row.peak_bytes or 0), said


def _run(report: Report, row: BenchRow) -> str:
    tokens = next((r.tokens for r in report.memory if r.file == row.file), row.tokens)
    length = "inputs of one size" if tokens is None else f"{row.tokens:,} tokens"
    return length if row.batch == 1 else f"{length}, batch {row.batch}"


# ---- parity


def _parity(report: Report) -> list[Html | None]:
    figure = draw_waterfall(report)
    if figure is None:
        return [h("p", "The manifest records no comparison with PyTorch for any artifact.")]
    names = labels(report.artifacts)
    rows: list[list[object]] = []
    for artifact in report.artifacts:
        parity = artifact.parity or {}
        for stage, snr_db in stages_of(parity).items():
            gate = stage_gate(stage, parity["gate_db"])
            rows.append([names[artifact.file], SHORT.get(stage, stage), _db(snr_db), _db(gate, 0), _verdict(snr_db >= gate)])
        eager = parity.get("snr_db_eager")
        if eager is not None:
            stage = "against the quantized PyTorch model"
            rows.append([names[artifact.file], stage, _db(eager), _db(EAGER_GATE_DB, 0), _verdict(eager >= EAGER_GATE_DB)])
    cases = f"{len(report.manifest.golden)} recorded cases" if len(report.manifest.golden) != 1 else "one recorded case"
    return [
        h(
            "p",
            "The trained model in PyTorch (FP32) is the reference. Each bar is the worst value of a stage, over all outputs, "
            f"all mixers and {cases}; a stage that misses its gate ends the export.",
        ),
        _pair(
            _figure(
                figure, "Signal-to-noise ratio, 10 log₁₀(Σ ref² / Σ error²), in dB. 20 dB more is an error ten times smaller."
            ),
            _table(["artifact", "stage", "SNR", "gate", ""], rows, numeric={2, 3}),
        ),
    ]


def _mixers(report: Report) -> list[Html | None]:
    figure = draw_mixers(report)
    if figure is None:
        worst = [
            f"{labels(report.artifacts)[a.file]}: {a.parity['worst_mixer']['name']}, {_db(a.parity['worst_mixer']['snr_db'])}"
            for a in report.artifacts
            if a.parity and a.parity.get("worst_mixer")
        ]
        said = f" The worst of each artifact: {'; '.join(worst)}." if worst else ""
        return [h("p", f"The manifest records no figure for each layer.{said}")]
    found = {a.file: a.parity["mixers"] for a in report.artifacts if a.parity and a.parity.get("mixers")}
    names = labels(report.artifacts)
    mixers = list(dict.fromkeys(name for values in found.values() for name in values))
    rows = [[h("code", mixer), *(_db(values.get(mixer)) for values in found.values())] for mixer in mixers]
    table = _table(["mixer", *(names[file] for file in found)], rows, numeric=set(range(1, len(found) + 1)))
    made = _details(f"All {len(mixers)} mixers as a table", table) if len(mixers) > 12 else table
    return [
        h("p", "A residual network hides a dead mixer from its output, so every mixer's own output is held against PyTorch's."),
        _pair(_figure(figure, "Worst value over the recorded cases. The dashed lines are the gates."), made),
        *(_quantized(artifact, names[artifact.file]) for artifact in report.artifacts if artifact.quantization),
    ]


def _quantized(artifact: Artifact, name: str) -> Html | None:
    found = artifact.quantization or {}
    if "layers" in found:
        kinds = {"gemm": "INT8", "weight": "INT8 weight", "float": "kept in float"}
        rows = [[h("code", r["layer"]), r["why"] or kinds.get(r["kind"], r["kind"]), _db(r["snr_db"])] for r in found["layers"]]
        title = f"{name}: what became of each layer, calibrated on {found['samples']} samples ({found['calibration']})"
    else:
        rows = [[h("code", r["name"]), f"{r['bits']} bits", _db(r["snr_db_alone"])] for r in found.get("weights", [])]
        rows += [[h("code", r), "kept in float", NONE] for r in found.get("kept_float", [])]
        title = f"{name}: what became of each weight"
    return _details(title, _table(["layer", "kept as", "SNR if it alone"], rows, numeric={2})) if rows else None


# ---- latency


def _latency(report: Report) -> list[Html | None]:
    return [*_times(report), h("h3", "One mixer beside its peers"), *_beside(report)]


def _times(report: Report) -> list[Html | None]:
    if report.bench is None:
        return [h("p", f"Not measured: {report.unmeasured}.")]
    names, figure = labels(report.artifacts), draw_latency(report)
    rows = [
        [
            names[row.file],
            f"{row.tokens:,}",
            _ms(row.median_ms),
            _ms(row.p90_ms),
            f"{row.tokens_per_s:,.0f}",
            _ms(bound_ms(report, row)),
            f"{row.against_fp32:.2f}x" if row.against_fp32 is not None else NONE,
        ]
        for row in report.bench.rows
    ]
    headers = ["artifact", "tokens", "median", "p90", "tokens/s", "products alone", "speed against FP32"]
    batch = report.bench.rows[0].batch
    assert figure is not None
    return [
        h(
            "p",
            f"Every artifact in turn, round by round, in ONNX Runtime on this machine, batch {batch}. The bound is the "
            f"unavoidable part, the matrix products of the graph at the rate that numpy reaches here "
            f"({report.bench.gflops:,.1f} GFLOP/s, FP32).",
        ),
        _growth(report),
        _pair(
            _figure(figure, "Median of a run; shaded up to the 90th percentile."),
            _table(headers, rows, numeric=set(range(1, 7))),
        ),
    ]


def _growth(report: Report) -> Html | None:
    """How time grows with the number of tokens, in words."""
    said = []
    for file, name in labels(report.artifacts).items():
        rows = [row for row in report.bench.rows if row.file == file] if report.bench is not None else []
        if len(rows) > 1:
            first, last = min(rows, key=lambda r: r.tokens), max(rows, key=lambda r: r.tokens)
            more, longer = last.tokens / first.tokens, last.median_ms / first.median_ms
            said.append(f"{name}: {more:.3g} times the tokens take {longer:.3g} times the time")
    return h("p", "; ".join(said), ".") if said else None


def _beside(report: Report) -> list[Html | None]:
    peers = report.peers
    if peers is None:
        return [
            h(
                "p",
                "The published form and attention were not measured for this report. ",
                h("code", "pom-edge report --peers FILE.json"),
                " shows the figures of a benchmark.",
            )
        ]
    lengths = sorted({row.tokens for row in peers.rows})
    values = {name: peers.ms(name) for name in peers.names}
    rows = [[f"{n:,}", *(_ms(of.get(n)) for of in values.values())] for n in lengths]
    absent = [NAMES[name] for name in NAMES if name not in values]
    figure = draw_peers(report)
    assert figure is not None
    return [
        h(
            "p",
            f"From {peers.source}, {f'measured on {peers.machine}' if peers.machine else 'which names no machine'}. ",
            f"Not measured there: {', '.join(absent)}." if absent else None,
        ),
        _pair(
            _figure(figure, "Median of a run of one mixer, not of this bundle's model."),
            _table(["tokens", *(NAMES.get(n, n) for n in values)], rows, numeric=set(range(len(values) + 1))),
        ),
    ]


# ---- memory


def _memory(report: Report) -> list[Html | None]:
    names, figure = labels(report.artifacts), draw_memory(report)
    recorded = _recorded(report)
    if figure is None:
        why = {row.why for row in report.memory if row.why}
        return [
            h("p", f"Nothing is predicted: {'; '.join(sorted(why)) or 'no artifact carries a plan of its memory'}."),
            recorded,
        ]
    rows = []
    for row in report.memory:
        opened = row.opened
        parts = [
            None if opened is None else opened.base_bytes,
            None if opened is None else opened.weights_bytes,
            row.io,
            row.activations,
            row.predicted,
            row.measured,
        ]
        tokens = "one size" if row.tokens is None else f"{row.tokens:,}"
        rows.append([names[row.file], tokens, *(NONE if part is None else human_bytes(part) for part in parts)])
    headers = ["artifact", "tokens", "runtime", "weights", "in and out", "activations", "predicted", "measured"]
    opened = any(row.opened is not None for row in report.memory)
    what = (
        "Predicted: runtime and weights from opening the artifact in a fresh process, the rest from the graph. Measured: the "
        "highest private memory of a run in a fresh process."
        if opened
        else "Predicted from the graph alone; nothing was run, so the runtime and the weights are not counted."
    )
    return [
        h("p", what),
        _budget(report),
        _pair(_figure(figure, ""), _table(headers, rows, numeric=set(range(1, 8)))),
        recorded,
    ]


def _budget(report: Report) -> Html | None:
    if report.budget is None:
        return None
    names, said = labels(report.artifacts), []
    for row in report.memory:
        total = row.measured if row.measured is not None else row.predicted
        if total is not None:
            how = "measured" if row.measured is not None else "predicted"
            over = total > report.budget
            length = "" if row.tokens is None else f" at {row.tokens:,} tokens"
            words = f"{names[row.file]}{length} {'over' if over else 'within'} ({human_bytes(total)} {how})"
            said.append(h("span", words, class_="bad" if over else "good"))
    listed = [part for each in said for part in ("; ", each)][1:] or ["nothing to hold against it: no run was measured"]
    return h("p", f"Budget {human_bytes(report.budget)} for the whole process: ", *listed, ".")


def _recorded(report: Report) -> Html | None:
    rows = [
        [
            h("code", m.file),
            NONE if m.tokens is None else f"{m.tokens:,}",
            human_bytes(m.predicted["total"]),
            human_bytes(m.measured["total"]),
            f"{m.runtime}, {', '.join(m.machine.values())}, {_moment(m.recorded)}{', spilled' if m.spill else ''}",
        ]
        for m in report.manifest.measurements
    ]
    if not rows:
        return None
    headers = ["file", "tokens", "predicted", "measured", "where and when"]
    return h("div", h("h3", "Recorded in the bundle"), _table(headers, rows, numeric={1, 2, 3}))


# ---- ranges


def _ranges(report: Report) -> list[Html | None]:
    found = [artifact for artifact in report.artifacts if artifact.ranges]
    if not found:
        return [h("p", "No artifact computes in half precision, so no range had to be proved.")]
    made: list[Html | None] = [
        h(
            "p",
            "How large every value can get, module by module, by interval arithmetic over the graph: a proof for all inputs "
            "within the limits below, not a sample. What could leave half precision's range stays in FP32, and so do sums over "
            "tokens.",
        )
    ]
    for index, artifact in enumerate(found):
        ranges, name = artifact.ranges or {}, labels(report.artifacts)[artifact.file]
        figure = draw_ranges(ranges, artifact.precision, f"ranges-{index}")
        rows = [
            [h("code", row["module"] or "(model)"), f"{row['largest']:,.4g}", row["basis"], _kept(row["fp32"])]
            for row in ranges["modules"]
        ]
        proved = sum(row["basis"] == "proved" for row in ranges["modules"])
        limits = ", ".join(f"|{key}| ≤ {value:g}" for key, value in ranges["assumed_inputs"].items()) or "all inputs"
        shown = "" if len(rows) <= SHOWN_MODULES else f" The figure shows the {SHOWN_MODULES} largest."
        facts = [
            ("holds for", limits),
            (
                "proved",
                f"{proved} of {len(rows)} modules; the others are observed on samples" if proved < len(rows) else "all modules",
            ),
            ("half precision", f"{ranges['half_nodes']} of {ranges['nodes']} floating-point nodes"),
            ("mixers kept in FP32", ", ".join(ranges.get("kept_fp32", [])) or "none"),
        ]
        table = _table(["module", "largest", "basis", "in FP32"], rows, numeric={1})
        made += [
            h("h3", name),
            _pair(
                _figure(figure, f"Largest magnitude inside each module.{shown}") if figure is not None else None,
                h("div", _facts(facts), _details(f"All {len(rows)} modules as a table", table)),
            ),
        ]
    return made


def _kept(fp32: Mapping[str, str]) -> str:
    reasons: dict[str, list[str]] = {}
    for operator, reason in fp32.items():
        reasons.setdefault(reason, []).append(operator)
    return "; ".join(f"{', '.join(operators)} ({reason})" for reason, operators in reasons.items()) or NONE


# ---- environment


def _environment(report: Report) -> list[Html | None]:
    manifest = report.manifest
    runtimes = sorted({a.verified for a in report.artifacts})
    config = manifest.model.get("config") or {k: v for k, v in manifest.model.items() if not isinstance(v, (dict, list))}
    here = [
        *report.machine.items(),
        ("threads", report.threads or "the runtime's own choice"),
        ("measured", _moment(report.created)),
    ]
    made = [("producer", manifest.producer), ("exported", _moment(manifest.created)), *manifest.tools.items()]
    made += [("published layout", manifest.published_layout)] if manifest.published_layout else []
    hashes = _table(
        ["file", "size", "sha256"],
        [[h("code", f.path), human_bytes(f.bytes), h("code", f.sha256)] for f in manifest.files],
        numeric={1},
    )
    settings = [(key, value) for key, value in sorted(config.items()) if value is not None]
    return [
        h("h3", "This report"),
        _facts(here),
        h("h3", "The export"),
        _facts([*made, ("checked in", "; ".join(runtimes))]),
        _details("Settings of the model", _facts(settings)) if settings else None,
        _details(f"Files and hashes ({len(manifest.files)})", hashes),
    ]


# ---- parts


def _figure(svg: Html, caption: str) -> Html:
    return h("figure", svg, h("figcaption", caption) if caption else None)


def _pair(figure: Html | None, beside: Html) -> Html:
    if figure is None:
        return beside
    return h("div", h("div", figure, class_="figures"), h("div", beside), class_="pair")


def _details(title: str, child: Html) -> Html:
    return h("details", h("summary", title), h("div", child))


def _facts(rows: Iterable[tuple[str, object]]) -> Html:
    return h("dl", *(part for key, value in rows for part in (h("dt", key), h("dd", value))), class_="facts")


def _table(headers: Sequence[str], rows: Iterable[Sequence[object]], numeric: set[int]) -> Html:
    """The first cell of a row is its heading. Roles are said aloud: as blocks, on a phone, the elements lose them."""
    head = [h("th", name, scope="col", role="columnheader", class_=_kind(index, numeric)) for index, name in enumerate(headers)]
    body = []
    for first, *rest in rows:
        cells = [h("th", first, scope="row", role="rowheader", class_=_kind(0, numeric))]
        for index, value in enumerate(rest, 1):
            content = value if isinstance(value, Html) else h("span", value)
            cells.append(h("td", content, role="cell", class_=_kind(index, numeric), data_label=headers[index]))
        body.append(h("tr", *cells, role="row"))
    top = h("thead", h("tr", *head, role="row"), role="rowgroup")
    return h("table", top, h("tbody", *body, role="rowgroup"), role="table")


def _kind(index: int, numeric: set[int]) -> str | None:
    return "number" if index in numeric else None


def _verdict(held: bool) -> Html:
    return h("span", "held" if held else "missed", class_="good" if held else "bad")


def _db(value: Any, digits: int = 1) -> str:
    return NONE if value is None else f"{plain(f'{value:.{digits}f}')} dB"


def _ms(value: float | None) -> str:
    return NONE if value is None else f"{value:,.3g} ms" if value < 1000 else f"{value:,.0f} ms"
