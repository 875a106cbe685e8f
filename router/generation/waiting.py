"""What one request waits for, and for how long.

It waits for a worker of a role, or for leave to prefill again (for its turn it waits at the gate). For a
worker it waits as long as the user said, for anything else until its own deadline.
"""

import asyncio
import time
from typing import Protocol

from router.errors import ApiError, NoWorker, TimedOut
from router.generation.retries import Retrier
from router.metrics import Metrics
from router.workers.pool import WorkerPool, WorkerWaiter


class Waits(WorkerWaiter, Retrier, Protocol):
    """A request, which is told when what it waited for is there."""

    def fail(self, error: ApiError) -> None:
        """It waited for too long."""
        ...


class Waiting:
    """Of one request, which has `timeout` seconds in all, and `worker_wait` for a worker to come."""

    def __init__(
        self, pool: WorkerPool, request: Waits, metrics: Metrics, *, timeout: float, worker_wait: float
    ) -> None:
        self._pool = pool
        self._request = request
        self._metrics = metrics
        self._worker_wait = worker_wait
        self._deadline = time.monotonic() + timeout
        loop = asyncio.get_running_loop()
        self._deadline_timer = loop.call_later(timeout, self._timed_out, timeout)
        self._worker_timer: asyncio.TimerHandle | None = None

    @property
    def seconds_left(self) -> float:
        return self._deadline - time.monotonic()

    def for_worker(self, role: str) -> None:
        self._pool.waiters[self._request] = None
        if self._worker_timer is None:
            loop = asyncio.get_running_loop()
            self._worker_timer = loop.call_later(self._worker_wait, self._no_worker, role)

    def worker_found(self) -> None:
        self._pool.waiters.pop(self._request, None)
        if self._worker_timer is not None:
            self._worker_timer.cancel()
            self._worker_timer = None

    def end(self) -> None:
        """For nothing any more."""
        self._deadline_timer.cancel()
        self.worker_found()
        self._pool.retries.leave(self._request)

    def _no_worker(self, role: str) -> None:
        self._metrics.deadlines["worker_wait"].inc()
        text = f"no {role} worker became available within {self._worker_wait:g} s"
        self._request.fail(NoWorker(text, retry_after=max(1, round(self._worker_wait))))

    def _timed_out(self, timeout: float) -> None:
        self._metrics.deadlines["request"].inc()
        self._request.fail(TimedOut(f"{self._request!r} was not finished within {round(timeout, 1):g} s"))
