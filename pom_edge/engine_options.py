"""What an engine may be asked for, and what no graph is needed to refuse: told before minutes of exporting."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pom_edge.errors import InputError
from pom_edge.extent import Extent

COMPILED = ("trt", "rtx")
DEFAULT_CAPABILITIES = ("86", "89")  # the RTX 30 and 40 series, where no GPU is at hand to ask
RTX_CAPABILITIES = ("75", "80", "86", "89", "120", "121")  # ComputeCapability of TensorRT-RTX 1.7
OPT_IN = ("refit", "version_compatible", "hardware_compatible")
MIN_WORKSPACE = 1 << 20  # below it TensorRT-RTX 1.7.1 answers with an internal error (seen with 12 bytes)

__all__ = ["COMPILED", "DEFAULT_CAPABILITIES", "OPT_IN", "EngineOptions", "rebuild_command"]


@dataclass(frozen=True)
class EngineOptions:
    """How to build, as on the command line (docs/tensorrt.md)."""

    precisions: Sequence[str] = ()  # empty: fp16
    form: str | None = None
    tokens: str | int | None = None
    batch: str | int | None = None
    compute_capability: Sequence[str] = ()
    workspace: int | None = None
    optimization_level: int | None = None
    refit: bool = False
    version_compatible: bool = False
    hardware_compatible: bool = False
    overwrite: bool = False  # an engine of other shapes

    def check(self, targets: Sequence[str]) -> None:
        """Refuse what no target uses, and what one of them is known not to do.

        Raises:
            InputError: naming the option.
        """
        Extent.parse(self.tokens, "--tokens")
        Extent.parse(self.batch, "--batch")
        engines = [target for target in targets if target in COMPILED]
        for name in ("compute_capability", "workspace", "optimization_level", *OPT_IN):
            if not engines and getattr(self, name) not in ((), None, False):
                raise InputError(f"{_option(name)} is for --target {' or '.join(COMPILED)}; leave it out")
        if self.optimization_level is not None and not 0 <= self.optimization_level <= 5:
            raise InputError(f"--optimization-level is {self.optimization_level}; expected 0 to 5")
        if self.workspace is not None and self.workspace < MIN_WORKSPACE:
            raise InputError(f"--workspace is {self.workspace} bytes; expected 1MiB or more, for example 512MiB")
        if self.compute_capability and "rtx" not in targets:
            raise InputError("--compute-capability is for --target rtx; TensorRT builds for the GPU of the machine it runs on")
        named = self.capabilities()
        if "rtx" in targets:
            self._check_rtx(named)

    def _check_rtx(self, named: tuple[str, ...]) -> None:
        """What TensorRT-RTX 1.7 takes, answers with a warning or an assertion, and does not do (seen)."""
        for name in ("version_compatible", "hardware_compatible"):
            if getattr(self, name):
                raise InputError(
                    f"{_option(name)} is for --target trt; a TensorRT-RTX engine is for the version that built it and "
                    "the GPUs of --compute-capability"
                )
        unknown = [each for each in named if each not in RTX_CAPABILITIES]
        if unknown:
            raise InputError(
                f"--compute-capability: TensorRT-RTX does not build for SM {', '.join(unknown)}; it has "
                f"{', '.join(RTX_CAPABILITIES)}. Jetson and data-centre GPUs are for --target trt"
            )
        if self.refit and len(named) > 1:
            raise InputError("--refit: TensorRT-RTX builds such an engine for one GPU only; give one --compute-capability")

    def capabilities(self) -> tuple[str, ...]:
        """Those that are named: ``8.6``, ``sm86`` and ``86`` are the same.

        Raises:
            InputError: not of that form.
        """
        found = []
        for text in self.compute_capability:
            number = str(text).lower().removeprefix("sm").replace(".", "").replace("_", "")
            if not number.isdigit():
                raise InputError(f"--compute-capability is {text!r}; expected a number as 8.6, 86 or sm86 (repeatable)")
            found.append(number)
        return tuple(dict.fromkeys(found))

    def command(self, target: str) -> str:
        """The arguments that ask for the same on another machine; those of the other target are left out."""
        parts = ["--target", target]
        for precision in self.precisions:
            parts += ["--precision", precision]
        for option, value in (
            ("--form", self.form),
            *(("--compute-capability", each) for each in self.compute_capability if target == "rtx"),
            ("--tokens", self.tokens),
            ("--batch", self.batch),
            ("--workspace", self.workspace),
            ("--optimization-level", self.optimization_level),
        ):
            parts += [] if value is None else [option, str(value)]
        parts += [_option(name) for name in OPT_IN if getattr(self, name)]
        return shlex.join(parts + (["--overwrite"] if self.overwrite else []))


def rebuild_command(bundle: str, target: str, form: str, precision: str, facts: Mapping[str, Any], for_gpu: bool = True) -> str:
    """The command that builds an engine of a bundle again, as the manifest describes it.

    Args:
        bundle: its name.
        target, form, precision: of the engine.
        facts: the manifest's entry ``engine``.
        for_gpu: for the same GPUs; otherwise for that of the machine where it runs.
    """
    shapes = facts.get("shapes") or {}
    sizes: dict[str, Any] = {
        axis: str(lengths[0]) if lengths[0] == lengths[-1] else ":".join(map(str, lengths))
        for axis, lengths in shapes.items()
        if axis in ("tokens", "batch")
    }
    capabilities = tuple(facts.get("compute_capabilities") or ()) if for_gpu and target == "rtx" else ()
    kept = {name: facts[name] for name in (*OPT_IN, "optimization_level", "workspace") if facts.get(name) is not None}
    options = EngineOptions((precision,), form=form, compute_capability=capabilities, **sizes, **kept)
    return f"pom-export {shlex.quote(bundle)} {options.command(target)}"


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
