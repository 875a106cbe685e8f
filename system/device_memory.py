"""Memory whose addresses stay while its pages move, are exported, or are given back. Without torch.

    reserve ─▶ addresses ──┐
    create ─▶ pages ─▶ map ┴─▶ unmap ─▶ map elsewhere ─▶ … ─▶ free
                └──▶ export ─▶ a file ─▶ adopt, in another process

A page keeps its bytes wherever it is mapped. Two implementations: CUDA's virtual memory calls on a GPU, and
`memfd` with `mmap` on a CPU. What a caller must know of both:

- An address may be used only while a page is mapped there. A read elsewhere ends the process (CPU), or the
  context (GPU).
- `unmap` does not wait for kernels: the caller calls it after the last step and the last copy that may touch
  the page.
- `cuIpcGetMemHandle` fails on such memory. Another process gets the file of `export`, and adopts it.
"""

import ctypes
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from ctypes import byref, c_int, c_size_t, c_ulonglong, c_void_p
from functools import cache
from itertools import islice
from typing import NamedTuple

from baton.system.cuda_driver import CudaError, call

MIB = 1 << 20
MAPPINGS = 1 << 14
"""Most pages of a CPU's memory that a caller should have: the system allows 65,530 mappings in a process."""


class Page(NamedTuple):
    """Physical memory of `DeviceMemory.page_bytes`."""

    handle: int
    """On a CPU, a descriptor of the file with the page; on a GPU, CUDA's handle."""
    offset: int = 0
    """In the file."""


class Exported(NamedTuple):
    """A page as another process adopts it."""

    fd: int
    """The receiver of the descriptor owns a copy of it. The caller closes this one."""
    offset: int


class DeviceMemory(ABC):
    """Pages and addresses of one device. One thread makes all calls.

    `close` gives all of it back. A page that another process has adopted lives as long as that process."""

    page_bytes: int

    @abstractmethod
    def reserve(self, size: int) -> int:
        """Returns the address of `size` bytes, rounded up to pages, where nothing is mapped."""

    @abstractmethod
    def create(self, count: int) -> list[Page]:
        """Returns new pages. On a CPU they are zeros, and take no memory before they are written. Raises
        `MemoryError`."""

    @abstractmethod
    def map(self, address: int, pages: Sequence[Page], *, writable: bool = True) -> None:
        """Maps pages one after the other from `address` on, to be read, and to be written if `writable`. Any
        other write ends the process (CPU), or the context (GPU). Raises `MemoryError`."""

    @abstractmethod
    def set_access(self, address: int, count: int, *, writable: bool) -> None:
        """As of `map`, of the `count` pages that are mapped from `address` on. Raises `MemoryError`."""

    @abstractmethod
    def unmap(self, address: int, count: int) -> None:
        """The addresses of `count` pages have no memory any more. The pages keep their bytes."""

    @abstractmethod
    def export(self, page: Page) -> Exported: ...

    @abstractmethod
    def adopt(self, exported: Exported, count: int) -> list[Page]:
        """The pages of another process, which may also be mapped here: `count` in a row. Copies the
        descriptor. Raises `MemoryError`."""

    @abstractmethod
    def free(self, pages: Sequence[Page]) -> None:
        """Gives back pages, which are mapped nowhere here."""

    @abstractmethod
    def close(self) -> None:
        """Unmaps all addresses and frees all pages. Nothing uses them any more."""

    def release(self, mapped: Mapping[int, Sequence[Page]]) -> None:
        """Unmaps and frees these pages, by the addresses that they are mapped at."""
        for address, pages in mapped.items():
            self.unmap(address, len(pages))
        self.free([page for pages in mapped.values() for page in pages])

    def resume(self, mapped: Mapping[int, Sequence[Page]]) -> dict[int, Sequence[Page]]:
        """Maps new pages where `release` has unmapped these. Raises `MemoryError` before it maps one."""
        new = iter(self.create(sum(map(len, mapped.values()))))
        new_pages: dict[int, Sequence[Page]] = {
            address: list(islice(new, len(pages))) for address, pages in mapped.items()
        }
        for address, pages in new_pages.items():
            self.map(address, pages)
        return new_pages


def open_device_memory(device: int | None, page_bytes: int, *, exportable: bool = False) -> DeviceMemory:
    """Memory of the CUDA device with this number, in pages of `page_bytes`, rounded up to what it can map.
    None: of the CPU. The thread has the context of the device. `exportable`: `export` will be called.
    Raises `MemoryError` if the device has no such memory."""
    if device is None:
        return HostMemory(page_bytes)
    return CudaMemory(device, page_bytes, exportable=exportable)


