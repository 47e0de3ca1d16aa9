"""What a model returns, by name: no tensor is lost on the way."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from pom_edge.errors import InputError
from pom_edge.export.reference import named_outputs

A, B, C = torch.zeros(1), torch.ones(1), torch.ones(2)


@dataclass
class Answer:
    logits: torch.Tensor
    hidden: Any = None


Pair = namedtuple("Pair", ["first", "second"])


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (A, {"y": A}),
        ((A, B), {"y": A, "output_1": B}),
        ([A, (B, C)], {"y": A, "output_1_0": B, "output_1_1": C}),
        ({"logits": A, "aux": [B, C]}, {"y": A, "aux_0": B, "aux_1": C}),
        ({"loss": None, "logits": A, "n": 3, "note": "text", "deep": {"b": B}}, {"y": A, "deep_b": B}),
        (Answer(A, (B, None, C)), {"y": A, "hidden_0": B, "hidden_2": C}),
        (Pair(A, B), {"y": A, "output_1": B}),
    ],
)
def test_every_tensor_has_a_name(result: Any, expected: dict[str, torch.Tensor]) -> None:
    found = named_outputs(result)
    assert list(found) == list(expected) and all(found[name] is expected[name] for name in expected)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, "without a tensor"),
        ({"loss": None}, "without a tensor"),
        ({"y": A, "extra": object()}, "returned object in extra, which may hold tensors"),
        ((A, {B}), "returned set in output_1"),
        ({"a": A, "b": {"c": B}, "b_c": C}, "one name"),
    ],
)
def test_what_would_be_lost_is_refused(result: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        named_outputs(result)
