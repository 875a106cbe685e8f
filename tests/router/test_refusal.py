"""The reasons for failed calls to a worker, from the errors of gRPC on real sockets."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import grpc.aio
import pytest
from aiohttp import web

from baton import rpc
from baton.bench.fakes.worker import SECRET, FakeWorker, Lanes
from baton.router.config import RouterConfig
from baton.router.workers import checks
from baton.router.workers.ask import first_description
from baton.rpc import TlsFiles
from baton.rpc import worker_pb2 as pb
from baton.rpc.worker_pb2_grpc import WorkerStub
from tests.conftest import Certificates


def files(pair: tuple[str, str], authority: str) -> TlsFiles:
    return TlsFiles(*pair, authority)


@contextlib.asynccontextmanager
async def worker(tls: TlsFiles | None = None) -> AsyncIterator[str]:
    started = await FakeWorker(pb.POOL_PREFILL, Lanes(), [2], tls=tls).start()
    yield started.address
    await started.kill()


@contextlib.asynccontextmanager
async def metrics_port() -> AsyncIterator[str]:
    runner = web.AppRunner(web.Application())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


@contextlib.asynccontextmanager
async def kv_port() -> AsyncIterator[str]:
    """A server that sends first, and not HTTP/2."""

    async def hello(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(bytes(range(200)))
        writer.close()

    async with await asyncio.start_server(hello, "127.0.0.1", 0) as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


@contextlib.asynccontextmanager
async def router_port() -> AsyncIterator[str]:
    server = rpc.create_public_server(1 << 20, rpc.HealthServicer(), [], message_timeout=5.0, share=False)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


class _RefusesUnsigned(grpc.aio.ServerInterceptor):
    async def intercept_service(self, continuation, handler_call_details):
        async def abort(_requests: object, context: grpc.aio.ServicerContext) -> None:
            text = "the call is not signed with the cluster secret"
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, text)

        return grpc.stream_stream_rpc_method_handler(abort)


@contextlib.asynccontextmanager
async def older_worker() -> AsyncIterator[str]:
    """A worker without server ids. It refuses the call for the id, like every unsigned call."""
    server = grpc.aio.server(interceptors=[_RefusesUnsigned()])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


@contextlib.asynccontextmanager
async def free_port() -> AsyncIterator[str]:
    async with worker() as address:
        pass
    yield address


@contextlib.asynccontextmanager
async def no_name() -> AsyncIterator[str]:
    yield "there.is.no.such.host.invalid:1"


async def told(address: str, tls: TlsFiles | None = None, secret: bytes = SECRET) -> tuple[str, str]:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        async with rpc.connect(address, secret, tls) as channel:
            await WorkerStub(channel).Describe(pb.DescribeRequest(), timeout=5)
    return checks.explain(error.value, tls=tls is not None)


async def test_a_different_secret_is_named() -> None:
    async with worker() as address:
        reason, remedy = await told(address, secret=b"another cluster secret")
    assert "another cluster secret" in reason
    assert remedy == checks.SECRET


@pytest.mark.parametrize(
    ("place", "reason", "remedy"),
    [
        (older_worker, "the worker is of an older version", checks.UPGRADE),
        (free_port, "nothing listens at this address", checks.START),
        (no_name, "the host name is unknown", checks.START),
        (metrics_port, "another service answers", checks.PORT),
        (kv_port, "another service answers", checks.PORT),
        (router_port, "another service answers", checks.PORT),
    ],
)
async def test_a_wrong_address_is_named(
    place: Callable[[], contextlib.AbstractAsyncContextManager[str]], reason: str, remedy: str
) -> None:
    async with place() as address:
        found = await told(address)
    assert found[0].startswith(reason)
    assert found[1] == remedy


async def test_a_tls_mismatch_is_named(
    certificates: Certificates, strange_certificates: Certificates
) -> None:
    ours, theirs = certificates, strange_certificates
    tls = files(ours.worker, ours.ca)
    wrong_name = files(ours.server, ours.ca)
    for there, here, reason, remedy in (
        (None, tls, "the router uses TLS, this port does not", checks.TLS),
        (tls, None, "the worker closed the connection: it may require TLS", checks.TLS),
        (files(theirs.worker, ours.ca), tls, "the worker's certificate is not trusted", checks.CERTIFICATE),
        (
            tls,
            files(theirs.worker, ours.ca),
            "the worker closed the connection: it may not trust",
            checks.TLS,
        ),
        (wrong_name, tls, "the worker's certificate is for another name", checks.CERTIFICATE),
    ):
        async with worker(there) as address:
            found = await told(address, here)
        assert found[0].startswith(reason), found
        assert remedy in found[1]


async def test_the_model_is_that_of_the_first_worker_that_answers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with free_port() as nothing, worker() as address:
        (tmp_path / "workers").write_text(f"{nothing}\n")
        config = RouterConfig(model=None, secret=SECRET, workers_file=str(tmp_path / "workers"))
        asking = asyncio.create_task(first_description(config.discovered(), SECRET, None))
        async with asyncio.timeout(10):
            while not caplog.messages:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        (tmp_path / "workers").write_text(f"{nothing}\n{address}\n")
        assert (await asking).model == "fake"
    assert [f"worker at {nothing}: nothing listens" in line for line in caplog.messages] == [True]