# CPU

_PROT_NONE, _MAP_FIXED, _MAP_NORESERVE = 0, 0x10, 0x4000
_FAILED = c_void_p(-1).value
_KEEP_SIZE, _PUNCH_HOLE = 1, 2


@cache
def _libc() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = c_void_p
    library.mmap.argtypes = (c_void_p, c_size_t, c_int, c_int, c_int, ctypes.c_long)
    library.munmap.argtypes = (c_void_p, c_size_t)
    library.mprotect.argtypes = (c_void_p, c_size_t, c_int)
    library.fallocate.argtypes = (c_int, c_int, ctypes.c_long, ctypes.c_long)
    return library


def _protection(writable: bool) -> int:
    return mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)


def _mmap(address: int | None, size: int, protection: int, flags: int, fd: int = -1, offset: int = 0) -> int:
    mapped = _libc().mmap(address, size, protection, flags, fd, offset)
    if mapped == _FAILED:
        raise MemoryError(f"mmap of {size} bytes: {os.strerror(ctypes.get_errno())}")
    return mapped


class HostMemory(DeviceMemory):
    """Each `create` makes one `memfd`, with all its pages."""

    def __init__(self, page_bytes: int) -> None:
        self.page_bytes = -(-page_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._reserved: list[tuple[int, int]] = []  # address, size
        self._files: dict[int, int] = {}  # descriptor → its pages that are not freed
        self._adopted: set[int] = set()  # those of other processes

    def reserve(self, size: int) -> int:
        size = -(-size // self.page_bytes) * self.page_bytes
        # One page more, so that the first address can be a multiple of a page.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        start = _mmap(None, size + self.page_bytes, _PROT_NONE, flags)
        self._reserved.append((start, size + self.page_bytes))
        return -(-start // self.page_bytes) * self.page_bytes

    def create(self, count: int) -> list[Page]:
        if not count:
            return []
        fd = os.memfd_create("baton-device-memory", os.MFD_CLOEXEC)
        os.ftruncate(fd, count * self.page_bytes)
        return self._pages(fd, 0, count)

    def _pages(self, fd: int, offset: int, count: int) -> list[Page]:
        self._files[fd] = count
        return [Page(fd, offset + i * self.page_bytes) for i in range(count)]

    def map(self, address: int, pages: Sequence[Page], *, writable: bool = True) -> None:
        flags = mmap.MAP_SHARED | _MAP_FIXED
        protection = _protection(writable)
        for page, count in self._runs(pages):
            _mmap(address, count * self.page_bytes, protection, flags, page.handle, page.offset)
            address += count * self.page_bytes

    def set_access(self, address: int, count: int, *, writable: bool) -> None:
        if _libc().mprotect(address, count * self.page_bytes, _protection(writable)):
            raise MemoryError(f"mprotect of {count} pages: {os.strerror(ctypes.get_errno())}")

    def _runs(self, pages: Sequence[Page]) -> Iterator[tuple[Page, int]]:
        """Pages that follow each other in a file: the first, and their number. They need one mapping."""
        first = 0
        for end in range(1, len(pages) + 1):
            next_in_file = pages[end - 1]._replace(offset=pages[end - 1].offset + self.page_bytes)
            if end == len(pages) or pages[end] != next_in_file:
                yield pages[first], end - first
                first = end

    def unmap(self, address: int, count: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
        _mmap(address, count * self.page_bytes, _PROT_NONE, flags)

    def export(self, page: Page) -> Exported:
        return Exported(os.dup(page.handle), page.offset)

    def adopt(self, exported: Exported, count: int) -> list[Page]:
        available = os.fstat(exported.fd).st_size - exported.offset
        if exported.offset < 0 or exported.offset % mmap.PAGESIZE or available < count * self.page_bytes:
            raise MemoryError(f"the file has {available} bytes from its offset on, not {count} pages")
        fd = os.dup(exported.fd)
        self._adopted.add(fd)
        return self._pages(fd, exported.offset, count)

    def free(self, pages: Sequence[Page]) -> None:
        for page in pages:
            if page.handle not in self._adopted:  # else the other process still has the page
                _libc().fallocate(page.handle, _KEEP_SIZE | _PUNCH_HOLE, page.offset, self.page_bytes)
            self._files[page.handle] -= 1
            if not self._files[page.handle]:
                del self._files[page.handle]
                self._adopted.discard(page.handle)
                os.close(page.handle)

    def close(self) -> None:
        for address, size in self._reserved:
            _libc().munmap(address, size)
        for fd in self._files:
            os.close(fd)
        self._reserved, self._files = [], {}
        self._adopted.clear()


# GPU


class _Location(ctypes.Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class _AllocFlags(ctypes.Structure):
    _fields_ = (
        ("compression", ctypes.c_ubyte),
        ("rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class _Properties(ctypes.Structure):
    """`CUmemAllocationProp`."""

    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location", _Location),
        ("win32", c_void_p),
        ("flags", _AllocFlags),
    )


class _Access(ctypes.Structure):
    """`CUmemAccessDesc`."""

    _fields_ = (("location", _Location), ("flags", c_int))


_PINNED, _ON_DEVICE, _FILE = 1, 1, 1
_READ, _READ_WRITE = 1, 3
_MAPS_MEMORY, _EXPORTS_FILES = 102, 103
"""Attributes of a device."""


def _call(name: str, *args: object) -> None:
    try:
        call(name, *args)
    except OSError as error:
        raise MemoryError(f"CUDA's driver is not here: {error}") from None
    except CudaError as error:
        raise MemoryError(str(error)) from None


class CudaMemory(DeviceMemory):
    """A page is one allocation of `cuMemCreate`."""

    def __init__(self, device: int, page_bytes: int, *, exportable: bool) -> None:
        self._device = device
        for attribute in (_MAPS_MEMORY, *([_EXPORTS_FILES] if exportable else ())):
            value = c_int()
            _call("cuDeviceGetAttribute", byref(value), attribute, device)
            if not value.value:
                raise MemoryError(f"device {device} lacks CUDA's attribute {attribute}")
        self._properties = _Properties(
            type=_PINNED, handle_types=_FILE if exportable else 0, location=_Location(_ON_DEVICE, device)
        )
        smallest = c_size_t()
        _call("cuMemGetAllocationGranularity", byref(smallest), byref(self._properties), 0)
        self.page_bytes = -(-page_bytes // smallest.value) * smallest.value
        self._reserved: list[tuple[int, int]] = []  # address, size
        self._mapped: dict[int, int] = {}  # address of a page → its handle
        self._handles: set[int] = set()

    def reserve(self, size: int) -> int:
        size = -(-size // self.page_bytes) * self.page_bytes
        address = c_ulonglong()
        _call("cuMemAddressReserve", byref(address), size, 0, 0, 0)
        self._reserved.append((address.value, size))
        return address.value

    def create(self, count: int) -> list[Page]:
        pages: list[Page] = []
        handle = c_ulonglong()
        try:
            for _ in range(count):
                _call("cuMemCreate", byref(handle), self.page_bytes, byref(self._properties), 0)
                pages.append(Page(handle.value))
                self._handles.add(handle.value)
        except MemoryError:
            self.free(pages)
            raise
        return pages

    def map(self, address: int, pages: Sequence[Page], *, writable: bool = True) -> None:
        at = address
        for page in pages:
            _call("cuMemMap", at, self.page_bytes, 0, page.handle, 0)
            self._mapped[at] = page.handle
            at += self.page_bytes
        if pages:
            self.set_access(address, len(pages), writable=writable)

    def set_access(self, address: int, count: int, *, writable: bool) -> None:
        access = _Access(_Location(_ON_DEVICE, self._device), _READ_WRITE if writable else _READ)
        _call("cuMemSetAccess", address, count * self.page_bytes, byref(access), 1)

    def unmap(self, address: int, count: int) -> None:
        _call("cuMemUnmap", address, count * self.page_bytes)
        for number in range(count):
            del self._mapped[address + number * self.page_bytes]

    def export(self, page: Page) -> Exported:
        fd = c_int()
        _call("cuMemExportToShareableHandle", byref(fd), page.handle, _FILE, 0)
        return Exported(fd.value, 0)

    def adopt(self, exported: Exported, count: int) -> list[Page]:
        if count != 1 or exported.offset:
            raise MemoryError("a file of CUDA has one page")
        handle = c_ulonglong()
        _call("cuMemImportFromShareableHandle", byref(handle), c_void_p(exported.fd), _FILE)
        self._handles.add(handle.value)
        return [Page(handle.value)]

    def free(self, pages: Sequence[Page]) -> None:
        for page in pages:
            _call("cuMemRelease", page.handle)
            self._handles.discard(page.handle)

    def close(self) -> None:
        _call("cuCtxSynchronize")
        for address in [*self._mapped]:
            self.unmap(address, 1)
        self.free([Page(handle) for handle in self._handles])
        for address, size in self._reserved:
            _call("cuMemAddressFree", address, size)
        self._reserved = []
