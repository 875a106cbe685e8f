"""The memory of a cache whose blocks and slots share one budget of pages (`engine.core.elastic` decides).

    plan ─▶ reserve the addresses of all places that there could ever be ─▶ create the pages of the budget
    ─▶ map those of the units that are present ─▶ move: unmap some units, map others

Kernels, graphs and transfers see tensors whose addresses never change. `baton.machine.device_memory` maps
pages.

A *plane* is what one layer keeps of places that follow each other: K, V, or a state. A unit of places has
whole pages of its own in each plane. Planes in which a unit has no whole pages, as those of scales, are
small: they have memory for all places.
"""

import ctypes
import math
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from baton.engine.models.cache_spec import CacheSpec, Places
from baton.machine.device_memory import MAPPINGS, DeviceMemory, Page

RESIDENT_SHARE: int = 16
"""At most one in so many bytes of a place is in planes that have memory for all places."""
FEWEST_UNITS = 2
"""With fewer units of blocks, no memory could move."""
MOST_PAGES = 1 << 15
"""Of a GPU: creating and mapping a page takes some tens of microseconds."""


class PlaneSize(NamedTuple):
    rows: int
    """Planes of this size in a row."""
    place_bytes: int


class Cells(NamedTuple):
    """Blocks or slots."""

    places: int
    """That there could ever be."""
    unit: int
    """Places that get and lose memory together."""
    pages: int
    """Of a unit, in all planes."""


@dataclass(frozen=True, slots=True)
class ElasticPlan:
    page_bytes: int
    num_pages: int
    """The budget."""
    blocks: Cells
    slots: Cells
    """Of states of requests, then of copies."""
    num_slots: int
    """Of these, the states of requests."""
    present_blocks: int
    """At the start. The first ones have memory."""
    present_slots: int
    """The same of states of requests."""
    present_copies: int

    @property
    def free_pages(self) -> int:
        """At the start."""
        slots = (self.present_slots + self.present_copies) // self.slots.unit
        used = slots * self.slots.pages + self.present_blocks // self.blocks.unit * self.blocks.pages
        return self.num_pages - used


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
    most_slots: int,
    most_copies: int,
    min_blocks: int,
) -> ElasticPlan | None:
    """Plans for `room` bytes. `most_slots`, `most_copies`: states of requests, and copies of states, that
    there may ever be. `min_blocks`: for each request with states, at the start. None: the room has too few
    units."""
    sizes = _Sizes()
    for layer in cache:
        layer.allocate(Places(1, block_size, 1), sizes)
    block_unit, slot_unit = unit_of(sizes.of_blocks, page_bytes), unit_of(sizes.of_slots, page_bytes)
    num_slots, num_copies = (-(-count // slot_unit) * slot_unit for count in (most_slots, most_copies))
    blocks = room // (sum(rows * size for rows, size in sizes.of_blocks)) // block_unit * block_unit
    slots = num_slots + num_copies
    resident = sum(
        -(-rows * size * places // page_bytes)
        for of, unit, places in ((sizes.of_blocks, block_unit, blocks), (sizes.of_slots, slot_unit, slots))
        for rows, size in of
        if unit * size % page_bytes
    )
    block_pages, slot_pages = (
        sum(rows * unit * size // page_bytes for rows, size in of if not unit * size % page_bytes)
        for of, unit in ((sizes.of_blocks, block_unit), (sizes.of_slots, slot_unit))
    )
    pages = room // page_bytes - resident
    block_units = min(blocks // block_unit, max(0, pages - slot_pages) // block_pages)
    if block_units < FEWEST_UNITS:
        return None
    # At the start, each request finds room for its states and some KV beside them.
    beside = -(-min_blocks * block_pages * slot_unit // block_unit)
    slot_units = max(1, min(num_slots // slot_unit, (pages - block_pages) // (slot_pages + beside)))
    left = pages - slot_units * slot_pages
    copy_units = min(1, num_copies // slot_unit, max(0, left - block_pages) // slot_pages)
    present = min(block_units, (left - copy_units * slot_pages) // block_pages)
    if present < 1:
        return None
    return ElasticPlan(
        page_bytes,
        pages,
        Cells(block_units * block_unit, block_unit, block_pages),
        Cells(slots, slot_unit, slot_pages),
        num_slots,
        present * block_unit,
        slot_units * slot_unit,
        copy_units * slot_unit,
    )


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


class _Sizes:
    """`CacheMemory` that has none: it notes the size of each plane, for one place."""

    def __init__(self) -> None:
        self.of_blocks: list[PlaneSize] = []
        self.of_slots: list[PlaneSize] = []

    def blocks(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        self.of_blocks.append(PlaneSize(shape[0], math.prod(shape[1:]) * dtype.itemsize))
        return torch.empty(*shape, dtype=dtype, device="meta")

    def slots(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        self.of_slots.append(PlaneSize(1, math.prod(shape) * dtype.itemsize))
        return torch.empty(*shape, dtype=dtype, device="meta")


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
        self._planes: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
        """Of blocks and of slots: the address of the first place, and pages of a unit."""
        self._pages: dict[int, Sequence[Page]] = {}
        """By the address of a unit in a plane."""

    def blocks(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self._reserve(shape, dtype, 0, shape[0], math.prod(shape[2:]) * dtype.itemsize)

    def slots(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self._reserve(shape, dtype, 1, 1, math.prod(shape[1:]) * dtype.itemsize)

    def _reserve(
        self, shape: Sequence[int], dtype: torch.dtype, which: int, rows: int, place_bytes: int
    ) -> Tensor:
        memory, cells = self._memory, (self._plan.blocks, self._plan.slots)[which]
        size = rows * cells.places * place_bytes
        address = memory.reserve(size)
        pages, rest = divmod(cells.unit * place_bytes, memory.page_bytes)
        if rest:
            memory.map(address, memory.create(-(-size // memory.page_bytes)))
        else:
            for row in range(rows):
                self._planes[which].append((address + row * cells.places * place_bytes, pages))
                self._map(*self._planes[which][-1], 0)  # torch asks CUDA for the device of the first address
        return tensor_at(address, shape, dtype, self._device, owner=self)

    def map_present(self) -> None:
        """Gives memory to what is present at the start. All tensors are there."""
        planned, copies = self._plan, self._plan.num_slots // self._plan.slots.unit
        of_copies = range(copies, copies + planned.present_copies // planned.slots.unit)
        self.move((0, unit, True) for unit in range(1, planned.present_blocks // planned.blocks.unit))
        slots = (*range(1, planned.present_slots // planned.slots.unit), *of_copies)
        self.move((1, unit, True) for unit in slots)

    def move(self, moves: Iterator[tuple[int, int, bool]] | Sequence[tuple[int, int, bool]]) -> None:
        """Makes these `Move`s of the budget, in order. Nothing touches a unit that loses its memory."""
        for which, unit, present in moves:
            for address, pages in self._planes[which]:
                (self._map if present else self._unmap)(address, pages, unit)

    def _map(self, address: int, pages: int, unit: int) -> None:
        at = address + unit * pages * self._memory.page_bytes
        self._pages[at] = mapped = [self._spare.pop() for _ in range(pages)]
        self._memory.map(at, mapped)

    def _unmap(self, address: int, pages: int, unit: int) -> None:
        at = address + unit * pages * self._memory.page_bytes
        self._memory.unmap(at, pages)
        self._spare += self._pages.pop(at)


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
