"""Memory whose pages move, of the device that tests run on."""

import gc
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from baton.engine.execution.elastic_cache import tensor_at
from baton.system.device_memory import DeviceMemory, Exported, open_device_memory
from baton.system.kept_pages import Shelf
from tests.device import DEVICE

NUMBER = None if DEVICE == "cpu" else 0
READER = f"""
import ctypes, socket, sys
from baton.system.device_memory import Exported, open_device_memory
if {DEVICE == "cuda"}:
    import torch
    torch.cuda.init(); torch.zeros(1, device="cuda")
memory = open_device_memory({NUMBER}, 1, exportable=True)
_, fds, *_ = socket.recv_fds(socket.socket(fileno=int(sys.argv[1])), 1, 1)
page, address = memory.adopt(Exported(fds[0], int(sys.argv[2])), 1), memory.reserve(1)
memory.map(address, page)
if {DEVICE == "cuda"}:
    from baton.engine.execution.elastic_cache import tensor_at
    found = tensor_at(address, (memory.page_bytes,), torch.uint8, torch.device("cuda"))
    print(found[:3].tolist(), flush=True)
    found += 1
    torch.cuda.synchronize()
else:
    found = (ctypes.c_ubyte * memory.page_bytes).from_address(address)
    print(found[:3], flush=True)
    found[0] += 1
"""
MAKER = f"""
import ctypes, os, signal, sys
from baton.system.device_memory import open_device_memory
from baton.system.kept_pages import KeptPages, Shelf
if {DEVICE == "cuda"}:
    import torch
    torch.zeros(1, device="cuda")
memory = open_device_memory({NUMBER}, 1, exportable=True)
address = memory.reserve(2 * memory.page_bytes)
[page] = memory.create(1)
memory.map(address, [page])
Shelf(*map(int, sys.argv[2:])).put([KeptPages(memory.page_bytes, [memory.export(page)])])
if {DEVICE == "cuda"}:
    from baton.engine.execution.elastic_cache import tensor_at
    both = tensor_at(address, (2 * memory.page_bytes,), torch.uint8, torch.device("cuda"))
    both[:3] = 7
    torch.cuda.synchronize()
    if sys.argv[1] == "access":
        print(both.sum().item())  # an address without memory poisons the context
else:
    ctypes.memset(address, 7, 3)
    if sys.argv[1] == "access":
        ctypes.memset(address + memory.page_bytes, 7, 1)
os.kill(os.getpid(), signal.SIGKILL)
"""
WRITER = f"""
import ctypes, sys
from baton.system.device_memory import open_device_memory
if {DEVICE == "cuda"}:
    import torch
    torch.zeros(1, device="cuda")
memory = open_device_memory({NUMBER}, 1)
address, pages = memory.reserve(2 * memory.page_bytes), memory.create(2)
memory.map(address, pages, writable=False)
if sys.argv[1] == "allowed":
    memory.set_access(address, 2, writable=True)
if {DEVICE == "cuda"}:
    from baton.engine.execution.elastic_cache import tensor_at
    both = tensor_at(address, (2 * memory.page_bytes,), torch.uint8, torch.device("cuda"))
    print(both[:1].numel(), flush=True)  # it may be read
    both[-1] = 7
    torch.cuda.synchronize()
else:
    print(len(ctypes.string_at(address, 1)), flush=True)
    ctypes.memset(address + 2 * memory.page_bytes - 1, 7, 1)
print("written")
"""


@pytest.fixture
def memory() -> Iterator[DeviceMemory]:
    if DEVICE == "cuda":
        torch.zeros(1, device=DEVICE)  # the context
    memory = open_device_memory(NUMBER, 1, exportable=True)
    yield memory
    gc.collect()
    memory.close()


def bytes_at(memory: DeviceMemory, address: int, pages: int = 1) -> Tensor:
    return tensor_at(address, (pages * memory.page_bytes,), torch.uint8, torch.device(DEVICE))


