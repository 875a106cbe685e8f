"""CUDA's streams, events and memory on a CPU: what `CudaPool` and others use of them.

Triton's interpreter runs the kernels. So tests without a GPU see which addresses are copied where, and in
which order. Each stream has its work in a queue. A stream that is *late* does its work only when another
stream or the host waits for it, and the others do theirs as soon as no event holds it back. So where a wait
is missing, a late stream shows it.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections import deque
from collections.abc import Callable, Collection, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeGuard

import pytest
import torch

from baton.kv_transfer.device import copy_kernels
from baton.system import cuda_driver

Work = Callable[[], object]
LOOKS = 50
"""At an event until it has passed, if nothing waits for it."""

_streams: list[Stream] = []
_current: list[Stream] = []
_late: set[int] = set()
_kept: list[torch.Tensor] = []  # on a GPU, memory of a stream goes to later work of this stream only


class _Mark:
    """A place in the work of a stream. In that of another stream it is a wait."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.passed = False
        self.looks = 0


class Stream:
    """Number 0 is the default stream, and the others are numbered as they were made."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.cuda_stream = len(_streams)
        self.captured: list[Work] | None = None
        self._work: deque[_Mark | Work] = deque()
        _streams.append(self)

    def launch(self, work: Work) -> None:
        if self.captured is not None:
            self.captured.append(work)
            return
        self._work.append(work)
        _go_on()

    def mark(self) -> _Mark:
        self._work.append(mark := _Mark(self))
        _go_on()
        return mark

    def wait_event(self, event: Event) -> None:
        assert event.mark is not None, "no stream may wait for an event that is not recorded"
        if event.mark.stream is not self:
            self._work.append(event.mark)
            _go_on()

    def wait_stream(self, other: Stream) -> None:
        if other is not self:
            self._work.append(other.mark())
            _go_on()

    def synchronize(self) -> None:
        self.reach(self.mark())

    def reach(self, mark: _Mark) -> None:
        """Does the work up to the mark, and that of other streams for which it waits."""
        while not mark.passed:
            first = self._work[0]
            if self._is_held_back_by(first):
                first.stream.reach(first)
            else:
                self._do_first()
        _go_on()

    def _is_held_back_by(self, first: _Mark | Work) -> TypeGuard[_Mark]:
        return isinstance(first, _Mark) and first.stream is not self and not first.passed

    def _do_first(self) -> None:
        work = self._work.popleft()
        if not isinstance(work, _Mark):
            work()
        elif work.stream is self:
            work.passed = True

    def go_on(self) -> bool:
        """Does what no event holds back. Returns whether there was some."""
        done = False
        while self._work and not self._is_held_back_by(self._work[0]):
            self._do_first()
            done = True
        return done


class Event:
    def __init__(self, **_: Any) -> None:
        self.mark: _Mark | None = None

    def record(self, stream: Stream | None = None) -> None:
        self.mark = (stream or _current[-1]).mark()

    def query(self) -> bool:
        """The device gets there while the host looks often."""
        if self.mark is not None and not self.mark.passed:
            self.mark.looks += 1
            if self.mark.looks < LOOKS:
                return False
        self.synchronize()
        return True

    def synchronize(self) -> None:
        if self.mark is not None:
            self.mark.stream.reach(self.mark)


class Graph:
    """A CUDA graph without memory of its own."""

    def __init__(self) -> None:
        self._work: list[Work] = []

    def capture_begin(self, *_: Any, **__: Any) -> None:
        _current[-1].captured = self._work

    def capture_end(self) -> None:
        _current[-1].captured = None

    def replay(self) -> None:
        for work in self._work:
            launch(work)


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
        _streams[stream].launch(partial(ctypes.memmove, to, source, size))

    def cuIpcGetMemHandle(self, handle: Any, address: int) -> None:
        pass

    def cuMemGetAddressRange_v2(self, base: Any, size: Any, address: int) -> None:
        base._obj.value, size._obj.value = address, len(self._given[address])


class _Kernel:
    """Launches a kernel on the current stream."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, **named: launch(partial(self._kernel[grid], *args, **named))


def launch(work: Work) -> None:
    """Work for the current stream."""
    _current[-1].launch(work)


def be_late(streams: Collection[int]) -> None:
    """From now on, these streams are late, and no others."""
    _late.clear()
    _late.update(streams)
    _go_on()


def use(patch: pytest.MonkeyPatch) -> None:
    """Until `patch` is undone, there is a GPU with memory of the CPU. None of its streams is late."""
    for state in (_streams, _current, _late, _kept):
        state.clear()
    _current.append(Stream())
    patch.setattr(cuda_driver, "call", Memory().call)
    registered = SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0)
    stand_ins: dict[str, Callable[..., Any]] = {
        "Stream": Stream, "Event": Event, "CUDAGraph": Graph, "graph_pool_handle": lambda: None,
        "stream": _on, "device": contextlib.nullcontext, "current_stream": lambda _=None: _current[-1],
        "set_device": lambda _: None, "synchronize": _synchronize, "cudart": lambda: registered,
    }  # fmt: skip
    for name, stand_in in stand_ins.items():
        patch.setattr(torch.cuda, name, stand_in)
    for name in ("_copy", "_sum", "_convert"):
        patch.setattr(copy_kernels, name, _Kernel(getattr(copy_kernels, name)))
    for name in ("empty", "zeros", "tensor"):
        patch.setattr(torch, name, partial(_unpinned, getattr(torch, name)))
    for name in ("copy_", "to", "cpu"):
        patch.setattr(torch.Tensor, name, _method(_METHODS[name], getattr(torch.Tensor, name)))


def _method(emulated: Callable[..., Any], real: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args, **named: emulated(real, self, *args, **named)


def _go_on() -> None:
    while any(stream.go_on() for stream in _streams if stream.cuda_stream not in _late):
        pass


@contextlib.contextmanager
def _on(stream: Stream) -> Iterator[None]:
    _current.append(stream)
    try:
        yield
    finally:
        _current.pop()


def _synchronize(_: Any = None) -> None:
    for stream in _streams:
        stream.synchronize()


def _unpinned(make: Callable[..., torch.Tensor], *args: Any, pin_memory: bool = False, **more: Any) -> Any:
    _kept.append(made := make(*args, **more))
    return made


def _copied(real: Any, self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    if non_blocking:
        launch(lambda: real(self, source))
    else:
        real(self, source)
    return self


def _moved(
    real: Any, self: torch.Tensor, *args: Any, non_blocking: bool = False, **named: Any
) -> torch.Tensor:
    if not non_blocking:
        return real(self, *args, **named)
    _kept.append(there := torch.full_like(self, 1))
    _copied(torch.Tensor.copy_, there, real(self, *args, **named), non_blocking=True)
    return there


def _read(real: Any, self: torch.Tensor) -> torch.Tensor:
    _current[-1].synchronize()
    return real(self)


_METHODS = {"copy_": _copied, "to": _moved, "cpu": _read}
