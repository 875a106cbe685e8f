"""How many prompt tokens fit beside a decode, learnt from steps whose cost is known."""

import pytest

from engine.chunk_limit import FIRST, LEAST, ChunkLimit

STEP, TOKEN = 0.010, 0.0001


def fed(limit: ChunkLimit, steps: int = 30, step: float = STEP, token: float = TOKEN) -> ChunkLimit:
    """A decode step takes `step` seconds, each prompt token adds `token`."""
    for _ in range(steps):
        limit.record(4, 0, step)
        limit.record(4, 50, step + 50 * token)
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


def test_where_mixing_alone_takes_too_long_half_of_what_a_chunk_adds_is_work() -> None:
    """As on a GPU where mixed steps are launched kernel by kernel: 10 ms, and 25 µs a token."""
    limit = ChunkLimit(0.008, 2048)
    chunks = []
    for _ in range(40):
        limit.record(4, 0, 0.005)
        limit.record(4, limit.tokens, 0.005 + 0.010 + limit.tokens * 25e-6)
        chunks.append(limit.tokens)
    assert limit.fitting == 0, "nobody is sent here for that"
    assert chunks[-1] == pytest.approx(400, rel=0.05)


def test_what_mixing_costs_is_taken_off_what_fits() -> None:
    limit = ChunkLimit(0.030, 2048)
    for tokens in (50, 200, 80, 120) * 10:
        limit.record(4, 0, STEP)
        limit.record(4, tokens, STEP + 0.005 + tokens * TOKEN)
    assert limit.fitting == pytest.approx(150, abs=1)
    assert limit.seconds == pytest.approx(0.030, abs=TOKEN)


def test_larger_chunks_that_took_less_time_are_no_reason_to_fail() -> None:
    limit = ChunkLimit(0.009, 2048)
    for tokens, seconds in ((64, 0.050), (8, 0.070)) * 10:
        limit.record(4, 0, 0.005)
        limit.record(4, tokens, seconds)
    assert (limit.fitting, limit.tokens) == (0, LEAST)
    assert limit.seconds == pytest.approx(0.060, rel=0.1)
