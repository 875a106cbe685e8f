"""What the gRPC service of a worker shows: its engine, its status, its pool and its prefix cache."""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, NamedTuple

from baton.engine import EngineConfig
from baton.kv_transfer import TransferStats
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
from baton.worker.processes import START_SILENCE, EngineError, EngineRestart, TreeError, dismiss
from baton.worker.service_process.cache_feed import CacheFeed
from baton.worker.service_process.counts import added
from baton.worker.service_process.journal import Journal
from baton.worker.service_process.kv_events import KVEventPublisher
from baton.worker.service_process.metrics import Metrics
from baton.worker.service_process.open_attempts import OpenAttempts
from baton.worker.service_process.standby import Standby
from baton.worker.service_process.status import reported
from baton.worker.service_process.streams import Routers
from baton.worker.service_process.tree import WorkerTree
from baton.worker.service_process.validation import RefusedAttempt

log = logging.getLogger(__name__)


STILL_CHECK = 0.002
"""Seconds between two questions whether a step is over."""
SHUTTING_DOWN = "the worker is shutting down"
LONG_LIFE = 60.0
"""Seconds after which the end of an engine process has other causes than its start."""
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

    It uses the metrics and the journal of the worker. The service process starts and ends the `tree`.
    """

    def __init__(
        self, config: WorkerConfig, tree: WorkerTree, routers: Routers, metrics: Metrics, journal: Journal,
        kv_events: KVEventPublisher | None = None,
    ) -> None:  # fmt: skip
        """`kv_events`: None unless the worker publishes them."""
        self.connect = partial(connect, secret=config.secret, tls=config.tls)
        """Opens a channel to another worker, by its address."""
        self.run_dir = config.run_dir
        self._tree = tree
        self._routers = routers
        self._metrics = metrics
        self._journal = journal
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
        self._last_status = pb.WorkerStatus()
        self._open = OpenAttempts(config.deadlines.hold) if config.replace_engine else None
        self._engine_timeout = config.deadlines.engine_dead
        self.replacing = False
        """Whether the engine process has ended, and another one is not ready yet."""
        self._settled = asyncio.Event()
        """Not set from the end of an engine process until `replacement_over`: restarts and pauses wait."""
        self._settled.set()
        self.standby: Standby | None = None
        """None: another engine process is started when it is needed."""
        self._goes_on = True
        """Whether the engine has computed a token since it replaced another one."""
        self._replaced_at = time.monotonic()
        self._counted: tuple[EngineStatus | None, TransferStats | None] = None, None
        """The last reports of processes that were replaced. Their counts are those of all up to then."""
        self.weights: ReplacedWeights | None = None
        """None: those of `--model`."""
        self.engines = 0
        """Engine processes that were replaced."""
        self._questions = count()
        self._answers: dict[int, asyncio.Future[Any]] = {}  # by question

    async def forward(self, message: FromRouter, said: pb.RouterMessage) -> None:
        """Sends what a router says. Between two engine processes an attempt alone is remembered, for the next
        one. Raises RefusedAttempt for an id of an attempt that is remembered. `said`: the same message."""
        origin = message.origin
        if self._open is not None:
            if origin is not None and origin.attempt_id in self._open:
                raise RefusedAttempt(pb.FAILURE_CODE_INVALID, "this id is in use")
            self._open.said(message, said)
        if origin is not None:
            self._journal.accepted(origin)
        await self.send(message)

    async def send(self, message: ToEngine) -> None:
        """Sends to the engine, in order. Waits while the engine reads too slowly."""
        if self._open is not None and isinstance(message, Detached):
            self._open.detached(message.stream)
        if self.replacing:
            return
        await self._tree.engine_link.send(message)

    # ------------------------------------------------------------ another engine process

    def replaceable_after(self, error: BaseException | None) -> bool:
        """Whether another engine process can go on. It would likely die, too, if the one that has died was
        itself such a process, computed nothing and lived for a short time."""
        if self._open is None or not isinstance(error, EngineError):
            return False
        lived = time.monotonic() - self._replaced_at
        return self._goes_on or lived > LONG_LIFE or isinstance(error, EngineRestart)

    async def restart_engine(self) -> None:
        """Another engine process takes the place of this one, between two steps. Returns when it serves. A
        replacement that is under way is the restart. Raises Refused."""
        if self._open is None:
            raise Refused("it was started without --replace-engine: restart the whole worker")
        if self.draining:
            raise Refused(self.draining)
        try:
            async with asyncio.timeout(LONGEST_RESTART):
                if self._settled.is_set() and self.standby is not None:
                    self.standby.renew()  # Baton on the disk may be newer
                    await self.standby.settled()
                    if why := self.standby.failure:
                        raise Refused(f"no other engine process can start, and this one goes on: {why}")
                if self._settled.is_set():
                    await self._end_engine()
                await self._settled.wait()
        except TimeoutError:
            raise Refused(f"no other engine process is ready after {LONGEST_RESTART:g} s") from None

    async def _end_engine(self) -> None:
        """Between two steps, unless these are too far apart. Also if the call is cancelled meanwhile, since
        the engine would stay frozen."""
        tree = self._tree
        try:
            async with asyncio.timeout(self._engine_timeout):
                while True:
                    paused = await self._answer(lambda question: messages.Pause(question, True, ""))
                    if not paused.computing:
                        break
                    await asyncio.sleep(STILL_CHECK)
        except TimeoutError:
            log.warning("the engine has not paused for %g s, and ends in a step", self._engine_timeout)
        except TreeError:
            pass  # it ends by itself meanwhile, and is replaced, too
        finally:
            if self._tree is tree:
                self._settled.clear()
                tree.end_engine()

    def engine_lost(self, error: str, step: Collection[bytes], *, planned: bool) -> None:
        """The engine process has ended, or shall end. Attempts wait for the next one; routers give the worker
        no others. `step`: the attempts of a crashed step."""
        assert self._open is not None, "another process may take its place"
        self.replacing, self._goes_on = True, planned
        self.engines += 1
        self._settled.clear()
        self._counted = self._metrics.engine_status, self._metrics.transfer_stats
        for lost in self._open.lost(step, error):
            self._routers.deliver(lost)
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(TreeError(error))
        self._last_status.health = pb.WorkerStatus.HEALTH_DRAINING
        self._routers.tell(self._last_status)
        if self._cache is not None:
            for changes in self._cache.cleared():
                self._routers.broadcast_cache_events(changes)
        if self._kv_events is not None:
            self._kv_events.publish(all_blocks_cleared())

    async def engine_replaced(self, tree: WorkerTree) -> None:
        """The next engine process is ready, and gets the attempts that wait."""
        assert self._open is not None, "it has taken the place of another one"
        self._tree, self.replacing = tree, False
        self._replaced_at = time.monotonic()
        waiting = self._open.again()  # what comes from now on is sent at once
        if self.pause == pb.PAUSE_STEPS:
            await self._answer(lambda question: messages.Pause(question, frozen=True, abort=""))
        for attempt in waiting:
            await tree.engine_link.send(attempt)
        # At once: until then routers send nothing here.
        self._routers.tell(await self.status())

    def replacement_over(self) -> None:
        """Another one may begin."""
        self._settled.set()

    # ------------------------------------------------------------ questions

    @property
    def draining(self) -> str:
        """Why the worker refuses new attempts. Empty: it takes them."""
        return "; ".join(sorted(self._drains))

    def drain(self, reason: str) -> None:
        """Refuses new attempts, until `serve_again` with each reason."""
        self._drains.add(reason)
        # Routers get the last status at once, because a new one must wait for the engine's step.
        self._last_status.health = pb.WorkerStatus.HEALTH_DRAINING
        self._routers.tell(self._last_status)

    async def serve_again(self, reason: str) -> None:
        """Takes new attempts, unless the worker drains for another reason."""
        self._drains.discard(reason)
        await self.status()

    def tell_pause(self, pause: "pb.Pause") -> None:
        """Tells all routers, at once."""
        self.pause = self._last_status.pause = pause
        self._routers.tell(self._last_status)

    def tell_staged(self, version: str) -> None:
        """Tells all routers, at once."""
        if version != self.staged_version:
            self.staged_version = self._last_status.staged_version = version
            self._routers.tell(self._last_status)

    async def freeze(self, *, frozen: bool, abort: str) -> messages.Paused:
        """The engine launches no step, or goes on. With `abort` it ends all attempts for that reason."""
        while True:
            with suppress(TreeError):
                return await self._answer(lambda question: messages.Pause(question, frozen, abort))
            await self._settled.wait()

    async def stage_weights(self, path: str) -> messages.WeightsStaged:
        """The engine reads other weights. `DropWeights` must follow, or `replace_weights`."""
        return await self._answer(lambda question: messages.StageWeights(question, path))

    async def replace_weights(self, version: str, path: str) -> messages.WeightsReplaced:
        """The engine computes with those that are staged. It is idle. `path`: where the next engine process
        finds them."""
        replaced: messages.WeightsReplaced = await self._answer(
            lambda question: messages.ReplaceWeights(question, version)
        )
        self.weights = ReplacedWeights(path, version, replaced)
        if self.standby is not None:
            self.standby.renew()
        self._last_status.lost_weights = self.lost_weights = False
        return replaced

    @property
    def lacks_memory(self) -> bool:
        """Whether memory is released, or the weights in it are lost: the engine cannot compute."""
        return bool(self.released) or self.lost_weights

    async def set_memory(self, tags: Sequence[str], *, release: bool) -> messages.MemorySet:
        """The engine gives memory back, or takes it again. It is frozen."""
        done: messages.MemorySet = await self._answer(
            lambda question: messages.SetMemory(question, release, list(tags))
        )
        self.released, self.lost_weights = done.released, done.lost_weights
        return done

    async def load_adapter(self, adapter: pb.Adapter) -> messages.AdapterLoaded:
        """The engine loads an adapter, while it computes."""
        return await self._answer(lambda question: messages.LoadAdapter(question, adapter))

    async def _answer(self, ask: Callable[[int], ToEngine]) -> Any:
        """Raises TreeError if the engine process ends before it answers."""
        if self.replacing:
            raise TreeError("the engine process is replaced")
        question = next(self._questions)
        answer = self._answers[question] = asyncio.get_running_loop().create_future()
        try:
            await self.send(ask(question))
            return await answer
        finally:
            del self._answers[question]
            dismiss(answer)

    async def status(self) -> pb.WorkerStatus:
        """Asks the engine and transfer processes for their status. While the engine process is replaced, it
        is the last one."""
        if self.replacing:
            return self._last_status
        try:
            engine, transfer = await asyncio.gather(self.engine_status(), self._tree.transfer.stats())
        except TreeError:
            return self._last_status
        if self.replacing:  # the engine process has answered, and ended meanwhile
            return self._last_status
        engine, transfer = added(self._counted[0], engine), added(self._counted[1], transfer)
        self._metrics.engine_status = engine
        self._metrics.transfer_stats = transfer
        self._last_status = pb.WorkerStatus(
            health=pb.WorkerStatus.HEALTH_DRAINING if self.draining else pb.WorkerStatus.HEALTH_SERVING,
            pool=self._pool,
            pause=self.pause,
            staged_version=self.staged_version,
            released=self.released,
            lost_weights=self.lost_weights,
            standby="" if self.standby is None else self.standby.state,
            standby_memory_bytes=0 if self.standby is None else self.standby.memory_bytes,
        )
        self._last_status.MergeFrom(reported(engine, transfer))
        self._routers.waiting = engine.waiting_of_streams
        return self._last_status

    async def set_pool(self, pool: "pb.Pool") -> pb.WorkerStatus:
        """Moves the worker to a pool and tells all routers. Returns the new status."""
        if pool != self._pool:
            log.info("moves from the %s pool to the %s pool", POOL_NAMES[self._pool], POOL_NAMES[pool])
            self._pool = pool
            self._metrics.role = POOL_NAMES[pool]
            # Routers get the label at once, because a new status must wait for the engine's step.
            self._last_status.pool = pool
            self._routers.tell(self._last_status)
        return await self.status()

    def phases(self, request: str) -> list[pb.Phase]:
        """The phases of a recent request, by the id that its client knows."""
        return self._journal.phases(request)

    def cache_snapshot(self) -> Iterator[bytes]:
        """Yields the contents of the prefix cache as messages; none if the cache is off."""
        return iter(()) if self._cache is None else self._cache.snapshot()

    async def engine_status(self) -> EngineStatus:
        """Raises TreeError if the engine process ends before it answers."""
        return await self._answer(messages.AskStatus)

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

    def deliver(self, message: FromEngine) -> None:
        match message:
            case messages.ToRouter():
                if self._open is not None:
                    self._goes_on |= self._open.heard(message) and not self.replacing
                self._routers.deliver(message)
            case messages.OfAttempt():
                self._metrics.report(message)
                self._journal.report(message)
            case messages.Answer():
                answer = self._answers.get(message.question)
                if answer is not None and not answer.done():
                    answer.set_result(message)
            case messages.CacheChanged() | messages.CacheEvents():
                self._cache_changed(message)
            case _:
                raise AssertionError(f"unexpected message of the engine: {message}")

    def _cache_changed(self, message: messages.CacheChanged | messages.CacheEvents) -> None:
        if self.replacing:
            return  # an engine process that has ended said it last; its cache counts as cleared
        match message:
            case messages.CacheChanged(tiers, stored):
                assert self._cache is not None
                for changes in self._cache.changed(tiers, stored):
                    self._routers.broadcast_cache_events(changes)
            case messages.CacheEvents(batch):
                assert self._kv_events is not None
                self._kv_events.publish(batch)
