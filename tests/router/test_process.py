"""The router process: its ready report and title, drain on SIGTERM, immediate end on SIGINT."""

import asyncio
import json
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import aiohttp
import psutil
import pytest

from tests.within import WITHIN

from .conftest import TEXT
from .routers import AS_CLIENT, KEY, Routers

pytestmark = pytest.mark.all


async def ask(router: Routers, **body: object) -> tuple[int, bytes]:
    async with (
        aiohttp.ClientSession(headers=AS_CLIENT) as http,
        http.post(
            router.url + "/v1/completions", json={"prompt": "Hi", "max_tokens": 99, **body}
        ) as response,
    ):
        return response.status, await response.read()


async def test_a_router_starts_serves_and_drains(start: Callable, tmp_path: Path):
    """SIGHUP changes the keys meanwhile. The running request goes on."""
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[a]\nkey = "{KEY}"')
    router = await start("--api-key-file", str(keys))
    assert router.ready["pid"] == router.popen.pid
    assert psutil.Process(router.popen.pid).cmdline()[0] == "baton: router 4"
    status, body = await ask(router)
    assert status == 200
    assert json.loads(body)["choices"][0]["text"] == TEXT
    await a_large_body_does_not_block_the_event_loop(router)

    router.decode.steps = asyncio.Semaphore(0)
    running = asyncio.create_task(ask(router, stream=True))
    await router.decode.until(lambda w: len(w.submitted) == 2)
    keys.write_text('[a]\nkey = "b"')
    router.popen.send_signal(signal.SIGHUP)
    async with asyncio.timeout(WITHIN):
        while (await ask(router, max_tokens=-1))[0] != 401:  # noqa: ASYNC110  400 before, without waiting
            await asyncio.sleep(0.02)
    router.popen.send_signal(signal.SIGTERM)
    await stops_listening(router)
    for _ in range(99):
        router.decode.steps.release()
    status, body = await running
    assert status == 200
    assert body.endswith(b"data: [DONE]\n\n")
    assert b"error" not in body
    assert await router.exit_code() == 0


async def test_a_drain_has_a_timeout_and_clients_get_an_error(start: Callable):
    """No text of a client is logged."""
    router = await start("--drain-timeout", "0.3", "--log-format", "text", "--log-level", "debug")
    await send_private_texts(router)
    router.decode.steps = asyncio.Semaphore(0)
    running = asyncio.create_task(ask(router, stream=True))
    await router.decode.until(lambda w: w.submitted)
    router.popen.send_signal(signal.SIGTERM)
    _, body = await running
    assert b"shutting_down" in body, "as a status, or as an event if the stream has begun"
    await router.decode.until(lambda w: w.cancelled)
    assert "private" not in await logged(router)


async def test_sigint_ends_the_router_at_once(start: Callable):
    """No text of a client is logged."""
    router = await start("--log-format", "json", "--log-level", "debug")
    await send_private_texts(router)
    router.decode.steps = asyncio.Semaphore(0)
    running = asyncio.create_task(ask(router))
    await router.decode.until(lambda w: w.submitted)
    router.popen.send_signal(signal.SIGINT)
    status, body = await running
    assert status == 503
    assert json.loads(body)["error"]["code"] == "shutting_down"
    assert "private" not in await logged(router)


async def test_a_mistake_of_the_user_is_reported(start: Callable, tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for flags, named in (
            (("--port", port), "the port is in use"),
            (("--model", str(tmp_path)), "no tokenizer.json"),
        ):
            router = await start(*flags)
            assert await router.exit_code() != 0
            assert named in router.said[-1]["error"]
            assert named in router.log.read_text()


async def a_large_body_does_not_block_the_event_loop(router: Routers) -> None:
    """Other processes than the router's prepare it: while they stand still, the router goes on."""
    body = json.dumps({"prompt": "The router chooses a worker. " * 10_000})

    async with aiohttp.ClientSession(headers=AS_CLIENT) as http:

        async def tokenize() -> int:
            headers = {"Content-Type": "application/json"}
            async with http.post(router.url + "/tokenize", data=body, headers=headers) as response:
                return response.status

        assert await tokenize() == 200
        others = psutil.Process(router.popen.pid).children(recursive=True)
        assert others
        for process in others:
            process.suspend()
        asked = asyncio.create_task(tokenize())
        for _ in range(20):
            async with http.get(router.url + "/health") as response:
                assert response.status == 200
        assert not asked.done()
        for process in others:
            process.resume()
        assert await asked == 200


async def send_private_texts(router: Routers) -> None:
    """Requests that the HTTP parser refuses, each with the word "private"."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    for request in (
        head + b"Authorization: Bearer sk-private\0\r\n\r\n",
        head + b"Transfer-Encoding: chunked\r\n\r\nprivate prompt\r\n",
        head + b"Transfer-Encoding: private\r\n\r\n",
        head + b"Content-Encoding: gzip\r\nContent-Length: 14\r\n\r\nprivate prompt",
        b"private\r\n\r\n",
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(router.url.rpartition(":")[2]))
        writer.write(request)
        assert (await reader.readline()).startswith(b"HTTP/1.")
        writer.close()


async def logged(router: Routers) -> str:
    """All that the router logged. It must end by itself, without an error."""
    assert await router.exit_code() == 0
    lines = router.log.read_text()
    assert "listening on" in lines
    return lines


async def stops_listening(router: Routers) -> None:
    host, _, port = router.url.removeprefix("http://").partition(":")
    async with asyncio.timeout(WITHIN):
        while True:
            try:
                _, writer = await asyncio.open_connection(host, int(port))
            except ConnectionError:
                return
            writer.close()
            await asyncio.sleep(0.01)
