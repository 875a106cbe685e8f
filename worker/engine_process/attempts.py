"""The attempts in the engine process: their states, their leases, and the messages about them to routers.

A *lease* says what uses an attempt: a transfer that reads or writes its blocks, an import that its prompt
waits for, a decode that takes the blocks over. The sender and the receiver report to the lease, which is the
`owner` in their events. So a report finds its attempt without an id. `states` has the rules.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from baton.engine import Logprobs, Output, PromptLogprobs
from baton.engine.core.live_request import LiveRequest
from baton.kv_transfer import Began, Closed, FetchFailed, FirstToken, Injected, Receiver, Released, Sender
from baton.kv_transfer.protocol.messages import Reason
from baton.machine.leases import Leases
from baton.worker import messages
from baton.worker.engine_process.states import TRANSITIONS, State
from baton.worker.messages import Code, FromEngine, Origin


@dataclass(slots=True, eq=False, kw_only=True)
class Attempt:
    """One attempt in the engine process. Each role adds what it does at an event."""

    stream: int | None
    """Of the router that submitted it. None: it has ended for this router."""
    origin: Origin
    tokens: int
    """Of the prompt, and of the output before this attempt."""
    fetched: int = 0
    """Those with KV that came from another worker's prefix cache for this attempt."""
    live: LiveRequest | None = None
    """Its request in the engine. None: it has not come there, or a decode has taken it over."""
    state: State = field(default=State.NEW, init=False)
    attempts: "Attempts[Any]" = field(init=False)
    leases: "Leases[Lease]" = field(init=False)
    """What uses the attempt. These two are set by `Attempts.open`."""

    @property
    def id(self) -> bytes:
        return self.origin.attempt_id

    @property
    def closed(self) -> bool:
        return self.leases.closed

    @property
    def live_request(self) -> LiveRequest:
        assert self.live is not None, "the engine has it"
        return self.live

    def to(self, state: State) -> None:
        if state not in TRANSITIONS[self.state]:
            raise RuntimeError(f"an attempt does not go from {self.state.name} to {state.name}")
        self.state = state

    # What happens to it. Roles override what concerns them.

    def computed(self, stop: int) -> None:
        """A step has computed its positions below `stop`."""

    def sampled(self, output: Output) -> None:
        """A step has sampled its next token."""

    def lost(self, code: Code, message: str) -> None:
        """The engine has ended it."""
        self.attempts.fail(self, code, message)
        self.close("gone")

    def released(self, reading: "Reading", reason: str) -> None:
        """No other worker reads its blocks under the id of the lease any more."""

    def written(self, event: Injected | FetchFailed | Closed | Began) -> None:
        """The receiver reports of a fetch into its blocks."""

    def take(self, decode: "Attempt") -> LiveRequest | bool | None:
        """Keeps the blocks for a decode on this worker. Returns the request when the engine may resume it,
        and False before. None: the blocks are not for this decode."""
        return None

    def let_go(self, decode: "Attempt", *, resumed: bool) -> None:
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

    def cancel(self) -> None:
        """Its router needs it no more."""
        self.attempts.cancelled(self)
        self.close("cancelled")

    def close(self, reason: Reason) -> None:
        """Ends it on this worker. All that uses it is told to end. Idempotent."""
        if self.leases.closed:
            return
        self.to(State.CLOSING)
        for lease in [*self.leases]:
            lease.revoke(reason)
        self.stop()
        self.leases.close()

    def stop(self) -> None:
        """Its request in the engine ends now. The blocks are free when no step and no lease uses them."""

    def over(self) -> None:
        """Its last lease has ended."""
        self.to(State.ENDED)
        del self.attempts.by_id[self.id]


@dataclass(slots=True, eq=False)
class Lease:
    """Something uses the attempt until `end`, which is called once: an import, a transfer, a decode here."""

    attempt: Attempt
    _live: LiveRequest | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.attempt.leases.begin(self)

    def keep_blocks(self) -> None:
        """From now on the lease is one on the request in the engine, too, so its blocks stay."""
        self._live = self.attempt.live_request
        self._live.leases.begin(self)

    def revoke(self, reason: Reason) -> None:
        """The attempt ends. What uses it shall end, too, now or later."""
        raise NotImplementedError

    def end(self) -> None:
        if self._live is not None:
            self._live.leases.end(self)
        self.attempt.leases.end(self)


@dataclass(slots=True, eq=False)
class Reading(Lease):
    """Other workers may read the blocks under this id, until the sender reports that none does."""

    sender: Sender
    id: bytes
    is_open: bool = False
    """Before that the sender reads nothing, and a FETCH waits."""

    def open(
        self,
        block_ids: Sequence[int],
        num_tokens: int,
        state_slot: int,
        states_at: Sequence[int] | None = None,
    ) -> None:
        """As `Sender.open`."""
        self.is_open = True
        self.keep_blocks()
        self.sender.open(self.id, block_ids, num_tokens, state_slot, states_at, self)

    def revoke(self, reason: Reason) -> None:
        self.sender.close(self.id, reason)
        if not self.is_open:
            self.end()

    def handle(self, event: Released) -> None:
        self.end()
        self.attempt.released(self, event.reason)


