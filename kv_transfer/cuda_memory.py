"""Raw device memory that peers read by CUDA IPC handle, through the driver's library. Without torch.

Not from torch's allocator: its segments may be expandable, and those have no handle. Calls are made with the
context of the device, which torch has set for threads that use it.
"""

import ctypes
from ctypes import byref, c_size_t, c_uint, c_ulonglong, c_void_p
from functools import cache

from baton.kv_transfer.arena import MARK, TOKEN, exported_bytes
from baton.kv_transfer.peer_memory import Unreachable, check, host
from baton.kv_transfer.protocol.messages import Export

_HANDLE_BYTES = 64
_LAZY_ENABLE_PEER_ACCESS = 1
_exported: dict[tuple[bytes, bytes], int] = {}
"""Token and handle → address, of this process: CUDA opens no handle in the process that made it. A process id
would not tell: in another container it may be that of another process."""


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * _HANDLE_BYTES),)


class CudaError(RuntimeError):
    pass


@cache
def _driver() -> ctypes.CDLL:
    library = ctypes.CDLL("libcuda.so.1")
    for name, *types in (
        ("cuInit", c_uint),
        ("cuDeviceGet", c_void_p, ctypes.c_int),
        ("cuDevicePrimaryCtxRetain", c_void_p, ctypes.c_int),
        ("cuCtxSetCurrent", c_void_p),
        ("cuMemAlloc_v2", c_void_p, c_size_t),
        ("cuMemsetD8_v2", c_ulonglong, ctypes.c_ubyte, c_size_t),
        ("cuMemcpyHtoD_v2", c_ulonglong, c_void_p, c_size_t),
        ("cuMemcpyDtoH_v2", c_void_p, c_ulonglong, c_size_t),
        ("cuMemGetAddressRange_v2", c_void_p, c_void_p, c_ulonglong),
        ("cuMemcpyAsync", c_ulonglong, c_ulonglong, c_size_t, c_void_p),
        ("cuIpcGetMemHandle", c_void_p, c_ulonglong),
        ("cuIpcOpenMemHandle_v2", c_void_p, _Handle, c_uint),
        ("cuIpcCloseMemHandle", c_ulonglong),
        ("cuGetErrorName", ctypes.c_int, c_void_p),
    ):
        getattr(library, name).argtypes = types
    return library


def _call(name: str, *args: object) -> None:
    error = getattr(_driver(), name)(*args)
    if error:
        text = ctypes.c_char_p()
        _driver().cuGetErrorName(error, byref(text))
        raise CudaError(f"{name}: {(text.value or b'unknown error').decode()}")


@cache
def _context(device: int) -> c_void_p:
    """The one that torch would use."""
    number, context = ctypes.c_int(), c_void_p()
    _call("cuInit", 0)
    _call("cuDeviceGet", byref(number), device)
    _call("cuDevicePrimaryCtxRetain", byref(context), number)
    return context


def enter_device(device: int) -> None:
    """In a thread of a process without torch. Raises CudaError."""
    _call("cuCtxSetCurrent", _context(device))


def allocate(size: int) -> int:
    """Returns the address, on the device of this thread."""
    address = c_ulonglong()
    _call("cuMemAlloc_v2", byref(address), size)
    return address.value


def read(address: int, size: int) -> bytes:
    found = ctypes.create_string_buffer(size)
    _call("cuMemcpyDtoH_v2", found, address, size)
    return found.raw


def copy(to: int, source: int, size: int, stream: int) -> None:
    """Enqueues a copy between two addresses of any device."""
    _call("cuMemcpyAsync", to, source, size, stream)


class Slots:
    """Addresses in memory with `num_slots` slots and their marks."""

    def __init__(self, address: int, num_slots: int, slot_bytes: int) -> None:
        self.address = address
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self.marks = address + num_slots * slot_bytes
        self.marks_bytes = num_slots * MARK
        self.token = self.marks + self.marks_bytes

    def slot(self, index: int) -> int:
        return self.address + index * self.slot_bytes

    def mark(self, index: int) -> int:
        return self.marks + index * MARK


class ExportedMemory(Slots):
    """Lives as long as its process. CUDA forbids that it is freed while a peer has it open."""

    def __init__(self, num_slots: int, slot_bytes: int, token: bytes) -> None:
        """On the device of this thread."""
        handle, self.size = _Handle(), exported_bytes(num_slots, slot_bytes)
        super().__init__(allocate(self.size), num_slots, slot_bytes)
        _call("cuMemsetD8_v2", self.marks, 0, self.marks_bytes)
        _call("cuMemcpyHtoD_v2", self.token, token, TOKEN)
        _call("cuIpcGetMemHandle", byref(handle), self.address)
        self.export = Export("cuda_ipc", host(), (bytes(handle),), num_slots, slot_bytes, token)
        _exported[token, self.export.handles[0]] = self.address


class PeerDeviceMemory(Slots):
    """Implements PeerMemory. The memory lives as long as it is open, also if its owner dies."""

    def __init__(self, export: Export) -> None:
        """Raises Unreachable. The caller then does a test copy of the token."""
        check(export, "cuda_ipc")
        try:
            own = _exported.get((export.token, export.handles[0]))
            self._is_local = own is not None
            address = c_ulonglong(own or 0)
            if not self._is_local:
                handle = _Handle.from_buffer_copy(export.handles[0])
                _call("cuIpcOpenMemHandle_v2", byref(address), handle, _LAZY_ENABLE_PEER_ACCESS)
        except (CudaError, OSError, ValueError) as e:
            raise Unreachable(f"the test copy failed: {e}") from None
        super().__init__(address.value, export.num_slots, export.slot_bytes)
        try:
            self._check_size(exported_bytes(export.num_slots, export.slot_bytes))
        except CudaError as e:
            self.close()
            raise Unreachable(f"the test copy failed: {e}") from None

    def _check_size(self, claimed: int) -> None:
        """A copy beyond the end would be an error that ends this process."""
        base, size = c_ulonglong(), c_size_t()
        _call("cuMemGetAddressRange_v2", byref(base), byref(size), self.address)
        there = base.value + size.value - self.address
        if there < claimed:
            raise CudaError(f"the memory has {there} bytes, and its owner says {claimed}")

    def close(self) -> None:
        if not self._is_local:
            _call("cuIpcCloseMemHandle", self.address)
