"""Converts vLLM's events about its prefix cache to the 64-token chunks that routers use. Without vLLM itself.

vLLM publishes by ZeroMQ which blocks enter its cache, with their tokens, and which leave it. It names a block
by a hash of its own, which is the same in all groups of layers. Blocks of one group count, which has all
tokens. vLLM may not have the states at the end of such a block, nor windows: routers may overestimate then.
"""

from collections.abc import Iterable
from typing import Any

import msgspec

from baton.content import CHUNK_TOKENS, extend_names, salted
from baton.worker.engine_process.cached_chunks import CachedChunks
from baton.worker.messages import CacheChanged


class CachedBlocks:
    """
    Attributes:
        chunks: that vLLM has.
    """

    def __init__(self, content_root: bytes, group: int = 0) -> None:
        """`group`: the number of that one."""
        self._root = content_root
        self._group = group
        self.chunks = CachedChunks()
        # By block: the name of all full chunks up to its end, and the tokens after these.
        self._ends: dict[bytes, tuple[bytes, list[int]]] = {}

    def changed(self, batch: bytes) -> CacheChanged | None:
        """`batch`: what vLLM has published after a step. Returns None if no chunk came or went."""
        _, events, *_ = msgspec.msgpack.decode(batch)
        for event in events:
            if event.get("group_idx") not in (None, self._group):
                continue
            match event["type"]:
                case "BlockStored":
                    self._stored(event)
                case "BlockRemoved":
                    self._removed(map(_name, event["block_hashes"]))
                case "AllBlocksCleared":
                    self._removed(list(self._ends))
        return self.chunks.take()

    def _stored(self, event: dict[str, Any]) -> None:
        parent, tokens, size = event["parent_block_hash"], event["token_ids"], event["block_size"]
        if parent is None:  # extra keys, by block, name the salt of a request last in its first block
            salt = [*((event.get("extra_keys") or [None])[0] or ("",))][-1]
            name, tail = salted(self._root, bytes.fromhex(salt)), []
        elif (end := self._ends.get(_name(parent))) is not None:
            name, tail = end
        else:
            return  # it was evicted since then
        # Blocks behind a window are null, and have no hash. Their tokens are published.
        null = len(tokens) // size - len(event["block_hashes"])
        for i, block in enumerate([None] * null + [*map(_name, event["block_hashes"])]):
            tail, names = [*tail, *tokens[i * size : (i + 1) * size]], []
            extend_names(names, tail, len(tail), name)
            tail, name = tail[len(names) * CHUNK_TOKENS :], (names or [name])[-1]
            if block is not None and block not in self._ends:  # else two requests have computed it
                self._ends[block] = name, tail
                self.chunks.add(block, names)

    def _removed(self, blocks: Iterable[bytes]) -> None:
        for block in blocks:
            if self._ends.pop(block, None) is not None:
                self.chunks.evicted(block)


def _name(block_hash: int | bytes) -> bytes:
    """vLLM may publish 64 bits of its hash as a number."""
    return block_hash if isinstance(block_hash, bytes) else block_hash.to_bytes(8)
