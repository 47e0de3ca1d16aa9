"""Shared exports: an export costs seconds, so tests that only look at one share it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)  # the suite runs in two workers on two cores


@pytest.fixture(scope="session")
def encoder_pom(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh, untrained 4-block encoder with padding mask, exported: the hardest model for a gate to judge."""
    from pom_edge.models import ModelConfig, build_model
    from pom_edge.pipeline import export_bundle

    torch.manual_seed(0)
    model = build_model(ModelConfig(kind="encoder", dim=32, depth=4, input_dim=12, n_sel_heads=4))
    folder = tmp_path_factory.mktemp("encoder")
    inputs = {"x": torch.randn(2, 24, 12), "mask": torch.ones(2, 24)}
    return export_bundle(model, example_inputs=inputs, out=folder / "encoder.pom").bundle
