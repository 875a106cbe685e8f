"""The chunk limit learns from steps with known costs."""

import math
from typing import Any

import pytest

from baton.engine import MixedStep
from baton.engine.core.meters import LATE_STEPS, LEAST, LONG, ChunkLimit
from tests.engine.conftest import MakeEngine

STEP, TOKEN = 0.010, 0.0001
LATE = [(500, 0.0)]
"""A prompt that is late already: it takes as many tokens as a long step has room for."""


def fed(limit: ChunkLimit, steps: int = 60, step: float = STEP, token: float = TOKEN) -> ChunkLimit:
    """Records steps: a decode takes `step` seconds, each prompt token adds `token`. Chunks are those of late
    prompts."""
    for _ in range(steps):
        limit.record(True, 0, step)
        tokens = limit.tokens(LATE, 0.0)
        limit.record(True, tokens, step + tokens * token)
    return limit


def test_nothing_is_known_before_the_first_decode() -> None:
    limit = ChunkLimit(0.02, 2048)
    limit.record(False, 500, 0.05)
    assert limit.mixed_step(limit.long_seconds) == MixedStep(0, 0.0)
    assert limit.tokens(LATE, 0.0) == limit.short_tokens == LEAST


def test_the_first_prompt_is_a_small_trial() -> None:
    limit = ChunkLimit(None, 2048)
    limit.record(True, 0, STEP)
    assert limit.tokens(LATE, 0.0) == limit.short_tokens == LEAST


def test_until_a_prompt_was_computed_a_token_costs_what_it_did_at_the_start() -> None:
    """Otherwise routers expect small chunks, and may send no prompt from which the worker could learn."""
    limit = ChunkLimit(None, 8192, 3.5)
    limit.record_alone(8192, 8192 * 2 * TOKEN)
    limit.record_alone(100, 1.0)  # it reads the weights for a few tokens
    limit.record(True, 0, STEP)
    found = limit.mixed_step(limit.long_seconds)
    assert (found.tokens, found.seconds) == (125, pytest.approx(3.5 * STEP))
    limit.record(True, 125, STEP + 125 * TOKEN)
    assert limit.mixed_step(limit.long_seconds).tokens == pytest.approx(250, abs=1)


@pytest.mark.parametrize(
    ("target", "short", "long"), [(0.012, LEAST, 20), (0.030, 73, 200), (None, 87, 10 * (LONG - 1) * 10)]
)
def test_steps_stay_within_their_bounds(target: float | None, short: int, long: int) -> None:
    limit = fed(ChunkLimit(target, 2048))
    assert limit.short_tokens == pytest.approx(short, abs=1)
    assert limit.tokens(LATE, 0.0) == pytest.approx(long, abs=1)
    assert limit.short_seconds == pytest.approx(math.sqrt(STEP * (target or LONG * STEP)))
    assert limit.mixed_step(limit.long_seconds).seconds <= (target or LONG * STEP) + 1e-9


@pytest.mark.parametrize("slower", [2, 8])
@pytest.mark.parametrize("prompts", [LATE, [(500, 0.15)], [(500, 0.3), (2000, 0.9)], [(500, -9.0)]])
def test_a_slower_worker_has_steps_of_the_same_shape(slower: float, prompts: list[tuple[int, float]]) -> None:
    """It computes as many tokens in each step if all targets are as many times longer."""
    scaled = [(tokens, slower * due) for tokens, due in prompts]
    limit = fed(ChunkLimit(None, 2048))
    other = fed(ChunkLimit(None, 2048), step=slower * STEP, token=slower * TOKEN)
    assert other.tokens(scaled, 0.0) == pytest.approx(limit.tokens(prompts, 0.0), abs=1)


@pytest.mark.parametrize("steps", [1.5, 6.0])
def test_without_a_target_in_seconds_a_long_step_takes_so_many_fastest_steps(steps: float) -> None:
    limit = fed(ChunkLimit(None, 2048, steps))
    assert limit.long_seconds == pytest.approx(steps * STEP)
    assert limit.tokens(LATE, 0.0) == pytest.approx(100 * (steps - 1), abs=1)
    assert fed(ChunkLimit(0.030, 2048, steps)).long_seconds == 0.030, "a target in seconds wins"


