"""Copies of states at a simulated worker, for models with state layers: where a prompt may begin.

A prompt begins with cached KV only up to a copy. Where copies are made, and which one is evicted, are rules
of the engine (`engine.core.state_copies`). An evicted copy lives on in the memory of the host. A prompt that
begins with it brings it back. The host forgets the least recently used one first.

    step of a prompt ──made──▶ cached ──allocate evicts──▶ host ──begin──▶ cached
    step that decodes ──reached──▶ kept by the request ──end──▶ cached

A copy goes with the KV before it. The times of copies are not counted: an H200 copies 64 MB to the host in
1.2 ms.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from baton.engine.core.state_copies import StateCopies, Wanted
from baton.kv_names import CHUNK_TOKENS

ANSWER = Wanted(0, decodes=True)


class CopyRoom(NamedTuple):
    """How many copies a worker has room for, and the positions between two copies of a prompt."""

    device: int
    host: int
    interval: int


class Copies:
    """Owned by one worker. `names` are those of the full chunks of a request; a request without names finds
    nothing, and nothing finds its copies."""

    def __init__(self, room: CopyRoom, block: int) -> None:
        """`block`: positions of a block of KV. Copies are at the ends of blocks."""
        self._block = block
        self._device = StateCopies(0, room.device, room.interval, block, CHUNK_TOKENS)
        self._host: OrderedDict[bytes, None] = OrderedDict()  # the least recently used first
        self._most_in_host = room.host
        self._answers: dict[int, tuple[bytes, int]] = {}  # number of the request → name, slot

    def usable(self, names: Sequence[int], cached: int) -> int:
        """How many of the first `cached` positions a prompt can begin with."""
        for position in range(cached // self._block * self._block, 0, -self._block):
            if (name := _name(names, position)) in self._device or name in self._host:
                return position
        return 0

    def begin(self, names: Sequence[int], position: int) -> None:
        """A prompt begins with the copy at this position, which is usable, or which has come from another
        worker."""
        name = _name(names, position)
        if name in self._host:
            self._host.move_to_end(name)
        self._cache(name)

    def cut(self, wanted: Wanted, start: int, stop: int, tokens: int) -> int:
        """As `StateCopies.cut`."""
        return self._device.cut(wanted, start, stop, tokens)

    def made(self, names: Sequence[int], wanted: Wanted, start: int, stop: int, tokens: int) -> None:
        """A step has computed the positions [start, stop) of a prompt with so many tokens."""
        positions = [*self._device.positions(wanted, start, stop, tokens)]
        for position in positions[-self._device.most_written :] if names else ():
            self._cache(_name(names, position))

    def next_of_answer(self, computed: int) -> int:
        """The next position at which a request that decodes gets a copy."""
        return self._device.next_position(ANSWER, computed, computed)

    def reached(self, number: int, names: Sequence[int], position: int) -> None:
        """The answer of this request has reached that position."""
        if not names:
            return
        name = _name(names, position)
        if not self._device.is_of_answer(ANSWER, position):
            self._cache(name)
        elif self._device.may_write_answer and (slot := self._allocate()) is not None:
            self._forget_answer(number)
            self._answers[number] = name, slot

    def end(self, number: int) -> None:
        """The request has ended."""
        if (copies := self._answers.pop(number, None)) is not None:
            name, slot = copies
            self._device.name(slot, name)

    def drop(self, evicted: Iterable[int]) -> None:
        """The KV of these chunks is gone."""
        for chunk in evicted:
            name = _name((chunk,), CHUNK_TOKENS)
            self._device.forget(name)
            self._host.pop(name, None)

    def _cache(self, name: bytes) -> None:
        if name in self._device:
            self._device.use(name)
        elif (slot := self._allocate()) is not None:
            self._device.name(slot, name)

    def _allocate(self) -> int | None:
        for _, name in self._device.next_evicted(1):
            self._to_host(name)
        return self._device.allocate()

    def _forget_answer(self, number: int) -> None:
        if (copies := self._answers.pop(number, None)) is not None:
            self._device.release(copies[1])

    def _to_host(self, name: bytes) -> None:
        self._host[name] = None
        self._host.move_to_end(name)
        if len(self._host) > self._most_in_host:
            self._host.popitem(last=False)


def _name(names: Sequence[int], position: int) -> bytes:
    """Of the chunk that ends there."""
    return names[position // CHUNK_TOKENS - 1].to_bytes(8, "big")
