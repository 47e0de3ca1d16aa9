"""One mixer beside its bounds and peers in ONNX Runtime, interleaved.

    python -m benchmarks.mixer_speed [--tokens 256 1024 4096 8192 16384] [--threads 2] [--rounds 15] [--repeats 3] [--json FILE]

"GEMM" is the product that no form can avoid, x W_po (N x d x D), alone. "Published" is the mixer as the published code computes
it, exported by the same exporter (benchmarks/published_form.py, held against ours in the same run). "Attention" is the fastest
of the runtime's own fused operators at the longest length, with its four projections. See benchmarks/lockstep.py for how.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from benchmarks.lockstep import (
    Model,
    Taken,
    add_threads,
    arguments_of,
    by_cores,
    check,
    described,
    measure,
    not_negative,
    positive,
    ratio,
    rows,
    spread,
    writable,
    write_json,
)
from benchmarks.published_form import PublishedForm
from benchmarks.published_vs_lowered import DEGREE, DIM, EXPAND, HEADS, export
from pom_edge.export.forms import LayerModel
from pom_edge.export.lowering import lower
from pom_edge.mixer import PoM

ATTENTION_HEADS = 6


def gemm() -> bytes:
    """x (1, N, d) -> x W (1, N, D)."""
    weight = np.random.default_rng(0).standard_normal((DIM, EXPAND * DIM)).astype(np.float32)
    return _model([helper.make_node("MatMul", ["x", "w"], ["y"])], {"w": weight}, EXPAND * DIM)


def attention(operator: str) -> bytes:
    """Fused attention of equal width, projections included.

    Args:
        operator: "MultiHeadAttention" or "Attention" of com.microsoft, or "standard", the one of opset 23.
    """
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal((DIM, DIM)).astype(np.float32) / DIM**0.5 for name in ("wq", "wk", "wv", "wo")}
    if operator == "Attention":
        packed = {"w": np.concatenate([weights[name] for name in ("wq", "wk", "wv")], axis=1)}
        packed |= {"b": np.zeros(3 * DIM, np.float32), "wo": weights["wo"]}
        nodes = [helper.make_node("Attention", ["x", "w", "b"], ["a"], domain="com.microsoft", num_heads=ATTENTION_HEADS)]
        return _model([*nodes, helper.make_node("MatMul", ["a", "wo"], ["y"])], packed, DIM)
    nodes = [helper.make_node("MatMul", ["x", f"w{part}"], [part]) for part in "qkv"]
    if operator == "standard":
        heads: dict[str, Any] = {"q_num_heads": ATTENTION_HEADS, "kv_num_heads": ATTENTION_HEADS}
        nodes.append(helper.make_node("Attention", ["q", "k", "v"], ["a"], **heads))
    else:
        settings: dict[str, Any] = {"domain": "com.microsoft", "num_heads": ATTENTION_HEADS}
        nodes.append(helper.make_node("MultiHeadAttention", ["q", "k", "v"], ["a"], **settings))
    nodes.append(helper.make_node("MatMul", ["a", "wo"], ["y"]))
    return _model(nodes, weights, DIM, 23 if operator == "standard" else 18)


def _model(nodes: list[Any], weights: dict[str, np.ndarray], width: int, opset: int = 18) -> bytes:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, "tokens", DIM])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, "tokens", width])],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return bytes(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString())


def mixers() -> tuple[nn.Module, nn.Module]:
    """The mixer and the published form of it, the same function."""
    torch.manual_seed(0)
    mixer = PoM(DIM, DEGREE, EXPAND, n_sel_heads=HEADS).eval()
    nn.init.normal_(mixer.po_coeff)
    layer, published = LayerModel(mixer), PublishedForm(mixer, False).eval()
    x = torch.randn(2, 50, DIM)
    with torch.no_grad():
        torch.testing.assert_close(published(x), layer(x), rtol=1e-4, atol=1e-4)
    return layer, published


def models(folder: Path) -> dict[str, Model]:
    """Everything that is compared, but the attention."""
    layer, published = mixers()
    export(*lower(layer), folder / "ours.onnx", ours=True)
    export(published, [], folder / "published.onnx")
    (folder / "gemm.onnx").write_bytes(gemm())
    return {
        "GEMM": Model("ort-plain", folder / "gemm.onnx"),
        "ours": Model("ort", folder / "ours.onnx"),
        "published": Model("ort-plain", folder / "published.onnx"),
    }


def fused_attention(folder: Path, tokens: int, threads: int) -> dict[str, Model]:
    """The runtime's fused operators; the fastest at that length first."""
    made = {}
    for operator in ("MultiHeadAttention", "Attention", "standard"):
        file = folder / f"{operator}.onnx"
        file.write_bytes(attention(operator))
        made[operator] = Model("ort-plain", file)
    taken = measure(made, tokens, DIM, threads, 1)
    print(f"fused attention at {tokens}: " + ", ".join(f"{name} {t.ms:.0f} ms" for name, t in taken.items()))
    return {name: made[name] for name in sorted(made, key=lambda name: min(taken[name].clock))}


