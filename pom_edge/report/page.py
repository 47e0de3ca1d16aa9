"""A report as one HTML file: no script, no request, light and dark, readable on a phone and without a mouse."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.resources import files

from pom_edge.report import parts
from pom_edge.report.collect import GENERATOR, Report, labels
from pom_edge.report.markup import Html, element
from pom_edge.report.measured import tell_latency, tell_memory
from pom_edge.report.parity import tell_mixers, tell_parity, tell_ranges
from pom_edge.runtimes.bench import BenchRow
from pom_edge.system import human_bytes
from pom_edge.words import counted

h = element

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"  # whatever a name may hold, nothing is loaded or run
Tile = tuple[str, str, str]  # name, value, note

__all__ = ["render"]


def render(report: Report) -> str:
    """The page, complete in itself."""
    sections = {
        "summary": ("Summary", _summary),
        "parity": ("Parity", tell_parity),
        "mixers": ("Layers", tell_mixers),
        "latency": ("Latency", tell_latency),
        "memory": ("Memory", tell_memory),
        "ranges": ("Ranges", tell_ranges),
        "environment": ("Environment", _environment),
    }
    name = report.manifest.name
    links = [h("li", h("a", title, href=f"#{key}")) for key, (title, _) in sections.items()]
    style = Html((files("pom_edge.report") / "page.css").read_text(encoding="utf-8"))
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
        h(
            "footer",
            f"Made by pom-edge report, {parts.moment(report.created)}. One file, no script.",
        ),
    )
    return f"<!doctype html>\n{h('html', head, body, lang='en')}\n"


def _section(key: str, title: str, children: Iterable[Html | None]) -> Html:
    return h("section", h("h2", title, id=f"{key}-heading"), *children, id=key, aria_labelledby=f"{key}-heading", tabindex="-1")


def _subtitle(report: Report) -> str:
    model = report.manifest.model
    kind = model.get("class") or model.get("kind") or "model"
    forms = ", ".join(dict.fromkeys(artifact.form for artifact in report.artifacts)) or "no artifact"
    return f"{kind} ({forms}), exported {parts.moment(report.manifest.created)} by {report.manifest.producer}"


def _summary(report: Report) -> list[Html | None]:
    compared = [a for a in report.artifacts if a.parity]
    held = [a for a in compared if a.parity and a.parity.get("passed")]
    rest = len(report.artifacts) - len(held)
    verdict: list[object] = [
        h("span", f"{len(held)} of {counted(len(report.artifacts), 'artifact')}", class_="good" if held else "bad"),
        " held: PyTorch's answers within the gate of the precision, output by output and mixer by mixer.",
    ]
    if rest:
        verdict += [" ", h("span", f"{rest} {'was' if rest == 1 else 'were'} not compared", class_="bad"), ": see the table."]
    tests = [test for a in compared for test in (a.parity or {}).get("vacuity", [])]
    caught = sum(test["caught"] is True for test in tests)
    proof = None
    if caught:
        broken = "1 answer was" if caught == 1 else f"{caught:,} answers were"
        proof = (
            f"{broken} broken on purpose to prove that the gates can fail: {'it was' if caught == 1 else 'all were'} caught."
        )
    notes = _notes(report)
    return [
        h("p", *verdict, class_="verdict"),
        h("p", proof) if proof else None,
        _tiles(report),
        _artifacts(report),
        parts.details(f"Notes of the export ({len(notes)})", parts.facts(notes)) if notes else None,
    ]


def _notes(report: Report) -> list[tuple[str, str]]:
    """Each once, under what it is about: the artifacts that have it, or the bundle where all do."""
    names = labels(report.artifacts)
    about: dict[str, list[str]] = {}
    for artifact in report.artifacts:
        for note in dict.fromkeys(artifact.notes):
            about.setdefault(note, []).append(names[artifact.file])
    facts = [("Warning", text) for text in report.manifest.warnings]
    shared = len(report.artifacts) if len(report.artifacts) > 1 else 0
    return facts + [("Bundle" if len(whose) == shared else ", ".join(whose), note) for note, whose in about.items()]


def _artifacts(report: Report) -> Html:
    """One row for each; what is the same for all, or known of none, is no column."""
    forms, scored = len({a.form for a in report.artifacts}) > 1, any((a.parity or {}).get("metric") for a in report.artifacts)
    sizes = {entry.path: entry.bytes for entry in report.manifest.files}
    headers = ["artifact", "file", "form", "size", "output SNR", "worst mixer", "gate", "task metric", "ran in"]
    kept = [index for index in range(len(headers)) if (index != 2 or forms) and (index != 7 or scored)]
    rows = []
    for artifact in report.artifacts:
        parity = artifact.parity or {}
        own = [size for path, size in sizes.items() if path in artifact.files or path.startswith(f"{artifact.file}/")]
        worst, metric = parity.get("worst_mixer"), parity.get("metric")
        row = [
            labels(report.artifacts)[artifact.file],
            h("code", artifact.file),
            artifact.form,
            human_bytes(sum(own)),
            parts.db(parity.get("snr_db")),
            parts.db(worst["snr_db"] if worst else None),
            parts.db(parity.get("gate_db"), digits=0),
            f"{metric['artifact']:g} (PyTorch {metric['pytorch']:g})" if metric else parts.NONE,
            artifact.verified,
        ]
        rows.append([row[index] for index in kept])
    numeric = {new for new, old in enumerate(kept) if 3 <= old <= 7}
    return parts.table([headers[index] for index in kept], rows, numeric)


def _tiles(report: Report) -> Html | None:
    tiles = [tile for tile in (_closest(report), _metric(report), _fastest(report), _smallest(report)) if tile]
    made = [h("div", h("dt", name), h("dd", value), h("dd", note, class_="note")) for name, value, note in tiles]
    return h("dl", *made, class_="tiles") if made else None


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
    shown = f"{margin:.1f} dB" if margin >= 0.1 else "under 0.1 dB"
    return "Smallest margin to a gate", shown, f"{labels(report.artifacts)[artifact.file]}, {name}"


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
    return "Fastest artifact here", f"{parts.ms(row.median_ms)}", f"{labels(report.artifacts)[row.file]}, {_run(report, row)}"


def _smallest(report: Report) -> Tile | None:
    rows = [row for row in report.bench.rows if row.peak_bytes is not None] if report.bench is not None else []
    if not rows:
        return None
    longest = max(row.tokens for row in rows)
    row = min((r for r in rows if r.tokens == longest), key=lambda r: r.peak_bytes or 0)
    said = f"{labels(report.artifacts)[row.file]}, {_run(report, row)}, whole process"
    return "Least memory of an artifact", human_bytes(row.peak_bytes or 0), said


def _run(report: Report, row: BenchRow) -> str:
    length = "inputs of one size" if report.is_one_size(row.file) else counted(row.tokens, "token")
    return length if row.batch == 1 else f"{length}, batch {row.batch}"


def _environment(report: Report) -> list[Html | None]:
    manifest = report.manifest
    runtimes = sorted({a.verified for a in report.artifacts})
    config = manifest.model.get("config") or {k: v for k, v in manifest.model.items() if not isinstance(v, (dict, list))}
    here = [
        *report.machine.items(),
        *([] if report.bench is None else report.bench.settings["versions"].items()),
        ("threads", report.threads or "the runtime's own choice"),
        ("measured", parts.moment(report.created)),
    ]
    made = [("producer", manifest.producer), ("exported", parts.moment(manifest.created)), *manifest.tools.items()]
    made += [("published layout", manifest.published_layout)] if manifest.published_layout else []
    hashes = parts.table(
        ["file", "size", "sha256"],
        [[h("code", f.path), human_bytes(f.bytes), h("code", f.sha256)] for f in manifest.files],
        numeric={1},
    )
    settings = [(key, value) for key, value in sorted(config.items()) if value is not None]
    return [
        h("h3", "This report"),
        parts.facts(here),
        h("h3", "The export"),
        parts.facts([*made, ("checked in", "; ".join(runtimes))]),
        parts.details("Settings of the model", parts.facts(settings)) if settings else None,
        parts.details(f"Files and hashes ({len(manifest.files)})", hashes),
    ]
