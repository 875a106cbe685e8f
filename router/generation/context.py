"""What all generations of one request share."""

from dataclasses import dataclass

from baton.router.admission.parked import Deadline, Parked
from baton.router.generation.output import TokenQueue, WeightsVersions
from baton.router.metrics import Metrics
from baton.router.workers.pool import WorkerPool
from baton.system.tracing import Span


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestContext:
    """Has what attempts use of `Services` and of the request, so that they know no body, text or HTTP."""

    pool: WorkerPool
    parked: Parked
    metrics: Metrics
    tokens: TokenQueue
    versions: WeightsVersions
    name: str
    """The request id that the client knows."""
    span: Span
    began_at: float
    """The time.monotonic() at which the request was admitted."""
    deadline: Deadline
    worker_wait: float
    max_wait: float
    """Seconds that it may wait for the end of a pause, before a worker has it."""
