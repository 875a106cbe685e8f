"""Runs kernels in Gluon on a CPU: each group of warps is a thread, and numpy computes.

Triton's interpreter has no Gluon. Here a program runs after the other, with these rules of the device:

- A copy engine writes a tile when it is told to, the earliest moment at which it may.
- A product of warp groups reads its operands when it begins and again when it is waited for, the latest
  moment. If a tile in shared memory has changed between, the kernel is wrong, and the assertion says so.
- Barriers have phases and counts of arrivals and bytes. A wait that never ends fails after `PATIENCE`.

Layouts are ignored, and so are barriers within a group of warps.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

PATIENCE = 60.0
"""Seconds. Only a kernel that hangs waits so long."""
FLOATS = {torch.float32: np.float32, torch.float16: np.float16, torch.bfloat16: np.float32}


class Array(np.ndarray):
    """A tensor of a program: numpy, with what kernels ask of a tensor."""

    @property
    def type(self) -> Any:
        return SimpleNamespace(layout=None)

    def to(self, dtype: Any) -> Any:
        return _rounded(self, dtype).view(Array) if isinstance(dtype, torch.dtype) else self


def _rounded(values: Any, dtype: torch.dtype) -> np.ndarray:
    """Values in this dtype. bfloat16 is float32 with fewer digits."""
    return torch.from_numpy(np.array(values, np.float32)).to(dtype).float().numpy()


def _array(values: Any) -> Any:
    return np.asarray(values).view(Array)


class Pointer:
    """Places in the memory of a tensor, which counts elements."""

    def __init__(self, memory: Tensor, at: Any = 0) -> None:
        self.memory, self.at = memory, at
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, other: Any) -> "Pointer":
        return Pointer(self.memory, self.at + other)

    @property
    def flat(self) -> Tensor:
        size = self.memory.untyped_storage().nbytes() // self.memory.itemsize - self.memory.storage_offset()
        return self.memory.as_strided((size,), (1,))


class Scalar(int):
    """A number that was loaded."""

    def to(self, _: Any) -> "Scalar":
        return self


def _load(pointer: Pointer, mask: Any = None, other: Any = 0, **_: Any) -> Any:
    at, used = np.broadcast_arrays(pointer.at, True if mask is None else mask)
    flat = pointer.flat
    inside = torch.from_numpy(np.where(used, at, 0).astype(np.int64))
    found = flat[inside]
    values = (found.float() if found.is_floating_point() else found).numpy()
    values = np.where(used, values, other)
    return _array(values) if values.ndim else Scalar(values)


def _store(pointer: Pointer, values: Any, mask: Any = None) -> None:
    at, values, used = np.broadcast_arrays(pointer.at, values, True if mask is None else mask)
    written = torch.from_numpy(np.ascontiguousarray(values[used])).to(pointer.memory.dtype)
    pointer.flat[torch.from_numpy(np.ascontiguousarray(at[used]).astype(np.int64))] = written


class Shared:
    """A part of shared memory."""

    def __init__(self, values: np.ndarray, dtype: Any) -> None:
        self.values, self.dtype = values, dtype
        self.shape = values.shape

    def index(self, i: int) -> "Shared":
        return Shared(self.values[int(i)], self.dtype)

    def slice(self, start: int, length: int, dim: int = 0) -> "Shared":
        taken = (slice(None),) * dim + (slice(int(start), int(start) + length),)
        return Shared(self.values[taken], self.dtype)

    def permute(self, order: Sequence[int]) -> "Shared":
        return Shared(self.values.transpose(order), self.dtype)

    def load(self, _: Any) -> Any:
        return _array(self.values.copy())

    def store(self, values: Any) -> None:
        self.values[...] = _rounded(values, self.dtype)


class Barrier:
    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.count = self.missing = self.bytes = self.phase = 0

    def add(self, arrivals: int, size: int) -> None:
        with self.changed:
            self.missing -= arrivals
            self.bytes += size
            assert self.missing >= 0, "no more arrive than a phase counts"
            if not self.missing and not self.bytes:
                self.phase, self.missing = self.phase ^ 1, self.count
                self.changed.notify_all()

    def wait(self, phase: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.phase != phase, PATIENCE), "the wait never ends"


class Barriers:
    def __init__(self, shape: Sequence[int]) -> None:
        self.all = [Barrier() for _ in range(shape[0])]

    def index(self, i: int) -> Barrier:
        return self.all[int(i)]


class Tiles:
    """In place of a `TensorDescriptor`, which tells the copy engine the size of a tile."""

    def __init__(self, descriptor: Any) -> None:
        self.base, self.block_shape = descriptor.base, descriptor.block_shape
        rows, columns = self.block_shape
        self.block_type = SimpleNamespace(nbytes=rows * columns * self.base.itemsize)

    def copy(self, at: Sequence[Any], barrier: Barrier, to: Shared) -> None:
        row, column = map(int, at)
        rows, columns = self.block_shape
        assert 0 <= row <= len(self.base) - rows
        to.values[...] = self.base[row : row + rows, column : column + columns].float().numpy()
        barrier.add(0, -self.block_type.nbytes)


class Product:
    """A product of warp groups that is under way."""

    def __init__(self, a: Any, b: Shared, acc: Any, use_acc: bool) -> None:
        self.a, self.b, self.acc = a, b, acc if use_acc else None
        self.began = self.compute()

    def compute(self) -> Any:
        a = self.a.values if isinstance(self.a, Shared) else self.a
        product = torch.mm(torch.from_numpy(a.astype(np.float32)), torch.from_numpy(self.b.values)).numpy()
        return _array(product if self.acc is None else self.acc + product)

    def result(self) -> Any:
        ended = self.compute()
        assert np.array_equal(ended, self.began, equal_nan=True), "an operand changed while it was read"
        return ended


class _Group(threading.local):
    def __init__(self) -> None:
        self.pending: list[Product] = []


_group = _Group()


def _mma(a: Any, b: Shared, acc: Any, *, use_acc: bool = True, is_async: bool = False) -> Product:
    assert is_async
    _group.pending.append(Product(a, b, acc, use_acc))
    return _group.pending[-1]


def _mma_wait(pending: int, deps: Sequence[Product]) -> Any:
    waits, _group.pending = _group.pending, _group.pending[len(_group.pending) - pending :]
    done = waits[: len(waits) - pending]
    assert all(product in done for product in deps), "a result is read before its product has ended"
    results = [product.result() for product in deps]
    return results[0] if len(results) == 1 else tuple(results)


def _specialize(groups: Sequence[tuple[Callable[..., None], tuple[Any, ...]]], *_: Any) -> None:
    with ThreadPoolExecutor(len(groups)) as threads:
        for ended in as_completed([threads.submit(function, *arguments) for function, arguments in groups]):
            ended.result()


def _language(program: int, programs: int) -> SimpleNamespace:
    """What a program calls `gl`."""

    def layout(*_: Any, **__: Any) -> None:
        return None

    def allocate(dtype: Any, shape: Sequence[int], *_: Any) -> Any:
        if not isinstance(dtype, torch.dtype):
            return Barriers(shape)
        return Shared(np.full(shape, np.nan, np.float32), dtype)

    return SimpleNamespace(
        constexpr=int, int64="int64", float32=torch.float32, program_id=lambda _: program,
        num_programs=lambda _: programs, load=_load, store=_store, cdiv=lambda a, b: -(-a // b),
        arange=lambda a, b, _: _array(np.arange(a, b)), static_range=range,
        where=lambda *x: _array(np.where(*x)),
        full=lambda shape, value, *_: _array(np.full(shape, value, np.float32)),
        zeros=lambda shape, *_: _array(np.zeros(shape, np.float32)), zeros_like=np.zeros_like,
        maximum=np.maximum, minimum=np.minimum, exp2=np.exp2, log2=np.log2,
        max=lambda x, axis: x.max(axis), sum=lambda x, axis: x.sum(axis),
        convert_layout=lambda x, _: x, allocate_shared_memory=allocate, warp_specialize=_specialize,
        SliceLayout=layout, DotOperandLayout=layout, BlockedLayout=layout, NVMMASharedLayout=layout,
        NVMMADistributedLayout=layout,
    )  # fmt: skip


def _begin(barrier: Barrier, count: int) -> None:
    barrier.count = barrier.missing = count


MBARRIER = SimpleNamespace(
    MBarrierLayout=lambda: None,
    init=_begin,
    expect=lambda barrier, size: barrier.add(1, size),
    arrive=lambda barrier: barrier.add(1, 0),
    wait=lambda barrier, phase: barrier.wait(int(phase)),
)
TMA = SimpleNamespace(
    async_copy_global_to_shared=lambda tiles, at, barrier, to: tiles.copy(at, barrier, to),
)


ON_CPU = {
    "mbarrier": MBARRIER, "tma": TMA, "warpgroup_mma": _mma, "warpgroup_mma_wait": _mma_wait,
    "fence_async_shared": lambda: None, "barrier": lambda: None,
}  # fmt: skip


@contextmanager
def _one_thread() -> Iterator[None]:
    """Groups of warps are threads already."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class Kernel:
    """In place of a kernel: `kernel[grid](…)` runs all its programs, one after the other."""

    def __init__(self, name: str, modules: Sequence[ModuleType]) -> None:
        """`modules`: its own, and those whose functions it calls."""
        self.name = name
        self.names: dict[str, Any] = {}
        for module in modules:
            for each, value in vars(module).items():
                function = getattr(value, "fn", None)
                if isinstance(function, FunctionType):
                    function = FunctionType(function.__code__, self.names, each, function.__defaults__)
                    self.names[each] = function
                elif not each.startswith("__"):
                    self.names.setdefault(each, getattr(value, "value", value))
        self.names |= ON_CPU

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(*arguments: Any, num_warps: int, **options: Any) -> None:
            arguments = tuple(
                Pointer(x) if isinstance(x, Tensor) else Tiles(x) if hasattr(x, "block_shape") else x
                for x in arguments
            )
            with _one_thread():
                for program in range(grid[0]):
                    self.names["gl"] = _language(program, grid[0])
                    self.names[self.name](*arguments, **options)

        return launch
