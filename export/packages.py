"""The Core ML packages of one form, beside :class:`pom_edge.export.made.Made`, whose traced programs they are made from."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from pom_edge.bundle import TensorSpec
from pom_edge.export.coreml_package import Islands as Islands
from pom_edge.export.coreml_package import Package, convert, save_package
from pom_edge.export.coreml_program import coreml_name
from pom_edge.export.coreml_stateful import stateful_plan, trace_stateful
from pom_edge.export.coreml_weights import compress, weights_of
from pom_edge.export.forms import Plan
from pom_edge.export.inputs import Extent
from pom_edge.export.made import Made
from pom_edge.export.onnx_graph import Traced
from pom_edge.manifest import PALETTES
from pom_edge.runtimes.coreml_session import EVALUATED, run_named
from pom_edge.runtimes.mil_program import MilProgram
from pom_edge.runtimes.stepping import NEXT, STATE, Execute, is_state

NARROW = {"int64": "int32"}  # Core ML has no 64-bit integers

WEIGHTS_ONLY = ("w8", "w4", *PALETTES)

__all__ = ["WEIGHTS_ONLY", "Packages"]


class Packages:
    """One package, or one for each pass of the streamed form.

    Args:
        base: in FP32, of the same shapes.
        precision: ``"fp32"``, ``"fp16"``, ``"w8a8"``, or one of :data:`WEIGHTS_ONLY`.
        islands: what stays in FP32 in each graph; None: all of it.
        target: minimum deployment target.
        traced: what to convert instead of the base's own programs (a quantized one).
        stateful: the recurrent form keeps its state in the package (iOS18), all but the count.
    """

    target = "coreml"
    verified = EVALUATED
    remainder = "fp32"

    def __init__(
        self,
        base: Made,
        precision: str,
        islands: list[Islands] | None,
        target: str,
        traced: list[Traced] | None = None,
        stateful: bool = False,
    ) -> None:
        self.base, self.precision, self.deployment = base, precision, target
        self.plan: Plan = base.plan
        self._states: dict[str, list[int]] = {}
        programs = base.traced_graphs if traced is None else traced
        if stateful:
            self.plan, self._states = stateful_plan(base.plan)
            programs = [trace_stateful(base.plan)]
        each = [None] * len(programs) if islands is None else islands
        self.packages: list[Package] = [convert(t, kept, target) for t, kept in zip(programs, each, strict=True)]
        if base.plan.form != "streamed":
            for spec in base.fields()["inputs"]:
                self._flexible(spec)
        self._taps: list[dict[str, str]] = []
        self.programs: list[MilProgram] = []
        self._floats = self.packages
        if precision in WEIGHTS_ONLY:
            self.store()

    def store(self, keep: Collection[str] | None = ()) -> None:
        """Weights alone: as integers, but for these (see :attr:`weights`); None: all of them stay floats."""
        self.packages = self._floats if keep is None else [compress(each, self.precision, keep) for each in self._floats]

    @property
    def weights(self) -> dict[str, str]:
        """Name of each weight -> module path of what reads it first."""
        return {name: path for package in self._floats for name, path in weights_of(package).items()}

    def _flexible(self, spec: TensorSpec) -> None:
        """What the package says of the shapes that an input may have, the shortest first."""
        name, package = coreml_name(spec.name), self.packages[0]
        for axis, lengths in spec.lengths.items():
            package.enumerated[name] = [[length if dim == axis else int(dim) for dim in spec.shape] for length in lengths]
        if spec.bounds and not spec.lengths:
            extents = [self.base.extent(dim) if isinstance(dim, str) else Extent(dim, dim, dim) for dim in spec.shape]
            package.bounds[name] = [(e.minimum, e.optimum or e.minimum, e.maximum or e.minimum) for e in extents]

    @property
    def mixers(self) -> list[str]:
        """Module paths of the mixers."""
        return self.base.mixers

    @property
    def kind(self) -> str:
        """As in file names."""
        return self.precision

    def files(self) -> list[str]:
        """Where each package lies inside the bundle."""
        names = [
            file.removesuffix(".onnx").replace(f".{self.base.kind}", f".{self.precision}", 1) for file in self.base.files()
        ]
        return [f"{name}{'.stateful' if self._states else ''}.mlpackage" for name in names]

    @property
    def file(self) -> str:
        """The package, or that of the first pass."""
        return self.files()[0]

    def save(self, folder: Path, metadata: Mapping[str, str]) -> list[str]:
        """Write the packages; returns the paths of their files inside the folder."""
        self._taps, self.programs = [], []
        metadata = {"description": f"{self.plan.form} form in {self.precision}, by pom-edge", **metadata}
        for file, package in zip(self.files(), self.packages, strict=True):
            (folder / file).parent.mkdir(exist_ok=True)
            self._taps.append(save_package(package, folder / file, metadata))
            self.programs.append(MilProgram(folder / file))
        paths = [path for file in self.files() for path in sorted((folder / file).rglob("*")) if path.is_file()]
        return [path.relative_to(folder).as_posix() for path in paths]

    def written(self, folder: Path) -> Execute:
        """Outputs and mixers by name, evaluated from the written packages."""
        return self.executing([MilProgram(folder / file) for file in self.files()])

    def executing(self, programs: list[MilProgram]) -> Execute:
        """The same of programs that are open."""
        nexts = {_following(name): _following(name) for name in self._states}
        wanted = [package.outputs | taps | nexts for package, taps in zip(self.packages, self._taps, strict=True)]
        return self.base.drive([functools.partial(run_named, *each) for each in zip(programs, wanted, strict=True)])

    @property
    def warnings(self) -> list[str]:
        """What coremltools said of the model."""
        return list(dict.fromkeys(text for package in self.packages for text in package.warnings))

    @property
    def nodes(self) -> int:
        """Operations in all packages, constants left out."""
        return sum(sum(program.counts.values()) for program in self.programs)

    def operators(self) -> dict[str, int]:
        """How often each operator occurs."""
        total: Counter[str] = Counter()
        for program in self.programs:
            total += program.counts
        return dict(sorted(total.items()))

    @property
    def half_share(self) -> float:
        """Floating-point operations that compute in FP16, read back from the files."""
        half = sum(program.half_operations for program in self.programs)
        return round(half / (sum(program.float_operations for program in self.programs) or 1), 4)

    def fields(self) -> dict[str, Any]:
        """What the manifest's artifact says."""
        fields = self.base.fields()
        counts: Counter[str] = Counter()
        for program in self.programs:
            counts += program.weight_dtypes
        total = sum(counts.values()) or 1
        names = {"fp32": "float", "fp16": "float16"}
        fields |= {
            "deployment_target": self.deployment,
            "opset": None,
            "ir_version": None,
            "census": {names.get(name, name): round(n / total, 4) for name, n in sorted(counts.items()) if n},
            "inputs": [_narrow(spec) for spec in fields["inputs"]],
            "outputs": [_narrow(spec) for spec in fields["outputs"]],
        }
        if self._states:
            for kind, rename in (("inputs", str), ("outputs", _following)):
                kept = [spec for spec in fields[kind] if not is_state(spec.name) or spec.name.endswith("count")]
                own = [TensorSpec(name=rename(n), dtype="float16", shape=list(shape)) for n, shape in self._states.items()]
                fields[kind] = [*kept, *own]
        if "stream" in fields:
            steps = [
                step.model_copy(update={"file": file, "mixers": taps})
                for step, file, taps in zip(fields["stream"].passes, self.files(), self._taps, strict=True)
            ]
            fields["stream"] = fields["stream"].model_copy(update={"passes": steps})
        else:
            fields["mixers"] = self._taps[0]
        return fields


def _following(name: str) -> str:
    """What a state becomes."""
    return NEXT + name.removeprefix(STATE)


def _narrow(spec: TensorSpec) -> TensorSpec:
    return spec.model_copy(update={"dtype": NARROW.get(spec.dtype, spec.dtype)})
