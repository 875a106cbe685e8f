"""The averages that an engine reports of its steps."""

from typing import Any, cast

import pytest

from baton.engine.core.meters import Batch, ChunkLimit, Meters
from baton.steps.learned_steps import LearnedSteps, row_sizes, token_sizes
from baton.steps.step_model import LARGE, StepModel
from tests.engine.conftest import MakeEngine
from tests.engine.scheduling import add, make, step


def make_meters(largest: tuple[int, float] = (0, 0.0), measured: StepModel | None = None) -> Meters:
    return Meters(ChunkLimit(LearnedSteps(row_sizes(8), token_sizes(8192), measured), 0.020, 8192), largest)


def test_the_speed_of_prompts_comes_with_their_positions() -> None:
    meters = make_meters((8192, 0.2048))
    assert meters.prefill_position == 4096
    for _ in range(50):
        meters.record(0, LARGE, 0.02, 20_000.0)
        meters.record(0, 20, 0.005, 99.0)
    assert meters.prefill_position == pytest.approx(20_000, rel=0.01), "a small step shows no speed"


def test_short_prompts_do_not_lower_the_speed_of_long_ones() -> None:
    """A short prompt takes as long as reading the weights."""
    meters = make_meters((8192, 0.2048))
    assert meters.prefill_tokens_per_s == 40_000
    for _ in range(50):
        meters.record(0, 20, 0.005)
    assert meters.prefill_tokens_per_s == 40_000
    for _ in range(50):
        meters.record(0, LARGE, LARGE / 20_000)
    assert 19_000 < meters.prefill_tokens_per_s < 21_000


def test_without_long_prompts_the_longest_seen_count() -> None:
    meters = make_meters()
    assert meters.prefill_tokens_per_s == 0
    meters.record(0, 20, 0.005)
    assert meters.prefill_tokens_per_s == 4_000
    meters.record(0, 100, 0.005)
    meters.record(0, 20, 0.005)
    assert meters.prefill_tokens_per_s > 10_000


def test_a_prompt_beside_decodes_is_as_fast_as_long_steps_allow() -> None:
    meters, scheduler = make_meters((8192, 0.2048)), make()

    def speed() -> float:
        return 1 / meters.prompt_seconds(1, 0, scheduler.batch(0))

    assert speed() == 40_000
    live = add(scheduler, 1, 8)
    for _ in range(2):
        step(scheduler)
    assert live in scheduler.lives.running
    assert scheduler.batch(0) == Batch(1, 9, 0)
    add(scheduler, 2, 8)
    scheduler.schedule()
    assert (len(scheduler.lives.running), scheduler.batch(0).rows) == (2, 1), (
        "the second one has no token yet"
    )
    assert speed() == 40_000, "nothing is known yet"
    for _ in range(50):
        meters.record(1, 0, 0.010, context=9)
        meters.record(1, 100, 0.020, 50, context=9)
    assert speed() == pytest.approx(100 / 0.020, rel=0.02)
    scheduler.lives.drop(live)
    assert scheduler.batch(0).rows == 0


def test_few_tokens_of_a_prompt_cost_what_steps_of_their_size_take() -> None:
    """A step reads the weights anyway, so fewer tokens save less than their share."""
    meters, alone = make_meters((8192, 0.2048)), Batch(0, 0, 0)
    assert meters.prompt_seconds(200, 40, alone) == 200 / 40_000, "no step was there yet"
    for _ in range(50):
        meters.record(0, 40, 0.006, 20)
        meters.record(0, 240, 0.014, 120)
        meters.record(0, 8192, 0.2048, 4096)
    assert meters.prompt_seconds(200, 40, alone) == pytest.approx(0.008)
    assert meters.prompt_seconds(8152, 40, alone) == pytest.approx(0.2048 - 0.006)
    assert meters.prompt_seconds(100, 0, alone) == pytest.approx(0.006 + 60 / 200 * 0.008)
    assert meters.prompt_seconds(200, 40, Batch(1, 9, 0)) == pytest.approx(200 / 40_000), "beside decodes"


@pytest.mark.parametrize("handover", [True, False])
def test_a_prompt_that_is_handed_over_after_this_step_does_not_decode(handover: bool) -> None:
    """A prefill worker that reports a decode is thought slow, and gets no prompts until its next report."""
    scheduler = make()
    live = add(scheduler, 1, 8, handover=handover)
    scheduler.launched(scheduler.schedule())
    live.promise(0)
    assert (live.num_left, len(scheduler.lives.running)) == (1, 1)
    assert scheduler.batch(0).rows == (not handover)


def test_what_is_cached_of_a_prompt_that_waits_needs_no_chunks() -> None:
    """Else steps would be long for the histories of agents."""
    scheduler = make(seqs=1, num_blocks=64, budget=64, prefix_cache=True)
    scheduler.lives.drop(add(scheduler, 1, 40))
    first = add(scheduler, 2, 40)
    step(scheduler)
    scheduler.lives.drop(first)
    known = scheduler.lives.pool.cached * scheduler.lives.pool.block_size
    assert 32 <= known <= 40
    add(scheduler, 3, 60)
    assert [left for left, _ in scheduler.prompts()] == [60 - known]


def test_a_worker_that_idles_forgets_what_made_its_steps_slow() -> None:
    """It looks slow to routers, so no step comes from which it could learn that it is over."""
    model = StepModel((1, 8), (0.004, 0.005), 1e-8, (16, 8192), (0.005, 0.2), 0.0, 0.9)
    meters, batch = make_meters(measured=model), Batch(1, 1000, 0)
    limit = meters.chunk_limit
    before = limit.long_step(batch)
    for _ in range(60):
        meters.record(1, 16, 0.05, 16.0, 1000.0)
    slow = limit.long_step(batch)
    assert slow.tokens < before.tokens / 4
    for idle in (0.0, 5 * meters.step_seconds):
        meters.rest(idle)
        assert limit.long_step(batch) == slow, "it only waits for the next step"
    meters.rest(11 * meters.step_seconds)
    assert limit.long_step(batch) == before


def test_an_engine_rests_when_no_step_is_under_way(
    tiny_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, rests = tiny_engine(num_blocks=16), list[float]()
    monkeypatch.setattr(engine.meters, "rest", rests.append)
    engine.stats()
    assert rests[0] > 0
    engine.loop.under_way.append(cast(Any, None))
    assert engine.loop.idle_seconds == 0.0
