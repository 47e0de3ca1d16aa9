"""Every published layout against float64 numpy that reads the original tensors, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, safe_open, save_file
from torch import Tensor

from pom_edge.checkpoint import LoadedModel, load_checkpoint
from pom_edge.errors import CheckpointError, InputError
from pom_edge.mixer import CumulativePoM, PoM
from pom_edge.published import LAYOUTS, build_layer, detect_layout
from tests.golden import FOLDER, NAMES, ROTARY

Array = NDArray[np.float64]
State = dict[str, Tensor]
PREFIXES = ("", "module.", "_orig_mod.", "denoiser.net.", "model.", "module._orig_mod.blocks.3.mixer.")


# ---- the formulas of pom.md, on the tensors as published ------------------------------------------------------------


def reference(state: State, x: Array, year: str = "current", mask: Array | None = None, clamp: float = 6.0) -> Array:
    """y (B, T, d) of a layer without rotary positions; ``year`` is current (and 2026) or 2025."""
    p = {name: value.double().numpy() for name, value in state.items()}
    hidden = p["ag_proj.weight"].shape[1]
    if "qc_proj.weight" in p:
        projected, logits = x @ p["qc_proj.weight"][:hidden].T, x @ p["qc_proj.weight"][hidden:].T + p["se_bias"]
    else:
        weight = p["po_proj.weight"].reshape(hidden, -1)
        groups = x.shape[-1] // weight.shape[1]
        parts = zip(np.split(x, groups, -1), np.split(weight, groups, 0), strict=True)
        projected = np.concatenate([tokens @ rows.T for tokens, rows in parts], -1) + p.get("po_proj.bias", 0.0)
        logits = x @ p["se_proj.weight"].T + p.get("se_proj.bias", 0.0)
    a = np.where(projected > 0, projected, 0.01 * projected)
    degree = p["po_coeff"].shape[1]
    powers = range(1, degree + 1)
    if year == "2025":
        s = 1 / (1 + np.exp(-logits))
        powers = powers if degree in (2, 3, 4) else range(degree)
    else:
        a, s = np.clip(a, -0.1, clamp), np.clip(logits / 6 + 0.5, 0, 1)
    f = sum(c * a**power for c, power in zip(p["po_coeff"].T, powers, strict=True))
    h = averaged(f, mask)
    gated = np.repeat(s, hidden // s.shape[-1], -1) * h
    return np.asarray(gated @ p["ag_proj.weight"].T + p.get("ag_proj.bias", 0.0))


def reference_cumulative(state: State, degree: int, x: Array, mask: Array | None = None) -> Array:
    """The 2025-02 formulas: running products of GELU branches."""
    p = {name.replace("ho_proj", "po_proj"): value.double().numpy() for name, value in state.items()}
    z = x @ p["po_proj.weight"].T + p.get("po_proj.bias", 0.0)
    branches = np.stack(np.split(z * 0.5 * (1 + np.vectorize(math.erf)(z / math.sqrt(2))), degree, -1))
    f = np.concatenate(list(np.cumprod(branches, 0)), -1)
    s = 1 / (1 + np.exp(-(x @ p["se_proj.weight"].T + p.get("se_proj.bias", 0.0))))
    return np.asarray((s * averaged(f, mask)) @ p["ag_proj.weight"].T + p.get("ag_proj.bias", 0.0))


def averaged(f: Array, mask: Array | None) -> Array:
    """Means over tokens; the older layouts add 1e-7 to the weight, so that a row of zeros gives zero."""
    weights = np.ones((*f.shape[:1], 1, f.shape[1])) if mask is None else mask
    weights = weights[:, None] if weights.ndim == 2 else weights
    return np.asarray(weights @ f / (weights.sum(-1, keepdims=True) + 1e-12))


# ---- drawing -----------------------------------------------------------------------------------------------------


def draw(layout: str, degree: int = 3, gates: int = 4, groups: int = 1, bias: bool = False, expand: int = 2) -> State:
    """Lively tensors (dim 16): every branch of activation and gate is used, every power counts."""
    dim, seed = 16, degree + 10 * gates + 100 * groups + bias
    hidden = dim * expand
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=generator) * std

    if layout in ("2025-02", "homm"):
        first = "ho_proj" if layout == "homm" else "po_proj"
        wide = degree * hidden
        state = {f"{first}.weight": normal(wide, dim, std=0.6), "se_proj.weight": normal(wide, dim, std=0.5)}
        state["ag_proj.weight"] = normal(dim, wide, std=wide**-0.5)
        biases = {f"{first}.bias": normal(wide), "se_proj.bias": normal(wide), "ag_proj.bias": normal(dim)}
        return state | (biases if bias else {})
    state = {
        "po_coeff": normal(hidden, degree) / 3.0 ** torch.arange(degree),
        "ag_proj.weight": normal(dim, hidden, std=hidden**-0.5),
    }
    state |= {"ag_proj.bias": normal(dim)} if bias else {}
    if layout == "current" and groups == 1:
        return state | {"qc_proj.weight": normal(hidden + gates, dim, std=0.8), "se_bias": normal(gates)}
    shape = (hidden, dim // groups, 1) if groups > 1 else (hidden, dim)
    state |= {"po_proj.weight": normal(*shape, std=0.8 * groups**0.5), "se_proj.weight": normal(gates, dim, std=0.5)}
    state |= {"po_proj.bias": normal(hidden)} if bias else {}
    return state | ({"se_proj.bias": normal(gates)} if bias or layout != "compom-2025" else {})


def tokens(batch: int = 3, count: int = 11) -> Array:
    return np.random.default_rng(1).standard_normal((batch, count, 16)).astype(np.float32).astype(np.float64)


def masks() -> list[Array | None]:
    """None, weights with one row that admits nothing, and weights for each query."""
    rng = np.random.default_rng(2)
    padding = (rng.random((3, 11)) < 0.6) * rng.uniform(0.5, 2, (3, 11))
    padding[-1] = 0
    return [None, padding, (rng.random((3, 11, 11)) < 0.6).astype(np.float64)]


def relative(found: Array, expected: Array) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@torch.no_grad()
def answer(layer: Any, x: Array, mask: Array | None = None) -> Array:
    y = layer(torch.from_numpy(x).float(), mask=None if mask is None else torch.from_numpy(mask).float())
    return np.asarray(y.double().numpy())


def write(tmp_path: Path, state: State, prefix: str = "", suffix: str = ".pt") -> Path:
    path = tmp_path / f"layer{suffix}"
    renamed = {prefix + name: tensor.contiguous() for name, tensor in state.items()}
    if suffix == ".safetensors":
        save_file(renamed, path)
    else:
        torch.save(renamed, path)
    return path


# ---- the recordings of the published module ---------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_recorded_layer_loads_with_its_settings(name: str, tmp_path: Path) -> None:
    with safe_open(FOLDER / f"{name}.safetensors", "pt") as file:
        metadata = file.metadata()
    recorded = load_file(FOLDER / f"{name}.safetensors")
    state = {key.removeprefix("param."): value for key, value in recorded.items() if key.startswith("param.")}
    number = int(name[:3])
    path = write(tmp_path, state, PREFIXES[number % len(PREFIXES)], [".pt", ".safetensors"][number % 2])
    loaded = load_checkpoint(path)
    layer, config = loaded.layer, json.loads(metadata["config"])
    assert isinstance(layer, PoM) and loaded.model is layer and not layer.training
    rotary = ROTARY[metadata["module"]]
    assert loaded.published_layout == ("current" if rotary is None else "current-rotary")
    heads = max(config["n_sel_heads"], 1)
    expected = config | {"rotary": rotary, "n_sel_heads": heads, "rotary_base": 10000.0, "clamp_max": 6.0}
    found = {key: getattr(layer, key) for key in expected}
    if found["n_sel_heads"] == 1 and heads == layer.hidden:
        found["n_sel_heads"] = heads  # as many heads as channels is a gate for each channel
    assert found == expected | ({"bias": found["bias"]} if layer.n_groups == 1 else {})
    assert found["bias"] == config["bias"]
    assert any("groups" in warning for warning in loaded.warnings) == (config["n_groups"] > 1)
    assert any("--clamp 1.0" in warning for warning in loaded.warnings) == (rotary is not None)
    if metadata["mode"] == "stream":
        return
    inputs = {key.removeprefix("in."): value for key, value in recorded.items() if key.startswith("in.")}
    mask = "causal" if metadata["mode"] == "causal" else inputs.get("mask")
    with torch.no_grad():
        y = layer(inputs["x"], inputs.get("context"), mask, inputs.get("positions_hw"))
    assert float((y - recorded["out.y"]).norm() / recorded["out.y"].norm()) < 1e-5


# ---- each layout ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("degree", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize(("gates", "groups"), [(32, 1), (4, 1), (8, 4)])
@pytest.mark.parametrize("bias", [False, True])
def test_current(tmp_path: Path, degree: int, gates: int, groups: int, bias: bool) -> None:
    state = draw("current", degree, gates, groups, bias)
    loaded = load_checkpoint(write(tmp_path, state))
    assert loaded.published_layout == "current"
    assert any("--layout compom-2025" in w for w in loaded.warnings) == (groups > 1 and bias)
    for mask in masks():
        assert relative(answer(loaded.model, tokens(), mask), reference(state, tokens(), mask=mask)) < 1e-5


@pytest.mark.parametrize("degree", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("gates", [32, 4])
@pytest.mark.parametrize("bias", [False, True])
def test_compom_2026_03(tmp_path: Path, degree: int, gates: int, bias: bool) -> None:
    state = draw("compom-2026-03", degree, gates, bias=bias)
    loaded = load_checkpoint(write(tmp_path, state), layout="compom-2026-03" if bias else None)
    assert loaded.published_layout == "compom-2026-03"
    layer = loaded.layer
    assert isinstance(layer, PoM) and torch.equal(layer.qc_proj.weight[:32], state["po_proj.weight"])
    assert torch.equal(layer.se_bias, state["se_proj.bias"])
    for mask in masks():
        expected = reference(state, tokens(), mask=mask)
        assert relative(answer(layer, tokens(), mask), expected) < 1e-5
        assert relative(reference(state, tokens(), "2025", mask), expected) > 0.05, "the layouts must differ here"


@pytest.mark.parametrize("degree", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize(("gates", "groups"), [(32, 1), (4, 1), (1, 1), (8, 4), (1, 2)])
@pytest.mark.parametrize("bias", [False, True])
def test_compom_2025(tmp_path: Path, degree: int, gates: int, groups: int, bias: bool) -> None:
    state = draw("compom-2025", degree, gates, groups, bias)
    loaded = load_checkpoint(write(tmp_path, state), layout="compom-2025" if bias else None)
    layer = loaded.layer
    assert loaded.published_layout == "compom-2025" and isinstance(layer, PoM)
    assert (layer.gate, layer.clamp_max, layer.first_power) == ("sigmoid", None, 1 if degree in (2, 3, 4) else 0)
    for mask in masks():
        expected = reference(state, tokens(), "2025", mask)
        assert relative(answer(layer, tokens(), mask), expected) < 1e-5
        assert relative(reference(state, tokens(), mask=mask), expected) > 0.05, "loading it as current must be wrong"


@pytest.mark.parametrize("layout", ["2025-02", "homm"])
@pytest.mark.parametrize("degree", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("bias", [False, True])
def test_cumulative_layouts(tmp_path: Path, layout: str, degree: int, bias: bool) -> None:
    state = draw(layout, degree, bias=bias)
    path = write(tmp_path, state)
    fitting = [k for k in range(1, 2 * degree + 1) if 2 * degree % k == 0]
    with pytest.raises(CheckpointError, match=f"does not tell its degree.*--degree, one of {', '.join(map(str, fitting))}$"):
        load_checkpoint(path)
    loaded = load_checkpoint(path, degree=degree)
    assert loaded.published_layout == layout and isinstance(loaded.layer, CumulativePoM)
    assert (loaded.layer.dim, loaded.layer.degree, loaded.layer.expand, loaded.layer.bias) == (16, degree, 2, bias)
    assert any("1 + its token count" in w for w in loaded.warnings) == (layout == "homm")
    for mask in masks():
        expected = reference_cumulative(state, degree, tokens(), mask)
        assert relative(answer(loaded.model, tokens(), mask), expected) < 1e-5
        other = reference_cumulative(state, 1 if degree > 1 else 2, tokens(), mask)
        assert relative(other, expected) > 0.05, "the degree must matter here"


def test_a_cumulative_layer_of_width_one_can_only_have_degree_one(tmp_path: Path) -> None:
    loaded = load_checkpoint(write(tmp_path, draw("2025-02", 1, expand=1)))
    assert isinstance(loaded.layer, CumulativePoM) and loaded.layer.degree == 1


def test_the_clamp_must_be_told(tmp_path: Path) -> None:
    path = write(tmp_path, state := draw("current"))
    six, one = load_checkpoint(path), load_checkpoint(path, clamp=1.0)
    expected = reference(state, tokens(), clamp=1.0)
    assert relative(answer(one.model, tokens()), expected) < 1e-5
    assert relative(answer(six.model, tokens()), expected) > 0.05


# ---- rotary tables ----------------------------------------------------------------------------------------------


def with_tables(
    base: float = 10000.0, rows: int = 64, kind: str = "1d", scale: float = 1.0, dtype: Any = torch.float32
) -> State:
    q = 16 if kind == "1d" else 8
    angles = scale * torch.outer(torch.arange(rows, dtype=torch.float32), base ** (-torch.arange(q, dtype=torch.float32) / q))
    names = ("freqs",) if kind == "1d" else ("row", "col")
    tables = {f"{n}_{f}": getattr(angles, f)().to(dtype) for n in names for f in ("cos", "sin")}
    return draw("current") | tables


@pytest.mark.parametrize("kind", ["1d", "2d"])
@pytest.mark.parametrize("rows", [2, 3, 64, 5000])
@pytest.mark.parametrize("base", [10000.0, 500000.0, 100.0, 12345.0, 1e6])
def test_the_base_is_read_from_tables_of_any_length(tmp_path: Path, kind: str, rows: int, base: float) -> None:
    layer = load_checkpoint(write(tmp_path, with_tables(base, rows, kind))).layer
    assert isinstance(layer, PoM) and (layer.rotary, layer.rotary_base) == (kind, base)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [2, 64, 5000])
@pytest.mark.parametrize("base", [10000.0, 500000.0, 100.0])
def test_the_base_survives_half_precision(tmp_path: Path, dtype: torch.dtype, rows: int, base: float) -> None:
    state = {name: tensor.to(dtype) for name, tensor in with_tables(base, rows).items()}
    loaded = load_checkpoint(write(tmp_path, state))
    assert isinstance(loaded.layer, PoM) and loaded.layer.rotary_base == base
    assert loaded.layer.po_coeff.dtype == torch.float32
    assert any("computed in FP32" in warning for warning in loaded.warnings)


def test_a_rotated_layer_turns_by_its_own_base(tmp_path: Path) -> None:
    """Pairs of channels as complex numbers times e^(i angle), gates at the stride of their heads."""
    state, base = with_tables(500.0), 500.0
    p = {name: value.double().numpy() for name, value in state.items()}
    x = tokens()
    a = x @ p["qc_proj.weight"][:32].T
    a = np.clip(np.where(a > 0, a, 0.01 * a), -0.1, 6)
    f = sum(p["po_coeff"][:, k] * a ** (k + 1) for k in range(3))
    s = np.clip((x @ p["qc_proj.weight"][32:].T + p["se_bias"]) / 6 + 0.5, 0, 1)
    where, theta = np.arange(11)[:, None], base ** (-np.arange(16) / 16)
    turned = (f[..., :16] + 1j * f[..., 16:]) * np.exp(1j * where * theta)
    gate = (s[..., :2] + 1j * s[..., 2:]) * np.exp(1j * where * theta[[0, 4]])  # heads are 8 wide: columns 0 and 4
    h = np.concatenate((turned.real, turned.imag), -1).mean(1, keepdims=True)
    gates = np.repeat(np.concatenate((gate.real, gate.imag), -1), 8, -1)
    expected = (gates * h) @ p["ag_proj.weight"].T
    assert relative(answer(load_checkpoint(write(tmp_path, state)).model, x), expected) < 1e-5
    assert relative(answer(load_checkpoint(write(tmp_path, with_tables(10000.0))).model, x), expected) > 0.01


def test_sd35_is_told_by_clamp_or_layout(tmp_path: Path) -> None:
    path = write(tmp_path, with_tables())
    default, clamp, layout = (
        load_checkpoint(path),
        load_checkpoint(path, clamp=1.0),
        load_checkpoint(path, layout="rotary-sd35"),
    )
    assert [getattr(each.layer, "clamp_max", None) for each in (default, clamp, layout)] == [6.0, 1.0, 1.0]
    assert ["--clamp 1.0" in " ".join(each.warnings) for each in (default, clamp, layout)] == [True, False, False]
    assert layout.published_layout == "rotary-sd35"
    with pytest.raises(CheckpointError, match="rotary-sd35 means --clamp 1"):
        load_checkpoint(path, layout="rotary-sd35", clamp=6.0)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (with_tables(scale=0.5), "scaled or interpolated positions"),
        (with_tables() | {"freqs_sin": torch.randn(64, 16)}, "do not hold cos and sin"),
        (with_tables(rows=1), r"1 row\(s\), and the base is read from row 1"),
        ({k: v for k, v in with_tables().items() if k != "freqs_sin"}, "found rotary tables freqs_cos; expected freqs_cos and"),
        (with_tables() | {"freqs_cos": torch.ones(64, 8), "freqs_sin": torch.ones(64, 8)}, r"freqs_cos has shape \(64, 8\)"),
        (
            with_tables(kind="2d") | {"col_cos": torch.ones(5, 8), "col_sin": torch.zeros(5, 8)},
            "col_cos and col_sin do not hold",
        ),
    ],
)
def test_inconsistent_tables_are_refused(tmp_path: Path, state: State, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(write(tmp_path, state))


def test_one_frequency_needs_no_base(tmp_path: Path) -> None:
    state = {
        "qc_proj.weight": torch.randn(4, 2), "se_bias": torch.randn(2), "po_coeff": torch.randn(2, 3),
        "ag_proj.weight": torch.randn(2, 2), "freqs_cos": torch.ones(1, 1), "freqs_sin": torch.zeros(1, 1),
    }  # fmt: skip
    assert load_checkpoint(write(tmp_path, state)).published_layout == "current-rotary"


# ---- what is refused --------------------------------------------------------------------------------------------


def test_two_dimensional_projection_with_both_biases_is_ambiguous(tmp_path: Path) -> None:
    path = write(tmp_path, draw("compom-2026-03", bias=True))
    with pytest.raises(CheckpointError, match=r"two layouts.*--layout compom-2026-03 .*--layout compom-2025 "):
        load_checkpoint(path)


@pytest.mark.parametrize(
    ("state", "options", "message"),
    [
        (draw("current"), {"layout": "compom-2025"}, "layout compom-2025 has ag_proj.weight, po_coeff, po_proj.weight"),
        (draw("current"), {"layout": "current-rotary"}, "has rotary tables .*, this layer has none"),
        (with_tables(), {"layout": "current"}, "has rotary tables, which layout current has not"),
        (draw("compom-2025"), {"layout": "current"}, "fuses its projections in qc_proj"),
        (draw("compom-2025"), {"clamp": 6.0}, "--clamp has no meaning for layout compom-2025"),
        (draw("2025-02", 2), {"clamp": 6.0, "degree": 2}, "--clamp has no meaning for layout 2025-02"),
        (draw("2025-02", 2), {"degree": 3}, "--degree is 3, but degree \\* expand is 4; expected one of 1, 2, 4"),
        (draw("current"), {"degree": 4}, "--degree is 4, but po_coeff has 3 columns"),
        (draw("current") | {"po_proj.weight": torch.ones(32, 16)}, {}, "layout current has no po_proj.weight"),
        (draw("current") | {"scale": torch.ones(3)}, {}, "no published PoM layer has scale"),
        (draw("current") | {"po_coeff": torch.ones(32, 3).int()}, {}, r"floating-point weights, found po_coeff \(torch.int32"),
    ],
)
def test_contradictions_are_refused(tmp_path: Path, state: State, options: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(write(tmp_path, state), **options)


@pytest.mark.parametrize(
    ("layout", "name", "shape", "message"),
    [
        ("current", "ag_proj.weight", (16, 31), "expected \\(dim, expand \\* dim\\)"),
        ("current", "ag_proj.weight", (16, 2, 16), "ag_proj.weight has shape"),
        ("current", "po_coeff", (31, 3), r"po_coeff has shape \(31, 3\); expected \(32, any\)"),
        ("current", "po_coeff", (32,), "po_coeff has shape"),
        ("current", "qc_proj.weight", (36, 15), "qc_proj.weight has shape"),
        ("current", "qc_proj.weight", (32, 16), "qc_proj.weight has 32 rows"),
        ("current", "qc_proj.weight", (39, 16), "selection has 7 rows; expected 32"),
        ("current", "qc_proj.weight", (33, 16), "selection has 1 rows; expected 32"),
        ("current", "se_bias", (5,), r"bias has shape \(5,\); expected \(4,\)"),
        ("compom-2025", "po_proj.weight", (32, 8), "po_proj.weight has shape"),
        ("compom-2025", "po_proj.weight", (32, 5, 1), "po_proj.weight has shape"),
        ("compom-2025", "se_proj.weight", (4, 8), "se_proj.weight has shape"),
        ("2025-02", "po_proj.weight", (90, 16), "po_proj.weight has shape"),
    ],
)
def test_mismatched_shapes_name_the_tensor(layout: str, name: str, shape: tuple[int, ...], message: str) -> None:
    state = draw(layout)
    state[name] = torch.ones(shape)
    with pytest.raises(CheckpointError, match=message):
        build_layer(state, degree=3 if layout == "2025-02" else None)


@pytest.mark.parametrize("missing", ["po_coeff", "se_bias", "qc_proj.weight"])
def test_an_incomplete_layer(missing: str) -> None:
    state = draw("current")
    del state[missing]
    with pytest.raises(CheckpointError, match="fit no published PoM layer"):
        detect_layout(state)


def test_unknown_options_list_the_choices(tmp_path: Path) -> None:
    path = write(tmp_path, draw("current"))
    with pytest.raises(InputError, match=f"--layout is 'curent'; expected one of {', '.join(LAYOUTS)}"):
        load_checkpoint(path, layout="curent")
    with pytest.raises(InputError, match="--degree is 0"):
        load_checkpoint(path, degree=0)
    for clamp in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(InputError, match="--clamp is"):
            load_checkpoint(path, clamp=clamp)


def test_errors_name_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, draw("compom-2026-03", bias=True))
    with pytest.raises(CheckpointError, match=str(path)):
        load_checkpoint(path)


def test_loading_says_what_it_is(tmp_path: Path) -> None:
    loaded: LoadedModel = load_checkpoint(write(tmp_path, draw("current")))
    assert loaded.format == "published PoM layer" and loaded.config is None and not loaded.samples and loaded.warnings == []
