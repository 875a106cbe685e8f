"""The prefill role: handles messages, reports of the KV sender, and the outputs of engine steps."""

import logging
import time
from dataclasses import dataclass
from typing import Literal

from engine import Output, StepResult
from kv_transfer import FirstToken, Released
from prefill_worker.sink import SenderSink
from worker import messages
from worker.engine_loop import Parts, paged_kv
from worker.messages import Code, ToEngine

log = logging.getLogger(__name__)


@dataclass(slots=True)
class PrefillAttempt:
    """One prefill, from its submission to the release of its blocks."""

    tokens: int  # number of tokens of the prompt and of the output so far
    handover: bool
    held: bool = False  # computed and its first token sent; the blocks stay for the decode worker
    closed: bool = False  # ended; the blocks are released when no transfer reads them


class PrefillRole:
    """The role of a prefill worker. Owns the engine and the KV sender.

    The sender may read the blocks of an opened prefill. The engine gets them back only after the sender has
    reported the prefill as released.
    """

    def __init__(self, parts: Parts) -> None:
        self._attempts = parts.attempts
        self._counts = parts.counts
        self._link = parts.link
        self._trace = parts.trace
        self._sink = SenderSink(parts.trace)
        self.engine = parts.start_engine(self._sink)
        self._sender = self._sink.sender = parts.transport.sender(paged_kv(self.engine))
        self._prefills: dict[bytes, PrefillAttempt] = {}  # by prefill id, in order of arrival

    @property
    def kv_fd(self) -> int:
        return self._sender.fileno()

    @property
    def poll_within(self) -> float | None:
        return None

    @property
    def empty(self) -> bool:
        return not self._prefills and self._sender.idle

    # ------------------------------------------------------------ messages

    def handle(self, message: ToEngine) -> None:
        assert isinstance(message, messages.Prefill), f"not for a prefill engine: {message}"
        request = message.work.request
        prefill_id = request.id
        if prefill_id in self._prefills:
            self._attempts.refuse_reused(message.stream, prefill_id)
            return
        self._attempts.open(message.stream, prefill_id)
        self.engine.add(request, handover=message.handover)
        if message.handover:
            self._sender.expect(prefill_id)
        self._prefills[prefill_id] = PrefillAttempt(
            len(request.prompt_ids) + len(request.output_ids), message.handover
        )

    def cancel(self, prefill_id: bytes) -> None:
        self._attempts.end(prefill_id)
        self._close(prefill_id, "cancelled")

    def shutdown(self) -> None:
        self._sender.shutdown()

    def _close(self, prefill_id: bytes, reason: Literal["cancelled", "finished", "gone"]) -> None:
        """Ends a prefill on this worker. If the sender has opened it, its blocks stay until `_released`."""
        prefill = self._prefills[prefill_id]
        if prefill.closed:
            return
        prefill.closed = True
        if prefill.handover:
            # This includes a prefill that is not opened yet, because a FETCH may wait for it.
            self._sender.close(prefill_id, reason)
        if prefill_id not in self._sink.opened:
            self._forget(prefill_id)

    def _forget(self, prefill_id: bytes) -> None:
        """Removes a prefill when no transfer reads its blocks."""
        if self._prefills.pop(prefill_id).held:
            self.engine.release(prefill_id)
        else:
            self.engine.cancel(prefill_id)

    # ------------------------------------------------------------ KV

    def move_kv(self, spare: float) -> None:
        for released in self._sender.poll():
            self._released(released)
        # A request with blocks on a decode worker must always be prefilled, or prefill and decode would wait
        # for each other. So prefills that no decode worker fetches are dropped when blocks are needed.
        has_fetch = self._sender.has_fetch
        closing = (prefill_id for prefill_id, prefill in self._prefills.items() if prefill.closed)
        unfetched = (
            prefill_id
            for prefill_id, prefill in self._prefills.items()
            if prefill.held and not prefill.closed and not has_fetch(prefill_id)
        )
        for prefill_id in self.engine.to_drop(has_fetch, closing, unfetched):
            log.warning(
                "prefill %s is dropped: no decode worker has fetched it, and its blocks are needed",
                prefill_id.hex()[:8],
            )
            self._attempts.fail(prefill_id, Code.DROPPED, "not fetched, and its blocks were needed")
            self._close(prefill_id, "gone")

    def _released(self, released: Released) -> None:
        self._sink.opened.discard(released.prefill_id)
        if released.reason == "deadline":
            self._attempts.fail(released.prefill_id, Code.DROPPED, "not fetched before the hold deadline")
        elif released.reason == "reused":
            self._attempts.fail(released.prefill_id, Code.INVALID, "this id was used before: draw a new one")
        self._attempts.end(released.prefill_id)
        self._forget(released.prefill_id)

    # ------------------------------------------------------------ steps

    def after_step(self, result: StepResult) -> None:
        for output in result.outputs:
            self._first_token(output)
        self._attempts.flush()  # before `_hand_over` wakes the pump: its thread competes for the GIL
        for output in result.outputs:
            self._hand_over(output)
        for prefill_id, message in result.failed:
            self._attempts.fail(prefill_id, Code.ENGINE, message)
            self._close(prefill_id, "gone")
        for prefill_id, message in result.refused:
            self._attempts.fail(prefill_id, Code.INVALID, message)
            self._close(prefill_id, "gone")
        assert not result.preempted, "a prefill worker never preempts"

    def _first_token(self, output: Output) -> None:
        prefill = self._prefills[output.id]
        self._trace.instant("first token", prefill=output.id.hex())
        self._counts.prompt_tokens += prefill.tokens
        self._counts.count(output)
        now = time.monotonic()
        began = now - output.prefill_seconds
        self._link.send(
            messages.Prefilled(
                output.id,
                accepted_at=began - output.queue_seconds,
                began_at=began,
                token_at=now,
                prompt_tokens=prefill.tokens,
                cached_tokens=output.cached_tokens,
            )
        )
        self._attempts.token(output)

    def _hand_over(self, output: Output) -> None:
        prefill = self._prefills[output.id]
        if not prefill.handover:
            del self._prefills[output.id]
            self._attempts.end(output.id)
            return
        prefill.held = True
        if prefill.closed:
            return
        if output.finish_reason:
            self._attempts.end(output.id)
            self._close(output.id, "finished")
            return
        logprobs = output.logprobs
        self._sender.commit(
            output.id,
            FirstToken(
                output.token,
                logprobs.logprob if logprobs else None,
                logprobs.top_ids if logprobs else (),
                logprobs.top_logprobs if logprobs else (),
            ),
        )
