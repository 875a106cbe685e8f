"""vLLM as the engine that roles call (`worker.engine_process.engine_protocol`). Without vLLM itself.

    add, start, resume ─▶ vLLM computes ─▶ tokens ─▶ its attempt ends it
    reserve ─▶ fetch ─▶ vLLM has the request, and the connector its KV ─▶ join ─▶ tokens ─▶ …

Blocks are vLLM's. A decode is accepted if the blocks of all requests fit beside it, and fewer decodes than
`max_num_seqs` are here, so that vLLM starts it soon. While an `alone` prompt has no token, none is accepted.
What waits for what:

    prompt in vLLM's queue ─▶ blocks of a held prefill ─▶ FETCH of its decode ─▶ room on another worker
    decode in vLLM's queue ─▶ blocks of running requests ─▶ nothing
    `alone` prompt ─▶ decodes that came before it ─▶ their KV ─▶ prompts, which wait for no such prompt yet
    prompt ─▶ token of an earlier `alone` prompt without such decodes ─▶ prompts in vLLM

Decodes go before prompts in vLLM's queue, and their blocks are counted before. So no decode waits for a
prompt. Two workers that both hold prefills for the other may both have no room: the hold deadline ends that.
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from typing import Any, ClassVar, Protocol

from baton.engine import EngineConfig, EngineRequest, Logprobs, Output, PromptLogprobs
from baton.kv_names import CHUNK_TOKENS, extend_names, salted
from baton.kv_transfer import TransferDeadlines
from baton.kv_transfer.protocol.shared import Tombstones
from baton.rpc import worker_pb2 as pb
from baton.vllm_worker.attachment import Pool
from baton.vllm_worker.metadata import REJECTED
from baton.vllm_worker.sampling import prompt_logprobs, sampling, tokens
from baton.worker.engine_process.attempt import UNREAD
from baton.worker.engine_process.cached_chunks import CachedChunks
from baton.worker.engine_process.engine_attempt import EngineAttempt
from baton.worker.engine_process.engine_protocol import Exchange

Generate = Callable[[EngineRequest, dict[str, Any], int], AsyncGenerator[Any, None]]
"""`VLLM.generate` in `llm`."""


class Host(Protocol):
    """What is called of the engine process."""

    def computing(self, ids: Collection[bytes]) -> None:
        """These attempts are in vLLM now."""

    def soon(self) -> None:
        """Calls `VLLMRoles.move_kv` and sends tokens, soon."""

    def gone(self) -> None:
        """vLLM's process has ended. What was told by `computing` stays."""


class EngineGone(Exception):
    """vLLM's process has ended. The engine process ends, too, and its service tells the routers."""


@dataclass(slots=True, eq=False)
class Submission:
    """vLLM has the request, or will have it. It has a lease of the attempt until then."""

    attempt: EngineAttempt
    task: asyncio.Task[None]
    submitted: bool = False
    """vLLM has it: it waits for no other request here."""


@dataclass(slots=True, eq=False)
class VLLMRequest:
    """A live request. vLLM keeps its blocks."""

    blocks: ClassVar[Sequence[int]] = ()
    num_cached: ClassVar[int] = 0
    state_slot: ClassVar[int] = 0
    images: ClassVar[None] = None

    request: EngineRequest
    owner: EngineAttempt
    chunks: Sequence[bytes]
    """Names of the full chunks in full blocks of the prompt, which requests share. Empty: they share none."""
    uncached: int
    """Tokens of the prompt that vLLM did not have when the request came."""
    handover: bool = False
    decode: bool = False
    begun: bool = False
    """Its first token comes from a prefill. vLLM goes on after it."""
    joined: asyncio.Event = field(default_factory=asyncio.Event)
    """That token is here."""
    fetch: bytes = b""
    """The connector's id of the fetch of its KV."""
    opened: bool = False
    """The connector may read the blocks of a handover."""
    handed_over: bool = False
    goes_on: bool = False
    submission: Submission | None = None
    sampled: int = 0
    first: Output | None = None
    """The first token of a handover."""
    ends: bool = False
    """vLLM has given its last output."""
    released: Callable[[], None] | None = None
    """To be called after vLLM's answer: the connector has told before that nothing reads its blocks."""

    @property
    def length(self) -> int:
        return len(self.request.prompt_ids) + len(self.request.output_ids) + self.sampled

    def answered(self) -> None:
        released, self.released = self.released, None
        if released is not None:
            released()

    @property
    def computes_prompt(self) -> bool:
        return self.submission is not None and not self.begun and not self.sampled

    @property
    def is_suspect(self) -> bool:
        """A prompt that may have crashed engines, and has no token yet."""
        return self.request.alone and self.computes_prompt

    @property
    def decodes(self) -> bool:
        return self.submission is not None and bool(self.sampled)

    @property
    def awaits_kv(self) -> bool:
        return self.begun and not self.joined.is_set()


