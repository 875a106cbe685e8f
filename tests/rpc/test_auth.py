"""Calls over a real socket: both sides prove that they have the cluster secret, or no message passes."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest

from baton.rpc.auth import certificate, load_secret
from baton.rpc.channel import cluster_pems, connect, create_server
from baton.rpc.stubs import WORKER, WorkerStub, add_service
from baton.rpc.tls import Pems, TlsFiles, add_port
from baton.rpc.worker_pb2 import DescribeRequest, RouterHello, RouterMessage, WorkerDescription, WorkerMessage
from tests.conftest import Certificates
from tests.within import WITHIN, within

SECRET, ANOTHER = b"a secret of the cluster", b"another secret, as long"


class Echo:
    """Answers each message of a stream with an empty one, and counts what it was told."""

    def __init__(self) -> None:
        self.told = 0

    async def Describe(self, request, context):
        self.told += 1
        return WorkerDescription(index=7)

    async def Attach(self, request_iterator, context):
        self.told += 1
        async for _ in request_iterator:
            yield WorkerMessage()


@contextlib.asynccontextmanager
async def serving(
    pems: Pems | None, tls: TlsFiles | None = None, echo: Echo | None = None
) -> AsyncIterator[str]:
    server = create_server(SECRET, tls)
    add_service(server, WORKER, echo or Echo())
    port = add_port(server, "127.0.0.1", 0, pems)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def describe(channel: grpc.aio.Channel) -> int:
    async with channel:
        return (await WorkerStub(channel).Describe(DescribeRequest(), timeout=WITHIN)).index


async def refused(channel: grpc.aio.Channel, code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await describe(channel)
    assert error.value.code() is code
    return error.value.details() or ""


def test_the_certificates_of_a_secret_differ_and_have_one_authority():
    """Each process has a private key of its own."""
    first = certificate(SECRET)
    certificate.cache_clear()
    second = certificate(SECRET)
    assert first.key != second.key
    assert first.chain != second.chain
    assert SECRET.decode() not in repr(second)
    assert second.key.decode() not in repr(second)


async def test_unary_and_stream_calls_pass():
    client = certificate(SECRET)
    certificate.cache_clear()  # as in another process
    async with serving(certificate(SECRET)) as address, connect(address, SECRET) as channel:
        stub = WorkerStub(channel)
        assert (await stub.Describe(DescribeRequest(), timeout=WITHIN)).index == 7
        call = stub.Attach(None)
        for _ in range(3):
            await call.write(RouterMessage(hello=RouterHello(router_id=bytes(16))))
            assert await within(call.read()) == WorkerMessage()
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF  # pyrefly: ignore[missing-attribute]
        options = [("grpc.ssl_target_name_override", "baton-worker")]
        assert await describe(grpc.aio.secure_channel(address, client.channel_credentials(), options)) == 7


async def test_a_caller_that_does_not_prove_the_secret_is_refused(tmp_path: Path):
    """It has another secret, accepts every server and shows its certificate; it shows none; it has no TLS."""
    echo, other = Echo(), certificate(ANOTHER)
    (tmp_path / "pem").write_bytes(other.key + other.chain)
    async with serving(certificate(SECRET), echo=echo) as address:
        host, _, port = address.partition(":")
        for shown in (True, False):
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            context.set_alpn_protocols(["h2"])
            if shown:
                context.load_cert_chain(tmp_path / "pem")
            reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
            writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5))
            with contextlib.suppress(OSError):  # the alert
                assert await within(reader.read()) == b"", "no frame of HTTP/2"
            writer.close()
        await refused(grpc.aio.insecure_channel(address))
    assert echo.told == 0


@pytest.mark.parametrize("pems", [certificate(ANOTHER), None])
async def test_a_server_that_does_not_prove_the_secret_gets_no_call(pems: Pems | None):
    """An impostor at the address of a worker."""
    echo = Echo()
    async with serving(pems, echo=echo) as address:
        said = await refused(connect(address, SECRET))
    assert ("CERTIFICATE_VERIFY_FAILED" if pems else "WRONG_VERSION_NUMBER") in said
    assert echo.told == 0


async def test_a_relay_sees_only_ciphertext():
    """It passes on all bytes of a connection, in both directions."""
    seen = bytearray()
    told = b"a prompt of a client, in plain text"

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                seen.extend(data)
                writer.write(data)
        writer.close()

    async with serving(certificate(SECRET)) as worker:

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there = await asyncio.open_connection(*worker.split(":"))
            await asyncio.gather(forward(reader, there[1]), forward(there[0], writer))

        async with await asyncio.start_server(relay, "127.0.0.1", 0) as listener:
            host, port = listener.sockets[0].getsockname()
            async with connect(f"{host}:{port}", SECRET) as channel:
                call = WorkerStub(channel).Attach(None)
                await call.write(RouterMessage(hello=RouterHello(router_id=told)))
                assert await within(call.read()) == WorkerMessage()
    assert len(seen) > len(told)
    assert told not in seen
    assert b"baton.v1.Worker" not in seen, "nor the names of calls"


async def test_certificates_of_the_user_need_the_secret_too(certificates: Certificates):
    """Others may have certificates of the same authority."""
    ours, echo = certificates, Echo()
    tls, router = TlsFiles(*ours.worker, ours.ca), TlsFiles(*ours.client, ours.ca)
    async with serving(cluster_pems(SECRET, tls), tls, echo) as address:
        said = await refused(connect(address, ANOTHER, router), grpc.StatusCode.UNAUTHENTICATED)
        assert "cluster's secret" in said
        options = [("grpc.ssl_target_name_override", "baton-worker")]
        without = grpc.aio.secure_channel(address, router.pems().channel_credentials(), options)
        async with without:  # which writes nothing, because the refusal must not wait for a message
            with pytest.raises(grpc.aio.AioRpcError) as stream:
                await within(WorkerStub(without).Attach(None).read())
            assert stream.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert echo.told == 0
        assert await describe(connect(address, SECRET, router)) == 7


async def test_two_servers_cannot_share_a_port():
    async with serving(certificate(SECRET)) as address:
        with pytest.raises(OSError, match="in use"):
            add_port(create_server(SECRET), "127.0.0.1", int(address.partition(":")[2]), certificate(SECRET))


def test_the_secret_comes_from_a_file_or_the_environment(tmp_path, monkeypatch):
    path = tmp_path / "secret"
    path.write_bytes(SECRET + b"\n")
    assert load_secret(path) == SECRET
    monkeypatch.setenv("BATON_CLUSTER_SECRET", "from the environment")
    assert load_secret() == b"from the environment"
    path.write_bytes(b"short")
    with pytest.raises(ValueError, match=f"--cluster-secret-file {path}: .*5 bytes"):
        load_secret(path)
    path.write_bytes(b"s" * 4096)
    assert load_secret(path) == b"s" * 4096
    path.write_bytes(b"s" * 4097)
    with pytest.raises(ValueError, match=f"--cluster-secret-file {path}: .*4097 bytes"):
        load_secret(path)
    with pytest.raises(ValueError, match=r"--cluster-secret-file .*cannot be read"):
        load_secret(tmp_path / "absent")
    monkeypatch.delenv("BATON_CLUSTER_SECRET")
    with pytest.raises(ValueError, match=r"BATON_CLUSTER_SECRET=\$\(openssl .*--cluster-secret-file"):
        load_secret()


# ---------------------------------------------------------------- certificates of the user


async def test_both_sides_show_certificates(certificates: Certificates):
    tls = TlsFiles(*certificates.worker, certificates.ca)
    async with serving(cluster_pems(SECRET, tls), tls) as address:
        client = TlsFiles(*certificates.client, certificates.ca)
        assert await describe(connect(address, SECRET, client)) == 7
        # The connection is encrypted.
        host, port = address.split(":")
        context = ssl.create_default_context(cafile=certificates.ca)
        context.load_cert_chain(*certificates.client)
        _, writer = await asyncio.open_connection(
            host, int(port), ssl=context, server_hostname="baton-worker"
        )
        assert writer.get_extra_info("ssl_object").version() == "TLSv1.3"
        writer.close()


async def test_a_router_without_the_right_certificates_is_refused(
    certificates: Certificates, strange_certificates: Certificates
):
    ours, theirs = certificates, strange_certificates
    tls = TlsFiles(*ours.worker, ours.ca)
    async with serving(cluster_pems(SECRET, tls), tls) as address:
        for router in (
            None,  # the certificate that the secret makes
            TlsFiles(*theirs.client, ours.ca),  # a certificate of another authority
            TlsFiles(*ours.client, theirs.ca),  # trusts another authority
        ):
            await refused(connect(address, SECRET, router))
        without = grpc.ssl_channel_credentials(Path(ours.ca).read_bytes())
        options = [("grpc.ssl_target_name_override", "baton-worker")]
        await refused(grpc.aio.secure_channel(address, without, options))


async def test_a_router_refuses_a_server_without_the_certificate_of_a_worker(certificates: Certificates):
    """Its certificate is a client's of the same authority, or the one that the secret makes."""
    files = TlsFiles(*certificates.client, certificates.ca)
    for tls in (files, None):
        async with serving(cluster_pems(SECRET, tls), tls) as address:
            await refused(connect(address, SECRET, files))


def test_an_error_names_the_missing_or_broken_file(
    certificates: Certificates, strange_certificates: Certificates, tmp_path: Path
):
    chain, key = certificates.server
    assert TlsFiles.of("ssl", None, None, None) is None
    assert TlsFiles.of("ssl", chain, key, None) == TlsFiles(chain, key)
    assert TlsFiles.of("cluster-ssl", chain, key, certificates.ca, mutual=True) is not None
    broken = tmp_path / "broken"
    broken.write_text("nothing")
    for given, message in (
        ((chain, None, None), "--ssl-certfile and --ssl-keyfile: some are missing"),
        ((None, None, certificates.ca), "some are missing"),
        ((chain, strange_certificates.server[1], None), "cannot be used"),
        ((str(broken), key, None), "broken"),
        ((chain, str(broken), None), "cannot be used"),
        ((chain, key, str(broken)), "cannot be used"),
        ((chain, str(tmp_path / "none"), None), "No such file"),
    ):
        with pytest.raises(ValueError) as error:
            TlsFiles.of("ssl", *given)
        assert message in str(error.value)
    with pytest.raises(ValueError, match="--cluster-ssl-ca-certs: some are missing"):
        TlsFiles.of("cluster-ssl", chain, key, None, mutual=True)
