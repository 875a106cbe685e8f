"""Memory that another process exports: what a reader refuses to open, and what it finds in it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch

import kv_transfer as kv
from kv_transfer.device import HostPool, Staged
from kv_transfer.layout import Slice
from kv_transfer.peer_memory import PeerArena, Unreachable, export_arena
from kv_transfer.protocol.messages import Export

LAYOUT = kv.KVLayout(1, 1, 8, "float32")
PIECE = Slice(0, 0, 1, 0, 16)


@pytest.fixture
def arena() -> Iterator[kv.Arena]:
    arena = kv.Arena.create(4, 4096)
    yield arena
    arena.close()


def pool(arena: kv.Arena) -> HostPool:
    return HostPool(kv.PagedKV([torch.randn(2, 2, 16, 1, 8)], 16, LAYOUT, "cpu"), arena)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"host": "another boot"}, "another machine"),
        ({"kind": "cuda_ipc"}, "the sender has KV in cuda_ipc"),
        ({"token": bytes(16)}, "another process"),
        ({"handle": b"short"}, "unpack"),
        ({"handle": (1 << 22).to_bytes(4, "little") + bytes(4)}, "No such file"),
        ({"num_slots": 400}, "mmap length"),
    ],
)
def test_what_is_refused(arena: kv.Arena, change: dict[str, Any], why: str) -> None:
    export = msgspec.structs.replace(export_arena(arena), **change)
    with pytest.raises(Unreachable, match=why):
        PeerArena(export)


def test_memory_that_may_shrink_is_refused(arena: kv.Arena) -> None:
    """A reader would die of it."""
    fd = os.memfd_create("not sealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 1 << 20)
    handle = os.getpid().to_bytes(4, "little") + fd.to_bytes(4, "little")
    with pytest.raises(Unreachable, match="may shrink"):
        PeerArena(msgspec.structs.replace(export_arena(arena), handle=handle))
    os.close(fd)


@pytest.mark.parametrize("change", ["none", "byte", "gathered again", "gathered for TCP", "marked again"])
def test_a_slice_that_is_not_the_one_named(arena: kv.Arena, change: str) -> None:
    owner, reader = pool(arena), pool(kv.Arena.create(4, 4096))
    memory = reader.open(owner.export())
    owner.gather([Staged(PIECE, 2, [1], generation=7)])
    if change == "byte":
        arena.slot(2)[9] ^= 4
    elif change == "gathered again":  # the same bytes, too
        owner.gather([Staged(PIECE, 2, [1], generation=8)])
    elif change == "gathered for TCP":
        owner.gather([Staged(PIECE, 2, [1])])
    elif change == "marked again":  # and the bytes are about to change
        arena.marks[2 * 16] ^= 1
    _, outcome = reader.pull(memory, [Staged(PIECE, 2, [0], generation=7)])
    assert outcome() == [change == "none"]
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
