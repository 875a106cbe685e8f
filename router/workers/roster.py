"""The workers that a router knows, and which of them take work now. Tells the routing policies.

All attached workers have one row in the tables of both pools, and serve in at most one of them. So a worker
that moves to the other pool keeps its prefix cache, its load and its open work in the tables.
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence

from baton.content import CHUNK_TOKENS
from baton.router.policy.decode import DecodeCaches, DecodeLoad
from baton.router.policy.prefill_loads import PrefillLoads, report_seconds
from baton.router.workers.checks import RefusedWorker, RouterModel, check_fit
from baton.router.workers.worker import POOL_NAMES, Worker, WorkerState
from baton.rpc import worker_pb2 as pb

STALE_PART = 1024
"""Chunks of cleared workers to remove from the index at once. It takes a millisecond."""


class Roster:
    """Streams call it with what their workers report.

    Attributes:
        changed: set when a worker comes or goes. Its only reader clears it.
        on_capacity: called when a worker comes or goes, and when a decode worker may have free capacity.
        on_ready: called when a worker becomes ready.
        listed: the workers that discovery lists, by address.
        by_row: the attached workers, by their row in `loads` and `decode_caches`.
        attached_rows: these rows, as a set of bits.
        decodes: the decode loads of workers of the decode pool that take new work.
        prefills: likewise, of the prefill pool.
        budgets: prompt tokens of a step of each prefill worker.
        had_decode: the decode pool had a worker once.
        max_positions: positions that one request may have on any worker; None while no worker is known.
        content_root: the root of the names of the workers' KV. Empty while no worker is known.
    """

    def __init__(self, model: RouterModel) -> None:
        self.changed = asyncio.Event()
        self.on_capacity: Callable[[], None] = lambda: None
        self.on_ready: Callable[[], None] = lambda: None
        self.listed: dict[str, Worker] = {}
        self.by_row: dict[int, Worker] = {}
        self.attached_rows = 0
        self.loads = PrefillLoads()
        self.decode_caches = DecodeCaches(self.loads.index)
        self.decodes: list[DecodeLoad] = []
        self.prefills: list[DecodeLoad] = []
        self.budgets: list[int] = []
        self.had_decode = False
        self.max_positions: int | None = None
        self.content_root = b""
        self._model = model
        self._serving: dict[Worker, None] = {}  # get new work
        self._breaker_timer: asyncio.TimerHandle | None = None  # at the end of the first open breaker
        self._dropping = False  # `_drop_part` will run again

    def ready(self, pool: "pb.Pool") -> list[Worker]:
        """The workers that take the new work of a pool."""
        return [worker for worker in self.listed.values() if worker.ready_in(pool)]

    # ------------------------------------------------------------ reports

    @property
    def report_seconds(self) -> float:
        """The least time between two reports of a worker."""
        return report_seconds(len(self.listed))

    def check(self, worker: Worker) -> None:
        """Raises RefusedWorker if the worker does not fit the other workers."""
        others = [other for other in self.listed.values() if other.accepted and other is not worker]
        check_fit(worker.description, self._model, {str(other): other.description for other in others})

    def reported(self, worker: Worker) -> None:
        alone = worker.pool == pb.POOL_PREFILL
        self.loads.reported(worker.row, worker.status, time.monotonic(), alone=alone)

    def cache_changed(self, worker: Worker, events: pb.CacheEvents) -> None:
        """Gets events without gaps. Raises RefusedWorker if more chunks are cached than its blocks hold, on
        its host included."""
        described, index = worker.description, self.loads.index
        index.apply(worker.row, events)
        self._drop_stale()
        blocks = described.num_blocks + described.offload_blocks
        if index.reported(worker.row) > blocks * -(-described.block_size // CHUNK_TOKENS):
            raise RefusedWorker(f"it reports more cached chunks than fit into {blocks} blocks")

    def availability_changed(self, worker: Worker) -> None:
        """A worker came, went, drains, or moved to another pool. Requests then see only what is there now."""
        if worker.attached and worker.row not in self.by_row:
            self._join(worker)
        self._serve(worker, worker.ready)
        if not worker.attached and worker.row in self.by_row:
            self._leave(worker)
        self._derive_limits()  # first: the next line calls `on_capacity`, and requests start
        self.apply_breakers()
        self.changed.set()
        if worker.ready:
            self.on_ready()

    def apply_breakers(self) -> None:
        """Gives work only to workers whose breaker is closed. If all breakers of a pool are open, all its
        workers get work: the cause is then probably not the workers.

        Runs again when the first open breaker may have closed. uvloop fires timers up to a millisecond early,
        so the breaker may still be open then, and the timer is set once more."""
        now = time.monotonic()
        first = math.inf
        for pool in POOL_NAMES:
            ready = self.ready(pool)
            open_ = {worker: seconds for worker in ready if (seconds := worker.breaker.open_for(now))}
            first = min(first, *open_.values(), math.inf)
            for worker in ready:
                serves = worker not in open_ or len(open_) == len(ready)
                if serves is not (worker in self._serving):
                    self._serve(worker, serves)
        self.prefills = [worker.load for worker in self._serving if worker.pool == pb.POOL_PREFILL]
        self.decodes = [worker.load for worker in self._serving if worker.pool == pb.POOL_DECODE]
        self.had_decode |= bool(self.decodes)
        if self._breaker_timer is not None:
            self._breaker_timer.cancel()
        loop = asyncio.get_running_loop()
        self._breaker_timer = loop.call_later(first, self.apply_breakers) if first < math.inf else None
        self.on_capacity()

    # ------------------------------------------------------------ tables

    def _join(self, worker: Worker) -> None:
        block_size = worker.description.block_size
        worker.row = self.loads.join(worker.address, block_size=block_size, now=time.monotonic())
        self.decode_caches.join(worker.row, worker.load)
        self.by_row[worker.row] = worker
        self.attached_rows |= 1 << worker.row
        self.reported(worker)

    def _leave(self, worker: Worker) -> None:
        self.loads.leave(worker.row)
        self.decode_caches.leave(worker.row)
        del self.by_row[worker.row]
        self.attached_rows ^= 1 << worker.row
        worker.row = -1
        self._drop_stale()

    def _serve(self, worker: Worker, serves: bool) -> None:
        """`serves`: the worker takes new work of its pool."""
        if serves:
            self._serving[worker] = None
        else:
            self._serving.pop(worker, None)
        if worker.row in self.by_row:
            self.loads.serve(worker.row, serves and worker.pool == pb.POOL_PREFILL)
            self.decode_caches.serve(worker.row, serves and worker.pool == pb.POOL_DECODE)

    def _derive_limits(self) -> None:
        """Derives from the workers' descriptions: the longest request, the names of KV, and the budgets."""
        connected = [w.description for w in self.listed.values() if w.state is not WorkerState.REFUSED]
        described = [worker for worker in connected if worker.num_blocks]
        prefilling = [worker.description for worker in self.ready(pb.POOL_PREFILL)]
        sizes = (min(worker.max_model_len, worker.num_blocks * worker.block_size) for worker in described)
        self.max_positions = min(sizes, default=None)
        self.content_root = _root_of_most(described, prefilling)
        self.budgets = [worker.max_num_batched_tokens for worker in prefilling]

    def _drop_stale(self) -> None:
        """Removes what the index has of cleared workers, a part in each round of the event loop."""
        if self.loads.index.has_stale and not self._dropping:
            self._dropping = True
            asyncio.get_running_loop().call_soon(self._drop_part)

    def _drop_part(self) -> None:
        self._dropping = False
        self.loads.index.drop_stale(STALE_PART)
        self._drop_stale()


def _root_of_most(
    described: Sequence[pb.WorkerDescription], prefilling: Sequence[pb.WorkerDescription]
) -> bytes:
    """The root of the KV names of most prefill workers, so that requests find the prefixes that these cache.

    Workers with another format have another root. Without prefill workers the other workers decide."""
    roots = Counter(worker.content_root for worker in described)
    computing = Counter(worker.content_root for worker in prefilling)
    return max(roots, key=lambda root: (computing[root], roots[root], root), default=b"")
