"""The attempts of a generation: at most one prefill and one decode at a time, each with a new id.

`AttemptPair` says what workers hold of the request, submits plans, and decides which tokens become output.
`FailureCount` (`failures`) says when there were too many failures. `Generation` decides when to plan.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, IntEnum, auto
from typing import Any

from baton.router.admission.parked import Waits
from baton.router.api.jobs import Job
from baton.router.generation.context import RequestContext
from baton.router.generation.failures import FailureCount
from baton.router.policy.plan import Plan
from baton.router.policy.planner import Held
from baton.router.policy.prefill import PrefillRequest
from baton.router.workers.worker import Attempt, AttemptEvent
from baton.rpc import worker_pb2 as pb
from baton.rpc.token_ids import packed_ids


class PrefillState(IntEnum):
    """How far a prefill is."""

    PLANNED = auto()  # it is sent when the decode has reserved its memory
    SENT = auto()
    ANSWERED = auto()  # its token came
    SERVED = auto()  # decode has the KV: only the prefill's token may still come, which the decode repeats


@dataclass(slots=True, eq=False, kw_only=True)
class PrefillAttempt(Attempt):
    base: int
    """Output tokens emitted before it, which is the output index of its own token."""
    state: PrefillState = PrefillState.PLANNED
    promised: int = 0
    """Positions of room at a decode worker that the pool keeps for it, until its decode is submitted."""
    fetches: int = 0
    """Decodes that began with it as their source. Its worker may have released the KV after the first one."""
    parts: "list[PrefillAttempt]" = field(default_factory=list)
    """Those of the other workers that compute this prompt, if this one samples the token."""


@dataclass(slots=True, eq=False, kw_only=True)
class DecodeAttempt(Attempt):
    sources: int = 0
    """Prefills that it was told to fetch from. 0: it computes the prompt itself."""
    joined: bool = False
    """Its first token came."""


class Verdict(Enum):
    """What becomes of a token."""

    EMIT = auto()  # the next token of the output
    DROP = auto()  # emitted before, or from an attempt that was replaced
    BROKEN = auto()  # the decode continues another text than the emitted one: end the attempt


@dataclass(eq=False, slots=True)
class AttemptPair:
    """The two attempts that may be open. Owns them and the output."""

    on_event: Callable[[Attempt, AttemptEvent | None], None]
    """Is told what happens to the attempts."""
    job: Job
    context: RequestContext
    waits: Waits
    prefill: PrefillAttempt | None = None
    decode: DecodeAttempt | None = None
    output_ids: list[int] = field(default_factory=list)
    """Emitted tokens in order. Only this class changes it."""
    failures: FailureCount = field(default_factory=FailureCount)
    """Of the attempts before."""
    retried: bool = False
    """An attempt ended before its time."""
    may_split: bool = True
    """None ended for another reason than a lack of room."""
    numerics: str = ""
    """Of the first worker that computed. Empty: its bits depend on the batch, or none has."""
    numerics_changed: bool = False
    """A worker of other numerics computed later."""

    _id: bytes = field(default_factory=lambda: os.urandom(16), init=False)
    _source_count: int = field(default=0, init=False)
    max_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.max_tokens = self.job.sampling.max_tokens

    @property
    def length(self) -> int:
        """Tokens of the prompt and the output so far."""
        return len(self.job.prompt_ids) + len(self.output_ids)

    @property
    def tokens_left(self) -> int:
        return self.max_tokens - len(self.output_ids)

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
                matches = self.output_ids[output_index] == token_id
                return Verdict.DROP if matches else Verdict.BROKEN
        elif (
            prefill is None
            or attempt is not prefill
            or prefill.state is PrefillState.SERVED
            or not output_index == emitted == prefill.base
        ):
            return Verdict.DROP
        self.output_ids.append(token_id)
        return Verdict.EMIT

    # ------------------------------------------------------------ plans

    @property
    def complete(self) -> bool:
        """Nothing needs to be submitted: the attempts lead to the next token."""
        prefill, decode = self.prefill, self.decode
        if decode is None:
            return prefill is not None and prefill.plan.decode is None
        return prefill is not None or decode.joined or not decode.sources

    @property
    def loses(self) -> bool:
        """A worker of an attempt was lost, which the generation is told in this round of the event loop."""
        return any(each is not None and not each.worker.attached for each in (self.prefill, self.decode))

    def request(self) -> PrefillRequest:
        """What a plan must know. Workers that failed the request or compute other bits are avoided."""
        pool, avoid = self.context.services.pool, self.failures.avoid
        if self.numerics:
            avoid = avoid | pool.of_other_numerics(self.numerics)
        version, attempt = None, self.prefill or self.decode
        if pool.rolls:
            version = pool.version_for(None if attempt is None else attempt.worker.weights_version)
            avoid = avoid | pool.of_other_weights(version)
        job, emitted = self.job, len(self.output_ids)
        return PrefillRequest(
            job.session_key,
            len(job.prompt_ids) + emitted,
            job.chunks,
            avoid,
            arrival=pool.prompts,
            answer=pool.desk.answers.expected(job.answer_names, emitted, self.tokens_left),
            # Log probabilities of the prompt come before its first token.
            one_token=self.tokens_left == 1 or (job.scores_prompt and not emitted),
            interrupted=self.retried,
            may_split=self.may_split and not emitted and not job.scores_prompt and not job.images,
            images=[each.span for each in job.images],
            encoded_in=pool.encoders.expected(job.images),
            pair=job.sender.pair,
            adapter=job.sender.adapter,
            version=version,
        )

    def held(self) -> Held:
        prefill, decode = self.prefill, self.decode
        row = None if decode is None else decode.worker.row
        if prefill is None:
            return Held(decode=row)
        return Held(
            prefill.worker.row,
            has_kv=prefill.state >= PrefillState.ANSWERED or bool(prefill.parts),
            queues=prefill.promised > 0,
            tokens=len(self.job.prompt_ids) + prefill.base,
            decode=row,
        )

    def submit(self, plan: Plan) -> None:
        """Sends what the plan says, and ends what it does not keep."""
        if self.context.span.exported and not self.waits.prefilled:
            self.context.span.set(plan.attributes())
        self.waits.worker_found()
        if plan.ranges:
            self.end_prefill()
        decode = self.decode
        if decode is not None and (plan.inline or plan.decode != decode.worker.row):
            self.end_decode()
            decode = None
        if plan.ranges and not plan.inline:
            prefill = self._add_prefill(plan)
            if decode is not None:  # it fetches the KV of the new prefill of prompt + output
                source = self._next_source(decode, prefill)
                retarget = pb.Retarget(decode_id=decode.id, source=source, output_ids=self.output_ids)
                decode.worker.send(pb.RouterMessage(retarget=retarget))
            elif plan.order == "prefill":
                self._promise(prefill, self.length + 1)
            if plan.order != "decode" or decode is not None:
                self.send_prefill(prefill)  # before the decode: the client waits for its token
        if decode is None and plan.decode is not None and plan.order != "prefill":
            self._submit_decode(plan)

    @property
    def queues(self) -> bool:
        """The decode is submitted when the prompt starts."""
        return self.prefill is not None and self.prefill.promised > 0

    @property
    def reserves(self) -> bool:
        """The prompt is sent when the decode has reserved its memory."""
        return self.prefill is not None and self.prefill.state is PrefillState.PLANNED

    def _add_prefill(self, plan: Plan) -> PrefillAttempt:
        """Makes the attempts of all workers that compute the prompt, and sends nothing yet."""
        attempts = {
            row: PrefillAttempt(
                worker=self.context.services.pool.by_row[row],
                name=self.context.entry.name,
                tenant=self.job.sender.tenant,
                on_event=self.on_event,
                plan=plan,
                work=plan.work(row, self.job.chunks),
                base=len(self.output_ids),
            )
            for row in dict.fromkeys(part.worker for part in plan.ranges)
        }
        prefill = self.prefill = attempts.pop(plan.ranges[-1].worker)
        prefill.parts = list(attempts.values())
        return prefill

    def send_prefill(self, prefill: PrefillAttempt) -> None:
        prefill.state = PrefillState.SENT
        plan, attempts = prefill.plan, {each.worker.row: each for each in (*prefill.parts, prefill)}
        ranges = list[pb.PlanRange]()
        for part in plan.ranges if prefill.parts else ():
            attempt = attempts[part.worker]
            ranges.append(pb.PlanRange(start=part.start, stop=part.stop, **_named(attempt)))
        pool = self.context.services.pool
        pool.prompts += 1
        for row, attempt in attempts.items():
            last = attempt is prefill
            request = self._request(plan, self.output_ids, plan.within, last=not last or plan.decode is None)
            if not last:  # what it samples means nothing
                request.sampling.CopyFrom(pb.SamplingParams(top_p=1, repetition_penalty=1, max_tokens=1))
            submit = pb.SubmitPrefill(
                prefill_id=attempt.id,
                request=request,
                handover=plan.decode is not None,
                report_start=attempt.promised > 0,
                content=None if plan.source is None else plan.source.message(pool.by_row),
                plan=ranges,
            )
            stop = max(part.stop for part in plan.ranges if part.worker == row) if prefill.parts else None
            self._submit(attempt, pb.RouterMessage(prefill=submit), stop=stop)

    def _submit_decode(self, plan: Plan) -> None:
        """The worker fetches the KV of the current prefill, and repeats its token. Without a prefill it
        computes the prompt itself."""
        assert plan.decode is not None
        worker, prefill = self.context.services.pool.by_row[plan.decode], self.prefill
        output_ids = self.output_ids if prefill is None else self.output_ids[: prefill.base]
        decode = self.decode = DecodeAttempt(
            worker=worker,
            name=self.context.entry.name,
            tenant=self.job.sender.tenant,
            on_event=self.on_event,
            plan=plan,
            tokens=len(self.job.prompt_ids) + len(output_ids) + 1,
            work=plan.work(plan.decode, self.job.chunks) if prefill is None else None,
        )
        within = plan.within if prefill is None else 0.0
        request = self._request(plan, output_ids, within)
        submit = pb.SubmitDecode(decode_id=decode.id, request=request)
        if prefill is not None:
            prefill.fetches += 1
            submit.source.CopyFrom(self._next_source(decode, prefill))
        else:
            self.context.services.pool.prompts += 1
            if plan.source is not None:
                submit.content.CopyFrom(plan.source.message(self.context.services.pool.by_row))
        self._submit(decode, pb.RouterMessage(decode=submit), computes_prompt=prefill is None)

    def _next_source(self, decode: DecodeAttempt, prefill: PrefillAttempt) -> pb.PrefillSource:
        """Names the current prefill for a decode worker."""
        self._source_count += 1
        decode.sources += 1
        self._promise(prefill, 0)
        return pb.PrefillSource(attempt=self._source_count, **_named(prefill))

    def _request(
        self,
        plan: Plan,
        output_ids: list[int],
        within: float,
        *,
        last: bool = False,
    ) -> pb.Request:
        """Builds the message to a worker, without prompt and images. `output_ids` were emitted before.

        `within`: seconds in which the prompt should be computed. 0: it is in no hurry.
        `last`: the worker generates no more than one token.
        """
        job = self.job
        request = pb.Request(
            request_id=self._id,
            output_ids=output_ids,
            sampling=job.sampling,
            timeout_ms=max(1, int(1000 * self.context.entry.deadline.seconds_left)),
            priority=job.sender.priority,
            alone=self.failures.alone,
            retried=self.retried,
            first_token_within=within,
            gap_cost=plan.gap_cost,
            waited=0.0 if output_ids else self.waits.waited,
            cache_salt=job.sender.cache_salt,
            adapter=job.sender.adapter,
            tenant=job.sender.tenant,
            name=self.context.entry.name,
        )
        sampling = request.sampling
        if output_ids:  # they came after all log probabilities of the prompt
            sampling.ClearField("prompt_logprobs")
        if last:
            sampling.max_tokens = len(output_ids) + 1
            sampling.min_tokens = min(sampling.min_tokens, sampling.max_tokens)
        return request

    def _submit(
        self,
        attempt: Attempt,
        message: pb.RouterMessage,
        *,
        stop: int | None = None,
        computes_prompt: bool = True,
    ) -> None:
        """`stop`: of the prompt that the worker gets; None: all of it. `computes_prompt`: it needs images."""
        request = message.prefill.request if message.HasField("prefill") else message.decode.request
        request.prompt_ids = packed_ids(self.job.prompt_ids[:stop])
        worker, cached = attempt.worker, attempt.plan.cached
        encodes = computes_prompt and not worker.description.image_fingerprint
        for image in self.job.images:
            placed = request.images.add(
                name=image.name, start=image.start, rows=image.rows, columns=image.columns
            )
            if encodes and worker.lacks_pixels(image, cached):
                placed.with_pixels = True
                worker.send_pixels(image)
        numerics = worker.description.numerics
        self.numerics = self.numerics or numerics
        self.numerics_changed |= numerics != self.numerics
        attempt.images = self.job.images
        worker.submit(attempt, message, self.context.span)
        if computes_prompt and not encodes:
            for image in self.job.images:
                if image.span.stop > attempt.plan.cached:
                    self.context.services.pool.encoders.want(attempt, image)

    def _promise(self, prefill: PrefillAttempt, positions: int) -> None:
        """Keeps so many positions for its decode. 0: its decode is submitted, or it needs none."""
        if positions != prefill.promised:
            self.context.services.pool.desk.promise(
                bool(positions) - bool(prefill.promised), positions - prefill.promised
            )
            prefill.promised = positions

    # ------------------------------------------------------------ end

    def decode_joined(self, decode: DecodeAttempt) -> None:
        """The decode worker has the KV, so the prefill is not needed any more."""
        decode.joined = True
        decode.worker.attempt_succeeded()
        prefill = self.prefill
        if prefill is None:
            return
        prefill.worker.attempt_succeeded()
        for part in prefill.parts:  # one whose receiver is lost would keep its blocks for a while
            part.worker.cancel(part.id)
        if decode.sources > 1:
            # Decode may have got the KV of the prefill before. Then it never fetches that of this one.
            prefill.worker.cancel(prefill.id)
        elif prefill.state is PrefillState.ANSWERED:
            prefill.worker.forget(prefill.id)
        prefill.state = PrefillState.SERVED

    def drop(self, attempt: Attempt, failure: str) -> bool:
        """Ends what a failure of this attempt destroys. False: nothing is lost with it.

        The worker of a prefill may fail after all of its KV has come, and that of a part after the token."""
        prefill, decode = self.prefill, self.decode
        if prefill is not None and (attempt is prefill or attempt in prefill.parts):
            is_part = attempt is not prefill
            if prefill.state > (PrefillState.SENT if is_part else PrefillState.ANSWERED):
                return False
            if is_part and decode is not None and decode.worker is prefill.worker:
                self.end_decode()  # it would go on with this prefill
            self.end_prefill(failure)
            return True
        if decode is None or attempt is not decode:
            return False
        self.end_decode(failure)
        if prefill is not None and prefill.state is PrefillState.PLANNED:
            self.end_prefill()
        elif prefill is not None and decode.joined:
            # Its KV is of a shorter text than was emitted, or was released after the transfer.
            if prefill.state is PrefillState.SERVED:
                prefill.worker.cancel(prefill.id, holds_kv=True)
            self.end_prefill()
        return True

    def end_prefill(self, failure: str = "") -> None:
        prefill, self.prefill = self.prefill, None
        if prefill is not None:
            self._promise(prefill, 0)
            for attempt in (prefill, *prefill.parts):
                attempt.worker.cancel(attempt.id, failure)

    def end_decode(self, failure: str = "") -> None:
        decode, self.decode = self.decode, None
        if decode is not None:
            decode.worker.cancel(decode.id, failure)

    def end(self) -> None:
        """Cancels both. All tokens that come now are dropped."""
        self.end_prefill()
        self.end_decode()
        self.on_event = lambda *_: None  # it refers to the generation


def _named(prefill: PrefillAttempt) -> dict[str, Any]:
    """How messages name a prefill and its worker."""
    worker = prefill.worker.description
    return {"prefill_id": prefill.id, "kv_address": worker.kv_address, "incarnation": worker.incarnation}
