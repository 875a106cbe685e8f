"""Moves blocks of KV and copies of states between the engine's cache and the tiers below it, as the engine
says, between two steps."""

import logging
import time
from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from baton.engine import Engine, EngineConfig
from baton.engine.api.config import TierCells
from baton.engine.core.offload_tier import CellCopy, OffloadTier
from baton.engine.execution.rank import Follower
from baton.kv_names import Tier
from baton.kv_transfer.endpoint.other_ranks import NO_RANKS, TIERS, Line, OtherRanks
from baton.kv_transfer.endpoint.ranked_store import RankedStore
from baton.kv_transfer.stores import CacheCells, CellStore
from baton.kv_transfer.stores.disk_store import DiskStore
from baton.kv_transfer.stores.host_store import open_host_store
from baton.worker.engine_process.paged_kv import paged_kv

log = logging.getLogger(__name__)

POLL = 0.0005
"""Seconds between two calls while copies are under way."""
SILENCE = {Tier.HOST: 10.0, Tier.DISK: 60.0}
"""Seconds without a copy after which another rank counts as hung. A disk may stand still for a while."""
SHARE = 0.2
"""Of the time between two calls, how long a CPU may copy cells to the host. It makes one batch in any
case."""


class OffloadPump:
    """Makes the copies that a tier wants. It starts some in each call, and never waits for one."""

    def __init__(self, tier: OffloadTier, store: CellStore, window_blocks: np.ndarray | None = None) -> None:
        """`window_blocks`: as in `PagedKV`."""
        self._window_blocks = window_blocks
        self._tier = tier
        self._store = store
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
        while not self._tier.under_way and (saves := self._tier.next_saves(self._store.batch)):
            self._start(saves, is_load=False)
            if time.monotonic() > until:
                break
        self._pumped = time.monotonic()

    def _start(self, copies: Sequence[CellCopy], *, is_load: bool) -> None:
        self._busy = True
        cells = [copy.cell for copy in copies]
        windowed = cells if self._window_blocks is None else self._window_blocks[cells].tolist()
        pairs = [(copy.cell, copy.place) for copy in copies]
        self._store.copy(pairs, is_load=is_load, window_cells=windowed)
        self._end()

    def _end(self) -> None:
        for intact in self._store.ended():
            self._tier.ended(intact)

    def _have(self) -> None:
        """The tier uses the places that have memory, and more get some before they are needed."""
        tier, store = self._tier, self._store
        if (tier.ready, tier.num_places) != (store.ready, store.num_places):
            tier.have(store.ready, store.num_places)
        store.expect(tier.places_used)

    @property
    def copies(self) -> bool:
        """Whether copies are under way or wait, so that `pump` must be called soon."""
        return self._busy or self._tier.copies

    def close(self) -> None:
        self._store.close()


def offload_pumps(engine: Engine, config: EngineConfig, ranks: OtherRanks = NO_RANKS) -> list[OffloadPump]:
    """One for each tier of the engine, except for a tier that would need more memory than the host has.
    Raises `ValueError` if the disk has too little space."""
    pumps: list[OffloadPump] = []
    for tier in engine.offload:
        kv = paged_kv(engine)
        kept = CacheCells(kv, tier.of_states)
        try:
            store = _open_store(tier.tier, kept, tier.num_places, config.disk_cache_dir)
        except MemoryError as error:
            name, size = tier.tier.name.lower(), tier.num_places * kept.cell_bytes * engine.ranks.size
            log.warning("--%s-cache-size: no %s tier, %d bytes cannot be had: %s", name, name, size, error)
            tier.have(0, 0)
            continue
        except OSError as error:
            raise ValueError(f"--disk-cache-dir: {config.disk_cache_dir}: {error}") from error
        if len(ranks):
            number = TIERS + _number(TierCells(tier.tier, tier.of_states))
            store = RankedStore(store, Line(ranks, number, SILENCE[tier.tier]))
        pumps.append(OffloadPump(tier, store, None if tier.of_states else kv.window_blocks))
    return pumps


def tiers_of_rank(config: EngineConfig, follower: Follower) -> dict[int, CellStore]:
    """The stores of this rank, by number."""
    stores: dict[int, CellStore] = {}
    for cells, places in follower.offload_places.items():
        kept = CacheCells(paged_kv(follower), cells.of_states)
        with suppress(MemoryError):  # if rank 0 has the store, its first order ends the thread of the copies
            stores[_number(cells)] = _open_store(cells.tier, kept, places, config.disk_cache_dir)
    return stores


def _number(cells: TierCells) -> int:
    """Of a store, on all ranks."""
    return 2 * cells.tier + cells.of_states


def _open_store(tier: Tier, cells: CacheCells, num_places: int, disk_cache_dir: str | None) -> CellStore:
    if tier is Tier.HOST:
        return open_host_store(cells, num_places)
    assert disk_cache_dir is not None, "checked by the configuration"
    return DiskStore(cells, num_places, disk_cache_dir)
