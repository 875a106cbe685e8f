"""Policies are pure: their promises are checked over many sessions, without a router."""

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from router.policy import DecodeLoad, Ring, least_loaded, sticky
from router.policy.sticky import BOUND

WORKERS = [f"10.0.0.{i}:7001" for i in range(8)]
_RANDOM = random.Random(5)
KEYS = [_RANDOM.getrandbits(64) for _ in range(4000)]


def idle_choice(ring: Ring, key: int) -> str | None:
    return sticky(ring, {}, 0, key=key, cost=100)


def test_the_same_session_goes_to_the_same_worker_in_every_router():
    left, right = Ring(WORKERS), Ring(list(reversed(WORKERS)))
    assert [idle_choice(left, k) for k in KEYS] == [idle_choice(right, k) for k in KEYS]


def test_sessions_spread_over_all_workers():
    counts = Counter(idle_choice(Ring(WORKERS), k) for k in KEYS)
    assert set(counts) == set(WORKERS)
    assert max(counts.values()) < 2 * len(KEYS) / len(WORKERS)


def test_a_worker_that_leaves_moves_only_its_own_sessions():
    before, after = Ring(WORKERS), Ring(WORKERS[1:])
    for key in KEYS:
        chosen = idle_choice(before, key)
        if chosen != WORKERS[0]:
            assert idle_choice(after, key) == chosen


def test_a_hot_session_overflows_to_its_next_worker_and_comes_back():
    ring, key = Ring(WORKERS), KEYS[0]
    first, second, *_ = ring.walk(key)
    loads = dict.fromkeys(WORKERS, 100) | {first: 1000}
    assert sticky(ring, loads, sum(loads.values()), key=key, cost=10) == second
    loads[first] = 100
    assert sticky(ring, loads, sum(loads.values()), key=key, cost=10) == first


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=200), st.integers(0, 2**64 - 1), st.integers(1, 8))
def test_no_worker_gets_more_than_its_bound(costs, key, workers):
    """One session only, the worst case: each placement is within the bound, or on an idle worker."""
    ring = Ring(WORKERS[:workers])
    loads = dict.fromkeys(WORKERS[:workers], 0)
    for cost in costs:
        total = sum(loads.values())
        chosen = sticky(ring, loads, total, key=key, cost=cost)
        assert chosen is not None
        bound = BOUND * (total + cost) / workers
        fits = [worker for worker, load in loads.items() if load == 0 or load + cost <= bound]
        assert chosen in fits or (not fits and loads[chosen] == min(loads.values()))
        loads[chosen] += cost


def test_workers_that_failed_are_taken_only_when_there_is_no_other():
    ring, key = Ring(WORKERS[:2]), KEYS[0]
    first, second = ring.walk(key)
    assert sticky(ring, {}, 0, key=key, cost=1, avoid={first}) == second
    assert sticky(ring, {}, 0, key=key, cost=1, avoid={first, second}) == first
    assert sticky(Ring([]), {}, 0, key=key, cost=1) is None


def load(name: str, free: int = 100, running: int = 0) -> DecodeLoad:
    return DecodeLoad(name, 16, blocks_total=100, max_running=64, blocks_free=free, running=running)


def test_of_two_the_less_loaded_is_taken():
    rng = random.Random(0)
    assert least_loaded([load("a", free=10), load("b", free=90)], tokens=16, rng=rng) == "b"
    assert least_loaded([load("a", running=60), load("b", running=3)], tokens=16, rng=rng) == "b"


def test_only_workers_with_room_are_asked():
    rng = random.Random(0)
    loads = [load("full", free=1, running=0), load("roomy", free=4, running=60)]
    assert least_loaded(loads, tokens=17, rng=rng) == "roomy"
    assert least_loaded(loads, tokens=65, rng=rng) is None
    assert least_loaded([], tokens=1, rng=rng) is None


def test_one_with_room_among_many_is_found():
    loads = [load(str(i), free=0) for i in range(500)]
    loads[321].blocks_free = 10
    assert least_loaded(loads, tokens=16, rng=random.Random(0)) == "321"


def test_avoided_ones_are_the_last_resort():
    loads = [load("a"), load("b", running=60)]
    assert least_loaded(loads, tokens=16, rng=random.Random(0), avoid={"a"}) == "b"
    assert least_loaded(loads, tokens=16, rng=random.Random(0), avoid={"a", "b"}) == "a"


def test_two_random_choices_balance_on_stale_loads():
    """Nobody is updated while 500 requests are placed: taking the best would send all to one worker."""
    rng = random.Random(1)
    loads = [load(str(i), running=i % 5) for i in range(50)]
    counts = Counter(least_loaded(loads, tokens=16, rng=rng) for _ in range(500))
    assert max(counts.values()) < 60
