"""The staging arena: memory that an engine process shares with its transfer process alone.

A memfd has no name: it is inherited, it dies with the last process that maps it, and it needs no /dev/shm
and no resource tracker. A slot belongs to one process at a time. Messages over the channel pass it on.
"""

import contextlib
import ctypes
import fcntl
import mmap
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from baton.kv_transfer.config import MAX_SLOT_BYTES, PAGE

_F_ADD_SEALS = 1033  # linux/fcntl.h; the fcntl module has no names for these before Python 3.13's
_SEAL_SHRINK_AND_GROW = 0x0002 | 0x0004
MARK = 16  # bytes: generation, checksum
TOKEN = 16
_MADV_POPULATE_WRITE = 23  # asm-generic/mman-common.h; the mmap module has no name for it


def exported_bytes(num_slots: int, slot_bytes: int) -> int:
    """Of memory with slots, and behind them a mark of each, then a token, up to a whole page."""
    return num_slots * slot_bytes + -(-(num_slots * MARK + TOKEN) // PAGE) * PAGE


def address_of(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def memory_file() -> int:
    """A descriptor of empty memory, for `Arena.create`."""
    return os.memfd_create("baton-kv-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


class Arena:
    """`num_slots` slots of `slot_bytes` each, and room for their marks. Owns `fd`."""

    def __init__(self, fd: int, num_slots: int, slot_bytes: int) -> None:
        """Maps an inherited arena. Raises ValueError if it is not of this size."""
        self.fd = fd
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        slots = num_slots * slot_bytes
        size = exported_bytes(num_slots, slot_bytes)
        size_of_fd = os.fstat(fd).st_size
        if size_of_fd != size:
            raise ValueError(f"arena fd {fd} has {size_of_fd} bytes, not {size} ({num_slots} × {slot_bytes})")
        self.pinned = False  # by `device.host_pool.prepare`
        self._map = mmap.mmap(fd, size)
        self.memory = memoryview(self._map)[:slots]  # all slots, for pinning
        self.marks = memoryview(self._map)[slots:]  # see `peer_memory`
        self._token = self.marks[num_slots * MARK :][:TOKEN]

    @classmethod
    def create(cls, num_slots: int, slot_bytes: int, fd: int | None = None) -> "Arena":
        """`fd`: an empty one of `memory_file`. None: a new one."""
        if slot_bytes % PAGE or not PAGE <= slot_bytes <= MAX_SLOT_BYTES:
            raise ValueError(
                f"slot_bytes is {slot_bytes}: must be a multiple of {PAGE}, at most {MAX_SLOT_BYTES}"
            )
        fd = memory_file() if fd is None else fd
        try:
            os.ftruncate(fd, exported_bytes(num_slots, slot_bytes))
            # Neither process can take the memory away from the other.
            fcntl.fcntl(fd, _F_ADD_SEALS, _SEAL_SHRINK_AND_GROW)
            arena = cls(fd, num_slots, slot_bytes)
        except BaseException:
            os.close(fd)
            raise
        arena._token[:] = os.urandom(TOKEN)
        return arena

    @property
    def token(self) -> bytes:
        """Random bytes behind the marks. All ranks of the worker export their slots with this token."""
        return bytes(self._token)

    def populate(self, slots: int) -> None:
        """Fills this process's page tables of the first slots now, and not page by page when the first frames
        come. Others take memory when they are used."""
        with contextlib.suppress(OSError):  # a kernel before Linux 5.14 does not know how
            self._map.madvise(_MADV_POPULATE_WRITE, 0, min(slots, self.num_slots) * self.slot_bytes)

    def slot(self, index: int) -> memoryview:
        assert 0 <= index < self.num_slots, f"slot {index} of {self.num_slots}"
        return self.memory[index * self.slot_bytes : (index + 1) * self.slot_bytes]

    def close(self) -> None:
        """Unmaps. Arrays over slots must be gone before. The last process to unmap frees the memory."""
        for view in (self.memory, self._token, self.marks):
            view.release()
        self._map.close()
        os.close(self.fd)


def channel_pair() -> tuple[socket.socket, socket.socket]:
    """For engine ↔ transfer and service ↔ transfer: keeps message boundaries, shows a dead other end."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


@dataclass(frozen=True, slots=True)
class ArenaEnd:
    """One direction of KV as the engine process or the transfer process holds it.

    A worker has one arena for KV that it sends and one for KV that it receives. So a fetch of its own never
    takes a slot from the fetches of others.
    """

    channel: socket.socket  # to the other process: messages that pass slots
    arena: Arena

    @classmethod
    def pair(cls, num_slots: int, slot_bytes: int) -> "tuple[ArenaEnd, ArenaEnd]":
        """Both ends, over one new arena."""
        arena = Arena.create(num_slots, slot_bytes)
        try:
            engine, transfer = channel_pair()
        except BaseException:
            arena.close()
            raise
        return cls(engine, arena), cls(transfer, arena)

    @classmethod
    def inherited(cls, fds: Sequence[int], num_slots: int, slot_bytes: int) -> "ArenaEnd":
        """The end of a process that inherited these `fds`."""
        channel, arena = fds
        return cls(socket.socket(fileno=channel), Arena(arena, num_slots, slot_bytes))

    @property
    def fds(self) -> Sequence[int]:
        return self.channel.fileno(), self.arena.fd


class Arenas(msgspec.Struct, frozen=True):
    """The arenas of a worker and its channels, as a process of its engine gets them."""

    memory_fds: Sequence[int]  # of the arenas: to send, and to receive
    transfer_fds: Sequence[int]  # of rank 0: the channels of both to the transfer process. Else empty
    rank_fds: Sequence[int]  # of rank 0: a channel to each other rank. Else the one to rank 0
    num_slots: int
    slot_bytes: int
    exports: bool  # as in `Transport`, and the next
    adopts: bool

    @property
    def fds(self) -> Sequence[int]:
        return *self.memory_fds, *self.transfer_fds, *self.rank_fds

    def with_fds(self, fds: Sequence[int]) -> "Arenas":
        """As another process has them, which got these in place of `fds`."""
        transfer = 2 + len(self.transfer_fds)
        return msgspec.structs.replace(
            self, memory_fds=fds[:2], transfer_fds=fds[2:transfer], rank_fds=fds[transfer:]
        )

    def map(self) -> tuple[Arena, Arena]:
        """The arenas to send and to receive."""
        sending, receiving = (Arena(fd, self.num_slots, self.slot_bytes) for fd in self.memory_fds)
        return sending, receiving

    def ends(self) -> tuple[ArenaEnd, ArenaEnd]:
        """Of rank 0: the same with their channels."""
        fds = zip(self.transfer_fds, self.memory_fds, strict=True)
        sending, receiving = (ArenaEnd.inherited(end, self.num_slots, self.slot_bytes) for end in fds)
        return sending, receiving

    def ranks(self) -> Sequence[socket.socket]:
        return [socket.socket(fileno=fd) for fd in self.rank_fds]


@dataclass(frozen=True, slots=True)
class WorkerEnds:
    """What the engine of a worker, its ranks and its transfer process share.

    Attributes:
        engine, transfer: ends of the arenas to send and to receive.
        ranks: of the channel between rank 0 and each other rank; rank 0's end first.
    """

    engine: Sequence[ArenaEnd]
    transfer: Sequence[ArenaEnd]
    ranks: Sequence[tuple[socket.socket, socket.socket]]

    @classmethod
    def create(cls, num_slots: int, slot_bytes: int, ranks: int) -> "WorkerEnds":
        engine, transfer = list[ArenaEnd](), list[ArenaEnd]()
        channels = list[tuple[socket.socket, socket.socket]]()
        ends = cls(engine, transfer, channels)
        try:
            for _ in range(2):
                of_engine, of_transfer = ArenaEnd.pair(num_slots, slot_bytes)
                engine.append(of_engine)
                transfer.append(of_transfer)
            for _ in range(ranks - 1):
                channels.append(channel_pair())
        except BaseException:
            ends.close()
            raise
        return ends

    def of_rank(self, rank: int, *, exports: bool, adopts: bool) -> Arenas:
        """`exports` and `adopts` as in `Transport`."""
        arena = self.engine[0].arena
        socks = [theirs for _, theirs in self.ranks[rank - 1 : rank]] if rank else [x for x, _ in self.ranks]
        return Arenas(
            memory_fds=[end.arena.fd for end in self.engine],
            transfer_fds=[] if rank else [end.channel.fileno() for end in self.engine],
            rank_fds=[sock.fileno() for sock in socks],
            num_slots=arena.num_slots,
            slot_bytes=arena.slot_bytes,
            exports=exports,
            adopts=adopts,
        )

    def copied(self, *, exports: bool, adopts: bool) -> Sequence[Arenas]:
        """Of each rank, with descriptors that the caller owns. Ranks share those of the memory."""
        ends = [self.of_rank(rank, exports=exports, adopts=adopts) for rank in range(len(self.ranks) + 1)]
        copies = {fd: os.dup(fd) for arenas in ends for fd in arenas.fds}
        return [arenas.with_fds([copies[fd] for fd in arenas.fds]) for arenas in ends]

    def close_inherited(self) -> None:
        """Closes what the ranks have inherited."""
        for sock in (*(end.channel for end in self.engine), *(end for pair in self.ranks for end in pair)):
            sock.close()

    def close(self) -> None:
        self.close_inherited()
        for end in self.transfer:
            end.channel.close()
            end.arena.close()
