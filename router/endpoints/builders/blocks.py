"""What the builders of /v1/responses and /v1/messages share: an output is a series of blocks.

A block is one piece of reasoning, one piece of content, or one tool call. It opens, grows, and closes before
the next one opens.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from baton.router.active_request import ActiveRequest
from baton.router.endpoints.builders.base import OutputParser, Part, ResponseBuilder, encode
from baton.router.generation.output import Delta
from baton.router.text.tokenizer import ModelTokenizer

Event = dict[str, Any]


@dataclass
class Block:
    """A block of the output. `index` is its place."""

    head: Part
    """Its first part."""
    index: int
    id: str = field(default_factory=lambda: os.urandom(16).hex())
    texts: list[str] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    """Entries of its tokens."""

    @property
    def text(self) -> str:
        return "".join(self.texts)


class BlocksBuilder(ResponseBuilder):
    """Follows the blocks of a request's one choice. A subclass turns each change into typed events."""

    def __init__(self, request: ActiveRequest, tokenizer: ModelTokenizer) -> None:
        self._request = request
        self._parser = OutputParser(request, tokenizer)
        self._blocks: list[Block] = []
        self._open: Block | None = None
        self._last: Delta | None = None

    def add(self, index: int, delta: Delta) -> None:
        for _ in self._changes(delta):
            pass

    def events(self, index: int, delta: Delta) -> bytes:
        return written(self._changes(delta))

    def _changes(self, delta: Delta) -> Iterator[Event]:
        self._last = delta
        if delta.first:
            yield from self._begin()
        parts = self._parser.push(delta.text, last=delta.finish_reason is not None)
        self._see(delta, parts)
        for part in parts:
            if self._open is None or (part.kind, part.call) != (self._open.head.kind, self._open.head.call):
                yield from self._end_block(cut=False)
                self._open = Block(part, len(self._blocks))
                self._blocks.append(self._open)
                yield from self._opened(self._open)
            self._open.texts.append(part.text)
            yield from self._grown(self._open, part.text)
        if delta.finish_reason is not None:
            yield from self._end_block(cut=delta.finish_reason == "length")

    def _end_block(self, *, cut: bool) -> Iterator[Event]:
        if self._open is not None:
            yield from self._closed(self._open, cut=cut)
            self._open = None

    def _begin(self) -> Iterator[Event]:
        """Yields the events before the first block."""
        raise NotImplementedError

    def _see(self, delta: Delta, parts: list[Part]) -> None:
        """Is called with each delta and its parts, before they join blocks."""

    def _opened(self, block: Block) -> Iterator[Event]:
        raise NotImplementedError

    def _grown(self, block: Block, text: str) -> Iterator[Event]:
        raise NotImplementedError

    def _closed(self, block: Block, *, cut: bool) -> Iterator[Event]:
        """`cut`: the limit for tokens ended the block."""
        raise NotImplementedError


def written(events: Iterator[Event]) -> bytes:
    """Returns server-sent events, each with its `type` as its name."""
    return b"".join(b"event: %b\ndata: %b\n\n" % (e["type"].encode(), encode(e)) for e in events)