def break_even(found: Iterable[tuple[int, float]]) -> str:
    """Where attention takes as long as ours, between the two lengths around it, on a line in logarithms."""
    points = sorted(found)
    for (low, below), (high, above) in itertools.pairwise(points):
        if below <= 1 < above:
            share = -np.log(below) / (np.log(above) - np.log(below))
            return f"as long as attention at about {np.exp(np.log(low) + share * np.log(high / low)):.0f} tokens"
    return "no break-even among these lengths: " + ("ours is faster at each" if points[0][1] > 1 else "attention is faster")


def main() -> None:
    """Print one table."""
    parser = arguments_of(__doc__)
    parser.add_argument(
        "--tokens", type=positive, nargs="+", default=[64, 256, 1024, 4096, 8192, 16384], help="lengths of the sequence"
    )
    add_threads(parser)
    parser.add_argument("--rounds", type=positive, default=15, help="of one repeat; a quarter of them from 8,192 tokens on")
    parser.add_argument("--repeats", type=positive, default=3, help="with fresh processes")
    parser.add_argument("--longest-attention", type=not_negative, default=8192, help="not measured beyond; 0: not at all")
    parser.add_argument("--json", type=writable, help="also write the rows there, for pom-edge report --peers")
    arguments = parser.parse_args()
    threads = arguments.threads
    print(
        f"{described(threads)}\nd {DIM}, degree {DEGREE}, expand {EXPAND}, {HEADS} heads, FP32; repeats: {arguments.repeats}, "
        f"rounds: {arguments.rounds}; ratios: median (middle half of the rounds), that of processor time"
    )
    made, ratios = [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        compared = models(folder)
        check({key: compared[key] for key in ("ours", "published")}, 333, DIM, threads, folder)
        longest = max((tokens for tokens in arguments.tokens if tokens <= arguments.longest_attention), default=0)
        if longest:
            compared["attention"] = next(iter(fused_attention(folder, longest, threads).values()))
        print(
            f"{'N':>6} {'cores':>8} {'rounds':>6} {'GEMM ms':>8} {'ours ms':>8} {'ours / GEMM':>24} {'published / ours':>24} "
            f"{'attention / ours':>26}"
        )
        for tokens in arguments.tokens:
            rounds = arguments.rounds if tokens < 8192 else max(3, arguments.rounds // 4)
            running = {key: model for key, model in compared.items() if key != "attention" or tokens <= longest}
            found = {key: Taken() for key in running}
            for _ in range(arguments.repeats):
                for key, taken in measure(running, tokens, DIM, threads, rounds).items():
                    found[key] += taken
            for cores, part in by_cores(found).items():
                against = ratio(part["attention"], part["ours"]) if "attention" in part else "not measured"
                print(
                    f"{tokens:6} {cores:>8} {len(part['ours'].clock):6} {part['GEMM'].ms:8.2f} {part['ours'].ms:8.2f} "
                    f"{ratio(part['ours'], part['GEMM']):>24} {ratio(part['published'], part['ours']):>24} {against:>26}",
                    flush=True,
                )
            made += rows(found, tokens, "ours")
            if "attention" in found:
                ratios.append((tokens, spread(found["attention"].clock, found["ours"].clock)[0]))
    if ratios:
        print(break_even(ratios))
    settings = {"d": DIM, "degree": DEGREE, "expand": EXPAND, "heads": HEADS, "precision": "fp32"}
    write_json(arguments.json, threads, made, **settings, rounds=arguments.rounds, repeats=arguments.repeats)


if __name__ == "__main__":
    main()
