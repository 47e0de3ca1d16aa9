"""What is known to go wrong in the published code, each shown absent here.

Export of the clamp; counting calls for tokens; an N x N mask for causal mixing; groups; identity of x and context; (T, N)
masks; causal with padding; one query with a causal context; empty mask rows; positions beyond a table; fresh weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pom_edge.errors import InputError
from pom_edge.mixer import SETTINGS_KEY, PoM, PoMState
from tests.mixers import SNR_DB, build, lively, stream
from tests.oracle import Case, evaluate, random_params, snr_db

DYNAMIC = {0: Dim("batch"), 1: Dim("tokens")}


def _layer(**settings: Any) -> PoM:
    torch.manual_seed(0)
    return lively(PoM(**({"dim": 16, "degree": 3, "expand": 2, "n_sel_heads": 4} | settings)))


def _case(mode: str, inputs: dict[str, Tensor], layer: PoM) -> Case:
    """The oracle's view of a layer and its inputs."""
    names = ("dim", "degree", "expand", "n_groups", "n_sel_heads", "bias", "rotary")
    params = {name: value.numpy() for name, value in layer.state_dict().items()}
    return Case({n: getattr(layer, n) for n in names}, params, {n: t.numpy() for n, t in inputs.items()}, mode)


def _snr_db(found: Tensor, expected: Tensor | np.ndarray) -> float:
    return snr_db(found.detach().numpy(), expected.detach().numpy() if isinstance(expected, Tensor) else expected)


class _Call(nn.Module):
    """A layer called with fixed keywords, as a model around it would."""

    def __init__(self, layer: PoM, **fixed: Any) -> None:
        super().__init__()
        self.layer, self.fixed = layer, fixed

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, **self.fixed)  # type: ignore[no-any-return]


class _Cross(nn.Module):
    def __init__(self, layer: PoM, causal: bool = False) -> None:
        super().__init__()
        self.layer, self.causal = layer, causal

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        return self.layer(x, context, causal=self.causal)  # type: ignore[no-any-return]


class _Step(nn.Module):
    def __init__(self, layer: PoM, causal: bool) -> None:
        super().__init__()
        self.layer, self.causal = layer, causal

    def forward(self, chunk: Tensor, mean: Tensor, mean_low: Tensor, count: Tensor) -> tuple[Tensor, ...]:
        y, state = self.layer.step(chunk, PoMState(mean, mean_low, count), causal=self.causal)
        return y, state.mean, state.mean_low, state.count


def _export(model: nn.Module, args: tuple[Tensor, ...], shapes: Any = None, **options: Any) -> ExportedProgram:
    with torch.no_grad():
        return torch.export.export(
            model, args, dynamic_shapes=shapes, strict=False, prefer_deferred_runtime_asserts_over_guards=True, **options
        )


# ---- export ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["none", "causal"])
@pytest.mark.parametrize("rotary", [None, "1d"])
def test_torch_export_with_free_batch_and_tokens(mode: str, rotary: str | None) -> None:
    layer = _layer(rotary=rotary, clamp_max=6)  # an int, as published: its mix with -0.1 is what broke the export
    program = _export(_Call(layer, causal=mode == "causal"), (torch.randn(2, 11, 16),), {"x": DYNAMIC})
    for batch, tokens in ((2, 11), (3, 2), (2, 300), (2, 1000)):
        x = torch.randn(batch, tokens, 16)
        assert _snr_db(program.module()(x), evaluate(_case(mode, {"x": x}, layer))) >= SNR_DB


def test_the_bounds_of_the_clamp_are_floats() -> None:
    program = _export(_Call(_layer(clamp_max=6)), (torch.randn(2, 11, 16),))
    bounds = [node.args[1:] for node in program.graph.nodes if "clamp" in str(node.target)]
    assert bounds == [(-0.1, 6.0)] and all(isinstance(bound, float) for bound in bounds[0])


