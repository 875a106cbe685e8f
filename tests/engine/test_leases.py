"""Leases: an object is over once, when it is closed and its last lease has ended."""

import gc
import weakref
from itertools import permutations

import pytest

from baton.engine.core.leases import Leases


@pytest.mark.parametrize("order", list(permutations(["close", "end step", "end transfer"])))
def test_an_object_is_over_with_the_last_of_its_end_and_its_leases(order: tuple[str, ...]) -> None:
    ended: list[str] = []
    leases = Leases[str](lambda: ended.append("over"))
    leases.begin("step")
    leases.begin("transfer")
    for event in order:
        assert not ended
        if event == "close":
            leases.close()
        else:
            leases.end(event.removeprefix("end "))
    assert ended == ["over"]
    assert leases.closed


def test_holders_come_in_the_order_of_their_beginning() -> None:
    leases = Leases[bytes](lambda: None)
    for holder in (b"a", b"b", b"c"):
        leases.begin(holder)
    leases.end(b"a")
    leases.begin(b"a")  # another lease of the same holder
    assert (list(leases), len(leases)) == ([b"b", b"c", b"a"], 3)
    assert b"a" in leases


def test_a_lease_ends_once_and_none_begins_after_the_end() -> None:
    ended: list[str] = []
    leases = Leases[str](lambda: ended.append("over"))
    leases.begin("step")
    with pytest.raises(AssertionError, match="'step' has this lease already"):
        leases.begin("step")
    leases.end("step")
    with pytest.raises(KeyError):
        leases.end("step")
    assert not ended, "it is open"
    leases.close()
    with pytest.raises(AssertionError, match="'step' wants to use what has ended"):
        leases.begin("step")
    with pytest.raises(AssertionError, match="ends once"):
        leases.close()


def test_what_is_over_is_freed_without_a_collection() -> None:
    class Attempt:
        def __init__(self) -> None:
            self.leases = Leases[str](self.over)

        def over(self) -> None:
            pass

    gc.disable()
    try:
        attempt = Attempt()
        attempt.leases.close()
        gone = weakref.ref(attempt)
        del attempt
        assert gone() is None
    finally:
        gc.enable()