class VLLMEngine:
    """Not for several threads: all methods are for the event loop.

    Attributes:
        lives: all requests, by the id of their attempt, in order of arrival.
        prefix_exchange: set when it is made. None: prefixes of this model do not move.
    """

    is_moving_memory = False

    def __init__(
        self,
        generate: Generate,
        host: Host,
        pool: Pool,
        described: pb.WorkerDescription,
        cached: CachedChunks,
        config: EngineConfig,
        prompt_seconds: Callable[[int], float],
        scored: Callable[[PromptLogprobs], None],
    ) -> None:
        """
        Args:
            pool: vLLM's blocks.
            cached: what vLLM's prefix cache has.
            prompt_seconds: how long vLLM computes so many tokens.
        """
        self._generate = generate
        self.vocab_size = described.vocab_size
        self.num_blocks = described.num_blocks - 1  # one of vLLM's pool is never used
        self.prefix_exchange: Exchange | None = None
        self.lives: dict[bytes, VLLMRequest] = {}
        self._described = described
        self._cached = cached
        self._seats = config.max_num_seqs
        self._shares = config.enable_prefix_caching
        self._prompt_seconds = prompt_seconds
        self._scored = scored
        self._host = host
        self._needed = NeededBlocks(pool)
        self._named: tuple[EngineRequest | None, list[bytes]] = None, []  # the last request
        self._handovers = Tombstones[bool](TransferDeadlines().tombstone)  # that vLLM has had
        self._moved = asyncio.Event()  # a request has a token, or has ended

    @property
    def blocks_free(self) -> int:
        return max(0, self.num_blocks - self._needed.of(self.lives.values()))

    @property
    def has_suspect(self) -> bool:
        """Whether no decode is accepted, since a prompt must share no step with others."""
        return any(live.is_suspect for live in self.lives.values())

    def prompt_seconds(self, tokens: int, uncached: int, position: int) -> float:
        return self._prompt_seconds(tokens)

    def names(self, request: EngineRequest) -> list[bytes]:
        """As `VLLMRequest.chunks`. Those of a long prompt take milliseconds, and are asked for twice."""
        if self._named[0] is request:
            return self._named[1]
        chunks = list[bytes]()
        self._named = request, chunks
        if self._shares:
            named_tokens = len(request.prompt_ids) // self._described.block_size * self._described.block_size
            root = salted(self._described.content_root, request.cache_salt)
            spans = [image.span for image in request.images]
            extend_names(chunks, request.prompt_ids, named_tokens, root, spans)
        return chunks

    # ------------------------------------------------------------ of the roles

    def add(self, request: EngineRequest, *, handover: bool, owner: EngineAttempt) -> VLLMRequest:
        live = self._live(request, owner, handover=handover)
        params: dict[str, Any] = {}
        if handover:
            params = {"do_remote_decode": True, "prefill_id": request.id.hex(), "worker_commits": True}
        self.submit(live, params)
        return live

    def start(self, request: EngineRequest, owner: EngineAttempt) -> VLLMRequest | None:
        if live := self._admitted(self._live(request, owner, decode=True)):
            self.submit(live, {})
        return live

    def reserve(self, request: EngineRequest, owner: EngineAttempt) -> VLLMRequest | None:
        return self._admitted(self._live(request, owner, decode=True, begun=True))

    def extend_reservation(self, live: VLLMRequest, output_ids: Sequence[int]) -> bool:
        """The KV of another prefill will come. Its fetch begins anew. False: an `alone` prompt did not wait
        for it, and has no token yet. Raises ValueError."""
        if live.submission is None and self.has_suspect:
            return False
        request = replace(live.request, output_ids=list(output_ids))
        sampling(request, only_first=False, scores_prompt=False)
        live.request = request
        return True

    def join(self, live: VLLMRequest, token: int, logprobs: Logprobs | None = None) -> Output:
        """vLLM has the KV, and goes on by itself. The token is repeated."""
        live.joined.set()
        return Output(live.request.id, len(live.request.output_ids), token, logprobs)

    def resume(self, live: VLLMRequest, request_id: bytes, owner: EngineAttempt) -> Output | None:
        """vLLM computes the prompt again, and its prefix cache has it: the prefill was held until now."""
        first = live.first
        assert first is not None, "it is held with its token"
        if self.has_suspect or self._seated >= self._seats:
            return None
        del self.lives[live.request.id]
        live.request, live.owner = replace(live.request, id=request_id), owner
        self.lives[request_id] = live
        live.handover = live.ends = False
        live.decode = live.begun = True
        live.sampled = 0
        self.submit(live, {"first_token": first.token})
        return self.join(live, first.token, first.logprobs)

    def cancel(self, live: VLLMRequest) -> None:
        if not live.ends and live.released is None:  # else vLLM's answer is on its way
            self.withdraw(live)
        live.owner.leases.close(partial(self._over, live))

    # ------------------------------------------------------------ of the connector's ends

    def submit(self, live: VLLMRequest, params: dict[str, Any]) -> None:
        """Gives the request to vLLM. `params`: of the connector. It replaces an earlier submission."""
        self.withdraw(live)
        task = asyncio.create_task(self._run(live, params))
        live.submission = submission = Submission(live.owner, task)
        live.owner.leases.begin(submission)
        task.add_done_callback(lambda _: self._left(live, submission))  # also if it never ran

    def withdraw(self, live: VLLMRequest) -> None:
        """Aborts the request in vLLM, which cannot fail one whose layers are in several groups: if the KV of
        such a request does not come, vLLM keeps it until it is aborted."""
        if live.submission is not None:
            live.submission.task.cancel()

    def opened(self, prefill_id: bytes) -> None:
        """The first chunk of a handover is in a step."""
        live = self.lives.get(prefill_id)
        if live is not None and live.handover and not live.opened and not live.owner.closed:
            live.opened = True
            live.owner.open(live.length)

    async def without(self, adapter: bytes) -> None:
        """Returns when vLLM computes no request with this adapter, and none waits for vLLM."""
        while any(live.request.adapter == adapter for live in self.lives.values()):
            self._moved.clear()
            await self._moved.wait()

    # ------------------------------------------------------------ admission

    def _live(
        self, request: EngineRequest, owner: EngineAttempt, *,
        handover: bool = False, decode: bool = False, begun: bool = False,
    ) -> VLLMRequest:  # fmt: skip
        chunks = self.names(request)
        length = len(request.prompt_ids) + len(request.output_ids)
        uncached = length - CHUNK_TOKENS * self._cached.leading(chunks)
        live = VLLMRequest(request, owner, chunks, uncached, handover, decode, begun)
        self.lives[request.id] = live
        self._needed.came(live)
        return live

    @property
    def _seated(self) -> int:
        return sum(live.decode for live in self.lives.values())

    def _admitted(self, live: VLLMRequest) -> VLLMRequest | None:
        """None: there is no room for the decode."""
        fits = self._needed.of(self.lives.values()) <= self.num_blocks
        if fits and self._seated <= self._seats and not self.has_suspect:
            return live
        self._over(live)
        return None

    def _over(self, live: VLLMRequest) -> None:
        del self.lives[live.request.id]
        self._needed.left(live)
        self._moved.set()

    # ------------------------------------------------------------ of vLLM

    async def _run(self, live: VLLMRequest, params: dict[str, Any]) -> None:
        request, owner = live.request, live.owner
        try:
            fields = sampling(request, only_first=live.handover, scores_prompt=not live.begun)
            if not live.begun and not all(image.pixels for image in request.images):
                raise ValueError("images: their pixels are missing, and this worker computes the prompt")
            params = {
                **params,
                # As in `LiveRequest.due`.
                "due": -math.inf if request.output_ids else time.monotonic() + request.first_token_within,
                "gap_cost": request.gap_cost,
                "uncached": 1 if live.begun else live.uncached,
            }
            fields["extra_args"] = {"kv_transfer_params": params}
            # Decodes first, then by priority; of these, requests that have waited elsewhere.
            priority = 2 * request.priority + (not request.retried) - live.begun * (1 << 40)
            while waits(live, [*self.lives.values()]):
                self._moved.clear()
                await self._moved.wait()
            assert live.submission is not None, "it is this task"
            self._handovers.expire(time.monotonic())
            if live.handover and self._handovers.get(request.id):  # the connector may still have the first
                raise ValueError(UNREAD["reused"][1])
            live.submission.submitted = True
            self._computes()
            async with aclosing(self._generate(request, fields, priority)) as outputs:
                async for output in outputs:
                    if live.begun:  # vLLM's socket may be faster than the connector's
                        await live.joined.wait()
                    self._output(live, output)
                    self._host.soon()
        except EngineGone:  # the request was in the step that crashed
            self._host.gone()
        except ValueError as error:
            owner.lost(pb.FAILURE_CODE_INVALID, str(error))
        except Exception as error:  # noqa: BLE001  vLLM's errors have no common base
            owner.lost(pb.FAILURE_CODE_ENGINE, f"vLLM: {error!r}")

    def _left(self, live: VLLMRequest, submission: Submission) -> None:
        """vLLM has the request no more."""
        if live.submission is submission:
            live.submission = None
        if submission.submitted and live.handover:
            self._handovers.bury(live.request.id, True, time.monotonic())
        live.answered()
        submission.attempt.leases.end(submission)
        self._computes()
        self._host.soon()

    def _output(self, live: VLLMRequest, output: Any) -> None:
        [completion] = output.outputs
        reason, request = completion.finish_reason or "", live.request
        if live.owner.closed and not live.handover:  # a handover counts though its router has its token
            return
        if reason in ("error", "abort") or completion.stop_reason == REJECTED:
            if live.begun:
                text = f"its KV is not used ({completion.stop_reason or reason})"
                live.owner.lost(pb.FAILURE_CODE_HANDED_BACK, text)
            else:
                text = "vLLM ended the request with an error; see the log"
                live.owner.lost(pb.FAILURE_CODE_ENGINE, text)
            return
        live.ends |= bool(reason)
        if live.handover:
            self.opened(request.id)
            if reason == "length":
                prompt = len(request.prompt_ids)
                most = min(self._described.max_model_len, prompt + request.sampling.max_tokens)
                reason = "" if live.length + 1 < most else reason  # it goes on elsewhere
        if output.prompt_logprobs:
            for piece in prompt_logprobs(request, output.prompt_logprobs):
                self._scored(piece)
        index, computed = len(request.output_ids) + live.begun + live.sampled, live.computes_prompt
        for token in tokens(request, index, output, reason, prefilled=computed):
            if not live.sampled:
                live.first = token
                self._moved.set()
            live.sampled += 1
            live.owner.sampled(token)
        live.answered()

    def _computes(self) -> None:
        """The requests in vLLM have changed, or are further."""
        self._moved.set()
        lives = self.lives.items()
        self._host.computing([name for name, live in lives if live.submission and live.submission.submitted])


