"""What goes into a graph: which axes are free, and example inputs of any size.

The tensor names carry the meaning (see docs/bundle.md): ``x``, ``context``, ``mask``, ``positions``,
``context_positions``. Inputs with other names (a user's own model) are understood by rank and size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pom_edge.errors import InputError
from pom_edge.extent import Extent
from pom_edge.generated import Recipe, generate, recipe_like
from pom_edge.system import memory_bytes

BATCH, TOKENS, CONTEXT = "batch", "tokens", "context_tokens"

Axes = dict[str, list[int | str]]  # input name -> for each dimension a number or the name of a free axis

__all__ = [
    "BATCH",
    "CONTEXT",
    "TOKENS",
    "Axes",
    "Extent",
    "axis_sizes",
    "check_example",
    "fixed_tokens",
    "make_inputs",
    "plan_axes",
    "plan_inputs",
]


def check_example(inputs: dict[str, Tensor]) -> None:
    """Refuse example inputs that no graph can be made from.

    Raises:
        InputError: no input, an empty one, or NaN in it.
    """
    if not inputs:
        raise InputError("the example has no inputs; expected at least one array, named as the model's argument")
    for name, tensor in inputs.items():
        if tensor.numel() == 0:
            raise InputError(f"example input {name!r} is empty (shape {tuple(tensor.shape)}); give at least one token")
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise InputError(f"example input {name!r} contains NaN or infinity; give finite values")


def plan_axes(inputs: dict[str, Tensor], batch: Extent, tokens: Extent) -> Axes:
    """Name the free axes of every input; an axis with a fixed extent becomes its number.

    Args:
        inputs: one example of each input.
        batch, tokens: extents asked for.

    Returns:
        For each input, its dimensions as numbers or names.
    """
    first = next(iter(inputs.values()))
    batch_size = first.shape[0]
    lengths = {name: tensor.shape[1] for name, tensor in inputs.items() if tensor.ndim in (2, 3)}
    axes: Axes = {}
    for name, tensor in inputs.items():
        dims: list[int | str] = list(tensor.shape)
        if name in ("positions", "context_positions"):
            dims[0] = TOKENS if name == "positions" else CONTEXT
        else:
            if tensor.ndim and tensor.shape[0] == batch_size:
                dims[0] = BATCH
            if tensor.ndim in (2, 3):
                dims[1] = _second_axis(name, tensor, inputs, lengths)
            if name == "mask" and tensor.ndim == 3:
                dims[1], dims[2] = TOKENS, CONTEXT if "context" in inputs else TOKENS
        axes[name] = dims
    if "context" not in inputs:  # positions of a context that is the tokens themselves
        axes = {name: [TOKENS if dim == CONTEXT else dim for dim in dims] for name, dims in axes.items()}
    fixed = {axis: extent.minimum for axis, extent in ((BATCH, batch), (TOKENS, tokens)) if extent.fixed}
    return {name: [fixed.get(dim, dim) if isinstance(dim, str) else dim for dim in dims] for name, dims in axes.items()}


def _second_axis(name: str, tensor: Tensor, inputs: dict[str, Tensor], lengths: dict[str, int]) -> int | str:
    first = next(iter(inputs))
    if name == first:
        return int(tensor.shape[1]) if tensor.ndim == 2 and tensor.is_floating_point() else TOKENS  # (B, features) is fixed
    if name == "context" or (name == "mask" and "context" in inputs):
        return CONTEXT
    if name == "mask" or tensor.shape[1] == lengths.get(first):
        return TOKENS
    return f"{name}_tokens"


def fixed_tokens(inputs: dict[str, Tensor], axes: Axes) -> int | None:
    """The number of tokens that every run has: the first input's, where its token axis is not free. None: any, or unknown."""
    (name, tensor) = next(iter(inputs.items()))
    tokens = axes[name][1] if tensor.ndim == 3 or (tensor.ndim == 2 and not tensor.is_floating_point()) else None
    return tokens if isinstance(tokens, int) else None


def axis_sizes(inputs: dict[str, Tensor], axes: Axes) -> dict[str, int]:
    """The lengths that the free axes have in these inputs."""
    sizes: dict[str, int] = {}
    for name, dims in axes.items():
        for dim, length in zip(dims, inputs[name].shape, strict=True):
            if isinstance(dim, str):
                sizes.setdefault(dim, int(length))
    return sizes


def plan_inputs(example: dict[str, Tensor], axes: Axes, sizes: dict[str, int], seed: int) -> dict[str, Recipe]:
    """Recipes for random inputs like the example, of other lengths (see :mod:`pom_edge.generated`).

    Args:
        example: one tensor for each input.
        axes: as planned.
        sizes: length of each free axis.
        seed: fixes the values.

    Raises:
        InputError: inputs that this machine has no memory for.
    """
    recipes = {}
    for name, dims in axes.items():
        shape = [sizes[dim] if isinstance(dim, str) else dim for dim in dims]
        _check_room(name, shape, example[name])
        recipes[name] = recipe_like(name, example[name].detach().numpy(), shape, seed)
    return recipes


def make_inputs(example: dict[str, Tensor], axes: Axes, sizes: dict[str, int], seed: int) -> dict[str, Tensor]:
    """What :func:`plan_inputs` plans, as tensors."""
    return {name: torch.from_numpy(generate(recipe)) for name, recipe in plan_inputs(example, axes, sizes, seed).items()}


def _check_room(name: str, shape: list[int], example: Tensor) -> None:
    """A model needs several times the memory of its inputs: refuse here, before the system kills the process.

    Raises:
        InputError: this input alone would take more than half of the memory there is.
    """
    needed, memory = math.prod(shape) * example.element_size(), memory_bytes()
    if memory is not None and needed > memory[1] // 2:
        raise InputError(
            f"input {name!r} of shape {tuple(shape)} takes {needed / 2**30:.1f} GiB, and this machine has "
            f"{memory[1] / 2**30:.1f} GiB available; ask for fewer --tokens or a smaller --batch"
        )
