"""One copy of the weights for the engine process that serves and the one that stands by, on CPUs.

    an engine loads its weights ─▶ the file is empty: it writes them there, and seals it
                                ─▶ the file is sealed: it compares the bytes
    ─▶ pages of the file take the place of its own memory
    new weights come ─▶ the pages that they are written to become its own

A sealed file never changes. Each process maps it privately. A file with other weights is not used. One that
an engine left half written is not sealed, so no process uses it: the next engine writes it anew.
"""

import ctypes
import fcntl
import mmap
import os
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from baton.engine.execution.elastic_cache import tensor_at
from baton.engine.execution.memory_saver import aligned
from baton.engine.layers.linear import packed_at, packed_memory

_POPULATE_READ = 22
_WRITE_BYTES = 1 << 30
"""Of one call, which writes at most 2 GiB."""


class _Part(NamedTuple):
    """Memory that the file has, too."""

    address: int
    size: int
    offset: int
    """In the file."""
    tensors: list[Tensor]
    """That share the memory, or one that is packed."""


@torch.inference_mode()
def share(tensors: Iterable[Tensor], fd: int) -> bool:
    """Gives these tensors memory of a file that other processes of the worker have, too, if it has the same
    bytes or is empty. `fd`: a `memfd` that can be sealed; the caller owns it. Only one process at a time
    shares. False: the file has other weights."""
    parts = _parts(tensors)
    size = sum(aligned(part.size) for part in parts)
    is_sealed = bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE)
    if not size or (is_sealed and os.fstat(fd).st_size != size):
        return False
    if not is_sealed:
        os.ftruncate(fd, size)
    file = _Mapping(fd, size)
    if is_sealed and not all(map(file.equals, parts)):
        return False
    for part in parts:  # each gives its own memory back before the next one is written
        if not is_sealed:
            _write(part, fd)
        file.give(part)
    if not is_sealed:
        file.populate()
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return True


def _parts(tensors: Iterable[Tensor]) -> list[_Part]:
    by_address: dict[int, _Part] = {}
    end = 0
    for tensor in tensors:
        if tensor.device.type != "cpu":
            continue
        address, size = _memory(tensor)
        if size and address not in by_address:
            by_address[address] = _Part(address, size, end, [])
            end += aligned(size)
        if size:
            by_address[address].tensors.append(tensor)
    return [*by_address.values()]


def _memory(tensor: Tensor) -> tuple[int, int]:
    """Address and bytes."""
    if tensor.is_mkldnn:
        return packed_memory(tensor)
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def _write(part: _Part, fd: int) -> None:
    memory = memoryview((ctypes.c_ubyte * part.size).from_address(part.address))
    for start in range(0, part.size, _WRITE_BYTES):
        some = memory[start : start + _WRITE_BYTES]
        if os.pwrite(fd, some, part.offset + start) != len(some):
            raise MemoryError("no memory is left for weights that processes share")


class _Mapping:
    """A file, mapped as long as a tensor has its pages."""

    def __init__(self, fd: int, size: int) -> None:
        self._memory = mmap.mmap(fd, size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        self._address = ctypes.addressof(ctypes.c_ubyte.from_buffer(self._memory))
        self._compare = ctypes.CDLL(None).memcmp
        self._compare.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t

    def populate(self) -> None:
        """Has the pages now, and not with the first step. Older kernels than Linux 5.14 do nothing."""
        with suppress(OSError):
            self._memory.madvise(_POPULATE_READ)

    def equals(self, part: _Part) -> bool:
        """Whether the bytes of this part are those of the file."""
        return not self._compare(part.address, self._address + part.offset, part.size)

    def give(self, part: _Part) -> None:
        """The tensors of this part have the bytes of the file from now on."""
        address = self._address + part.offset
        for tensor in part.tensors:
            if tensor.is_mkldnn:
                with torch.inference_mode(tensor.is_inference()):
                    tensor.data = packed_at(address, tensor)
                tensor.owner = self  # pyrefly: ignore[missing-attribute]
                continue
            storage = tensor_at(address, (part.size,), torch.uint8, tensor.device, owner=self)
            place = tensor.storage_offset(), tensor.size(), tensor.stride()
            tensor.set_(storage.untyped_storage(), *place)
