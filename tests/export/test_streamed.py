"""The streamed form: passes that are the model, in memory and in files, and models that have none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pom_edge import PoM, build_model, export_bundle, open_session
from pom_edge.bundle import Bundle
from pom_edge.checkpoint import save_checkpoint
from pom_edge.errors import InputError
from pom_edge.models import ModelConfig
from pom_edge.pipeline import ExportOptions, export_file
from pom_edge.runtimes import check_bundle
from pom_edge.runtimes.tokens import SPILL_PREFIX, Buffer
from tests.oracle import snr_db

CHUNK = 16
ENCODER = {"kind": "encoder", "dim": 16, "depth": 3, "input_dim": 6}


def _lively(model: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.eval()


class _Pooled(nn.Module):
    """Mean over tokens, then a head: one sum more."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = build_model(ModelConfig(**(ENCODER | {"depth": 1}))), nn.Linear(16, 5)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x).mean(1))  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def rotary_pom(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    model = _lively(build_model(ModelConfig(**ENCODER, rotary="1d", n_sel_heads=4)))  # type: ignore[arg-type]
    out = tmp_path_factory.mktemp("streamed") / "a.pom"
    inputs = {"x": torch.randn(1, 24, 6)}
    return model, export_bundle(model, form="streamed", chunk=CHUNK, example_inputs=inputs, out=out).bundle


def test_a_pass_for_each_sum_and_one_more(rotary_pom: tuple[nn.Module, Path]) -> None:
    """Three blocks: four passes; what one stores for the next is the residual stream, 16 floats, and nothing before the "
    "first."""
    artifact = Bundle.open(rotary_pom[1]).manifest.artifacts[0]
    assert artifact.file == "streamed.fp32/pass-0.onnx" and len(artifact.files) == 4
    assert artifact.stream is not None and artifact.stream.chunk == CHUNK
    assert [len(step.stores) for step in artifact.stream.passes] == [0, 1, 1, 0]
    stored = [name for step in artifact.stream.passes for name in step.stores]
    assert [artifact.stream.shapes[name] for name in stored] == [[1, CHUNK, 16]] * 2
    assert all("offset" in step.inputs for step in artifact.stream.passes)  # rotary positions count from there
    report = check_bundle(rotary_pom[1], layers=True)
    assert report.passed and list(report.artifacts[0].layers) == [f"blocks.{i}.mixer" for i in range(3)]


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 100, 257])
def test_any_number_of_tokens_is_the_model(rotary_pom: tuple[nn.Module, Path], tokens: int, tmp_path: Path) -> None:
    model, path = rotary_pom
    x = torch.randn(1, tokens, 6, generator=torch.Generator().manual_seed(tokens))
    done: list[tuple[int, int]] = []
    with open_session(path) as session, torch.no_grad():
        session.progress = lambda so_far, total: done.append((so_far, total))
        y = np.asarray(session.run(x.numpy()))
        assert snr_db(y, model(x).numpy()) > 110
    assert done[-1] == (4 * tokens, 4 * tokens)
    np.save(tmp_path / "x.npy", x.numpy())
    with open_session(path, spill=tmp_path) as session:
        np.testing.assert_array_equal(session.run(x.numpy()), y)
        assert session.run_file(tmp_path / "x.npy", tmp_path / "y.npy") == {"y": [1, tokens, 16]}
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), y)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["x.npy", "y.npy"]


def test_a_head_after_pooling_runs_once(tmp_path: Path) -> None:
    model = _lively(_Pooled())
    path = export_bundle(
        model, form="streamed", chunk=8, example_inputs={"x": torch.randn(1, 9, 6)}, out=tmp_path / "a.pom"
    ).bundle
    stream = Bundle.open(path).manifest.artifacts[0].stream
    assert stream is not None and [step.looped for step in stream.passes] == [True, True, False]
    x = torch.randn(1, 1000, 6)
    with open_session(path) as session, torch.no_grad():
        assert snr_db(np.asarray(session.run(x.numpy())), model(x).numpy()) > 110
        with pytest.raises(InputError, match="one output with a row for each token"):
            session.run_file(tmp_path / "x.npy", tmp_path / "y.npy")


