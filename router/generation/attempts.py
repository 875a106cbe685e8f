"""The attempts of a generation: at most one prefill and one decode at a time, each with a new id.

1. `Chooser` says which workers the generation may ask for what it needs next.
2. `AttemptPair` starts the two attempts that may be open with messages to workers, and ends them.
3. `FailureCount` says when there were too many.

`Generation` decides whether to ask, and when.
"""

import os
from collections.abc import Collection
from dataclasses import dataclass

from baton.machine.tracing import Span
from baton.router.generation.output import EmitOnce
from baton.router.job import Job
from baton.router.policy import PrefillWork, patience
from baton.router.workers.attempts import OnEvent
from baton.router.workers.candidates import PrefillTarget
from baton.router.workers.connection import WorkerConnection
from baton.router.workers.pool import Place, WorkerPool
from baton.rpc import worker_pb2 as pb


@dataclass(slots=True)
class PrefillAttempt:
    id: bytes
    worker: WorkerConnection
    work: PrefillWork
    base: int
    """Output tokens emitted before it, which is the output index of its own token."""
    handover: bool = True
    """A decode worker takes over the KV. False if the prefill's token is the last one."""
    queued: bool = False
    """The first decode for it is submitted when it starts."""
    within: float = 0.0
    """Seconds in which the prompt should be computed. 0: it is in no hurry."""
    sent: bool = False
    answered: bool = False
    over: bool = False
    """The decode worker has the KV. Only the prefill's token may still come."""
    replaces: bool = False
    """The decode worker was told to fetch from another prefill before."""
    refetched: bool = False
    """A second decode worker fetches the KV, which the prefill worker may have released."""

    def source(self, attempt: int) -> pb.PrefillSource:
        """`attempt`: its number among the sources of the request, from 1."""
        described = self.worker.description
        return pb.PrefillSource(
            prefill_id=self.id,
            kv_address=described.kv_address,
            incarnation=described.incarnation,
            attempt=attempt,
        )


@dataclass(slots=True)
class DecodeAttempt:
    id: bytes
    worker: WorkerConnection
    prefills: bool = False
    """The decode worker computes the prompt itself (overflow)."""
    joined: bool = False
    """Its first token came."""


class AttemptPair:
    """The two attempts that may be open. Owns them and the output.

    Attributes:
        prefill, decode: the current attempts; None if there is none.
        emit: what tokens of the attempts become output.
    """

    def __init__(self, on_event: OnEvent, span: Span, job: Job, pool: WorkerPool) -> None:
        """`on_event` is told what happens to the attempts. `span`: of the request."""
        self.prefill: PrefillAttempt | None = None
        self.decode: DecodeAttempt | None = None
        self.emit = EmitOnce()
        self._on_event = on_event
        self._span = span
        self._job = job
        self._pool = pool
        self._source_count = 0

    @property
    def length(self) -> int:
        """Tokens of the prompt and the output so far."""
        return len(self._job.prompt_ids) + len(self.emit.output_ids)

    # ------------------------------------------------------------ start

    def plan_prefill(self, target: PrefillTarget, *, handover: bool) -> PrefillAttempt:
        """Makes the prefill attempt, and sends nothing yet."""
        prefill_id = os.urandom(16)
        base = self.emit.begin_prefill(prefill_id)
        within = patience(target.alone)
        self.prefill = PrefillAttempt(prefill_id, target.worker, target.work, base, handover, within=within)
        return self.prefill

    def send_prefill(self, request: pb.Request) -> None:
        prefill = self.prefill
        assert prefill is not None
        prefill.sent = True
        submit = pb.SubmitPrefill(
            prefill_id=prefill.id,
            request=request,
            handover=prefill.handover,
            report_start=prefill.queued,
            content=self._pool.prefix_source(prefill.worker, self._job.chunks, self.length),
        )
        prefill.worker.submit_prefill(submit, self._on_event, self._span, prefill.work)

    def submit_decode(
        self,
        worker: WorkerConnection,
        request: pb.Request,
        source: pb.PrefillSource | None,
        place: Place | None = None,
    ) -> None:
        """Without a source the decode worker prefills, as `place` says."""
        decode = self.decode = DecodeAttempt(os.urandom(16), worker, prefills=source is None)
        self.emit.begin_decode(decode.id)
        length = len(request.prompt_ids) + len(request.output_ids)
        submit = pb.SubmitDecode(
            decode_id=decode.id,
            request=request,
            source=source,
            content=self._pool.prefix_source(worker, self._job.chunks, length) if source is None else None,
        )
        work = None if place is None else place.work
        worker.submit_decode(submit, self._on_event, self._span, length + 1, work)

    def retarget(self) -> None:
        """Tells the decode worker to fetch the KV of the planned prefill of prompt + output."""
        assert self.prefill is not None
        assert self.decode is not None
        self.prefill.replaces = True
        source, output_ids = self.next_source(), self.emit.output_ids
        self.decode.worker.retarget(
            pb.Retarget(decode_id=self.decode.id, source=source, output_ids=output_ids)
        )

    def next_source(self) -> pb.PrefillSource:
        """Names the current prefill for a decode worker."""
        assert self.prefill is not None
        self._source_count += 1
        self._fulfilled(self.prefill)
        return self.prefill.source(self._source_count)

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
        self.emit.end_prefill()
        if prefill.answered:
            prefill.worker.forget(prefill.id)
        elif prefill.replaces:
            # Decode may have got the KV of the prefill before, while this one still computes.
            prefill.worker.cancel(prefill.id)

    def end_prefill(self, failure: str = "") -> None:
        prefill, self.prefill = self.prefill, None
        if prefill is not None:
            self._fulfilled(prefill)
            self.emit.end_prefill()
            prefill.worker.cancel(prefill.id, failure)

    def end_decode(self, *, cancel: bool, failure: str = "") -> None:
        decode, self.decode = self.decode, None
        if decode is not None:
            self.emit.end_decode()
            if cancel:
                decode.worker.cancel(decode.id, failure)
            else:
                decode.worker.forget(decode.id)

    def end(self) -> None:
        """Drops all tokens from now on, and cancels both."""
        self.emit.end()
        self.end_prefill()
        self.end_decode(cancel=True)


