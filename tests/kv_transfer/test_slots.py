"""The pipe of free slots: several processes take from it, and each slot is taken once."""

import os
from collections import Counter

import pytest

from baton.kv_transfer.arena import Arena
from baton.kv_transfer.process.frames import SlotPipe
from baton.kv_transfer.protocol.frame import FrameError


def taken(pipe: SlotPipe) -> list[int]:
    """All that are laid out."""
    slots = []
    while True:
        try:
            slots.append(pipe.take())
        except FrameError as e:
            assert e.kind == "credit"  # noqa: PT017
            return slots


def test_only_what_is_laid_out_is_taken() -> None:
    pipe = SlotPipe(Arena.create(8, 4096))
    with pytest.raises(FrameError):
        pipe.take()
    for _ in range(3):
        pipe.lay_out([4, 2])
        pipe.lay_out([7])
        assert taken(pipe) == [4, 2, 7]


@pytest.mark.all
def test_processes_never_take_the_same() -> None:
    """Four of them, each as fast as it can."""
    count, reading, children = 15_000, [], []
    pipe = SlotPipe(Arena.create(count, 4096))
    pipe.lay_out(range(count))
    for _ in range(4):
        read_fd, write_fd = os.pipe()
        if not (child := os.fork()):
            mine = taken(pipe)
            with os.fdopen(write_fd, "w") as file:
                file.write(" ".join(map(str, mine)))
            os._exit(0)
        os.close(write_fd)
        children.append(child)
        reading.append(os.fdopen(read_fd))
    found = Counter(int(slot) for file in reading for slot in file.read().split())
    for file, child in zip(reading, children, strict=True):
        file.close()
        assert os.waitpid(child, 0)[1] == 0
    assert found == Counter(range(count))
