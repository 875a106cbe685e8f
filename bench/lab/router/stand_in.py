"""Stand-ins for workers: the real gRPC service on real sockets, and a model whose output is known.

Output token i of every request is `output_ids[i]`. The KV of a prefill is an entry in a table that a prefill
and a decode worker share. Tests have a subclass with the faults of real workers.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field
from typing import Any, Self

import grpc.aio

from baton.rpc import worker_pb2 as pb
from baton.rpc.channel import cluster_pems, create_server
from baton.rpc.port import Server
from baton.rpc.stubs import WORKER, add_service
from baton.rpc.tls import TlsFiles, add_port

Outputs = asyncio.Queue[pb.WorkerMessage]
"""To one router."""


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


class StandIn:
    """One worker. Its pool is a label: it takes both kinds of attempts at any time.

    Attributes:
        step_seconds: 0, or the interval in which all attempts get their next token at the same time.
    """

    def __init__(self, first_pool: pb.Pool, lanes: Lanes, output_ids: list[int], *, secret: bytes) -> None:
        self.first_pool, self.lanes, self.output_ids, self.secret = first_pool, lanes, output_ids, secret
        self.step_seconds = 0.0
        self.address = ""
        self.incarnation = int.from_bytes(os.urandom(8))
        self.status = pb.WorkerStatus(
            health=pb.WorkerStatus.HEALTH_SERVING,
            pool=first_pool,
            blocks_free=512,
            blocks_total=512,
            prefill_tokens_per_s=1e9,  # it answers at once
        )
        self._step: asyncio.Future[None] | None = None
        self.outputs: set[Outputs] = set()
        self._attempts: dict[bytes, asyncio.Task[None]] = {}
        self._server: Server | None = None

    async def start(self, port: int = 0, tls: TlsFiles | None = None) -> Self:
        self._server = create_server(self.secret, tls)
        add_service(self._server, WORKER, self)
        port = add_port(self._server, "127.0.0.1", port, cluster_pems(self.secret, tls))
        self.address = f"127.0.0.1:{port}"
        await self._server.start()
        return self

    # ------------------------------------------------------------ the service

    async def Describe(
        self, request: pb.DescribeRequest, context: grpc.aio.ServicerContext
    ) -> pb.WorkerDescription:
        return pb.WorkerDescription(
            first_pool=self.first_pool, incarnation=self.incarnation, model="fake", vocab_size=1 << 20,
            model_fingerprint="model=m1", layout_fingerprint="l1", kv_address="127.0.0.1:1",
            metrics_address="127.0.0.1:2",  # no process listens there
            block_size=16, num_blocks=512, max_model_len=8192, max_num_seqs=64, max_num_batched_tokens=2048,
            exchanges_prefixes=True, status=self.status,
        )  # fmt: skip

    async def GetStatus(
        self, request: pb.StatusRequest, context: grpc.aio.ServicerContext
    ) -> pb.WorkerStatus:
        return self.status

    async def Attach(
        self, request_iterator: AsyncIterator[pb.RouterMessage], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.WorkerMessage]:
        outputs: Outputs = asyncio.Queue()
        self._attached(outputs)
        reading = asyncio.create_task(self._read(request_iterator, outputs, context))
        try:
            while True:
                messages = [await outputs.get()]
                while not outputs.empty():
                    messages.append(outputs.get_nowait())
                for message in _by_step(messages):
                    yield message
        finally:
            reading.cancel()
            self.outputs.discard(outputs)

    def _attached(self, outputs: Outputs) -> None:
        self.outputs.add(outputs)

    async def _read(
        self,
        messages: AsyncIterator[pb.RouterMessage],
        outputs: Outputs,
        context: grpc.aio.ServicerContext,
    ) -> None:
        async for message in messages:
            if message.hello.describe:
                described = await self.Describe(pb.DescribeRequest(), context)
                outputs.put_nowait(pb.WorkerMessage(description=described))
            self._take(message, outputs)

    def _take(self, message: pb.RouterMessage, outputs: Outputs) -> None:
        match message.WhichOneof("kind"):
            case "prefill":
                self._begin(message.prefill.prefill_id, self._prefill(message.prefill, outputs))
            case "decode":
                self._begin(message.decode.decode_id, self._decode(message.decode, outputs))
            case "cancel":
                self._cancel(message.cancel.attempt_id)

    def _begin(self, attempt_id: bytes, work: Coroutine[Any, Any, None]) -> None:
        self._attempts[attempt_id] = asyncio.create_task(work)

    def _cancel(self, attempt_id: bytes) -> None:
        if (task := self._attempts.get(attempt_id)) is not None:
            task.cancel()

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

    async def _prefill(self, submit: pb.SubmitPrefill, outputs: Outputs) -> None:
        if submit.report_start:
            started = pb.PrefillStarted(prefill_id=submit.prefill_id)
            outputs.put_nowait(pb.WorkerMessage(prefill_started=started))
        first = len(submit.request.output_ids)
        finished = await self._emit(submit.prefill_id, submit.request, first, outputs)
        if submit.handover and not finished:
            await self._hand_over(submit.prefill_id)

    async def _hand_over(self, prefill_id: bytes) -> None:
        self.lanes.of(prefill_id).settle(True)

    async def _decode(self, submit: pb.SubmitDecode, outputs: Outputs) -> None:
        outputs.put_nowait(pb.WorkerMessage(reserved=pb.Reserved(decode_id=submit.decode_id)))
        if submit.HasField("source"):
            await self.lanes.of(submit.source.prefill_id).settled.wait()
        index = len(submit.request.output_ids)
        while not await self._emit(submit.decode_id, submit.request, index, outputs):
            index += 1

    async def _emit(self, attempt_id: bytes, request: pb.Request, index: int, outputs: Outputs) -> bool:
        """Sends output token `index`. Returns whether it is the last one."""
        await self.next_step()
        event = self._token(attempt_id, request, index)
        outputs.put_nowait(pb.WorkerMessage(step=pb.StepOutput(tokens=[event])))
        return event.finish_reason != pb.FINISH_REASON_NONE

    def _token(self, attempt_id: bytes, request: pb.Request, index: int) -> pb.TokenEvent:
        ended = index + 1 >= request.sampling.max_tokens
        return pb.TokenEvent(
            attempt_id=attempt_id, output_index=index, token_id=self.output_ids[index % len(self.output_ids)],
            finish_reason=pb.FINISH_REASON_LENGTH if ended else pb.FINISH_REASON_NONE,
        )  # fmt: skip


def _by_step(messages: list[pb.WorkerMessage]) -> list[pb.WorkerMessage]:
    """Joins consecutive tokens in one message, as a real worker does with the tokens of a step."""
    joined: list[pb.WorkerMessage] = []
    for message in messages:
        if joined and message.HasField("step") and joined[-1].HasField("step"):
            joined[-1].step.tokens.extend(message.step.tokens)
        else:
            joined.append(message)
    return joined
