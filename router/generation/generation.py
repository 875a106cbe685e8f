"""Decides what one generation does next: when it starts, when a worker reports something, and after failures.

The docstring of the package shows the states, and what waits for what.
"""

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from baton.machine.logs import of_request
from baton.machine.tracing import Span
from baton.router import prompt_logprobs
from baton.router.admission.parked import Deadline, Parked, Waits
from baton.router.admission.queue import Turn, TurnResult
from baton.router.api.jobs import Job
from baton.router.errors import ApiError, Failed, InvalidRequest, TimedOut
from baton.router.generation.attempts import AttemptPair, DecodeAttempt, PrefillAttempt, Verdict
from baton.router.generation.failures import is_failure
from baton.router.generation.output import Token, TokenQueue
from baton.router.metrics import Metrics
from baton.router.policy.placement import Placement
from baton.router.policy.prefill_loads import PrefillWork
from baton.router.workers.pool import Place, PrefillTarget, WorkerPool
from baton.router.workers.worker import Attempt, AttemptEvent, Worker
from baton.rpc import worker_pb2 as pb

log = logging.getLogger(__name__)
_FINISH = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}


@dataclass(slots=True)
class Seconds:
    """How long the parts of a generation took."""

    queue: float = 0.0
    """Until the prompt was sent to a worker."""
    first_token: float = 0.0
    later_tokens: float = 0.0
    """From the first token to the last one."""


