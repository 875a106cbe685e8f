"""Measures NIXL between two nodes, if both have it: the listener reads memory of the peer."""

from __future__ import annotations

import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import msgspec

from baton.cluster.tools.doctor.finding import Finding, good, note, warning

if TYPE_CHECKING:
    from baton.kv_transfer.process.nixl_memory import NixlMemory

SECONDS = 1.0
SLOTS, SLOT_BYTES = 32, 2 << 20  # half of the slots are under way
LARGEST = 8192  # bytes of the description of a node's memory
_RESULT = struct.Struct("<Qd")  # bytes, seconds
REMEDY = "Set UCX_NET_DEVICES and UCX_TLS on both nodes, or use another --kv-connector."


def measure(
    lane: socket.socket, exactly: Callable[[int], bytes], secret: bytes, *, reads: bool
) -> Iterator[Finding]:
    """One node reads, and the other waits for the result. No finding if neither has NIXL.

    `lane`: both ends have proved the secret. `exactly`: reads that many bytes from it."""
    from baton.kv_transfer.config import nixl_installed

    mine, memory = b"", None
    if nixl_installed():
        from baton.kv_transfer import Arena
        from baton.kv_transfer.process.nixl_memory import NixlMemory, checksum

        incarnation, filling = secrets.randbits(64), os.urandom(SLOT_BYTES)
        sending, receiving = (Arena.create(SLOTS, SLOT_BYTES) for _ in range(2))
        sending.memory[:] = filling * SLOTS
        memory = NixlMemory(secret, incarnation, sending, receiving)
        mine = msgspec.msgpack.encode((incarnation, checksum(memoryview(filling)), memory.export))
    lane.sendall(len(mine).to_bytes(4, "little") + mine)
    theirs = exactly(min(int.from_bytes(exactly(4), "little"), LARGEST))
    if memory is None or not theirs:
        if mine or theirs:
            yield note("nixl", f"not installed {'there' if mine else 'here'}")
        return
    why = "the other node could not read from here"
    if reads:
        size, took, why = _read(memory, theirs)
        lane.sendall(_RESULT.pack(size, took))
    else:
        size, took = _RESULT.unpack(exactly(_RESULT.size))
    if size:
        from baton.kv_transfer.process.nixl_memory import rdma_devices

        rdma = ", ".join(rdma_devices()) or "none"
        speed = f"{size * 8 / took / 1e9:.1f} Gbit/s ({size / took / 1e9:.2f} GB/s)"
        yield good("nixl", f"{speed}; RDMA devices here: {rdma}")
    else:
        yield warning("nixl", why, REMEDY)


def _read(memory: NixlMemory, theirs: bytes) -> tuple[int, float, str]:
    """Bytes, seconds, and why there are none, if so."""
    from baton.kv_transfer.process.nixl_memory import SliceToRead
    from baton.kv_transfer.protocol.messages import Export

    try:
        incarnation, expected, export = msgspec.msgpack.decode(theirs, type=tuple[int, int, Export])
    except msgspec.DecodeError as error:  # many network devices need more bytes than workers take
        return 0, 0.0, f"the memory of the other node: {error}"
    if why := memory.open(0, incarnation, export):
        return 0, 0.0, why
    while not (opened := [why for _, why in memory.opened()]):
        time.sleep(0)
    if opened[0]:
        return 0, 0.0, opened[0]
    size, began = 0, time.perf_counter()
    free: Iterable[int] = range(SLOTS // 2)
    while (now := time.perf_counter()) < began + SECONDS or memory.busy:
        if now < began + SECONDS:
            memory.read(0, [SliceToRead(slot, slot, SLOT_BYTES, expected) for slot in free])
        ended = memory.finished()
        if not all(ended.values()):
            return 0, 0.0, "a read failed, or other bytes came"
        time.sleep(0)  # threads read
        size += SLOT_BYTES * len(ended)
        free = ended
    return size, time.perf_counter() - began, "no read can start"
