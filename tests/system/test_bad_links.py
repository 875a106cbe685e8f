"""Links between hosts, which are network namespaces, that carry little, or nothing of some kind."""

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from baton.bench.lab.harness.cluster import LocalCluster, leaks_when_idle, status
from baton.bench.lab.harness.hosts import Host, Hosts, NoHosts
from baton.bench.lab.harness.streams import cases, expected
from baton.cluster.model import EMBEDDED_NAME
from baton.rpc import worker_pb2 as pb
from baton.system.python_path import python_path
from tests.fake_worker import SECRET, FakeWorker, Lanes
from tests.forked import FreshPopen
from tests.within import WITHIN, eventually

from .recovery import FLAGS, PATIENT, Broken, each_has, wait_exit

pytestmark = pytest.mark.long

ASKED = cases(6, 4, repeat=5)
SOON = "--failure-timeout", "8"
"""A silent peer is dead after half of that."""
CARDS = "--advanced.kv-host", "eth0,eth1"


CUT_S = 20.0
SLOW = 1e6
"""Bytes/s: far less than the cores of any machine move."""
DEEP = cases(24, 2, repeat=14)[2::3]
"""Prompts of some hundred tokens: 30 MB of KV."""
ROUTER = (*PATIENT, "--advanced.no-overflow", "--advanced.no-split-prompts")


@contextlib.contextmanager
def network(cards: int, *, only_ipv6: bool = False) -> Iterator[list[Host]]:
    try:
        made = Hosts(3, cards, only_ipv6=only_ipv6)
    except NoHosts as e:
        pytest.skip(str(e))
    with made:
        yield made.hosts


