"""Prefills and decodes of a vLLM engine: what routers ask for, what vLLM samples, what the connector says.

    submitted ─▶ accepted ─▶ vLLM computes ─▶ first token ─▶ … ─▶ last token          decode, prefill alone
        │                        │               └─▶ held until the connector says Released       handover
        ▼                        ▼
     refused               failed, cancelled

Blocks are vLLM's. A decode is accepted if the blocks of all attempts fit beside it, and fewer decodes than
`max_num_seqs` are in vLLM, so that vLLM starts it soon. While an `alone` prompt has no token, none is
accepted. What waits for what:

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
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from baton.engine import EngineRequest, Output
from baton.kv_names import CHUNK_TOKENS, extend_names, salted
from baton.kv_transfer import Closed, FetchFailed, Injected, Released, TraceWriter
from baton.kv_transfer.config import TransferDeadlines
from baton.kv_transfer.protocol.shared import Tombstones
from baton.rpc import worker_pb2 as pb
from baton.vllm_worker.adapters import Adapters
from baton.vllm_worker.attachment import (
    Blind,
    Close,
    Commit,
    Computed,
    Costs,
    Encoded,
    ForRoles,
    Pool,
    Started,
    ToConnector,
    Wanted,
)
from baton.vllm_worker.attempt import Computing, NeededBlocks, Sending, VLLMAttempt, waits
from baton.vllm_worker.cached_blocks import CachedBlocks
from baton.vllm_worker.metadata import REJECTED, Source
from baton.vllm_worker.prefixes import PRIORITY, VLLMPrefixes
from baton.vllm_worker.sampling import prompt_logprobs, sampling, tokens
from baton.vllm_worker.stats import Load
from baton.worker import messages
from baton.worker.engine_process.attempt import UNREAD, AttemptTable, handed_over, logprobs_of
from baton.worker.engine_process.handler import Handler
from baton.worker.engine_process.prefix_fetches import PrefixFetches, PrefixLinks, Workers
from baton.worker.engine_process.start import EngineProcessConfig
from baton.worker.engine_process.states import State
from baton.worker.messages import FromEngine, FromRouter
from baton.worker.requests import content_source, engine_request, prefill_source


class Engine(Protocol):
    """What roles call of vLLM. All raise `EngineGone`."""

    adapters: Adapters
    """That vLLM has loaded."""

    def generate(
        self, request: EngineRequest, fields: dict[str, Any], priority: int
    ) -> AsyncGenerator[Any, None]:
        """Yields vLLM's RequestOutputs. `fields`: of SamplingParams. Raises ValueError if the request is
        wrong."""
        ...

    async def pin(self, pin_id: bytes, params: dict[str, Any]) -> None:
        """Shows `kv_transfer_params` to the connector. Nothing is computed."""


_SERVED = ("acked", "finished")
"""Why a prefill is freed that has sent, or will send, its token to its router."""
_PREEMPTED = pb.FAILURE_CODE_DROPPED, "preempted: other requests needed its blocks"
"""By vLLM, if this worker has not closed the prefill."""


class EngineGone(Exception):
    """vLLM's process has ended. The engine process ends, too, and its service tells the routers."""


