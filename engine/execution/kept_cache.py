"""KV and states in pages: memory that outlives its engine, or that is given back for a while (`Releasable`).

    pages of each dtype (blocks, window blocks and states of all layers) ── their files wait in a socket
      (`KeptMemory`)
    table: what the rest is of ── what the engine measured ── records of blocks, window blocks and slots
      (`engine.core.kept_blocks`)

Each rank has such memory for its part. Rank 0 alone has records. It reads the memory of the other ranks for
checksums. Blocks, window blocks and states keep their shares of it: each page that moves between them
(`elastic_cache`) would be a file on a GPU. The worker's README says how many gain how much.

The first engine makes the pages. Those that follow adopt them, once the engine before them has ended. Until
then their tensors have the same addresses as later, over one page of each dtype, which is mapped again and
again: so a GPU warms up and captures graphs, and touches no KV that is kept.

An engine that needs pages of another size or number, as of a new version of Baton, does not stand by. It
starts when no other engine is there, lets go of these pages, and makes its own. Without `KeptMemory` the
pages end with their engine, and there are no records.

The process that holds the descriptors maps nothing, and needs no CUDA. The memory is given back when that
process and the engine have ended, or by `release`. The files have no names, so no other process can open
them.
"""

import logging
import mmap
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import prod
from typing import NamedTuple

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from baton.engine.api.config import EngineConfig
from baton.engine.api.pools import Pool, RecordMemory, Sums
from baton.engine.execution.cache_limits import CacheLimits
from baton.engine.execution.elastic_cache import aligned, memory_of, tensor_at
from baton.engine.execution.memory_sizing import PoolSize
from baton.engine.execution.memory_sums import WORD, sums_of
from baton.engine.layers.ranks import Ranks
from baton.engine.models.cache_spec import CacheSpec, Places, asked_by
from baton.steps.step_model import StepModel
from baton.system.device_memory import Page
from baton.system.kept_pages import (
    MOST_PAGES,
    CannotShareError,
    KeptMemory,
    KeptPages,
    adopted,
    close,
    exported,
)

log = logging.getLogger(__name__)

_KEY_BYTES = 32
_HEAD = 1 << 14
"""Bytes before the records: the key, then the length of what was measured, and this as JSON."""
_MEASURED = _KEY_BYTES + 4
_VERSION = b"baton kept cache 4"


@dataclass(frozen=True, slots=True)
class Keep:
    """What a rank needs to keep its KV."""

    memory: Sequence[KeptMemory] = ()
    """Its own and, on rank 0, those of the others. Empty: KV ends with the engine."""
    record_bytes: Callable[[int], int] = lambda _: 0
    """Of each place, if a block has so many positions. 0 but on rank 0."""
    wait_for_turn: Callable[[], None] | None = None
    """For an engine that is made while another one serves: waits until that one has ended."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What an engine on a GPU tells those that follow, which cannot measure it beside the KV."""

    pool: PoolSize
    steps: StepModel | None = None


_JSON = TypeAdapter(Measured)


def measured(keep: Keep) -> Measured | None:
    """None: no engine before has left any KV. Raises `ValueError` if this engine cannot read it."""
    if not keep.memory:
        return None
    head = os.pread(keep.memory[0].table, _HEAD, 0)
    length = int.from_bytes(head[_KEY_BYTES:_MEASURED], "little")
    try:
        return _JSON.validate_json(head[_MEASURED:][:length]) if length else None
    except ValidationError as error:
        raise ValueError(f"what the engine before has measured is of another version: {error}") from error


