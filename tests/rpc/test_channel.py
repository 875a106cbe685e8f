"""Limits of a channel: a call to a stalled peer ends, idle connections close, large messages are refused."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest

from baton.rpc import channel
from baton.rpc.channel import MAX_MESSAGE_BYTES, cluster_pems, connect, create_server
from baton.rpc.stubs import WORKER, WorkerStub, add_service
from baton.rpc.tls import add_port
from baton.rpc.worker_pb2 import DescribeRequest, WorkerDescription, WorkerMessage
from tests.within import WITHIN, within

SECRET = b"a secret of the cluster"


class Silent:
    """Sends one message on each stream and then nothing. Its description exceeds the message limit."""

    async def Attach(self, request_iterator, context):
        yield WorkerMessage()
        await asyncio.Event().wait()

    async def Describe(self, request, context):
        return WorkerDescription(model="m" * (MAX_MESSAGE_BYTES + 1))


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[int]:
    server = create_server(SECRET)
    add_service(server, WORKER, Silent())
    port = add_port(server, "127.0.0.1", 0, cluster_pems(SECRET, None))
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)


@pytest.mark.all
async def test_a_stream_to_a_stalled_peer_ends_within_the_keepalive_time(monkeypatch: pytest.MonkeyPatch):
    waits = dict(channel._KEEPALIVE)
    assert waits["grpc.keepalive_time_ms"] + waits["grpc.keepalive_timeout_ms"] <= 5_000
    sooner = [(name, value // 5 if value > 1_000 else value) for name, value in channel._KEEPALIVE]
    monkeypatch.setattr(channel, "_KEEPALIVE", sooner)
    stalled = asyncio.Event()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                if not stalled.is_set():
                    writer.write(data)
        writer.close()

    async with serving() as port:

        async def proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            upstream_reader, upstream_writer = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(forward(reader, upstream_writer), forward(upstream_reader, writer))

        listener = await asyncio.start_server(proxy, "127.0.0.1", 0)
        address = f"127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        async with connect(address, SECRET) as connected:
            call = WorkerStub(connected).Attach(None)
            assert await within(call.read()) == WorkerMessage()
            stalled.set()
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await within(call.read())
            assert failure.value.code() == grpc.StatusCode.UNAVAILABLE
        listener.close()


@pytest.mark.parametrize("sent", [b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)])
async def test_a_connection_without_a_call_is_closed(monkeypatch: pytest.MonkeyPatch, sent: bytes):
    """One connection sends nothing. The other one sends an empty HTTP/2 SETTINGS frame and makes no call."""
    monkeypatch.setattr(channel, "_IDLE", [(name, 200) for name, _ in channel._IDLE])
    never = [(name, 10**6 if value > 1_000 else value) for name, value in channel._KEEPALIVE]
    monkeypatch.setattr(channel, "_KEEPALIVE", never)
    async with serving() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        await within(reader.read())
        writer.close()


async def test_an_oversized_message_is_refused():
    async with serving() as port, connect(f"127.0.0.1:{port}", SECRET) as connected:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await WorkerStub(connected).Describe(DescribeRequest(), timeout=WITHIN)
        assert failure.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
