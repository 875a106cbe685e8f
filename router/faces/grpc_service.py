"""The gRPC face: `baton.v1.Inference`, with health and reflection. It answers as the HTTP face does."""

import asyncio
import logging

import grpc
import grpc.aio
from grpc_health.v1.health_pb2 import HealthCheckResponse

from router.config import RouterConfig
from router.errors import ApiError, TooSlow
from router.faces.intake import Intake, request_name
from router.faces.serving import Answer
from router.generation.choice import Delta
from router.workers.pool import WorkerPool
from rpc import HealthServicer, add_port, cannot_listen, create_public_server, url_host
from rpc import inference_pb2 as pb

log = logging.getLogger(__name__)

SERVICE = pb.DESCRIPTOR.services_by_name["Inference"].full_name
_WAIT_SECONDS = 60.0  # gRPC keeps the connection alive by itself
_LAST_WORDS_SECONDS = 0.5
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
_FINISH: dict[str | None, pb.Delta.FinishReason] = {
    None: pb.Delta.UNFINISHED,
    "stop": pb.Delta.STOP,
    "length": pb.Delta.LENGTH,
}


class GrpcFace:
    """Owns the gRPC server of a router, and keeps what health says current.

    Health: "" says that the process serves, "baton.v1.Inference" that it also has a worker of each role.
    """

    def __init__(
        self, config: RouterConfig, intake: Intake, pool: WorkerPool, *, share: bool = False
    ) -> None:
        self._intake = intake
        self._client_timeout = config.client_timeout
        self._pool = pool
        self._health = HealthServicer()
        self._tls = config.tls
        self._server = create_public_server(
            config.max_body_bytes,
            self._health,
            [SERVICE],
            message_timeout=config.client_timeout,
            share=share,
        )
        # Not by the generated function: it would parse a message before the handler sees the client's key.
        generate = grpc.unary_stream_rpc_method_handler(
            self._generate, response_serializer=pb.GenerateResponse.SerializeToString
        )
        handler = grpc.method_handlers_generic_handler(SERVICE, {"Generate": generate})
        self._server.add_generic_rpc_handlers((handler,))
        self._following: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int) -> str:
        """Returns the address at which it listens. Raises ValueError when it cannot."""
        try:
            bound = add_port(self._server, host, port, self._tls)
        except OSError as error:
            raise ValueError(cannot_listen("--grpc-port", host, port, error)) from error
        await self._server.start()
        self._following = asyncio.create_task(self._follow_readiness(), name="gRPC health")
        return f"{url_host(host)}:{bound}"

    async def drain(self) -> None:
        """Says that it is going. It still listens: clients keep their connections, and are told on them."""
        self._health.stop()

    async def close(self) -> None:
        """Cuts what still runs; an answer that is complete reaches its client."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)
        await self._server.stop(_LAST_WORDS_SECONDS)

    async def _follow_readiness(self) -> None:
        while True:
            self._pool.changed.clear()
            complete = self._pool.complete
            status = HealthCheckResponse.SERVING if complete else HealthCheckResponse.NOT_SERVING
            self._health.set(SERVICE, status)
            await self._pool.changed.wait()

    # ------------------------------------------------------------ the service

    async def _generate(
        self,
        raw: bytes,
        context: "grpc.aio.ServicerContext[bytes, pb.GenerateResponse]",
    ) -> None:
        sent = context.invocation_metadata() or ()
        metadata = {key: value for key, value in sent if isinstance(value, str)}
        name = request_name(metadata.get("x-request-id"))
        context.set_trailing_metadata((("x-request-id", name),))
        try:
            account = self._intake.authorize(metadata.get("authorization", ""))
            with self._intake.admit(account, len(raw)) as entry:
                answer = await self._intake.answer(
                    "message",
                    raw,
                    entry,
                    name=name,
                    session=metadata.get("x-session-id"),
                    timeout=context.time_remaining(),
                    traceparent=metadata.get("traceparent"),
                )
                del raw  # may be large, and the answer may take long
                with answer.generating():
                    await _write(answer, context, self._client_timeout)
        except ApiError as error:
            await self._refuse(context, error, name)
        except Exception:
            if context.cancelled():
                return  # the client went: nobody is there to be told
            # A bug of ours must not look like the client's: it is logged whole, and the client learns its id.
            log.exception("request %s", name)
            await self._refuse(context, ApiError(f"request {name} failed inside the router"), name)

    async def _refuse(self, context: grpc.aio.ServicerContext, error: ApiError, name: str) -> None:
        self._intake.metrics.failed(error)
        said = {"x-request-id": name, "error-code": error.code, "error-param": error.param}
        if error.retry_after is not None:
            said["retry-after"] = str(error.retry_after)
        trailing = tuple((key, value) for key, value in said.items() if value is not None)
        await context.abort(_CODES[error.status], error.message, trailing)


async def _write(answer: Answer, context: grpc.aio.ServicerContext, client_timeout: float) -> None:
    while not answer.finished:
        deltas = await answer.take(_WAIT_SECONDS)
        if deltas:
            response = pb.GenerateResponse(deltas=[_delta(*delta) for delta in deltas])
            try:
                async with asyncio.timeout(client_timeout):
                    await context.write(response)
            except TimeoutError:
                raise TooSlow(f"the client read nothing for {client_timeout:g} s") from None
    used = answer.usage()
    usage = pb.Usage(
        prompt_tokens=used.prompt_tokens,
        completion_tokens=used.completion_tokens,
        cached_tokens=used.cached_tokens,
    )
    await context.write(pb.GenerateResponse(usage=usage))


def _delta(index: int, delta: Delta) -> pb.Delta:
    written = pb.Delta(
        index=index,
        token_id=delta.token.token_id,
        text=delta.text,
        finish_reason=_FINISH[delta.finish_reason],
    )
    if isinstance(delta.stop_reason, str):
        written.stop_string = delta.stop_reason
    elif delta.stop_reason is not None:
        written.stop_token_id = delta.stop_reason
    given = delta.token.logprobs
    if given is not None:
        written.logprobs.logprob = given.logprob
        top = zip(given.top_ids, given.top_logprobs, strict=True)
        written.logprobs.top.extend(pb.TopLogprob(token_id=t, logprob=logprob) for t, logprob in top)
    return written
