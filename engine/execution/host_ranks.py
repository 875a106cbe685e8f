"""How ranks on CPUs exchange tensors: through memory that all of them map.

    write the tensor to this rank's place in a bank ─▶ count ─▶ wait until all have counted ─▶ read the bank

There are two banks, used in turn. A rank that writes to a bank again has seen all ranks count in the other
one, so all have read what was there.

A rank that waits yields its core for a while, since there may be fewer cores than ranks, and then sleeps.
With three ranks on two cores an all-reduce takes 30 µs. Gloo, which wakes threads, takes 900 to 4,000.
"""

import mmap
import os
import threading
import time

import torch
from torch import Tensor

from baton.engine.layers.ranks import Group

PLACE_BYTES = 4 << 20
"""Bytes of one rank in a bank. Larger tensors go in pieces."""
LINE = 64
"""Bytes of a cache line: each rank's count has its own."""
YIELDS = 200
"""Times that a rank yields its core, before it sleeps."""
SLEEP_SECONDS = 50e-6


class HostRanks(Group):
    """Several ranks, each a process or, in tests, a thread."""

    def __init__(self, rank: int, size: int, fd: int) -> None:
        """`fd`: a memfd that all ranks have. It is empty at first."""
        super().__init__(rank, size, torch.device("cpu"))
        counts, banks = LINE * size, 2 * size * PLACE_BYTES
        os.ftruncate(fd, counts + banks)
        memory = mmap.mmap(fd, counts + banks)
        self._counts = memoryview(memory)[:counts].cast("q")[:: LINE // 8]
        self._banks = torch.frombuffer(memory, dtype=torch.uint8, offset=counts).view(2, size, PLACE_BYTES)
        self._turn = 0
        self._lock = threading.Lock()

    def all_reduce(self, x: Tensor) -> Tensor:
        for piece in self._pieces(x):
            torch.sum(self._exchanged(piece), dim=0, out=piece)
        return x

    def broadcast(self, x: Tensor) -> None:
        for piece in self._pieces(x):
            piece.copy_(self._exchanged(piece)[0])

    def _gather(self, x: Tensor) -> Tensor:
        gathered = [self._exchanged(piece).clone() for piece in self._pieces(x)]
        return torch.cat(gathered, dim=1).view(self.size, *x.shape)

    def _reduce_minimum(self, x: Tensor) -> None:
        for piece in self._pieces(x):
            piece.copy_(self._exchanged(piece).amin(dim=0))

    @staticmethod
    def _pieces(x: Tensor) -> tuple[Tensor, ...]:
        return x.view(-1).split(PLACE_BYTES // x.element_size())

    def _exchanged(self, piece: Tensor) -> Tensor:
        """What each rank passes here: [ranks, numel]. Valid until the next call but one."""
        bank = self._banks[self._turn % 2].view(piece.dtype)[:, : piece.numel()]
        bank[self.rank] = piece
        self._meet()
        return bank

    def _meet(self) -> None:
        """Returns when all ranks have called it."""
        self._turn += 1
        self._fence()
        self._counts[self.rank] = self._turn
        for rank in range(self.size):
            yields = 0
            while self._counts[rank] < self._turn:
                yields += 1
                if yields < YIELDS:
                    os.sched_yield()
                else:
                    time.sleep(SLEEP_SECONDS)
        self._fence()

    def _fence(self) -> None:
        """Orders accesses to memory before and after it, on CPUs that do not keep their order (ARM)."""
        for _ in range(2):  # a release, then an acquire
            with self._lock:
                pass
