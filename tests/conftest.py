"""Shared exports: an export costs seconds, so tests that only look at one share it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
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


@pytest.fixture
def put_coremltools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], None]]:
    """Puts a package of this name, with this code in it, before what is installed."""
    folder, name = tmp_path_factory.mktemp("site"), "coremltools"

    def loaded() -> list[str]:
        return [module for module in sys.modules if module.partition(".")[0] == name]

    def put(code: str) -> None:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(code)
        sys.path.insert(0, str(folder))

    before = {module: sys.modules.pop(module) for module in loaded()}
    yield put
    sys.path[:] = [path for path in sys.path if path != str(folder)]
    for module in loaded():
        del sys.modules[module]
    sys.modules.update(before)
