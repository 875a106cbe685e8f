"""Clusters with workers of another size in each pool: clients read the tokens of one rank."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from baton.bench.lab.harness.cluster import LocalCluster

from .recovery import FLAGS, MIXED, Broken, each_has, wait_exit

pytestmark = pytest.mark.long

KINDS = {1: ("engine",), 3: ("rank 1", "rank 2", "engine")}
"""What is killed of a worker, by its ranks. The engine process is rank 0."""


@pytest.mark.parametrize(("prefill_ranks", "decode_ranks"), [(3, 1), (1, 3)])
async def test_each_rank_is_killed_in_mid_stream(
    broken: Broken, tmp_path: Path, shallow_model: list[str], prefill_ranks: int, decode_ranks: int
) -> None:
    """Greedy and seeded requests, some with a grammar; prompts of several chunks."""
    size = "--tensor-parallel-size"
    with LocalCluster(
        tmp_path, prefill=1, decode=1,
        worker_flags=[*FLAGS, *shallow_model, size, str(prefill_ranks), "--advanced.block-size", "32"],
        decode_flags=[size, str(decode_ranks), "--advanced.block-size", "16"],
        router_flags=["--advanced.no-overflow", *shallow_model],
    ) as cluster:  # fmt: skip
        ranked = Broken(cluster, broken.right)
        await ranked.ride(MIXED)
        await ranked.settled()

        def kill(role: str, kind: str) -> Callable[[], None]:
            def strike() -> None:
                [victim] = cluster.of(role)
                count = len(victim.exits) + 1
                victim.kill(kind)
                assert wait_exit(victim, count) == 1

            return strike

        for of_prefill, of_decode in itertools.product(KINDS[prefill_ranks], KINDS[decode_ranks]):
            await asyncio.to_thread(ranked.all_back)
            await ranked.ride(
                MIXED,
                (ranked.transferring, kill("prefill", of_prefill)),
                (each_has(3), kill("decode", of_decode)),
                felt=ranked.retries,
            )
            await ranked.settled()
