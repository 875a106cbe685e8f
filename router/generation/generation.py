"""The life of one generation: from a prompt to its last token, through whatever happens to workers.

A state machine without tasks of its own. `_advance` gets whatever the generation lacks; connections report
what happened; between the two nothing waits:

    decode  none ─ submitted ─ reserved ─ joined (its first token came) ─ finished
    prefill none ─ planned ─ sent ─ answered (its token came) ─ over (decode has joined, or needs none)

At first both are submitted at the same time. After a failure the reservation comes first and the prefill
when it is there, so that no prompt is computed for a pool without room. What was emitted is never emitted
again and never lost: a new prefill is of prompt + output.
"""

import logging
import os

from router.admission.gate import Taken, Turn
from router.api.jobs import Job
from router.errors import ApiError, Failed, InvalidRequest
from router.generation.attempt import Decode, Prefill
from router.generation.emit import EmitOnce, Verdict
from router.generation.outbox import Outbox
from router.generation.output import Output
from router.generation.strikes import Strikes
from router.generation.waiting import Waiting
from router.metrics import Metrics
from router.workers.connection import WorkerConnection
from router.workers.members import PrefillChoice
from router.workers.pool import Overflow, WorkerPool
from rpc import worker_pb2 as pb
from rpc.logs import of_request
from rpc.tracing import Span

log = logging.getLogger(__name__)

# Ends of an attempt that say nothing against its worker.
_NO_FAILURE = {
    pb.FAILURE_CODE_NO_ROOM,
    pb.FAILURE_CODE_HANDED_BACK,
    pb.FAILURE_CODE_DRAINING,
    pb.FAILURE_CODE_DROPPED,
}


