"""An attempt and its engine: its request there, and the transfers that read and write its blocks.

The sender and the receiver report to the lease, which is the `owner` in their events.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton import engine
from baton.engine import Output
from baton.kv_transfer import (
    Began,
    Closed,
    FetchFailed,
    Injected,
    Receiver,
    Released,
    Sender,
    TraceWriter,
)
from baton.kv_transfer.protocol.messages import Reason
from baton.rpc import worker_pb2 as pb
from baton.worker.engine_process.attempt import Attempt, AttemptTable, Lease
from baton.worker.engine_process.engine_protocol import Engine, Live, ReceivingEnd, SendingEnd


@dataclass(frozen=True, slots=True)
class Resources:
    """What the attempts of an engine share."""

    engine: Engine
    sender: SendingEnd
    receiver: ReceivingEnd
    attempts: "AttemptTable[EngineAttempt]"
    trace: TraceWriter
    incarnation: int
    """Of this worker."""
    tick: Callable[[], None]
    """Shows that the engine process lives."""

    def no_room(self) -> str:
        """Counts a refusal, and says why."""
        self.attempts.counts.no_room += 1
        return f"{self.engine.blocks_free} of {self.engine.num_blocks} blocks are free"


@dataclass(frozen=True, slots=True)
class BatonResources(Resources):
    """Those of Baton's engine."""

    engine: engine.Engine
    sender: Sender
    receiver: Receiver


@dataclass(slots=True, eq=False, kw_only=True)
class EngineAttempt(Attempt):
    """Roles override what concerns them."""

    shared: Resources
    fetched: int = 0
    """Tokens with KV that came from another worker's prefix cache for this attempt."""
    live: Live | None = None
    """Its request in the engine. None: it has not come there, or a decode has taken it over."""
    again: Callable[[], None] | None = None
    """Asks the engine again for blocks. It moves memory meanwhile, so that there is room. None: it has
    answered."""

    @property
    def live_request(self) -> Any:
        """A `Live` of its engine."""
        assert self.live is not None, "the engine has it"
        return self.live

    def no_room(self, again: Callable[[], None]) -> None:
        """Holds nothing and waits for no other attempt: only for steps, which move memory."""
        if self.shared.engine.is_moving_memory:
            self.again = again
        else:
            self.lost(pb.FAILURE_CODE_NO_ROOM, self.shared.no_room())

    def stop(self) -> None:
        """The blocks are free when its last lease has ended."""
        if self.live is not None:
            self.shared.engine.cancel(self.live)

    def open(self, num_tokens: int) -> None:
        """The engine is about to write the KV of these positions of a handover. The sender may read what is
        ready."""
        raise NotImplementedError

    def computed(self, stop: int) -> None:
        """A step has computed its positions below `stop`."""

    def sampled(self, output: Output) -> None:
        """A step has sampled its next token."""
        raise NotImplementedError

    def prefilled(self, output: Output, tokens: int) -> None:
        """Reports the prefill. `tokens`: of the prompt that were computed here, or cached."""
        self.shared.trace.instant(
            "first token", prefill=self.id.hex(), request=self.origin.name, computing=output.prefill_seconds
        )
        self.attempts.counts.count_prompt(tokens, output.cached_tokens, self.fetched)
        images = None if self.live is None else self.live.images
        times = (0.0, 0.0) if images is None else (images.asked_at, images.encoded_at)
        self.attempts.prefilled(self, output, *times)

    def range_launched(self) -> None:
        """The last step of a range of its part of a split prompt is launched."""

    def released(self, reading: "Reading", reason: str) -> None:
        """No other worker reads its blocks under the id of the lease any more."""

    def written(self, event: Injected | FetchFailed | Closed | Began) -> None:
        """The receiver reports of a fetch into its blocks."""

    def take(self, decode: Attempt) -> Live | bool | None:
        """Keeps the blocks for a decode on this worker. Returns the request when the engine may resume it,
        and False before. None: the blocks are not for this decode."""
        return None

    def let_go(self, decode: Attempt, *, resumed: bool) -> None:
        """The engine has resumed the request for the decode, or the decode has ended before."""

    @property
    def is_wanted(self) -> bool:
        """Whether another worker holds memory for its result."""
        return False

    @property
    def is_spare(self) -> bool:
        """Whether it has blocks, and may be dropped so that a wanted attempt can start."""
        return False

    def drop(self) -> None:
        """Ends a spare attempt: its blocks are needed."""


@dataclass(slots=True, eq=False)
class Reading(Lease[EngineAttempt]):
    """Other workers may read the blocks and the state slot under this id, until the sender reports that none
    does. The sender reads nothing before `open`, and a FETCH waits."""

    id: bytes
    opened: bool = field(default=False, init=False)

    def open(
        self, num_tokens: int, states_at: Sequence[int] | None = None, next_positions: Sequence[int] = ()
    ) -> None:
        """As `Sender.open`."""
        self.opened = True
        live, sender = self.attempt.live_request, self.attempt.shared.sender
        table = tuple(live.blocks)
        sender.open(self.id, table, num_tokens, live.state_slot, states_at, next_positions, self)

    def revoke(self, reason: Reason) -> None:
        self.attempt.shared.sender.close(self.id, reason)
        if not self.opened:
            self.end()

    def handle(self, event: Released) -> None:
        self.end()
        self.attempt.released(self, event.reason)


@dataclass(slots=True, eq=False)
class Writing(Lease[EngineAttempt]):
    """The receiver may write into the blocks and the state slot, until it reports the end of the fetch with
    this id."""

    id: bytes

    def revoke(self, reason: Reason) -> None:
        self.attempt.shared.receiver.cancel(self.id)

    def handle(self, event: Injected | FetchFailed | Closed | Began) -> None:
        if not isinstance(event, Began):
            self.end()
        self.attempt.written(event)
