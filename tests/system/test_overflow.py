"""A real cluster that leaves prompts to its decode worker wherever it may: the same tokens, killed or not."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from baton.bench.lab.harness.cluster import LocalCluster
from baton.bench.lab.harness.streams import Case, expected
from baton.kv_names import CHUNK_TOKENS
from tests.within import WITHIN

from .recovery import FLAGS, SHORT, Broken, each_has, hold, wait_exit

pytestmark = pytest.mark.all

# Steps may take as long as they like.
GENEROUS = ("--itl-target", "5000", "--enable-prefix-caching")
TOKENS = 65
ASKED = [replace(case, max_tokens=TOKENS) for case in SHORT]
CHUNKS = 3 * CHUNK_TOKENS
# With all of its chunks cached, one token is left: that fits into every step, however slow the machine is.
PROMPT = {"prompt": [*range(1000, 1001 + CHUNKS)], "stream_options": {"include_usage": True}}
CACHED = Case("", TOKENS, temperature=0.0, seed=1, options=json.dumps(PROMPT))
AT_DECODE = ("short", "cached", "saturated", "no_prefill")


@pytest.fixture(scope="module")
def overflowing(tmp_path_factory: pytest.TempPathFactory, shallow_model: list[str]) -> Iterator[Broken]:
    """The right answers are those of the same workers while the decode worker may not prefill."""
    directory: Path = tmp_path_factory.mktemp("overflow")
    flags = [*FLAGS, *shallow_model]
    with LocalCluster(
        directory, prefill=1, decode=1,
        worker_flags=flags, decode_flags=GENEROUS, router_flags=shallow_model,
    ) as cluster:  # fmt: skip
        cluster.restart_router("--advanced.no-overflow")
        right = asyncio.run(expected(cluster.url, [*ASKED, CACHED], at_once=12))
        cluster.restart_router()
        yield Broken(cluster, right)


def overflowed(overflowing: Broken, *reasons: str) -> float:
    with urllib.request.urlopen(overflowing.cluster.url + "/metrics", timeout=WITHIN) as page:
        lines = page.read().decode().splitlines()
    found = [x for x in lines if x.startswith("baton:overflow_total{")]
    return sum(float(x.split()[-1]) for x in found if any(f'reason="{reason}"' in x for reason in reasons))


async def until_it_overflows(overflowing: Broken) -> None:
    """The decode worker learns from its steps what it has to spare, and reports that."""
    before = await asyncio.to_thread(overflowed, overflowing, *AT_DECODE)
    while await asyncio.to_thread(overflowed, overflowing, *AT_DECODE) == before:
        await overflowing.ride(ASKED)


@pytest.mark.long
async def test_decode_prefills_and_goes_on_through_kills(overflowing: Broken) -> None:
    prefill, decode = overflowing.cluster.workers
    await until_it_overflows(overflowing)
    await overflowing.ride(ASKED, (each_has(4), lambda: decode.kill("engine")), felt=overflowing.retries)
    await until_it_overflows(overflowing)
    release = hold(prefill)
    try:
        await asyncio.to_thread(prefill.kill, "service")
        await asyncio.to_thread(wait_exit, prefill, 1)
        await overflowing.ride(ASKED[:4])
    finally:
        release()
    await overflowing.settled()


@pytest.mark.long
async def test_decode_prefills_the_rest_of_what_it_has_cached(overflowing: Broken) -> None:
    """A prompt of several chunks, whose KV came from a prefill worker the first time."""
    await asyncio.to_thread(overflowing.all_back)
    await asyncio.to_thread(overflowing.cluster.restart_router, "--advanced.no-overflow")
    [stream] = await overflowing.ride([CACHED])
    assert stream.cached_tokens == 0  # the prefill worker computed it, and has no prefix cache
    await asyncio.to_thread(overflowing.cluster.restart_router)
    # What decode has cached reaches the new router with a report.
    while not await asyncio.to_thread(overflowed, overflowing, "cached"):
        [stream] = await overflowing.ride([CACHED])
    assert stream.cached_tokens == CHUNKS
    await overflowing.settled()
