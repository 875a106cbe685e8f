"""The attempts of a worker whose engine process may be replaced: what the next one must be told.

    message of a router ─▶ said ──────▶ open ─▶ failed, finished, cancelled
    token of the engine ─▶ heard ──────▶ │
    the engine has ended ─▶ lost ─▶ told to routers, or submitted again: prompt + output so far

An attempt goes on under its id, so its router sees a pause and then the next token. The next engine has the
published KV of the one before, and computes the rest. What another worker may have read half is told to the
router, which plans it again: a prefill that waits for its decode worker, and a part of a split prompt.
"""

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from baton.rpc import worker_pb2 as pb
from baton.worker.engine_process import to_routers
from baton.worker.messages import FromRouter, Origin, ToRouter
from baton.worker.service_process.validation import RefusedAttempt

MOST_CRASHES = 2
"""An attempt that was in so many crashed steps, without a token between them, shares no step with others.
With one more it fails. A token shows that the crash was not its own: the step was computed again."""


@dataclass(slots=True)
class _Open:
    stream: int
    origin: Origin
    pixels: list[bytes]
    said: pb.RouterMessage  # that submitted it. It gets the output so far
    deadline: float  # time.monotonic()
    alone: bool  # as its router wants it
    crashes: int = 0
    has_output: bool = False
    was_scored: bool = False
    """The router has a part of the log probabilities of its prompt. It takes no position twice."""

    @property
    def is_prefill(self) -> bool:
        return self.said.HasField("prefill")

    @property
    def request(self) -> pb.Request:
        return (self.said.prefill if self.is_prefill else self.said.decode).request

    @property
    def returns(self) -> str:
        """Why the attempt goes back to its router. Empty: it goes on here."""
        request = self.request
        if self.was_scored and not request.output_ids:
            return "its prompt was being scored"
        if self.is_prefill and (self.has_output or self.said.prefill.plan):
            return "its KV was on the way to another worker"
        if self.has_output and any(not pixels for pixels in self.pixels):
            return "its images were on another worker"
        return "" if self.deadline > time.monotonic() else "its deadline has come"


