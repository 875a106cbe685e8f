"""A real cluster that leaves prompts to its decode worker wherever it may: the same tokens, killed or not."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.chaos.cluster import LocalCluster

from .recovery import FLAGS, LONG, SHORT, Broken, each_has

# Steps may take as long as they like, so every prompt is short.
GENEROUS = ("--ttit-target", "5000", "--enable-prefix-caching")


@pytest.fixture(scope="module")
def overflowing(
    tmp_path_factory: pytest.TempPathFactory, broken: Broken, shallow_model: list[str]
) -> Iterator[Broken]:
    directory: Path = tmp_path_factory.mktemp("overflow")
    flags = [*FLAGS, *shallow_model]
    with LocalCluster(directory, prefill=1, decode=1, worker_flags=flags, decode_flags=GENEROUS) as cluster:
        yield Broken(cluster, broken.right)


async def until_it_overflows(overflowing: Broken) -> None:
    """The decode worker learns from its steps what it has to spare, and reports that."""

    def overflowed() -> float:
        return overflowing.cluster.router_metric("baton:overflow_total")

    before = await asyncio.to_thread(overflowed)
    while await asyncio.to_thread(overflowed) == before:
        await overflowing.ride(SHORT[:2])


@pytest.mark.long
@pytest.mark.timeout(300)  # with the start of both clusters
async def test_decode_prefills_and_goes_on_through_kills(overflowing: Broken) -> None:
    """The right answers are those of a cluster whose decode workers never prefill."""
    prefill, decode = overflowing.cluster.workers
    await until_it_overflows(overflowing)
    await overflowing.ride(SHORT, (each_has(4), lambda: decode.kill("engine")))
    await until_it_overflows(overflowing)
    prefill.hold()
    await asyncio.to_thread(prefill.kill, "service")
    await asyncio.to_thread(prefill.wait_exit, 1)
    await overflowing.ride(SHORT[:4])
    prefill.release()
    await overflowing.settled()


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_decode_prefills_the_rest_of_what_it_has_cached(overflowing: Broken) -> None:
    """A prompt of several chunks, whose KV came from a prefill worker the first time."""

    def cached() -> float:
        with urllib.request.urlopen(overflowing.cluster.url + "/metrics", timeout=10) as page:
            lines = page.read().decode().splitlines()
        found = [x for x in lines if x.startswith("baton:overflow_total{") and 'reason="cached"' in x]
        return float(found[0].split()[-1])

    await asyncio.to_thread(overflowing.all_back)
    await until_it_overflows(overflowing)
    before = await asyncio.to_thread(cached)
    await overflowing.ride(LONG[2:3])
    while await asyncio.to_thread(cached) == before:  # what it still has to compute is reported once a second
        await overflowing.ride(LONG[2:3])
    await overflowing.settled()
