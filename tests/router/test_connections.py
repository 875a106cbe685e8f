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
from baton.rpc import channel
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


async def test_grpc_connections_have_a_bound(
    tokenizer: ModelTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Those that say nothing end within seconds, and then others are served."""
    monkeypatch.setattr(channel, "_connections", lambda: ("grpc.max_allowed_incoming_connections", 4))
    monkeypatch.setattr(channel, "_IDLE", [(name, 300) for name, _ in channel._IDLE])
    async with make_cluster(tokenizer, tmp_path) as cluster:
        address = cluster.router.grpc_address
        assert address is not None
        async with contextlib.AsyncExitStack() as stack:
            readers = []
            for _ in range(12):
                reader, writer = await asyncio.open_connection("127.0.0.1", port_of(address))
                stack.callback(writer.close)
                readers.append(reader)
            ended = [asyncio.create_task(reader.read()) for reader in readers]
            await within(asyncio.gather(*ended))
            async with grpc.aio.insecure_channel(address) as client:
                await within(client.channel_ready())
                await channel.check_health(client, WITHIN)
