"""What a graph asks of ONNX Runtime's arena, in order: the formula from which memory is predicted for any size.

Read off the graph as the runtime has optimised it (fused operators need fewer tensors), in the order in which it runs:

    +3 4*batch*tokens*768     tensor 3 is made
    -3                        nobody needs it any more
    =7 y                      tensor 7 is the graph's output y: the caller has it now
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import onnx
import onnxruntime

from pom_edge.runtimes.onnxruntime_session import SLOW_REWRITES

# The output is the input's memory under another shape; an output of the graph is always memory of its own
# (onnxruntime/core/framework/allocation_planner.cc, kAllocateOutput). Nothing works in place: see onnxruntime_session.py.
# Begins the name of a value that is computed in FP32 since there is no FP16 kernel (optimizer/insert_cast_transformer.cc).
_WIDENED = "InsertedPrecisionFreeCast_"
_NCHWC = "com.microsoft.nchwc"  # convolutions on blocked channels, where the CPU's vectors allow it
# Tensors as large as the output that a kernel makes for itself, before it (core/providers/cpu/tensor/where_op.cc: one choice of
# each side; contrib_ops/cpu/bert/bias_gelu.cc: the sum with the bias). LeakyRelu in FP16 becomes a Where: it has no kernel.
_TEMPORARIES = {"Where": 2, "BiasGelu": 1}
_ALIASES = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity"})

__all__ = ["arena_plan"]


def arena_plan(path: Path) -> list[str] | None:
    """Events of one run of an ONNX file; None where a tensor's size is not known from the inputs."""
    graph = _optimised(path).graph
    infos = {info.name: info for info in (*graph.value_info, *graph.output)}
    sizes = {name: _bytes(info) for name, info in infos.items()} | _blocked_bytes(graph)
    results = {output.name for output in graph.output}
    users: dict[str, int] = {}
    for name in (*(name for node in graph.node for name in node.input), *results):
        users[name] = users.get(name, 0) + 1
    events: list[str] = []
    owner: dict[str, int] = {}
    left: list[int] = []
    for node in graph.node:
        made = []
        for name in filter(None, node.output):
            if node.op_type in _ALIASES and name not in results:
                if node.input[0] not in owner:
                    continue  # memory of the caller or of the weights
                owner[name] = owner[node.input[0]]
            else:
                size = sizes.get(name)
                if size is None:
                    return None
                for _ in range(_TEMPORARIES.get(node.op_type, 0) + 1):
                    made.append(len(left))
                    left.append(0)
                    events.append(f"+{made[-1]} {size}")
                owner[name] = made[-1]
            left[owner[name]] += users.get(name, 0)
        for name in node.input:
            if name in owner:
                left[owner[name]] -= 1
        touched = {*made, *(owner[name] for name in (*node.input, *node.output) if name in owner)}
        events += [f"-{index}" for index in sorted(touched) if left[index] == 0]
    return events + [f"={owner[output.name]} {output.name}" for output in graph.output if output.name in owner]


def _optimised(path: Path) -> onnx.ModelProto:
    with tempfile.TemporaryDirectory() as folder:
        options = onnxruntime.SessionOptions()
        options.optimized_model_filepath = str(Path(folder) / "optimised.onnx")
        options.log_severity_level = 4
        providers = ["CPUExecutionProvider"]
        onnxruntime.InferenceSession(str(path), options, providers=providers, disabled_optimizers=SLOW_REWRITES)
        model = onnx.load(options.optimized_model_filepath, load_external_data=False)
    source = onnx.load(str(path), load_external_data=False).graph
    shapes = {info.name: info for info in (*source.value_info, *source.output)}
    for name in [name for node in model.graph.node for name in node.output if name.startswith(_WIDENED)]:
        if (info := shapes.get(name.removeprefix(_WIDENED))) is not None:  # of a fused operator, which onnx knows nothing of
            model.graph.value_info.add().CopyFrom(info)
            model.graph.value_info[-1].name = name
            model.graph.value_info[-1].type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    return onnx.shape_inference.infer_shapes(model, data_prop=True)  # fusions make tensors of their own, without a shape


def _blocked_bytes(graph: onnx.GraphProto) -> dict[str, str]:
    """Outputs of convolutions that ONNX Runtime has moved to blocked channels, which onnx's shape inference does not know.

    (B, C, H, W) -> (B, M, H', W'), M the filters with the padding of the last block, as the reordered weights have them
    (onnxruntime/core/optimizer/nchwc_transformer.cc). Only for an input in the usual layout: the stem of an image model.
    """
    shapes = {info.name: info.type.tensor_type.shape.dim for info in (*graph.input, *graph.value_info)}
    weights = {tensor.name: tensor.dims for tensor in graph.initializer}
    made: dict[str, str] = {}
    for node in graph.node:
        if node.domain != _NCHWC or node.op_type != "Conv" or len(shapes.get(node.input[0], ())) != 4:
            continue
        options = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
        batch, _, *sides = (f"({dim.dim_param})" if dim.dim_param else str(dim.dim_value) for dim in shapes[node.input[0]])
        filters, _, *kernel = weights.get(node.input[1], (0, 0))
        if len(kernel) != 2 or options.get("auto_pad", b"NOTSET") not in (b"NOTSET", b"VALID"):
            continue
        pads, strides = options.get("pads", [0] * 4), options.get("strides", [1, 1])
        wide = [1 + (k - 1) * d for k, d in zip(kernel, options.get("dilations", [1, 1]), strict=True)]
        sides = [f"(({n} + {pads[i] + pads[i + 2] - wide[i]})//{strides[i]} + 1)" for i, n in enumerate(sides)]
        made[node.output[0]] = "*".join(["4", batch, str(filters), *sides])
    return made


def _bytes(info: onnx.ValueInfoProto) -> str | None:
    if not info.type.tensor_type.HasField("shape"):
        return None
    tensor = info.type.tensor_type
    factors = [str(onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type).itemsize)]
    for dim in tensor.shape.dim:
        if not dim.dim_param and not dim.HasField("dim_value"):
            return None
        factors.append(f"({dim.dim_param})" if dim.dim_param else str(dim.dim_value))
    return "*".join(factors)
