"""Random messages of a gateway: the picker answers or refuses them, and serves others as before."""

import asyncio
import contextlib
import random
import resource
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.endpoint_picker import exchange as exchange_module
from baton.endpoint_picker.exchange import SUBSET, SUBSET_NAMESPACE, Exchange
from baton.endpoint_picker.routers import Routers, reported_requests
from baton.endpoint_picker.server import SERVICE
from baton.router.discovery import FileDiscovery
from baton.rpc import ext_proc_pb2 as pb
from tests.within import WITHIN

from .test_picker import BODY, Gateway, destination, fake_router, picker_for

ROUTERS = ("10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000")
KINDS = ("request_headers", "request_body", "request_trailers")
KINDS += ("response_headers", "response_body", "response_trailers")

texts = st.text(max_size=9) | st.sampled_from(["x-session-id", ":path", "/v1/responses/resp_12ab", *ROUTERS])
deep = b"[" * 5000
MAX_BODY_BYTES, PIECE_BYTES = 9_000, 500  # small ones, so that a test takes many
bodies = (
    st.binary(max_size=40)
    | st.sampled_from([BODY, BODY[:20], deep, b'{"messages":' + deep, b'{"user": "\\ud800"}', b'{"user": 1}'])
    | st.sampled_from([PIECE_BYTES, PIECE_BYTES + 1, MAX_BODY_BYTES]).map(bytes)
)
modes: Any = st.integers(0, 5)
values: Any = st.recursive(
    st.none() | st.booleans() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)


@st.composite
def messages(draw: st.DrawFn) -> pb.ProcessingRequest:
    message = pb.ProcessingRequest()
    kind = draw(st.sampled_from((*KINDS, *KINDS[:2], None)))
    part = None if kind is None else getattr(message, kind)
    if isinstance(part, pb.HttpHeaders):
        part.end_of_stream = draw(st.booleans())
        for _ in range(draw(st.integers(0, 3))):
            part.headers.headers.add(
                key=draw(texts), value=draw(texts), raw_value=draw(st.binary(max_size=9))
            )
    elif isinstance(part, pb.HttpBody):
        part.body, part.end_of_stream = draw(bodies), draw(st.booleans())
    if part is not None:
        part.SetInParent()
    if draw(st.booleans()):
        hint = message.metadata_context.filter_metadata[draw(st.sampled_from([SUBSET_NAMESPACE, "other"]))]
        hint.update({SUBSET: draw(values)})
    if draw(st.booleans()):
        message.protocol_config.request_body_mode = draw(modes)
        message.protocol_config.response_body_mode = draw(modes)
    return message


def exchanged(sent: list[pb.ProcessingRequest]) -> None:
    """Checks the answers to the messages of one stream."""
    routers = Routers(FileDiscovery(None, ROUTERS), None)
    routers.update(frozenset(ROUTERS))
    exchange, body, back, is_chosen = Exchange(routers), b"", b"", False
    for number, message in enumerate(sent):
        kind = message.WhichOneof("request")
        if kind == "request_headers" and number:
            with pytest.raises(ValueError, match="must be the first message"):
                list(exchange.answers(message))
            return
        answers = list(exchange.answers(message))
        body += message.request_body.body
        duplex = exchange._request_mode == pb.FULL_DUPLEX_STREAMED
        if not duplex and kind is not None and kind != "response_body":
            assert len(answers) == 1
        for answer in answers:
            said = answer.WhichOneof("response")
            if said == "immediate_response":
                assert exchange.ended
                return
            assert said == kind or (duplex and said is not None)
            if said in ("request_headers", "request_body"):
                common = getattr(answer, said).response
                named = [option.header.raw_value.decode() for option in common.header_mutation.set_headers]
                assert set(named) <= set(ROUTERS)
                is_chosen |= bool(named)
                assert len(common.body_mutation.streamed_response.body) <= PIECE_BYTES
                back += common.body_mutation.streamed_response.body
        if duplex:
            assert back == (body if is_chosen else b""), "the body comes back whole and in order"
            assert len(body) - len(back) < MAX_BODY_BYTES


@pytest.mark.all
@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.long)])
def test_any_messages_are_answered(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_module, "MAX_BODY_BYTES", MAX_BODY_BYTES)
    monkeypatch.setattr(exchange_module, "PIECE_BYTES", PIECE_BYTES)
    check = given(st.lists(messages(), max_size=6))(exchanged)
    settings(max_examples=count, deadline=None)(check)()


def spoiled(rng: random.Random) -> bytes:
    """The bytes of a message with some of them changed, cut off or repeated."""
    message = pb.ProcessingRequest()
    message.request_headers.headers.headers.add(key="x-session-id", raw_value=b"s")
    if rng.random() < 0.5:
        message.request_body.body, message.request_body.end_of_stream = BODY, rng.random() < 0.5
    message.metadata_context.filter_metadata[SUBSET_NAMESPACE].update({SUBSET: [*ROUTERS]})
    raw = bytearray(message.SerializeToString())
    for _ in range(rng.choice((0, 0, 1, 3))):
        raw[rng.randrange(len(raw))] = rng.randrange(256)
    start, stop = sorted(rng.randrange(len(raw) + 1) for _ in range(2))
    return bytes(rng.choice([raw, raw, raw, raw[:stop], raw[start:stop] * 3, rng.randbytes(30)]))


@pytest.mark.parametrize("count", [300, pytest.param(6_000, marks=pytest.mark.long)])
async def test_streams_of_random_bytes_do_no_harm(count: int, caplog: pytest.LogCaptureFixture) -> None:
    rng, codes = random.Random(5), set()

    async def sent() -> AsyncIterator[bytes]:
        for _ in range(rng.randrange(1, 5)):
            yield spoiled(rng)

    async with fake_router(0) as router, picker_for([router]) as (_, channel):
        process = channel.stream_stream(f"/{SERVICE}/Process", bytes, bytes)

        async def one() -> None:
            call = process(sent())
            async with asyncio.timeout(WITHIN):
                with contextlib.suppress(grpc.aio.AioRpcError):
                    async for _ in call:
                        pass
                if await call.details() != "Internal error from Core":  # it wrote when the call had ended
                    codes.add(await call.code())

        async def served() -> None:
            gateway = Gateway(channel, pb.BUFFERED, pb.NONE)
            await gateway.headers(x_session_id="known")
            assert (await gateway.answer()).HasField("request_headers")
            await gateway.body(BODY)
            assert destination(await gateway.answer(), "request_body") == router
            await gateway.done()

        used = 0
        for number in range(count // 20):
            await asyncio.gather(*(one() for _ in range(20)), served())
            if number == count // 40:
                used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used < 32 << 10, "KiB"
    assert codes == {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT}
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("said", ["nan", "inf", "-1", "one"])
def test_a_router_with_a_senseless_number_of_requests_is_as_one_that_does_not_answer(said: str) -> None:
    with pytest.raises(ValueError):
        reported_requests(f"vllm:num_requests_running {said}\n")
