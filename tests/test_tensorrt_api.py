"""Our calls of TensorRT and CUDA against what the bindings of each version say they take. Needs neither; nothing is built.

`mock`'s autospec sees nothing through pybind11: it accepts wrong arguments. So the calls are read from our source, and the
signatures from the bindings' own docstrings, written down in tests/data/tensorrt_api by describe.py. That they are what the
bindings say, and that the code runs with these, is held by tests/test_tensorrt_bindings.py.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.data.tensorrt_api.describe import fits

ROOT = Path(__file__).parent.parent
DATA = Path(__file__).parent / "data" / "tensorrt_api"
VERSIONS = ["10.3.0", "10.7.0", "10.13.3.9", "10.16.1.11", "11.4.0.106", "rtx-1.7.1.116"]
CUDA_VERSIONS = ["cuda-12.9.0", "cuda-13.0.0"]
FILES = [
    "export/tensorrt_engine.py",
    "export/engine_census.py",
    "export/timing_cache.py",
    "runtimes/tensorrt_library.py",
    "runtimes/engine_file.py",
    "runtimes/tensorrt_session.py",
]
CUDA_FILE = "runtimes/cuda_memory.py"
VARIABLES = {
    "builder": "Builder",
    "config": "IBuilderConfig",
    "network": "INetworkDefinition",
    "parser": "OnnxParser",
    "error": "ParserError",
    "layer": "ILayer",
    "profile": "IOptimizationProfile",
    "engine": "ICudaEngine",
    "context": "IExecutionContext",
    "inspector": "EngineInspector",
    "cache": "ITimingCache",
    "other": "ITimingCache",
    "tensor": "ITensor",
    "serialized": "IHostMemory",
    "runtime": "Runtime",
    "_config": "IBuilderConfig",
    "_context": "IExecutionContext",
    "_engine": "ICudaEngine",
    "_library": "Runtime",
}
RESULTS = {"get_output": "ITensor", "get_input": "ITensor", "get_layer": "ILayer"}


@cache
def _api(version: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((DATA / f"{version}.json").read_text())
    return content


def _is_module(node: ast.expr) -> bool:
    """`trt`, or `self._trt`."""
    return (isinstance(node, ast.Name) and node.id == "trt") or (isinstance(node, ast.Attribute) and node.attr == "_trt")


def _class_of(node: ast.expr) -> str | None:
    """Which of TensorRT's classes an expression is of, by the names that our code gives."""
    if isinstance(node, ast.Name):
        return VARIABLES.get(node.id)
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
        return VARIABLES.get(node.attr)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr if _is_module(node.func.value) else RESULTS.get(node.func.attr)
    return None


