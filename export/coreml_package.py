"""A traced program to a Core ML package: an ML program, FP16 with FP32 islands, that can be checked without a Mac.

    ExportedProgram -> prepare -> coremltools.convert -> (integer weights) -> .mlpackage

It is converted with the mixers' outputs as further outputs; the saved package has the model's own, and the manifest names the
values inside that hold the mixers', so that one file is what is checked and what is deployed.
"""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pom_edge.errors import InputError
from pom_edge.export.coreml_program import coreml_name, merge_results, prepare
from pom_edge.export.onnx_graph import Graph, Traced
from pom_edge.export.precision import MOVING
from pom_edge.export.ranges import AGGREGATE, TABLES
from pom_edge.runtimes.coreml_library import TESTED_TORCH, listen_to_coremltools, load_coremltools, quiet_coremltools
from pom_edge.runtimes.mil_program import STATE_OPERATORS, model_file

TARGETS = ("iOS16", "iOS17", "iOS18")  # the macOS of the same year takes them too: 13, 14, 15
DEFAULT_TARGET = "iOS17"  # the oldest with INT8 activations
TAP = "mixer_output_"
DEBUG_FILE = "executorch_debug_handle_mapping.json"  # coremltools 9.0 leaves it beside the model, for another tool
NAMESPACE = uuid.UUID("6f1d9c1e-5f0e-5c52-9a55-7d9c2f6f4a10")  # of the package's item identifiers: the same in every export

# ONNX operators, whose types the range proof decides, as MIL calls them
MIL_NAMES = {
    "Add": ("add",),
    "Clip": ("clip",),
    "Conv": ("conv",),
    "Div": ("real_div",),
    "Erf": ("erf", "gelu"),
    "Exp": ("exp",),
    "Gelu": ("gelu",),
    "Gemm": ("linear", "matmul"),
    "HardSigmoid": ("sigmoid_hard",),
    "LayerNormalization": ("layer_norm",),
    "LeakyRelu": ("leaky_relu",),
    "MatMul": ("matmul", "linear"),
    "Max": ("maximum",),
    "Min": ("minimum",),
    "Mul": ("mul", "square"),
    "Reciprocal": ("inverse",),
    "Relu": ("relu",),
    "Sigmoid": ("sigmoid", "silu"),
    "Softmax": ("softmax",),
    "Sqrt": ("sqrt", "rsqrt"),
    "Sub": ("sub",),
    "Tanh": ("tanh",),
    "Where": ("select",),
}
# Both sides move values in their own ways (one splits where the other slices): all of a module's moves, or none
ONNX_MOVES = MOVING - {"Identity"}
MIL_MOVES = (
    "concat",
    "expand_dims",
    "gather",
    "pad",
    "reshape",
    "slice_by_index",
    "split",
    "squeeze",
    "stack",
    "tile",
    "transpose",
)
SUMS = ("reduce_mean", "reduce_sum", "reduce_sum_square", "reduce_l2_norm", "cumsum", "pow", "range_1d")

__all__ = ["DEFAULT_TARGET", "TARGETS", "Islands", "Package", "convert", "deployment_target", "module_paths", "save_package"]


@dataclass(frozen=True)
class Islands:
    """What stays in FP32.

    Attributes:
        operators: module path and MIL operator, from the range proof.
        modules: module paths that stay in FP32 altogether.
    """

    operators: frozenset[tuple[str, str]] = frozenset()
    modules: frozenset[str] = frozenset()

    @classmethod
    def of(cls, typed: Graph, modules: Collection[str] = ()) -> Islands:
        """What a graph typed in half precision (:func:`pom_edge.export.precision.to_half`) keeps."""
        kept = set()
        for node in typed.model.graph:
            if node.op_type != "Cast" and any(v.dtype is not None and v.dtype.name == "FLOAT" for v in node.outputs):
                path = str(node.name).rpartition("/")[0] or "."
                names = MIL_MOVES if node.op_type in ONNX_MOVES else MIL_NAMES.get(node.op_type, ())
                kept |= {(path, name) for name in names}
        return cls(frozenset(kept), frozenset(modules))

    def half(self, path: str, operator: str) -> bool:
        """Whether an operation computes in FP16."""
        scopes = path.split(".")
        if AGGREGATE in scopes or TABLES in scopes or operator in SUMS:
            return False
        if any(module in ("", path) or path.startswith(module + ".") for module in self.modules):
            return False
        return (path, operator) not in self.operators


