"""Memory that another process exports: what a reader refuses to open, and what it finds in it."""

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch

import baton.kv_transfer as kv
from baton.kv_transfer import cuda_memory
from baton.kv_transfer.arena import exported_bytes
from baton.kv_transfer.device.host_pool import HostPool
from baton.kv_transfer.layout import Piece
from baton.kv_transfer.peer_memory import (
    PeerArena,
    PeerMemories,
    Unreachable,
    count_slots,
    export_arena,
    join,
)
from baton.kv_transfer.protocol.messages import Export
from baton.kv_transfer.slices import EXPORTED, Slice
from baton.system import cuda_driver
from tests.layouts import kv_layout, paged

LAYOUT = kv_layout(1, 1, 8, "float32")
PIECE = Piece(0, 0, 1, 0, 16)


@pytest.fixture
def arena() -> Iterator[kv.Arena]:
    arena = kv.Arena.create(4, 4096)
    yield arena
    arena.close()


def pool(arena: kv.Arena) -> HostPool:
    return HostPool(paged([torch.randn(2, 2, 16, 1, 8)], 16, LAYOUT, "cpu"), arena)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"kind": "cuda_ipc"}, "the sender has KV in cuda_ipc"),
        ({"token": bytes(16)}, "another process"),
        ({"handles": (b"short",)}, "unpack"),
        ({"handles": ((1 << 22).to_bytes(4, "little") + bytes(4),)}, "No such file"),
        ({"num_slots": 400}, "mmap length"),
    ],
)
def test_what_is_refused(arena: kv.Arena, change: dict[str, Any], why: str) -> None:
    export = msgspec.structs.replace(export_arena(arena), **change)
    with pytest.raises(Unreachable, match=why):
        PeerArena(export)


@pytest.mark.parametrize(("heads", "ranks"), [((0, 2), {0}), ((2, 4), {1}), ((1, 3), {0, 1})])
def test_a_rank_opens_the_memories_with_its_heads(
    arena: kv.Arena, heads: tuple[int, int], ranks: set[int]
) -> None:
    """Of a worker with two ranks. Slots of its other memories cannot be read."""
    own = export_arena(arena)
    both = join([own, msgspec.structs.replace(own, handles=(b"of rank1",))])
    assert count_slots(both) == 8
    opened: list[bytes] = []

    def open_one(export: Export) -> PeerArena:
        opened.append(export.handles[0])
        return PeerArena(own)

    memories = PeerMemories(both, kv_layout(1, 4, 8, "float32"), [heads], open_one)
    assert opened == [(own.handles[0], b"of rank1")[rank] for rank in sorted(ranks)]
    for rank in range(2):
        if rank in ranks:
            assert memories.place(4 * rank + 3)[1] == 3
        else:
            with pytest.raises(Unreachable, match="rank without its heads"):
                memories.place(4 * rank + 3)
    memories.close()


def test_handles_of_more_ranks_than_can_share_the_heads(arena: kv.Arena) -> None:
    three = join([export_arena(arena)] * 3)
    with pytest.raises(Unreachable, match="3 ranks do not share the heads"):
        PeerMemories(three, kv_layout(1, 4, 8, "float32"), [(0, 4)], PeerArena)


@pytest.mark.parametrize("missing", [0, 1])
def test_device_memory_that_is_smaller_than_its_owner_says(
    monkeypatch: pytest.MonkeyPatch, missing: int
) -> None:
    """It is closed again. Copies beyond its end would end the process of the reader."""
    calls: list[str] = []

    def driver(name: str, *args: Any) -> None:
        calls.append(name)
        if name == "cuIpcOpenMemHandle_v2":
            args[0]._obj.value = 0x7000_1000
        elif name == "cuMemGetAddressRange_v2":  # the memory begins a page before the first slot
            args[0]._obj.value, args[1]._obj.value = 0x7000_0000, 0x1000 + exported_bytes(4, 4096) - missing

    monkeypatch.setattr(cuda_driver, "call", driver)
    export = Export("cuda_ipc", (bytes(64),), 4, 4096, bytes(16))
    if missing:
        with pytest.raises(Unreachable, match=f"has {exported_bytes(4, 4096) - 1} bytes, and its owner says"):
            cuda_memory.PeerDeviceMemory(export)
    else:
        cuda_memory.PeerDeviceMemory(export).close()
    assert calls.count("cuIpcCloseMemHandle") == 1


def test_memory_that_may_shrink_is_refused(arena: kv.Arena) -> None:
    """A reader would die of it."""
    fd = os.memfd_create("not sealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 1 << 20)
    handle = os.getpid().to_bytes(4, "little") + fd.to_bytes(4, "little")
    with pytest.raises(Unreachable, match="may shrink"):
        PeerArena(msgspec.structs.replace(export_arena(arena), handles=(handle,)))
    os.close(fd)


@pytest.mark.parametrize("change", ["none", "byte", "gathered again", "gathered for TCP", "marked again"])
def test_a_slice_that_is_not_the_one_named(arena: kv.Arena, change: str) -> None:
    owner, reader = pool(arena), pool(kv.Arena.create(4, 4096))
    memory = reader.open(owner.export(), None)
    owner.gather([Slice(PIECE, slot=2, table=([1], 0), memory=EXPORTED, sum=7)])
    if change == "byte":
        arena.slot(2)[9] ^= 4
    elif change == "gathered again":  # the same bytes, too
        owner.gather([Slice(PIECE, slot=2, table=([1], 0), memory=EXPORTED, sum=8)])
    elif change == "gathered for TCP":
        owner.gather([Slice(PIECE, slot=2, table=([1], 0))])
    elif change == "marked again":  # and the bytes are about to change
        arena.marks[2 * 16] ^= 1
    _, outcome = reader.scatter([Slice(PIECE, there=2, table=([0], 0), sum=7)], memory)
    assert outcome() == [0 if change == "none" else None]
    memory.close()


def test_memory_of_a_killed_process_stays_until_it_is_closed() -> None:
    code = (
        "import os, sys, msgspec, kv_transfer as kv; from kv_transfer.peer_memory import export_arena, mark\n"
        "arena = kv.Arena.create(4, 4096); arena.slot(1)[:4] = b'true'; mark(arena, 1, 5, 6)\n"
        "os.write(1, msgspec.msgpack.encode(export_arena(arena))); os.close(1)\n"
        "sys.stdin.read()"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    export = msgspec.msgpack.decode(child.stdout.read(), type=Export)
    memory = PeerArena(export)
    child.kill()
    child.communicate()
    assert bytes(memory.slot(1)[:4]) == b"true"
    assert memory.mark(1) == (5, 6)
    memory.close()
    with pytest.raises(Unreachable, match="No such"):
        PeerArena(export)
