"""The protocol, with a real gRPC client in the place of a gateway. Fake routers serve their metrics."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from aiohttp import web
from google.protobuf import json_format
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.endpoint_picker import PickerConfig
from baton.endpoint_picker.exchange import MAX_BODY_BYTES, PIECE_BYTES
from baton.endpoint_picker.server import SERVICE, running
from baton.router.discovery import FileDiscovery
from baton.router.metrics import Metrics
from baton.rpc import ext_proc_pb2 as pb
from baton.rpc.stubs import EXTERNAL_PROCESSOR
from tests.within import WITHIN, within

BODY = json.dumps({"messages": [{"role": "user", "content": "Hello"}]}).encode()
KEY = "x-gateway-destination-endpoint"


@asynccontextmanager
async def fake_router(requests: int) -> AsyncIterator[str]:
    """Serves the metrics of a router with `requests` requests. Yields its address."""
    metrics = Metrics("fake")
    metrics.running.set(requests)

    async def page(_: web.Request) -> web.Response:
        return web.Response(body=metrics.exposition())

    app = web.Application()
    app.router.add_get("/metrics", page)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


class Gateway:
    """One HTTP request of a gateway, as a client of ext_proc."""

    def __init__(
        self, channel: grpc.aio.Channel, request_mode: Any = None, response_mode: Any = None
    ) -> None:
        process: Any = channel.stream_stream(
            f"/{EXTERNAL_PROCESSOR.full_name}/Process",
            pb.ProcessingRequest.SerializeToString,
            pb.ProcessingResponse.FromString,
        )
        self._call = process()
        self._first = pb.ProcessingRequest()
        if request_mode is not None:
            modes = pb.ProtocolConfiguration(request_body_mode=request_mode, response_body_mode=response_mode)
            self._first.protocol_config.CopyFrom(modes)

    async def headers(self, *, end: bool = False, subset: Any = None, **headers: str) -> None:
        message = self._first
        for name, value in headers.items():
            message.request_headers.headers.headers.add(key=name.replace("_", "-"), raw_value=value.encode())
        message.request_headers.end_of_stream = end
        if subset is not None:
            hint = message.metadata_context.filter_metadata["envoy.lb.subset_hint"]
            hint.update({f"{KEY}-subset": subset})
        await self._call.write(message)

    async def body(self, *pieces: bytes, end: bool = True) -> None:
        for i, piece in enumerate(pieces):
            last = end and i == len(pieces) - 1
            await self._call.write(
                pb.ProcessingRequest(request_body=pb.HttpBody(body=piece, end_of_stream=last))
            )

    async def send(self, **message: Any) -> pb.ProcessingResponse:
        await self._call.write(pb.ProcessingRequest(**message))
        return await self.answer()

    async def answer(self) -> pb.ProcessingResponse:
        answer = await within(self._call.read())
        assert isinstance(answer, pb.ProcessingResponse), "the picker ended the stream"
        return answer

    async def body_back(self) -> bytes:
        """The request's body as the gateway would forward it."""
        body = b""
        while True:
            streamed = (await self.answer()).request_body.response.body_mutation.streamed_response
            assert len(streamed.body) <= PIECE_BYTES
            body += streamed.body
            if streamed.end_of_stream:
                return body

    async def done(self) -> None:
        await self._call.done_writing()
        assert await self._call.code() is grpc.StatusCode.OK


def destination(answer: pb.ProcessingResponse, kind: str) -> str:
    """The address that an answer of this kind names, in a header and in metadata."""
    assert answer.WhichOneof("response") == kind
    common = getattr(answer, kind).response
    [option] = common.header_mutation.set_headers
    assert option.append_action == pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD, (
        "a client may send it, too"
    )
    assert option.header.key == KEY
    address = option.header.raw_value.decode()
    assert json_format.MessageToDict(answer.dynamic_metadata) == {"envoy.lb": {KEY: address}}
    assert common.clear_route_cache
    return address


@pytest.fixture
async def routers() -> AsyncIterator[list[str]]:
    async with fake_router(0) as one, fake_router(0) as other:
        yield [one, other]


@asynccontextmanager
async def picker_for(routers: Iterable[str]) -> AsyncIterator[tuple[asyncio.Task[None], grpc.aio.Channel]]:
    config = PickerConfig(routers=FileDiscovery(None, tuple(routers)), port=0, drain_timeout=5.0)
    async with running(config) as (address, following), grpc.aio.insecure_channel(address) as channel:
        await readiness(channel, health_pb2.HealthCheckResponse.SERVING)
        yield following, channel


