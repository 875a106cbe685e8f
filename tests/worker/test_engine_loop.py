"""How long the loop of the engine process waits."""

import math
from types import SimpleNamespace
from typing import Any

import pytest

from baton.kv_transfer import wait as waits
from baton.kv_transfer.wait import SPIN
from baton.worker.engine_process.loop import IDLE_TICK, seconds_to_wait


def test_an_idle_engine_polls_for_a_commit_that_is_due_and_then_sleeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(waits, "_cores", 64)
    engine: Any = SimpleNamespace(has_work=False, rest=0.004, joins_at=math.inf)
    roles: Any = SimpleNamespace(poll_within=IDLE_TICK)
    assert seconds_to_wait(engine, roles, 10.0) == IDLE_TICK
    engine.joins_at = 10.0
    slept = [seconds_to_wait(engine, roles, 10.0 + turn * SPIN / 8) for turn in range(-2, 1000)]
    assert slept[:2] == [IDLE_TICK] * 2, "a layer is still to come"
    assert slept[2:10] == [0.0] * 8
    assert slept[10:] == [IDLE_TICK] * 992, "COMMIT never comes"
    roles.poll_within = 0.00005
    assert seconds_to_wait(engine, roles, 11.0) == roles.poll_within
    engine.has_work = True
    roles.poll_within = IDLE_TICK
    assert seconds_to_wait(engine, roles, 10.0 + SPIN / 8) == engine.rest, "the device computes"
