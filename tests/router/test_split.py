"""The plan of a prompt that several workers compute. No router is needed."""

import math
import random
import re
import statistics
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.kv_names import CHUNK_TOKENS
from baton.router.policy import split as module
from baton.router.policy.plan import Plan
from baton.router.policy.split import (
    HOP_SECONDS,
    LATEST,
    PromptCost,
    SplitWorker,
    best_of,
    fill,
    may_gain,
    wait_variance,
)
from baton.router.policy.split import split as split_by_row

from .formulas import evaluated

# Llama-3.1-8B in bfloat16 on one H200: 8,000 tokens take 206 ms.
SPEED, DOUBLES_AT, LAYERS, STEP, FLOOR = 44_000.0, 29_000.0, 32, 8192, 0.0043


def cost_of(tokens: int, cached: int = 0, doubles_at: float = DOUBLES_AT) -> PromptCost:
    return PromptCost(tokens, cached, doubles_at, LAYERS)


def idle(count: int, wait: float = 0.0, speed: float = SPEED) -> list[SplitWorker]:
    return [SplitWorker(wait if i else 0.0, speed, STEP, FLOOR) for i in range(count)]


def split(cost: PromptCost, workers: list[SplitWorker], spared: float = 0.0) -> Plan | None:
    return split_by_row(cost, enumerate(workers), spared=spared)


def ends(cost: PromptCost, workers: list[SplitWorker], plan: Plan) -> float:
    """When the last range ends: each worker computes its ranges in order, each at least one layer behind the
    range before, and none ends before the range before has ended, and the link has brought what it lacks."""
    free = [worker.wait for worker in workers]
    own = [cost.cached if number == 0 else 0 for number in range(len(workers))]
    began = ended = -math.inf
    for part in plan.ranges:
        worker, lacks = workers[part.worker], max(part.start, cost.cached) - own[part.worker]
        for start in range(max(part.start, cost.cached), part.stop, worker.step):
            work = cost.work(start, min(part.stop, start + worker.step))
            spent = worker.floor + work / worker.speed
            began = max(free[part.worker], began + spent / cost.layers + HOP_SECONDS)
            comes = worker.link_wait + lacks / worker.link if lacks else 0.0
            ended = free[part.worker] = max(began + spent, ended, comes)
        own[part.worker] += part.stop - max(part.start, cost.cached)
    return ended


@pytest.mark.parametrize(
    ("tokens", "workers", "ratio"),
    [(2_000, 2, 0.72), (8_000, 2, 0.62), (30_000, 2, 0.58), (128_000, 2, 0.56), (30_000, 4, 0.34)],
)
def test_an_idle_prompt_takes_its_share_of_the_time(tokens: int, workers: int, ratio: float) -> None:
    plan = split(cost_of(tokens), idle(workers))
    assert plan is not None
    assert {part.worker for part in plan.ranges} == set(range(workers))
    assert plan.costs["split"] < ratio * plan.costs["unsplit"]


def test_a_later_range_is_shorter() -> None:
    plan = split(cost_of(30_000), [SplitWorker(0.0, SPEED, 10**6, FLOOR)] * 4)
    assert plan is not None
    sizes = [part.stop - part.start for part in plan.ranges]
    assert [part.worker for part in plan.ranges] == [0, 1, 2, 3]
    assert sizes == sorted(sizes, reverse=True)


def test_a_slow_worker_gets_less_and_a_busy_one_begins_later() -> None:
    fast, slow = SplitWorker(0.0, SPEED, STEP, FLOOR), SplitWorker(0.0, SPEED / 3, STEP, FLOOR)
    plan = split(cost_of(8_000), [fast, slow])
    assert plan is not None
    assert plan.ranges[0].stop > 5_000
    busy = split(cost_of(8_000), [fast, SplitWorker(0.08, SPEED, STEP, FLOOR)])
    even = split(cost_of(8_000), [fast, fast])
    assert busy is not None
    assert even is not None
    assert busy.ranges[0].stop > even.ranges[0].stop
    assert even.costs["split"] < busy.costs["split"] < busy.costs["unsplit"]


