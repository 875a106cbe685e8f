"""CUDA's streams, events and memory on a CPU, where all is done at once: what `CudaPool` uses of them.

Triton's interpreter runs the kernels. So tests without a GPU see which addresses are copied where. They do
not see what runs at the same time.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from baton.kv_transfer import cuda_memory


class Stream:
    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        assert event.recorded, "no stream may wait for an event that is not recorded"

    def synchronize(self) -> None:
        pass


class Event:
    recorded = False

    def record(self, stream: Any = None) -> None:
        self.recorded = True

    def query(self) -> bool:
        return self.recorded


class Memory:
    """The driver's calls. It refuses copies beyond the memory that it has given."""

    def __init__(self) -> None:
        self._given: dict[int, Any] = {}

    def call(self, name: str, *args: Any) -> None:
        getattr(self, name)(*args)

    def cuMemAlloc_v2(self, address: Any, size: int) -> None:
        memory = ctypes.create_string_buffer(size)
        address._obj.value = ctypes.addressof(memory)
        self._given[ctypes.addressof(memory)] = memory

    def cuMemsetD8_v2(self, address: int, byte: int, size: int) -> None:
        ctypes.memset(address, byte, size)

    def cuMemcpyHtoD_v2(self, to: int, source: bytes, size: int) -> None:
        ctypes.memmove(to, source, size)

    def cuMemcpyAsync(self, to: int, source: int, size: int, stream: int) -> None:
        for start, memory in self._given.items():
            if start <= source < start + len(memory):
                assert source + size <= start + len(memory), "a copy from beyond the end of exported memory"
        ctypes.memmove(to, source, size)

    def cuIpcGetMemHandle(self, handle: Any, address: int) -> None:
        pass

    def cuMemGetAddressRange_v2(self, base: Any, size: Any, address: int) -> None:
        base._obj.value, size._obj.value = address, len(self._given[address])


def use(patch: pytest.MonkeyPatch) -> None:
    """Until `patch` is undone, a `CudaPool` may be made over tensors of the CPU."""
    patch.setattr(cuda_memory, "_call", Memory().call)
    registered = SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0)
    stand_ins: dict[str, Callable[..., Any]] = {
        "Stream": Stream, "Event": Event, "stream": contextlib.nullcontext, "device": contextlib.nullcontext,
        "current_stream": Stream, "set_device": lambda _: None, "synchronize": lambda _=None: None,
        "cudart": lambda: registered,
    }  # fmt: skip
    for name, stand_in in stand_ins.items():
        patch.setattr(torch.cuda, name, stand_in)
    patch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)
    for name in ("empty", "tensor"):
        patch.setattr(torch, name, partial(_unpinned, getattr(torch, name)))


def _unpinned(make: Callable[..., torch.Tensor], *args: Any, pin_memory: bool = False, **more: Any) -> Any:
    return make(*args, **more)
