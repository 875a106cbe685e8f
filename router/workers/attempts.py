"""What the router knows of its work at one worker: the open attempts, their load, and whether they fail.

Pure: no I/O and no clock. `WorkerConnection` sends and receives the messages, and passes the time.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from baton.machine.tracing import Span
from baton.router.policy import DecodeLoad, PrefillWork
from baton.rpc import worker_pb2 as pb


@dataclass(frozen=True, slots=True)
class Lost:
    """The stream of an attempt ended."""

    attempt_id: bytes


AttemptEvent = pb.TokenEvent | pb.PromptLogprobs | pb.Reserved | pb.PrefillStarted | pb.AttemptFailed | Lost
OnEvent = Callable[[AttemptEvent], None]
"""Tells a generation what happened to one of its attempts. Called on the event loop; must not wait."""


@dataclass(slots=True)
class Attempt:
    name: str
    """The request id that the client knows."""
    on_event: OnEvent
    span: Span
    tokens: int = 0
    """KV positions that a decode reserves. 0 for a prefill."""
    work: PrefillWork | None = None
    """The prompt that the worker still computes. None after the first token, and if it fetches the KV."""


class AttemptTable:
    """The attempts that this router has open at one worker, by id, and the load that they add there.

        submitted ─▶ first token (prefill work is over) ─▶ ended
            └─ failed, cancelled, or lost with the stream ─▶ ended

    Attributes:
        load: the decode load of an attached worker, in either pool; None without a stream.
    """

    def __init__(self) -> None:
        self.load: DecodeLoad | None = None
        self._attempts: dict[bytes, Attempt] = {}

    def __len__(self) -> int:
        return len(self._attempts)

    def get(self, attempt_id: bytes) -> Attempt | None:
        return self._attempts.get(attempt_id)

    def add(self, attempt_id: bytes, attempt: Attempt) -> None:
        """A decode counts as load from now on."""
        if attempt.tokens:
            assert self.load is not None
            self.load.sent(attempt.tokens)
        self._attempts[attempt_id] = attempt

    def prefilled(self, attempt: Attempt) -> PrefillWork | None:
        """Records that a prompt is computed. Returns the finished work, once."""
        work, attempt.work = attempt.work, None
        if work is not None and not attempt.tokens:
            attempt.span.end()
        return work

    def end(self, attempt_id: bytes, failure: str = "") -> Attempt | None:
        """Removes an attempt; None if it ended before. `failure` goes into its span."""
        attempt = self._attempts.pop(attempt_id, None)
        if attempt is not None:
            attempt.span.end(failure)
            if self.load is not None and attempt.tokens:
                self.load.ended(attempt.tokens)
        return attempt

    def fail(self, failure: pb.AttemptFailed) -> Attempt | None:
        """Applies a failure that the worker reported. None if the attempt is not open.

        After KV_FAILED the attempt stays: the worker keeps its reservation. All other failures end it. A code
        of a newer worker becomes UNSPECIFIED.
        """
        attempt = self._attempts.get(failure.attempt_id)
        if attempt is None:
            return None
        if failure.code not in pb.FailureCode.values():
            failure.message = f"{failure.message} (unknown failure code {failure.code})"
            failure.code = pb.FAILURE_CODE_UNSPECIFIED
        if failure.code != pb.FAILURE_CODE_KV_FAILED:
            self.end(failure.attempt_id, f"{pb.FailureCode.Name(failure.code)}: {failure.message}")
        if failure.code == pb.FAILURE_CODE_NO_ROOM and self.load is not None:
            self.load.full = True
        return attempt

    def lose_all(self) -> dict[bytes, Attempt]:
        """Empties the table when the stream ends. Returns what was open."""
        lost, self._attempts = self._attempts, {}
        self.load = None
        for attempt in lost.values():
            attempt.span.end("the worker was lost")
        return lost


FAILURES = 3
WINDOW_S = 30.0
OPEN_S = 10.0
TOGETHER_S = 1.0
"""Failures within this time count as one: they have one cause, such as a failed batch or a lost stream."""


class CircuitBreaker:
    """Keeps requests away from a worker that fails repeatedly, for a while. Then it gets one probe.

        closed ─ 3 failures in 30 s ─▶ open ─ 10 s ─▶ half-open ─ one probe ─▶ closed, if the probe succeeds
                                         ▲                            │
                                         └──────── the probe fails ───┘

    Times are seconds of `time.monotonic()`, and never go back. Source: M. Nygard, Release It! (2007).
    """

    __slots__ = ("_failures", "_open_until", "_probing", "_tripped")

    def __init__(self) -> None:
        self._failures: deque[float] = deque()
        self._tripped = self._probing = False
        self._open_until = 0.0

    def open_for(self, now: float) -> float:
        """Seconds until the worker may get an attempt; 0 if it may now."""
        return max(0.0, self._open_until - now) if self._tripped else 0.0

    def attempt_sent(self, now: float) -> bool:
        """Returns True if this attempt is the probe. The breaker is then open again, for OPEN_S at most.

        The limit is needed because a probe may be cancelled, and then gives no result.
        """
        if self._tripped and now >= self._open_until:
            self._open_until = now + OPEN_S
            self._probing = True
            return True
        return False

    def attempt_succeeded(self) -> bool:
        """Returns True if this closes the breaker."""
        if not self._probing:
            return False
        self._tripped = self._probing = False
        self._failures.clear()
        return True

    def attempt_failed(self, now: float) -> bool:
        """Counts a failed attempt or a lost stream. Returns True if this opens the breaker."""
        if self._failures and now - self._failures[-1] < TOGETHER_S:
            return False
        while self._failures and self._failures[0] <= now - WINDOW_S:
            self._failures.popleft()
        self._failures.append(now)
        if not self._tripped and len(self._failures) < FAILURES:
            return False
        self._tripped, self._probing = True, False
        self._open_until = now + OPEN_S
        return True