class Roles(Handler):
    """Not for several threads: all methods are for the event loop.

    Args:
        computing: gets the ids of all requests in vLLM when they change.
        send: takes messages for the service process.
        soon: flushes `attempts` soon.
        gone: vLLM's process has ended. `computing` should keep what it has.
        cached: what vLLM's prefix cache has.
        pool: vLLM's blocks.
    """

    def __init__(
        self,
        attempts: AttemptTable[VLLMAttempt],
        send: Callable[[FromEngine], None],
        vllm: Engine,
        tell: Callable[[ToConnector], None],
        computing: Callable[[Collection[bytes]], None],
        soon: Callable[[], None],
        gone: Callable[[], None],
        cached: CachedBlocks,
        pool: Pool,
        config: EngineProcessConfig,
        ready: messages.EngineReady,
    ) -> None:
        self.load = Load(encoded=None if ready.images is None else Encoded(0, 0, 0.0, 0.0))
        Handler.__init__(self, attempts, send, "--engine vllm")
        self.adapters = vllm.adapters
        self._tasks = set[asyncio.Task[None]]()  # that no attempt has
        self._vllm = vllm
        self._tell = tell
        self._computing = computing
        self._soon = soon
        self._gone = gone
        self._cached = cached
        self._config = config
        self._described = ready.description
        self._blocks = ready.description.num_blocks - 1  # one of vLLM's pool is never used
        self._needed = NeededBlocks(pool)
        self._used = Tombstones[bool](TransferDeadlines().tombstone)
        self._moved = asyncio.Event()  # an attempt has a token, or has ended
        block_size = pool.block_size if ready.description.exchanges_prefixes else None
        self._prefixes = VLLMPrefixes(
            attempts, cached.chunks, self.load, self._run_prefix, block_size=block_size,
            at_once=not config.rank_arenas,
        )  # fmt: skip
        self._links = PrefixLinks()
        self._fetches = PrefixFetches(self._prefixes, attempts.counts, TraceWriter(None, ""))
        self._fetches.sources.append(Workers(self._prefixes, config.incarnation, self._links))

    @property
    def busy(self) -> bool:
        return any(attempt.computing is not None for attempt in self._attempts)

    @property
    def _has_suspect(self) -> bool:
        """Whether no decode is accepted, since a prompt must share no step with others."""
        return any(attempt.is_suspect for attempt in self._attempts)

    def status(self, question: int) -> messages.EngineStatus:
        stats = self.load.stats(self._blocks, [*self._attempts])
        if self._has_suspect:
            stats = replace(stats, blocks_free=0, blocks_spare=0)
        computed = ((each.id, each.uncached) for each in self._attempts if each.computes_prompt)
        return messages.EngineStatus(
            question,
            stats,
            self._attempts.counts,
            pb.WorkerStatus(
                idle=not self._attempts,
                adapters_on_device=self.adapters.on_device,
                adapter_move_seconds=self.adapters.move_seconds,
                prefix_links=self._links.recent(time.monotonic()),
            ),
            waiting_of_streams=self._waiting_of_streams(computed),
        )

    # ------------------------------------------------------------ of the service

    def _pause(self, message: messages.Pause) -> messages.Paused:
        if message.abort:
            self._attempts.end_all(pb.FAILURE_CODE_ABORTED, message.abort)
        error = ""
        if message.frozen and not all(attempt.closed for attempt in self._attempts):
            error = f"{self._name}: requests cannot be frozen; pause with mode=abort or mode=wait"
        return messages.Paused(message.question, bool(self._attempts), error)

    def _change_adapters(self, message: messages.LoadAdapter | messages.UnloadAdapter) -> None:
        if isinstance(message, messages.LoadAdapter):
            change = self._load(message)
        else:
            unused = partial(self._without, message.fingerprint)
            change = self.adapters.unload(message.fingerprint, unused)
        self._do(change)

    def _do(self, change: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(change)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _load(self, message: messages.LoadAdapter) -> None:
        fingerprint, error = b"", ""
        try:
            fingerprint = await self.adapters.load(message.adapter.name, message.adapter.path)
        except ValueError as why:
            error = str(why)
        except EngineGone:
            self._gone()
            return
        self._send(messages.AdapterLoaded(message.question, fingerprint, error))

    async def _without(self, adapter: bytes) -> None:
        """Returns when vLLM computes no request with this adapter, and none waits for vLLM."""
        while any(x.computing is not None and x.request.adapter == adapter for x in self._attempts):
            self._moved.clear()
            await self._moved.wait()

    def _said(self, kind: str, content: Any, message: FromRouter) -> None:
        match kind:
            case "prefill":
                self._prefill(message, content)
            case "decode":
                self._decode(message, content)
            case "retarget":
                attempt = self._attempts.find(content.decode_id)
                if attempt is not None and attempt.stream == message.stream and attempt.awaits_kv:
                    text = "a vLLM worker cannot change the source of a request"
                    attempt.lost(pb.FAILURE_CODE_HANDED_BACK, text)
            case "only_copies":
                pass  # vLLM chooses what it evicts
            case _:
                raise AssertionError(f"the service refuses {kind}")

    def _prefill(self, message: FromRouter, submit: pb.SubmitPrefill) -> None:
        attempt = self._attempt(message, submit.request, decode=False, handover=submit.handover)
        if submit.plan:
            self._attempts.fail(attempt, pb.FAILURE_CODE_INVALID, "vLLM computes no part of a prompt")
            return
        if not self._open(attempt):
            return
        params: dict[str, Any] = {}
        if submit.handover:
            params = {"do_remote_decode": True, "prefill_id": attempt.id.hex()}
            params["report_start"] = submit.report_start
            params["logprobs"] = attempt.request.sampling.logprobs is not None
        self._compute(attempt, params, content_source(submit))

    def _decode(self, message: FromRouter, submit: pb.SubmitDecode) -> None:
        source = prefill_source(submit)
        attempt = self._attempt(message, submit.request, decode=True, source=source)
        if not self._open(attempt):
            return
        params: dict[str, Any] = {}
        if source is not None:
            if source.incarnation != self._config.incarnation:
                held = Source(source.kv_address, source.incarnation, source.prefill_id)
                params = {**held.params, "decode_id": attempt.id.hex(), "attempt": source.attempt}
                if attempt.request.images:
                    params["unseen_until"] = attempt.request.images[-1].stop
            elif (prefill := self._attempts.find(source.prefill_id)) is None or not prefill.gives_token_to(
                attempt
            ):
                text = f"there is no prefill {source.prefill_id.hex()[:8]} on this worker"
                attempt.lost(pb.FAILURE_CODE_HANDED_BACK, text)
                return
            else:
                attempt.taken, attempt.first_token = prefill, prefill.first_token
                attempt.request.images = prefill.request.images  # with their pixels
                params = {"first_token": prefill.first_token.result().token_id}
        needed = self._needed.of(self._attempts)
        seated = sum(other.seated for other in self._attempts)
        seats = self._config.engine.max_num_seqs
        text = ""
        if needed > self._blocks or seated >= seats:
            text = f"needs {needed} of {self._blocks} blocks, and seat {seated + 1} of {seats}"
        elif self._has_suspect:
            text = "a prompt that must share no step with others has its turn next"
        if text:
            self._attempts.counts.no_room += 1
            attempt.lost(pb.FAILURE_CODE_NO_ROOM, text)
        else:
            self._compute(attempt, params, None if source is not None else content_source(submit))

    def _attempt(self, message: FromRouter, asked: pb.Request, **more: Any) -> VLLMAttempt:
        assert message.origin is not None, "it submits an attempt"
        request, chunks = engine_request(message.origin, asked, message.pixels), list[bytes]()
        tokens = len(request.prompt_ids) + len(request.output_ids)
        if self._config.engine.enable_prefix_caching:
            block_size = self._described.block_size
            named_tokens = len(request.prompt_ids) // block_size * block_size
            root = salted(self._described.content_root, request.cache_salt)
            spans = [image.span for image in request.images]
            extend_names(chunks, request.prompt_ids, named_tokens, root, spans)
        uncached = tokens - CHUNK_TOKENS * self._cached.chunks.leading(chunks)
        return VLLMAttempt(
            stream=message.stream, origin=message.origin, tokens=tokens, request=request, chunks=chunks,
            uncached=uncached, ended=self._ended, **more,
        )  # fmt: skip

    def _compute(self, attempt: VLLMAttempt, params: dict[str, Any], place: pb.ContentSource | None) -> None:
        """Gives the request to vLLM. What its cache lacks of the prompt may come from another worker before.
        `params`: of the connector."""
        start = partial(self._start, attempt, params)
        if self._fetches.get(attempt, attempt.request, place, start):
            attempt.to(State.IMPORTING)
        else:
            start(0)

    def _start(self, attempt: VLLMAttempt, kv_transfer_params: dict[str, Any], fetched: int) -> None:
        request, attempt.fetched = attempt.request, fetched
        try:
            fields = sampling(request, only_first=attempt.handover, scores_prompt=attempt.source is None)
            if attempt.source is None and not all(image.pixels for image in request.images):
                raise ValueError("images: their pixels are missing, and this worker computes the prompt")
        except ValueError as error:
            attempt.lost(pb.FAILURE_CODE_INVALID, str(error))
            return
        params = {
            **kv_transfer_params,
            **({"fetched": fetched} if fetched else {}),
            # As in `LiveRequest.due`.
            "first_token_within": -math.inf if request.output_ids else request.first_token_within,
            "gap_cost": request.gap_cost,
        }
        fields["extra_args"] = {"kv_transfer_params": params}
        # Decodes first, then by priority; of these, requests that have waited elsewhere.
        priority = 2 * request.priority + (not request.retried) - (attempt.source is not None) * (1 << 40)
        task = asyncio.create_task(self._run(attempt, fields, priority))
        task.add_done_callback(lambda _: self._left(attempt))  # also if it never ran
        attempt.computing = Computing(attempt, task)
        attempt.to(State.COMPUTING if attempt.source is None else State.FETCHING)
        if attempt.handover:
            attempt.sending = Sending(attempt, self._tell)
        elif attempt.decode:
            self._attempts.reserved(attempt)

    def _open(self, attempt: VLLMAttempt) -> bool:
        """As `AttemptTable.open`. An id that vLLM has had is not used again: vLLM aborts a request later
        than its attempt ends, and the connector would take what comes then for the new attempt."""
        self._used.expire(time.monotonic())
        if self._used.get(attempt.id):
            self._attempts.fail(attempt, *UNREAD["reused"])
            return False
        is_new = self._attempts.open(attempt)
        if is_new:
            self._needed.came(attempt)
        return is_new

    def _ended(self, attempt: VLLMAttempt) -> None:
        self._needed.left(attempt)
        if attempt.submitted:
            self._used.bury(attempt.id, True, time.monotonic())

    def stop(self) -> None:
        """The worker ends. All attempts have failed."""
        for attempt in list(self._attempts):
            attempt.close("cancelled")

    def expire(self) -> None:
        """Computes prompts whose prefixes do not come in time. To be called now and then."""
        self._fetches.expire()

    def _serve(self, wanted: Wanted) -> None:
        """Another worker wants a prefix. The connector keeps its blocks until they are sent."""
        if blocks := self._cached.blocks_of(wanted.chunks, wanted.first_chunk):
            first, count = wanted.first_chunk, len(wanted.chunks)
            names = [name.hex() for name in blocks]
            params = {"pin_id": wanted.pin_id.hex(), "pinned": names, "first_chunk": first, "chunks": count}
            self._do(self._pin(wanted.pin_id, params))
        else:
            self._tell(Close(wanted.pin_id, "gone"))

    # ------------------------------------------------------------ of vLLM

    async def _run_prefix(self, request: EngineRequest, params: dict[str, Any]) -> None:
        """As `run` of `VLLMPrefixes`."""
        fields = sampling(request, only_first=True, scores_prompt=False)
        fields["extra_args"] = {"kv_transfer_params": params}
        try:
            async with aclosing(self._vllm.generate(request, fields, PRIORITY)) as outputs:
                async for _ in outputs:
                    pass
        except EngineGone:
            self._gone()

    async def _pin(self, pin_id: bytes, params: dict[str, Any]) -> None:
        try:
            await self._vllm.pin(pin_id, params)
        except EngineGone:
            self._gone()

    async def _run(self, attempt: VLLMAttempt, fields: dict[str, Any], priority: int) -> None:
        try:
            while waits(attempt, [*self._attempts]):
                self._moved.clear()
                await self._moved.wait()
            attempt.submitted = True
            self._computes()
            async with aclosing(self._vllm.generate(attempt.request, fields, priority)) as outputs:
                async for output in outputs:
                    if attempt.source is not None and output.outputs[0].token_ids:
                        # vLLM's socket may be faster than the connector's.
                        await asyncio.wait([attempt.first_token])
                    self._output(attempt, output)
                    self._soon()
        except EngineGone:  # the attempt was in the step that crashed
            self._gone()
        except ValueError as error:
            self._attempts.fail(attempt, pb.FAILURE_CODE_INVALID, str(error))
        except Exception as error:  # noqa: BLE001  vLLM's errors have no common base
            self._attempts.fail(attempt, pb.FAILURE_CODE_ENGINE, f"vLLM: {error!r}")

    def _left(self, attempt: VLLMAttempt) -> None:
        """vLLM has the request no more. A handover stays until the connector reads its blocks no more."""
        computing, attempt.computing = attempt.computing, None
        assert computing is not None, "this is called once"
        computing.end()
        if not attempt.answered:  # then the connector has nothing to read
            self._sent(attempt)
        attempt.end_if_unused()
        self._computes()

    def _sent(self, attempt: VLLMAttempt) -> None:
        """The connector reads the blocks no more."""
        if attempt.sending is not None:
            attempt.sending.end()
            attempt.sending = None

    def _output(self, attempt: VLLMAttempt, output: Any) -> None:
        [completion] = output.outputs
        reason = completion.finish_reason or ""
        if reason in ("error", "abort") or completion.stop_reason == REJECTED:
            attempt.no_kv = attempt.no_kv or completion.stop_reason or reason
            self._failed(attempt)
            return
        if attempt.handover and reason == "length":
            request = attempt.request
            most = min(self._described.max_model_len, len(request.prompt_ids) + request.sampling.max_tokens)
            reason = "" if attempt.tokens + 1 < most else reason  # it goes on elsewhere
        if output.prompt_logprobs:
            for piece in prompt_logprobs(attempt.request, output.prompt_logprobs):
                self._attempts.scored(piece)
        if attempt.awaits_kv and completion.token_ids:
            self._joined(attempt)
        index = len(attempt.request.output_ids) + (attempt.source is not None) + attempt.num_sampled
        for token in tokens(attempt.request, index, output, reason, prefilled=not attempt.answered):
            self._sampled(attempt, token)
        if reason:
            self._finished(attempt)

    def _joined(self, attempt: VLLMAttempt) -> None:
        """vLLM goes on after the token of a prefill. It is repeated: the router emits each index once."""
        self._answered(attempt)
        first, index = attempt.first_token.result(), len(attempt.request.output_ids)
        repeated = Output(attempt.id, index, first.token_id, logprobs_of(first))
        self._attempts.token(attempt, repeated, elsewhere=True)
        if attempt.taken is not None:
            attempt.taken.stream = None
            attempt.taken.close("cancelled")

    def _answered(self, attempt: VLLMAttempt) -> None:
        attempt.joined_at, attempt.answered = time.monotonic(), True
        if not attempt.closed and (attempt.decode or attempt.handover):
            attempt.to(State.DECODING if attempt.decode else State.HELD)

    def _sampled(self, attempt: VLLMAttempt, output: Output) -> None:
        if not attempt.answered:
            self._answered(attempt)
            self._moved.set()
            if attempt.handover:  # the connector says `Computed`
                first = handed_over(output)
                if output.logprobs is not None:
                    self._tell(Commit(attempt.id, first))
                attempt.first_token.set_result(first)
            else:
                self._attempts.counts.count_prompt(attempt.tokens, output.cached_tokens, attempt.fetched)
            self._attempts.prefilled(attempt, output)
        self._attempts.token(attempt, output)

    def _finished(self, attempt: VLLMAttempt) -> None:
        if attempt.decode:
            self._attempts.decoded(attempt)
        elif attempt.handover:  # its token is the last
            attempt.stream = None
            attempt.close("finished")

    def _failed(self, attempt: VLLMAttempt) -> None:
        """vLLM has ended the request with an error."""
        if attempt.no_kv == "finished":
            self._attempts.fail(attempt, pb.FAILURE_CODE_FINISHED, "prefill's token is the last")
        elif attempt.source is not None:
            self._attempts.fail(attempt, pb.FAILURE_CODE_HANDED_BACK, f"its KV is not used ({attempt.no_kv})")
        else:
            self._attempts.fail(
                attempt, pb.FAILURE_CODE_ENGINE, "vLLM ended the request with an error; see the log"
            )

    def _end_without_kv(self, attempt: VLLMAttempt) -> None:
        """vLLM cannot fail a request whose layers are in several groups: it keeps it until it is aborted."""
        self._failed(attempt)
        attempt.close("gone")

    def _computes(self) -> None:
        """The requests in vLLM have changed, or are further."""
        self._moved.set()
        self._computing([x.id for x in self._attempts if x.computing is not None and x.submitted])

    # ------------------------------------------------------------ of the connector

    def heard(self, message: ForRoles) -> None:
        match message:
            case Computed(tokens, cached, fetched):
                self._attempts.counts.count_prompt(tokens, cached, fetched)
            case Costs(costs):
                self.load.costs = costs
            case Encoded():
                self.load.encoded = message
            case Wanted():
                self._serve(message)
            case Started(attempt_id) | Released(attempt_id):
                if (attempt := self._attempts.find(attempt_id)) is not None:
                    self._of_prefill(attempt, message)
            case _:
                if (attempt := self._attempts.find(message.decode_id)) is not None:
                    self._of_decode(attempt, message)
                elif not isinstance(message, Blind):
                    self._prefixes.handle(message)

    def _of_prefill(self, attempt: VLLMAttempt, message: Started | Released) -> None:
        if isinstance(message, Started):
            self._attempts.prefill_started(attempt)
        else:
            self._released(attempt, message.reason)

    def _of_decode(self, attempt: VLLMAttempt, message: Injected | FetchFailed | Closed | Blind) -> None:
        match message:
            case Injected(_, first_token, stats):
                attempt.first_token.set_result(first_token)
                self._attempts.injected(attempt, stats)
            case FetchFailed(_, reason):
                attempt.no_kv = reason
                if reason not in ("finished", "cancelled"):  # of these the worker of the prefill tells
                    assert attempt.source is not None
                    self._attempts.fail(attempt, pb.FAILURE_CODE_KV_FAILED, reason, attempt.source.prefill_id)
                self._end_without_kv(attempt)
            case Closed():
                attempt.no_kv = "cancelled"
                self._end_without_kv(attempt)
            case Blind():
                attempt.lost(pb.FAILURE_CODE_HANDED_BACK, "preempted: its images are on another worker")

    def _released(self, prefill: VLLMAttempt, reason: str) -> None:
        self._sent(prefill)
        if reason not in _SERVED:
            prefill.lost(*UNREAD.get(reason, _PREEMPTED))
        prefill.end_if_unused()
