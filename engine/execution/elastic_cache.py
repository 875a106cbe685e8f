"""The memory of a cache whose blocks share one budget of pages with slots, or with window blocks
or with both (`engine.core.elastic` decides).

    plan ─▶ reserve the addresses of all places that there could ever be ─▶ create the pages of the budget
    ─▶ map those of the units that are present ─▶ move: unmap some units, map others

Kernels, graphs and transfers see tensors whose addresses never change. `baton.system.device_memory` maps
pages.

A *plane* is what one layer keeps of places that follow each other: K, V, or a state. A unit of places has
whole pages of its own in each plane. Planes in which a unit has no whole pages, as those of scales, are
small: they have memory for all places.
"""

import ctypes
import math
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from baton.engine.api.pools import Pool
from baton.engine.models.cache_spec import CacheSpec, Places, asked_by
from baton.system.device_memory import MAPPINGS, DeviceMemory, Page, open_device_memory

RESIDENT_SHARE: int = 16
"""At most one in so many bytes of a place is in planes that have memory for all places."""
FEWEST_UNITS = 2
"""With fewer units of blocks, no memory could move."""
MOST_PAGES = 1 << 15
"""Of a GPU: creating and mapping a page takes some tens of microseconds."""
ALIGNMENT = 512
"""Bytes. As the allocator of torch."""


class PlaneSize(NamedTuple):
    rows: int
    """Planes of this size in a row."""
    place_bytes: int


class PoolPlan(NamedTuple):
    """Blocks, slots of requests, slots of copies of states, or window blocks. Without arguments: there are
    none."""

    places: int = 0
    """That there could ever be."""
    unit: int = 1
    """Places that get and lose memory together."""
    pages: int = 0
    """Of a unit, in all planes."""
    present: int = 0
    """Places that have memory at the start: the first ones."""

    @property
    def present_units(self) -> int:
        return self.present // self.unit


@dataclass(frozen=True, slots=True)
class ElasticPlan:
    page_bytes: int
    num_pages: int
    """The budget."""
    blocks: PoolPlan
    slots: PoolPlan
    copies: PoolPlan
    """In the slots behind those."""
    windows: PoolPlan

    def of(self, pool: Pool) -> PoolPlan:
        """Without copies of states."""
        return (self.blocks, self.slots, self.windows)[pool]

    @property
    def free_pages(self) -> int:
        """At the start."""
        pools = self.blocks, self.slots, self.copies, self.windows
        return self.num_pages - sum(pool.present_units * pool.pages for pool in pools)


def page_size(smallest: int, room: int, *, on_gpu: bool) -> int:
    """Bytes of a page for a budget of `room` bytes: a power of two times what the device can map."""
    pages = room / smallest / (MOST_PAGES if on_gpu else MAPPINGS)
    return smallest * 2 ** max(0, math.ceil(math.log2(pages)))


