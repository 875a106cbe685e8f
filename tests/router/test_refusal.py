"""The reasons for failed calls to a worker, from the errors of gRPC on real sockets."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import grpc.aio
import pytest
from aiohttp import web

from baton.cluster.options.clients import EndpointOptions
from baton.cluster.tools.http import fetch
from baton.router.ask import first_description
from baton.router.config import RouterConfig
from baton.router.workers import checks
from baton.rpc import worker_pb2 as pb
from baton.rpc.channel import connect, create_public_server
from baton.rpc.health import HealthServicer
from baton.rpc.stubs import WorkerStub
from baton.rpc.tls import TlsFiles
from baton.system.addresses import free_port as unused_port
from baton.system.python_path import PACKAGES
from tests.conftest import Certificates
from tests.fake_worker import SECRET, FakeWorker, Lanes
from tests.within import WITHIN, eventually


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
async def loading_worker() -> AsyncIterator[str]:
    """It has its port, and serves it when its model is loaded."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"127.0.0.1:{listening.getsockname()[1]}"


@contextlib.asynccontextmanager
async def router_port() -> AsyncIterator[str]:
    server = create_public_server(1 << 20, HealthServicer(), [], message_timeout=5.0, share=False)
    port = server.add_port("127.0.0.1:0", None)
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
        async with connect(address, secret, tls) as channel:
            await WorkerStub(channel).Describe(pb.DescribeRequest(), timeout=WITHIN)
    return checks.explain(error.value, files=tls is not None)


async def test_a_different_secret_is_named(certificates: Certificates) -> None:
    tls = files(certificates.worker, certificates.ca)
    for both, named in (
        (None, "the worker does not prove the cluster secret"),
        (tls, "the worker has another cluster secret"),
    ):
        async with worker(both) as address:
            reason, remedy = await told(address, both, secret=b"another cluster secret")
        assert reason.startswith(named)
        assert remedy.startswith(checks.SECRET)


@pytest.mark.all
@pytest.mark.parametrize(
    ("place", "reason", "remedy"),
    [
        (free_port, "nothing listens at this address", checks.START),
        (loading_worker, "the worker is still starting", checks.WAIT),
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
        (None, tls, "the worker's certificate is not trusted", checks.TLS),
        (tls, None, "the worker does not prove the cluster secret", checks.TLS),
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
    """Meanwhile `baton status` says for what the router waits, on each port."""
    ports = unused_port(), unused_port()
    async with free_port() as nothing, worker() as address:
        (tmp_path / "workers").write_text(f"{nothing}\n")
        config = RouterConfig(
            model=None,
            secret=SECRET,
            workers_file=str(tmp_path / "workers"),
            port=ports[0],
            admin_port=ports[1],
        )
        asking = asyncio.create_task(first_description(config))
        await eventually(lambda: caplog.messages)
        for port in ports:
            with pytest.raises(ValueError, match=f"503 the router asks its workers .* at {nothing}: nothing"):
                await fetch(EndpointOptions(url=f"http://127.0.0.1:{port}"), "status")
        (tmp_path / "workers").write_text(f"{nothing}\n{address}\n")
        assert (await asking).model == "fake"
    assert [f"worker at {nothing}: nothing listens" in line for line in caplog.messages] == [True]


@pytest.mark.all
async def test_a_router_that_asks_for_its_model_logs_no_traceback(shallow_model_path: Path) -> None:
    """A call to the second worker is under way when the first one has answered."""
    fake = FakeWorker(pb.POOL_PREFILL, Lanes(), [2])
    fake.model = str(shallow_model_path)
    async with loading_worker() as loading:
        await fake.start()
        command = [
            "-m",
            "baton.cluster.cli",
            "router",
            "--port",
            "0",
            "--worker",
            fake.address,
            "--worker",
            loading,
        ]
        environment = os.environ | {"BATON_CLUSTER_SECRET": SECRET.decode(), "PYTHONPATH": PACKAGES}
        router = await asyncio.create_subprocess_exec(
            sys.executable, *command, env=environment, stderr=asyncio.subprocess.PIPE
        )
        assert router.stderr is not None
        lines: list[bytes] = []
        async with asyncio.timeout(WITHIN):
            while not lines or b"is ready" not in lines[-1]:
                lines.append(await router.stderr.readline())
                assert lines[-1], b"".join(lines).decode()
            router.send_signal(signal.SIGTERM)
            lines.append((await router.communicate())[1])
        await fake.kill()
    assert router.returncode == 0
    assert b"Traceback" not in b"".join(lines), b"".join(lines).decode()
