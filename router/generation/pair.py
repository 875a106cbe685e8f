"""The two attempts of a generation that may be open: starts them with messages to workers, and ends them.

`Generation` decides which workers to ask, and when.
"""

import os

from baton.router.generation.attempt import DecodeAttempt, PrefillAttempt
from baton.router.generation.emit import EmitOnce
from baton.router.job import Job
from baton.router.policy import patience
from baton.router.workers.attempts import AttemptOwner
from baton.router.workers.candidates import PrefillTarget
from baton.router.workers.connection import WorkerConnection
from baton.router.workers.pool import Place, WorkerPool
from baton.rpc import worker_pb2 as pb


class AttemptPair:
    """Owns the attempts and the output.

    Attributes:
        prefill, decode: the current attempts; None if there is none.
        emit: what tokens of the attempts become output.
    """

    def __init__(self, owner: AttemptOwner, job: Job, pool: WorkerPool) -> None:
        """`owner` is told what happens to the attempts."""
        self.prefill: PrefillAttempt | None = None
        self.decode: DecodeAttempt | None = None
        self.emit = EmitOnce()
        self._owner = owner
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
        prefill.worker.submit_prefill(submit, self._owner, prefill.work)

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
        worker.submit_decode(submit, self._owner, length + 1, None if place is None else place.work)

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
