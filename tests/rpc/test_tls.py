"""Mutual TLS between routers and workers, with real certificates over a real socket."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest

from baton.rpc.channel import cluster_pems, connect, create_server
from baton.rpc.tls import TlsFiles, add_port
from baton.rpc.worker_pb2 import DescribeRequest, WorkerDescription
from baton.rpc.worker_pb2_grpc import WorkerServicer, WorkerStub, add_WorkerServicer_to_server
from tests.conftest import Certificates

SECRET = b"a secret of the cluster"


class Described(WorkerServicer):
    async def Describe(self, request, context):
        return WorkerDescription(index=7)


@contextlib.asynccontextmanager
async def serving(tls: TlsFiles | None) -> AsyncIterator[str]:
    server = create_server(SECRET, tls)
    add_WorkerServicer_to_server(Described(), server)
    port = add_port(server, "127.0.0.1", 0, cluster_pems(SECRET, tls))
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def describe(address: str, tls: TlsFiles | None) -> int:
    async with connect(address, SECRET, tls) as channel:
        return (await WorkerStub(channel).Describe(DescribeRequest(), timeout=10)).index


async def test_both_sides_show_certificates(certificates: Certificates):
    async with serving(TlsFiles(*certificates.worker, certificates.ca)) as address:
        assert await describe(address, TlsFiles(*certificates.client, certificates.ca)) == 7
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
    async with serving(TlsFiles(*ours.worker, ours.ca)) as address:
        for router in (
            None,  # the certificate that the secret makes
            TlsFiles(*theirs.client, ours.ca),  # a certificate of another authority
            TlsFiles(*ours.client, theirs.ca),  # trusts another authority
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                await describe(address, router)
            assert refusal.value.code() == grpc.StatusCode.UNAVAILABLE
        async with grpc.aio.secure_channel(
            address,
            grpc.ssl_channel_credentials(Path(ours.ca).read_bytes()),
            options=[("grpc.ssl_target_name_override", "baton-worker")],
        ) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                await WorkerStub(channel).Describe(DescribeRequest(), timeout=10)
            assert refusal.value.code() == grpc.StatusCode.UNAVAILABLE


async def test_a_router_refuses_a_server_without_the_certificate_of_a_worker(certificates: Certificates):
    """Its certificate is a client's of the same authority, or the one that the secret makes."""
    files = TlsFiles(*certificates.client, certificates.ca)
    for tls in (files, None):
        async with serving(tls) as address:
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                await describe(address, files)
            assert refusal.value.code() == grpc.StatusCode.UNAVAILABLE


def test_an_error_names_the_missing_or_broken_file(
    certificates: Certificates, strange_certificates: Certificates, tmp_path: Path
):
    chain, key = certificates.server
    assert TlsFiles.of("ssl", None, None, None) is None
    assert TlsFiles.of("ssl", chain, key, None) == TlsFiles(chain, key)
    assert TlsFiles.of("cluster", chain, key, certificates.ca, mutual=True) is not None
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
    with pytest.raises(ValueError, match="--cluster-ca-certs: some are missing"):
        TlsFiles.of("cluster", chain, key, None, mutual=True)
