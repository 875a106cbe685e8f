"""The attempts in the engine process: their states, their leases, and the messages about them to routers.

A *lease* says what uses an attempt: a step of the engine, a transfer that reads or writes its blocks, an
import that its prompt waits for, a decode that takes the blocks over. What uses it knows the lease, and so
finds the attempt without an id. `states` has the rules.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from baton.engine import Logprobs, Output, PromptLogprobs
from baton.engine.core.leases import Leases
from baton.kv_transfer import FirstToken, InjectStats
from baton.kv_transfer.protocol.messages import Reason
from baton.rpc import worker_pb2 as pb
from baton.worker import messages
from baton.worker.engine_process import to_routers
from baton.worker.engine_process.states import TRANSITIONS, State
from baton.worker.engine_process.to_routers import StepTokens
from baton.worker.messages import FromEngine, Origin
from baton.worker.stats import RequestCounts

UNREAD: Mapping[str, tuple[pb.FailureCode, str]] = {
    "deadline": (pb.FAILURE_CODE_DROPPED, "not fetched before the hold deadline"),
    "cancelled": (pb.FAILURE_CODE_DROPPED, "preempted: other requests needed its blocks"),
    "reused": (pb.FAILURE_CODE_INVALID, "this id was used before: draw a new one"),
}
"""By the reason of `Released`: what a router is told of a prefill that no worker has read."""


@dataclass(slots=True, eq=False, kw_only=True)
class Attempt:
    """One attempt in the engine process. Each engine and each role adds what it does at an event."""

    stream: int | None
    """Of the router that submitted it. None: it has ended for this router."""
    origin: Origin
    tokens: int
    """Of the prompt, and of the output before this attempt."""
    other_ids: Collection[bytes] = ()
    """Under which it moves KV, beside its own. They follow from ids that routers choose."""
    state: State = field(default=State.NEW, init=False)
    joined_at: float = 0.0
    """time.monotonic() at which a decode joined the batch with its prompt computed."""
    first_token_at: float | None = None
    """When COMMIT named the first token of a decode. None after the second token."""
    num_sampled: int = 0
    """Tokens that this worker sampled."""
    leases: Leases = field(default_factory=Leases, init=False)
    """What uses the attempt and the memory of its request."""
    attempts: "AttemptTable[Any]" = field(init=False)
    """Set by `AttemptTable.open`."""

    @property
    def id(self) -> bytes:
        return self.origin.attempt_id

    @property
    def closed(self) -> bool:
        return self.state in (State.CLOSING, State.ENDED)

    def to(self, state: State) -> None:
        if state not in TRANSITIONS[self.state]:
            raise RuntimeError(f"an attempt does not go from {self.state.name} to {state.name}")
        self.attempts.decoding += (state is State.DECODING) - (self.state is State.DECODING)
        self.state = state

    def lost(self, code: pb.FailureCode, message: str) -> None:
        """The engine has ended it."""
        self.attempts.fail(self, code, message)
        self.close("gone")

    def cancel(self) -> None:
        """Its router needs it no more."""
        self.attempts.cancelled(self)
        self.close("cancelled")

    def close(self, reason: Reason) -> None:
        """Ends it on this worker. All that uses it is told to end. Idempotent."""
        if self.closed:
            return
        self.to(State.CLOSING)
        for lease in [*self.leases]:
            if isinstance(lease, Lease):  # else of a step, which goes on to its end
                lease.revoke(reason)
        self.stop()
        self.leases.close(self.over)

    def stop(self) -> None:
        """Ends what the engine does for it."""

    def over(self) -> None:
        """Its last lease has ended."""
        self.to(State.ENDED)
        self.attempts.remove(self)


A = TypeVar("A", bound=Attempt)


@dataclass(slots=True, eq=False)
class Lease(Generic[A]):
    """Something uses the attempt until `end`, which is called once."""

    attempt: A

    def __post_init__(self) -> None:
        self.attempt.leases.begin(self)

    def revoke(self, reason: Reason) -> None:
        """The attempt ends. What uses it shall end, too, now or later."""
        raise NotImplementedError

    def end(self) -> None:
        self.attempt.leases.end(self)


class AttemptTable(Generic[A]):
    """All attempts of the engine process, by id, in order of arrival. `send` takes messages for the service
    process.

    Tokens are collected until `flush`, which the loop calls once per engine step.

    Attributes:
        decoding: attempts that decode, and nothing else.
        counts: of all attempts, also of those that have ended.
    """

    def __init__(self, send: Callable[[FromEngine], None]) -> None:
        self._send = send
        self.by_id: dict[bytes, A] = {}  # until the attempt has ended
        self._other_ids = set[bytes]()  # of all attempts
        self.decoding = 0
        self.counts = RequestCounts()
        self._tokens: defaultdict[int, StepTokens] = defaultdict(StepTokens)  # by stream
        self._reports: list[FromEngine] = []  # since the last flush
        self._later: list[Callable[[], None]] = []
        self.find = self.by_id.get

    def __len__(self) -> int:
        return len(self.by_id)

    def __iter__(self) -> Iterator[A]:
        return iter(self.by_id.values())

    def open(self, attempt: A) -> bool:
        """Adds a new attempt.

        If the id is in use, returns False and tells the router. The attempt that uses the id goes on.
        """
        ids = {attempt.id, *attempt.other_ids}
        if not (ids.isdisjoint(self.by_id) and ids.isdisjoint(self._other_ids)):
            self.fail(attempt, pb.FAILURE_CODE_INVALID, "this id is in use")
            return False
        attempt.attempts = self
        self.by_id[attempt.id] = attempt
        self._other_ids.update(attempt.other_ids)
        return True

    def remove(self, attempt: Attempt) -> None:
        """It has ended."""
        del self.by_id[attempt.id]
        self._other_ids.difference_update(attempt.other_ids)

    def cancelled(self, attempt: Attempt) -> None:
        """The router needs it no more."""
        self.report(messages.Cancelled(attempt.origin))
        attempt.stream = None

    def cancel(self, stream: int, attempt_id: bytes | None) -> None:
        """Cancels the attempt with this id, if this router submitted it. None: all that it submitted."""
        attempts = [*self] if attempt_id is None else [self.find(attempt_id)]
        for attempt in attempts:
            if attempt is not None and attempt.stream == stream:
                attempt.cancel()

    def fail(self, attempt: Attempt, code: pb.FailureCode, message: str, prefill_id: bytes = b"") -> None:
        """Tells the router why, once. Only with KV_FAILED the attempt goes on; `prefill_id` should have sent
        the KV."""
        if attempt.stream is None:
            return
        self.flush_tokens()  # the router must get them before the failure
        self._send(to_routers.failed(attempt.stream, attempt.id, code, message, prefill_id))
        self.report(messages.Failed(attempt.origin, code, message))
        if code != pb.FAILURE_CODE_KV_FAILED:
            attempt.stream = None

    def fail_all(self, code: pb.FailureCode, message: str) -> None:
        for attempt in self:
            self.fail(attempt, code, message)

    def end_all(self, code: pb.FailureCode, message: str, *, but_decodes: bool = False) -> None:
        """`but_decodes`: those that decode stay."""
        for attempt in [*self]:
            if not but_decodes or attempt.state is not State.DECODING:
                attempt.lost(code, message)

    def reserved(self, attempt: Attempt) -> None:
        if attempt.stream is not None:
            self._send(to_routers.reserved(attempt.stream, attempt.id))

    def prefill_started(self, attempt: Attempt) -> None:
        if attempt.stream is not None:
            self._send(to_routers.prefill_started(attempt.stream, attempt.id))

    def scored(self, logprobs: PromptLogprobs) -> None:
        attempt = self.find(logprobs.id)
        if attempt is not None and attempt.stream is not None:
            self._send(to_routers.scored(attempt.stream, logprobs))

    def token(self, attempt: Attempt, output: Output, *, elsewhere: bool = False) -> None:
        """The attempt has this token. `elsewhere`: no step of this worker has sampled it for a client."""
        if not elsewhere:
            if attempt.first_token_at is not None:
                seconds = time.monotonic() - attempt.first_token_at
                self.report(messages.SecondToken(attempt.origin, seconds))
                attempt.first_token_at = None
            attempt.num_sampled += 1
            self.counts.generation_tokens += 1
            if output.finish_reason:
                self.counts.finished_stop += output.finish_reason == "stop"
                self.counts.finished_length += output.finish_reason == "length"
        if (stream := attempt.stream) is not None:
            self._tokens[stream].add(output, tell_cached=not attempt.origin.resumed)

    def prefilled(
        self, attempt: Attempt, output: Output, asked_at: float = 0.0, encoded_at: float = 0.0
    ) -> None:
        """The step has computed the prompt of the attempt. The times are those of its images, as in
        `PromptImages`."""
        now = time.monotonic()
        began = now - output.prefill_seconds
        done = messages.Prefilled(
            attempt.origin,
            queued_at=began - output.queue_seconds,
            began_at=began,
            token_at=now,
            prompt_tokens=attempt.tokens,
            cached_tokens=output.cached_tokens,
            images_asked_at=asked_at,
            images_encoded_at=encoded_at,
        )
        self.report(done)

    def injected(self, attempt: Attempt, stats: InjectStats) -> None:
        """Its KV came from another worker."""
        attempt.first_token_at = stats.commit_at
        self.counts.handovers += 1
        self.counts.handovers_hidden += stats.hidden_share
        self.report(messages.KVInjected(attempt.origin, stats))

    def decoded(self, attempt: Attempt) -> None:
        """A decode has its last token."""
        times = attempt.joined_at, time.monotonic()
        self.report(messages.Decoded(attempt.origin, *times, attempt.num_sampled))

    def after_tokens(self, call: Callable[[], None]) -> None:
        """Calls this when the tokens of the step are sent: it may wait until then."""
        self._later.append(call)

    def report(self, message: messages.Report) -> None:
        """Sends what metrics and logs say of an attempt, when no client waits for this thread."""
        self._reports.append(message)

    def flush_tokens(self) -> None:
        """Sends each router one message with all its tokens since the last flush."""
        for stream, tokens in self._tokens.items():
            self._send(messages.ToRouter(stream, tokens.message.SerializeToString()))
        self._tokens.clear()

    def flush(self) -> None:
        """Sends tokens, makes the calls that wait for that, then sends reports."""
        self.flush_tokens()
        later, self._later = self._later, []
        for call in later:
            call()
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
