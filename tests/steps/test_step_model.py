"""The model of a step follows the steps that it is told of."""

import math
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.router.policy.pace import Pace
from baton.simulator.steps import step_seconds
from baton.steps.learned_steps import Correction, LearnedSteps, ObservedSteps, row_sizes, token_sizes
from baton.steps.measured_steps import Step, measure
from baton.steps.step_model import LARGEST_FACTOR, MOST_ROWS, StepModel, long_seconds

ROWS, TOKENS = row_sizes(256), token_sizes(8192)
CONTEXT, POSITION = 3_000, 8_000
MODEL = StepModel((1, 8, 64), (0.004, 0.005, 0.012), 1e-7, (16, 512), (0.005, 0.015), 1e-9, 0.5)


def dense(rows: int, context: float, tokens: int, position: float) -> float:
    return step_seconds(rows, context, [(tokens, int(position))] if tokens else [])


def experts(rows: int, context: float, tokens: int, position: float) -> float:
    """Reads 128 experts as far as rows choose them, 8 each: 0.66 ms a row at first, in the end 0.03."""
    all_rows = rows + tokens
    read = 1 - (1 - 8 / 128) ** all_rows
    attention = 3e-8 * context + 1e-9 * tokens * (position + tokens / 2)
    return 0.0026 + 0.012 * read + max(0.0, all_rows - 64) * 30e-6 + attention


@pytest.mark.parametrize(
    ("size", "seconds"),
    [
        ((1, 0, 0, 0), 0.004),
        ((8, 1000, 0, 0), 0.0051),
        ((36, 0, 0, 0), 0.0085),
        ((120, 0, 0, 0), 0.019),
        ((0, 0, 1, 0), 0.005),
        ((0, 0, 512, 1000), 0.015 + 0.000512),
        ((0, 0, 512, -256), 0.015 - 0.000131072),
        ((8, 1000, 504, 0), (0.005 + 0.0001 + 0.005 + 488 / 496 * 0.01 + 0.015 + 0.0001) / 2),
        ((64, 0, 16, 0), (0.012 + 0.005 + 0.012) / 2),
        ((0, 0, 0, 0), 0.0),
    ],
)
def test_a_step_costs_what_its_parts_do(size: tuple[int, float, int, float], seconds: float) -> None:
    assert MODEL.step(*size) == pytest.approx(seconds)
    assert MODEL.corrected(2, 3).step(*size) == pytest.approx(
        sum(factor * part for factor, part in zip((2, 3), MODEL.parts(*size), strict=True)), rel=0.2
    )


SECONDS = st.floats(0, 10)


