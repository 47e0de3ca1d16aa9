"""From model to bundle in Python: gates that hold, and broken graphs that do not get past them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

import pom_edge
from pom_edge.bundle import MANIFEST, Bundle
from pom_edge.errors import GateError, InputError
from pom_edge.export import forms, lowering, made, onnx_graph
from pom_edge.mixer import PoM
from pom_edge.models import ModelConfig, build_model
from pom_edge.pipeline import ExportOptions, export_bundle
from pom_edge.runtimes import check_bundle, open_session
from tests.core.published_standin import PoM as PublishedPoM

CONFIG = ModelConfig(kind="encoder", dim=16, depth=4, input_dim=6, n_sel_heads=2)


@pytest.fixture
def fresh() -> nn.Module:
    torch.manual_seed(0)
    return build_model(CONFIG)


def test_a_fresh_model_passes_and_every_mixer_is_judged(encoder_pom: Path) -> None:
    artifact = Bundle.open(encoder_pom).manifest.artifacts[0]
    assert artifact.parity is not None and artifact.parity["passed"]
    assert list(artifact.mixers) == [f"blocks.{i}.mixer" for i in range(4)]
    tests = {entry["test"]: entry["caught"] for entry in artifact.parity["vacuity"]}
    assert all(tests[f"zeroed mixer blocks.{i}.mixer"] is True for i in range(4))
    assert tests["zeroed y"] is True and tests["permuted y (tokens)"] is True
    assert artifact.parity["stages"].keys() == {"lowered", "onnx"}
    assert artifact.census == {
        "float": pytest.approx(1, abs=0.05),
        **{k: v for k, v in artifact.census.items() if k != "float"},
    }


def test_the_bundle_checks_itself_layer_by_layer(encoder_pom: Path) -> None:
    report = check_bundle(encoder_pom, layers=True)
    assert report.passed and len(report.artifacts[0].layers) == 4
    assert len(report.artifacts[0].cases) >= 3  # several batch sizes and lengths


def test_any_length_and_batch_and_any_kind_of_mask(encoder_pom: Path) -> None:
    x = np.random.default_rng(0).standard_normal((3, 41, 12)).astype(np.float32)
    mask = np.arange(41) < np.array([[41], [20], [7]])
    with open_session(encoder_pom) as session:
        y = session.run(x, mask=mask)
        assert y.shape[:2] == (3, 41)
        assert np.array_equal(y, session.run(x, mask=mask.astype(np.int64)))
        changed = x.copy()
        changed[2, 7:] = 0  # padded tokens are not seen by the others
        assert np.allclose(session.run(changed, mask=mask)[2, :7], y[2, :7], atol=1e-6)


@pytest.mark.parametrize("block", [0, 3])
def test_a_dead_mixer_in_the_lowered_model(
    fresh: nn.Module, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the output of a fresh residual model a dead mixer is nearly invisible; at its own output it is 0 dB."""
    true = lowering.lower

    def broken(model: nn.Module) -> tuple[nn.Module, list[str]]:
        lowered, names = true(model)
        lowered.get_submodule(f"blocks.{block}.mixer").ag_weight.zero_()  # type: ignore[operator,union-attr]
        return lowered, names

    monkeypatch.setattr(forms, "lower", broken)
    with pytest.raises(GateError, match=rf"mixer blocks\.{block}\.mixer 0\.0 dB.*First stage that differs: lowered"):
        export_bundle(fresh, out=tmp_path / "a.pom")
    assert list(tmp_path.iterdir()) == []


def _corrupt(change: Callable[[onnx.ModelProto], None]) -> Callable[..., list[str]]:
    true = onnx_graph.save_graph

    def save(model: Any, path: Path, metadata: dict[str, str]) -> list[str]:
        files = true(model, path, metadata)
        proto = onnx.load(str(path))
        change(proto)
        onnx.save(proto, str(path))
        return files

    return save


def _other_slope(proto: onnx.ModelProto) -> None:
    node = next(n for n in proto.graph.node if n.name == "blocks.1.mixer/LeakyRelu_0")
    node.attribute[0].f = 0.02


