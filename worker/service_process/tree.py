"""The process tree of one worker: shared resources, ordered start, supervision, ordered stop.

1. Make the shared resources: heartbeat, arenas, socket pairs, local socket.
2. Start the engine process, which loads the model, the processes of its other ranks, and the store process.
   Those of a standby wait before they touch the memory of KV.
3. Start the transfer process, which needs the KV layout of the engine.
4. Watch them. `WorkerTree.failure` completes with a TreeError as soon as a process dies or hangs. Only
   a store process that ends is started again.
5. Stop the engine's requests, then the transfer process, then the engine process.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psutil

from baton.engine.execution.rank_files import RankFiles
from baton.kv_transfer import Arenas, Heartbeat, TransferConfig
from baton.kv_transfer.config import MOST_PINS
from baton.kv_transfer.spawn import EXIT_ENGINE_GONE
from baton.kv_transfer.staging import device_bytes
from baton.processes.children import Child, describe_exit
from baton.processes.liveness import Watchdog
from baton.processes.spawn import spawn
from baton.system.addresses import url_host
from baton.system.background import raise_priority
from baton.system.directories import make_directory
from baton.system.kept_pages import KeptMemory
from baton.worker import messages
from baton.worker.config import WorkerConfig
from baton.worker.engine_process.start import (
    EXIT_START_FAILED,
    EXIT_TRANSFER_GONE,
    RANK_MODULE,
    EngineProcessConfig,
    RankProcessConfig,
)
from baton.worker.ipc import EngineLink
from baton.worker.messages import EngineReady, FromEngine
from baton.worker.processes import (
    START_SILENCE,
    EngineError,
    EngineRestart,
    StandbyError,
    StartError,
    TreeError,
)
from baton.worker.service_process.store import Store
from baton.worker.service_process.transfer import STOP_TIMEOUT, Transfer

log = logging.getLogger(__name__)
M = TypeVar("M", messages.StandsBy, EngineReady)

MIN_TRANSFER_SILENCE = 3.0
"""Seconds. The transfer process reports once a second."""
CAUSE_SOON = 5.0
"""Seconds to wait for the reason of the rank that caused the exit of another one."""
HURRY = 0.1
"""Seconds between two looks at the priority of a standby that is needed."""


class WorkerTree:
    """Starts, watches and stops the child processes.

    The service process owns it and uses it in its main thread.
    """

    def __init__(
        self,
        config: WorkerConfig,
        incarnation: int,
        kept_files: Sequence[KeptMemory] = (),
        replacements: int = 0,
    ) -> None:
        """`kept_files`: by rank, for KV that outlives the engine. The caller owns them. `replacements`:
        how many engines this worker has had before."""
        self._config = config
        self._replacements = replacements
        self._kept_files = kept_files
        self._adopted = config.reader_device() is not None
        self._exported = self._adopted or config.kv_connector == "auto"
        other = 0
        if self._exported:
            other = device_bytes(config.kv_slots, config.kv_slot_bytes, adopted=self._adopted)
        self._engine_config = replace(
            config.engine, other_bytes=other, stands_by=config.standby
        )  # of each rank
        self._incarnation = incarnation
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._watchers: list[asyncio.Task[None]] = []
        self._stopping = False
        self._engine_stopped = asyncio.Event()
        self._started = False
        self.stands_by = asyncio.Event()
        """Set when the engine process of a standby has all but the memory of KV."""
        self._loaded = False
        """Whether it has loaded the model. If not, it loads, compiles and measures when it is its turn."""
        self._dog: asyncio.Task[None] | None = None
        """Watches the start of the engine process."""
        self._engine: Child | None = None
        self._ranks: list[Child] = []  # from rank 1 on
        if config.trace_dir is not None:
            make_directory("--advanced.trace-dir", Path(config.trace_dir))
        with contextlib.ExitStack() as opened:
            enter = opened.enter_context
            self._store: Store | None = None
            if config.kv_store:
                self._store = enter(contextlib.closing(Store(config, incarnation)))
            self.engine_link = enter(contextlib.closing(EngineLink(config.run_dir)))
            self.heartbeat = enter(contextlib.closing(Heartbeat.create()))
            ranks = config.ranks
            self._rank_files = enter(contextlib.closing(RankFiles.create(ranks))) if ranks > 1 else None
            of_kv = Transfer(config, "transfer", config.engine.tensor_parallel_size)
            self.transfer = enter(contextlib.closing(of_kv))
            self._transfers = [of_kv]
            self._images: Transfer | None = None
            if config.engine.encoder_pool:
                self._images = enter(contextlib.closing(Transfer(config, "image transfer", 1)))
                self._transfers.append(self._images)
            self._shared = opened.pop_all()

    # ------------------------------------------------------------ start

    def start_standby(self) -> None:
        """Starts the engine process and its ranks beside those that serve. They leave the memory of KV alone
        until `start_engine`. `failure` completes with a StartError if they cannot start."""
        self._spawn_engine(standby=True)
        self._dog = self.watch(self._watchdog(START_SILENCE).watch())
        self.watch(self._prepare())

    async def _prepare(self) -> None:
        stages: list[str] = []
        await self._message(messages.StandsBy, lambda stage, fraction: stages.append(stage))
        self._loaded = bool(stages)
        self.engine_link.remove_directory()
        assert self._dog is not None, "it watches the start"
        self._dog.cancel()  # the process sleeps
        for transfer in self._transfers:
            self._spawn_transfer(transfer)
        self.stands_by.set()

    @property
    def is_standby(self) -> bool:
        """Whether `start_standby` has been called, and `start_engine` has not returned."""
        return self._engine is not None and not self._started

    @property
    def standby_bytes(self) -> int:
        """Memory of the engine process and its ranks that no other process has."""
        total = 0
        for child in (self._engine, *self._ranks):
            with contextlib.suppress(psutil.Error):  # it has ended
                total += psutil.Process(child.pid).memory_full_info().uss if child else 0
        return total

    async def start_engine(self, progress: Callable[[str, float], None]) -> EngineReady:
        """Starts the engine process and waits until it is ready. That of a standby goes on: the one before it
        has been reaped.

        `progress` gets each start-up stage and the fraction of it that is done. Raises StartError if the
        user's configuration is the cause.
        """
        silence = START_SILENCE
        if self._engine is None:
            self._spawn_engine(standby=False)
        else:
            await self._hurry()
            if self._loaded:  # it only maps and verifies KV, and prepares transfers
                silence = self._config.deadlines.engine_dead
            await self.engine_link.send(messages.TakeOver())
        if self._store is not None:
            self.watch(self._store.keep())
        dog = self._watchdog(silence)
        self.watch(dog.watch())
        ready = await self._message(EngineReady, progress)
        self.engine_link.remove_directory()
        dog.restart(self._config.deadlines.engine_dead)
        self._started = True
        return ready

    async def _hurry(self) -> None:
        """Waits until the standby stands by. It is needed now."""
        while True:
            for child in (self._engine, *self._ranks):
                if child is not None:
                    raise_priority(child.pid)  # a library may have made threads for later, too
            if self.stands_by.is_set():
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HURRY):  # a thread that starts then has a low priority again
                    await self.stands_by.wait()

    def _watchdog(self, limit: float) -> Watchdog:
        assert self._engine is not None, "it has been started"
        pids = [child.pid for child in (self._engine, *self._ranks)]
        return Watchdog(self._engine.name, lambda: self.heartbeat.ticks, limit, EngineError, pids)

    async def _message(self, kind: type[M], progress: Callable[[str, float], None]) -> M:
        """Waits for a message of this kind, during the start."""
        while True:
            match message := await self.engine_link.receive():
                case messages.Progress(stage, fraction):
                    progress(stage, fraction)
                case messages.StartFailed(reason, alone):
                    raise _start_error(reason, alone)
                case kind():
                    return message
                case _:
                    raise AssertionError(f"unexpected message before {kind.__name__}: {message}")

    def _spawn_engine(self, *, standby: bool) -> None:
        config = self._config
        start = EngineProcessConfig(
            **self._rank_config("engine", 0, standby),
            incarnation=self._incarnation,
            address=self.engine_link.address,
            heartbeat_fd=self.heartbeat.fd,
            trace_path=config.trace_path("engine", self._replacements),
            engine_args=config.engine_args or (),
            hold_seconds=config.deadlines.hold,
            kv_events=config.kv_events_endpoint is not None,
            image_arenas=None if self._images is None else self._image_arenas(self._images),
            rank_arenas=[
                self._arenas(rank) for rank in range(config.ranks, config.engine.tensor_parallel_size)
            ],
        )
        for rank in range(1, config.ranks):
            of_rank = RankProcessConfig(**self._rank_config(f"rank {rank}", rank, standby))
            popen = spawn("-m", RANK_MODULE, given=msgspec.json.encode(of_rank), pass_fds=of_rank.fds)
            self._ranks.append(Child(of_rank.name, popen))
            self.watch(self._watch_exit(self._ranks[-1]))
        popen = spawn("-m", config.engine_module, given=msgspec.json.encode(start), pass_fds=start.fds)
        self._engine = Child(start.name, popen)
        for transfer in self._transfers:
            transfer.ends.close_inherited()
        if self._store is not None:
            self._store.ends.engine.close()
        self.watch(self._watch_exit(self._engine))

    def _rank_config(self, process: str, rank: int, standby: bool) -> dict[str, Any]:
        """The fields of `RankProcessConfig`."""
        config = self._config
        return {
            "name": f"{config.name} {process}",
            "title": config.title,
            "parent_pid": os.getpid(),
            "rank": rank,
            "files": self._rank_files,
            "logging": config.logging(self._incarnation, process),
            "engine": self._engine_config,
            "arenas": self._arenas(rank),
            "store_fds": () if self._store is None else self._store.ends.of_rank(rank),
            "kept_files": self._kept_files[rank : None if rank == 0 else rank + 1],
            "standby": standby,
        }

    def _arenas(self, rank: int) -> Arenas:
        return self.transfer.ends.of_rank(rank, exports=self._exported, adopts=self._adopted)

    def _image_arenas(self, images: Transfer) -> Arenas:
        return images.ends.of_rank(0, exports=self._config.kv_connector == "auto", adopts=False)

    async def start_transfer(self, engine: EngineReady) -> str:
        """Starts the transfer process. Returns the address of the KV lanes."""
        config = self._config
        try:
            start = self._transfer_config(engine)
            images = None if engine.image_layout is None else self._image_config(start, engine)
        except ValueError as error:
            raise StartError(f"--advanced.kv-slot-size: {error}") from error
        port = await self._start_transfer(self.transfer, start)
        if images is not None:
            assert self._images is not None, "the engine fetches images as it was told"
            await self._start_transfer(self._images, images)
        return f"{','.join(map(url_host, config.reachable_kv_hosts()))}:{port}"

    async def _start_transfer(self, transfer: Transfer, start: TransferConfig) -> int:
        """Returns the port of its lanes."""
        silence = start_silence = max(MIN_TRANSFER_SILENCE, self._config.deadlines.engine_dead)
        process = transfer.process
        if process is None:
            process = self._spawn_transfer(transfer)
            start_silence = START_SILENCE
        dog = Watchdog(transfer.name, lambda: transfer.reports, start_silence, TreeError, [process.pid])
        self.watch(transfer.watch(dog.watch()))
        port = await transfer.start(start, self._config.secret)
        dog.restart(silence)
        return port

    def _spawn_transfer(self, transfer: Transfer) -> Child:
        process = transfer.spawn(self.heartbeat)
        self.watch(self._watch_exit(process))
        return process

    def _image_config(self, of_kv: TransferConfig, engine: EngineReady) -> TransferConfig:
        """Of embeddings, which come from encoders: no peer needs to know the port."""
        return msgspec.structs.replace(
            of_kv,
            name=f"{self._config.name} images",
            model_fingerprint=engine.description.image_fingerprint,
            layout=engine.image_layout,
            port=0,
            exports=self._config.kv_connector == "auto",
            sums=False,  # they are in memory of the host
            reader="",
            reader_device=None,
            trace_path=self._config.trace_path("image-transfer", self._replacements),
            logging=self._config.logging(self._incarnation, "image transfer"),
        )

    def _transfer_config(self, engine: EngineReady) -> TransferConfig:
        config = self._config
        return TransferConfig(
            name=config.name,
            title=config.title,
            incarnation=self._incarnation,
            model_fingerprint=engine.description.model_fingerprint,
            layout=engine.layout,
            num_slots=config.kv_slots,
            slot_bytes=config.kv_slot_bytes,
            hosts=config.kv_listen_hosts(),
            port=config.kv_port,
            lanes=config.kv_lanes,
            # An image takes at least one block of an encoder: no more could be on their way.
            max_pins=engine.description.num_blocks if config.role == "encode" else MOST_PINS,
            bind=config.lane_sources,
            encrypt=config.kv_encrypt,
            exports=self._exported,
            sums=engine.sums,
            reader=config.kv_connector if config.reader else "",
            reader_device=config.reader_device(),
            deadlines=config.deadlines,
            trace_path=config.trace_path("transfer", self._replacements),
            logging=config.logging(self._incarnation, "transfer"),
        )

    def follow(self, deliver: Callable[[FromEngine], None]) -> None:
        """Starts the tasks that receive from the children.

        `deliver` gets each message of the engine process.
        """
        received = self.watch(self.engine_link.receive_all(deliver))
        received.add_done_callback(lambda _: self._engine_stopped.set())
        for transfer in self._transfers:
            self.watch(transfer.watch(transfer.receive()))

    # ------------------------------------------------------------ watch

    def watch(self, watcher: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Runs `watcher` as a task. An exception of the task becomes the tree's `failure`."""

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and not self.failure.done():
                error = task.exception()
                if error is not None:
                    self.failure.set_exception(error)

        task = asyncio.create_task(watcher)
        task.add_done_callback(ended)
        self._watchers.append(task)
        return task

    async def _watch_exit(self, child: Child) -> None:
        code = await child.wait()
        if self._stopping:
            return
        if code == EXIT_START_FAILED and not self._started:
            if child in self._ranks and self._rank_files is not None:
                raise _start_error(*self._rank_files.start_failure)
            return  # the receiver of messages will raise StartError for its StartFailed
        if self._ranks and not self._started and not self.stands_by.is_set():
            await asyncio.sleep(CAUSE_SOON)  # if another rank could not start, its reason is reported first
        transfers = [transfer.process for transfer in self._transfers]
        causes = {(transfer, EXIT_ENGINE_GONE): self._engine for transfer in transfers}
        causes[self._engine, EXIT_TRANSFER_GONE] = self.transfer.process
        if cause := causes.get((child, code)):
            # The watcher of the other process reports its end first. The kernel frees the memory of a killed
            # engine process before that, and takes 0.2 s for 1 GiB that a GPU has pinned. A process that
            # stays does so in silence, which ends it, too.
            await cause.wait()
            await asyncio.sleep(0)
        error = TreeError if child in transfers else EngineError
        raise error(f"{child.name} (pid {child.pid}) {describe_exit(code)}")

    # ------------------------------------------------------------ end

    def end_engine(self) -> None:
        """`failure` completes with an EngineRestart, unless it is complete."""
        if not self.failure.done():
            self.failure.set_exception(EngineRestart("a restart of the engine process was asked for"))

    async def stop(self) -> None:
        """Asks the processes to stop, in order, and waits for each with a time limit.

        The engine fails its remaining attempts, the transfer process closes its lanes, then both exit. Does
        nothing before the engine is ready. `kill` must follow.
        """
        self._begin_stop()
        if not self._started or self._engine is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_TIMEOUT):
                await self.engine_link.send(messages.Stop())
                await self._engine_stopped.wait()
        for transfer in self._transfers:
            await transfer.stop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_TIMEOUT):
                await self.engine_link.send(messages.Exit())
        for child in (self._engine, *self._ranks):
            await child.end(STOP_TIMEOUT)

    def _begin_stop(self) -> None:
        """From now on no process that ends is a failure, or is started again."""
        self._stopping = True
        if self._store is not None:
            self._store.stop()

    async def kill(self) -> None:
        """Kills the processes that still run, and waits for their exit."""
        self._begin_stop()
        # The transfer processes first: they would log that the engine process is gone.
        transfers = [transfer.process for transfer in self._transfers]
        store = None if self._store is None else self._store.process
        ended = (*transfers, self._engine, *self._ranks, store)
        children = [each for each in ended if each]
        for child in children:
            child.kill()
        for child in children:
            await child.wait()

    async def close(self) -> None:
        """Frees the shared resources. Must be called after the processes have ended."""
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        if self.failure.done():
            self.failure.exception()  # else asyncio logs it as never retrieved
        self._shared.close()


async def discard(tree: WorkerTree) -> None:
    """Ends its processes, and frees what they shared. Returns when they have ended, also if the caller is
    cancelled."""

    async def end() -> None:
        await tree.kill()
        await tree.close()

    ending = asyncio.create_task(end())
    try:
        await asyncio.shield(ending)
    finally:
        await asyncio.wait({ending})


def _start_error(reason: str, alone: bool) -> StartError:
    """`alone`: as in `StartFailed`."""
    return StandbyError(reason) if alone else StartError(reason)
