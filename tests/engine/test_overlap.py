"""Launching a step before the tokens of the step before are known changes nothing but the timing."""

import math
from typing import Any

import pytest

from baton.engine import Engine
from baton.engine.core.pace import Pace
from tests.engine.conftest import MakeEngine, request_of, run
from tests.engine.scheduling import end
from tests.engine.test_engine import PROMPT
from tests.engine.told_device import ToldDevice
from tests.within import WITHIN


def land_one(engine: Engine) -> Any:
    """Calls `step` until a launched step lands. Returns its result."""
    while True:
        result = engine.loop.step()
        if result.seconds:
            return result


@pytest.mark.parametrize("sampling", [{}, {"repetition_penalty": 1.2}, {"presence_penalty": 0.5}])
def test_a_step_is_launched_while_one_is_under_way(
    late_engine: MakeEngine, sampling: dict[str, float]
) -> None:
    engine = late_engine()
    request = request_of(1, PROMPT, max_tokens=3, ignore_eos=True, **sampling)
    engine.add(request)
    assert engine.loop.seconds_to_step == 0
    assert not engine.loop.step().outputs
    assert not engine.loop.step().outputs
    assert engine.loop.under_way
    assert engine.loop.seconds_to_step == float("inf"), "two at most"
    first = engine.loop.step()
    assert [output.output_index for output in first.outputs] == [0]
    assert first.seconds > 0
    assert [land_one(engine).outputs[0].output_index for _ in range(2)] == [1, 2]
    assert not engine.loop.has_work, "that the third token is the last is known before it is"
    engine.assert_whole()


def test_a_frozen_engine_lands_what_is_under_way_and_launches_nothing(
    late_engine: MakeEngine, tiny_engine: MakeEngine
) -> None:
    request = request_of(1, PROMPT, max_tokens=8, ignore_eos=True)
    tokens = run(tiny_engine(), [request])[request.id].tokens
    engine = late_engine()
    engine.add(request)
    found = [output.token for output in land_one(engine).outputs]
    assert engine.loop.under_way
    engine.loop.frozen = True
    while engine.loop.has_work:
        found += [output.token for output in engine.loop.step().outputs]
    assert not engine.loop.under_way
    assert 0 < len(found) < len(tokens)
    assert engine.stats().requests_running == 1
    engine.loop.frozen = False
    while engine.loop.has_work:
        found += [output.token for output in engine.loop.step().outputs]
    assert found == tokens
    engine.assert_whole()


def test_the_blocks_of_an_ended_request_stay_in_use_until_its_last_launched_step_is_over(
    late_engine: MakeEngine, tiny_engine: MakeEngine
) -> None:
    probe = request_of(1, PROMPT, max_tokens=3, ignore_eos=True)
    tokens = run(tiny_engine(), [probe])[probe.id].tokens
    engine = late_engine(num_blocks=8)
    stopped = request_of(2, PROMPT, max_tokens=20, ignore_eos=True, stop_token_ids=(tokens[1],))
    engine.add(stopped)
    land_one(engine)
    engine.loop.step()
    (last,) = land_one(engine).outputs
    assert last.finish_reason == "stop"
    assert engine.loop.under_way, "a step with the ended request is under way"
    assert engine.blocks_free < 8
    assert engine.stats().requests_running == 0
    assert not engine.idle
    assert land_one(engine).outputs == []
    assert engine.blocks_free == 8
    engine.assert_whole()


def test_a_slow_launch_does_not_delay_the_tokens_of_the_step_before(late_engine: MakeEngine) -> None:
    """The launch of a prompt without a graph takes long. If the step under way would end meanwhile, its
    tokens come first."""
    engine = late_engine()
    engine.loop.graph_rows = engine.scheduler._full_step = len(PROMPT) - 1
    requests = [request_of(number, PROMPT, max_tokens=1) for number in range(3)]
    for request in requests:
        engine.add(request, handover=True)
    assert not engine.loop.step().outputs
    engine.loop._pace.fits_slow_launch = lambda now: True
    assert not engine.loop.step().outputs, "there is time, so a second step is launched"
    assert land_one(engine).outputs[0].id == requests[0].id
    engine.loop._pace.fits_slow_launch = lambda now: False
    assert engine.loop.seconds_to_step == float("inf"), "no launch before the second prompt has landed"
    assert land_one(engine).outputs[0].id == requests[1].id
    assert engine.loop.seconds_to_step == 0
    assert land_one(engine).outputs[0].id == requests[2].id


