"""The engine process: start-up, then one loop over one engine and two roles until the service sends Stop.

    wait for work, messages or KV → take messages → move KV → step the engine → send tokens
    → copy blocks to the host, to the shared store and back → tick

The loop sleeps while the engine has nothing to do, also while a GPU computes. Messages and KV that arrive
during a step are handled before the next step.

The allocator keeps the large buffers and the grammars that steps have freed, for the next steps. When the
engine has been idle for `IDLE_TICK`, it gives them back.

The heartbeat shows that this process is alive. The engine ticks once per layer, the loop once per
iteration, and start-up once per stage. When idle, an iteration lasts at most `IDLE_TICK` seconds. The loop
does not tick while the device computes a step, because the device may hang. The service process reads the
counter, and so does the transfer process, which tells its peers.
"""

import gc
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any, ClassVar, Protocol

from baton.content import vocabulary_fingerprint
from baton.engine import CachedBlock, Engine, Hooks, StepResult, build_engine
from baton.engine.loader.tokenizer_json import vocabulary
from baton.engine.step_loop import StepLoop
from baton.kv_transfer import Heartbeat, TraceWriter, Transport
from baton.kv_transfer.channel import ChannelClosed
from baton.kv_transfer.wait import spins, wait
from baton.machine.memory import trim
from baton.worker import messages
from baton.worker.engine_process.attempts import Attempt, Attempts, State
from baton.worker.engine_process.cached_chunks import CachedChunks
from baton.worker.engine_process.offload import POLL, OffloadPump, offload_pumps
from baton.worker.engine_process.paged_kv import kv_layout
from baton.worker.engine_process.prefix_links import PrefixLinks
from baton.worker.engine_process.shared_store import StoreTier
from baton.worker.engine_process.start import EXIT_START_FAILED, EXIT_TRANSFER_GONE, EngineProcessConfig
from baton.worker.ipc import ServiceLink
from baton.worker.messages import Code, RequestCounts, ToEngine

IDLE_TICK = 0.5  # seconds
_PREEMPTED = "preempted: other requests needed its blocks"


class Role(Protocol):
    """One kind of work over the engine: prefill for a handover, or decode. The loop's thread calls it."""

    handles: ClassVar[tuple[type, ...]]
    """Types of the messages that `handle` takes."""

    @property
    def kv_fd(self) -> int:
        """A descriptor that is readable when `move_kv` has something to do."""

    @property
    def poll_within(self) -> float | None:
        """Seconds after which `move_kv` must be called even if `kv_fd` is not readable. None: no limit."""
        return None

    @property
    def empty(self) -> bool:
        """Whether no transfer reads or writes the KV pool."""

    def handle(self, message: ToEngine) -> None:
        """Handles a message of one of the types `handles`."""

    def move_kv(self, spare: float) -> None:
        """Handles the reports of the transfer process. Never waits.

        Work that may take longer than `spare` seconds is left for the next call.
        """

    def after_step(self) -> None:
        """The attempts know what the step did to them. The loop then sends their tokens."""

    def after_tokens(self) -> None:
        """Does what may wait until the tokens of the step are sent."""

    def shutdown(self) -> None:
        """Closes the KV sender or receiver. The transfer process has closed its lanes."""


@dataclass(slots=True)
class Context:
    """The objects that roles are built from. All of them live as long as the process."""

    config: EngineProcessConfig
    link: ServiceLink
    heartbeat: Heartbeat
    transport: Transport
    trace: TraceWriter
    attempts: Attempts
    counts: RequestCounts = field(default_factory=RequestCounts)
    links: PrefixLinks = field(default_factory=PrefixLinks)
    cached_chunks: CachedChunks = field(default_factory=CachedChunks)
    store: StoreTier | None = None

    def report_cache(self) -> None:
        """Tells the service process what has entered and left the prefix cache."""
        if (changed := self.cached_chunks.take()) is not None:
            self.link.send(changed)

    def _cached(self, blocks: Iterable[CachedBlock]) -> None:
        entered = list(blocks)
        self.cached_chunks.cached(entered)
        if self.store is not None:
            self.store.entered(entered)

    def _kept(self, salt: bytes, name: bytes, chunk: int, *, states: bool) -> None:
        if self.store is not None:
            self.store.store.offer(salt, name, chunk, states=states)

    def start_engine(
        self,
        prefill_started: Callable[[Any, Sequence[int], int, int, int], None],
        layer_done: Callable[[int, Mapping[Any, range]], bool],
    ) -> Engine:
        """Builds the engine with these hooks. Raises ValueError if the user's configuration is wrong."""
        hooks = Hooks(
            progress=lambda stage, fraction: self.link.send(messages.Progress(stage, fraction)),
            tick=self.heartbeat.tick,
            computing=self.heartbeat.set_step,
            prefill_started=prefill_started,
            layer_done=layer_done,
            cached=self._cached,
            moved=self.cached_chunks.moved,
            evicted=self.cached_chunks.evicted,
            states_kept=partial(self._kept, states=True),
            remnant_kept=partial(self._kept, states=False),
        )
        return build_engine(self.config.engine, files=self.config.files, hooks=hooks)


