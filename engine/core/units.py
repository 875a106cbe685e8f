"""Which places of a pool have memory, in units that get and lose it as a whole. Pure."""

import heapq
import math
from collections.abc import Callable
from functools import partial
from typing import Self


class Units:
    """The units of one pool: those that are present, and which of these no place is held of.

    Attributes:
        size: places of a unit.
        present: the number of units with memory.
        absent: the others, the smallest first (a heap).
        idle: present units without a held place. The one that has been idle for longest is first.
    """

    def __init__(self, first: int, places: int, size: int, present: int, *, keeps_first: bool) -> None:
        """Of a pool with `places` places from `first` on, the first `present` units have memory. With
        `keeps_first` the first unit always has it, and is never idle. `first` and `places` are multiples of
        `size`."""
        assert first % size == places % size == 0, "a unit is whole"
        begin, end = first // size, (first + places) // size
        self.size = size
        self.present = present
        self.absent = [*range(begin + present, end)]
        self.idle = dict.fromkeys(range(begin + keeps_first, begin + present))
        self._begin, self._end = begin, end
        self._fixed = begin if keeps_first else -1
        self._held = [0] * (end - begin)

    @classmethod
    def fixed(cls, places: int, first: int = 0) -> Self:
        """Those of a pool whose places always have memory."""
        size = math.gcd(first, places)
        return cls(first, places, size, places // size, keeps_first=True)

    def units(self, places: int) -> int:
        """The number of units with so many places."""
        return -(-places // self.size)

    def places(self, unit: int) -> range:
        return range(unit * self.size, (unit + 1) * self.size)

    def hold(self, *places: int) -> None:
        """The memory of these places is used, until `let`. A place may be held several times."""
        held, begin = self._held, self._begin
        if len(held) == 1 and self._fixed == begin:
            held[0] += len(places)
            return
        for place in places:
            unit = place // self.size
            if not held[unit - begin] and unit != self._fixed:
                del self.idle[unit]
            held[unit - begin] += 1

    def let(self, *places: int) -> None:
        held, begin = self._held, self._begin
        if len(held) == 1 and self._fixed == begin:
            held[0] -= len(places)
            return
        for place in places:
            unit = place // self.size
            held[unit - begin] -= 1
            if not held[unit - begin] and unit != self._fixed:
                self.idle[unit] = None

    def lease(self, place: int) -> Callable[[], None]:
        """As `hold`, until what it returns is called."""
        self.hold(place)
        return partial(self.let, place)

    def add(self) -> int:
        """An absent unit gets memory. Returns its number."""
        unit = heapq.heappop(self.absent)
        self.idle[unit] = None
        self.present += 1
        return unit

    def remove(self, unit: int) -> None:
        """An idle unit loses its memory."""
        del self.idle[unit]
        heapq.heappush(self.absent, unit)
        self.present -= 1

    def with_memory(self) -> list[int]:
        """The places that have memory, ascending."""
        absent = set(self.absent)
        units = (unit for unit in range(self._begin, self._end) if unit not in absent)
        return [place for unit in units for place in self.places(unit)]

    @property
    def all_places(self) -> range:
        """Those that have memory, and those that could have it."""
        return range(self._begin * self.size, self._end * self.size)

    @property
    def is_whole(self) -> bool:
        """Whether each unit is present or absent, and none is held."""
        return not any(self._held) and self.present + len(self.absent) == self._end - self._begin
