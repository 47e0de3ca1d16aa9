"""Images in the streamed form: patches as tokens, and pixels put back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pom_edge import PoM, build_model, export_bundle, open_session
from pom_edge.bundle import Bundle
from pom_edge.checkpoint import save_checkpoint
from pom_edge.errors import InputError
from pom_edge.models import DensePredictor, ModelConfig
from pom_edge.pipeline import ExportOptions, export_file
from pom_edge.runtimes import check_bundle
from pom_edge.runtimes.patches import GridRows, PatchRows, PixelRows
from tests.oracle import snr_db

PATCH, SIDE = 4, 20
SETTINGS: dict[str, Any] = {"dim": 16, "depth": 2, "patch_size": PATCH, "channels": 3, "num_classes": 5, "image_size": SIDE}


def _image_model(kind: Any, rotary: Any) -> nn.Module:
    torch.manual_seed(0)
    model = build_model(ModelConfig(kind, rotary=rotary, n_sel_heads=4 if rotary else 1, **SETTINGS))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.eval()


@pytest.mark.parametrize("rotary", [None, "2d"])
@pytest.mark.parametrize("kind", ["classifier", "dense"])
def test_an_image_model_is_the_model(kind: str, rotary: str | None, tmp_path: Path) -> None:
    """Chunks of 7 patches end within rows of 5; the dense model takes any image of whole patches."""
    model = _image_model(kind, rotary)
    path = export_bundle(model, form="streamed", chunk=7, out=tmp_path / "a.pom").bundle
    stream = Bundle.open(path).manifest.artifacts[0].stream
    assert stream is not None and [step.looped for step in stream.passes] == [True] * 3 + [False] * (kind == "classifier")
    assert check_bundle(path, layers=True).passed
    sizes = [(SIDE, SIDE)] if kind == "classifier" else [(SIDE, SIDE), (PATCH, PATCH), (12, 28), (100, 36)]
    with open_session(path) as session, open_session(path, spill=tmp_path) as spilled:
        for height, width in sizes:
            x = torch.randn(1, 3, height, width, generator=torch.Generator().manual_seed(height))
            with torch.no_grad():
                expected = model.double()(x.double()).numpy()
            model.float()
            y = np.asarray(session.run(x.numpy()))
            assert y.shape == expected.shape and snr_db(y, expected) > 110
            np.testing.assert_array_equal(spilled.run(x.numpy()), y)


def test_samples_of_a_checkpoint_are_cut_to_the_batch(tmp_path: Path) -> None:
    model = _image_model("classifier", None)
    x = torch.randn(6, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    save_checkpoint(tmp_path / "m.pt", model, model.config, samples={"x": x})  # type: ignore[arg-type]
    path = export_file(tmp_path / "m.pt", ExportOptions(form="streamed", chunk=7, batch=2)).bundle
    kinds = {case.kind: inputs["x"].shape for case, inputs, _ in Bundle.open(path).cases()}
    assert kinds == {"real": (2, 3, SIDE, SIDE), "random": (2, 3, SIDE, SIDE)}


def test_images_that_do_not_fit(tmp_path: Path) -> None:
    path = export_bundle(_image_model("dense", None), form="streamed", chunk=7, out=tmp_path / "a.pom").bundle
    np.save(tmp_path / "x.npy", np.zeros((1, 3, SIDE, SIDE), np.float32))
    with open_session(path) as session:
        with pytest.raises(InputError, match="has 22 x 20 pixels; expected multiples of 4, the side of a patch"):
            session.run(np.zeros((1, 3, 22, SIDE), np.float32))
        with pytest.raises(InputError, match="has 2 along axis 1"):
            session.run(np.zeros((1, 2, SIDE, SIDE), np.float32))
        spoilt = np.zeros((1, 3, SIDE, SIDE), np.float32)
        spoilt[0, 1, 9, 6] = np.nan  # row 2, column 1 of the patches
        with pytest.raises(InputError, match="input 'x' contains NaN or infinity at patch 11,"):
            session.run(spoilt)
        with pytest.raises(InputError, match=r"takes images \(x\).*--output y\.npz"):
            session.run_file(tmp_path / "x.npy", tmp_path / "y.npy")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.pom", "x.npy"]


class _Stem(nn.Module):
    """An image model of somebody else."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mixer = nn.Conv2d(3, 8, 4, stride=4), PoM(8, 2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mixer(self.stem(x).flatten(2).transpose(1, 2))  # type: ignore[no-any-return]


class _Scaled(DensePredictor):
    """A subclass of ours that computes something else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize("make", [_Stem, lambda: _Scaled(ModelConfig("dense", **SETTINGS))])
def test_other_image_models_are_refused(make: Any, tmp_path: Path) -> None:
    inputs = {"x": torch.randn(1, 3, SIDE, SIDE)}
    with pytest.raises(InputError, match="the reference models.*cut the image into patches outside of yours"):
        export_bundle(make(), form="streamed", chunk=7, example_inputs=inputs, out=tmp_path / "a.pom")


def test_patches_and_pixels_are_those_of_torch() -> None:
    """Against unfold and pixel_shuffle, in pieces that start and end within rows."""
    x = torch.randn(2, 3, 12, 20)
    patches = F.unfold(x, PATCH, stride=PATCH).transpose(1, 2).numpy()  # (2, 15, 48)
    tokens = torch.randn(2, 15, 5 * PATCH**2)
    made = PixelRows(np.zeros((2, 5, 12, 20), np.float32), PATCH)
    for start, count in ((0, 1), (1, 6), (7, 7), (14, 1)):
        np.testing.assert_array_equal(PatchRows(x.numpy(), PATCH).read(start, count), patches[:, start : start + count])
        made.write(start, tokens[:, start : start + count].numpy())
    np.testing.assert_array_equal(made.array, F.pixel_shuffle(tokens.transpose(1, 2).unflatten(2, (3, 5)), PATCH).numpy())
    np.testing.assert_array_equal(GridRows(5).read(4, 3), [[0, 4], [1, 0], [1, 1]])