def test_the_engine_passes_its_targets_on(tiny_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[float | None, int, float]] = []

    def limit(*given: Any) -> ChunkLimit:
        made.append(given)
        return ChunkLimit(*given)

    monkeypatch.setattr("baton.engine.engine.ChunkLimit", limit)
    tiny_engine(device="cpu", max_num_batched_tokens=64, ttit_target_steps=6.0)
    tiny_engine(device="cpu", max_num_batched_tokens=128, ttit_target=0.02)
    assert made == [(None, 64, 6.0), (0.02, 128, LONG)]


def test_a_prompt_takes_only_what_it_needs_to_be_in_time() -> None:
    """500 tokens take 50 ms beside the decodes. In 300 ms there is time for 22 steps that decode."""
    limit = fed(ChunkLimit(None, 2048))
    short = limit.short_seconds
    assert limit.tokens([], 0.0) == limit.tokens([(500, math.inf)], 0.0) == limit.short_tokens
    assert limit.tokens([(500, 5.3)], 5.0) == limit.short_tokens, "short steps suffice"
    for seconds in (0.1, 0.08):
        found = limit.tokens([(500, 5.0 + seconds + short)], 5.0)
        assert found == pytest.approx(500 * STEP / (seconds - 500 * TOKEN), abs=2)
    assert limit.tokens([(500, 5.06)], 5.0) == limit.tokens([(500, 4.95)], 5.0) == limit.tokens(LATE, 0.0)


def test_steps_are_longer_while_a_prompt_would_be_late_by_far_in_spite_of_long_steps() -> None:
    """A long step of 35 ms has 250 tokens, so the second prompt would be computed after 140 ms."""
    limit, prompt = fed(ChunkLimit(None, 2048)), (500, 9.0)
    due = 5.14 - LATE_STEPS * LONG * STEP
    in_time, late = ([prompt, (500, due + by), prompt] for by in (0.01, -0.01))
    assert limit.tokens(in_time, 5.0) == pytest.approx(250, abs=1)
    assert limit.tokens(late, 5.0) == pytest.approx(250 + 87, abs=1), "as many more as a short step has"
    assert limit.tokens(in_time, 5.0, joins_at=5.0) == limit.short_tokens
    assert limit.tokens(late, 5.0, joins_at=5.0) == pytest.approx(2 * 87, abs=1), "what joins waits longer"
    assert fed(ChunkLimit(0.030, 2048)).tokens(late, 5.0) == pytest.approx(200, abs=1), "in seconds: kept"


def test_a_prompt_behind_others_is_in_time_too() -> None:
    limit = fed(ChunkLimit(None, 2048))
    due = 0.2 + limit.short_seconds
    alone = limit.tokens([(500, due)], 0.0)
    assert limit.tokens([(500, math.inf), (500, due)], 0.0) == pytest.approx(1000 * STEP / 0.1, abs=2)
    assert limit.tokens([(500, due), (500, math.inf)], 0.0) == alone


def test_a_prompt_that_is_in_time_finishes_in_time() -> None:
    """Whichever step is its last one."""
    for due in (0.14, 0.145, 0.15, 0.155, 0.16):
        limit, now, left = fed(ChunkLimit(None, 2048)), 0.0, 700
        while left:
            chunk = min(left, limit.tokens([(left, due)], now))
            left, now = left - chunk, now + STEP + chunk * TOKEN
        assert due - LONG * STEP <= now <= due


def test_a_step_ends_a_short_step_after_a_request_joins_at_most() -> None:
    limit = fed(ChunkLimit(0.030, 2048))
    assert limit.tokens(LATE, 1.0) == pytest.approx(200, abs=1)
    assert limit.tokens(LATE, 1.0, joins_at=1.004) == pytest.approx(113, abs=1), "4 ms more than a short step"
    assert limit.tokens(LATE, 1.0, joins_at=1.5) == pytest.approx(200, abs=1)
    assert limit.tokens(LATE, 1.0, joins_at=1.0) == limit.short_tokens
    assert limit.tokens(LATE, 1.0, joins_at=0.5) == limit.short_tokens, "later than expected"


