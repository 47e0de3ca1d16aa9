"""One model in one runtime, in a process of its own, run when told so.

    python -m benchmarks.runners KIND FILE TOKENS DIM THREADS

The process answers ``run`` with the seconds of a run, on the clock and of all its threads together: the mean of some, after
others that do not count. It answers ``write PATH`` with the output in a .npy file.
Kinds: ort (our session options), ort-plain (ONNX Runtime's own), openvino, eager, compile, executorch.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

WARM_S, TIMED_S = 0.03, 0.1
Run = Callable[[], Any]


def onnx_runtime(file: str, x: np.ndarray, threads: int, plain: bool) -> tuple[Run, Run]:
    """Inputs and outputs bound to memory that stays: no copies on either side."""
    import onnxruntime as ort

    if plain:
        options = ort.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = threads, 4
        session = ort.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    else:
        from pom_edge.runtimes.onnxruntime_session import native_session

        session = native_session(file, threads)
    (first,) = session.run(None, {"x": x})
    output = ort.OrtValue.ortvalue_from_numpy(first)
    binding = session.io_binding()
    binding.bind_cpu_input("x", x)
    binding.bind_ortvalue_output(session.get_outputs()[0].name, output)
    return lambda: session.run_with_iobinding(binding), output.numpy


def openvino(file: str, x: np.ndarray, threads: int) -> tuple[Run, Run]:
    """Static shape, FP32 arithmetic, tuned for latency."""
    ov = importlib.import_module("openvino")
    core = ov.Core()
    model = core.read_model(file)
    model.reshape({"x": list(x.shape)})
    settings = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
    request = core.compile_model(model, "CPU", settings).create_infer_request()
    request.set_input_tensor(ov.Tensor(x, shared_memory=True))
    return request.infer, lambda: request.get_output_tensor(0).data


def pytorch(file: str, x: np.ndarray, threads: int, compiled: bool) -> tuple[Run, Run]:
    """A pickled module that the benchmark itself has written."""
    import torch

    torch.set_num_threads(threads)
    model = torch.load(file, weights_only=False).eval()
    run = torch.compile(model, dynamic=False) if compiled else model
    tensor = torch.from_numpy(x)

    def once() -> Any:
        with torch.inference_mode():
            return run(tensor)

    return once, lambda: once().numpy()


def executorch(file: str, x: np.ndarray, threads: int) -> tuple[Run, Run]:
    """A program lowered to XNNPACK."""
    import torch

    runtime = importlib.import_module("executorch.runtime")
    importlib.import_module("executorch.extension.pybindings.portable_lib")._unsafe_reset_threadpool(threads)
    method = runtime.Runtime.get().load_program(file).load_method("forward")
    inputs = [torch.from_numpy(x)]
    return lambda: method.execute(inputs), lambda: method.execute(inputs)[0].numpy()


def open_runner(kind: str, file: str, x: np.ndarray, threads: int) -> tuple[Run, Run]:
    """(run once, run and give the output) of a model in a runtime."""
    if kind in ("ort", "ort-plain"):
        return onnx_runtime(file, x, threads, kind == "ort-plain")
    if kind in ("eager", "compile"):
        return pytorch(file, x, threads, kind == "compile")
    return {"openvino": openvino, "executorch": executorch}[kind](file, x, threads)


def main() -> None:
    """Serve until the input ends."""
    kind, file = sys.argv[1:3]
    tokens, dim, threads = map(int, sys.argv[3:6])
    x = np.random.default_rng(0).standard_normal((1, tokens, dim)).astype(np.float32)
    run, output = open_runner(kind, file, x, threads)
    print("answer ready", flush=True)
    for line in sys.stdin:
        command, _, argument = line.strip().partition(" ")
        if command == "write":
            run()
            np.save(argument, output())
            print("answer written", flush=True)
        else:
            repeat(run, WARM_S)
            used = time.process_time()
            count, taken = repeat(run, TIMED_S)
            print(f"answer {taken / count} {(time.process_time() - used) / count}", flush=True)


def repeat(run: Run, least_s: float) -> tuple[int, float]:
    """Run at least once, and until that time is over; (how often, how long)."""
    count, start = 0, time.perf_counter()
    while True:
        run()
        count, taken = count + 1, time.perf_counter() - start
        if taken >= least_s:
            return count, taken


if __name__ == "__main__":
    main()
