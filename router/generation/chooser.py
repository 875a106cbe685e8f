"""Which workers a generation asks for what it needs next."""

from collections.abc import Collection

from baton.router.generation.attempt import DecodeAttempt, PrefillAttempt
from baton.router.generation.failure_count import FailureCount
from baton.router.generation.pair import AttemptPair
from baton.router.job import Job
from baton.router.workers.candidates import PrefillTarget
from baton.router.workers.connection import WorkerConnection
from baton.router.workers.pool import Place, WorkerPool
from baton.rpc.tracing import Span


class Chooser:
    """Asks the pool, with what is known of the job, its attempts and its failures. Sends nothing."""

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
