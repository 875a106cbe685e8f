"""A gRPC port keeps to its bound: idle connections end, those with calls stay, and probes are answered."""

import asyncio
import contextlib
import itertools
import multiprocessing
import time
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest

from baton.rpc import channel, port
from baton.rpc.channel import check_health, cluster_pems, connect, create_public_server, create_server
from baton.rpc.health import HealthServicer
from baton.rpc.port import Server
from baton.rpc.stubs import WORKER, WorkerStub, add_service
from baton.rpc.tls import add_port
from baton.rpc.worker_pb2 import DescribeRequest, WorkerDescription, WorkerMessage
from tests.within import WITHIN, within

SECRET = b"a secret of the cluster"
BEGUN = {True: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", False: b"\x16\x03"}
"""Whether the server is public: what its clients send first."""
MOST = 8


class Streams:
    """Sends one message, and another one when it may. Its description names the client."""

    def __init__(self) -> None:
        self.may_go = asyncio.Event()

    async def Attach(self, request_iterator, context):
        yield WorkerMessage()
        await self.may_go.wait()
        yield WorkerMessage()

    async def Describe(self, request, context):
        return WorkerDescription(model=context.peer())


class Public(Streams):
    """As a service for clients: it says which calls count."""

    def __init__(self, busy: bool) -> None:
        super().__init__()
        self.busy, self.server = busy, Server([], [], proven=False)

    async def Attach(self, request_iterator, context):
        with self.server.call(context, busy=self.busy):
            async for message in super().Attach(request_iterator, context):
                yield message


@contextlib.asynccontextmanager
async def serving(service: Streams, host: str = "127.0.0.1") -> AsyncIterator[int]:
    if isinstance(service, Public):
        server = create_public_server(1 << 20, HealthServicer(), [], message_timeout=WITHIN, share=False)
        service.server, pems = server, None
    else:
        server, pems = create_server(SECRET), cluster_pems(SECRET, None)
    add_service(server, WORKER, service)
    number = add_port(server, host, 0, pems)
    await server.start()
    try:
        yield number
    finally:
        await server.stop(None)


@contextlib.asynccontextmanager
async def crowd(
    number: int, public: bool, count: int = 5 * MOST
) -> AsyncIterator[list[asyncio.StreamReader]]:
    """So many connections from one address, which only begin to speak HTTP/2, or TLS."""
    async with contextlib.AsyncExitStack() as stack:
        readers = []
        for _ in range(count):
            reader, writer = await asyncio.open_connection("127.0.0.1", number, local_addr=("127.0.0.8", 0))
            stack.callback(writer.close)
            writer.write(BEGUN[public])
            readers.append(reader)
        yield readers


def open_channel(service: Streams, address: str) -> grpc.aio.Channel:
    options = [("grpc.use_local_subchannel_pool", 1)]  # a connection of its own
    is_public = isinstance(service, Public)
    return grpc.aio.insecure_channel(address, options) if is_public else connect(address, SECRET)


@pytest.mark.cases(1)
@pytest.mark.parametrize("host", ["127.0.0.1", "::"])
@pytest.mark.parametrize("public", [False, True])
async def test_calls_go_on_and_new_clients_are_served_beside_idle_connections(
    monkeypatch: pytest.MonkeyPatch, public: bool, host: str
):
    monkeypatch.setattr(port, "affordable_connections", lambda: MOST)
    for name in ("_IDLE", "_KEEPALIVE"):  # gRPC itself ends no connection
        options = [(option, 10**6 if value > 1_000 else value) for option, value in getattr(channel, name)]
        monkeypatch.setattr(channel, name, options)
    service = Public(busy=True) if public else Streams()
    async with serving(service, host) as number, open_channel(service, f"127.0.0.1:{number}") as old:
        call = WorkerStub(old).Attach(None)
        assert await within(call.read()) == WorkerMessage()
        async with crowd(number, public) as readers:
            for _ in range(2):
                async with open_channel(service, f"127.0.0.1:{number}") as new:
                    await within(new.channel_ready())
                    await check_health(new, WITHIN)
            ends = asyncio.as_completed([reader.read() for reader in readers])
            for end in itertools.islice(ends, len(readers) - MOST):
                with contextlib.suppress(ConnectionError):
                    assert await within(end) is not None
        service.may_go.set()
        assert await within(call.read()) == WorkerMessage()


async def test_a_call_that_any_client_can_make_protects_no_connection(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(port, "affordable_connections", lambda: MOST)
    service = Public(busy=False)
    async with serving(service) as number, contextlib.AsyncExitStack() as stack:
        calls = []
        for _ in range(MOST):
            opened = await stack.enter_async_context(open_channel(service, f"127.0.0.1:{number}"))
            calls.append(WorkerStub(opened).Attach(None))
            assert await within(calls[-1].read()) == WorkerMessage()
        async with open_channel(service, f"127.0.0.1:{number}") as new:
            await within(new.channel_ready())
            await check_health(new, WITHIN)
            reads = [asyncio.create_task(call.read()) for call in calls]
            ended, _ = await within(asyncio.wait(reads, return_when=asyncio.FIRST_COMPLETED))
            with pytest.raises(grpc.aio.AioRpcError) as error:
                ended.pop().result()
            assert error.value.code() is grpc.StatusCode.UNAVAILABLE
            service.may_go.set()
            await asyncio.gather(*reads, return_exceptions=True)


@pytest.mark.cases(1)
@pytest.mark.parametrize("public", [False, True])
async def test_a_connection_without_a_call_ends_soon_and_one_that_had_a_call_stays(
    monkeypatch: pytest.MonkeyPatch, public: bool
):
    """A call to the health service is none: it needs no key."""
    monkeypatch.setattr(port, "FIRST_CALL_SECONDS", 0.1)
    service = Public(busy=True) if public else Streams()
    async with serving(service) as number, open_channel(service, f"127.0.0.1:{number}") as proven:
        service.may_go.set()
        assert len([message async for message in WorkerStub(proven).Attach(None, timeout=WITHIN)]) == 2
        peer = await WorkerStub(proven).Describe(DescribeRequest(), timeout=WITHIN)
        if public:
            async with open_channel(service, f"127.0.0.1:{number}") as probe:
                await check_health(probe, WITHIN)
                state = probe.get_state()
                while state is grpc.ChannelConnectivity.READY:
                    await within(probe.wait_for_state_change(state))
                    state = probe.get_state()
        async with crowd(number, public, 2) as readers:
            await within(asyncio.gather(*(reader.read() for reader in readers)))
        assert await WorkerStub(proven).Describe(DescribeRequest(), timeout=WITHIN) == peer


def insist(number: int) -> None:
    """Runs 2,000 clients that connect again when their connection ends."""

    async def connect_always() -> None:
        while True:
            async with crowd(number, public=True, count=1) as (reader,):
                with contextlib.suppress(ConnectionError):
                    await reader.read()

    async def run() -> None:
        await asyncio.gather(*(connect_always() for _ in range(2_000)))

    asyncio.run(run())


@pytest.mark.long
async def test_each_probe_is_answered_beside_clients_that_connect_again_and_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """They have one address, and are twice as many as the port may have connections."""
    monkeypatch.setattr(port, "affordable_connections", lambda: 1_000)
    waits = []
    async with serving(service := Public(busy=True)) as number:
        clients = multiprocessing.get_context("spawn").Process(target=insist, args=(number,))
        clients.start()
        for _ in range(50):
            await asyncio.sleep(0.2)
            began = time.monotonic()
            async with open_channel(service, f"127.0.0.1:{number}") as probe:
                await check_health(probe, WITHIN)
            waits.append(time.monotonic() - began)
        assert clients.is_alive()
        clients.kill()
        await asyncio.to_thread(clients.join)
    with capsys.disabled():
        print(f"\nprobes: median {sorted(waits)[25]:.3f} s, longest {max(waits):.3f} s")
    assert max(waits) < 1.0
