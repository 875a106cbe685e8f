"""The attempts that this router has open at one worker, and the load that they add there.

    submitted ─▶ first token (prefill work is over) ─▶ ended
        └─ failed, cancelled, or lost with the stream ─▶ ended

Pure: no I/O and no clock. `WorkerConnection` sends and receives the messages.
"""

from dataclasses import dataclass
from typing import Protocol

from baton.router.policy import DecodeLoad, PrefillWork
from baton.rpc import worker_pb2 as pb
from baton.rpc.tracing import Span


class AttemptOwner(Protocol):
    """A generation, which is told what happens to its attempts. Called on the event loop; must not wait."""

    span: Span
    """Of the request. The spans of its attempts are children of it."""
    name: str
    """The request id that the client knows."""

    def on_token(self, event: pb.TokenEvent) -> None: ...
    def on_prompt_logprobs(self, message: pb.PromptLogprobs) -> None: ...
    def on_reserved(self, decode_id: bytes) -> None: ...
    def on_prefill_started(self) -> None: ...
    def on_failed(self, failure: pb.AttemptFailed) -> None: ...
    def on_lost(self, attempt_id: bytes) -> None: ...


@dataclass(slots=True)
class Attempt:
    owner: AttemptOwner
    span: Span
    tokens: int = 0
    """KV positions that a decode reserves. 0 for a prefill."""
    work: PrefillWork | None = None
    """The prompt that the worker still computes. None after the first token, and if it fetches the KV."""


class AttemptTable:
    """Owns the open attempts by id.

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

    def add_prefill(self, attempt_id: bytes, owner: AttemptOwner, span: Span, work: PrefillWork) -> None:
        self._attempts[attempt_id] = Attempt(owner, span, work=work)

    def add_decode(
        self, attempt_id: bytes, owner: AttemptOwner, span: Span, tokens: int, work: PrefillWork | None
    ) -> None:
        """Reserves `tokens` KV positions. The worker computes the prompt itself if there is `work`."""
        assert self.load is not None
        self.load.sent(tokens)
        self._attempts[attempt_id] = Attempt(owner, span, tokens, work)

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
