"""How long the loop of the engine process waits."""

import math
from typing import Any

import pytest

from baton.engine import Engine
from baton.kv_transfer import wait as waits
from baton.kv_transfer.wait import SPIN
from baton.worker.engine_process.loop import IDLE_TICK, Roles, seconds_to_wait
from tests.stand_in import stand_in


def test_an_idle_engine_polls_for_a_commit_that_is_due_and_then_sleeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(waits, "_cores", 64)
    now: dict[str, Any] = {"has_work": False, "poll_within": IDLE_TICK}
    engine = stand_in(Engine, has_work=property(lambda _: now["has_work"]), rest=0.004, joins_at=math.inf)
    roles = stand_in(Roles, poll_within=property(lambda _: now["poll_within"]))
    assert seconds_to_wait(engine, roles, 10.0) == IDLE_TICK
    engine.joins_at = 10.0
    slept = [seconds_to_wait(engine, roles, 10.0 + turn * SPIN / 8) for turn in range(-2, 1000)]
    assert slept[:2] == [IDLE_TICK] * 2, "a layer is still to come"
    assert slept[2:10] == [0.0] * 8
    assert slept[10:] == [IDLE_TICK] * 992, "COMMIT never comes"
    now["poll_within"] = 0.00005
    assert seconds_to_wait(engine, roles, 11.0) == roles.poll_within
    now |= {"has_work": True, "poll_within": IDLE_TICK}
    assert seconds_to_wait(engine, roles, 10.0 + SPIN / 8) == engine.rest, "the device computes"