def run(config: EngineProcessConfig, build: Callable[[Context], tuple[Engine, Sequence[Role]]]) -> int:
    """Runs the engine process. Returns its exit code.

    `build` makes the engine and the roles. An exception of a step ends the process, and the supervisor starts
    a new worker.
    """
    gc.freeze()  # what imports made; the collection below would scan it for a tenth of a second
    link = ServiceLink(config.address)
    trace = TraceWriter(config.trace_path, config.name)
    arenas = config.arenas
    transport = Transport(*arenas.ends(), trace, arenas.exports, arenas.adopts)
    heartbeat = Heartbeat(config.heartbeat_fd)
    context = Context(config, link, heartbeat, transport, trace, Attempts(link.send))
    heartbeat.tick()
    try:
        engine, roles = build(context)
        pumps: list[OffloadPump | StoreTier] = [
            *offload_pumps(engine, heartbeat.tick, config.engine.disk_cache_dir, config.offload_fds)
        ]
        if context.store is not None:
            pumps.append(context.store)
        ready = _ready(engine)
    except ValueError as error:
        link.send(messages.StartFailed(str(error)))
        link.close()
        return EXIT_START_FAILED
    gc.collect()
    gc.enable()
    gc.freeze()  # these objects live as long as the process; scanning them would delay a step
    link.send(ready)
    try:
        loop(engine, Roles(engine, roles, context), context, pumps)
    except ChannelClosed:
        return EXIT_TRANSFER_GONE
    for pump in pumps:
        pump.close()
    engine.close()
    context.trace.close()
    link.close()
    return 0


class Roles:
    """The roles of one engine as one: each message belongs to exactly one of them. What a step did, each
    attempt learns here."""

    def __init__(self, engine: Engine, roles: Sequence[Role], context: Context) -> None:
        self._engine = engine
        self._roles = roles
        self._context = context
        self._attempts = context.attempts
        self.kv_fds = [role.kv_fd for role in roles]

    @property
    def poll_within(self) -> float:
        return min(role.poll_within or IDLE_TICK for role in self._roles)

    def handle(self, message: ToEngine) -> None:
        """Handles a message of the service process that does not end the loop."""
        match message:
            case messages.AskStatus():
                idle = self._engine.idle and not self._attempts and all(role.empty for role in self._roles)
                store = self._context.store
                status = messages.EngineStatus(
                    message.question,
                    self._engine.stats(),
                    self._context.counts,
                    idle and (store is None or store.idle),
                    self._context.links.recent(time.monotonic()),
                    None if store is None else store.stats,
                )
                self._context.link.send(status)
            case messages.Cancel():
                attempt = self._attempts.find(message.attempt_id)
                if attempt is not None and attempt.stream == message.stream:
                    attempt.cancel()
            case messages.CancelStream():
                for attempt in [of for of in self._attempts if of.stream == message.stream]:
                    attempt.cancel()
            case _:
                next(role for role in self._roles if isinstance(message, role.handles)).handle(message)

    def move_kv(self, spare: float) -> None:
        for role in self._roles:
            role.move_kv(spare)
        self._make_room()

    def _make_room(self) -> None:
        """Drops attempts that hold blocks for others, so that each worker goes on alone.

        A prompt here may wait for blocks that held prefills and reservations have. These may wait for other
        workers, where prompts may wait for the same reason. So a prompt with a FETCH first takes the blocks
        of prefills that no worker fetches. Then it takes those of reservations without any KV yet.
        """
        spare = (attempt.live_request for attempt in self.spare())
        for live in self._engine.to_drop(attrgetter("is_wanted"), spare):
            live.owner.drop()

    def spare(self) -> Iterator[Attempt]:
        """Held prefills that no decode worker fetches, then reservations without any KV, each in order of
        arrival."""
        for states in ((State.HELD,), (State.FETCHING, State.WITHOUT_KV)):
            for attempt in self._attempts:
                if attempt.state in states and attempt.is_spare:
                    yield attempt

    def after_step(self, result: StepResult) -> None:
        find = self._attempts.find
        for logprobs in result.prompt_logprobs:
            self._attempts.scored(logprobs)
        for prefill_id, chunk in result.prompts.items():
            if (attempt := find(prefill_id)) is not None:
                attempt.computed(chunk.stop)
        for output in result.outputs:
            if (attempt := find(output.id)) is not None:
                attempt.sampled(output)
        for code, lost in (
            (Code.HANDED_BACK, ((of, _PREEMPTED) for of in result.preempted)),
            (Code.ENGINE, result.failed),
            (Code.INVALID, result.refused),
        ):
            for attempt_id, message in lost:
                if (attempt := find(attempt_id)) is not None:
                    attempt.lost(code, message)
        for role in self._roles:
            role.after_step()
        self._attempts.flush_tokens()
        for role in self._roles:
            role.after_tokens()

    def shutdown(self) -> None:
        for role in self._roles:
            role.shutdown()