def test_masks_and_ids(tmp_path: Path) -> None:
    """A mask is read again where a pass needs it; ids are narrower than their embeddings, so they are what is kept."""
    model = _lively(build_model(ModelConfig("encoder", dim=16, depth=2, vocab_size=50)))
    example = {"x": torch.randint(50, (1, 24)), "mask": torch.ones(1, 24)}
    path = export_bundle(model, form="streamed", chunk=CHUNK, example_inputs=example, out=tmp_path / "a.pom").bundle
    stream = Bundle.open(path).manifest.artifacts[0].stream
    assert stream is not None and [len(step.stores) for step in stream.passes] == [0, 1, 0]
    x, mask = torch.randint(50, (1, 90)), (torch.arange(90) < 70).float().unsqueeze(0)
    with open_session(path) as session, torch.no_grad():
        assert snr_db(np.asarray(session.run(x.numpy(), mask=mask.numpy())), model(x, mask=mask).numpy()) > 110
        with pytest.raises(InputError, match="tokens is 90 in input 'x' but 80 in 'mask'"):
            session.run(x.numpy(), mask=mask.numpy()[:, :80])


def test_learned_positions_to_their_last_row(tmp_path: Path) -> None:
    """The last chunk is longer than the table; its padded tokens must look nothing up there."""
    model = _lively(build_model(ModelConfig(**(ENCODER | {"depth": 1}), positions="learned", max_tokens=40)))  # type: ignore[arg-type]
    example = {"x": torch.randn(1, 24, 6)}
    path = export_bundle(model, form="streamed", chunk=CHUNK, example_inputs=example, out=tmp_path / "a.pom").bundle
    x = torch.randn(1, 40, 6)
    with open_session(path) as session, torch.no_grad():
        assert snr_db(np.asarray(session.run(x.numpy())), model.double()(x.double()).numpy()) > 110


