"""The prefix cache: which blocks are found by the names of their content, in the pool and in the tiers below.
Pure.

A block is *thin* if it lacks positions of arrays with windows. It lost its window block (`window_blocks`), or
came from another worker, which left out what no later token of that prompt reads. A request may begin behind
thin blocks if no window reaches back to them. A block that has all positions takes the place of a thin one.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

from baton.engine.api.config import TierCells
from baton.engine.api.pools import Pool, RecordMemory
from baton.engine.api.request import NO_HOOKS, CachedBlock, EngineRequest, Hooks, Kept, Moved
from baton.engine.core.block_pool import BlockPool
from baton.engine.core.kept_blocks import packed, record_bytes, unpacked
from baton.engine.core.kept_table import KeptTable
from baton.engine.core.live_request import LiveRequest
from baton.engine.core.offload_tier import CellTiers, Load, OffloadTier
from baton.engine.core.prefix_names import PrefixNames
from baton.engine.core.state_copies import StateCopies
from baton.kv_names import CHUNK_TOKENS, Tier
from baton.kv_names.cache_kinds import Window, first_read, last_unread


class PrefixCache:
    """Names blocks and chunks. The pool owns the blocks.

    Attributes:
        queries, hits: tokens that requests looked up, and how many of these were found.
        offload: the tiers with what the pools may have evicted, the fastest first: of blocks, then of states.
        copies: of the states of a model with state layers. None: another model.
        windows: those of the arrays of tokens that layers keep.
    """

    def __init__(
        self,
        pool: BlockPool,
        content_root: bytes,
        *,
        hooks: Hooks = NO_HOOKS,
        offload_places: Mapping[TierCells, int] = MappingProxyType({}),
        prompt_seconds: Callable[[int, int, int], float] = lambda *_: 0.0,
        copies: StateCopies | None = None,
        windows: Collection[Window] = (),
        kept: Mapping[Pool, RecordMemory] = MappingProxyType({}),
    ) -> None:
        """`content_root`: root of all names. `offload_places`: cells of each tier below the device.
        `prompt_seconds`: as in `Meters`. `windows`: those of the arrays of tokens that layers keep.
        `kept`: for records of what the next engine may use. Empty: the memory ends with this one."""
        self.queries = 0
        self.hits = 0
        self.copies = copies
        self.prompt_seconds = prompt_seconds
        self._pool = pool
        self._block_size = pool.block_size
        self._root = content_root
        self._hooks = hooks
        self.windows = windows
        # The names of blocks that are thin in all tiers. Those of `halved` are thin on the device alone.
        self._thin: set[bytes] = set()
        self._halved = pool.halved
        self._named: tuple[EngineRequest, PrefixNames] | None = None  # the last request, and its names
        # Chunk → its position in the prompt, in chunks; and the blocks with its positions, in order.
        self._blocks_of: dict[bytes, tuple[int, list[bytes]]] = {}
        # By name, the blocks that are in any tier. The last used one is last.
        self._cached: OrderedDict[bytes, CachedBlock] = OrderedDict()
        # Of those that the device does not have, the fastest tier that has them, as the hooks know it.
        self._lower: dict[bytes, Tier] = {}
        kept_below = offload_places, self._cached, pool.evicted
        self._blocks_below = CellTiers(pool, pool.block_size, *kept_below)
        self._states_below = CellTiers(copies or pool, 0, *kept_below)
        tiers = [*self._blocks_below.tiers, *self._states_below.tiers]
        self.offload: Sequence[OffloadTier] = tiers
        self._records: list[KeptTable] = []
        all_cells = {Pool.BLOCKS: pool, Pool.WINDOWS: pool.windows, Pool.SLOTS: copies}
        for which, memory in kept.items():
            if (cells := all_cells[which]) is not None:
                cells.records = KeptTable(memory, record_bytes(pool.block_size))
                self._records.append(cells.records)
        self._looked_up = [x for x in (pool, pool.windows, copies, *tiers) if x is not None]

    @property
    def changes(self) -> int:
        """It grows whenever what is found, or where, may have changed."""
        return sum([each.changes for each in self._looked_up])

    def names(self, request: EngineRequest) -> PrefixNames:
        """Names for the tokens of a request. A prompt is looked up for a fetch, and again when it is added.
        It is hashed once, if no other request comes between."""
        if self._named is None or self._named[0] is not request:
            spans = [image.span for image in request.images]
            names = PrefixNames(self._root, request.cache_salt, self._block_size, request.tenant, spans)
            self._named = request, names
        return self._named[1]

    def names_of(self, live: LiveRequest) -> PrefixNames:
        """The names of all full blocks with known tokens."""
        if live.names is None:
            live.names = self.names(live.request)
        live.names.extend(live.token_ids, live.num_known)
        return live.names

    def rename(self, content_root: bytes) -> None:
        """All names of requests from now on begin at this root. Blocks with names of before are found no
        more."""
        self._root, self._named = content_root, None
        self._forget_records()

    def clear_device(self) -> None:
        """The device loses all that is cached there. Tiers below keep what they have. Nothing holds a
        block."""
        self._pool.clear()
        if self.copies is not None:
            self.copies.clear()
        self._read_evictions()
        self._forget_records()

    def _forget_records(self) -> None:
        for records in self._records:
            records.clear()

    def publish(
        self, names: PrefixNames, blocks: Sequence[int], start: int, stop: int, *, thin: Sequence[range] = ()
    ) -> None:
        """Offers the blocks with indices [start, stop) of a block table. Their KV is verified. Those with
        indices in `thin` are thin, and those without a window block."""
        self._read_evictions()
        pool, cached = self._pool, self._cached
        entered: list[int] = []
        published: dict[bytes, int] = {}  # name → block
        for index in range(start, stop):
            name, block, is_thin = names.blocks[index], blocks[index], False
            if thin or self.windows:
                is_thin = any(index in each for each in thin) or not pool.has_window(block)
                if is_thin and name in cached and name not in self._thin:
                    continue  # there is a whole one
                if name in self._thin and not is_thin:
                    self._forget_thin(name)
                elif name in self._halved and not is_thin:
                    self._forget_half(name)
            if not pool.publish(block, name):
                continue
            published[name] = block
            if is_thin:
                self._thin.add(name)
            if name in cached:
                self._place_changed(name)
            else:
                entered.append(index)
        for block in names.cached(entered):
            self._enter(block, names.blocks)
        self._keep(published)

    def _keep(self, blocks: Mapping[bytes, int]) -> None:
        """The next engine may have these cached blocks, by name. Only a block with a window block of its own
        may be thin."""
        pool, windows = self._pool, self._pool.windows
        if pool.records is None:
            return
        windowed = {
            name: block for name, block in blocks.items() if name not in self._thin and pool.has_window(block)
        }
        of_all = windowed if windows is None else blocks
        pool.records.add((block, packed(self._cached[name])) for name, block in of_all.items())
        if windows is not None and windows.records is not None:
            windows.records.add((int(windows.of[block]), name) for name, block in windowed.items())

    def keep_states(self, names: PrefixNames, position: int, slot: int) -> None:
        """The next engine may have the states after this many tokens, which end a block."""
        self._keep_states(names.blocks[position // self._block_size - 1], slot)

    def _keep_states(self, name: bytes, slot: int) -> None:
        records = None if self.copies is None else self.copies.records
        if records is not None and slot not in records:
            records.add([(slot, name)])

    def _enter(self, block: CachedBlock, names: list[bytes]) -> None:
        """A block comes to the cache. `names`: of the blocks of its prompt, up to it at least."""
        self._cached[block.name] = block
        for chunk, name in enumerate(block.chunks, block.first_chunk):
            first = chunk * CHUNK_TOKENS // self._block_size
            stop = -(-(chunk + 1) * CHUNK_TOKENS // self._block_size)
            self._blocks_of[name] = chunk, names[first:stop]
        self._hooks.cache_changed(block)

    def settle(self) -> None:
        """Called often: what is evicted, and what the next engine may use, becomes known after a while."""
        self._read_evictions()
        for records in self._records:
            records.settle()

    def take_over(self) -> int:
        """Has the blocks and states from now on that the engine before this one left, if they are whole.
        Returns the number of blocks. A block whose beginning of the prompt is lost is left out. Called once,
        before all else."""
        pool, windows, copies, tick = self._pool, self._pool.windows, self.copies, self._hooks.tick
        if pool.records is None:
            return 0
        left: dict[bytes, tuple[int, CachedBlock]] = {}
        after: dict[bytes, list[CachedBlock]] = {}
        for place, body in pool.records.left(tick):
            block = unpacked(body)
            if left.setdefault(block.name, (place, block))[1] is block:
                after.setdefault(block.before, []).append(block)
        block_of: dict[bytes, int] = {}
        prompts = [(block, list[bytes]()) for block in after.pop(b"", ())]
        while prompts:
            block, before = prompts.pop()
            names = [*before, block.name]
            self._enter(block, names)
            block_of[block.name], _ = left[block.name]
            prompts.extend((each, names) for each in after.pop(block.name, ()))
        for name, place in reversed(block_of.items()):  # the end of a prompt is evicted first
            pool.put_cached(place, name)
        if windows is not None and windows.records is not None:
            places = {name: place for place, name in windows.records.left(tick)}
            self._thin.update(block_of.keys() - places.keys())
            for name, block in block_of.items():  # the end of a prompt loses them first
                if (place := places.get(name)) is not None:
                    windows.put_cached(place, block)
        if copies is not None and copies.records is not None:
            slots = {name: slot for slot, name in copies.records.left(tick)}
            for name, slot in slots.items():
                if name in block_of:
                    copies.put_cached(slot, name)
        return len(block_of)

    def _forget_thin(self, name: bytes) -> None:
        """A block with this name has all positions. No tier keeps a thin one, except while it is read."""
        if any(tier.reads(name) for tier in self._blocks_below.tiers):
            return
        self._pool.forget(name)
        self._blocks_below.drop(name)
        self._gone(name)

    def _forget_half(self, name: bytes) -> None:
        """A block with this name takes the place of that on the device, which is thin."""
        self._halved.discard(name)
        self._pool.forget(name)

    def thin_before(self, position: int) -> int:
        """The index of the first block that is not thin, if a prompt came for the token at `position`."""
        return -(-last_unread(self.windows, position) // self._block_size)

    def publish_states(self, names: PrefixNames, position: int, slot: int) -> None:
        """Names a copy of the states after this many tokens, which end a block. The states are verified."""
        self._name_states(names.blocks[position // self._block_size - 1], slot)
        if not position % CHUNK_TOKENS:
            chunk = position // CHUNK_TOKENS - 1
            self._hooks.cache_changed(Kept(names.salt, names.chunks[chunk], chunk, states=True))

    def used(self, names: Iterable[bytes]) -> None:
        """A request begins with these cached blocks."""
        for name in names:
            self._cached.move_to_end(name)

    def only_here(self, chunks: Iterable[bytes] | None) -> None:
        """No other worker has these chunks any more. None: all chunks."""
        if chunks is None:
            self._pool.only_here(None)
            return
        names = (name for chunk in chunks for name in self._blocks_of.get(chunk, (0, ()))[1])
        self._pool.only_here(block for name in names if (block := self._pool.find(name)) is not None)

    def last_used(self) -> Iterator[tuple[bytes, list[bytes]]]:
        """Yields the salts and the chunks of cached prefixes, the last used first. None is the beginning of
        one before it."""
        self._read_evictions()
        seen: set[bytes] = set()
        for last in reversed(list(self._cached)):
            if last in seen:
                continue
            blocks: list[CachedBlock] = []
            name = last
            while name in self._cached:
                seen.add(name)
                blocks.append(self._cached[name])
                name = blocks[-1].before
            if blocks and not name:  # otherwise the cache has lost the beginning
                blocks.reverse()
                yield blocks[0].salt, [chunk for block in blocks for chunk in block.chunks]

    def usable(self, names: Sequence[bytes], *, on_device: bool = False, loads: bool = True) -> int:
        """How many of these cached blocks a request can begin with. No window reaches from there to a thin
        block. For a model with states, these are the blocks before the last copy of the states, in any tier
        or on the device. `loads`: blocks that are thin on the device alone are loaded."""
        self._read_evictions()
        ends: Sequence[int] = range(1, len(names) + 1)
        if self._thin or (self._halved and not loads):
            thin = [name in self._thin or (not loads and name in self._halved) for name in names]
            ends = self._readable(thin, self._block_size)
        if (copies := self.copies) is None:
            return ends[-1] if ends else 0
        kept = [copies] if on_device else [copies, *self._states_below.tiers]
        return next((end for end in reversed(ends) if any(names[end - 1] in each for each in kept)), 0)

    def _readable(self, thin: Sequence[bool], size: int, first: int = 0) -> Sequence[int]:
        """Behind how many of these pieces of a prompt the next token reads none that is thin, ascending.
        `size`: positions of each. `first`: the number of the first one in the prompt."""
        last, ends = -1, []
        for number, is_thin in enumerate(thin, first):
            last = number if is_thin else last
            if last < first_read(self.windows, (number + 1) * size) // size:
                ends.append(number + 1 - first)
        return ends

    def usable_before(self, names: Sequence[bytes], position: int) -> int:
        """How many of these cached blocks a request can begin with, if the KV behind them comes from another
        worker for the token at `position`: no window reaches from there to a thin block."""
        self._read_evictions()
        read = range(first_read(self.windows, position) // self._block_size, -(-position // self._block_size))
        return next((i for i in read if i < len(names) and self._is_thin_here(names[i])), len(names))

    def _is_thin_here(self, name: bytes) -> bool:
        return name in self._thin or name in self._halved

    def sendable(self, chunks: Sequence[bytes], first_chunk: int) -> Sequence[int]:
        """Behind how many of these cached chunks another worker can go on, ascending."""
        self._read_evictions()
        if not self._thin and not self._halved:
            return range(1, len(chunks) + 1)
        return self._readable([not self.is_whole(name) for name in chunks], CHUNK_TOKENS, first_chunk)

    def is_whole(self, chunk: bytes) -> bool:
        """Whether no block with this chunk is thin on the device."""
        return not any(map(self._is_thin_here, self._blocks_of.get(chunk, (0, ()))[1]))

    def known(self, names: Sequence[bytes]) -> int:
        """How many of these blocks are in any tier, from the first on."""
        self._read_evictions()
        cached = self._cached
        for count, name in enumerate(names):
            if name not in cached:
                return count
        return len(names)

    def remnant(
        self, names: PrefixNames, token_ids: Sequence[int], num_blocks: int, limit: int
    ) -> tuple[int, bytes | None]:
        """The remnant behind the first `num_blocks` cached blocks of a prompt: the position up to which it
        has KV, at most `limit`, and its name. The name is None if there is no remnant."""
        start = num_blocks * self._block_size
        last = min(start + self._block_size - 1, limit) // CHUNK_TOKENS * CHUNK_TOKENS
        if last > start and not self.known(names.blocks[num_blocks : num_blocks + 1]):  # in any tier
            for end in range(last, start, -CHUNK_TOKENS):
                name = names.of_chunk(token_ids, end)
                if self._pool.has_remnant(name):
                    return end, name
        return start, None

    def remnant_kept(self, names: PrefixNames, position: int) -> None:
        """The pool has a remnant that ends at this position."""
        if position % self._block_size == CHUNK_TOKENS:  # it is one chunk, so its name is that of the chunk
            chunk = position // CHUNK_TOKENS - 1
            self._hooks.cache_changed(Kept(names.salt, names.chunks[chunk], chunk, states=False))

    def blocks_of(self, chunks: Sequence[bytes], first_chunk: int) -> list[bytes]:
        """The names of the blocks with the KV of consecutive chunks, as in `table`, as far as any tier has
        them."""
        blocks: dict[bytes, None] = {}
        for position, name in enumerate(chunks, first_chunk):
            chunk, names = self._blocks_of.get(name, (-1, []))
            if chunk != position or self.known(names) < len(names):
                break
            blocks.update(dict.fromkeys(names))
        return list(blocks)

    def tier_of(self, name: bytes) -> OffloadTier | None:
        """The fastest tier below the device that has this block."""
        return self._blocks_below.find(name)

    def states_tier_of(self, name: bytes) -> OffloadTier | None:
        """The fastest tier that has the states after this block. None: the device has them, or the model has
        none."""
        if self.copies is None or name in self.copies:
            return None
        return self._states_below.find(name)

    def load(
        self,
        wanted: Sequence[tuple[bytes, int]],
        then: Callable[[bool], None],
        states: tuple[bytes, int] | None = None,
    ) -> None:
        """Copies these blocks, which the tiers have, from there to blocks of the pool that nothing else uses
        meanwhile. `states`: also a copy of states, to a slot of `StateCopies.allocate`. If all bytes are as
        they were saved, the cache has these blocks and states then. At last calls `then`, with True if so."""

        def ended(intact: bool) -> None:
            if intact:
                for name, block in wanted:
                    self._restore(name, block)
            if states is not None and intact:
                self._name_states(*states)
            elif states is not None and self.copies is not None:
                self.copies.release(states[1])
            then(intact)

        load = Load(ended)
        for name, block in wanted:
            tier = self.tier_of(name)
            assert tier is not None, "what the device has is not loaded"
            tier.load(name, block, load)
        if states is not None:
            tier = self.states_tier_of(states[0])
            assert tier is not None
            tier.load(*states, load)

    def _restore(self, name: bytes, block: int) -> None:
        """Offers a block with KV from a tier below, which is verified. The tier had it when the copy
        began."""
        self._read_evictions()
        if name in self._halved and self._pool.has_window(block):
            self._forget_half(name)
        if name in self._cached and self._pool.publish(block, name):
            if not self._pool.has_window(block):
                self._has_half(name)
            self._keep({name: block})
            self._place_changed(name)

    def _name_states(self, name: bytes, slot: int) -> None:
        """Offers a copy of the states after the block of this name. They are verified."""
        assert self.copies is not None, "the model has states"
        if self.copies.name(slot, name):
            self._keep_states(name, slot)

    def table(self, chunks: Sequence[bytes], first_chunk: int, most: int) -> tuple[int, list[int]]:
        """Finds the KV of consecutive chunks, of which the first is chunk `first_chunk` of its prompt.

        Returns how many are cached, from the first on, in at most `most` blocks; and these blocks. A chunk
        with another position than the caller says counts as not cached."""
        first = first_chunk * CHUNK_TOKENS // self._block_size
        table: dict[int, int] = {}  # index → block
        for count, name in enumerate(chunks):
            start = (first_chunk + count) * CHUNK_TOKENS // self._block_size
            chunk, names = self._blocks_of.get(name, (-1, []))
            blocks = self._pool.lookup(names)
            indices = range(start - first, start - first + len(blocks))
            if chunk != first_chunk + count or len(blocks) < len(names) or indices.stop > most:
                return count, list(table.values())
            table.update(zip(indices, blocks, strict=True))
        return len(chunks), list(table.values())

    def _read_evictions(self) -> None:
        """Reads what blocks, window blocks and tiers have evicted since the last call."""
        pool, windows = self._pool, self._pool.windows
        if windows is not None and windows.lost:
            for name in filter(None, (pool.cell(block).name for block in windows.lost)):
                if (
                    name in self._cached
                    and (block := pool.find(name)) is not None
                    and not pool.has_window(block)
                ):
                    self._has_half(name)
            windows.lost.clear()
        if pool.evicted:
            for name in pool.evicted:
                self._place_changed(name)
            pool.evicted.clear()

    def _has_half(self, name: bytes) -> None:
        """The block of this name on the device has no window block."""
        if name not in self._thin:
            (self._thin if self.tier_of(name) is None else self._halved).add(name)

    def _place_changed(self, name: bytes) -> None:
        """A block came to the pool or to a tier below, or left it."""
        if name not in self._cached:
            return  # it was a remnant, or another tier had lost it before
        below, tier = self.tier_of(name), Tier.DEVICE
        if self._pool.find(name) is None:
            self._halved.discard(name)
            if below is None:
                self._gone(name)
                return
            tier = below.tier
        elif name in self._halved and below is None:
            self._halved.discard(name)
            self._thin.add(name)
        if tier is not self._lower.pop(name, Tier.DEVICE):
            self._hooks.cache_changed(Moved(name, tier))
        if tier is not Tier.DEVICE:
            self._lower[name] = tier

    def _gone(self, name: bytes) -> None:
        if self.copies is not None:
            self.copies.forget(name)
            self._states_below.drop(name)
        self._thin.discard(name)
        self._lower.pop(name, None)
        for chunk in self._cached.pop(name).chunks:
            if (blocks := self._blocks_of.get(chunk)) is not None and blocks[1][-1] == name:
                del self._blocks_of[chunk]
        self._hooks.cache_changed(Moved(name, None))
