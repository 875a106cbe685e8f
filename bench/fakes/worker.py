"""Fake workers with the real gRPC service on real sockets, and a model whose output is known.

Output token i of every request is `output_ids[i]`. So a stream must be the same with and without failures.
The KV of a prefill is an entry in a table that fake prefill and decode workers share. A test can switch on
the faults that real workers may have.
"""

import asyncio
import os
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field

import grpc.aio

from baton.content import Tier
from baton.rpc import worker_pb2 as pb
from baton.rpc.channel import cluster_pems, create_server
from baton.rpc.tls import TlsFiles, add_port
from baton.rpc.worker_pb2_grpc import WorkerServicer, add_WorkerServicer_to_server

SECRET = b"a secret of the cluster"
EOS = 2
PROMPT_PIECE = 4
"""Tokens in a `PromptLogprobs` message."""


@dataclass
class KV:
    """The transfer of a prefill's KV. Decode waits for `settled`, then reads `good`."""

    settled: asyncio.Event = field(default_factory=asyncio.Event)
    good: bool = False

    def settle(self, good: bool) -> None:
        self.good = good
        self.settled.set()


@dataclass
class Lanes:
    """The KV of all prefills, by prefill id."""

    table: dict[bytes, KV] = field(default_factory=dict)

    def of(self, prefill_id: bytes) -> KV:
        return self.table.setdefault(prefill_id, KV())


