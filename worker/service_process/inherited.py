"""What the children of a worker inherit beside arenas (`WorkerEnds`): the memory of the shared store."""

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from baton.kv_transfer import channel_pair
from baton.kv_transfer.arena import memory_file


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
