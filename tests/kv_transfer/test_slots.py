"""Free slots, of which several processes take: each is in one place, whoever took it."""

from __future__ import annotations

import os
import random
from collections import Counter

from kv_transfer.process.slots import Slots


def test_a_slot_is_taken_once_and_comes_back_as_often_as_one_likes() -> None:
    rng = random.Random(1)
    slots = Slots(64)
    out: list[int] = []
    for _ in range(20_000):
        slots.lay_out(rng.randrange(65))
        for _ in range(rng.randrange(8)):
            slot = slots.take()
            if slot is None:
                break
            slots.taken()
            assert slot not in out
            out.append(slot)
        rng.shuffle(out)
        while len(out) > rng.randrange(64):
            slots.give_back(out.pop())
        assert slots.free + len(out) == 64


def test_nothing_is_taken_that_was_not_laid_out() -> None:
    slots = Slots(8)
    assert slots.take() is None
    slots.lay_out(3)
    slots.lay_out(2)
    assert sorted(iter(slots.take, None)) == [0, 1, 2], "the lowest, and no more than asked for"
    assert slots.free == 8, "nobody has told of them"


def test_processes_never_take_the_same() -> None:
    """Four of them, each as fast as it can."""
    count, reading = 15_000, []
    slots = Slots(count)
    slots.lay_out(count)
    for _ in range(4):
        read_fd, write_fd = os.pipe()
        if os.fork() == 0:
            mine = list(iter(slots.take, None))
            with os.fdopen(write_fd, "w") as file:
                file.write(" ".join(map(str, mine)))
            os._exit(0)
        os.close(write_fd)
        reading.append(os.fdopen(read_fd))
    found = Counter(int(slot) for file in reading for slot in file.read().split())
    for file in reading:
        file.close()
        assert os.wait()[1] == 0
    assert found == Counter(range(count))
