"""Slots that the transfer process registers with NIXL.

Those of the arenas: the transfer processes compute and compare checksums, and the engines see no difference
to TCP. Or slots with marks, which the engines fill and verify as they do with memory that they export:

    sender:    RING to its engine; the engine opens the slots, gathers slices into them and marks them; SLICE
    receiver:  SLICE: NIXL reads the slot and its mark into a slot here; the engine copies both, and verifies

Slots with marks are on a GPU. The transfer process allocates them, since UCX cannot register memory that it
has by CUDA IPC. On a CPU they are the arena, so that tests run all of this without a GPU.
"""

import ctypes

from baton.kv_transfer.arena import MARK, TOKEN, Arena, address_of
from baton.kv_transfer.config import PAGE
from baton.kv_transfer.cuda_memory import ExportedMemory, Slots
from baton.kv_transfer.peer_memory import export_arena
from baton.kv_transfer.protocol.messages import Export
from baton.system.cuda_driver import allocate, enter_device, read


class ArenaSlots(Slots):
    kind = "nixl"
    mark_bytes = 0  # of each slot; slots and marks come before the token
    device: int | None = None
    export: Export | None = None  # for the engine

    def __init__(self, arena: Arena) -> None:
        super().__init__(address_of(arena.memory), arena.num_slots, arena.slot_bytes)
        self.arena = arena
        self.size = len(arena.memory) + len(arena.marks)
        self._tokens = ctypes.create_string_buffer(PAGE)
        self.tokens = ctypes.addressof(self._tokens)  # a page for those that are read

    def enter_thread(self) -> None:
        """In each thread that reads."""

    def token_read(self, address: int) -> bytes:
        return ctypes.string_at(address, TOKEN)


class MarkedArenaSlots(ArenaSlots):
    kind = "nixl_host"
    mark_bytes = MARK

    def __init__(self, arena: Arena) -> None:
        super().__init__(arena)
        self.export = export_arena(arena)


class GpuSlots(Slots):
    kind = "nixl_cuda"
    mark_bytes = MARK

    def __init__(self, arena: Arena, device: int, slot_bytes: int) -> None:
        """As many slots as the arena has, of `slot_bytes` or what a slot of the arena has, whichever is more.
        Raises CudaError."""
        enter_device(device)
        memory = ExportedMemory(arena.num_slots, max(slot_bytes, arena.slot_bytes), arena.token)
        super().__init__(memory.address, memory.num_slots, memory.slot_bytes)
        self.arena = arena
        self.device: int | None = device
        self.export: Export | None = memory.export
        self.size = memory.size
        self.tokens = allocate(PAGE)

    def enter_thread(self) -> None:
        assert self.device is not None
        enter_device(self.device)

    def token_read(self, address: int) -> bytes:
        self.enter_thread()
        return read(address, TOKEN)


NixlSlots = ArenaSlots | GpuSlots


def make_slots(arena: Arena, device: str | None, slot_bytes: int) -> NixlSlots:
    """`device` and `slot_bytes` as `reader_device` and `exported_slot_bytes` in `TransferConfig`. Raises
    CudaError; OSError if there is no driver."""
    if device is None:
        arena.marks[:TOKEN] = arena.token
        return ArenaSlots(arena)
    kind, _, number = device.partition(":")
    return GpuSlots(arena, int(number), slot_bytes) if kind == "cuda" else MarkedArenaSlots(arena)
