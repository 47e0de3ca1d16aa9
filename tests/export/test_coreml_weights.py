"""Palettes of weights: as good as theory says, and never worse than they look."""

from __future__ import annotations

import numpy as np
import pytest

from pom_edge.export.coreml_weights import palette
from pom_edge.runtimes.parity import measure


@pytest.mark.parametrize("bits", [4, 6, 8])
def test_uniform_weights_reach_six_decibels_a_bit(bits: int) -> None:
    weight = np.random.default_rng(0).uniform(-1, 1, (128, 256))
    values, index = palette(weight, bits)
    assert values.shape == (1 << bits,) and index.shape == (weight.size,) and index.dtype == np.uint8
    assert measure(weight, values[index].reshape(weight.shape)).snr_db == pytest.approx(20 * np.log10(2) * bits, abs=0.3)


@pytest.mark.parametrize(("bits", "optimum"), [(4, 20.2), (6, 31.9), (8, 43.8)])
def test_normal_weights_come_near_the_optimal_quantizer(bits: int, optimum: float) -> None:
    """Lloyd-Max: 20.22 dB at 4 bits; above, Panter and Dite's 6.02 b - 4.35 dB."""
    weight = np.random.default_rng(0).standard_normal((384, 384)).astype(np.float16)
    values, index = palette(weight, bits)
    assert values.dtype == np.float16
    assert measure(weight.reshape(-1), values[index]).snr_db >= optimum - 0.3


@pytest.mark.parametrize("weight", [np.zeros((32, 32), np.float16), np.full(600, 3.0), np.repeat([-1.0, 0.0, 2.0], 300)])
def test_few_distinct_weights_are_exact(weight: np.ndarray) -> None:
    values, index = palette(weight, 4)
    np.testing.assert_allclose(values[index].reshape(weight.shape), weight, rtol=0, atol=1e-12)
