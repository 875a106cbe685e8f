"""The chunk limit with known costs of steps, and with costs that it must learn."""

import math
from typing import Any

import pytest

from baton.engine import MixedStep
from baton.engine.core.meters import LEAST, LONG, Batch, ChunkLimit
from baton.simulator.step_worker import measured as measured_h200
from baton.simulator.steps import H200_8B
from baton.steps.learned_steps import LearnedSteps, row_sizes, token_sizes
from baton.steps.step_model import StepModel
from tests.engine.conftest import MakeEngine

STEP, TOKEN = 0.010, 0.0001
COSTLY = 1e9
"""Gaps that cost so much leave prompts as much time as decodes take, or the gap target."""
ONE = Batch(1, 0, 0, COSTLY)
Prompts = list[tuple[int, float]]
LATE: Prompts = [(500, 0.0)]
"""A prompt that is late already: it takes as many tokens as a long step has room for."""
SIZES = row_sizes(64), token_sizes(8192)


def linear(step: float = STEP, token: float = TOKEN) -> StepModel:
    """A decode takes `step` seconds, and each row beside it adds `token`."""
    sizes = (1, 16, 8192)
    prompts = tuple(step + (size - 1) * token for size in sizes)
    return StepModel((1, 2, 64), (step, step, step), 0.0, sizes, prompts, 0.0, 1.0)


def measured(
    target: float | None, most: int = 2048, steps: float = LONG, model: StepModel | None = None
) -> ChunkLimit:
    return ChunkLimit(LearnedSteps(*SIZES, model or linear()), target, most, steps)


def learning(target: float | None, most: int = 2048) -> ChunkLimit:
    return ChunkLimit(LearnedSteps(*SIZES), target, most)


def record(limit: ChunkLimit, decodes: int, prompt_tokens: int, seconds: float) -> None:
    limit.steps.record(decodes, 0.0, prompt_tokens, 0.0, seconds)
    if not prompt_tokens:
        limit.decoded(seconds)


def fed(limit: ChunkLimit, steps: int = 60, step: float = STEP, token: float = TOKEN) -> ChunkLimit:
    """Records steps with these costs. Chunks are those of late prompts."""
    for _ in range(steps):
        record(limit, 1, 0, step)
        tokens = limit.tokens(ONE, LATE, 0.0)
        record(limit, 1, tokens, step + tokens * token)
    return limit


def short_seconds(limit: ChunkLimit) -> float:
    return math.sqrt(STEP * limit.gap_target)


def test_nothing_is_known_before_the_first_decode() -> None:
    limit = learning(0.02)
    assert limit.long_step(ONE) == MixedStep(0, 0.0)
    record(limit, 0, 500, 0.05)
    assert limit.long_step(ONE).tokens == 0
    assert limit.tokens(ONE, LATE, 0.0) == limit.tokens(ONE, [], 0.0) == LEAST


def test_a_measured_worker_has_full_chunks_from_the_first_step_on() -> None:
    """Otherwise routers expect small chunks, and may send no prompt from which the worker could learn."""
    found = measured(None, 8192, 3.5).long_step(ONE)
    assert (found.tokens, found.seconds) == (pytest.approx(250, abs=1), pytest.approx(3.5 * STEP, rel=0.01))


@pytest.mark.parametrize(
    ("target", "short", "long"), [(0.012, LEAST, 20), (0.030, 73, 200), (None, 87, 10 * (LONG - 1) * 10)]
)
def test_steps_stay_within_their_bounds(target: float | None, short: int, long: int) -> None:
    for limit in (measured(target), fed(learning(target))):
        assert limit.tokens(ONE, [], 0.0) == pytest.approx(short, abs=2)
        assert limit.tokens(ONE, LATE, 0.0) == pytest.approx(long, rel=0.02, abs=1)
        assert limit.long_step(ONE).seconds <= (target or LONG * STEP) + 1e-9


def test_the_decodes_and_the_position_of_a_prompt_take_their_time() -> None:
    """16 decodes that read 300,000 positions leave less time, and a token at 20,000 costs more."""
    batches = (1, 1, 0, COSTLY), (16, 3e5, 0, COSTLY), (16, 3e5, 2e4, COSTLY)
    model = StepModel((1, 16), (0.005, 0.007), 2e-8, (16, 8192), (0.006, 0.006 + 8192 * 2.4e-5), 1e-9, 0.8)
    limit = measured(0.030, 8192, model=model)
    chunks = [limit.tokens(Batch(*batch), LATE, 0.0) for batch in batches]
    assert chunks[0] > 1.2 * chunks[1] > 1.5 * chunks[2] > 0
    for batch in batches:
        tokens = limit.tokens(Batch(*batch), LATE, 0.0)
        assert model.step(*batch[:2], tokens, batch[2]) == pytest.approx(0.030, rel=0.01)
    assert limit.tokens(Batch(0, 0, 0), LATE, 0.0) == pytest.approx(chunks[0], abs=1), "one may join"