def test_the_limit_stays_within_the_token_budget() -> None:
    limit = fed(ChunkLimit(9.0, 300))
    assert limit.tokens(LATE, 0.0) == 300
    assert limit.mixed_step(9.0).seconds == pytest.approx(STEP + 300 * TOKEN), "less than the target"


def test_the_limit_adapts_to_changed_costs() -> None:
    limit = fed(ChunkLimit(0.030, 2048))
    assert fed(limit, 99, step=0.020).tokens(LATE, 0.0) == pytest.approx(100, rel=0.1)
    assert fed(limit, 99, step=0.020, token=0.0004).tokens(LATE, 0.0) == pytest.approx(25, rel=0.1)


def test_a_pause_of_the_process_makes_no_longer_steps() -> None:
    """It falls into a step that only decodes. Meanwhile prompts are late."""
    limit, queue = fed(ChunkLimit(None, 2048)), [(5000, 0.0)]
    before = limit.tokens(queue, 2.0)
    limit.record(True, 0, 1.0)
    for _ in range(40):
        tokens = limit.tokens(queue, 2.0)
        assert tokens <= before
        limit.record(True, tokens, STEP + tokens * TOKEN)
    for _ in range(40):
        limit.record(True, 0, 10 * STEP)
    assert limit.step_seconds == pytest.approx(10 * STEP, rel=0.1), "no pause: decoding costs more now"
    first = ChunkLimit(None, 2048)
    first.record(True, 0, 1.0)
    first.record(True, 0, STEP)
    assert first.step_seconds == STEP


def test_if_decodes_alone_exceed_the_target_prefills_get_the_least_chunk() -> None:
    limit = fed(ChunkLimit(0.009, 2048))
    assert limit.mixed_step(limit.long_seconds).tokens == 0
    assert limit.tokens(LATE, 0.0) == limit.short_tokens == LEAST


def test_many_decodes_make_long_steps_longer_than_a_few() -> None:
    """Else prompts would have only the least chunk while they are late."""
    limit = fed(ChunkLimit(None, 2048))
    fed(limit, 200, step=2 * STEP)
    assert limit.long_seconds == pytest.approx(2 * STEP * math.sqrt(LONG))
    assert limit.short_seconds == pytest.approx(2 * STEP)


def test_the_limit_uses_the_whole_target_though_the_first_tokens_are_cheap() -> None:
    """As on a GPU: rows are padded, and a decode step reads all weights anyway."""
    limit = ChunkLimit(0.008, 2048)
    chunks = []
    for _ in range(60):
        limit.record(True, 0, 0.0055)
        tokens = limit.tokens(LATE, 0.0)
        padded = -(-tokens // 16) * 16
        limit.record(True, tokens, 0.0055 + max(0.0001, (padded - 32) * 27e-6))
        chunks.append(tokens)
    assert chunks[-1] == pytest.approx(32 + 2500 / 27, abs=17)
    assert max(chunks[20:]) - min(chunks[20:]) <= 32


def test_the_limit_at_most_doubles_the_largest_recent_chunk() -> None:
    limit = ChunkLimit(0.015, 8192)
    limit.record(True, 0, STEP)
    limit.record(True, 64, STEP)
    assert limit.tokens(LATE, 0.0) == 128
    limit.record(True, 3, STEP)
    tokens = limit.tokens(LATE, 0.0)
    assert tokens == pytest.approx(128, rel=0.11), "a short last chunk does not lower the limit"


def test_steps_that_do_not_decode_teach_nothing() -> None:
    """Such a step may be faster than decoding many long contexts, as if prompt tokens were free."""
    limit = fed(ChunkLimit(0.015, 2048))
    learned = limit.tokens(LATE, 0.0)
    for _ in range(60):
        limit.record(False, 2000, STEP / 2)
    assert limit.tokens(LATE, 0.0) == learned


def test_a_slope_of_zero_is_handled() -> None:
    limit = ChunkLimit(0.009, 2048)
    for tokens, seconds in ((64, 0.050), (8, 0.070)) * 10:
        limit.record(True, 0, 0.005)
        limit.record(True, tokens, seconds)
    assert limit.tokens(LATE, 0.0) == LEAST
    assert limit.mixed_step(limit.long_seconds).tokens == 0
