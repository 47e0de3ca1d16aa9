"""An export within a memory budget: what a form would take, known from its graphs before anything else is made of it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from pom_edge.bundle import Artifact, finish_bundle
from pom_edge.errors import GateError
from pom_edge.runtimes.memory import Prediction, predict, stored_bytes, token_count
from pom_edge.system import human_bytes

if TYPE_CHECKING:
    from pom_edge.export.made import Made

SMALLER_CHUNKS = (2048, 1024, 512, 256, 128, 64)  # where the fastest is over the budget

__all__ = ["OverBudgetError", "keep_budget"]


class OverBudgetError(GateError):
    """A form's prediction is over the budget.

    Args:
        form: its name.
        prediction: of its memory.
        chunk: streamed form: tokens of a chunk; else 0.
        scaling: bytes of the prediction that shrink with the chunk, at most in proportion.
    """

    def __init__(self, form: str, prediction: Prediction, chunk: int, scaling: int) -> None:
        self.prediction, self.total, self._chunk, self._scaling = prediction, prediction.total, chunk, scaling
        parts = ", ".join(f"{name} {human_bytes(size)}" for name, size in prediction.to_dict().items() if name != "total")
        super().__init__(f"{form}{f' in chunks of {chunk}' if chunk else ''} takes {human_bytes(self.total)} ({parts})")

    def smaller(self, budget: int) -> int | None:
        """The next chunk size worth an attempt: those whose least possible memory is over the budget are passed over, but for
        the smallest, which names the smallest budget. None: there is none."""
        left = [chunk for chunk in SMALLER_CHUNKS if chunk < self._chunk]
        least = {chunk: self.total - self._scaling * (self._chunk - chunk) // self._chunk for chunk in left}
        return next((chunk for chunk in left if least[chunk] <= budget), left[-1] if left else None)


def keep_budget(made: Made, budget: int, tokens: int | None, batch: int) -> str:
    """Predict from the graphs alone, before minutes of work are spent on a form that is over the budget.

    Returns:
        A note that says what is predicted.

    Raises:
        OverBudgetError: it is over the budget.
    """
    from pom_edge.export.arena import arena_plan  # needs onnx, which an export has

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        files = made.save(folder, {})
        arena = [arena_plan(folder / file) for file in files if file.endswith(".onnx")]
        artifact = Artifact(
            target="onnx",
            form=made.plan.form,
            precision="fp32",
            file=made.file,
            files=files,
            verified="not verified",
            **made.fields(),
            arena=arena,
        )
        about = {"name": "draft", "created": "", "producer": "", "tools": {}, "model": {}, "config_hash": "", "golden": []}
        finish_bundle(folder, {**about, "artifacts": [artifact]}, {})
        prediction = predict(folder, tokens, batch)
    if prediction.total > budget:
        stored = 0 if artifact.stream is None else stored_bytes(artifact.stream, token_count(artifact, tokens) or 1)
        raise OverBudgetError(made.plan.form, prediction, made.chunk, prediction.activations - stored)
    return f"memory predicted: {human_bytes(prediction.total)} of {human_bytes(budget)}"
