"""The choice of a decode worker is pure: its promises are checked without a router."""

import random
from collections import Counter

from router.policy import DecodeLoad, two_choices


def load(name: str, free: int = 100, running: int = 0) -> DecodeLoad:
    return DecodeLoad(name, 16, blocks_total=100, max_running=64, blocks_free=free, running=running)


def test_of_two_the_less_loaded_is_taken():
    rng = random.Random(0)
    assert two_choices([load("a", free=10), load("b", free=90)], tokens=16, rng=rng) == "b"
    assert two_choices([load("a", running=60), load("b", running=3)], tokens=16, rng=rng) == "b"


def test_only_workers_with_room_are_asked():
    rng = random.Random(0)
    loads = [load("full", free=1, running=0), load("roomy", free=4, running=60)]
    assert two_choices(loads, tokens=17, rng=rng) == "roomy"
    assert two_choices(loads, tokens=65, rng=rng) is None
    assert two_choices([], tokens=1, rng=rng) is None


def test_one_with_room_among_many_is_found():
    loads = [load(str(i), free=0) for i in range(500)]
    loads[321].blocks_free = 10
    assert two_choices(loads, tokens=16, rng=random.Random(0)) == "321"


def test_avoided_ones_are_the_last_resort():
    loads = [load("a"), load("b", running=60)]
    assert two_choices(loads, tokens=16, rng=random.Random(0), avoid={"a"}) == "b"
    assert two_choices(loads, tokens=16, rng=random.Random(0), avoid={"a", "b"}) == "a"


def test_two_random_choices_balance_on_stale_loads():
    """Nobody is updated while 500 requests are placed: taking the best would send all to one worker."""
    rng = random.Random(1)
    loads = [load(str(i), running=i % 5) for i in range(50)]
    counts = Counter(two_choices(loads, tokens=16, rng=rng) for _ in range(500))
    assert max(counts.values()) < 60
