"""The pools of KV blocks and of states: the owner of each. Pure bookkeeping; the memory is the engine's.

A block is always in exactly one of four states:

    free ──allocate──▶ private (one request's) ──publish──▶ cached, referenced ◀──share── cached, unreferenced
      ▲                    │ release                            └────────release──────────────▶ │
      └────────────────────┴──────────────────────────── allocate (evicts copies, then the oldest)

A cached block is full and immutable. It is found by the name of all tokens up to its end (`kv_names`), so
requests share a prefix block by block. "Free" includes the unreferenced cached blocks, since `allocate`
can evict them at once.

A cached block is a *copy* while another worker has its content, too, and used it last. Copies are evicted
before all others. So two workers do not cache the same, and hold twice as much.

A *remnant* is a free block that still has the KV of a request's last tokens, which do not fill it. One
request may adopt it: then it is private, and the request goes on after these tokens. So the next turn of a
chat does not compute the end of the turn before again. `allocate` gives out remnants before it evicts cached
blocks.

Of a model with states or windows a part of the blocks may have no memory (`elastic`). These blocks are in
no state.
"""

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain, islice

from baton.engine.core.units import Units
from baton.engine.core.window_blocks import WindowBlocks


class BlockPool:
    """Owns all blocks that no request owns. `on_evicted` is called with the name of each block that leaves
    the cache, `on_window_lost` with that of each cached block that loses its window block, and `on_allocated`
    with each block that will be written anew."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        windows: WindowBlocks | None = None,
        units: Units | None = None,
    ) -> None:
        """`units`: those of blocks that have memory. None: all have."""
        self.num_blocks = num_blocks
        self.units = units = Units.fixed(num_blocks) if units is None else units
        self.block_size = block_size
        """Positions of a block."""
        self.windows = windows
        """None: all layers have the same blocks."""
        if windows is not None:
            windows.on_lost = self._window_lost
        self.on_window_lost: Callable[[bytes], None] = lambda _: None
        self.halved: set[bytes] = set()
        """Names of cached blocks without a window block of which a tier has all. The prefix cache writes
        it."""
        self.on_evicted: Callable[[bytes], None] = lambda _: None
        self.on_allocated: Callable[[int], None] = lambda _: None
        self.moves = 0
        """Blocks that changed their state so far. Each counts as often as it did."""
        self._lowest = [*range(units.present * units.size)]
        """The free blocks, and some that are not (a heap)."""
        self._free = {*self._lowest}
        self._private: set[int] = set()
        self._references: dict[int, int] = {}  # cached block → number of requests that hold it
        # Cached, and held by no request; the least recently used first.
        self._unreferenced: OrderedDict[int, None] = OrderedDict()
        self._unreferenced_copies: OrderedDict[int, None] = OrderedDict()
        self._copies: set[int] = set()  # cached blocks that another worker has, too
        self._remnants: OrderedDict[bytes, int] = OrderedDict()  # by the name of their tokens; oldest first
        self._block_of: dict[bytes, int] = {}  # name → cached block
        self._name_of: dict[int, bytes] = {}  # cached block → name

    @property
    def free(self) -> int:
        """Number of blocks that `allocate` can give out now."""
        unreferenced = len(self._unreferenced) + len(self._unreferenced_copies)
        return len(self._free) + len(self._remnants) + unreferenced

    @property
    def spare(self) -> int:
        """The part of `free` that has nothing which is cached here only."""
        return self.free - len(self._unreferenced)

    @property
    def cached(self) -> int:
        """Number of cached blocks, referenced or not."""
        return len(self._name_of)

    def allocate(self, count: int) -> list[int]:
        """Returns `count` private blocks with undefined content. Evicts cached blocks where needed."""
        assert count <= self.free, f"{count} blocks wanted, {self.free} free"
        while len(self._free) < count and self._remnants:
            self._has_no_content(self._remnants.popitem(last=False)[1])
        while len(self._free) < count:
            evicted, _ = (self._unreferenced_copies or self._unreferenced).popitem(last=False)
            self._evict(evicted)
            self._has_no_content(evicted)
        blocks = [self._lowest_free() for _ in range(count)]
        for block in blocks:
            self.units.hold(block)
            self.on_allocated(block)
        self._private.update(blocks)
        self.moves += count
        return blocks

    def _make_free(self, block: int) -> None:
        self._free.add(block)
        heapq.heappush(self._lowest, block)

    def _lowest_free(self) -> int:
        """Takes the free block with the smallest number, so that few units are in use."""
        while (block := heapq.heappop(self._lowest)) not in self._free:
            pass  # it lost its memory, or was found in it
        self._free.remove(block)
        return block

    def _evict(self, block: int) -> None:
        """The cache forgets a block that no request holds."""
        self._copies.discard(block)
        name = self._name_of.pop(block)
        del self._block_of[name]
        self.on_evicted(name)

    def has_remnant(self, name: bytes) -> bool:
        return name in self._remnants

    def adopt(self, name: bytes) -> int:
        """Takes a remnant as a private block. It has the KV of its tokens up to the end of those with this
        name."""
        block = self._remnants.pop(name)
        self._private.add(block)
        self.units.hold(block)
        self.moves += 1
        return block

    def lookup(self, names: Sequence[bytes]) -> list[int]:
        """The cached blocks of the longest known prefix among these. Takes no reference."""
        blocks = []
        for name in names:
            block = self._block_of.get(name)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def next_evicted(self, most: int) -> Iterator[tuple[int, bytes]]:
        """The cached blocks that the next `most` blocks of `allocate` would evict, in order, with names. Then
        those that would lose their window blocks."""
        count = max(0, most - len(self._free) - len(self._remnants))
        evictable = chain(self._unreferenced_copies, self._unreferenced)
        evicted = islice(evictable, count)
        if self.windows is not None:
            lost = self.windows.next_lost(self.windows.present * most // self.num_blocks)
            evicted = chain(evicted, (block for block in lost if self.unreferenced([block])))
        return ((block, self._name_of[block]) for block in evicted)

    def may_save(self, name: bytes) -> bool:
        """Whether a tier should have this cached block, if it lacks it."""
        return name not in self.halved

    def unreferenced(self, blocks: Iterable[int]) -> int:
        """How many of these cached blocks `free` counts. `share` would take them out of it."""
        return sum(block in self._unreferenced or block in self._unreferenced_copies for block in blocks)

    def free_after(self, released: Iterable[Sequence[int]], keep: Collection[int]) -> int:
        """Blocks that `allocate` could give out once these tables are released, without those to `keep`."""
        holders = Counter(chain.from_iterable(released))
        back = sum(
            block in self._private or self._references[block] == count
            for block, count in holders.items()
            if block not in keep
        )
        return self.free + back - self.unreferenced(keep)

    def is_unheld_after(self, released: Iterable[Sequence[int]]) -> bool:
        """Whether no request holds a block once these tables are released."""
        holders = Counter(chain.from_iterable(released))
        return self._private <= holders.keys() and all(
            holders[block] == count for block, count in self._references.items()
        )

    def share(self, blocks: Sequence[int]) -> None:
        """Adds a reference to each of these cached blocks, for one request."""
        self.moves += len(blocks)
        for block in blocks:
            self._unreferenced.pop(block, None)
            self._unreferenced_copies.pop(block, None)
            references = self._references[block] = self._references.get(block, 0) + 1
            if references == 1:
                self.units.hold(block)

    def publish(self, block: int, name: bytes) -> bool:
        """Moves a private block to the cache; its request keeps a reference. The block must be full and its
        KV verified.

        False: a block with the same content is cached already, and this one stays private.
        """
        if block not in self._private or name in self._block_of:
            return False
        self._private.remove(block)
        self._references[block] = 1
        self._block_of[name] = block
        self._name_of[block] = name
        return True

    def put_cached(self, block: int, name: bytes) -> None:
        """A free block has the content of this name, which no other block has. It is evicted after those that
        came before."""
        self._free.remove(block)
        self._block_of[name] = block
        self._name_of[block] = name
        self._unreferenced[block] = None

    def forget(self, name: bytes) -> None:
        """No request finds the cached block with this name any more, if there is one. Those that hold it keep
        it."""
        block = self._block_of.pop(name, None)
        if block is None:
            return
        del self._name_of[block]
        self._copies.discard(block)
        for unreferenced in (self._unreferenced, self._unreferenced_copies):
            if block in unreferenced:
                del unreferenced[block]
                self._has_no_content(block)

    def release(
        self,
        blocks: Sequence[int],
        remnant: tuple[int, bytes] | None = None,
        *,
        copied: bool | None = None,
        first_copied: int = 0,
    ) -> None:
        """Takes back all blocks of a request: private ones become free, cached ones lose a reference.

        `remnant`: one of these blocks, and the name of the tokens whose KV ends in it. `copied`: whether
        another worker has the cached ones now, too, from index `first_copied` on, and goes on with them.
        None: as before."""
        self.moves += len(blocks)
        if copied:
            self._copies.update(block for block in blocks[first_copied:] if block in self._name_of)
        elif copied is not None:
            self._copies.difference_update(blocks)
        # Reversed, so that the end of a prefix is evicted first: more requests share its beginning.
        for block in reversed(blocks):
            if block in self._private:
                self._private.remove(block)
                self.units.let(block)
                is_remnant = remnant is not None and block == remnant[0] and self.has_window(block)
                if remnant is not None and is_remnant and remnant[1] not in self._remnants:
                    self._remnants[remnant[1]] = block
                else:
                    self._has_no_content(block)
                continue
            self._references[block] -= 1
            if self._references[block] == 0:
                del self._references[block]
                self.units.let(block)
                if block not in self._name_of:
                    self._has_no_content(block)
                    continue
                (self._unreferenced_copies if block in self._copies else self._unreferenced)[block] = None

    def _has_no_content(self, block: int) -> None:
        if self.windows is not None:
            self.windows.freed(block)
        self._make_free(block)

    def has_window(self, block: int) -> bool:
        """Whether the block has KV of layers with windows, as far as it has that of others."""
        return self.windows is None or self.windows.has(block)

    def _window_lost(self, block: int) -> None:
        if (name := self._name_of.get(block)) is not None:
            self.on_window_lost(name)
            return
        if (remnant := self._remnant_of(block)) is not None:
            del self._remnants[remnant]
            self._make_free(block)

    def _remnant_of(self, block: int) -> bytes | None:
        return next((name for name, kept in self._remnants.items() if kept == block), None)

    # Memory

    def lease(self, block: int) -> Callable[[], None]:
        """The memory of a block, and that of its window block, is used until what this returns is called. A
        tier that copies it calls this."""
        ends = [self.units.lease(block)]
        if self.windows is not None:
            ends.append(self.windows.lease(block))

        def end() -> None:
            for each in ends:
                each()

        return end

    def has_cached(self, blocks: range) -> bool:
        """Whether one of these blocks is cached."""
        return any(block in self._name_of for block in blocks)

    def put_in(self, blocks: Iterable[int]) -> None:
        """These blocks have memory now, and are free."""
        for block in blocks:
            self._make_free(block)
        if len(self._lowest) > 2 * self.num_blocks:  # most lost their memory, and got it again
            self._lowest = sorted(self._free)

    def take_out(self, blocks: Sequence[int]) -> None:
        """These blocks, which nothing holds, lose their memory. The cache forgets them."""
        for block in blocks:
            if block in self._free:
                self._free.remove(block)
            elif block in self._name_of:
                self._unreferenced.pop(block, None)
                self._unreferenced_copies.pop(block, None)
                self._evict(block)
            else:
                remnant = self._remnant_of(block)
                assert remnant is not None, "nothing holds the block"
                del self._remnants[remnant]
            if self.windows is not None:
                self.windows.freed(block)
        self.moves += len(blocks)

    def clear(self) -> None:
        """Nothing is cached any more. Nothing holds a block."""
        blocks = self.units.with_memory()
        self.take_out(blocks)
        self.put_in(blocks[::-1])

    @property
    def is_unheld(self) -> bool:
        """Whether no request holds a block."""
        return not self._private and not self._references

    def only_here(self, blocks: Iterable[int] | None) -> None:
        """No other worker has these blocks any more. None: none of the blocks."""
        for block in self._copies.intersection(self._copies if blocks is None else blocks):
            self._copies.remove(block)
            if block in self._unreferenced_copies:
                del self._unreferenced_copies[block]
                self._unreferenced[block] = None

    def assert_consistent(self) -> None:
        """Asserts that every block is in exactly one state, and that the name maps mirror each other."""
        free = [*self._free, *self._remnants.values()]
        unreferenced = {*self._unreferenced, *self._unreferenced_copies}
        states = [*free, *self._private, *self._references, *self._unreferenced, *self._unreferenced_copies]
        assert sorted(states) == self.units.with_memory(), "a block was lost or has two owners"
        assert all(count > 0 for count in self._references.values())
        assert self._name_of == {block: name for name, block in self._block_of.items()}
        assert unreferenced <= self._name_of.keys() <= self._references.keys() | unreferenced
        assert self._copies <= self._name_of.keys()
        assert self._copies & unreferenced == self._unreferenced_copies.keys()
        if self.windows is not None:
            self.windows.assert_consistent()
            assert not any(self.windows.has(block) for block in self._free)
            assert all(self.windows.has(block) for block in self._remnants.values())

    def assert_whole(self) -> None:
        """Asserts that no request holds a block."""
        self.assert_consistent()
        assert not self._private, f"private blocks left: {sorted(self._private)}"
        assert not self._references, f"cached blocks still referenced: {sorted(self._references)}"
        if self.windows is not None:
            self.windows.assert_whole()


class StatePool:
    """The slots of the states of a model with state layers: owns all that no request owns.

    A request has one slot as long as it has blocks: it gets and returns both together. With drafts it has
    another one until the step that verifies them is over."""

    def __init__(self, num_slots: int, units: Units | None = None) -> None:
        """`units`: those of slots that have memory. None: all have."""
        self.num_slots = num_slots
        self.units = units = Units.fixed(num_slots) if units is None else units
        self._free = [*range(units.present * units.size)]  # a heap, so that few units are in use

    @property
    def free(self) -> int:
        """Number of slots that `allocate` can give out now."""
        return len(self._free)

    @property
    def spare(self) -> int:
        """The part of `free` that nothing needs."""
        return len(self._free)

    def allocate(self) -> int:
        """Returns a slot with undefined content."""
        slot = heapq.heappop(self._free)
        self.units.hold(slot)
        return slot

    def release(self, slot: int) -> None:
        """Takes back the slot of a request."""
        assert slot not in self._free, "a slot has one owner"
        heapq.heappush(self._free, slot)
        self.units.let(slot)

    def has_cached(self, slots: range) -> bool:
        """No slot is: copies have slots of their own."""
        return False

    def put_in(self, slots: range) -> None:
        """These slots have memory now, and are free."""
        for slot in slots:
            heapq.heappush(self._free, slot)

    def take_out(self, slots: range) -> None:
        """These slots, which are free, lose their memory."""
        for slot in slots:
            self._free.remove(slot)
        heapq.heapify(self._free)

    def assert_whole(self) -> None:
        """Asserts that no request has a slot."""
        assert sorted(self._free) == self.units.with_memory(), "a slot was left behind"
