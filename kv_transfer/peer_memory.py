"""Memory of an engine process that engine processes of other workers on its host read.

    owner:   mark the slot with a new generation, fill it, mark it with its checksum, send a descriptor
    reader:  copy the slot, copy its mark, compare generation and checksum, send TAKEN

The owner may use a slot again without TAKEN when the session has ended. The reader then finds another
generation. A deadline would prove nothing. Memory lives as long as it is mapped, also if its owner dies.

The memory has `num_slots` slots of `slot_bytes`, then the marks, then a token. Two implementations: the arena
(`shared_memory`), and raw device memory (`cuda_ipc`, in `cuda_memory`). Each rank of a worker exports a
memory of its own. On CPUs this is the arena for all of them.
"""

import fcntl
import mmap
import os
import struct
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from msgspec.structs import replace

from baton.kv_transfer.arena import MARK, TOKEN, Arena, exported_bytes
from baton.kv_transfer.layout import KVLayout, Range, rank_of
from baton.kv_transfer.protocol.messages import Export

# linux/fcntl.h; the fcntl module has no names for these before Python 3.13's
_F_GET_SEALS, _F_SEAL_SHRINK = 1034, 0x0002
_HANDLE = struct.Struct("<II")  # process, descriptor
_MARK = struct.Struct("<QQ")
assert _MARK.size == MARK


class Unreachable(Exception):
    """The memory cannot be exported, or not be read from here. The text says why."""


class PeerMemory(Protocol):
    """Memory of another process (`PeerArena`, `PeerDeviceMemory`), or of all ranks of another worker
    (`PeerMemories`), as a reader has it."""

    def close(self) -> None:
        """No copy from it is under way."""


M = TypeVar("M", bound=PeerMemory)


class PeerMemories(Generic[M]):
    """Implements PeerMemory: the memories of a worker that one rank of a reader has open.

    Slots are numbered over all ranks of the worker: those of rank 0, then those of rank 1, and so on."""

    def __init__(
        self, export: Export, layout: KVLayout, heads: Sequence[Range], open_one: Callable[[Export], M]
    ) -> None:
        """Opens those with any of `heads`, by array of the layout. Raises Unreachable."""
        ranks = len(export.handles)
        needed: set[int] = set()
        try:
            for array, rank_heads in enumerate(heads):
                needed |= {rank_of(layout, head, ranks, array) for head in range(*rank_heads)}
        except StopIteration:
            raise Unreachable(f"{ranks} ranks do not share the heads of this model") from None
        self.slot_bytes = export.slot_bytes
        self._num_slots = export.num_slots
        self._of_ranks: dict[int, M] = {}
        try:
            for rank in sorted(needed):
                self._of_ranks[rank] = open_one(replace(export, handles=(export.handles[rank],)))
        except Unreachable:
            self.close()
            raise

    def place(self, slot: int) -> tuple[M, int]:
        """The memory with this slot, and the number of the slot there. Raises Unreachable."""
        rank, in_rank = divmod(slot, self._num_slots)
        if rank not in self._of_ranks:
            raise Unreachable("a slice is in memory of a rank without its heads")
        return self._of_ranks[rank], in_rank

    def close(self) -> None:
        for memory in self._of_ranks.values():
            memory.close()


def count_slots(export: Export) -> int:
    """Of all ranks."""
    return export.num_slots * len(export.handles)


def join(exports: Sequence[Export]) -> Export:
    """The memories of all ranks of a worker, as peers get them."""
    return replace(exports[0], handles=tuple(handle for export in exports for handle in export.handles))


@cache
def host() -> str:
    """Names this machine until it boots again. Raises Unreachable where the kernel does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError as e:
        raise Unreachable(str(e)) from None


def check(export: Export, kind: str) -> None:
    """Raises Unreachable if the memory is not of this kind."""
    if export.kind != kind:
        raise Unreachable(f"the sender has KV in {export.kind}, the receiver in {kind}")


def mark(arena: Arena, slot: int, generation: int, checksum: int) -> None:
    _MARK.pack_into(arena.marks, slot * MARK, generation, checksum)


def export_arena(arena: Arena) -> Export:
    handle = _HANDLE.pack(os.getpid(), arena.fd)
    return Export("shared_memory", (handle,), arena.num_slots, arena.slot_bytes, arena.token)


class PeerArena:
    """Implements PeerMemory: the arena of another process of this user, mapped to read."""

    def __init__(self, export: Export) -> None:
        """Raises Unreachable."""
        check(export, "shared_memory")
        slots = export.num_slots * export.slot_bytes
        size = exported_bytes(export.num_slots, export.slot_bytes)
        try:
            pid, number = _HANDLE.unpack(export.handles[0])
            fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                if not fcntl.fcntl(fd, _F_GET_SEALS) & _F_SEAL_SHRINK:
                    raise Unreachable("the memory may shrink")
                self._map = mmap.mmap(fd, size, access=mmap.ACCESS_COPY)  # nothing is written to it
            finally:
                os.close(fd)
        except (OSError, ValueError, struct.error) as e:
            raise Unreachable(str(e)) from None
        self._memory = memoryview(self._map)
        self._slot_bytes = export.slot_bytes
        self._marks = slots
        at = slots + export.num_slots * MARK
        if self._memory[at : at + TOKEN] != export.token:
            raise Unreachable("another process has that number here")

    def slot(self, index: int) -> memoryview:
        return self._memory[index * self._slot_bytes : (index + 1) * self._slot_bytes]

    def mark(self, slot: int) -> tuple[int, int]:
        """Generation and checksum."""
        return _MARK.unpack_from(self._memory, self._marks + slot * MARK)

    def close(self) -> None:
        self._memory.release()
        self._map.close()
