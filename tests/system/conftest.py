"""One real cluster for all system tests that do not break it: `baton serve`, embedded model, float32."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from baton.bench.lab.harness.cluster import LocalCluster, free_port
from baton.bench.lab.harness.streams import expected
from baton.cluster.model import EMBEDDED_NAME
from baton.engine import Engine, EngineConfig, build_engine
from tests.forked import forking
from tests.otlp import Receiver

from .machine import Machine
from .recovery import FLAGS, LONG, PATIENT, SHORT, Broken
from .serve import Serve

GOLDENS = Path(__file__).with_name("goldens.json")
BUDGET = 64
"""Tokens of a step of `server`. Every longer prompt is a chunked one."""


CLUSTERS = ("broken", "server")
"""Fixtures that live until the last test of this package."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Modules that share no cluster come first, then those of each shared one: an idle cluster takes a
    twentieth of a core, mostly of its router."""
    last: dict[Path, int] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.path.parent == GOLDENS.parent:
            used = [order for order, name in enumerate(CLUSTERS, 1) if name in item.fixturenames]
            last[item.path] = max(last.get(item.path, 0), *used, 0)
    items.sort(key=lambda item: last.get(item.path, 0))


@pytest.fixture(scope="package", autouse=True)
def forked_roles() -> Iterator[None]:
    with forking():
        yield


@pytest.fixture(scope="package")
def grpc_address() -> str:
    """Of the router of `server`."""
    return f"127.0.0.1:{free_port()}"


@pytest.fixture(scope="package")
def server(grpc_address: str) -> Iterator[Serve]:
    machine = Machine()
    grpc_port = grpc_address.rpartition(":")[2]
    server = Serve(machine, "--max-num-batched-tokens", str(BUDGET), "--grpc-port", grpc_port)
    try:
        server.until_ready()
        yield server
        server.assert_whole()
        server.stop(signal.SIGTERM)
    finally:
        server.kill()
        machine.remove()


@pytest.fixture(scope="package")
def one_engine(shallow_model_path: Path) -> Engine:
    """The model of `broken` in one engine, in this process."""
    config = EngineConfig(model=str(shallow_model_path), dtype="float32", num_blocks=512, num_threads=1)
    return build_engine(config)


@pytest.fixture
async def aclient(server: Serve) -> AsyncIterator[openai.AsyncOpenAI]:
    url = server.url + "/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture(scope="session")
def goldens() -> list[dict[str, Any]]:
    return json.loads(GOLDENS.read_text())


@pytest.fixture(scope="package")
def model_id(server: Serve) -> str:
    return server.get("/v1/models")["data"][0]["id"]


@pytest.fixture(scope="package")
def otlp() -> Iterator[Receiver]:
    """Takes the traces of `broken`."""
    receiver = Receiver()
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")  # ms
        yield receiver
    receiver.close()


@pytest.fixture(scope="session")
def shallow_model(shallow_model_path: Path) -> list[str]:
    """Flags of a worker or a router: the shallow model, under the name of the embedded one."""
    return ["--model", str(shallow_model_path), "--served-model-name", EMBEDDED_NAME]


@pytest.fixture(scope="package")
def broken(
    tmp_path_factory: pytest.TempPathFactory, otlp: Receiver, shallow_model: list[str]
) -> Iterator[Broken]:
    """The one that tests do break: two workers of each role, each started again however it ends."""
    watched = ("--advanced.otlp-endpoint", otlp.endpoint, "--log-format", "json", "--log-level", "debug")
    # What is broken here is the way of KV from a prefill worker to decode: decode workers do not go without,
    # and prompts have one prefill worker. `test_split` breaks what several have.
    with LocalCluster(
        tmp_path_factory.mktemp("broken"),
        worker_flags=[*FLAGS, *watched, *shallow_model],
        router_flags=[
            "--advanced.no-overflow",
            "--advanced.no-split-prompts",
            *PATIENT,
            *watched,
            *shallow_model,
        ],
    ) as cluster:
        yield Broken(cluster, asyncio.run(expected(cluster.url, [*SHORT, *LONG], at_once=12)))


@pytest.fixture
async def client_of_broken(broken: Broken) -> AsyncIterator[openai.AsyncOpenAI]:
    url = broken.cluster.url + "/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as client:
        yield client