@pytest.mark.parametrize(
    ("tokens", "workers"),
    [
        pytest.param(300, idle(4), id="a step with few tokens takes as long"),
        pytest.param(8_000, idle(1), id="one worker"),
        pytest.param(8_000, idle(4, wait=0.2), id="the others are busy"),
        pytest.param(8_000, idle(1) + idle(1, speed=SPEED / 20), id="the other one is slow"),
        pytest.param(
            8_000, [idle(1)[0], SplitWorker(0.0, SPEED, STEP, FLOOR, link=2_000.0)], id="a slow network"
        ),
    ],
)
def test_one_worker_computes_a_prompt_that_gains_nothing(tokens: int, workers: list[SplitWorker]) -> None:
    assert split(cost_of(tokens), workers) is None


def on(names: str, wait: float = 0.0) -> SplitWorker:
    return SplitWorker(wait, SPEED, STEP, FLOOR, computes_on=frozenset(names))


def test_workers_that_share_cpus_do_not_share_a_prompt() -> None:
    assert split(cost_of(30_000), [on("ab"), on("bc")]) is None
    plan = split(cost_of(30_000), [on("ab"), on("bc"), on("de"), on("d"), on("f")])
    assert plan is not None
    assert {part.worker for part in plan.ranges} == {0, 2, 4}


def test_a_decode_worker_takes_the_place_of_one_that_shares_its_cpus() -> None:
    """As the last one it has no handover, but it must not compute beside a worker on the same CPUs."""
    plan = split_by_row(cost_of(30_000), [(0, on("a")), (1, on("b", wait=0.3))], last=(2, on("b")))
    assert plan is not None
    assert {part.worker for part in plan.ranges} == {0, 2}
    assert split_by_row(cost_of(30_000), [(0, on("a"))], last=(1, on("a"))) is None


def test_a_plan_costs_less_than_the_best_other_one() -> None:
    plan = split(cost_of(8_000), idle(2))
    assert plan is not None
    gain = plan.costs["unsplit"] - plan.costs["split"]
    assert split(cost_of(8_000), idle(2), spared=gain - 0.001) == plan
    assert split(cost_of(8_000), idle(2), spared=gain + 0.001) is None


def test_time_that_busy_workers_lose_counts_by_the_prompts_that_come() -> None:
    """Prompts that come while a worker computes wait for half of its time, which the starts of steps and the
    waits for other workers make longer. Without the split they wait for half of the time of one worker."""
    busy = [SplitWorker(0.0, SPEED, STEP, FLOOR, behind=behind) for behind in (0.0, 1.0, 7 / 3)]
    plans = [split(cost_of(8_000), [worker, worker]) for worker in busy]
    harms = [plan.costs["harm"] for plan in plans if plan is not None]
    assert harms[0] == 0.0
    assert plans[1] is not None
    alone, lost = plans[1].costs["unsplit"], sum(plans[1].waits.values())
    assert lost > 2 * FLOOR
    assert harms[1] == pytest.approx((alone + lost) ** 2 / 4 / alone - alone / 2, rel=0.02)
    assert harms[2] == pytest.approx(7 / 3 * harms[1])
    assert split(cost_of(1_000), [busy[0]] * 2) is not None
    assert split(cost_of(1_000), [busy[0], busy[2]]) is None


def test_a_split_that_others_gain_from_may_cost_less_than_nothing() -> None:
    """Another plan may spare more than the time of one worker, since fewer prompts wait for its worker."""
    busy = [SplitWorker(0.0, SPEED, STEP, FLOOR, behind=17 / 3)] * 4
    plan = split(cost_of(30_000), busy)
    assert plan is not None
    spared = plan.costs["unsplit"] + 0.1
    assert plan.costs["harm"] < -spared
    assert split(cost_of(30_000), busy, spared=spared) == plan


