"""Converts changes of the engine's prefix cache from blocks to the 64-token chunks that routers use.

A chunk counts as cached while the block that holds its last token is cached. The blocks before that one are
then cached, too, because the cache evicts the end of a prefix before its beginning. There is one exception.
Two requests may compute the same prefix at the same time, and one publishes its beginning and the other its
end. If the beginning is evicted first, routers overestimate the prefix until its end is evicted, too.

Let b be the block size and c the number of leading chunks of a prompt that routers see as cached:

- If b divides 64, then 64c to 64c + 64 - b tokens of the prompt are cached.
- If 64 divides b, then 64c tokens, rounded down to a multiple of b, are cached. The prompt may share only the
  first chunks of a cached block.

The engine uses the full blocks of these tokens that end before the last position of the prompt.
"""

from collections.abc import Iterable

from content import hint
from engine import CachedBlock
from worker.messages import CacheChanged


class CachedChunks:
    """The engine's `CacheObserver`. Collects changes until `take`, which the loop calls once per step."""

    def __init__(self) -> None:
        self._chunks_of: dict[bytes, list[int]] = {}  # cached block → chunks that end in it, at least one
        self._blocks: dict[int, int] = {}  # chunk → number of cached blocks in which it ends
        self._changes: dict[int, bool] = {}  # chunk → whether it is cached now

    def cached(self, blocks: Iterable[CachedBlock]) -> None:
        for block in blocks:
            chunks = [hint(name) for name in block.chunks]
            if chunks:
                self._chunks_of[block.name] = chunks
            for chunk in chunks:
                self._blocks[chunk] = self._blocks.get(chunk, 0) + 1
                if self._blocks[chunk] == 1:
                    self._changes[chunk] = True

    def evicted(self, name: bytes) -> None:
        for chunk in self._chunks_of.pop(name, ()):
            self._blocks[chunk] -= 1
            if not self._blocks[chunk]:
                del self._blocks[chunk]
                self._changes[chunk] = False

    def take(self) -> CacheChanged | None:
        """Returns the changes since the last call, or None if there are none."""
        if not self._changes:
            return None
        changes, self._changes = self._changes, {}
        return CacheChanged(
            [chunk for chunk, cached in changes.items() if cached],
            [chunk for chunk, cached in changes.items() if not cached],
        )
