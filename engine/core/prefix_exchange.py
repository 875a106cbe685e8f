"""Prefixes that travel between the caches of two workers. Pure.

    brought     blocks that get KV from a tier below, so that another worker can read it
    pinned      cached blocks that another worker reads (`Pin`)
    importing   new blocks that get the KV of another worker's cache, beside the cached blocks before them
                (`Import`)

An import begins with `missing`, which takes no block: the caller may still decide to compute the prompt.

What holds blocks here, and what it waits for:

    importing ──▶ brought, on the other worker ──▶ copies from the memory or the disk of its host
    importing ──▶ pinned, on the other worker ──▶ a transfer into blocks that are reserved

The last two end with the transfer, at the latest at its deadlines. A pin is made at once or not at all. So is
an import. A request that waits for an import has no block. So nothing here waits in a circle.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from baton.engine.api.request import EngineRequest
from baton.engine.core.block_pool import BlockPool, Held
from baton.engine.core.prefix_cache import PrefixCache
from baton.engine.core.prefix_names import PrefixNames
from baton.engine.core.request_memory import RequestMemory
from baton.engine.core.state_copies import CopyLease
from baton.engine.core.window_blocks import WindowSpan
from baton.kv_names import CHUNK_TOKENS

PINNED_SHARE = 4
"""One in so many blocks may be pinned."""


@dataclass(frozen=True, slots=True)
class MissingPrefix:
    """What the cache lacks of a prompt. It holds no block, so it is true only until the pool changes."""

    chunks: Sequence[bytes]
    """The names of consecutive 64-token chunks, at least one."""
    first_chunk: int
    """Position of the first one in the prompt, in chunks."""
    names: PrefixNames
    hits: Sequence[int]
    """The cached blocks that the prompt begins with."""
    computed_from: int
    """The position from which the prompt would be computed now."""


@dataclass(frozen=True, slots=True, eq=False)
class Pin:
    """Cached KV that another worker or a store reads. It stays in its blocks until `end`."""

    num_chunks: int
    held: Held
    """A block table up to the end of the chunks, with the states after them if these are read."""
    exchange: "PrefixExchange"
    remnant: bytes | None = None
    """The name of the chunk, if it is in a block that is not full."""

    @property
    def table(self) -> Sequence[int]:
        return self.held.table

    @property
    def state_slot(self) -> int:
        """That of the states after the chunks. 0: none are read."""
        return 0 if self.held.copy is None else self.held.copy.slot

    def end(self, *, copied: bool | None = None) -> None:
        """Nothing reads the blocks any more. `copied`: as in `BlockPool.release`."""
        remnant = None if self.remnant is None else (self.held.table[-1], self.remnant)
        self.exchange.ended(self, remnant, copied=copied)


@dataclass(frozen=True, slots=True, eq=False)
class Import:
    """New blocks, and a slot if the model has states, for KV that comes from another worker or a store."""

    missing: MissingPrefix
    """What comes."""
    held: Held
    """New blocks, up to the end of the last chunk, beside the cached ones."""
    state_slot: int | None
    """For the states after the last chunk. None: the model has none."""
    exchange: "PrefixExchange"

    @property
    def table(self) -> Sequence[int]:
        return self.held.table

    def end(self, num_tokens: int, *, all_positions: bool = False) -> None:
        """Nothing is written into the blocks any more. The cache gets what is complete among the first
        `num_tokens` positions: their KV is verified. 0: nothing. The pool keeps a block that is not full as a
        remnant. `all_positions`: arrays with windows have those, too, that no later token reads."""
        self.exchange.imported(self, num_tokens, all_positions=all_positions)


class PrefixExchange:
    """Makes pins and imports. Each ends once."""

    def __init__(
        self,
        pool: BlockPool,
        cache: PrefixCache,
        memory: RequestMemory,
        may_take: Callable[[int, int, Collection[int]], bool],
    ) -> None:
        """`may_take`: whether an import or a pin may take so many free blocks, so many window blocks, and
        these cached blocks. The free blocks include those of the cached ones that nothing holds."""
        self._block_size = pool.block_size
        self._pool = pool
        self.cache = cache
        self._memory = memory
        self._may_take = may_take
        self._windows = pool.windows
        self._open = set[Pin | Import]()
        self._brought = 0

    @property
    def empty(self) -> bool:
        return not self._open and not self._brought

    def ended(
        self, ended: Pin | Import, remnant: tuple[int, bytes] | None, *, copied: bool | None = None
    ) -> None:
        """A pin or an import has ended, which happens once. The rest is as in `BlockPool.release`."""
        self._open.remove(ended)
        first_whole = self.cache.thin_before(len(ended.table) * self._block_size)
        self._pool.release(ended.held, remnant, copied=copied, first_copied=first_whole)

    def imported(self, ended: Import, num_tokens: int, *, all_positions: bool) -> None:
        """As `Import.end`."""
        names, (last, remainder) = ended.missing.names, divmod(num_tokens, self._block_size)
        thin = 0 if all_positions else self.cache.thin_before(num_tokens)
        self.cache.publish(names, ended.table, ended.held.first, last, thin=[range(thin)])
        if (slot := ended.state_slot) is not None:
            assert self.cache.copies is not None, "it gave the slot"
            if num_tokens and not remainder:
                self.cache.publish_states(names, num_tokens, slot)
            else:
                self.cache.copies.release(slot)
        has_remnant = slot is None and remainder and last >= thin
        remnant = (ended.table[last], names.chunks[num_tokens // CHUNK_TOKENS - 1]) if has_remnant else None
        self.ended(ended, remnant)

    def bring(self, chunks: Sequence[bytes], first_chunk: int, then: Callable[[], None]) -> bool:
        """Copies what the tiers below have of these chunks to the pool, as far as `pin` may take it, and then
        calls `then`. If the model has states, also those at the end of what it copies. False: they have
        nothing that the pool lacks, or there is no room."""
        copies = self.cache.copies
        if copies is not None:
            chunks = self._with_states(chunks, first_chunk)
        names = self.cache.blocks_of(chunks, first_chunk)[: self._may_pin]
        cached = [block for name in names for block in self._pool.lookup([name])]
        wanted = [name for name in names if not self._pool.lookup([name])]
        lacks_states = copies is not None and bool(chunks) and chunks[-1] not in copies
        if not (wanted or lacks_states) or not self._may_import(len(wanted), cached):
            return False
        if (taken := self._take(len(wanted), cached, states=lacks_states)) is None:
            return False
        held, slot = taken

        def ended(_: bool) -> None:
            self._brought -= 1
            self._pool.release(held)
            then()

        self._brought += 1
        states = None if slot is None else (chunks[-1], slot)
        self.cache.load(list(zip(wanted, held.table, strict=True)), ended, states)
        return True

    def _take(
        self, count: int, hits: Sequence[int], *, states: bool, before: int = 0
    ) -> tuple[Held, int | None] | None:
        """So many new blocks, beside these cached ones, with what they read in layers with windows, and a
        slot for `states`. None: no slot."""
        held, slot = self._pool.hold(before=before, beside=hits), None
        read, windows = 0, self._windows
        if windows is not None:  # for all of the new blocks, or for the last ones alone if there is no room
            read = count if self._may_take(count, count, ()) else windows.need(count)
            self._memory.provide(count, windows=read)
            windows.promise(held.windows, read)
        self._pool.extend(held, count)
        # After the blocks: copies may take the memory of those that nothing holds.
        if states and (of_requests := self._memory.states) is not None:
            slot = of_requests.allocate_copy()
            if slot is None:
                self._pool.release(held)
                return None
        if windows is not None:
            windows.begin(held.windows, held.table, len(held.table) - read, len(held.table))
        return held, slot

    def _with_states(self, chunks: Sequence[bytes], first_chunk: int) -> Sequence[bytes]:
        """The longest beginning that may be pinned of which the tiers have all blocks, and the states at its
        end. Empty: there is none."""
        first = first_chunk * CHUNK_TOKENS // self._block_size
        for count in range(len(chunks), 0, -1):
            if self.cache.usable(chunks[count - 1 : count]):
                last = -(-(first_chunk + count) * CHUNK_TOKENS // self._block_size)
                if len(self.cache.blocks_of(chunks[:count], first_chunk)) == last - first <= self._may_pin:
                    return chunks[:count]
        return ()

    @property
    def _may_pin(self) -> int:
        return self._pool.num_blocks // PINNED_SHARE - sum(
            len(each.held.blocks) for each in self._open if isinstance(each, Pin)
        )

    def pin(
        self,
        chunks: Sequence[bytes],
        first_chunk: int,
        states: CopyLease | None = None,
        *,
        is_prefix: bool = False,
    ) -> Pin | None:
        """Keeps the cached KV of these chunks in its blocks, from the first one on. None: no chunk is cached,
        or there is no room beside the queue.

        `first_chunk`: the position of the first one in its prompt, in chunks. `states` end with the pin.
        `is_prefix`: of layers with windows, only what the token behind the chunks reads is kept."""
        count, blocks = self.cache.table(chunks, first_chunk, self._may_pin)
        # Otherwise pins could delay the first request of the queue forever.
        if not count or not self._may_take(self._pool.unreferenced(blocks), 0, blocks):
            return None  # without the table: `first_chunk` comes from a peer, and may be any number
        held = self._pool.hold(hits=blocks, before=self._before(first_chunk))
        first = held.first
        if is_prefix and self._windows is not None:
            first = max(first, self._windows.first((first_chunk + count) * CHUNK_TOKENS))
        if not self._keep_windows(held.windows, held.table, first):
            self._pool.release(held)
            return None
        held.copy = states
        pin = Pin(count, held, self)
        self._open.add(pin)
        return pin

    def _keep_windows(self, span: WindowSpan, table: Sequence[int], first: int) -> bool:
        """Keeps the window blocks of these blocks, behind the last one that has none. False: no room."""
        if (windows := self._windows) is None:
            return True
        first = 1 + max((i for i in range(first, len(table)) if table[i] not in windows), default=first - 1)
        if not self._may_take(0, len(table) - first, ()):
            return False
        windows.begin(span, table, first, len(table))
        self._memory.provide(0, windows=len(table) - first)
        windows.promise(span, len(table) - first)
        return True

    def _may_import(self, count: int, hits: Sequence[int]) -> bool:
        """Whether there is room for so many new blocks behind these cached ones, and for the window at their
        end."""
        windows = 0 if self._windows is None else self._windows.need(count)
        return self._may_take(count + self._pool.unreferenced(hits), windows, hits)

    def pin_prefix(self, chunks: Sequence[bytes], first_chunk: int) -> Pin | None:
        """As `pin`, for another worker. No window reaches from the end to a thin block. If the model has
        states, the device has those after the last chunk, and they are pinned, too."""
        lease, copies = None, self.cache.copies
        chunks = chunks[: self.cache.table(chunks, first_chunk, self._may_pin)[0]]
        ends = self.cache.sendable(chunks, first_chunk)
        if copies is not None:
            ends = [end for end in ends if chunks[end - 1] in copies]
        if not ends:
            return None
        chunks = chunks[: ends[-1]]
        if copies is not None and (lease := copies.lend(chunks[-1])) is None:
            return None
        pin = self.pin(chunks, first_chunk, lease, is_prefix=True)
        if pin is None and lease is not None:
            lease.end()
        return pin

    def pin_remnant(self, chunk: bytes, position: int) -> Pin | None:
        """Keeps this chunk, if it is the only one in a block that is not full. `position`: in its prompt, in
        chunks. None: there is none, or no room beside the queue."""
        if not self._pool.has_remnant(chunk) or not self._may_take(1, 1, ()):
            return None
        if self._windows is not None:
            self._memory.provide(0, windows=1)
            if not self._pool.has_remnant(chunk):  # its memory became that of window blocks
                return None
        held = self._pool.hold(before=self._before(position))
        held.table.append(self._pool.adopt(chunk))
        if self._windows is not None:
            self._windows.promise(held.windows, 1)
            self._windows.begin(held.windows, held.table, held.first, len(held.table))
        pin = Pin(1, held, self, chunk)
        self._open.add(pin)
        return pin

    def _before(self, chunk: int) -> int:
        """The entries of a block table before this chunk of a prompt."""
        return chunk * CHUNK_TOKENS // self._block_size

    def has(self, name: bytes, chunk: int) -> bool:
        """Whether the pool has this chunk, at this position in its prompt, whether it may be kept or not."""
        return self._pool.has_remnant(name) or bool(self.cache.table([name], chunk, self._pool.num_blocks)[0])

    def missing(self, request: EngineRequest, most: int, *, remnant: bool = False) -> MissingPrefix | None:
        """What all tiers lack of a prompt that is not added yet, in at most `most` chunks.
        The prompt's end does not count. None: computing begins behind all of them.

        `remnant`: behind full blocks that are missing, the full chunks of the last block count, too."""
        tokens = [*request.prompt_ids, *request.output_ids]
        usable = (len(tokens) - 1) // self._block_size  # as for a prefill
        names = self.cache.names(request)
        names.extend(tokens, usable * self._block_size)
        known = self.cache.usable(names.blocks[: self.cache.known(names.blocks)])
        hits = self._pool.lookup(names.blocks[:known])
        first_chunk = known * self._block_size // CHUNK_TOKENS
        end = usable * self._block_size // CHUNK_TOKENS
        last = (len(tokens) - 1) // CHUNK_TOKENS
        if remnant and last and known < usable and self.cache.copies is None:
            end = last
            names.of_chunk(tokens, end * CHUNK_TOKENS)
        stop = min(first_chunk + most, end)
        chunks = names.chunks[first_chunk:stop]
        computed_from, _ = self.cache.remnant(names, tokens, known, len(tokens) - 1)
        if stop * CHUNK_TOKENS <= computed_from:
            return None
        return MissingPrefix(chunks, first_chunk, names, hits, computed_from)

    def start_import(self, missing: MissingPrefix) -> Import | None:
        """Reserves blocks for what is missing, and a slot if the model has states. The caller writes KV into
        them. None: there is no room."""
        start, stop = missing.first_chunk, missing.first_chunk + len(missing.chunks)
        # A chunk may begin with cached blocks, which nothing may write: such blocks are fetched again, as a
        # whole, since a chunk begins where a block does, or in a block that the cache lacks.
        first = start * CHUNK_TOKENS // self._block_size
        last = -(-stop * CHUNK_TOKENS // self._block_size)
        if not self._may_import(last - first, missing.hits):
            return None
        states = self.cache.copies is not None
        if (taken := self._take(last - first, missing.hits, states=states, before=first)) is None:
            return None
        started = Import(missing, *taken, self)
        self._open.add(started)
        return started