class _Faults:
    """What in a source does not agree with one version's API."""

    def __init__(self, source: str, api: dict[str, Any]) -> None:
        self._tree, self._api = ast.parse(source), api
        self._guarded = set(self._guards())
        self._calls = {id(node.func): node for node in ast.walk(self._tree) if isinstance(node, ast.Call)}

    def _guards(self) -> Iterator[str]:
        """Names that the source asks for before it uses them: `hasattr(x, "name")`, `"NAME" in trt.Enum.__members__`."""
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "hasattr":
                assert isinstance(node.args[1], ast.Constant)
                yield str(node.args[1].value)

    def find(self) -> Iterator[str]:
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Attribute):
                yield from self._attribute(node)
            elif isinstance(node, ast.ClassDef):
                yield from self._subclass(node)
            elif isinstance(node, ast.Compare) and isinstance(node.left, ast.Constant):
                yield from self._member(node)

    def _attribute(self, node: ast.Attribute) -> Iterator[str]:
        if _is_module(node):
            return
        if _is_module(node.value):
            if not node.attr.startswith("__") and node.attr not in self._api["module"] and node.attr not in self._guarded:
                yield f"line {node.lineno}: the module has no {node.attr}"
            elif id(node) in self._calls and node.attr in self._api["classes"]:
                yield from self._arguments(self._calls[id(node)], node.attr, "__init__")
            return
        outer = node.value
        if isinstance(outer, ast.Attribute) and outer.attr.startswith("__"):
            return
        if isinstance(outer, ast.Attribute) and _is_module(outer.value) and not node.attr.startswith("__"):
            known = self._api["enums"].get(outer.attr, self._api["classes"].get(outer.attr, {}))
            if node.attr not in known and not {outer.attr, node.attr} & self._guarded:
                yield f"line {node.lineno}: {outer.attr} has no {node.attr}"
            return
        kind = _class_of(outer)
        if kind is None or kind not in self._api["classes"] or node.attr.startswith("__"):
            return
        members = self._api["classes"][kind]
        if node.attr not in members:
            if node.attr not in self._guarded:
                yield f"line {node.lineno}: {kind} has no {node.attr}"
        elif id(node) in self._calls:
            yield from self._arguments(self._calls[id(node)], kind, node.attr)

    def _arguments(self, call: ast.Call, kind: str, name: str) -> Iterator[str]:
        overloads = self._api["classes"][kind][name]
        if overloads == "property":
            yield f"line {call.lineno}: {kind}.{name} is a property, and is called"
        elif overloads and not any(_fits(call, signature.split()) for signature in overloads):
            yield f"line {call.lineno}: {kind}.{name} takes ({' | '.join(overloads)})"

    def _subclass(self, node: ast.ClassDef) -> Iterator[str]:
        """Methods that TensorRT calls have its names and arguments."""
        for base in node.bases:
            if not isinstance(base, ast.Attribute) or not _is_module(base.value) or base.attr not in self._api["classes"]:
                continue
            members = self._api["classes"][base.attr]
            for method in (each for each in node.body if isinstance(each, ast.FunctionDef) and each.name in members):
                names = [argument.arg for argument in method.args.args[1:]]
                if method.name != "__init__" and not any(set(names) <= set(text.split()) for text in members[method.name]):
                    yield f"line {method.lineno}: {base.attr}.{method.name} takes ({' | '.join(members[method.name])})"
            own = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
            called = {name for name, text in members.items() if name in CALLED_BACK.get(base.attr, ())}
            if called - own:
                yield f"line {node.lineno}: {base.attr} calls {', '.join(sorted(called - own))}; {node.name} has no such method"

    def _member(self, node: ast.Compare) -> Iterator[str]:
        right = node.comparators[0]
        if isinstance(right, ast.Attribute) and right.attr == "__members__" and isinstance(right.value, ast.Attribute):
            name = node.left.value if isinstance(node.left, ast.Constant) else None
            if not any(name in _api(version)["enums"].get(right.value.attr, ()) for version in VERSIONS):
                yield f"line {node.lineno}: no version has {right.value.attr}.{name}"


CALLED_BACK = {
    "ILogger": ("log",),
    "IProgressMonitor": ("phase_start", "phase_finish", "step_complete"),
    "IStreamReaderV2": ("read", "seek"),
}


def _fits(call: ast.Call, signature: list[str]) -> bool:
    """Whether a call agrees with one overload: `name=` has a default."""
    if any(keyword.arg is None for keyword in call.keywords):
        return False
    return fits(signature, len(call.args), [str(keyword.arg) for keyword in call.keywords])


def _faults(source: str, version: str) -> list[str]:
    return list(_Faults(source, _api(version)).find())


def _cuda_faults(source: str, version: str) -> list[str]:
    api, found = _api(version), []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _of_cuda(node.func.value):
            signature = api["functions"].get(node.func.attr)
            if signature is None or not _fits(node, signature.split()):
                found.append(f"line {node.lineno}: {node.func.attr}({signature})")
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute) and _of_cuda(node.value.value):
            members = api["enums"].get(node.value.attr, ())
            found += [] if node.attr in members else [f"line {node.lineno}: {node.value.attr} has no {node.attr}"]
    return found


