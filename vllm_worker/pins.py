"""Cached blocks of vLLM that other workers read. For vLLM's scheduler, without vLLM itself.

A pin is a request that is never computed: vLLM's scheduler hands it to the connector, which keeps the blocks
that the request names. The engine process aborts it at once, and the connector holds it until nothing reads
the blocks. It waits for nothing, and ends with a transfer, at the latest at its deadline.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from baton.vllm_worker.metadata import NULL_BLOCK, BlockTable

PINNED_SHARE = 4
"""One in so many blocks may be pinned, as in Baton's engine."""


class Pins:
    """Keeps cached blocks of vLLM until nothing reads them.

    Args:
        pool: vLLM's BlockPool.
        tables: of all groups of layers. Their blocks are equally long.
    """

    def __init__(self, pool: Any, tables: Sequence[BlockTable]) -> None:
        self._pool = pool
        self._tables = tables
        self._complete = [group for group, table in enumerate(tables) if table.complete]
        self._pinned: dict[str, Sequence[Any]] = {}  # vLLM's blocks, by request

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._pinned

    def add(self, request_id: str, hashes: Sequence[bytes], first: int) -> list[list[int]]:
        """Keeps the blocks with these hashes, up to the first that is not cached. Of windows and states it
        keeps what the token behind all of them reads, and nothing if some of that is not cached.

        Returns their numbers, of each group as many. `first`: the number of the first block in its prompt."""
        found = self._found(hashes, first)
        held = self._pinned[request_id] = [block for of_group in found for block in of_group if block]
        self._pool.touch(held)
        return [[block.block_id if block else NULL_BLOCK for block in of_group] for of_group in found]

    def _found(self, hashes: Sequence[bytes], first: int) -> list[list[Any]]:
        """None: a block that is not read."""
        nothing = [list[Any]() for _ in self._tables]
        found, groups = [*map(list, nothing)], self._complete
        room = self._pool.num_gpu_blocks // PINNED_SHARE - sum(map(len, self._pinned.values()))
        for name in hashes[: max(0, room // len(self._tables))]:
            if (blocks := self._pool.get_cached_block(name, groups)) is None:
                break
            for group, block in zip(groups, blocks, strict=True):
                found[group].append(block)
        for group, table in enumerate(self._tables):
            if table.complete:
                continue
            unread = max(0, table.first_read((first + len(hashes)) * table.block_size) - first)
            read = [self._pool.get_cached_block(name, [group]) for name in hashes[unread:]]
            if len(found[groups[0]]) < len(hashes) or None in read:
                return nothing
            found[group] = [*[None] * unread, *(block for [block] in read)]
        return found

    def end(self, request_id: str) -> None:
        """Nothing reads the blocks any more. The end of a prefix is evicted before its beginning."""
        if (blocks := self._pinned.pop(request_id, None)) is not None:
            self._pool.free_blocks(reversed(blocks))
