"""Workers of a group end when all have drained."""

import asyncio
import os

import msgspec
import pytest

from baton.worker.group import Group
from tests.within import WITHIN, within


def groups(count: int) -> list[Group]:
    """As the processes of a group have them: each has both ends of the pipe."""
    drained, undrained = os.pipe()
    ends = [(os.dup(undrained), os.dup(drained)) for _ in range(count)]
    os.close(drained)
    os.close(undrained)
    return [Group("0" * 16, rank, count, 7000, *each) for rank, each in enumerate(ends)]


async def test_a_worker_waits_for_those_that_have_not_drained() -> None:
    first, second, third = groups(3)
    waiting = [asyncio.create_task(each.all_drained(WITHIN)) for each in (first, second)]
    done, _ = await asyncio.wait(waiting, timeout=0.01)
    assert not done
    os.close(third.undrained)  # as when its process ends
    for each in waiting:
        await within(each)
    for each in (first, second, third):
        os.close(each.drained)


async def test_the_wait_has_an_end() -> None:
    first, second = groups(2)
    await within(first.all_drained(0.01))
    for fd in (first.drained, second.drained, second.undrained):
        os.close(fd)


def test_descriptors_are_not_inherited_further() -> None:
    drained, undrained = os.pipe()
    for fd in (drained, undrained):
        os.set_inheritable(fd, True)
    text = msgspec.json.encode(Group("0" * 16, 1, 2, 7000, undrained, drained)).decode()
    group = Group.parse(text)
    assert not os.get_inheritable(group.undrained)
    assert not os.get_inheritable(group.drained)
    for fd in (drained, undrained):
        os.close(fd)
    for wrong in (text, text[:-2], '{"id": 1}'):
        with pytest.raises(ValueError, match="is for workers that a group has started"):
            Group.parse(wrong)
