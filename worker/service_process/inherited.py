"""What the child processes of a worker inherit: their ends of arenas and channels."""

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from baton.kv_transfer import ArenaEnd, channel_pair
from baton.kv_transfer.arena import memory_file
from baton.kv_transfer.shared_store import StoreFds
from baton.worker.config import WorkerConfig


@dataclass(frozen=True, slots=True)
class ArenaEnds:
    """The ends of one direction of KV, which the children inherit."""

    ranks: Sequence[ArenaEnd]
    transfer: ArenaEnd

    @classmethod
    def create(cls, config: WorkerConfig) -> "ArenaEnds":
        engine, transfer = ArenaEnd.pair(config.kv_slots, config.kv_slot_bytes)
        engine, others = engine.of_ranks(config.engine.tensor_parallel_size)
        return cls([engine, *others], transfer)

    def close(self) -> None:
        for end in (*self.ranks, self.transfer):
            end.close_channels()
        self.transfer.arena.close()


@dataclass(frozen=True, slots=True)
class StoreEnds:
    """Of the shared store: memory for its units, and channels of the ranks and of the store process."""

    ranks: Sequence[StoreFds]
    store: socket.socket
    inherited: Sequence[socket.socket]  # by the ranks

    @classmethod
    def create(cls, ranks: int) -> "StoreEnds":
        arena, (engine, store) = memory_file(), channel_pair()
        pairs = [[channel_pair() for _ in range(ranks - 1)] for _ in ("gathers", "scatters")]
        ours, theirs = ([[pair[end].fileno() for pair in some] for some in pairs] for end in (0, 1))
        others = [StoreFds(arena, None, [gather], [scatter]) for gather, scatter in zip(*theirs, strict=True)]
        first = StoreFds(arena, engine.fileno(), *ours)
        return cls([first, *others], store, [engine, *chain(*chain(*pairs))])

    def close_inherited(self) -> None:
        for end in self.inherited:
            end.close()

    def close(self) -> None:
        self.close_inherited()
        self.store.close()
        os.close(self.ranks[0].arena)