class NeededBlocks:
    """Counts the blocks of all requests. Those of a common prefix count once: vLLM's prefix cache has it, but
    for requests that compute it at the same time."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._chunks = Counter[bytes]()  # of all requests

    def came(self, live: VLLMRequest) -> None:
        self._chunks.update(live.chunks)

    def left(self, live: VLLMRequest) -> None:
        for chunk in live.chunks:
            self._chunks[chunk] -= 1
            if not self._chunks[chunk]:
                del self._chunks[chunk]

    def of(self, lives: Iterable[VLLMRequest]) -> int:
        """`lives`: all that came and have not left. They grow."""
        pool, lives, shared = self._pool, [*lives], len(self._chunks) * CHUNK_TOKENS
        unshared = (live.length + 1 - len(live.chunks) * CHUNK_TOKENS for live in lives)
        blocks = sum(-(-tokens // pool.block_size) for tokens in (*unshared, shared))
        bounded = sum(
            min(most, -(-(live.length + 1) // size)) for size, most in pool.bounded for live in lives
        )
        return blocks + -(-bounded // pool.weight)


def waits(live: VLLMRequest, lives: Collection[VLLMRequest]) -> bool:
    """Whether vLLM may not have a request yet. `lives`: all, in order of arrival.

    A prompt that may have crashed engines is computed without others. It waits for all that came before.
    Decodes that come later are refused until it has its token. Prompts that come later go on while decodes
    that came before run, which may take minutes. From then on they wait, so the prompt has its turn."""
    if live.begun:
        return False
    earlier = [*takewhile(lambda x: x is not live, lives)]
    if live.request.alone:
        later = (x for x in lives if x is not live and x.submission is not None and x.submission.submitted)
        return any(x.submission is not None for x in (*earlier, *later))
    decodes = False
    for other in earlier:
        if other.is_suspect and not decodes:
            return True
        decodes |= other.decode and other.submission is not None
    return False
