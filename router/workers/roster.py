"""The workers that a router knows, and which of them take work now. Tells the routing policies.

All attached workers have one row in the tables of both pools, and serve in at most one of them. So a worker
that moves to the other pool keeps its prefix cache, its load and its open work in the tables.
"""

import asyncio
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

from baton.kv_names import CHUNK_TOKENS
from baton.router.policy.desk import Desk
from baton.router.workers.adapters import KnownAdapters, set_of
from baton.router.workers.checks import (
    NEW_WEIGHTS,
    RefusedWorker,
    RouterModel,
    check_fit,
    lacks_weights,
    must_agree,
)
from baton.router.workers.encoders import Encoders
from baton.router.workers.worker import CALL_TIMEOUT, POOL_NAMES, Worker, WorkerState
from baton.rpc import worker_pb2 as pb


class _Limits(NamedTuple):
    """What a worker sets for all requests."""

    positions: int
    """Positions that one request may have."""
    root: bytes
    """Of the names of its KV."""
    prefills: bool
    """It is ready in the prefill pool."""


class _Ready:
    """The workers of a pool that take new work. Those with a closed breaker get it. If all breakers are open,
    all workers get it: the cause is then probably not the workers."""

    def __init__(self) -> None:
        self.workers: dict[Worker, None] = {}
        self.open: dict[Worker, asyncio.TimerHandle] = {}  # these breakers are open until the timer runs

    @property
    def all_open(self) -> bool:
        return len(self.open) == len(self.workers)


