"""Predicted beside measured memory for every form, and one mixer's peak at 65,536 tokens in each.

python -m benchmarks.memory
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.lockstep import arguments_of
from benchmarks.published_form import PublishedForm
from pom_edge import ModelConfig, PoM, build_model, export_bundle
from pom_edge.bundle import MANIFEST, Bundle, seal, sha256_of
from pom_edge.export.inputs import Extent, make_inputs, plan_axes
from pom_edge.export.onnx_graph import export_graph, save_graph
from pom_edge.runtimes.memory import make_arrays, measure_peak, predict

MIB = 1 << 20
FLOOR_BYTES = 4 * MIB  # interpreter and runtime take some 0.2 to 0.5 MiB of their own in a run, whatever its size


def main() -> None:
    """Print both tables."""
    arguments_of(__doc__).parse_args()
    torch.manual_seed(0)
    errors: dict[tuple[Any, ...], tuple[float, float | None]] = {}  # by combination: one that is measured twice counts once
    with tempfile.TemporaryDirectory() as folder:
        print("| form | precision | model | N | batch | activations predicted / measured, MiB | error | total, MiB | error |")
        print("|---|---|---|---|---|---|---|---|---|")
        for name, model, options, sizes in _combinations():
            out = Path(folder) / "a.pom"
            export_bundle(model, out=out, overwrite=True, **options)
            kind = (name, options.get("form"), options.get("precision"))
            errors |= {(*kind, *size): _row(out, name, options, *size) for size in sizes}
        counted = [activations for _, activations in errors.values() if activations is not None]
        totals = [abs(total) for total, _ in errors.values()]
        print(
            f"{len(errors)} combinations; largest error of the total {max(totals):.1%}, of the "
            f"activations from {FLOOR_BYTES // MIB} MiB on ({len(counted)} combinations) {max(map(abs, counted)):.1%}"
        )
        _one_mixer(Path(folder))


def _combinations() -> Iterator[tuple[str, nn.Module, dict[str, Any], list[tuple[int, int]]]]:
    example = {"example_inputs": {"x": torch.randn(1, 24, 64)}}
    wide = build_model(ModelConfig("encoder", dim=384, depth=2, input_dim=64, n_sel_heads=6))
    rotary = build_model(ModelConfig("encoder", dim=128, depth=2, input_dim=64, rotary="1d"))
    text = build_model(ModelConfig("lm", dim=256, depth=2, vocab_size=256, n_sel_heads=8))
    hybrid = build_model(ModelConfig("lm", dim=256, depth=2, vocab_size=256, n_sel_heads=8, blocks=("pom", "local"), window=64))
    grouped = PoM(256, 4, 2, n_groups=4, n_sel_heads=8)
    yield "encoder d384", wide, example, [(512, 1), (4096, 1), (16384, 1), (4096, 4)]
    yield "rotary encoder d128", rotary, example, [(4096, 1), (16384, 1), (65536, 1)]
    yield "causal mixer d128", PoM(128, 3, 2, n_sel_heads=4), {"mask": "causal"}, [(4096, 1), (16384, 1), (8192, 4)]
    yield "mixer d384", PoM(384, 3, 2, n_sel_heads=6), {}, [(4096, 1), (16384, 1), (65536, 1)]
    yield "language model d256", text, {}, [(4096, 1)]
    yield "language model d256", text, {"form": "recurrent"}, [(1, 1), (64, 1), (1024, 1), (4096, 1), (1024, 4), (50000, 1)]
    yield "hybrid, window 64, d256", hybrid, {"form": "recurrent"}, [(64, 1), (1024, 1), (4096, 1), (512, 4), (12000, 1)]
    yield "grouped mixer d256", grouped, {"form": "recurrent", "mask": "causal"}, [(1024, 1), (10000, 3)]
    for chunk in (64, 512, 2048):
        options = {**example, "form": "streamed", "chunk": chunk}
        yield f"encoder d384, chunks of {chunk}", wide, options, [(1024, 1), (4096, 1), (16384, 1), (65536, 1)]
    options = {**example, "form": "streamed", "chunk": 512, "batch": 3}
    yield "encoder d384, chunks of 512", wide, options, [(4096, 3)]
    half = {"precision": "fp16"}
    yield "encoder d384", wide, {**example, **half}, [(4096, 1), (16384, 1), (4096, 4)]
    yield "mixer d384", PoM(384, 3, 2, n_sel_heads=6), half, [(16384, 1)]
    yield "language model d256", text, {**half, "form": "recurrent"}, [(4096, 1), (50000, 1)]
    yield "encoder d384, chunks of 512", wide, {**example, **half, "form": "streamed", "chunk": 512}, [(4096, 1), (65536, 1)]
    dense = build_model(ModelConfig("dense", dim=64, depth=2, channels=3, patch_size=3, num_classes=5, rotary="2d"))
    image = {"example_inputs": {"x": torch.randn(1, 3, 192, 192)}}  # of fixed size in the parallel form
    yield "dense predictor d64", dense, image, [(4096, 1), (4096, 2)]
    yield "dense predictor d64, chunks of 4096", dense, {"form": "streamed", "chunk": 4096, "batch": 2}, [(3000, 2), (40000, 2)]


def _row(path: Path, name: str, options: dict[str, Any], tokens: int, batch: int) -> tuple[float, float | None]:
    """Print one line; the errors of total and activations, None where these are below the floor."""
    predicted = predict(path, tokens, batch)
    measured = measure_peak(path, None, make_arrays(Bundle.open(path).manifest.artifacts[0], tokens, batch))
    assert measured is not None
    total = predicted.total / measured.total_bytes - 1
    activations = predicted.activations / measured.activations_bytes - 1 if measured.activations_bytes >= FLOOR_BYTES else None
    columns = [
        options.get("form", "parallel"),
        options.get("precision", "fp32"),
        name,
        tokens,
        batch,
        f"{predicted.activations / MIB:.2f} / {measured.activations_bytes / MIB:.2f}",
        "below the floor" if activations is None else f"{activations:+.1%}",
        f"{predicted.total / MIB:.1f} / {measured.total_bytes / MIB:.1f}",
        f"{total:+.1%}",
    ]
    print(f"| {' | '.join(map(str, columns))} |", flush=True)
    return total, activations


def _one_mixer(folder: Path, tokens: int = 65536) -> None:
    """d 384, degree 3, expand 2, 6 heads: the published form's export against ours."""
    layer = PoM(384, 3, 2, n_sel_heads=6)
    for name, options in (("parallel", {}), ("streamed", {"form": "streamed", "chunk": 1024})):
        export_bundle(layer, out=folder / f"{name}.pom", **options)  # type: ignore[arg-type]
        measured = measure_peak(folder / f"{name}.pom", None, {"x": np.zeros((1, tokens, 384), np.float32)})
        assert measured is not None
        print(f"one mixer, N {tokens}, {name}: activations {measured.activations_bytes / MIB:.0f} MiB")
    published = PublishedForm(layer)
    example = {"x": torch.randn(2, 24, 384)}
    axes = plan_axes(example, Extent(), Extent())
    graph = export_graph(published, [], make_inputs(example, axes, {"batch": 2, "tokens": 40}, 0), axes)
    bundle = folder / "parallel.pom"  # the published form's graph in the place of ours, measured by the same code
    save_graph(graph.model, bundle / "parallel.fp32.onnx", {})
    print(f"one mixer, N {tokens}, published form: activations {_unchecked_peak(bundle, tokens) / MIB:.0f} MiB")


def _unchecked_peak(bundle: Path, tokens: int) -> int:

    content = json.loads((bundle / MANIFEST).read_text())
    for entry in content["files"]:
        entry["sha256"], entry["bytes"] = sha256_of(bundle / entry["path"]), (bundle / entry["path"]).stat().st_size
    (bundle / MANIFEST).write_text(seal(content))
    measured = measure_peak(bundle, None, {"x": np.zeros((1, tokens, 384), np.float32)})
    assert measured is not None
    return measured.activations_bytes


if __name__ == "__main__":
    main()
