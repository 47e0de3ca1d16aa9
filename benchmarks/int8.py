"""INT8 against FP32 on ONNX Runtime: ours, onnxruntime's own quantize_static, and weights alone, on the same data in one run.

    python -m benchmarks.int8 [--model digits|text|encoder] [--rounds 15] [--threads 2]

SNR is against PyTorch in FP32, on inputs that calibration did not see. Times are ratios to FP32: every round runs each file
once, in turn; the ratio is that of the medians.
"""

from __future__ import annotations

import functools
import logging
import platform
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import onnxruntime as ort
import torch
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process
from torch import Tensor, nn

from benchmarks.lockstep import add_threads, arguments_of, positive
from demos.digits import metric as digits_metric
from demos.digits.images import load_digits, model_input
from demos.text import metric as text_metric
from pom_edge.checkpoint import load_checkpoint
from pom_edge.export.forms import parallel
from pom_edge.export.inputs import Extent
from pom_edge.export.moments import with_moments
from pom_edge.export.onnx_graph import Graph, Traced, save_graph, trace_graph, translate
from pom_edge.mixer import PoM
from pom_edge.models import ModelConfig, build_model
from pom_edge.quantize import Options, finish, prepare, weight_only
from pom_edge.runtimes.onnxruntime_session import native_session
from pom_edge.runtimes.parity import measure
from pom_edge.runtimes.timing import timed

DEMOS = Path(digits_metric.__file__).parents[1]


@dataclass
class Subject:
    """A model, calibration data, inputs to judge it by, and its task metric."""

    model: nn.Module
    samples: dict[str, Tensor]
    unseen: np.ndarray
    metric: Callable[[Any], float] | None
    unit: str = ""


def subject(name: str) -> Subject:
    """A demo's checkpoint with its samples, or a random encoder as wide as real ones."""
    if name == "encoder":
        torch.manual_seed(0)
        model = build_model(ModelConfig(kind="encoder", dim=384, depth=4, input_dim=384, n_sel_heads=6)).eval()
        for mixer in (module for module in model.modules() if isinstance(module, PoM)):
            nn.init.normal_(mixer.po_coeff, std=0.3)
        return Subject(model, {"x": torch.randn(4, 1024, 384)}, torch.randn(1, 1024, 384).numpy(), None)
    loaded = load_checkpoint(DEMOS / name / "model.pt")
    assert loaded.model is not None
    if name == "digits":
        images = model_input(load_digits(DEMOS / "digits" / "test_images.npz").images)
        return Subject(loaded.model, loaded.samples, images[:200], digits_metric.accuracy, "%")
    text = np.frombuffer((DEMOS / "text" / "heldout.txt").read_bytes(), np.uint8).astype(np.int64)
    unseen = np.lib.stride_tricks.sliding_window_view(text, 1024)[::1024][:4].copy()
    return Subject(loaded.model, loaded.samples, unseen, text_metric.bits, "-bits/byte")


class Samples(CalibrationDataReader):  # type: ignore[misc]  # onnxruntime is untyped
    """The samples one by one, as onnxruntime's calibration wants them."""

    def __init__(self, samples: dict[str, Tensor]) -> None:
        (name, rows), *_ = samples.items()
        self._batches = iter([{name: row.unsqueeze(0).numpy()} for row in rows])

    def get_next(self) -> dict[str, np.ndarray] | None:
        """The next batch."""
        return next(self._batches, None)


