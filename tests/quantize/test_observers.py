"""Observers: the same scale however data came in batches, against NumPy over all values at once."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pom_edge.quantize.observers import METHODS, ActivationObserver, Method, WeightObserver
from pom_edge.quantize.scales import best_clip, channel_scales

VALUES = torch.randn(6000, generator=torch.Generator().manual_seed(0)) ** 3


def _observed(method: Method, parts: list[torch.Tensor], percentile: float = 99.9) -> ActivationObserver:
    observer = ActivationObserver(method, percentile)
    for part in parts:
        observer(part)
    return observer


@pytest.mark.parametrize("method", METHODS)
def test_scale_does_not_depend_on_batches(method: Method) -> None:
    whole = float(_observed(method, [VALUES]).scale)
    for pieces in (VALUES.split(7), tuple(VALUES.flip(0).split(1000)), (VALUES.reshape(2, 30, 100),)):
        assert float(_observed(method, list(pieces)).scale) == whole


def test_minmax_and_percentile_against_numpy() -> None:
    magnitudes = VALUES.abs().double().numpy()
    assert float(_observed("minmax", [VALUES]).scale) == pytest.approx(magnitudes.max() / 127, rel=1e-6)
    found = float(_observed("percentile", [VALUES]).scale) * 127
    assert found == pytest.approx(np.quantile(magnitudes, 0.999, method="higher"), rel=2**-7)


def test_mse_is_no_worse_than_any_clip() -> None:
    """The real squared error with the chosen scale, against a search over real errors."""

    def error(scale: float) -> float:
        again = torch.fake_quantize_per_tensor_affine(VALUES, scale, 0, -128, 127)
        return float(((VALUES - again).double() ** 2).sum())

    largest = float(VALUES.abs().max())
    least = min(error(largest * part / 127) for part in np.geomspace(1, 0.05, 200))
    chosen = error(float(_observed("mse", [VALUES]).scale))
    assert least <= chosen <= 1.03 * least and chosen < error(largest / 127)


def test_memory_is_bounded_and_infinite_range_is_held() -> None:
    observer = _observed("percentile", [VALUES, VALUES * 1e30, VALUES * 1e-30])
    assert sum(buffer.numel() for buffer in observer.buffers()) <= 2**16 + 1
    assert 0 < float(observer.scale) < float("inf") and observer.outlying >= 1


def test_zeros_are_not_seen() -> None:
    assert not _observed("mse", [torch.zeros(3, 4)]).seen


def test_weight_scales() -> None:
    weight = torch.randn(5, 40, generator=torch.Generator().manual_seed(1))
    weight[2] = 0
    plain = channel_scales(weight, 0, 127, mse=False)
    expected = weight.abs().amax(1) / 127
    expected[2] = expected.max()
    assert torch.allclose(plain, expected)

    def error(scales: torch.Tensor, limit: int) -> torch.Tensor:
        return ((weight - (weight / scales[:, None]).round().clamp(-limit, limit) * scales[:, None]) ** 2).sum(1)

    assert (error(channel_scales(weight, 0, 7, mse=True), 7) <= error(channel_scales(weight, 0, 7, mse=False), 7)).all()


def test_seven_bits_stay_within_63() -> None:
    weight = torch.randn(4, 9)
    observer = WeightObserver(0, limit=63)
    observer(weight)
    observer.quantize(True)
    assert float((observer(weight) / observer.scale[:, None]).abs().max()) == pytest.approx(63, rel=1e-5)


def test_best_clip_keeps_everything_where_nothing_is_rare() -> None:
    assert best_clip(torch.linspace(0.1, 1, 50).double(), torch.ones(50).double(), 1.0, 127) == 1.0
