"""The module against all 60 recordings of the published one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.golden import NAMES, PARALLEL, STREAMS, read
from tests.mixers import answer, build, stream
from tests.oracle import admitted, evaluate, means, mix, relative_error

TOLERANCE = 1e-5  # ||a - b|| / ||b||; both sides are FP32


def _uneven(tokens: int, seed: int) -> list[int]:
    """Chunk lengths that add up to ``tokens``: 1, then anything."""
    rng, chunks = np.random.default_rng(seed), [1]
    while sum(chunks) < tokens:
        chunks.append(min(int(rng.integers(1, 14)), tokens - sum(chunks)))
    return chunks


def test_all_recordings_are_here() -> None:
    assert len(NAMES) == 60 and len(PARALLEL) == 48 and len(STREAMS) == 12
    assert {read(name).case.mode for name in PARALLEL} == {
        "none", "padding", "cross", "cross_per_query", "causal",
    }  # fmt: skip
    assert {read(name).case.config["rotary"] for name in NAMES} == {None, "1d", "2d"}


@pytest.mark.parametrize("name", NAMES)
def test_the_oracle_agrees_with_the_recording(name: str) -> None:
    recording = read(name)
    assert relative_error(evaluate(recording.case), recording.y) <= TOLERANCE


@pytest.mark.parametrize("name", PARALLEL)
def test_forward_agrees_with_the_recording(name: str) -> None:
    recording = read(name)
    assert relative_error(answer(recording.case), recording.y) <= TOLERANCE


@pytest.mark.parametrize("name", STREAMS)
def test_step_agrees_with_the_recorded_stream(name: str) -> None:
    """The published step treats a chunk as a frame, and is right as long as all chunks are of one length."""
    recording = read(name)
    assert recording.state_mean is not None
    x = torch.from_numpy(recording.case.inputs["x"])
    y, state = stream(build(recording.case), x, recording.case.frames, causal=False)
    assert relative_error(y.numpy(), recording.y) <= TOLERANCE
    assert relative_error((state.mean + state.mean_low).numpy(), recording.state_mean) <= TOLERANCE
    assert state.count.tolist() == [x.shape[1]] * x.shape[0]


@pytest.mark.parametrize("causal", [True, False], ids=["tokens", "frames"])
@pytest.mark.parametrize("name", STREAMS)
def test_a_recorded_stream_in_uneven_chunks(name: str, causal: bool) -> None:
    """What the published module cannot do: token by token, or in frames, of any lengths."""
    case = read(name).case
    x = case.inputs["x"]
    batch, tokens = x.shape[:2]
    chunks = _uneven(tokens, seed=tokens)
    y, state = stream(build(case), torch.from_numpy(x), chunks, causal)
    if causal:
        expected = mix(case.config, case.params, x, x, admitted("causal", None, batch, tokens, tokens))
    else:
        expected = evaluate(type(case)(case.config, case.params, case.inputs, "frames", tuple(chunks)))
    assert relative_error(y.numpy(), expected) <= TOLERANCE
    mean = means(case.config, case.params, x, np.ones((batch, 1, tokens)))
    assert relative_error((state.mean + state.mean_low).numpy(), mean) <= TOLERANCE


@pytest.mark.parametrize("name", PARALLEL)
def test_a_recording_is_not_vacuous(name: str) -> None:
    """The tolerance refuses an output of zeros, and that of a neighbouring coefficient."""
    recording = read(name)
    assert relative_error(np.zeros_like(recording.y), recording.y) > 0.5
    coefficients = recording.case.params["po_coeff"] * 1.001
    changed = type(recording.case)(
        recording.case.config,
        recording.case.params | {"po_coeff": coefficients},
        recording.case.inputs,
        recording.case.mode,
    )
    assert relative_error(evaluate(changed), recording.y) > TOLERANCE