class OpenAttempts:
    """Not more than the engine has, and for `hold` seconds more what routers need not cancel: prefills that
    were handed over."""

    def __init__(self, hold: float | None) -> None:
        """`hold` None: no engine process follows another one, so nothing is remembered."""
        self._remembers, self._hold = hold is not None, hold or 0.0
        self._open: dict[bytes, _Open] = {}
        self._held: dict[bytes, float] = {}
        """When it is forgotten, in this order: of prefills with their token, and of parts."""

    def __len__(self) -> int:
        return len(self._open)

    def said(self, message: FromRouter, said: pb.RouterMessage) -> None:
        """A router said this: the same message, read. Messages of an attempt come in order. Raises
        RefusedAttempt for an id of an open attempt."""
        if not self._remembers:
            return
        stream = message.stream
        match said.WhichOneof("kind"):
            case "prefill" | "decode":
                assert message.origin is not None, "it submits an attempt"
                self._submitted(stream, message.origin, message.pixels, said)
            case "retarget":
                told = said.retarget
                attempt = self._open.get(told.decode_id)
                if attempt is None or attempt.stream != stream or attempt.has_output or attempt.is_prefill:
                    return
                attempt.said.decode.source.CopyFrom(told.source)
                attempt.request.output_ids[:] = told.output_ids
            case "cancel":
                attempt = self._open.get(said.cancel.attempt_id)
                if attempt is not None and attempt.stream == stream:
                    self._end(said.cancel.attempt_id)

    def _submitted(self, stream: int, origin: Origin, pixels: list[bytes], said: pb.RouterMessage) -> None:
        if origin.attempt_id in self._open:
            raise RefusedAttempt(pb.FAILURE_CODE_INVALID, "this id is in use")
        attempt = _Open(stream, origin, pixels, said, 0.0, alone=False)
        request = attempt.request
        attempt.deadline, attempt.alone = time.monotonic() + request.timeout_ms / 1000, request.alone
        self._open[origin.attempt_id] = attempt
        if said.prefill.plan:
            self._forget_later(origin.attempt_id, attempt.deadline)

    def detached(self, stream: int) -> None:
        """The stream of a router has ended, and with it its attempts."""
        for attempt_id, attempt in [*self._open.items()]:
            if attempt.stream == stream:
                self._end(attempt_id)

    def heard(self, message: ToRouter) -> bool:
        """The engine tells a router this. Returns whether it has computed a token."""
        if not self._remembers:
            return False
        said = pb.WorkerMessage.FromString(message.data)
        for token in said.step.tokens:
            if (attempt := self._open.get(token.attempt_id)) is not None:
                is_last = token.finish_reason != pb.FINISH_REASON_NONE
                self._has_token(attempt, token.output_index, token.token_id, is_last)
        if (attempt := self._open.get(said.prompt_logprobs.attempt_id)) is not None:
            attempt.was_scored = True
        attempt = self._open.get(said.failed.attempt_id)
        if (
            attempt is not None
            and attempt.stream == message.stream
            and said.failed.code != pb.FAILURE_CODE_KV_FAILED
        ):
            self._end(said.failed.attempt_id)
        return said.HasField("step")

    def _has_token(self, attempt: _Open, index: int, token: int, is_last: bool) -> None:
        request, attempt_id = attempt.request, attempt.origin.attempt_id
        if is_last or (attempt.is_prefill and not attempt.said.prefill.handover):
            self._end(attempt_id)
            return
        attempt.has_output = True
        if attempt.is_prefill:
            self._forget_later(attempt_id, time.monotonic() + self._hold)
        elif index == len(request.output_ids):
            request.output_ids.append(token)
            attempt.crashes = 0
            for field in ("source", "content"):  # the KV of all tokens is, or was, here
                attempt.said.decode.ClearField(field)

    def _forget_later(self, attempt_id: bytes, at: float) -> None:
        self._held[attempt_id] = at
        now = time.monotonic()
        while self._held and (first := next(iter(self._held))) and self._held[first] <= now:
            self._end(first)

    def _end(self, attempt_id: bytes) -> None:
        self._open.pop(attempt_id, None)
        self._held.pop(attempt_id, None)

    def lost(self, step: Collection[bytes], error: str) -> list[ToRouter]:
        """The engine has ended, with these attempts in its last step. Returns what routers are told. All
        other attempts stay open."""
        told: list[ToRouter] = []
        for attempt_id, attempt in [*self._open.items()]:
            attempt.crashes += attempt_id in step
            attempt.origin.resumed = not attempt.has_output
            if reason := attempt.returns:
                code, text = pb.FAILURE_CODE_HANDED_BACK, f"{error}: {reason}"
            elif attempt.crashes > MOST_CRASHES:
                code, text = pb.FAILURE_CODE_ENGINE, f"it was being computed when {error}"
            else:
                continue
            told.append(to_routers.failed(attempt.stream, attempt_id, code, text))
            self._end(attempt_id)
        return told

    def again(self) -> Iterator[FromRouter]:
        """Returns what the next engine gets, in the order of arrival. From this call on attempts may end, and
        others may come, which are not among them."""
        return self._again([*self._open])

    def _again(self, attempt_ids: Sequence[bytes]) -> Iterator[FromRouter]:
        for attempt_id in attempt_ids:
            if (attempt := self._open.get(attempt_id)) is None:
                continue
            request = attempt.request
            request.timeout_ms = max(0, int(1000 * (attempt.deadline - time.monotonic())))
            request.retried = True
            request.alone = attempt.alone or attempt.crashes >= MOST_CRASHES
            data = attempt.said.SerializeToString()
            yield FromRouter(attempt.stream, data, attempt.origin, attempt.pixels)
