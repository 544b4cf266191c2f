"""Load compiled kernels and launch them through the driver's own interface.

Nothing is built as an extension. Kernels run in torch's context and on its stream.

``DryRunDriver`` has the same methods, runs nothing and needs no GPU. It refuses calls that a GPU would
refuse: a kernel that a file does not hold, and more shared memory or threads than a block can have.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

MOST_SHARED, MOST_THREADS = 227 * 1024, 1024  # of a block on compute capability 9.0
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_EARLY = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION

# numbers are 64 bits wide, or 32 where the kernel's parameter is an int: see Int
Argument = int | ctypes.Structure


class Int(int):
    """An argument of 32 bits."""


class _Attribute(ctypes.Structure):
    _fields_ = (
        ("id", ctypes.c_int),
        ("pad", ctypes.c_int),
        ("value", ctypes.c_int),
        ("rest", ctypes.c_char * 60),
    )


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


def _check_launch(name: str, threads: int, shared: int) -> None:
    if shared > MOST_SHARED or not 0 < threads <= MOST_THREADS or threads % 32:
        raise ValueError(
            f"{name}: a block of {threads} threads with {shared} bytes of shared memory does not fit"
        )


class Driver:
    """The CUDA driver by ``ctypes``.

    Kernels run on torch's current stream, so that torch's events and graphs see them.
    """

    dry = False

    def __init__(self) -> None:
        torch.zeros(1, device="cuda")  # makes the context of the device current
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self._functions: dict[tuple[Path, str], ctypes.c_void_p] = {}
        self._modules: dict[Path, ctypes.c_void_p] = {}

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._cuda, name)(*arguments)
        if code != 0:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorName(code, ctypes.byref(text))
            raise RuntimeError(f"{name}: {(text.value or b'error').decode()} ({code})")

    def function(self, path: Path, name: str) -> ctypes.c_void_p:
        """Return the kernel of a file, which is loaded once.

        The kernel may then use all of the shared memory.
        """
        if path not in self._modules:
            self._modules[path] = ctypes.c_void_p()
            self._call("cuModuleLoadData", ctypes.byref(self._modules[path]), path.read_bytes())
        if (path, name) not in self._functions:
            found = ctypes.c_void_p()
            self._call("cuModuleGetFunction", ctypes.byref(found), self._modules[path], name.encode())
            self._functions[path, name] = found
        return self._functions[path, name]

    def launch(
        self,
        path: Path,
        name: str,
        blocks: int,
        threads: int,
        shared: int,
        arguments: Sequence[Argument],
        *,
        early: bool = False,
    ) -> None:
        """Launch a kernel.

        With ``early`` it may begin while the kernel before it ends.
        """
        _check_launch(name, threads, shared)
        function = self.function(path, name)
        if shared:
            self._call("cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED, shared)
        given = [
            argument
            if isinstance(argument, ctypes.Structure)
            else (ctypes.c_int if isinstance(argument, Int) else ctypes.c_int64)(argument)
            for argument in arguments
        ]
        pointers = (ctypes.c_void_p * len(given))(*(ctypes.addressof(argument) for argument in given))
        attribute = _Attribute(_EARLY, 0, 1)
        size = ctypes.c_uint * 3
        stream = torch.cuda.current_stream().cuda_stream
        config = _Config(
            size(blocks, 1, 1), size(threads, 1, 1), shared, stream, ctypes.pointer(attribute), int(early)
        )
        self._call("cuLaunchKernelEx", ctypes.byref(config), function, pointers, None)

    def zeros(self, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """Return zeros on the device."""
        return torch.zeros(shape, dtype=dtype, device="cuda")

    def us(self, call: Callable[[int], object], times: int = 20) -> float:
        """Return the median microseconds of a call in a graph of calls.

        Each call gets its number. Launches are not in the time.
        """
        call(0)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for number in range(times):
                call(number)
        found = []
        for _ in range(5):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            found.append(1e3 * begin.elapsed_time(end) / times)
        return float(sorted(found)[2])


class DryRunDriver:
    """A driver that launches nothing and lists the launches."""

    dry = True

    def __init__(self) -> None:
        self.launched: list[tuple[str, int, int, int]] = []

    def function(self, path: Path, name: str) -> None:
        """Raise ValueError where the file does not hold the kernel."""
        if f".text.{name}\0".encode() not in path.read_bytes():
            raise ValueError(f"{path} holds no kernel {name}")

    def launch(
        self,
        path: Path,
        name: str,
        blocks: int,
        threads: int,
        shared: int,
        arguments: Sequence[Argument],
        *,
        early: bool = False,
    ) -> None:
        """Check the launch."""
        self.function(path, name)
        _check_launch(name, threads, shared)
        self.launched.append((name, blocks, threads, shared))

    def zeros(self, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """Return zeros on the CPU."""
        return torch.zeros(shape, dtype=dtype)

    def us(self, call: Callable[[int], object], times: int = 20) -> float:
        """Call once and return NaN."""
        call(0)
        return float("nan")


AnyDriver = Driver | DryRunDriver
