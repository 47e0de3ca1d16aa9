"""The polynomial regularisation: its value by hand, its gradient, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import pom_edge
from pom_edge.errors import InputError
from pom_edge.mixer import CumulativePoM, PoM, coefficient_penalty


def _set(layer: PoM, rows: list[list[float]]) -> PoM:
    with torch.no_grad():
        layer.po_coeff.copy_(torch.tensor(rows))
    return layer


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        (1, ((1 + 2 * 2 + 3 * 3) + (0 + 2 * 1 + 3 * 4)) / 2),
        (2, ((1 + 2 * 4 + 3 * 9) + (0 + 2 * 1 + 3 * 16)) / 2),
        (3, ((1 + 2 * 8 + 3 * 27) + (0 + 2 * 1 + 3 * 64)) / 2),
    ],
)
def test_the_value_by_hand(order: int, expected: float) -> None:
    """Mean over channels of sum_p p |c_p|^order, signs without effect."""
    layer = _set(PoM(2, 3, 1), [[1, -2, 3], [0, 1, -4]])
    assert coefficient_penalty(layer, order).item() == pytest.approx(expected, rel=1e-6)


def test_the_default_order_is_two() -> None:
    layer = _set(PoM(2, 2, 1), [[1, 2], [3, 4]])
    assert torch.equal(coefficient_penalty(layer), coefficient_penalty(layer, order=2))


def test_mixers_add_up_wherever_they_are() -> None:
    first, second = _set(PoM(2, 1, 1), [[1], [2]]), _set(PoM(1, 2, 1), [[1, 1]])
    model = nn.ModuleDict({"blocks": nn.ModuleList([nn.Sequential(nn.Linear(3, 2), first)]), "tail": second})
    expected = coefficient_penalty(first) + coefficient_penalty(second)
    assert coefficient_penalty(model).item() == pytest.approx(expected.item()) == 2.5 + 3


def test_a_shared_mixer_counts_once() -> None:
    layer = _set(PoM(2, 1, 1), [[1], [2]])
    assert torch.equal(coefficient_penalty(nn.ModuleList([layer, layer])), coefficient_penalty(layer))


def test_zero_coefficients_cost_nothing_and_have_a_finite_gradient() -> None:
    for order in (1, 2):
        layer = _set(PoM(2, 3, 1), [[0, 0, 0], [0, 0, 0]])
        penalty = coefficient_penalty(layer, order)
        penalty.backward()
        assert penalty.item() == 0
        assert layer.po_coeff.grad is not None and torch.equal(layer.po_coeff.grad, torch.zeros(2, 3))


def test_high_powers_are_pushed_harder_and_nothing_else_is() -> None:
    layer = _set(PoM(4, 4, 1, n_sel_heads=2), [[1.0] * 4] * 4)
    coefficient_penalty(layer).backward()
    gradient = layer.po_coeff.grad
    assert gradient is not None and torch.allclose(gradient, torch.tensor([2.0, 4.0, 6.0, 8.0]).expand(4, 4) / 4)
    assert all(p.grad is None for name, p in layer.named_parameters() if name != "po_coeff")


def test_training_with_the_penalty_shrinks_high_powers() -> None:
    torch.manual_seed(0)
    x, target = torch.randn(4, 12, 8), torch.randn(4, 12, 8)

    def trained(weight: float) -> torch.Tensor:
        torch.manual_seed(1)
        layer = PoM(8, 4, 2)
        nn.init.normal_(layer.po_coeff, std=0.3)
        for _ in range(60):
            loss = nn.functional.mse_loss(layer(x), target) + weight * coefficient_penalty(layer)
            (gradient,) = torch.autograd.grad(loss, [layer.po_coeff])
            with torch.no_grad():
                layer.po_coeff.sub_(0.1 * gradient)
        return layer.po_coeff.detach().abs().mean(0)

    free, held = trained(0.0), trained(0.1)
    kept = held / free
    assert (kept < 1).all() and (kept[1:] < kept[:-1]).all(), "the higher the power, the more it shrinks"


@pytest.mark.parametrize("model", [nn.Linear(3, 3), nn.Identity(), CumulativePoM(4, 2, 1)])
def test_a_model_without_coefficients_is_refused(model: nn.Module) -> None:
    with pytest.raises(InputError, match="no PoM layer"):
        coefficient_penalty(model)


def test_it_is_part_of_the_face_of_the_toolkit() -> None:
    assert pom_edge.coefficient_penalty is coefficient_penalty
