"""Flips between the pools: the policy on single decisions, and on loads that change in the simulator."""

import random
from collections.abc import Callable, Mapping

import pytest

from baton.bench.lab.routing_sim.baselines import Flips
from baton.cluster.autoscaling.balancer import FLIP_EVERY, Balancer
from baton.cluster.autoscaling.scaling import GROW_AFTER
from baton.cluster.options.pools import PoolOptions, PoolSize
from baton.cluster.supervision.blueprint import Pool
from baton.simulator.placement import SEATS, simulate
from baton.simulator.placement_outcome import PlacementOutcome
from baton.simulator.trace import Load

TTFT, GAP = 0.25, 0.02  # objectives of a request in seconds; the gap is the mean of a request
PROMPTS = Load(2000, 50, 24)  # needs 3 prefill workers and 1 decode worker
ANSWERS = Load(200, 500, 28)  # needs 1 or 2 prefill workers
PHASE = 20.0


def balancer(least: int = 1) -> Balancer:
    size = PoolSize(least, 3)
    return Balancer(PoolOptions(size, size), 1e3 * TTFT, 1e3 * GAP)


def served(
    load: Callable[[float], Load], requests: int, prefills: int = 2, *, flip: bool = True
) -> PlacementOutcome:
    flips = Flips(most=3, ttft=TTFT, gap=GAP, seats=SEATS) if flip else None
    return simulate(load, "split", requests=requests, workers=4, prefills=prefills, flips=flips)


@pytest.mark.all
def test_flips_serve_a_load_that_swings_better_than_fixed_splits() -> None:
    def swings(now: float) -> Load:
        return PROMPTS if now < PHASE else ANSWERS

    requests = round(2 * PHASE * (PROMPTS.rate + ANSWERS.rate))
    flipped = served(swings, requests)
    fixed = [served(swings, requests, prefills, flip=False) for prefills in (2, 3)]
    assert flipped.goodput(TTFT, GAP) >= 1.1 * max(found.goodput(TTFT, GAP) for found in fixed)
    assert flipped.flips == 2, "one to each pool"


@pytest.mark.all
@pytest.mark.parametrize(("load", "flips"), [(PROMPTS, 1), (ANSWERS, 0), (Load(1000, 200, 25), 0)], ids=str)
def test_a_steady_load_is_not_flipped_back(load: Load, flips: int) -> None:
    noise = random.Random(1)
    noisy = [noise.uniform(0.8, 1.1) for _ in range(200)]
    found = served(lambda now: Load(load.prompt, load.answer, load.rate * noisy[int(now)]), 1_500)
    assert found.flips == flips


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