def plan(
    cache: Sequence[CacheSpec],
    block_size: int,
    room: int,
    page_bytes: int,
    *,
    most_slots: int = 0,
    most_copies: int = 0,
    min_blocks: int = 0,
    min_windows: int = 0,
) -> ElasticPlan | None:
    """Plans for `room` bytes. `most_slots`, `most_copies`: states of requests, and copies of states, that
    there may ever be. `min_blocks`: for each request with states, at the start. `min_windows`: window blocks
    that there must always be. 0: layers with windows have no blocks of their own. None: the room has too few
    units."""
    planes: dict[Pool, list[PlaneSize]] = {pool: [] for pool in Pool}
    for asked in asked_by(cache, Places(1, block_size, 1, 1 if min_windows else None)):
        planes[asked.pool].append(PlaneSize(asked.shape[0], asked.nbytes // asked.shape[0]))
    blocks, slots, windows = (_Geometry(planes[pool], page_bytes) for pool in Pool)
    most_blocks = blocks.down(room // blocks.place_bytes)
    num_slots, num_copies = slots.up(most_slots), slots.up(most_copies)
    # Each window block belongs to a block.
    first_windows = windows.up(min_windows)
    most_windows = max(first_windows, windows.up(room // (blocks.place_bytes + windows.place_bytes)))
    if not min_windows:
        most_windows = 0
    resident = (
        blocks.resident(most_blocks) + slots.resident(num_slots + num_copies) + windows.resident(most_windows)
    )
    # Window blocks for one request always have memory, and so has a unit of slots.
    pages = room // page_bytes - resident
    of_requests = pages - first_windows // windows.unit * windows.pages
    block_units = min(most_blocks // blocks.unit, max(0, of_requests - slots.pages) // blocks.pages)
    if block_units < FEWEST_UNITS:
        return None
    # At the start, each request finds room for its states and some KV beside them.
    block_pages = -(-min_blocks * blocks.pages * slots.unit // blocks.unit)
    slot_units = min(
        num_slots // slots.unit, (of_requests - blocks.pages) // max(1, slots.pages + block_pages)
    )
    slot_units = max(slot_units, min(1, num_slots))
    free_pages = of_requests - slot_units * slots.pages
    copy_units = min(1, num_copies // slots.unit, max(0, free_pages - blocks.pages) // max(1, slots.pages))
    present = min(block_units, (free_pages - copy_units * slots.pages) // blocks.pages)
    if present < 1:
        return None
    return ElasticPlan(
        page_bytes,
        pages,
        blocks.pool(block_units * blocks.unit, present),
        slots.pool(num_slots, slot_units),
        slots.pool(num_copies, copy_units),
        windows.pool(most_windows, first_windows // windows.unit),
    )


class _Geometry:
    """Units of one pool.

    Attributes:
        place_bytes: of a place, in all planes.
        unit, pages: as in `PoolPlan`. 1 and 0 without planes.
    """

    def __init__(self, planes: Sequence[PlaneSize], page_bytes: int) -> None:
        self._planes = planes
        self._page_bytes = page_bytes
        self.place_bytes = sum(rows * size for rows, size in planes)
        self.unit = unit = unit_of(planes, page_bytes)
        self.pages = sum(
            rows * unit * size // page_bytes for rows, size in planes if not unit * size % page_bytes
        )

    def resident(self, places: int) -> int:
        """Pages of the planes that have memory for all places."""
        return sum(
            -(-rows * size * places // self._page_bytes)
            for rows, size in self._planes
            if self.unit * size % self._page_bytes
        )

    def up(self, places: int) -> int:
        """As whole units, with at least so many places."""
        return -(-places // self.unit) * self.unit

    def down(self, places: int) -> int:
        return places // self.unit * self.unit

    def pool(self, places: int, present_units: int) -> PoolPlan:
        return PoolPlan(places, self.unit, self.pages, present_units * self.unit)


def unit_of(planes: Sequence[PlaneSize], page_bytes: int) -> int:
    """The fewest places that have whole pages of their own, in all but small planes."""
    total = sum(rows * size for rows, size in planes)
    units = {page_bytes // math.gcd(page_bytes, size) for _, size in planes}
    fit = (
        unit
        for unit in sorted(units)
        if RESIDENT_SHARE * sum(rows * size for rows, size in planes if unit * size % page_bytes) <= total
    )
    return next(fit, math.lcm(*units))


class ElasticCache:
    """Implements `CacheMemory`, and moves pages. Its memory is free when no tensor is left."""

    def __init__(self, memory: DeviceMemory, planned: ElasticPlan, device: torch.device) -> None:
        """Raises `MemoryError` if the device has not so much memory."""
        assert memory.page_bytes == planned.page_bytes, "the plan is one for this memory"
        self._memory = memory
        self._plan = planned
        self._device = device
        self._spare = memory.create(planned.num_pages)[::-1]
        weakref.finalize(self, memory.close).atexit = False  # pyrefly: ignore[missing-attribute]
        self._planes: dict[int, list[tuple[int, int]]] = {pool: [] for pool in Pool}
        """By `Pool`: the address of the first place, and pages of a unit."""
        self._pages: dict[int, Sequence[Page]] = {}
        """By the address of a unit in a plane, or of a plane that has memory for all places."""

    def tensor(self, pool: Pool, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        memory, (rows, places, *each) = self._memory, shape
        place_bytes = math.prod(each) * dtype.itemsize
        size = rows * places * place_bytes
        address = memory.reserve(size)
        pages, remainder = divmod(self._plan.of(pool).unit * place_bytes, memory.page_bytes)
        if remainder:
            self._pages[address] = memory.create(-(-size // memory.page_bytes))
            memory.map(address, self._pages[address])
        else:
            for row in range(rows):
                self._planes[pool].append((address + row * places * place_bytes, pages))
                self._map(*self._planes[pool][-1], 0)  # torch asks CUDA for the device of the first address
        return tensor_at(address, shape, dtype, self._device, owner=self)

    def map_present(self) -> None:
        """Gives memory to what is present at the start. All tensors are there."""
        planned = self._plan
        for pool in Pool:
            self.move((pool, unit, True) for unit in range(1, planned.of(pool).present_units))
        first = planned.slots.places // planned.slots.unit
        copies = range(first, first + planned.copies.present_units)
        self.move((Pool.SLOTS, unit, True) for unit in copies)

    def move(self, moves: Iterable[tuple[int, int, bool]]) -> None:
        """Makes these `Move`s of the budget, in order. Nothing touches a unit that loses its memory."""
        for pool, unit, present in moves:
            for address, pages in self._planes[pool]:
                (self._map if present else self._unmap)(address, pages, unit)

    def release(self) -> None:
        """As in `Releasable`, as the next."""
        self._memory.release(self._pages)
        self._memory.free(self._spare)

    def resume(self) -> None:
        spare = self._memory.create(len(self._spare))
        try:
            self._pages = self._memory.resume(self._pages)
        except MemoryError:
            self._memory.free(spare)
            raise
        self._spare = spare

    def _map(self, address: int, pages: int, unit: int) -> None:
        at = address + unit * pages * self._memory.page_bytes
        self._pages[at] = mapped = [self._spare.pop() for _ in range(pages)]
        self._memory.map(at, mapped)

    def _unmap(self, address: int, pages: int, unit: int) -> None:
        at = address + unit * pages * self._memory.page_bytes
        self._memory.unmap(at, pages)
        self._spare += self._pages.pop(at)


def aligned(size: int) -> int:
    """`size` rounded up to the alignment."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def memory_of(device: torch.device, page_bytes: int, *, exportable: bool = False) -> DeviceMemory:
    """As `open_device_memory`, by the name that torch has for the device."""
    index = None if device.type == "cpu" else device.index or 0
    return open_device_memory(index, page_bytes, exportable=exportable)


class _DeviceArray:
    def __init__(self, address: int, size: int, owner: object) -> None:
        self.owner = owner
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def tensor_at(
    address: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device, *, owner: object = None
) -> Tensor:
    """A tensor over memory of which the first page is mapped. It keeps the `owner` of the memory alive."""
    size = math.prod(shape) * dtype.itemsize
    if not size:
        return torch.empty(*shape, dtype=dtype, device=device)
    if device.type == "cuda":
        flat = torch.as_tensor(_DeviceArray(address, size, owner), device=device)
    else:
        array = (ctypes.c_ubyte * size).from_address(address)
        array.owner = owner  # pyrefly: ignore[missing-attribute]
        flat = torch.frombuffer(array, dtype=torch.uint8)
    return flat.view(dtype).view(*shape)
