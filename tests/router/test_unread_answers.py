"""Clients that do not read what they asked for: they keep no connection from others, and little memory."""

import asyncio
import json
import re
import select
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from baton.router import server
from baton.router.admission.keys import ApiKey
from baton.router.api.queries import PAGE
from baton.router.batches.objects import BatchObject, new_id, owner_of, timestamp
from baton.router.batches.storage import Storage
from baton.router.endpoints import http_connections
from baton.router.text.tokenizer import ModelTokenizer
from baton.rpc.tls import TlsFiles
from tests.conftest import Certificates
from tests.loop_clock import Clock
from tests.within import WITHIN, within

from .conftest import Cluster, make_cluster
from .routers import AS_CLIENT, KEY
from .test_slow_clients import PATIENT, connected, passing

FILE = b"GET /uPlot.iife.min.js HTTP/1.1\r\nHost: x\r\n\r\n"
AUTHORIZED = f"Authorization: Bearer {KEY}\r\n".encode()
KEYS = (ApiKey.of("client", KEY),)


async def open_unread(url: str, sent: bytes) -> socket.socket:
    """Sends requests over a connection, and reads nothing of the answers."""
    host, _, port = url.removeprefix("http://").partition(":")
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, (host, int(port)))
    await loop.sock_sendall(sock, sent)
    return sock


def get(path: str) -> bytes:
    return b"GET %s HTTP/1.1\r\nHost: x\r\n%s\r\n" % (path.encode(), AUTHORIZED)


