"""What ONNX Runtime's session options cost or save on our graphs.

    python -m benchmarks.session_options [--tokens 1024] [--rounds 15]

A 4-block encoder (d 384, 6 heads, FP32), every variant in turn in one process; ratios to our own settings, on the clock and of
processor time.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from benchmarks.lockstep import Taken, add_threads, arguments_of, described, positive, ratio
from benchmarks.peers import encoders
from benchmarks.published_vs_lowered import DIM, export
from pom_edge.export.lowering import lower
from pom_edge.runtimes.onnxruntime_session import SLOW_REWRITES

Change = Callable[[ort.SessionOptions], None]


def entry(name: str, value: str) -> Change:
    """A configuration entry."""
    return lambda options: options.add_session_config_entry(name, value)


def attribute(name: str, value: Any) -> Change:
    """An attribute of the options."""
    return lambda options: setattr(options, name, value)


VARIANTS: dict[str, Change] = {
    "ours": lambda _: None,
    "fusion of Add and LayerNorm": lambda _: None,  # see variant()
    "memory pattern and reuse": attribute("enable_mem_pattern", True),  # and reuse, see variant()
    "no arena": attribute("enable_cpu_mem_arena", False),
    "no prepacking": entry("session.disable_prepacking", "1"),
    "denormals to zero": entry("session.set_denormal_as_zero", "1"),
    "basic rewrites only": attribute("graph_optimization_level", ort.GraphOptimizationLevel.ORT_ENABLE_BASIC),
}


def variant(name: str, file: Path, threads: int) -> ort.InferenceSession:
    """A session with our settings and one change; threads sleep between runs, as sessions in one process disturb each other."""
    options = ort.SessionOptions()
    options.enable_mem_pattern = False
    options.intra_op_num_threads, options.log_severity_level = threads, 4
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.enable_mem_reuse = name.startswith("memory")
    VARIANTS[name](options)
    disabled = None if name.startswith("fusion") else SLOW_REWRITES
    return ort.InferenceSession(str(file), options, providers=["CPUExecutionProvider"], disabled_optimizers=disabled)


def bound(session: ort.InferenceSession, x: np.ndarray) -> Callable[[], Any]:
    """Runs into memory that stays: no copies."""
    binding = session.io_binding()
    binding.bind_cpu_input("x", x)
    binding.bind_ortvalue_output(
        session.get_outputs()[0].name, ort.OrtValue.ortvalue_from_numpy(session.run(None, {"x": x})[0])
    )
    return lambda: session.run_with_iobinding(binding)


def main() -> None:
    """Print one line for each variant."""
    parser = arguments_of(__doc__)
    parser.add_argument("--tokens", type=positive, default=1024, help="length of the sequence")
    add_threads(parser)
    parser.add_argument("--rounds", type=positive, default=15, help="timed, after one that is not")
    options = parser.parse_args()
    x = np.random.default_rng(0).standard_normal((1, options.tokens, DIM)).astype(np.float32)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "ours.onnx"
        export(*lower(encoders()[0]), file, ours=True)
        single = variant("ours", file, 1)
        runs: dict[str, Callable[[], Any]] = {
            "bound inputs and outputs": bound(variant("ours", file, options.threads), x),
            "one thread": lambda: single.run(None, {"x": x}),
        }
        for name in VARIANTS:
            session = variant(name, file, options.threads)
            runs[name] = lambda session=session: session.run(None, {"x": x})  # type: ignore[misc]
    taken = {name: Taken() for name in runs}
    for number in range(options.rounds + 2):
        for name, run in runs.items():
            start, used = time.perf_counter(), time.process_time()
            run()
            if number >= 2:
                taken[name].clock.append(time.perf_counter() - start)
                taken[name].processor.append(time.process_time() - used)
    print(f"{described(options.threads)}, 4-block encoder, N {options.tokens}; ratio to ours (middle half) processor time")
    for name, each in taken.items():
        print(f"{name:30} {each.ms:8.2f} ms  {ratio(each, taken['ours'])}", flush=True)


if __name__ == "__main__":
    main()
