"""A traced model to INT8 and to ONNX: what is quantized, under which names, and that the file means what PyTorch computes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from pom_edge.errors import InputError
from pom_edge.export.forms import parallel, recurrent
from pom_edge.export.inputs import Extent
from pom_edge.export.lint import GraphContext, lint
from pom_edge.export.onnx_graph import Boundary, Traced, save_graph, trace, trace_graph, trace_pass, translate
from pom_edge.export.streamed import Splitter
from pom_edge.mixer import CumulativePoM, PoM
from pom_edge.models import ModelConfig, build_model
from pom_edge.quantize.graph import finish
from pom_edge.quantize.quantize import Options, Prepared, Quantized, prepare, quantize
from tests.mixers import lively
from tests.oracle import snr_db

DIM, TOKENS = 32, 24


def _lively(model: nn.Module) -> nn.Module:
    for index, layer in enumerate(module for module in model.modules() if isinstance(module, PoM)):
        lively(layer, index)
    return model.eval()


def _data(batch: int = 16, tokens: int = TOKENS, dim: int = 12, seed: int = 1) -> dict[str, Tensor]:
    return {"x": torch.randn(batch, tokens, dim, generator=torch.Generator().manual_seed(seed))}


def _traced(model: nn.Module, example: dict[str, Tensor]) -> Traced:
    plan = parallel(model, example, Extent(), Extent())
    return trace_graph(plan.model, plan.mixers, plan.example, plan.axes)


def _run(path: Path, inputs: dict[str, Tensor], **settings: Any) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    for name, value in settings.items():
        if name == "exact":
            options.add_session_config_entry("session.x64quantprecision", "1")
        else:
            setattr(options, name, value)
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return session.run(None, {name: value.numpy() for name, value in inputs.items()})  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def encoder() -> nn.Module:
    torch.manual_seed(0)
    return _lively(build_model(ModelConfig(kind="encoder", dim=DIM, depth=2, input_dim=12, n_sel_heads=4)))


@pytest.fixture(scope="module")
def prepared(encoder: nn.Module) -> Prepared:
    return prepare(_traced(encoder, {"x": torch.randn(2, TOKENS, 12)}), lambda module: module(_data()))


@pytest.fixture(scope="module")
def quantized(prepared: Prepared) -> Quantized:
    return prepared.convert()


@pytest.fixture(scope="module")
def file(quantized: Quantized, tmp_path_factory: pytest.TempPathFactory) -> Path:
    graph = finish(translate(quantized.traced))
    assert lint(GraphContext(graph)) == []
    path = tmp_path_factory.mktemp("int8") / "encoder.onnx"
    save_graph(graph.model, path, {})
    onnx.checker.check_model(str(path), full_check=True)
    return path


def test_layers_have_the_names_of_the_model(encoder: nn.Module, quantized: Quantized) -> None:
    paths = [layer.path for layer in quantized.layers]
    modules = dict(encoder.named_modules())
    for path in paths:
        assert path in modules or path.rpartition(".")[0] in modules, path
    block = ["mixer.qc_proj.po", "mixer.qc_proj.se", "mixer.ag_proj", "ff.0", "ff.2"]
    assert [path for path in paths if path.startswith("blocks.1.")] == [f"blocks.1.{name}" for name in block]
    kinds = {layer.path: layer.kind for layer in quantized.layers}
    assert kinds["blocks.0.mixer.ag_proj"] == "weight" and kinds["blocks.0.ff.2"] == "gemm"


def test_the_file_means_what_eager_computes(quantized: Quantized, file: Path, encoder: nn.Module) -> None:
    inputs = _data(3, 17, seed=9)  # other batch and tokens than traced
    with torch.no_grad():
        eager, truth = quantized.module(inputs)[0].numpy(), encoder(**inputs).numpy()
    plain = _run(file, inputs, graph_optimization_level=onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL)[0]
    assert snr_db(plain, eager) > 45
    assert snr_db(_run(file, inputs, exact=True)[0], eager) > 40
    assert 25 < snr_db(eager, truth) < 60


def test_weights_are_integers_and_nodes_say_where_they_are(file: Path, encoder: nn.Module) -> None:
    model = onnx.load(str(file))
    counts = Counter(node.op_type for node in model.graph.node)
    assert counts["QuantizeLinear"] == counts["DequantizeLinear"] - len([n for n in model.graph.node if _of_weight(model, n)])
    floats = [i for i in model.graph.initializer if i.data_type == onnx.TensorProto.FLOAT and np.prod(i.dims) >= 512]
    assert not [i.name for i in floats if "weight" in i.name]
    modules = {name for name, _ in encoder.named_modules()}
    for node in model.graph.node:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            assert node.name.rpartition("/")[0] in modules, node.name


def _of_weight(model: onnx.ModelProto, node: onnx.NodeProto) -> bool:
    return node.op_type == "DequantizeLinear" and node.input[0] in {i.name for i in model.graph.initializer}


def test_no_zero_point_is_shared_and_no_weight_is_transposed(file: Path) -> None:
    model = onnx.load(str(file))
    pairs = [node for node in model.graph.node if node.op_type in ("QuantizeLinear", "DequantizeLinear")]
    zeros = [node.input[2] for node in pairs]
    assert len(set(zeros)) == len(zeros)
    weights = {node.output[0] for node in pairs if _of_weight(model, node)}
    assert not [n.name for n in model.graph.node if n.op_type == "Transpose" and n.input[0] in weights]


def test_every_token_gemm_becomes_an_integer_kernel(file: Path, tmp_path: Path, quantized: Quantized) -> None:
    """ONNX Runtime fuses a GEMM only where it has QuantizeLinear and DequantizeLinear of its own."""
    _run(file, _data(2), optimized_model_filepath=str(tmp_path / "optimized.onnx"))
    counts = Counter(node.op_type for node in onnx.load(str(tmp_path / "optimized.onnx")).graph.node)
    assert counts["MatMulIntegerToFloat"] == sum(layer.kind == "gemm" for layer in quantized.layers)


def test_one_layer_alone_is_what_converting_it_alone_gives(prepared: Prepared) -> None:
    inputs, path = _data(2, seed=5), "blocks.1.ff.0"
    others = [layer.path for layer in prepared.layers if layer.path != path]
    with prepared.quantizing([path]) as module, torch.no_grad():
        alone = module(inputs)[0]
    with torch.no_grad():
        converted, unquantized = prepared.convert(others).module(inputs)[0], prepared.module(inputs)[0]
    assert torch.allclose(alone, converted, atol=1e-6) and not torch.allclose(alone, unquantized, atol=1e-4)
    assert {layer.path: layer.kind for layer in prepared.convert(others).layers}[path] == "gemm"


def test_excluding_a_module_excludes_what_lies_in_it(prepared: Prepared) -> None:
    kinds = {layer.path: layer.kind for layer in prepared.convert(["blocks.0.mixer", "blocks.1.ff.2"]).layers}
    floats = {path for path, kind in kinds.items() if kind == "float"}
    assert floats == {f"blocks.0.mixer.{n}" for n in ("qc_proj.po", "qc_proj.se", "ag_proj")} | {"blocks.1.ff.2"}
    with pytest.raises(InputError, match=r"'blocks.7' is none of the layers"):
        prepared.convert(["blocks.7"])


def test_scales_do_not_depend_on_the_batch_size(encoder: nn.Module, quantized: Quantized) -> None:
    traced = _traced(encoder, {"x": torch.randn(2, TOKENS, 12)})
    again = prepare(traced, lambda module: [module({"x": part}) for part in _data()["x"].split(3)]).convert()
    for mine, theirs in zip(
        again.layers, quantized.layers, strict=True
    ):  # FP32 sums in another order move a value, not a range
        assert (mine.activation_scale or 0) == pytest.approx(theirs.activation_scale or 0, rel=0.02)


def test_zeros_leave_a_layer_in_float_or_refuse(encoder: nn.Module) -> None:
    traced = _traced(encoder, {"x": torch.randn(2, TOKENS, 12)})
    with pytest.raises(InputError, match="does not run through"):
        quantize(traced, lambda module: module({"x": torch.randn(2, 4, 5)}))
    dead = quantize(traced, lambda module: module({"x": torch.zeros(2, TOKENS, 12)}))
    first = dead.layers[0]
    assert first.kind == "float" and "zeros" in first.why and any(first.path in warning for warning in dead.warnings)


def test_a_model_without_weights_is_refused() -> None:
    traced = _traced(nn.Sequential(nn.ReLU()).eval(), {"input": torch.randn(2, 4, 8)})
    with pytest.raises(InputError, match="no layer with a weight"):
        quantize(traced, lambda module: module({"input": torch.randn(2, 4, 8)}))


@pytest.mark.parametrize("bad", [{"method": "entropy"}, {"weight_bits": 4}, {"percentile": 0.5}])
def test_options_refuse(bad: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="expected"):
        Options(**bad)


LAYERS = {
    "grouped": lambda: PoM(32, degree=3, expand=2, n_groups=4, n_sel_heads=4),
    "gate for each channel": lambda: PoM(32, degree=2, expand=2, n_sel_heads=1, bias=True),
    "cumulative": lambda: CumulativePoM(32, degree=3, expand=2),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_every_kind_of_mixer(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.LayerNorm(32), layer := LAYERS[kind]())
    if isinstance(layer, PoM):
        lively(layer)
    data = {"input": torch.randn(8, 20, 32)}
    found = quantize(_traced(model.eval(), {"input": data["input"][:2]}), lambda module: module(data), Options(weight_bits=7))
    graph = finish(translate(found.traced))
    lint(GraphContext(graph))
    ir.save(graph.model, tmp_path / "layer.onnx")
    with torch.no_grad():
        truth, eager = model(data["input"]).numpy(), found.module(data)[0].numpy()
    assert snr_db(eager, truth) > 20
    for exact in ({}, {"exact": True}):
        assert snr_db(_run(tmp_path / "layer.onnx", data, **exact)[0], eager) > 40
    for value in graph.model.graph.initializers.values():
        if value.dtype == ir.DataType.INT8 and value.const_value is not None:
            assert np.abs(value.const_value.numpy().astype(int)).max() <= 63


def test_convolution_stem() -> None:
    torch.manual_seed(0)
    config = ModelConfig(kind="classifier", dim=16, depth=1, image_size=8, patch_size=4, channels=1, num_classes=3)
    data = {"x": torch.randn(8, 1, 8, 8)}
    found = quantize(_traced(_lively(build_model(config)), {"x": data["x"][:2]}), lambda module: module(data))
    assert found.layers[0].path == "stem.proj" and found.layers[0].channels == 16
    assert lint(GraphContext(finish(translate(found.traced)))) is not None


def test_attention_beside_mixers(tmp_path: Path) -> None:
    """Projections of attention are quantized, products of two activations are not."""
    torch.manual_seed(0)
    config = ModelConfig(kind="encoder", dim=16, depth=2, input_dim=12, blocks=("full", "pom"), n_sel_heads=2)
    data = _data(8)
    found = quantize(_traced(_lively(build_model(config)), {"x": data["x"][:2]}), lambda module: module(data))
    inside = [layer.path for layer in found.layers if layer.path.startswith("blocks.0.mixer")]
    assert inside and all(layer.kind == "gemm" for layer in found.layers if layer.path in inside)
    graph = finish(translate(found.traced))
    products = [n for n in graph.model.graph if n.op_type == "MatMul" and str(n.name).startswith("blocks.0.mixer")]
    made = [[v.producer().op_type if v is not None and v.producer() else "" for v in n.inputs] for n in products]
    assert sum(kinds == ["DequantizeLinear"] * 2 for kinds in made) == len(inside)
    assert any("DequantizeLinear" not in kinds for kinds in made)


def test_recurrent_form_is_calibrated_on_chunks() -> None:
    torch.manual_seed(0)
    model = _lively(build_model(ModelConfig(kind="lm", dim=16, depth=2, vocab_size=32, n_sel_heads=1)))
    plan = recurrent(model, {"x": torch.randint(0, 32, (2, 8))}, Extent(), Extent())
    traced = trace_graph(plan.model, plan.mixers, plan.example, plan.axes, inside=plan.inside)
    tokens = torch.randint(0, 32, (4, 40), generator=torch.Generator().manual_seed(0))

    def calibrate(module: nn.Module) -> None:
        def execute(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            values = module({name: torch.from_numpy(array) for name, array in inputs.items()})
            return {name: value.numpy() for name, value in zip(traced.outputs, values[: len(traced.outputs)], strict=True)}

        plan.through(execute, {"x": tokens.numpy()}, [8] * 5)

    found = quantize(traced, calibrate)
    assert "blocks.0.mixer.qc_proj.po" in [layer.path for layer in found.layers]
    graph = finish(translate(found.traced))
    assert lint(GraphContext(graph)) is not None
    assert {str(value.name) for value in graph.model.graph.outputs} == set(traced.outputs)


def test_a_streamed_pass(encoder: nn.Module) -> None:
    plan = parallel(encoder, {"x": torch.randn(1, TOKENS, 12)}, Extent(1, 1, 1), Extent())
    boundary = Boundary(plan.model, plan.mixers)
    outputs, taps = boundary.run(plan.example)
    split = Splitter(boundary, plan.example, plan.axes, list(outputs), list(taps)).split(16)
    traced = trace_pass(split.passes[1], split, plan.mixers)
    generator = torch.Generator().manual_seed(0)
    feeds = [torch.randn(a.shape, generator=generator) if a.ndim > 1 else a for a in traced.arguments]
    found = quantize(traced, lambda module: module(*feeds))
    assert {"blocks.0.ff.0", "blocks.1.mixer.qc_proj.po"} <= {layer.path for layer in found.layers}
    counts = Counter(node.op_type for node in finish(translate(found.traced)).model.graph)
    assert counts["QuantizeLinear"] > 0


class _Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64).half(), nn.Linear(64, 8).half()

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (self.down(torch.relu(self.up(x.half()))).float(),)


def test_between_half_values_scales_are_half(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 5, 32)
    traced = Traced(trace(_Half().eval().requires_grad_(False), (x,), None), ["x"], ["y"], arguments=(x,))
    found = quantize(traced, lambda module: module(x))
    graph = finish(translate(found.traced))
    pairs = [node for node in graph.model.graph if node.op_type in ("QuantizeLinear", "DequantizeLinear")]
    assert {str(node.inputs[1].dtype) for node in pairs if node.inputs[1] is not None} == {"FLOAT16"}
    assert sum(node.op_type == "Cast" for node in graph.model.graph) == 2  # of the input and of the output
    ir.save(graph.model, tmp_path / "half.onnx")
    onnx.checker.check_model(str(tmp_path / "half.onnx"), full_check=True)
    with torch.no_grad():
        assert snr_db(_run(tmp_path / "half.onnx", {"x": x})[0], found.module(x)[0].numpy()) > 40
