"""Core ML packages: the model in FP32 and FP16, finite where a naive conversion is not, under a gate that notices faults."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from pom_edge.bundle import Bundle
from pom_edge.cli import app
from pom_edge.coreml import fix_axes, known_target
from pom_edge.errors import BundleError, GateError, InputError
from pom_edge.export import forms
from pom_edge.export.coreml_package import Islands, convert, deployment_target, save_package
from pom_edge.export.golden import golden_cases, record
from pom_edge.export.inputs import Extent
from pom_edge.export.made import Single
from pom_edge.export.onnx_graph import trace_graph
from pom_edge.export.typed import look, typed
from pom_edge.gates import against, hold_stage
from pom_edge.mixer import PoM
from pom_edge.models import ModelConfig, build_model
from pom_edge.pipeline import ExportOptions, export_bundle
from pom_edge.runtimes import open_session
from pom_edge.runtimes.coreml_session import EVALUATED, open_package
from pom_edge.runtimes.mil_program import WEIGHTS, MilProgram, model_file
from pom_edge.runtimes.parity import GATES_DB, measure
from tests.golden import PARALLEL, read
from tests.mixers import build, lively, tensors

pytest.importorskip("coremltools", reason="needs pip install 'pom-edge[coreml]'")
pytestmark = pytest.mark.slow

ONE = Extent(1, 1, 1)
# every mode, degrees 1 to 6, grouped and not, with and without selection heads, all three kinds of positions
SAMPLE = [
    "001-rope2d-padding-d2-k2-g4-h4",
    "002-rope1d-cross-d2-k4-g4-h2",
    "003-rope1d-causal-d5-k2-g1-h8",
    "004-rope1d-none-d4-k3-g2-h8",
    "006-pom-causal-d3-k2-g4-h1",
    "008-rope2d-causal-d1-k4-g1-h8",
    "013-pom-cross_mask-d5-k4-g1-h4",
    "016-rope1d-none-d6-k2-g2-h0",
    "020-pom-cross-d3-k1-g2-h8",
    "029-rope2d-padding-d1-k3-g4-h0",
    "035-pom-causal-d6-k1-g2-h4",
    "042-pom-none-d6-k4-g1-h4",
]


def _made(model: torch.nn.Module, example: dict[str, torch.Tensor], batch: Extent = ONE) -> Single:
    tokens = next(iter(example.values())).shape[1]
    fixed = Extent(tokens, tokens, tokens)
    plan = forms.parallel(model.eval(), example, batch, fixed)
    fix_axes(plan, example)
    return Single(plan, trace_graph(plan.model, plan.mixers, plan.example, plan.axes), batch, fixed)


def _islands(made: Single) -> Islands:
    cases, _ = record(golden_cases(made.plan.example, made.plan.axes, Extent(), Extent(), None), made.plan.reference)
    half, _ = typed(made, "fp16", look(made, cases, None))
    return Islands.of(half.graphs[0])


class Everything(Islands):
    """What a naive conversion does: all of it in FP16."""

    def half(self, path: str, operator: str) -> bool:
        return True


@pytest.mark.parametrize("name", SAMPLE)
def test_recording_survives_the_conversion(name: str, tmp_path: Path) -> None:
    case = read(name).case
    mask = "causal" if case.causal else "none"
    model = forms.LayerModel(build(case), mask).eval()
    example = {
        key: value.float() if key == "mask" else value
        for key, value in sorted(tensors(case).items(), key=lambda i: i[0] != "x")
    }
    rows = next(iter(example.values())).shape[0]
    made = _made(model, example, Extent(rows, rows, rows))
    (traced,) = made.traced_graphs
    for precision, islands in (("fp32", None), ("fp16", _islands(made))):
        path = tmp_path / f"{precision}.mlpackage"
        taps = save_package(convert(traced, islands), path, {})
        found = open_package(path, {"y": "y", **taps})({key: value.numpy() for key, value in example.items()})
        for value in found.values():
            assert measure(read(name).y, value).passes(GATES_DB[precision]), (precision, measure(read(name).y, value))


@pytest.mark.parametrize(("causal", "tokens", "scale"), [(False, 65536, 4.0), (True, 65536, 0.3), (True, 4096, 0.3)])
def test_fp16_is_finite_where_a_naive_conversion_is_not(causal: bool, tokens: int, scale: float, tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer = PoM(8, 6, 2)
    torch.nn.init.normal_(layer.po_coeff, std=scale)
    with torch.no_grad():
        layer.projection()[0].mul_(8)
    made = _made(forms.LayerModel(layer, "causal" if causal else "none"), {"x": torch.randn(1, tokens, 8)})
    x = torch.randn(1, tokens, 8, generator=torch.Generator().manual_seed(1))
    truth = made.plan.reference.run({"x": x.numpy()})[0]["y"]
    metrics = {}
    for kind, islands in (("naive", Everything()), ("islands", _islands(made))):
        save_package(convert(made.traced_graphs[0], islands), tmp_path / f"{kind}.mlpackage", {})
        metrics[kind] = measure(truth, MilProgram(tmp_path / f"{kind}.mlpackage").run({"x": x.numpy()})["y"])
    assert metrics["islands"].passes(GATES_DB["fp16"]), metrics
    assert metrics["naive"].nonfinite or metrics["naive"].snr_db < 0, metrics
    assert MilProgram(tmp_path / "islands.mlpackage").half_operations > 0


@pytest.fixture(scope="module")
def encoder() -> Single:
    torch.manual_seed(0)
    model = build_model(ModelConfig(kind="encoder", dim=32, depth=2, input_dim=12, n_sel_heads=4))
    for module in model.modules():
        if isinstance(module, PoM):
            lively(module)
    mask = torch.ones(1, 20)
    mask[0, 13:] = 0
    return _made(model, {"x": torch.randn(1, 20, 12), "mask": mask})


def _hold(made: Single, path: Path, taps: dict[str, str]) -> None:
    """The gate on outputs and mixers, as an export holds it."""
    example = {name: tensor.numpy() for name, tensor in made.plan.example.items()}
    example["mask"] = (np.arange(20) < 13).astype(np.float32)[None]
    from pom_edge.export.golden import Case

    cases, _ = record([Case("example", "random", "x", example)], made.plan.reference)
    stage = against(cases, made.plan, open_package(path, {"y": "y", **taps}))
    hold_stage("coreml", stage, GATES_DB["fp32"], made.plan, ["y"])


def _edit(path: Path, change: Any) -> None:
    from coremltools.proto import Model_pb2

    spec = Model_pb2.Model()
    spec.ParseFromString(model_file(path).read_bytes())
    (block,) = spec.mlProgram.functions["main"].block_specializations.values()
    change(block)
    model_file(path).write_bytes(spec.SerializeToString())


@pytest.mark.parametrize("fault", ["none", "weight", "operand", "mask"])
def test_a_planted_fault_is_caught(fault: str, encoder: Single, tmp_path: Path) -> None:
    path = tmp_path / "a.mlpackage"
    taps = save_package(convert(encoder.traced_graphs[0], None), path, {"form": "parallel"})
    if fault == "none":
        _hold(encoder, path, taps)
        return
    if fault == "weight":
        file = path / WEIGHTS / "weight.bin"
        data = bytearray(file.read_bytes())
        middle = len(data) // 2 // 4 * 4
        data[middle : middle + 4] = np.float32(3.0).tobytes()
        file.write_bytes(bytes(data))
    elif fault == "operand":

        def swap(block: Any) -> None:
            operation = next(each for each in block.operations if each.type == "sub" or each.type == "real_div")
            x, y = operation.inputs["x"].arguments[0].name, operation.inputs["y"].arguments[0].name
            operation.inputs["x"].arguments[0].name, operation.inputs["y"].arguments[0].name = y, x

        _edit(path, swap)
    else:

        def drop(block: Any) -> None:
            """Features instead of features times mask."""
            made = {out.name: each for each in block.operations for out in each.outputs}
            for each in block.operations:
                if each.type == "reduce_sum":
                    product = made[each.inputs["x"].arguments[0].name]
                    if product.type == "mul":
                        each.inputs["x"].arguments[0].name = product.inputs["x"].arguments[0].name
                        return
            raise AssertionError("no masked sum")

        _edit(path, drop)
    with pytest.raises(GateError, match="the Core ML program is not the model"):
        _hold(encoder, path, taps)


def test_the_same_model_gives_the_same_bytes(encoder: Single, tmp_path: Path) -> None:
    contents = []
    for name in ("a", "b"):
        path = tmp_path / f"{name}.mlpackage"
        save_package(convert(encoder.traced_graphs[0], Islands()), path, {"producer": "pom-edge", "version": "1"})
        contents.append({file.relative_to(path): file.read_bytes() for file in path.rglob("*") if file.is_file()})
    assert contents[0].keys() == contents[1].keys()
    assert contents[0] == contents[1]


@pytest.mark.parametrize(
    ("precision", "target", "fewest_db"),
    [
        ("w8", "iOS17", 40),
        ("w4", "iOS18", 20),
        ("p8", "iOS16", 40),
        ("p8", "iOS18", 40),
        ("p6", "iOS16", 28),
        ("p4", "iOS18", 16),
    ],
)
def test_weights_as_integers(precision: str, target: str, fewest_db: float, encoder: Single, tmp_path: Path) -> None:
    from pom_edge.export.coreml_weights import compress

    shares = {"w8": 0.8, "p8": 0.8, "p6": 0.65, "w4": 0.65, "p4": 0.45}
    sizes, taps = {}, {}
    for name in ("fp16", precision):
        package = convert(encoder.traced_graphs[0], Islands(), target)
        if name == precision:
            package = compress(package, precision)
        taps = save_package(package, tmp_path / f"{name}.mlpackage", {})
        sizes[name] = (tmp_path / f"{name}.mlpackage" / WEIGHTS / "weight.bin").stat().st_size
    example = {name: tensor.numpy() for name, tensor in encoder.plan.example.items()}
    truth, mixers = encoder.plan.reference.run(example)
    found = open_package(tmp_path / f"{precision}.mlpackage", {"y": "y", **taps})(example)
    assert sizes[precision] < shares[precision] * sizes["fp16"]
    assert any(name.startswith("constexpr") for name in MilProgram(tmp_path / f"{precision}.mlpackage").counts)
    for name, value in {**truth, **mixers}.items():
        assert fewest_db - 5 <= measure(value, found[name]).snr_db < 60, name


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("coreml") / "digits.pom"
    from typer.testing import CliRunner

    result = CliRunner().invoke(
        app, ["export", "demos/digits/model.pt", "--target", "coreml", "--out", str(out), "--json"], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    (artifact,) = report["artifacts"]
    assert artifact["target"] == "coreml" and artifact["precision"] == "fp16" and artifact["verified"] == EVALUATED
    assert artifact["parity"]["snr_db"] >= 45 and artifact["parity"]["worst_mixer"]["snr_db"] >= 45
    assert "Warning" not in result.stderr and "Converting" not in result.stderr
    return out


def test_digits_bundle_opens_and_checks(digits: Path) -> None:
    (artifact,) = Bundle.open(digits).manifest.artifacts
    assert artifact.file == "parallel.fp16.mlpackage" and artifact.opset is None
    assert artifact.census["float16"] > 0.9 and artifact.ranges is not None and 0.5 < artifact.ranges["half_share"] < 1
    assert {path.rpartition("/")[2] for path in artifact.files} == {"Manifest.json", "model.mlmodel", "weight.bin"}
    with open_session(digits) as session:
        assert "not run on a device" in session.runtime and session.check().passed
        x = np.random.default_rng(0).standard_normal((3, 1, 28, 28)).astype(np.float32)
        both = session.run(x)
        assert isinstance(both, np.ndarray) and both.shape == (3, 10)
        np.testing.assert_array_equal(both[1:2], session.run(x[1:2]))


def test_what_only_graphs_have_is_refused_and_a_run_is_called_evaluated(digits: Path, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    def told(*arguments: str) -> str:
        result = CliRunner().invoke(app, [*arguments], catch_exceptions=False)
        return f"{result.exit_code} {result.stdout}{result.stderr}"

    assert "holds no ONNX graph, and memory is known for these" in (said := told("memory", str(digits))) and said[0] == "2"
    assert (
        f"holds nothing that is timed with --runtime ort; it holds parallel.fp16.mlpackage (--runtime coreml, {EVALUATED})"
        in " ".join(told("bench", str(digits)).split())
    )
    np.save(tmp_path / "x.npy", np.zeros((1, 1, 28, 28), np.float32))
    assert EVALUATED in told("run", str(digits), "--input", str(tmp_path / "x.npy"), "--output", str(tmp_path / "y.npy"))


def test_layers_are_checked_inside_the_package(digits: Path) -> None:
    from pom_edge.runtimes.layers import first_divergence

    bundle = Bundle.open(digits)
    (artifact,) = bundle.manifest.artifacts
    layers = first_divergence(bundle, artifact)
    assert list(layers) == [f"blocks.{i}.mixer" for i in range(4)]
    assert all(metrics.snr_db >= 45 for metrics in layers.values())


def test_a_changed_package_does_not_open(digits: Path, tmp_path: Path) -> None:
    import shutil

    copy = Path(shutil.copytree(digits, tmp_path / "digits.pom"))
    (copy / "parallel.fp16.mlpackage" / WEIGHTS / "weight.bin").unlink()
    with pytest.raises(BundleError, match=r"weight\.bin is missing"):
        open_session(copy)


def test_a_strange_file_in_a_package_is_refused(digits: Path, tmp_path: Path) -> None:
    import shutil

    copy = Path(shutil.copytree(digits, tmp_path / "digits.pom"))
    package = copy / "parallel.fp16.mlpackage"
    for left in (package / ".DS_Store", package / "Data" / "._weights", package / "model.mlmodelc" / "weights" / "0.bin"):
        left.parent.mkdir(parents=True, exist_ok=True)
        left.write_bytes(b"macOS")
    Bundle.open(copy)
    (package / WEIGHTS / "other.bin").write_bytes(b"")
    result = CliRunner().invoke(app, ["check", str(copy)])
    assert result.exit_code == 2 and "weights/other.bin is not of the export" in " ".join(result.stderr.split())


@pytest.mark.parametrize("stateful", [False, True])
def test_text_steps_with_state(stateful: bool, tmp_path: Path) -> None:
    """8192 tokens, one by one: the state neither drifts in FP32 nor as a pair of FP16 numbers."""
    torch.manual_seed(0)
    model = build_model(ModelConfig(kind="lm", dim=16, depth=1, vocab_size=40, n_sel_heads=4, rotary="1d"))
    example = {"x": torch.randint(0, 40, (1, 24))}
    target = "iOS18" if stateful else "iOS17"
    report = export_bundle(
        model,
        "coreml",
        form="recurrent",
        stateful=stateful,
        deployment_target=target,
        example_inputs=example,
        out=tmp_path / "text.pom",
    )
    (artifact,) = Bundle.open(report.bundle).manifest.artifacts
    kinds = {spec.name: spec.dtype for spec in artifact.inputs}
    assert kinds["x"] == kinds["state.count"] == "int32"
    assert kinds["state.0.mean_high" if stateful else "state.0.mean"] == ("float16" if stateful else "float32")
    tokens = np.random.default_rng(0).integers(0, 40, (1, 8192))
    with torch.no_grad():
        truth = model.eval()(torch.from_numpy(tokens)).numpy()
    with open_session(report) as session:
        found = np.concatenate([session.step(tokens[:, i : i + 1]) for i in range(8192)], axis=1)
    assert measure(truth[:, -256:], found[:, -256:]).snr_db >= 45


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precisions": ("bf16",)}, "Core ML has no BF16"),
        ({"deployment_target": "iOS12"}, "--minimum-deployment-target is 'iOS12'"),
        ({"precisions": ("w8a8",), "deployment_target": "iOS16"}, "--precision w8a8 needs iOS17"),
        ({"precisions": ("w4",)}, "needs iOS18"),
        ({"form": "recurrent", "tokens": "1:8:64"}, "has one length on Core ML"),
        (
            {"form": "recurrent", "stateful": True},
            "does not go with --minimum-deployment-target iOS17, the default: give iOS18 or macOS15. W",
        ),
        (
            {"stateful": True, "deployment_target": "macos15"},
            "does not go with --form parallel, which has no state: give [^;]*$",
        ),
        (
            {"stateful": True, "precisions": ("w8a8",), "batch": "1:2:3"},
            "--form parallel.*nor with --minimum-d.*nor with --precision w8a8.*nor with --batch 1:2:3, a range",
        ),
        ({"memory_budget": 1 << 30, "tokens": 8}, "--memory-budget is for ONNX Runtime"),
    ],
)
def test_what_core_ml_does_not_have_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ExportOptions(targets=("coreml",), **options).check()


def test_targets_are_known_in_any_case() -> None:
    for text, known in (("ios18", "iOS18"), ("MACOS13", "macOS13"), (None, "iOS17")):
        assert known_target(ExportOptions(targets=("coreml",), deployment_target=text)) == known


def test_a_mac_says_macos() -> None:
    assert deployment_target("macOS15") == "iOS18"
    assert Counter(PARALLEL) >= Counter(SAMPLE)
