"""The attempts of a generation: at most one prefill and one decode at a time, each with a new id.

1. `AttemptPair` asks the pool which workers may do what the generation needs next. It starts and ends the
   attempts there, and decides which tokens of theirs become output.
2. `FailureCount` (`failures`) says when there were too many.

`Generation` decides what it needs, and when.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from baton.content import CHUNK_TOKENS
from baton.machine.tracing import Span
from baton.router.admission.parked import Waits
from baton.router.api.jobs import Job
from baton.router.generation.failures import FailureCount
from baton.router.policy.prefill import PrefillRequest
from baton.router.policy.prefill_loads import PrefillWork
from baton.router.policy.split import SplitRange
from baton.router.workers.pool import Place, PrefillTarget, WorkerPool
from baton.router.workers.worker import Attempt, AttemptEvent, Worker
from baton.rpc import worker_pb2 as pb


@dataclass(slots=True, eq=False, kw_only=True)
class PrefillAttempt(Attempt):
    within: float
    """Seconds in which the prompt should be computed. 0: it is in no hurry."""
    base: int
    """Output tokens emitted before it, which is the output index of its own token."""
    handover: bool = True
    """A decode worker takes over the KV. False if the prefill's token is the last one."""
    queued: bool = False
    """The first decode for it is submitted when it starts."""
    sent: bool = False
    answered: bool = False
    over: bool = False
    """The decode worker has the KV. Only the prefill's token may still come, which the decode repeats."""
    replaces: bool = False
    """The decode worker was told to fetch from another prefill before."""
    refetched: bool = False
    """A second decode worker fetches the KV, which the prefill worker may have released."""
    ranges: Sequence[SplitRange] = ()
    """Of a prompt that several workers compute: its own ones."""
    parts: list["PrefillAttempt"] = field(default_factory=list)
    """The other ones of this prompt, if this one samples the token."""
    plan: list[pb.PlanRange] = field(default_factory=list)
    """All ranges."""


@dataclass(slots=True, eq=False, kw_only=True)
class DecodeAttempt(Attempt):
    prefills: bool = False
    """The decode worker computes the prompt itself (overflow)."""
    joined: bool = False
    """Its first token came."""


class Verdict(Enum):
    """What becomes of a token."""

    EMIT = auto()  # the next token of the output
    DROP = auto()  # emitted before, or from an attempt that was replaced
    BROKEN = auto()  # the decode continues another text than the emitted one: end the attempt


