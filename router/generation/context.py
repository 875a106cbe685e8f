"""What all requests of a router use, and what all generations of one request share."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from baton.router.admission.entry import Entry
from baton.router.admission.parked import Parked, RetryBudget
from baton.router.admission.queue import Admission
from baton.router.api.jobs import SamplingDefaults
from baton.router.config import RouterConfig
from baton.router.errors import ApiError
from baton.router.generation.output import Consumers, TokenQueue
from baton.router.metrics import Metrics
from baton.router.text.tokenizer import ModelTokenizer
from baton.router.workers.pool import WorkerPool
from baton.system.tracing import Span, Tracer

Abort = Callable[[ApiError], None]
"""Ends a request with an error."""


class ActiveRequests:
    """The requests that generate, and a count that includes those that are being prepared."""

    def __init__(self) -> None:
        self._generating: set[Abort] = set()
        self._count = 0
        self.none = asyncio.Event()  # set while no request generates and none is being prepared
        self.none.set()

    def __len__(self) -> int:
        """Requests that generate."""
        return len(self._generating)

    @contextmanager
    def counting(self, *abort: Abort) -> Iterator[None]:
        """Counts a request while it is open. Without `abort` the request is being prepared."""
        self._generating.update(abort)
        self._count += 1
        self.none.clear()
        try:
            yield
        finally:
            self._generating.difference_update(abort)
            self._count -= 1
            if not self._count:
                self.none.set()

    def abort(self, error: ApiError) -> None:
        """Ends every request that generates with this error."""
        for abort in self._generating:
            abort(error)


@dataclass(frozen=True, kw_only=True)
class Services:
    """What all requests of a router use."""

    tokenizer: ModelTokenizer
    pool: WorkerPool
    admission: Admission
    metrics: Metrics
    tracer: Tracer
    config: RouterConfig
    defaults: SamplingDefaults
    """Fields that a request gets if it leaves them out."""
    parked: Parked = field(default_factory=lambda: Parked(RetryBudget()))
    """Generations that wait outside the queue of `admission`."""
    active: ActiveRequests = field(default_factory=ActiveRequests)
    consumers: Consumers = field(default_factory=Consumers)


@dataclass(eq=False, slots=True)
class RequestContext:
    """What all generations of one request share."""

    services: Services
    entry: Entry
    first_weights: str | None = field(default=None, init=False)
    """The version of the weights that computed the first token, over all choices. Empty: those of `--model`.
    None: there is no token."""
    last_weights: str = field(default="", init=False)
    """Likewise of the last token so far."""
    tokens: TokenQueue = field(init=False)
    span: Span = field(init=False)
    """That of the request, while it generates."""