def test_the_module_itself_exports_to_onnx(tmp_path: Path) -> None:
    """Not lowered, straight through torch.onnx: what a user's own script would do."""
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    layer, path = _layer(clamp_max=6), tmp_path / "layer.onnx"
    program = _export(_Call(layer), (torch.randn(2, 11, 16),), {"x": DYNAMIC})
    exported = torch.onnx.export(program, dynamo=True, opset_version=18, verbose=False)
    assert exported is not None
    exported.save(path)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    x = torch.randn(3, 40, 16)
    (y,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert snr_db(y, evaluate(_case("none", {"x": x}, layer))) >= SNR_DB


# ---- counting -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [True, False], ids=["tokens", "frames"])
def test_tokens_are_counted_and_not_calls(causal: bool) -> None:
    """Chunks of 5, 3 and 1: a mean over calls is off by half."""
    layer, x = _layer(), torch.randn(2, 9, 16)
    y, state = stream(layer, x, (5, 3, 1), causal)
    case = _case("causal", {"x": x}, layer)
    case = case if causal else Case(case.config, case.params, case.inputs, "frames", (5, 3, 1))
    assert _snr_db(y, evaluate(case)) >= SNR_DB
    assert state.count.tolist() == [9, 9]

    calls = torch.stack([layer.features(part, None).mean(1) for part in (x[:, :5], x[:, 5:8], x[:, 8:])]).mean(0)  # the fault
    assert _snr_db(calls.detach(), (state.mean + state.mean_low)[:, 0]) < 20, "the two cannot be told apart here"


@pytest.mark.parametrize("causal", [True, False], ids=["tokens", "frames"])
def test_the_count_is_not_baked_into_an_exported_step(causal: bool) -> None:
    """Exported at a count of 7, run from nothing over chunks of any length."""
    layer = _layer(rotary="1d")
    example = (torch.randn(2, 5, 16), torch.randn(2, 1, 32), torch.zeros(2, 1, 32), torch.tensor([7, 7]))
    step = _export(_Step(layer, causal), example, ({1: Dim("chunk")}, None, None, None)).module()
    x, pieces, start = torch.randn(2, 40, 16), [], 0
    state = [torch.zeros(2, 1, 32), torch.zeros(2, 1, 32), torch.zeros(2, dtype=torch.int64)]
    for length in (13, 2, 25):
        y, *state = step(x[:, start : start + length], *state)
        pieces.append(y)
        start += length
    expected, last = stream(layer, x, (13, 2, 25), causal)
    assert _snr_db(torch.cat(pieces, 1), expected) >= SNR_DB
    assert torch.equal(state[2], last.count) and _snr_db(state[0], last.mean) >= SNR_DB


def test_decoding_uses_the_state() -> None:
    """The published single-token step ignores it."""
    layer, x = _layer(), torch.randn(1, 30, 16)
    _, state = layer.step(x[:, :29])
    decoded, _ = layer.step(x[:, 29:], state)
    assert _snr_db(decoded, layer(x, causal=True)[:, 29:]) >= SNR_DB
    assert _snr_db(decoded, layer(x[:, 29:])) < 40


# ---- no N x N tensor ------------------------------------------------------------------------------------------------


class _Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.elements: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.elements = max(self.elements, leaf.numel())
        return result


def _largest(run: Callable[[], object]) -> int:
    mode = _Largest()
    with mode:
        run()
    return mode.elements


def _causal_runs(layer: PoM, x: Tensor) -> Iterator[tuple[str, Callable[[], object]]]:
    mask = torch.ones(x.shape[:2])
    yield "causal", lambda: layer(x, causal=True)
    yield "causal with padding", lambda: layer(x, mask=mask, causal=True)
    yield "step", lambda: layer.step(x)
    yield "step with a ragged mask", lambda: layer.step(x, mask=mask)
    yield "frame", lambda: layer.step(x, causal=False)
    yield "training", lambda: layer(x.clone().requires_grad_(), causal=True).square().sum().backward()


@pytest.mark.parametrize("rotary", [None, "1d"])
def test_causal_mixing_makes_no_tensor_of_tokens_by_tokens(rotary: str | None) -> None:
    """At 20,000 tokens the largest tensor is a few times (B, N, D), where an N x N mask has 400 million elements."""
    layer = _layer(dim=8, rotary=rotary)
    tokens = 20_000
    for name, run in _causal_runs(layer, torch.randn(1, tokens, 8)):
        assert _largest(run) <= 2 * tokens * layer.hidden, name


def test_the_largest_tensor_would_be_seen() -> None:
    """The measure is not blind: a mask for each query, which the caller asks for, shows up."""
    layer, x = _layer(dim=8), torch.randn(1, 500, 8)
    assert _largest(lambda: layer(x, mask=torch.ones(1, 500, 500, dtype=torch.bool))) >= 500 * 500


@pytest.mark.parametrize("rotary", [None, "1d"])
def test_an_exported_causal_graph_holds_no_tensor_of_tokens_by_tokens(rotary: str | None) -> None:
    """No value has the token count on two axes, none grows with its square, and no mask is baked in as a constant."""
    layer = _layer(rotary=rotary)
    program = _export(_Call(layer, causal=True), (torch.randn(2, 512, 16),), {"x": {1: Dim("tokens")}})
    placeholder = next(node for node in program.graph.nodes if node.name == "x")
    tokens = placeholder.meta["val"].shape[1].node.expr
    for node in program.graph.nodes:
        for value in tree_leaves(node.meta.get("val")):
            if isinstance(value, Tensor):
                sizes = [int(s.node.expr.subs(tokens, 8192)) if isinstance(s, torch.SymInt) else s for s in value.shape]
                assert np.prod(sizes) <= 4 * 2 * (8192 + 256) * layer.hidden, f"{node.name} {value.shape}"
                assert sum(size >= 8192 for size in sizes) <= 1, f"{node.name} {value.shape}"
    baked = sum(tensor.numel() for tensor in program.constants.values() if isinstance(tensor, Tensor))
    assert baked <= layer.hidden


# ---- groups ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["none", "padding", "causal"])
@pytest.mark.parametrize("groups", [1, 2, 4, 8])
def test_each_group_sees_its_own_channels(groups: int, mode: str) -> None:
    config = {"dim": 16, "degree": 3, "expand": 2, "n_groups": groups, "n_sel_heads": 4, "bias": True, "rotary": None}
    rng = np.random.default_rng(groups)
    x = rng.standard_normal((2, 30, 16)).astype(np.float32)
    inputs = {"x": x} | ({"mask": (rng.random((2, 30)) < 0.7).astype(np.float32)} if mode == "padding" else {})
    case = Case(config, random_params(rng, config), inputs, mode)
    layer = build(case)
    expected = evaluate(case)
    for tokens in (torch.from_numpy(x), torch.from_numpy(x).transpose(1, 2).contiguous().transpose(1, 2)):
        mask = torch.from_numpy(inputs["mask"]) if mode == "padding" else None
        y = layer(tokens, mask=mask, causal=mode == "causal")
        assert _snr_db(y, expected) >= SNR_DB, f"strides {tokens.stride()}"


def test_a_group_depends_on_its_channels_only() -> None:
    layer = _layer(n_groups=2)
    x = torch.randn(1, 5, 16)
    other = x.clone()
    other[..., 8:] += 1
    before, after = layer.features(x, None), layer.features(other, None)
    assert torch.equal(before[..., :16], after[..., :16]) and not torch.allclose(before[..., 16:], after[..., 16:])


# ---- identity -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rotary", [None, "1d"])
def test_the_same_object_as_context_is_like_an_equal_copy(rotary: str | None, causal: bool) -> None:
    layer, x, mask = _layer(rotary=rotary), torch.randn(3, 7, 16), torch.rand(3, 7) < 0.7
    for given in (None, mask):
        same = layer(x, x, mask=given, causal=causal)
        assert torch.equal(same, layer(x, x.clone(), mask=given, causal=causal))
        assert torch.equal(same, layer(x, mask=given, causal=causal))


def test_positions_of_the_context_do_not_depend_on_identity() -> None:
    layer, x, positions = _layer(rotary="1d"), torch.randn(2, 7, 16), torch.arange(20, 27)
    itself = layer(x, positions=positions)
    for context in (x, x.clone()):
        assert torch.equal(layer(x, context, positions=positions, context_positions=positions), itself)
        assert _snr_db(layer(x, context, positions=positions), itself) < 40, "a context counts from 0 unless told"


def test_an_exported_cross_layer_uses_both_inputs(tmp_path: Path) -> None:
    """With one and the same sample tensor for both inputs, which torch.export alone would merge into one."""
    pytest.importorskip("onnxscript")
    from pom_edge.export.inputs import Extent, axis_sizes, make_inputs, plan_axes
    from pom_edge.export.lowering import lower
    from pom_edge.export.onnx_graph import export_graph, save_graph
    from pom_edge.runtimes.onnxruntime_session import native_session

    layer, sample = _layer(), torch.randn(2, 6, 16)
    example = {"x": sample, "context": sample}
    axes = plan_axes(example, Extent(), Extent())
    lowered, mixers = lower(_Cross(layer))
    graph = export_graph(lowered, mixers, make_inputs(example, axes, axis_sizes(example, axes), 0), axes)
    save_graph(graph.model, tmp_path / "cross.onnx", {})
    session = native_session(str(tmp_path / "cross.onnx"), threads=1)
    assert [value.name for value in session.get_inputs()] == ["x", "context"]
    inputs = {"x": torch.randn(2, 6, 16), "context": torch.randn(2, 6, 16)}
    y = session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})[0]
    assert snr_db(y, evaluate(_case("cross", inputs, layer))) >= SNR_DB


