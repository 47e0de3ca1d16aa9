"""The PyTorch side of the parity waterfall: what a model answers, output by output and mixer by mixer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from pom_edge.errors import InputError
from pom_edge.export.lowering import replace_mixers
from pom_edge.mixer import Mask, Mixer, PoMState
from pom_edge.runtimes.stepping import join, split

Arrays = dict[str, np.ndarray]

__all__ = ["FrameSession", "RaggedSession", "Reference", "Taps", "TorchSession", "named_outputs"]


class Reference(Protocol):
    """What an artifact's answers are compared with."""

    def run(self, inputs: Arrays, zeroed: str | None = None) -> tuple[Arrays, Arrays]:
        """Outputs, and mixers' outputs by module path; ``zeroed`` names a mixer whose output is replaced by zeros."""
        ...


def named_outputs(result: Any) -> dict[str, Tensor]:
    """Every tensor of a model's return value by name: the first is ``y``, further ones keep the model's names.

    Tensors inside further tuples, dicts and dataclasses are named by their path: ``hidden_states_2``. None and plain numbers
    and texts are constants of the model, no outputs.

    Raises:
        InputError: the model returns no tensor, or something that may hide one.
    """
    tensors = list(_tensors(result, ""))
    if not tensors:
        raise InputError(f"the model returned {type(result).__name__} without a tensor; expected a tensor, tuple or dict")
    named = {"y" if i == 0 else name: value for i, (name, value) in enumerate(tensors)}
    if len(named) < len(tensors):
        listed = ", ".join(name for name, _ in tensors)
        raise InputError(
            f"two outputs of the model would have one name ({listed}; the first is always called y); rename or reorder them"
        )
    return named


