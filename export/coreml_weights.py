"""Weights of a Core ML package as integers; everything else stays as it was converted.

w8          W  ->  s_c W_q                  int8, symmetric, a scale for each channel
w4          W  ->  s_b W_q                  int4, symmetric, a scale for each block of 32 (iOS18)
p8, p6, p4  W  ->  palette[index]           2^n values for each tensor, which one-dimensional k-means chooses
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import takewhile
from typing import Any

import numpy as np

from pom_edge.export.coreml_package import Package, module_paths
from pom_edge.export.coreml_program import coreml_name
from pom_edge.runtimes.coreml_library import listen_to_coremltools, quiet_coremltools

MIN_COMPRESSED = 512  # elements; coremltools' own 2048 leaves most of a small model as it is
BLOCK = 32
PRODUCTS = ("linear", "matmul", "conv", "einsum")
PARAMETER = "p_"  # how torch.export begins the name of one
ROUNDS = 100  # of k-means; it ends earlier where nothing moves
BINS = 64  # of the histogram from which it begins

# numpy on a channel of zeros (a fresh bias), whose scale is 0: whatever integer comes out of 0 / 0 stands for 0
OF_ZEROS = ("invalid value encountered in divide", "invalid value encountered in cast")

__all__ = ["before", "compress", "palette"]


def compress(package: Package, precision: str, keep: Collection[str] = ()) -> list[str]:
    """Store the weights as integers.

    Args:
        package: changed in place.
        precision: see above.
        keep: module paths whose weights stay as they are.

    Returns:
        Paths of all modules that have weights, as they run.
    """
    with quiet_coremltools():
        import coremltools.optimize.coreml as cto
    with listen_to_coremltools() as said:
        constants = cto.get_weights_metadata(package.model, weight_threshold=MIN_COMPRESSED)
        scopes = module_paths(package.model)
        weights = {name: found for name, found in constants.items() if _is_weight(name, found)}
        kept = {name for name, found in weights.items() if _is_kept(name, found, scopes, keep)}
        floats = {name: None for name in constants if name not in weights or name in kept}
        chosen = cto.OptimizationConfig(global_config=_config(cto, precision), op_name_configs=floats)
        convert = cto.palettize_weights if precision.startswith("p") else cto.linear_quantize_weights
        package.model = convert(package.model, config=chosen)
    package.warnings += [text for text in said if text not in OF_ZEROS]
    readers = {child.name for found in weights.values() for child in found.child_ops}
    return list(dict.fromkeys(path for name, path in scopes.items() if name in readers))


def _is_weight(name: str, found: Any) -> bool:
    """Whether a constant is a weight: a parameter, or an operand of a product. Tables of rotary angles are neither."""
    return name.startswith(PARAMETER) or any(child.op_type in PRODUCTS for child in found.child_ops)


def _is_kept(name: str, found: Any, scopes: Mapping[str, str], keep: Collection[str]) -> bool:
    """Whether a constant is of one of these modules: by its own name, or, renamed by a conversion, by what reads it."""
    paths = [scopes.get(child.name, "") for child in found.child_ops]
    return any(f"_{coreml_name(path)}_" in name or any(within(own, path) for own in paths) for path in keep)


def within(path: str, module: str) -> bool:
    """Whether a module is another one or inside it."""
    return f"{path}.".startswith(f"{module}.")


def before(failed: Collection[str], modules: Sequence[str], mixers: Collection[str], keep: Collection[str]) -> set[str]:
    """What else to keep where values miss their gate though their own weights are kept: the error comes from before them.

    Args:
        failed: paths of mixers; an output, which comes last, where none is.
        modules: with weights, as they run.
        mixers: all.
        keep: what is kept already.

    Returns:
        What precedes every mixer (an embedding, whose error all of them see); then the modules between the first of these and
        the mixer before it; then that mixer, and so on. Empty: all are kept.
    """
    last = len(modules) - 1
    ends = [max((i for i, path in enumerate(modules) if within(path, name)), default=last) for name in failed]
    left = [path for path in modules[: min(ends, default=last) + 1] if not any(within(path, name) for name in keep)]
    own = [path for path in modules if any(within(path, mixer) for mixer in mixers)]
    early = set(left).intersection(takewhile(lambda path: path not in own, modules))
    if early or not left:
        return early
    nearest = reversed(modules[: modules.index(left[-1]) + 1])
    return set(left).intersection(takewhile(lambda path: path not in own, nearest)) or {left[-1]}


def _config(cto: Any, precision: str) -> Any:
    if precision == "w8":
        return cto.OpLinearQuantizerConfig(mode="linear_symmetric", dtype="int8", weight_threshold=MIN_COMPRESSED)
    if precision == "w4":
        return cto.OpLinearQuantizerConfig(
            mode="linear_symmetric", dtype="int4", granularity="per_block", block_size=BLOCK, weight_threshold=MIN_COMPRESSED
        )
    bits = int(precision[1:])
    # coremltools' own k-means is scikit-learn's for small tensors: another library, from random starts
    return cto.OpPalettizerConfig(
        mode="custom", lut_function=lambda weight: palette(weight, bits), weight_threshold=MIN_COMPRESSED
    )


def palette(weight: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """2^bits values that stand for a tensor's with little squared error.

    Lloyd's algorithm in one dimension: a cluster is a run of the sorted values, so a round is a search for its borders. It
    begins where many values are best: their density is the cube root of the weights' (Panter and Dite 1951). On normal weights
    it ends within 0.3 dB of the optimum.

    Args:
        weight: of any shape, floating point.
        bits: 1 to 8.

    Returns:
        The values in ascending order, (2^bits), in the weight's type; the index of each element, uint8, flat.
    """
    flat, count = weight.reshape(-1).astype(np.float64), 1 << bits
    values = np.sort(flat)
    sums = np.concatenate(([0.0], np.cumsum(values)))
    share, edges = np.histogram(values, bins=BINS)
    begun = np.concatenate(([0.0], np.cumsum(np.cbrt(share))))
    centres = np.interp((np.arange(count) + 0.5) / count * begun[-1], begun, edges)
    for _ in range(ROUNDS):
        borders = np.concatenate(([0], np.searchsorted(values, (centres[1:] + centres[:-1]) / 2), [len(values)]))
        sizes = np.diff(borders)
        means = np.where(sizes > 0, np.diff(sums[borders]) / np.maximum(sizes, 1), centres)
        if np.array_equal(means, centres):
            break
        centres = means
    centres = centres.astype(weight.dtype)
    wide = centres.astype(np.float64)
    return centres, np.searchsorted((wide[1:] + wide[:-1]) / 2, flat).astype(np.uint8)
