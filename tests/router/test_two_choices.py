"""The choice of a decode worker, checked without a router."""

import random
from collections import Counter
from collections.abc import Collection

from baton.router.policy.decode import DecodeLoad, DecodePool


def load(name: str, free: int = 100, running: int = 0) -> DecodeLoad:
    return DecodeLoad(0, name, 16, blocks_total=100, max_running=64, blocks_free=free, running=running)


def choose(
    loads: list[DecodeLoad], tokens: int, rng: random.Random, avoid: Collection[str] = ()
) -> str | None:
    found = DecodePool(loads).choose(tokens, rng, avoid)
    return None if found is None else found.worker


def test_the_less_loaded_of_two_is_chosen():
    rng = random.Random(0)
    assert choose([load("a", free=10), load("b", free=90)], 16, rng) == "b"
    assert choose([load("a", running=60), load("b", running=3)], 16, rng) == "b"


def test_only_workers_with_capacity_are_chosen():
    rng = random.Random(0)
    loads = [load("full", free=1, running=0), load("roomy", free=4, running=60)]
    assert choose(loads, 17, rng) == choose(loads, 64, rng) == "roomy"
    assert choose(loads, 65, rng) is None
    assert [loads[1].fits(tokens) for tokens in (64, 65)] == [True, False]
    assert choose([], 1, rng) is None


def test_one_request_more_than_a_batch_has_slots_is_sent():
    """So the worker refuses it, and its report tells the autoscaler."""
    assert choose([load("a", running=64)], 16, random.Random(0)) == "a"
    assert choose([load("a", running=65)], 16, random.Random(0)) is None


def test_the_only_worker_with_capacity_is_found_among_many():
    loads = [load(str(i), free=0) for i in range(500)]
    loads[321].blocks_free = 10
    assert choose(loads, 16, random.Random(0)) == "321"


def test_avoided_workers_are_chosen_last():
    loads = [load("a"), load("b", running=60)]
    assert choose(loads, 16, random.Random(0), avoid={"a"}) == "b"
    assert choose(loads, 16, random.Random(0), avoid={"a", "b"}) == "a"


def test_two_random_choices_balance_on_stale_loads():
    """500 requests are placed without new reports. The best worker of all would get every one of them."""
    rng = random.Random(1)
    loads = [load(str(i), running=i % 5) for i in range(50)]
    counts = Counter(choose(loads, 16, rng) for _ in range(500))
    assert max(counts.values()) < 60
