"""New weights for a worker, under one call of a coordinator that replaces those of all workers.

    stage ─▶ the engine reads and checks the weights, while attempts go on
    close ─▶ attempts are handed back, routers are let go, and no KV of the old weights is in use
    apply ─▶ the engine computes with the new weights, and routers attach again

In a pause with `keep_kv`, attempts that decode stay, with their KV, and so do the streams of routers:

    close ─▶ all other attempts are handed back
    apply ─▶ the engine has the new weights, and routers get the new description

All workers are closed before one applies. So no attempt has KV of other weights than its worker, and no
worker of a pair is behind the other one. A call that ends before `apply` leaves the worker as it was.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator

from baton.rpc import worker_pb2 as pb
from baton.worker import messages
from baton.worker.service_process.backend import Backend, Refused
from baton.worker.service_process.pause import WorkerPause
from baton.worker.service_process.streams import Routers

log = logging.getLogger(__name__)

MAX_PATH, MAX_VERSION = 4096, 128
CLOSE_WITHIN, IDLE_CHECK, FREE_WITHIN = 30.0, 0.002, 1.0  # seconds
REASON = "the weights of the model are replaced"


class WeightsReplacement:
    """Of one worker. `description` has the weights that it computes with."""

    def __init__(
        self,
        backend: Backend,
        routers: Routers,
        pause: WorkerPause,
        description: pb.WorkerDescription,
    ) -> None:
        self._backend = backend
        self._pause = pause
        self._routers = routers
        self._description = description
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._free = asyncio.Event()  # no call has staged weights
        self._free.set()

    @property
    def is_open(self) -> bool:
        return self._is_open.is_set()

    @property
    def under_way(self) -> bool:
        """Whether weights are read, or staged."""
        return not self._free.is_set()

    async def opened(self) -> None:
        """Returns when routers may attach."""
        await self._is_open.wait()

    async def run(self, commands: AsyncIterator[pb.WeightsCommand]) -> AsyncIterator[pb.WeightsReport]:
        """Raises Refused."""
        stage = (await _next(commands, "stage")).stage
        path, version = _checked(stage)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FREE_WITHIN):  # the end of another call may come later than this one
                await self._free.wait()
        if not self._free.is_set():
            raise Refused("another replacement of the weights is under way")
        if self._backend.draining:
            raise Refused("the worker is shutting down")
        self._free.clear()
        applying: asyncio.Task[None] | None = None
        unpaused = contextlib.AsyncExitStack()
        try:
            began, engines = time.monotonic(), self._backend.engines
            staged = await self._backend.stage_weights(path)
            if staged.error:
                raise Refused(staged.error)
            log.info("weights of %s are staged, version %s", path, version)
            yield pb.WeightsReport(bytes=staged.nbytes, seconds=time.monotonic() - began)
            await _next(commands, "close")
            began = time.monotonic()
            await unpaused.enter_async_context(self._pause.unchanged())
            keeps_kv = self._pause.keeps_kv
            await self._close(keeps_kv=keeps_kv)
            self._check_staged(engines)
            yield pb.WeightsReport(seconds=time.monotonic() - began)
            if renamed := (await _next(commands, "apply")).version:
                stage = pb.StageWeights(path=path, version=renamed, named_at=stage.named_at)
                _, version = _checked(stage)
            self._check_staged(engines)
            began = time.monotonic()
            applying = asyncio.create_task(self._apply(stage, keeps_kv=keeps_kv))
            await asyncio.shield(applying)  # the caller may end the call, and the engine goes on
            log.info("computes with weights of %s, version %s", path, version)
            yield pb.WeightsReport(seconds=time.monotonic() - began)
        finally:
            # A call may end by cancellation, while what follows waits for the engine.
            await asyncio.shield(self._end(applying, unpaused))

    async def _apply(self, weights: pb.StageWeights, *, keeps_kv: bool) -> None:
        replaced, described = await self._backend.replace_weights(weights), self._description
        described.weights.CopyFrom(weights)
        described.model_fingerprint, described.content_root = (
            replaced.model_fingerprint,
            replaced.content_root,
        )
        if keeps_kv:
            self._routers.broadcast(pb.WorkerMessage(description=described))
        await self._open()

    async def _end(self, applying: asyncio.Task[None] | None, unpaused: contextlib.AsyncExitStack) -> None:
        async with unpaused:
            if applying is None:
                await self._backend.send(messages.DropWeights())
            else:
                await asyncio.wait([applying])
            await self._open()
            self._free.set()
        await self._pause.settle()  # the engine may have lacked weights

    def _check_staged(self, engines: int) -> None:
        if self._backend.engines != engines:
            raise Refused("its engine process was replaced meanwhile: its weights stay")

    async def _close(self, *, keeps_kv: bool) -> None:
        self._is_open.clear()
        await self._backend.drain()
        end = time.monotonic() + CLOSE_WITHIN
        while True:
            # Again with each turn: an attempt that was accepted before may have waited for a full socket.
            await self._backend.send(messages.HandBack(REASON, keeps_kv))
            engine = await self._backend.engine_status()
            if engine.idle or (keeps_kv and engine.only_decodes):
                break
            if time.monotonic() > end:
                raise Refused(f"its engine is still busy after {CLOSE_WITHIN:g} s")
            await asyncio.sleep(IDLE_CHECK)
        if not keeps_kv:
            self._routers.finish()

    async def _open(self) -> None:
        if not self._is_open.is_set():
            await self._backend.serve_again()
            self._is_open.set()


async def _next(commands: AsyncIterator[pb.WeightsCommand], kind: str) -> pb.WeightsCommand:
    command = await anext(commands, None)
    if command is None:
        raise Refused(f"the call ended before {kind}: the weights stay")
    if command.WhichOneof("kind") != kind:
        raise Refused(f"expected {kind}, not {command.WhichOneof('kind')}")
    return command


def _checked(stage: pb.StageWeights) -> tuple[str, str]:
    if not 0 < len(stage.path) <= MAX_PATH or "\0" in stage.path:
        raise Refused(f"path has {len(stage.path)} characters: it must have 1 to {MAX_PATH}")
    if not 0 < len(stage.version) <= MAX_VERSION or not stage.version.isprintable() or ";" in stage.version:
        raise Refused(f'version must be 1 to {MAX_VERSION} printable characters without ";"')
    return stage.path, stage.version
