"""Golden data: inputs and PyTorch's answers that travel in the bundle, so that a device checks without torch.

The cases are also the proof that free axes are free: short, odd and long lengths and several batch sizes, each run
through PyTorch and through the graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from pom_edge.bundle import GoldenCase, sampled_rows, take_rows
from pom_edge.errors import InputError
from pom_edge.export.inputs import BATCH, TOKENS, Axes, Extent, axis_sizes, plan_inputs
from pom_edge.export.reference import Arrays, Reference
from pom_edge.extent import cut
from pom_edge.generated import Recipe, generate
from pom_edge.runtimes.parity import compare

MAX_GOLDEN_BYTES = 16 << 20
MAX_TAP_BYTES = 4 << 20  # golden layer outputs are kept for the smallest cases, so that `check --layers` has a reference
MAX_REAL_SAMPLES = 64
EACH = "tokens-"  # how the cases of a list of lengths are named: every one of them is run
LONG = 257  # tokens of the long case: two blocks of the module's running sum
GREAT = 4096  # where every run is longer than this, one case is all that is recorded: more would take minutes
MAX_STREAMS = 4  # real samples in the recurrent form
MAX_STEPS = 64  # chunks of a real sample where their length is fixed: it may be a single token
REPEATABLE_DB = 110.0  # threads may add in another order; FP32 leaves 125 dB and more

__all__ = ["Case", "golden_cases", "image_sizes", "record", "store", "stream_cases"]


@dataclass
class Case:
    """One set of inputs with PyTorch's answers.

    Attributes:
        name: unique in the bundle, for example ``"odd"``.
        kind: ``"real"`` for samples the checkpoint carried, else ``"random"``.
        description: shapes in words.
        inputs: by tensor name.
        recipes: how random inputs were made.
        outputs: PyTorch's answers, by output name.
        taps: PyTorch's value of every mixer's output, by module path.
        chunks: recurrent form: how the sequence is cut.
    """

    name: str
    kind: str
    description: str
    inputs: Arrays
    recipes: dict[str, Recipe] = field(default_factory=dict)
    outputs: Arrays = field(default_factory=dict)
    taps: Arrays = field(default_factory=dict)
    chunks: list[int] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of inputs and outputs."""
        return sum(array.nbytes for array in (*self.inputs.values(), *self.outputs.values()))


