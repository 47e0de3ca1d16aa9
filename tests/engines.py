"""Bundles from which engines are built, shared by the tests of builder and runtime: an export costs seconds."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from pom_edge.bundle import MANIFEST, seal

__all__ = ["edit_manifest", "small_bundle"]


@cache
def small_bundle(folder: Path) -> Path:
    """A two-block encoder with free batch and tokens: FP32, FP16 and INT8."""
    import torch

    from pom_edge.models import ModelConfig, build_model
    from pom_edge.pipeline import export_bundle

    torch.manual_seed(0)
    model = build_model(ModelConfig(kind="encoder", dim=32, depth=2, input_dim=12, n_sel_heads=4))
    generator = torch.Generator().manual_seed(1)
    batches = [{"x": torch.randn(4, 16, 12, generator=generator), "mask": torch.ones(4, 16)} for _ in range(4)]
    inputs = {"x": torch.randn(2, 16, 12, generator=generator), "mask": torch.ones(2, 16)}
    precisions = ["fp32", "fp16", "int8"]
    return export_bundle(
        model, precision=precisions, calibration=batches, example_inputs=inputs, out=folder / "small.pom"
    ).bundle


def edit_manifest(bundle: Path, change: Any) -> None:
    """Change a manifest as somebody would who also knows how to seal it."""
    content = json.loads((bundle / MANIFEST).read_text())
    change(content)
    (bundle / MANIFEST).write_text(seal(content))