def _tensors(value: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path or "y", value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _tensors(item, f"{path}_{name}" if path else str(name))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _tensors(getattr(value, field.name), f"{path}_{field.name}" if path else field.name)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for i, item in enumerate(value):
            yield from _tensors(item, f"{path or 'output'}_{i}")
    elif value is not None and not isinstance(value, (bool, int, float, str)):
        raise InputError(
            f"the model returned {type(value).__name__}{f' in {path}' if path else ''}, which may hold tensors that would be "
            "lost; expected tensors in tuples, dicts or dataclasses. Wrap the model in a module that returns those"
        )


class Taps:
    """Collects the output of chosen modules while the context lasts: ``values`` maps module path to tensor.

    A module that runs more than once gets ``path#1``, ``path#2`` for its later runs.

    Args:
        model: the module that contains them.
        names: their module paths.
        zeroed: a path whose output is replaced by zeros: what a dead mixer looks like.
    """

    def __init__(self, model: nn.Module, names: Sequence[str], zeroed: str | None = None) -> None:
        self.values: dict[str, Tensor] = {}
        self._model, self._names, self._zeroed = model, names, zeroed
        self._handles: list[Any] = []

    def __enter__(self) -> Taps:
        for name in self._names:
            self._handles.append(self._model.get_submodule(name).register_forward_hook(self._hook(name)))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for handle in self._handles:
            handle.remove()

    def _hook(self, name: str) -> Any:
        def keep(_module: nn.Module, _args: Any, output: Tensor) -> Tensor | None:
            value = torch.zeros_like(output) if name == self._zeroed else output
            runs = sum(key.split("#")[0] == name for key in self.values)
            self.values[name if runs == 0 else f"{name}#{runs}"] = value
            return value if name == self._zeroed else None

        return keep


class TorchSession:
    """Runs a PyTorch model the way a runtime session runs an artifact: numpy in by name, numpy out by name.

    Args:
        model: an nn.Module (set to eval mode), or the module of an ExportedProgram.
        taps: module paths whose outputs are wanted too.
        dtype: floating inputs are cast to it; float64 with a float64 model gives the reference for FP32.
    """

    def __init__(self, model: nn.Module, taps: Sequence[str] = (), dtype: torch.dtype = torch.float32) -> None:
        self.model = model
        self.taps = [name for name in taps if name]
        self.dtype = dtype

    def run(self, inputs: Arrays, zeroed: str | None = None) -> tuple[Arrays, Arrays]:
        """Outputs and tapped values for one set of inputs; ``zeroed`` names a mixer whose output is replaced by zeros.

        Raises:
            InputError: the model refuses the inputs, with its own reason.
        """
        # copies: a model may write into its inputs
        tensors = {name: torch.from_numpy(np.array(array, order="C")) for name, array in inputs.items()}
        tensors = {name: t.to(self.dtype) if t.is_floating_point() else t for name, t in tensors.items()}
        with torch.no_grad(), Taps(self.model, self.taps, zeroed) as taps:
            if zeroed == "":
                outputs = {name: torch.zeros_like(y) for name, y in named_outputs(self.model(**tensors)).items()}
            else:
                outputs = named_outputs(self.model(**tensors))
        return _arrays(outputs), _arrays(taps.values)


class RaggedSession:
    """A model over sequences of different lengths, each by itself: truth for batches that are padded.

    Inputs are padded and have a ``mask`` (B, N) whose real tokens lead; so are outputs and mixers, with zeros.
    """

    def __init__(self, model: nn.Module, taps: Sequence[str]) -> None:
        self._session = TorchSession(model, taps)

    def run(self, inputs: Arrays, zeroed: str | None = None) -> tuple[Arrays, Arrays]:
        """As :meth:`TorchSession.run`."""
        mask = inputs["mask"]
        rows: list[tuple[Arrays, Arrays]] = []
        for row, length in enumerate(mask.sum(1).astype(int)):
            own = {name: array[row : row + 1, :length] for name, array in inputs.items() if name != "mask"}
            rows.append(self._session.run(own, zeroed))
        outputs, taps = ([row[part] for row in rows] for part in (0, 1))
        return _stacked(outputs, mask.shape[1]), _stacked(taps, mask.shape[1])


def _stacked(rows: list[Arrays], tokens: int) -> Arrays:
    def padded(array: np.ndarray) -> np.ndarray:
        return np.pad(array, [(0, 0), (0, tokens - array.shape[1]), *[(0, 0)] * (array.ndim - 2)])

    return {name: np.concatenate([padded(row[name]) for row in rows]) for name in rows[0]}


class FrameSession:
    """A model whose mixers step from frame to frame with :meth:`pom_edge.mixer.Mixer.step`: truth for block-causal streams.

    Args:
        model: whose mixers see all tokens.
        taps: module paths.
        frame: tokens of a frame.
        axes: token axis of each input that has one.
    """

    def __init__(self, model: nn.Module, taps: Sequence[str], frame: int, axes: Mapping[str, int]) -> None:
        self._stepped, _ = replace_mixers(model, _FrameMixer)
        self._session = TorchSession(self._stepped, taps)
        self._frame, self._axes = frame, axes

    def run(self, inputs: Arrays, zeroed: str | None = None) -> tuple[Arrays, Arrays]:
        """As :meth:`TorchSession.run`."""
        for module in self._stepped.modules():
            if isinstance(module, _FrameMixer):
                module.state = None
        axes = {name: axis for name, axis in self._axes.items() if name in inputs}
        tokens = next(inputs[name].shape[axis] for name, axis in axes.items())
        frames = [self._frame] * (tokens // self._frame) + ([tokens % self._frame] if tokens % self._frame else [])
        pieces = [self._session.run(part, zeroed) for part in split(inputs, axes, frames)]
        return join([piece[0] for piece in pieces], {}), join([piece[1] for piece in pieces], {})


class _FrameMixer(nn.Module):
    def __init__(self, mixer: Mixer) -> None:
        super().__init__()
        self.mixer = mixer
        self.state: PoMState | None = None

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,  # noqa: ARG002  # refused by the recurrent form
        mask: Mask = None,
        positions: Tensor | None = None,
        context_positions: Tensor | None = None,  # noqa: ARG002
        causal: bool = False,
    ) -> Tensor:
        """The next frame."""
        y, self.state = self.mixer.step(x, self.state, causal=causal or mask == "causal", positions=positions)
        return y


def _arrays(tensors: dict[str, Tensor]) -> Arrays:
    half = [name for name, tensor in tensors.items() if tensor.dtype in (torch.bfloat16, torch.float16)]
    if half:
        raise InputError(
            f"the model answers in half precision ({', '.join(half)}); an export starts from FP32: leave autocast and "
            ".half() out"
        )
    return {name: tensor.detach().cpu().numpy() for name, tensor in tensors.items()}
