"""The product whose rate is the bound: a valid ONNX file, read by onnx and by the runtime, that multiplies."""

from __future__ import annotations

import numpy as np
import onnx

from pom_edge.runtimes.onnxruntime_session import native_session
from pom_edge.runtimes.product import product_file


def test_the_file_is_valid_and_multiplies() -> None:
    x, weight = np.random.default_rng(1).standard_normal((2, 20, 20)).astype(np.float32)
    model = onnx.load_from_string(product_file(weight))
    onnx.checker.check_model(model, full_check=True)
    np.testing.assert_array_equal(onnx.numpy_helper.to_array(model.graph.initializer[0]), weight)
    (y,) = native_session(product_file(weight)).run(None, {"x": x})
    np.testing.assert_allclose(y, x.astype(np.float64) @ weight, atol=1e-5)