@contextlib.contextmanager
def cluster(
    hosts: Sequence[Host], directory: Path, model: list[str], *flags: str, router: Sequence[str] = ROUTER
) -> Iterator[Broken]:
    """Two prefill workers and a decode worker."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", FreshPopen)
        with LocalCluster(
            directory, prefill=2, decode=1, hosts=hosts,
            worker_flags=[*FLAGS, *SOON, *model, "--kv-connector", "tcp", *flags],
            router_flags=[*router, *model],
        ) as started:  # fmt: skip
            yield Broken(started, asyncio.run(expected(started.url, [*ASKED, *DEEP])))


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    with network(2) as made:
        yield made


@pytest.fixture
def apart(hosts: list[Host], tmp_path: Path, shallow_model: list[str]) -> Iterator[Broken]:
    """Each worker has two cards for KV."""
    with cluster(hosts, tmp_path, shallow_model, *CARDS) as started:
        yield started


def sent(broken: Broken) -> list[int]:
    """Bytes of KV from each prefill worker."""
    workers = status(broken.cluster.url)["workers"]
    return [sum(w["status"]["kv_sent"].values()) for w in workers if w["role"] == "prefill"]


def logged(broken: Broken, role: str) -> str:
    return "".join(worker.log.read_text() for worker in broken.cluster.of(role))


async def test_kv_goes_over_the_cards_that_are_left_and_by_the_workers_that_can_be_reached(
    apart: Broken, hosts: list[Host]
) -> None:
    """A card of the decode worker is lost under load. Then all of the first prefill worker is, for this pair
    alone."""
    for host in hosts[:2]:
        host.limit(sends=5 * SLOW)
    await apart.ride(DEEP, (apart.transferring, lambda: hosts[2].cut(1)))
    before = [host.sent(0) for host in hosts[:2]]
    await apart.ride(DEEP)
    assert all(host.sent(0) > sent for host, sent in zip(hosts, before, strict=False))
    for host in hosts[:2]:
        host.limit()
    assert "over pairs of cards [1]" in logged(apart, "decode")
    hosts[2].lose(hosts[0])
    before = await asyncio.to_thread(sent, apart)
    await apart.ride(ASKED)
    _, second = await asyncio.to_thread(sent, apart)
    assert second > before[1], "the other prefill worker computes the prompts"
    hosts[2].find(hosts[0])
    hosts[2].mend(1)
    await apart.ride(ASKED)
    assert [worker.exits for worker in apart.cluster.workers] == [[], [], []]
    assert await asyncio.to_thread(leaks_when_idle, apart.cluster.url) == {}


async def test_lost_large_packets_are_named_and_small_ones_sent(apart: Broken, hosts: list[Host]) -> None:
    for host in hosts[:2]:
        host.lose_large(hosts[2], 1400)
    await apart.ride(ASKED)
    assert "Use the same MTU" in logged(apart, "decode")
    assert await asyncio.to_thread(leaks_when_idle, apart.cluster.url) == {}


async def test_a_worker_that_was_cut_off_for_long_gets_work_again(apart: Broken, hosts: list[Host]) -> None:
    """First the only decode worker, while streams decode and while their KV comes: they pause. Then a prefill
    worker, while the other works."""

    def cut(host: Host) -> None:
        for card in (0, 1):
            host.cut(card)
        time.sleep(CUT_S)
        for card in (0, 1):
            host.mend(card)

    await apart.ride(ASKED, (each_has(1), lambda: cut(hosts[2])), felt=apart.retries)
    for host in hosts[:2]:
        host.limit(sends=SLOW)
    await apart.ride(ASKED, (apart.transferring, lambda: cut(hosts[2])), felt=apart.retries)
    for host in hosts[:2]:
        host.limit()
    cutting = asyncio.create_task(asyncio.to_thread(cut, hosts[0]))
    while not cutting.done():
        await apart.ride(ASKED)
    await asyncio.to_thread(apart.all_back)
    before = await asyncio.to_thread(sent, apart)
    await apart.ride(ASKED)
    after = await asyncio.to_thread(sent, apart)
    assert all(now > then for now, then in zip(after, before, strict=True)), "both prefill workers compute"
    assert [worker.exits for worker in apart.cluster.workers] == [[], [], []]
    assert await asyncio.to_thread(leaks_when_idle, apart.cluster.url) == {}


async def test_a_worker_that_ended_unheard_leaves_no_half_open_connection(
    apart: Broken, hosts: list[Host]
) -> None:
    """Its peers and the router hold connections that its next process does not know."""
    [worker, _] = apart.cluster.of("prefill")

    def restart() -> None:
        for card in (0, 1):
            hosts[0].cut(card)
        worker.kill("service")
        wait_exit(worker, 1)
        for card in (0, 1):
            hosts[0].mend(card)

    await apart.ride(ASKED, (apart.transferring, restart), felt=apart.retries)
    await apart.settled()
    before = await asyncio.to_thread(sent, apart)
    await apart.ride(ASKED)
    after = await asyncio.to_thread(sent, apart)
    assert after[0] > before[0], "the new process hands over"


async def test_the_decode_worker_reports_what_each_link_carries(apart: Broken, hosts: list[Host]) -> None:
    """After some frames: the first ones came without a limit, more than a hundred times as fast."""
    rate, links = 5 * SLOW, dict[str, float]()
    for host in hosts[:2]:
        host.limit(sends=rate)  # of each card
    while len(links) < 2 or not all(rate < carried < 3 * rate for carried in links.values()):
        await apart.ride(DEEP)
        first, second, decode = (await asyncio.to_thread(status, apart.cluster.url))["workers"]
        links = {link["incarnation"]: link["bytes_per_s"] for link in decode["status"]["kv_links"]}
        assert links.keys() <= {first["incarnation"], second["incarnation"]}
        assert first["status"]["kv_links"] == [], "the other direction carried none"


async def test_kv_comes_over_routes_that_differ_from_those_back(apart: Broken, hosts: list[Host]) -> None:
    for host in hosts[:2]:
        host.detour(hosts[2], 1)
    before = [(host.sent(0), host.sent(1)) for host in hosts[:2]]
    await apart.ride(ASKED)
    for host, (first, second) in zip(hosts, before, strict=False):
        assert host.sent(1) - second > 10 * (host.sent(0) - first)


def test_a_slow_link_beside_a_fast_one_carries_little(
    hosts: list[Host], tmp_path: Path, shallow_model: list[str]
) -> None:
    """The second prefill worker is 100 times as fast to reach. The decode worker computes prompts, too, so
    the bound is a quarter of what the fast link carries, or a prompt: one takes 10 s on the slow link."""
    with cluster(hosts, tmp_path, shallow_model, router=PATIENT) as apart:
        asyncio.run(apart.ride(ASKED))  # shows the links
        hosts[0].limit(sends=1e5)
        hosts[1].limit(sends=1e7)
        asyncio.run(apart.ride(ASKED))
        before = sent(apart)
        for _ in range(3):
            asyncio.run(apart.ride(ASKED))
        slow, fast = (now - then for now, then in zip(sent(apart), before, strict=True))
        workers = status(apart.cluster.url)["workers"]
        of_prompt = sum(sent(apart)) / sum(w["status"].get("handovers", 0) for w in workers)
        assert slow <= max(fast / 4, of_prompt)


@pytest.mark.parametrize("decodes_on_ipv4", [False, True])
def test_hosts_may_have_ipv6_alone_or_beside_ipv4(
    decodes_on_ipv4: bool, tmp_path: Path, shallow_model: list[str]
) -> None:
    with network(1, only_ipv6=not decodes_on_ipv4) as hosts:
        for host in hosts[:2]:
            host.address = host.address6
        with cluster(hosts, tmp_path, shallow_model) as apart:
            asyncio.run(apart.ride(ASKED))
            assert all(sent(apart))
            assert leaks_when_idle(apart.cluster.url) == {}


async def test_a_router_follows_a_name_to_its_next_address(tmp_path: Path) -> None:
    """`/etc/hosts` of the router alone is another file: of its mount namespace."""
    if os.geteuid():
        pytest.skip("mount namespaces need root")
    names = tmp_path / "hosts"
    names.write_text("127.0.0.2 worker.test\n")  # nothing listens there
    worker = await FakeWorker(pb.POOL_DECODE, Lanes(), [1]).start()
    _, port = worker.address.split(":")
    router = await asyncio.create_subprocess_exec(
        "unshare", "--mount", "sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"', names,
        sys.executable, "-m", "baton.cluster.cli", "router", "--port", "0", "--model", EMBEDDED_NAME,
        "--advanced.decode-only", "--worker", f"worker.test:{port}",
        env={**os.environ, **python_path(), "BATON_CLUSTER_SECRET": SECRET.decode()},
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert router.stderr is not None
    try:
        async with asyncio.timeout(WITHIN):
            while b"worker.test" not in (line := await router.stderr.readline()):
                assert line, "the router says that it cannot reach the worker, and goes on"
        assert not worker.attached
        names.write_text("127.0.0.1 worker.test\n")
        await eventually(lambda: worker.attached)
    finally:
        router.terminate()
        await router.communicate()
        await worker.kill()
