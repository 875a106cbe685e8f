"""How many prompt tokens fit beside a decode, learnt from steps whose cost is known."""

import pytest

from engine.core.chunk_limit import FIRST, LEAST, ChunkLimit

STEP, TOKEN = 0.010, 0.0001


def fed(limit: ChunkLimit, steps: int = 60, step: float = STEP, token: float = TOKEN) -> ChunkLimit:
    """A decode step takes `step` seconds, each prompt token adds `token`; chunks are as large as they may."""
    for _ in range(steps):
        limit.record(4, 0, step)
        limit.record(4, limit.tokens, step + limit.tokens * token)
    return limit


def test_nothing_is_known_before_the_first_decode() -> None:
    limit = ChunkLimit(0.02, 2048)
    limit.record(0, 500, 0.05)
    assert (limit.fitting, limit.tokens) == (0, LEAST)


def test_the_first_prompt_is_a_try() -> None:
    limit = ChunkLimit(None, 2048)
    limit.record(1, 0, STEP)
    assert limit.fitting == FIRST


@pytest.mark.parametrize(("target", "tokens"), [(0.015, 50), (0.030, 200), (None, 50)])
def test_a_step_stays_within_its_target(target: float | None, tokens: int) -> None:
    limit = fed(ChunkLimit(target, 2048))
    assert limit.fitting == pytest.approx(tokens, abs=1)
    assert limit.seconds == pytest.approx(STEP + limit.fitting * TOKEN)
    assert limit.seconds <= (target or 1.5 * STEP) + 1e-9


def test_no_step_takes_more_than_any_step_may() -> None:
    limit = fed(ChunkLimit(9.0, 300))
    assert limit.fitting == 300
    assert limit.seconds == pytest.approx(STEP + 300 * TOKEN), "what it takes, not what it may"


def test_it_follows_what_changes() -> None:
    limit = fed(ChunkLimit(0.030, 2048))
    assert fed(limit, 99, step=0.020).fitting == pytest.approx(100, rel=0.1)
    assert fed(limit, 99, step=0.020, token=0.0004).fitting == pytest.approx(25, rel=0.1)


def test_where_decodes_alone_take_as_long_nothing_fits_but_what_began_goes_on() -> None:
    limit = fed(ChunkLimit(0.009, 2048))
    assert (limit.fitting, limit.tokens) == (0, LEAST)


def test_it_settles_where_a_step_takes_what_it_may_though_the_first_tokens_are_cheap() -> None:
    """As on a GPU, where rows are padded, and the weights are read for a decode step anyway."""
    limit = ChunkLimit(0.008, 2048)
    chunks = []
    for _ in range(60):
        limit.record(4, 0, 0.0055)
        padded = -(-limit.tokens // 16) * 16
        limit.record(4, limit.tokens, 0.0055 + max(0.0001, (padded - 32) * 27e-6))
        chunks.append(limit.tokens)
    assert chunks[-1] == pytest.approx(32 + 2500 / 27, abs=17)
    assert max(chunks[20:]) - min(chunks[20:]) <= 32


def test_tokens_that_cost_nothing_are_not_taken_for_free() -> None:
    limit = ChunkLimit(0.015, 8192)
    limit.record(4, 0, STEP)
    limit.record(4, FIRST, STEP)
    assert limit.fitting == 2 * FIRST
    limit.record(4, 3, STEP)
    assert limit.fitting == pytest.approx(2 * FIRST, rel=0.11), "the rest of a prompt is no measure"


def test_larger_chunks_that_took_less_time_are_no_reason_to_fail() -> None:
    limit = ChunkLimit(0.009, 2048)
    for tokens, seconds in ((64, 0.050), (8, 0.070)) * 10:
        limit.record(4, 0, 0.005)
        limit.record(4, tokens, seconds)
    assert (limit.fitting, limit.tokens) == (0, LEAST)
    assert limit.seconds == pytest.approx(0.005)
