"""How long the axes of an engine are: fixed, or MIN:OPT:MAX. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pom_edge.bundle import Artifact, Bundle, TensorSpec
from pom_edge.errors import InputError
from pom_edge.extent import Extent

BATCH, TOKENS = "batch", "tokens"
MAX_DEFAULT = 1 << 20  # tokens of an example beyond which no engine is built without being asked for

__all__ = ["choose_sizes", "engine_spec", "profile"]


def choose_sizes(
    bundle: Bundle, source: Artifact, tokens: str | int | None, batch: str | int | None
) -> tuple[dict[str, Extent], str]:
    """How long each free axis is: as asked for, else as the export bounded it, else fixed at one sample of the example's size.

    TensorRT is up to three times slower with free shapes (TensorRT#976), so they are opt-in. A recurrent graph takes chunks of
    any length up to the longest golden one, tuned for one token.

    Returns:
        An extent by axis, and a note that says what was chosen.

    Raises:
        InputError: sizes that the graph does not take, or that it has no axis for.
    """
    if source.stream is not None:
        given = [f"--{axis}" for axis, value in ((TOKENS, tokens), (BATCH, batch)) if value is not None]
        if given:
            raise InputError(
                f"{', '.join(given)}: the passes of {source.file} have fixed shapes, and take runs of any length in chunks of "
                f"{source.stream.chunk} tokens; leave it out, or export the model again with another --batch or --chunk"
            )
        return {}, ""
    example = _example_sizes(bundle, source)
    asked = {BATCH: Extent.parse(batch, "--batch"), TOKENS: Extent.parse(tokens, "--tokens")}
    sizes: dict[str, Extent] = {}
    chosen = []
    for spec in source.inputs:
        for dim in spec.shape:
            if isinstance(dim, int) or dim in sizes:
                continue
            low, high = spec.bounds.get(dim, (1, None))
            extent = asked.get(dim, Extent())
            if extent.maximum is None:
                extent = _default(dim, source, bundle, example, spec)
                chosen.append(
                    f"{dim} {extent.minimum}" + ("" if extent.fixed else f" to {extent.maximum}, usually {extent.optimum}")
                )
            if extent.minimum < low or (high is not None and (extent.maximum or 0) > high):
                raise InputError(f"--{dim} asks for {extent.minimum} to {extent.maximum}; {source.file} takes {low} to {high}")
            sizes[dim] = extent
    unused = [f"--{axis}" for axis, extent in asked.items() if extent.maximum is not None and axis not in sizes]
    if unused and not any(_fixed_at(source, axis, asked[axis]) for axis in asked if f"--{axis}" in unused):
        raise InputError(f"{', '.join(unused)}: {source.file} has no such free axis; export the model again to change it")
    free = "; --tokens and --batch MIN:OPT:MAX make other sizes"
    return sizes, f"{source.file}: compiled for {', '.join(chosen)}{free}" if chosen else ""


def _fixed_at(source: Artifact, axis: str, extent: Extent) -> bool:
    """Whether the graph has that very size: an export with --tokens 64 leaves no free axis."""
    position = 0 if axis == BATCH else 1
    return extent.fixed and any(len(spec.shape) > position and spec.shape[position] == extent.minimum for spec in source.inputs)


def _default(dim: str, source: Artifact, bundle: Bundle, example: Mapping[str, int], spec: TensorSpec) -> Extent:
    low, high = spec.bounds.get(dim, (1, None))
    recurrent = dim == TOKENS and source.form == "recurrent"
    usual = spec.usual.get(dim, low if recurrent or dim == BATCH else example.get(dim, low))
    if high is not None:  # the export was told
        return Extent(low, min(max(usual, low), high), high)
    if recurrent:
        return Extent(low, low, max((chunk for case in bundle.manifest.golden for chunk in case.chunks), default=1))
    length = max(low, 1) if dim == BATCH else max(low, min(example.get(dim, low), MAX_DEFAULT))
    return Extent(length, length, length)


def _example_sizes(bundle: Bundle, source: Artifact) -> dict[str, int]:
    """Lengths of the free axes in the golden case that has the example's size."""
    ordered = sorted(bundle.cases(), key=lambda found: found[0].name != "example")
    sizes: dict[str, int] = {}
    for _, inputs, _ in ordered[:1]:
        for spec in source.inputs:
            if spec.name in inputs:
                sizes.update(
                    {dim: n for dim, n in zip(spec.shape, inputs[spec.name].shape, strict=True) if isinstance(dim, str)}
                )
    return sizes


def profile(specs: Sequence[TensorSpec], sizes: Mapping[str, Extent]) -> dict[str, tuple[list[int], list[int], list[int]]]:
    """MIN, OPT and MAX shape of every input with free axes."""
    shapes = {}
    for spec in specs:
        if not any(isinstance(dim, str) for dim in spec.shape):
            continue
        low = [dim if isinstance(dim, int) else sizes[dim].minimum for dim in spec.shape]
        usual = [dim if isinstance(dim, int) else sizes[dim].optimum or sizes[dim].minimum for dim in spec.shape]
        high = [dim if isinstance(dim, int) else sizes[dim].maximum or sizes[dim].minimum for dim in spec.shape]
        shapes[spec.name] = (low, usual, high)
    return shapes


def engine_spec(spec: TensorSpec, sizes: Mapping[str, Extent]) -> TensorSpec:
    """Of the engine: fixed axes are numbers, free ones have bounds."""
    shape = [sizes[dim].minimum if isinstance(dim, str) and dim in sizes and sizes[dim].fixed else dim for dim in spec.shape]
    bounds = {dim: (sizes[dim].minimum, sizes[dim].maximum) for dim in shape if isinstance(dim, str) and dim in sizes}
    return spec.model_copy(update={"shape": shape, "bounds": bounds or spec.bounds})