class Generation:
    """Puts tokens into `outbox` under `index`, ending with one that has a finish reason, or with an ApiError.

    `name` is the request's id as its client knows it.

    Attributes:
        span: of the request, for those of its attempts.
        cached_tokens: prompt tokens that the first prefill found in its prefix cache.
    """

    def __init__(
        self,
        job: Job,
        turn: Turn,
        pool: WorkerPool,
        outbox: Outbox,
        metrics: Metrics,
        *,
        index: int,
        name: str,
        span: Span,
        timeout: float,
        worker_wait: float,
    ) -> None:
        self.id = os.urandom(16)
        self.name = name
        self.span = span
        self.arrival = pool.arrival()
        self.cached_tokens = 0
        self._job = job
        self._turn = turn
        self._pool = pool
        self._output = Output(outbox, index, job.sampling.max_tokens, metrics, span)
        self._metrics = metrics
        self._emit = EmitOnce()
        self._prefill: Prefill | None = None
        self._decode: Decode | None = None
        self._strikes = Strikes()
        self._waiting = Waiting(pool, self, metrics, timeout=timeout, worker_wait=worker_wait)
        self._prefilled = False  # once, so that the next time is a retry
        self._may_retry = False
        self._retrying = False
        self._done = False

    def start(self) -> None:
        """It waits for its turn from here on."""
        self._advance()

    def __repr__(self) -> str:
        return f"request {self.name}"

    @property
    def output_ids(self) -> list[int]:
        return self._emit.output_ids

    @property
    def done(self) -> bool:
        return self._done

    def cancel(self) -> None:
        """Nobody wants its tokens any more (the client went, or a stop string was met). May come late."""
        self._end()

    # ------------------------------------------------------------ getting what it lacks

    def _advance(self) -> None:
        if self._done:
            return
        prefill, decode = self._prefill, self._decode
        if decode is not None and (decode.here or decode.joined):
            return
        if prefill is not None and not prefill.handover:
            return
        if decode is None:
            self._turn.wait(self)
        elif prefill is None and self._one_left:
            self._end_decode(cancel=True)
            self._prefill_last()
        elif prefill is None:
            self._retarget(decode)

    def on_turn(self) -> Taken:
        if self._prefill is None and self._one_left:
            return self._prefill_last()
        return self._reserve()

    @property
    def _one_left(self) -> bool:
        """A prefill yields the last token, and decode has nothing to do."""
        return self._job.sampling.max_tokens - len(self.output_ids) == 1

    def _prefill_last(self) -> Taken:
        if not self._may_prefill() or not self._plan_prefill(self._choose_prefill(), handover=False):
            return Taken.LATER
        self._send_prefill()
        return Taken.SERVED

    def _reserve(self) -> Taken:
        """Asks a decode worker for room, and at first a prefill worker too."""
        output_ids = self.output_ids
        if self._prefill is not None:
            # Held: the new decode worker takes over the KV, and repeats prefill's token.
            output_ids = output_ids[: self._prefill.base]
            self._prefill.refetched = self._prefill.sent
        tokens = len(self._job.prompt_ids) + len(output_ids) + 1
        worker = self._pool.choose_decode(tokens, self._strikes.avoid)
        if worker is None:
            if self._pool.can_hold(tokens):
                self._waiting.worker_found()
                return Taken.NO_ROOM
            self._waiting.for_worker("decode")
            return Taken.LATER
        if self._prefill is not None:
            self._submit_decode(worker, output_ids, self._prefill.source)
            return Taken.SERVED
        if not self._may_prefill():
            return Taken.LATER
        choice = self._choose_prefill()
        if (overflow := self._overflow(worker, choice)) is not None:
            self._prefill_on_decode(overflow)
        elif self._plan_prefill(choice):
            assert self._prefill is not None
            if not self._retrying:
                self._send_prefill()  # first: the client waits for its token
            self._submit_decode(worker, output_ids, self._prefill.source)
        else:
            return Taken.LATER
        return Taken.SERVED

    def _submit_decode(
        self, worker: WorkerConnection, output_ids: list[int], source: pb.PrefillSource | None, own: int = 0
    ) -> None:
        """Without a source the worker prefills it too, and has to compute `own` tokens."""
        self._waiting.worker_found()
        decode = self._decode = Decode(os.urandom(16), worker, here=source is None)
        self._emit.begin_decode(decode.id)
        submit = pb.SubmitDecode(decode_id=decode.id, request=self._request(output_ids), source=source)
        tokens = len(self._job.prompt_ids) + len(output_ids) + 1
        worker.submit_decode(submit, self, tokens, computes=own)

    def _overflow(self, worker: WorkerConnection, choice: PrefillChoice | None) -> Overflow | None:
        tokens = len(self._job.prompt_ids) + len(self.output_ids)
        return self._pool.overflow(worker, self._job.chunks, tokens, choice, self._strikes.avoid)

    def _prefill_on_decode(self, overflow: Overflow) -> None:
        self._prefilled, self._may_retry = True, False
        self._metrics.overflow[overflow.reason].inc()
        self._submit_decode(overflow.worker, self.output_ids, None, overflow.tokens)

    def _may_prefill(self) -> bool:
        """False: the prompt may not be computed again yet, and the generation waits for that."""
        if self._prefilled and not self._may_retry:
            self._may_retry = self._pool.retries.take(self)
        return self._may_retry or not self._prefilled

    def _choose_prefill(self) -> PrefillChoice | None:
        tokens = len(self._job.prompt_ids) + len(self.output_ids)
        return self._pool.choose_prefill(self._job.session_key, self._job.chunks, tokens, self._strikes.avoid)

    def _plan_prefill(self, choice: PrefillChoice | None, *, handover: bool = True) -> bool:
        """False: there is no worker, and the generation waits for one."""
        if choice is None:
            self._waiting.for_worker("prefill")
            return False
        self._waiting.worker_found()
        prefill_id = os.urandom(16)
        base = self._emit.begin_prefill(prefill_id)
        self._prefill = Prefill(prefill_id, choice.worker, choice.work, base, handover)
        return True

    def _send_prefill(self) -> None:
        prefill = self._prefill
        assert prefill is not None
        prefill.sent = self._prefilled = True
        self._may_retry = False
        submit = pb.SubmitPrefill(
            prefill_id=prefill.id, request=self._request(self.output_ids), handover=prefill.handover
        )
        prefill.worker.submit_prefill(submit, self, prefill.work)

    def _retarget(self, decode: Decode) -> None:
        """Keeps the reservation, and takes the KV from a new prefill of prompt + output."""
        if not self._may_prefill():
            return
        choice = self._choose_prefill()
        if choice is None and self._overflow(decode.worker, None) is not None:
            self._end_decode(cancel=True)
            self._advance()
        elif self._plan_prefill(choice):
            assert self._prefill is not None
            self._prefill.replaces = True
            decode.worker.retarget(
                pb.Retarget(decode_id=decode.id, source=self._prefill.source, output_ids=self.output_ids)
            )
            self._send_prefill()

    def _request(self, output_ids: list[int]) -> pb.Request:
        seconds = self._waiting.seconds_left
        retried, alone = self._retrying, self._strikes.alone
        return self._job.request(
            self.id, self.name, output_ids, seconds=seconds, retried=retried, alone=alone
        )

    # ------------------------------------------------------------ what it waited for

    def on_workers(self) -> None:
        self._advance()
        if self._turn.waits:  # for its turn, and no longer for a worker
            self._waiting.worker_found()

    def on_retry(self) -> None:
        self._may_retry = True
        self._advance()

    # ------------------------------------------------------------ what connections report

    def on_token(self, event: pb.TokenEvent) -> None:
        prefill, decode = self._prefill, self._decode
        from_prefill = prefill is not None and event.attempt_id == prefill.id
        if from_prefill:
            assert prefill is not None
            prefill.answered = True
            if prefill.base == 0:
                self.cached_tokens = event.cached_tokens
        elif decode is not None and not decode.joined and event.attempt_id == decode.id:
            decode.joined = True
            decode.worker.worked()
            if decode.here and not self.output_ids:
                self.cached_tokens = event.cached_tokens
            self._prefill_served()
        verdict = self._emit.offer(event.attempt_id, event.output_index, event.token_id)
        if verdict is Verdict.BROKEN:
            about = of_request(self.name)
            worker = decode and decode.worker
            log.warning("%r: %s continues another text; starting again", self, worker, extra=about)
            self._decode_failed("mismatch", counts=True, cancel=True)
        elif verdict is Verdict.EMIT:
            self._emitted(event, from_prefill=from_prefill)
        if from_prefill and prefill is self._prefill and prefill is not None and prefill.over:
            prefill.worker.forget(prefill.id)

    def _emitted(self, event: pb.TokenEvent, *, from_prefill: bool) -> None:
        self._strikes.token()
        self._turn.generated()
        handed_over = self._prefill is not None
        finish_reason = self._output.token(event, len(self.output_ids), handed_over=handed_over)
        if finish_reason:
            if event.finish_reason:
                ended = self._prefill if from_prefill else self._decode
                assert ended is not None
                ended.worker.forget(ended.id)
            self._end()
        elif self._decode is None:
            self._advance()

    def on_reserved(self, decode_id: bytes) -> None:
        prefill, decode = self._prefill, self._decode
        if self._done or decode is None or decode.id != decode_id or prefill is None or prefill.sent:
            return
        if prefill.worker.ready:
            self._send_prefill()
        else:
            self._end_prefill()
            self._advance()

    def on_failed(self, failure: pb.AttemptFailed) -> None:
        prefill, decode = self._prefill, self._decode
        code, cause = failure.code, pb.FailureCode.Name(failure.code).removeprefix("FAILURE_CODE_").lower()
        if self._done:
            return
        if code == pb.FAILURE_CODE_INVALID:
            self.fail(InvalidRequest(f"the workers refuse {self}: {failure.message}"))
        elif prefill is not None and failure.attempt_id == prefill.id:
            self._prefill_failed(cause, counts=code not in _NO_FAILURE, message=failure.message)
        elif decode is not None and failure.attempt_id == decode.id:
            if code == pb.FAILURE_CODE_FINISHED:
                # It overtook prefill's token, which is on its way or lost with its worker.
                self._end_decode(cancel=False)
            elif code != pb.FAILURE_CODE_KV_FAILED:
                self._decode_failed(cause, counts=code not in _NO_FAILURE, message=failure.message)
            elif prefill is not None and failure.prefill_id in (b"", prefill.id):
                # Of a prefill that had to be asked twice nobody promised that it is still there.
                self._prefill_failed(cause, counts=not prefill.refetched, message=failure.message)

    def on_lost(self, attempt_id: bytes) -> None:
        if self._prefill is not None and attempt_id == self._prefill.id:
            self._prefill_failed("lost", counts=False, message=f"{self._prefill.worker} was lost")
        elif self._decode is not None and attempt_id == self._decode.id:
            self._decode_failed("lost", counts=False, message=f"{self._decode.worker} was lost")

    # ------------------------------------------------------------ ends of attempts

    def _prefill_served(self) -> None:
        """Decode has the KV: the prefill is never used again."""
        prefill = self._prefill
        if prefill is None:
            return
        prefill.over = True
        prefill.worker.worked()
        self._emit.end_prefill()
        if prefill.answered:
            prefill.worker.forget(prefill.id)
        elif prefill.replaces:
            # Decode may have had all it needed of the one before; this one may still be computing.
            prefill.worker.cancel(prefill.id)

    def _prefill_failed(self, cause: str, *, counts: bool, message: str) -> None:
        prefill = self._prefill
        assert prefill is not None
        if prefill.over:
            return
        self._end_prefill(cause)
        self._failed(cause, prefill.worker, counts=counts, message=message)

    def _decode_failed(self, cause: str, *, counts: bool, message: str = "", cancel: bool = False) -> None:
        decode = self._decode
        assert decode is not None
        self._end_decode(cancel=cancel, failure=cause)
        prefill = self._prefill
        if prefill is not None and (decode.joined or len(self.output_ids) > prefill.base + 1):
            # Its KV is of a shorter text than what the client has, or was released when decode had it.
            self._end_prefill()
        self._failed(cause, decode.worker, counts=counts, message=message)

    def _failed(self, cause: str, worker: WorkerConnection, *, counts: bool, message: str) -> None:
        self._metrics.retries[cause].inc()
        self._retrying = True
        strikes = self._strikes
        if counts:
            strikes.failed(worker.address, crashed=cause == "engine")
            worker.failed()
        elif cause == "lost":
            strikes.lost(worker.address)
        if counts or cause == "lost":
            about = of_request(self.name)
            log.info("%r: attempt %d failed (%s): %s", self, strikes.count, cause, message, extra=about)
        if strikes.out:
            text = f"{self} failed {strikes.count} times without a new token, at last: {message}"
            self.fail(Failed(text))
            return
        self._advance()

    def _end_prefill(self, failure: str = "") -> None:
        prefill, self._prefill = self._prefill, None
        if prefill is not None:
            self._emit.end_prefill()
            prefill.worker.cancel(prefill.id, failure)

    def _end_decode(self, *, cancel: bool, failure: str = "") -> None:
        decode, self._decode = self._decode, None
        if decode is not None:
            self._emit.end_decode()
            if cancel:
                decode.worker.cancel(decode.id, failure)
            else:
                decode.worker.forget(decode.id)

    # ------------------------------------------------------------ its own end

    def fail(self, error: ApiError) -> None:
        if not self._done:
            if error.status >= 500:
                log.warning("%r: %s", self, error.message, extra=of_request(self.name))
            self._output.error(error)
            self._end()

    def _end(self) -> None:
        """Exactly once; from here on whatever is still running for it is cancelled."""
        if self._done:
            return
        self._done = True
        self._emit.end()
        self._output.end()
        self._waiting.end()
        self._end_prefill()
        self._end_decode(cancel=True)
        self._turn.end()