def test_prompts_share_the_time_of_a_step_with_images() -> None:
    """As their work is: 500 tokens take 0.06 s, and leave a third of the time to images of 0.03 s."""
    limit = measured(0.030)
    alone, beside = limit.tokens(ONE, LATE, 0.0), limit.tokens(ONE, LATE, 0.0, encoding=0.03)
    assert (alone, beside) == (pytest.approx(200, abs=1), pytest.approx(200 * 2 / 3, abs=1))
    assert limit.tokens(ONE, LATE, 0.0, encoding=1e6) == LEAST


@pytest.mark.parametrize("slower", [2, 8])
@pytest.mark.parametrize("prompts", [LATE, [(500, 0.15)], [(500, 0.3), (2000, 0.9)], [(500, -9.0)]])
def test_a_slower_worker_has_steps_of_the_same_shape(slower: float, prompts: Prompts) -> None:
    """It computes as many tokens in each step if all targets are as many times longer."""
    scaled = [(tokens, slower * due) for tokens, due in prompts]
    limit, other = measured(None), measured(None, model=linear(slower * STEP, slower * TOKEN))
    assert other.tokens(ONE, scaled, 0.0) == pytest.approx(limit.tokens(ONE, prompts, 0.0), abs=1)


@pytest.mark.parametrize("steps", [1.5, 6.0])
def test_without_a_target_in_seconds_a_long_step_takes_so_many_fastest_steps(steps: float) -> None:
    limit = measured(None, 2048, steps)
    assert limit.gap_target == pytest.approx(steps * STEP)
    assert limit.tokens(ONE, LATE, 0.0) == pytest.approx(100 * (steps - 1), abs=1)
    assert measured(0.030, 2048, steps).gap_target == 0.030, "a target in seconds wins"


def test_the_engine_passes_its_targets_on(tiny_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[float | None, int, float]] = []

    def limit(steps: LearnedSteps, *given: Any) -> ChunkLimit:
        made.append(given)
        return ChunkLimit(steps, *given)

    monkeypatch.setattr("baton.engine.engine.ChunkLimit", limit)
    tiny_engine(device="cpu", max_num_batched_tokens=64, itl_target_steps=6.0)
    tiny_engine(device="cpu", max_num_batched_tokens=128, itl_target=0.02)
    assert made == [(None, 64, 6.0), (0.02, 128, LONG)]


def test_a_prompt_takes_only_what_it_needs_to_be_in_time() -> None:
    """500 tokens take 50 ms beside the decodes. In 300 ms there is time for 22 steps that decode."""
    limit = measured(None)
    short, tokens = short_seconds(limit), limit.tokens(ONE, [], 0.0)
    assert limit.tokens(ONE, [(500, math.inf)], 0.0) == tokens == pytest.approx((short - STEP) / TOKEN, abs=1)
    assert limit.tokens(ONE, [(500, 5.3)], 5.0) == tokens, "short steps suffice"
    for seconds in (0.1, 0.08):
        found = limit.tokens(ONE, [(500, 5.0 + seconds + short)], 5.0)
        assert found == pytest.approx(500 * STEP / (seconds - 500 * TOKEN), abs=2)
    for due in (5.06, 4.95):
        assert limit.tokens(ONE, [(500, due)], 5.0) == limit.tokens(ONE, LATE, 0.0)


def test_no_step_is_longer_than_a_long_one_however_late_prompts_are() -> None:
    for target in (None, 0.030):
        limit = measured(target)
        for due in (-9e9, *(5.0 + late / 1000 for late in range(200))):  # too late, almost, and in time
            for queue in ([(500, due)], [(10**6, due)], [(500, due)] * 50):
                assert STEP + limit.tokens(ONE, queue, 5.0) * TOKEN <= limit.gap_target + 1e-9


def test_where_gaps_cost_nothing_a_step_ends_the_first_prompt_if_two_would_decode_twice() -> None:
    """A long step has room for 250 tokens, and the time of the decodes for 100 more."""
    limit, only = measured(None), Batch(1, 0, 0, 0.0)
    for due in (0.0, math.inf):  # a prompt in time costs no gap, either
        chunks = [limit.tokens(only, [(left, due), (900, 0.0)], 0.0) for left in (100, 340, 360)]
        assert chunks == [pytest.approx(250, abs=1), 340, pytest.approx(250, abs=1)]
        assert limit.tokens(Batch(1, 0, 0, 1e-9), [(340, due), (900, 0.0)], 0.0) == pytest.approx(250, abs=1)
    assert limit.tokens(only, [(340, math.inf)], 0.0) == 340
    assert limit.tokens(only, [(340, 0.0)], 0.0, joins_at=0.0) == limit.tokens(only, [], 0.0)
    assert limit.tokens(Batch(0, 0, 0), [(340, 0.0)], 0.0) == pytest.approx(250, abs=1), "one may join"


