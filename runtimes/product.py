"""What this machine's matrix products reach in ONNX Runtime: the bound beside the times of ``pom-edge bench``.

By the runtime and with the threads that run the artifacts: numpy's library is another one, and takes all cores.
"""

from __future__ import annotations

import numpy as np

from pom_edge.runtimes.onnxruntime_session import native_session

SIZE = 1024  # of the square product
_FLOAT = 1  # TensorProto.DataType

__all__ = ["Product"]


class Product:
    """A product x W of square FP32 matrices, W packed beforehand as a layer's weight is."""

    def __init__(self, threads: int | None = None) -> None:
        x, weight = np.random.default_rng(0).standard_normal((2, SIZE, SIZE)).astype(np.float32)
        self._inputs = {"x": x}
        self._session = native_session(product_file(weight), threads)

        self.operations = 2 * SIZE**3  # of a run

    def run(self) -> None:
        """Multiply once."""
        self._session.run(None, self._inputs)


def product_file(weight: np.ndarray) -> bytes:
    """The ONNX file of y = x W: x of W's own shape, (n, n). Without the package ``onnx``, which a device need not have.

    The numbers are those of onnx.proto: a message is fields, each its number and wire type, then an integer or a length and
    that many bytes.
    """
    rows, columns = weight.shape
    dims = b"".join(_bytes(1, _integer(1, size)) for size in (rows, columns))  # TensorShapeProto
    typed = _bytes(2, _bytes(1, _integer(1, _FLOAT) + _bytes(2, dims)))  # ValueInfoProto.type
    tensor = _integer(1, rows) + _integer(1, columns) + _integer(2, _FLOAT) + _bytes(8, b"w")
    tensor += _bytes(9, np.ascontiguousarray(weight, "<f4").tobytes())
    node = _bytes(1, b"x") + _bytes(1, b"w") + _bytes(2, b"y") + _bytes(4, b"MatMul")
    graph = _bytes(1, node) + _bytes(2, b"product") + _bytes(5, tensor)
    graph += _bytes(11, _bytes(1, b"x") + typed) + _bytes(12, _bytes(1, b"y") + typed)
    return _integer(1, 8) + _bytes(7, graph) + _bytes(8, _integer(2, 17))  # IR version 8, opset 17


def _integer(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _bytes(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    """Seven bits a byte, the lowest first; the eighth says that more follow."""
    made = bytearray()
    while value > 0x7F:
        made.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*made, value])
