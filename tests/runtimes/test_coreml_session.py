"""The MIL evaluator: each operator against torch, and packages that are damaged, foreign or beyond it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pom_edge.bundle import Artifact, GoldenCase, TensorSpec
from pom_edge.errors import BundleError, InputError
from pom_edge.runtimes.fitting import run_fitting
from pom_edge.runtimes.mil_operators import OPERATORS
from pom_edge.runtimes.stepping import run_rows

pytest.importorskip("coremltools", reason="needs pip install 'pom-edge[coreml]'")

A = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0)) * 3
P = A.abs() + 0.1
W = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
V = torch.randn(4, generator=torch.Generator().manual_seed(2))
WHOLE = torch.tensor([-7, -1, 0, 5, 300], dtype=torch.int32)
X4 = torch.randn(2, 4, 7, 6, generator=torch.Generator().manual_seed(3))
K4 = torch.randn(6, 2, 3, 2, generator=torch.Generator().manual_seed(4))
B6 = torch.randn(6, generator=torch.Generator().manual_seed(5))

CASES: list[tuple[str, dict[str, Any], Callable[[], Any]]] = [
    ("add", {"x": A, "y": V}, lambda: A + V),
    ("sub", {"x": A, "y": V}, lambda: A - V),
    ("mul", {"x": A, "y": V}, lambda: A * V),
    ("real_div", {"x": A, "y": V}, lambda: A / V),
    ("floor_div", {"x": WHOLE, "y": np.int32(2)}, lambda: torch.div(WHOLE, 2, rounding_mode="floor")),
    ("floor_div", {"x": A, "y": np.float32(0.7)}, lambda: torch.div(A, 0.7, rounding_mode="floor")),
    ("mod", {"x": WHOLE, "y": np.int32(256)}, lambda: torch.remainder(WHOLE, 256)),
    ("pow", {"x": P, "y": np.float32(1.5)}, lambda: P**1.5),
    ("maximum", {"x": A, "y": V}, lambda: torch.maximum(A, V)),
    ("minimum", {"x": A, "y": V}, lambda: torch.minimum(A, V)),
    ("equal", {"x": WHOLE, "y": np.int32(5)}, lambda: WHOLE == 5),
    ("not_equal", {"x": WHOLE, "y": np.int32(5)}, lambda: WHOLE != 5),
    ("greater", {"x": A, "y": V}, lambda: A > V),
    ("greater_equal", {"x": WHOLE, "y": np.int32(0)}, lambda: WHOLE >= 0),
    ("less", {"x": A, "y": V}, lambda: A < V),
    ("less_equal", {"x": WHOLE, "y": np.int32(0)}, lambda: WHOLE <= 0),
    ("logical_and", {"x": A > 0, "y": V > 0}, lambda: (A > 0) & (V > 0)),
    ("logical_or", {"x": A > 0, "y": V > 0}, lambda: (A > 0) | (V > 0)),
    ("logical_xor", {"x": A > 0, "y": V > 0}, lambda: (A > 0) ^ (V > 0)),
    ("logical_not", {"x": A > 0}, lambda: ~(A > 0)),
    ("abs", {"x": A}, lambda: A.abs()),
    ("ceil", {"x": A}, lambda: A.ceil()),
    ("cos", {"x": A}, lambda: A.cos()),
    ("erf", {"x": A}, lambda: A.double().erf()),
    ("exp", {"x": A}, lambda: A.exp()),
    ("floor", {"x": A}, lambda: A.floor()),
    ("identity", {"x": A}, lambda: A),
    ("relu", {"x": A}, lambda: A.relu()),
    ("round", {"x": A}, lambda: A.round()),
    ("sigmoid", {"x": A}, lambda: A.sigmoid()),
    ("sign", {"x": WHOLE}, lambda: WHOLE.sign()),
    ("silu", {"x": A}, lambda: F.silu(A)),
    ("sin", {"x": A}, lambda: A.sin()),
    ("softplus", {"x": A}, lambda: F.softplus(A)),
    ("sqrt", {"x": P}, lambda: P.sqrt()),
    ("square", {"x": A}, lambda: A**2),
    ("tanh", {"x": A}, lambda: A.tanh()),
    ("reduce_mean", {"x": A, "axes": [-1], "keep_dims": True}, lambda: A.mean(-1, keepdim=True)),
    ("reduce_sum", {"x": A, "axes": [0, 2]}, lambda: A.sum((0, 2))),
    ("reduce_max", {"x": A, "axes": [1]}, lambda: A.amax(1)),
    ("reduce_min", {"x": A, "axes": [1]}, lambda: A.amin(1)),
    ("reduce_prod", {"x": A, "axes": [1]}, lambda: A.prod(1)),
    ("reduce_sum_square", {"x": A, "axes": [1]}, lambda: (A**2).sum(1)),
    ("reduce_l2_norm", {"x": A, "axes": [1]}, lambda: A.norm(dim=1)),
    ("band_part", {"x": A, "lower": 0, "upper": -1}, lambda: A.triu()),
    ("band_part", {"x": A, "lower": -1, "upper": 0}, lambda: A.tril()),
    (
        "batch_norm",
        {"x": X4, "mean": V, "variance": V.abs() + 0.1, "gamma": V, "beta": V, "epsilon": 1e-3},
        lambda: F.batch_norm(X4, V, V.abs() + 0.1, V, V, eps=1e-3),
    ),
    ("cast", {"x": A, "dtype": "int32"}, lambda: A.int()),
    ("cast", {"x": WHOLE, "dtype": "fp32"}, lambda: WHOLE.float()),
    ("clip", {"x": A, "alpha": np.float32(-0.1), "beta": np.float32(6)}, lambda: A.clamp(-0.1, 6)),
    ("concat", {"values": [A, P], "axis": 1}, lambda: torch.cat((A, P), 1)),
    ("conv", {"x": X4, "weight": K4, "bias": B6, "groups": 2}, lambda: F.conv2d(X4, K4, B6, groups=2)),
    (
        "conv",
        {"x": X4, "weight": K4, "strides": [2, 1], "pad_type": "custom", "pad": [1, 1, 2, 2], "dilations": [1, 2], "groups": 2},
        lambda: F.conv2d(X4, K4, stride=(2, 1), padding=(1, 2), dilation=(1, 2), groups=2),
    ),
    (
        "conv",
        {"x": X4, "weight": K4, "pad_type": "same", "groups": 2},
        lambda: F.conv2d(X4, K4, padding="same", groups=2),
    ),
    ("cumsum", {"x": A, "axis": -1}, lambda: A.cumsum(-1)),
    ("cumsum", {"x": A, "axis": -1, "exclusive": True}, lambda: A.cumsum(-1) - A),
    ("cumsum", {"x": A, "axis": 1, "reverse": True}, lambda: A.flip(1).cumsum(1).flip(1)),
    ("expand_dims", {"x": A, "axes": [1, -1]}, lambda: A.unsqueeze(1).unsqueeze(-1)),
    ("fill", {"shape": [2, 3], "value": np.float32(1.5)}, lambda: torch.full((2, 3), 1.5)),
    ("gather", {"x": W, "indices": np.array([[0, 4], [2, 2]]), "axis": 0}, lambda: W[torch.tensor([[0, 4], [2, 2]])]),
    (
        "gather",
        {"x": A, "indices": np.array([[0, 2], [1, 1]]), "axis": 1, "batch_dims": 1},
        lambda: torch.stack((A[0][[0, 2]], A[1][[1, 1]])),
    ),
    (
        "gather_along_axis",
        {"x": W, "indices": np.array([[1, 0, 3, 2]]), "axis": 0},
        lambda: W.gather(0, torch.tensor([[1, 0, 3, 2]])),
    ),
    ("gelu", {"x": A, "mode": "EXACT"}, lambda: F.gelu(A.double())),
    ("gelu", {"x": A, "mode": "TANH_APPROXIMATION"}, lambda: F.gelu(A, approximate="tanh")),
    ("inverse", {"x": P, "epsilon": np.float32(0)}, lambda: 1 / P),
    ("layer_norm", {"x": A, "axes": [-1], "gamma": V, "beta": V, "epsilon": 1e-3}, lambda: F.layer_norm(A, (4,), V, V, 1e-3)),
    ("leaky_relu", {"x": A, "alpha": np.float32(0.01)}, lambda: F.leaky_relu(A)),
    ("linear", {"x": A, "weight": W, "bias": W[:, 0]}, lambda: F.linear(A, W, W[:, 0])),
    ("log", {"x": P}, lambda: P.log()),
    ("matmul", {"x": A, "y": W, "transpose_y": True}, lambda: A @ W.t()),
    ("matmul", {"x": A, "y": A, "transpose_x": True}, lambda: A.transpose(1, 2) @ A),
    ("pad", {"x": A, "pad": [1, 2], "constant_val": np.float32(3)}, lambda: F.pad(A, (1, 2), value=3)),
    ("pad", {"x": A, "pad": [1, 0, 0, 2], "mode": "reflect"}, lambda: F.pad(A[None], (0, 2, 1, 0), mode="reflect")[0]),
    ("pad", {"x": A, "pad": [0, 2], "mode": "replicate"}, lambda: F.pad(A, (0, 2), mode="replicate")),
    ("range_1d", {"start": np.int32(2), "end": np.int32(9), "step": np.int32(3)}, lambda: torch.arange(2, 9, 3)),
    ("reshape", {"x": A, "shape": [0, -1]}, lambda: A.flatten(1)),
    ("rsqrt", {"x": P}, lambda: P.rsqrt()),
    ("select", {"cond": A > 0, "a": A, "b": P}, lambda: torch.where(A > 0, A, P)),
    ("shape", {"x": A}, lambda: torch.tensor(A.shape)),
    ("sigmoid_hard", {"x": A, "alpha": np.float32(1 / 6), "beta": np.float32(0.5)}, lambda: F.hardsigmoid(A)),
    (
        "slice_by_index",
        {"x": A, "begin": [0, 1, 0], "end": [2, 2, -1], "stride": [1, 1, 2], "squeeze_mask": [False, True, False]},
        lambda: A[:, 1, :-1:2],
    ),
    (
        "slice_by_index",
        {"x": A, "begin": [0, 9, -2], "end": [0, 1, 0], "begin_mask": [1, 1, 0], "end_mask": [1, 0, 1]},
        lambda: A[:, :1, -2:],
    ),
    ("slice_by_size", {"x": A, "begin": [1, 0, 2], "size": [1, -1, 2]}, lambda: A[1:2, :, 2:4]),
    ("softmax", {"x": A, "axis": 1}, lambda: A.softmax(1)),
    ("split", {"x": A, "axis": 2, "num_splits": 2}, lambda: A.split(2, 2)),
    ("split", {"x": A, "axis": 1, "split_sizes": [1, 2]}, lambda: A.split([1, 2], 1)),
    ("squeeze", {"x": A[:1, :, :1], "axes": [-1]}, lambda: A[:1, :, 0]),
    ("stack", {"values": [A, P], "axis": 2}, lambda: torch.stack((A, P), 2)),
    ("tile", {"x": A, "reps": [2, 1, 3]}, lambda: A.repeat(2, 1, 3)),
    ("transpose", {"x": A, "perm": [2, 0, 1]}, lambda: A.permute(2, 0, 1)),
    (
        "quantize",
        {"input": A, "scale": np.float32(0.05), "output_dtype": "int8"},
        lambda: torch.quantize_per_tensor(A, 0.05, 0, torch.qint8).int_repr(),
    ),
    (
        "dequantize",
        {"input": np.array([[-3, 7], [1, 2]], np.int8), "scale": np.array([0.5, 2], np.float32), "axis": 0},
        lambda: torch.tensor([[-1.5, 3.5], [2, 4]]),
    ),
    (
        "constexpr_affine_dequantize",
        {
            "quantized_data": np.array([[-3, 7], [1, 2]], np.int8),
            "scale": np.array([0.5, 2], np.float32),
            "zero_point": np.array([1, 0], np.int8),
            "axis": 1,
        },
        lambda: torch.tensor([[-2.0, 14], [0, 4]]),
    ),
    (
        "constexpr_blockwise_shift_scale",
        {"data": np.array([[-3, 7, 1, 2]], np.int8), "scale": np.array([[0.5, 2]], np.float32)},
        lambda: torch.tensor([[-1.5, 3.5, 2, 4]]),
    ),
    (
        "constexpr_lut_to_dense",
        {"indices": np.array([0b11100100], np.uint8), "lut": np.array([1, 2, 4, 8], np.float32), "shape": [2, 2]},
        lambda: torch.tensor([[1.0, 2], [4, 8]]),
    ),
]


def test_every_operator_has_a_case() -> None:
    assert {name for name, _, _ in CASES} == set(OPERATORS)


@pytest.mark.parametrize(("name", "arguments", "truth"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_operator_is_that_of_torch(name: str, arguments: dict[str, Any], truth: Callable[[], Any]) -> None:
    def plain(value: Any) -> Any:
        if isinstance(value, list) and value and isinstance(value[0], Tensor):
            return [plain(each) for each in value]
        if isinstance(value, list):
            return np.array(value)
        return value.numpy() if isinstance(value, Tensor) else value

    found, expected = OPERATORS[name](**{key: plain(value) for key, value in arguments.items()}), truth()
    pairs = zip(found, expected, strict=True) if isinstance(found, list) else [(found, expected)]
    for array, tensor in pairs:
        assert np.asarray(array).shape == tuple(tensor.shape)
        np.testing.assert_allclose(array, tensor.numpy(), rtol=3e-6, atol=1e-6)


def _artifact(shape: list[int | str], form: str = "parallel", axes: dict[str, int] | None = None) -> Artifact:
    spec = TensorSpec(name="x", dtype="float32", shape=shape, bounds={"tokens": (2, 8)})
    return Artifact(
        target="coreml",
        form=form,
        precision="fp16",
        file="a.mlpackage",
        files=[],
        inputs=[spec],
        outputs=[],
        verified="test",
        token_axes=axes or {},
    )


@pytest.mark.parametrize(
    ("shape", "length", "chunks", "expected"),
    [
        ([1, 8, 3], 8, [], True),
        ([1, 8, 3], 7, [], False),
        ([1, "tokens", 3], 8, [], True),
        ([1, "tokens", 3], 9, [], False),
        ([1, 2, 3], 8, [2, 2, 2, 2], True),
        ([1, 2, 3], 8, [2, 6], False),
    ],
)
def test_cases_of_other_shapes_are_left_out(shape: list[int | str], length: int, chunks: list[int], expected: bool) -> None:
    artifact = _artifact(shape, "recurrent" if chunks else "parallel", {"x": 1} if chunks else None)
    case = GoldenCase(name="a", kind="random", description="", inputs={}, outputs={}, chunks=chunks)
    x = np.ones((1, length, 3), np.float32)
    found = run_fitting(lambda inputs: {"y": 2 * inputs["x"]}, artifact, case, {"x": x})
    assert (found is not None) is expected
    assert found is None or np.array_equal(found["y"], 2 * x)


def test_more_sequences_than_a_package_takes_go_through_it_in_parts() -> None:
    x = np.arange(12.0).reshape(6, 2)
    seen = []

    def run(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        seen.append(inputs["x"].shape[0])
        return {"y": inputs["x"] * inputs["scale"]}

    found = run_rows(run, {"x": x, "scale": np.array(2.0)}, 2)
    assert seen == [2, 2, 2]
    np.testing.assert_array_equal(found["y"], 2 * x)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """y = relu(x W), in FP32."""
    from pom_edge.export.coreml_package import convert, save_package
    from pom_edge.export.onnx_graph import trace_graph

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(40, 40, generator=torch.Generator().manual_seed(0)))

        def forward(self, x: Tensor) -> Tensor:
            return (x @ self.weight).relu()

    path = tmp_path_factory.mktemp("package") / "a.mlpackage"
    traced = trace_graph(Model(), [], {"x": torch.randn(1, 3, 40)}, {"x": [1, 3, 40]})
    save_package(convert(traced, None), path, {})
    return path


def _copy(package: Path, tmp_path: Path) -> Path:
    import shutil

    return Path(shutil.copytree(package, tmp_path / package.name))


def test_a_deleted_weight_file_is_named(package: Path, tmp_path: Path) -> None:
    from pom_edge.runtimes.mil_program import WEIGHTS, MilProgram

    broken = _copy(package, tmp_path)
    (broken / WEIGHTS / "weight.bin").unlink()
    with pytest.raises(BundleError, match=r"weight file weight\.bin is missing"):
        MilProgram(broken)


def test_an_unknown_operator_is_named(package: Path, tmp_path: Path) -> None:
    from coremltools.proto import Model_pb2

    from pom_edge.runtimes.mil_program import MilProgram, model_file

    foreign = _copy(package, tmp_path)
    spec = Model_pb2.Model()
    spec.ParseFromString(model_file(foreign).read_bytes())
    (block,) = spec.mlProgram.functions["main"].block_specializations.values()
    next(operation for operation in block.operations if operation.type == "relu").type = "crop_resize"
    model_file(foreign).write_bytes(spec.SerializeToString())
    with pytest.raises(InputError, match="operator 'crop_resize'"):
        MilProgram(foreign)


def test_what_is_no_package_is_refused(package: Path, tmp_path: Path) -> None:
    from pom_edge.runtimes.mil_program import MilProgram, model_file

    foreign = _copy(package, tmp_path)
    model_file(foreign).write_bytes(b"no protobuf at all")
    with pytest.raises(BundleError, match="not a Core ML model|holds no ML program"):
        MilProgram(foreign)
