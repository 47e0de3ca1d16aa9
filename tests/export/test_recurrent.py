"""The recurrent form: one graph from chunk to chunk, against recordings, float64 and the model itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pom_edge import PoM, build_model, export_bundle, open_session
from pom_edge.arrays import read_safetensors, write_safetensors
from pom_edge.bundle import Bundle
from pom_edge.errors import GateError, InputError
from pom_edge.export.forms import recurrent
from pom_edge.export.inputs import Extent
from pom_edge.export.recurrent import NEXT, STATE, make_recurrent
from pom_edge.mixer import CumulativePoM
from pom_edge.models import ModelConfig
from pom_edge.runtimes import check_bundle
from tests.core.published_standin import PoM as PublishedPoM
from tests.golden import PARALLEL, STREAMS, read
from tests.mixers import SNR_DB, build, lively
from tests.oracle import admitted, mix, relative_error, snr_db

CAUSAL = [name for name in PARALLEL if read(name).case.mode == "causal"]
LM = {"kind": "lm", "dim": 16, "depth": 2, "vocab_size": 50}
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rotary": {"rotary": "1d", "n_sel_heads": 4},
    "hybrid": {"blocks": ("pom", "local"), "n_heads": 2, "window": 5},
    "wide window": {"blocks": ("local", "pom"), "n_heads": 2, "window": 40},
    "learned positions": {"positions": "learned", "max_tokens": 300},
}
CHUNKINGS = ([100], [1] * 100, [37, 1, 30, 32])


def _lm(**settings: Any) -> nn.Module:
    torch.manual_seed(0)
    model = build_model(ModelConfig(**(LM | settings)))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.eval()


@torch.no_grad()
def _stream(
    model: nn.Module, inputs: dict[str, Tensor], chunks: list[int] | tuple[int, ...]
) -> tuple[Tensor, dict[str, Tensor]]:
    """y of a recurrent model over chunks, and its last state."""
    state: dict[str, Tensor] = {}
    pieces, start = [], 0
    for length in chunks:
        here = slice(start, start + length)
        part = {name: value[here] if name == "positions" else value[:, here] for name, value in inputs.items()}
        start += length
        outputs = model(**part, **state)
        pieces.append(outputs["y"])
        state = {STATE + name.removeprefix(NEXT): value for name, value in outputs.items() if name.startswith(NEXT)}
    return torch.cat(pieces, 1), state


def _decibel(expected: Tensor, found: Tensor) -> float:
    return snr_db(found.detach().numpy(), expected.detach().double().numpy())


@pytest.mark.parametrize("name", STREAMS)
def test_recorded_streams(name: str) -> None:
    """The published step treats a chunk as a frame; its mean is our mean plus its low part."""
    recording = read(name)
    assert recording.state_mean is not None
    model, _ = make_recurrent(nn.Sequential(build(recording.case)), frames=True)
    y, state = _stream(model, {"input": torch.from_numpy(recording.case.inputs["x"])}, recording.case.frames)
    assert relative_error(y.numpy(), recording.y) <= 1e-5
    assert relative_error((state["state.0.mean"] + state["state.0.mean_low"]).numpy(), recording.state_mean) <= 1e-5


@pytest.mark.parametrize("name", CAUSAL)
def test_recorded_causal_layers_chunk_by_chunk(name: str) -> None:
    case = read(name).case
    tokens = case.inputs["x"].shape[1]
    model, _ = make_recurrent(_Causal(build(case)))
    inputs = {name: torch.from_numpy(value) for name, value in case.inputs.items()}
    for chunks in ([tokens], [1] * tokens, [tokens // 2 + 1, tokens - tokens // 2 - 1]):
        y, state = _stream(model, inputs, [length for length in chunks if length])
        assert relative_error(y.numpy(), read(name).y) <= 1e-5
        assert state["state.count"].tolist() == [tokens] * y.shape[0]


class _Causal(nn.Module):
    def __init__(self, mixer: nn.Module, **settings: Any) -> None:
        super().__init__()
        self.mixer, self.settings = mixer, {"causal": True, **settings}

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        where = {} if positions is None else {"positions": positions}
        return self.mixer(x, **where, **self.settings)  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("chunks", CHUNKINGS, ids=["whole", "single", "uneven"])
def test_a_model_chunk_by_chunk_is_the_model(kind: str, chunks: list[int]) -> None:
    model = _lm(**MODELS[kind])
    x = torch.randint(50, (2, 100), generator=torch.Generator().manual_seed(1))
    recurrent, _ = make_recurrent(model)
    with torch.no_grad():
        assert _decibel(model(x), _stream(recurrent, {"x": x}, chunks)[0]) > 120


@pytest.mark.parametrize("kind", ["plain", "rotary", "hybrid", "wide window"])
def test_sequences_of_different_lengths_in_one_batch(kind: str) -> None:
    """Chunk by chunk each row has fewer real tokens than the others, or none at all."""
    model, lengths = _lm(**MODELS[kind]), [100, 61, 3]
    recurrent, _ = make_recurrent(model, ragged=True)
    x = torch.randint(50, (3, 100), generator=torch.Generator().manual_seed(1))
    taken, pieces, state = [0, 0, 0], [[], [], []], {}  # type: ignore[var-annotated]
    for length in (10, 1, 7, 50, 40):
        real = [min(length, total - start) for total, start in zip(lengths, taken, strict=True)]
        chunk, mask = torch.zeros(3, length, dtype=torch.int64), torch.zeros(3, length)
        for row, n in enumerate(real):
            chunk[row, :n], mask[row, :n] = x[row, taken[row] : taken[row] + n], 1
        with torch.no_grad():
            outputs = recurrent(x=chunk, mask=mask, **state)
        state = {STATE + name.removeprefix(NEXT): value for name, value in outputs.items() if name.startswith(NEXT)}
        for row, n in enumerate(real):
            pieces[row].append(outputs["y"][row, :n])
            assert not outputs["y"][row, n:].any()
            taken[row] += n
    assert state["state.count"].tolist() == taken == lengths
    with torch.no_grad():
        for row, total in enumerate(lengths):
            assert _decibel(model(x[row : row + 1, :total])[0], torch.cat(pieces[row])) > 120


def test_long_streams_against_float64() -> None:
    """20,000 tokens one by one and in uneven chunks, rotary positions from a million on."""
    torch.manual_seed(0)
    layer = lively(PoM(8, degree=3, expand=2, n_sel_heads=4, rotary="1d"))
    x = torch.randn(1, 20_000, 8)
    params = {name: parameter.detach().numpy() for name, parameter in layer.named_parameters()}
    config = {"dim": 8, "degree": 3, "expand": 2, "n_groups": 1, "n_sel_heads": 4, "bias": False, "rotary": "1d"}
    visible = admitted("causal", None, 1, 512, 512)
    recurrent, _ = make_recurrent(_Causal(layer))
    single, _ = _stream(recurrent, {"x": x}, [1] * 2_000)
    chunked, _ = _stream(recurrent, {"x": x}, [5_000, 1, 14_999])
    double = _Causal(layer.double())(x.double()).detach()
    assert _decibel(double[:, :2_000], single) > SNR_DB and _decibel(double, chunked) > SNR_DB
    expected = mix(config, params, x[:, :512].numpy(), x[:, :512].numpy(), visible)
    assert snr_db(chunked[:, :512].numpy(), expected) > SNR_DB


def test_the_old_layout_and_the_published_class_stream_too() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 30, 16)
    for layer, settings in (
        (CumulativePoM(16, 3, 2), {}),
        (PublishedPoM(16, degree=2, expand=2, n_groups=1, n_sel_heads=4), {"causal": None, "mask": "causal"}),
    ):
        model = _Causal(layer.eval())
        model.settings = {k: v for k, v in (model.settings | settings).items() if v is not None}
        recurrent, names = make_recurrent(model)
        assert names == ["mixer"]
        with torch.no_grad():
            assert _decibel(model(x), _stream(recurrent, {"x": x}, [7, 1, 22])[0]) > 110


# ---- in ONNX --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hybrid_pom(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    model = _lm(**MODELS["hybrid"], rotary="1d", n_sel_heads=4)
    out = tmp_path_factory.mktemp("recurrent") / "lm.pom"
    return model, export_bundle(model, form="recurrent", out=out).bundle


def test_one_graph_for_prefill_and_decode(hybrid_pom: tuple[nn.Module, Path]) -> None:
    model, path = hybrid_pom
    artifact = Bundle.open(path).manifest.artifacts[0]
    assert artifact.file == "recurrent.fp32.onnx" and artifact.token_axes == {"x": 1, "y": 1}
    shapes = {spec.name: spec.shape for spec in artifact.inputs}
    assert shapes == {
        "x": ["batch", "tokens"],
        "state.count": ["batch"],
        "state.0.mean": ["batch", 1, 32],
        "state.0.mean_low": ["batch", 1, 32],
        "state.1.keys": ["batch", 5, 16],
        "state.1.values": ["batch", 5, 16],
    }
    assert [spec.name.replace("next", "state") for spec in artifact.outputs] == ["y", *list(shapes)[1:]]
    x = torch.randint(50, (3, 90), generator=torch.Generator().manual_seed(2))
    with open_session(path) as session, torch.no_grad():
        expected = model(x).numpy()
        assert [spec.name for spec in session.inputs] == ["x"]
        assert snr_db(np.asarray(session.run(x.numpy())), expected) > 110
        for chunks in ([60, *[1] * 30], [1, 7, 64, 18]):
            session.reset()
            parts = np.split(x.numpy(), np.cumsum(chunks)[:-1], axis=1)
            y = np.concatenate([np.asarray(part) for part in session.stream(parts)], axis=1)
            assert snr_db(y, expected) > 110 and session.tokens_seen == [90] * 3
    assert check_bundle(path, layers=True).passed


def test_a_stream_goes_on_from_its_saved_state(hybrid_pom: tuple[nn.Module, Path], tmp_path: Path) -> None:
    _, path = hybrid_pom
    x = np.random.default_rng(0).integers(0, 50, (2, 40))
    with open_session(path) as session:
        session.step(x[:, :25])
        session.save_state(tmp_path / "s.safetensors")
        expected = session.step(x[:, 25:])
    with open_session(path) as other:
        other.step(x[:, :3])
        other.load_state(tmp_path / "s.safetensors")
        assert other.tokens_seen == [25, 25]
        np.testing.assert_array_equal(other.step(x[:, 25:]), expected)


def test_a_state_of_something_else_is_refused(hybrid_pom: tuple[nn.Module, Path], tmp_path: Path) -> None:
    model, path = hybrid_pom
    with open_session(path) as session:
        with pytest.raises(InputError, match="there is no state to save"):
            session.save_state(tmp_path / "s.safetensors")
        session.step(np.zeros((1, 2), np.int64))
        session.save_state(tmp_path / "s.safetensors")
        with pytest.raises(InputError, match="cannot be written"):
            session.save_state(tmp_path / "none" / "s.safetensors")
        (tmp_path / "text").write_text("no state")
        for name, message in (("text", "cannot be read"), ("none", "does not exist")):
            with pytest.raises(InputError, match=message):
                session.load_state(tmp_path / name)
        with pytest.raises(InputError, match="is not a saved state"):
            session.load_state(path / "golden.safetensors")
        arrays, metadata = read_safetensors(tmp_path / "s.safetensors")
        write_safetensors(tmp_path / "newer.safetensors", arrays, metadata | {"version": "2"})
        with pytest.raises(InputError, match="is a state of version 2, this release reads version 1; go on with the release"):
            session.load_state(tmp_path / "newer.safetensors")
        assert session.tokens_seen == [2]
    torch.manual_seed(1)
    nn.init.normal_(model.embed.weight)  # type: ignore[union-attr,arg-type]
    other = export_bundle(model, form="recurrent", out=tmp_path / "other.pom")
    with open_session(other) as session, pytest.raises(InputError, match="state of another model or export"):
        session.load_state(tmp_path / "s.safetensors")


def test_bad_chunks_leave_the_stream_as_it_was(hybrid_pom: tuple[nn.Module, Path]) -> None:
    _, path = hybrid_pom
    x = np.random.default_rng(0).integers(0, 50, (2, 10))
    with open_session(path) as session:
        session.step(x)
        for bad, message in (
            (x[:, :0], "is empty along tokens"),
            (x[:1], "batch is 1 in input 'x' but 2 in 'state.count'"),
            (x[0], "expected x int64"),
            (x.astype(np.float32), "is float32; expected x int64"),
            (x + 50, "expected 0 to 49"),
        ):
            with pytest.raises(InputError, match=message):
                session.step(bad)
        assert session.tokens_seen == [10, 10]
        assert list(session.stream([])) == []


def test_a_stream_that_carries_nan_is_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    path = export_bundle(PoM(8, 2, 2), form="recurrent", mask="padding", out=tmp_path / "a.pom").bundle
    assert (path / "recurrent.fp32.ragged.onnx").is_file()
    x = np.ones((2, 4, 8), np.float32)
    with open_session(path) as session:
        session.step(x, mask=np.array([[1, 1, 1, 1], [1, 0, 0, 0]]))
        with pytest.raises(InputError, match=r"'x' contains NaN.*the stream is unchanged"):
            session.step(x * np.nan)
        with pytest.raises(InputError, match="padding before a real token"):
            session.step(x, mask=np.array([[1, 0, 1, 1], [1, 0, 0, 0]]))
        assert session.tokens_seen == [4, 1]
        session.step(x)  # without a mask every token is real
        assert session.tokens_seen == [8, 5]


def test_frames_of_any_length(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer = lively(PoM(8, 3, 2, n_sel_heads=2))
    path = export_bundle(layer, form="recurrent", mask="frames", out=tmp_path / "a.pom").bundle
    x = torch.randn(2, 20, 8)
    with open_session(path) as session, torch.no_grad():
        state, start = None, 0
        for length in (4, 9, 1, 6):
            frame = x[:, start : start + length]
            expected, state = layer.step(frame, state, causal=False)
            assert snr_db(np.asarray(session.step(frame.numpy())), expected.numpy()) > 110
            start += length


@pytest.mark.parametrize("tokens", ["1", "4", "2:8:32"])
def test_chunks_of_a_fixed_or_bounded_length(tokens: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer = lively(PoM(8, 3, 2, rotary="1d", n_sel_heads=2))
    path = export_bundle(layer, form="recurrent", mask="causal", tokens=tokens, batch=1, out=tmp_path / "a.pom").bundle
    x = torch.randn(1, 40, 8)
    with open_session(path) as session, torch.no_grad():
        assert snr_db(np.asarray(session.run(x.numpy())), layer(x, causal=True).numpy()) > 110
        if tokens != "1":
            with pytest.raises(InputError, match="cannot be cut into chunks|takes 2 to 32|has 33 along"):
                session.step(np.zeros((1, 33, 8), np.float32))


# ---- what has no recurrent form -------------------------------------------------------------------------------------


class _Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixer, self.norm = PoM(8, 2, 2), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.mixer(x, causal=True)
        return y + self.norm(y.mean(1, keepdim=True))  # type: ignore[no-any-return]


class _LateMean(_Pooled):
    """On usual inputs the mean does nothing: no comparison would see it."""

    def forward(self, x: Tensor) -> Tensor:
        return self.mixer(x, causal=True) + (x.mean(1, keepdim=True) - 30.0).relu()  # type: ignore[no-any-return]


class _LateCount(_Pooled):
    def forward(self, x: Tensor) -> Tensor:
        late = (torch.arange(x.shape[1]) >= 5000).float()[None, :, None]
        return self.mixer(x, causal=True) + late  # type: ignore[no-any-return]


class _First(_Pooled):
    def forward(self, x: Tensor) -> Tensor:
        return self.mixer(x, causal=True) + x[:, 0].unsqueeze(1)  # type: ignore[no-any-return]


class _Several(_Pooled):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.mixer(x, causal=True)
        return {"logits": y, "hidden": self.norm(y), "last": y[:, -1]}


def test_several_outputs_and_the_last_token_so_far(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = _Several().eval(), torch.randn(2, 12, 8)
    path = export_bundle(model, form="recurrent", example_inputs={"x": x}, out=tmp_path / "a.pom").bundle
    with open_session(path) as session, torch.no_grad():
        expected, found = model(x), session.run(x.numpy())
        assert isinstance(found, dict) and list(found) == ["y", "hidden", "last"]
        for name, value in zip(found, expected.values(), strict=True):
            assert snr_db(found[name], value.numpy()) > 110
        for end in (5, 12):
            step = session.step(x.numpy()[:, 0 if end == 5 else 5 : end])
            assert isinstance(step, dict) and snr_db(step["last"], model(x[:, :end])["last"].numpy()) > 110


def test_a_state_that_would_overflow_is_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer = lively(PoM(8, 3, 2, clamp_max=None))
    path = export_bundle(layer, form="recurrent", mask="causal", out=tmp_path / "a.pom").bundle
    x = np.ones((1, 3, 8), np.float32)
    with open_session(path) as session:
        expected = session.step(x)
        with pytest.raises(InputError, match="drives the state beyond what FP32 holds.*the stream is unchanged"):
            session.step(x * np.float32(1e20))
        assert session.tokens_seen == [3]
        session.reset()
        np.testing.assert_array_equal(session.step(x), expected)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda: PoM(8, 2, 2), {}, "sees all tokens, later ones too.*--mask causal"),
        (lambda: _lm(blocks=("pom", "full"), n_heads=2), {}, r"blocks\.1\.mixer is an attention over all tokens"),
        (lambda: nn.Sequential(_Causal(PoM(8, 2, 2)), nn.TransformerEncoderLayer(8, 1)), "input", "attention over all tokens"),
        (_Pooled, "x", "mean does away with the token axis"),
        (_LateMean, "x", "mean does away with the token axis"),
        (_LateCount, "x", "arange counts the tokens of a chunk from 0"),
        (_First, "x", "does away with the token axis"),
    ],
)
def test_models_without_a_recurrent_form(make: Any, options: Any, message: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    extra = {"example_inputs": {options: torch.randn(2, 9, 8)}} if isinstance(options, str) else options
    with pytest.raises((InputError, GateError), match=message):
        export_bundle(make(), form="recurrent", out=tmp_path / "a.pom", **extra)
    assert not list(tmp_path.iterdir())


def test_a_parallel_artifact_keeps_nothing(encoder_pom: Path) -> None:
    with open_session(encoder_pom) as session, pytest.raises(InputError, match=r"step\(\) has no meaning.*--form recurrent"):
        session.step(np.zeros((1, 2, 12), np.float32))


def test_ids_beyond_the_vocabulary_are_one_message() -> None:
    model = build_model(ModelConfig(kind="lm", vocab_size=20, dim=16, depth=1))
    with pytest.raises(InputError, match="does not accept its example inputs, x"):
        recurrent(model, {"x": torch.full((2, 8), 20)}, Extent(), Extent())