class _Cross(nn.Module):
    """Tokens that see a context of their own length, which is mixed before: two lengths, two levels each."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.own, self.cross = (PoM(6, 2, 2, rotary="1d") for _ in range(3))

    def forward(self, x: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        context = context + self.inner(context)
        x = x + self.own(x)
        return x + self.cross(x, context=context), context.mean(1)


@pytest.mark.parametrize(("tokens", "others"), [(1, 1), (100, 17), (5, 250)])
def test_a_context_of_another_length(tokens: int, others: int, tmp_path: Path) -> None:
    model = _lively(_Cross())
    example = {"x": torch.randn(1, 24, 6), "context": torch.randn(1, 9, 6)}
    path = export_bundle(model, form="streamed", chunk=8, example_inputs=example, out=tmp_path / "a.pom").bundle
    artifact = Bundle.open(path).manifest.artifacts[0]
    assert artifact.stream is not None
    assert [step.axis for step in artifact.stream.passes] == ["tokens", "context_tokens"] * 2 + ["tokens"]
    generator = torch.Generator().manual_seed(0)
    inputs = {"x": torch.randn(1, tokens, 6, generator=generator), "context": torch.randn(1, others, 6, generator=generator)}
    done: list[tuple[int, int]] = []
    for spill in (None, tmp_path):
        with open_session(path, spill=spill) as session, torch.no_grad():
            session.progress = lambda so_far, total: done.append((so_far, total))
            found = session.run_named({name: value.numpy() for name, value in inputs.items()})
            wide = model.double()(**{name: value.double() for name, value in inputs.items()})
            for value, expected in zip(found.values(), wide, strict=True):
                assert snr_db(value, expected.numpy()) > 110
        model.float()
    assert done[-1][0] == done[-1][1]
    assert check_bundle(path, layers=True).passed


class _LogAndPool(nn.Module):
    """A padded token of zeros would be log(0); and the pooled output comes first, though it is finished last."""

    def __init__(self) -> None:
        super().__init__()
        self.mixer = PoM(6, 2, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.mixer(x.abs().log()) + x
        return y.mean(1), y


def test_padding_is_a_token_and_outputs_keep_their_order(tmp_path: Path) -> None:
    model = _lively(_LogAndPool())
    example = {"x": torch.randn(1, 24, 6)}
    path = export_bundle(model, form="streamed", chunk=8, example_inputs=example, out=tmp_path / "a.pom").bundle
    x = torch.randn(1, 77, 6)
    with open_session(path) as session, torch.no_grad():
        found = session.run(x.numpy())
        assert isinstance(found, dict) and list(found) == ["y", "output_1"]
        for value, expected in zip(found.values(), model(x), strict=True):
            assert snr_db(value, expected.numpy()) > 100


class _FirstToken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixer = PoM(6, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.mixer(x)[:, 0]  # type: ignore[no-any-return]


class _Prefix(_FirstToken):
    def forward(self, x: Tensor) -> Tensor:
        return self.mixer(torch.cat((torch.zeros_like(x[:, :1]), x), 1))  # type: ignore[no-any-return]


class _Softmax(_FirstToken):
    def forward(self, x: Tensor) -> Tensor:
        return self.mixer(x) * x.softmax(1)  # type: ignore[no-any-return]


class _Scaled(_FirstToken):
    def forward(self, x: Tensor) -> Tensor:
        return self.mixer(x) / x.shape[1]  # type: ignore[no-any-return]


class _Chosen(_FirstToken):
    """Every token takes the last value of a token of the context."""

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        index = (x[:, :, :1] > 0).long().expand(-1, -1, 6)
        return self.mixer(x) + context.gather(1, index)  # type: ignore[no-any-return]


class _Added(_FirstToken):
    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        return self.mixer(x) + context  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: build_model(ModelConfig(**ENCODER, blocks=("pom", "full", "pom"), n_heads=2)), r"blocks\.1.* every other one"),
        (
            lambda: build_model(ModelConfig(**ENCODER, blocks=("pom", "local", "pom"), n_heads=2, window=4)),
            r"blocks\.1.*makes an axis",
        ),
        (_FirstToken, "does away with the token axis"),
        (_Prefix, "token axis|axis of tokens"),
        (_Softmax, "goes along the token axis"),
        (_Scaled, "computes with the number of tokens"),
        (_Chosen, "picks tokens of one input for those of another"),
        (_Added, "does not leave tokens, context_tokens free.*--form parallel"),
    ],
)
def test_models_without_a_streamed_form(make: Any, message: str, tmp_path: Path) -> None:
    model = _lively(make())
    example = {"x": torch.randn(1, 24, 6)}
    if isinstance(model, (_Chosen, _Added)):
        example["context"] = torch.randn(1, 24, 6)
    with pytest.raises(InputError, match=f"{message}.*no streamed form|{message}"):
        export_bundle(model, form="streamed", chunk=8, example_inputs=example, out=tmp_path / "a.pom")
    assert not list(tmp_path.iterdir())


def test_an_input_of_the_name_of_a_pass_s_own_is_refused(tmp_path: Path) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mixer = PoM(8, 2, 2)

        def forward(self, x: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
            return self.mixer(x, mask=valid)  # type: ignore[no-any-return]

    example = {"x": torch.randn(1, 24, 8), "valid": torch.ones(1, 24, dtype=torch.bool)}
    with pytest.raises(InputError, match="has an input or output 'valid'.*rename it"):
        export_bundle(Named().eval(), form="streamed", chunk=8, example_inputs=example, out=tmp_path / "a.pom")


def test_causal_models_are_sent_to_the_recurrent_form(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="causal models have the recurrent form"):
        export_bundle(PoM(8, 2, 2), form="streamed", mask="causal", chunk=8, out=tmp_path / "a.pom")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunk": 0}, "--chunk is 0"),
        ({"chunk": 4, "form": "parallel"}, "--form streamed"),
        ({"chunk": 101, "tokens": "1:40:100"}, "--chunk is 101, and there are 100 tokens at most.*give --chunk 100 or less"),
        ({"batch": "1:2:4"}, "give one number"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        export_bundle(PoM(8, 2, 2), **({"form": "streamed"} | options), out=tmp_path / "a.pom")


def test_files_that_do_not_fit(rotary_pom: tuple[nn.Module, Path], tmp_path: Path) -> None:
    path, x = rotary_pom[1], np.zeros((1, 40, 6), np.float32)
    (tmp_path / "text.npy").write_text("no array")
    np.save(tmp_path / "width.npy", x[..., :5])
    np.save(tmp_path / "batch.npy", np.concatenate((x, x)))
    np.save(tmp_path / "good.npy", x)
    cut = (tmp_path / "good.npy").read_bytes()[:-100]
    (tmp_path / "cut.npy").write_bytes(cut)
    before = sorted(tmp_path.iterdir())
    with open_session(path, spill=tmp_path) as session:
        for name, message in (
            ("none", "cannot be read as .npy"),
            ("text", "cannot be read as .npy"),
            ("width", "has 5 along axis 2"),
            ("batch", r"is \(1, tokens, ..\)"),
            ("cut", "ends before token 40"),
        ):
            with pytest.raises(InputError, match=message):
                session.run_file(tmp_path / f"{name}.npy", tmp_path / "y.npy")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("value", "message"),
    [(np.nan, "input 'x' contains NaN or infinity at token 33"), (3e38, "tokens 32 to 39 drive a sum beyond what FP32 holds")],
)
def test_what_would_spoil_every_answer_is_refused(value: float, message: str, tmp_path: Path) -> None:
    layer = PoM(6, 2, 2, clamp_max=None)
    path = export_bundle(layer, form="streamed", chunk=CHUNK, out=tmp_path / "a.pom").bundle
    x = np.ones((1, 40, 6), np.float32)
    x[0, 33, 4] = value
    np.save(tmp_path / "x.npy", x)
    before = sorted(tmp_path.iterdir())
    with open_session(path, spill=tmp_path) as session:
        with pytest.raises(InputError, match=message):
            session.run(x)
        with pytest.raises(InputError, match=message):
            session.run_file(tmp_path / "x.npy", tmp_path / "y.npy")
    assert sorted(tmp_path.iterdir()) == before


def test_a_place_to_spill_that_is_none(rotary_pom: tuple[nn.Module, Path], encoder_pom: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not a folder"):
        open_session(rotary_pom[1], spill=tmp_path / "none")
    with pytest.raises(InputError, match="spill is for the streamed form"):
        open_session(encoder_pom, spill=tmp_path)


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Buffer(tmp_path) as buffer:
        with pytest.raises(InputError, match=r"the tokens take [\d.]+ MiB, and [\d.]+ MiB are free"):
            buffer.rows(1 << 40, (1, 16, 64), 1, np.dtype(np.float32))
        rows = buffer.rows(100, (1, 16, 64), 1, np.dtype(np.float32))

        def full(*_: object) -> int:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "pwrite", full)
        with pytest.raises(InputError, match="the disk is full"):
            rows.write(0, np.zeros((1, 16, 64), np.float32))
    assert not list(tmp_path.iterdir())


def test_a_killed_run_leaves_nothing(tmp_path: Path) -> None:
    """And where a system keeps the name of an open file, the next start removes it."""
    script = (
        "import sys, time; from pathlib import Path; from pom_edge.runtimes.tokens import Spill; import numpy as np\n"
        "s = Spill(Path(sys.argv[1])); s.rows(100, (1, 16, 64), 1, np.dtype('f4')).write(0, np.zeros((1, 16, 64), 'f4'))\n"
        "print('ready', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True)  # noqa: S603
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    (tmp_path / f"{SPILL_PREFIX}{process.pid}-abc").write_bytes(b"left behind")
    (tmp_path / f"{SPILL_PREFIX}{os.getpid()}-abc").write_bytes(b"somebody's, alive")
    with Buffer(tmp_path):
        pass
    assert [file.name for file in tmp_path.iterdir()] == [f"{SPILL_PREFIX}{os.getpid()}-abc"]


def test_a_checkpoint_runs_from_file_to_file(tmp_path: Path) -> None:
    """A reference encoder has its mask input only where it was asked for; the refusal says so."""
    config = ModelConfig("encoder", dim=16, depth=1, input_dim=8)
    save_checkpoint(tmp_path / "m.pt", build_model(config), config)
    x = np.random.default_rng(0).standard_normal((1, 50, 8)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    path = export_file(tmp_path / "m.pt", ExportOptions(form="streamed", chunk=16)).bundle
    with open_session(path, spill=tmp_path) as session:
        session.run_file(tmp_path / "x.npy", tmp_path / "y.npy")
        np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), session.run(x))
    masked = ExportOptions(form="streamed", chunk=16, mask="padding", overwrite=True)
    with open_session(export_file(tmp_path / "m.pt", masked)) as session:
        assert [spec.name for spec in session.inputs] == ["x", "mask"]
        with pytest.raises(InputError, match="has an input mask beside x .*without --mask padding.*--output y.npz"):
            session.run_file(tmp_path / "x.npy", tmp_path / "z.npy")


def test_what_the_form_is_not_for(tmp_path: Path) -> None:
    model = build_model(ModelConfig("lm", dim=16, depth=1, vocab_size=16))
    with pytest.raises(InputError, match="^LanguageModel is causal: .* Give --form recurrent"):
        export_bundle(model, form="streamed", out=tmp_path / "a.pom")
    for options, message in (
        ({"form": "streamed", "chunk": 99999999999999}, "--chunk is 99999999999999; expected 1 to 2147483647 tokens"),
        ({"form": "parallel", "chunk": 64}, "--chunk 64 is for --form streamed"),
        ({"form": "streamed", "chunk": 2**31 - 1}, "--chunk is 2147483647: one value of so many tokens takes .* a smaller one"),
    ):
        with pytest.raises(InputError, match=message):
            export_bundle(PoM(64, 2, 2), out=tmp_path / "a.pom", **options)  # type: ignore[arg-type]
