"""What to make, as on the command line, and what of it this version does not make. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pom_edge.coreml import check_coreml
from pom_edge.engine_options import EngineOptions
from pom_edge.errors import InputError
from pom_edge.manifest import PALETTES, PRECISIONS
from pom_edge.metric import Metric
from pom_edge.runtimes.parity import GATES_DB, MAX_SNR_DB

if TYPE_CHECKING:
    from torch import Tensor, nn

TARGETS = ("onnx", "coreml", "trt", "rtx")
DEFAULT_PRECISION = {"onnx": "fp32", "coreml": "fp16", "trt": "fp16", "rtx": "fp16"}
# What a name stands for, where a target has another one for it. On Core ML INT8 is weights alone unless activations are asked
# for: those have run many times slower than floats on some devices (coremltools#2410), and they need data.
MEANT = {"coreml": {"int8": "w8"}}
MEANT_ELSEWHERE = {"w8a8": "int8"}
INT8_ACTIVATIONS = frozenset({"int8", "w8a8"})  # as precisions_of() gives them
REMAINDERS = ("fp32", "fp16")
FORMS = ("parallel", "recurrent", "streamed")
OBSERVERS = ("minmax", "percentile", "mse")
INT8_WEIGHTS = ("8bit", "7bit")
MAX_CHUNK = 2**31 - 1

__all__ = ["DEFAULT_PRECISION", "FORMS", "TARGETS", "ExportOptions"]


@dataclass(frozen=True)
class ExportOptions:
    """What to make, as on the command line (see ``pom-export --help``)."""

    targets: Sequence[str] = ("onnx",)
    precisions: Sequence[str] = ()  # none: each target's own, see DEFAULT_PRECISION
    form: str | None = None
    tokens: str | int | None = None
    batch: str | int | None = None
    chunk: int | None = None
    mask: str = "none"
    factory: str | Callable[[], nn.Module] | None = None
    example: str | Mapping[str, Tensor] | None = None
    layout: str | None = None
    degree: int | None = None
    clamp: float | None = None
    unsafe_pickle: bool = False
    snr_db: float | None = None
    metric: str | Callable[..., float] | None = None
    max_drop: float | None = None
    calibration: Any = None
    observer: str = "percentile"
    int8_weights: str = "8bit"
    remainder: str = "fp32"
    deployment_target: str | None = None  # None: iOS17
    stateful: bool = False
    author: str | None = None
    license: str | None = None
    memory_budget: int | None = None
    compute_capability: Sequence[str] = ()
    workspace: int | None = None
    optimization_level: int | None = None
    refit: bool = False
    version_compatible: bool = False
    hardware_compatible: bool = False
    overwrite: bool = False

    def precisions_of(self, *targets: str) -> tuple[str, ...]:
        """What targets are made in, each once: what was asked for as they know it, else what each of them has by default."""
        return tuple(
            dict.fromkeys(
                MEANT.get(target, MEANT_ELSEWHERE).get(precision, precision)
                for target in targets
                for precision in self.precisions or [DEFAULT_PRECISION.get(target, "fp32")]
            )
        )

    @property
    def calibrated(self) -> bool:
        """Whether a target quantizes activations, which takes data."""
        return not INT8_ACTIVATIONS.isdisjoint(self.precisions_of(*self.targets))

    def engines(self, precisions: Sequence[str] = ()) -> EngineOptions:
        """Those that say how engines are built."""
        names = set(EngineOptions.__dataclass_fields__) - {"precisions"}
        return EngineOptions(tuple(precisions), **{name: getattr(self, name) for name in names})

    def check(self) -> None:
        """Refuse what this version does not make.

        Raises:
            InputError: an unknown target, precision or form, with the list of known ones.
        """
        if self.metric is not None:
            Metric.named(self.metric, self.max_drop)  # a typo is told before the work is done
        elif self.max_drop is not None:
            raise InputError("--max-drop needs --metric module:function, whose points may drop")
        for what, asked, known in (
            ("target", self.targets, TARGETS),
            ("precision", self.precisions_of(*self.targets), PRECISIONS),
            ("form", [self.form or FORMS[0]], FORMS),
            ("remainder", [self.remainder], REMAINDERS),
            ("observer", [self.observer], OBSERVERS),
            ("width of INT8 weights", [self.int8_weights], INT8_WEIGHTS),
        ):
            unknown = [value for value in asked if value not in known]
            if unknown or not asked:
                raise InputError(f"unknown {what} {', '.join(map(repr, unknown))}; this version makes: {', '.join(known)}")
        self.engines().check(self.targets)
        self._check_calibration()
        if self.remainder != "fp32" and not set(self.precisions_of(*self.targets)) & {"int8", "w8a8", "w8", "w4"}:
            raise InputError("--remainder is what is not INT8 or weights in int8, w8 and w4; ask for one of these precisions")
        if self.chunk is not None and self.form != "streamed":
            raise InputError(f"--chunk {self.chunk} is for --form streamed, found --form {self.form or FORMS[0]}; leave it out")
        if self.chunk is not None and not 1 <= self.chunk <= MAX_CHUNK:
            raise InputError(
                f"--chunk is {self.chunk}; expected 1 to {MAX_CHUNK} tokens, as many as tensors of a graph can have"
            )
        if self.mask == "frames" and self.form != "recurrent":
            raise InputError("--mask frames is for --form recurrent: each chunk is a frame that sees itself and the past")
        if self.deployment_target is not None and "coreml" not in self.targets:
            raise InputError(
                f"--minimum-deployment-target is for --target coreml; leave it out (found {self.deployment_target} and "
                f"--target {', '.join(self.targets)})"
            )
        if self.stateful and "coreml" not in self.targets:
            raise InputError("--stateful is for --target coreml")
        if (palettes := set(self.precisions) & set(PALETTES)) and set(self.targets) != {"coreml"}:
            raise InputError(
                f"--precision {min(palettes)}, a palette of weights, is for --target coreml alone; others have w8, w4"
            )
        if "coreml" in self.targets:
            check_coreml(self)
        elif "," in str(self.tokens):
            raise InputError(f"--tokens is {self.tokens!r}; a list of lengths is for --target coreml: give N or MIN:OPT:MAX")
        lowest = min(GATES_DB[precision] for precision in self.precisions_of(*self.targets))
        if self.snr_db is not None and not lowest <= self.snr_db <= MAX_SNR_DB:
            raise InputError(f"--snr is {self.snr_db:g}; expected {lowest:g} to {MAX_SNR_DB:g} dB: the gate can only be raised")

    def _check_calibration(self) -> None:
        """Refuse what is for INT8 activations alone where no target has any.

        Raises:
            InputError: naming the options.
        """
        given = {
            "--calibration": self.calibration is not None,
            "--observer": self.observer != OBSERVERS[1],
            "--int8-weights": self.int8_weights != INT8_WEIGHTS[0],
        }
        found = [option for option, is_given in given.items() if is_given]
        if not found or self.calibrated:
            return
        options, them = " and ".join(found), "it" if len(found) == 1 else "them"
        verb = "is" if len(found) == 1 else "are"
        if set(self.targets) != {"coreml"}:
            why = "; the other precisions need no data" if found == ["--calibration"] else ""
            raise InputError(f"{options} {verb} for --precision int8{why}: leave {them} out")
        is_w8 = "; int8 is weights alone on Core ML (w8)" if "int8" in self.precisions else ""
        asked = " ".join(f"--precision {each}" for each in self.precisions) or "its default, --precision fp16"
        raise InputError(
            f"{options} {verb} for activations in INT8, found --target coreml and {asked}{is_w8}: give --precision w8a8, or "
            f"leave {them} out"
        )
