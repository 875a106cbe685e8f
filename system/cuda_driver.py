"""Raw device memory through CUDA's driver, and its handles for other processes. Without torch.

Calls are made with the context of the device, which torch has set for threads that use it.
"""

import ctypes
from ctypes import byref, c_int, c_size_t, c_uint, c_ulonglong, c_void_p
from functools import cache

HANDLE_BYTES = 64
_LAZY_ENABLE_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * HANDLE_BYTES),)


class CudaError(RuntimeError):
    pass


@cache
def _driver() -> ctypes.CDLL:
    library = ctypes.CDLL("libcuda.so.1")
    for name, *types in (
        ("cuInit", c_uint),
        ("cuDeviceGet", c_void_p, c_int),
        ("cuDevicePrimaryCtxRetain", c_void_p, c_int),
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
        ("cuDeviceGetAttribute", c_void_p, c_int, c_int),
        ("cuMemGetAllocationGranularity", c_void_p, c_void_p, c_int),
        ("cuMemAddressReserve", c_void_p, c_size_t, c_size_t, c_ulonglong, c_ulonglong),
        ("cuMemAddressFree", c_ulonglong, c_size_t),
        ("cuMemCreate", c_void_p, c_size_t, c_void_p, c_ulonglong),
        ("cuMemRelease", c_ulonglong),
        ("cuMemMap", c_ulonglong, c_size_t, c_size_t, c_ulonglong, c_ulonglong),
        ("cuMemUnmap", c_ulonglong, c_size_t),
        ("cuMemSetAccess", c_ulonglong, c_size_t, c_void_p, c_size_t),
        ("cuMemExportToShareableHandle", c_void_p, c_ulonglong, c_int, c_ulonglong),
        ("cuMemImportFromShareableHandle", c_void_p, c_void_p, c_int),
        ("cuCtxSynchronize",),
        ("cuGetErrorName", c_int, c_void_p),
    ):
        getattr(library, name).argtypes = types
    return library


def call(name: str, *args: object) -> None:
    error = getattr(_driver(), name)(*args)
    if error:
        text = ctypes.c_char_p()
        _driver().cuGetErrorName(error, byref(text))
        raise CudaError(f"{name}: {(text.value or b'unknown error').decode()}")


@cache
def _context(device: int) -> c_void_p:
    """The one that torch would use."""
    number, context = c_int(), c_void_p()
    call("cuInit", 0)
    call("cuDeviceGet", byref(number), device)
    call("cuDevicePrimaryCtxRetain", byref(context), number)
    return context


def enter_device(device: int) -> None:
    """In a thread of a process without torch. Raises CudaError."""
    call("cuCtxSetCurrent", _context(device))


def allocate(size: int) -> int:
    """Returns the address, on the device of this thread."""
    address = c_ulonglong()
    call("cuMemAlloc_v2", byref(address), size)
    return address.value


def read(address: int, size: int) -> bytes:
    copied = ctypes.create_string_buffer(size)
    call("cuMemcpyDtoH_v2", copied, address, size)
    return copied.raw


def copy(to: int, source: int, size: int, stream: int) -> None:
    """Enqueues a copy between two addresses of any device."""
    call("cuMemcpyAsync", to, source, size, stream)


def export_handle(address: int) -> bytes:
    """The handle by which other processes of this host open the allocation with this address, from its
    beginning on."""
    handle = _Handle()
    call("cuIpcGetMemHandle", byref(handle), address)
    return bytes(handle)


def open_handle(handle: bytes) -> int:
    """The address of another process's memory, until `close_handle`. The memory lives as long, also if its
    owner dies. Raises `CudaError`, or `ValueError` if the handle is too short."""
    address = c_ulonglong()
    opened = _Handle.from_buffer_copy(handle)
    call("cuIpcOpenMemHandle_v2", byref(address), opened, _LAZY_ENABLE_PEER_ACCESS)
    return address.value


def close_handle(address: int) -> None:
    call("cuIpcCloseMemHandle", address)


def allocation(address: int) -> tuple[int, int]:
    """The address and the size of the allocation that this address is in."""
    base, size = c_ulonglong(), c_size_t()
    call("cuMemGetAddressRange_v2", byref(base), byref(size), address)
    return base.value, size.value