class Generation:
    """Writes tokens into `tokens` under `index`. The last one has a finish reason, or is an ApiError.

    Attributes:
        name: the request id that the client knows.
        cached_tokens: prompt tokens that the first prefill found in its prefix cache.
        accepted_drafts: tokens that workers had drafted.
        rejected_drafts: drafts that became no tokens.
        done: the generation has ended.
    """

    def __init__(
        self,
        job: Job,
        turn: Turn,
        pool: WorkerPool,
        parked: Parked,
        tokens: TokenQueue,
        metrics: Metrics,
        *,
        index: int,
        name: str,
        span: Span,
        deadline: Deadline,
        worker_wait: float,
    ) -> None:
        self.name = name
        self.cached_tokens = 0
        self.accepted_drafts = self.rejected_drafts = 0
        self.done = False
        self._job = job
        self._turn = turn
        self._pool = pool
        self._tokens = tokens
        self._index = index
        self._span = span
        self._metrics = metrics
        self._emitted_at = time.monotonic()
        self.seconds = Seconds()
        metrics.waiting.inc()
        self._waits = Waits(
            parked,
            name=name,
            on_worker=self.advance,
            on_retry=self.advance,
            on_deadline=self._waited_too_long,
            deadline=deadline,
            worker_wait=worker_wait,
        )
        self._pair = AttemptPair(self._on_event, span, job, name, pool, self._waits)

    def __repr__(self) -> str:
        return f"request {self.name}"

    @property
    def output_ids(self) -> list[int]:
        return self._pair.output_ids

    @property
    def numerics_changed(self) -> bool:
        return self._pair.numerics_changed

    # ------------------------------------------------------------ starting attempts

    def advance(self) -> None:
        """Requests what the generation needs next: at first a turn in the admission queue."""
        prefill, decode = self._pair.prefill, self._pair.decode
        if self.done or (decode is not None and (decode.prefills or decode.joined)):
            return
        if prefill is not None and not prefill.handover:
            return
        if decode is None:
            self._turn.wait(self._on_turn)
        elif prefill is None and self._pair.next_token_alone:
            self._pair.end_decode(cancel=True)
            self._prefill_alone(self._pair.choose_prefill())
        elif prefill is None:
            self._retarget(decode)

    def _on_turn(self) -> TurnResult:
        alone = self._pair.prefill is None and self._pair.next_token_alone
        target = self._pair.choose_prefill() if alone else None
        return self._reserve() if target is None else self._prefill_alone(target)

    def _prefill_alone(self, target: PrefillTarget | None) -> TurnResult:
        if not self._waits.may_prefill() or not self._plan_prefill(target, handover=False):
            return TurnResult.PARKED
        self._send_prefill()
        return TurnResult.SENT

    def _reserve(self) -> TurnResult:
        """Submits a decode, if a worker has capacity for it, and the first time also the prefill."""
        output_ids = self.output_ids
        if self._pair.prefill is not None:
            # The prefill worker still holds the KV. The new decode repeats the prefill's token.
            output_ids = output_ids[: self._pair.prefill.base]
        tokens = len(self._job.prompt_ids) + len(output_ids) + 1
        worker = self._pair.choose_decode(tokens)
        if worker is None:
            if self._pair.prefill is None and (place := self._pair.place_without_room()) is not None:
                return self._prefill_and_decode_on(place)
            if self._pool.can_ever_hold(tokens):
                self._waits.worker_found()
                return TurnResult.NO_CAPACITY
            self._waits.wait_for_worker("decode")
            return TurnResult.PARKED
        if self._pair.prefill is not None:
            return self._fetch(self._pair.prefill, worker, output_ids)
        return self._prefill_and_decode(worker)

    def _prefill_and_decode(self, worker: Worker) -> TurnResult:
        if not self._waits.may_prefill():
            return TurnResult.PARKED
        target = self._pair.choose_prefill()
        place = self._pair.place(worker, target)
        if place is not None and target is not None and self._split(target, worker, place.why.alone):
            pass
        elif place is not None and place.work is not None:
            return self._prefill_and_decode_on(place)
        elif not self._plan_prefill(target):
            return TurnResult.PARKED
        assert self._pair.prefill is not None
        assert target is not None
        if not self._pair.retried or self._pair.prefill.plan:
            if target.queues and self._pair.prefill.worker is not worker:
                self._pair.promise()
            self._send_prefill()  # first: the client waits for its token
            if self._pair.prefill.queued:
                return TurnResult.QUEUED
        self._pair.submit_decode(worker, self.output_ids)
        return TurnResult.SENT

    def _split(self, target: PrefillTarget, decode: Worker, alone: float = math.inf) -> bool:
        found = self._pair.split(target, decode, alone)
        self._metrics.split_prompts.inc(found)
        return found

    def _fetch(self, prefill: PrefillAttempt, worker: Worker, output_ids: list[int]) -> TurnResult:
        """Submits a decode for a prefill that was planned before."""
        if prefill.worker is not worker or prefill.answered or prefill.plan:
            prefill.refetched = prefill.sent and not prefill.queued and not prefill.replaces
            self._pair.submit_decode(worker, output_ids)
        elif self._waits.may_prefill():
            self._prefill_here(worker)
        else:
            return TurnResult.PARKED
        return TurnResult.SENT

    def _prefill_and_decode_on(self, place: Place) -> TurnResult:
        """One worker computes the prompt and decodes."""
        assert place.work is not None
        if not self._waits.may_prefill():
            return TurnResult.PARKED
        self._prompt_sent(place.work.tokens)
        if place.why.reason is not None:
            self._metrics.overflow[place.why.reason].inc()
        self._pair.submit_decode(place.worker, self.output_ids, place)
        return TurnResult.SENT

    def _prefill_here(self, worker: Worker) -> None:
        """The only worker left computes the prompt and decodes."""
        self._pair.end_prefill()
        self._pair.end_decode(cancel=True)
        work = PrefillWork(self._pair.length, self._job.chunks)
        reason = "no_prefill" if self._pool.decodes else "no_decode"
        self._prefill_and_decode_on(Place(worker, work, 0.0, Placement("decode", reason=reason)))

    def _plan_prefill(self, target: PrefillTarget | None, *, handover: bool = True) -> bool:
        """Returns False if there is no worker. The generation then waits for one."""
        if target is None:
            self._waits.wait_for_worker("prefill")
            return False
        self._pair.plan_prefill(target, handover=handover)
        return True

    def _send_prefill(self) -> None:
        prefill = self._pair.prefill
        assert prefill is not None
        works = [attempt.work for attempt in (prefill, *prefill.parts) if attempt.work is not None]
        self._prompt_sent(sum(work.tokens for work in works))
        self._pair.send_prefill()

    def _prompt_sent(self, tokens: int) -> None:
        if not self._waits.prefilled:
            self.seconds.queue = self._waits.waited
            self._metrics.queue.observe(self.seconds.queue)
        self._waits.prefill_sent()
        if not self.output_ids:  # a prompt that is computed again after that costs its key nothing
            self._turn.computes(tokens)

    def _retarget(self, decode: DecodeAttempt) -> None:
        """Keeps the reservation. The decode worker fetches the KV of a new prefill of prompt + output."""
        if not self._waits.may_prefill():
            return
        target = self._pair.choose_prefill()
        same = target is not None and target.worker is decode.worker
        if same and not self._pool.decodes:
            self._prefill_here(decode.worker)
        elif same or (target is None and self._pair.place(decode.worker, None) is not None):
            self._pair.end_decode(cancel=True)
            self.advance()
        elif (target is not None and self._split(target, decode.worker)) or self._plan_prefill(target):
            self._pair.retarget()
            self._send_prefill()

    # ------------------------------------------------------------ reports of the connections

    def _on_event(self, attempt: Attempt, event: AttemptEvent | None) -> None:
        match event:
            case pb.TokenEvent():
                self._on_token(attempt, event)
            case pb.PromptLogprobs():
                attempt.scores.append(event)
            case pb.Reserved():
                self._on_reserved(attempt)
            case pb.PrefillStarted():
                if self._pair.prefill is not None and self._pair.prefill.queued:
                    self.advance()
            case pb.AttemptFailed():
                self._on_failed(attempt, event)
            case None:
                self._on_lost(attempt)

    def _on_token(self, attempt: Attempt, event: pb.TokenEvent) -> None:
        prefill, decode = self._pair.prefill, self._pair.decode
        if prefill is not None and attempt is prefill:
            prefill.answered = True
            if prefill.base == 0:
                self._found_cached(event.cached_tokens)
        elif decode is not None and attempt is decode and not decode.joined:
            decode.joined = True
            self._waits.worker_found()  # it may have waited for another prefill
            decode.worker.attempt_succeeded()
            if decode.prefills and not self.output_ids:
                self._found_cached(event.cached_tokens)
            self._pair.prefill_served()
        verdict = self._pair.offer(attempt, event.output_index, event.token_id)
        if verdict is Verdict.BROKEN:
            text = "%r: %s continues another text; the decode starts again"
            log.warning(text, self, attempt.worker, extra=of_request(self.name))
            self._decode_failed("mismatch", counts=True, cancel=True)
        elif verdict is Verdict.EMIT:
            self._emitted(attempt, event)
        if prefill is not None and attempt is prefill is self._pair.prefill and prefill.over:
            prefill.worker.forget(prefill.id)

    def _found_cached(self, tokens: int) -> None:
        self.cached_tokens = tokens
        self._turn.computes(max(0, len(self._job.prompt_ids) - tokens))

    def _emitted(self, attempt: Attempt, event: pb.TokenEvent) -> None:
        pair = self._pair
        pair.failures.token()
        self._turn.generated()
        self._measure()
        self.accepted_drafts += event.accepted_draft
        self.rejected_drafts += event.rejected_drafts
        scores: Sequence[pb.PromptLogprobs] = ()
        if len(pair.output_ids) == 1 and self._job.scores_prompt:
            scores, attempt.scores = attempt.scores, []
            if sum(map(prompt_logprobs.tokens, scores)) != len(self._job.prompt_ids) - 1:
                text = "the worker sent no log probabilities for a part of the prompt"
                self.fail(Failed(f"{self}: {text}"))
                return
        finish_reason, ended = "", event.finish_reason
        if ended:  # no token follows a finish reason, not even an unknown one
            finish_reason = _FINISH.get(ended, "length")
            attempt.worker.forget(attempt.id)
        if not pair.tokens_left:
            finish_reason = finish_reason or "length"
        elif ended == pb.FINISH_REASON_LENGTH and attempt is pair.prefill:
            # A prefill without a handover scored the prompt, and its token is not the last one.
            pair.end_prefill()
            self._waits.free_retry()
            finish_reason = ""
        logprobs = event.logprobs if event.HasField("logprobs") else None
        self._tokens.put(self._index, Token(event.token_id, logprobs, finish_reason, scores))
        if finish_reason:
            self.cancel()
        elif pair.decode is None:
            self.advance()

    def _measure(self) -> None:
        """Counts the latency of a token. Until the first one the request waits, and then it runs."""
        metrics, now, emitted = self._metrics, time.monotonic(), len(self._pair.output_ids)
        passed, self._emitted_at = now - self._emitted_at, now
        if emitted == 1:
            metrics.waiting.dec()
            metrics.running.inc()
            self.seconds.first_token = passed
            metrics.time_to_first_token.observe(passed)
            self._span.set({"gen_ai.latency.time_to_first_token": passed})
            return
        self.seconds.later_tokens += passed
        metrics.inter_token.observe(passed)
        if emitted == 2 and self._pair.prefill is not None:
            metrics.handover_gap.observe(passed)

    def _on_reserved(self, attempt: Attempt) -> None:
        prefill, decode = self._pair.prefill, self._pair.decode
        if self.done or decode is None or attempt is not decode or prefill is None or prefill.sent:
            return
        if prefill.worker.ready_in(pb.POOL_PREFILL):
            self._send_prefill()
        else:
            self._pair.end_prefill()
            self.advance()

    def _on_failed(self, attempt: Attempt, failure: pb.AttemptFailed) -> None:
        prefill, decode = self._pair.prefill, self._pair.decode
        code, cause = failure.code, pb.FailureCode.Name(failure.code).removeprefix("FAILURE_CODE_").lower()
        if self.done:
            return
        if code == pb.FAILURE_CODE_NO_ROOM and attempt is not decode:
            self._pair.failures.avoid.add(attempt.worker.address)
        if prefill is not None and attempt in prefill.parts:
            self._part_failed(attempt, cause, counts=is_failure(code), message=failure.message)
        elif code == pb.FAILURE_CODE_INVALID:
            self.fail(InvalidRequest(f"the workers rejected {self}: {failure.message}"))
        elif attempt is prefill:
            self._prefill_failed(cause, counts=is_failure(code), message=failure.message)
        elif attempt is decode:
            if code == pb.FAILURE_CODE_FINISHED:
                # FINISHED came before the prefill's token, which may still come or be lost with its worker.
                self._pair.end_decode(cancel=False)
            elif code != pb.FAILURE_CODE_KV_FAILED:
                self._decode_failed(cause, counts=is_failure(code), message=failure.message)
            elif prefill is not None and failure.prefill_id in (b"", prefill.id):
                # The prefill worker may have released KV that is fetched a second time: no failure.
                self._prefill_failed(cause, counts=not prefill.refetched, message=failure.message)

    def _on_lost(self, attempt: Attempt) -> None:
        if self._pair.prefill is not None and attempt in self._pair.prefill.parts:
            self._part_failed(attempt, "lost", counts=False, message=f"{attempt.worker} was lost")
        elif attempt is self._pair.prefill:
            self._prefill_failed("lost", counts=False, message=f"{attempt.worker} was lost")
        elif attempt is self._pair.decode:
            self._decode_failed("lost", counts=False, message=f"{attempt.worker} was lost")

    # ------------------------------------------------------------ the end of attempts

    def _prefill_failed(self, cause: str, *, counts: bool, message: str) -> None:
        prefill = self._pair.prefill
        assert prefill is not None
        if prefill.over:
            return
        self._pair.end_prefill(cause)
        self._failed(cause, prefill.worker, counts=counts, message=message)

    def _part_failed(self, part: Attempt, cause: str, *, counts: bool, message: str) -> None:
        """Other workers compute the prompt: one, or a plan without the worker that had no room."""
        prefill, decode = self._pair.prefill, self._pair.decode
        assert prefill is not None
        if prefill.over or prefill.answered:  # its token came, so it has all of the KV
            return
        if decode is not None and decode.worker is prefill.worker:
            self._pair.end_decode(cancel=True)  # it would go on with this prefill
        self._pair.end_prefill(cause)
        self._failed(cause, part.worker, counts=counts, message=message)

    def _decode_failed(self, cause: str, *, counts: bool, message: str = "", cancel: bool = False) -> None:
        decode = self._pair.decode
        assert decode is not None
        self._pair.end_decode(cancel=cancel, failure=cause)
        prefill = self._pair.prefill
        if prefill is not None and (decode.joined or len(self.output_ids) > prefill.base + 1):
            # Its KV is of a shorter text than was emitted, or was released after the transfer.
            if prefill.over:
                prefill.worker.release(prefill.id)
            self._pair.end_prefill()
        self._failed(cause, decode.worker, counts=counts, message=message)

    def _failed(self, cause: str, worker: Worker, *, counts: bool, message: str) -> None:
        self._metrics.retries[cause].inc()
        self._pair.retried = True
        self._pair.may_split &= cause == "no_room"
        if counts:
            self._pair.failures.failed(worker.address, crashed=cause == "engine")
            worker.attempt_failed()
        elif cause == "lost":
            self._pair.failures.lost(worker.address)
        if counts or cause == "lost":
            total, about = self._pair.failures.total, of_request(self.name)
            log.info("%r: attempt %d failed (%s): %s", self, total, cause, message, extra=about)
        if self._pair.failures.exhausted:
            times = f"{self._pair.failures.total} times without a new token"
            self.fail(Failed(f"{self} failed {times}; the last failure: {message}"))
            return
        self.advance()

    # ------------------------------------------------------------ the end of the generation

    def fail(self, error: ApiError) -> None:
        if not self.done:
            if error.status >= 500:
                log.warning("%r: %s", self, error.message, extra=of_request(self.name))
            self._tokens.put(self._index, error)
            self.cancel()

    def _waited_too_long(self, error: ApiError) -> None:
        self._metrics.deadlines["request" if isinstance(error, TimedOut) else "worker_wait"].inc()
        self.fail(error)

    def cancel(self) -> None:
        """Ends the generation with all its attempts and waits. Idempotent."""
        if self.done:
            return
        self.done = True
        (self._metrics.running if self.output_ids else self._metrics.waiting).dec()
        self._waits.end()
        self._pair.end()
        self._turn.end()
