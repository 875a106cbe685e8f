"""Where a request stands, as metrics have it: it waits for its first token, then runs, then is over."""

import time

from router.metrics import Metrics
from rpc.tracing import Span


class Stages:
    """Of one request. Counts it as waiting from the start."""

    __slots__ = ("_metrics", "_running", "_since", "_span")

    def __init__(self, metrics: Metrics, span: Span) -> None:
        self._metrics = metrics
        self._span = span
        self._since = time.monotonic()
        self._running = False
        metrics.waiting.inc()

    def token(self, emitted: int) -> None:
        """Another one was emitted, now so many."""
        now = time.monotonic()
        since, self._since = now - self._since, now
        if not self._running:
            self._running = True
            self._metrics.waiting.dec()
            self._metrics.running.inc()
            self._metrics.time_to_first_token.observe(since)
            self._span.set({"gen_ai.latency.time_to_first_token": since})
            return
        self._metrics.inter_token.observe(since)
        if emitted == 2:
            self._metrics.handover_gap.observe(since)

    def end(self) -> None:
        (self._metrics.running if self._running else self._metrics.waiting).dec()