def test_prompt_tokens_wait_until_their_step_is_over(late_engine: MakeEngine) -> None:
    """Routers learn of each other's prompts from this number."""
    engine = late_engine()
    engine.add(request_of(1, PROMPT, ignore_eos=True))
    assert engine.stats().tokens_waiting == len(PROMPT)
    engine.loop.step()
    assert (len(engine.loop.under_way), engine.stats().tokens_waiting) == (1, len(PROMPT))
    land_one(engine)
    assert engine.stats().tokens_waiting == 0
    end(engine, bytes([1]) * 16)


def test_a_landing_makes_its_file_descriptor_readable(tiny_engine: MakeEngine) -> None:
    engine = tiny_engine(overlap=True)
    device = ToldDevice(engine)
    for number in range(3):
        engine.add(request_of(number, PROMPT, max_tokens=3 + number, ignore_eos=True))
    tokens = steps = 0
    while engine.loop.has_work:
        while engine.loop.has_work and (rest := engine.loop.seconds_to_step) < math.inf:
            if not rest:
                tokens += len(engine.loop.step().outputs)
                steps += 1
        if engine.loop.has_work:
            assert not device.woken(), "nothing to do, and no wakeup"
            began, ended = device.events.pop(0), device.events.pop(0)
            began.happens()
            ended.happens()
            assert device.woken(WITHIN)
    assert tokens == 3 + 4 + 5
    assert steps <= 2 * 5 + 1, "each step is launched by one call and landed by one, at most"
    engine.assert_whole()


def test_pace() -> None:
    """The next step is due before the end of the current one, by the time that a launch takes."""
    pace = Pace()
    now = 100.0
    pace.launched(8, now - 0.001, now)
    assert pace.due() <= now, "how long it takes is not known"
    for _ in range(20):
        pace.launched(8, now + 0.005, now + 0.006)
        now += 0.010
        pace.landed(0.010, now)
    assert now + 0.007 < pace.due() < now + 0.009
    pace.launched(None, now + 0.005, now + 0.006)
    now += 0.010
    pace.landed(0.010, now)
    assert pace.due() <= now, "a prefill: any time"
    pace.landed(0.5, now + 0.5)
    pace.launched(8, now + 0.6, now + 0.601)
    assert now + 0.607 < pace.due() < now + 0.611, "it began when it was launched"


def test_pace_beside_prompts() -> None:
    """A request that joins waits for every step that is launched already, also one of prompts alone."""
    pace = Pace()
    pace.launched(None, 0.0, 0.001, expected=0.010)
    assert pace.ends == pytest.approx(0.011)
    assert 0.001 + 0.6 * 0.010 < pace.due() < 0.001 + 0.8 * 0.010


def test_the_device_does_not_wait_for_launches_of_prompts_alone() -> None:
    """A worker that only computes prompts knows no launches of decodes."""
    pace = Pace()
    pace.launched(None, 0.0, 0.004, expected=0.010)
    assert pace.due() + 0.004 < 0.004 + 0.8 * 0.010


def test_pace_of_slow_launches() -> None:
    """A launch without a graph must end before the step under way."""
    pace = Pace()
    pace.launched(None, 0.0, 0.02, slow=True, expected=0.05)
    assert pace.fits_slow_launch(0.024), "the device began with the launch"
    assert not pace.fits_slow_launch(0.026)
    assert 0.8 * 0.05 > pace.due() > pace.due(slow=True), "the next launch takes long, too"
    assert pace.fits_slow_launch(pace.due(slow=True))
    pace.landed(0.05, 0.1)
    pace.launched(8, 0.1, 0.1)
    assert not pace.fits_slow_launch(0.1), "how long it takes is not known"


def test_a_chat_goes_on_in_its_last_block(tiny_engine: MakeEngine, late_engine: MakeEngine) -> None:
    """A step that was launched for the turn before, after its last token, writes behind what is kept."""
    engine = late_engine(enable_prefix_caching=True, block_size=128, num_blocks=4)
    chat, cached = [(7 * i) % 190 for i in range(70)], []
    for turn in range(3):
        request = request_of(turn, chat, max_tokens=6)
        result = run(engine, [request])[request.id]
        assert result.tokens == run(tiny_engine(overlap=False), [request])[request.id].tokens
        cached.append(result.outputs[0].cached_tokens)
        chat = [*chat, *result.tokens, *range(20 + turn, 40 + turn)]
        engine.assert_whole()
    assert cached == [0, 64, 64]
