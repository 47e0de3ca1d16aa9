"""Weights of a Core ML package as integers; everything else stays as it was converted.

w8          W  ->  s_c W_q                  int8, symmetric, a scale for each channel
w4          W  ->  s_b W_q                  int4, symmetric, a scale for each block of 32 (iOS18)
p8, p6, p4  W  ->  palette[index]           2^n values for each tensor, which one-dimensional k-means chooses
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

import numpy as np

from pom_edge.export.coreml_package import Package, module_paths
from pom_edge.export.coreml_program import coreml_name
from pom_edge.runtimes.coreml_library import listen_to_coremltools, quiet_coremltools

MIN_COMPRESSED = 512  # elements; coremltools' own 2048 leaves most of a small model as it is
BLOCK = 32
PRODUCTS = ("linear", "matmul", "conv", "einsum")
PARAMETER = "p_"  # how torch.export begins the name of one
STORED = ("_quantized", "_palettized")  # what coremltools adds to the name of a weight that it stores as integers
ROUNDS = 100  # of k-means; it ends earlier where nothing moves
BINS = 64  # of the histogram from which it begins

# numpy on a channel of zeros (a fresh bias), whose scale is 0: whatever integer comes out of 0 / 0 stands for 0
OF_ZEROS = ("invalid value encountered in divide", "invalid value encountered in cast")

__all__ = ["STORED", "compress", "palette", "weight_label", "weights_of"]


def compress(package: Package, precision: str, keep: Collection[str] = ()) -> Package:
    """The package with its weights stored as integers.

    Args:
        package: stays as it is.
        precision: see above.
        keep: names of weights, as in :func:`weights_of`, that stay floats.
    """
    with quiet_coremltools():
        import coremltools.optimize.coreml as cto
    with listen_to_coremltools() as said:
        found = _constants(package)
        floats = {name: None for name, each in found.items() if name in keep or not _is_weight(name, each)}
        chosen = cto.OptimizationConfig(global_config=_config(cto, precision), op_name_configs=floats)
        convert = cto.palettize_weights if precision.startswith("p") else cto.linear_quantize_weights
        model = convert(package.model, config=chosen)
    return dataclasses.replace(
        package, model=model, warnings=package.warnings + [text for text in said if text not in OF_ZEROS]
    )


def weights_of(package: Package) -> dict[str, str]:
    """Name of each weight -> module path of what reads it first; of a package in floats.

    A weight is a parameter, or an operand of a product; tables of rotary angles are neither. A conversion renames some
    ("transpose_3"), so the name alone does not say whose a weight is.
    """
    with listen_to_coremltools():
        found, scopes = _constants(package), module_paths(package.model)
    return {
        name: next((scopes[child.name] for child in each.child_ops if child.name in scopes), ".")
        for name, each in found.items()
        if _is_weight(name, each)
    }


def weight_label(name: str, path: str) -> str:
    """A weight as people know it: module path and parameter, or what the conversion made of its name."""
    short, own = name.removesuffix("_to_fp16"), f"_{coreml_name(path)}_"
    return f"{path}.{short.rpartition(own)[2].removeprefix('lowered_')}" if own in short else f"{path} ({short})"


def _constants(package: Package) -> dict[str, Any]:
    with quiet_coremltools():
        import coremltools.optimize.coreml as cto
    return dict(cto.get_weights_metadata(package.model, weight_threshold=MIN_COMPRESSED))


def _is_weight(name: str, found: Any) -> bool:
    return name.startswith(PARAMETER) or any(child.op_type in PRODUCTS for child in found.child_ops)


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