async def readiness(channel: grpc.aio.Channel, state: int) -> None:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    watch = stub.Watch(health_pb2.HealthCheckRequest(service="readiness"))
    async with asyncio.timeout(WITHIN):
        async for answer in watch:
            if answer.status == state:
                break
    watch.cancel()


@pytest.fixture
async def channel(routers: list[str]) -> AsyncIterator[grpc.aio.Channel]:
    async with picker_for(routers) as (_, channel):
        yield channel


@pytest.mark.parametrize("modes", [(), (pb.FULL_DUPLEX_STREAMED, pb.FULL_DUPLEX_STREAMED)])
async def test_a_streamed_body_is_read_before_the_choice_and_comes_back_unchanged(
    channel: grpc.aio.Channel, routers: list[str], modes: tuple[Any, ...]
):
    chosen = set()
    for _ in range(3):
        gateway = Gateway(channel, *modes)
        await gateway.headers(content_type="application/json")
        await gateway.body(BODY[:10], BODY[10:])
        chosen.add(destination(await gateway.answer(), "request_headers"))
        assert await gateway.body_back() == BODY
        answer = await gateway.send(response_headers=pb.HttpHeaders())
        assert answer.WhichOneof("response") == "response_headers"
        answer = await gateway.send(response_body=pb.HttpBody(body=b"data: x\n\n"))
        streamed = answer.response_body.response.body_mutation.streamed_response
        assert (streamed.body, streamed.end_of_stream) == (b"data: x\n\n", False)
        answer = await gateway.send(response_body=pb.HttpBody(end_of_stream=True))
        assert answer.response_body.response.body_mutation.streamed_response.end_of_stream
        await gateway.done()
    assert len(chosen) == 1, "a conversation stays at its router"
    assert chosen <= set(routers)


