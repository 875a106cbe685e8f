"""What the loop of an engine process asks of its two kinds of work, and both as one."""

import math
import time
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any, ClassVar, Protocol

from baton.engine.api.config import MEMORY_TAGS
from baton.engine.core.making_room import to_drop
from baton.rpc import worker_pb2 as pb
from baton.worker import messages
from baton.worker.engine_process.context import Context
from baton.worker.engine_process.engine_attempt import BatonResources, EngineAttempt
from baton.worker.engine_process.handler import Handler
from baton.worker.engine_process.states import State
from baton.worker.engine_process.weights import WeightsChange
from baton.worker.messages import FromRouter, ToEngine


class Role(Protocol):
    """One kind of work over the engine: prefill for a handover, or decode. The loop's thread calls it."""

    handles: ClassVar[tuple[str, ...]]
    """Kinds of `RouterMessage` that `handle` takes."""

    @property
    def idle(self) -> bool:
        """Whether it has nothing that is neither an attempt nor a transfer."""
        return True

    def handle(self, message: FromRouter, content: Any) -> None:
        """Handles a message of one of these kinds. `content`: what it says."""

    def move_kv(self, spare: float) -> None:
        """Handles the reports of the transfer process. Never waits.

        Work that may take longer than `spare` seconds is left for the next call.
        """


class Roles(Handler):
    """The roles of one engine as one: each message belongs to exactly one of them.

    Attributes:
        polls: whether something may have begun or ended that no descriptor shows. Then `move_kv` is due.
    """

    def __init__(self, context: Context, shared: BatonResources, roles: Sequence[Role]) -> None:
        Handler.__init__(self, context.attempts, context.link.send, "Baton's engine")
        self._context = context
        self.engine = shared.engine
        self._sender, self._receiver = shared.sender, shared.receiver
        self._roles = roles
        self._weights = WeightsChange(self.engine, context.link)
        self._change_weights = self._weights.handle
        self._images = context.images
        self.fds = [self._sender.fileno(), self._receiver.fileno(), self._weights.fileno()]
        self.fds += [] if self._images is None else [self._images.fileno()]
        """`move_kv` is due when one of them is readable."""
        self.polls = True

    @property
    def poll_within(self) -> float:
        """Seconds after which `move_kv` must be called in any case. Infinite: no limit."""
        return math.inf if (within := self._receiver.poll_within) is None else within

    @property
    def idle(self) -> bool:
        """Whether there is no attempt, no request, and no transfer from or to the KV pool."""
        return not self._attempts and self.engine.idle and self._moves_nothing

    @property
    def only_decodes(self) -> bool:
        """Whether all attempts decode, and neither a step nor a transfer uses their blocks."""
        attempts = self._attempts
        return attempts.decoding == len(attempts) and self.engine.only_decodes and self._moves_nothing

    @property
    def _moves_nothing(self) -> bool:
        images = () if self._images is None else (self._images,)
        return all(part.idle for part in (self._sender, self._receiver, *images, *self._roles))

    @property
    def _store_idle(self) -> bool:
        return (store := self._context.store) is None or store.idle

    def handle(self, message: ToEngine) -> bool:
        self.polls = True
        return Handler.handle(self, message)

    def status(self, question: int) -> messages.EngineStatus:
        store, parts = self._context.store, [*self.engine.parts_waiting()]
        links = self._context.links.recent(time.monotonic())
        told = pb.WorkerStatus(idle=self.idle and self._store_idle, prefix_links=links)
        if store is not None:
            store.tell(told)
        return messages.EngineStatus(
            question,
            self.engine.stats(parts),
            self._attempts.counts,
            told,
            None if store is None else store.stats,
            self.only_decodes and self._store_idle,
            waiting_of_streams=self._waiting_of_streams((request, tokens) for request, tokens, _ in parts),
        )

    def _pause(self, message: messages.Pause) -> messages.Paused:
        steps = self.engine.loop
        steps.frozen = message.frozen
        if message.abort:
            self._attempts.end_all(pb.FAILURE_CODE_ABORTED, message.abort)
        return messages.Paused(message.question, bool(steps.under_way), "")

    def _said(self, kind: str, content: Any, message: FromRouter) -> None:
        match kind:
            case "only_copies":
                chunks = None if content.all else self._context.cached_chunks.names(content.chunks)
                self.engine.only_here(chunks)
            case "image_ready":
                assert self._images is not None, "the service refuses them where the engine encodes"
                self._images.tell(content)
            case "encode":
                assert self.engine.encoder is not None, "the service refuses them elsewhere"
                image, [pixels] = content.image, message.pixels
                self.engine.encoder.embeddings(image.name, pixels, image.rows, image.columns, content.tenant)
            case _:
                role = next(role for role in self._roles if kind in role.handles)
                role.handle(message, content)

    def _set_memory(self, message: messages.SetMemory) -> messages.MemorySet:
        memory, error, busy = self.engine.memory, "", False
        tags = [tag for tag in MEMORY_TAGS if tag in message.tags]
        try:
            memory.check()
            if not message.release:
                memory.resume(tags)
            elif "kv_cache" in tags and not (self.idle and self._store_idle and not memory.uses_kv()):
                busy = True
            else:
                memory.release(tags)
        except ValueError as reason:
            error = str(reason)
        except MemoryError as reason:
            error = f"the device has not as much memory now: end or shrink what has it ({reason})"
        return messages.MemorySet(message.question, sorted(memory.released), memory.lost_weights, busy, error)

    def move_kv(self, spare: float) -> None:
        self._weights.report()
        if self._images is not None:
            self._images.report()
        for role in self._roles:
            role.move_kv(spare)
        self.engine.loop.joins_at = self._receiver.next_injection
        self._make_room()
        self.polls = self.poll_within < math.inf

    def _make_room(self) -> None:
        """Drops attempts that hold blocks for others, so that each worker goes on alone.

        A prompt here may wait for blocks that held prefills and reservations have. These may wait for other
        workers, where prompts may wait for the same reason. So a prompt with a FETCH first takes the blocks
        of prefills that no worker fetches. Then it takes those of reservations without any KV yet.
        """
        spare = (attempt.live_request for attempt in self.spare())
        for live in to_drop(self.engine.lives, attrgetter("is_wanted"), spare):
            live.owner.drop()

    def spare(self) -> Iterator[EngineAttempt]:
        """Held prefills that no decode worker fetches, then reservations without any KV, each in order of
        arrival."""
        for states in ((State.HELD,), (State.FETCHING, State.WITHOUT_KV)):
            for attempt in self._attempts:
                if attempt.state in states and attempt.is_spare:
                    yield attempt

    def shutdown(self) -> None:
        """Closes the KV sender and receiver, and the rest. The transfer process has closed its lanes."""
        self._weights.close()
        if self._images is not None:
            self._images.close()
        self._sender.shutdown()
        self._receiver.shutdown()
