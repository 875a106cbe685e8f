"""Fake workers with the faults that real workers may have. A test switches them on.

Output token i of every request is `output_ids[i]`. So a stream must be the same with and without failures.
"""

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field

import grpc.aio

from baton.bench.lab.router.stand_in import Lanes, Outputs, StandIn
from baton.kv_names import Tier
from baton.rpc import worker_pb2 as pb
from baton.rpc.tls import TlsFiles
from baton.rpc.token_ids import unpacked_ids
from tests.within import WITHIN

SECRET = b"a secret of the cluster"
EOS = 2
PROMPT_PIECE = 4
"""Tokens in a `PromptLogprobs` message."""


class FakeWorker(StandIn):
    """One worker.

    Attributes (a test may change them at any time):
        steps: None, or a semaphore of the tokens that the worker may still send.
        starts: None, or a semaphore of the prefills that may start.
        scores_prompts: False: it sends no log probabilities of prompts.
        no_room: how many reservations to refuse.
        fail: how many attempts to fail, and the code.
        failure: what is said of each attempt that fails.
        fail_after: fail each decode after that many tokens.
        holds_kv: the test decides when a transfer succeeds or fails.
        retargets: False: it hands a request back that should fetch from another prefill, as with vLLM.
        transfer: awaited with the prefill id, after the first token and before the KV is there.
        duplicate, late: send each token twice; repeat old tokens in between.
        change: called with each token before it is sent.
        before_description: awaited before Describe answers.
        described: how often Describe was called.
        cache: None, or the chunks that routers are told when they attach.
        attention_doubles_at: as in the description; 0: it computes no parts of prompts.
        num_layers, kv_token_bytes: as there.
        exchanges_prefixes: as there.
        refuses_pause: why it refuses to pause; empty: it does not.
        refuses_restart: why its engine process is not restarted; empty: it is.
        engine_restarts: how often it was.
        paused: the last pause that it was asked for.
        phases: what it remembers of requests, by their names.
    """

    attention_doubles_at = 0
    num_layers = 1
    kv_token_bytes = 0
    exchanges_prefixes = True

    def __init__(
        self,
        first_pool: "pb.Pool",
        lanes: Lanes,
        output_ids: list[int],
        *,
        index: int = 0,
        secret: bytes = SECRET,
        tls: TlsFiles | None = None,
    ) -> None:
        super().__init__(first_pool, lanes, output_ids, secret=secret)
        self.index = index
        self.tls = tls
        self.steps: asyncio.Semaphore | None = None
        self.starts: asyncio.Semaphore | None = None
        self.scores_prompts = True
        self.pixels: list[bytes] = []
        self.no_room = 0
        self.fail: tuple[int, pb.FailureCode] = (0, pb.FAILURE_CODE_ENGINE)
        self.failure = "fails on purpose"
        self.fail_after: int | None = None
        self.holds_kv = False
        self.retargets = True
        self.transfer: Callable[[bytes], Awaitable[None]] = _at_once
        self.duplicate = self.late = False
        self.burst = 1
        """Tokens of a message, as of a step whose drafts were right."""
        self._unsent: dict[bytes, list[pb.TokenEvent]] = {}
        self.change: Callable[[pb.TokenEvent], None] = lambda event: None
        self.before_description: Callable[[], Awaitable[None]] = _nothing
        self.described = 0
        self.cache: set[int] | None = None
        self._wanting_cache: set[Outputs] = set()
        self.submitted: list[pb.RouterMessage] = []
        self.cancelled: list[bytes] = []
        self.arrived = asyncio.Event()  # set with each message from a router
        self.model, self.served_model_name = "fake", ""
        self.model_fingerprint = "model=m1"
        self.max_model_len = 8192
        self.numerics = ""
        self.vocab_size, self.vocabulary_fingerprint = 1 << 20, ""
        self.metrics_address = "127.0.0.1:2"  # no process listens there
        self._sources: dict[bytes, Source] = {}
        self._may_step = asyncio.Event()
        self._may_step.set()
        self.refuses_pause = self.refuses_restart = ""
        self.engine_restarts = 0
        self.paused = pb.PauseRequest()
        self.phases: dict[str, list[pb.Phase]] = {}

    # ------------------------------------------------------------ start, stop, reports

    async def start(self, port: int = 0, tls: TlsFiles | None = None) -> "FakeWorker":
        return await super().start(port, tls or self.tls)

    async def kill(self) -> None:
        """As kill -9: streams break at once, and the KV is lost."""
        if self._server is not None:
            server, self._server = self._server, None
            for task in self._attempts.values():
                task.cancel()
            for message in self.submitted:
                if message.HasField("prefill"):
                    kv = self.lanes.of(message.prefill.prefill_id)
                    if not kv.settled.is_set():
                        kv.settle(False)
                    kv.good = False
            await server.stop(None)

    async def until(self, condition) -> None:
        """Waits for `condition(self)`, which it checks with each message from a router."""
        async with asyncio.timeout(WITHIN):
            while not condition(self):
                self.arrived.clear()
                await self.arrived.wait()

    @property
    def attached(self) -> bool:
        """Whether the stream of a router is open."""
        return bool(self.outputs)

    def report(self) -> None:
        """Sends `status` to all routers."""
        for outputs in self.outputs:
            outputs.put_nowait(pb.WorkerMessage(status=self.status))

    def change_cache(
        self,
        added: Iterable[int],
        evicted: Iterable[int] = (),
        *,
        tiers: Mapping[Tier, Iterable[int]] | None = None,
    ) -> None:
        """Changes the cache, and tells all routers. `tiers`: where chunks are now."""
        assert self.cache is not None
        self.cache = (self.cache | {*added}) - {*evicted}
        events = pb.CacheEvents(added=added, evicted=evicted)
        for tier, chunks in (tiers or {}).items():
            getattr(events, tier.name.lower()).extend(chunks)
        for outputs in self.outputs & self._wanting_cache:
            outputs.put_nowait(pb.WorkerMessage(cache=events))

    def _put_snapshot(self, outputs: Outputs) -> None:
        if self.cache is not None:
            events = pb.CacheEvents(reset=True, added=self.cache)
            outputs.put_nowait(pb.WorkerMessage(cache=events))

    # ------------------------------------------------------------ the service

    async def Describe(
        self, request: pb.DescribeRequest, context: grpc.aio.ServicerContext
    ) -> pb.WorkerDescription:
        self.described += 1
        self.arrived.set()
        await self.before_description()
        described = await super().Describe(request, context)
        for name in (
            "index", "model", "served_model_name", "vocab_size", "vocabulary_fingerprint",
            "model_fingerprint", "metrics_address", "max_model_len", "numerics",
            "attention_doubles_at", "num_layers", "kv_token_bytes", "exchanges_prefixes",
        ):  # fmt: skip
            setattr(described, name, getattr(self, name))
        return described

    async def GetPhases(self, request: pb.PhasesRequest, context: grpc.aio.ServicerContext) -> pb.Phases:
        return pb.Phases(phases=self.phases.get(request.name, ()))

    async def SetPool(self, request: pb.SetPoolRequest, context: grpc.aio.ServicerContext) -> pb.WorkerStatus:
        self.flip(request.pool)
        return self.status

    async def RestartEngine(
        self, request: pb.RestartEngineRequest, context: grpc.aio.ServicerContext
    ) -> pb.RestartedEngine:
        if self.refuses_restart:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, self.refuses_restart)
        self.engine_restarts += 1
        return pb.RestartedEngine(seconds=2.25)

    async def SetPause(self, request: pb.PauseRequest, context: grpc.aio.ServicerContext) -> pb.WorkerStatus:
        """Frozen, it sends no token."""
        if self.refuses_pause:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, self.refuses_pause)
        if not request.pause and self.status.released:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "memory is released")
        self.status.pause, self.paused = request.pause, request
        self.report()
        if request.abort:
            for attempt_id, task in self._attempts.items():
                if not task.done():
                    task.cancel()
                    for outputs in self.outputs:
                        self._say_failed(outputs, attempt_id, pb.FAILURE_CODE_ABORTED)
        if request.pause == pb.PAUSE_STEPS:
            self._may_step.clear()
        else:
            self._may_step.set()
        return self.status

    async def SetMemory(
        self, request: pb.MemoryRequest, context: grpc.aio.ServicerContext
    ) -> pb.WorkerStatus:
        if self.refuses_pause:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, self.refuses_pause)
        status, tags = self.status, set(request.tags)
        released = {*status.released} | tags if request.release else {*status.released} - tags
        status.released[:] = sorted(released)
        status.lost_weights |= "weights" in released
        status.pause = pb.PAUSE_STEPS if released or status.lost_weights else pb.PAUSE_NONE
        self.report()
        return status

    def flip(self, pool: "pb.Pool") -> None:
        """Moves to another pool and reports that."""
        self.status.pool = pool
        self.report()

    def _take(self, message: pb.RouterMessage, outputs: Outputs) -> None:
        kind = message.WhichOneof("kind")
        match kind:
            case "pixels":
                self.pixels.append(message.pixels.data)
            case "decode":
                submit = message.decode
                here = not submit.HasField("source")
                source = Source(submit.source.prefill_id, len(submit.request.output_ids), here)
                self._sources[submit.decode_id] = source
            case "retarget":
                source = self._sources[message.retarget.decode_id]
                source.prefill_id = message.retarget.source.prefill_id
                source.base = len(message.retarget.output_ids)
                source.changed.set()
            case "hello" if message.hello.cache:
                self._wanting_cache.add(outputs)
                self._put_snapshot(outputs)
        super()._take(message, outputs)
        if kind in ("prefill", "decode", "retarget"):
            self.submitted.append(message)
        self.arrived.set()

    def _cancel(self, attempt_id: bytes) -> None:
        self.cancelled.append(attempt_id)
        super()._cancel(attempt_id)
        if attempt_id not in self._sources and not self.lanes.of(attempt_id).settled.is_set():
            self.lanes.of(attempt_id).settle(False)

    # ------------------------------------------------------------ the model

    def _fails(self, attempt_id: bytes, outputs: Outputs) -> bool:
        left, code = self.fail
        if left > 0:
            self.fail = (left - 1, code)
            self._say_failed(outputs, attempt_id, code)
        return left > 0

    async def _emit(self, attempt_id: bytes, request: pb.Request, index: int, outputs: Outputs) -> bool:
        """Sends output token `index`. Returns whether it is the last one."""
        await self._may_step.wait()
        await self.next_step()
        if request.sampling.HasField("prompt_logprobs") and self.scores_prompts and not index:
            self._put_prompt_logprobs(attempt_id, request, outputs)
        if self.steps is not None:
            await self.steps.acquire()
        event = self._token(attempt_id, request, index)
        self.change(event)
        events = [event, event] if self.duplicate else [event]
        if self.late and index > len(request.output_ids):
            old = pb.TokenEvent(
                attempt_id=attempt_id, output_index=index - 1, token_id=self.output_ids[index - 1]
            )
            events.insert(0, old)
        events = [*self._unsent.pop(attempt_id, ()), *events]
        if len(events) < self.burst and not event.finish_reason:
            self._unsent[attempt_id] = events
        else:
            outputs.put_nowait(pb.WorkerMessage(step=pb.StepOutput(tokens=events)))
        return event.finish_reason != pb.FINISH_REASON_NONE

    def _token(self, attempt_id: bytes, request: pb.Request, index: int) -> pb.TokenEvent:
        event, sampling = super()._token(attempt_id, request, index), request.sampling
        if (event.token_id == EOS and not sampling.ignore_eos) or event.token_id in sampling.stop_token_ids:
            event.finish_reason = pb.FINISH_REASON_STOP
        if attempt_id not in self._sources:
            event.cached_tokens = 3
        if sampling.HasField("logprobs"):
            event.logprobs.logprob = -0.5 * (index + 1)
            top = list(sampling.logprob_token_ids) or range(100, 100 + sampling.logprobs)
            event.logprobs.top_ids.extend(top)
            event.logprobs.top_logprobs.extend(-float(i) for i in range(len(top)))
        return event

    def _put_prompt_logprobs(self, attempt_id: bytes, request: pb.Request, outputs: Outputs) -> None:
        """The token at position p has the log probability -p and the rank p. Its alternative i is token
        100 + i, with the log probability -i."""
        top = request.sampling.prompt_logprobs
        prompt = len(unpacked_ids(request.prompt_ids))
        for start in range(1, prompt, PROMPT_PIECE):
            positions = range(start, min(start + PROMPT_PIECE, prompt))
            message = pb.PromptLogprobs(
                attempt_id=attempt_id,
                position=start,
                logprobs=array("f", (-p for p in positions)).tobytes(),
                ranks=array("i", positions).tobytes(),
                top_ids=array("i", [100 + i for i in range(top)] * len(positions)).tobytes(),
                top_logprobs=array("f", [-i for i in range(top)] * len(positions)).tobytes(),
            )
            outputs.put_nowait(pb.WorkerMessage(prompt_logprobs=message))

    async def _prefill(self, submit: pb.SubmitPrefill, outputs: Outputs) -> None:
        if self._fails(submit.prefill_id, outputs):
            await self.transfer(submit.prefill_id)
            self.lanes.of(submit.prefill_id).settle(False)
            return
        if self.starts is not None:
            await self.starts.acquire()
        await super()._prefill(submit, outputs)

    async def _hand_over(self, prefill_id: bytes) -> None:
        if not self.holds_kv:
            await self.transfer(prefill_id)
            await super()._hand_over(prefill_id)

    async def _decode(self, submit: pb.SubmitDecode, outputs: Outputs) -> None:
        decode_id, request = submit.decode_id, submit.request
        if self._fails(decode_id, outputs):
            return
        if self.no_room > 0:
            self.no_room -= 1
            self._say_failed(outputs, decode_id, pb.FAILURE_CODE_NO_ROOM)
            return
        outputs.put_nowait(pb.WorkerMessage(reserved=pb.Reserved(decode_id=decode_id)))
        source = self._sources[decode_id]
        while not await self._fetched(source):
            if not source.changed.is_set():
                failed = pb.AttemptFailed(
                    attempt_id=decode_id, code=pb.FAILURE_CODE_KV_FAILED, prefill_id=source.prefill_id
                )
                outputs.put_nowait(pb.WorkerMessage(failed=failed))
                await source.changed.wait()
                if not self.retargets:
                    self._say_failed(outputs, decode_id, pb.FAILURE_CODE_HANDED_BACK)
                    return
            source.changed.clear()
        index = source.base
        while not await self._emit(decode_id, request, index, outputs):
            index += 1
            if self.fail_after is not None and index == source.base + self.fail_after:
                self._say_failed(outputs, decode_id, pb.FAILURE_CODE_ENGINE)
                return

    def drop(self, prefill_id: bytes) -> None:
        """Drops a finished prefill that was not fetched, as a worker that needs its blocks."""
        self.lanes.of(prefill_id).good = False
        for outputs in self.outputs:
            self._say_failed(outputs, prefill_id, pb.FAILURE_CODE_DROPPED)

    def _say_failed(self, outputs: Outputs, attempt_id: bytes, code: "pb.FailureCode") -> None:
        failed = pb.AttemptFailed(attempt_id=attempt_id, code=code, message=self.failure)
        outputs.put_nowait(pb.WorkerMessage(failed=failed))

    async def _fetched(self, source: "Source") -> bool:
        """Whether the KV came. False also if the router named another source meanwhile."""
        if source.here:
            return True
        kv = self.lanes.of(source.prefill_id)
        waits = [asyncio.create_task(kv.settled.wait()), asyncio.create_task(source.changed.wait())]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for task in waits:
            task.cancel()
        return kv.good and not source.changed.is_set()


async def _nothing() -> None:
    pass


async def _at_once(prefill_id: bytes) -> None:
    pass


@dataclass
class Source:
    """Where the KV of a reservation comes from. A Retarget message changes it."""

    prefill_id: bytes
    base: int
    here: bool = False  # the decode worker computes the prompt
    changed: asyncio.Event = field(default_factory=asyncio.Event)