class Roster:
    """Streams call it with what their workers report. A change takes as long with 1,000 workers as with two,
    unless it opens the last closed breaker of a pool, or closes the first.

    Attributes:
        changed: set when a worker comes or goes. Its only reader clears it.
        on_capacity: called when a worker comes or goes, and when a decode worker may have free capacity.
        on_ready: called when a worker becomes ready.
        listed: the workers that discovery lists, by address.
        desk: makes plans, by what is told of the workers here.
        by_row: the attached workers, by their row in its tables.
        adapters: that clients can name as models.
        encoders: of images. They are in no other table.
        pool_changes: how often an attached worker moved to another pool.
    """

    def __init__(self, model: RouterModel, desk: Desk, worker_wait: float = math.inf) -> None:
        """`worker_wait`: seconds that an image waits for an encoder."""
        self.encoders = Encoders(worker_wait)
        self.changed = asyncio.Event()
        self._turns = asyncio.Lock()
        self.on_capacity: Callable[[], None] = lambda: None
        self.on_ready: Callable[[], None] = lambda: None
        self.listed: dict[str, Worker] = {}
        self.by_row: dict[int, Worker] = {}
        self.desk = desk
        self.adapters = KnownAdapters()
        self.pool_changes = 0
        self._ready = {pool: _Ready() for pool in POOL_NAMES}
        self._model = model
        self._accepted: dict[tuple[str, ...], dict[Worker, None]] = {}  # by what must agree; none is empty
        self._with_numerics: dict[str, set[str]] = {}  # addresses of accepted workers; none is empty
        self._limits: dict[Worker, _Limits] = {}
        self._paused: dict[Worker, pb.Pause] = {}
        self._workers_with: Counter[_Limits] = Counter()  # how many workers have the same

    async def turn(self) -> None:
        """Waits for a round of the event loop that no other worker has. So a thousand workers that come or go
        at the same time do not stall it."""
        async with self._turns:
            await asyncio.sleep(0)

    def ready(self, pool: "pb.Pool") -> list[Worker]:
        """The workers that take the new work of a pool."""
        return list(self._ready[pool].workers)

    @property
    def pause(self) -> "pb.Pause":
        """The furthest pause of an attached worker. It holds for all: a pause is one of the cluster, which
        workers that start meanwhile do not know."""
        return max(self._paused.values(), default=pb.PAUSE_NONE)

    @property
    def max_positions(self) -> int | None:
        """Positions that one request may have on any worker; None while no worker is known."""
        return min((limits.positions for limits in self._workers_with), default=None)

    @property
    def content_root(self) -> bytes:
        """The root of the KV names of most prefill workers, so that requests find the prefixes that these
        cache. Empty while no worker is known.

        Workers with another format have another root. Without prefill workers the other workers decide."""
        roots: Counter[bytes] = Counter()
        computing: Counter[bytes] = Counter()
        for limits, workers in self._workers_with.items():
            roots[limits.root] += workers
            computing[limits.root] += workers * limits.prefills
        return max(roots, key=lambda root: (computing[root], roots[root], root), default=b"")

    # ------------------------------------------------------------ reports

    def accept(self, worker: Worker) -> None:
        """Raises RefusedWorker if the worker does not fit the accepted workers. Those with older weights get
        no work until they have the same, unless they wait for their turn."""
        if worker.encodes:
            if not worker.description.kv_address:
                raise RefusedWorker("its description has no KV address, from which workers fetch")
            return
        agreed = must_agree(worker.description)
        accepted = {next(iter(same)): same for key, same in self._accepted.items() if key != agreed}
        older = [each for each in accepted if lacks_weights(each.description, worker.description)]
        newer = [each for each in accepted if _waits_for(worker, each.description)]
        apart = {*older, *newer}
        differing = {str(other): other.description for other in accepted if other not in apart}
        check_fit(worker.description, self._model, differing)
        self.adapters.check(worker.description)
        outdated = [other for each in older for other in accepted[each]]
        self._outdate(outdated, worker.description)
        self._accepted.setdefault(agreed, {})[worker] = None
        self._with_numerics.setdefault(worker.description.numerics, set()).add(worker.address)

    def redescribed(self, worker: Worker, description: pb.WorkerDescription) -> None:
        """An attached worker has got other adapters or weights, while its attempts stay. All workers get the
        weights, after each has stopped to take work. So those with other ones get no work until they say the
        same, unless workers get them some after others. Raises RefusedWorker."""
        if worker.encodes:
            raise RefusedWorker("it is an encoder, and has described itself before")
        weights_changed = worker.redescribed(description)
        self.desk.described(worker.row, worker.description)
        if weights_changed:
            self.release(worker)
            newest = must_agree(worker.description)
            outdated = [other for key, same in self._accepted.items() if key != newest for other in same]
            self._outdate(outdated, worker.description)
            self.accept(worker)
            self.availability_changed(worker)
        self.adapters.told(worker, set_of(worker.description))

    def _outdate(self, workers: Iterable[Worker], newest: pb.WorkerDescription) -> None:
        """These workers get no work until they have the newest weights, unless they wait for their turn."""
        for worker in workers:
            if not _waits_for(worker, newest):
                worker.outdated_since = time.monotonic()
                self.release(worker)
                self.availability_changed(worker)

    def _staged(self, worker: Worker, version: str) -> None:
        """It gets weights of this version next, or no others any more: its call has ended."""
        worker.staged_version = version
        accepted = [next(iter(same)).description for same in self._accepted.values()]
        newer = [each for each in accepted if lacks_weights(worker.description, each)]
        if worker.outdated_since is None:
            for each in newer:
                self._outdate([worker], each)
        elif newer and all(_waits_for(worker, each) for each in newer):
            worker.outdated_since = None
            self.accept(worker)
            self.availability_changed(worker)

    def weights_for(self, refused: Worker) -> pb.StageWeights | None:
        """What a refused worker needs to be accepted, if that is only the weights of the accepted workers."""
        for workers in self._accepted.values():
            peer = random.choice(list(workers))  # several may start at once
            if lacks_weights(refused.description, peer.description):
                weights = pb.StageWeights(fingerprint=peer.description.model_fingerprint, peer=peer.address)
                weights.MergeFrom(peer.description.weights)
                return weights
        return None

    def release(self, worker: Worker) -> None:
        """Undoes `accept`, if it was called. Its description may have changed, too."""
        for key, same in list(self._accepted.items()):
            if same.pop(worker, same) is None and not same:
                del self._accepted[key]
        for numerics, addresses in list(self._with_numerics.items()):
            addresses.discard(worker.address)
            if not addresses:
                del self._with_numerics[numerics]
        self._limit(worker)

    @property
    def rolls(self) -> bool:
        """Whether workers have weights of several versions, which no request may mix."""
        return len({next(iter(same)).weights_version for same in self._accepted.values()}) > 1

    def version_for(self, held_version: str | None) -> str:
        """The version of the weights that is to compute a request: that of the workers that hold something
        of it (`held_version`), if others decode with it. Else it is drawn by counts of decode workers."""
        decoding = Counter(worker.weights_version for worker in self.ready(pb.POOL_DECODE))
        computing = {worker.weights_version for worker in self.ready(pb.POOL_PREFILL)}
        versions = {name: count for name, count in decoding.items() if name in computing}
        versions = versions or decoding or Counter(computing)
        if held_version is not None and (held_version in versions or not versions):
            return held_version
        return random.choices([*versions], [*versions.values()])[0] if versions else ""

    def of_other_weights(self, version: str) -> set[str]:
        """The addresses of workers with weights of other versions."""
        accepted = (worker for same in self._accepted.values() for worker in same)
        return {worker.address for worker in accepted if worker.weights_version != version}

    def of_other_numerics(self, numerics: str) -> set[str]:
        """The addresses of workers that compute other bits than those of these numerics."""
        groups = (addresses for key, addresses in self._with_numerics.items() if key != numerics)
        return set().union(*groups)

    def reported(self, worker: Worker, status: pb.WorkerStatus) -> None:
        """An attached worker sent a report. Raises RefusedWorker if the worker goes on with weights of which
        the others have newer ones."""
        if worker.encodes:
            if worker.report(status):
                self.availability_changed(worker)
            return
        if status.staged_version != worker.staged_version:
            self._staged(worker, status.staged_version)
        serves, since = status.health == pb.WorkerStatus.HEALTH_SERVING, worker.outdated_since
        if serves and since is not None and time.monotonic() - since > CALL_TIMEOUT:
            raise RefusedWorker("the other workers have newer weights", NEW_WEIGHTS)
        before = worker.pool
        changed = worker.report(status)
        self.pool_changes += worker.pool != before
        self.desk.reported(worker.row)
        if changed:  # first: requests that start now must not go to a worker that drains or has left
            self.availability_changed(worker)
        else:
            worker.on_load()

    def cache_changed(self, worker: Worker, events: pb.CacheEvents) -> None:
        """Raises RefusedWorker if more chunks are cached than its blocks hold, on its host included."""
        if worker.encodes:
            raise RefusedWorker("it is an encoder, and reports chunks of a cache")
        described, index = worker.description, self.desk.loads.index
        self.desk.cached(worker.row, events)
        blocks = described.num_blocks + described.offload_blocks
        if index.reported(worker.row) > blocks * -(-described.block_size // CHUNK_TOKENS):
            raise RefusedWorker(f"it reports more cached chunks than fit into {blocks} blocks")
        for row, chunks in index.sole_holders(events.evicted).items():
            if (holder := self.by_row.get(row)) is not None:
                holder.send(pb.RouterMessage(only_copies=pb.OnlyCopies(chunks=chunks)))

    def availability_changed(self, worker: Worker) -> None:
        """A worker came, went, drains, pauses, goes on, or moved to another pool. Requests then see only what
        is there now."""
        if worker.encodes:
            self.encoders.availability_changed(worker)
            self.changed.set()
            return
        if worker.retired:
            self.release(worker)
        if worker.attached and worker.row not in self.by_row:
            self._join(worker)
        self._paused.pop(worker, None)
        if worker.attached and worker.status.pause in pb.Pause.values() and worker.status.pause:
            self._paused[worker] = worker.status.pause
        self._place(worker)
        if not worker.attached and worker.row in self.by_row:
            self._leave(worker)
        self._limit(worker)
        self.on_capacity()
        self.changed.set()
        if worker.ready:
            self.on_ready()

    def breaker_changed(self, worker: Worker) -> None:
        self._place(worker)
        self.on_capacity()

    def _place(self, worker: Worker) -> None:
        """Gives the worker the new work of its pool, or takes it away.

        Runs again when an open breaker may have closed. uvloop fires timers up to a millisecond early, so the
        breaker may still be open then, and the timer is set once more."""
        for pool in sorted(POOL_NAMES, key=worker.ready_in):  # the one that it leaves is first
            ready, is_in = self._ready[pool], worker.ready_in(pool)
            if not is_in and worker not in ready.workers:
                continue
            all_open = ready.all_open
            ready.workers.pop(worker, None)
            if timer := ready.open.pop(worker, None):
                timer.cancel()
            if is_in:
                ready.workers[worker] = None
                if seconds := worker.breaker.open_for(time.monotonic()):
                    loop = asyncio.get_running_loop()
                    ready.open[worker] = loop.call_later(seconds, self.breaker_changed, worker)
            for changed in (worker, *(ready.workers if ready.all_open is not all_open else ())):
                serves = changed in ready.workers and (ready.all_open or changed not in ready.open)
                self.desk.serve(changed.row, pool, serves)
        if worker.row >= 0:
            self.desk.placed(worker.row, worker.ready)

    # ------------------------------------------------------------ tables

    def _join(self, worker: Worker) -> None:
        self.desk.join(worker)
        self.by_row[worker.row] = worker
        self.adapters.told(worker, set_of(worker.description))

    def _leave(self, worker: Worker) -> None:
        for row in self.desk.loads.index.sole_partners(worker.row):
            if (partner := self.by_row.get(row)) is not None:
                partner.send(pb.RouterMessage(only_copies=pb.OnlyCopies(all=True)))
        del self.by_row[worker.row]
        self.desk.leave(worker.row)
        self.adapters.left(worker)
        worker.row = -1

    def _limit(self, worker: Worker) -> None:
        """Counts the limits that the worker sets now, in place of those before."""
        if before := self._limits.pop(worker, None):
            self._workers_with[before] -= 1
            if not self._workers_with[before]:
                del self._workers_with[before]
        described = worker.description
        if (
            described.num_blocks
            and not worker.encodes
            and worker.state is not WorkerState.REFUSED
            and not worker.retired
        ):
            positions = min(described.max_model_len, described.num_blocks * described.block_size)
            prefills = worker.ready_in(pb.POOL_PREFILL)
            now = self._limits[worker] = _Limits(positions, described.content_root, prefills)
            self._workers_with[now] += 1


def _waits_for(worker: Worker, other: pb.WorkerDescription) -> bool:
    """Whether it gets the weights of the other one when its turn comes. A coordinator gives them to some
    workers after others, and its call to this one goes on. A worker that starts again has no such call."""
    newer = other.weights
    return newer.rolls and newer.version == worker.staged_version and lacks_weights(worker.description, other)
