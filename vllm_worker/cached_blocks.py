"""Converts vLLM's events about its prefix cache to the 64-token chunks that routers use. Without vLLM itself.

vLLM publishes by ZeroMQ which blocks enter its cache, with their tokens, and which leave it. It names a block
by a hash of its own, which is the same in all groups of layers. Blocks of one group have all tokens. They
count as far as vLLM can go on behind one of them, or behind one that follows: there it has the windows and
states that the next token reads. vLLM says no parents of these, so a window that lost its beginning counts.
If groups have blocks of other lengths, routers may overestimate.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, takewhile
from operator import itemgetter
from typing import Any, NamedTuple

import msgspec

from baton.kv_names import CHUNK_TOKENS, ImageSpan, extend_names, salted
from baton.vllm_worker.metadata import BlockTable
from baton.worker.engine_process.cached_chunks import CachedChunks
from baton.worker.messages import CacheChanged


def identifier(image: ImageSpan) -> str:
    """By what vLLM knows an image. vLLM tells where it begins, and not how long it is."""
    return f"{image.name.hex()}-{image.stop - image.start}"


class _End(NamedTuple):
    """A block, and what follows at its end."""

    name: bytes
    """Of all full chunks up to its end."""
    tail: list[int]
    """Tokens after these."""
    images: list[ImageSpan]
    """Of the tail."""
    begin: int
    """The position of its first token, and that behind its last."""
    stop: int
    parent: bytes | None
    """The block before it."""
    chunks: list[bytes]
    """Those that end in it."""


class CachedBlocks:
    """
    Attributes:
        chunks: that vLLM has.
    """

    def __init__(self, content_root: bytes, group: int = 0, tables: Sequence[BlockTable] = ()) -> None:
        """`group`: the number of that one. `tables`: of all groups, if their blocks are equally long. vLLM
        must publish the hashes of blocks in full."""
        self._root = content_root
        self._group = group
        self._bounded = {number: table for number, table in enumerate(tables) if not table.complete}
        # Of each of these groups, by cached block: copies, and blocks in a row that end with it.
        self._copies = {number: Counter[bytes]() for number in self._bounded}
        self._rows = {number: dict[bytes, int]() for number in self._bounded}
        self._usable = set[bytes]()  # blocks behind which vLLM can go on
        self._support = Counter[bytes]()  # by block: whether it is usable, and children that count
        self.chunks = CachedChunks()
        self._ends: dict[bytes, _End] = {}  # by block
        self._more = Counter[bytes]()  # by block: copies beside the first, of requests that computed it, too
        self._block_of: dict[bytes, bytes] = {}  # by chunk: the block in which it ends

    def changed(self, batch: bytes) -> CacheChanged | None:
        """`batch`: what vLLM has published after a step. Returns None if no chunk came or went."""
        _, events, *_ = msgspec.msgpack.decode(batch)
        clears = accumulate(event["type"] == "AllBlocksCleared" for event in events)
        bounded = [event.get("group_idx") in self._bounded for event in events]
        for _, is_bounded, event in sorted(zip(clears, bounded, events, strict=True), key=itemgetter(0, 1)):
            group = event.get("group_idx")
            if is_bounded:
                self._changed_in(group, event)
                continue
            if group not in (None, self._group):
                continue
            match event["type"]:
                case "BlockStored":
                    self._stored(event)
                case "BlockRemoved":
                    self._removed(event["block_hashes"])
                case "AllBlocksCleared":
                    self._more.clear()
                    self._removed(list(self._ends))
                    for number in self._bounded:
                        self._copies[number].clear()
                        self._rows[number].clear()
        return self.chunks.take()

    def _changed_in(self, group: int, event: dict[str, Any]) -> None:
        """Blocks with windows or states, after those with all tokens."""
        copies, rows = self._copies[group], self._rows[group]
        for block in event["block_hashes"]:
            if event["type"] == "BlockStored":
                copies[block] += 1
                if (end := self._ends.get(block)) is not None:
                    rows[block] = 1 + (rows.get(end.parent, 0) if end.parent is not None else 0)
            elif (left := copies.pop(block, 0) - 1) > 0:
                copies[block] = left
            else:
                rows.pop(block, None)
            self._look_at(block)

    def _look_at(self, block: bytes) -> None:
        """Whether vLLM can go on behind a block may have changed."""
        end = self._ends.get(block)
        usable = end is not None and all(
            self._rows[group].get(block, 0) >= end.stop // table.block_size - table.first_read(end.stop)
            for group, table in self._bounded.items()
        )
        if usable != (block in self._usable):
            (self._usable.add if usable else self._usable.discard)(block)
            self._count(block, 1 if usable else -1)

    def _count(self, block: bytes | None, change: int) -> None:
        """A block counts if it is usable, or if a child counts."""
        while block is not None:
            before = self._support[block]
            self._support[block] = after = before + change
            if not after:
                del self._support[block]
            if (end := self._ends.get(block)) is None or (before > 0) == (after > 0):
                return
            self._shown(block, end, is_there=change > 0)
            block = end.parent

    def _shown(self, block: bytes, end: _End, *, is_there: bool) -> None:
        if is_there:
            self._block_of |= dict.fromkeys(end.chunks, block)
            self.chunks.add(block, end.chunks)
            return
        for chunk in end.chunks:
            if self._block_of.get(chunk) == block:
                del self._block_of[chunk]
        self.chunks.moved(block, None)

    def _stored(self, event: dict[str, Any]) -> None:
        parent, tokens, size = event["parent_block_hash"], event["token_ids"], event["block_size"]
        if len(tokens) != len(event["block_hashes"]) * size:
            return  # some blocks have no hash, as those behind a window, and it is not said which
        keys = event.get("extra_keys") or [None] * len(event["block_hashes"])  # by block
        if parent is None:
            last, stop = None, 0
            name, tail, images = salted(self._root, bytes.fromhex(_salt(keys[0] or ()))), list[int](), []
        elif (end := self._ends.get(last := parent)) is not None:
            name, tail, images, stop = end.name, end.tail, end.images, end.stop
        else:
            return  # it was evicted since then
        for i, (block, keys_of) in enumerate(zip(event["block_hashes"], keys, strict=True)):
            # Positions of images count from the first token of `tail`. One may be in several blocks.
            images = [*dict.fromkeys([*images, *_images(keys_of or (), len(tail))])]
            tail, names = [*tail, *tokens[i * size : (i + 1) * size]], []
            extend_names(names, tail, len(tail), name, images)
            named = len(names) * CHUNK_TOKENS
            tail, name = tail[named:], (names or [name])[-1]
            images = [ImageSpan(x.start - named, x.stop - named, x.name) for x in images if x.stop > named]
            begin, stop = stop, stop + size
            if block in self._ends:
                self._more[block] += 1
            else:
                end = self._ends[block] = _End(name, tail, images, begin, stop, last, names)
                if self._support[block] > 0:  # children outlived an earlier copy
                    self._shown(block, end, is_there=True)
                    self._count(last, 1)
                self._look_at(block)
            last = block

    def _removed(self, blocks: Iterable[bytes]) -> None:
        for block in blocks:
            if copies := self._more.pop(block, 0):
                if copies > 1:
                    self._more[block] = copies - 1
            elif (end := self._ends.pop(block, None)) is not None:
                counted = self._support[block] > 0
                self._look_at(block)
                if counted:
                    self._shown(block, end, is_there=False)
                    self._count(end.parent, -1)

    def blocks_of(self, chunks: Sequence[bytes], first_chunk: int) -> list[bytes]:
        """Returns vLLM's names of the blocks with as many of these chunks as are cached, from the one with
        the first position of the first chunk on. Empty: none is cached. `first_chunk`: as in
        `ContentWanted`."""
        cached = [*takewhile(self._block_of.__contains__, chunks)]
        start, stop = first_chunk * CHUNK_TOKENS, (first_chunk + len(cached)) * CHUNK_TOKENS
        block, found = self._block_of[cached[-1]] if cached else None, list[bytes]()
        while block is not None and (end := self._ends.get(block)) is not None:
            if not found and not end.begin < stop <= end.stop:
                break  # the peer is wrong about the position
            found.append(block)
            if end.begin <= start:
                return found[::-1]
            block = end.parent
        return []


def with_numbers(batch: bytes) -> bytes:
    """Returns what vLLM publishes by default: of each hash, 64 bits as a number."""
    time, events, *rest = msgspec.msgpack.decode(batch)
    for event in events:
        if "block_hashes" in event:
            event["block_hashes"] = [*map(_number, event["block_hashes"])]
        if event.get("parent_block_hash") is not None:
            event["parent_block_hash"] = _number(event["parent_block_hash"])
    return msgspec.msgpack.encode([time, events, *rest])


def _number(block_hash: bytes) -> int:
    return int.from_bytes(block_hash[-8:])


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
