"""What a tensor's scale is taken from: observers in bounded memory, whose answer does not depend on how data came in batches.

Everything is symmetric around zero: a scale s says x = s q with q an 8-bit integer and zero point 0.

    minmax      s = max |x| / 127
    percentile  as minmax after leaving out the largest 0.01 % of the magnitudes
    mse         the clipping limit whose expected squared error over the observed magnitudes is least

Magnitudes are counted in buckets of a float's own exponent and leading mantissa bits: 2^16 counters hold any float to 0.4 %,
need no range to begin with, and add up to the same counts in any order.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from pom_edge.quantize.libraries import imported_quietly
from pom_edge.quantize.scales import best_clip, channel_scales

with imported_quietly():
    from torchao.quantization.pt2e.observer import ObserverBase

Method = Literal["minmax", "percentile", "mse"]
METHODS: tuple[Method, ...] = ("minmax", "percentile", "mse")
ACTIVATION_LIMIT = 127  # one step below -127 is left to saturation: QuantizeLinear ends at -128, TensorRT's too
PERCENTILE = 99.99
SHIFT = 15  # of a float's 31 bits below the sign, 16 are counted: 8 of exponent and 8 of mantissa
BUCKETS = 1 << (31 - SHIFT)
BLOCK = 1 << 22  # elements counted at once: bincount widens its input to int64

__all__ = ["ACTIVATION_LIMIT", "METHODS", "ActivationObserver", "Method", "Observer", "WeightObserver", "as_int8"]


class Limits(Protocol):
    """What says which integers there are."""

    quant_min: int
    quant_max: int
    ch_axis: int | None


class Observer(ObserverBase):  # type: ignore[misc]  # torchao is untyped
    """Watches a tensor; afterwards quantizes it where that is switched on.

    Attributes:
        watching: take note of what runs through.
        quantizing: return the tensor as INT8 would hold it: how one layer alone is tried.
        dtype: int8; anything else makes torchao's conversion leave the tensor in float.
    """

    limit: int
    ch_axis: int | None

    def __init__(self, limit: int, low: int, ch_axis: int | None) -> None:
        super().__init__(dtype=torch.int8)
        self.limit, self.quant_min, self.quant_max = limit, low, limit
        self.ch_axis = ch_axis
        self.qscheme = torch.per_tensor_symmetric if ch_axis is None else torch.per_channel_symmetric
        self.watching, self.quantizing = True, False
        self._fixed: Tensor | None = None

    @property
    def scale(self) -> Tensor:
        """Positive, () or one for each channel (C)."""
        raise NotImplementedError

    @property
    def seen(self) -> bool:
        """Whether anything but zeros was watched."""
        raise NotImplementedError

    def watch(self, x: Tensor) -> None:
        """Take note of a tensor."""
        raise NotImplementedError

    def calculate_qparams(self, **_: Any) -> tuple[Tensor, Tensor]:
        """For torchao: scale and zero point, which is 0."""
        scale = self.scale
        return scale, torch.zeros(scale.shape, dtype=torch.int32)

    def float_again(self) -> None:
        """Leave the tensor in float when the module is converted."""
        self.dtype = torch.float32

    def quantize(self, on: bool) -> None:
        """Switch quantizing on or off; the scale is that of what was watched until now."""
        self.quantizing = on
        self._fixed = self.scale if on else None

    def forward(self, x: Tensor) -> Tensor:
        """x, or x as INT8 holds it."""
        if self.watching:
            self.watch(x.detach())
        return as_int8(x, self._fixed, self) if self.quantizing and self._fixed is not None else x


def as_int8(x: Tensor, scale: Tensor, observer: Limits) -> Tensor:
    """x rounded to integer multiples of its scale; gradients go straight through where nothing is clipped."""
    zero = torch.zeros(scale.shape, dtype=torch.int32)
    if observer.ch_axis is None:
        return torch.fake_quantize_per_tensor_affine(x, scale, zero, observer.quant_min, observer.quant_max)
    return torch.fake_quantize_per_channel_affine(x, scale, zero, observer.ch_axis, observer.quant_min, observer.quant_max)


class ActivationObserver(Observer):
    """One scale for a tensor whose values depend on the data.

    Args:
        method: how the clipping limit is chosen.
        percentile: for that method.
    """

    counts: Tensor
    largest: Tensor

    def __init__(self, method: Method = "minmax", percentile: float = PERCENTILE) -> None:
        # QuantizeLinear has no limits of its own: eager arithmetic saturates where the file will, at -128.
        super().__init__(ACTIVATION_LIMIT, -ACTIVATION_LIMIT - 1, None)
        self.method, self.percentile = method, percentile
        self.register_buffer("counts", torch.zeros(BUCKETS, dtype=torch.int64))
        self.register_buffer("largest", torch.zeros(()))

    @property
    def seen(self) -> bool:
        return bool(self.largest > 0)

    @property
    def outlying(self) -> float:
        """The largest magnitude over the one that 99.99 % of the values do not exceed."""
        return float(self.largest / self._percentile(PERCENTILE)) if self.seen else 1.0

    def watch(self, x: Tensor) -> None:
        magnitude = x.abs().float().flatten()
        if not magnitude.numel():
            return
        self.largest = torch.maximum(self.largest, magnitude.max())
        for part in magnitude.split(BLOCK):
            self.counts += torch.bincount(part.view(torch.int32) >> SHIFT, minlength=BUCKETS)

    @property
    def scale(self) -> Tensor:
        if not self.seen:
            return torch.ones(())
        clip = float(self.largest)
        if self.method == "percentile":
            clip = self._percentile(self.percentile)
        elif self.method == "mse":
            clip = best_clip(self._centres(), self.counts.double(), clip, self.limit)
        return torch.tensor(clip / self.limit, dtype=torch.float32)

    def _percentile(self, percentile: float) -> float:
        """Upper edge of the bucket in which the percentile lies, at most the largest magnitude."""
        wanted = percentile / 100 * float(self.counts.sum())
        bucket = int(torch.searchsorted(self.counts.cumsum(0).double(), torch.tensor(wanted, dtype=torch.float64)))
        edge = torch.tensor([min(bucket + 1, BUCKETS - 1) << SHIFT], dtype=torch.int32).view(torch.float32)
        return min(float(edge), float(self.largest)) or float(self.largest)

    def _centres(self) -> Tensor:
        middle = (torch.arange(BUCKETS, dtype=torch.int32) << SHIFT) + (1 << (SHIFT - 1))
        return middle.view(torch.float32).double()


class WeightObserver(Observer):
    """One scale for each channel of a weight, which is watched once.

    Args:
        ch_axis: axis of the channels.
        limit: 127, or 63 where the kernels of a processor saturate with more.
        mse: clip each channel where its squared error is least; otherwise nothing is clipped.
    """

    def __init__(self, ch_axis: int, limit: int = 127, mse: bool = False) -> None:
        super().__init__(limit, -limit, ch_axis)
        self.mse = mse
        self._scale: Tensor | None = None

    @property
    def seen(self) -> bool:
        return True

    def watch(self, x: Tensor) -> None:
        if self._scale is None:
            assert self.ch_axis is not None
            self._scale = channel_scales(x, self.ch_axis, self.limit, self.mse)

    @property
    def scale(self) -> Tensor:
        assert self._scale is not None, "the prepared module has not run"
        return self._scale