@st.composite
def models(draw: st.DrawFn) -> StepModel:
    """Any that a worker may report."""

    def table(most: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
        sizes = draw(st.lists(st.integers(1, most), min_size=1, max_size=5, unique=True).map(sorted))
        count = len(sizes)
        seconds = draw(st.lists(SECONDS, min_size=count, max_size=count).map(sorted))
        return tuple(sizes), tuple(seconds)

    return StepModel(*table(256), draw(SECONDS), *table(8192), draw(SECONDS), draw(st.floats(0, 1)))


@st.composite
def learned(draw: st.DrawFn) -> StepModel:
    """Of steps whose seconds have nothing to do with their sizes, some with several prompts."""
    observed = ObservedSteps(ROWS, TOKENS)
    for _ in range(draw(st.integers(1, 12))):
        rows, tokens = draw(st.integers(0, 256)), draw(st.integers(1, 8192))
        position = draw(st.integers(-tokens, 200_000)) / 2
        observed.add(rows, 1e3 * rows, tokens, position, draw(SECONDS))
    assert observed.model is not None
    return observed.model


@pytest.mark.all
@settings(max_examples=300, deadline=None)
@given(
    models() | learned(), st.integers(0, 300), st.floats(0, 1e6), st.integers(0, 20_000), st.floats(-1e5, 1e5)
)
def test_no_part_of_a_step_costs_less_than_nothing(
    model: StepModel, rows: int, context: float, tokens: int, position: float
) -> None:
    for each in (model, model.corrected(0.3, 7.0)):
        whole, tiny = (
            each.step(rows, context, tokens, 0.0),
            1e-9 * (1 + each.step(rows, context, tokens, 1e5)),
        )
        assert min(each.parts(rows, context, tokens, position)) >= -tiny
        assert each.step(rows, context, tokens, min(0.0, position)) <= whole + tiny, "of several prompts"
        assert Pace(each, position=max(0.0, position)).token >= -tiny
        assert each.prompt_speed(max(0.0, position)) > 0


def test_a_steep_line_through_short_prompts_makes_no_long_ones_free() -> None:
    observed = ObservedSteps(ROWS, TOKENS)
    observed.add(0, 0.0, 8192, 0.0, 0.19)
    for position, seconds in ((0.0, 0.010), (2_000.0, 0.020)):  # the second one waited for a CPU
        observed.add(0, 0.0, 512, position, seconds)
    assert observed.model is not None
    assert observed.model.prompt(8192, -4096) > 0.01, "many short prompts in one step"
    assert Pace(observed.model).token > 1e-6


def test_a_long_prompt_takes_several_steps() -> None:
    assert MODEL.prefill(0) == 0
    assert MODEL.prefill(264, 1_000) == pytest.approx(0.010 + 264 * 1_000e-9)
    assert MODEL.prefill(1_024, 1_000) == pytest.approx(2 * 0.015 + 512 * (1_000 + 1_512) * 1e-9)


@pytest.mark.parametrize("real", [dense, experts])
def test_the_measured_model_predicts_other_steps(real: Step) -> None:
    model = measure(real, ROWS, TOKENS, CONTEXT, POSITION)
    for rows in (0, 1, 5, 20, 48, 100, 200, 256):
        for context in (500, 8_000):
            for tokens in (0, 16, 100, 300, 1000, 8000):
                for position in (0, 16_000) if rows or tokens else ():
                    size = rows, rows * context, tokens, position
                    assert model.step(*size) == pytest.approx(real(*size), rel=0.2), size


@pytest.mark.parametrize("real", [dense, experts])
def test_a_step_never_falls(real: Step) -> None:
    noise = random.Random(1)

    def noisy(rows: int, context: float, tokens: int, position: float) -> float:
        return noise.uniform(0.8, 1.2) * real(rows, context, tokens, position)

    model = measure(noisy, ROWS, TOKENS, CONTEXT, POSITION)
    for sizes in (
        *([(rows, 9_000, tokens, 0) for rows in range(1, 300, 7)] for tokens in (0, 20, 300)),
        [(40, context, 100, 0) for context in range(0, 100_000, 9_999)],
        *([(rows, 9_000, tokens, 500) for tokens in range(1, 9_000, 97)] for rows in (0, 1, 60)),
        [(40, 9_000, 300, position) for position in range(-150, 9_000, 99)],
    ):
        for before, after in pairwise(sizes):
            assert model.step(*before) <= model.step(*after) + 1e-12


@pytest.mark.parametrize("rows", [0, 1, 30, 256])
def test_as_many_prompt_tokens_fit_as_the_time_allows(rows: int) -> None:
    model = measure(dense, ROWS, TOKENS, CONTEXT, POSITION)
    context = 2_000.0 * rows
    for seconds in (0.001, 0.008, 0.015, 0.02, 0.1, 9.0):
        tokens = model.fitting(rows, context, 4_000, seconds)
        assert not tokens or model.step(rows, context, tokens, 4_000) <= seconds + 1e-9
        more = math.ceil(1.02 * tokens) + 1
        assert tokens == TOKENS[-1] or model.step(rows, context, more, 4_000) > seconds


def test_as_many_decodes_fit_as_the_time_allows() -> None:
    model = StepModel((1, 8, 64), (0.004, 0.005, 0.012), 1e-7, (512,), (0.015,), 1e-9, 0.5)
    fitting = [model.fitting_rows(*given) for given in ((0, 0.0039), (0, 0.005), (5_000, 0.0052), (0, 0.02))]
    assert fitting == [0, 8, 2, 128]  # the context of two is 1 ms; beyond the table by its last slope
    assert replace(model, rows=(1,), decode_seconds=(0.0,)).fitting_rows(0, 1.0) == MOST_ROWS - 1
    assert [model.prompt_speed(256), model.prompt_speed(5_256)] == pytest.approx([512 / 0.015, 512 / 0.01756])


def test_a_measurement_keeps_its_budget() -> None:
    spent: list[float] = []

    def step(*size: float) -> float:
        spent.append(dense(int(size[0]), size[1], int(size[2]), size[3]))
        return spent[-1]

    model = measure(step, ROWS, TOKENS, CONTEXT, POSITION, budget=0.2)
    assert sum(spent[4:]) <= 0.2
    assert model.rows == ROWS
    assert model.context_seconds > 0 < model.pair_seconds
    spent.clear()
    model = measure(step, ROWS, TOKENS, CONTEXT, POSITION, budget=0.0)
    assert len(spent) == 4, "the first step twice, and two prompts"
    for tokens in (1, 500, 4_000, 30_000):
        assert model.prefill(tokens) == pytest.approx(dense(0, 0, tokens, 0), rel=0.4), tokens


@pytest.mark.parametrize("slow", [0, 1, 2], ids=["the first", "a decode", "a prompt"])
def test_one_slow_step_does_not_make_all_larger_ones_slow(slow: int) -> None:
    count = iter(range(1000))

    def step(*size: float) -> float:
        seconds = dense(int(size[0]), size[1], int(size[2]), size[3])
        return 1.3 * seconds if next(count) == slow else seconds

    model, same = (measure(each, ROWS, TOKENS, CONTEXT, POSITION) for each in (step, dense))
    for of in (lambda each: each.decode_seconds, lambda each: each.prompt_seconds):
        off = [a / b - 1 for a, b in zip(of(model), of(same), strict=True)]
        assert max(off) < 0.2


@pytest.mark.parametrize(
    ("size", "same"),
    [((4, 100, 0, 0), (0, 0, 4, 0)), ((0, 0, 100, 0), (100, 0, 0, 0)), ((4, 100, 20, 0), (24, 0, 0, 0))],
)
def test_the_first_step_gives_a_model(
    size: tuple[int, float, int, float], same: tuple[int, float, int, float]
) -> None:
    """Until there are others, a decode costs as much as a prompt token."""
    observed = ObservedSteps(ROWS, TOKENS)
    assert observed.model is None
    observed.add(*size, 0.02)
    model = observed.model
    assert model is not None
    assert model.step(*size) == pytest.approx(model.step(*same)) == pytest.approx(0.02)


def test_a_worker_with_long_prompts_alone_expects_less_of_short_ones() -> None:
    observed = ObservedSteps(ROWS, TOKENS)
    observed.add(8, 800, 0, 0, dense(8, 800, 0, 0))
    observed.add(0, 0, 4_000, 0, dense(0, 0, 4_000, 0))
    model = observed.model
    assert model is not None
    for tokens in (1, 16, 300, 2_000):
        assert model.prompt(tokens) == pytest.approx(dense(0, 0, tokens, 0), rel=0.4)


@pytest.mark.parametrize("real", [dense, experts])
def test_a_worker_that_always_decodes_learns_of_prompts_from_mixed_steps(real: Step) -> None:
    observed, random_ = ObservedSteps(ROWS, TOKENS), random.Random(2)
    sizes = [size for size in (traffic(random_) for _ in range(3_000)) if size[0]]
    for size in sizes[:-300]:
        observed.add(*size, real(*size))
    model = observed.model
    assert model is not None
    errors = sorted(abs(model.step(*size) / real(*size) - 1) for size in sizes[-300:])
    assert errors[270] < 0.3, errors[270]
    assert errors[150] < 0.1, errors[150]


def traffic(random_: random.Random) -> tuple[int, float, int, float]:
    rows = random_.choice((0, random_.randint(1, 200)))
    tokens = random_.choice((0, random_.randint(16, 2_000))) if rows else random_.randint(16, 8_000)
    return rows, rows * random_.uniform(500, 6_000), tokens, random_.uniform(0, 10_000) if tokens else 0.0


@pytest.mark.parametrize("real", [dense, experts])
def test_a_model_is_learned_from_the_steps_of_real_traffic(real: Step) -> None:
    observed, random_ = ObservedSteps(ROWS, TOKENS), random.Random(2)
    for number in range(600):
        size = traffic(random_)
        observed.add(*size, real(*size) * (100 if number % 50 == 49 else 1))
    model = observed.model
    assert model is not None
    errors = sorted(
        abs(model.step(*size) / real(*size) - 1) for size in (traffic(random_) for _ in range(300))
    )
    assert errors[270] < 0.25, errors[270]
    assert errors[150] < 0.1, errors[150]


def corrected(
    real: Callable[[int], Step], sizes: Callable[[random.Random], tuple[int, float, int, float]] = traffic
) -> Correction:
    """After 500 steps. The real costs may change with each."""
    correction, random_ = Correction(measure(dense, ROWS, TOKENS, CONTEXT, POSITION)), random.Random(3)
    for number in range(500):
        size = sizes(random_)
        correction.record(*size, real(number)(*size))
    return correction


@cache
def slower(decode: float, prompt: float) -> Step:
    model = measure(dense, ROWS, TOKENS, CONTEXT, POSITION).corrected(decode, prompt)
    return model.step


@pytest.mark.parametrize("factors", [(1, 1), (2, 2), (0.5, 0.5), (1, 2), (2, 1)])
def test_the_factors_follow_a_worker_that_is_slower(factors: tuple[float, float]) -> None:
    found = corrected(lambda _: slower(*factors))
    assert (found.decode, found.prompt) == pytest.approx(factors, rel=0.1)


def test_a_worker_that_is_slow_for_a_while_is_as_fast_as_before_after_it() -> None:
    slow, fast = slower(2, 2), slower(1, 1)
    found = corrected(lambda number: slow if number < 200 else fast)
    assert (found.decode, found.prompt) == pytest.approx((1, 1), rel=0.1)


def test_pauses_of_the_process_hardly_count() -> None:
    found = corrected(lambda number: slower(1_000, 1_000) if number % 100 == 99 else slower(1, 1))
    assert (found.decode, found.prompt) == pytest.approx((1, 1), abs=0.1)


def test_steps_that_are_all_alike_do_not_tell_the_factors_apart() -> None:
    """Mixed steps of one size take longer: both parts may. They are predicted, and no factor runs away."""
    size = 30, 60_000.0, 200, 4_000.0
    found = corrected(lambda _: slower(1, 2), lambda _: size)
    assert found.corrected.step(*size) == pytest.approx(slower(1, 2)(*size), rel=0.01)
    assert 1 < found.decode < found.prompt < 2


def test_prompts_say_nothing_of_decodes() -> None:
    found = corrected(lambda _: slower(3, 3), lambda random_: (0, 0.0, random_.randint(16, 8_000), 0.0))
    assert (found.decode, found.prompt) == (1.0, pytest.approx(3, rel=0.01))


@pytest.mark.parametrize("seconds", [0.0, 1e9, math.inf])
def test_factors_are_bounded(seconds: float) -> None:
    found = corrected(lambda _: lambda *_: seconds)
    assert 1 / LARGEST_FACTOR <= found.decode <= LARGEST_FACTOR
    assert 1 / LARGEST_FACTOR <= found.prompt <= LARGEST_FACTOR
    nothing = Correction(replace(MODEL, decode_seconds=(0.0,) * 3, context_seconds=0.0))
    nothing.record(1, 0, 0, 0, seconds)
    assert nothing.decode == 1


def test_sizes_that_were_not_measured_are_learned() -> None:
    """As on a CPU, which measures a few steps only. The factors do not follow each change of the size."""
    measured = measure(experts, (1,), (16,), CONTEXT, POSITION)
    learned, random_ = LearnedSteps(ROWS, TOKENS, measured), random.Random(4)
    for _ in range(2_000):
        size = traffic(random_)
        learned.record(*size, 2 * experts(*size))
    assert learned.table is not None
    assert learned.model is not None
    assert learned.table.rows[0] == 1
    assert learned.table.decode_seconds[0] == pytest.approx(measured.decode_seconds[0])
    sizes = [traffic(random_) for _ in range(300)]
    errors = sorted(abs(learned.model.step(*size) / experts(*size) / 2 - 1) for size in sizes)
    assert errors[270] < 0.3, errors[270]
    assert errors[150] < 0.1, errors[150]


def test_what_was_measured_is_not_learned_again() -> None:
    """Steps on a GPU then cost the factors only."""
    measured, random_ = measure(dense, ROWS, TOKENS, CONTEXT, POSITION), random.Random(6)
    observed, learned = ObservedSteps(ROWS, TOKENS, measured), LearnedSteps(ROWS, TOKENS, measured)
    for _ in range(100):
        size = traffic(random_)
        assert not observed.learns(size[0], size[2])
        learned.record(*size, 3 * dense(*size))
    assert learned.table == measured
    assert learned.factors[1] > 1.5


def test_a_slope_that_was_not_measured_is_learned() -> None:
    measured = replace(measure(dense, ROWS, TOKENS, CONTEXT, POSITION), context_seconds=0.0)
    learned, random_ = LearnedSteps(ROWS, TOKENS, measured), random.Random(5)
    for _ in range(2_000):
        size = traffic(random_)
        learned.record(*size, dense(*size))
    assert learned.table is not None
    assert learned.table.decode_seconds == measured.decode_seconds
    assert learned.table.context_seconds == pytest.approx(33e-9, rel=0.3)


def test_nothing_is_known_before_the_first_step() -> None:
    learned = LearnedSteps(ROWS, TOKENS)
    assert (learned.table, learned.model, learned.factors) == (None, None, (1.0, 1.0))
    learned.record(3, 100, 0, 0, 0.01)
    assert learned.model is not None
    assert learned.model.step(3, 100) == pytest.approx(0.01)


def test_sizes_end_with_the_most() -> None:
    assert row_sizes(256) == (1, 2, 4, 8, 16, 32, 64, 128, 256)
    assert row_sizes(1) == (1,)
    assert row_sizes(100) == (1, 2, 4, 8, 16, 32, 64, 100)
    assert token_sizes(8192) == (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
    assert token_sizes(9) == (9,)


@pytest.mark.parametrize("decode", [0.005, 0.014, 0.040])
@pytest.mark.parametrize("gap_cost", [0.5, 4.0, 30.0])
@pytest.mark.parametrize("prompts", [1.0, 3.0])
@pytest.mark.parametrize("fixed", [0.0, 0.011])
def test_a_long_step_has_the_least_cost_within_its_bounds(
    decode: float, gap_cost: float, prompts: float, fixed: float
) -> None:
    """A prompt of a second: all steps that it takes, and what they cost those that decode."""
    gap, fastest = 0.015, 0.004

    def cost(long: float) -> float:
        steps = 1 / (long - decode - fixed)
        return prompts * steps * long + gap_cost * steps * long**2 / (2 * min(decode, gap))

    best = min((decode * (1 + number / 1000) + fixed for number in range(1, 10_000)), key=cost)
    bound = decode * gap / fastest
    expected = max(gap, min(best, max(bound, min(bound + fixed, 2 * (decode + fixed)))))
    assert long_seconds(decode, fastest, gap, gap_cost, prompts, fixed) == pytest.approx(expected, rel=0.002)


def test_what_the_first_tokens_of_a_prompt_take_is_known() -> None:
    """A dense model reads its weights for decodes, too. A mixture of experts reads 8 of 256 for one token and
    nearly all for 64: those of an H200 with the shape of Qwen3.5-35B-A3B."""
    tokens = (16, 64, 128, 512, 2048, 8192)
    dense = tuple(max(0.0042, 24e-6 * n) for n in tokens)
    assert StepModel((1, 256), (0.0042, 0.0065), 0.0, tokens, dense, 0.0, 1.0).fixed(1) == 0
    experts = (0.0087, 0.018, 0.0205, 0.022, 0.044, 0.133)
    model = StepModel((1, 8, 32, 256), (0.0029, 0.0063, 0.0133, 0.0285), 0.0, tokens, experts, 0.0, 1.0)
    assert model.fixed(1) == pytest.approx(0.0117, abs=0.0005)
    assert model.fixed(8) == pytest.approx(0.0084, abs=0.0005)
    assert model.fixed(256) == 0
    slower = model.corrected(2.0, 3.0).corrected(1.5, 1.0)
    assert slower.fixed(8) == 3 * model.fixed(8), "the factors change at different times"
    assert slower.table is model
    changed = replace(slower, decode_seconds=model.decode_seconds)
    assert changed.fixed(8) > 4 * model.fixed(8), "it has a table of its own"
    assert StepModel((1,), (0.01,), 0.0, (1,), (0.01,), 0.0, 1.0).fixed(1) == 0, "one size tells nothing"


def test_gaps_that_cost_nothing_are_bounded_all_the_same() -> None:
    assert long_seconds(0.020, 0.005, 0.015, 0.0) == pytest.approx(0.060)
    assert long_seconds(0.004, 0.005, 0.015, 0.0) == 0.015
    assert long_seconds(0.020, 0.0, 0.015, 0.0) == 0.020, "the fastest step is not known"
