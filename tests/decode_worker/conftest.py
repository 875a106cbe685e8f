"""A prefill and a decode worker with the tiny model, which the tests of this package share, and helpers."""

import json
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from baton.rpc import worker_pb2 as pb
from tests.bad_network import BadNetwork
from tests.cluster_helpers import (
    Pair,
    WorkerProcess,
    WorkerStream,
    assert_whole,
    paired,
    request,
    sampling,
    started_pair,
    tiny_model,
)
from tests.device import DEVICE
from tests.forked import forking
from tests.within import WITHIN

BLOCKS = 300  # of 16 positions
TINY: dict[str, Any] = {
    "load_format": "dummy",
    "num_blocks": BLOCKS,
    "block_size": 16,
    "max_num_batched_tokens": 64,
}
ENDLESS = sampling(max_tokens=2000, ignore_eos=True)
Workers = tuple[WorkerProcess, WorkerProcess]
WorkersAndNetwork = tuple[Workers, BadNetwork]
RANKS = [
    pytest.param((1, 1), id="one rank"),
    pytest.param(
        (2, 4), id="2 to 4 ranks",
        marks=[pytest.mark.long, pytest.mark.skipif(DEVICE != "cpu", reason="needs several devices")],
    ),
]  # fmt: skip
"""Of the prefill worker and of the decode worker. KV goes over TCP, where tests damage it."""


@contextmanager
def network_before(worker: WorkerProcess) -> Iterator[BadNetwork]:
    """All lanes to this worker go through it, in every test. A peer keeps one session with a worker, so a
    network at a second address would carry nothing."""
    with closing(BadNetwork(int(worker.ready["kv_address"].rpartition(":")[2]))) as network:
        worker.ready["kv_address"] = network.address
        yield network


@contextmanager
def damaging(network: BadNetwork, fault: str, frames: int = 1) -> Iterator[None]:
    """The next frames with KV suffer `fault`, at most until the end of the context."""
    network.fault, network.hits = fault, frames
    try:
        yield
    finally:
        network.hits = 0


@pytest.fixture(scope="package", autouse=True)
def forked_roles() -> Iterator[None]:
    with forking():
        yield


@pytest.fixture(scope="package", params=RANKS)
def workers_and_network(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[WorkersAndNetwork]:
    """The network is before the prefill worker."""
    directory = tmp_path_factory.mktemp("tiny")
    with (
        started_pair(
            tiny_model(directory / "model"),
            directory,
            engine=TINY,
            ranks=request.param,
            kv_connector="tcp",
            deadlines={"peer_dead": 3.0, "engine_dead": WITHIN},
        ) as started,
        network_before(started[0]) as network,
    ):
        yield started, network


@pytest.fixture(scope="package")
def workers(workers_and_network: WorkersAndNetwork) -> Workers:
    return workers_and_network[0]


@pytest.fixture(scope="package")
def caching_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of `caching_workers`: their model and their traces."""
    directory = tmp_path_factory.mktemp("caching")
    tiny_model(directory / "model")
    return directory


@pytest.fixture(scope="package", params=RANKS)
def caching_workers_and_network(
    request: pytest.FixtureRequest, caching_directory: Path
) -> Iterator[WorkersAndNetwork]:
    """Both keep a prefix cache, and fetch what they lack. The network is before the decode worker."""
    engine = TINY | {"enable_prefix_caching": True}
    with (
        started_pair(
            caching_directory / "model",
            caching_directory,
            engine=engine,
            ranks=request.param,
            kv_connector="tcp",
            engine_module="tests.decode_worker.engine_process",
            trace_dir=str(caching_directory / "traces"),
        ) as started,
        network_before(started[1]) as network,
    ):
        yield started, network
    assert list((caching_directory / "run").iterdir()) == []
    assert_traces(caching_directory / "traces")


@pytest.fixture(scope="package")
def caching_workers(caching_workers_and_network: WorkersAndNetwork) -> Workers:
    return caching_workers_and_network[0]


@pytest.fixture
async def pair(workers: Workers) -> AsyncIterator[Pair]:
    """A router's streams to both. All pools are whole afterwards."""
    async with paired(*workers) as pair:
        yield pair
        await assert_whole(*workers)


@pytest.fixture
async def caching_pair(caching_workers: Workers) -> AsyncIterator[Pair]:
    async with paired(*caching_workers) as pair:
        yield pair
        await assert_whole(*caching_workers)


def assert_traces(directory: Path) -> None:
    """Traces of workers that have ended name what transfers and steps did."""
    events: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for path in directory.iterdir():
        events[path.stem] += [json.loads(line.rstrip(",")) for line in path.read_text().splitlines()[1:]]
    names = {event["name"] for of_process in events.values() for event in of_process}
    assert names >= {"layer", "gather", "send", "recv", "inject", "joined"}
    assert names >= {"queued", "prompt", "step", "first token"}
    chunks: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for step in [event["args"] for event in events["prefill-0-engine"] if event["name"] == "step"]:
        for name, start, stop in step["prompts"]:
            chunks[name].append((start, stop))
            assert stop - start <= TINY["max_num_batched_tokens"]
    assert all(a[1] <= b[0] for of_prompt in chunks.values() for a, b in pairwise(of_prompt))


async def passed_on(stream: WorkerStream) -> None:
    """Waits until the engine need only read what was sent: the service process answers in order."""
    refused = await stream.submit_decode(request([1], sampling(top_p=0.0)))
    await stream.failure(refused)


@asynccontextmanager
async def paused(stream: WorkerStream) -> AsyncIterator[None]:
    """The worker computes no step meanwhile. Its engine reads the end of the pause after all that came on the
    stream."""
    await stream.stub.SetPause(pb.PauseRequest(pause=pb.PAUSE_STEPS, seconds=WITHIN))
    try:
        yield
        await passed_on(stream)
    finally:
        await stream.stub.SetPause(pb.PauseRequest(pause=pb.PAUSE_NONE))


def prompt(length: int) -> list[int]:
    return random.Random(length).choices(range(500), k=length)


async def status(stream: WorkerStream) -> pb.WorkerStatus:
    return await stream.stub.GetStatus(pb.StatusRequest())


async def retarget(pair: Pair, decode_id: bytes, prefill_id: bytes, output_ids: list[int]) -> None:
    source = pair.source(prefill_id)
    await pair.decode.send(retarget=pb.Retarget(decode_id=decode_id, source=source, output_ids=output_ids))
