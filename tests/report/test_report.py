"""pom-edge report: the page says what manifest and benchmark say, harms nobody, and reads well in a real browser."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

from benchmarks.lockstep import Taken, rows
from pom_edge.bundle import MANIFEST, Bundle, seal
from pom_edge.cli import app
from pom_edge.models import ModelConfig, build_model
from pom_edge.pipeline import export_bundle
from pom_edge.report.collect import collect, labels
from pom_edge.report.markup import element
from pom_edge.report.page import render
from pom_edge.report.peers import read_peers
from tests.browser import CONTRAST, CUT, RUN_INTO, SMALLEST
from tests.bundles import make_bundle

PEERS = [
    {"what": what, "tokens": tokens, "ms": factor * tokens**power, "p90_ms": 2 * factor * tokens**power}
    for what, factor, power in (("GEMM", 0.004, 1), ("ours", 0.005, 1), ("attention", 1e-4, 2), ("torch eager", 0.02, 1))
    for tokens in (256, 1024, 4096, 8192, 16384)
]
HOSTILE = "<script>alert(1)</script>\"'&$x^2$ \u0007\u202e 多項式"


def _rated(**changed: object) -> str:
    """The JSON of one row with ratios, some of it changed; None: left out."""
    row: dict[str, object] = {"what": "ours", "tokens": 4, "ms": 1.0, "against": "ours", "ratio": 1.0}
    row |= {"ratio_middle_half": [1.0, 1.0], "cores": {"apart": {"rounds": 3, "ms": 1.0, "ratio": 1.0}}, **changed}
    return json.dumps([{key: value for key, value in row.items() if value is not None}])


class Reader(HTMLParser):
    """The text of a page, by section; its ids and its elements."""

    def __init__(self) -> None:
        super().__init__()
        self.sections: dict[str, str] = {"": ""}
        self.ids: Counter[str] = Counter()
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str]] = []
        self._section = ""

    @classmethod
    def of(cls, page: str) -> Reader:
        reader = cls()
        reader.feed(page)
        return reader

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        found = {name: value or "" for name, value in attrs}
        self.attributes += [(tag, name, value) for name, value in found.items()]
        if "id" in found:
            self.ids[found["id"]] += 1
        if tag == "section":
            self._section = found["id"]
            self.sections[self._section] = ""

    def handle_endtag(self, tag: str) -> None:
        if tag == "section":
            self._section = ""

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.sections[self._section] += f"{data.strip()} "


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every kind of stage: FP32, typed and rounded, quantized."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("report")
    model = build_model(ModelConfig(kind="encoder", dim=32, depth=2, input_dim=12, n_sel_heads=4))
    for name, parameter in model.named_parameters():
        if "po_coeff" in name:
            torch.nn.init.normal_(parameter)
    np.savez(folder / "calibration.npz", x=np.random.default_rng(0).standard_normal((8, 24, 12)).astype(np.float32))
    return export_bundle(
        model,
        precision=["fp32", "fp16", "int8"],
        calibration=str(folder / "calibration.npz"),
        example_inputs={"x": torch.randn(2, 24, 12)},
        out=folder / "m.pom",
    ).bundle


@pytest.fixture(scope="module")
def page(bundle: Path) -> Path:
    """Written by the command itself, measured here."""
    peers = bundle.parent / "peers.json"
    peers.write_text(json.dumps({"machine": {"processor": "a 9000"}, "rows": PEERS}))
    out = bundle.parent / "page.html"
    more = ("--tokens", "16,64", "--rounds", "2", "--budget", "1GiB", "--peers", peers)
    result = _run(bundle, "-o", out, *more)
    assert result.exit_code == 0, result.output
    assert result.stdout.strip() == str(out)
    return out


def _run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def test_every_section_says_what_the_manifest_says(bundle: Path, page: Path) -> None:
    manifest = json.loads((bundle / MANIFEST).read_text())
    said = Reader.of(page.read_text()).sections
    assert list(said) == ["", "summary", "parity", "mixers", "latency", "memory", "ranges", "environment"]
    assert "3 of 3 artifacts" in said["summary"] and "not compared" not in said["summary"]
    for artifact in manifest["artifacts"]:
        parity = artifact["parity"]
        assert artifact["file"] in said["summary"] and f"{parity['snr_db']:.1f} dB" in said["summary"]
        assert len(parity["stages"]) >= 2 and len(parity["mixers"]) == 2
        for snr_db in parity["stages"].values():
            assert f" {snr_db:.1f} dB " in said["parity"]
        assert f" {parity['gate_db']:.0f} dB " in said["parity"]
        for name, snr_db in parity["mixers"].items():
            assert name in said["mixers"] and f" {snr_db:.1f} dB " in said["mixers"]
    int8 = manifest["artifacts"][2]
    assert f"graph against the quantized PyTorch model {int8['parity']['snr_db_eager']:.1f} dB 40 dB held" in said["parity"]
    for row in int8["quantization"]["layers"]:
        assert row["layer"] in said["mixers"]
    for row in manifest["artifacts"][1]["ranges"]["modules"]:
        assert (row["module"] or "(model)") in said["ranges"] and f" {row['largest']:,.4g} " in said["ranges"]
    for entry in manifest["files"]:
        assert entry["sha256"] in said["environment"]
    for tool, number in manifest["tools"].items():
        assert tool in said["environment"] and number in said["environment"]


def test_what_was_measured_is_told(page: Path) -> None:
    said = Reader.of(page.read_text()).sections
    for name in ("FP32", "FP16", "INT8"):
        assert f"{name} : 4 times the tokens take" in said["latency"]
    assert "measured on processor a 9000" in said["latency"] and "Not measured there: published form" in said["latency"]
    assert "torch eager" in said["latency"] and "20.5 ms" in said["latency"]  # 0.005 ms a token, 4,096 of them
    assert "Budget 1.00 GiB for the whole process: held" in said["memory"] and "64 tokens" in said["memory"]


def test_ratios_within_rounds_are_told_and_count_more_than_medians(bundle: Path, tmp_path: Path) -> None:
    """The file that the benchmarks write, from times where the medians of two say the opposite of every round."""
    ours = [1.0, 1.0, 1.0, 2.0, 2.2, 2.4, 2.6]
    cores = ["together"] * 3 + ["apart"] * 4
    times = {"ours": ours, "GEMM": [t / 2 for t in ours], "published": [0.9, 0.9, 0.9, 1.9, 2.1, 2.3, 9.0]}
    found = {name: Taken([1e-3 * t for t in taken], taken, cores) for name, taken in times.items()}
    found["mine"] = Taken([1e-3 * t * (1.1 if t < 2 else 0.9) for t in ours], ours, cores)  # slower in 3 rounds, faster in 4
    made = rows(found, 256, "ours")
    made[2]["ms"] = 2.5  # as after a disturbed median: 2.0 is that of ours
    content = {"machine": "a 9000", "settings": {"d": 384, "repeats": [1, 3], "note": "<i>", "none": None}, "rows": made}
    (tmp_path / "peers.json").write_text(json.dumps(content))
    peers = read_peers(tmp_path / "peers.json")
    page = render(collect(bundle, measured=False, peers=peers))
    said = Reader.of(page).sections["latency"]
    assert " d 384 repeats 1, 3 note <i> Lines" in said and "none" not in peers.settings
    assert "What counts between two of them is the ratio of their times within a round" in said
    assert "At 256 tokens the medians are in the wrong order: within the rounds published form is faster than ours" in said
    assert said.count("wrong order") == 1 and len(peers.contradictions) == 1
    assert "256 unavoidable GEMM 1.00 ms" in said.replace("1 ms", "1.00 ms")
    assert " ours 0.50 0.50 to 0.50 0.50 (3 rounds) 0.50 (4 rounds)" in said
    assert " ours 0.90 0.90 to 1.10 1.10 (3 rounds) 0.90 (4 rounds)" in said
    assert "ratio, cores together ratio, cores apart" in said


def test_what_was_not_timed_is_on_the_page(tmp_path: Path) -> None:
    make_bundle(tmp_path / "a.pom")
    result = _run(tmp_path / "a.pom", "--rounds", "1", "--tokens", "64,100", "--json")
    assert result.exit_code == 0 and "note: parallel.fp32.onnx was not timed at 100 tokens: " in result.stderr
    (left_out,) = json.loads(result.stdout)["left_out"]
    assert (left_out["file"], left_out["tokens"]) == ("parallel.fp32.onnx", 100)
    said = Reader.of((tmp_path / "a.html").read_text()).sections
    assert "Left out: parallel.fp32.onnx was not timed at 100 tokens: " in said["latency"]
    assert "1 round after 1 round of warm-up, batch 1, threads of the runtime's own choice, onnxruntime " in said["latency"]
    assert f" onnxruntime {version('onnxruntime')} " in said["environment"]


def test_each_note_once_under_what_it_is_about(bundle: Path, tmp_path: Path) -> None:
    manifest = Bundle.open(bundle).manifest
    own = [["all", "two"], ["all", "two", "one"], ["all"]]
    artifacts = [a.model_copy(update={"notes": notes}) for a, notes in zip(manifest.artifacts, own, strict=True)]
    report = collect(bundle, measured=False)
    page = render(type(report)(**{**vars(report), "manifest": manifest.model_copy(update={"artifacts": artifacts})}))
    assert "Notes of the export (3) Bundle all FP32, FP16 two FP16 one " in Reader.of(page).sections["summary"]


def test_an_export_says_of_each_artifact_what_is_about_it(tmp_path: Path) -> None:
    """What became of w4's weights is no note of FP32."""
    model = build_model(ModelConfig(kind="encoder", dim=32, depth=1, input_dim=12, n_sel_heads=4))
    example = {"x": torch.randn(2, 24, 12)}
    report = export_bundle(model, precision=["fp32", "w4"], tokens=24, example_inputs=example, out=tmp_path / "m.pom")
    full, four = (artifact.notes for artifact in Bundle.open(report.bundle).manifest.artifacts)
    shared = "linear-cost: not applied, the graph has no free token axis"
    assert full == [shared] and four[0] == shared and four[1:] == [note for note in report.notes if note.startswith("w4: ")]
    assert len(four) > 1


