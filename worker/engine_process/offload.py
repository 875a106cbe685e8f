"""Moves blocks between the engine's KV cache and the tiers below it, as the engine says, between two
steps."""

import logging
import socket
import time
from collections import deque
from collections.abc import Sequence

from baton.content import Tier
from baton.engine import Engine, EngineConfig
from baton.engine.core.offload_tier import BlockCopy, OffloadTier
from baton.engine.execution.rank import Follower
from baton.engine.models import cache_bytes_per_token, state_caches
from baton.kv_transfer.stores import BlockStore
from baton.kv_transfer.stores.disk_store import DiskStore
from baton.kv_transfer.stores.host_store import open_host_store
from baton.kv_transfer.stores.ranked_store import RankedStore, serve_store
from baton.kv_transfer.transport import PagedKV
from baton.worker.engine_process.paged_kv import paged_kv

log = logging.getLogger(__name__)

POLL = 0.0005
"""Seconds between two calls while copies are under way."""
SILENCE = {Tier.HOST: 10.0, Tier.DISK: 60.0}
"""Seconds without a copy after which another rank counts as hung. A disk may stand still for a while."""
SHARE = 0.2
"""Of the time between two calls, how long a CPU may copy blocks to the host. It makes one batch in any
case."""


class OffloadPump:
    """Makes the copies that a tier wants. It starts some in each call, and never waits for one."""

    def __init__(self, tier: OffloadTier, store: BlockStore) -> None:
        self._tier = tier
        self._store = store
        self._under_way: deque[BlockCopy] = deque()  # in the order of the store
        self._busy = False  # the last call started copies, so more may wait
        self._pumped = time.monotonic()
        self._have()

    def pump(self) -> None:
        """Ends the copies that are over, and starts the next ones. Copies that requests wait for go first."""
        began = time.monotonic()
        until = began + SHARE * (began - self._pumped)
        self._end()
        self._have()
        self._busy = False
        if loads := self._tier.next_loads(self._store.room):
            self._start(loads, is_load=True)
        # A GPU or a disk makes one batch at a time, since a request that must be loaded waits for it. A CPU
        # makes a batch at once.
        while not self._under_way and (saves := self._tier.next_saves(self._store.batch)):
            self._start(saves, is_load=False)
            if time.monotonic() > until:
                break
        self._pumped = time.monotonic()

    def _start(self, copies: Sequence[BlockCopy], *, is_load: bool) -> None:
        self._busy = True
        self._under_way += copies
        self._store.copy([(copy.block, copy.place) for copy in copies], is_load=is_load)
        self._end()

    def _end(self) -> None:
        for intact in self._store.ended():
            self._tier.ended(self._under_way.popleft(), intact)

    def _have(self) -> None:
        """The tier uses the places that have memory, and more get some before they are needed."""
        tier, store = self._tier, self._store
        if (tier.ready, tier.num_places) != (store.ready, store.num_places):
            tier.have(store.ready, store.num_places)
        store.expect(tier.places_used)

    @property
    def copies(self) -> bool:
        """Whether copies are under way or wait, so that `pump` must be called soon."""
        return self._busy or bool(self._under_way) or self._tier.loading

    def close(self) -> None:
        self._store.close()


def offload_pumps(
    engine: Engine,
    disk_cache_dir: str | None = None,
    rank_fds: Sequence[Sequence[int]] = (),
) -> list[OffloadPump]:
    """One for each tier of the engine, except for a tier that would need more memory than the host has.
    `rank_fds`: for each other rank, a socket for each tier. Raises `ValueError` if the disk has too little
    space."""
    pumps: list[OffloadPump] = []
    for number, tier in enumerate(engine.offload):
        sockets = [socket.socket(fileno=fds[number]) for fds in rank_fds]
        try:
            store = _open_store(tier.tier, paged_kv(engine), tier.num_places, disk_cache_dir)
        except MemoryError as error:
            name, size = tier.tier.name.lower(), tier.num_places * engine.block_bytes
            log.warning("--%s-cache-size: no %s tier, %d bytes cannot be had: %s", name, name, size, error)
            tier.have(0, 0)
            for sock in sockets:
                sock.close()
            continue
        except OSError as error:
            raise ValueError(f"--disk-cache-dir: {disk_cache_dir}: {error}") from error
        if sockets:
            store = RankedStore(store, sockets, SILENCE[tier.tier])
        pumps.append(OffloadPump(tier, store))
    return pumps


def serve_offload(config: EngineConfig, follower: Follower, fds: Sequence[int]) -> None:
    """Makes the copies of this rank, in a thread for each tier. `fds`: for each tier, a socket to rank 0. A
    model with states has no tiers."""
    if state_caches(follower.cache_spec):
        return
    kv = paged_kv(follower)
    size_of_block = kv.block_size * cache_bytes_per_token(follower.cache_spec) * kv.ranks
    for (tier, size), fd in zip(config.offload_sizes.items(), fds, strict=True):
        sock = socket.socket(fileno=fd)
        try:
            store = _open_store(tier, kv, size // size_of_block, config.disk_cache_dir)
        except MemoryError:
            sock.close()  # rank 0 logs the same
            continue
        serve_store(store, sock)


def _open_store(tier: Tier, kv: PagedKV, num_places: int, disk_cache_dir: str | None) -> BlockStore:
    if tier is Tier.HOST:
        return open_host_store(kv, num_places)
    assert disk_cache_dir is not None, "checked by the configuration"
    return DiskStore(kv, num_places, disk_cache_dir)
