"""Metrics by hand-made cases, and gates that are seen to fail."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pom_edge.errors import InputError
from pom_edge.runtimes.parity import GATES_DB, MAX_SNR_DB, Vacuity, compare, measure, prove_not_vacuous, summarise, worst

REF = np.random.default_rng(0).standard_normal((2, 7, 5)).astype(np.float32)


def test_snr_of_a_known_error() -> None:
    found = measure(REF, REF * 1.001)
    assert found.snr_db == pytest.approx(60, abs=0.01)  # 10 log10(1 / 0.001^2)
    assert found.max_rel == pytest.approx(1e-3, rel=1e-3)
    assert found.cosine == pytest.approx(1)


def test_an_all_zero_answer_scores_zero_however_small_the_reference() -> None:
    found = measure(REF * 1e-6, np.zeros_like(REF))
    assert found.snr_db == pytest.approx(0) and found.cosine == 0
    assert not any(found.passes(gate) for gate in GATES_DB.values())


def test_identical_and_zero_references() -> None:
    assert measure(REF, REF).snr_db == MAX_SNR_DB
    zero = np.zeros_like(REF)
    assert measure(zero, zero).snr_db == MAX_SNR_DB
    assert measure(zero, REF).snr_db == -MAX_SNR_DB


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nonfinite_never_passes(bad: float) -> None:
    out = REF.copy()
    out[0, 0, 0] = bad
    found = measure(REF, out)
    assert found.nonfinite == 1 and not found.passes(-MAX_SNR_DB)


def test_nan_in_both_places_is_not_held_against_the_output() -> None:
    ref = REF.copy()
    ref[0, 0, 0] = math.nan
    assert measure(ref, ref).nonfinite == 0


def test_half_precision_is_widened_before_the_difference() -> None:
    big = np.full((4, 4), 60000, np.float16)
    assert measure(big, big - np.float16(32)).max_rel == pytest.approx(32 / 60000, rel=1e-2)


def test_top1() -> None:
    logits = np.array([[0.1, 0.9], [0.8, 0.2]])
    assert measure(logits, logits[:, ::-1]).top1 == 0
    assert measure(logits, logits + 1e-3).top1 == 1


def test_shapes_and_names_that_do_not_fit() -> None:
    with pytest.raises(InputError, match="shape"):
        measure(REF, REF[:1])
    with pytest.raises(InputError, match="outputs y are missing"):
        compare({"y": REF}, {"z": REF}, 90)
    with pytest.raises(InputError, match="no output was compared"):
        compare({}, {"z": REF}, 90)


def test_every_value_must_hold_the_gate() -> None:
    both = compare({"y": REF, "mixer": REF}, {"y": REF, "mixer": REF * 1.01}, 90)
    assert both.failed == ["mixer"] and not both.passed


def test_worst_takes_the_worst_of_each() -> None:
    found = worst([measure(REF, REF * 1.001), measure(REF, REF)])
    assert found.snr_db == pytest.approx(60, abs=0.01) and found.max_rel > 0


def test_a_lively_answer_proves_its_gate() -> None:
    assert [result.caught for result in prove_not_vacuous({"y": REF}, 90)] == [True, True]


def test_a_common_mean_does_not_hide_a_permutation() -> None:
    """Tokens that differ by 1e-6 of their mean: without centring the permuted answer would pass the gate."""
    shifted = 1e6 + REF.astype(np.float64)
    rolled = np.roll(shifted, 1, axis=1)
    assert measure(shifted, rolled).passes(90)
    zeroed, permuted = prove_not_vacuous({"y": shifted}, 90)
    assert zeroed.caught and permuted.caught


def test_undefined_tests_say_why() -> None:
    zeroed, permuted = prove_not_vacuous({"y": np.zeros((2, 7, 5))}, 90)
    assert zeroed.caught is None and "zero" in zeroed.note
    assert permuted.caught is None and "equal" in permuted.note
    _, permuted = prove_not_vacuous({"y": REF[:1, 0]}, 90)
    assert permuted.caught is None and "one row" in permuted.note


def test_pooled_outputs_are_permuted_over_the_batch() -> None:
    _, permuted = prove_not_vacuous({"y": REF[:, 0]}, 90)
    assert permuted.test == "permuted y (batch)" and permuted.caught


def test_a_gate_that_passes_everything_is_vacuous() -> None:
    assert [result.caught for result in prove_not_vacuous({"y": REF}, -MAX_SNR_DB)] == [False, False]


def test_summary_keeps_the_failure() -> None:
    results = [Vacuity("t", None, "why"), Vacuity("t", True), Vacuity("t", False), Vacuity("t", True)]
    assert summarise(results) == [Vacuity("t", False)]
    assert summarise(results[:2]) == [Vacuity("t", True)]
