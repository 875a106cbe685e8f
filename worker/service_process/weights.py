"""New weights for a worker, under one call of a coordinator that replaces those of all workers.

    stage ─▶ the engine reads and checks the weights, while attempts go on. What is not at the path comes from
             another worker, if a router asks
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
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from grpc.aio import AioRpcError

from baton.engine import trainer_files
from baton.engine.api.config import versioned
from baton.rpc import worker_pb2 as pb
from baton.rpc.stubs import WorkerStub
from baton.worker import messages
from baton.worker.messages import WeightsStaged
from baton.worker.service_process.backend import Backend, Refused
from baton.worker.service_process.checkpoint_files import CheckpointFiles
from baton.worker.service_process.live_engine import LiveEngine
from baton.worker.service_process.pause import WorkerPause
from baton.worker.service_process.streams import Routers

log = logging.getLogger(__name__)

MAX_PATH, MAX_VERSION = 4096, 128
MOST_READERS = 2
"""Workers that read the checkpoint at the same time."""
CLOSE_WITHIN, IDLE_CHECK, FREE_WITHIN, ATTACH_WITHIN = 30.0, 0.002, 1.0, 5.0  # seconds
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
        self._files: CheckpointFiles | None = None  # of the weights; None: they are those of `--model`
        self._streams = 0  # of routers that will have been opened when all are attached again
        self._readers = asyncio.Semaphore(MOST_READERS)

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
        """Raises Refused, and TreeError if the engine process that has staged the weights ends."""
        stage = (await _next(commands, "stage")).stage
        path, version = _checked(stage)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FREE_WITHIN):  # the end of another call may come later than this one
                await self._free.wait()
        if not self._free.is_set():
            raise Refused("another replacement of the weights is under way")
        if self._backend.draining:
            raise Refused(self._backend.draining)
        self._free.clear()
        applying: asyncio.Task[CheckpointFiles | None] | None = None
        files: CheckpointFiles | None = None
        unpaused = contextlib.AsyncExitStack()
        try:
            began, engine = time.monotonic(), await self._backend.serving()
            files, staged = await self._stage(engine, stage)
            log.info("weights of %s are staged, version %s", path, version)
            if not stage.fingerprint:  # else a router waits until it computes with them
                self._backend.tell_staged(version)
            yield pb.WeightsReport(bytes=staged.nbytes, seconds=time.monotonic() - began)
            await _next(commands, "close")
            began = time.monotonic()
            await unpaused.enter_async_context(self._pause.unchanged())
            keeps_kv = self._pause.keeps_kv
            await self._close(engine, keeps_kv=keeps_kv)
            yield pb.WeightsReport(seconds=time.monotonic() - began)
            version = (await _next(commands, "apply")).version or version
            new = pb.StageWeights(path=path, version=version, named_at=stage.named_at, rolls=stage.rolls)
            _checked(new)
            began = time.monotonic()
            applying = asyncio.create_task(self._apply(engine, new, files, keeps_kv=keeps_kv))
            await asyncio.shield(applying)  # the caller may end the call, and the engine goes on
            log.info("computes with weights of %s, version %s", path, version)
            yield pb.WeightsReport(seconds=time.monotonic() - began)
        finally:
            # A call may end by cancellation, while what follows waits for the engine.
            await asyncio.shield(self._end(applying, files, unpaused))

    async def send_checkpoint(
        self, version: str, write: Callable[[pb.CheckpointPart], Awaitable[object]]
    ) -> None:
        """Sends the files of the weights to another worker. Raises Refused."""
        async with self._readers:
            weights = self._backend.weights
            if self._files is None or weights is None or weights.version != version:
                raise Refused(f"it has no weights of version {version[:MAX_VERSION]}")
            try:
                await self._files.send(write)
            except OSError as error:
                raise Refused(f"it cannot read its weights: {error}") from error

    async def _stage(
        self, engine: LiveEngine, stage: pb.StageWeights
    ) -> tuple[CheckpointFiles, WeightsStaged]:
        """The engine reads the weights, from the path or from another worker. Raises Refused."""
        if stage.fingerprint and (why := await asyncio.to_thread(_not_copied, Path(stage.path))):
            raise Refused(why)
        staged = await self._backend.stage_weights(engine, stage.path)
        if not (why := _unfit(stage, staged)):
            return await _opened(Path(stage.path), self._backend.run_dir), staged
        if not stage.peer:
            raise Refused(why)
        log.info("%s; %s is asked for the weights of version %s", why, stage.peer, stage.version)
        await self._backend.send(messages.DropWeights())
        files = await self._fetched(stage, why)
        try:
            staged = await self._backend.stage_weights(engine, files.path)
            if unfit := _unfit(stage, staged):
                raise Refused(f"{why}; {stage.peer}: {unfit}")
        except BaseException:
            await asyncio.to_thread(files.close)
            raise
        return files, staged

    async def _fetched(self, stage: pb.StageWeights, why: str) -> CheckpointFiles:
        try:
            async with self._backend.connect(stage.peer) as channel:
                parts = WorkerStub(channel).ReadCheckpoint(pb.CheckpointRequest(version=stage.version))
                return await CheckpointFiles.received(aiter(parts), self._backend.run_dir)
        except AioRpcError as error:
            raise Refused(f"{why}; {stage.peer}: {error.details()}") from error
        except OSError as error:
            raise Refused(
                f"{why}; the weights of {stage.peer} cannot be copied to memory: {error}"
            ) from error

    async def _apply(
        self, engine: LiveEngine, weights: pb.StageWeights, files: CheckpointFiles, *, keeps_kv: bool
    ) -> CheckpointFiles | None:
        """Returns the files of the weights of before, which are closed after the report: to give 16 GB of
        memory back takes a second, and streams go on with the report."""
        replaced = await self._backend.replace_weights(engine, weights.version, files.path)
        before, self._files = self._files, files
        described = self._description
        described.weights.CopyFrom(weights)
        described.model_fingerprint, described.content_root = (
            replaced.model_fingerprint,
            replaced.content_root,
        )
        if keeps_kv:
            self._routers.broadcast(pb.WorkerMessage(description=described).SerializeToString())
        await self._open()
        if weights.rolls:  # the next workers stop when this one serves
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ATTACH_WITHIN):
                    await self._routers.opened(self._streams)
        return before

    async def _end(
        self,
        applying: asyncio.Task[CheckpointFiles | None] | None,
        files: CheckpointFiles | None,
        unpaused: contextlib.AsyncExitStack,
    ) -> None:
        before: CheckpointFiles | None = None
        async with unpaused:
            if applying is None:
                await self._backend.send(messages.DropWeights())
            else:
                await asyncio.wait([applying])
                if not applying.cancelled() and applying.exception() is None:
                    before = applying.result()
            # Before another call may replace the files.
            unused = [each for each in (before, files) if each is not None and each is not self._files]
            self._backend.tell_staged("")
            await self._open()
            self._free.set()
        try:
            await self._pause.settle()  # the engine may have lacked weights
        finally:
            for each in unused:
                await asyncio.to_thread(each.close)

    async def _close(self, engine: LiveEngine, *, keeps_kv: bool) -> None:
        self._is_open.clear()
        self._backend.drain(REASON)
        end = time.monotonic() + CLOSE_WITHIN
        while True:
            # Again with each turn: an attempt that was accepted before may have waited for a full socket.
            await engine.send(messages.HandBack(REASON, keeps_kv))
            status = await engine.status()
            if status.told.idle or (keeps_kv and status.only_decodes):
                break
            if time.monotonic() > end:
                raise Refused(f"its engine is still busy after {CLOSE_WITHIN:g} s")
            await asyncio.sleep(IDLE_CHECK)
        self._streams = self._routers.expected
        if not keeps_kv:
            self._routers.finish()

    async def _open(self) -> None:
        if not self._is_open.is_set():
            await self._backend.serve_again(REASON)
            self._is_open.set()


def _not_copied(path: Path) -> str:
    """Why the weights cannot be read yet. Empty, too, if this host cannot read the path: another worker may
    have them."""
    try:
        files = trainer_files.found_in(path.iterdir()) if path.is_dir() else []
        trainer_files.check_runs(files)
    except ValueError as error:
        return str(error)
    except OSError:
        return ""  # the engine reads it next, and says why it cannot
    return f"{path}: the trainer has not copied its tensors to memory of the host" if files else ""


def _unfit(stage: pb.StageWeights, staged: WeightsStaged) -> str:
    """Why these are not the weights that are asked for. Empty: they are."""
    if staged.error or not stage.fingerprint:
        return staged.error
    read = versioned(staged.fingerprint, stage.version)
    if read == stage.fingerprint:
        return ""
    return f"{stage.path}: other weights than those of the other workers ({read}, there {stage.fingerprint})"


async def _opened(path: Path, run_dir: str | None) -> CheckpointFiles:
    """Raises Refused."""
    opening = asyncio.ensure_future(asyncio.to_thread(CheckpointFiles.opened, path, run_dir))
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        opening.add_done_callback(lambda done: done.exception() or done.result().close())
        raise
    except OSError as error:
        raise Refused(f"{path}: its files cannot be opened: {error}") from error


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
