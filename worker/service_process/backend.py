"""What the gRPC service of a worker shows: its engine, its status, its pool and its prefix cache."""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from baton.engine import EngineConfig
from baton.rpc import LONGEST_REPORT
from baton.rpc import worker_pb2 as pb
from baton.rpc.channel import connect
from baton.rpc.pools import POOL_NAMES, POOLS
from baton.worker import messages
from baton.worker.config import WorkerConfig
from baton.worker.engine_process.kv_events import all_blocks_cleared
from baton.worker.messages import (
    Detached,
    EngineStatus,
    FromEngine,
    FromRouter,
    ToEngine,
)
from baton.worker.processes import START_SILENCE, TreeError
from baton.worker.service_process.cache_feed import CacheFeed
from baton.worker.service_process.journal import Journal
from baton.worker.service_process.kv_events import KVEventPublisher
from baton.worker.service_process.live_engine import LiveEngine, Reports
from baton.worker.service_process.metrics import Metrics
from baton.worker.service_process.standby import Standby
from baton.worker.service_process.status import reported
from baton.worker.service_process.streams import Routers
from baton.worker.service_process.tree import WorkerTree

log = logging.getLogger(__name__)


SHUTTING_DOWN = "the worker is shutting down"
LONGEST_RESTART = START_SILENCE
"""Seconds until another engine process serves, after which a call that asked for it ends."""


class Refused(Exception):
    """Why the worker does not do what a coordinator asks. The message is for the user."""


class ReplacedWeights(NamedTuple):
    """What the engine computes with in place of the weights of `--model`."""

    path: str
    version: str
    engine: messages.WeightsReplaced

    def of(self, config: EngineConfig) -> EngineConfig:
        """The configuration of an engine that begins with them."""
        tokenizer = config.tokenizer or config.model  # a checkpoint with weights may have none
        replaced = replace(config, model=self.path, revision=None, load_format="auto", tokenizer=tokenizer)
        return replace(replaced, weights_version=self.version)

    def described(self, engine: pb.WorkerDescription) -> pb.WorkerDescription:
        """How that engine describes itself. `engine`: how one with the weights of `--model` does."""
        described = pb.WorkerDescription()
        described.CopyFrom(engine)
        described.model_fingerprint = self.engine.model_fingerprint
        described.content_root = self.engine.content_root
        return described


