"""Clients that reuse connections see no error when routers are replaced one after the other."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import aiohttp
import grpc
import grpc.aio
import pytest

from baton.router import server
from baton.router.config import RouterConfig
from baton.router.endpoints import http_connections
from baton.router.server import RunningRouter, running
from baton.router.text.tokenizer import ModelTokenizer
from baton.rpc import inference_pb2
from baton.rpc.stubs import InferenceStub
from tests.fake_worker import SECRET
from tests.loop_clock import Clock
from tests.within import WITHIN, eventually, within

from .conftest import NO_DEFAULTS, TEXT, Cluster

HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


async def connect(cluster: Cluster) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = cluster.url.removeprefix("http://").partition(":")
    return await asyncio.open_connection(host, int(port))


async def test_an_open_connection_is_served_in_a_drain_and_told_to_close(cluster: Cluster, clock: Clock):
    """So is a new one, until load balancers know. Those that stay idle close, and then the drain ends."""
    assert (await cluster.complete())["choices"][0]["text"] == TEXT
    idle, idle_writer = await connect(cluster)
    idle_writer.write(HEALTH)
    assert b"Connection: close" not in await within(idle.readuntil(b"\r\n\r\n"))
    stream = await cluster.http.post(
        cluster.url + "/v1/completions", json={"prompt": "Hi", "stream": True, "max_tokens": 200}
    )
    draining = asyncio.create_task(cluster.router.drain())
    await asyncio.sleep(0)
    for _ in range(2):  # over the open connection, then over a new one
        async with cluster.http.post(
            cluster.url + "/v1/completions", json={"prompt": "Hi", "max_tokens": 200}
        ) as response:
            assert (response.status, response.headers["Connection"]) == (200, "close")
            assert (await response.json())["choices"][0]["text"] == TEXT
    await cluster.get("/routable", 503)
    assert "[DONE]" in await stream.text()
    assert not draining.done()
    await clock.forward(http_connections.RETIRE_SECONDS)
    await within(idle.read())  # to its end
    idle_writer.close()
    await within(draining)
    with pytest.raises(ConnectionError):
        await connect(cluster)


async def test_a_drain_without_connections_ends_at_once(cluster: Cluster):
    await cluster.http.close()
    await within(cluster.router.listener.connections.none.wait())
    await within(cluster.router.drain())


class Chooser:
    """A client with a pool of connections, and what chooses a router that was routable at the last look."""

    def __init__(self, http: aiohttp.ClientSession) -> None:
        self._http = http
        self.urls: list[str] = []
        self.channels: dict[str, grpc.aio.Channel] = {}
        self.sent = self.called = 0
        self._turn = 0

    async def look(self, urls: list[str]) -> None:
        found = []
        for url in urls:
            async with self._http.get(url + "/routable", headers={"Connection": "close"}) as response:
                if response.status == 200:
                    found.append(url)
        self.urls = found

    async def ask(self) -> None:
        """Raises for whatever is no whole answer."""
        self._turn += 1
        url = self.urls[self._turn % len(self.urls)]
        body = {"prompt": "Hi", "max_tokens": 200, "stream": self._turn % 3 == 0}
        async with self._http.post(url + "/v1/completions", json=body) as response:
            text = await response.text()
            assert response.status == 200, text
            assert "[DONE]" in text if body["stream"] else '"finish_reason":"stop"' in text
        self.sent += 1

    async def call(self) -> None:
        """The same over gRPC, over the one channel to each router."""
        self._turn += 1
        channel = self.channels[self.urls[self._turn % len(self.urls)]]
        request = inference_pb2.GenerateRequest(text="Hi", max_tokens=200)
        call = InferenceStub(channel).Generate(request, timeout=WITHIN)
        finished = [d.finish_reason async for message in call for d in message.deltas if d.finish_reason]
        assert finished == [inference_pb2.Delta.STOP]
        self.called += 1


@contextlib.asynccontextmanager
async def replaceable(config: RouterConfig, tokenizer: ModelTokenizer) -> AsyncIterator[RunningRouter]:
    """A router that has found its workers."""
    async with running(config, tokenizer, NO_DEFAULTS) as router:
        await eventually(lambda: router.services.pool.complete)
        yield router


@pytest.mark.parametrize(
    ("restarts", "period", "retire_seconds"),
    [(1, 0.1, 2.0), pytest.param(10, 1.0, 3.0, marks=pytest.mark.long)],
)
async def test_a_client_with_a_pool_sees_no_error_while_routers_are_replaced(
    cluster: Cluster,
    tokenizer: ModelTokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    restarts: int,
    period: float,
    retire_seconds: float,
):
    """Two routers behind a chooser that looks at /routable once in a `period` of seconds. The first row has
    time for twenty looks: on a busy machine a look is late."""
    for module in (server, http_connections):
        monkeypatch.setattr(module, "RETIRE_SECONDS", retire_seconds)
    config = RouterConfig(
        model="fake", secret=SECRET, port=0, workers_file=str(tmp_path / "workers"), grpc_port=0
    )
    async with contextlib.AsyncExitStack() as stack:
        http = await stack.enter_async_context(aiohttp.ClientSession())
        chooser = Chooser(http)
        running_routers: list[tuple[RunningRouter, contextlib.AsyncExitStack]] = []

        async def begin() -> None:
            own = await stack.enter_async_context(contextlib.AsyncExitStack())
            router = await own.enter_async_context(replaceable(config, tokenizer))
            assert router.grpc_address is not None
            channel = grpc.aio.insecure_channel(router.grpc_address)
            chooser.channels[router.url] = await stack.enter_async_context(channel)
            running_routers.append((router, own))

        async def looking() -> None:
            while True:
                await chooser.look([router.url for router, _ in running_routers])
                await asyncio.sleep(period)

        async def asking(ask: Callable[[], Awaitable[None]], pause: float) -> None:
            while not ended.is_set():
                await ask()
                await asyncio.sleep(pause)

        await begin()
        await begin()
        await chooser.look([router.url for router, _ in running_routers])
        ended = asyncio.Event()
        look = asyncio.create_task(looking())
        clients = [
            asyncio.create_task(asking(ask, pause))
            for pause in (0, 0.01, 0.1, 0.5 * period, 1.5 * period)
            for ask in (chooser.ask, chooser.call)
        ]
        for _ in range(restarts):
            await begin()
            await chooser.look([router.url for router, _ in running_routers])
            router, own = running_routers[0]
            before = chooser.sent, chooser.called
            draining = asyncio.create_task(router.drain())
            await asyncio.wait({draining, *clients}, return_when=asyncio.FIRST_COMPLETED)
            assert draining.done(), [client for client in clients if client.done()]
            assert chooser.sent > before[0]
            assert chooser.called > before[1]
            running_routers.pop(0)
            await own.aclose()
        ended.set()
        await within(asyncio.gather(*clients))
        look.cancel()
        print(f"{chooser.sent} requests, {chooser.called} calls, {restarts} restarts, no error")
