"""Device memory, copies, a stream and graphs, through cuda-python; every error becomes an exception."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pom_edge.errors import InputError, MissingToolError, PomError
from pom_edge.system import human_bytes

ALIGNMENT = 256

__all__ = ["Cuda", "DeviceBuffer", "cuda_missing"]


class Cuda:
    """One stream of one device.

    Raises:
        MissingToolError: cuda-python is not installed, or there is no device.
    """

    def __init__(self) -> None:
        self._api = _import()
        self.stream: Any = _checked(self._api.cudaStreamCreate())

    @property
    def handle(self) -> int:
        """The stream as a number, as TensorRT takes it."""
        return int(self.stream)

    def allocate(self, size: int) -> int:
        """Address of so many bytes on the device."""
        return int(_checked(self._api.cudaMalloc(max(size, ALIGNMENT)), size))

    def free(self, address: int) -> None:
        """Give them back."""
        _checked(self._api.cudaFree(address))

    def upload(self, address: int, array: np.ndarray) -> None:
        """Queue a copy to the device; the array must live until :meth:`wait`."""
        kind = self._api.cudaMemcpyKind.cudaMemcpyHostToDevice
        _checked(self._api.cudaMemcpyAsync(address, array.ctypes.data, array.nbytes, kind, self.stream))

    def download(self, array: np.ndarray, address: int) -> None:
        """Queue a copy from the device; the array holds it after :meth:`wait`."""
        kind = self._api.cudaMemcpyKind.cudaMemcpyDeviceToHost
        _checked(self._api.cudaMemcpyAsync(array.ctypes.data, address, array.nbytes, kind, self.stream))

    def copy(self, target: int, source: int, size: int) -> None:
        """Queue a copy on the device."""
        kind = self._api.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        _checked(self._api.cudaMemcpyAsync(target, source, size, kind, self.stream))

    def wait(self) -> None:
        """Until everything that is queued is done."""
        _checked(self._api.cudaStreamSynchronize(self.stream))

    def capture(self, enqueue: Callable[[], None]) -> Any:
        """What ``enqueue`` queues as one graph, not run yet; None where it cannot be captured."""
        mode = self._api.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        _checked(self._api.cudaStreamBeginCapture(self.stream, mode))
        refused = False
        try:
            enqueue()
        except PomError:  # it runs all the same, without a graph
            refused = True
        ended = self._api.cudaStreamEndCapture(self.stream)
        if refused or int(ended[0]) != 0:
            self._api.cudaGetLastError()  # a failed capture stays as the last error otherwise
            return None
        graph = _checked(self._api.cudaGraphInstantiate(ended[1], 0))
        _checked(self._api.cudaGraphDestroy(ended[1]))
        return graph

    def launch(self, graph: Any) -> None:
        """Queue a captured graph."""
        _checked(self._api.cudaGraphLaunch(graph, self.stream))

    def release(self, graph: Any) -> None:
        """Give a captured graph back."""
        _checked(self._api.cudaGraphExecDestroy(graph))

    def close(self) -> None:
        """Give the stream back."""
        if self.stream is not None:
            _checked(self._api.cudaStreamDestroy(self.stream))
            self.stream = None


class DeviceBuffer:
    """Device memory that grows when more is asked for.

    Attributes:
        address: 0 before the first :meth:`reserve`.
    """

    def __init__(self, cuda: Cuda) -> None:
        self._cuda, self.address, self.size = cuda, 0, 0

    def reserve(self, size: int) -> int:
        """Address of at least so many bytes; what was in a smaller buffer is gone."""
        if not self.address or size > self.size:
            self.close()
            self.address, self.size = self._cuda.allocate(size), size
        return self.address

    def close(self) -> None:
        """Give it back."""
        if self.address:
            self._cuda.free(self.address)
            self.address, self.size = 0, 0


def _import() -> Any:
    try:
        from cuda.bindings import runtime
    except ImportError:
        try:
            from cuda import cudart as runtime  # before cuda-python 12.6.1
        except ImportError as error:
            raise MissingToolError(
                "cuda-python is not installed, and engines need it. Run: pip install 'pom-edge[trt]' (on a Jetson: "
                "'pom-edge[jetson]')"
            ) from error
    return runtime


def cuda_missing() -> str:
    """Why cuda-python does not work here; empty where it does."""
    try:
        _import()
    except MissingToolError as error:
        return str(error)
    return ""


def _checked(answer: Any, size: int | None = None) -> Any:
    """What a call of cuda-python answers after its status.

    Raises:
        InputError: there is not enough device memory.
        MissingToolError: no device, or a driver that is too old.
    """
    status, *values = answer
    if int(status) == 0:
        return values[0] if values else None
    name = getattr(status, "name", str(status))
    if "MemoryAllocation" in name:
        asked = "" if size is None else f" for {human_bytes(size)}"
        raise InputError(f"the device has no memory{asked}: shorter inputs, a smaller batch, or --form streamed take less")
    if "NoDevice" in name or "Insufficient" in name or "Initialization" in name:
        raise MissingToolError(f"CUDA does not start here ({name}): no NVIDIA GPU, or a driver that is too old")
    raise InputError(f"CUDA reports {name}; the session cannot go on, open another one")
