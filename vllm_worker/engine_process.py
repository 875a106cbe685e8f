"""The engine process of a worker with vLLM. Its service runs `python -m baton.vllm_worker.engine_process`.

    service process ── messages ── this process (asyncio, AsyncLLM) ── vLLM's EngineCore with the connector
           └── transfer process ◀── arenas, heartbeat, which this process gives to the connector ──┘

1. Make the link to the connector, then vLLM's engine (`llm`), in a thread. The connector attaches meanwhile.
2. Tell the service that the engine is ready. The service starts the transfer process.
3. Give messages of the service and of the connector to the roles, which call vLLM, until Stop and Exit.

The connector shows by the heartbeat that vLLM computes, and this process that it is idle. If vLLM's process
ends, this one ends.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import uvloop
import zmq
import zmq.asyncio

from baton.kv_transfer import Heartbeat
from baton.kv_transfer.channel import ChannelClosed
from baton.vllm_worker.attachment import ConnectorLink, Pool
from baton.vllm_worker.cached_blocks import CachedBlocks, with_numbers
from baton.vllm_worker.roles import VLLMRoles
from baton.worker import messages
from baton.worker.engine_process.attempt import AttemptTable
from baton.worker.engine_process.engine_attempt import EngineAttempt
from baton.worker.engine_process.start import EXIT_START_FAILED, EngineProcessConfig, start
from baton.worker.ipc import ServiceLink
from baton.worker.messages import EngineReady, FromEngine

if TYPE_CHECKING:
    from baton.vllm_worker.llm import VLLM

log = logging.getLogger(__name__)

TICK = 0.25
"""Seconds between two signs of life."""
_INT_HASHES = "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"
_EXIT_BROKEN, _EXIT_VLLM_GONE = 1, 5


def run(config: EngineProcessConfig) -> int:
    gc.enable()
    int_hashes = _environment(config)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(config, int_hashes))


async def _run(config: EngineProcessConfig, int_hashes: bool) -> int:
    return await EngineProcess(config, int_hashes=int_hashes).run()


def _environment(config: EngineProcessConfig) -> bool:
    """Settings that vLLM has no options for. What the user has set wins. But this process needs the hashes of
    blocks in full: returns whether others see numbers."""
    threads = config.engine.num_threads
    settings = {
        "VLLM_CONFIGURE_LOGGING": "0",  # its lines look like all others
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PROCESS_NAME_PREFIX": f"{config.title}: {config.name}",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB, as Baton's own engine
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several workers share the CPUs
        **({} if threads is None else {"OMP_NUM_THREADS": str(threads)}),
    }
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    published = os.environ.get(_INT_HASHES, "1") != "0"
    os.environ[_INT_HASHES] = "0"
    return published


class EngineProcess:
    """Made and used in the event loop's thread."""

    def __init__(self, config: EngineProcessConfig, *, int_hashes: bool = True) -> None:
        """`int_hashes`: whether subscribers of vLLM's events see hashes of blocks as numbers."""
        self._config = config
        self._int_hashes = int_hashes
        self._link = ServiceLink(config.address)
        self._attempts = AttemptTable[EngineAttempt](self._send)
        self._heartbeat = Heartbeat(config.heartbeat_fd)
        directory = Path(config.address.removeprefix("ipc://")).parent
        self._connector = ConnectorLink([config.arenas, *config.rank_arenas], config.heartbeat_fd, directory)
        # vLLM's process dies with the thread that starts it. This one lives on, while it can be reached.
        self._thread = ThreadPoolExecutor(1, "vllm")
        self._flushes = False  # soon
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._roles: VLLMRoles | None = None
        self._events: zmq.asyncio.Socket | None = None  # of vLLM's prefix cache

    async def run(self) -> int:
        """Returns the exit code."""
        loop, ticking = asyncio.get_running_loop(), asyncio.create_task(self._tick())
        try:
            vllm, ready, pool = await self._start()
        except ValueError as error:
            self._link.send(messages.StartFailed(str(error)))
            self._link.close()
            return EXIT_START_FAILED
        gc.collect()
        gc.freeze()  # what vLLM's modules have made: scanning it would hold up all streams for half a second
        cached = CachedBlocks(ready.description.content_root, pool.complete, pool.tables)
        self._roles = VLLMRoles(
            self._attempts,
            self._send,
            vllm,
            self,
            self._connector.send,
            cached,
            pool,
            self._config,
            ready,
        )
        self._send(ready)
        loop.set_exception_handler(self._broken)
        loop.add_reader(self._link.fileno(), self._receive)
        listening = asyncio.create_task(self._listen(self._roles))
        waits: set[asyncio.Future[Any]] = {ticking, listening, self._ended}
        if self._events is not None:
            waits.add(asyncio.create_task(self._follow(self._events, cached)))
        [ended, *_], _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        loop.remove_reader(self._link.fileno())
        self._end(_EXIT_BROKEN)  # unless it is said why
        if (code := ended.result()) == 0:
            for task in waits:
                task.cancel()
            await asyncio.wait(waits)  # they use what is closed now
            vllm.close()
            self._connector.close()
            self._link.close()
        return code

    async def _start(self) -> tuple[VLLM, EngineReady, Pool]:
        """Raises ValueError if vLLM does not start."""
        self._send(messages.Progress("starting vLLM", 0.0))
        attaching = asyncio.create_task(self._connector.attached())
        try:
            vllm = await asyncio.get_running_loop().run_in_executor(self._thread, self._start_vllm)
        except ValueError:
            raise
        except Exception as error:
            log.exception("vLLM does not start")
            cause = attaching.exception() if attaching.done() else None
            text = f"--engine vllm: vLLM does not start: {cause or error}; see the worker's log"
            raise ValueError(text) from cause or error
        attach = await attaching
        if self._config.engine.enable_prefix_caching:
            self._events = await _subscribed(vllm.events)
        self._send(messages.Progress("warming up vLLM", 0.8))
        await vllm.warm_up(attach.pool)
        adapters = await vllm.load_adapters()
        return vllm, await asyncio.to_thread(vllm.ready, attach, adapters), attach.pool

    def _start_vllm(self) -> VLLM:
        from baton.vllm_worker.llm import VLLM

        return VLLM(self._config, self._connector.path, self._stepped)

    # ------------------------------------------------------------ messages

    def _send(self, message: FromEngine) -> None:
        self._link.send(message)
        self.soon()

    def soon(self) -> None:
        """Flushes when the tasks that are ready now have run: all tokens of a step share a message."""
        if not self._flushes:
            self._flushes = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flushes = False
        if self._roles is not None:
            self._roles.move_kv()
        self._attempts.flush()
        if self._link.has_messages:  # a send may have taken the signal of their arrival
            self._receive()

    def _receive(self) -> None:
        assert self._roles is not None, "the service waits for EngineReady"
        for message in self._link.receive_all():
            if isinstance(message, messages.Exit):
                self._end(0)
            elif not self._roles.handle(message):
                self._roles.stop()
        self.soon()

    async def _listen(self, roles: VLLMRoles) -> int:
        """Takes the connector's messages, until vLLM's process ends. Returns the exit code."""
        try:
            while True:
                for message in await self._connector.receive():
                    roles.heard(message)
                self.soon()
        except ChannelClosed:
            log.error("vLLM's process has ended")
            return _EXIT_VLLM_GONE

    async def _follow(self, events: zmq.asyncio.Socket, blocks: CachedBlocks) -> NoReturn:
        """Tells the service what enters and leaves vLLM's prefix cache."""
        while True:
            *_, batch = await events.recv_multipart()
            if self._config.kv_events:
                self._send(messages.CacheEvents(with_numbers(batch) if self._int_hashes else batch))
            if (changed := blocks.changed(batch)) is not None:
                self._send(changed)

    def _stepped(self, scheduler: Any, iteration: Any) -> None:
        if (roles := self._roles) is not None:
            roles.load.step(scheduler, iteration)

    async def _tick(self) -> NoReturn:
        """Shows that this process lives while vLLM starts, or has nothing to compute."""
        while True:
            if self._roles is None or not self._roles.busy:
                self._heartbeat.tick()
            if self._roles is not None:
                self.soon()
            await asyncio.sleep(TICK)

    def _broken(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """If it was a callback of this class, the worker ends."""
        loop.default_exception_handler(context)
        if "handle" in context:
            self._end(_EXIT_BROKEN)

    def _end(self, code: int) -> None:
        if not self._ended.done():
            self._ended.set_result(code)

    def gone(self) -> None:
        self._end(_EXIT_VLLM_GONE)

    def computing(self, ids: Collection[bytes]) -> None:
        """Requests leave when this process ends, but the service wants to know those of the last step."""
        if not self._ended.done():
            self._heartbeat.set_step(ids)


async def _subscribed(address: str) -> zmq.asyncio.Socket:
    """Returns when vLLM publishes to the socket."""
    socket = zmq.asyncio.Context(io_threads=1).socket(zmq.SUB)
    socket.set_hwm(0)
    socket.subscribe(b"")
    monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    socket.connect(address)
    await monitor.recv_multipart()
    socket.disable_monitor()
    return socket


if __name__ == "__main__":
    start(EngineProcessConfig, run)
