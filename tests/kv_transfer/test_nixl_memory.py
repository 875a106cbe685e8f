"""Memory that NIXL reads, of two workers in this process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import msgspec
import pytest

import kv_transfer as kv
from kv_transfer.config import nixl_installed
from kv_transfer.process.nixl_memory import NixlMemory, checksum

from .conftest import until

pytestmark = pytest.mark.skipif(not nixl_installed(), reason="NIXL is not installed")
OWNER, READER = 5, 6  # incarnations


@pytest.fixture(scope="module")
def pair() -> tuple[NixlMemory, kv.Arena, NixlMemory, kv.Arena]:
    """The owner with its arena, the reader with its own."""
    arenas = [kv.Arena.create(4, 4096) for _ in range(4)]
    return NixlMemory(OWNER, *arenas[:2]), arenas[0], NixlMemory(READER, *arenas[2:]), arenas[3]


def all_of(found: Callable[[], Iterator[tuple[int, object]]]) -> list[tuple[int, object]]:
    return until(lambda: list(found()), "a read to end")


def test_slots_are_read_and_verified(pair: tuple[NixlMemory, kv.Arena, NixlMemory, kv.Arena]) -> None:
    owner, there, reader, here = pair
    assert reader.open(1, OWNER, owner.export) == ""
    assert all_of(reader.opened) == [(1, "")]
    payload = os.urandom(1000)
    there.slot(2)[:1000] = payload
    assert reader.read(1, 2, 3, 1000, checksum(memoryview(payload)))
    assert all_of(reader.finished) == [(3, True)]
    assert here.slot(3)[:1000] == payload
    assert reader.read(1, 2, 0, 1000, checksum(memoryview(b"what was there before")))
    reader.close(1)  # the session ends, the read goes on
    assert all_of(reader.finished) == [(0, False)]
    assert reader.look_within() is None


def test_metadata_that_is_not_of_this_peer(pair: tuple[NixlMemory, kv.Arena, NixlMemory, kv.Arena]) -> None:
    """It is refused, and the next peer is read."""
    owner, _, reader, _ = pair
    assert reader.open(1, OWNER + 1, owner.export) == "the metadata is of another worker"
    for size in (2, 8, 50):
        bad = msgspec.structs.replace(owner.export, handle=owner.export.handle[:size])
        assert reader.open(2, OWNER, bad).startswith("NIXL: ")
    wrong = msgspec.structs.replace(owner.export, token=bytes(16))
    assert reader.open(3, OWNER, wrong) == ""
    assert all_of(reader.opened) == [(3, "NIXL did not read the token")]
    reader.close(3)
    assert reader.open(4, OWNER, owner.export) == ""
    assert all_of(reader.opened) == [(4, "")]
    reader.close(4)