def test_figures_are_drawn_in_the_colours_of_the_page_and_never_twice_alike(page: Path) -> None:
    reader = Reader.of(page.read_text())
    assert reader.tags["svg"] == 6 and reader.tags["style"] == 1  # stages, mixers, times, peers, memory, one range proof
    assert [name for name, count in reader.ids.items() if count > 1] == []
    drawn = " ".join(value for tag, name, value in reader.attributes if name == "style")
    assert "var(--ink)" in drawn and "var(--s1)" in drawn and "#" not in drawn.replace("url(#", "")
    targets = {value[1:] for _, name, value in reader.attributes if name == "href" and value.startswith("#")}
    targets |= set(re.findall(r"url\(#([^)]+)\)", " ".join(value for _, _, value in reader.attributes)))
    assert targets <= set(reader.ids)


def test_the_same_facts_make_the_same_page(bundle: Path) -> None:
    assert render(report := collect(bundle, measured=False)) == render(report)


def test_without_measuring_it_needs_neither_torch_nor_onnx_nor_a_runtime(bundle: Path, tmp_path: Path) -> None:
    out = tmp_path / "a.html"
    code = (
        "import sys; from pom_edge.cli import app\n"
        f"app(['report', {str(bundle)!r}, '--no-bench', '-o', {str(out)!r}], standalone_mode=False)\n"
        "print(sorted({'torch', 'onnx', 'onnxruntime'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert all(line.startswith("[") for line in done.stderr.splitlines())
    said = Reader.of(out.read_text()).sections
    assert "Not measured: the report was asked for without (--no-bench)." in said["latency"]
    assert "The published form and attention were not measured for this report." in said["latency"]
    assert "Predicted from the graph alone" in said["memory"] and "4,096" in said["memory"]


def test_memory_rows_are_those_of_the_prediction(bundle: Path) -> None:
    from pom_edge.runtimes.memory import predict_run

    report = collect(bundle, tokens=[32, 512], batch=3, measured=False)
    artifacts = Bundle.open(bundle).manifest.artifacts
    assert [(r.file, r.tokens) for r in report.memory] == [(a.file, n) for a in artifacts for n in (32, 512)]
    assert [(r.io, r.activations) for r in report.memory] == [predict_run(a, n, 3) for a in artifacts for n in (32, 512)]
    assert all(row.predicted is None for row in report.memory)  # runtime and weights are not known


def test_a_bundle_that_records_nothing(tmp_path: Path) -> None:
    """No parity, no plan of memory, lengths up to 64: every section says what is missing."""
    make_bundle(tmp_path / "tiny.pom")
    result = _run(tmp_path / "tiny.pom", "--rounds", "1")
    assert result.exit_code == 0, result.output
    assert all(line.startswith("[") for line in result.stderr.splitlines())  # steps: no library complains
    said = Reader.of((tmp_path / "tiny.html").read_text()).sections
    assert "0 of 1 artifact held" in said["summary"] and "1 was not compared" in said["summary"]
    assert "records no comparison" in said["parity"] and "no figure for each layer" in said["mixers"]
    assert " 64 " in said["latency"] and "256" not in said["latency"]
    assert "Not predicted: the memory of parallel.fp32.onnx cannot be predicted" in said["memory"]
    assert "no range had to be proved" in said["ranges"]


def test_inputs_of_one_size_and_engines(tmp_path: Path) -> None:
    """A batch and a length that are fixed need no option; what does not run here is said not to."""
    make_bundle(tmp_path / "a.pom")
    content = json.loads((tmp_path / "a.pom" / MANIFEST).read_text())
    (artifact,) = content["artifacts"]
    artifact["inputs"][0] |= {"shape": [2, 5, 6], "bounds": {}}
    artifact |= {"arena": [["+0 4*2*5*6"]], "verified": "test"}
    (tmp_path / "a.pom" / MANIFEST).write_text(seal(content))
    assert _run(tmp_path / "a.pom", "--rounds", "1").exit_code == 0
    said = Reader.of((tmp_path / "a.html").read_text()).sections
    assert (
        "inputs of one size, batch 2" in said["summary"] and " one size " in said["memory"] and " one size " in said["latency"]
    )
    artifact["verified"] = "built, not run"
    (tmp_path / "a.pom" / MANIFEST).write_text(seal(content))
    assert _run(tmp_path / "a.pom").exit_code == 0
    said = Reader.of((tmp_path / "a.html").read_text()).sections
    assert "no artifact of the bundle runs in ONNX Runtime" in said["latency"] and "built, not run" in said["summary"]


def test_names_are_text_whatever_they_hold(bundle: Path, tmp_path: Path) -> None:
    page = _hostile(bundle, tmp_path)
    reader = Reader.of(page)
    assert reader.tags["script"] == 0 and not [name for _, name, _ in reader.attributes if name.startswith("on")]
    shown = HOSTILE.replace("\u0007", "\N{REPLACEMENT CHARACTER}")
    assert all(shown in reader.sections[key] for key in ("", "summary", "parity", "mixers", "latency", "environment"))
    assert "\u0007" not in page


def _hostile(bundle: Path, folder: Path) -> str:
    """The page of a bundle whose names are chosen to do harm."""
    manifest = Bundle.open(bundle).manifest
    artifacts = []
    for artifact in manifest.artifacts:
        parity = dict(artifact.parity or {}, mixers={HOSTILE: 99.0, "b" * 200: 98.0})
        parity["worst_mixer"] = {"name": HOSTILE, "snr_db": 98.0}
        parity["stages"] = {**parity["stages"], HOSTILE: 97.0}
        artifacts.append(artifact.model_copy(update={"parity": parity, "notes": [HOSTILE], "verified": HOSTILE}))
    changed = manifest.model_copy(update={"name": HOSTILE, "artifacts": artifacts, "tools": {HOSTILE: HOSTILE}})
    (folder / "peers.json").write_text(json.dumps([{"what": HOSTILE, "tokens": 7, "ms": 1}]))
    report = collect(bundle, measured=False, peers=read_peers(folder / "peers.json"))
    return render(type(report)(**{**vars(report), "manifest": changed}))


def test_element_escapes_text_and_attributes() -> None:
    assert element("p", "<b>", element("i", "&"), None, 3, class_='"x"', hidden=True, id=None) == (
        '<p class="&quot;x&quot;" hidden>&lt;b&gt;<i>&amp;</i>3</p>'
    )


def test_labels_tell_artifacts_apart(bundle: Path) -> None:
    first, second, third = Bundle.open(bundle).manifest.artifacts
    assert list(labels([first, second, third]).values()) == ["FP32", "FP16", "INT8"]
    streamed = first.model_copy(update={"form": "streamed", "file": "streamed.fp32/pass-0.onnx"})
    assert list(labels([first, streamed]).values()) == ["FP32 parallel", "FP32 streamed"]
    twin = first.model_copy(update={"file": "twin.onnx"})
    assert list(labels([first, twin]).values()) == [first.file, "twin.onnx"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("{}", "holds no rows; expected"),
        ('{"rows": []}', "holds no rows; expected"),
        ('[{"what": "ours", "tokens": 4}]', "row 0 is"),
        ('[{"what": "ours", "tokens": 4, "ms": 1}, {"what": "", "tokens": 4, "ms": 1}]', "row 1 is"),
        ('[{"what": "ours", "tokens": true, "ms": 1}]', "row 0 is"),
        ('[{"what": "ours", "tokens": 4, "ms": NaN}]', "row 0 is"),
        ("[7]", "row 0 is 7; expected"),
        (f'[{{"what": "ours", "tokens": {10**400}, "ms": 1}}]', "row 0 is"),
        (f'[{{"what": "ours", "tokens": {10**24}, "ms": 1}}]', "row 0 is"),
        (f'[{{"what": "ours", "tokens": 4, "ms": {10**400}}}]', "numbers above 0 and below 1e15"),
        (_rated(ratio=10**400), "the ratios of row 0 are"),
        (json.dumps([{"what": "ours", "tokens": 4, "ms": 1}] * 501), "holds 501 rows; expected 500 at most"),
        (" " * (17 << 20), "has 17.0 MiB, too much"),
        (_rated(against=None), "the ratios of row 0 are"),
        (_rated(ratio=None), "the ratios of row 0 are"),
        (_rated(ratio=-1), "the ratios of row 0 are"),
        (_rated(ratio_middle_half=[2, 1]), "the ratios of row 0 are"),
        (_rated(ratio_middle_half=3), "the ratios of row 0 are"),
        (_rated(cores=[1]), "the ratios of row 0 are"),
        (_rated(cores={"apart": {"rounds": 3}}), "the ratios of row 0 are"),
        (_rated(cores={"apart": {"rounds": 1.5, "ms": 1, "ratio": 1}}), "the ratios of row 0 are"),
        ('{"settings": 3, "rows": [{"what": "ours", "tokens": 4, "ms": 1}]}', "settings is 3; expected an object"),
    ],
)
def test_a_wrong_file_of_peers_is_one_message(bundle: Path, tmp_path: Path, content: str, message: str) -> None:
    peers = tmp_path / "peers.json"
    peers.write_text(content)
    result = _run(bundle, "--no-bench", "--peers", peers, "-o", tmp_path / "a.html")
    assert result.exit_code == 2 and result.stderr.count("error: ") == 1 and message in result.stderr
    assert not (tmp_path / "a.html").exists()


@pytest.mark.parametrize("option", ["--tokens", "--batch", "--rounds", "--threads"])
def test_a_report_that_measures_nothing_takes_no_options_of_measuring(bundle: Path, tmp_path: Path, option: str) -> None:
    result = _run(bundle, "--no-bench", option, "8", "-o", tmp_path / "a.html")
    assert result.exit_code == 2 and "--no-bench measures nothing: leave --tokens" in result.stderr


def test_peers_from_a_pipe_are_refused_not_waited_for(bundle: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    result = _run(bundle, "--no-bench", "--peers", tmp_path / "pipe", "-o", tmp_path / "a.html")
    assert result.exit_code == 2 and "pipe is not a file; expected" in result.stderr


def test_peers_are_read_leniently(tmp_path: Path) -> None:
    rows = [{"what": "GEMM", "tokens": 8, "median_ms": 2, "extra": []}, {"what": "ours", "tokens": 8, "ms": 3, "p90_ms": None}]
    (tmp_path / "peers.json").write_text(json.dumps(rows))
    peers = read_peers(tmp_path / "peers.json")
    assert peers.names == ["ours", "gemm"] and peers.ms("gemm") == {8: 2.0} and peers.machine == ""


def test_bad_places_and_bad_numbers(bundle: Path, tmp_path: Path) -> None:
    thesis = tmp_path / "thesis.html"
    thesis.write_text("<title>thesis</title>")
    beside = bundle.with_suffix(".html")
    for arguments, message in [
        (("-o", tmp_path), "is a folder; expected the name of a file"),
        (
            ("-o", bundle / "a.html"),
            f"lies inside a bundle, whose files are hashed; expected a file outside, for example {beside}",
        ),
        (("-o", bundle), f"is a bundle, whose files are hashed; expected a file outside, for example {beside}"),
        (("-o", "/proc/a.html"), "the system makes no file there" if Path("/proc").is_dir() else "does not exist; create it"),
        (("-o", thesis), "exists and is not a report of pom-edge"),
        (("-o", tmp_path / "no" / "a.html"), "does not exist; create it first"),
        (("-o", tmp_path / "a.html", "--tokens", "ten"), "--tokens holds 'ten'"),
        (("-o", tmp_path / "a.html", "--tokens", "64,"), "a comma with nothing after it"),
        (("-o", tmp_path / "a.html", "--tokens", "0"), "expected at least 1 of each"),
        (("-o", tmp_path / "a.html", "--budget", "much"), "--budget is 'much'"),
        (("-o", tmp_path / "a.html", "--peers", tmp_path / "none.json"), "cannot be read"),
    ]:
        result = _run(bundle, *arguments)
        assert result.exit_code == 2 and message in result.stderr, (arguments, result.output)
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.html"]
    assert thesis.read_text() == "<title>thesis</title>"


def test_a_full_disk_leaves_the_previous_report(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "a.html"
    assert _run(bundle, "--no-bench", "-o", out).exit_code == 0
    before = out.read_bytes()

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("pom_edge.exchange.os.fsync", full)
    result = _run(bundle, "--no-bench", "-o", out)
    assert result.exit_code == 2 and "the disk is full" in result.stderr
    assert out.read_bytes() == before and [file.name for file in tmp_path.iterdir()] == ["a.html"]


def test_without_matplotlib_it_says_what_to_install(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = _run(bundle, "-o", tmp_path / "a.html")
    assert result.exit_code == 2 and "pip install 'pom-edge[report]'" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_json(bundle: Path, tmp_path: Path) -> None:
    result = _run(bundle, "--no-bench", "-o", tmp_path / "a.html", "--json")
    assert json.loads(result.stdout) == {
        "report": str(tmp_path / "a.html"), "bytes": (tmp_path / "a.html").stat().st_size, "measured": False, "left_out": []
    }  # fmt: skip


def test_it_fits_and_can_be_read(view: Any, page: Path, tmp_path: Path) -> None:
    view.goto(page.as_uri())
    dark = view.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
    paper = view.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", paper))) < 200) == dark
    for opened in (False, True):
        view.evaluate(f"document.querySelectorAll('details').forEach(d => d.open = {str(opened).lower()})")
        widest = "Math.max(...[...document.querySelectorAll('body *')].map(e => e.getBoundingClientRect().right))"
        assert view.evaluate("document.documentElement.scrollWidth") <= view.viewport_size["width"]
        assert view.evaluate(widest) <= view.viewport_size["width"] + 1
    measured = view.evaluate(CONTRAST)
    texts, marks = ([item for item in measured if item["kind"] == kind] for kind in ("text", "mark"))
    assert len(texts) > 200 and len(marks) > 20
    assert [item for item in texts if item["ratio"] < 4.5] == []  # WCAG 2.2, 1.4.3
    assert [item for item in marks if item["ratio"] < 3] == []  # 1.4.11
    boxes = view.evaluate(
        "[...document.querySelectorAll('svg')].map(s => s.getBoundingClientRect()).map(b => [b.width, b.height])"
    )
    assert all(width >= 320 and height >= 60 for width, height in boxes)
    assert view.evaluate(SMALLEST) >= 12  # pixels of the page
    assert view.evaluate(RUN_INTO) == []
    assert view.evaluate(CUT) == []
    view.screenshot(path=tmp_path / "page.png", full_page=True)


def test_bars_of_one_length_can_be_read(view: Any, bundle: Path, tmp_path: Path) -> None:
    """Figures beside bars, and names that are long."""
    renamed = Bundle.open(bundle).manifest
    names = {a.file: f"{a.file}-of-a-name-that-is-long" for a in renamed.artifacts}
    report = collect(bundle, [16], rounds=1, budget=1 << 26)
    assert report.bench is not None
    modules = [
        {"module": f"blocks.{i}.mixer.pom_mean.of_a_long_name", "largest": 23.0 * 3.7**i, "basis": "proved", "fp32": {}}
        for i in range(6)
    ]  # beside such names a scale that reaches from 23 to 65,504 has little room
    artifacts = [
        a.model_copy(
            update={"file": names[a.file], "precision": "fp16", "ranges": a.ranges and a.ranges | {"modules": modules}}
        )
        for a in renamed.artifacts
    ]
    bench = dataclasses.replace(report.bench, rows=[dataclasses.replace(r, file=names[r.file]) for r in report.bench.rows])
    memory = [dataclasses.replace(row, file=names[row.file]) for row in report.memory]
    changed = dataclasses.replace(
        report, manifest=renamed.model_copy(update={"artifacts": artifacts}), bench=bench, memory=memory
    )
    for number, each in enumerate((report, changed)):
        (tmp_path / f"{number}.html").write_text(render(each), encoding="utf-8")
        view.goto((tmp_path / f"{number}.html").as_uri())
        assert view.evaluate(SMALLEST) >= 12
        assert view.evaluate(RUN_INTO) == [] and view.evaluate(CUT) == []


def test_it_is_used_without_a_mouse(view: Any, page: Path) -> None:
    view.goto(page.as_uri())
    focused = """(e => e === document.body ? null :
        [e.tagName, e.textContent.trim(), getComputedStyle(e).outlineStyle])(document.activeElement)"""
    order = []
    view.keyboard.press("Tab")
    assert view.evaluate("document.activeElement.getBoundingClientRect().left") >= 0  # the skip link comes into view
    while (stop := view.evaluate(focused)) is not None and len(order) < 60:
        order.append(stop)
        view.keyboard.press("Tab")
    assert order[0][:2] == ["A", "Skip to the content"]
    names = ["Summary", "Parity", "Layers", "Latency", "Memory", "Ranges", "Environment"]
    assert [text for tag, text, _ in order[1:8]] == names
    assert [text for tag, text, _ in order[8:]] == view.evaluate(
        "[...document.querySelectorAll('summary')].map(s => s.textContent.trim())"
    )
    assert {outline for *_, outline in order} == {"solid"}
    view.evaluate("document.querySelector('summary').focus()")
    view.keyboard.press("Enter")
    assert view.evaluate("document.querySelector('details').open")
    view.evaluate("document.querySelector('.skip').focus()")
    view.keyboard.press("Enter")
    assert view.evaluate("document.activeElement.id") == "summary"


def test_hostile_names_do_nothing_in_it(view: Any, bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(_hostile(bundle, tmp_path), encoding="utf-8")
    view.goto((tmp_path / "a.html").as_uri())
    view.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert view.evaluate("document.documentElement.scrollWidth") <= view.viewport_size["width"]
    assert "<script>alert(1)</script>" in view.inner_text("h1")
