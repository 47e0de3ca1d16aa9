"""The yardstick of every "published / ours" computes what the published module was recorded to compute."""

from __future__ import annotations

import pytest
import torch

from benchmarks.published_form import PublishedForm
from pom_edge.runtimes.parity import measure
from tests.golden import PARALLEL, read
from tests.mixers import build, tensors

WHOLE = [
    name
    for name in PARALLEL
    if (case := read(name).case).mode in ("none", "causal") and not case.config["rotary"] and case.config["n_groups"] == 1
]


@torch.no_grad()
@pytest.mark.parametrize("name", WHOLE)
def test_it_is_the_published_module(name: str) -> None:
    case = read(name).case
    found = PublishedForm(build(case), case.causal)(tensors(case)["x"]).numpy()
    assert measure(read(name).y, found).snr_db >= 120


def test_both_ways_of_a_mean_are_among_them() -> None:
    assert {read(name).case.mode for name in WHOLE} == {"none", "causal"} and len(WHOLE) == 9


@torch.no_grad()
def test_another_function_is_far_from_the_recording() -> None:
    """The bound can fail: the mean over all tokens in place of those before."""
    name = next(name for name in WHOLE if read(name).case.causal)
    case = read(name).case
    assert measure(read(name).y, PublishedForm(build(case), causal=False)(tensors(case)["x"]).numpy()).snr_db < 40