def _of_cuda(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "_api"


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("file", FILES)
def test_every_call_agrees_with_the_bindings(file: str, version: str) -> None:
    assert _faults((ROOT / file).read_text(), version) == []


@pytest.mark.parametrize("version", CUDA_VERSIONS)
def test_every_call_agrees_with_cuda_python(version: str) -> None:
    assert _cuda_faults((ROOT / CUDA_FILE).read_text(), version) == []


def test_what_is_guarded_exists_somewhere() -> None:
    """A guard around a misspelt name would hide it for ever."""
    known = {name for version in VERSIONS for kind in _api(version)["classes"].values() for name in kind}
    known |= {name for version in VERSIONS for name in _api(version)["module"]}
    for file in FILES:
        guarded = _Faults((ROOT / file).read_text(), _api("10.3.0"))._guarded
        assert guarded <= known, (file, guarded - known)


MISTAKES = {
    "export/tensorrt_engine.py": [
        ("builder.create_builder_config()", "builder.create_config()"),
        ("NetworkDefinitionCreationFlag.STRONGLY_TYPED", "NetworkDefinitionCreationFlag.STRONG_TYPED"),
        ("set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, job.workspace)", "set_memory_pool_limit(job.workspace)"),
        ("trt.MemoryPoolType.TACTIC_DRAM", "trt.MemoryPoolType.TACTIC_RAM"),
        ("profile.set_shape(name, low, usual, high)", "profile.set_shape(name, low, usual, maximum=high)"),
        ("parser.parse_from_file(job.onnx)", "parser.parse_from_file(job.onnx, True)"),
        ("error.node_operator()", "error.operator()"),
        ("trt.OnnxParser(network, logger)", "trt.OnnxParser(network)"),
        ("builder.build_serialized_network(network, config)", "builder.build_serialized_network(config)"),
        ("def step_complete(self, phase_name: str, step: int)", "def step_done(self, phase_name: str, step: int)"),
        ("def phase_finish(self, phase_name: str)", "def phase_finish(self, phase: str)"),
        ("layer.get_output(0).dtype", "layer.get_output(0).type"),
        ("get_engine_information(trt.LayerInformationFormat.JSON)", "get_engine_information()"),
        ('"OBEY_PRECISION_CONSTRAINTS" in', '"OBEY_PRECISION" in'),
    ],
    "export/timing_cache.py": [
        ("cache.combine(other, False)", "cache.combine(other)"),
    ],
    "runtimes/engine_file.py": [
        ("runtime.deserialize_cuda_engine(reader)", "runtime.deserialise_cuda_engine(reader)"),
        ("def seek(self, offset: int, where: Any)", "def seek(self, offset: int, whence: Any)"),
    ],
    "runtimes/tensorrt_session.py": [
        ("context.set_tensor_address(", "context.set_tensor_adress("),
        ("execute_async_v3(self._cuda.handle)", "execute_async_v3(self._cuda.handle, 0)"),
        ("context.set_device_memory(self._arena.reserve(scratch), self._arena.size)", "context.set_device_memory(self._arena)"),
        ("engine.get_tensor_mode(name)", "engine.get_tensor_mode(name=name, index=0)"),
        ("engine.device_memory_size_v2", "engine.device_memory_size"),
        ("ExecutionContextAllocationStrategy.USER_MANAGED", "ExecutionContextAllocationStrategy.USER"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("file", "right", "wrong"), [(file, *each) for file, mistakes in MISTAKES.items() for each in mistakes]
)
def test_a_mistake_is_seen(file: str, right: str, wrong: str) -> None:
    source = (ROOT / file).read_text()
    assert right in source, f"{right!r} is not in {file} any more: mend this test"
    broken = source.replace(right, wrong)
    assert any(_faults(broken, version) for version in VERSIONS)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("self._api.cudaMalloc(", "self._api.cudaMaloc("),
        ("cudaMemcpyHostToDevice", "cudaMemcpyHostToDev"),
        ("cudaGraphInstantiate(ended[1], 0)", "cudaGraphInstantiate(ended[1])"),
        ("cudaStreamSynchronize(self.stream)", "cudaStreamSynchronize()"),
    ],
)
def test_a_mistake_with_cuda_is_seen(right: str, wrong: str) -> None:
    source = (ROOT / CUDA_FILE).read_text()
    assert right in source
    assert _cuda_faults(source.replace(right, wrong), CUDA_VERSIONS[0])


def test_the_flags_of_weak_typing_exist_where_typing_is_weak() -> None:
    from pom_edge.export import tensorrt_lint

    source = Path(tensorrt_lint.__file__).read_text()
    for version in ("10.3.0", "10.7.0"):
        for flag in ("FP16", "BF16", "INT8", "INT4"):
            assert f'"{flag}"' in source and flag in _api(version)["enums"]["BuilderFlag"]
