"""The store process of a worker, and what it shares with the engine."""

import asyncio
import logging
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from baton.kv_transfer import channel_pair
from baton.kv_transfer.arena import memory_file
from baton.kv_transfer.shared_store import EXIT_UNUSABLE, STORE_MODULE, StoreStart
from baton.processes.children import Child, describe_exit
from baton.processes.keep import keep
from baton.processes.restarts import RestartPolicy
from baton.processes.spawn import spawn
from baton.worker.config import WorkerConfig
from baton.worker.processes import StartError

log = logging.getLogger(__name__)

AGAIN = 1.0
"""Seconds before a store process that has ended is started again."""


@dataclass(frozen=True, slots=True)
class StoreEnds:
    """Memory for the units of the store, and the channel between the engine and the store process."""

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


class Store:
    """Starts the store process, and again whenever it ends.

    Attributes:
        ends: what it shares with the engine.
        process: the newest one. None: it was not started yet.
    """

    def __init__(self, config: WorkerConfig, incarnation: int) -> None:
        self._config = config
        self._incarnation = incarnation
        self._stopping = asyncio.Event()
        self.ends = StoreEnds.create()
        self.process: Child | None = None

    async def keep(self) -> None:
        """Returns when it has ended after `stop`. It learns the KV layout from the engine. Raises StartError
        if its client cannot be loaded."""
        config, ends = self._config, self.ends
        assert config.kv_store is not None, "it has a store"
        start = StoreStart(
            url=config.kv_store,
            name=config.name,
            title=config.title,
            parent_pid=os.getpid(),
            encrypt=config.kv_encrypt,
            arena_fd=ends.memory,
            channel_fd=ends.store.fileno(),
            logging=config.logging(self._incarnation, "store"),
        )
        lines = msgspec.json.encode(start) + b"\n" + config.secret.hex().encode()

        async def live() -> tuple[float, str]:
            fds = start.arena_fd, start.channel_fd
            child = self.process = Child(
                f"{start.name} store", spawn("-m", STORE_MODULE, given=lines, pass_fds=fds)
            )
            code = await child.wait()
            if code == EXIT_UNUSABLE and not self._stopping.is_set():
                raise StartError("--kv-store: the client of the store cannot be loaded; the log says why")
            return 0.0, f"(pid {child.pid}) {describe_exit(code)}"

        def ended(why: str, delay: float) -> None:
            log.warning("%s store %s; it is started again", start.name, why)

        await keep(live, RestartPolicy(AGAIN, AGAIN), self._stopping, ended)

    def stop(self) -> None:
        """A process that ends is not started again."""
        self._stopping.set()

    def close(self) -> None:
        self.ends.close()
