"""The gRPC face of a worker: Attach, Describe, GetStatus.

A router's stream owns what is submitted on it. It ends when the router ends it, when gRPC's keepalive finds the
router gone, when the router breaks the protocol, or when it leaves too much unread; each way the engine is told to
cancel all of it.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

import grpc.aio

from rpc import worker_pb2 as pb
from rpc.worker_pb2_grpc import WorkerServicer
from worker import messages, streams, validation
from worker.config import Role
from worker.messages import Code, ToEngine
from worker.streams import RouterStream
from worker.validation import Limits, ProtocolError, Refused

log = logging.getLogger(__name__)

HELLO_TIMEOUT = 5.0


class Backend(Protocol):
    """What the servicer needs of the rest of the service process."""

    draining: bool

    async def send(self, message: ToEngine) -> None:
        """To the engine, in order; waits when the engine is behind."""

    async def status(self) -> pb.WorkerStatus:
        """Read from the engine and transfer processes now."""


class AttachService(WorkerServicer):
    """Serves routers; owns their streams. `backend` owns the engine."""

    def __init__(
        self, backend: Backend, role: Role, limits: Limits, description: pb.WorkerDescription
    ) -> None:
        self._backend = backend
        self._role = role
        self._limits = limits
        self._description = description
        self._streams: dict[int, RouterStream] = {}
        self._opened = 0
        self._cancels: set[asyncio.Task[None]] = set()
        self._handlers: dict[str, Callable[[RouterStream, pb.RouterMessage], Awaitable[None]]] = {
            "prefill": self._prefill,
            "decode": self._decode,
            "retarget": self._retarget,
            "cancel": self._cancel,
        }

    # ------------------------------------------------------------ the calls

    async def Attach(self, request_iterator: object, context: grpc.aio.ServicerContext) -> None:
        try:
            hello = await asyncio.wait_for(context.read(), HELLO_TIMEOUT)
        except TimeoutError:
            hello = grpc.aio.EOF
        if hello is grpc.aio.EOF or hello.WhichOneof("kind") != "hello":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a stream begins with a RouterHello")
        if len(hello.hello.router_id) != validation.ID_BYTES:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "router_id must have 16 bytes")
        self._opened += 1
        stream = RouterStream(self._opened)
        self._streams[stream.number] = stream
        log.info("router %s attached", hello.hello.router_id.hex()[:8])
        tasks = [
            asyncio.create_task(self._read(stream, context)),
            asyncio.create_task(stream.write_to(context)),
            asyncio.create_task(stream.overflow.wait()),
        ]
        try:
            stream.put(pb.WorkerMessage(status=await self._backend.status()))
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            del self._streams[stream.number]
            self._cancel_all(stream)
            for task in tasks:
                task.cancel()
            reading, *_ = await asyncio.gather(*tasks, return_exceptions=True)
            log.info("router %s detached", hello.hello.router_id.hex()[:8])
        if stream.overflow.is_set():
            log.warning("router %s left more than 8 MiB unread and was cut", hello.hello.router_id.hex()[:8])
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, "more than 8 MiB of output was left unread"
            )
        if isinstance(reading, ProtocolError):
            log.warning("router %s broke the protocol: %s", hello.hello.router_id.hex()[:8], reading)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(reading))

    async def Describe(
        self, request: pb.DescribeRequest, context: grpc.aio.ServicerContext
    ) -> pb.WorkerDescription:
        return self._description

    async def GetStatus(
        self, request: pb.StatusRequest, context: grpc.aio.ServicerContext
    ) -> pb.WorkerStatus:
        return await self._backend.status()

    # ------------------------------------------------------------ worker to router

    def deliver(self, stream_number: int, message: pb.WorkerMessage) -> None:
        """To one router, if it is still there."""
        stream = self._streams.get(stream_number)
        if stream is not None:
            stream.put(message)

    def broadcast(self, message: pb.WorkerMessage) -> None:
        for stream in self._streams.values():
            stream.put(message)

    # ------------------------------------------------------------ router to worker

    async def _read(self, stream: RouterStream, context: grpc.aio.ServicerContext) -> None:
        while True:
            message = await context.read()
            if message is grpc.aio.EOF:
                return
            kind = message.WhichOneof("kind")
            handler = self._handlers.get(kind or "")
            if handler is None:
                raise ProtocolError(f"a message of kind {kind} is out of place here")
            await handler(stream, message)

    async def _prefill(self, stream: RouterStream, message: pb.RouterMessage) -> None:
        submit = message.prefill
        prefill_id = validation.attempt_id(submit.prefill_id, "prefill_id")
        try:
            self._accepts("prefill")
            work = validation.work(submit.request, self._limits)
        except Refused as refusal:
            stream.put(streams.failed(prefill_id, refusal.code, str(refusal)))
        else:
            await self._backend.send(messages.Prefill(stream.number, prefill_id, work, submit.handover))

    async def _decode(self, stream: RouterStream, message: pb.RouterMessage) -> None:
        submit = message.decode
        decode_id = validation.attempt_id(submit.decode_id, "decode_id")
        try:
            self._accepts("decode")
            work = validation.work(submit.request, self._limits)
            source = validation.source(submit.source)
        except Refused as refusal:
            stream.put(streams.failed(decode_id, refusal.code, str(refusal)))
        else:
            await self._backend.send(messages.Decode(stream.number, decode_id, work, source))

    async def _retarget(self, stream: RouterStream, message: pb.RouterMessage) -> None:
        retarget = message.retarget
        decode_id = validation.attempt_id(retarget.decode_id, "decode_id")
        try:
            source = validation.source(retarget.source)
            output_ids = validation.output_tokens(retarget.output_ids, self._limits)
        except Refused as refusal:
            await self._backend.send(messages.Cancel(stream.number, decode_id))
            stream.put(streams.failed(decode_id, refusal.code, str(refusal)))
        else:
            await self._backend.send(messages.Retarget(stream.number, decode_id, source, output_ids))

    async def _cancel(self, stream: RouterStream, message: pb.RouterMessage) -> None:
        attempt_id = validation.attempt_id(message.cancel.attempt_id, "attempt_id")
        await self._backend.send(messages.Cancel(stream.number, attempt_id))

    def _accepts(self, role: Role) -> None:
        if role != self._role:
            raise Refused(Code.INVALID, f"this is a {self._role} worker")
        if self._backend.draining:
            raise Refused(Code.DRAINING, "the worker is shutting down")

    def _cancel_all(self, stream: RouterStream) -> None:
        # In a task of its own: the call that ends may be cancelled while the engine is behind.
        task = asyncio.create_task(self._backend.send(messages.CancelStream(stream.number)))
        self._cancels.add(task)
        task.add_done_callback(self._cancels.discard)