class _Region:
    """The addresses of all tensors of one dtype."""

    def __init__(self, device: torch.device, size: int, kept: KeptPages | None, *, exportable: bool) -> None:
        """`kept`: of an engine before. None: there was none. `exportable`: `export` will be called. Raises
        `MemoryError`."""
        self._memory = memory = memory_of(device, -(-size // MOST_PAGES), exportable=exportable)
        weakref.finalize(self, memory.close).atexit = False  # pyrefly: ignore[missing-attribute]
        self._count = -(-size // memory.page_bytes)
        self.address = self.end = memory.reserve(size)
        self._kept = kept
        self.of_others: dict[int, Sequence[Page]] = {}
        """Pages of the other ranks, in their order, by address."""
        self._pages = memory.create(self._count if kept is None else 1)
        memory.map(self.address, self._pages if kept is None else self._pages * self._count)
        if kept is not None and device.type == "cuda":  # what a step reads must be numbers
            tensor_at(self.address, (memory.page_bytes,), torch.uint8, device).zero_()

    def take(self, size: int) -> int:
        """Returns the address of the next `size` bytes."""
        address, self.end = self.end, self.end + aligned(size)
        return address

    def adopt(self) -> None:
        """Has the pages of the engine before in place of its own. Nothing uses the memory."""
        if self._kept is not None:
            pages = adopted(self._memory, self._kept)
            self._memory.unmap(self.address, self._count)
            self._memory.map(self.address, pages)
            self._memory.free(self._pages)
            self._pages, self._kept = pages, None

    def export(self) -> KeptPages:
        """The caller owns the files."""
        return exported(self._memory, self._pages)

    def reach(self, number: int, kept: KeptPages) -> None:
        """Maps the same region of another rank, the one with this number. Raises `MemoryError`."""
        if number == len(self.of_others):
            self.of_others[self._memory.reserve(self._count * self._memory.page_bytes)] = ()
        address = [*self.of_others][number]
        pages = self.of_others[address] = adopted(self._memory, kept)
        self._memory.map(address, pages)

    def release(self) -> None:
        """Gives all pages back. Addresses stay."""
        self._memory.release({self.address: self._pages, **self.of_others})
        self.of_others = dict.fromkeys(self.of_others, ())

    def resume(self) -> None:
        """This rank has new pages. Raises `MemoryError`."""
        self._pages = [*self._memory.resume({self.address: self._pages})[self.address]]


def _sizes(cache: Sequence[CacheSpec], places: Places) -> Mapping[torch.dtype, int]:
    """The bytes of each region."""
    sizes = Counter[torch.dtype]()
    for asked in asked_by(cache, places):
        sizes[asked.dtype] += aligned(asked.nbytes)
    return {dtype: size for dtype, size in sizes.items() if size}


class _Tensor(NamedTuple):
    """Where a tensor lies in the memory of each rank."""

    pool: Pool
    dtype: torch.dtype
    """Its region."""
    offset: int
    """In that region."""
    rows: int
    place_bytes: int
    """In each row."""


class KeptCache:
    """The `CacheMemory` of one engine.

    Use it in this order: `tensor` for each, `open`, then `records`. On a GPU `warm_up` comes before
    `open`."""

    def __init__(self, keep: Keep, cache: Sequence[CacheSpec], places: Places, device: torch.device) -> None:
        """For what `cache` allocates at these places. The pages of an engine before, if there are
        any, have the size and number that it needs. Raises `MemoryError`."""
        self._own, *self._others = keep.memory or (None,)
        self._device = device
        self._places = {
            Pool.BLOCKS: places.num_blocks,
            Pool.WINDOWS: places.window_blocks or 0,
            Pool.SLOTS: places.num_slots,
        }
        """By pool, as the next two."""
        self._record_bytes = keep.record_bytes(places.block_size)
        sizes = _sizes(cache, places)
        kept = [] if self._own is None else self._own.cache.pages()
        self._is_first = not kept
        self._regions = {
            dtype: _Region(device, size, pages, exportable=self._own is not None)
            for (dtype, size), pages in zip(sizes.items(), kept or [None] * len(sizes), strict=True)
        }
        self._layout: list[_Tensor] = []
        self._key = blake2b(_VERSION, digest_size=_KEY_BYTES)
        self._key.update(f"{self._record_bytes};".encode())
        self._mapped = memoryview(b"")
        self._rows: dict[Pool, list[tuple[int, int]]] = {pool: [] for pool in Pool}
        """On all ranks: address, bytes of a place."""
        self._sums: dict[Pool, Sums] = {pool: sums_of(rows, device) for pool, rows in self._rows.items()}

    def tensor(self, pool: Pool, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        self._key.update(f"{pool.name} {dtype} {[*shape]};".encode())
        if not (size := prod(shape) * dtype.itemsize):
            return torch.empty(*shape, dtype=dtype, device=self._device)
        region, rows = self._regions[dtype], shape[0]
        address = region.take(size)
        place_bytes = size // (rows * self._places[pool])
        assert self._own is None or not place_bytes % WORD, "a GPU sums words"
        self._layout.append(_Tensor(pool, dtype, address - region.address, rows, place_bytes))
        self._add_rows(region.address, self._layout[-1:])
        return tensor_at(address, shape, dtype, self._device, owner=region)

    def _add_rows(self, region: int, layout: Iterable[_Tensor]) -> None:
        for pool, _, offset, rows, size in layout:
            first, row_bytes = region + offset, self._places[pool] * size
            self._rows[pool] += [(first + row * row_bytes, size) for row in range(rows)]

    def warm_up(self) -> None:
        """Compiles what sums need."""
        for pool, rows in self._rows.items():
            if rows:
                self._sums[pool]([0]).wait()

    @property
    def records(self) -> Mapping[Pool, RecordMemory]:
        """For those of each pool, once the memory is open. Sums are over all layers on all ranks."""
        records: dict[Pool, RecordMemory] = {}
        end = _HEAD
        for pool, count in self._places.items():
            start, end = end, end + count * self._record_bytes
            if count:
                records[pool] = RecordMemory(self._mapped[start:end], self._sums[pool])
        return records

    def open(self, root: bytes, ranks: Ranks) -> None:
        """All tensors have memory. `root`: of the names of KV. KV of another model or layout is forgotten.
        Memory that ends with the engine needs no call."""
        assert self._own is not None, "it is kept"
        records = sum(self._places.values()) * self._record_bytes
        size = -(-(_HEAD + records) // mmap.PAGESIZE) * mmap.PAGESIZE
        if os.fstat(self._own.table).st_size < size:
            os.ftruncate(self._own.table, size)
        self._mapped = memoryview(mmap.mmap(self._own.table, size))
        key = self._key_of(root)
        if not ranks.minimum(int(self._mapped[:_KEY_BYTES] == key)):
            if not self._is_first:
                log.warning("the KV that was kept is of another model or layout: its memory is used anew")
            self._mapped[_HEAD:] = bytes(size - _HEAD)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # steps have used the page in place of these
        for region in self._regions.values():
            region.adopt()
        if self._is_first:
            self._put()
        self._mapped[:_KEY_BYTES] = key
        ranks.minimum(0)  # the pages of all ranks wait in their sockets
        self._reach_others()
        for dtype, region in self._regions.items():
            for address in region.of_others:
                self._add_rows(address, [each for each in self._layout if each.dtype == dtype])

    def _put(self) -> None:
        """The pages wait for the next engine, if there may be one."""
        if self._own is None:
            return
        files = [region.export() for region in self._regions.values()]
        self._own.cache.put(files)
        close(*files)

    def _reach_others(self) -> None:
        """Sums are over the pages of all ranks, too. Raises `ValueError` if the device cannot read them."""
        for number, memory in enumerate(self._others):
            for region, kept in zip(self._regions.values(), memory.cache.pages(), strict=True):
                try:
                    region.reach(number, kept)
                except MemoryError as error:
                    text = f"the first device cannot read the KV of rank {number + 1}: {error}"
                    raise ValueError(f"--replace-engine: {text}") from error

    def release(self) -> None:
        """Gives all memory back, while nothing uses it: no other process has it. Records must have been
        cleared."""
        if self._own is not None:
            self._own.cache.clear()
        for region in self._regions.values():
            region.release()

    def resume(self) -> None:
        """As in `Releasable`. The other ranks have their memory."""
        resumed: list[_Region] = []
        try:
            for region in self._regions.values():
                region.resume()
                resumed.append(region)
        except MemoryError:
            for region in resumed:
                region.release()
            raise
        self._put()
        self._reach_others()

    def remember(self, steps_and_pool: Measured) -> None:
        """For engines that follow. The memory is open."""
        text = _JSON.dump_json(steps_and_pool)
        assert len(text) <= _HEAD - _MEASURED, "steps of some dozen sizes are measured"
        length = self._mapped[_KEY_BYTES:_MEASURED]
        length[:] = bytes(4)
        self._mapped[_MEASURED:][: len(text)] = text
        length[:] = len(text).to_bytes(4, "little")

    def rename(self, root: bytes) -> None:
        """The names of KV begin at this root from now on. The table is empty."""
        self._mapped[:_KEY_BYTES] = self._key_of(root)

    def _key_of(self, root: bytes) -> bytes:
        key = self._key.copy()
        if self._record_bytes:  # the memory of another rank has no records, and rank 0 verifies what is in it
            key.update(root)
        return key.digest()


def can_keep(config: EngineConfig, limits: CacheLimits) -> bool:
    """Whether such a cache may outlive its engine: not if the user wants memory that moves."""
    moves = config.elastic_memory and (limits.state_bytes or limits.windows)
    return config.enable_prefix_caching and not moves


def releasable_cache(
    config: EngineConfig, limits: CacheLimits, pool: PoolSize, device: torch.device
) -> KeptCache | None:
    """The memory of one rank that ends with the engine, and can be given back. None: it is not given back.
    Raises `MemoryError`."""
    if not config.enable_memory_saver:
        return None
    return KeptCache(Keep(), limits.cache, _places(limits, pool), device)


def kept_cache(
    keep: Keep,
    config: EngineConfig,
    limits: CacheLimits,
    pool: PoolSize,
    device: torch.device,
    ranks: Ranks,
    *,
    stands_by: bool,
) -> KeptCache | None:
    """The memory of one rank. None: the KV ends with the engine, since there are no files for it, or it
    cannot be kept. An engine that does not stand by lets go of pages that it cannot adopt. Raises
    `MemoryError`, and `CannotShareError` for one that does."""
    if not keep.memory:
        return None
    keeps, places = can_keep(config, limits), _places(limits, pool)
    if not ranks.minimum(int(_can_adopt(keep, _sizes(limits.cache if keeps else (), places), device))):
        if stands_by:
            raise CannotShareError(
                "the caches of KV have another layout than those of the engine process that serves, so both "
                "cannot share them"
            )
        log.warning("the KV that was kept has another layout: its memory is given back")
        keep.memory[0].cache.clear()
    if not keeps:
        if config.enable_prefix_caching:
            log.info("KV ends with this engine process: --advanced.elastic-memory moves its memory")
        return None
    return KeptCache(keep, limits.cache, places, device)


def _places(limits: CacheLimits, pool: PoolSize) -> Places:
    slots = pool.num_slots + pool.num_copies
    return Places(pool.num_blocks, limits.block_size, slots, pool.window_blocks)


def _can_adopt(keep: Keep, sizes: Mapping[torch.dtype, int], device: torch.device) -> bool:
    """Whether the pages of the engine before have the size and number that such regions need. True if there
    are none."""
    close(*(kept := keep.memory[0].cache.pages()))
    needed = [_pages(size, device) for size in sizes.values()] if kept else []
    return [(each.page_bytes, len(each.pages)) for each in kept] == needed


def _pages(size: int, device: torch.device) -> tuple[int, int]:
    """The bytes of a page of a region, and how many it has."""
    memory = memory_of(device, -(-size // MOST_PAGES), exportable=True)
    memory.close()
    return memory.page_bytes, -(-size // memory.page_bytes)
