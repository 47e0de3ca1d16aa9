"""One mixer beside its bounds and peers, in ONNX Runtime, one process, interleaved.

    python -m benchmarks.mixer_speed [--tokens 256 1024 4096 8192 16384] [--threads 2] [--rounds 15]

Every round runs each graph once, in turn; times are medians over the rounds, ratios are medians of the ratios within a round,
so that a busy machine disturbs all alike. "GEMM" is the product that no form can avoid, x W_po (N x d x D). "Published" is the
mixer as the published code computes it, exported by the same exporter (benchmarks/published_form.py, held against ours in the
same run). "Attention" is the runtime's own fused operator (com.microsoft MultiHeadAttention) with its four projections.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from benchmarks.published_form import PublishedForm
from benchmarks.published_vs_lowered import DEGREE, DIM, EXPAND, HEADS, export
from pom_edge.export.forms import LayerModel
from pom_edge.export.lowering import lower
from pom_edge.mixer import PoM

ATTENTION_HEADS = 6
Graph = Callable[[np.ndarray], Any]


def gemm() -> bytes:
    """x (1, N, d) -> x W (1, N, D)."""
    weight = np.random.default_rng(0).standard_normal((DIM, EXPAND * DIM)).astype(np.float32)
    return _model([helper.make_node("MatMul", ["x", "w"], ["y"])], {"w": weight}, [1, "tokens", EXPAND * DIM])


def attention() -> bytes:
    """Fused attention of equal width, projections included."""
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal((DIM, DIM)).astype(np.float32) / DIM**0.5 for name in ("wq", "wk", "wv", "wo")}
    nodes = [helper.make_node("MatMul", ["x", f"w{part}"], [part]) for part in "qkv"]
    nodes.append(
        helper.make_node("MultiHeadAttention", ["q", "k", "v"], ["a"], domain="com.microsoft", num_heads=ATTENTION_HEADS)
    )
    nodes.append(helper.make_node("MatMul", ["a", "wo"], ["y"]))
    return _model(nodes, weights, [1, "tokens", DIM])


def _model(nodes: list[Any], weights: dict[str, np.ndarray], shape: list[Any]) -> bytes:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, "tokens", DIM])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    return bytes(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString())


def open_graph(model: str | bytes, threads: int, ours: bool) -> Graph:
    """A session whose threads do not spin: several sessions in one process disturb each other otherwise.

    Our graph has the memory options of our sessions, the others keep the runtime's own.
    """
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 4
    if ours:
        options.enable_mem_pattern = options.enable_mem_reuse = False
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return lambda x: session.run(None, {"x": x})


def graphs(threads: int, folder: Path) -> dict[str, Graph]:
    """Everything that is compared."""
    torch.manual_seed(0)
    mixer = PoM(DIM, DEGREE, EXPAND, n_sel_heads=HEADS).eval()
    nn.init.normal_(mixer.po_coeff)
    layer, published = LayerModel(mixer), PublishedForm(mixer, False).eval()
    x = torch.randn(2, 50, DIM)
    with torch.no_grad():
        torch.testing.assert_close(published(x), layer(x), rtol=1e-4, atol=1e-4)
    export(*lower(layer), folder / "ours.onnx")
    export(published, [], folder / "published.onnx")
    made: dict[str, str | bytes] = {
        "GEMM": gemm(),
        "ours": str(folder / "ours.onnx"),
        "published": str(folder / "published.onnx"),
        "attention": attention(),
    }
    return {name: open_graph(model, threads, name == "ours") for name, model in made.items()}


def measure(runs: dict[str, Graph], tokens: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of every round, after two rounds that do not count."""
    x = np.random.default_rng(0).standard_normal((1, tokens, DIM)).astype(np.float32)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds + 2):
        for name, run in runs.items():
            start = time.perf_counter()
            run(x)
            seconds[name].append(time.perf_counter() - start)
    return {name: taken[2:] for name, taken in seconds.items()}


def ratio(above: list[float], below: list[float]) -> str:
    """Median of the rounds' ratios, with the middle half of them."""
    ratios = sorted(a / b for a, b in zip(above, below, strict=True))
    low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
    return f"{statistics.median(ratios):.2f} ({low:.2f}-{high:.2f})"


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 1024, 4096, 8192, 16384])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    print(
        f"{platform.machine()}, {arguments.threads} threads, d {DIM}, degree {DEGREE}, expand {EXPAND}, {HEADS} heads, FP32, "
        f"onnxruntime {ort.__version__}; medians (middle half)"
    )
    print(f"{'N':>6} {'GEMM ms':>8} {'ours ms':>8} {'ours / GEMM':>18} {'published / ours':>18} {'attention / ours':>20}")
    with tempfile.TemporaryDirectory() as folder:
        runs = graphs(arguments.threads, Path(folder))
        for tokens in arguments.tokens:
            found = measure(runs, tokens, arguments.rounds)
            bare, ours = (1e3 * statistics.median(found[name]) for name in ("GEMM", "ours"))
            print(
                f"{tokens:6} {bare:8.1f} {ours:8.1f} {ratio(found['ours'], found['GEMM']):>18} "
                f"{ratio(found['published'], found['ours']):>18} {ratio(found['attention'], found['ours']):>20}",
                flush=True,
            )


if __name__ == "__main__":
    main()
