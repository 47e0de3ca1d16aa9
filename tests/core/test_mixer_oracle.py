"""A random sweep: the module in FP32 against the independent float64 loops of tests/oracle.py."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from pom_edge.mixer import CumulativePoM
from tests.mixers import SNR_DB, answer
from tests.oracle import MODES, Case, admitted, evaluate, evaluate_cumulative, mix, random_case, random_params, snr_db

SEEDS = range(400)


@cache
def _case(seed: int) -> Case:
    """One case in four leaves the published activation and gate, as the older layouts do."""
    return random_case(seed, published_only=seed % 4 != 0)


@pytest.mark.parametrize("seed", SEEDS)
def test_module_agrees_with_the_oracle(seed: int) -> None:
    case = _case(seed)
    found = snr_db(answer(case), evaluate(case))
    assert found >= SNR_DB, f"{found:.1f} dB, {case}"


def test_the_sweep_covers_what_it_claims() -> None:
    cases = [_case(seed) for seed in SEEDS]
    configs = [case.config for case in cases]
    assert {(case.mode, case.config["rotary"]) for case in cases} == {(m, r) for m in MODES for r in (None, "1d", "2d")}
    assert {config["degree"] for config in configs} == set(range(1, 9))
    assert {config["expand"] for config in configs} == {1, 2, 3, 4}
    assert {config["n_groups"] for config in configs} == {1, 2, 4}
    assert {-1, 0, 1, 2, 3, 4, 6, 8, 16} == {config["n_sel_heads"] for config in configs}
    assert {config["bias"] for config in configs} == {True, False}
    assert {config.get("gate") for config in configs} >= {"sigmoid", "hardsigmoid"}
    assert {config.get("clamp_max", 6.0) for config in configs} == {6.0, 1.0, None}
    assert {config.get("first_power") for config in configs} >= {0, 1}
    assert {case.inputs["x"].shape[0] for case in cases} == {1, 2, 3, 4}
    lengths = {case.inputs["x"].shape[1] for case in cases}
    assert min(lengths) == 1 and max(lengths) > 256
    masks = [case.inputs["mask"] for case in cases if "mask" in case.inputs]
    assert {str(mask.dtype) for mask in masks} == {"float32", "bool", "int64"}
    assert sum(not mask.any(-1).all() for mask in masks) >= 10, "rows that admit nothing"
    positions = [case.inputs["positions"] for case in cases if "positions" in case.inputs]
    assert max(int(p.max()) for p in positions) > 100_000


def test_the_draws_use_every_branch() -> None:
    """Both ends of the activation and of the gate are reached, and every power matters."""
    case = random_case(7, rotary=(None,), modes=("none",))
    config = case.config | {"n_groups": 1, "degree": 8, "n_sel_heads": 1, "dim": 16, "expand": 2}
    params = random_params(np.random.default_rng(0), config)
    x = np.random.default_rng(1).standard_normal((1000, 16))
    projected = x @ params["qc_proj.weight"][:32].T
    logits = x @ params["qc_proj.weight"][32:].T + params["se_bias"]
    assert (projected > 6).mean() > 0.01 and (projected < -10).any() and (np.abs(projected) < 6).mean() > 0.5
    assert (logits > 3).mean() > 0.01 and (logits < -3).mean() > 0.01 and (np.abs(logits) < 3).mean() > 0.5
    inputs = {"x": x[None, :50].astype(np.float32)}
    whole = evaluate(Case(config, params, inputs))
    for power in range(8):
        coefficients = params["po_coeff"].copy()
        coefficients[:, power] = 0
        without = evaluate(Case(config, params | {"po_coeff": coefficients}, inputs))
        assert snr_db(without, whole) < 40, f"power {power + 1} hardly matters"


@pytest.mark.parametrize("change", ["zero", "permute", "drop a head", "shift", "other mask"])
def test_the_gate_refuses_wrong_answers(change: str) -> None:
    case = replace(random_case(3, rotary=("1d",), modes=("causal_padding",)), note="")
    config = case.config | {"dim": 16, "expand": 2, "n_sel_heads": 4, "n_groups": 1}
    rng = np.random.default_rng(5)
    x = rng.standard_normal((2, 30, 16)).astype(np.float32)
    mask = (rng.random((2, 30)) < 0.7).astype(np.float32)
    case = Case(config, random_params(rng, config), {"x": x, "mask": mask}, "causal_padding")
    expected = evaluate(case)
    wrong = expected.copy()
    if change == "zero":
        wrong[:] = 0
    elif change == "permute":
        wrong = wrong[:, ::-1]
    elif change == "drop a head":
        weight = case.params["ag_proj.weight"].copy()
        weight[:, :8] = 0
        wrong = evaluate(replace(case, params=case.params | {"ag_proj.weight": weight}))
    elif change == "shift":
        wrong = evaluate(replace(case, inputs=case.inputs | {"positions": np.arange(1, 31)}))
    else:
        wrong = evaluate(replace(case, mode="padding"))
    assert snr_db(answer(case), expected) >= SNR_DB
    assert snr_db(wrong, expected) < 60


@pytest.mark.parametrize(("tokens", "gate_db"), [(100_000, 100.0), (1_000_000, 95.0)])
@pytest.mark.parametrize("mode", ["none", "padding", "causal", "causal_padding"])
@pytest.mark.parametrize("rotary", [None, "1d"])
def test_long_sequences_keep_their_precision(mode: str, rotary: str | None, tokens: int, gate_db: float) -> None:
    """Sums are where FP32 is lost: the last queries of a long sequence see them all."""
    config = {"dim": 4, "degree": 3, "expand": 1, "n_groups": 1, "n_sel_heads": 1, "bias": False, "rotary": rotary}
    rng = np.random.default_rng(tokens)
    inputs = {"x": rng.standard_normal((1, tokens, 4)).astype(np.float32)}
    if mode.endswith("padding"):
        inputs["mask"] = (rng.random((1, tokens)) < 0.8).astype(np.float32)
    case = Case(config, random_params(rng, config), inputs, mode)
    queries = np.array([tokens // 3, tokens - 2, tokens - 1])
    weights = np.ones((1, 3, tokens)) * inputs.get("mask", np.ones((1, tokens)))[:, None]
    if case.causal:
        weights *= np.arange(tokens) <= queries[:, None]
    expected = mix(config, case.params, inputs["x"][:, queries], inputs["x"], weights, queries, np.arange(tokens))
    found = snr_db(answer(case)[:, queries], expected)
    assert found >= gate_db, f"{found:.1f} dB"


@pytest.mark.parametrize("degree", [1, 2, 3, 5])
@pytest.mark.parametrize("mode", ["none", "padding", "causal", "causal_padding", "per_query"])
def test_the_cumulative_mixer_agrees_with_its_oracle(degree: int, mode: str) -> None:
    torch.manual_seed(degree)
    layer = CumulativePoM(8, degree, 2, bias=degree != 3).eval()
    with torch.no_grad():
        layer.po_proj.weight.mul_(4)
    x = torch.randn(2, 13, 8)
    mask = None
    if mode.endswith("padding"):
        mask = torch.rand(2, 13) < 0.7
    elif mode == "per_query":
        mask = torch.rand(2, 13, 13) < 0.7
    with torch.no_grad():
        found = layer(x, mask=mask, causal=mode.startswith("causal")).numpy()
    params = {name: value.numpy() for name, value in layer.state_dict().items()}
    weights = admitted(mode, None if mask is None else mask.numpy(), 2, 13, 13)
    assert snr_db(found, evaluate_cumulative(params, degree, x.numpy(), weights)) >= SNR_DB