@dataclass(slots=True, eq=False)
class Writing(Lease):
    """The receiver may write into the blocks, until it reports the end of the fetch with this id."""

    receiver: Receiver
    id: bytes

    def __post_init__(self) -> None:
        Lease.__post_init__(self)
        self.keep_blocks()

    def revoke(self, reason: Reason) -> None:
        self.receiver.cancel(self.id)

    def handle(self, event: Injected | FetchFailed | Closed | Began) -> None:
        if not isinstance(event, Began):
            self.end()
        self.attempt.written(event)


A = TypeVar("A", bound=Attempt)


class Attempts(Generic[A]):
    """All attempts of the engine process, by id, in order of arrival. `send` takes messages for the service
    process.

    Tokens are collected until `flush_tokens`, which the loop calls once per engine step.
    """

    def __init__(self, send: Callable[[FromEngine], None]) -> None:
        self._send = send
        self.by_id: dict[bytes, A] = {}  # until the attempt has ended
        self._tokens: defaultdict[int, list[Output]] = defaultdict(list)  # by stream
        self._reports: list[FromEngine] = []  # since the last flush
        self.find = self.by_id.get

    def __len__(self) -> int:
        return len(self.by_id)

    def __iter__(self) -> Iterator[A]:
        return iter(self.by_id.values())

    def open(self, attempt: A) -> bool:
        """Adds a new attempt.

        If the id is in use, returns False and tells the router. The attempt that uses the id goes on.
        """
        if attempt.id in self.by_id:
            self.fail(attempt, Code.INVALID, "this id is in use")
            return False
        attempt.attempts, attempt.leases = self, Leases(attempt.over)
        self.by_id[attempt.id] = attempt
        return True

    def cancelled(self, attempt: Attempt) -> None:
        """The router needs it no more."""
        self.report(messages.Cancelled(attempt.origin))
        attempt.stream = None

    def fail(self, attempt: Attempt, code: Code, message: str, prefill_id: bytes = b"") -> None:
        """Tells the router why, once. Only with KV_FAILED the attempt goes on; `prefill_id` should have sent
        the KV."""
        if attempt.stream is None:
            return
        self.flush()  # the router must get earlier tokens before the failure
        self._send(messages.AttemptFailed(attempt.stream, attempt.origin, code, message, prefill_id))
        if code is not Code.KV_FAILED:
            attempt.stream = None

    def fail_all(self, code: Code, message: str) -> None:
        for attempt in self:
            self.fail(attempt, code, message)

    def reserved(self, attempt: Attempt) -> None:
        if attempt.stream is not None:
            self._send(messages.Reserved(attempt.stream, attempt.id))

    def prefill_started(self, attempt: Attempt) -> None:
        if attempt.stream is not None:
            self._send(messages.PrefillStarted(attempt.stream, attempt.id))

    def scored(self, logprobs: PromptLogprobs) -> None:
        attempt = self.find(logprobs.id)
        if attempt is not None and attempt.stream is not None:
            self._send(messages.PromptScored(attempt.stream, logprobs))

    def token(self, attempt: Attempt, output: Output) -> None:
        if attempt.stream is not None:
            self._tokens[attempt.stream].append(output)

    def prefilled(self, attempt: Attempt, output: Output) -> None:
        """The step has computed the prompt of the attempt."""
        now = time.monotonic()
        began = now - output.prefill_seconds
        done = messages.Prefilled(
            attempt.origin,
            queued_at=began - output.queue_seconds,
            began_at=began,
            token_at=now,
            prompt_tokens=attempt.tokens,
            cached_tokens=output.cached_tokens,
        )
        self.report(done)

    def report(self, message: messages.Report) -> None:
        """Sends what metrics and logs say of an attempt, when no client waits for this thread."""
        self._reports.append(message)

    def flush_tokens(self) -> None:
        """Sends each router one message with all its tokens since the last flush."""
        for stream, tokens in self._tokens.items():
            self._send(messages.Tokens(stream, tokens))
        self._tokens.clear()

    def flush(self) -> None:
        """Sends tokens, then reports."""
        self.flush_tokens()
        for report in self._reports:
            self._send(report)
        self._reports.clear()


def handed_over(output: Output) -> FirstToken:
    """What a decode worker gets of the first token, beside the KV."""
    if (logprobs := output.logprobs) is None:
        return FirstToken(output.token)
    return FirstToken(output.token, logprobs.logprob, logprobs.top_ids, logprobs.top_logprobs)


def logprobs_of(first: FirstToken) -> Logprobs | None:
    """None: they were not asked for."""
    if first.logprob is None:
        return None
    return Logprobs(first.logprob, first.top_ids, first.top_logprobs)
