"""Leases: what a request and its attempt wait for at their ends."""

import gc
import weakref
from itertools import permutations

import pytest

from baton.engine.core.leases import Leases


@pytest.mark.parametrize("order", list(permutations(["memory", "attempt", "end step", "end transfer"])))
def test_all_that_closed_are_over_with_the_last_lease(order: tuple[str, ...]) -> None:
    ended: list[str] = []
    leases, held, closed = Leases(), {"step", "transfer"}, list[str]()
    for holder in held:
        leases.begin(holder)
    for event in order:
        if event.startswith("end "):
            held.remove(event.removeprefix("end "))
            leases.end(event.removeprefix("end "))
        else:
            closed.append(event)
            leases.close(lambda event=event: ended.append(event))
        assert leases.closed == bool(closed)
        assert ended == ([] if held else closed), "each once, in the order of their ends"


def test_holders_come_in_the_order_of_their_beginning() -> None:
    leases = Leases()
    for holder in (b"a", b"b", b"c"):
        leases.begin(holder)
    leases.end(b"a")
    leases.begin(b"a")  # another lease of the same holder
    assert (list(leases), len(leases)) == ([b"b", b"c", b"a"], 3)
    assert b"a" in leases


def test_a_lease_ends_once_and_none_begins_after_the_end() -> None:
    ended: list[str] = []
    leases = Leases()
    leases.begin("step")
    with pytest.raises(AssertionError, match="'step' has this lease already"):
        leases.begin("step")
    leases.end("step")
    with pytest.raises(KeyError):
        leases.end("step")
    assert not ended, "it is open"
    leases.close(lambda: ended.append("over"))
    with pytest.raises(AssertionError, match="'step' wants to use what has ended"):
        leases.begin("step")
    assert ended == ["over"]


def test_what_is_over_is_freed_without_a_collection() -> None:
    class Attempt:
        def __init__(self) -> None:
            self.leases = Leases()

        def over(self) -> None:
            pass

    gc.disable()
    try:
        attempt = Attempt()
        attempt.leases.begin("step")
        attempt.leases.close(attempt.over)
        attempt.leases.end("step")
        gone = weakref.ref(attempt)
        del attempt
        assert gone() is None
    finally:
        gc.enable()
