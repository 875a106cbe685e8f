"""What the engine's prefix cache has, in the words that routers use: 64-token chunks instead of blocks.

A chunk counts as cached while the block that holds its last token is. Blocks before it are then cached as
well: the cache gives up the end of a prefix before its beginning. (Except where two requests computed the
same prefix at the same time, of which one published the beginning and the other the end: until the end is
given up too, routers believe in more than there is.) So with blocks of b tokens, a prompt of which routers
see c chunks has

    b divides 64:     from 64c to 64c + 64 - b tokens cached
    64 divides b:     64c, rounded down to a multiple of b: of a block that does not fit a prompt to its end,
    the
                      prompt may share chunks

and the engine uses full blocks of that before the last position.
"""

from collections.abc import Sequence

from engine import EngineRequest
from rpc import CHUNK_TOKENS, chunk_hashes
from worker.messages import CacheChanged


class CachedChunks:
    """The engine's `CacheObserver`. Gathers changes until `take`, once per step."""

    def __init__(self) -> None:
        self.block_size = 0  # known once the engine is there
        self._chunks_of: dict[bytes, list[int]] = {}  # cached block → chunks that end in it; no empty ones
        self._blocks: dict[int, int] = {}  # chunk → cached blocks in which it ends, differing
        self._changes: dict[int, bool] = {}  # chunk → whether it is cached now

    def cached(
        self, request: EngineRequest, token_ids: Sequence[int], blocks: Sequence[tuple[int, bytes]]
    ) -> None:
        ends = [(index * self.block_size, (index + 1) * self.block_size) for index, _ in blocks]
        last = ends[-1][1] // CHUNK_TOKENS * CHUNK_TOKENS
        if last <= ends[0][0]:
            return
        hashes = chunk_hashes(token_ids[:last], salt=request.cache_salt)
        for (start, stop), (_, block_hash) in zip(ends, blocks, strict=True):
            chunks = hashes[start // CHUNK_TOKENS : stop // CHUNK_TOKENS]
            if chunks:
                self._chunks_of[block_hash] = chunks
            for chunk in chunks:
                self._blocks[chunk] = self._blocks.get(chunk, 0) + 1
                if self._blocks[chunk] == 1:
                    self._changes[chunk] = True

    def evicted(self, block_hash: bytes) -> None:
        for chunk in self._chunks_of.pop(block_hash, ()):
            self._blocks[chunk] -= 1
            if not self._blocks[chunk]:
                del self._blocks[chunk]
                self._changes[chunk] = False

    def take(self) -> CacheChanged | None:
        """What changed since the last time; None: nothing."""
        if not self._changes:
            return None
        changes, self._changes = self._changes, {}
        return CacheChanged(
            [chunk for chunk, cached in changes.items() if cached],
            [chunk for chunk, cached in changes.items() if not cached],
        )
