"""Half-precision graphs with every operator rounded: it computes in FP32, and its result becomes FP16 or BF16.

That is what hardware with FP32 accumulators does, up to the order of sums. ONNX Runtime on a CPU does otherwise: it has no BF16
kernels, and computes chains of FP16 operators in FP32, where an overflow between two of them is not seen. It is an evaluation
of the written file, not a run of it. Needs the onnx package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from pom_edge.errors import require
from pom_edge.runtimes.onnxruntime_session import native_session

__all__ = ["open_rounded", "rounded_session"]

FLOAT, HALVES = 1, (10, 16)  # FP16, BF16
EXACT = ("Reshape", "Transpose", "Squeeze", "Unsqueeze", "Slice", "Split", "Concat", "Gather")


def rounded_session(path: Path, threads: int | None = None, taps: Iterable[str] = ()) -> Any:
    """An ``onnxruntime.InferenceSession`` that evaluates a graph typed in FP16 or BF16.

    Args:
        path: the ``.onnx`` file.
        threads: None leaves the choice to ONNX Runtime.
        taps: values inside the graph that become outputs too.

    Raises:
        MissingExtraError: the onnx package is not installed.
    """
    onnx = require("onnx", "export")
    model = onnx.load(str(path))
    _widen(onnx, model, _types(onnx, model))
    known = {output.name for output in model.graph.output}
    for value in taps:
        if value not in known:
            model.graph.output.append(onnx.ValueInfoProto(name=value))
    del model.graph.value_info[:]
    return native_session(model.SerializeToString(), threads, optimize=False)  # a cast there and back would be taken out


def open_rounded(path: Path, taps: dict[str, str]) -> Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]:
    """As :func:`pom_edge.runtimes.layers.open_tapped`, by :func:`rounded_session`."""
    native = rounded_session(path, taps=taps.values())
    return lambda inputs: dict(zip(taps, native.run(list(taps.values()), inputs), strict=True))


def _types(onnx: Any, model: Any) -> dict[str, int]:
    """Element type of every value, by name."""
    inferred = onnx.shape_inference.infer_shapes(model).graph
    types = {
        value.name: value.type.tensor_type.elem_type for value in (*inferred.value_info, *inferred.input, *inferred.output)
    }
    return types | {tensor.name: tensor.data_type for tensor in model.graph.initializer}


def _widen(onnx: Any, model: Any, types: dict[str, int]) -> None:
    """Half constants to FP32, and after every node that answers in half precision a cast there and back."""
    graph = model.graph
    for tensor in graph.initializer:
        if tensor.data_type in HALVES:
            wide = onnx.numpy_helper.to_array(tensor).astype(np.float32)
            tensor.CopyFrom(onnx.numpy_helper.from_array(wide, tensor.name))
    nodes = list(graph.node)
    del graph.node[:]
    for node in nodes:
        narrow = [name for name in node.output if types.get(name) in HALVES]
        if node.op_type == "Cast" and narrow:
            for attribute in node.attribute:
                attribute.i = FLOAT
        kept = graph.node.add()
        kept.CopyFrom(node)
        for i, name in enumerate(node.output):
            if name in narrow and node.op_type not in EXACT:
                kept.output[i] = f"{name}.exact"
                graph.node.append(onnx.helper.make_node("Cast", [f"{name}.exact"], [f"{name}.rounded"], to=types[name]))
                graph.node.append(onnx.helper.make_node("Cast", [f"{name}.rounded"], [name], to=FLOAT))