def test_cross_lengths_are_free_of_each_other() -> None:
    layer = _layer()
    shapes = {"x": {1: Dim("queries")}, "context": {1: Dim("tokens")}}
    program = _export(_Cross(layer), (torch.randn(2, 6, 16), torch.randn(2, 9, 16)), shapes)
    inputs = {"x": torch.randn(2, 31, 16), "context": torch.randn(2, 4, 16)}
    assert _snr_db(program.module()(*inputs.values()), evaluate(_case("cross", inputs, layer))) >= SNR_DB


# ---- masks ----------------------------------------------------------------------------------------------------------


def test_a_two_dimensional_mask_is_always_padding() -> None:
    """(T, N) with B == N cannot be told from (B, N): it is (B, N), as documented; a mask for each query has three axes."""
    layer, x = _layer(), torch.randn(4, 4, 16)
    mask = torch.tensor([[1, 0, 0, 1], [1, 1, 0, 0], [0, 1, 1, 1], [1, 1, 1, 1]])
    padding = layer(x, mask=mask)
    per_query = layer(x, mask=mask.unsqueeze(0))
    assert _snr_db(padding, evaluate(_case("padding", {"x": x, "mask": mask}, layer))) >= SNR_DB
    assert _snr_db(per_query, evaluate(_case("per_query", {"x": x, "mask": mask.unsqueeze(0)}, layer))) >= SNR_DB
    assert _snr_db(padding, per_query) < 40


