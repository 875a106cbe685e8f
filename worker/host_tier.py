"""Moves blocks between the engine's KV cache and the host tier, as the engine says, between two steps."""

import socket
import time
from collections import deque
from collections.abc import Callable, Sequence

from engine import Engine
from engine.core.host_tier import BlockCopy, HostTier
from engine.execution.rank import Follower
from engine.models import cache_bytes_per_token, state_caches
from kv_transfer.host_store import HostStore, Pair, open_host_store
from kv_transfer.ranked_store import RankedStore, StoreServer
from worker.paged_kv import paged_kv

POLL = 0.0005
"""Seconds between two calls while copies are under way."""


SHARE = 0.2
"""Of the time between two calls, how long a CPU may copy blocks to the host. It makes one batch in any
case."""


class HostTierPump:
    """Makes the copies that the tier wants. It starts some in each call, and never waits for one."""

    def __init__(self, tier: HostTier, store: HostStore) -> None:
        self._tier = tier
        self._store = store
        self._under_way: deque[BlockCopy] = deque()  # in the order of the store
        self._busy = False  # the last call started copies, so more may wait
        self._pumped = time.monotonic()

    def pump(self) -> None:
        """Ends the copies that are over, and starts the next ones. Copies that requests wait for go first."""
        began = time.monotonic()
        until = began + SHARE * (began - self._pumped)
        self._end()
        self._busy = False
        if loads := self._tier.next_loads(self._store.room):
            self._start(self._store.load, loads)
        # A GPU makes one batch at a time, since a request that must be loaded waits for it. A CPU makes a
        # batch at once.
        while not self._under_way and (saves := self._tier.next_saves(self._store.batch)):
            self._start(self._store.save, saves)
            if time.monotonic() > until:
                break
        self._pumped = time.monotonic()

    def _start(self, start: Callable[[Sequence[Pair]], None], copies: Sequence[BlockCopy]) -> None:
        self._busy = True
        self._under_way += copies
        start([(copy.block, copy.place) for copy in copies])
        self._end()

    def _end(self) -> None:
        for whole in self._store.ended():
            self._tier.ended(self._under_way.popleft(), whole)

    @property
    def copies(self) -> bool:
        """Whether copies are under way or wait, so that `pump` must be called soon."""
        return self._busy or bool(self._under_way) or self._tier.loading

    def close(self) -> None:
        self._store.close()


def host_tier_pump(
    engine: Engine, tick: Callable[[], None], rank_fds: Sequence[int] = ()
) -> HostTierPump | None:
    """None: the engine has no host tier. `tick`, a sign of life, is called while memory is pinned.
    `rank_fds`: sockets to the other ranks. Raises `ValueError` if the host has too little memory."""
    tier = engine.host_tier
    if tier is None:
        return None
    try:
        store: HostStore = open_host_store(paged_kv(engine), tier.num_places, tick)
    except MemoryError as error:
        raise ValueError(
            f"--host-cache-size: {tier.num_places * engine.block_bytes} bytes cannot be had: {error}"
        ) from error
    if rank_fds:
        store = RankedStore(store, [socket.socket(fileno=fd) for fd in rank_fds])
    return HostTierPump(tier, store)


def serve_host_tier(host_cache_size: int, follower: Follower, fd: int) -> None:
    """Makes the copies of this rank, in a thread. `fd`: a socket to rank 0. A model with states has no prefix
    cache, so it has no host tier."""
    if state_caches(follower.cache_spec):
        return
    kv = paged_kv(follower)
    block_bytes = kv.block_size * cache_bytes_per_token(follower.cache_spec) * kv.ranks
    store = open_host_store(kv, host_cache_size // block_bytes, lambda: None)
    StoreServer(store, socket.socket(fileno=fd))
