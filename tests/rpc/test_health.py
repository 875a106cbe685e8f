"""The health service: the number of watches is bounded, and an unread watch delays no other call."""

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from baton.rpc import health
from baton.rpc.channel import create_public_server
from baton.rpc.health import HealthServicer
from tests.within import WITHIN

SERVING, NOT_SERVING = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING


async def test_the_number_of_watches_is_bounded_and_stop_ends_serving(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(health, "MOST_WATCHES", 2)
    servicer = HealthServicer()
    server = create_public_server(1 << 20, servicer, [], message_timeout=5.0, share=False)
    port = server.add_port("127.0.0.1:0", None)
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub: Any = HealthStub(channel)
        watches = [stub.Watch(HealthCheckRequest()) for _ in range(2)]
        assert [(await watch.read()).status for watch in watches] == [SERVING] * 2
        one_more = stub.Watch(HealthCheckRequest(), timeout=WITHIN)
        assert await one_more.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        servicer.stop()
        assert [(await watch.read()).status for watch in watches] == [NOT_SERVING] * 2
    await server.stop(None)


async def test_an_unread_watch_does_not_delay_a_change_of_state() -> None:
    class Stalled:
        def __init__(self) -> None:
            self.written = asyncio.Event()

        async def write(self, _: HealthCheckResponse) -> None:
            self.written.set()
            await asyncio.Event().wait()

    servicer, context = HealthServicer(), Stalled()
    context_: Any = context
    watch = asyncio.create_task(servicer.Watch(HealthCheckRequest(), context_))
    await context.written.wait()
    servicer.set("", NOT_SERVING)
    assert (await servicer.Check(HealthCheckRequest(), context_)).status == NOT_SERVING
    watch.cancel()
