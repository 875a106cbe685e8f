"""How long the loop of the engine process waits, and what it does meanwhile."""

import math
from typing import Any

import pytest

from baton.decode_worker.role import DecodeRole
from baton.engine import Engine
from baton.engine.core.request_lives import RequestLives
from baton.engine.step_loop import StepLoop
from baton.kv_transfer import Receiver, Sender
from baton.kv_transfer import wait as waits
from baton.kv_transfer.wait import SPIN
from baton.worker import messages
from baton.worker.engine_process import loop
from baton.worker.engine_process.attempt import AttemptTable
from baton.worker.engine_process.context import Context
from baton.worker.engine_process.engine_attempt import BatonResources, EngineAttempt, Reading
from baton.worker.engine_process.loop import IDLE_TICK, FreedMemory, may_move, seconds_to_wait
from baton.worker.engine_process.roles import Roles
from baton.worker.engine_process.states import State
from baton.worker.ipc import ServiceLink
from baton.worker.messages import Origin
from tests.memory import anonymous_bytes
from tests.stand_in import stand_in


def test_an_idle_engine_polls_for_a_commit_that_is_due_and_then_sleeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(waits, "_cores", 64)
    now: dict[str, Any] = {"has_work": False, "poll_within": IDLE_TICK}
    has_work = property(lambda _: now["has_work"])
    steps = stand_in(StepLoop, has_work=has_work, seconds_to_step=0.004, joins_at=math.inf)
    roles = stand_in(Roles, polls=True, poll_within=property(lambda _: now["poll_within"]))
    table = AttemptTable[EngineAttempt](lambda _: None)
    assert seconds_to_wait(table, steps, roles, 10.0) == IDLE_TICK
    steps.joins_at = 10.0
    slept = [seconds_to_wait(table, steps, roles, 10.0 + turn * SPIN / 8) for turn in range(-2, 1000)]
    assert slept[:2] == [IDLE_TICK] * 2, "a layer is still to come"
    assert slept[2:10] == [0.0] * 8
    assert slept[10:] == [IDLE_TICK] * 992, "COMMIT never comes"
    now["poll_within"] = 0.00005
    assert seconds_to_wait(table, steps, roles, 11.0) == roles.poll_within
    now |= {"has_work": True, "poll_within": IDLE_TICK}
    assert seconds_to_wait(table, steps, roles, 10.0 + SPIN / 8) == steps.seconds_to_step, (
        "the device computes"
    )


def test_kv_is_moved_while_it_may_have_something_to_do() -> None:
    """While all attempts decode, a turn of the loop costs nothing for KV."""
    table, within = AttemptTable[EngineAttempt](lambda _: None), list[float]()
    poll_within = property(lambda _: min(within, default=None))
    shared = stand_in(
        BatonResources,
        engine=stand_in(
            Engine, lives=stand_in(RequestLives, waiting=[]), loop=stand_in(StepLoop, joins_at=math.inf)
        ),
        sender=stand_in(Sender, fileno=lambda: 6, close=lambda *_: None),
        receiver=stand_in(Receiver, fileno=lambda: 7, poll_within=poll_within, next_injection=math.inf),
    )
    role = stand_in(DecodeRole, move_kv=lambda _: None)
    link = stand_in(ServiceLink, send=lambda _: None)
    roles = Roles(stand_in(Context, attempts=table, link=link, images=None), shared, [role])
    attempt = EngineAttempt(stream=1, origin=Origin(b"a", "", "", 0.0), tokens=1, shared=shared)

    def moves() -> bool:
        """Whether it does so after it has done so."""
        assert may_move(table, roles)
        roles.move_kv(0.0)
        return may_move(table, roles)

    assert not moves(), "there is no attempt"
    assert table.open(attempt)
    attempt.to(State.FETCHING)
    assert moves(), "its deadline may pass"
    attempt.to(State.DECODING)
    assert not may_move(table, roles)
    roles.handle(messages.Detached(2))
    within.append(0.1)
    assert moves(), "a copy is under way"
    within.clear()
    assert not moves()
    reading = Reading(attempt, b"r")
    reading.opened = True
    attempt.close("gone")
    assert moves(), "a lease is about to end"
    reading.end()
    assert not may_move(table, roles)


def test_memory_is_given_back_once_after_work(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []
    now, freed = 0.0, FreedMemory()
    monkeypatch.setattr(loop, "trim", lambda: given.append(now))
    for turn in range(40):
        now = 100 + turn * IDLE_TICK / 4
        freed.turn(idle=turn not in (10, 11, 13), now=now)
    assert given == [100, 100 + 18 * IDLE_TICK / 4], "at the start, and more than a tick after the last work"


def test_freed_memory_goes_back_to_the_system() -> None:
    """Though it lies between things that stay."""
    pairs = [[bytearray(100_000), bytearray(200)] for _ in range(400)]
    before = anonymous_bytes()
    for pair in pairs:
        del pair[0]
    freed = FreedMemory()
    freed.turn(idle=False, now=0)
    freed.turn(idle=True, now=2 * IDLE_TICK)
    assert before - anonymous_bytes() > 30_000_000
    del pairs
