"""Quantization-aware training: an ordinary module to train, and weights that lose less when they become INT8."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pom_edge.errors import InputError
from pom_edge.mixer import PoM
from pom_edge.quantize import prepare_qat
from tests.mixers import lively
from tests.oracle import snr_db


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.mixer, self.head = nn.Linear(6, 16), lively(PoM(16, degree=2, expand=2, n_sel_heads=4)), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.head(h + self.mixer(h)).mean(1)


def _model() -> Small:
    torch.manual_seed(0)
    return Small().eval()


X = torch.randn(64, 10, 6, generator=torch.Generator().manual_seed(0))


def test_what_is_trained_is_the_model_itself() -> None:
    model = _model()
    training = prepare_qat(model, {"x": X[:2]})
    names = {name.removeprefix("graph.model.") for name, _ in training.named_parameters()}
    assert names == {name for name, _ in model.named_parameters()}
    assert training.layers == ["up", "mixer.qc_proj", "mixer.qc_proj#1", "mixer.ag_proj", "head"]
    before = training(X)
    assert isinstance(before, Tensor) and not torch.allclose(before, model(X), atol=1e-5)  # rounded
    assert torch.allclose(before, model(X), atol=0.1)
    F.mse_loss(training(X), torch.zeros(64, 3)).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in training.parameters())
    assert torch.equal(training.finished()(X), model(X))  # nothing was stepped yet, and the original has no gradient
    assert all(p.grad is None for p in model.parameters())


def test_ranges_follow_data_in_training_only() -> None:
    training = prepare_qat(_model(), {"x": X[:2]})
    training.train()
    training(X)
    training.eval()
    first = training(X)
    training(100 * X)
    assert torch.equal(first, training(X))
    training.train()
    training(100 * X)
    training.eval()
    assert not torch.equal(first, training(X))


def test_training_regains_what_rounding_lost() -> None:
    """Towards the float model's own answers, 7-bit weights made worse by one outlying column of the input."""
    model = _model()
    with torch.no_grad():
        model.up.weight[:, 0] *= 30
        model.mixer.ag_proj.weight[:, 5] *= 20
    target = model(X).detach()
    training = prepare_qat(model, {"x": X[:2]}, weight_bits=7)
    training.train()
    training(X)
    start = F.mse_loss(training(X), target).item()
    optimizer = torch.optim.Adam(training.parameters(), lr=3e-4)
    for _ in range(150):
        optimizer.zero_grad()
        loss = F.mse_loss(training(X), target)
        loss.backward()
        optimizer.step()
    training.eval()
    assert F.mse_loss(training(X), target).item() < 0.5 * start


def test_refusals() -> None:
    with pytest.raises(InputError, match="has no inputs"):
        prepare_qat(_model(), {})
    with pytest.raises(InputError, match="no layer with a weight"):
        prepare_qat(nn.Sequential(nn.ReLU()), {"input": X})
    with pytest.raises(InputError, match="'nothing' is none of the layers"):
        prepare_qat(_model(), {"x": X[:2]}, keep_float=["nothing"])


def test_batch_norms_keep_their_statistics() -> None:
    """They are those of the checkpoint, as in the file: training does not see others, and leaves them alone."""
    torch.manual_seed(0)

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.mixer = nn.BatchNorm1d(12), PoM(12, 2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.mixer(self.norm(x.transpose(1, 2)).transpose(1, 2))

    model = Normed()
    nn.init.normal_(model.mixer.po_coeff)
    for _ in range(20):
        model(3 * torch.randn(16, 8, 12) + 1)
    model.eval()
    x = 3 * torch.randn(4, 8, 12) + 1
    training = prepare_qat(model, {"x": x})
    for _ in range(3):
        training(x)
    with torch.no_grad():
        assert snr_db(training(x).numpy(), model(x).numpy()) > 25
        assert torch.equal(training.finished()(x), model(x))
