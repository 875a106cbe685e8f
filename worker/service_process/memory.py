"""Memory that the worker gives back to its device, which a coordinator asks of all workers (`rpc.pause`).

    release ─▶ nothing is computed ─▶ resume, and ReplaceWeights if weights were released ─▶ it goes on

A pause that was set before, or meanwhile, lasts until its own end. The end of a pause does not bring memory
back: a trainer may have it.
"""

import asyncio
import logging

from baton.engine.api.config import MEMORY_TAGS
from baton.rpc import worker_pb2 as pb
from baton.worker import messages
from baton.worker.service_process.backend import Backend, Refused
from baton.worker.service_process.pause import WorkerPause
from baton.worker.service_process.weights import WeightsReplacement

log = logging.getLogger(__name__)

FREE_WITHIN, FREE_CHECK = 1.0, 0.01
"""Seconds in which copies to other tiers end, and transfers of attempts that were aborted."""


class WorkerMemory:
    """Of one worker."""

    def __init__(self, backend: Backend, pause: WorkerPause, weights: WeightsReplacement) -> None:
        self._backend = backend
        self._pause = pause
        self._weights = weights
        self._releasing = False

    @property
    def is_closed(self) -> bool:
        """An attempt that comes would use memory that is not there, or soon is not."""
        return self._releasing or self._backend.lacks_memory

    async def set(self, request: pb.MemoryRequest) -> pb.WorkerStatus:
        """Returns when it is done. Raises Refused."""
        if not request.tags or set(request.tags) - set(MEMORY_TAGS):
            raise Refused(f"tags must be of {', '.join(MEMORY_TAGS)}, not {', '.join(request.tags)[:80]!r}")
        try:
            async with self._pause.unchanged():
                if request.release:
                    self._releasing = True
                    await self._release(list(request.tags))
                elif self._backend.released:
                    done = await self._backend.set_memory(request.tags, release=False)
                    log.info("memory that is released: %s", ", ".join(done.released) or "none")
                    if done.error:
                        raise Refused(done.error)
        finally:
            self._releasing = False
            await self._pause.settle()
        return await self._backend.status()

    async def _release(self, tags: list[str]) -> None:
        backend = self._backend
        if "weights" in tags and self._weights.under_way:
            raise Refused("the weights are being replaced: finish that, or end it, and call again")
        if backend.pause != pb.PAUSE_STEPS and not (await backend.engine_status()).told.idle:
            raise Refused("requests run: call /pause?mode=abort or /pause?mode=wait first")
        await self._pause.freeze()
        done = await self._free(tags)
        if done.busy:
            raise Refused("requests have KV: call /pause?mode=abort or /pause?mode=wait first")
        if done.error:
            raise Refused(done.error)
        log.info("memory that is released: %s", ", ".join(done.released))

    async def _free(self, tags: list[str]) -> messages.MemorySet:
        end = asyncio.get_running_loop().time() + FREE_WITHIN
        while True:
            done = await self._backend.set_memory(tags, release=True)
            if not done.busy or asyncio.get_running_loop().time() > end:
                return done
            await asyncio.sleep(FREE_CHECK)