async def test_a_large_body_is_passed_on_after_its_first_part(channel: grpc.aio.Channel):
    pieces = [os_piece * 2 * PIECE_BYTES for os_piece in (b"a", b"b", b"c") for _ in range(8)]
    gateway = Gateway(channel)
    await gateway.headers()
    sent = 0
    while sent < MAX_BODY_BYTES:
        await gateway.body(pieces[0], end=False)
        sent += len(pieces[0])
    destination(await gateway.answer(), "request_headers")
    await gateway.body(*pieces)
    assert await gateway.body_back() == pieces[0] * (sent // len(pieces[0])) + b"".join(pieces)
    await gateway.done()


async def test_trailers_end_a_body_too(channel: grpc.aio.Channel):
    gateway = Gateway(channel)
    await gateway.headers()
    await gateway.body(BODY, end=False)
    destination(await gateway.send(request_trailers=pb.HttpTrailers()), "request_headers")
    streamed = (await gateway.answer()).request_body.response.body_mutation.streamed_response
    assert (streamed.body, streamed.end_of_stream) == (BODY, False)
    assert (await gateway.answer()).WhichOneof("response") == "request_trailers"
    await gateway.done()


async def test_a_buffered_body_names_the_destination_in_its_own_answer(channel: grpc.aio.Channel):
    gateway = Gateway(channel, pb.BUFFERED, pb.NONE)
    await gateway.headers()
    assert not (await gateway.answer()).request_headers.HasField("response")
    await gateway.body(BODY)
    answer = await gateway.answer()
    destination(answer, "request_body")
    assert not answer.request_body.response.HasField("body_mutation")
    answer = await gateway.send(request_trailers=pb.HttpTrailers())
    assert answer.WhichOneof("response") == "request_trailers"
    await gateway.done()


async def test_the_headers_are_answered_once_where_trailers_follow_without_a_body(channel: grpc.aio.Channel):
    gateway = Gateway(channel, pb.BUFFERED, pb.NONE)
    await gateway.headers()
    assert (await gateway.answer()).WhichOneof("response") == "request_headers"
    answer = await gateway.send(request_trailers=pb.HttpTrailers())
    assert answer.WhichOneof("response") == "request_trailers"
    await gateway.done()


@pytest.mark.parametrize(
    ("mode", "end"), [(pb.NONE, False), (pb.STREAMED, False), (pb.BUFFERED, True), (None, True)]
)
async def test_where_no_body_comes_before_the_request_the_headers_decide(
    channel: grpc.aio.Channel, mode: Any, end: bool
):
    chosen = set()
    for _ in range(3):
        gateway = Gateway(channel, mode, mode)
        await gateway.headers(end=end, x_session_id="s")
        chosen.add(destination(await gateway.answer(), "request_headers"))
        if mode == pb.STREAMED:
            answer = await gateway.send(request_body=pb.HttpBody(body=BODY, end_of_stream=True))
            assert not answer.request_body.HasField("response"), "the piece stays as it is"
        await gateway.done()
    assert len(chosen) == 1


@pytest.mark.parametrize("form", [list, ",".join])
async def test_the_gateway_may_allow_only_some_endpoints(
    channel: grpc.aio.Channel, routers: list[str], form: Any
):
    for allowed in routers:
        gateway = Gateway(channel)
        await gateway.headers(end=True, subset=form([allowed, "10.0.0.1:8000"]), x_session_id="s")
        assert destination(await gateway.answer(), "request_headers") == allowed
        await gateway.done()


@pytest.mark.parametrize("subset", [[], ["10.0.0.1:8000"]])
async def test_no_allowed_router_is_an_error_for_the_client(channel: grpc.aio.Channel, subset: list[str]):
    gateway = Gateway(channel)
    await gateway.headers(subset=subset)
    await gateway.body(BODY)
    refused = (await gateway.answer()).immediate_response
    assert refused.status.code == 503
    assert json.loads(refused.body)["error"]["code"] == "no_worker"
    headers = {option.header.key: option.header.raw_value for option in refused.headers.set_headers}
    assert headers == {"content-type": b"application/json", "retry-after": b"1"}
    await gateway.done()


async def test_a_router_that_is_gone_gets_nothing_and_a_busy_one_less():
    async with fake_router(40) as busy, fake_router(0) as idle:
        async with fake_router(0) as gone:
            pass
        async with picker_for([busy, idle, gone]) as (_, channel):

            async def pick() -> str:
                gateway = Gateway(channel)
                await gateway.headers(end=True)
                return destination(await gateway.answer(), "request_headers")

            async with asyncio.timeout(WITHIN):
                while {await pick() for _ in range(6)} != {idle}:
                    pass


async def test_readiness_waits_for_a_router_and_ends_with_the_drain(routers: list[str]):
    check = health_pb2.HealthCheckRequest
    async with picker_for(routers) as (following, channel):
        health: Any = health_pb2_grpc.HealthStub(channel)
        for service in ("", "liveness", "readiness", SERVICE):
            answer = await health.Check(check(service=service))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        gateway = Gateway(channel)
        await gateway.headers()
        await gateway.body(BODY)
        destination(await gateway.answer(), "request_headers")
        assert not following.done(), "a fixed list needs no discovery, but its loads are followed"
        await gateway.body_back()
        await gateway.done()
    config = PickerConfig(routers=FileDiscovery(None, ()), port=0)
    async with running(config) as (address, _), grpc.aio.insecure_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        answer = await health.Check(check(service=SERVICE))  # pyrefly: ignore
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING


def field(number: int, value: bytes | int) -> bytes:
    """A field of a message on the wire."""
    if isinstance(value, int):
        return bytes([number << 3, value])
    return bytes([number << 3 | 2, len(value)]) + value


async def test_the_numbers_of_the_fields_are_those_of_envoy(channel: grpc.aio.Channel, routers: list[str]):
    """The bytes are written here by Envoy's definitions, without the checked-in stubs."""
    session = field(1, b"x-session-id") + field(3, b"s")
    entry = field(1, f"{KEY}-subset".encode()) + field(2, field(3, routers[0].encode()))
    hint = field(1, b"envoy.lb.subset_hint") + field(2, field(1, entry))
    headers = field(2, field(1, field(1, session)))
    first = headers + field(8, field(1, hint)) + field(11, field(1, 4) + field(2, 4))
    body = field(4, field(1, b'{"prompt": "a"}') + field(2, 1))
    method: Any = channel.stream_stream
    call = method("/envoy.service.ext_proc.v3.ExternalProcessor/Process")()
    for message in (first, body):
        await call.write(message)
    address = routers[0].encode()
    option = field(1, field(1, KEY.encode()) + field(3, address)) + field(3, 2)
    answer = field(1, field(1, field(2, field(1, option)) + field(5, 1)))
    value = field(1, KEY.encode()) + field(2, field(3, address))
    metadata = field(1, field(1, b"envoy.lb") + field(2, field(5, field(1, value))))
    assert await call.read() == answer + field(8, metadata)
    streamed = field(1, b'{"prompt": "a"}') + field(2, 1)
    assert await call.read() == field(3, field(1, field(3, field(3, streamed))))
    call.cancel()
