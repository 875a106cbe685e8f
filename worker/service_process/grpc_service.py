"""The gRPC service of a worker: its calls, and the streams of routers.

The stream of a router owns the attempts that are submitted on it. The stream ends when:

- the router ends it,
- gRPC's keepalive finds that the router is gone,
- the router breaks the protocol,
- the router leaves too many bytes unread.

In each case the engine cancels all attempts of the stream.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

import grpc.aio

from baton.rpc import worker_pb2 as pb
from baton.worker.engine_process import to_routers
from baton.worker.messages import Detached, FromRouter
from baton.worker.processes import TreeError
from baton.worker.service_process import validation
from baton.worker.service_process.adapters import WorkerAdapters
from baton.worker.service_process.backend import Backend, Refused
from baton.worker.service_process.memory import WorkerMemory
from baton.worker.service_process.pause import WorkerPause
from baton.worker.service_process.streams import Routers, RouterStream
from baton.worker.service_process.validation import Checked, Limits, RefusedAttempt, StreamError
from baton.worker.service_process.weights import WeightsReplacement

log = logging.getLogger(__name__)

HELLO_TIMEOUT = 5.0  # seconds

T = TypeVar("T")


class AttachService:
    """Serves routers. `routers` has their streams."""

    def __init__(
        self,
        backend: Backend,
        routers: Routers,
        limits: Limits,
        description: pb.WorkerDescription,
        *,
        encodes: bool = False,
    ) -> None:
        """`encodes`: it is an encoder, which takes images and no requests."""
        self._backend = backend
        self._routers = routers
        self._limits = limits
        self._description = description
        self._pause = WorkerPause(backend)
        self._weights = WeightsReplacement(backend, routers, self._pause, description)
        self._memory = WorkerMemory(backend, self._pause, self._weights)
        self._adapters = WorkerAdapters(backend, routers, description)
        self._cancels: set[asyncio.Task[None]] = set()
        self._encodes = encodes
        self._kinds: dict[str, tuple[str, Callable[[RouterStream, bytes, Any], Checked | None]]] = {
            "cancel": ("attempt_id", lambda _stream, _id, _: None),
        }
        if encodes:
            self._kinds["encode"] = "encode_id", self._encode
        else:
            self._kinds |= {
                "prefill": ("prefill_id", self._prefill),
                "decode": ("decode_id", self._decode),
                "retarget": ("decode_id", lambda _stream, _id, told: validation.retarget(told, limits)),
                "only_copies": ("", lambda _stream, _id, told: validation.only_copies(told)),
            }
        if description.kept_image_tokens:
            self._kinds["encode"] = "encode_id", self._encode
        if description.image_fingerprint:
            self._kinds["image_ready"] = "", lambda _stream, _id, told: validation.image_ready(told, limits)
        """By kind of a message, its field with the id of an attempt, and what checks it."""

    # ------------------------------------------------------------ the calls

    # It writes and does not yield, because a generator that waits for a slow router cannot be ended.
    async def Attach(self, request_iterator: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        try:
            router, hello = await _hello(request_iterator)
            report_seconds = validation.report_seconds(hello.report_seconds)
        except StreamError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        described = await self.Describe(pb.DescribeRequest(), context) if hello.describe else None
        while not self._weights.is_open:  # what was described may have changed
            await self._weights.opened()
            described = await self.Describe(pb.DescribeRequest(), context) if hello.describe else None
        stream = self._routers.open(report_seconds)
        if described is not None:
            stream.put(pb.WorkerMessage(description=described).SerializeToString())
        if hello.cache:
            stream.want_cache_events(self._backend.cache_snapshot)
        log.info("router %s attached", router)
        reading = asyncio.create_task(self._read(stream, request_iterator))
        writing = asyncio.create_task(stream.write_to(context))
        overflow = asyncio.create_task(stream.overflow.wait())
        try:
            await asyncio.wait({reading, writing, overflow}, return_when=asyncio.FIRST_COMPLETED)
            self._detach(stream)
            reading.cancel()
            # gRPC cannot end a call while a write is pending. A router that does not read learns of the end
            # only when it reads again.
            stream.discard()
            await asyncio.wait({reading, writing})
        finally:
            self._detach(stream)
            for task in (reading, writing, overflow):
                task.cancel()
            await asyncio.gather(reading, writing, overflow, return_exceptions=True)
            log.info("router %s detached", router)
        if stream.overflow.is_set():
            log.warning("the stream of router %s ends: it left more than 8 MiB unread", router)
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "the router left more than 8 MiB unread")
        if not reading.cancelled() and (broken := reading.exception()) is not None:
            log.warning("router %s broke the protocol: %s", router, broken)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(broken))

    async def Describe(
        self, request: pb.DescribeRequest, context: grpc.aio.ServicerContext
    ) -> pb.WorkerDescription:
        described = pb.WorkerDescription(status=await self._backend.status())
        described.MergeFrom(self._description)
        return described

    async def GetStatus(
        self, request: pb.StatusRequest, context: grpc.aio.ServicerContext
    ) -> pb.WorkerStatus:
        return await self._backend.status()

    async def GetPhases(self, request: pb.PhasesRequest, context: grpc.aio.ServicerContext) -> pb.Phases:
        return pb.Phases(phases=self._backend.journal.phases(request.name))

    async def SetPool(self, request: pb.SetPoolRequest, context: grpc.aio.ServicerContext) -> pb.WorkerStatus:
        if self._encodes:
            text = "it is an encoder, which stays in its pool"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, text)
        if request.pool not in (pb.POOL_PREFILL, pb.POOL_DECODE):
            text = f"pool is {request.pool}: it must be POOL_PREFILL or POOL_DECODE"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, text)
        return await self._backend.set_pool(request.pool)

    async def SetPause(self, request: pb.PauseRequest, context: grpc.aio.ServicerContext) -> pb.WorkerStatus:
        return await done(self._pause.set(request), context)

    async def SetMemory(
        self, request: pb.MemoryRequest, context: grpc.aio.ServicerContext
    ) -> pb.WorkerStatus:
        return await done(self._memory.set(request), context)

    async def SetAdapters(self, request: pb.AdapterSet, context: grpc.aio.ServicerContext) -> pb.AdapterSet:
        return await done(self._adapters.set(request), context)

    async def RestartEngine(
        self, request: pb.RestartEngineRequest, context: grpc.aio.ServicerContext
    ) -> pb.RestartedEngine:
        began = time.monotonic()
        await done(self._backend.restart_engine(), context)
        return pb.RestartedEngine(seconds=time.monotonic() - began)

    async def ReplaceWeights(
        self, request_iterator: AsyncIterator[pb.WeightsCommand], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.WeightsReport]:
        try:
            async for report in self._weights.run(aiter(request_iterator)):
                yield report
        except (Refused, TreeError) as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))

    async def ReadCheckpoint(self, request: pb.CheckpointRequest, context: grpc.aio.ServicerContext) -> None:
        try:
            await self._weights.send_checkpoint(request.version, context.write)
        except Refused as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))

    # ------------------------------------------------------------ router to worker

    async def _read(self, stream: RouterStream, request_iterator: AsyncIterator[bytes]) -> None:
        async for data in request_iterator:
            message = validation.message(data)
            kind = message.WhichOneof("kind")
            if kind == "pixels":
                validation.add_pixels(stream.pixels, message.pixels.data)
                continue
            if kind not in self._kinds:
                raise StreamError(f"a message of kind {kind} is not allowed here")
            (field, check), content = self._kinds[kind], getattr(message, kind)
            attempt_id = validation.attempt_id(getattr(content, field), field) if field else b""
            try:
                checked = check(stream, attempt_id, content)
                origin, pixels = (None, []) if checked is None else checked
                await self._backend.forward(FromRouter(stream.number, data, origin, pixels), message)
            except RefusedAttempt as refusal:
                if kind == "retarget":
                    cancel = pb.RouterMessage(cancel=pb.Cancel(attempt_id=attempt_id))
                    await self._backend.forward(FromRouter(stream.number, cancel.SerializeToString()), cancel)
                refused = to_routers.failed(stream.number, attempt_id, refusal.code, str(refusal))
                self._routers.deliver(refused)

    def _prefill(self, stream: RouterStream, prefill_id: bytes, submit: pb.SubmitPrefill) -> Checked:
        pixels = stream.take_pixels()
        self._require_accepting(submit.request)
        checked = validation.submission(
            prefill_id, submit.request, self._limits, pixels, handover=submit.handover
        )
        validation.content_source(submit)
        validation.plan(submit)
        return checked

    def _decode(self, stream: RouterStream, decode_id: bytes, submit: pb.SubmitDecode) -> Checked:
        pixels = stream.take_pixels()
        self._require_accepting(submit.request)
        checked = validation.submission(decode_id, submit.request, self._limits, pixels)
        if submit.HasField("source"):
            validation.source(submit.source)
        validation.content_source(submit)
        return checked

    def _encode(self, stream: RouterStream, encode_id: bytes, submit: pb.SubmitEncode) -> Checked:
        pixels = stream.take_pixels()
        if self._encodes and self._backend.draining:
            raise RefusedAttempt(pb.FAILURE_CODE_DRAINING, self._backend.draining)
        return validation.encode(encode_id, submit, self._limits, pixels)

    def _require_accepting(self, asked: pb.Request) -> None:
        if self._backend.draining:
            raise RefusedAttempt(pb.FAILURE_CODE_DRAINING, self._backend.draining)
        if self._memory.is_closed:
            raise RefusedAttempt(pb.FAILURE_CODE_DRAINING, "the memory of the worker is released")
        if asked.adapter and not self._adapters.has(asked.adapter):
            raise RefusedAttempt(pb.FAILURE_CODE_NO_ADAPTER, "the adapter is not loaded")

    def _detach(self, stream: RouterStream) -> None:
        """Removes the stream and makes the engine cancel its attempts. Idempotent."""
        if not self._routers.remove(stream):
            return
        # A separate task, because gRPC may cancel the ending call while the engine reads too slowly.
        task = asyncio.create_task(self._backend.send(Detached(stream.number)))
        self._cancels.add(task)
        task.add_done_callback(self._cancels.discard)


async def done(change: Coroutine[Any, Any, T], context: grpc.aio.ServicerContext) -> T:
    """Does what a coordinator asks, also if the coordinator goes meanwhile: the engine must not stay behind
    what routers were told. An error of the change ends the call, with the reason for the user. If the
    coordinator has gone, the log has the error."""
    changing = asyncio.create_task(change)
    try:
        return await asyncio.shield(changing)
    except (Refused, TreeError) as error:
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
    except asyncio.CancelledError:
        changing.add_done_callback(_log_error)
        raise


def _log_error(changing: asyncio.Task[Any]) -> None:
    if not changing.cancelled() and (error := changing.exception()) is not None:
        known = isinstance(error, Refused | TreeError)
        log.error("a call has failed after its caller left: %s", error, exc_info=None if known else error)


async def _hello(request_iterator: AsyncIterator[bytes]) -> tuple[str, pb.RouterHello]:
    """Reads the RouterHello that every stream begins with. Returns the router's name for logs, too."""
    try:
        async with asyncio.timeout(HELLO_TIMEOUT):
            first = validation.message(await anext(request_iterator))
    except (TimeoutError, StopAsyncIteration) as error:
        raise StreamError("a stream begins with a RouterHello") from error
    if first.WhichOneof("kind") != "hello":
        raise StreamError("a stream begins with a RouterHello")
    return validation.attempt_id(first.hello.router_id, "router_id").hex()[:8], first.hello