def test_a_mask_of_queries_by_tokens_is_refused_where_it_can_be_told() -> None:
    layer, x = _layer(), torch.randn(5, 3, 16)
    with pytest.raises(InputError, match=r"\(1, T, N\)"):
        layer(x, torch.randn(5, 5, 16), mask=torch.ones(3, 5))
    with pytest.raises(InputError, match=r"\(1, T, N\)"):
        layer(x, mask=torch.ones(3, 3))


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(2), r"\(B, N\) or \(B, T, N\)"),
        (torch.ones(2, 1, 6, 6), r"\(B, N\) or \(B, T, N\)"),
        (torch.ones(1, 6), r"\(2, 6\)"),
        (torch.ones(2, 6, 5), r"\(2, 6, 6\)"),
        (torch.ones(3, 6, 6), r"\(2, 6, 6\)"),
        ("Causal", "'causal'"),
    ],
)
def test_a_mask_that_does_not_fit_is_refused(mask: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        _layer()(torch.randn(2, 6, 16), mask=mask)


@pytest.mark.parametrize("rotary", [None, "1d"])
@pytest.mark.parametrize("kind", ["float", "bool", "weights"])
def test_causal_and_padding_combine(kind: str, rotary: str | None) -> None:
    layer, x = _layer(rotary=rotary), torch.randn(3, 40, 16)
    mask = torch.rand(3, 40) < 0.6
    mask[0, :5] = False  # the first tokens see nothing
    given = {"bool": mask, "float": mask.float(), "weights": mask * torch.rand(3, 40)}[kind]
    y = layer(x, mask=given, causal=True)
    assert _snr_db(y, evaluate(_case("causal_padding", {"x": x, "mask": given}, layer))) >= SNR_DB
    assert _snr_db(y, layer(x, causal=True)) < 40 and _snr_db(y, layer(x, mask=given)) < 40
    assert y[0, :5].abs().max() == 0


def test_causal_and_a_mask_for_each_query_is_refused() -> None:
    with pytest.raises(InputError, match="drop causal"):
        _layer()(torch.randn(2, 6, 16), mask=torch.ones(2, 6, 6), causal=True)


@pytest.mark.parametrize(("queries", "tokens"), [(1, 9), (9, 1), (4, 9)])
def test_causal_with_another_number_of_queries_is_refused(queries: int, tokens: int) -> None:
    """One query with a causal context returns N rows in the published code."""
    x, context = torch.randn(2, queries, 16), torch.randn(2, tokens, 16)
    with pytest.raises(InputError, match=r"step\(\)"):
        _layer()(x, context, causal=True)
    with pytest.raises(RuntimeError, match="as many queries as context"):
        _export(_Cross(_layer(), causal=True), (x, context))


def _empty_row_cases() -> Iterator[tuple[str, dict[str, Any]]]:
    padding = torch.ones(2, 6)
    padding[0] = 0
    per_query = torch.ones(2, 6, 6)
    per_query[0] = 0
    yield "padding", {"mask": padding}
    yield "bool", {"mask": padding.bool()}
    yield "per query", {"mask": per_query}
    yield "shared per query", {"mask": torch.zeros(1, 6, 6)}
    yield "causal", {"mask": padding, "causal": True}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("name", "arguments"), list(_empty_row_cases()), ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_row_that_admits_nothing_gives_the_bias(name: str, arguments: dict[str, Any], bias: bool) -> None:
    """A zero mean, so zeros without a bias: never NaN, in the output or in a gradient."""
    layer, x = _layer(bias=bias), torch.randn(2, 6, 16, requires_grad=True)
    y = layer(x, **arguments)
    expected = layer.ag_proj.bias.expand(6, 16) if bias else torch.zeros(6, 16)
    assert torch.equal(y[0], expected), name
    assert y.isfinite().all() and (name == "shared per query" or y[1].abs().max() > 0.01)
    y.square().sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in layer.parameters())


