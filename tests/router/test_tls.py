"""TLS of a router: for HTTP and gRPC clients, with client certificates, and for connections to workers."""

import re
import ssl
from pathlib import Path

import aiohttp
import grpc
import grpc.aio
import pytest

from baton.router.text.tokenizer import ModelTokenizer
from baton.rpc import inference_pb2 as pb
from baton.rpc import worker_pb2
from baton.rpc.stubs import InferenceStub
from baton.rpc.tls import TlsFiles
from tests.conftest import Certificates
from tests.fake_worker import FakeWorker, Lanes
from tests.within import WITHIN

from .conftest import TEXT, Cluster, make_cluster

BODY = {"prompt": "Hello", "max_tokens": 200, "stream": False}


def context(authority: str, pair: tuple[str, str] | None = None) -> ssl.SSLContext:
    made = ssl.create_default_context(cafile=authority)
    if pair is not None:
        made.load_cert_chain(*pair)
    return made


async def over_https(cluster: Cluster, client: ssl.SSLContext) -> str:
    async with cluster.http.post(cluster.url + "/v1/completions", json=BODY, ssl=client) as response:
        assert response.status == 200
        return (await response.json())["choices"][0]["text"]


async def over_grpc(cluster: Cluster, authority: str, pair: tuple[str, str] | None = None) -> str:
    chain, key = (Path(path).read_bytes() for path in pair) if pair else (None, None)
    credentials = grpc.ssl_channel_credentials(Path(authority).read_bytes(), key, chain)
    assert cluster.router.grpc_address is not None
    async with grpc.aio.secure_channel(cluster.router.grpc_address, credentials) as channel:
        request = pb.GenerateRequest(text="Hello", max_tokens=200)
        call = InferenceStub(channel).Generate(request, timeout=WITHIN)
        return "".join([d.text async for message in call for d in message.deltas])


async def test_clients_over_tls(tokenizer: ModelTokenizer, tmp_path: Path, certificates: Certificates):
    async with make_cluster(tokenizer, tmp_path, tls=TlsFiles(*certificates.server)) as cluster:
        assert cluster.url.startswith("https://127.0.0.1:")
        page = cluster.router.services.metrics.exposition().decode()
        [ends_at] = re.findall(r"^baton:certificate_expiry_time_seconds{.*} (.*)$", page, re.M)
        assert float(ends_at) > cluster.router.services.metrics.history.started_at
        assert await over_https(cluster, context(certificates.ca)) == TEXT
        assert await over_grpc(cluster, certificates.ca) == TEXT
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await over_https(cluster, ssl.create_default_context())
        with pytest.raises((aiohttp.ClientError, OSError)):
            await cluster.http.get(cluster.url.replace("https", "http") + "/health")
        old = context(certificates.ca)
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        assert await over_https(cluster, old) == TEXT


async def test_clients_must_show_certificates(
    tokenizer: ModelTokenizer, tmp_path: Path, certificates: Certificates, strange_certificates: Certificates
):
    ours, theirs = certificates, strange_certificates
    tls = TlsFiles(*ours.server, ours.ca)
    async with make_cluster(tokenizer, tmp_path, tls=tls) as cluster:
        assert await over_https(cluster, context(ours.ca, ours.client)) == TEXT
        assert await over_grpc(cluster, ours.ca, ours.client) == TEXT
        for pair in (None, theirs.client):
            with pytest.raises((aiohttp.ClientError, OSError)):
                await over_https(cluster, context(ours.ca, pair))
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                await over_grpc(cluster, ours.ca, pair)
            assert refusal.value.code() == grpc.StatusCode.UNAVAILABLE
        assert len(cluster.decodes[0].submitted) == 2


async def test_tls_to_workers(tokenizer: ModelTokenizer, tmp_path: Path, certificates: Certificates):
    async with make_cluster(
        tokenizer,
        tmp_path,
        worker_tls=TlsFiles(*certificates.worker, certificates.ca),
        cluster_tls=TlsFiles(*certificates.client, certificates.ca),
    ) as cluster:
        assert (await cluster.complete())["choices"][0]["text"] == TEXT


async def test_an_impostor_at_the_address_of_a_worker_gets_no_prompt(
    tokenizer: ModelTokenizer, tmp_path: Path
):
    """A worker ends, and a process without the secret listens at its address."""
    async with make_cluster(tokenizer, tmp_path, prefill=2) as cluster:
        gone = cluster.prefills[1]
        await gone.kill()
        impostor = FakeWorker(worker_pb2.POOL_PREFILL, Lanes(), cluster.output_ids, secret=b"a guess at it")
        await impostor.start(port=int(gone.address.rpartition(":")[2]))
        try:
            [connection] = [c for c in cluster.pool.connections if c.address == gone.address]
            await cluster.until(lambda: "does not prove the cluster secret" in connection.reason)
            for _ in range(4):
                assert (await cluster.complete())["choices"][0]["text"] == TEXT
            workers = (await cluster.get("/status"))["workers"]
            [shown] = [w for w in workers if w["address"] == gone.address]
            assert shown["state"] == "connecting"
            assert "does not prove the cluster secret" in shown["reason"]
            assert "--cluster-secret-file" in shown["remedy"]
            assert impostor.described == 0
            assert impostor.submitted == []
        finally:
            await impostor.kill()
