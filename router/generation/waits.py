"""What one request waits for outside the admission queue: a worker, retry budget, and its own deadline."""

import asyncio
import time
from typing import Protocol

from baton.router.admission.parked import Parkable, Parked
from baton.router.errors import ApiError, NoWorker, TimedOut
from baton.router.metrics import Metrics


class Failable(Parkable, Protocol):
    def fail(self, error: ApiError) -> None:
        """Ends the request."""
        ...


class Waits:
    """Owns two timers: `timeout` seconds in all, and `worker_wait` seconds while no worker is available."""

    def __init__(
        self, parked: Parked, request: Failable, metrics: Metrics, *, timeout: float, worker_wait: float
    ) -> None:
        self._parked = parked
        self._request = request
        self._metrics = metrics
        self._worker_wait = worker_wait
        self._prefilled = False
        self._has_retry = False  # taken from the budget and not used yet
        self._began = time.monotonic()
        self._deadline = self._began + timeout
        loop = asyncio.get_running_loop()
        self._deadline_timer = loop.call_later(timeout, self._timed_out, timeout)
        self._worker_timer: asyncio.TimerHandle | None = None

    @property
    def seconds_left(self) -> float:
        return self._deadline - time.monotonic()

    @property
    def waited(self) -> float:
        """Seconds since the request came."""
        return time.monotonic() - self._began

    def may_prefill(self) -> bool:
        """Whether the prompt may be computed now: once for free, then only with a retry from the budget.

        Without budget it parks the request, until `Parkable.on_retry`.
        """
        if self._prefilled and not self._has_retry:
            self._has_retry = self._parked.take_retry(self._request)
        return self._has_retry or not self._prefilled

    def retry_granted(self) -> None:
        self._has_retry = True

    def prefill_sent(self) -> None:
        if not self._prefilled:
            self._metrics.queue.observe(self.waited)
        self._prefilled, self._has_retry = True, False

    def wait_for_worker(self, pool: str) -> None:
        """Parks the request, until `Parkable.on_worker`."""
        self._parked.for_worker(self._request)
        if self._worker_timer is None:
            loop = asyncio.get_running_loop()
            self._worker_timer = loop.call_later(self._worker_wait, self._no_worker, pool)

    def worker_found(self) -> None:
        self._parked.worker_found(self._request)
        if self._worker_timer is not None:
            self._worker_timer.cancel()
            self._worker_timer = None

    def end(self) -> None:
        self._deadline_timer.cancel()
        self.worker_found()
        self._parked.remove(self._request)

    def _no_worker(self, pool: str) -> None:
        self._metrics.deadlines["worker_wait"].inc()
        text = f"no {pool} worker became available within {self._worker_wait:g} s"
        self._request.fail(NoWorker(text, retry_after=max(1, round(self._worker_wait))))

    def _timed_out(self, timeout: float) -> None:
        self._metrics.deadlines["request"].inc()
        seconds = f"{round(timeout, 1):g}" if timeout >= 0.1 else f"{timeout:.1g}"
        self._request.fail(TimedOut(f"{self._request!r} was not finished within {seconds} s"))
