"""Integer weights: palettes as good as theory says, which constants are weights, and which go back to floats."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from pom_edge.export import forms
from pom_edge.export.coreml_weights import compress, palette, weight_label, weights_of
from pom_edge.export.inputs import Extent
from pom_edge.export.onnx_graph import trace_graph
from pom_edge.models import ModelConfig, build_model
from pom_edge.runtimes.parity import measure


@pytest.mark.parametrize("bits", [4, 6, 8])
def test_uniform_weights_reach_six_decibels_a_bit(bits: int) -> None:
    weight = np.random.default_rng(0).uniform(-1, 1, (128, 256))
    values, index = palette(weight, bits)
    assert values.shape == (1 << bits,) and index.shape == (weight.size,) and index.dtype == np.uint8
    assert measure(weight, values[index].reshape(weight.shape)).snr_db == pytest.approx(20 * np.log10(2) * bits, abs=0.3)


@pytest.mark.parametrize(("bits", "optimum"), [(4, 20.2), (6, 31.9), (8, 43.8)])
def test_normal_weights_come_near_the_optimal_quantizer(bits: int, optimum: float) -> None:
    """Lloyd-Max: 20.22 dB at 4 bits; above, Panter and Dite's 6.02 b - 4.35 dB."""
    weight = np.random.default_rng(0).standard_normal((384, 384)).astype(np.float16)
    values, index = palette(weight, bits)
    assert values.dtype == np.float16
    assert measure(weight.reshape(-1), values[index]).snr_db >= optimum - 0.3


@pytest.mark.parametrize("weight", [np.zeros((32, 32), np.float16), np.full(600, 3.0), np.repeat([-1.0, 0.0, 2.0], 300)])
def test_few_distinct_weights_are_exact(weight: np.ndarray) -> None:
    values, index = palette(weight, 4)
    np.testing.assert_allclose(values[index].reshape(weight.shape), weight, rtol=0, atol=1e-12)


def test_tables_are_no_weights_and_what_is_kept_stays_a_float() -> None:
    """The conversion transposes a matrix and gives it a name that says nothing of its mixer."""
    pytest.importorskip("coremltools", reason="needs pip install 'pom-edge[coreml]'")
    import coremltools.optimize.coreml as cto

    from pom_edge.export.coreml_package import Islands, convert

    torch.manual_seed(0)
    model = build_model(ModelConfig(kind="lm", dim=32, depth=2, vocab_size=40, n_sel_heads=4, rotary="1d")).eval()
    plan = forms.recurrent(model, {"x": torch.zeros(1, 1, dtype=torch.int64)}, Extent(1, 1, 1), Extent(1, 1, 1))
    package = convert(trace_graph(plan.model, plan.mixers, plan.example, plan.axes, {}, plan.inside), Islands())
    weights = weights_of(package)
    assert list(dict.fromkeys(weights.values())) == [
        "embed", "blocks.0.mixer", "blocks.0.ff.0", "blocks.0.ff.2", "blocks.1.mixer", "blocks.1.ff.0", "blocks.1.ff.2", "."
    ]  # fmt: skip
    labels = {name: weight_label(name, path) for name, path in weights.items()}
    kept = [name for name, label in labels.items() if label.startswith("blocks.1.mixer")]
    assert {labels[name].partition(" (transpose")[0] for name in kept} == {"blocks.1.mixer", "blocks.1.mixer.po_weight"}
    stored = compress(package, "w8", kept)
    (block,) = stored.model.get_spec().mlProgram.functions["main"].block_specializations.values()
    floats = {value.name for operation in block.operations if operation.type == "const" for value in operation.outputs}
    large = cto.get_weights_metadata(stored.model, weight_threshold=512)  # the integers too
    kinds = Counter("table" if "pom_angles" in name else large[name].val.shape for name in floats & set(large))
    assert kinds.pop("table") > 0
    assert kinds == {(64, 32): 1, (32, 64): 1}, "projection and aggregation of the second mixer, and nothing else"
    assert weights_of(package) == weights, "the package in floats is as it was"