class AttemptPair:
    """The two attempts that may be open. Owns them and the output.

    Attributes:
        prefill, decode: the current attempts; None if there is none.
        output_ids: emitted tokens in order. Only this class changes it.
        failures: of the attempts before.
        retried: an attempt ended before its time.
        may_split: none ended for another reason than a lack of room.
        numerics: of the first worker that computed. Empty: its bits depend on the batch, or none has.
        numerics_changed: a worker of other numerics computed later.
    """

    def __init__(
        self,
        on_event: Callable[[Attempt, AttemptEvent | None], None],
        span: Span,
        job: Job,
        name: str,
        pool: WorkerPool,
        waits: Waits,
    ) -> None:
        """`on_event` is told what happens to the attempts. `span`: of the request. `name`: the request id
        that the client knows. `waits`: with the deadline."""
        self.prefill: PrefillAttempt | None = None
        self.decode: DecodeAttempt | None = None
        self.output_ids: list[int] = []
        self.failures = FailureCount()
        self.retried = False
        self.may_split = True
        self.numerics = ""
        self.numerics_changed = False
        self._id = os.urandom(16)
        self._name = name
        self._waits = waits
        self._on_event = on_event
        self._span = span
        self._job = job
        self._pool = pool
        self._source_count = 0
        self._max_tokens = job.sampling.max_tokens

    @property
    def length(self) -> int:
        """Tokens of the prompt and the output so far."""
        return len(self._job.prompt_ids) + len(self.output_ids)

    @property
    def tokens_left(self) -> int:
        return self._max_tokens - len(self.output_ids)

    @property
    def next_token_alone(self) -> bool:
        """A prefill computes the next token without a handover.

        It is the last one, or log probabilities of the prompt come before it.
        """
        return (not self.output_ids and self._job.scores_prompt) or self.tokens_left == 1

    def offer(self, attempt: Attempt, output_index: int, token_id: int) -> Verdict:
        """Decides about one token, and records it if it is emitted.

        Prefill and decode both send the first token, and messages of replaced attempts may come late. So a
        token counts only if it comes from the current prefill or the current decode. The first of both to
        send the next output index wins.
        """
        prefill, decode, emitted = self.prefill, self.decode, len(self.output_ids)
        if decode is not None and attempt is decode:
            if output_index > emitted:
                return Verdict.BROKEN
            if output_index < emitted:
                known = self.output_ids[output_index] == token_id
                return Verdict.DROP if known else Verdict.BROKEN
        elif (
            prefill is None
            or attempt is not prefill
            or prefill.over
            or not output_index == emitted == prefill.base
        ):
            return Verdict.DROP
        self.output_ids.append(token_id)
        return Verdict.EMIT

    # ------------------------------------------------------------ choices

    def choose_prefill(self) -> PrefillTarget | None:
        return self._pool.choose_prefill(self._wanted(self.length, self.decode))

    def choose_decode(self, tokens: int) -> Worker | None:
        """Returns a worker with capacity for `tokens` KV positions, or the prefill worker that has them."""
        prefill = self.prefill
        promised = prefill is not None and prefill.queued
        found = self._pool.choose_decode(self._wanted(tokens, prefill), promised=promised)
        if found is None and prefill is not None and self._pool.decodes_instead(prefill.worker):
            return prefill.worker
        return found

    def place(self, worker: Worker, target: PrefillTarget | None) -> Place | None:
        """Returns where the request goes: `worker` decodes if there is a handover from `target`."""
        wanted = self._wanted(self.length, None)
        return self._traced(self._pool.place(worker, wanted, self.tokens_left, target))

    def place_without_room(self) -> Place | None:
        """Returns where the request goes while no decode worker has room for it. None: it waits."""
        return self._traced(self._pool.place_without_room(self._wanted(self.length, self.decode)))

    def _traced(self, place: Place | None) -> Place | None:
        if place is not None:
            self._span.set(place.why.attributes())
        return place

    def _wanted(self, tokens: int, other: Attempt | None) -> PrefillRequest:
        """A worker of the other attempt, or one that failed or computes other bits, is chosen only if there
        is no other."""
        avoid = self.failures.avoid if other is None else self.failures.avoid | {other.worker.address}
        if self.numerics:
            avoid = avoid | self._pool.of_other_numerics(self.numerics)
        return PrefillRequest(self._job.session_key, tokens, self._job.chunks, avoid)

    # ------------------------------------------------------------ start

    def plan_prefill(self, target: PrefillTarget, *, handover: bool) -> PrefillAttempt:
        """Makes the prefill attempt, and sends nothing yet."""
        self.prefill = PrefillAttempt(
            worker=target.worker,
            name=self._name,
            on_event=self._on_event,
            work=target.work,
            within=target.within,
            base=len(self.output_ids),
            handover=handover,
        )
        return self.prefill

    def split(self, target: PrefillTarget, decode: Worker, alone: float) -> bool:
        """Makes the prefill attempts of several workers that compute the prompt together, and sends nothing
        yet. False: one worker computes the prompt. `alone`: as in `WorkerPool.split`."""
        if self.output_ids or not self.may_split or self._job.scores_prompt:
            return False
        found = self._pool.split(self._wanted(self.length, None), target, decode, alone)
        if found is None:
            return False
        plan, workers = found
        self._span.set(plan.attributes())
        chunks, attempts = self._job.chunks, dict[int, PrefillAttempt]()
        for index in dict.fromkeys(part.worker for part in plan.ranges):
            own = [part for part in plan.ranges if part.worker == index]
            tokens = sum(part.stop - part.start for part in own)
            tokens -= self.length - target.work.tokens if own[0].start == 0 else 0
            attempts[index] = PrefillAttempt(
                worker=workers[index],
                name=self._name,
                on_event=self._on_event,
                work=PrefillWork(tokens, chunks[: own[-1].stop // CHUNK_TOKENS]),
                within=target.within,
                base=0,
                ranges=own,
            )
        self.prefill = final = attempts.pop(plan.ranges[-1].worker)
        final.parts = list(attempts.values())
        for part in plan.ranges:
            attempt = attempts.get(part.worker, final)
            described = attempt.worker.description
            final.plan.append(
                pb.PlanRange(
                    prefill_id=attempt.id,
                    kv_address=described.kv_address,
                    incarnation=described.incarnation,
                    start=part.start,
                    stop=part.stop,
                )
            )
        return True

    def send_prefill(self) -> None:
        prefill = self.prefill
        assert prefill is not None
        prefill.sent = True
        self._waits.worker_found()
        content = None
        if not prefill.plan:
            content = self._pool.content_source(prefill.worker, self._job.chunks, self.length)
        for part in prefill.parts:
            request = self._request([], part.within, last=True)
            del request.prompt_ids[part.ranges[-1].stop :]
            # What it samples means nothing.
            request.sampling.CopyFrom(pb.SamplingParams(top_p=1, repetition_penalty=1, max_tokens=1))
            self._submit_prefill(part, request, prefill.plan)
        request = self._request(self.output_ids, prefill.within, last=not prefill.handover)
        self._submit_prefill(prefill, request, prefill.plan, content)

    def _submit_prefill(
        self,
        prefill: PrefillAttempt,
        request: pb.Request,
        plan: list[pb.PlanRange],
        content: pb.ContentSource | None = None,
    ) -> None:
        submit = pb.SubmitPrefill(
            prefill_id=prefill.id,
            request=request,
            handover=prefill.handover,
            report_start=prefill.queued,
            content=content,
            plan=plan,
        )
        self._computed_by(prefill.worker)
        prefill.worker.submit(prefill, "prefill", pb.RouterMessage(prefill=submit), self._span)

    def submit_decode(self, worker: Worker, output_ids: list[int], place: Place | None = None) -> None:
        """The worker fetches the KV of the current prefill, or computes the prompt itself, as `place` says.

        `output_ids` were emitted before."""
        self._waits.worker_found()
        work, within = (None, 0.0) if place is None else (place.work, place.within)
        length = len(self._job.prompt_ids) + len(output_ids)
        decode = self.decode = DecodeAttempt(
            worker=worker,
            name=self._name,
            on_event=self._on_event,
            tokens=length + 1,
            work=work,
            prefills=work is not None,
        )
        submit = pb.SubmitDecode(decode_id=decode.id, request=self._request(output_ids, within))
        if work is None:
            submit.source.CopyFrom(self._next_source())
        elif content := self._pool.content_source(worker, self._job.chunks, length):
            submit.content.CopyFrom(content)
        self._computed_by(worker)
        worker.submit(decode, "decode", pb.RouterMessage(decode=submit), self._span)

    def _computed_by(self, worker: Worker) -> None:
        numerics = worker.description.numerics
        self.numerics = self.numerics or numerics
        self.numerics_changed |= numerics != self.numerics

    def _request(self, output_ids: list[int], within: float, *, last: bool = False) -> pb.Request:
        """Builds the message to a worker. `output_ids` were emitted before.

        `within`: seconds in which the prompt should be computed. 0: it is in no hurry.
        `last`: the worker generates no more than one token.
        """
        job = self._job
        request = pb.Request(
            request_id=self._id,
            prompt_ids=job.prompt_ids,
            output_ids=output_ids,
            sampling=job.sampling,
            timeout_ms=max(1, int(1000 * self._waits.seconds_left)),
            priority=job.priority,
            alone=self.failures.alone,
            retried=self.retried,
            first_token_within=within,
            waited=0.0 if output_ids else self._waits.waited,
            cache_salt=job.cache_salt,
            tenant=job.tenant,
            name=self._name,
        )
        sampling = request.sampling
        if output_ids:  # they came after all log probabilities of the prompt
            sampling.ClearField("prompt_logprobs")
        if last:
            sampling.max_tokens = len(output_ids) + 1
            sampling.min_tokens = min(sampling.min_tokens, sampling.max_tokens)
        return request

    def retarget(self) -> None:
        """Tells the decode worker to fetch the KV of the planned prefill of prompt + output."""
        assert self.prefill is not None
        assert self.decode is not None
        self.prefill.replaces = True
        source, output_ids = self._next_source(), self.output_ids
        message = pb.Retarget(decode_id=self.decode.id, source=source, output_ids=output_ids)
        self.decode.worker.send(pb.RouterMessage(retarget=message))

    def _next_source(self) -> pb.PrefillSource:
        """Names the current prefill for a decode worker."""
        assert self.prefill is not None
        self._source_count += 1
        self._fulfilled(self.prefill)
        described = self.prefill.worker.description
        return pb.PrefillSource(
            prefill_id=self.prefill.id,
            kv_address=described.kv_address,
            incarnation=described.incarnation,
            attempt=self._source_count,
        )

    def promise(self) -> None:
        """The prompt queues, and its decode is submitted when it starts."""
        prefill = self.prefill
        assert prefill is not None
        prefill.queued = True
        self._pool.promise(self._decode_tokens(prefill))

    def _fulfilled(self, prefill: PrefillAttempt) -> None:
        if prefill.queued:
            prefill.queued = False
            self._pool.fulfilled(self._decode_tokens(prefill))

    def _decode_tokens(self, prefill: PrefillAttempt) -> int:
        return len(self._job.prompt_ids) + prefill.base + 1

    # ------------------------------------------------------------ end

    def prefill_served(self) -> None:
        """The decode worker has the KV, so the prefill is not needed any more."""
        prefill = self.prefill
        if prefill is None:
            return
        prefill.over = True
        prefill.worker.attempt_succeeded()
        for part in prefill.parts:  # one whose receiver is lost would keep its blocks for a while
            part.worker.cancel(part.id)
        if prefill.replaces:
            # Decode may have got the KV of the prefill before. Then it never fetches that of this one.
            prefill.worker.cancel(prefill.id)
        elif prefill.answered:
            prefill.worker.forget(prefill.id)

    def end_prefill(self, failure: str = "") -> None:
        prefill, self.prefill = self.prefill, None
        if prefill is not None:
            self._fulfilled(prefill)
            for attempt in (prefill, *prefill.parts):
                attempt.worker.cancel(attempt.id, failure)

    def end_decode(self, *, cancel: bool, failure: str = "") -> None:
        decode, self.decode = self.decode, None
        if decode is not None and cancel:
            decode.worker.cancel(decode.id, failure)
        elif decode is not None:
            decode.worker.forget(decode.id)

    def end(self) -> None:
        """Cancels both. All tokens that come now are dropped."""
        self.end_prefill()
        self.end_decode(cancel=True)
        self._on_event = lambda *_: None  # it refers to the generation
