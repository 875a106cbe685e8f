"""What the child processes of a worker inherit: their ends of arenas and channels."""

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from baton.kv_transfer import ArenaEnd, Arenas, channel_pair
from baton.kv_transfer.arena import memory_file


@dataclass(frozen=True, slots=True)
class Ends:
    """What the engine, its ranks and the transfer process share.

    Attributes:
        engine, transfer: ends of the arenas to send and to receive.
        ranks: of the channel between rank 0 and each other rank; rank 0's end first.
    """

    engine: Sequence[ArenaEnd]
    transfer: Sequence[ArenaEnd]
    ranks: Sequence[tuple[socket.socket, socket.socket]]

    @classmethod
    def create(cls, num_slots: int, slot_bytes: int, ranks: int) -> "Ends":
        engine, transfer = list[ArenaEnd](), list[ArenaEnd]()
        channels = list[tuple[socket.socket, socket.socket]]()
        found = cls(engine, transfer, channels)
        try:
            for _ in range(2):
                of_engine, of_transfer = ArenaEnd.pair(num_slots, slot_bytes)
                engine.append(of_engine)
                transfer.append(of_transfer)
            for _ in range(ranks - 1):
                channels.append(channel_pair())
        except BaseException:
            found.close()
            raise
        return found

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

    def close_inherited(self) -> None:
        """Closes what the ranks have inherited."""
        for sock in (*(end.channel for end in self.engine), *(end for pair in self.ranks for end in pair)):
            sock.close()

    def close(self) -> None:
        self.close_inherited()
        for end in self.transfer:
            end.channel.close()
            end.arena.close()


@dataclass(frozen=True, slots=True)
class StoreEnds:
    """Of the shared store: memory for its units, and the channel between the engine and the store process."""

    memory: int
    engine: socket.socket
    store: socket.socket

    @classmethod
    def create(cls) -> "StoreEnds":
        memory = memory_file()
        try:
            return cls(memory, *channel_pair())
        except BaseException:
            os.close(memory)
            raise

    def of_rank(self, rank: int) -> Sequence[int]:
        return [self.memory] if rank else [self.memory, self.engine.fileno()]

    def close(self) -> None:
        self.engine.close()
        self.store.close()
        os.close(self.memory)
