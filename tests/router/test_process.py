"""The router process: its ready report and title, drain on SIGTERM, immediate end on SIGINT."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from baton.router.text.tokenizer import ModelTokenizer
from baton.rpc import worker_pb2 as pb
from tests.fake_worker import SECRET, FakeWorker, Lanes
from tests.within import WITHIN

from .conftest import TEXT

LAUNCH = """
import json, sys
from baton.router import main
from baton.router.admission.keys import api_keys
from baton.router.config import RouterConfig
given = json.loads(sys.argv[1])
if keys := given.get("api_key_file"):
    given["read_api_keys"] = lambda: api_keys([], keys)
secret, workers = given.pop("secret").encode(), tuple(given.pop("workers"))
names = tuple(given.pop("served_model_name"))
sys.exit(main(RouterConfig(secret=secret, workers=workers, served_model_name=names, **given)))
"""
ROOT = Path(__file__).parents[2]


@dataclass
class Router:
    process: subprocess.Popen[bytes]
    reports: list[dict[str, Any]]
    prefill: FakeWorker
    decode: FakeWorker

    @property
    def url(self) -> str:
        return self.reports[-1]["ready"]["url"]

    async def exit_code(self) -> int:
        return await asyncio.to_thread(self.process.wait, 20)


def launch(**config: Any) -> tuple[subprocess.Popen[bytes], list[dict[str, Any]]]:
    """Starts a router and reads all its reports."""
    reader, writer = os.pipe()
    config = {
        "served_model_name": ["fake"], "secret": SECRET.decode(), "index": 3, "port": 0, "workers": [],
        "ready_fd": writer, **config,
    }  # fmt: skip
    command = [sys.executable, "-c", LAUNCH, json.dumps(config)]
    process = subprocess.Popen(command, pass_fds=[writer], cwd=ROOT, stderr=subprocess.PIPE)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        return process, [json.loads(line) for line in pipe]


@pytest.fixture
async def start(tokenizer: ModelTokenizer, directory: Path) -> AsyncIterator[Callable]:
    async with contextlib.AsyncExitStack() as stack:

        async def start_router(**config: Any) -> Router:
            lanes, output_ids = Lanes(), [*tokenizer.encode(TEXT), 2]
            workers = [FakeWorker(role, lanes, output_ids) for role in (pb.POOL_PREFILL, pb.POOL_DECODE)]
            for worker in workers:
                await worker.start()
                stack.push_async_callback(worker.kill)
            config |= {"model": str(directory), "workers": [w.address for w in workers]}
            process, reports = await asyncio.to_thread(launch, **config)
            stack.callback(process.wait)
            stack.callback(process.kill)
            return Router(process, reports, *workers)

        yield start_router


async def ask(router: Router, **body: Any) -> tuple[int, bytes]:
    async with (
        aiohttp.ClientSession() as http,
        http.post(
            router.url + "/v1/completions", json={"prompt": "Hi", "max_tokens": 99, **body}
        ) as response,
    ):
        return response.status, await response.read()


async def test_a_router_starts_serves_and_drains(start: Callable, tmp_path: Path):
    """SIGHUP changes the keys meanwhile. The running request goes on."""
    keys = tmp_path / "keys.toml"
    router = await start(api_key_file=str(keys))
    assert router.reports[-1]["ready"]["pid"] == router.process.pid
    assert psutil.Process(router.process.pid).cmdline()[0] == "baton: router 3"
    status, body = await ask(router)
    assert status == 200
    assert json.loads(body)["choices"][0]["text"] == TEXT

    router.decode.steps = asyncio.Semaphore(0)
    running = asyncio.create_task(ask(router, stream=True))
    await router.decode.until(lambda w: len(w.submitted) == 2)
    keys.write_text('[a]\nkey = "b"')
    router.process.send_signal(signal.SIGHUP)
    async with asyncio.timeout(WITHIN):
        while (await ask(router, max_tokens=-1))[0] != 401:  # noqa: ASYNC110  400 before, without waiting
            await asyncio.sleep(0.02)
    router.process.send_signal(signal.SIGTERM)
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
    router = await start(drain_timeout=0.3, log_format="text", log_level="debug")
    await send_private_texts(router)
    router.decode.steps = asyncio.Semaphore(0)
    running = asyncio.create_task(ask(router, stream=True))
    await router.decode.until(lambda w: w.submitted)
    router.process.send_signal(signal.SIGTERM)
    _, body = await running
    assert b"shutting_down" in body, "as a status, or as an event if the stream has begun"
    await router.decode.until(lambda w: w.cancelled)
    assert b"private" not in await logged(router)


async def test_sigint_ends_the_router_at_once(start: Callable):
    """No text of a client is logged."""
    router = await start(log_format="json", log_level="debug")
    await send_private_texts(router)
    router.decode.steps = asyncio.Semaphore(0)
    running = asyncio.create_task(ask(router))
    await router.decode.until(lambda w: w.submitted)
    router.process.send_signal(signal.SIGINT)
    status, body = await running
    assert status == 503
    assert json.loads(body)["error"]["code"] == "shutting_down"
    assert b"private" not in await logged(router)


async def test_a_mistake_of_the_user_is_reported(directory: Path, tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        cases: list[tuple[dict[str, Any], bytes]] = [
            ({"model": str(directory), "port": taken.getsockname()[1]}, b"the port is in use"),
            ({"model": str(tmp_path)}, b"no tokenizer.json"),
        ]
        for wrong, named in cases:
            process, reports = await asyncio.to_thread(launch, **wrong)
            _, errors = await asyncio.to_thread(process.communicate)
            assert process.returncode != 0
            assert named in errors
            assert not any("ready" in report for report in reports)


async def test_a_large_body_does_not_block_the_event_loop(start: Callable):
    """Other processes than the router's prepare it: while they stand still, the router goes on."""
    router = await start()
    body = json.dumps({"prompt": "The router chooses a worker. " * 10_000})

    async with aiohttp.ClientSession() as http:

        async def tokenize() -> int:
            headers = {"Content-Type": "application/json"}
            async with http.post(router.url + "/tokenize", data=body, headers=headers) as response:
                return response.status

        assert await tokenize() == 200
        others = psutil.Process(router.process.pid).children(recursive=True)
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


async def send_private_texts(router: Router) -> None:
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


async def logged(router: Router) -> bytes:
    """All that the router logged. It must end by itself, without an error."""
    _, lines = await asyncio.to_thread(router.process.communicate, timeout=WITHIN)
    assert router.process.returncode == 0
    assert b"listening on" in lines
    return lines


async def stops_listening(router: Router) -> None:
    host, _, port = router.url.removeprefix("http://").partition(":")
    async with asyncio.timeout(WITHIN):
        while True:
            try:
                _, writer = await asyncio.open_connection(host, int(port))
            except ConnectionError:
                return
            writer.close()
            await asyncio.sleep(0.01)
