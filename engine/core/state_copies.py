"""Copies of states, which the prefix cache keeps for models with state layers. Pure bookkeeping.

A request can begin with cached blocks only if the cache also has its states at the end of these blocks. A
state cannot be cut to fewer tokens. So a copy serves exactly its own position. A request gets copies

- at each multiple of an interval,
- where its prompt leaves cached blocks that have no states at their end: other prompts may leave them there,
- at the last block boundary of its prompt,
- at the last multiple of `ANSWER_TOKENS` of its answer: the next turn of a chat begins there. The request
  keeps that copy to itself until it ends, and each later one takes its place.

The scan of a prompt copies the states on its way if a scanned chunk ends there. Else a step ends there, and
they are copied right after it.

    free ──allocate──▶ written by a step ──publish──▶ cached ──drop──▶ free
      ▲                  by a transfer or a load        │ allocate (evicts the least recently used)
      └───── release ───────┘                           └──▶ written by a step

Copies are evicted in an order of their own, and blocks in theirs, as in SGLang's cache for hybrid models. A
copy is also dropped when the cache drops the block before its position. The tiers below the device keep what
is evicted (`offload_tier`). No request waits for a slot: without one there is no copy.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, takewhile
from typing import NamedTuple

from baton.engine.core.units import Units
from baton.kv_names import CHUNK_TOKENS

END_TOKENS = 512
"""The end of a prompt, or of what it shares, gets a copy only this many tokens past the copy before it. Fewer
tokens take a step about as long as one."""
ANSWER_TOKENS = CHUNK_TOKENS
"""Positions between two copies of the states of a request that decodes. Other workers know no others."""


class Wanted(NamedTuple):
    """What the positions of the copies of a request depend on."""

    begun: int
    """It began with the copy at this position. 0: with none."""
    branch: int = 0
    """Where its prompt leaves cached blocks, past `begun`. 0: it does not."""
    decodes: bool = False


class Save(NamedTuple):
    """A copy that a step makes."""

    state_slot: int
    """Of the request."""
    position: int
    to: int


class Copy(NamedTuple):
    """A copy that a request has and the cache does not."""

    position: int
    slot: int
    of_answer: bool


class CopyLease:
    """Nothing writes to a copy, in `slot`, until `end`."""

    __slots__ = ("_give_back", "slot")

    def __init__(self, slot: int, give_back: Callable[[int], None]) -> None:
        self.slot = slot
        self._give_back: Callable[[int], None] | None = give_back

    def end(self) -> None:
        give_back, self._give_back = self._give_back, None
        assert give_back is not None, "a lease ends once"
        give_back(self.slot)


class StateCopies:
    """Owns the slots of copies, and finds cached copies by the name of the last block before them.

    Attributes:
        on_evicted: called with the name of each copy that `allocate` evicts.
        on_allocated: called with each slot that will be written anew.
        grow: called before `allocate` evicts a copy. It may `put_in` slots.
        count, moves: as `BlockPool.num_blocks` and `moves`, of slots.
    """

    def __init__(
        self,
        first_slot: int,
        count: int,
        interval: int,
        block_size: int,
        chunk_tokens: int,
        units: Units | None = None,
    ) -> None:
        """The slots are `count` in a row. Positions between two copies: `interval`, rounded up to blocks.
        `chunk_tokens`: as `Kernels.chunk_tokens`. `units`: those of slots that have memory. None: all
        have."""
        self._chunk_tokens = chunk_tokens
        self._interval = -(-interval // block_size) * block_size
        self._answer_interval = -(-ANSWER_TOKENS // block_size) * block_size
        self._block_size = block_size
        self.count = count
        self.units = units = Units.fixed(count, first_slot) if units is None else units
        self.moves = 0
        self.on_evicted: Callable[[bytes], None] = lambda _: None
        self.on_allocated: Callable[[int], None] = lambda _: None
        self.grow: Callable[[], None] = lambda: None
        self._present = units.present * units.size
        self._free = list(range(first_slot + self._present - 1, first_slot - 1, -1))
        self._slot_of: OrderedDict[bytes, int] = OrderedDict()  # the least recently used first
        self._name_of: dict[int, bytes] = {}
        self._lent = Counter[int]()  # how often each slot is lent, also of a copy that was dropped meanwhile
        self._writing = 0

    @property
    def most_written(self) -> int:
        """Slots that one request may write at a time, so that a long prompt leaves room for others."""
        return max(1, self._present // 4)

    def next_position(self, wanted: Wanted, computed: int, tokens: int) -> int:
        """The first position after `computed` at which a request with so many tokens gets a copy."""
        at_interval = (computed // self._interval + 1) * self._interval
        if wanted.decodes:
            return min(at_interval, (computed // self._answer_interval + 1) * self._answer_interval)
        before = wanted.begun
        for end in (wanted.branch, (tokens - 1) // self._block_size * self._block_size):
            if end - max(before, end // self._interval * self._interval) >= END_TOKENS:
                if computed < end < at_interval:
                    return end
                before = end
        return at_interval

    def is_of_answer(self, wanted: Wanted, position: int) -> bool:
        """Whether the copy here is only for what comes after the answer."""
        return wanted.decodes and position % self._interval > 0

    def positions(self, wanted: Wanted, start: int, stop: int, tokens: int) -> Iterator[int]:
        """The positions at which the chunk [start, stop) of a request gets copies. The first one that the
        scan cannot copy at is the last one here: the chunk has to end there."""
        position = self.next_position(wanted, start, tokens)
        while position <= stop:
            yield position
            if (position - start) % self._chunk_tokens:
                return
            position = self.next_position(wanted, position, tokens)

    def cut(self, wanted: Wanted, start: int, stop: int, tokens: int) -> int:
        """`stop`, or the position before it where the chunk has to end."""
        *_, last = 0, *self.positions(wanted, start, stop, tokens)
        return last if last and (last - start) % self._chunk_tokens else stop

    def __contains__(self, name: bytes) -> bool:
        return name in self._slot_of

    def use(self, name: bytes) -> None:
        """A cached copy counts as used now."""
        self.moves += 1
        self._slot_of.move_to_end(name)

    # As a pool of a tier

    def next_evicted(self, most: int) -> Iterator[tuple[int, bytes]]:
        """The copies that the next `most` calls of `allocate` would evict, in order, with names."""
        evictable = ((slot, name) for name, slot in self._slot_of.items() if slot not in self._lent)
        return islice(evictable, max(0, most - len(self._free)))

    def lookup(self, names: Sequence[bytes]) -> list[int]:
        """The slots of the copies with these names, up to the first one that is not here."""
        return [self._slot_of[name] for name in takewhile(self._slot_of.__contains__, names)]

    def may_save(self, name: bytes) -> bool:
        return True

    def unreferenced(self, slots: Iterable[int]) -> int:
        """How many of these copies `allocate` may evict."""
        return sum(slot not in self._lent for slot in slots)

    # Slots

    def allocate(self) -> int | None:
        """Returns a slot for a step to write, and evicts a copy where needed. None: steps are writing to all
        slots."""
        if not self._free:
            self.grow()
        if not self._free:
            oldest = next((name for name, slot in self._slot_of.items() if slot not in self._lent), None)
            if oldest is not None:
                self._free.append(self._forget(oldest))
                self.on_evicted(oldest)
        if not self._free:
            return None
        self._writing += 1
        self.moves += 1
        slot = self._free.pop()
        self.on_allocated(slot)
        self.units.hold(slot)
        return slot

    def allocate_for_answer(self) -> int | None:
        """As `allocate`. None, too, if this would leave less than half of the slots to what is cached."""
        return self.allocate() if self._writing < self._present // 2 else None

    def publish(self, name: bytes, slot: int) -> bool:
        """Names a copy that a step has written. Its states are verified. False: another one has this name
        already, and the slot is free."""
        if name in self._slot_of:
            self.release(slot)
            return False
        self._writing -= 1
        self._slot_of[name] = slot
        self._name_of[slot] = name
        self.units.let(slot)
        return True

    def put_cached(self, name: bytes, slot: int) -> None:
        """A free slot has the states of this name, which no other slot has. They count as used last."""
        self._free.remove(slot)
        self._slot_of[name] = slot
        self._name_of[slot] = name

    def release(self, slot: int) -> None:
        """Takes back a slot that `allocate` returned."""
        self._writing -= 1
        self._free.append(slot)
        self.units.let(slot)

    def drop(self, name: bytes) -> None:
        """Forgets the copy with this name, if there is one."""
        if name in self._slot_of and (slot := self._forget(name)) not in self._lent:
            self._free.append(slot)

    def _forget(self, name: bytes) -> int:
        """Returns the slot of the copy with this name."""
        slot = self._slot_of.pop(name)
        del self._name_of[slot]
        return slot

    def lend(self, name: bytes) -> CopyLease | None:
        """A lease on a cached copy, which may be dropped meanwhile. None: there is no such copy."""
        slot = self._slot_of.get(name)
        if slot is None:
            return None
        self._lent[slot] += 1
        self.units.hold(slot)
        return CopyLease(slot, self._take_back)

    def _take_back(self, slot: int) -> None:
        self._lent[slot] -= 1
        self.units.let(slot)
        if not self._lent[slot]:
            del self._lent[slot]
            if slot not in self._name_of:
                self._free.append(slot)

    # Memory

    def lease(self, slot: int) -> Callable[[], None]:
        """As `BlockPool.lease`."""
        return self.units.lease(slot)

    def has_cached(self, slots: range) -> bool:
        """Whether one of these slots has a cached copy."""
        return any(slot in self._name_of for slot in slots)

    def put_in(self, slots: Sequence[int]) -> None:
        """These slots have memory now, and are free."""
        self._free[:0] = reversed(slots)
        self._present += len(slots)

    def take_out(self, slots: Sequence[int]) -> None:
        """These slots, which nothing holds, lose their memory. The cache forgets their copies."""
        for slot in slots:
            if (name := self._name_of.get(slot)) is None:
                self._free.remove(slot)
            else:
                self._forget(name)
                self.on_evicted(name)
        self._present -= len(slots)
        self.moves += len(slots)

    def clear(self) -> None:
        """Nothing is cached any more. Nothing holds a slot."""
        slots = sorted([*self._free, *self._slot_of.values()])
        self.take_out(slots)
        self.put_in(slots)

    def assert_whole(self) -> None:
        """Asserts that each slot is free or has a cached copy."""
        slots = {*self._free, *self._slot_of.values()}
        assert not self._writing and not self._lent, "a copy was left behind"  # noqa: PT018
        assert self._name_of == {slot: name for name, slot in self._slot_of.items()}
        assert len(slots) == self._present == len(self._free) + len(self._slot_of), "a slot has two owners"