def await_writes() -> None:
    """`unmap` and `export` do not."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def test_a_page_keeps_its_bytes_wherever_it_is_mapped(memory: DeviceMemory) -> None:
    here, there = memory.reserve(4 * memory.page_bytes), memory.reserve(4 * memory.page_bytes)
    one, two = memory.create(2)
    memory.map(here, [one, two])
    bytes_at(memory, here).fill_(1)
    bytes_at(memory, here + memory.page_bytes).fill_(2)
    await_writes()
    memory.unmap(here, 2)
    memory.map(there + memory.page_bytes, [two])
    memory.map(here + 3 * memory.page_bytes, [one])
    assert bytes_at(memory, there + memory.page_bytes).unique().tolist() == [2]
    assert bytes_at(memory, here + 3 * memory.page_bytes).unique().tolist() == [1]


def test_a_tensor_keeps_its_address_while_pages_under_it_come_and_go(memory: DeviceMemory) -> None:
    size = memory.page_bytes
    address = memory.reserve(8 * size)
    pages = memory.create(3)
    memory.map(address, pages[:2])
    whole = tensor_at(address, (8, size // 4), torch.float32, torch.device(DEVICE))
    whole[:2] = 3.5
    await_writes()
    memory.unmap(address + size, 1)
    memory.map(address + 6 * size, [pages[1]])
    assert whole[6].unique().tolist() == [3.5]
    whole[7:7] = 0
    memory.map(address + 7 * size, [pages[2]])
    whole[7].copy_(whole[0])
    assert whole[[0, 6, 7]].unique().tolist() == [3.5]
    assert whole.data_ptr() == address


@pytest.mark.parametrize("access", ["read", "allowed"])
def test_pages_to_be_read_are_written_only_when_that_is_allowed(access: str) -> None:
    """Else the process ends, or on a GPU its context."""
    command = [sys.executable, "-c", WRITER, access]
    writer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert writer.stdout == ("1\nwritten\n" if access == "allowed" else "1\n"), writer.stderr
    assert bool(writer.returncode) == (access == "read")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int64])
def test_a_tensor_may_have_any_type(memory: DeviceMemory, dtype: torch.dtype) -> None:
    address = memory.reserve(1)
    memory.map(address, memory.create(1))
    made = tensor_at(address, (2, 4), dtype, torch.device(DEVICE))
    made.copy_(torch.arange(8).view(2, 4).to(dtype))
    assert made.to(torch.int64).flatten().tolist() == [*range(8)]


def test_another_process_adopts_a_page_and_both_see_what_is_written(memory: DeviceMemory) -> None:
    _, page = memory.create(2)
    address = memory.reserve(1)
    memory.map(address, [page])
    bytes_at(memory, address).copy_(torch.arange(memory.page_bytes).to(torch.uint8))
    await_writes()
    exported = memory.export(page)
    here, there = socket.socketpair()
    with (
        here,
        there,
        subprocess.Popen(
            [sys.executable, "-c", READER, str(there.fileno()), str(exported.offset)],
            stdout=subprocess.PIPE,
            pass_fds=[there.fileno()],
        ) as reader,
    ):
        socket.send_fds(here, [b"x"], [exported.fd])
        os.close(exported.fd)
        assert reader.communicate()[0] == b"[0, 1, 2]\n"
    assert reader.returncode == 0
    assert bytes_at(memory, address)[0].item() == 1, "the page outlives the reader"


@pytest.mark.parametrize("end", ["kill", "access"])
def test_pages_outlive_the_process_that_made_them_however_it_ends(memory: DeviceMemory, end: str) -> None:
    shelf = Shelf.create()
    command = [sys.executable, "-c", MAKER, end, *map(str, shelf)]
    maker = subprocess.run(command, pass_fds=shelf, capture_output=True, text=True, check=False)
    assert maker.returncode, maker.stderr
    assert end == "kill" or DEVICE == "cpu" or "illegal memory access" in maker.stderr
    for _ in range(2):
        [kept] = shelf.pages()
        [exported] = kept.pages
        assert kept.page_bytes == memory.page_bytes
        address = memory.reserve(1)
        memory.map(address, memory.adopt(exported, 1))
        os.close(exported.fd)
        assert bytes_at(memory, address)[:3].tolist() == [7, 7, 7]
    for end_of_shelf in shelf:
        os.close(end_of_shelf)


def test_pages_come_back_when_they_are_freed(memory: DeviceMemory) -> None:
    pages = memory.create(4)
    address = memory.reserve(4 * memory.page_bytes)
    memory.map(address, pages)
    bytes_at(memory, address, 4).fill_(1)
    await_writes()
    memory.unmap(address, 4)
    if DEVICE == "cpu":
        before = os.fstat(pages[0].handle).st_blocks
        memory.free(pages[:3])
        assert os.fstat(pages[3].handle).st_blocks == before // 4
        memory.free(pages[3:])
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(pages[3].handle)
    else:
        free, _ = torch.cuda.mem_get_info()
        memory.free(pages)
        assert torch.cuda.mem_get_info()[0] >= free + 3 * memory.page_bytes


def test_a_file_that_is_too_short_is_not_adopted() -> None:
    memory = open_device_memory(None, 1)
    with open("/dev/null", "rb") as file, pytest.raises(MemoryError, match="has 0 bytes"):
        memory.adopt(Exported(file.fileno(), 0), 1)
    fd = os.memfd_create("short")
    os.ftruncate(fd, memory.page_bytes)
    for offset in (-memory.page_bytes, 1, memory.page_bytes):
        with pytest.raises(MemoryError, match="not 1 pages"):
            memory.adopt(Exported(fd, offset), 1)
    os.close(fd)
    memory.close()
