"""Prefixes that vLLM's cache gets from other workers. Without vLLM itself.

KV comes into blocks of a request. So a fetch is a request of its own, with the prompt up to the end of the
prefix and one token more. The connector fetches what vLLM's cache lacks of it, and vLLM then caches the
blocks. If the source has less, the connector cuts the request. It is scheduled first, and computes one token.
Then come the prompts that have waited.

A request with images, and one that runs alone, fetches nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from baton.engine import EngineRequest, SamplingParams
from baton.kv_names import CHUNK_TOKENS
from baton.kv_transfer import Closed, FetchFailed, Injected
from baton.vllm_worker.attempt import VLLMAttempt
from baton.vllm_worker.metadata import Source
from baton.vllm_worker.stats import Load
from baton.worker.engine_process.attempt import AttemptTable
from baton.worker.engine_process.cached_chunks import CachedChunks
from baton.worker.engine_process.prefix_fetches import PrefixFetch

log = logging.getLogger(__name__)

PRIORITY = -(1 << 41)
"""Before all other requests: its prompts wait."""


@dataclass(frozen=True, slots=True)
class Missing:
    """As `MissingPrefix`."""

    chunks: Sequence[bytes]
    first_chunk: int
    computed_from: int


@dataclass(frozen=True, slots=True)
class Import:
    """As that of Baton's engine. Blocks are vLLM's."""

    missing: Missing
    table: Sequence[int] = ()
    state_slot: int | None = None

    def end(self, num_tokens: int, *, all_positions: bool = False) -> None:
        """vLLM frees the blocks with the request."""


class VLLMPrefixes:
    """What `PrefixFetches` asks of an engine and of its receiver.

    Args:
        run: gives a request to vLLM, with `kv_transfer_params`, and returns when vLLM has ended it.
        block_size: tokens of a block. None: prefixes of this model do not move.
        at_once: whether vLLM's scheduler hears of KV that has come before it gets a request that is given to
            it then. With several ranks it hears of it after a step.
    """

    def __init__(
        self,
        attempts: AttemptTable[VLLMAttempt],
        cached: CachedChunks,
        load: Load,
        run: Callable[[EngineRequest, dict[str, Any]], Coroutine[Any, Any, None]],
        block_size: int | None,
        at_once: bool,
    ) -> None:
        self.prefix_exchange = None if block_size is None else self
        self._block_size = block_size or 1
        self._attempts = attempts
        self._cached = cached
        self._load = load
        self._run = run
        self._at_once = at_once
        self._came: dict[bytes, Injected] = {}  # by id of the fetch, until vLLM has ended it
        self._open: dict[bytes, tuple[PrefixFetch, asyncio.Task[None]]] = {}  # by id of the fetch

    # ------------------------------------------------------------ as the engine

    def missing(self, request: EngineRequest, most: int, *, remnant: bool = False) -> Missing | None:
        """What vLLM's cache lacks of the full chunks in full blocks of a prompt, as far as known. vLLM says
        what it has when it schedules the request."""
        attempt = self._attempts.find(request.id)
        if attempt is None or request.images or request.alone:
            return None
        usable = (attempt.tokens - 1) // self._block_size * self._block_size
        chunks = attempt.chunks[: min(most, usable // CHUNK_TOKENS)]
        first = self._cached.leading(chunks)
        return Missing(chunks[first:], first, first * CHUNK_TOKENS) if first < len(chunks) else None

    def start_import(self, missing: Missing) -> Import:
        return Import(missing)

    def prompt_seconds(self, tokens: int, uncached: int, position: int) -> float:
        """As `Meters.prompt_seconds`."""
        costs = self._load.costs
        speed, step = costs.prefill_tokens_per_s, costs.long
        if self._load.running and step.tokens:
            speed = min(speed, step.tokens / step.seconds)
        return tokens / speed if speed else 0.0

    # ------------------------------------------------------------ as the receiver

    def fetch_content(
        self, fetch_id: bytes, *, chunks: Sequence[bytes], first_chunk: int, kv_address: str,
        incarnation: int, block_ids: Sequence[int], state_slot: int = 0, owner: Any = None,
    ) -> None:  # fmt: skip
        """As that of `Receiver`. `owner`: a `PrefixFetch`. vLLM's cache may have less of the prompt than it
        was thought to have: the connector gets the names from the beginning on."""
        first = next(iter(owner.waiting))
        request, attempt = first.request, first.attempt
        assert isinstance(attempt, VLLMAttempt)
        stop = (first_chunk + len(chunks)) * CHUNK_TOKENS
        tokens = [*request.prompt_ids, *request.output_ids][: stop + 1]
        sampling = SamplingParams(max_tokens=1, temperature=0.0)
        prefix = replace(request, id=fetch_id, prompt_ids=tokens, output_ids=[], sampling=sampling)
        names = [name.hex() for name in attempt.chunks[: first_chunk + len(chunks)]]
        params = Source(kv_address, incarnation, bytes(16)).params
        params |= {"decode_id": fetch_id.hex(), "attempt": 0, "chunks": names}
        task = asyncio.create_task(self._run(prefix, params))
        self._open[fetch_id] = owner, task
        task.add_done_callback(partial(self._left, fetch_id))

    def cancel(self, fetch_id: bytes) -> None:
        if (opened := self._open.get(fetch_id)) is not None:
            opened[1].cancel()

    def began(self, fetch_id: bytes) -> bool:
        """The connector does not tell."""
        return False

    def handle(self, event: Injected | FetchFailed | Closed) -> None:
        """The connector reports the end of a fetch, or of what is none of these."""
        if event.decode_id not in self._open:
            return
        if isinstance(event, Injected) and not self._at_once and event.decode_id not in self._came:
            self._came[event.decode_id] = event
        else:
            self._open.pop(event.decode_id)[0].handle(event)

    def _left(self, fetch_id: bytes, task: asyncio.Task[None]) -> None:
        """vLLM has ended the request. Unless a report came before, it has fetched nothing."""
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("vLLM cannot import a prefix: %r", error)
        self.handle(self._came.get(fetch_id, Closed(fetch_id)))
        self._came.pop(fetch_id, None)
