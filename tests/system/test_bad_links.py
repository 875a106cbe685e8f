"""Links between hosts, which are network namespaces, that carry little, or nothing of some kind."""

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.bench.lab.harness.cluster import LocalCluster, leaks_when_idle, status
from baton.bench.lab.harness.hosts import Host, Hosts, NoHosts
from baton.bench.lab.harness.streams import cases, expected
from tests.forked import FreshPopen

from .recovery import FLAGS, PATIENT, Broken

pytestmark = pytest.mark.long

ASKED = cases(6, 4, repeat=5)
SOON = "--failure-timeout", "8"
"""A silent peer is dead after half of that."""
CARDS = "--advanced.kv-host", "eth0,eth1"


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    try:
        network = Hosts(3, 2)
    except NoHosts as e:
        pytest.skip(str(e))
    with network:
        yield network.hosts


@pytest.fixture
def apart(hosts: list[Host], tmp_path: Path, shallow_model: list[str]) -> Iterator[Broken]:
    """Two prefill workers and a decode worker. Each has two cards for KV."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", FreshPopen)
        with LocalCluster(
            tmp_path, prefill=2, decode=1, hosts=hosts,
            worker_flags=[*FLAGS, *SOON, *shallow_model, "--kv-connector", "tcp", *CARDS],
            router_flags=[*PATIENT, *shallow_model, "--advanced.no-overflow", "--advanced.no-split-prompts"],
        ) as cluster:  # fmt: skip
            yield Broken(cluster, asyncio.run(expected(cluster.url, ASKED)))


def sent(broken: Broken) -> list[int]:
    """Bytes of KV from each prefill worker."""
    workers = status(broken.cluster.url)["workers"]
    return [sum(w["status"]["kv_sent"].values()) for w in workers if w["role"] == "prefill"]


def logged(broken: Broken, role: str) -> str:
    return "".join(worker.log.read_text() for worker in broken.cluster.of(role))


async def test_kv_goes_over_the_cards_that_are_left_and_by_the_workers_that_can_be_reached(
    apart: Broken, hosts: list[Host]
) -> None:
    """A card of the decode worker is lost. Then all of the first prefill worker is, for this pair alone."""
    for host in hosts:
        host.cut(1)
    await apart.ride(ASKED)
    assert "over pairs of cards [1]" in logged(apart, "decode")
    hosts[2].lose(hosts[0])
    before = await asyncio.to_thread(sent, apart)
    await apart.ride(ASKED)
    _, second = await asyncio.to_thread(sent, apart)
    assert second > before[1], "the other prefill worker computes the prompts"
    hosts[2].find(hosts[0])
    for host in hosts:
        host.mend(1)
    await apart.ride(ASKED)
    assert [worker.exits for worker in apart.cluster.workers] == [[], [], []]
    assert await asyncio.to_thread(leaks_when_idle, apart.cluster.url) == {}


async def test_lost_large_packets_are_named_and_small_ones_sent(apart: Broken, hosts: list[Host]) -> None:
    for host in hosts[:2]:
        host.lose_large(hosts[2], 1400)
    await apart.ride(ASKED)
    assert "Use the same MTU" in logged(apart, "decode")
    assert await asyncio.to_thread(leaks_when_idle, apart.cluster.url) == {}