def _wrong_weight(proto: onnx.ModelProto) -> None:
    weight = next(w for w in proto.graph.initializer if "blocks.2.mixer" in w.name and len(w.dims) == 2)
    values = onnx.numpy_helper.to_array(weight).copy()
    values[0] *= 1.5
    weight.CopyFrom(onnx.numpy_helper.from_array(values, weight.name))


@pytest.mark.parametrize("change", [_wrong_weight, _other_slope])
def test_a_broken_graph(
    fresh: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[onnx.ModelProto], None]
) -> None:
    monkeypatch.setattr(made, "save_graph", _corrupt(change))
    with pytest.raises(GateError, match="the ONNX graph in ONNX Runtime is not the model: .*First stage that differs: onnx"):
        export_bundle(fresh, out=tmp_path / "a.pom")
    assert list(tmp_path.iterdir()) == []


class _Mute(nn.Module):
    """A model whose output does not depend on its mixer: no gate on it means anything."""

    def __init__(self) -> None:
        super().__init__()
        self.mixer = PoM(8, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ones_like(x) + 0 * self.mixer(x)


def test_a_gate_that_cannot_fail_is_refused(tmp_path: Path) -> None:
    model = _Mute()
    model.mixer.ag_proj.weight.data.zero_()
    report = export_bundle(model, example_inputs={"x": torch.randn(2, 9, 8)}, out=tmp_path / "a.pom")
    vacuity = {entry["test"]: entry for entry in (report.artifacts[0].parity or {})["vacuity"]}
    assert vacuity["zeroed mixer mixer"]["caught"] is None, "said, not passed: its output is zero already"
    assert vacuity["permuted y (tokens)"]["caught"] is None


class _Published(nn.Module):
    """A user's model around the published class, with attention beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = PublishedPoM(16, degree=3, expand=2, n_groups=1, n_sel_heads=4)
        self.attend = nn.MultiheadAttention(16, 2, batch_first=True)
        self.head = nn.Linear(16, 3)

    def forward(self, tokens: Tensor, memory: Tensor) -> tuple[Tensor, dict[str, Tensor] | Tensor]:
        x = tokens + self.mix(tokens, mask="causal")
        x = x + self.mix(tokens, memory)
        x = x + self.attend(x, x, x, need_weights=False)[0]
        return self.head(x), x


def test_a_users_model_with_the_published_class_twice(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = _Published().eval()
    nn.init.normal_(model.mix.po_coeff)
    inputs = {"tokens": torch.randn(2, 10, 16), "memory": torch.randn(2, 13, 16)}
    report = export_bundle(model, example_inputs=inputs, out=tmp_path / "a.pom")
    artifact = Bundle.open(report.bundle).manifest.artifacts[0]
    assert list(artifact.mixers) == ["mix", "mix#1"]
    assert any("in another way too (attend" in note for note in artifact.notes)
    with torch.no_grad():
        expected = model(**inputs)
    with pom_edge.open_session(report) as session:
        found = session.run(**{name: tensor.numpy() for name, tensor in inputs.items()})
    assert isinstance(found, dict) and list(found) == ["y", "output_1"]
    assert np.allclose(found["y"], expected[0].numpy(), atol=1e-5)


class _PinnedLength(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixer = PoM(8, 2, 2)
        self.positions = nn.Parameter(torch.randn(12, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.mixer(x + self.positions)  # type: ignore[no-any-return]


def test_a_model_that_pins_its_token_count(tmp_path: Path) -> None:
    example = {"x": torch.randn(2, 12, 8)}
    with pytest.raises((InputError, GateError), match="--tokens"):
        export_bundle(_PinnedLength(), example_inputs=example, out=tmp_path / "a.pom")
    report = export_bundle(_PinnedLength(), example_inputs=example, out=tmp_path / "a.pom", tokens=12)
    assert Bundle.open(report.bundle).manifest.artifacts[0].inputs[0].shape == ["batch", 12, 8]


class _LongestLength(nn.Module):
    """A table of positions, as in BERT: any length up to the table's."""

    def __init__(self) -> None:
        super().__init__()
        self.mixer = PoM(8, 2, 2)
        self.positions = nn.Parameter(torch.randn(40, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.mixer(x + self.positions[: x.shape[1]])  # type: ignore[no-any-return]


def test_a_model_with_a_longest_length(tmp_path: Path) -> None:
    example = {"x": torch.randn(2, 12, 8)}
    report = export_bundle(_LongestLength(), example_inputs=example, out=tmp_path / "a.pom", tokens="1:12:40")
    with open_session(report) as session:
        assert session.run_named({"x": np.zeros((1, 40, 8), np.float32)})["y"].shape == (1, 40, 8)
        with pytest.raises(InputError, match="tokens is 41"):
            session.run(np.zeros((1, 41, 8), np.float32))


def test_bounds_are_kept_at_run_time(fresh: nn.Module, tmp_path: Path) -> None:
    report = export_bundle(fresh, out=tmp_path / "a.pom", tokens="4:16:32", batch="1")
    with open_session(report) as session:
        assert session.inputs[0].shape == [1, "tokens", 6]
        with pytest.raises(InputError, match="tokens is 33; this artifact takes 4 to 32"):
            session.run(np.zeros((1, 33, 6), np.float32), mask=np.ones((1, 33)))


def test_same_model_same_bytes(fresh: nn.Module, tmp_path: Path) -> None:
    first = export_bundle(fresh, out=tmp_path / "one" / "a.pom") if not (tmp_path / "one").mkdir() else None
    second = export_bundle(fresh, out=tmp_path / "two" / "a.pom") if not (tmp_path / "two").mkdir() else None
    assert first is not None and second is not None
    for file in ("parallel.fp32.onnx", "golden.safetensors"):
        assert (first.bundle / file).read_bytes() == (second.bundle / file).read_bytes()
    manifests = [json.loads((report.bundle / MANIFEST).read_text()) for report in (first, second)]
    for manifest in manifests:
        del manifest["created"], manifest["digest"]  # the digest is of the date as well
    assert manifests[0] == manifests[1]


def test_nothing_local_in_the_bundle(encoder_pom: Path) -> None:
    here = str(Path(pom_edge.__file__).parents[1]).encode()
    for file in encoder_pom.rglob("*"):
        content = file.read_bytes()
        assert here not in content and b".py" not in content and b"/tmp" not in content, file.name


def test_the_callers_model_is_left_as_it_was(fresh: nn.Module, tmp_path: Path) -> None:
    fresh.train()
    fresh.blocks[1].eval()  # type: ignore[index,union-attr]
    before = {name: tensor.clone() for name, tensor in fresh.state_dict().items()}
    export_bundle(fresh, out=tmp_path / "a.pom")
    assert fresh.training and not fresh.blocks[1].training  # type: ignore[index,union-attr]
    assert all(torch.equal(tensor, before[name]) for name, tensor in fresh.state_dict().items())


def test_half_weights_in_memory(fresh: nn.Module, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"weights are torch.float16; .* call model.float\(\)"):
        export_bundle(fresh.half(), out=tmp_path / "a.pom")


def test_a_layers_mask_is_weights(tmp_path: Path) -> None:
    inputs = {"x": torch.randn(2, 5, 8), "mask": torch.ones(2, 5, dtype=torch.bool)}
    report = export_bundle(PoM(8, 2, 2), example_inputs=inputs, out=tmp_path / "a.pom")
    assert str(Bundle.open(report.bundle).manifest.artifacts[0].inputs[1]) == "mask float32 (batch, tokens)"


def test_a_model_without_pom(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="Linear contains no PoM layer"):
        export_bundle(nn.Linear(4, 4), example_inputs={"input": torch.randn(2, 4)}, out=tmp_path / "a.pom")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"targets": ("tpu",)}, "unknown target 'tpu'; this version makes: onnx, coreml, trt, rtx"),
        ({"precisions": ("fp8",)}, "unknown precision 'fp8'; this version makes: fp32"),
        ({"form": "spiral"}, "unknown form 'spiral'; this version makes: parallel"),
        ({"targets": ()}, "unknown target"),
        ({"snr_db": 20.0}, "can only be raised"),
    ],
)
def test_unknown_choices_are_listed(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ExportOptions(**options).check()


def test_example_names_that_do_not_fit(fresh: nn.Module, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"gives tokens, but Encoder.forward has no argument tokens; it takes x, mask"):
        export_bundle(fresh, example_inputs={"tokens": torch.randn(2, 5, 6)}, out=tmp_path / "a.pom")


def test_a_raised_gate_is_held(fresh: nn.Module, tmp_path: Path) -> None:
    with pytest.raises(
        GateError, match=r"--snr 250 asks for more than FP32 rounding leaves here: 1\d\d\.\d dB.*give --snr 1\d\d or less"
    ):
        export_bundle(fresh, out=tmp_path / "a.pom", snr_db=250.0)


class _Random(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixer = PoM(8, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.mixer(x) + 0.01 * torch.rand_like(x)  # type: ignore[no-any-return]


class _Counting(_Random):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.mixer(x) * self.calls  # type: ignore[no-any-return]


class _Branching(_Random):
    def forward(self, x: Tensor) -> Tensor:
        y = self.mixer(x)
        return y if y.sum() > 0 else -y  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (_Random, "answers the same inputs differently"),
        (_Counting, "answers the same inputs differently"),
        (_Branching, r"decides by the values of its tensors"),
    ],
)
def test_models_that_no_graph_can_be(
    model: type[nn.Module], message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InputError, match=message):
        export_bundle(model(), example_inputs={"x": torch.randn(2, 5, 8)}, out=tmp_path / "a.pom")
    assert capfd.readouterr().err == "" and not list(tmp_path.iterdir())


class _Several(_Random):
    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.mixer(x)
        return {"logits": y, "aux": [y.mean(1), None], "same": y}


def test_every_output_of_a_model_is_exported(tmp_path: Path) -> None:
    x = torch.randn(2, 5, 8)
    model = _Several().eval()
    report = export_bundle(model, targets="onnx", example_inputs={"x": x}, out=tmp_path / "a.pom")
    with open_session(report) as session, torch.no_grad():
        found, expected = session.run(x.numpy()), model(x)
        assert isinstance(found, dict) and list(found) == ["y", "aux_0", "same"]
        assert np.allclose(found["aux_0"], expected["aux"][0].numpy(), atol=1e-6)
        with pytest.raises(InputError, match="run_named"):
            session.run({"x": x.numpy()})  # type: ignore[arg-type]


def test_an_unknown_option_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no option bogus; it takes author, batch, calibration, chunk"):
        export_bundle(_Random(), bogus=1, out=tmp_path / "a.pom")
    with pytest.raises(InputError, match=r"use example_inputs for example"):
        export_bundle(_Random(), example={}, out=tmp_path / "a.pom")


class _Model(nn.Module):
    """What the tests below forward through: two mixers, one of them under a second name, and an embedding."""

    def __init__(self, forward: Callable[..., Any], rotary: str | None = None) -> None:
        super().__init__()
        self.a = PoM(16, 3, 2, rotary=rotary)  # type: ignore[arg-type]
        self.again, self.other, self.embed = self.a, PoM(16, 2, 2), nn.Embedding(10, 16)
        self._forward = forward
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Any:
        return self._forward(self, x) if positions is None else self._forward(self, x, positions)


X = {"x": torch.randn(2, 16, 16)}
IDS = {"x": torch.randint(10, (2, 5))}


def test_a_mixer_with_two_names_is_one_layer(tmp_path: Path) -> None:
    model = _Model(lambda m, x: m.again(m.a(x)) + m.other(x))
    report = export_bundle(model, example_inputs=X, out=tmp_path / "a.pom")
    assert sorted(Bundle.open(report.bundle).manifest.artifacts[0].mixers) == ["a", "a#1", "other"]


def test_negative_positions_are_not_other_positions(tmp_path: Path) -> None:
    model = _Model(lambda m, x, positions: m.a(x, positions=positions) + 0 * m.other(x), rotary="1d").eval()
    inputs = {"x": torch.randn(2, 3, 16), "positions": torch.arange(3)}
    report = export_bundle(model, example_inputs=inputs, out=tmp_path / "a.pom")
    with open_session(report) as session, torch.no_grad():
        for positions in ([-1, 0, 1], [-255, -256, -257], [-70_000, 5, 2**31]):
            at = {**inputs, "positions": torch.tensor(positions)}
            found = session.run(**{name: tensor.numpy() for name, tensor in at.items()})
            assert pom_edge.runtimes.parity.measure(model(**at).numpy(), found).snr_db > 100


def test_bounds_apply_to_the_example_too(tmp_path: Path) -> None:
    model = _Model(lambda m, x: m.a(x, x[:, ::2]))  # needs two tokens
    report = export_bundle(model, example_inputs=X, tokens="3:4:9", batch=1, out=tmp_path / "a.pom")
    with open_session(report) as session:
        assert session.inputs[0].shape == [1, "tokens", 16] and session.inputs[0].bounds["tokens"] == (3, 9)


def test_a_mixer_that_never_runs_is_said(tmp_path: Path) -> None:
    report = export_bundle(_Model(lambda m, x: m.a(x)), example_inputs=X, out=tmp_path / "a.pom")
    assert report.artifacts[0].parity is not None
    (said,) = [entry for entry in report.artifacts[0].parity["vacuity"] if entry["test"] == "zeroed mixer other"]
    assert said["caught"] is None and "does not run" in said["note"]


def test_ids_beyond_the_table_are_refused(tmp_path: Path) -> None:
    """ONNX looks -1 up as the last row; PyTorch refuses it."""
    report = export_bundle(_Model(lambda m, x: m.a(m.embed(x))), example_inputs=IDS, out=tmp_path / "a.pom")
    with open_session(report) as session:
        session.run(np.array([[0, 9]]))
        for bad in (-1, 10):
            with pytest.raises(InputError, match=r"expected 0 to 9, the rows of the table"):
                session.run(np.array([[0, bad]]))


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixer = PoM(16, 2, 2)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.mixer(x) * scale  # type: ignore[no-any-return]


def test_numbers_and_doubles_as_examples(tmp_path: Path) -> None:
    report = export_bundle(_Scaled(), example_inputs={"x": X["x"].double(), "scale": 3.0}, out=tmp_path / "a.pom")
    with open_session(report) as session:
        assert session.inputs[1].shape == [] and session.run(X["x"].numpy(), scale=2.0).shape == (2, 16, 16)


@pytest.mark.parametrize(
    ("forward", "example", "message"),
    [
        (lambda m, x: 0 * m.a(x), X, "answers are zero, or the same"),
        (lambda m, x: {"x": x, "y": m.a(x)}, X, "the first is always called y"),
        (lambda m, x: {"z": m.a(x), "x": x}, X, "output x of the model has the name of an input"),
        (lambda m, x: m.a.step(x)[0], X, "--form recurrent"),
        (lambda m, x: m.a(x).half(), X, "half precision"),
        (lambda m, x: m.a(x), {"x": torch.randn(2, 4, 17)}, r"example inputs, x \(2, 4, 17\)"),
        (lambda m, x: m.a(x), X["x"], "example_inputs is a Tensor"),
        (lambda m, x: m.a(x), {"x": "abc"}, "input 'x' is a str"),
        (lambda m, x: m.a(x), {"batch": X}, "input 'batch' is a dict"),
    ],
)
def test_what_no_bundle_can_be_made_of(forward: Any, example: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises((GateError, InputError), match=message):
        export_bundle(_Model(forward), example_inputs=example, out=tmp_path / "a.pom")
    assert not list(tmp_path.iterdir())


def test_what_is_no_model() -> None:
    with pytest.raises(InputError, match=r"given a str.*pom_edge.load"):
        export_bundle("model.pt")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="the class PoM, not an instance"):
        export_bundle(PoM)  # type: ignore[arg-type]
