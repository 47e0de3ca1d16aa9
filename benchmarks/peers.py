"""Ours beside other runtimes that run the published form, mixer or encoder, interleaved: run by the peers' own environment.

    make peers
    .venv-peers/bin/python -m benchmarks.peers --model mixer|encoder [--tokens 1024 4096] [--rounds 9] [--json FILE]

ONNX Runtime runs our graph and the published form's, OpenVINO both too, PyTorch the published module (eager, and compiled with
inductor, which needs a C++ compiler), ExecuTorch the published form lowered to XNNPACK. OpenVINO, torch.compile and ExecuTorch
get the exact shape, ONNX Runtime's graphs keep free batch and tokens. The encoder has 4 blocks. All outputs are compared first.
"""

from __future__ import annotations

import importlib
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.lockstep import (
    Model,
    add_threads,
    arguments_of,
    by_cores,
    check,
    described,
    measure,
    positive,
    ratio,
    rows,
    writable,
    write_json,
)
from benchmarks.mixer_speed import mixers
from benchmarks.published_form import published_encoder
from benchmarks.published_vs_lowered import DIM, HEADS, export
from pom_edge.config import ModelConfig
from pom_edge.export.lowering import lower
from pom_edge.models import build_model

BLOCKS = 4
MODULES = {"ort": "onnxruntime", "openvino": "openvino", "torch": "torch", "executorch": "executorch"}


def encoders() -> tuple[nn.Module, nn.Module]:
    """An encoder, and the same with the published form of each mixer."""
    torch.manual_seed(0)
    model = build_model(ModelConfig("encoder", dim=DIM, depth=BLOCKS, input_dim=DIM, n_sel_heads=HEADS)).eval()
    for block in model.blocks:  # type: ignore[union-attr]
        nn.init.normal_(block.mixer.po_coeff, std=0.3)
    return model, published_encoder(model)


def save_executorch(model: nn.Module, tokens: int, file: Path) -> None:
    """The model lowered to XNNPACK for one length; what XNNPACK does not take stays in ExecuTorch's portable operators."""
    exir = importlib.import_module("executorch.exir")
    xnnpack = importlib.import_module("executorch.backends.xnnpack.partition.xnnpack_partitioner")
    program = torch.export.export(model, (torch.randn(1, tokens, DIM),))
    lowered = exir.to_edge_transform_and_lower(program, partitioner=[xnnpack.XnnpackPartitioner()])
    file.write_bytes(lowered.to_executorch().buffer)


def prepare(kind: str, peers: list[str], tokens: int, folder: Path) -> dict[str, Model]:
    """Files of everything that is compared, "ours" first."""
    ours, published = mixers() if kind == "mixer" else encoders()
    files = {"ours": folder / "ours.onnx", "published": folder / "published.onnx", "torch": folder / "published.pt"}
    export(*lower(ours), files["ours"], ours=True)
    export(published, [], files["published"])
    torch.save(published, files["torch"])
    made = {"ours": Model("ort", files["ours"])}
    if "ort" in peers:
        made["published, ONNX Runtime"] = Model("ort-plain", files["published"])
    if "openvino" in peers:
        made["published, OpenVINO"] = Model("openvino", files["published"])
        made["ours, OpenVINO"] = Model("openvino", files["ours"])
    if "torch" in peers:
        made["published, torch eager"] = Model("eager", files["torch"])
        if shutil.which("c++") or shutil.which("g++"):
            made["published, torch.compile"] = Model("compile", files["torch"])
        else:
            print("published, torch.compile: not measured, there is no C++ compiler")
    if "executorch" in peers:
        save_executorch(published, tokens, folder / "published.pte")
        made["published, ExecuTorch"] = Model("executorch", folder / "published.pte")
    return made


def main() -> None:
    """Print one table for each length."""
    parser = arguments_of(__doc__)
    parser.add_argument("--model", choices=("mixer", "encoder"), default="mixer", help="which")
    parser.add_argument("--tokens", type=positive, nargs="+", default=[1024, 4096], help="lengths of the sequence")
    add_threads(parser)
    parser.add_argument("--rounds", type=positive, default=9, help="timed, after one that is not")
    parser.add_argument("--peers", nargs="+", choices=MODULES, default=list(MODULES), help="runtimes")
    parser.add_argument("--json", type=writable, help="also write the rows there, for pom-edge report --peers")
    arguments = parser.parse_args()
    absent = [name for name in arguments.peers if find_spec(MODULES[name]) is None]
    if absent:
        parser.error(f"no {', '.join(absent)} here; run make peers and .venv-peers/bin/python, or give --peers without")
    threads = arguments.threads
    print(
        f"{described(threads)}, {arguments.model}, d {DIM}, FP32; medians of {arguments.rounds} rounds (middle half), CPU time"
    )
    made: list[dict[str, Any]] = []
    for tokens in arguments.tokens:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            compared = prepare(arguments.model, arguments.peers, tokens, folder)
            check(compared, tokens, DIM, threads, folder)
            found = measure(compared, tokens, DIM, threads, arguments.rounds)
        made += rows(found, tokens, "ours")
        for cores, part in by_cores(found).items():
            print(f"{arguments.model}, {tokens} tokens, cores {cores} ({len(part['ours'].clock)} rounds)")
            for what, taken in part.items():
                print(f"  {what:28} {taken.ms:9.1f} ms   {ratio(taken, part['ours']):>26} of ours", flush=True)
    write_json(
        arguments.json, threads, made, model=arguments.model, d=DIM, heads=HEADS, precision="fp32", rounds=arguments.rounds
    )


if __name__ == "__main__":
    main()