def test_work_counts_by_the_prompts_that_come_to_its_worker() -> None:
    """Half of the prompt is taken from the first worker. Prompts lose that time where it is computed."""
    calm, busy = (SplitWorker(0.0, SPEED, STEP, FLOOR, behind=behind) for behind in (0.0, 1.0))
    plans = [split(cost_of(8_000), way) for way in ([calm, calm], [busy, calm], [calm, busy])]
    even, relieved, burdened = (plan.costs for plan in plans if plan is not None)
    assert even["harm"] == 0.0
    alone = even["unsplit"]
    assert relieved["harm"] == pytest.approx((relieved["split"] ** 2 / alone - alone) / 2, rel=0.2)
    assert burdened["harm"] == pytest.approx(burdened["split"] ** 2 / alone / 2, rel=0.2)


def test_the_formulas_of_the_docstring_are_what_a_split_costs() -> None:
    formulas = dict(re.findall(r"^    (latest|variance) += (.*)$", module.__doc__ or "", re.M))
    for terms in ({"unseen": 0.75, "s": 0.05, "m": m, "b": 2 / 3} for m in (0.1, 5.0)):
        assert wait_variance(*terms.values()) == pytest.approx(evaluated(formulas["variance"], terms))
    for count in range(2, len(LATEST)):
        workers = [SplitWorker(0.0, SPEED, STEP, FLOOR, variance=1e-4 * i) for i in range(count)]
        plans = [best_of(cost_of(8_000), [*enumerate(way)], None, 1e9) for way in (workers, idle(count))]
        late, expected = (plan.costs["split"] for plan in plans if plan is not None)
        terms = {"k": LATEST[count], "V": 1e-4 * (count - 1) / 2}
        assert late - expected == pytest.approx(evaluated(formulas["latest"], terms))


def test_the_last_of_some_workers_is_as_late_as_the_largest_of_as_many_draws() -> None:
    rng = random.Random(1)
    for count in range(2, len(LATEST)):
        largest = [max(rng.gauss() for _ in range(count)) for _ in range(20_000)]
        assert LATEST[count] == pytest.approx(statistics.mean(largest), abs=0.02)


@pytest.mark.parametrize("busy", [0.2, 0.5, 0.8])
def test_a_wait_varies_like_that_of_a_queue_however_old_the_report_is(busy: float) -> None:
    """Prompts of 0.1 s come at random times, and each waits for those before it (Lindley)."""
    rng, wait, waits = random.Random(1), 0.0, list[float]()
    for _ in range(200_000):
        waits.append(wait)
        wait = max(0.0, wait + 0.1 - rng.expovariate(busy / 0.1))
    variance, behind = statistics.pvariance(waits), busy / (1 - busy)
    assert wait_variance(1.0, 0.1, math.inf, behind) == pytest.approx(variance, rel=0.1)
    assert wait_variance(0.25, 0.1, math.inf, behind) == pytest.approx(variance / 4, rel=0.1)
    assert wait_variance(1.0, 0.1, 0.01, behind) == pytest.approx(0.01 * 0.1**2), "as yet"


def test_workers_that_may_come_late_share_only_what_gains_more() -> None:
    sure, unsure = (SplitWorker(0.0, SPEED, STEP, FLOOR, variance=s**2) for s in (0.0, 0.03))
    plans = [split(cost_of(8_000), [worker] * 4) for worker in (sure, unsure)]
    expected, late = (plan.costs["split"] for plan in plans if plan is not None)
    assert late == pytest.approx(expected + LATEST[4] * 0.03)
    assert split(cost_of(2_000), [sure] * 2) is not None
    assert split(cost_of(2_000), [unsure] * 2) is None


def test_a_worker_is_busy_while_it_waits_for_ranges_of_others() -> None:
    plan = split(cost_of(8_000), idle(2))
    assert plan is not None
    assert set(plan.waits) == {0, 1}
    for row, seconds in plan.waits.items():
        assert plan.work(row, []).beside == seconds >= 0.99 * FLOOR


