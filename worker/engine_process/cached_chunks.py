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

from collections.abc import Iterable, Sequence
from itertools import takewhile

from baton.engine import CacheChange, CachedBlock, Moved
from baton.kv_names import Tier, hint
from baton.worker.messages import CacheChanged


class CachedChunks:
    """Reads the changes of the prefix cache. Collects those of chunks until `take`, which the loop calls once
    per step.

    The tier of a chunk is the fastest one that has a block in which it ends.
    """

    def __init__(self) -> None:
        self._chunks_of: dict[bytes, list[int]] = {}  # cached block → chunks that end in it, at least one
        self._tier_of: dict[bytes, Tier] = {}  # of these blocks
        self._blocks: dict[int, list[Tier]] = {}  # chunk → of each cached block in which it ends, its tier
        self._names: dict[int, bytes] = {}  # of these chunks
        self._changes: dict[int, Tier | None] = {}  # as in `CacheChanged`, and the next
        self._stored: dict[int, bool] = {}

    def read(self, changes: Iterable[CacheChange]) -> None:
        for change in changes:
            match change:
                case CachedBlock():
                    self.add(change.name, change.chunks)
                case Moved():
                    self.moved(change.name, change.tier)

    def add(self, block: bytes, names: Sequence[bytes]) -> None:
        """A block has entered the cache, in which the chunks with these names end."""
        chunks = [hint(name) for name in names]
        if chunks:
            self._chunks_of[block] = chunks
            self._tier_of[block] = Tier.DEVICE
        for chunk, name in zip(chunks, names, strict=True):
            self._names[chunk] = name
            self._change(chunk, None, Tier.DEVICE)

    def moved(self, name: bytes, tier: Tier | None) -> None:
        """A block is in this tier now. None: it has left the cache."""
        if (chunks := self._chunks_of.get(name)) is None:
            return
        before = self._tier_of.pop(name)
        if tier is None:
            del self._chunks_of[name]
        else:
            self._tier_of[name] = tier
        for chunk in chunks:
            self._change(chunk, before, tier)

    def leading(self, names: Iterable[bytes]) -> int:
        """Returns how many of these chunks are cached before the first that is not."""
        return sum(1 for _ in takewhile(lambda name: hint(name) in self._blocks, names))

    def names(self, chunks: Iterable[int]) -> list[bytes]:
        """The names of those of the chunks that are cached."""
        return [self._names[chunk] for chunk in chunks if chunk in self._names]

    def stored(self, name: bytes, is_there: bool) -> None:
        """The shared store has this chunk, or is not known to have it any more."""
        self._stored[hint(name)] = is_there

    def _change(self, chunk: int, before: Tier | None, now: Tier | None) -> None:
        """A block in which the chunk ends moves between two tiers. None: outside the cache."""
        tiers = self._blocks.setdefault(chunk, [])
        fastest = min(tiers, default=None)
        if before is not None:
            tiers.remove(before)
        if now is not None:
            tiers.append(now)
        if (tier := min(tiers, default=None)) != fastest:
            self._changes[chunk] = tier
        if not tiers:
            del self._blocks[chunk]
            del self._names[chunk]

    def take(self) -> CacheChanged | None:
        """Returns the changes since the last call, or None if there are none."""
        if not self._changes and not self._stored:
            return None
        changed = CacheChanged(self._changes, self._stored)
        self._changes, self._stored = {}, {}
        return changed