def test_a_prompt_behind_others_is_in_time_too() -> None:
    limit = measured(None)
    due = 0.2 + short_seconds(limit)
    alone = limit.tokens(ONE, [(500, due)], 0.0)
    found = limit.tokens(ONE, [(500, math.inf), (500, due)], 0.0)
    assert found == pytest.approx(1000 * STEP / 0.1, abs=3)
    assert limit.tokens(ONE, [(500, due), (500, math.inf)], 0.0) == alone


def test_a_prompt_that_is_in_time_finishes_in_time() -> None:
    """Whichever step is its last one."""
    for due in (0.14, 0.145, 0.15, 0.155, 0.16):
        limit, now, left = measured(None), 0.0, 700
        while left:
            chunk = min(left, limit.tokens(ONE, [(left, due)], now))
            left, now = left - chunk, now + STEP + chunk * TOKEN
        assert due - LONG * STEP <= now <= due


def test_a_step_ends_a_short_step_after_a_request_joins_at_most() -> None:
    limit = measured(0.030)
    short = limit.tokens(ONE, [], 0.0)
    for joins_at, tokens in ((math.inf, 200), (1.004, short + 40), (1.5, 200), (1.0, short), (0.5, short)):
        assert limit.tokens(ONE, LATE, 1.0, joins_at=joins_at) == pytest.approx(tokens, abs=1), joins_at


def test_a_request_that_joins_waits_as_prompts_do_and_its_own_step_is_short() -> None:
    """1.5 and 2 prompts wait for each token of two and three. A short step takes 17.3 ms, a long one 30."""
    limit = measured(0.030)
    for waiting, tokens in ((1, 83), (2, 170), (3, 200)):
        prompts = [(60, 0.0)] * waiting
        assert limit.tokens(ONE, prompts, 1.0, joins_at=1.001) == pytest.approx(tokens, abs=1), waiting
        assert limit.tokens(ONE, prompts, 1.0, joins_at=1.0) == limit.tokens(ONE, [], 0.0)


def begin_again(due: float, *, joins: bool) -> tuple[int, float]:
    """Returns the steps and the seconds of an H200 in which 32 streams of 16,000 tokens get a token again.
    Each has 100 tokens whose KV was lost. `joins`: one more request, of 500 tokens, joins in each step."""
    limit = ChunkLimit(LearnedSteps(*SIZES, measured_h200(H200_8B)), None, 8192)
    left, joined, now, steps = [100] * 32, 0, 0.0, 0
    while left:
        joined += joins
        again = 32 - len(left)
        rows, context = again + joined, 16_000 * again + 500 * joined
        batch = Batch(rows, context, 16_000, 0.13 * rows)
        tokens = limit.tokens(batch, [(each, due) for each in left], now, now if joins else math.inf)
        chunks = []
        while left and tokens:
            chunks.append((min(tokens, left[0]), 16_000))
            tokens, left[0] = tokens - chunks[-1][0], left[0] - chunks[-1][0]
            left = left if left[0] else left[1:]
        now, steps = now + H200_8B.step(rows, context, chunks), steps + 1
    return steps, now


def test_streams_begin_again_in_long_steps_though_a_request_joins_in_each() -> None:
    """As after a takeover. Prompts of new requests would be computed in short steps."""
    (steps, seconds), (alone, _) = begin_again(-math.inf, joins=True), begin_again(-math.inf, joins=False)
    assert steps <= 1.5 * alone
    of_prompts, longer = begin_again(0.0, joins=True)
    assert of_prompts > 4 * steps
    assert longer > 2 * seconds


def test_the_limit_adapts_to_changed_costs() -> None:
    for limit in (measured(0.030), fed(learning(0.030))):
        assert fed(limit, 99, step=0.014).tokens(ONE, LATE, 0.0) == pytest.approx(160, rel=0.1)
        fed(limit, 199, step=0.014, token=0.0004)
        assert limit.tokens(ONE, LATE, 0.0) == pytest.approx(40, rel=0.2)


