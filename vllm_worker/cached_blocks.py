"""Converts vLLM's events about its prefix cache to the 64-token chunks that routers use. Without vLLM itself.

vLLM publishes by ZeroMQ which blocks enter its cache, with their tokens, and which leave it. It names a block
by a hash of its own, which is the same in all groups of layers. Blocks of one group count, which has all
tokens. vLLM may not have the states at the end of such a block, nor windows: routers may overestimate then.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from baton.kv_names import CHUNK_TOKENS, ImageSpan, extend_names, salted
from baton.worker.engine_process.cached_chunks import CachedChunks
from baton.worker.messages import CacheChanged


def identifier(image: ImageSpan) -> str:
    """By what vLLM knows an image. vLLM tells where it begins, and not how long it is."""
    return f"{image.name.hex()}-{image.stop - image.start}"


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
        # By block: the name of all full chunks up to its end, the tokens after these, and their images.
        self._ends: dict[bytes, tuple[bytes, list[int], list[ImageSpan]]] = {}

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
        if len(tokens) != len(event["block_hashes"]) * size:
            return  # some blocks have no hash, as those behind a window, and it is not said which
        keys = event.get("extra_keys") or [None] * len(event["block_hashes"])  # by block
        if parent is None:
            name, tail, images = salted(self._root, bytes.fromhex(_salt(keys[0] or ()))), list[int](), []
        elif (end := self._ends.get(_name(parent))) is not None:
            name, tail, images = end
        else:
            return  # it was evicted since then
        for i, (block, keys_of) in enumerate(zip(map(_name, event["block_hashes"]), keys, strict=True)):
            # Positions of images count from the first token of `tail`. One may be in several blocks.
            images = [*dict.fromkeys([*images, *_images(keys_of or (), len(tail))])]
            tail, names = [*tail, *tokens[i * size : (i + 1) * size]], []
            extend_names(names, tail, len(tail), name, images)
            named = len(names) * CHUNK_TOKENS
            tail, name = tail[named:], (names or [name])[-1]
            images = [ImageSpan(x.start - named, x.stop - named, x.name) for x in images if x.stop > named]
            if block not in self._ends:  # else two requests have computed it
                self._ends[block] = name, tail, images
                self.chunks.add(block, names)

    def _removed(self, blocks: Iterable[bytes]) -> None:
        for block in blocks:
            if self._ends.pop(block, None) is not None:
                self.chunks.moved(block, None)


def _name(block_hash: int | bytes) -> bytes:
    """vLLM may publish 64 bits of its hash as a number."""
    return block_hash if isinstance(block_hash, bytes) else block_hash.to_bytes(8)


def _salt(keys: Sequence[Any]) -> str:
    """That of a request, which is the last of the keys of its first block that names no image."""
    return next((key for key in reversed(keys) if isinstance(key, str)), "")


def _images(keys: Sequence[Any], before: int) -> Iterator[ImageSpan]:
    """Those of a block: each has its identifier, and its first position, counted from that of the block. An
    adapter may stand before the identifier. `before`: tokens before the block."""
    for key in keys:
        if not isinstance(key, str):
            said, offset = key
            name, _, tokens = said.rpartition(":")[2].partition("-")
            yield ImageSpan(before + offset, before + offset + int(tokens), bytes.fromhex(name))
