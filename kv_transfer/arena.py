"""The staging arena: memory that an engine process shares with its transfer process alone.

A memfd has no name: it is inherited, it dies with the last process that maps it, it needs no /dev/shm and no
resource tracker. It begins with a control area: the engine's ticks (a u64), how many ids follow (a u64), and
the ids (16 bytes each) of the requests that the engine is computing, which explain its death. Pages of that
area take no memory until they are written. Then come the slots. A slot belongs to one process at a time:
descriptors over the engine channel pass it back and forth.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from collections.abc import Collection

from kv_transfer.config import MAX_SLOT_BYTES, PAGE

_F_ADD_SEALS = 1033  # linux/fcntl.h; the fcntl module has no names for these before Python 3.13's
_SEAL_SHRINK_AND_GROW = 0x0002 | 0x0004
_MADV_POPULATE_WRITE = 23  # asm-generic/mman-common.h; the mmap module has no name for it
_ID_BYTES = 16
_CONTROL_BYTES = 1 << 20
MAX_STEP_IDS = _CONTROL_BYTES // _ID_BYTES - 1


class Arena:
    """`num_slots` × `slot_bytes` behind a control area. `fd` stays open, and is owned by this object."""

    def __init__(self, fd: int, num_slots: int, slot_bytes: int) -> None:
        self.fd = fd
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        size = _CONTROL_BYTES + num_slots * slot_bytes
        found = os.fstat(fd).st_size
        if found != size:
            raise ValueError(f"arena fd {fd} has {found} bytes, not {size} ({num_slots} × {slot_bytes})")
        self._map = mmap.mmap(fd, size)
        self.memory = memoryview(self._map)[_CONTROL_BYTES:]  # all slots, for pinning
        self._tick = memoryview(self._map)[:8].cast("Q")
        self._step_size = memoryview(self._map)[8:16].cast("Q")
        self._step_ids = memoryview(self._map)[16:_CONTROL_BYTES]

    @classmethod
    def create(cls, num_slots: int, slot_bytes: int) -> Arena:
        if slot_bytes % PAGE or not PAGE <= slot_bytes <= MAX_SLOT_BYTES:
            raise ValueError(
                f"slot_bytes is {slot_bytes}: must be a multiple of {PAGE}, at most {MAX_SLOT_BYTES}"
            )
        fd = os.memfd_create("baton-kv-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, _CONTROL_BYTES + num_slots * slot_bytes)
        # Neither side can pull the memory away under the other.
        fcntl.fcntl(fd, _F_ADD_SEALS, _SEAL_SHRINK_AND_GROW)
        return cls(fd, num_slots, slot_bytes)

    @classmethod
    def attach(cls, fd: int, num_slots: int, slot_bytes: int) -> Arena:
        """Map an inherited arena; ValueError if it is not of this size."""
        return cls(fd, num_slots, slot_bytes)

    def populate(self) -> None:
        """Have this process's page tables filled now, and not page by page as the first frames come."""
        with contextlib.suppress(OSError):  # a kernel before Linux 5.14 does not know how
            self._map.madvise(_MADV_POPULATE_WRITE, _CONTROL_BYTES)

    def slot(self, index: int) -> memoryview:
        assert 0 <= index < self.num_slots, f"slot {index} of {self.num_slots}"
        return self.memory[index * self.slot_bytes : (index + 1) * self.slot_bytes]

    def tick(self) -> None:
        """Engine thread only: once per layer and start-up stage, and at least once a second when idle."""
        self._tick[0] = (self._tick[0] + 1) & 0xFFFF_FFFF_FFFF_FFFF

    @property
    def ticks(self) -> int:
        """0: the engine has not ticked yet."""
        return self._tick[0]

    def set_step(self, ids: Collection[bytes]) -> None:
        """Engine thread only: the requests that are being computed from now on, `MAX_STEP_IDS` at most. A
        reader never sees ids that are half written, whenever the writer dies."""
        assert len(ids) <= MAX_STEP_IDS
        self._step_size[0] = 0
        written = b"".join(ids)
        self._step_ids[: len(written)] = written
        self._step_size[0] = len(written) // _ID_BYTES

    @property
    def step(self) -> list[bytes]:
        """The ids of the step that the engine is in, or died in."""
        end = min(self._step_size[0], MAX_STEP_IDS) * _ID_BYTES
        return [bytes(self._step_ids[i : i + _ID_BYTES]) for i in range(0, end, _ID_BYTES)]

    def close(self) -> None:
        """Unmap. Arrays over slots must be gone before; what the kernel frees waits for the last mapping."""
        for view in (self._tick, self._step_size, self._step_ids):
            view.release()
        self.memory.release()
        self._map.close()
        os.close(self.fd)