@pytest.mark.parametrize("limit", [measured(None), fed(learning(None))])
def test_a_pause_of_the_process_makes_no_longer_steps(limit: ChunkLimit) -> None:
    """It falls into a step that only decodes. Meanwhile prompts are late."""
    queue = [(5000, 0.0)]
    before = limit.tokens(ONE, queue, 2.0)
    record(limit, 1, 0, 1.0)
    for _ in range(40):
        tokens = limit.tokens(ONE, queue, 2.0)
        assert tokens <= 1.02 * before
        record(limit, 1, tokens, STEP + tokens * TOKEN)
    for _ in range(100):
        record(limit, 1, 0, 4 * STEP)
    assert limit.decode_seconds(ONE) == pytest.approx(4 * STEP, rel=0.1), "no pause: decoding costs more now"


def test_steps_are_the_longer_the_more_prompts_wait_and_the_less_gaps_cost() -> None:
    """But at most so many times as long as their decodes alone as the target is times the fastest step."""
    sizes = (1, 8192)
    prompts = tuple(STEP + size * TOKEN for size in sizes)
    slow = StepModel((1, 64), (STEP, 4 * STEP), 0.0, sizes, prompts, 0.0, 1.0)
    limit, four = measured(0.030, model=slow), [(500, 0.0)] * 4
    batches = [Batch(60, 0, 0, gap_cost) for gap_cost in (COSTLY, 20.0, 2.0, 1e-9, 0.0)]
    seconds = [slow.step(60, 0, limit.tokens(batch, four, 0.0)) for batch in batches]
    decode = limit.decode_seconds(batches[0])
    assert decode > limit.gap_target
    assert seconds == sorted(seconds)
    assert seconds[1] > slow.step(60, 0, limit.tokens(batches[1], LATE, 0.0))
    assert seconds[0] == pytest.approx(2 * decode, rel=0.02)
    assert seconds[3] == seconds[4] == pytest.approx(3 * decode, rel=0.02)


def test_many_decodes_make_long_steps_longer_than_a_few() -> None:
    """Else prompts would have only the least chunk while they are late."""
    sizes, batch = (1, 8192), Batch(60, 0, 0, COSTLY)
    prompts = tuple(STEP + size * TOKEN for size in sizes)
    limit = measured(None, model=StepModel((1, 64), (STEP, 4 * STEP), 0.0, sizes, prompts, 0.0, 1.0))
    decode = limit.decode_seconds(batch)
    assert decode > limit.gap_target
    assert limit.long_step(batch).seconds == pytest.approx(2 * decode, rel=0.01)


def test_the_limit_uses_the_whole_target_though_the_first_tokens_are_cheap() -> None:
    """As on a GPU: rows are padded, and a decode step reads all weights anyway."""
    limit = learning(0.008)
    chunks = []
    for _ in range(90):
        record(limit, 1, 0, 0.0055)
        tokens = limit.tokens(ONE, LATE, 0.0)
        padded = -(-tokens // 16) * 16
        record(limit, 1, tokens, 0.0055 + max(0.0001, (padded - 32) * 27e-6))
        chunks.append(tokens)
    assert chunks[-1] == pytest.approx(32 + 2500 / 27, abs=17)
    assert max(chunks[40:]) - min(chunks[40:]) <= 32


def test_the_limit_about_doubles_the_largest_chunk_that_was_seen() -> None:
    """What far larger ones cost is a guess."""
    limit = learning(0.015, 8192)
    record(limit, 1, 0, STEP)
    record(limit, 1, 64, STEP)
    assert limit.tokens(ONE, LATE, 0.0) == pytest.approx(128, abs=2)
    record(limit, 1, 3, STEP)
    assert limit.tokens(ONE, LATE, 0.0) == pytest.approx(128, abs=2), "a short last chunk does not lower it"


def test_a_mixture_of_experts_does_not_read_them_all_for_a_few_tokens() -> None:
    """With the gap target as the bound, a step beside one decode would take 16 tokens of a prompt, for which
    it reads half of the experts: a thousand tokens a second in place of thirty thousand."""
    rows, decodes = (1, 8, 32, 256), (0.0029, 0.0063, 0.0133, 0.0285)
    tokens, prompts = (16, 64, 128, 512, 2048, 8192), (0.0087, 0.018, 0.0205, 0.022, 0.044, 0.133)
    model = StepModel(rows, decodes, 0.0, tokens, prompts, 0.0, 1.0)
    limit = measured(None, model=model)
    for count, least in ((1, 400), (8, 600)):
        late = limit.tokens(Batch(count, 0.0, 0.0), [(1000, 0.0)] * 8, 1.0)
        assert late >= least
        longest = max(limit.gap_target, model.decode(count, 0.0) * LONG)
        assert model.step(count, 0.0, late) <= model.fixed(count) + longest
    calm = limit.tokens(Batch(1, 0.0, 0.0), [(1000, 1e9)], 1.0)
    assert LEAST < calm < late
