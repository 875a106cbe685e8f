"""List and watch of the API server, with its failures. The tests that every discovery shares are in
test_discovery."""

import asyncio
import datetime
import importlib
import os
import re
import ssl
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import pytest
import trustme

from baton.bench.lab.harness.processes import spawn
from baton.cluster.discovery import kubernetes_discovery
from baton.cluster.discovery.kubernetes_discovery import RESYNC_SECONDS, KubernetesDiscovery
from baton.cluster.model import EMBEDDED_NAME
from baton.rpc import worker_pb2 as pb
from tests.fake_kubernetes import NAMESPACE, FakeKubernetes, endpoint
from tests.fake_worker import SECRET, FakeWorker, Lanes
from tests.within import WITHIN, eventually

from .followed import Follower

A, B, C = "10.0.0.1:7001", "10.0.0.2:7001", "10.0.0.3:7001"
SERVICES = ("baton-prefill", "baton-decode")


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries come soon. Only a test ends a watch or a request."""
    for name, seconds in (("FIRST_BACKOFF", 0.02), ("WATCH_SECONDS", 3600), ("TIMEOUT", WITHIN)):
        monkeypatch.setattr(kubernetes_discovery, name, seconds)


@pytest.fixture
async def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeKubernetes]:
    server = FakeKubernetes()
    await server.start()
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path / "kubeconfig")))
    yield server
    await server.stop()


@pytest.fixture
async def router(server: FakeKubernetes) -> AsyncIterator[Follower]:
    """It knows A, and watches."""
    server.put("a", "baton-prefill", [endpoint("10.0.0.1")])
    async with Follower(KubernetesDiscovery(SERVICES, "grpc")) as router:
        await router.until(A)
        await watching(server)
        yield router


async def watching(server: FakeKubernetes, after: int = 0) -> None:
    """Until a watch is open, the `after`-th of all or a later one."""
    await eventually(lambda: bool(server.watched) and len(server.watches()) >= after)


async def test_one_watch_follows_both_services_and_ignores_others(
    server: FakeKubernetes, router: Follower
) -> None:
    server.put("x", "somebody-else", [endpoint("10.9.9.9")])
    server.put("b", "baton-decode", [endpoint("10.0.0.2")])
    await router.until(A, B)
    server.put("moved", "baton-decode", [endpoint("10.0.0.2")])
    server.delete("b")
    server.put("c", "baton-decode", [endpoint("10.0.0.3")])
    await router.until(A, B, C)
    assert all(B in heard for heard in router.heard[1:]), "an endpoint that moves is never away"
    server.delete("moved")
    server.delete("c")
    await router.until(A)
    assert (server.lists(), len(server.watches())) == (1, 1)
    assert server.asked[0]["labelSelector"] == "kubernetes.io/service-name in (baton-decode,baton-prefill)"


async def test_a_broken_watch_continues_from_its_last_version(
    server: FakeKubernetes, router: Follower
) -> None:
    for turn in range(3):
        server.cut()
        server.put("b", "baton-decode", [endpoint("10.0.0.2", ready=turn % 2 == 0)])
        await router.until(*([A, B] if turn % 2 == 0 else [A]))
        await watching(server, after=turn + 2)
    assert server.lists() == 1


async def test_watches_share_one_tls_context(
    server: FakeKubernetes, router: Follower, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To make one reads all certificates of the system, on the event loop of the router."""
    made: list[object] = []
    create = ssl.create_default_context
    monkeypatch.setattr(
        ssl, "create_default_context", lambda *args, **kw: made.append(args) or create(*args, **kw)
    )
    for turn in range(3):
        server.cut()
        await watching(server, after=turn + 2)
    assert not made


async def test_a_watch_that_ends_in_time_goes_on_from_the_last_bookmark(
    server: FakeKubernetes, router: Follower
) -> None:
    server.bookmark()
    server.end_watches()
    await watching(server, after=2)
    server.put("b", "baton-decode", [endpoint("10.0.0.2")])
    await router.until(A, B)
    first, second = server.watches()
    assert {query["timeoutSeconds"] for query in server.asked[1:]} == {"3600"}
    assert int(second) == int(first) + 50
    assert server.lists() == 1


@pytest.mark.parametrize("as_event", [True, False], ids=["in the stream", "at once"])
async def test_410_lists_again(server: FakeKubernetes, router: Follower, as_event: bool) -> None:
    server.gone_as_event = as_event
    await server.stop()
    server.delete("a", silently=True)
    server.put("b", "baton-decode", [endpoint("10.0.0.2")], silently=True)
    server.forget()
    await server.start()
    await router.until(B)
    assert router.heard == [frozenset({A}), frozenset({B})], "never empty in between"
    await watching(server)
    server.put("c", "baton-decode", [endpoint("10.0.0.3")])
    await router.until(B, C)
    assert server.lists() == 2