class Backend:
    """Sends messages to the engine, and passes on to the routers what the engine says.

    It uses the metrics and the journal of the worker. The service process starts and ends the processes of
    each engine, and tells when one begins or has ended. Between two of them a call waits for the next one, or
    is answered from the last reports.
    """

    def __init__(
        self, config: WorkerConfig, routers: Routers, metrics: Metrics, journal: Journal,
        kv_events: KVEventPublisher | None = None,
    ) -> None:  # fmt: skip
        """`kv_events`: None unless the worker publishes them."""
        self.connect = partial(connect, secret=config.secret, tls=config.tls)
        """Opens a channel to another worker, by its address."""
        self.run_dir = config.run_dir
        self._routers = routers
        self._metrics = metrics
        self.journal = journal
        self._kv_events = kv_events
        self._drains = set[str]()
        self.pause: pb.Pause = pb.PAUSE_NONE
        self.released: Sequence[str] = ()
        """Memory, as in `MemoryRequest`."""
        self.lost_weights = False
        self.staged_version = ""
        """As in `WorkerStatus`."""
        self._cache = CacheFeed() if config.engine.enable_prefix_caching else None
        self._pool = POOLS[config.role]
        self._replaces_engine = config.replace_engine
        self._engine_timeout = config.deadlines.engine_dead
        self.engine: LiveEngine | None = None
        """The last one that began. None: the first one has not."""
        self._serves = asyncio.Event()
        """Set while that one has all that the worker has."""
        self._reports: Reports | None = None
        """The last ones, with the counts of all processes up to then."""
        self.standby: Standby | None = None
        """None: another engine process is started when it is needed."""
        self.weights: ReplacedWeights | None = None
        """None: those of `--model`."""

    async def forward(self, message: FromRouter, said: pb.RouterMessage) -> None:
        """Sends what a router says. Between two engine processes an attempt alone is remembered, for the next
        one. Raises RefusedAttempt for an id of an attempt that is remembered. `said`: the same message."""
        self.journal.said(message, said)
        await self.send(message)

    async def send(self, message: ToEngine) -> None:
        """Sends to the engine, in order. Waits while the engine reads too slowly."""
        if isinstance(message, Detached):
            self.journal.open.detached(message.stream)
        if self.engine is not None:
            await self.engine.send(message)

    # ------------------------------------------------------------ engine processes

    async def begin(self, tree: WorkerTree) -> LiveEngine:
        """The engine of this tree is ready, and gets all that the worker has: its pause, and open attempts.
        Raises TreeError if it ends before it has them."""
        self.engine = engine = LiveEngine(tree, self._reports)
        tree.follow(partial(self.deliver, engine))
        waiting = self.journal.open.again()  # what comes from now on is sent at once
        if self.pause == pb.PAUSE_STEPS:
            await engine.freeze(frozen=True)
        for attempt in waiting:
            await engine.send(attempt)
        self._note(await engine.reports())
        self._serves.set()
        self._tell()  # at once: until then routers send nothing here
        return engine

    def ended(self, error: str, step: Collection[bytes]) -> None:
        """The engine process has ended, or shall end. Attempts wait for the next one; routers give the worker
        no others. `step`: the attempts of a crashed step."""
        if self.engine is None or self.engine.has_ended:
            return
        self.engine.end(error)
        self._serves.clear()
        for lost in self.journal.open.lost(step, error):
            self._routers.deliver(lost)
        self._tell()
        if self._cache is not None:
            for changes in self._cache.cleared():
                self._routers.broadcast_cache_events(changes)
        if self._kv_events is not None:
            self._kv_events.publish(all_blocks_cleared())

    async def serving(self) -> LiveEngine:
        """The engine process that serves. Waits for it."""
        await self._serves.wait()
        assert self.engine is not None, "it began"
        return self.engine

    async def _ask(self, question: Callable[[int], ToEngine]) -> Any:
        """The answer of the engine process that serves. If it ends before it answers, the next one is
        asked."""
        while True:
            engine = await self.serving()
            with suppress(TreeError):
                return await engine.ask(question)

    async def restart_engine(self) -> None:
        """Another engine process takes the place of this one, between two steps. Returns when it serves. A
        replacement that is under way is the restart. Raises Refused."""
        if not self._replaces_engine:
            raise Refused("it was started without --replace-engine: restart the whole worker")
        if self.draining:
            raise Refused(self.draining)
        if self.lacks_memory:
            raise Refused("its memory is released, or it lacks weights")
        try:
            async with asyncio.timeout(LONGEST_RESTART):
                if self._serves.is_set() and self.standby is not None:
                    self.standby.renew()  # Baton on the disk may be newer
                    await self.standby.settled()
                    if why := self.standby.failure:
                        raise Refused(f"no other engine process can start, and this one goes on: {why}")
                if self._serves.is_set():
                    await self._end_engine()
                await self.serving()
        except TimeoutError:
            raise Refused(f"no other engine process is ready after {LONGEST_RESTART:g} s") from None

    async def _end_engine(self) -> None:
        """Between two steps, unless these are too far apart. Also if the call is cancelled meanwhile, since
        the engine would stay frozen."""
        engine = await self.serving()
        try:
            async with asyncio.timeout(self._engine_timeout):
                await engine.stop_between_steps()
        except TimeoutError:
            log.warning("the engine has not paused for %g s, and ends in a step", self._engine_timeout)
        except TreeError:
            pass  # it ends by itself meanwhile, and is replaced, too
        finally:
            if not engine.has_ended:
                self._serves.clear()
                engine.tree.end_engine()

    # ------------------------------------------------------------ questions

    @property
    def draining(self) -> str:
        """Why the worker refuses new attempts. Empty: it takes them."""
        return "; ".join(sorted(self._drains))

    @property
    def serves(self) -> bool:
        """Whether routers shall send new attempts."""
        return self._serves.is_set() and not self._drains

    def drain(self, reason: str) -> None:
        """Refuses new attempts, until `serve_again` with each reason."""
        self._drains.add(reason)
        self._tell()

    async def serve_again(self, reason: str) -> None:
        """Takes new attempts, unless the worker drains for another reason."""
        self._drains.discard(reason)
        await self.status()

    def tell_pause(self, pause: "pb.Pause") -> None:
        """Tells all routers, at once."""
        self.pause = pause
        self._tell()

    def tell_staged(self, version: str) -> None:
        """Tells all routers, at once."""
        if version != self.staged_version:
            self.staged_version = version
            self._tell()

    def _tell(self) -> None:
        """Routers get what has changed with the last reports, since new ones must wait for the engine's
        step."""
        self._routers.tell(self._last_status())

    async def freeze(self, *, frozen: bool, abort: str) -> messages.Paused:
        """The engine launches no step, or goes on. With `abort` it ends all attempts for that reason."""
        return await self._ask(lambda question: messages.Pause(question, frozen, abort))

    async def stage_weights(self, engine: LiveEngine, path: str) -> messages.WeightsStaged:
        """The engine reads other weights. `DropWeights` must follow, or `replace_weights`. Raises
        TreeError."""
        return await engine.ask(lambda question: messages.StageWeights(question, path))

    async def replace_weights(self, engine: LiveEngine, version: str, path: str) -> messages.WeightsReplaced:
        """The engine computes with those that it has staged. It is idle. `path`: where the next engine
        process finds them. Raises TreeError."""
        replaced: messages.WeightsReplaced = await engine.ask(
            lambda question: messages.ReplaceWeights(question, version)
        )
        self.weights = ReplacedWeights(path, version, replaced)
        self.lost_weights = False
        self._renew_standby()
        return replaced

    def _renew_standby(self) -> None:
        """It must have what the engine has now. While memory is released there is none."""
        if self.standby is not None and not self.lacks_memory:
            self.standby.renew()

    @property
    def lacks_memory(self) -> bool:
        """Whether memory is released, or the weights in it are lost: the engine cannot compute."""
        return bool(self.released) or self.lost_weights

    async def set_memory(self, tags: Sequence[str], *, release: bool) -> messages.MemorySet:
        """The engine gives memory back, or takes it again. It is frozen. A standby would have the same
        pages."""
        if release and self.standby is not None:
            await self.standby.close()
        done: messages.MemorySet = await self._ask(
            lambda question: messages.SetMemory(question, release, list(tags))
        )
        self.released, self.lost_weights = done.released, done.lost_weights
        self._renew_standby()
        return done

    async def load_adapter(self, adapter: pb.Adapter) -> messages.AdapterLoaded:
        """The engine loads an adapter, while it computes."""
        return await self._ask(lambda question: messages.LoadAdapter(question, adapter))

    async def engine_status(self) -> EngineStatus:
        return await self._ask(messages.AskStatus)

    async def status(self) -> pb.WorkerStatus:
        """Asks the engine and transfer processes for their status. If they end meanwhile, or have ended, it
        has what they reported last."""
        if self.engine is not None:
            with suppress(TreeError):
                self._note(await self.engine.reports())
        return self._last_status()

    def _note(self, reports: Reports) -> None:
        self._reports = reports
        self._metrics.engine_status, self._metrics.transfer_stats = reports
        self._routers.waiting = reports[0].waiting_of_streams

    def _last_status(self) -> pb.WorkerStatus:
        status = pb.WorkerStatus(
            health=pb.WorkerStatus.HEALTH_SERVING if self.serves else pb.WorkerStatus.HEALTH_DRAINING,
            pool=self._pool,
            pause=self.pause,
            staged_version=self.staged_version,
            released=self.released,
            lost_weights=self.lost_weights,
            standby="" if self.standby is None else self.standby.state,
            standby_memory_bytes=0 if self.standby is None else self.standby.memory_bytes,
        )
        if self._reports is not None:
            status.MergeFrom(reported(*self._reports))
        return status

    async def set_pool(self, pool: "pb.Pool") -> pb.WorkerStatus:
        """Moves the worker to a pool and tells all routers. Returns the new status."""
        if pool != self._pool:
            log.info("moves from the %s pool to the %s pool", POOL_NAMES[self._pool], POOL_NAMES[pool])
            self._pool = pool
            self._metrics.role = POOL_NAMES[pool]
            self._tell()
        return await self.status()

    def cache_snapshot(self) -> Iterator[bytes]:
        """Yields the contents of the prefix cache as messages; none if the cache is off."""
        return iter(()) if self._cache is None else self._cache.snapshot()

    async def report(self) -> None:
        """Sends the status to routers: if it has changed, and once a second in any case.

        The sleep may end a millisecond early, so a report goes out unless the next time is nearer to it."""
        sent, due = pb.WorkerStatus(), 0.0
        while True:
            seconds = self._routers.report_seconds
            await asyncio.sleep(seconds)
            status, now = await self.status(), time.monotonic()
            if status != sent or now + seconds / 2 >= due:
                self._routers.tell(status)
                sent, due = status, now + LONGEST_REPORT

    # ------------------------------------------------------------ from the engine

    def deliver(self, engine: LiveEngine, message: FromEngine) -> None:
        """`engine`: has sent it. It may have ended since."""
        match message:
            case messages.ToRouter():
                engine.has_computed |= self.journal.open.heard(message)
                self._routers.deliver(message)
            case messages.OfAttempt():
                self._metrics.report(message)
                self.journal.report(message)
            case messages.Answer():
                engine.answered(message)
            case messages.CacheChanged(tiers, stored):
                if not engine.has_ended:  # else its cache counts as cleared
                    assert self._cache is not None
                    for changes in self._cache.changed(tiers, stored):
                        self._routers.broadcast_cache_events(changes)
            case messages.CacheEvents(batch):
                if not engine.has_ended:
                    assert self._kv_events is not None
                    self._kv_events.publish(batch)
            case _:
                raise AssertionError(f"unexpected message of the engine: {message}")