def golden_cases(
    example: dict[str, Tensor],
    axes: Axes,
    batch: Extent,
    tokens: Extent,
    samples: dict[str, Tensor] | None = None,
    longest: int = LONG,
    sizes: Mapping[str, dict[str, int]] | None = None,
) -> list[Case]:
    """Cases at several sizes: real samples first, then the example's own size, a short, an odd and a long one.

    Where no run is shorter than GREAT tokens, there is one case, of two sequences.

    Args:
        example: one tensor for each input.
        axes: as planned for the graph.
        batch, tokens: extents; sizes outside them are left out.
        samples: real inputs from the checkpoint, used as they are.
        longest: tokens of the long case.
        sizes: of all free axes for each case, where they are not to be chosen here.
    """
    cases = []
    enough = samples and all(len(tensor) >= batch.minimum for tensor in samples.values())
    if samples and enough and set(samples) == set(example):
        row_bytes = sum(tensor[:1].nbytes for tensor in samples.values())
        rows = min(MAX_REAL_SAMPLES, max(1, MAX_GOLDEN_BYTES // 4 // row_bytes))  # a quarter at most: outputs and others follow
        rows = min(rows, batch.maximum or rows)
        real = {name: tensor[:rows].numpy() for name, tensor in samples.items()}
        cases.append(Case("samples", "real", _describe(real), real))
    wanted = list(_sizes(example, axes, batch, tokens, longest)) if sizes is None else list(sizes.items())
    for seed, (name, lengths) in enumerate(wanted):
        recipes = plan_inputs(example, axes, lengths, seed)
        inputs = {key: generate(recipe) for key, recipe in recipes.items()}
        cases.append(Case(name, "random", _describe(inputs), inputs, recipes))
    return cases


def image_sizes(example: dict[str, Tensor], axes: Axes, patch: int, chunk: int) -> dict[str, dict[str, int]]:
    """Sizes of images for passes over their patches: the example's, and where it is free one patch, a narrow and a wide image.

    The wide one has three rows of patches that end within chunks, in two whole chunks and a part of one.
    """
    sizes = {"example": axis_sizes(example, axes)}
    if sizes["example"]:
        height, width = sizes["example"]
        for name, (rows, columns) in {"short": (1, 1), "odd": (5, 3), "long": (3, 2 * chunk // 3 + 1)}.items():
            sizes[name] = {height: rows * patch, width: columns * patch}
    return sizes


def stream_cases(
    example: dict[str, Tensor],
    axes: Axes,
    tokens: Extent,
    samples: dict[str, Tensor] | None = None,
    frame: int = 0,
    ragged: bool = False,
) -> list[Case]:
    """Sequences, and how a recurrent graph is to be fed with them: whole, token by token, unevenly, long.

    Args:
        example: one tensor for each input of the model.
        axes: of the sequences; their token axis is free.
        tokens: extent of a chunk.
        samples: real inputs from the checkpoint.
        frame: every chunk is as long as this (the last may be shorter); 0 for causal models.
        ragged: rows of different lengths, with a mask.
    """
    wanted = {"whole": (2, [24]), "single": (1, [1] * 6), "uneven": (3, [3, 1, 7, 2, 12]), "long": (2, [64, 1, 100, 7, 85])}
    if tokens.lengths:  # each of them, the longest first
        wanted = {"whole": (1, [*reversed(tokens.lengths), *tokens.lengths])}
    elif tokens.minimum > GREAT:  # of a chunk
        wanted = {"whole": (1, [tokens.minimum] * 2)}
    base = axis_sizes(example, axes)
    cases = []
    if samples and set(samples) == set(example) and not ragged:
        first = next(iter(axes.values()))[0]
        real = {name: tensor[: first if isinstance(first, int) else MAX_STREAMS].numpy() for name, tensor in samples.items()}
        length = next(array.shape[1] for array in real.values())
        if tokens.fixed:
            length = min(length, MAX_STEPS * tokens.minimum) // tokens.minimum * tokens.minimum or length
            real = {name: _shortened(array, axes[name], length) for name, array in real.items()}
        chunks = cut(length, tokens.lengths) if tokens.lengths else _cut(length, [length // 2 or 1], tokens, frame)
        if chunks:
            cases.append(Case("samples", "real", _describe(real), real, chunks=chunks))
    for seed, (name, (rows, lengths)) in enumerate(wanted.items()):
        chunks = _cut(sum(lengths), lengths, tokens, frame)
        sizes = {axis: {BATCH: rows, TOKENS: sum(chunks)}.get(axis, length) for axis, length in base.items()}
        recipes = plan_inputs(example, axes, sizes, seed)
        inputs = {key: generate(recipe) for key, recipe in recipes.items()}
        if ragged:
            del recipes["mask"]
            real_tokens = sum(chunks) - np.arange(inputs["mask"].shape[0]) * sum(chunks) // 4
            inputs["mask"] = (np.arange(sum(chunks)) < real_tokens[:, None]).astype(np.float32)
        cases.append(Case(name, "random", _describe(inputs), inputs, recipes, chunks=chunks))
    return [
        case
        for i, case in enumerate(cases)
        if (case.chunks, case.description) not in [(c.chunks, c.description) for c in cases[:i]]
    ]


def _shortened(array: np.ndarray, dims: list[int | str], length: int) -> np.ndarray:
    return array[(slice(None),) * dims.index(TOKENS) + (slice(length),)] if TOKENS in dims else array


def _cut(total: int, lengths: list[int], tokens: Extent, frame: int) -> list[int]:
    """Chunks of about these lengths that the graph takes; the total may change where it must."""
    if frame:
        return [frame] * (total // frame) + ([total % frame] if total % frame else [])
    if tokens.fixed:
        return [tokens.minimum] * max(1, round(total / tokens.minimum))
    lengths = [*lengths, total - sum(lengths)] if total > sum(lengths) else lengths
    return [min(max(length, tokens.minimum), tokens.maximum or length) for length in lengths]


def _sizes(
    example: dict[str, Tensor], axes: Axes, batch: Extent, tokens: Extent, longest: int
) -> Iterator[tuple[str, dict[str, int]]]:
    base = axis_sizes(example, axes)
    wanted = {"example": (2, base.get(TOKENS, 2))}
    if tokens.lengths:
        wanted = {f"{EACH}{length}": (2, length) for length in tokens.lengths}
    elif tokens.minimum <= GREAT:
        wanted |= {"short": (1, 2), "odd": (3, 7), "long": (2, min(longest, tokens.maximum or longest))}
    seen = set()
    for name, (rows, length) in wanted.items():
        sizes = {axis: _other_length(axis, base[axis], length) for axis in base}
        if BATCH in sizes:
            sizes[BATCH] = min(max(rows, batch.minimum), batch.maximum or rows)
        if TOKENS in sizes:
            sizes[TOKENS] = min(max(length, tokens.minimum), tokens.maximum or length)
        key = tuple(sizes.values())
        if key not in seen or not sizes:
            seen.add(key)
            yield name, sizes


def _other_length(axis: str, base: int, length: int) -> int:
    """A length for an axis beside batch and tokens: follows the tokens, but differs, so that a mix-up shows."""
    return base if axis in (BATCH, TOKENS) else length + 3


def record(cases: list[Case], session: Reference) -> tuple[list[Case], list[str]]:
    """Run every case through PyTorch and keep its answers.

    Returns:
        The cases PyTorch accepted, and a note for each it refused (a model may limit its length).

    Raises:
        InputError: PyTorch refuses the example itself, or answers it with NaN or infinity.
    """
    kept: list[Case] = []
    notes: list[str] = []
    for case in cases:
        try:
            case.outputs, case.taps = session.run(case.inputs)
        except Exception as error:  # a user's model: anything may come
            reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            if case.name in ("example", "whole", "samples") or case.name.startswith(EACH):
                raise InputError(f"the model does not accept the inputs {case.description}: {reason}") from error
            notes.append(f"{case.name} ({case.description}) left out: the model refuses it ({reason})")
            continue
        bad = [name for name, value in case.outputs.items() if not np.isfinite(value).all()]
        if bad:
            raise InputError(
                f"PyTorch itself returns NaN or infinity in {', '.join(bad)} for {case.description}: nothing can be checked "
                "against that; mend the model or its example inputs"
            )
        if not kept:
            _check_repeatable(case, session)
        kept.append(case)
    return kept, notes


def store(cases: list[Case]) -> tuple[dict[str, np.ndarray], list[GoldenCase]]:
    """What of the cases travels in the bundle, at most :data:`MAX_GOLDEN_BYTES` or little more.

    The smallest cases are kept whole, their layer outputs too while those are small. Of a longer one the random inputs are kept
    as recipes, and of its outputs some rows.

    Returns:
        Arrays by key, and the manifest's entries.
    """
    arrays: dict[str, np.ndarray] = {}
    entries = []
    total = tap_bytes = 0
    for case in sorted(cases, key=lambda c: c.nbytes):
        total += case.nbytes
        tap_bytes += sum(tap.nbytes for tap in case.taps.values())
        whole = total <= MAX_GOLDEN_BYTES
        rows = {} if whole else {name: sampled_rows(output.shape) for name, output in case.outputs.items()}
        groups = {
            "in": {name: array for name, array in case.inputs.items() if whole or name not in case.recipes},
            "out": {name: take_rows(output, rows.get(name)) for name, output in case.outputs.items()},
            "tap": case.taps if tap_bytes <= MAX_TAP_BYTES else {},
        }
        keys = {kind: {name: f"{case.name}.{kind}.{name}" for name in group} for kind, group in groups.items()}
        for kind, group in groups.items():
            arrays |= {keys[kind][name]: array for name, array in group.items()}
        entries.append(
            GoldenCase(
                name=case.name,
                kind="real" if case.kind == "real" else "random",
                description=case.description,
                inputs=keys["in"],
                generated={} if whole else case.recipes,
                outputs=keys["out"],
                rows=rows,
                taps=keys["tap"],
                chunks=case.chunks,
            )
        )
    return arrays, entries


def _check_repeatable(case: Case, session: Reference) -> None:
    """The same inputs once more: an answer that differs is none to compare with.

    Raises:
        InputError: it differs.
    """
    again, _ = session.run(case.inputs)
    if not compare(case.outputs, again, REPEATABLE_DB).passed:
        raise InputError(
            "the model answers the same inputs differently the second time: random numbers, dropout that stays on in eval "
            "mode, or a state that it keeps between calls. Nothing can be compared with that; make forward a function of its "
            "inputs"
        )


def _describe(inputs: Arrays) -> str:
    return ", ".join(f"{name} {'x'.join(map(str, array.shape))}" for name, array in inputs.items())
