"""The two roles over a vLLM engine: what the service asks of them, and what the connector says."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from baton.decode_worker.role import DecodeRole
from baton.engine import EngineRequest
from baton.kv_transfer import Closed, ContentWanted, FetchFailed, Injected, Released, TraceWriter
from baton.prefill_worker.role import PrefillRole
from baton.rpc import worker_pb2 as pb
from baton.vllm_worker.attachment import FromConnector, OnDevice, Pool, ToConnector
from baton.vllm_worker.cached_blocks import CachedBlocks
from baton.vllm_worker.ends import VLLMReceiver, VLLMSender
from baton.vllm_worker.engine import EngineGone, Host, VLLMEngine
from baton.vllm_worker.metadata import Blind, Costs, Encoded, Started
from baton.vllm_worker.mixed_steps import NOT_ENCODED
from baton.vllm_worker.prefixes import PRIORITY, VLLMExchange
from baton.vllm_worker.sampling import sampling
from baton.vllm_worker.stats import Load
from baton.worker import messages
from baton.worker.engine_process.attempt import AttemptTable
from baton.worker.engine_process.engine_attempt import EngineAttempt, Resources
from baton.worker.engine_process.handler import Handler
from baton.worker.engine_process.prefix_fetches import PrefixFetches, PrefixLinks, Workers
from baton.worker.engine_process.start import EngineProcessConfig
from baton.worker.messages import FromEngine, FromRouter

if TYPE_CHECKING:
    from baton.vllm_worker.llm import VLLM

log = logging.getLogger(__name__)


class VLLMRoles(Handler):
    """Not for several threads: all methods are for the event loop.

    Args:
        send: takes messages for the service process.
        cached: what vLLM's prefix cache has.
        pool: vLLM's blocks.
    """

    def __init__(
        self,
        attempts: AttemptTable[EngineAttempt],
        send: Callable[[FromEngine], None],
        vllm: VLLM,
        host: Host,
        tell: Callable[[ToConnector], None],
        cached: CachedBlocks,
        pool: Pool,
        config: EngineProcessConfig,
        ready: messages.EngineReady,
    ) -> None:
        self.load = Load(encoder=None if ready.images is None else NOT_ENCODED)
        Handler.__init__(self, attempts, send, "--engine vllm")
        self.adapters = vllm.adapters
        self._tasks = set[asyncio.Task[None]]()  # that no request has
        self._vllm = vllm
        self._host = host
        described = ready.description
        self._engine = engine = VLLMEngine(
            vllm.generate, host, pool, described, cached.chunks, config.engine, self.load.prompt_seconds,
            attempts.scored,
        )  # fmt: skip
        if described.exchanges_prefixes:
            engine.prefix_exchange = VLLMExchange(cached, engine.names, pool.block_size)
        self._sender = VLLMSender(engine, host, tell, self._pin)
        self._receiver = VLLMReceiver(engine, host, self._run_prefix, pool, at_once=not config.rank_arenas)
        shared = Resources(
            engine, self._sender, self._receiver, attempts, TraceWriter(None, ""), config.incarnation,
            tick=lambda: None,
        )  # fmt: skip
        self._links = PrefixLinks()
        fetches = PrefixFetches(engine, attempts.counts, shared.trace)
        fetches.sources.append(Workers(self._receiver, config.incarnation, self._links))
        self._roles = PrefillRole(shared, None, fetches), DecodeRole(shared, fetches)

    @property
    def busy(self) -> bool:
        return any(live.submission is not None for live in self._engine.lives.values())

    def status(self, question: int) -> messages.EngineStatus:
        lives = self._engine.lives
        stats = self.load.stats(self._engine.num_blocks, [*lives.values()])
        if self._engine.has_suspect:
            stats = replace(stats, blocks_free=0, blocks_spare=0)
        held = self._attempts or lives
        idle = not held and self._receiver.idle and all(role.idle for role in self._roles)
        return messages.EngineStatus(
            question,
            stats,
            self._attempts.counts,
            pb.WorkerStatus(
                idle=idle,
                adapters_on_device=self.adapters.on_device,
                adapter_move_seconds=self.adapters.move_seconds,
                prefix_links=self._links.recent(time.monotonic()),
            ),
            waiting_of_streams=self._waiting_of_streams(
                (name, live.uncached) for name, live in lives.items() if live.computes_prompt
            ),
        )

    # ------------------------------------------------------------ of the service

    def _pause(self, message: messages.Pause) -> messages.Paused:
        if message.abort:
            self._attempts.end_all(pb.FAILURE_CODE_ABORTED, message.abort)
        error = ""
        if message.frozen and not all(attempt.closed for attempt in self._attempts):
            error = f"{self._name}: requests cannot be frozen; pause with mode=abort or mode=wait"
        return messages.Paused(message.question, bool(self._attempts), error)

    def _change_adapters(self, message: messages.LoadAdapter | messages.UnloadAdapter) -> None:
        if isinstance(message, messages.LoadAdapter):
            self._do(self._load(message))
        else:
            unused = partial(self._engine.without, message.fingerprint)
            self._do(self.adapters.unload(message.fingerprint, unused))

    def _do(self, change: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(change)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, EngineGone):
            self._host.gone()
        elif error is not None:
            log.error("vLLM: %r", error, exc_info=error)

    async def _load(self, message: messages.LoadAdapter) -> None:
        fingerprint, error = b"", ""
        try:
            fingerprint = await self.adapters.load(message.adapter.name, message.adapter.path)
        except ValueError as why:
            error = str(why)
        self._send(messages.AdapterLoaded(message.question, fingerprint, error))

    def _said(self, kind: str, content: Any, message: FromRouter) -> None:
        if kind != "only_copies":  # vLLM chooses what it evicts
            role = next(role for role in self._roles if kind in role.handles)
            role.handle(message, content)

    def stop(self) -> None:
        """The worker ends. All attempts have failed."""
        for attempt in [*self._attempts]:
            attempt.close("cancelled")
        self.move_kv()

    def move_kv(self) -> None:
        """To be called when `soon` was, and now and then."""
        for role in self._roles:
            role.move_kv(0.0)

    # ------------------------------------------------------------ of vLLM

    def _run_prefix(self, request: EngineRequest, params: dict[str, Any]) -> asyncio.Task[None]:
        """As `run` of `VLLMReceiver`."""
        fields = sampling(request, only_first=True, scores_prompt=False)
        fields["extra_args"] = {"kv_transfer_params": params}

        async def run() -> None:
            async with aclosing(self._vllm.generate(request, fields, PRIORITY)) as outputs:
                async for _ in outputs:
                    pass

        return self._do(run())

    def _pin(self, pin_id: bytes, params: dict[str, Any]) -> None:
        """As `pin` of `VLLMSender`. The connector keeps the blocks until they are sent."""
        self._do(self._vllm.pin(pin_id, params))

    # ------------------------------------------------------------ of the connector

    def heard(self, message: FromConnector) -> None:
        match message:
            case Costs(costs):
                self.load.costs = costs
            case Encoded(stats):
                self.load.encoder = stats
            case OnDevice(numbers, seconds):
                self.adapters.moved(numbers, seconds)
            case Started(prefill_id):
                self._engine.opened(prefill_id)
            case Released() | ContentWanted():
                self._sender.heard(message)
            case Injected() | FetchFailed() | Closed():
                self._receiver.heard(message)
            case Blind(decode_id):
                for live in [*self._engine.lives.values()]:
                    if live.fetch == decode_id:
                        text = "preempted: its images are on another worker"
                        live.owner.lost(pb.FAILURE_CODE_HANDED_BACK, text)
