"""Cached blocks of vLLM that other workers read. For vLLM's scheduler, without vLLM itself.

A pin is a request that is never computed: vLLM's scheduler hands it to the connector, which keeps the blocks
that the request names. The engine process aborts it at once, and the connector holds it until nothing reads
the blocks. It waits for nothing, and ends with a transfer, at the latest at its deadline.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

PINNED_SHARE = 4
"""One in so many blocks may be pinned, as in Baton's engine."""


class Pins:
    """Args:
    pool: vLLM's BlockPool, of the one group of layers.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._pinned: dict[str, Sequence[Any]] = {}  # vLLM's blocks, by request

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._pinned

    def add(self, request_id: str, hashes: Sequence[bytes]) -> list[int]:
        """Keeps the blocks with these hashes, up to the first that is not cached. Returns their numbers."""
        found = list[Any]()
        room = self._pool.num_gpu_blocks // PINNED_SHARE - sum(map(len, self._pinned.values()))
        for name in hashes[: max(0, room)]:
            if (blocks := self._pool.get_cached_block(name, [0])) is None:
                break
            found += blocks
        self._pool.touch(found)
        self._pinned[request_id] = found
        return [block.block_id for block in found]

    def end(self, request_id: str) -> None:
        """Nothing reads the blocks any more. The end of a prefix is evicted before its beginning."""
        if (blocks := self._pinned.pop(request_id, None)) is not None:
            self._pool.free_blocks(reversed(blocks))
