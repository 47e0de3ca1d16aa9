"""Write down the API of an installed `tensorrt` or `tensorrt_rtx`: names, enum members, and the signatures in its docstrings.

    python tests/data/tensorrt_api/describe.py tensorrt_bindings > tests/data/tensorrt_api/10.3.0.json

The bindings wheels (tensorrt-cu12-bindings and its like, 1.3 MB) need no GPU. They do need the names of the native libraries to
resolve, for which tests/stub_library.py writes empty ones; tests/test_tensorrt_bindings.py holds that what is written down is
what the bindings say.

    python tests/data/tensorrt_api/describe.py cuda.bindings.runtime > tests/data/tensorrt_api/cuda-12.9.0.json
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import re
import sys
from typing import Any

CLASSES = (
    "Builder", "EngineInspector", "IBuilderConfig", "ICudaEngine", "IExecutionContext", "IHostMemory", "ILayer", "ILogger",
    "INetworkDefinition", "IOptimizationProfile", "IProgressMonitor", "IRuntimeConfig", "IStreamReaderV2", "ITensor",
    "ITimingCache", "OnnxParser", "ParserError", "Runtime", "Dims",
)  # fmt: skip
ENUMS = (
    "BuilderFlag", "ComputeCapability", "DataType", "ExecutionContextAllocationStrategy", "HardwareCompatibilityLevel",
    "LayerInformationFormat", "LayerType", "MemoryPoolType", "NetworkDefinitionCreationFlag", "OnnxParserFlag",
    "ProfilingVerbosity", "Severity", "TensorIOMode", "TensorLocation",
)  # fmt: skip


def signatures(function: Any) -> list[str]:
    """Arguments of every overload, self left out, with a `=` where there is a default: ["name shape= stream"]."""
    name = function.__name__
    found = re.findall(rf"^(?:\d+\. )?{re.escape(name)}\((.*)\) -> ", function.__doc__ or "", flags=re.MULTILINE)
    return [" ".join(arguments(text)) for text in found]


def arguments(text: str) -> list[str]:
    """Names from `self: T, name: str, path: Foo[a, b] = None`."""
    depth, parts = 0, [""]
    for letter in text:
        depth += (letter in "([{<") - (letter in ")]}>")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    names = [part.strip() for part in parts if part.strip()]
    return [
        part.split(":")[0].split("=")[0].strip() + ("=" if "=" in part else "")
        for part in names
        if part.split(":")[0] != "self"
    ]


def fits(signature: list[str], positional: int, keywords: list[str]) -> bool:
    """Whether a call with so many positional arguments and these names agrees with one overload."""
    names = [name.rstrip("=") for name in signature]
    given = names[:positional] + keywords
    needed = {name for name in signature if not name.endswith("=")}
    return positional <= len(names) and set(given) <= set(names) and len(set(given)) == len(given) and needed <= set(given)


def describe_class(kind: type) -> dict[str, Any]:
    members: dict[str, Any] = {}
    for name in dir(kind):
        if name.startswith("_") and name != "__init__":
            continue
        value = getattr(kind, name)
        if type(value).__name__ in ("instancemethod", "function", "builtin_function_or_method", "method", "wrapper_descriptor"):
            members[name] = signatures(value)
        else:
            members[name] = "property"
    return members


def describe_cuda(module: Any) -> dict[str, Any]:
    """Argument names of the runtime's functions, from the first line of each docstring; its enums."""
    families = ("cudaMalloc", "cudaFree", "cudaMemcpy", "cudaStream", "cudaGraph", "cudaGetLastError")
    functions, enums = {}, {}
    for name in dir(module):
        value = getattr(module, name)
        if hasattr(value, "__members__") and name.startswith(("cudaMemcpyKind", "cudaStreamCaptureMode")):
            enums[name] = sorted(value.__members__)
        elif name.startswith(families) and callable(value) and (value.__doc__ or "").startswith(name + "("):
            text = value.__doc__.splitlines()[0].partition("(")[2].rpartition(")")[0]
            functions[name] = " ".join(part.split(":")[0].split()[-1] for part in text.split(",") if part.strip())
    return {"version": importlib.metadata.version("cuda-bindings"), "functions": functions, "enums": enums}


def main(module_name: str) -> None:
    module = importlib.import_module(module_name)
    if module_name.startswith("cuda"):
        print(json.dumps(describe_cuda(module), sort_keys=True, indent=0))
        return
    facts = {
        "version": module.__version__,
        "classes": {name: describe_class(getattr(module, name)) for name in CLASSES if hasattr(module, name)},
        "enums": {
            name: sorted(getattr(module, name, getattr(module.ILogger, name, None)).__members__)
            for name in ENUMS
            if hasattr(module, name) or hasattr(module.ILogger, name)
        },
        "module": sorted(name for name in dir(module) if not name.startswith("_")),
    }
    print(json.dumps(facts, sort_keys=True, separators=(",", ":")).replace('},"', '},\n"'))


if __name__ == "__main__":
    main(sys.argv[1])
