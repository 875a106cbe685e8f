"""Flips between the pools: the policy on single decisions, and on loads that change in the simulator."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import cache

import pytest

from bench.routing_sim.flips import Flips
from bench.routing_sim.sizing import h200
from cluster.balancer import FLIP_EVERY, Balancer
from cluster.options import PoolOptions, PoolSize
from cluster.plan import Pool
from cluster.scaling import GROW_AFTER
from rpc import worker_pb2 as pb
from simulator.pools import SEATS, Load, PoolsOutcome, Slo, simulate

SLO = Slo(ttft=1.0, ttit=0.015)
PROMPTS = Load(45, prompt=2000, output=50)  # needs 3 prefill workers and 1 decode worker
ANSWERS = Load(55, prompt=200, output=500)  # needs 1 and 3
PHASE = 60.0


def balancer(least: int = 1, most: int = 3) -> Balancer:
    size = PoolSize(least, most)
    return Balancer(PoolOptions(size, size, ttft_target=1e3 * SLO.ttft, ttit_target=1e3 * SLO.ttit))


def flips() -> Flips:
    return Flips(most=3, ttft=SLO.ttft, gap=SLO.ttit, seats=SEATS)


def _sizes(reports: Mapping[Pool, Sequence[pb.WorkerStatus]]) -> dict[Pool, int]:
    return {pool: len(statuses) for pool, statuses in reports.items()}


def swings(now: float) -> Load:
    return PROMPTS if now % (2 * PHASE) < PHASE else ANSWERS


def run(load, policy, prefill: int = 2, seconds: float = 4 * PHASE) -> PoolsOutcome:
    return simulate(
        load, policy, pools={"prefill": prefill, "decode": 4 - prefill}, seconds=seconds, prefill=h200,
        step=lambda batch: 4.4e-3 + 0.045e-3 * batch, slo=SLO,
    )  # fmt: skip


@cache
def fixed(prefill: int) -> float:
    return run(swings, lambda now, reports: _sizes(reports), prefill).goodput


def test_flips_serve_a_load_that_swings_better_than_each_fixed_split() -> None:
    flipped = run(swings, flips())
    assert flipped.goodput >= 1.1 * max(map(fixed, (1, 2, 3)))
    assert {size for _, size in flipped.sizes} == {1, 2, 3}
    assert len(flipped.sizes) - 1 <= 2 * 4, "at most two flips a phase"


@pytest.mark.parametrize("load", [PROMPTS, ANSWERS, Load(25, prompt=1000, output=200)])
def test_a_steady_load_is_not_flipped_back(load: Load) -> None:
    noise = random.Random(1)
    noisy = [noise.uniform(0.8, 1.1) for _ in range(200)]
    found = run(lambda now: Load(load.rate * noisy[int(now)], load.prompt, load.output), flips(), seconds=180)
    assert len(found.sizes) - 1 <= 1
    assert found.goodput > 0.9


def decisions(
    needs: Mapping[Pool, float], sizes: dict[Pool, int], of: Balancer, seconds: int
) -> list[dict[Pool, int]]:
    return [of.decide(second, needs, sizes, ()) for second in range(seconds)]


def test_a_worker_moves_before_one_is_started() -> None:
    sizes: dict[Pool, int] = {"prefill": 2, "decode": 2}
    found = decisions({"prefill": 2.9, "decode": 0.5}, sizes, balancer(), 20)
    changes = [second for second, new in enumerate(found) if new != sizes]
    assert changes[0] == GROW_AFTER
    assert all(found[second] == {"prefill": 3, "decode": 1} for second in changes)
    assert changes[1] - changes[0] == FLIP_EVERY, "and meanwhile no worker is started"


@pytest.mark.parametrize("least", [1, 2])
def test_a_pool_that_has_no_worker_to_spare_keeps_it_and_the_other_grows(least: int) -> None:
    sizes: dict[Pool, int] = {"prefill": 2, "decode": 2}
    busy = 0.9 if least == 1 else 0.0
    found = decisions({"prefill": 2.9, "decode": busy}, sizes, balancer(least), 20)
    assert found[int(GROW_AFTER)] == {"prefill": 3, "decode": 2}
    assert all(new["decode"] == 2 for new in found)
