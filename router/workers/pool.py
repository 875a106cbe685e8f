"""The connections to all workers. What they report goes to the `desk`, which makes plans."""

import asyncio
import logging
import random
import time

from baton.router.config import RouterConfig
from baton.router.policy.desk import Desk
from baton.router.policy.recording import record
from baton.router.workers.checks import RouterModel
from baton.router.workers.roster import Roster
from baton.router.workers.stream import WorkerStream
from baton.router.workers.worker import POOL_NAMES, Worker
from baton.rpc import worker_pb2 as pb

log = logging.getLogger(__name__)


class WorkerPool(Roster):
    """Owns the streams to the workers. Runs on the event loop, and never waits for a worker.

    Attributes:
        prompts: how many were sent.
    """

    def __init__(self, config: RouterConfig, model: RouterModel) -> None:
        desk = Desk(time.monotonic, config, seed=random.getrandbits(64))
        super().__init__(model, desk, config.worker_wait)
        self.prompts = 0
        self._config = config
        self._streams: dict[str, WorkerStream] = {}  # to the listed workers
        self._retired: set[WorkerStream] = set()  # no longer listed, with open attempts
        self._discovered = False  # there was a list

    async def run(self) -> None:
        """Follows discovery until cancelled, then closes every stream."""
        file = None
        if self._config.record_plans is not None:
            path = f"{self._config.record_plans}.{self._config.incarnation}"
            file = await asyncio.to_thread(open, path, "xb")
            record(self.desk, file)
        try:
            async for addresses in self._config.discovered().watch():
                for address in addresses - self.listed.keys():
                    await self.turn()
                    self._open(address)
                for address in self.listed.keys() - addresses:
                    await self.turn()
                    self.retire(address)
                self._discovered = True
                self.changed.set()
            await asyncio.Event().wait()
        finally:
            await asyncio.gather(*(stream.close() for stream in {*self._streams.values(), *self._retired}))
            self.desk.listener = None
            if file is not None:
                file.close()

    def _open(self, address: str) -> None:
        worker = Worker(address, self.desk, lambda: self.on_capacity(), self.breaker_changed)
        self.listed[address] = worker
        self._streams[address] = WorkerStream(worker, self, self._config)

    def retire(self, address: str) -> None:
        """Discovery no longer lists this worker."""
        del self.listed[address]
        stream = self._streams.pop(address)
        self._retired.add(stream)
        stream.retire(self._retired.discard)

    # ------------------------------------------------------------ the workers

    @property
    def connections(self) -> list[Worker]:
        """All listed workers, by name."""
        return sorted(
            self.listed.values(), key=lambda w: (w.description.first_pool, w.description.index, w.address)
        )

    @property
    def pools(self) -> dict[pb.Pool, str]:
        """The pools that the cluster has, with their names."""
        has_prefill = not self._config.decode_only
        return {p: name for p, name in POOL_NAMES.items() if has_prefill or p == pb.POOL_DECODE}

    @property
    def complete(self) -> bool:
        """Whether each pool of the cluster has a worker."""
        return bool(self.desk.decodes) and (self._config.decode_only or bool(self.desk.prefills))

    @property
    def blind(self) -> bool:
        """Whether this router reaches no worker, though some are listed or there was no list yet. Another
        router may reach them."""
        reaches = self.desk.prefills or self.desk.decodes
        return not reaches and (bool(self.listed) or not self._discovered)