class FakeWorker(WorkerServicer):
    """One worker. Its pool is a label: it takes both kinds of attempts at any time.

    Attributes (a test may change them at any time):
        steps: None, or a semaphore of the tokens that the worker may still send.
        starts: None, or a semaphore of the prefills that may start.
        scores_prompts: False: it sends no log probabilities of prompts.
        no_room: how many reservations to refuse.
        fail: how many attempts to fail, and the code.
        fail_after: fail each decode after that many tokens.
        holds_kv: the test decides when a transfer succeeds or fails.
        transfer: awaited with the prefill id, after the first token and before the KV is there.
        duplicate, late: send each token twice; repeat old tokens in between.
        change: called with each token before it is sent.
        before_status: awaited before GetStatus answers.
        described: how often Describe was called.
        cache: None, or the chunks that routers are told when they attach.
        step_seconds: 0, or the interval in which all attempts get their next token at the same time.
    """

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
        self.first_pool = first_pool
        self.lanes = lanes
        self.output_ids = output_ids
        self.index = index
        self.secret = secret
        self.tls = tls
        self.steps: asyncio.Semaphore | None = None
        self.starts: asyncio.Semaphore | None = None
        self.scores_prompts = True
        self.no_room = 0
        self.fail: tuple[int, pb.FailureCode] = (0, pb.FAILURE_CODE_ENGINE)
        self.fail_after: int | None = None
        self.holds_kv = False
        self.transfer: Callable[[bytes], Awaitable[None]] = _at_once
        self.duplicate = self.late = False
        self.change: Callable[[pb.TokenEvent], None] = lambda event: None
        self.before_status: Callable[[], Awaitable[None]] = _nothing
        self.described = 0
        self.step_seconds = 0.0
        self.cache: set[int] | None = None
        self.cache_sequence = 0
        self._step: asyncio.Future[None] | None = None
        self.submitted: list[pb.RouterMessage] = []
        self.cancelled: list[bytes] = []
        self.arrived = asyncio.Event()  # set with each message from a router
        self.status = pb.WorkerStatus(
            health=pb.WorkerStatus.HEALTH_SERVING,
            pool=first_pool,
            blocks_free=512,
            blocks_total=512,
            prefill_tokens_per_s=1e9,  # it answers at once
        )
        self.model, self.served_model_name = "fake", ""
        self.model_fingerprint = "model=m1"
        self.max_model_len = 8192
        self.vocab_size, self.vocabulary_fingerprint = 1 << 20, ""
        self.incarnation = int.from_bytes(os.urandom(8))
        self.address = ""
        self.metrics_address = "127.0.0.1:2"  # no process listens there
        self._outputs: set[asyncio.Queue[pb.WorkerMessage]] = set()
        self._attempts: dict[bytes, asyncio.Task[None]] = {}
        self._sources: dict[bytes, Source] = {}
        self._server: grpc.aio.Server | None = None

    # ------------------------------------------------------------ start, stop, reports

    async def start(self, port: int = 0) -> "FakeWorker":
        self._server = create_server(self.secret, self.tls)
        add_WorkerServicer_to_server(self, self._server)
        port = add_port(self._server, "127.0.0.1", port, cluster_pems(self.secret, self.tls))
        self.address = f"127.0.0.1:{port}"
        await self._server.start()
        return self

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
        async with asyncio.timeout(10):
            while not condition(self):
                self.arrived.clear()
                await self.arrived.wait()

    @property
    def attached(self) -> bool:
        """Whether the stream of a router is open."""
        return bool(self._outputs)

    def report(self) -> None:
        """Sends `status` to all routers."""
        for outputs in self._outputs:
            outputs.put_nowait(pb.WorkerMessage(status=self.status))

    def offer(self, number: int, token_ids: list[int]) -> None:
        """Offers a prefix to all routers."""
        offer = pb.Offer(number=number, prefix=pb.Prefix(token_ids=token_ids))
        for outputs in self._outputs:
            outputs.put_nowait(pb.WorkerMessage(offer=offer))

    def change_cache(
        self,
        added: Iterable[int],
        evicted: Iterable[int] = (),
        *,
        tiers: Mapping[Tier, Iterable[int]] | None = None,
        lost: bool = False,
    ) -> None:
        """Changes the cache, and tells all routers unless the message is `lost`. `tiers`: where chunks are
        now."""
        assert self.cache is not None
        self.cache = (self.cache | {*added}) - {*evicted}
        self.cache_sequence += 1
        events = pb.CacheEvents(sequence=self.cache_sequence, added=added, evicted=evicted)
        for tier, chunks in (tiers or {}).items():
            getattr(events, tier.name.lower()).extend(chunks)
        for outputs in () if lost else self._outputs:
            outputs.put_nowait(pb.WorkerMessage(cache=events))

    def _put_snapshot(self, outputs: asyncio.Queue[pb.WorkerMessage]) -> None:
        if self.cache is not None:
            events = pb.CacheEvents(sequence=self.cache_sequence, reset=True, added=self.cache)
            outputs.put_nowait(pb.WorkerMessage(cache=events))

    # ------------------------------------------------------------ the service

    async def Describe(
        self, request: pb.DescribeRequest, context: grpc.aio.ServicerContext
    ) -> pb.WorkerDescription:
        self.described += 1
        self.arrived.set()
        return pb.WorkerDescription(
            first_pool=self.first_pool, index=self.index, incarnation=self.incarnation, model=self.model,
            served_model_name=self.served_model_name, vocab_size=self.vocab_size,
            vocabulary_fingerprint=self.vocabulary_fingerprint,
            model_fingerprint=self.model_fingerprint, layout_fingerprint="l1", kv_address="127.0.0.1:1",
            metrics_address=self.metrics_address, fetches_prefixes=self.cache is not None,
            block_size=16, num_blocks=512, max_model_len=self.max_model_len, max_num_seqs=64,
            max_num_batched_tokens=2048,
        )  # fmt: skip

    async def GetStatus(
        self, request: pb.StatusRequest, context: grpc.aio.ServicerContext
    ) -> pb.WorkerStatus:
        await self.before_status()
        return self.status

    async def SetPool(self, request: pb.SetPoolRequest, context: grpc.aio.ServicerContext) -> pb.WorkerStatus:
        self.flip(request.pool)
        return self.status

    def flip(self, pool: "pb.Pool") -> None:
        """Moves to another pool and reports that."""
        self.status.pool = pool
        self.report()

    async def Attach(
        self, request_iterator: AsyncIterator[pb.RouterMessage], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.WorkerMessage]:
        outputs: asyncio.Queue[pb.WorkerMessage] = asyncio.Queue()
        self._outputs.add(outputs)
        self._put_snapshot(outputs)
        reading = asyncio.create_task(self._read(request_iterator, outputs))
        try:
            while True:
                messages = [await outputs.get()]
                while not outputs.empty():
                    messages.append(outputs.get_nowait())
                for message in _by_step(messages):
                    yield message
        finally:
            reading.cancel()
            self._outputs.discard(outputs)

    async def _read(
        self, messages: AsyncIterator[pb.RouterMessage], outputs: asyncio.Queue[pb.WorkerMessage]
    ) -> None:
        async for message in messages:
            match message.WhichOneof("kind"):
                case "prefill":
                    self._begin(message.prefill.prefill_id, self._prefill(message.prefill, outputs))
                case "decode":
                    submit = message.decode
                    here = not submit.HasField("source")
                    source = Source(submit.source.prefill_id, len(submit.request.output_ids), here)
                    self._sources[submit.decode_id] = source
                    self._begin(message.decode.decode_id, self._decode(message.decode, outputs))
                case "retarget":
                    source = self._sources[message.retarget.decode_id]
                    source.prefill_id = message.retarget.source.prefill_id
                    source.base = len(message.retarget.output_ids)
                    source.changed.set()
                case "cancel":
                    self._cancel(message.cancel.attempt_id)
                case "cache_resync":
                    self._put_snapshot(outputs)
            kind = message.WhichOneof("kind")
            if kind in ("prefill", "decode", "retarget", "fetch_prefix", "offer_declined"):
                self.submitted.append(message)
            self.arrived.set()

    def _begin(self, attempt_id: bytes, work) -> None:
        self._attempts[attempt_id] = asyncio.create_task(work)

    def _cancel(self, attempt_id: bytes) -> None:
        self.cancelled.append(attempt_id)
        task = self._attempts.get(attempt_id)
        if task is not None:
            task.cancel()
        if attempt_id not in self._sources and not self.lanes.of(attempt_id).settled.is_set():
            self.lanes.of(attempt_id).settle(False)

    # ------------------------------------------------------------ the model

    async def next_step(self) -> None:
        """Waits for the next step. The first waiter schedules the step for all waiters."""
        if not self.step_seconds:
            return
        if self._step is None:
            loop = asyncio.get_running_loop()
            self._step = loop.create_future()
            loop.call_later(self.step_seconds, self._finish_step)
        await asyncio.shield(self._step)

    def _finish_step(self) -> None:
        assert self._step is not None
        self._step.set_result(None)
        self._step = None

    def _fails(self, attempt_id: bytes, outputs: asyncio.Queue[pb.WorkerMessage]) -> bool:
        left, code = self.fail
        if left > 0:
            self.fail = (left - 1, code)
            self._say_failed(outputs, attempt_id, code)
        return left > 0

    async def _emit(
        self, attempt_id: bytes, request: pb.Request, index: int, outputs: asyncio.Queue[pb.WorkerMessage]
    ) -> bool:
        """Sends output token `index`. Returns whether it is the last one."""
        await self.next_step()
        if request.sampling.HasField("prompt_logprobs") and self.scores_prompts and not index:
            self._put_prompt_logprobs(attempt_id, request, outputs)
        if self.steps is not None:
            await self.steps.acquire()
        token_id = self.output_ids[index % len(self.output_ids)]
        finish = pb.FINISH_REASON_NONE
        sampling = request.sampling
        if (token_id == EOS and not sampling.ignore_eos) or token_id in sampling.stop_token_ids:
            finish = pb.FINISH_REASON_STOP
        elif index + 1 >= sampling.max_tokens:
            finish = pb.FINISH_REASON_LENGTH
        event = pb.TokenEvent(
            attempt_id=attempt_id, output_index=index, token_id=token_id, finish_reason=finish
        )
        if attempt_id not in self._sources:
            event.cached_tokens = 3
        if sampling.HasField("logprobs"):
            event.logprobs.logprob = -0.5 * (index + 1)
            top = list(sampling.logprob_token_ids) or range(100, 100 + sampling.logprobs)
            event.logprobs.top_ids.extend(top)
            event.logprobs.top_logprobs.extend(-float(i) for i in range(len(top)))
        self.change(event)
        events = [event, event] if self.duplicate else [event]
        if self.late and index > len(request.output_ids):
            old = pb.TokenEvent(
                attempt_id=attempt_id, output_index=index - 1, token_id=self.output_ids[index - 1]
            )
            events.insert(0, old)
        outputs.put_nowait(pb.WorkerMessage(step=pb.StepOutput(tokens=events)))
        return finish != pb.FINISH_REASON_NONE

    def _put_prompt_logprobs(
        self, attempt_id: bytes, request: pb.Request, outputs: asyncio.Queue[pb.WorkerMessage]
    ) -> None:
        """The token at position p has the log probability -p and the rank p. Its alternative i is token
        100 + i, with the log probability -i."""
        top = request.sampling.prompt_logprobs
        for start in range(1, len(request.prompt_ids), PROMPT_PIECE):
            positions = range(start, min(start + PROMPT_PIECE, len(request.prompt_ids)))
            message = pb.PromptLogprobs(
                attempt_id=attempt_id,
                position=start,
                logprobs=array("f", (-p for p in positions)).tobytes(),
                ranks=array("i", positions).tobytes(),
                top_ids=array("i", [100 + i for i in range(top)] * len(positions)).tobytes(),
                top_logprobs=array("f", [-i for i in range(top)] * len(positions)).tobytes(),
            )
            outputs.put_nowait(pb.WorkerMessage(prompt_logprobs=message))

    async def _prefill(self, submit: pb.SubmitPrefill, outputs: asyncio.Queue[pb.WorkerMessage]) -> None:
        if self._fails(submit.prefill_id, outputs):
            await self.transfer(submit.prefill_id)
            self.lanes.of(submit.prefill_id).settle(False)
            return
        if self.starts is not None:
            await self.starts.acquire()
        if submit.report_start:
            started = pb.PrefillStarted(prefill_id=submit.prefill_id)
            outputs.put_nowait(pb.WorkerMessage(prefill_started=started))
        finished = await self._emit(
            submit.prefill_id, submit.request, len(submit.request.output_ids), outputs
        )
        if submit.handover and not finished and not self.holds_kv:
            await self.transfer(submit.prefill_id)
            self.lanes.of(submit.prefill_id).settle(True)

    async def _decode(self, submit: pb.SubmitDecode, outputs: asyncio.Queue[pb.WorkerMessage]) -> None:
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
        for outputs in self._outputs:
            self._say_failed(outputs, prefill_id, pb.FAILURE_CODE_DROPPED)

    def _say_failed(
        self, outputs: asyncio.Queue[pb.WorkerMessage], attempt_id: bytes, code: "pb.FailureCode"
    ) -> None:
        failed = pb.AttemptFailed(attempt_id=attempt_id, code=code, message="fails on purpose")
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


def _by_step(messages: list[pb.WorkerMessage]) -> list[pb.WorkerMessage]:
    """Joins consecutive tokens in one message, as a real worker does with the tokens of a step."""
    joined: list[pb.WorkerMessage] = []
    for message in messages:
        if joined and message.HasField("step") and joined[-1].HasField("step"):
            joined[-1].step.tokens.extend(message.step.tokens)
        else:
            joined.append(message)
    return joined


@dataclass
class Source:
    """Where the KV of a reservation comes from. A Retarget message changes it."""

    prefill_id: bytes
    base: int
    here: bool = False  # the decode worker computes the prompt
    changed: asyncio.Event = field(default_factory=asyncio.Event)
