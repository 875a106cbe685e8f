"""A cluster of workers with three ranks each: no client reads another token than of workers with one rank."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.chaos.cluster import LocalCluster

from .recovery import FLAGS, MIXED, Broken, each_has

pytestmark = pytest.mark.long

ROUNDS = [("rank 1", "rank 2"), ("rank 2", "engine"), ("engine", "rank 1")]
"""What is killed of the prefill worker, and then of the decode worker. The engine process is rank 0."""


async def test_each_rank_is_killed_in_mid_stream(
    broken: Broken, tmp_path: Path, shallow_model: list[str]
) -> None:
    """Greedy and seeded requests, some with a grammar; prompts of several chunks."""
    flags = [*FLAGS, *shallow_model, "--tensor-parallel-size", "3"]
    with LocalCluster(
        tmp_path, prefill=1, decode=1, worker_flags=flags, router_flags=["--no-overflow"]
    ) as cluster:
        ranked = Broken(cluster, broken.right)
        await ranked.ride(MIXED)
        await ranked.settled()

        def kill(role: str, kind: str) -> Callable[[], None]:
            def strike() -> None:
                [victim] = cluster.of(role)
                count = len(victim.exits) + 1
                victim.kill(kind)
                assert victim.wait_exit(count) == 1

            return strike

        for of_prefill, of_decode in ROUNDS:
            await asyncio.to_thread(ranked.all_back)
            await ranked.ride(
                MIXED,
                (ranked.transferring, kill("prefill", of_prefill)),
                (each_has(3), kill("decode", of_decode)),
            )
            await ranked.settled()
