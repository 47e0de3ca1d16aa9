"""Streaming: step() against forward, against the oracle, and over streams longer than FP32 can count."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from pom_edge.errors import InputError
from pom_edge.mixer import PoM, PoMState
from tests.mixers import SNR_DB, build, lively, stream
from tests.oracle import Case, mix, random_case, random_params, resume, snr_db

TOKENS = 20_000


def _chunks(rng: np.random.Generator, tokens: int) -> list[int]:
    """Uneven lengths that add up to ``tokens``; a single token is as likely as a long chunk."""
    chunks: list[int] = []
    while sum(chunks) < tokens:
        chunks.append(min(int(rng.choice([1, 1, 2, 7, 40, 280])), tokens - sum(chunks)))
    return chunks


def _oracle_stream(case: Case, chunks: list[int], frame: bool, mask: np.ndarray | None) -> tuple[np.ndarray, ...]:
    x, start, pieces = case.inputs["x"], 0, []
    positions = case.inputs.get("positions")
    mean = np.zeros((x.shape[0], case.config["dim"] * case.config["expand"]))
    count = np.zeros(x.shape[0], np.int64)
    for length in chunks:
        part = slice(start, start + length)
        start += length
        y, mean, count = resume(
            case.config,
            case.params,
            x[:, part],
            mean,
            count,
            frame,
            None if mask is None else mask[:, part],
            None if positions is None else positions[part],
        )
        pieces.append(y)
    return np.concatenate(pieces, 1), mean, count


def _layer(rotary: str | None = None, **settings: object) -> PoM:
    torch.manual_seed(0)
    options: dict[str, object] = {"dim": 16, "degree": 3, "expand": 2, "n_sel_heads": 4, "rotary": rotary}
    return lively(PoM(**(options | settings)))  # type: ignore[arg-type]


def _snr_db(found: Tensor, expected: Tensor) -> float:
    return snr_db(found.detach().numpy(), expected.detach().numpy())


# ---- any chunks, any kind -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(120))
def test_a_stream_in_any_chunks_agrees_with_the_oracle(seed: int) -> None:
    """Tokens or frames, dense or ragged, with and without rotary positions, in uneven chunks."""
    rng = np.random.default_rng(seed)
    case = random_case(seed + 10_000, modes=("causal",))
    batch, tokens = case.inputs["x"].shape[:2]
    chunks, frame = _chunks(rng, tokens), seed % 2 == 0
    mask = (rng.random((batch, tokens)) < 0.7) if seed % 3 == 0 else None
    if mask is not None:
        mask[0, -1] = True  # something is admitted
    positions = case.inputs.get("positions")
    y, state = stream(
        build(case),
        torch.from_numpy(case.inputs["x"]),
        chunks,
        causal=not frame,
        mask=None if mask is None else torch.from_numpy(mask),
        positions=None if positions is None else torch.from_numpy(positions),
    )
    expected, mean, count = _oracle_stream(case, chunks, frame, mask)
    assert snr_db(y.numpy(), expected) >= SNR_DB, str(case)
    assert snr_db((state.mean + state.mean_low)[:, 0].numpy(), mean) >= SNR_DB, str(case)
    assert state.count.dtype == torch.int64 and np.array_equal(state.count.numpy(), count)
    assert state.mean.dtype == state.mean_low.dtype == torch.float32


@pytest.mark.parametrize("rotary", [None, "1d"])
@pytest.mark.parametrize("chunks", [[300], [1] * 300, [5, 3, 1, 291], [257, 43]], ids=["one", "singles", "uneven", "blocks"])
def test_a_causal_stream_is_the_causal_forward(chunks: list[int], rotary: str | None) -> None:
    layer, x = _layer(rotary), torch.randn(2, 300, 16)
    y, state = stream(layer, x, chunks)
    assert _snr_db(y, layer(x, causal=True)) >= SNR_DB
    assert state.count.tolist() == [300, 300]


@pytest.mark.parametrize("rotary", [None, "1d", "2d"])
def test_frames_are_block_causal(rotary: str | None) -> None:
    """Frames of unequal lengths: a token sees its whole frame and the past, weighted by tokens and not by frames."""
    frames = (4, 9, 1, 30)
    layer, x = _layer(rotary), torch.randn(2, 44, 16)
    positions = torch.arange(88).reshape(44, 2) if rotary == "2d" else None
    y, _ = stream(layer, x, frames, causal=False, positions=positions)
    seen = torch.repeat_interleave(torch.tensor(frames).cumsum(0), torch.tensor(frames))
    mask = (torch.arange(44) < seen[:, None]).unsqueeze(0)  # (1, T, N)
    assert _snr_db(y, layer(x, mask=mask, positions=positions)) >= SNR_DB


def test_one_frame_is_the_forward_without_a_mask() -> None:
    layer, x = _layer(), torch.randn(3, 50, 16)
    y, _ = layer.step(x, causal=False)
    assert _snr_db(y, layer(x)) >= SNR_DB


@pytest.mark.parametrize("rotary", [None, "1d"])
def test_prefill_then_decode(rotary: str | None) -> None:
    layer, x = _layer(rotary), torch.randn(2, 150, 16)
    y, state = stream(layer, x, [130, *[1] * 20])
    assert _snr_db(y, layer(x, causal=True)) >= SNR_DB
    assert state.count.tolist() == [150, 150]


def test_prefill_as_a_frame_then_decode_token_by_token() -> None:
    layer, x = _layer("1d"), torch.randn(1, 60, 16)
    first, state = layer.step(x[:, :40], causal=False)
    rest, _ = stream(layer, x[:, 40:], [1] * 20, state=state)
    seen = torch.arange(1, 61).clamp(min=40)
    expected = layer(x, mask=(torch.arange(60) < seen[:, None]).unsqueeze(0))
    assert _snr_db(torch.cat([first, rest], 1), expected) >= SNR_DB


def test_the_state_is_used_and_not_changed() -> None:
    layer, x = _layer(), torch.randn(2, 20, 16)
    _, state = layer.step(x[:, :10])
    kept = PoMState(state.mean.clone(), state.mean_low.clone(), state.count.clone())
    with_past, _ = layer.step(x[:, 10:], state)
    without_past, _ = layer.step(x[:, 10:])
    assert _snr_db(with_past, without_past) < 60
    assert all(torch.equal(getattr(state, n), getattr(kept, n)) for n in ("mean", "mean_low", "count"))


# ---- ragged batches -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("rotary", [None, "1d"])
def test_a_ragged_batch_is_each_sequence_alone(rotary: str | None, causal: bool) -> None:
    """Sequences of 3 to 12 tokens, padded at the end of each chunk, give what each gives alone."""
    layer, lengths = _layer(rotary), [[5, 0, 7], [2, 1, 0], [7, 7, 7]]
    x = torch.randn(3, 21, 16)
    mask = torch.zeros(3, 21, dtype=torch.bool)
    for b, row in enumerate(lengths):
        for i, length in enumerate(row):
            mask[b, 7 * i : 7 * i + length] = True
    y, state = stream(layer, x, [7, 7, 7], causal, mask=mask)
    for b, row in enumerate(lengths):
        alone, own = stream(layer, x[b : b + 1, mask[b]], [n for n in row if n], causal)
        assert _snr_db(y[b : b + 1, mask[b]], alone) >= SNR_DB
        assert state.count[b] == own.count[0] == sum(row)
        assert _snr_db(state.mean[b], own.mean[0]) >= SNR_DB


def test_a_step_that_admits_nothing_leaves_the_state_alone() -> None:
    layer, x = _layer(bias=True), torch.randn(2, 4, 16)
    nothing = torch.zeros(2, 4)
    y, state = layer.step(x, mask=nothing)
    assert torch.equal(y, layer.ag_proj.bias.expand_as(y)), "no token yet: a zero mean, so y is the bias"
    assert state.count.tolist() == [0, 0] and state.mean.abs().max() == 0
    _, before = layer.step(x)
    _, after = layer.step(x, before, mask=nothing)
    assert torch.equal(after.mean, before.mean) and torch.equal(after.count, before.count)


# ---- precision ------------------------------------------------------------------------------------------------------


def test_twenty_thousand_single_token_steps() -> None:
    """The output holds 100 dB against float64, and the running mean far more than a plain FP32 one would."""
    config = {"dim": 4, "degree": 3, "expand": 2, "n_groups": 1, "n_sel_heads": 1, "bias": False, "rotary": "1d"}
    rng = np.random.default_rng(0)
    params, x = random_params(rng, config), rng.standard_normal((1, TOKENS, 4)).astype(np.float32)
    layer, tokens = build(Case(config, params, {"x": x})), torch.from_numpy(x)
    y, state = stream(layer, tokens, [1] * TOKENS)
    assert state.count.tolist() == [TOKENS]

    queries = np.array([9_999, TOKENS - 2, TOKENS - 1])
    weights = (np.arange(TOKENS) <= queries[:, None]).astype(np.float64)[None]  # (1, 3, N)
    expected = mix(config, params, x[:, queries], x, weights, queries, np.arange(TOKENS))
    assert snr_db(y[:, queries].numpy(), expected) >= SNR_DB

    with torch.no_grad():
        f = layer.features(tokens, torch.arange(TOKENS).unsqueeze(-1))[0]  # (N, D) in FP32: what the mean is taken of
    exact = f.double().mean(0).numpy()
    compensated = (state.mean.double() + state.mean_low.double())[0, 0].numpy()
    plain, features = np.zeros(8, np.float32), f.numpy()
    for n in range(TOKENS):
        plain = plain + (features[n] - plain) / np.float32(n + 1)
    assert snr_db(compensated, exact) >= 140
    assert snr_db(plain, exact) < 130, "a plain running mean would do as well: the test shows nothing"


@pytest.mark.parametrize("frame", [False, True], ids=["tokens", "frame"])
@pytest.mark.parametrize("rotary", [None, "1d"])
def test_counts_beyond_what_fp32_can_hold(rotary: str | None, frame: bool) -> None:
    """A stream resumed at 2^24 - 2, 2^31 and 2^40 tokens counts on exactly; rotary angles follow the count."""
    config = {"dim": 8, "degree": 2, "expand": 2, "n_groups": 1, "n_sel_heads": 4, "bias": False, "rotary": rotary}
    rng = np.random.default_rng(1)
    case = Case(config, random_params(rng, config), {"x": rng.standard_normal((3, 6, 8)).astype(np.float32)})
    count = np.array([2**24 - 2, 2**31, 2**24 + 1 if rotary else 2**40])
    mean = rng.standard_normal((3, 16)).astype(np.float32)
    layer, x = build(case), torch.from_numpy(case.inputs["x"])
    start = PoMState(torch.from_numpy(mean).unsqueeze(1), torch.zeros(3, 1, 16), torch.from_numpy(count))
    expected, _, _ = resume(config, case.params, case.inputs["x"], mean, count, frame)
    y, state = stream(layer, x, [6], causal=not frame, state=start)
    assert state.count.tolist() == (count + 6).tolist()
    assert snr_db(y.numpy(), expected) >= SNR_DB
    if not frame:
        y, state = stream(layer, x, [1] * 6, state=start)
        assert state.count.tolist() == (count + 6).tolist()
        assert snr_db(y.numpy(), expected) >= SNR_DB


def test_a_long_stream_still_learns() -> None:
    """After 2^24 tokens each new one moves the mean by less than half an ulp: only the low part can remember it."""
    layer = _layer(n_sel_heads=1)
    mean = torch.full((1, 1, 32), 1.0)
    state = PoMState(mean, torch.zeros_like(mean), torch.tensor([2**25]))
    chunk = torch.randn(1, 1, 16)
    with torch.no_grad():
        f = layer.features(chunk, None).double()
        for _ in range(64):
            _, state = layer.step(chunk, state)
    expected = 64 * (f - 1) / (2**25 + 64)  # of the mean, from 1
    moved = state.mean.double() - 1 + state.mean_low.double()
    assert snr_db(moved.numpy(), expected.numpy()) >= 80
    assert torch.equal(state.mean + state.mean_low, state.mean), "the low part stays below half an ulp of the mean"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_state_of_a_half_precision_layer_stays_fp32(dtype: torch.dtype) -> None:
    """A running sum in FP16 overflows, a running mean in BF16 stops moving: the state is FP32 whatever the layer is."""
    layer = _layer(bias=True).to(dtype)
    x = torch.randn(2, 1_300, 16).to(dtype)
    with torch.no_grad():
        y, state = stream(layer, x, [1_000, *[1] * 300])
        exact = layer.features(x, None).double().mean(1, keepdim=True)
    assert state.mean.dtype == state.mean_low.dtype == torch.float32 and y.dtype == dtype
    assert snr_db((state.mean.double() + state.mean_low.double()).numpy(), exact.numpy()) >= SNR_DB


# ---- mistakes -------------------------------------------------------------------------------------------------------


def _state(batch: int = 2, hidden: int = 32) -> PoMState:
    return PoMState(torch.zeros(batch, 1, hidden), torch.zeros(batch, 1, hidden), torch.zeros(batch, dtype=torch.int64))


@pytest.mark.parametrize(
    ("chunk", "state", "mask", "message"),
    [
        ((2, 0, 16), None, None, "empty"),
        ((2, 4, 15), None, None, "16"),
        ((4, 16), None, None, "tokens, 16"),
        ((2, 4, 16), _state(batch=3), None, "another layer or batch size"),
        ((2, 4, 16), _state(hidden=16), None, "another layer or batch size"),
        ((2, 4, 16), None, torch.ones(2, 3), r"\(2, 4\)"),
        ((2, 4, 16), None, torch.ones(2, 4, 4), r"\(2, 4\)"),
        ((2, 4, 16), None, torch.full((2, 4), 0.5), "0 or 1"),
    ],
)
def test_a_wrong_chunk_state_or_mask_is_refused(
    chunk: tuple[int, ...], state: PoMState | None, mask: Tensor | None, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        _layer().step(torch.zeros(chunk), state, mask=mask)


def test_positions_are_needed_for_2d_and_refused_without_rotary() -> None:
    with pytest.raises(InputError, match="row and column"):
        _layer("2d").step(torch.zeros(1, 4, 16))
    with pytest.raises(InputError, match="no rotary"):
        _layer().step(torch.zeros(1, 4, 16), positions=torch.arange(4))
