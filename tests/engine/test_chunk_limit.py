"""The chunk limit learns from steps with known costs."""

import pytest

from engine.core.chunk_limit import FIRST, LEAST, ChunkLimit

STEP, TOKEN = 0.010, 0.0001


def fed(limit: ChunkLimit, steps: int = 60, step: float = STEP, token: float = TOKEN) -> ChunkLimit:
    """Records steps: a decode takes `step` seconds, each prompt token adds `token`. Chunks have the limit's
    size."""
    for _ in range(steps):
        limit.record(True, 0, step)
        limit.record(True, limit.tokens, step + limit.tokens * token)
    return limit


def test_nothing_is_known_before_the_first_decode() -> None:
    limit = ChunkLimit(0.02, 2048)
    limit.record(False, 500, 0.05)
    assert (limit.fitting, limit.tokens) == (0, LEAST)


def test_the_first_prompt_is_a_small_trial() -> None:
    limit = ChunkLimit(None, 2048)
    limit.record(True, 0, STEP)
    assert limit.fitting == FIRST


@pytest.mark.parametrize(("target", "tokens"), [(0.015, 50), (0.030, 200), (None, 50)])
def test_a_step_stays_within_its_target(target: float | None, tokens: int) -> None:
    limit = fed(ChunkLimit(target, 2048))
    assert limit.fitting == pytest.approx(tokens, abs=1)
    assert limit.seconds == pytest.approx(STEP + limit.fitting * TOKEN)
    assert limit.seconds <= (target or 1.5 * STEP) + 1e-9


def test_the_limit_stays_within_the_token_budget() -> None:
    limit = fed(ChunkLimit(9.0, 300))
    assert limit.fitting == 300
    assert limit.seconds == pytest.approx(STEP + 300 * TOKEN), "less than the target"


def test_the_limit_adapts_to_changed_costs() -> None:
    limit = fed(ChunkLimit(0.030, 2048))
    assert fed(limit, 99, step=0.020).fitting == pytest.approx(100, rel=0.1)
    assert fed(limit, 99, step=0.020, token=0.0004).fitting == pytest.approx(25, rel=0.1)


def test_if_decodes_alone_exceed_the_target_prefills_get_the_least_chunk() -> None:
    limit = fed(ChunkLimit(0.009, 2048))
    assert (limit.fitting, limit.tokens) == (0, LEAST)


def test_the_limit_uses_the_whole_target_though_the_first_tokens_are_cheap() -> None:
    """As on a GPU: rows are padded, and a decode step reads all weights anyway."""
    limit = ChunkLimit(0.008, 2048)
    chunks = []
    for _ in range(60):
        limit.record(True, 0, 0.0055)
        padded = -(-limit.tokens // 16) * 16
        limit.record(True, limit.tokens, 0.0055 + max(0.0001, (padded - 32) * 27e-6))
        chunks.append(limit.tokens)
    assert chunks[-1] == pytest.approx(32 + 2500 / 27, abs=17)
    assert max(chunks[20:]) - min(chunks[20:]) <= 32


def test_the_limit_at_most_doubles_the_largest_recent_chunk() -> None:
    limit = ChunkLimit(0.015, 8192)
    limit.record(True, 0, STEP)
    limit.record(True, FIRST, STEP)
    assert limit.fitting == 2 * FIRST
    limit.record(True, 3, STEP)
    assert limit.fitting == pytest.approx(2 * FIRST, rel=0.11), "a short last chunk does not lower the limit"


def test_steps_that_do_not_decode_teach_nothing() -> None:
    """Such a step may be faster than decoding many long contexts, as if prompt tokens were free."""
    limit = fed(ChunkLimit(0.015, 2048))
    learned = limit.fitting
    for _ in range(60):
        limit.record(False, 2000, STEP / 2)
    assert limit.fitting == learned


def test_a_slope_of_zero_is_handled() -> None:
    limit = ChunkLimit(0.009, 2048)
    for tokens, seconds in ((64, 0.050), (8, 0.070)) * 10:
        limit.record(True, 0, 0.005)
        limit.record(True, tokens, seconds)
    assert (limit.fitting, limit.tokens) == (0, LEAST)
    assert limit.seconds == pytest.approx(0.005)