@dataclass
class Package:
    """A converted graph, not yet written.

    Attributes:
        model: coremltools' model, with the mixers' outputs as further outputs.
        inputs: names in the manifest, in order.
        outputs: names in the manifest -> in the package.
        taps: module paths of the mixers -> outputs that hold theirs.
        enumerated: input -> the shapes that it may have; empty: its shape is fixed, or a range.
        bounds: input -> shortest, usual and longest extent of each axis, where its shape is a range.
        warnings: what coremltools said of the model.
    """

    model: Any
    inputs: list[str]
    outputs: dict[str, str]
    taps: dict[str, str]
    enumerated: dict[str, list[list[int]]] = field(default_factory=dict)
    bounds: dict[str, list[tuple[int, int, int]]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def deployment_target(name: str) -> str:
    """A known ``--minimum-deployment-target``.

    Raises:
        InputError: another one.
    """
    years = {"macOS13": "iOS16", "macOS14": "iOS17", "macOS15": "iOS18"}
    found = years.get(name, name)
    if found not in TARGETS:
        known = ", ".join((*TARGETS, *years))
        raise InputError(f"--minimum-deployment-target is {name!r}; expected one of {known}")
    return found


def convert(traced: Traced, islands: Islands | None, target: str = DEFAULT_TARGET) -> Package:
    """Convert one graph.

    Args:
        traced: with static shapes, or bounded ones.
        islands: None leaves everything in FP32.
        target: of :data:`TARGETS`.

    Raises:
        InputError: coremltools cannot convert it; says the operator.
        MissingExtraError: coremltools is not installed.
    """
    ct = load_coremltools()
    with quiet_coremltools():
        program = prepare(traced)
    names = [*map(coreml_name, traced.outputs), *(f"{TAP}{i}" for i in range(len(traced.taps)))]
    found = merge_results(program, names)
    outputs = [
        ct.TensorType(name=name, dtype=np.float32 if _is_float(node) else np.int32)
        for name, node in zip(dict.fromkeys(found.values()), _results(program), strict=True)
    ]
    try:
        with listen_to_coremltools() as said:
            model = ct.convert(
                program,
                outputs=outputs,
                minimum_deployment_target=getattr(ct.target, target),
                compute_precision=ct.precision.FLOAT32 if islands is None else _half_precision(ct, islands),
                pass_pipeline=_passes(ct),
                skip_model_load=True,
            )
    except Exception as error:  # whatever coremltools raises on a graph that it cannot take
        raise InputError(_refusal(ct, error)) from error
    taps = {path: found[f"{TAP}{index}"] for index, path in enumerate(traced.taps)}
    outputs_by_name = {name: found[coreml_name(name)] for name in traced.outputs}
    return Package(model, list(traced.inputs), outputs_by_name, taps, warnings=said)


def _passes(ct: Any) -> Any:
    """coremltools' own, without one that loses its place where a value is both stored and used (9.0: KeyError)."""
    passes = ct.PassPipeline()
    passes.remove_passes({"common::canonicalize_inplace_pattern"})
    return passes


def _half_precision(ct: Any, islands: Islands) -> Any:
    def half(operation: Any) -> bool:
        path, kind = _scope(operation), str(operation.op_type)
        if kind in MIL_MOVES and not islands.half(path, kind):
            return _comes_in_half(operation)  # a move computes nothing: it follows what it moves
        return islands.half(path, kind)

    return ct.transform.FP16ComputePrecision(op_selector=half)


def _scope(operation: Any) -> str:
    """The module path that :func:`pom_edge.export.coreml_program.prepare` left on the node of which this was made."""
    from coremltools.converters.mil.mil.scope import ScopeSource

    return str((operation.scopes.get(ScopeSource.EXIR_STACK_TRACE) or ["."])[-1] or ".")


def module_paths(model: Any) -> dict[str, str]:
    """Module path of each operation of a converted model, by its name."""
    return {str(operation.name): _scope(operation) for operation in model._mil_program.functions["main"].operations}


def _comes_in_half(operation: Any) -> bool:
    """Whether every value that is moved was made in FP16; what precedes it has been typed already."""
    given = operation.inputs.get("values") or [operation.inputs["x"]]
    from coremltools.converters.mil.mil import types

    sources = [_before_casts(value) for value in given if value.val is None]
    return bool(sources) and all(value.op is not None and types.builtin_to_string(value.dtype) == "fp16" for value in sources)


def _before_casts(value: Any) -> Any:
    while value.op is not None and value.op.op_type == "cast":
        value = value.op.x
    return value


def _results(program: Any) -> list[Any]:
    (output,) = (node for node in program.graph.nodes if node.op == "output")
    specs = program.graph_signature.output_specs
    return [node for node, spec in zip(output.args[0], specs, strict=True) if spec.kind.name == "USER_OUTPUT"]


def _is_float(node: Any) -> bool:
    return bool(node.meta["val"].dtype.is_floating_point)


def _refusal(ct: Any, error: Exception) -> str:
    import torch

    reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    tested = ".".join(map(str, TESTED_TORCH))
    return (
        f"coremltools {ct.__version__} cannot convert the model: {type(error).__name__}: {reason.rstrip('.')}. A fixed "
        f"--tokens N leaves it the least to do (found torch {torch.__version__}; {tested} with coremltools 9.0 is tested)"
    )


def save_package(package: Package, path: Path, metadata: Mapping[str, str]) -> dict[str, str]:
    """Write the package; the same model gives the same bytes.

    Args:
        package: as converted.
        path: of the ``.mlpackage``.
        metadata: becomes the package's user-defined metadata; ``description``, ``author``, ``license`` and ``version`` have
            fields of their own.

    Returns:
        Module path of each mixer -> the value inside the saved program that holds its output.
    """
    if path.exists():
        shutil.rmtree(path)
    with quiet_coremltools():
        package.model.save(str(path))
        (path / DEBUG_FILE).unlink(missing_ok=True)
        from coremltools.proto import Model_pb2

    spec = Model_pb2.Model()
    spec.ParseFromString(model_file(path).read_bytes())
    taps = _drop_taps(spec, package.taps)
    _describe(spec.description, package, metadata)
    model_file(path).write_bytes(spec.SerializeToString(deterministic=True))
    _fix_identifiers(path / "Manifest.json")
    return taps


def _block(spec: Any) -> Any:
    (block,) = spec.mlProgram.functions["main"].block_specializations.values()
    return block


def _drop_taps(spec: Any, taps: Mapping[str, str]) -> dict[str, str]:
    """Take the mixers' outputs back, with the casts that only they needed."""
    block = _block(spec)
    producers = {value.name: operation for operation in block.operations for value in operation.outputs}
    found: dict[str, str] = {}
    for path, name in taps.items():
        operation = producers[name]
        while name.startswith(TAP) and operation.type in ("cast", "identity") and _source(operation) in producers:
            name = _source(operation)
            operation = producers[name]
        found[path] = name
    kept = [name for name in block.outputs if not name.startswith(TAP)]
    del block.outputs[:]
    block.outputs.extend(kept)
    described = [output for output in spec.description.output if not output.name.startswith(TAP)]
    del spec.description.output[:]
    spec.description.output.extend(described)
    _drop_unused(block)
    return found


def _source(operation: Any) -> str:
    return str(operation.inputs["x"].arguments[0].name)


def _drop_unused(block: Any) -> None:
    needed = set(block.outputs)
    kept = []
    for operation in reversed(block.operations):
        names = {value.name for value in operation.outputs}
        if names & needed or operation.type in STATE_OPERATORS:
            kept.append(operation)
            needed |= {
                binding.name
                for argument in operation.inputs.values()
                for binding in argument.arguments
                if binding.WhichOneof("binding") == "name"
            }
    kept.reverse()
    copies = [type(operation).FromString(operation.SerializeToString()) for operation in kept]
    del block.operations[:]
    block.operations.extend(copies)


def _describe(description: Any, package: Package, metadata: Mapping[str, str]) -> None:
    own = description.metadata
    own.author = metadata.get("author", "")
    own.license = metadata.get("license", "")
    own.shortDescription = metadata.get("description", "")
    own.versionString = metadata.get("version", "")
    own.userDefined.pop("com.github.apple.coremltools.conversion_date", None)  # two exports of one model would differ
    for name, value in metadata.items():
        if name not in ("author", "license", "description"):
            own.userDefined[name] = value
    for value in description.input:
        array = value.type.multiArrayType
        if value.name in package.enumerated or value.name in package.bounds:
            array.ClearField("ShapeFlexibility")  # coremltools has the range in which the model was traced
        for shape in package.enumerated.get(value.name, []):
            array.enumeratedShapes.shapes.add(shape=shape)
        if value.name in package.enumerated:
            array.shape[:] = package.enumerated[value.name][0]
        if value.name in package.bounds:
            array.shape[:] = [usual for _, usual, _ in package.bounds[value.name]]
        for low, _, high in package.bounds.get(value.name, []):
            array.shapeRange.sizeRanges.add(lowerBound=low, upperBound=high)


def _fix_identifiers(path: Path) -> None:
    """coremltools draws the items' identifiers anew each time; here they follow from the items' paths."""
    manifest = json.loads(path.read_text())
    entries = manifest["itemInfoEntries"]
    renamed = {old: str(uuid.uuid5(NAMESPACE, entry["path"])).upper() for old, entry in entries.items()}
    manifest["itemInfoEntries"] = {renamed[old]: entry for old, entry in entries.items()}
    manifest["rootModelIdentifier"] = renamed[manifest["rootModelIdentifier"]]
    path.write_text(json.dumps(manifest, indent=4, sort_keys=True) + "\n")
