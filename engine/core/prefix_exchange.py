"""Prefixes that travel between the caches of two workers. Pure.

    pinned      cached blocks that another worker reads
    importing   new blocks that get the KV of another worker's cache, beside the cached blocks before them

An import begins with `missing`, which takes no block: the caller may still decide to compute the prompt.

What holds blocks here, and what it waits for:

    importing ──▶ pinned, on the other worker ──▶ a transfer into blocks that are reserved

Both end with the transfer, at the latest at its deadlines. A pin is made at once or not at all. So is an
import. A request that waits for an import has no block. So nothing here waits in a circle.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from content import CHUNK_TOKENS
from engine.api.request import EngineRequest
from engine.core.block_pool import BlockPool
from engine.core.prefix_cache import PrefixCache
from engine.core.prefix_names import PrefixNames

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


@dataclass(frozen=True, slots=True)
class _Import:
    missing: MissingPrefix
    blocks: list[int]  # the table, with its new blocks from `first` on
    first: int


class PrefixExchange:
    """Owns pins and imports, by the ids that their callers draw."""

    def __init__(
        self, pool: BlockPool, cache: PrefixCache, block_size: int, spare_blocks: Callable[[], int]
    ) -> None:
        """`spare_blocks`: how many of the free blocks an import or a pin may take."""
        self._pool = pool
        self._cache = cache
        self._block_size = block_size
        self._spare_blocks = spare_blocks
        self._pins: dict[bytes, list[int]] = {}
        self._imports: dict[bytes, _Import] = {}

    @property
    def empty(self) -> bool:
        return not self._pins and not self._imports

    def pin(self, pin_id: bytes, chunks: Sequence[bytes], first_chunk: int) -> tuple[int, list[int]]:
        """Keeps the cached KV of these chunks in its blocks, until `unpin`.

        `first_chunk`: the position of the first one in its prompt, in chunks. Returns how many chunks are
        pinned, from the first on, and a block table up to their end. Its entries before the first chunk mean
        nothing. If no chunk is pinned, `unpin` must not be called."""
        assert pin_id not in self._pins, "ids are unique"
        most = self._pool.num_blocks // PINNED_SHARE - sum(map(len, self._pins.values()))
        count, blocks = self._cache.table(chunks, first_chunk, most)
        # Otherwise pins could delay the first request of the queue forever.
        if not count or self._pool.unreferenced(blocks) > self._spare_blocks():
            return 0, []  # not the table: `first_chunk` comes from a peer, and may be any number
        self._pool.share(blocks)
        self._pins[pin_id] = blocks
        return count, [*[0] * (first_chunk * CHUNK_TOKENS // self._block_size), *blocks]

    def unpin(self, pin_id: bytes) -> None:
        """Nothing reads the pinned blocks any more."""
        self._pool.release(self._pins.pop(pin_id))

    def missing(self, request: EngineRequest, most: int) -> MissingPrefix | None:
        """What the cache lacks of a prompt that is not added yet, in at most `most` chunks. The prompt's end
        does not count. None: nothing is missing."""
        tokens = [*request.prompt_ids, *request.output_ids]
        usable = (len(tokens) - 1) // self._block_size  # as for a prefill
        names = self._cache.names(request)
        names.extend(tokens, usable * self._block_size)
        hits = self._pool.lookup(names.blocks)
        first_chunk = len(hits) * self._block_size // CHUNK_TOKENS
        chunks = names.chunks[first_chunk : first_chunk + most]
        return MissingPrefix(chunks, first_chunk, names, hits) if chunks else None

    def start_import(self, import_id: bytes, missing: MissingPrefix) -> Sequence[int] | None:
        """Reserves blocks for what is missing. The caller writes KV into them. Returns a block table up to
        the end of the last chunk. None: there is no room."""
        start, stop = missing.first_chunk, missing.first_chunk + len(missing.chunks)
        # A chunk may begin in a cached block, which nothing may write: such a block is fetched again.
        first = start * CHUNK_TOKENS // self._block_size
        last = -(-stop * CHUNK_TOKENS // self._block_size)
        if last - first + self._pool.unreferenced(missing.hits) > self._spare_blocks():
            return None
        self._pool.share(missing.hits)
        blocks = [*missing.hits[:first], *self._pool.allocate(last - first)]
        self._imports[import_id] = _Import(missing, blocks, first)
        return blocks

    def end_import(self, import_id: bytes, num_tokens: int) -> None:
        """Nothing is written into the blocks of an import any more. The cache gets what is complete among its
        first `num_tokens` positions: their KV is verified. 0: nothing."""
        ended = self._imports.pop(import_id)
        names, hits = ended.missing.names, ended.missing.hits
        self._cache.publish(names, ended.blocks, len(hits), num_tokens // self._block_size)
        self._pool.release([*hits, *ended.blocks[ended.first :]])
