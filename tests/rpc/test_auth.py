"""Calls over a real socket: signed calls pass, and all others are refused before a message is read."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.rpc import HealthServicer, auth, connect, create_server, load_secret
from baton.rpc import channel as rpc_channel
from baton.rpc.auth import WINDOW_SECONDS, Verifier, ask_server_id, sign
from baton.rpc.worker_pb2 import DescribeRequest, RouterHello, RouterMessage, WorkerDescription, WorkerMessage
from baton.rpc.worker_pb2_grpc import WorkerServicer, WorkerStub, add_WorkerServicer_to_server

SECRET = b"a secret of the cluster"
ID = b"the id of server"
DESCRIBE = "/baton.v1.Worker/Describe"


class Echo(WorkerServicer):
    """Answers each message of a stream with an empty one."""

    async def Describe(self, request, context):
        return WorkerDescription(index=7)

    async def Attach(self, request_iterator, context):
        async for _ in request_iterator:
            yield WorkerMessage()


@contextlib.asynccontextmanager
async def serving(health_servicer: HealthServicer | None = None, port: int = 0) -> AsyncIterator[str]:
    server = create_server(SECRET, health_servicer)
    add_WorkerServicer_to_server(Echo(), server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def test_signed_unary_and_stream_calls_pass():
    async with serving() as address, connect(address, SECRET) as channel:
        stub = WorkerStub(channel)
        assert (await stub.Describe(DescribeRequest(), timeout=5)).index == 7
        call = stub.Attach(None)
        for _ in range(3):
            await call.write(RouterMessage(hello=RouterHello(router_id=bytes(16))))
            assert await asyncio.wait_for(call.read(), 5) == WorkerMessage()
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF  # pyrefly: ignore[missing-attribute]


@pytest.mark.parametrize("secret", [b"another secret, as long", None])
async def test_wrong_or_no_secret_is_refused(secret):
    async with serving() as address:
        channel = connect(address, secret) if secret else grpc.aio.insecure_channel(address)
        async with channel:
            stub = WorkerStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as unary:
                await stub.Describe(DescribeRequest(), timeout=5)
            assert unary.value.code() == grpc.StatusCode.UNAUTHENTICATED
            assert "cluster secret" in (unary.value.details() or "")
            # The client writes nothing, because the refusal must not wait for a message.
            with pytest.raises(grpc.aio.AioRpcError) as stream:
                await asyncio.wait_for(stub.Attach(None).read(), 5)
            assert stream.value.code() == grpc.StatusCode.UNAUTHENTICATED


async def test_a_replayed_header_is_refused():
    async with serving() as address, grpc.aio.insecure_channel(address) as channel:
        server_id = await ask_server_id(channel)
        header = (("x-baton-auth", sign(SECRET, server_id, DESCRIBE)),)
        stub = WorkerStub(channel)
        assert (await stub.Describe(DescribeRequest(), metadata=header, timeout=5)).index == 7
        with pytest.raises(grpc.aio.AioRpcError) as replay:
            await stub.Describe(DescribeRequest(), metadata=header, timeout=5)
        assert replay.value.code() == grpc.StatusCode.UNAUTHENTICATED


async def test_a_signature_is_refused_by_another_server():
    async with serving() as first, serving() as second, grpc.aio.insecure_channel(first) as channel:
        server_id = await ask_server_id(channel)
        header = (("x-baton-auth", sign(SECRET, server_id, DESCRIBE)),)
        async with grpc.aio.insecure_channel(second) as other:
            with pytest.raises(grpc.aio.AioRpcError, match="another server"):
                await WorkerStub(other).Describe(DescribeRequest(), metadata=header, timeout=5)
        described = await WorkerStub(channel).Describe(DescribeRequest(), metadata=header, timeout=5)
        assert described.index == 7


async def test_a_channel_signs_for_a_restarted_server_after_one_refusal():
    """The first call is refused, because it is signed for the earlier server."""
    async with serving() as address:
        channel = connect(address, SECRET)
        await WorkerStub(channel).Describe(DescribeRequest(), timeout=5)
    async with channel, serving(port=int(address.rpartition(":")[2])):
        stub = WorkerStub(channel)
        with pytest.raises(grpc.aio.AioRpcError, match="another server"):
            await stub.Describe(DescribeRequest(), timeout=5, wait_for_ready=True)
        assert (await stub.Describe(DescribeRequest(), timeout=5)).index == 7


async def test_an_unsigned_call_cannot_stay_open(monkeypatch: pytest.MonkeyPatch):
    """Health/Watch needs a signature, and a Health/Check ends if its message does not arrive."""
    monkeypatch.setattr(rpc_channel, "_MESSAGE_SECONDS", 0.05)
    async with serving() as address, grpc.aio.insecure_channel(address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch  # pyrefly: ignore[missing-attribute]
        assert await watch(health_pb2.HealthCheckRequest()).code() is grpc.StatusCode.UNAUTHENTICATED
        silent = channel.stream_stream("/grpc.health.v1.Health/Check", bytes, bytes)(None)
        assert await asyncio.wait_for(silent.code(), 5) is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_one_connection_has_a_bounded_number_of_unsigned_calls():
    async with serving() as address, contextlib.AsyncExitStack() as open_:
        options = [("grpc.use_local_subchannel_pool", 1)]
        flooding, other = [
            await open_.enter_async_context(grpc.aio.insecure_channel(address, options)) for _ in range(2)
        ]
        check = "/grpc.health.v1.Health/Check"
        silent = [flooding.stream_stream(check, bytes, bytes)(None) for _ in range(1_000)]
        await asyncio.gather(*(call.wait_for_connection() for call in silent))
        with pytest.raises(grpc.aio.AioRpcError, match="Deadline"):
            await flooding.unary_unary(check, bytes, bytes)(b"", timeout=0.3)
        await other.unary_unary(check, bytes, bytes)(b"", timeout=5)
        for call in silent:
            call.cancel()


async def test_an_unsigned_health_check_reports_the_state_that_was_set():
    servicer = HealthServicer()
    async with serving(servicer) as address, grpc.aio.insecure_channel(address) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check  # pyrefly: ignore[missing-attribute]
        status = await check(health_pb2.HealthCheckRequest(), timeout=5)
        assert status.status == health_pb2.HealthCheckResponse.SERVING
        servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        status = await check(health_pb2.HealthCheckRequest(), timeout=5)
        assert status.status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_two_servers_cannot_share_a_port():
    async with serving() as address:
        with pytest.raises(RuntimeError):
            create_server(SECRET).add_insecure_port(address)


def test_a_header_is_valid_for_one_method_and_within_the_window():
    header = sign(SECRET, ID, DESCRIBE, now=1000.0)
    assert Verifier(SECRET, ID).refusal(DESCRIBE, header, now=1000.0) is None
    assert Verifier(SECRET, ID).refusal("/baton.v1.Worker/Attach", header, now=1000.0)
    for shift in (WINDOW_SECONDS - 0.01, -WINDOW_SECONDS + 0.01):
        assert Verifier(SECRET, ID).refusal(DESCRIBE, header, now=1000.0 + shift) is None
    for shift in (WINDOW_SECONDS + 0.01, -WINDOW_SECONDS - 0.01):
        refusal = Verifier(SECRET, ID).refusal(DESCRIBE, header, now=1000.0 + shift)
        assert refusal is not None
        assert "clock" in refusal


def test_a_header_is_accepted_only_once():
    verifier = Verifier(SECRET, ID)
    header = sign(SECRET, ID, DESCRIBE, now=1000.0 + WINDOW_SECONDS)
    assert verifier.refusal(DESCRIBE, header, now=1000.0) is None
    for later in range(int(2 * WINDOW_SECONDS) + 2):
        assert verifier.refusal(DESCRIBE, header, now=1000.0 + later)


def test_the_number_of_nonces_is_bounded_and_old_ones_are_forgotten(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(auth, "_MAX_NONCES", 4)
    verifier = Verifier(SECRET, ID)
    for _ in range(4):
        assert verifier.refusal(DESCRIBE, sign(SECRET, ID, DESCRIBE, now=1000.0), now=1000.0) is None
    assert verifier.refusal(DESCRIBE, sign(SECRET, ID, DESCRIBE, now=1000.0), now=1000.0)
    later = 1000.0 + 2 * WINDOW_SECONDS + 1
    assert verifier.refusal(DESCRIBE, sign(SECRET, ID, DESCRIBE, now=later), now=later) is None


@pytest.mark.parametrize("header", ["", ".", "..", "x.y.z", "1.2.é", "9" * 5000, "\udcff.\udcff.\udcff"])
def test_malformed_headers_are_refused(header):
    assert Verifier(SECRET, ID).refusal(DESCRIBE, header)


def test_the_secret_comes_from_a_file_or_the_environment(tmp_path, monkeypatch):
    path = tmp_path / "secret"
    path.write_bytes(SECRET + b"\n")
    assert load_secret(path) == SECRET
    monkeypatch.setenv("BATON_CLUSTER_SECRET", "from the environment")
    assert load_secret() == b"from the environment"
    path.write_bytes(b"short")
    with pytest.raises(ValueError, match=f"--cluster-secret-file {path}: .*5 bytes"):
        load_secret(path)
    with pytest.raises(ValueError, match=r"--cluster-secret-file .*cannot be read"):
        load_secret(tmp_path / "absent")
    monkeypatch.delenv("BATON_CLUSTER_SECRET")
    with pytest.raises(ValueError, match=r"BATON_CLUSTER_SECRET=\$\(openssl .*--cluster-secret-file"):
        load_secret()
