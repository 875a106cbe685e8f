"""Streams that lost their decode worker return to it when it has come back."""

import asyncio
from pathlib import Path

import pytest

from baton.bench.lab.harness.cluster import LocalCluster, leaks_when_idle
from baton.bench.lab.harness.streams import cases, expected
from baton.bench.lab.harness.workers import metric
from tests.within import WITHIN

from .recovery import FLAGS, PATIENT, each_has, ride

pytestmark = pytest.mark.all

GAPS_COST = ("--ttft-target", "1e6")
"""Users would wait that long for a first token, so any gap costs more than a handover."""
ASKED = cases(2, 400)
"""One is greedy and one seeded. They last while a worker starts; more streams would only compute more."""


async def test_streams_return_to_a_killed_decode_worker_with_equal_tokens(
    tmp_path: Path, shallow_model: list[str]
) -> None:
    """They go on at the prefill worker, and the decode worker starts again while they run."""
    flags = [flag for flag in FLAGS if flag != "--no-enable-prefix-caching"]
    router = [*GAPS_COST, *PATIENT, *shallow_model]
    with LocalCluster(
        tmp_path, prefill=1, decode=1, worker_flags=[*flags, *shallow_model], router_flags=router
    ) as cluster:
        [decode] = cluster.of("decode")
        right = await expected(cluster.url, ASKED, at_once=len(ASKED))

        def returned() -> float:
            return metric(cluster.url, "baton:retries_total", cause="returned")

        for _ in range(9):  # all streams may end before the worker is there
            if returned():
                break
            lives = len(decode.lives)
            await ride(cluster.url, right, ASKED, (each_has(3), lambda: decode.kill("engine")))
            while len(decode.lives) == lives:  # it starts meanwhile
                await ride(cluster.url, right, ASKED)
            await asyncio.to_thread(cluster.wait_attached, decode)
        assert returned()
        assert await asyncio.to_thread(leaks_when_idle, cluster.url, WITHIN) == {}
