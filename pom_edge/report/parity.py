"""The sections about exactness: stages, layers, ranges."""

from __future__ import annotations

from collections.abc import Mapping

from pom_edge.building import EAGER_GATE_DB
from pom_edge.bundle import Artifact
from pom_edge.report import parts
from pom_edge.report.collect import Report, labels
from pom_edge.report.figures import SHORT, SHOWN_MODULES, draw_mixers, draw_ranges, draw_waterfall, waterfall
from pom_edge.report.markup import Html, element
from pom_edge.words import counted

h = element

__all__ = ["tell_mixers", "tell_parity", "tell_ranges"]


def tell_parity(report: Report) -> list[Html | None]:
    figure = draw_waterfall(report)
    if figure is None:
        return [h("p", "The manifest records no comparison with PyTorch for any artifact.")]
    rows: list[list[object]] = [
        [name, SHORT.get(stage, stage), parts.db(snr_db), parts.db(gate_db, 0), parts.verdict(snr_db >= gate_db)]
        for name, _, stages in waterfall(report)
        for stage, (snr_db, gate_db) in stages.items()
    ]
    for artifact in report.artifacts:
        eager = (artifact.parity or {}).get("snr_db_eager")
        if eager is not None:
            about = [labels(report.artifacts)[artifact.file], "graph against the quantized PyTorch model"]
            rows.append([*about, parts.db(eager), parts.db(EAGER_GATE_DB, 0), parts.verdict(eager >= EAGER_GATE_DB)])
    count = len(report.manifest.golden)
    text = [
        h(
            "p",
            "The trained model in PyTorch (FP32) is the reference. Each bar is the worst value of a stage, over all outputs, "
            f"all mixers and {'the recorded case' if count == 1 else f'{count} recorded cases'}; a stage that misses its gate "
            "ends the export.",
        ),
        h(
            "p",
            "SNR is 10 log\u2081\u2080(\u03a3 ref\u00b2 / \u03a3 error\u00b2): 20 dB more is an error ten times smaller.",
            class_="quiet",
        ),
    ]
    return [
        parts.pair(text, figure),
        parts.details("Stages as a table", parts.table(["artifact", "stage", "SNR", "gate", "verdict"], rows, numeric={2, 3})),
    ]


def tell_mixers(report: Report) -> list[Html | None]:
    figure = draw_mixers(report)
    if figure is None:
        worst = [
            f"{labels(report.artifacts)[file]}: {found['name']}, {parts.db(found['snr_db'])}"
            for file, found in ((a.file, (a.parity or {}).get("worst_mixer")) for a in report.artifacts)
            if found
        ]
        said = f" The worst of each artifact: {'; '.join(worst)}." if worst else ""
        return [h("p", f"The manifest records no figure for each layer.{said}")]
    found = {a.file: a.parity["mixers"] for a in report.artifacts if a.parity and a.parity.get("mixers")}
    names = labels(report.artifacts)
    mixers = list(dict.fromkeys(name for values in found.values() for name in values))
    rows = [[h("code", mixer), *(parts.db(values.get(mixer)) for values in found.values())] for mixer in mixers]
    table = parts.table(["mixer", *(names[file] for file in found)], rows, numeric=set(range(1, len(found) + 1)))
    said = (
        "A residual network hides a dead mixer from its output, so every mixer's own output is held against PyTorch's. Each "
        "point is the worst value over the recorded cases; the dashed lines are the gates."
    )
    return [
        parts.pair([h("p", said)], figure),
        parts.details(f"{counted(len(mixers), 'mixer')} as a table", table),
        *(_quantized(artifact, names[artifact.file]) for artifact in report.artifacts if artifact.quantization),
    ]


def _quantized(artifact: Artifact, name: str) -> Html | None:
    found = artifact.quantization or {}
    if "layers" in found:
        kinds = {"gemm": "INT8", "weight": "INT8 weight", "float": "kept in float"}
        rows = [
            [h("code", r["layer"]), r["why"] or kinds.get(r["kind"], r["kind"]), parts.db(r["snr_db"])] for r in found["layers"]
        ]
        title = (
            f"{name}: what became of each layer, calibrated on {counted(found['samples'], 'sample')} ({found['calibration']})"
        )
    else:
        rows = [[h("code", r["name"]), f"{r['bits']} bits", parts.db(r["snr_db_alone"])] for r in found.get("weights", [])]
        rows += [[h("code", r), "kept in float", parts.NONE] for r in found.get("kept_float", [])]
        title = f"{name}: what became of each weight"
    return parts.details(title, parts.table(["layer", "kept as", "SNR if it alone"], rows, numeric={2})) if rows else None


def tell_ranges(report: Report) -> list[Html | None]:
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
                f"{proved} of {counted(len(rows), 'module')}; the others are observed on samples"
                if proved < len(rows)
                else "all modules",
            ),
            ("half precision", f"{ranges['half_nodes']} of {ranges['nodes']} floating-point nodes"),
            ("mixers kept in FP32", ", ".join(ranges.get("kept_fp32", [])) or "none"),
        ]
        table = parts.table(["module", "largest", "basis", "in FP32"], rows, numeric={1})
        made += [
            h("h3", name),
            parts.pair([h("p", f"Largest magnitude inside each module.{shown}"), parts.facts(facts)], figure),
            parts.details(f"{counted(len(rows), 'module')} as a table", table),
        ]
    return made


def _kept(fp32: Mapping[str, str]) -> str:
    reasons: dict[str, list[str]] = {}
    for operator, reason in fp32.items():
        reasons.setdefault(reason, []).append(operator)
    return "; ".join(f"{', '.join(operators)} ({reason})" for reason, operators in reasons.items()) or parts.NONE