async def test_a_periodic_list_finds_missed_changes(
    server: FakeKubernetes, router: Follower, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.put("b", "baton-decode", [endpoint("10.0.0.2")], silently=True)
    server.delete("a", silently=True)
    later = time.monotonic() + RESYNC_SECONDS
    monkeypatch.setattr(kubernetes_discovery, "time", SimpleNamespace(monotonic=lambda: later))
    server.end_watches()
    await router.until(B)


@pytest.mark.parametrize("code", [401, 403, 429, 500])
async def test_a_refusal_is_logged_and_keeps_the_last_list(
    server: FakeKubernetes, router: Follower, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    server.deny = code
    server.cut()
    await eventually(lambda: str(code) in caplog.text)
    assert router.heard == [frozenset({A})]
    assert ("needs list and watch of endpointslices" in caplog.text) == (code == 403)
    server.put("b", "baton-decode", [endpoint("10.0.0.2")])
    server.deny = 0
    await router.until(A, B)


async def test_a_server_that_ends_every_watch_at_once_is_not_asked_in_a_loop(
    server: FakeKubernetes, router: Follower, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        await asyncio.sleep(0)

    monkeypatch.setattr(kubernetes_discovery, "asyncio", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(kubernetes_discovery, "time", SimpleNamespace(monotonic=lambda: 0.0))
    before = len(server.watches())
    server.hasty = True
    server.cut()
    await eventually(lambda: len(server.watches()) >= before + 4)
    assert len(pauses) >= len(server.watches()) - before
    for i, pause in enumerate(pauses[:4]):
        assert 0.5 <= pause / (kubernetes_discovery.FIRST_BACKOFF * 2**i) <= 1
    server.hasty = False
    server.put("b", "baton-decode", [endpoint("10.0.0.2")])
    await router.until(A, B)


async def test_in_a_pod_it_uses_the_service_account_and_follows_its_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    authority = trustme.CA()
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(tls)
    server = FakeKubernetes(tls)
    server.token = "the first token"
    await server.start()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.crt"))
    (tmp_path / "token").write_text(server.token)
    (tmp_path / "namespace").write_text(NAMESPACE)
    loading = importlib.import_module("kubernetes.aio.config.incluster_config")
    monkeypatch.setattr(loading, "SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
    monkeypatch.setattr(loading, "SERVICE_CERT_FILENAME", str(tmp_path / "ca.crt"))
    monkeypatch.setattr(kubernetes_discovery, "NAMESPACE_FILE", tmp_path / "namespace")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.port))
    read = loading.InClusterConfigLoader._read_token_file

    def read_it_every_time(self) -> None:
        read(self)
        self.token_expires_at = datetime.datetime.min  # a minute, else

    monkeypatch.setattr(loading.InClusterConfigLoader, "_read_token_file", read_it_every_time)
    server.put("a", "baton-prefill", [endpoint("10.0.0.1")])
    async with Follower(KubernetesDiscovery(SERVICES, "grpc")) as router:
        await router.until(A)
        await watching(server)
        server.token = "the second token"
        server.cut()
        await eventually(lambda: "401" in caplog.text)
        (tmp_path / "token").write_text(server.token)
        server.put("b", "baton-decode", [endpoint("10.0.0.2")])
        await router.until(A, B)
    await server.stop()


async def test_without_pod_and_kubeconfig_the_error_names_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    async with Follower(KubernetesDiscovery(SERVICES, "grpc")) as router:
        with pytest.raises(ValueError, match="run in a pod with a ServiceAccount"):
            await router.until(A)


async def test_without_the_client_library_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    monkeypatch.setitem(sys.modules, "kubernetes.aio", None)
    with pytest.raises(ValueError, match=re.escape("pip install -e '.[kubernetes]'")):
        KubernetesDiscovery(SERVICES, "grpc")


@pytest.mark.all
async def test_a_router_process_uses_the_workers_of_the_services(
    server: FakeKubernetes, tmp_path: Path
) -> None:
    workers = [FakeWorker(role, Lanes(), [2]) for role in (pb.POOL_PREFILL, pb.POOL_DECODE)]
    for worker in workers:
        await worker.start()
    names = [argument for service in SERVICES for argument in ("--kubernetes-service", service)]
    environment = {**os.environ, "BATON_CLUSTER_SECRET": SECRET.decode()}
    # With --model the router starts without asking a worker for its model.
    process, told_by = spawn(
        "router", "--port", "0", "--model", EMBEDDED_NAME, *names, environment=environment
    )
    # A timeout of pytest would break into the event loop, and the router could outlive the test.
    with process, told_by:
        try:
            async with asyncio.timeout(WITHIN), aiohttp.ClientSession() as http:
                told = (await asyncio.to_thread(told_by.read)).decode()
                url = re.search(r'"url": "([^"]*)"', told)
                assert url, told
                ready = url[1] + "/ready"
                assert (await http.get(ready)).status == 503
                for service, worker in zip(SERVICES, workers, strict=True):
                    host, _, port = worker.address.rpartition(":")
                    server.put(service, service, [endpoint(host)], port=int(port))
                while (await http.get(ready)).status != 200:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        finally:
            process.kill()
            for worker in workers:
                await worker.kill()
