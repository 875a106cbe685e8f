"""The averages that an engine reports of its steps."""

from array import array

from engine import EngineRequest
from engine.core.live_request import LiveRequest, Phase
from engine.core.meters import LARGE, Meters
from engine.core.scheduler import Chunk, Schedule


def step(tokens: int) -> Schedule:
    live = LiveRequest(EngineRequest(b"r", [1] * tokens), Phase.RUNNING, 0)
    assert live.token_ids == array("i", [1] * tokens)
    return Schedule([Chunk(live, 0, tokens)])


def test_short_prompts_do_not_lower_the_speed_of_long_ones() -> None:
    """A short prompt takes as long as reading the weights."""
    meters = Meters(8192, 0.2048)
    assert meters.prefill_tokens_per_s == 40_000
    for _ in range(50):
        meters.record(step(20), 0.005)
    assert meters.prefill_tokens_per_s == 40_000
    for _ in range(50):
        meters.record(step(LARGE), LARGE / 20_000)
    assert 19_000 < meters.prefill_tokens_per_s < 21_000


def test_without_long_prompts_the_longest_seen_count() -> None:
    meters = Meters()
    assert meters.prefill_tokens_per_s == 0
    meters.record(step(20), 0.005)
    assert meters.prefill_tokens_per_s == 4_000
    meters.record(step(100), 0.005)
    meters.record(step(20), 0.005)
    assert meters.prefill_tokens_per_s > 10_000
