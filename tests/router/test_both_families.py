"""A router and a picker that listen on `::` serve clients of IPv4 and of IPv6."""

from pathlib import Path
from urllib.parse import urlsplit

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.endpoint_picker import PickerConfig
from baton.endpoint_picker.server import running
from baton.router.discovery import FileDiscovery
from baton.router.endpoints.stored_responses import home_tag
from baton.router.text.tokenizer import ModelTokenizer
from tests.within import WITHIN

from .conftest import make_cluster

HOSTS = ("127.0.0.1", "[::1]")


async def serves(address: str) -> bool:
    async with grpc.aio.insecure_channel(address) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check  # pyrefly: ignore[missing-attribute]
        answer = await check(health_pb2.HealthCheckRequest(), timeout=WITHIN)
    return answer.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.all
async def test_a_router(tokenizer: ModelTokenizer, tmp_path: Path) -> None:
    async with make_cluster(tokenizer, tmp_path, host="::") as cluster:
        assert cluster.router.grpc_address is not None
        port, grpc_port = urlsplit(cluster.url).port, cluster.router.grpc_address.rpartition(":")[2]
        for host in HOSTS:
            body = {"model": "fake", "input": "Hello", "max_output_tokens": 4}
            async with cluster.http.post(f"http://{host}:{port}/v1/responses", json=body) as answer:
                made = await answer.json()
                assert answer.status == 200, made
            # The picker knows the address of the pod, never the form ::ffff:127.0.0.1 of a socket for both.
            assert made["id"].startswith(home_tag(f"{host}:{port}"))
            assert await serves(f"{host}:{grpc_port}")


async def test_a_picker() -> None:
    config = PickerConfig(host="::", port=0, routers=FileDiscovery(None, ("[::1]:8000",)))
    async with running(config) as (address, _):
        port = address.rpartition(":")[2]
        for host in HOSTS:
            assert await serves(f"{host}:{port}")
