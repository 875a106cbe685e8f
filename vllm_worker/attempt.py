"""Prefills and decodes of a vLLM engine: what is known of each, the blocks they need, what they wait for."""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from baton.engine import EngineRequest
from baton.kv_names import CHUNK_TOKENS
from baton.kv_transfer.protocol.messages import FirstToken, Reason
from baton.rpc import worker_pb2 as pb
from baton.vllm_worker.attachment import Close, Pool
from baton.worker.engine_process.attempt import Attempt, Lease
from baton.worker.engine_process.states import State


@dataclass(slots=True, eq=False)
class Computing(Lease["VLLMAttempt"]):
    """vLLM has the request, or will have it."""

    task: asyncio.Task[None]

    def revoke(self, reason: Reason) -> None:
        if reason != "finished":  # else vLLM ends it now
            self.task.cancel()


@dataclass(slots=True, eq=False)
class Sending(Lease["VLLMAttempt"]):
    """The connector may read the blocks of a handover."""

    tell: Callable[[Close], None]

    def revoke(self, reason: Reason) -> None:
        self.tell(Close(self.attempt.id, reason))


@dataclass(slots=True, eq=False, kw_only=True)
class VLLMAttempt(Attempt):
    request: EngineRequest
    ended: Callable[["VLLMAttempt"], None]
    """Is called when nothing uses the attempt any more."""
    chunks: Sequence[bytes]
    """Names of the full chunks in full blocks of the prompt, which requests share. Empty: they share none."""
    uncached: int
    """Tokens of the prompt that vLLM did not have when the request came."""
    handover: bool = False
    """A prefill with KV for another worker."""
    decode: bool
    source: pb.PrefillSource | None = None
    """Of a decode: the prefill that has sampled its first token."""
    taken: "VLLMAttempt | None" = None
    """That prefill, if it is on this worker."""
    computing: Computing | None = None
    """None: vLLM has finished the request."""
    sending: Sending | None = None
    """None: it is no handover, or the connector reads its blocks no more."""
    submitted: bool = False
    """vLLM has had the request."""
    fetched: int = 0
    """Tokens that came from another worker's cache for it."""
    answered: bool = False
    """vLLM has sampled a token."""
    first_token: asyncio.Future[FirstToken] = field(default_factory=asyncio.Future)
    """That of a handover, or of the prefill of `source`. vLLM goes on after it."""
    no_kv: str = ""
    """Of a decode: why its KV did not come, or is not used."""

    @property
    def length(self) -> int:
        return self.tokens + self.num_sampled

    @property
    def computes_prompt(self) -> bool:
        waits = self.computing is not None or self.state is State.IMPORTING
        return waits and self.source is None and not self.answered

    @property
    def seated(self) -> bool:
        """A decode that vLLM has, or will have."""
        return self.decode and (self.computing is not None or self.state is State.IMPORTING)

    @property
    def is_suspect(self) -> bool:
        """A prompt that may have crashed engines, and has no token yet."""
        return self.request.alone and self.computes_prompt

    @property
    def decodes(self) -> bool:
        return self.computing is not None and self.answered

    @property
    def awaits_kv(self) -> bool:
        """A decode whose KV is not used yet."""
        return self.source is not None and not self.answered

    def gives_token_to(self, decode: "VLLMAttempt") -> bool:
        """Whether it is a prefill, held with its token, that may have been computed for this decode."""
        asked, images = decode.request, [image.span for image in decode.request.images]
        return (
            self.handover
            and self.first_token.done()
            and not self.closed
            and self.tokens == len(asked.prompt_ids) + len(asked.output_ids)
            and [image.span for image in self.request.images] == images
        )

    def end_if_unused(self) -> None:
        """Ends the attempt if neither vLLM nor the connector uses it."""
        if not self.leases:
            self.close("finished")

    def over(self) -> None:
        Attempt.over(self)
        self.ended(self)


class NeededBlocks:
    """Counts the blocks of all attempts. Those of a common prefix count once: vLLM's prefix cache has it, but
    for requests that compute it at the same time."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._chunks = Counter[bytes]()  # of all attempts

    def came(self, attempt: VLLMAttempt) -> None:
        self._chunks.update(attempt.chunks)

    def left(self, attempt: VLLMAttempt) -> None:
        for chunk in attempt.chunks:
            self._chunks[chunk] -= 1
            if not self._chunks[chunk]:
                del self._chunks[chunk]

    def of(self, attempts: Iterable[VLLMAttempt]) -> int:
        """`attempts`: all that came and have not left. They grow."""
        pool, attempts, shared = self._pool, [*attempts], len(self._chunks) * CHUNK_TOKENS
        unshared = (attempt.length + 1 - len(attempt.chunks) * CHUNK_TOKENS for attempt in attempts)
        blocks = sum(-(-tokens // pool.block_size) for tokens in (*unshared, shared))
        bounded = sum(
            min(most, -(-(attempt.length + 1) // size)) for size, most in pool.bounded for attempt in attempts
        )
        return blocks + -(-bounded // pool.weight)


def waits(attempt: VLLMAttempt, attempts: Collection[VLLMAttempt]) -> bool:
    """Whether vLLM may not have an attempt yet. `attempts`: all, in order of arrival.

    A prompt that may have crashed engines is computed without others. It waits for all that came before.
    Decodes that come later are refused until it has its token. Prompts that come later go on while decodes
    that came before run, which may take minutes. From then on they wait, so the prompt has its turn."""
    if attempt.source is not None:
        return False
    earlier = [*takewhile(lambda x: x is not attempt, attempts)]
    if attempt.request.alone:
        later_in_vllm = (x for x in attempts if x.submitted and x is not attempt)
        return any(x.computing is not None for x in (*earlier, *later_in_vllm))
    decodes = False
    for other in earlier:
        if other.is_suspect and not decodes:
            return True
        decodes |= other.decode and other.computing is not None
    return False
