"""The attempts of a worker whose engine process may be replaced: what the next one must be told.

    message of a router ─▶ sent ──────▶ open ─▶ failed, finished, cancelled
    token of the engine ─▶ heard ──────▶ │
    the engine has ended ─▶ lost ─▶ told to routers, or submitted again: prompt + output so far

An attempt goes on under its id, so its router sees a pause and then the next token. The next engine has the
published KV of the one before, and computes the rest. What another worker may have read half is told to the
router, which plans it again: a prefill that waits for its decode worker, and a part of a split prompt.
"""

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from baton.rpc import worker_pb2 as pb
from baton.worker import messages
from baton.worker.messages import Code, Decode, FromEngine, Prefill, ToEngine

MOST_CRASHES = 2
"""An attempt that was in so many crashed steps, without a token between them, shares no step with others.
With one more it fails. A token shows that the crash was not its own: the step was computed again."""


class Lost(NamedTuple):
    """What a router is told of an attempt."""

    stream: int
    attempt_id: bytes
    code: Code
    message: str


@dataclass(slots=True)
class _Open:
    message: Prefill | Decode
    deadline: float  # time.monotonic()
    alone: bool  # as its router wants it
    crashes: int = 0
    has_output: bool = False
    was_scored: bool = False
    """The router has a part of the log probabilities of its prompt. It takes no position twice."""

    @property
    def returns(self) -> str:
        """Why the attempt goes back to its router. Empty: it goes on here."""
        request = self.message.work.request
        if self.was_scored and not request.output_ids:
            return "its prompt was being scored"
        if isinstance(self.message, Prefill) and (self.has_output or self.message.plan):
            return "its KV was on the way to another worker"
        if self.has_output and any(not image.pixels for image in request.images):
            return "its images were on another worker"
        return "" if self.deadline > time.monotonic() else "its deadline has come"


class OpenAttempts:
    """Not more than the engine has, and for `hold` seconds more what routers need not cancel: prefills that
    were handed over."""

    def __init__(self, hold: float) -> None:
        self._hold = hold
        self._open: dict[bytes, _Open] = {}
        self._held: dict[bytes, float] = {}
        """When it is forgotten, in this order: of prefills with their token, and of parts."""

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, attempt_id: bytes) -> bool:
        return attempt_id in self._open

    def sent(self, message: ToEngine) -> None:
        """A router sent this. Messages of an attempt come in order, and no other has its id."""
        match message:
            case Prefill(work=work) | Decode(work=work):
                deadline = time.monotonic() + work.timeout
                self._open[work.request.id] = _Open(message, deadline, work.request.alone)
                if isinstance(message, Prefill) and message.plan:
                    self._forget_later(work.request.id, deadline)
            case messages.Retarget(stream, decode_id, source, output_ids):
                attempt = self._open.get(decode_id)
                if attempt is None or attempt.message.stream != stream or attempt.has_output:
                    return
                if isinstance(attempt.message, Decode):
                    attempt.message.source = source
                    attempt.message.work.request.output_ids = list(output_ids)
            case messages.Cancel(stream, cancelled):
                for attempt_id in [*self._open] if cancelled is None else [cancelled]:
                    attempt = self._open.get(attempt_id)
                    if attempt is not None and attempt.message.stream == stream:
                        self._end(attempt_id)
            case _:
                pass

    def heard(self, message: FromEngine) -> bool:
        """The engine says this, and routers are told. Returns whether it has computed a token."""
        match message:
            case messages.ToRouter(_, data):
                said = pb.WorkerMessage.FromString(data)
                for token in said.step.tokens:
                    if (attempt := self._open.get(token.attempt_id)) is not None:
                        is_last = token.finish_reason != pb.FINISH_REASON_NONE
                        self._has_token(attempt, token.output_index, token.token_id, is_last)
                if (attempt := self._open.get(said.prompt_logprobs.attempt_id)) is not None:
                    attempt.was_scored = True
                return said.HasField("step")
            case messages.AttemptFailed(stream, origin, code) if code is not Code.KV_FAILED:
                attempt = self._open.get(origin.attempt_id)
                if attempt is not None and attempt.message.stream == stream:
                    self._end(origin.attempt_id)
            case _:
                pass
        return False

    def _has_token(self, attempt: _Open, index: int, token: int, is_last: bool) -> None:
        request = attempt.message.work.request
        if is_last or (isinstance(attempt.message, Prefill) and not attempt.message.handover):
            self._end(request.id)
            return
        attempt.has_output = True
        if isinstance(attempt.message, Prefill):
            self._forget_later(request.id, time.monotonic() + self._hold)
        elif index == len(request.output_ids):
            request.output_ids.append(token)
            attempt.crashes = 0
            attempt.message.source = attempt.message.content = None  # the KV of all tokens is, or was, here

    def _forget_later(self, attempt_id: bytes, at: float) -> None:
        self._held[attempt_id] = at
        now = time.monotonic()
        while self._held and (first := next(iter(self._held))) and self._held[first] <= now:
            self._end(first)

    def _end(self, attempt_id: bytes) -> None:
        self._open.pop(attempt_id, None)
        self._held.pop(attempt_id, None)

    def lost(self, step: Collection[bytes], error: str) -> list[Lost]:
        """The engine has ended, with these attempts in its last step. Returns what routers are told. All
        other attempts stay open."""
        told: list[Lost] = []
        for attempt_id, attempt in [*self._open.items()]:
            attempt.crashes += attempt_id in step
            attempt.message.work.origin.resumed = not attempt.has_output
            if reason := attempt.returns:
                told.append(Lost(attempt.message.stream, attempt_id, Code.HANDED_BACK, f"{error}: {reason}"))
            elif attempt.crashes > MOST_CRASHES:
                text = f"it was being computed when {error}"
                told.append(Lost(attempt.message.stream, attempt_id, Code.ENGINE, text))
            else:
                continue
            self._end(attempt_id)
        return told

    def again(self) -> Iterator[Prefill | Decode]:
        """Returns what the next engine gets, in the order of arrival. From this call on attempts may end, and
        others may come, which are not among them."""
        return self._again([*self._open])

    def _again(self, attempt_ids: Sequence[bytes]) -> Iterator[Prefill | Decode]:
        for attempt_id in attempt_ids:
            if (attempt := self._open.get(attempt_id)) is None:
                continue
            work = attempt.message.work
            work.timeout = max(0.0, attempt.deadline - time.monotonic())
            work.request.retried = True
            work.request.alone = attempt.alone or attempt.crashes >= MOST_CRASHES
            yield attempt.message
