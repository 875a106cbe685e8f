"""Prefixes that vLLM's cache exchanges with other workers. Without vLLM itself.

KV comes into blocks of a request. So a fetch is a request of its own, with the prompt up to the end of the
prefix and one token more. The connector fetches what vLLM's cache lacks of it, and vLLM then caches the
blocks. If the source has less, the connector cuts the request. It is scheduled first, and computes one token.
Then come the prompts that have waited.

A request with images, and one that runs alone, fetches nothing.

The connector keeps the blocks that another worker reads (`pins`). A pin names vLLM's blocks, which may be
evicted before vLLM's scheduler knows of the pin.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from baton.engine import EngineRequest
from baton.kv_names import CHUNK_TOKENS
from baton.vllm_worker.cached_blocks import CachedBlocks

PRIORITY = -(1 << 41)
"""Of the request of a fetch: before all others, since its prompts wait."""


@dataclass(frozen=True, slots=True)
class Missing:
    """As `MissingPrefix`."""

    request: EngineRequest
    names: Sequence[bytes]
    """Of all chunks up to the end of these."""
    first_chunk: int

    @property
    def chunks(self) -> Sequence[bytes]:
        return self.names[self.first_chunk :]

    @property
    def computed_from(self) -> int:
        return self.first_chunk * CHUNK_TOKENS


@dataclass(frozen=True, slots=True)
class Import:
    """As that of Baton's engine. Blocks are vLLM's."""

    table: ClassVar[Sequence[int]] = ()
    state_slot: ClassVar[None] = None
    missing: Missing

    def end(self, num_tokens: int, *, all_positions: bool = False) -> None:
        """vLLM frees the blocks with the request."""


@dataclass(frozen=True, slots=True)
class Pin:
    """As that of Baton's engine, before the connector has it."""

    state_slot: ClassVar[int] = 0
    table: Sequence[bytes]
    """vLLM's names of the blocks, from that with the first position of the first chunk on."""
    num_chunks: int
    """At most: fewer may be cached."""

    def end(self, *, copied: bool | None = None) -> None:
        """The connector frees the blocks."""


class VLLMExchange:
    """As `PrefixExchange`.

    Args:
        names: of the full chunks in full blocks of a prompt.
        block_size: tokens of a block.
    """

    def __init__(
        self, cached: CachedBlocks, names: Callable[[EngineRequest], Sequence[bytes]], block_size: int
    ) -> None:
        self._cached = cached
        self._names = names
        self._block_size = block_size

    def missing(self, request: EngineRequest, most: int, *, remnant: bool = False) -> Missing | None:
        """What vLLM's cache lacks of the full chunks in full blocks of a prompt, as far as known. vLLM says
        what it has when it schedules the request."""
        if request.images or request.alone:
            return None
        tokens = len(request.prompt_ids) + len(request.output_ids)
        usable = (tokens - 1) // self._block_size * self._block_size
        names = self._names(request)[: min(most, usable // CHUNK_TOKENS)]
        first = self._cached.chunks.leading(names)
        return Missing(request, names, first) if first < len(names) else None

    def start_import(self, missing: Missing) -> Import:
        return Import(missing)

    def bring(self, chunks: Sequence[bytes], first_chunk: int, then: Callable[[], None]) -> bool:
        """vLLM has no tiers that Baton knows."""
        return False

    def pin_prefix(self, chunks: Sequence[bytes], first_chunk: int) -> Pin | None:
        blocks = self._cached.blocks_of(chunks, first_chunk)
        return Pin(blocks, len(chunks)) if blocks else None