async def test_answers_without_a_key_that_are_not_read_keep_no_connection_from_others(
    tokenizer: ModelTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(server, "affordable_connections", lambda processes: 8)
    async with make_cluster(tokenizer, tmp_path, api_keys=KEYS) as cluster:
        unread = [await open_unread(cluster.url, 31 * FILE) for _ in range(12)]
        connections = cluster.router.listener.connections
        for _ in range(3):
            status, answer = await cluster.post("/v1/completions", AS_CLIENT, prompt="Hi", max_tokens=200)
            assert status == 200, answer
        assert len(connections) <= 8
        for sock in unread:
            sock.close()


async def a_page(cluster: Cluster) -> bytes:
    return FILE


async def a_list(cluster: Cluster) -> bytes:
    return get("/v1/models")


async def an_error(cluster: Cluster) -> bytes:
    return get(f"/v1/models/{'x' * 4000}")


async def a_stored_response(cluster: Cluster) -> bytes:
    status, made = await cluster.post("/v1/responses", AS_CLIENT, input="x" * 500)
    assert status == 200, made
    return get(f"/v1/responses/{made['id']}/input_items")


async def events_of_the_background(cluster: Cluster) -> bytes:
    body = json.dumps({"input": "Hi", "background": True, "stream": True}).encode()
    headers = {**AS_CLIENT, "Content-Type": "application/json"}
    async with cluster.http.post(cluster.url + "/v1/responses", data=body, headers=headers) as response:
        id = re.findall(r'"(resp_\w+)"', await response.text())[0]
    return get(f"/v1/responses/{id}?stream=true")


async def the_content_of_a_file(cluster: Cluster) -> bytes:
    form = aiohttp.FormData({"purpose": "batch"})
    form.add_field("file", json.dumps({"custom_id": "x" * (1 << 20)}), filename="in.jsonl")
    async with cluster.http.post(cluster.url + "/v1/files", data=form, headers=AS_CLIENT) as response:
        made = await response.json()
        assert response.status == 200, made
    return get(f"/v1/files/{made['id']}/content")


@pytest.mark.parametrize(
    "asked",
    [a_page, a_list, an_error, a_stored_response, events_of_the_background, the_content_of_a_file],
)
async def test_a_client_is_cut_off_whatever_it_does_not_read(
    tokenizer: ModelTokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    clock: Clock,
    caplog: pytest.LogCaptureFixture,
    asked: Callable[[Cluster], Any],
):
    """The end of idle connections does not come first."""
    caplog.set_level("INFO")
    monkeypatch.setattr(http_connections, "SEND_BUFFER_BYTES", 4096)
    config = {**PATIENT, "api_keys": KEYS, "keep_alive": 1e6, "batch_dir": str(tmp_path / "kept")}
    async with make_cluster(tokenizer, tmp_path, **config) as cluster:
        sent = await asked(cluster)
        await cluster.http.close()
        connections = cluster.router.listener.connections
        async with asyncio.timeout(WITHIN):
            await connections.none.wait()
        sock = await open_unread(cluster.url, 200 * sent)
        await passing(clock, lambda: "does not read its response" in caplog.text)
        async with asyncio.timeout(WITHIN):
            await connections.none.wait()
        sock.close()
        assert cluster.router.frontend.authorize(AS_CLIENT["Authorization"]).body_bytes == 0
        assert "Traceback" not in caplog.text


async def test_a_client_that_reads_slowly_is_not_cut_off(
    tokenizer: ModelTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
):
    """It has the timeout again after each piece."""
    monkeypatch.setattr(http_connections, "SEND_BUFFER_BYTES", 4096)
    async with (
        make_cluster(tokenizer, tmp_path, **PATIENT, keep_alive=1e6) as cluster,
        connected(cluster) as (reader, writer),
    ):
        writer.write(31 * FILE)
        for _ in range(4):
            await within(reader.readexactly(1 << 18))  # more than what waits for it
            await clock.forward(0.75 * PATIENT["client_timeout"])


async def test_a_client_is_cut_off_over_tls(
    tokenizer: ModelTokenizer,
    tmp_path: Path,
    clock: Clock,
    certificates: Certificates,
    caplog: pytest.LogCaptureFixture,
):
    caplog.set_level("INFO")
    context = ssl.create_default_context(cafile=certificates.ca)
    context.check_hostname = False
    config = {**PATIENT, "keep_alive": 1e6, "tls": TlsFiles(*certificates.worker)}
    async with make_cluster(tokenizer, tmp_path, **config) as cluster:
        sock = await open_unread(cluster.url.replace("https", "http"), b"")
        _, writer = await asyncio.open_connection(sock=sock, ssl=context, server_hostname="x", limit=1024)
        writer.write(31 * FILE)
        await passing(clock, lambda: "does not read its response" in caplog.text)
        await within(cluster.router.listener.connections.none.wait())
        writer.transport.abort()


@pytest.mark.long
async def test_a_router_process_cuts_off_a_client(start: Callable[..., Any]):
    """With the event loop that routers use."""
    router = await start("--advanced.client-timeout", "0.5")
    sock = await open_unread(router.url, 31 * FILE)
    ended = select.poll()
    ended.register(sock, 0)  # errors alone: to read would be progress
    assert await asyncio.to_thread(ended.poll, 1000 * WITHIN), "the connection was reset"
    status = await router.get(router.url + "/health")
    assert status["status"]
    sock.close()


async def test_requests_that_come_ahead_of_a_running_one_wait_in_the_kernel(cluster: Cluster):
    """aiohttp would keep 31 of them, with 128 headers of 8 KiB each."""
    cluster.decodes[0].steps = asyncio.Semaphore(1)
    body = json.dumps({"prompt": "Hi", "max_tokens": 9}).encode()
    begun = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    begun += b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
    large = FILE.replace(
        b"\r\n\r\n", b"".join(b"\r\nX-%d: %s" % (n, b"x" * 8000) for n in range(100)) + b"\r\n\r\n"
    )
    async with connected(cluster) as (reader, writer):
        writer.write(begun)
        await cluster.decodes[0].until(lambda w: w.submitted)
        writer.write(20 * large)
        sock = writer.get_extra_info("socket")
        await asyncio.sleep(0)
        left = -1
        # No event says that the router has stopped to read.
        while left != (left := writer.transport.get_write_buffer_size()):  # noqa: ASYNC110
            await asyncio.sleep(0.2)
        assert left > 10 * len(large), "the router has stopped to read"
        for _ in range(99):
            cluster.decodes[0].steps.release()
        assert sock.fileno() >= 0
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"


def ended_batches(directory: Path, count: int) -> set[str]:
    """Puts so many batches of the client in a directory of a router. Returns their ids."""
    storage, ids = Storage(directory, 1 << 30, lambda: 1), [new_id("batch") for _ in range(count)]
    storage.open()
    for id in ids:
        batch = BatchObject(
            id=id,
            endpoint="/v1/completions",
            input_file_id=new_id("file"),
            created_at=timestamp(),
            expires_at=timestamp() + 9999,
            status="completed",
        )
        storage.put(owner_of(KEYS[0]), batch)
    storage.close()
    return {*ids}


async def test_a_list_comes_in_pages(tokenizer: ModelTokenizer, tmp_path: Path):
    kept = tmp_path / "kept"
    ids = ended_batches(kept, PAGE + 5)
    async with make_cluster(tokenizer, tmp_path, api_keys=KEYS, batch_dir=str(kept)) as cluster:
        seen, after = [], ""
        for expected in (PAGE, 5):
            path = f"/v1/batches?limit=10000{after}"
            async with cluster.http.get(cluster.url + path, headers=AS_CLIENT) as response:
                page = await response.json()
            assert len(page["data"]) == expected
            seen += [each["id"] for each in page["data"]]
            after = f"&after={page['last_id']}"
        assert {*seen} == ids
        assert not page["has_more"]


async def test_the_events_of_a_response_in_the_background_count_while_they_grow(cluster: Cluster):
    decode = cluster.decodes[0]
    decode.steps = asyncio.Semaphore(20)
    account = cluster.router.frontend.authorize("")
    asked = {"input": "Hi", "background": True, "stream": True, "max_output_tokens": 60}
    async with cluster.http.post(cluster.url + "/v1/responses", json=asked) as response:
        counted = 0
        for _ in range(10):
            counted += len(await response.content.readuntil(b"\n\n"))
        assert account.body_bytes >= counted
        for _ in range(99):
            decode.steps.release()
        await response.read()
    await cluster.until(lambda: account.body_bytes == 0)


async def test_events_of_the_background_that_are_too_many_end_their_response(
    tokenizer: ModelTokenizer, tmp_path: Path
):
    async with make_cluster(tokenizer, tmp_path, max_body_bytes=150) as cluster:
        cluster.decodes[0].step_seconds = 0.001
        asked = {"input": "Hi", "background": True, "ignore_eos": True, "max_output_tokens": 900}
        events = await cluster.typed_events("/v1/responses", **asked)
        assert events[-1]["type"] == "response.failed"
        assert "events of the background" in events[-1]["response"]["error"]["message"]
        account = cluster.router.frontend.authorize("")
        await cluster.until(lambda: account.body_bytes == 0)
