"""The text demo's task metric: ``pom-export demos/text/model.pt --metric demos/text/metric.py:bits --max-drop 0.02``."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pom_edge.metric import Run

TOKENS = 512  # of a stretch, as in training

__all__ = ["bits"]


def bits(run: Run) -> float:
    """Minus the mean cost of a byte in bits, over the held-out text beside this file, 32 KiB."""
    text = np.frombuffer((Path(__file__).parent / "heldout.txt").read_bytes(), np.uint8).astype(np.int64)
    count = (len(text) - 1) // TOKENS
    stretches = np.lib.stride_tricks.sliding_window_view(text, TOKENS + 1)[::TOKENS][:count]
    logits = run(stretches[:, :-1])
    assert not isinstance(logits, dict)
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    of_next = np.take_along_axis(shifted, stretches[:, 1:, None], -1)[..., 0]
    return -float((np.log(np.exp(shifted).sum(-1)) - of_next).mean()) / float(np.log(2))
