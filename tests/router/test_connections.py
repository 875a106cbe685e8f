"""Connections that say nothing take no connection from others, and no probe fails."""

import asyncio
import contextlib
import re
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import grpc
import pytest

from baton.router import server
from baton.router.endpoints import http_connections
from baton.router.text.tokenizer import ModelTokenizer
from baton.rpc import channel, port
from baton.rpc import inference_pb2 as pb
from baton.rpc.stubs import InferenceStub
from baton.rpc.tls import TlsFiles
from tests.conftest import Certificates
from tests.within import WITHIN, within

from .conftest import TEXT, make_cluster

MOST = 8


@contextlib.asynccontextmanager
async def crowd(port: int, count: int) -> AsyncIterator[None]:
    """So many connections from one address, which say nothing."""
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(count):
            _, writer = await asyncio.open_connection("127.0.0.9", port, local_addr=("127.0.0.8", 0))
            stack.callback(writer.close)
        yield


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


@pytest.mark.parametrize("tls", [False, True])
async def test_idle_connections_leave_room_for_others(
    tokenizer: ModelTokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    certificates: Certificates,
    caplog: pytest.LogCaptureFixture,
    tls: bool,
):
    """A stream goes on, a connection of another address stays open, and new requests are served."""
    monkeypatch.setattr(server, "affordable_connections", lambda processes: MOST)
    files = TlsFiles(*certificates.worker) if tls else None
    context = ssl.create_default_context(cafile=certificates.ca) if tls else None
    if context is not None:
        context.check_hostname = False
    async with make_cluster(tokenizer, tmp_path, host="0.0.0.0", tls=files) as cluster:
        port = port_of(cluster.url)
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)

        async def healthy() -> None:
            """On a connection that is idle otherwise."""
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(int(re.findall(rb"(?i)content-length: (\d+)", head)[0]))

        await healthy()
        url = f"{'https' if tls else 'http'}://127.0.0.1:{port}/v1/completions"
        body = {"prompt": "Hello", "max_tokens": 200, "stream": True}
        connector = aiohttp.TCPConnector(ssl=context or False)
        async with (
            aiohttp.ClientSession(connector=connector) as http,
            http.post(url, json=body) as stream,
            crowd(port, 5 * MOST),
            http.post(url, json=body) as new,
        ):
            assert "[DONE]" in await new.text()
            await healthy()
            assert "[DONE]" in await stream.text()
        writer.close()
    assert caplog.text.count("connections are open, the most it may have") == 1
    assert "Traceback" not in caplog.text


async def test_a_probe_is_answered_while_all_connections_are_busy(
    tokenizer: ModelTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(server, "affordable_connections", lambda processes: MOST)
    async with make_cluster(tokenizer, tmp_path) as cluster, contextlib.AsyncExitStack() as stack:
        begun = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        begun += b"Content-Length: 99\r\n\r\n"
        for _ in range(MOST):
            _, writer = await asyncio.open_connection("127.0.0.1", port_of(cluster.url))
            stack.callback(writer.close)
            writer.write(begun)
        await cluster.until(lambda: cluster.router.frontend.authorize("").requests == MOST)
        for _ in range(3):
            await cluster.get("/health")
        status, refused = await cluster.post("/v1/completions", prompt="x")
        assert (status, refused["error"]["code"]) == (429, "overloaded")


async def test_a_listener_without_descriptors_goes_on_later(
    tokenizer: ModelTokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    """The log says it once, not once for each connection."""
    monkeypatch.setattr(http_connections, "_PAUSE_SECONDS", 0.01)
    async with make_cluster(tokenizer, tmp_path) as cluster:
        accept, failures = socket.socket.accept, iter(range(5))

        def fails(sock: socket.socket) -> tuple[socket.socket, tuple[str, int]]:
            if next(failures, None) is not None:
                raise OSError(24, "Too many open files")
            return accept(sock)

        monkeypatch.setattr(socket.socket, "accept", fails)
        assert (await cluster.complete())["choices"][0]["text"] == TEXT
    assert caplog.text.count("none can be accepted: Too many open files") == 1


async def test_a_unix_socket_answers_what_starts_a_router(tokenizer: ModelTokenizer, tmp_path: Path):
    path = tmp_path / "admin"
    async with (
        make_cluster(tokenizer, tmp_path, admin_socket=str(path)),
        aiohttp.UnixConnector(str(path)) as connector,
        aiohttp.ClientSession("http://router", connector=connector) as http,
    ):
        for page, said in (("/health", ""), ("/metrics", "baton:tokens_waiting_for_turn")):
            async with http.get(page) as response:
                assert response.status == 200
                assert said in await response.text()


@pytest.mark.all
async def test_idle_grpc_connections_leave_room_for_others(
    tokenizer: ModelTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A generation goes on while others connect, and a probe is answered."""
    monkeypatch.setattr(port, "affordable_connections", lambda: MOST)
    never = [(name, 10**6 if value > 1_000 else value) for name, value in channel._IDLE]
    monkeypatch.setattr(channel, "_IDLE", never)  # gRPC itself ends no connection
    options = [("grpc.use_local_subchannel_pool", 1)]  # a connection of its own
    async with make_cluster(tokenizer, tmp_path, host="0.0.0.0") as cluster:
        address = f"127.0.0.1:{port_of(cluster.router.grpc_address or '')}"
        async with (
            grpc.aio.insecure_channel(address, options) as client,
            grpc.aio.insecure_channel(address, options) as probe,
        ):
            cluster.decodes[0].steps = steps = asyncio.Semaphore(2)
            call = InferenceStub(client).Generate(
                pb.GenerateRequest(text="Hello", max_tokens=200), timeout=WITHIN
            )
            messages = aiter(call)
            await within(anext(messages))
            async with crowd(port_of(address), 5 * MOST):
                await within(probe.channel_ready())
                await channel.check_health(probe, WITHIN)
            for _ in cluster.output_ids:
                steps.release()
            *_, last = [message async for message in messages]
            assert last.usage.completion_tokens == len(cluster.output_ids)
