"""A prefill and a decode worker on two hosts, which are network namespaces: the link between them is real."""

import asyncio
import subprocess
import time
from collections.abc import Iterator

import pytest

from baton.bench.lab.harness.cluster import LocalCluster, leaks_when_idle, status
from baton.bench.lab.harness.hosts import Host, Hosts, NoHosts
from baton.bench.lab.harness.streams import cases, expected
from tests.forked import FreshPopen

from .recovery import FLAGS, LONG, MIXED, PATIENT, Broken, each_has

pytestmark = pytest.mark.long

RATE = 10e6
"""Bytes/s: far less than the cores of any machine move."""
CUT_S = 4.0
DEEP = cases(24, 2, repeat=14)[2::3]
"""Prompts of some hundred tokens: 30 MB of KV."""


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[Host]]:
    try:
        network = Hosts(2)
    except NoHosts as e:
        pytest.skip(str(e))
    with network:
        yield network.hosts


@pytest.fixture(scope="module")
def apart(
    hosts: list[Host], tmp_path_factory: pytest.TempPathFactory, shallow_model: list[str]
) -> Iterator[Broken]:
    """Each prompt is handed over, by TCP: these hosts share their memory. A fork server would be on none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", FreshPopen)
        with LocalCluster(
            tmp_path_factory.mktemp("hosts"), prefill=1, decode=1, hosts=hosts,
            worker_flags=[*FLAGS, *shallow_model, "--kv-connector", "tcp"],
            router_flags=[*PATIENT, *shallow_model, "--advanced.no-overflow"],
        ) as cluster:  # fmt: skip
            yield Broken(cluster, asyncio.run(expected(cluster.url, [*MIXED, *DEEP])))


async def test_streams_go_on_with_the_same_text_after_a_host_was_cut_off(
    apart: Broken, hosts: list[Host]
) -> None:
    """Once while KV is under way, and once while all streams decode. The router gives up the silent worker,
    and attaches to it again when the link is back. No process ends."""

    def cut() -> None:
        hosts[1].cut()
        time.sleep(CUT_S)
        hosts[1].mend()

    hosts[0].limit(sends=RATE / 10)
    await apart.ride(LONG, (apart.transferring, cut), felt=apart.retries)
    hosts[0].limit()
    await apart.ride(MIXED, (each_has(2), cut), felt=apart.retries)
    assert [worker.exits for worker in apart.cluster.workers] == [[], []]
    assert await asyncio.to_thread(leaks_when_idle, apart.cluster.url) == {}


async def test_the_decode_worker_reports_what_the_link_carries(apart: Broken, hosts: list[Host]) -> None:
    hosts[0].limit(sends=RATE)
    await apart.ride(DEEP)
    prefill, decode = status(apart.cluster.url)["workers"]
    hosts[0].limit()
    [link] = decode["status"]["kv_links"]
    assert link["incarnation"] == prefill["incarnation"]
    assert 0.5 * RATE < link["bytes_per_s"] < 1.5 * RATE, (
        "without a limit it is more than a hundred times that"
    )
    assert prefill["status"]["kv_links"] == [], "the other direction carried none"
