"""What only a GPU can tell, in one script: python -m benchmarks.gpu [--out table.md]. Not measured so far.

    parity    lowered mixers in FP32, FP16 and BF16 on the GPU against float64 on the CPU
    speed     fused attention, the published project and ours, N = 1k to 64k, in one run, interleaved
    runtime   ONNX Runtime's CUDA provider on a bundle of ours, where its wheel is there
    engine    TensorRT or TensorRT-RTX on the same bundle, where it is there

Times are of CUDA events, median of interleaved rounds. The published project (github.com/davidpicard/pom) is no part of this
one: where its package `pom` is installed, and triton, its module runs beside ours with the same weights.
"""

from __future__ import annotations

import functools
import importlib
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.lockstep import arguments_of, writable
from benchmarks.published_form import PublishedForm
from pom_edge.errors import PomError
from pom_edge.export.lowering import lower
from pom_edge.mixer import PoM
from pom_edge.models import ModelConfig, build_model
from pom_edge.pipeline import export_bundle
from pom_edge.runtimes.parity import measure
from pom_edge.runtimes.session import open_session

WIDTH, HEADS, DEGREE, EXPAND = 384, 6, 3, 2
LENGTHS = (1024, 4096, 16384, 65536)
PARITY_LENGTHS = (7, 1000, 16384)
ROUNDS = 20
TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class Attention(nn.Module):
    """Multi-head attention of equal width on PyTorch's fused kernels (FlashAttention in half precision)."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, d) -> (B, N, d)."""
        q, k, v = self.project(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)  # (B, heads, N, d / heads)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def mixer() -> PoM:
    """With coefficients that matter: fresh ones are within 0.001."""
    torch.manual_seed(0)
    layer = PoM(WIDTH, degree=DEGREE, expand=EXPAND, n_sel_heads=HEADS).eval()
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "coeff" in name:
                parameter.uniform_(-1, 1)
    return layer


def published() -> dict[str, nn.Module]:
    """The published module with our mixer's weights, where it is installed: on CUDA it takes its Triton kernels."""
    if find_spec("pom") is None:
        return {}
    layer = importlib.import_module("pom").PoM(WIDTH, DEGREE, EXPAND, n_groups=1, n_sel_heads=HEADS)
    layer.load_state_dict({name: value for name, value in mixer().state_dict().items() if name in layer.state_dict()})
    return {"published, Triton" if find_spec("triton") else "published, no Triton": layer}


def parity(device: str, lengths: Sequence[int] = PARITY_LENGTHS) -> list[str]:
    """SNR in dB of the lowered mixer on the GPU against the module in float64."""
    rows = ["| tokens | " + " | ".join(TYPES) + " |", "|---" * (len(TYPES) + 1) + "|"]
    layer = mixer()
    exact = mixer().double()
    for tokens in lengths:
        x = torch.randn(1, tokens, WIDTH, generator=torch.Generator().manual_seed(tokens))
        truth = exact(x.double()).detach().numpy()
        found = []
        for dtype in TYPES.values():
            lowered = lower(layer)[0].to(device, dtype)
            with torch.no_grad():
                found.append(measure(truth, lowered(x.to(device, dtype)).double().cpu().numpy()).snr_db)
        rows.append(f"| {tokens} | " + " | ".join(f"{snr_db:.1f} dB" for snr_db in found) + " |")
    return rows


def speed(device: str, lengths: Sequence[int] = LENGTHS) -> list[str]:
    """Median milliseconds of each, interleaved, in FP16."""
    layers: dict[str, nn.Module] = {
        "attention": Attention(),
        "published form": PublishedForm(mixer()),
        **published(),
        "PoM": mixer(),
        "PoM, lowered": lower(mixer())[0],
    }
    layers = {name: layer.eval().to(device).half() for name, layer in layers.items()}
    rows = ["| tokens | " + " | ".join(layers) + " |", "|---" * (len(layers) + 1) + "|"]
    for tokens in lengths:
        x = torch.randn(1, tokens, WIDTH, device=device, dtype=torch.float16)
        taken: dict[str, list[float]] = {name: [] for name in layers}
        with torch.no_grad():
            for round_ in range(ROUNDS + 3):
                for name, layer in layers.items():
                    ms = event_ms(functools.partial(layer, x), device)
                    if round_ >= 3:  # the first ones choose kernels
                        taken[name].append(ms)
        rows.append(f"| {tokens} | " + " | ".join(f"{statistics.median(each):.3f} ms" for each in taken.values()) + " |")
    return rows


def event_ms(run: Callable[[], object], device: str) -> float:
    """Milliseconds on the device; of the clock where there is none."""
    if device == "cpu":
        begin = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - begin)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end))


def runtimes() -> list[str]:
    """Parity of a bundle's artifacts in every runtime that this machine has; why not, for the others."""
    torch.manual_seed(0)
    model = build_model(ModelConfig(kind="encoder", dim=WIDTH, depth=4, input_dim=64, n_sel_heads=HEADS))
    rows = ["| runtime | artifact | SNR | |", "|---|---|---|---|"]
    targets = ["onnx", *(target for target, name in (("trt", "tensorrt"), ("rtx", "tensorrt_rtx")) if find_spec(name))]
    with tempfile.TemporaryDirectory() as folder:
        inputs = {"x": torch.randn(1, 1024, 64)}
        report = export_bundle(model, targets, example_inputs=inputs, out=Path(folder) / "gpu.pom")
        for runtime in ("ort-cuda", "ort-trt", "trt", "rtx"):
            try:
                with open_session(report, runtime=runtime) as session:
                    (check,) = session.check().artifacts
                    worst = min(metrics.snr_db for metrics in check.outputs.values())
                    rows.append(f"| {session.runtime} | {check.file} | {worst:.1f} dB | {'ok' if check.passed else 'FAILED'} |")
            except PomError as error:
                rows.append(f"| {runtime} | - | - | {error} |")
    return rows


def main() -> None:
    """All tables, on stdout or in a file."""
    parser = arguments_of(__doc__)
    parser.add_argument("--out", type=writable, help="also write the rows there")
    parser.add_argument("--dry-run", action="store_true", help="run every step on the CPU, at short lengths: proves the script")
    arguments = parser.parse_args()
    if arguments.dry_run:
        lines = ["Dry run on the CPU: these are no results.", ""]
        tables = (parity("cpu", (7, 64)), speed("cpu", (64,)), runtimes())
    elif not torch.cuda.is_available():
        raise SystemExit("no CUDA device that torch can use: nothing is measured (--dry-run proves the script)")
    else:
        name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
        lines = [f"{name}, compute capability {capability[0]}.{capability[1]}, torch {torch.__version__}", ""]
        tables = (parity("cuda"), speed("cuda"), runtimes())
    for title, rows in zip(("Parity of one mixer", "One mixer, batch 1, FP16", "Runtimes"), tables, strict=True):
        lines += [f"## {title}", "", *rows, ""]
    if not published():
        lines.append("The published project's own Triton kernels: not measured (its package `pom` is not installed).")
    text = "\n".join(lines)
    if arguments.out:
        arguments.out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
