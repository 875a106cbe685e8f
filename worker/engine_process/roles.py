"""What the loop of an engine process asks of its two kinds of work, and both as one."""

import math
import time
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import ClassVar, Protocol

from baton.engine import Engine
from baton.kv_transfer import Receiver, Sender
from baton.worker import messages
from baton.worker.engine_process.context import Context
from baton.worker.engine_process.engine_attempt import EngineAttempt
from baton.worker.engine_process.states import State
from baton.worker.messages import ToEngine


class Role(Protocol):
    """One kind of work over the engine: prefill for a handover, or decode. The loop's thread calls it."""

    handles: ClassVar[tuple[type, ...]]
    """Types of the messages that `handle` takes."""

    kv: Sender | Receiver
    """Its end of KV transfer. `move_kv` takes what it reports."""

    @property
    def empty(self) -> bool:
        """Whether no transfer reads or writes the KV pool."""
        return self.kv.idle

    def handle(self, message: ToEngine) -> None:
        """Handles a message of one of the types `handles`."""

    def move_kv(self, spare: float) -> None:
        """Handles the reports of the transfer process. Never waits.

        Work that may take longer than `spare` seconds is left for the next call.
        """


class Roles:
    """The roles of one engine as one: each message belongs to exactly one of them.

    Attributes:
        polls: whether something may have begun or ended that no descriptor shows. Then `move_kv` is due.
    """

    def __init__(self, engine: Engine, roles: Sequence[Role], context: Context) -> None:
        self._engine = engine
        self._roles = roles
        self._context = context
        self._attempts = context.attempts
        self.kv_fds = [role.kv.fileno() for role in roles]
        self.polls = True

    @property
    def poll_within(self) -> float:
        """Seconds after which `move_kv` must be called in any case. Infinite: no limit."""
        return min(math.inf if (limit := role.kv.poll_within) is None else limit for role in self._roles)

    def handle(self, message: ToEngine) -> None:
        """Handles a message of the service process that does not end the loop."""
        self.polls = True
        match message:
            case messages.AskStatus():
                idle = self._engine.idle and not self._attempts and all(role.empty for role in self._roles)
                store = self._context.store
                status = messages.EngineStatus(
                    message.question,
                    self._engine.stats(),
                    self._attempts.counts,
                    idle and (store is None or store.idle),
                    self._context.links.recent(time.monotonic()),
                    None if store is None else store.stats,
                )
                self._context.link.send(status)
            case messages.Cancel(stream, attempt_id):
                self._attempts.cancel(stream, attempt_id)
            case messages.OnlyCopies(chunks):
                names = None if chunks is None else self._context.cached_chunks.names(chunks)
                self._engine.only_here(names)
            case _:
                next(role for role in self._roles if isinstance(message, role.handles)).handle(message)

    def move_kv(self, spare: float) -> None:
        for role in self._roles:
            role.move_kv(spare)
        self._make_room()
        self.polls = self.poll_within < math.inf

    def _make_room(self) -> None:
        """Drops attempts that hold blocks for others, so that each worker goes on alone.

        A prompt here may wait for blocks that held prefills and reservations have. These may wait for other
        workers, where prompts may wait for the same reason. So a prompt with a FETCH first takes the blocks
        of prefills that no worker fetches. Then it takes those of reservations without any KV yet.
        """
        spare = (attempt.live_request for attempt in self.spare())
        for live in self._engine.to_drop(attrgetter("is_wanted"), spare):
            live.owner.drop()

    def spare(self) -> Iterator[EngineAttempt]:
        """Held prefills that no decode worker fetches, then reservations without any KV, each in order of
        arrival."""
        for states in ((State.HELD,), (State.FETCHING, State.WITHOUT_KV)):
            for attempt in self._attempts:
                if attempt.state in states and attempt.is_spare:
                    yield attempt

    def shutdown(self) -> None:
        """Closes the KV sender and receiver. The transfer process has closed its lanes."""
        for role in self._roles:
            role.kv.shutdown()
