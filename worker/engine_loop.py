"""The engine process of either role: start-up, then one loop until the service says stop.

    wait for work, messages or KV → take messages → move KV → step the engine → send tokens → tick

The loop waits while the engine has nothing to do, also for a GPU that computes: so nothing spins when idle,
and messages and KV that come while a step is under way are in the next one. The arena's tick counter says
that this process is alive: once a layer, a step and a start-up stage, and `IDLE_TICK` seconds apart when
idle; never while a GPU computes that may hang. The service reads it, and so does the transfer process, which
tells its peers.
"""

import gc
import math
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from engine import (
    Engine,
    EngineConfig,
    KVSink,
    StepResult,
    build_engine,
)
from engine.loader.tokenizer_json import vocabulary
from kv_transfer import Arena, KVLayout, TraceWriter
from kv_transfer.wait import wait
from rpc import vocabulary_fingerprint
from worker import messages
from worker.attempts import Attempts
from worker.cached_chunks import CachedChunks
from worker.engine_start import EXIT_START_FAILED, EngineProcessConfig
from worker.ipc import ServiceLink
from worker.messages import Code, RequestCounts, ToEngine

IDLE_TICK = 0.5


class Role(Protocol):
    """What makes an engine process a prefill or a decode one. Everything runs in the loop's thread."""

    engine: Engine

    @property
    def kv_fd(self) -> int:
        """Readable when `move_kv` has something to do."""

    @property
    def poll_within(self) -> float | None:
        """Seconds after which `move_kv` is due although `kv_fd` stays silent; None: no need."""

    @property
    def empty(self) -> bool:
        """No attempt is known, and nothing of the pool is being read or written by the lanes."""

    def handle(self, message: ToEngine) -> None:
        """What only this role is told: everything but Stop, AskStatus and the two cancels."""

    def cancel(self, attempt_id: bytes, /) -> None:
        """Ends an attempt, which its router has given up."""

    def move_kv(self, spare: float) -> None:
        """Takes what the KV channel reported. Never waits; what may take more than `spare` seconds is left
        for the next call."""

    def after_step(self, result: StepResult) -> None: ...

    def shutdown(self) -> None:
        """Ends the KV half; the transfer process is gone."""


@dataclass(slots=True)
class Parts:
    """What a role is built from. Everything in it lives as long as the process."""

    config: EngineProcessConfig
    link: ServiceLink
    arena: Arena
    channel: socket.socket
    trace: TraceWriter
    attempts: Attempts
    counts: RequestCounts = field(default_factory=RequestCounts)
    cached_chunks: CachedChunks = field(default_factory=CachedChunks)

    def start_engine(self, kv_sink: KVSink | None = None) -> Engine:
        """Raises ValueError for what the user got wrong."""
        config = msgspec.convert(msgspec.json.decode(self.config.engine), EngineConfig)
        engine = build_engine(
            config,
            kv_sink=kv_sink,
            cache_observer=self.cached_chunks,
            tick=self.arena.tick,
            computing=self.arena.set_step,
            progress=lambda stage, fraction: self.link.send(messages.Progress(stage, fraction)),
        )
        self.cached_chunks.block_size = engine.block_size
        return engine


def device(engine: Engine) -> str:
    return str(engine.kv_cache[0].device)


def kv_layout(engine: Engine) -> KVLayout:
    """All layers cache alike; the wire has one layout for them."""
    layer = engine.cache_spec[0]
    assert all(other == layer for other in engine.cache_spec), "the wire has one layout for all layers"
    dtype = str(layer.dtype).removeprefix("torch.")
    return KVLayout(len(engine.cache_spec), layer.num_kv_heads, layer.head_dim, dtype)


def run(config: EngineProcessConfig, build: Callable[[Parts], Role]) -> int:
    """Exit code of the engine process. An exception of a step is not caught: the worker starts anew."""
    link = ServiceLink(config.address)
    parts = Parts(
        config,
        link,
        Arena.attach(config.arena_fd, config.kv_slots, config.kv_slot_bytes),
        socket.socket(fileno=config.channel_fd),
        TraceWriter(config.trace_path, config.name),
        Attempts(link.send),
    )
    parts.arena.tick()
    try:
        role = build(parts)
        ready = _ready(role.engine)
    except ValueError as error:
        link.send(messages.StartFailed(str(error)))
        link.close()
        return EXIT_START_FAILED
    gc.collect()
    gc.enable()
    gc.freeze()  # what was built lives as long as the process: no step shall wait while it is looked through
    link.send(ready)
    loop(role, parts)
    parts.trace.close()
    link.close()
    return 0


def loop(role: Role, parts: Parts) -> None:
    engine, link = role.engine, parts.link
    fds = [link.fileno(), role.kv_fd, engine.landings_fd]
    while True:
        idle = not engine.has_work
        seconds = min(IDLE_TICK if idle else engine.rest, IDLE_TICK, role.poll_within or IDLE_TICK)
        readable = wait(fds, 0.0 if link.has_messages else seconds)
        if engine.landings_fd in readable:
            os.eventfd_read(engine.landings_fd)
        elif idle and not readable:
            parts.trace.flush()
        for message in link.receive_all():
            match message:
                case messages.Stop():
                    parts.attempts.fail_all(Code.DRAINING, "the worker shuts down")
                    link.send(messages.Stopped())
                    link.wait_for_exit()
                    role.shutdown()
                    return
                case messages.AskStatus():
                    idle = engine.idle and role.empty
                    link.send(messages.EngineStatus(message.question, engine.stats(), parts.counts, idle))
                case messages.Cancel():
                    if parts.attempts.owned(message.stream, message.attempt_id):
                        role.cancel(message.attempt_id)
                case messages.CancelStream():
                    for attempt_id in parts.attempts.of(message.stream):
                        role.cancel(attempt_id)
                case _:
                    role.handle(message)
        role.move_kv(engine.rest if engine.waits_for_device else math.inf)
        result = engine.step() if engine.has_work and not engine.rest else None
        if (changed := parts.cached_chunks.take()) is not None:
            link.send(changed)  # before the token: who continues from it finds its prefix here
        if result is not None:
            if result.seconds:
                now = time.monotonic()
                parts.trace.span("step", now - result.seconds, now)
            role.after_step(result)
        parts.attempts.flush()
        if not engine.waits_for_device:
            parts.arena.tick()


def _ready(engine: Engine) -> messages.EngineReady:
    """Raises ValueError for a tokenizer that cannot be read."""
    model = engine.model_config
    return messages.EngineReady(
        model_fingerprint=engine.model_fingerprint,
        layout=kv_layout(engine),
        vocab_size=model.vocab_size,
        max_model_len=model.max_model_len,
        block_size=engine.block_size,
        num_blocks=engine.num_blocks,
        vocabulary_fingerprint=vocabulary_fingerprint(vocabulary(engine.source)),
        sliding_window=model.max_model_len if model.max_model_len == model.sliding_window else 0,
    )