def files(case: Subject, folder: Path) -> dict[str, Path]:
    """Every file that is compared."""
    plan = parallel(case.model, {name: rows[:2] for name, rows in case.samples.items()}, Extent(), Extent())
    traced = trace_graph(plan.model, plan.mixers, plan.example, plan.axes)
    made = {"FP32": _save(traced, folder / "fp32.onnx", with_moments)}
    for label, options in {
        "INT8": Options(),
        "INT8 minmax": Options(method="minmax"),
        "INT8 mse": Options(method="mse"),
        "INT8 7-bit weights": Options(weight_bits=7),
    }.items():
        quantized = prepare(traced, lambda module: module(case.samples), options).convert()
        made[label] = _save(quantized.traced, folder / f"{label}.onnx", finish)
    for bits in (8, 4):
        made[f"w{bits}"] = _save(traced, folder / f"w{bits}.onnx", functools.partial(_integer_weights, bits=bits))
    prepared = folder / "prepared.onnx"
    quant_pre_process(str(_save(traced, folder / "plain.onnx")), str(prepared), skip_symbolic_shape=True)
    gemms = {"op_types_to_quantize": ["MatMul", "Gemm", "Conv"], "per_channel": True, "weight_type": QuantType.QInt8}
    symmetric = {"ActivationSymmetric": True, "WeightSymmetric": True, "MatMulConstBOnly": True}
    for label, settings in {
        "onnxruntime, S8S8, GEMMs": {**gemms, "activation_type": QuantType.QInt8, "extra_options": symmetric},
        "onnxruntime, U8S8, GEMMs": {**gemms, "activation_type": QuantType.QUInt8, "extra_options": {"MatMulConstBOnly": True}},
        "onnxruntime, defaults": {},
    }.items():
        made[label] = folder / f"{label}.onnx"
        quantize_static(str(prepared), str(made[label]), Samples(case.samples), quant_format=QuantFormat.QDQ, **settings)
    return made


def _save(traced: Traced, path: Path, change: Callable[[Graph], Graph] = lambda graph: graph) -> Path:
    save_graph(change(translate(traced)).model, path, {})
    return path


def _integer_weights(graph: Graph, bits: Literal[4, 8]) -> Graph:
    weight_only(graph.model, bits)
    return with_moments(graph)


def open_file(path: str | Path, threads: int, optimized: Path | None = None) -> ort.InferenceSession:
    """A session as ONNX Runtime makes it by itself."""
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 4
    if optimized is not None:
        options.optimized_model_filepath = str(optimized)
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _runner(session: ort.InferenceSession) -> Callable[[np.ndarray], np.ndarray]:
    return lambda x: session.run(["y"], {"x": x})[0]


def fused(path: Path, folder: Path) -> str:
    """How many GEMMs run on integers, of those that there are."""
    open_file(path, 1, folder / "optimized.onnx")
    counts = Counter(node.op_type for node in onnx.load(str(folder / "optimized.onnx")).graph.node)
    integer = sum(counts[kind] for kind in ("MatMulIntegerToFloat", "QLinearMatMul", "QGemm", "QLinearConv", "MatMulNBits"))
    return f"{integer}/{integer + sum(counts[kind] for kind in ('MatMul', 'Gemm', 'Conv', 'FusedMatMul', 'FusedConv'))}"


def main() -> None:
    """Print one table."""
    parser = arguments_of(__doc__)
    parser.add_argument("--model", choices=("digits", "text", "encoder"), default="digits", help="which")
    parser.add_argument("--rounds", type=positive, default=15, help="timed, after one that is not")
    add_threads(parser)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(arguments.threads)
    case = subject(arguments.model)
    with torch.no_grad():
        truth = case.model(torch.from_numpy(case.unseen)).numpy()
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    print(
        f"{arguments.model}, x {case.unseen.shape}, {arguments.threads} threads, {platform.machine()}, "
        f"VNNI {'yes' if 'vnni' in flags else 'no'}, onnxruntime {ort.__version__}"
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        made = files(case, folder)
        sessions = {
            label: (open_file if label.startswith("onnxruntime") else native_session)(str(path), arguments.threads)
            for label, path in made.items()
        }
        seconds: dict[str, list[float]] = {label: [] for label in sessions}
        for _ in range(arguments.rounds):
            for label, session in sessions.items():
                seconds[label].append(timed(functools.partial(session.run, ["y"], {"x": case.unseen})))
        reference = statistics.median(seconds["FP32"])
        print(f"{'file':26} {'bytes':>10} {'SNR dB':>7} {'speed':>6} {'integer GEMMs':>14} {'metric ' + case.unit:>18}")
        for label, session in sessions.items():
            found = session.run(["y"], {"x": case.unseen})[0]
            value = "-" if case.metric is None else f"{case.metric(_runner(session)):.4f}"
            print(
                f"{label:26} {made[label].stat().st_size:>10,} {measure(truth, found).snr_db:>7.2f} "
                f"{reference / statistics.median(seconds[label]):>5.2f}x {fused(made[label], folder):>14} {value:>18}",
                flush=True,
            )


if __name__ == "__main__":
    main()