def test_what_the_first_worker_has_cached_is_not_computed() -> None:
    cost = cost_of(8_000, cached=4_096)
    plan = split(cost, idle(2))
    assert plan is not None
    first, second = plan.ranges
    assert (first.start, second.stop) == (0, 8_000)
    assert first.stop - 4_096 < 2_200
    assert split(cost_of(8_000, cached=7_900), idle(2)) is None


@given(st.integers(65, 3_000), st.floats(100, 100_000), st.floats(0, 0.02), st.integers(2, 8))
def test_a_prompt_that_may_not_gain_is_never_split(
    tokens: int, speed: float, floor: float, count: int
) -> None:
    workers = [SplitWorker(0.0, speed, STEP, floor)] * count
    # Far from the position at which attention counts.
    assert may_gain(tokens, workers[0]) or split(cost_of(tokens, doubles_at=1e9), workers) is None


def test_few_tries_find_plans_as_fast_as_many_do() -> None:
    """Compares with the plain search, which halves the time until it fits: the mean of random clusters."""
    rng, ratios = random.Random(1), list[float]()
    for _ in range(200):
        tokens = rng.choice((1_000, 2_000, 8_000, 30_000, 128_000))
        cost = cost_of(tokens, rng.choice((0, tokens // 3)) // CHUNK_TOKENS * CHUNK_TOKENS)
        workers = [
            SplitWorker(rng.choice((0, rng.uniform(0, 0.3) * tokens / SPEED)), SPEED, STEP, FLOOR)
            for _ in range(rng.randrange(2, 5))
        ]
        last = rng.choice((None, len(workers) - 1))
        low, high, found = 0.0, cost.work(0, tokens) / SPEED, math.inf
        for _ in range(15):
            middle = (low + high) / 2
            filled = fill(cost, workers, last, middle)
            low, high, found = (middle, high, found) if isinstance(filled, int) else (low, middle, filled[1])
        chosen = [*enumerate(workers)]
        plan = best_of(cost, chosen, None if last is None else chosen[last], 1e9)
        if plan is not None:
            ratios.append(plan.costs["split"] / found)
    assert len(ratios) > 150
    assert statistics.mean(ratios) < 1.005


@pytest.mark.all
@given(
    st.integers(65, 140_000),
    st.integers(0, 20_000),
    st.lists(
        st.builds(
            SplitWorker,
            wait=st.floats(0, 2),
            speed=st.floats(100, 100_000),
            step=st.integers(64, 10_000),
            floor=st.floats(0, 0.02),
            link=st.floats(100, 1e6) | st.just(math.inf),
            link_wait=st.floats(0, 2),
        ),
        min_size=1,
        max_size=8,
    ),
)
def test_each_plan_is_whole_and_is_as_fast_as_it_says(
    tokens: int, cached: int, workers: list[SplitWorker]
) -> None:
    cost = cost_of(tokens, cached=min(cached, tokens - 1) // CHUNK_TOKENS * CHUNK_TOKENS)
    plan = split(cost, workers)
    if plan is None:
        return
    ranges = plan.ranges
    assert (ranges[0].start, ranges[-1].stop) == (0, tokens)
    assert all(a.stop == b.start for a, b in pairwise(ranges))
    assert all(part.stop % CHUNK_TOKENS == 0 for part in ranges[:-1])
    assert all(a.worker != b.worker for a, b in pairwise(ranges))
    assert all(part.stop > max(part.start, cost.cached) for part in ranges)
    assert plan.costs["split"] < plan.costs["unsplit"]
    assert ends(cost, workers, plan) < plan.costs["unsplit"]
    described = plan.attributes()
    assert (described["baton.place"], described["baton.cost_s.split"]) == ("split", plan.costs["split"])
    assert len(str(described["baton.ranges"]).split()) == len(ranges)
