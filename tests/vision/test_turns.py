"""When the layers of an encoder may begin."""

import math
import queue
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from baton.vision import turns as turns_module
from baton.vision.turns import Turns
from tests.within import WITHIN


class Announced(threading.Condition):
    """Tells before a layer waits."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = threading.Event()

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        self.waits.set()
        return super().wait_for(predicate, timeout)


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> Turns:
    """A layer takes 1 s for an image of 200 tokens. Its clock stands still afterwards."""
    now = 0.0
    monkeypatch.setattr(turns_module, "time", SimpleNamespace(monotonic=lambda: now))
    turns = Turns()
    turns.grant(0.0, 0.0)
    with turns.image(100):  # the cost is not known yet, so no layer waits
        for _ in range(4):
            turns.next_layer()
            now += 0.5
    assert turns.taken() == 0
    return turns


def test_a_layer_begins_when_a_step_leaves_time_for_it(turns: Turns) -> None:
    turns._granted = condition = Announced()
    begun: queue.SimpleQueue[int] = queue.SimpleQueue()

    def encode() -> None:
        with turns.image(200):
            for layer in range(5):
                turns.next_layer()
                begun.put(layer)

    turns.grant(2.5, WITHIN)
    thread = threading.Thread(target=encode)
    thread.start()
    assert [begun.get(timeout=WITHIN) for _ in range(2)] == [0, 1]
    assert condition.waits.wait(WITHIN)
    assert turns.taken() == 2
    condition.waits.clear()
    turns.grant(1.0, WITHIN)  # what the step before left is no time any more
    assert begun.get(timeout=WITHIN) == 2
    assert condition.waits.wait(WITHIN)
    assert turns.taken() == 1
    assert begun.empty()
    turns.grant(math.inf)
    thread.join(WITHIN)
    assert [begun.get(timeout=WITHIN) for _ in range(2)] == [3, 4]


def test_a_layer_waits_no_longer_than_it_must(turns: Turns) -> None:
    """Decodes take all of the time, or no step comes any more."""
    turns.grant(0.0, 1e-3)
    with turns.image(200):
        turns.next_layer()
        turns.next_layer()
    assert turns.taken() == 2


def test_an_image_tells_what_its_tokens_cost(turns: Turns) -> None:
    assert turns.seconds == 2
    assert turns.token_seconds == pytest.approx(2 / 100)
    turns.forget()
    assert turns.token_seconds == 0


def test_layers_are_launched_ahead_where_nothing_decodes(turns: Turns) -> None:
    with turns.image(200):  # a layer takes 1 s
        turns.grant(5.0, 20.0)
        assert turns.ahead == 1, "those that are launched could not wait"
        turns.grant(math.inf, 4.0)
        assert turns.ahead == 4, "a request that begins to decode waits for no more than the target of a gap"
        turns.grant(math.inf, 0.5)
        assert turns.ahead == 1
        turns.grant(math.inf)
        assert turns.ahead == math.inf
