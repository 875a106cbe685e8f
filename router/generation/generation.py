"""Decides what one generation does next: when it starts, when a worker reports something, and after failures.

The docstring of the package shows the states, and what waits for what.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from baton.router import prompt_logprobs
from baton.router.admission.parked import Waits
from baton.router.admission.queue import Turn, TurnResult
from baton.router.api.jobs import Job
from baton.router.errors import Aborted, ApiError, Failed, InvalidRequest, ModelNotFound, Paused, TimedOut
from baton.router.generation.attempts import AttemptPair, DecodeAttempt, PrefillState, Verdict
from baton.router.generation.context import RequestContext
from baton.router.generation.failures import is_failure
from baton.router.generation.output import Delta
from baton.router.history import EVENTS, Event
from baton.router.policy.plan import Plan
from baton.router.policy.planner import Lack
from baton.router.workers.worker import Attempt, AttemptEvent, NotEncoded, Worker
from baton.rpc import worker_pb2 as pb
from baton.system.logs import of_request

log = logging.getLogger(__name__)
_DEADLINES: dict[type[ApiError], str] = {TimedOut: "request", Paused: "pause"}
_FINISH = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}


@dataclass(eq=False, slots=True)
class Generation:
    """Writes tokens into `context.tokens` under `index`. The last one has a finish reason, or is an
    ApiError."""

    job: Job
    turn: Turn
    index: int
    context: RequestContext
    cached_tokens: int = 0
    """Prompt tokens that were cached when the request came, as its prefill has found. 0 until then."""
    accepted_drafts: int = 0
    """Tokens that workers had drafted."""
    rejected_drafts: int = 0
    """Drafts that became no tokens."""
    done: bool = False
    """It has ended."""
    queue_seconds: float = 0.0
    """Until the prompt was sent to a worker."""
    first_token_seconds: float = 0.0
    later_seconds: float = 0.0
    """From the first token to the last one."""
    events: list[Event] = field(default_factory=list)
    """What happened to it so far, without its tokens. Bounded."""
    addresses: dict[str, str] = field(default_factory=dict)
    """The workers that it was sent to, and their addresses."""
    _cached_before: int | None = field(default=None, init=False)
    """The same as far as the router knew. None: no turn was asked for yet."""
    _prompts_sent: int = field(default=0, init=False)
    """How often workers got the prompt to compute. From the second time on its own KV may be in caches."""
    _emitted_at: float = field(init=False)
    _waits: Waits = field(init=False)
    pair: AttemptPair = field(init=False)

    def __post_init__(self) -> None:
        context = self.context
        self._emitted_at = context.entry.began_at
        context.services.metrics.waiting.inc()
        self._waits = Waits(context.services.parked, context.entry, self._woken, self._waited_too_long)
        self.pair = AttemptPair(self._on_event, self.job, context, self._waits)

    def __repr__(self) -> str:
        return f"request {self.context.entry.name}"

    def _note(self, what: str, *workers: Worker) -> None:
        addresses = {str(worker): worker.address for worker in workers}
        self.addresses |= addresses
        if len(self.events) < EVENTS:
            self.events.append(Event(time.monotonic(), what, ", ".join(addresses)))

    # ------------------------------------------------------------ the next attempts

    def advance(self) -> None:
        """Requests what the generation needs next: at first a turn in the admission queue."""
        if self.done or self.pair.complete:
            return
        if self.pair.decode is None:
            if self.turn.is_new:
                tokens, desk = len(self.job.prompt_ids), self.context.services.pool.desk
                self.turn.computes(uncached := desk.uncached(self.job.chunks, tokens))
                if self._cached_before is None:
                    self._cached_before = tokens - uncached
            self.turn.wait(self._start)
        else:
            self._start()

    def _woken(self) -> None:
        decode = self.pair.decode
        if decode is not None and decode.joined:
            self._safely(partial(self._return, decode))
        else:
            self.advance()

    def _return(self, decode: DecodeAttempt) -> TurnResult:
        """Moves the decode to another worker if that costs less, its handover included. Another worker with
        the KV is not needed: the one that decodes has it in its prefix cache."""
        pool, waits = self.context.services.pool, self._waits
        if pool.pause or not decode.worker.attached or not waits.parked.may_return(waits):
            return TurnResult.PARKED
        request = replace(self.pair.request(), interrupted=True)
        planned = pool.desk.returns(request, decode.worker.row, decode.tokens)
        if planned is None or not waits.may_prefill():
            return TurnResult.PARKED
        self._note("returns", decode.worker)
        self.context.services.metrics.retries["returned"].inc()
        self.pair.retried = True
        return self._submit(planned)

    def _start(self) -> TurnResult:
        return self._safely(self._go_on)

    def _safely(self, act: Callable[[], TurnResult]) -> TurnResult:
        """An error there is a defect: it ends this generation, and no caller sees it, since most act for
        other generations or workers."""
        try:
            return act()
        except Exception as error:
            log.exception("%r: a defect in the router", self, extra=of_request(self.context.entry.name))
            self.fail(ApiError(f"{self}: a defect in the router: {type(error).__name__}: {error}"))
            return TurnResult.PARKED

    def _go_on(self) -> TurnResult:
        """Plans from what workers hold of the request, and submits the plan or waits for what it lacks."""
        pair = self.pair
        if (pause := self.context.services.pool.pause) and (self.turn.is_new or pause == pb.PAUSE_STEPS):
            max_wait = min(self.context.services.config.max_wait, self.context.entry.max_wait)
            self._waits.wait_for_resume(max_wait if self.turn.is_new else math.inf)
            return TurnResult.PARKED
        # Without budget there is no plan: in a storm of retries the loop would make thousands in vain.
        if pair.loses or (pair.prefill is None and not self._waits.may_prefill()):
            return TurnResult.PARKED
        planned = self.context.services.pool.desk.plan(pair.request(), pair.held())
        match planned:
            case Lack.TURN:
                pair.end_decode()
                self.turn.wait(self._start)
            case Lack.ROOM:
                self._waits.worker_found()
                return TurnResult.NO_CAPACITY
            case Lack():
                self._waits.wait_for_worker(planned.value, self.context.services.config.worker_wait)
            case Plan():
                if not planned.ranges or self._waits.may_prefill():
                    return self._submit(planned)
        return TurnResult.PARKED

    def _submit(self, planned: Plan) -> TurnResult:
        services = self.context.services
        if planned.reason is not None:
            services.metrics.on_one_worker(planned.reason, planned.costs)
        services.metrics.split_prompts.inc(planned.place == "split")
        self.pair.submit(planned)
        rows = dict.fromkeys(part.worker for part in planned.ranges)
        if planned.decode is not None:
            rows[planned.decode] = None
        self._note(
            f"planned: {planned.reason or planned.place}", *map(services.pool.by_row.__getitem__, rows)
        )
        if planned.ranges and not self.pair.reserves:
            self._prompt_sent(planned)
        return TurnResult.QUEUED if self.pair.queues else TurnResult.SENT

    def _prompt_sent(self, planned: Plan) -> None:
        self._prompts_sent += 1
        if not self._waits.prefilled:
            self.queue_seconds = self._waits.waited
            self.context.services.metrics.queue.observe(self.queue_seconds)
        self._waits.prefill_sent()
        if not self.pair.output_ids:  # a prompt that is computed again after that costs its key nothing
            self.turn.computes(self.pair.length - planned.cached)

    # ------------------------------------------------------------ reports of the connections

    def _on_event(self, attempt: Attempt, event: AttemptEvent | None) -> None:
        if not isinstance(event, pb.TokenEvent):
            self._on_report(attempt, event)
            return
        pair = self.pair
        decode = pair.decode
        if decode is None or attempt is not decode or not decode.joined:
            self._first_token_of(attempt, event)
        token_id = event.token_id
        verdict = pair.offer(attempt, event.output_index, token_id)
        if verdict is Verdict.EMIT:
            self._emitted(attempt, event, token_id)
        elif verdict is Verdict.BROKEN:
            text = "%r: %s continues another text; the decode starts again"
            log.warning(text, self, attempt.worker, extra=of_request(self.context.entry.name))
            self._failed(attempt, "mismatch", counts=True, message="")
        prefill = pair.prefill
        if prefill is not None and attempt is prefill and prefill.state is PrefillState.SERVED:
            prefill.worker.forget(prefill.id)

    def _on_report(self, attempt: Attempt, event: AttemptEvent | None) -> None:
        match event:
            case pb.PromptLogprobs():
                attempt.scores.append(event)
            case pb.Reserved():
                self._note("memory reserved", attempt.worker)
                self._on_reserved(attempt)
            case pb.PrefillStarted():
                self._note("prompt started", attempt.worker)
                if self.pair.queues:
                    self.advance()
            case pb.AttemptFailed():
                self._on_failed(attempt, event)
            case NotEncoded(error):
                self.fail(error)
            case None:
                self._failed(attempt, "lost", counts=False, message=f"{attempt.worker} was lost")

    def _first_token_of(self, attempt: Attempt, event: pb.TokenEvent) -> None:
        prefill, decode = self.pair.prefill, self.pair.decode
        if prefill is not None and attempt is prefill:
            prefill.state = max(prefill.state, PrefillState.ANSWERED)
            if prefill.base == 0:
                self._found_cached(event.cached_tokens)
        elif decode is not None and attempt is decode:
            self._waits.worker_found()  # it may have waited for another prefill
            self._note("decode has the KV" if decode.sources else "prompt computed", attempt.worker)
            self.pair.decode_joined(decode)
            if self.pair.retried or decode.worker.pool != pb.POOL_DECODE:
                self._waits.parked.away[self._waits] = None
            if not decode.sources and not self.pair.output_ids:
                self._found_cached(event.cached_tokens)

    def _found_cached(self, tokens: int) -> None:
        if self._prompts_sent > 1:
            tokens = min(tokens, self._cached_before or 0)
        self.cached_tokens = tokens
        self.turn.computes(max(0, len(self.job.prompt_ids) - tokens))

    def _emitted(self, attempt: Attempt, event: pb.TokenEvent, token_id: int) -> None:
        pair, context, now = self.pair, self.context, time.monotonic()
        if pair.failures.avoid:  # each failure adds to it
            pair.failures.token()
        context.last_weights = attempt.weights_version
        self.turn.generated()
        emitted = len(pair.output_ids)
        passed, self._emitted_at = now - self._emitted_at, now
        if emitted == 1:
            self._runs(passed)
        else:
            metrics = context.services.metrics
            self.later_seconds += passed
            metrics.inter_token.observe(passed)
            if emitted == 2 and pair.prefill is not None:
                metrics.handover_gap.observe(passed)
        self.accepted_drafts += event.accepted_draft
        self.rejected_drafts += event.rejected_drafts
        scores: Sequence[pb.PromptLogprobs] = ()
        if emitted == 1 and self.job.scores_prompt:
            scores, attempt.scores = attempt.scores, []
            if sum(map(prompt_logprobs.tokens, scores)) != len(self.job.prompt_ids) - 1:
                text = "the worker sent no log probabilities for a part of the prompt"
                self.fail(Failed(f"{self}: {text}"))
                return
        finish_reason, ended = None, event.finish_reason
        if ended:  # no token follows a finish reason, not even an unknown one
            finish_reason = _FINISH.get(ended, "length")
            attempt.worker.forget(attempt.id)
        if emitted >= pair.max_tokens:
            finish_reason = finish_reason or "length"
        elif ended == pb.FINISH_REASON_LENGTH and attempt is pair.prefill:
            # A prefill without a handover scored the prompt, and its token is not the last one.
            pair.end_prefill()
            self._waits.free_retry()
            finish_reason = None
        logprobs = event.logprobs if event.HasField("logprobs") else None
        context.tokens.put(self.index, Delta(token_id, logprobs, finish_reason, scores))
        if finish_reason is not None:
            self.cancel()
        elif pair.decode is None:
            self.advance()

    def _runs(self, passed: float) -> None:
        """It waited for its first token, which came after `passed` seconds."""
        context, metrics = self.context, self.context.services.metrics
        if context.first_weights is None:
            context.first_weights = context.last_weights
        metrics.waiting.dec()
        metrics.running.inc()
        self.first_token_seconds = passed
        self._note("first token")
        metrics.time_to_first_token.observe(passed)
        context.span.set({"gen_ai.latency.time_to_first_token": passed})

    def _on_reserved(self, attempt: Attempt) -> None:
        prefill = self.pair.prefill
        if attempt is not self.pair.decode or prefill is None or not self.pair.reserves:
            return
        if prefill.worker.ready_in(pb.POOL_PREFILL):
            self._prompt_sent(prefill.plan)
            self.pair.send_prefill(prefill)
        else:
            self.pair.end_prefill()
            self.advance()

    # ------------------------------------------------------------ failures

    def _rejection(self, message: str) -> InvalidRequest:
        """Returns the error for a request that workers refuse. A grammar may be more than they can follow,
        though the router has compiled it."""
        field, (kind, colon, reason) = self.job.structure_field, message.partition(": ")
        if field and colon and kind == "structured output":
            return InvalidRequest.at(field, reason)
        return InvalidRequest(f"the workers rejected {self}: {message}")

    def _on_failed(self, attempt: Attempt, failure: pb.AttemptFailed) -> None:
        prefill, decode = self.pair.prefill, self.pair.decode
        code, counts = failure.code, is_failure(failure.code)
        cause = pb.FailureCode.Name(code).removeprefix("FAILURE_CODE_").lower()
        if code == pb.FAILURE_CODE_NO_ROOM and attempt is not decode:
            self.pair.failures.avoid.add(attempt.worker.address)
        if code == pb.FAILURE_CODE_INVALID and attempt in (prefill, decode):
            self.fail(self._rejection(failure.message))
        elif code == pb.FAILURE_CODE_ABORTED:
            self._note("aborted", attempt.worker)
            self.fail(Aborted(f"{self} was aborted: the cluster was paused with mode=abort"))
        elif code == pb.FAILURE_CODE_NO_ADAPTER:  # all ready workers have the same adapters
            self.fail(ModelNotFound(f"the adapter of {self} was unloaded", param="model"))
        elif code == pb.FAILURE_CODE_FINISHED and attempt is decode:
            # FINISHED came before the prefill's token, which may still come or be lost with its worker.
            self.pair.end_decode()
        elif code == pb.FAILURE_CODE_KV_FAILED and attempt is decode:
            if prefill is not None and failure.prefill_id in (b"", prefill.id):
                # The prefill worker may have released KV that is fetched a second time: no failure.
                self._failed(prefill, cause, counts=prefill.fetches < 2, message=failure.message)
        else:
            self._failed(attempt, cause, counts=counts, message=failure.message)

    def _failed(self, attempt: Attempt, cause: str, *, counts: bool, message: str) -> None:
        """An attempt failed. The generation goes on from what workers still hold of it."""
        name, metrics = self.context.entry.name, self.context.services.metrics
        pair, worker = self.pair, attempt.worker
        # A part of a prompt that was late, or that needed one: one worker computes all of it again.
        part_failed = cause == "dropped" and attempt.plan.place == "split" and not pair.output_ids
        decode = pair.decode
        refused = cause == "no_room" and decode is not None and attempt is decode and not decode.sources
        if self.done or not pair.drop(attempt, cause):
            return
        self._prompts_sent -= refused
        metrics.retries[cause].inc()
        self._note(f"attempt ended: {cause}", worker)
        pair.retried = True
        pair.may_split &= cause == "no_room"
        if counts:
            pair.failures.failed(worker.address, crashed=cause == "engine")
            worker.attempt_failed()
        elif cause == "lost":
            pair.failures.lost(worker.address)
        if counts or cause == "lost":
            total, fields = pair.failures.total, of_request(name)
            log.info("%r: attempt %d failed (%s): %s", self, total, cause, message, extra=fields)
            metrics.history.attempt_failed(name, cause, str(worker), message)
        elif part_failed:
            text = "%r: the part of its prompt at %s failed, so one worker computes all of it: %s"
            log.warning(text, self, worker, message, extra=of_request(name))
            metrics.history.attempt_failed(name, "part_failed", str(worker), message)
        if pair.failures.exhausted:
            times = f"{pair.failures.total} times without a new token"
            self.fail(Failed(f"{self} failed {times}; the last failure: {message}"))
            return
        self.advance()

    # ------------------------------------------------------------ the end of the generation

    def fail(self, error: ApiError) -> None:
        if not self.done:
            if error.status >= 500:
                log.warning("%r: %s", self, error.message, extra=of_request(self.context.entry.name))
            self.context.tokens.put(self.index, error)
            self.cancel()

    def _waited_too_long(self, error: ApiError) -> None:
        self.context.services.metrics.deadlines[_DEADLINES.get(type(error), "worker_wait")].inc()
        self.fail(error)

    def cancel(self) -> None:
        """Ends the generation with all its attempts and waits. Idempotent."""
        if self.done:
            return
        self.done = True
        metrics = self.context.services.metrics
        (metrics.running if self.pair.output_ids else metrics.waiting).dec()
        self._waits.end()
        self.pair.end()
        self.turn.end()