MAX_FAILURES = 3
# Attempts on workers that were lost. A lost worker names the requests in its crashed step, so the others are
# probably not the cause. But a request that is present each time a machine dies may be the cause.
MAX_LOSSES = 12
CRASHES_TOGETHER = 2

_NO_FAILURE = {
    pb.FAILURE_CODE_NO_ROOM,
    pb.FAILURE_CODE_HANDED_BACK,
    pb.FAILURE_CODE_DRAINING,
    pb.FAILURE_CODE_DROPPED,
}


def is_failure(code: "pb.FailureCode") -> bool:
    """Whether the end of an attempt counts against the request and the worker."""
    return code not in _NO_FAILURE


class FailureCount:
    """Counts the failed attempts of a request. Pure: no clock, no I/O.

    A new token resets failures and losses, but not crashed steps.

    Attributes:
        avoid: addresses of workers that failed the request since its last token.
    """

    __slots__ = ("_crashes", "_failures", "_losses", "avoid")

    def __init__(self) -> None:
        self.avoid: set[str] = set()
        self._failures = self._losses = self._crashes = 0

    @property
    def total(self) -> int:
        """Failures and losses since the last token."""
        return self._failures + self._losses

    @property
    def exhausted(self) -> bool:
        """The request has failed too often."""
        return self._failures >= MAX_FAILURES or self._losses >= MAX_LOSSES

    @property
    def alone(self) -> bool:
        """The request was in several crashed steps. It may be the cause, so it runs in steps of its own."""
        return self._crashes >= CRASHES_TOGETHER

    def token(self) -> None:
        """Records a new token."""
        self._failures = self._losses = 0
        self.avoid.clear()

    def failed(self, worker: str, *, crashed: bool) -> None:
        """Records a failed attempt. `crashed`: the engine crashed in a step with this request."""
        self._failures += 1
        self._crashes += crashed
        self.avoid.add(worker)

    def lost(self, worker: str) -> None:
        """Records an attempt whose worker was lost."""
        self._losses += 1
        self.avoid.add(worker)


class Chooser:
    """Finds workers: asks the pool, with what is known of the job, its attempts and its failures.

    Sends nothing.
    """

    def __init__(
        self, job: Job, pool: WorkerPool, pair: AttemptPair, failures: FailureCount, span: Span
    ) -> None:
        self._job = job
        self._pool = pool
        self._pair = pair
        self._failures = failures
        self._span = span

    @property
    def tokens_left(self) -> int:
        return self._job.sampling.max_tokens - len(self._pair.emit.output_ids)

    @property
    def next_token_alone(self) -> bool:
        """A prefill computes the next token without a handover.

        It is the last one, or log probabilities of the prompt come before it.
        """
        first = not self._pair.emit.output_ids
        return (first and self._job.scores_prompt) or self.tokens_left == 1

    def prefill(self) -> PrefillTarget | None:
        job, pair = self._job, self._pair
        return self._pool.choose_prefill(job.session_key, job.chunks, pair.length, self._avoid(pair.decode))

    def decode(self, tokens: int) -> WorkerConnection | None:
        """Returns a worker with capacity for `tokens` KV positions, or the prefill worker that has them."""
        prefill = self._pair.prefill
        promised = prefill is not None and prefill.queued
        found = self._pool.choose_decode(self._job.chunks, tokens, self._avoid(prefill), promised=promised)
        if found is None and prefill is not None and self._pool.decodes_instead(prefill.worker):
            return prefill.worker
        return found

    def place(self, worker: WorkerConnection, target: PrefillTarget | None) -> Place | None:
        """Returns where the request goes: `worker` decodes if there is a handover from `target`."""
        place = self._pool.place(
            worker, self._job.chunks, self._pair.length, self.tokens_left, target, self._failures.avoid
        )
        if place is not None:
            self._span.set(place.why.attributes())
        return place

    def place_without_room(self) -> Place | None:
        """Returns where the request goes while no decode worker has room for it. None: it waits."""
        job, pair = self._job, self._pair
        avoid = self._avoid(pair.decode)
        place = self._pool.place_without_room(job.session_key, job.chunks, pair.length, avoid)
        if place is not None:
            self._span.set(place.why.attributes())
        return place

    def _avoid(self, other: PrefillAttempt | DecodeAttempt | None) -> Collection[str]:
        """Workers to choose only if there is no other: those that failed, and that of the other attempt."""
        avoid = self._failures.avoid
        return avoid if other is None else avoid | {other.worker.address}