# ---- positions ------------------------------------------------------------------------------------------------------


def test_there_is_no_table_to_fall_off() -> None:
    for rotary in ("1d", "2d"):
        layer = _layer(rotary=rotary)
        assert not list(layer.buffers())
        state = layer.state_dict().keys() - dict(layer.named_parameters()).keys()
        assert state == {SETTINGS_KEY} and layer.state_dict()[SETTINGS_KEY].numel() < 40


@pytest.mark.parametrize("first", [0, 63, 8_192, 1_000_000, 2**31])
def test_positions_in_one_dimension_go_on(first: int) -> None:
    layer, x = _layer(rotary="1d"), torch.randn(2, 70, 16)
    inputs = {"x": x, "positions": torch.arange(first, first + 70)}
    assert _snr_db(layer(**inputs), evaluate(_case("none", inputs, layer))) >= SNR_DB


@pytest.mark.parametrize("first", [0, 500, 100_000, 2**24])
def test_positions_in_two_dimensions_go_on(first: int) -> None:
    layer, x = _layer(rotary="2d"), torch.randn(2, 30, 16)
    inputs = {"x": x, "positions": first + torch.stack((torch.arange(30) // 6, 3 * torch.arange(30) % 7), -1)}
    assert _snr_db(layer(**inputs), evaluate(_case("none", inputs, layer))) >= SNR_DB


def test_the_output_depends_on_absolute_positions() -> None:
    """A shift of all positions changes it, so a stream must carry them: step() does."""
    layer, x = _layer(rotary="1d"), torch.randn(1, 20, 16)
    assert _snr_db(layer(x, positions=torch.arange(5, 25)), layer(x)) < 40
    y, _ = stream(layer, x, (7, 13))
    assert _snr_db(y, layer(x, causal=True)) >= SNR_DB


@pytest.mark.parametrize(
    ("rotary", "positions", "message"),
    [
        (None, torch.arange(6), "no rotary"),
        ("1d", torch.arange(5), "5 positions were given for 6 tokens"),
        ("1d", torch.zeros(6, 2, dtype=torch.int64), r"\(tokens,\)"),
        ("2d", None, "row and column"),
        ("2d", torch.arange(6), r"\(tokens, 2\)"),
    ],
)
def test_positions_that_do_not_fit_are_refused(rotary: str | None, positions: Tensor | None, message: str) -> None:
    with pytest.raises(InputError, match=message):
        _layer(rotary=rotary)(torch.randn(2, 6, 16), positions=positions)


# ---- fresh weights --------------------------------------------------------------------------------------------------


def test_fresh_weights_need_a_relative_gate() -> None:
    """A fresh layer answers near 1e-4: an output of zeros passes an absolute tolerance, and fails a relative one."""
    torch.manual_seed(0)
    layer, x = PoM(64, 3, 2, n_sel_heads=4), torch.randn(2, 50, 64)
    assert layer.po_coeff.abs().max() <= 0.001
    y = layer(x)
    assert 1e-6 < y.abs().mean() < 1e-3
    zeros = torch.zeros_like(y)
    assert torch.allclose(zeros, y, atol=1e-2), "what an absolute tolerance says"
    assert _snr_db(zeros, y) < 1
    assert _snr_db(y, evaluate(_case("none", {"x": x}, layer))) >= SNR_DB


@pytest.mark.parametrize("rotary", [None, "1d"])
def test_mixing_without_positions_does_not_see_the_order(rotary: str | None) -> None:
    layer, x = _layer(rotary=rotary), torch.randn(2, 30, 16)
    order = torch.randperm(30)
    same = _snr_db(layer(x[:, order]), layer(x)[:, order]) >= SNR_DB
    assert same == (rotary is None)


@pytest.mark.parametrize("causal", [False, True])
def test_compiling_makes_one_graph(causal: bool) -> None:
    """No graph breaks, in forward and in step, with lengths left free."""
    layer, x = _layer(rotary="1d"), torch.randn(2, 30, 16)
    forward = torch.compile(layer, backend="eager", fullgraph=True, dynamic=True)
    step = torch.compile(layer.step, backend="eager", fullgraph=True, dynamic=True)
    state = layer.step(x[:, :10])[1]
    assert _snr_db(forward(x, causal=causal), layer(x, causal=causal)) >= SNR_DB
    assert _snr_db(step(x[:, 10:], state, causal)[0], layer.step(x[:, 10:], state, causal)[0]) >= SNR_DB
