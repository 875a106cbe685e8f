"""Slots for which several keys wait."""

import asyncio
import contextlib
from types import SimpleNamespace

import pytest

from baton.router.admission.slots import Slots
from tests.within import WITHIN


class Work:
    """Pieces of work that take what the test says, on its own clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
        self.now = 0.0
        clock = SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr("baton.router.admission.slots.time", clock)
        self.slots, self._count = Slots(count), count
        self.begun: list[str] = []
        self._ends: list[asyncio.Event] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def add(self, *keys: str, is_long: bool = False) -> None:
        """Pieces of work that wait for their slots, or have begun, when this returns."""
        for key in keys:
            self._tasks.append(asyncio.create_task(self._hold(key, is_long)))
        await turns_of_the_loop()

    async def _hold(self, key: str, is_long: bool) -> None:
        async with self.slots.turn(key, is_long=is_long):
            self.begun.append(key)
            self._ends.append(end := asyncio.Event())
            await end.wait()

    async def end(self, number: int, seconds: float) -> None:
        """Ends the piece that began as the one with this number, so many seconds later."""
        self.now += seconds
        self._ends[number].set()
        await turns_of_the_loop()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await all_are_free(self.slots, self._count)


async def all_are_free(slots: Slots, count: int) -> None:
    """Each of as many keys gets one, and none waits."""
    async with contextlib.AsyncExitStack() as stack, asyncio.timeout(WITHIN):
        for number in range(count):
            await stack.enter_async_context(slots.turn(f"another key {number}"))


async def turns_of_the_loop() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_keys_take_turns_by_the_time_of_their_work(monkeypatch: pytest.MonkeyPatch):
    work = Work(monkeypatch, 1)
    await work.add(*"aaaaaa", *"bbbbbb")
    for number in range(9):
        await work.end(number, 0.02 if work.begun[number] == "a" else 0.01)
    assert "".join(work.begun) == "abbabbabba"
    await work.close()


async def test_work_that_need_not_wait_counts_as_well(monkeypatch: pytest.MonkeyPatch):
    """A key that has worked alone owes nothing, and a new key gets nothing for the time before it came."""
    work = Work(monkeypatch, 1)
    for number in range(3):
        await work.add("a")
        await work.end(number, 1.0)
    await work.add(*"abababab")
    for number in range(3, 10):
        await work.end(number, 1.0)
    assert "".join(work.begun[3:]) == "abababab"
    await work.close()


async def test_a_key_holds_a_share_of_what_it_leaves_free(monkeypatch: pytest.MonkeyPatch):
    """So other keys need not wait for its work, however long that takes."""
    work = Work(monkeypatch, 10)
    await work.add(*"a" * 20)
    assert "".join(work.begun) == "aaaaaa"
    await work.add(*"b" * 20)
    assert "".join(work.begun) == "aaaaaabb"
    await work.add("c", "d")
    assert "".join(work.begun) == "aaaaaabbcd", "a key always has one slot"
    await work.end(0, 5.0)
    assert "".join(work.begun) == "aaaaaabbcd", "no key with slots gets the last one"
    await work.add("e")
    assert work.begun[-1] == "e"
    await work.close()


async def test_long_work_leaves_a_slot_to_short_work_and_to_other_keys(monkeypatch: pytest.MonkeyPatch):
    work = Work(monkeypatch, 3)
    await work.add("a", "a", is_long=True)
    assert work.begun == ["a"]
    await work.add("b", "c", is_long=True)
    assert work.begun == ["a", "b"]
    await work.add("d")
    assert work.begun == ["a", "b", "d"]
    await work.end(2, 1.0)
    await work.add("d", "e")
    assert work.begun == ["a", "b", "d", "e"], "the last work of d took long"
    await work.close()


async def test_work_that_waits_is_long_when_its_key_turns_out_to_be_slow(monkeypatch: pytest.MonkeyPatch):
    work = Work(monkeypatch, 3)
    await work.add("a", "a", "a", "a")
    assert work.begun == ["a", "a"]
    await work.end(0, 1.0)
    await work.end(1, 1.0)
    assert work.begun == ["a", "a", "a"]
    await work.close()


@pytest.mark.parametrize("begun", [False, True])
async def test_work_that_has_begun_goes_on_when_its_caller_is_cancelled(begun: bool):
    slots, done, ended = Slots(1), asyncio.Event(), list[str]()

    async def work(key: str) -> None:
        await done.wait()
        ended.append(key)

    first = asyncio.create_task(slots.run("a", lambda: work("a")))
    second = asyncio.create_task(slots.run("b", lambda: work("b")))
    await turns_of_the_loop()
    cancelled, other = (first, second) if begun else (second, first)
    cancelled.cancel()
    await turns_of_the_loop()
    done.set()
    await other
    await asyncio.gather(cancelled, return_exceptions=True)
    assert cancelled.cancelled()
    assert ended == (["a", "b"] if begun else ["a"])
    await all_are_free(slots, 1)


async def test_close_ends_what_runs():
    slots = Slots(1)
    task = asyncio.create_task(slots.run("a", asyncio.Event().wait))
    await turns_of_the_loop()
    await slots.close()
    with pytest.raises(asyncio.CancelledError):
        await task
    await all_are_free(slots, 1)
