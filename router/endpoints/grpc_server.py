"""The gRPC endpoint: `baton.v1.Inference`, with health and reflection. Limits and errors are those of
HTTP."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import grpc.aio
from grpc_health.v1.health_pb2 import HealthCheckResponse

from baton.router import access_log
from baton.router.admission.entry import Entry
from baton.router.endpoints.answers import defect, stream
from baton.router.endpoints.builders.grpc import MessagesBuilder
from baton.router.endpoints.frontend import Frontend, request_name, unenforced_header
from baton.router.errors import ApiError, TooSlow
from baton.router.generation.context import Services
from baton.rpc import inference_pb2 as pb
from baton.rpc.channel import create_public_server
from baton.rpc.health import HealthServicer
from baton.rpc.port import message_of
from baton.rpc.tls import add_port
from baton.system.addresses import cannot_listen, url_host

SERVICE = pb.DESCRIPTOR.services_by_name["Inference"].full_name
_SOON = 0.1
"""Seconds in which a message usually comes: clients send it together with the call."""
_GRACE_SECONDS = 0.5
"""For the last messages of running calls, when the server stops."""
_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    500: grpc.StatusCode.INTERNAL,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}


class GrpcEndpoint:
    """Owns the gRPC server of a router, and updates its health service.

    Health of the service "": the process serves. Health of "baton.v1.Inference": it also has a worker of each
    pool.
    """

    def __init__(self, services: Services, frontend: Frontend) -> None:
        config = self._config = services.config
        self._frontend = frontend
        self._pool = services.pool
        self._health = HealthServicer()
        self._server = create_public_server(
            config.max_body_bytes,
            self._health,
            [SERVICE],
            message_timeout=config.client_timeout,
            share=config.supervised,
        )
        # gRPC calls only stream handlers before it reads the message. So the API key is checked first.
        generate = grpc.stream_stream_rpc_method_handler(self._generate)
        handler = grpc.method_handlers_generic_handler(SERVICE, {"Generate": generate})
        self._server.grpc.add_generic_rpc_handlers((handler,))
        self._following: asyncio.Task[None] | None = None
        self._retiring: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int) -> str:
        """Listens, and returns the address. Raises ValueError when the port cannot be had."""
        try:
            tls = self._config.tls
            pems = None if tls is None else tls.pems()
            bound = add_port(self._server, host, port, pems)
        except OSError as error:
            raise ValueError(cannot_listen("--grpc-port", host, port, error)) from error
        await self._server.start()
        self._following = asyncio.create_task(self._follow_readiness(), name="gRPC health")
        return f"{url_host(host)}:{bound}"

    @property
    def has_connections(self) -> bool:
        return self._server.has_connections

    def drain(self) -> None:
        """Tells health clients that it stops. It still serves new calls, until `retire`."""
        self._health.stop()

    def retire(self) -> None:
        """Listens no more, and tells clients to leave (GOAWAY). They make their next call elsewhere, and
        those that are open finish."""
        if self._retiring is None:
            self._retiring = asyncio.create_task(
                self._server.stop(self._config.drain_timeout), name="gRPC drain"
            )

    async def close(self) -> None:
        """Ends the calls that still run. A response that is complete still reaches its client."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)
        await self._server.stop(_GRACE_SECONDS)
        if self._retiring is not None:
            await self._retiring

    async def _follow_readiness(self) -> None:
        while True:
            self._pool.changed.clear()
            complete = self._pool.complete
            status = HealthCheckResponse.SERVING if complete else HealthCheckResponse.NOT_SERVING
            self._health.set(SERVICE, status)
            await self._pool.changed.wait()

    # ------------------------------------------------------------ the service

    async def _generate(
        self, requests: AsyncIterator[bytes], context: "grpc.aio.ServicerContext[bytes, bytes]"
    ) -> None:
        sent = context.invocation_metadata() or ()
        metadata = {key: value for key, value in sent if isinstance(value, str)}
        name = request_name(metadata.get("x-request-id"))
        context.set_trailing_metadata((("x-request-id", name),))
        with access_log.request(name, "gRPC Generate", on=self._config.access_log) as access:
            try:
                account = self._frontend.authorize(metadata.get("authorization", ""))
                access.key = account.key.name
                with self._server.call(context), self._frontend.admit(account, name) as entry:
                    raw = await self._message(requests, context, entry)
                    active = await self._frontend.activate(
                        "grpc", raw, entry, metadata, timeout=context.time_remaining()
                    )
                    if active.unenforced:
                        unenforced = ("x-baton-unenforced", unenforced_header(active.unenforced))
                        context.set_trailing_metadata((("x-request-id", name), unenforced))
                    del raw  # frees the body, which may be large, before the generation, which may be long
                    with active.generating():
                        to = MessageStream(context, self._config.client_timeout)
                        await stream(active, MessagesBuilder(active), to)
            except ApiError as error:
                access.status = error.status
                await self._refuse(context, error, name)
            except Exception:  # noqa: BLE001 - `defect` logs it
                if context.cancelled():
                    access.status = access_log.CLOSED_BY_CLIENT
                    return  # the client disconnected
                await self._refuse(context, defect(name), name)

    async def _message(
        self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext, entry: Entry
    ) -> bytes:
        """Returns the message of a call. gRPC does not say how much of it came, so one that takes long counts
        as the largest message until then."""
        reading = asyncio.create_task(message_of(requests, context, self._config.client_timeout))
        try:
            await asyncio.wait({reading}, timeout=_SOON)
            counted = 0 if reading.done() else self._config.max_body_bytes
            entry.receive(counted)
            raw = await reading
            entry.receive(len(raw) - counted)
            return raw
        finally:
            reading.cancel()

    async def _refuse(self, context: grpc.aio.ServicerContext, error: ApiError, name: str) -> None:
        self._frontend.metrics.failed(error, name)
        metadata = {"x-request-id": name, "error-code": error.code, "error-param": error.param}
        if error.retry_after is not None:
            metadata["retry-after"] = str(error.retry_after)
        trailing = tuple((key, value) for key, value in metadata.items() if value is not None)
        await context.abort(_CODES[error.status], error.message, trailing)


class MessageStream:
    """The messages of a call (`answers.Stream`). The status of the call follows them, so an error may always
    be one. gRPC keeps the connection alive."""

    begun = silent = False

    def __init__(self, context: grpc.aio.ServicerContext, client_timeout: float) -> None:
        self._context = context
        self._seconds = client_timeout

    async def write(self, events: bytes) -> None:
        if events:
            try:
                async with asyncio.timeout(self._seconds):
                    await self._context.write(events)
            except TimeoutError:
                raise TooSlow(f"the client read nothing for {self._seconds:g} s") from None

    async def end(self, events: bytes, end: bytes) -> None:
        await self.write(events)
        await self.write(end)

    def write_now(self, events: bytes, now: float) -> bool:
        return False  # the task writes