class FreedMemory:
    """What the allocator keeps. It takes milliseconds to give it back, so that is done after work only."""

    def __init__(self) -> None:
        self._worked_at = 0.0  # infinite: it was given back since

    def turn(self, *, idle: bool, now: float) -> None:
        if not idle:
            self._worked_at = now
        elif now - self._worked_at > IDLE_TICK:
            self._worked_at = math.inf
            gc.collect()  # garbage may hold grammars
            trim()


def loop(engine: Engine, roles: Roles, context: Context, pumps: Sequence[OffloadPump | StoreTier]) -> None:
    link, steps = context.link, engine.loop
    fds = [link.fileno(), steps.landings_fd, *roles.kv_fds]
    fds += [] if context.store is None else [context.store.store.fileno()]
    freed = FreedMemory()
    while True:
        idle, now = not steps.has_work, time.monotonic()
        freed.turn(idle=idle, now=now)
        seconds = seconds_to_wait(steps, roles, now)
        if any(pump.copies for pump in pumps):
            seconds = min(seconds, POLL)
        readable = wait(fds, 0.0 if link.has_messages else seconds)
        if steps.landings_fd in readable:
            os.eventfd_read(steps.landings_fd)
        elif idle and seconds and not readable:
            context.trace.flush()
        for message in link.receive_all():
            if isinstance(message, messages.Stop):
                context.attempts.fail_all(Code.DRAINING, "the worker shuts down")
                link.send(messages.Stopped())
                link.wait_for_exit()
                roles.shutdown()
                return
            roles.handle(message)
        roles.move_kv(steps.seconds_to_step if steps.under_way else math.inf)
        result = steps.step() if steps.has_work and not steps.seconds_to_step else None
        if result is not None and any(output.finish_reason for output in result.outputs):
            context.report_cache()  # before a last token: the router of the next turn must know the prefix
        if result is not None:
            if result.seconds and context.trace.enabled:
                _trace_step(context.trace, result)
            roles.after_step(result)
        context.attempts.flush()
        context.report_cache()
        for pump in pumps:
            pump.pump()
        if not steps.under_way:
            context.heartbeat.tick()


def seconds_to_wait(steps: StepLoop, roles: Roles, now: float) -> float:
    """How long the loop may sleep until a message comes. 0: it polls."""
    if steps.has_work:
        return min(steps.seconds_to_step, roles.poll_within)
    if spins(steps.joins_at, now):  # all KV of a request has come, and its COMMIT has not
        return 0.0
    return min(IDLE_TICK, roles.poll_within)


def _trace_step(trace: TraceWriter, result: StepResult) -> None:
    """Writes what the step computed, and how long each prompt waited that got its first token."""
    now = time.monotonic()
    chunks = [(prompt.hex(), chunk.start, chunk.stop) for prompt, chunk in result.prompts.items()]
    trace.span("step", now - result.seconds, now, decodes=result.decodes, prompts=chunks)
    for output in result.outputs:
        if output.prefill_seconds:
            began = now - output.prefill_seconds
            trace.span("queued", began - output.queue_seconds, began, request=output.id.hex())
            trace.span("prompt", began, now, request=output.id.hex(), cached=output.cached_tokens)


def _ready(engine: Engine) -> messages.EngineReady:
    """Describes the engine for the service process. Raises ValueError if the tokenizer cannot be read."""
    model = engine.model_config
    return messages.EngineReady(
        model_fingerprint=engine.model_fingerprint,
        content_root=engine.content_root,
        layout=kv_layout(engine),
        vocab_size=model.vocab_size,
        max_model_len=model.max_model_len,
        block_size=engine.block_size,
        num_blocks=engine.num_blocks,
        offload_blocks=sum(tier.num_places for tier in engine.offload),
        vocabulary_fingerprint=vocabulary_fingerprint(vocabulary(engine.tokenizer)),
        attention_doubles_at=model.attention_doubles_at,
        numerics=engine.numerics,
    )
