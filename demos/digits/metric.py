"""The digits demo's task metric: ``pom-export demos/digits/model.pt --metric demos/digits/metric.py:accuracy``."""

from __future__ import annotations

from pathlib import Path

from demos.digits.images import load_digits, model_input
from pom_edge.metric import Run

__all__ = ["accuracy"]


def accuracy(run: Run) -> float:
    """Per cent of the 1,000 held-out test images that are read right."""
    digits = load_digits(Path(__file__).parent / "test_images.npz")
    logits = run(model_input(digits.images))
    assert not isinstance(logits, dict)
    return 100 * float((logits.argmax(-1) == digits.labels).mean())
