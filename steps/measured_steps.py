"""Measures the model of the steps of an engine (`step_model`) at its start, with a few steps of chosen sizes.
Pure: the caller runs the steps."""

import math
from collections.abc import Callable, Iterator, Sequence

from baton.steps.learned_steps import ObservedSteps
from baton.steps.step_model import StepModel

Step = Callable[[int, float, int, float], float]
"""Seconds of a step with (rows, context, tokens, position), as in `StepModel.step`."""


def measure(
    step: Step,
    rows: Sequence[int],
    tokens: Sequence[int],
    context: int,
    position: int,
    *,
    budget: float = math.inf,
) -> StepModel:
    """Measures a model with a few calls of `step`.

    `rows`, `tokens`: sizes to measure, ascending; the most important are the first and the last. `context`:
    positions of a decode in steps with a long context. `position`: of long prompts.
    `budget`: seconds of all steps but the smallest decode, the smallest prompt and the largest one. Others
    that are expected to exceed it are left out. Without a large prompt each token would count as a step:
    prompts would seem to wait a hundred times as long as they do."""
    step(rows[0], rows[0], 0, 0.0)  # a device that had no work is slow at first
    observed, spent = ObservedSteps(rows, tokens), 0.0
    always = (rows[0], rows[0], 0, 0.0), (0, 0.0, tokens[0], 0.0), (0, 0.0, tokens[-1], 0.0)
    for size in dict.fromkeys(always):
        observed.add(*size, step(*size))
    for size in _grid(rows, tokens, context, position):
        assert observed.model is not None, "three steps were measured"
        if size in always or spent + observed.model.step(*size) > budget:
            continue
        seconds = step(*size)
        spent += seconds
        observed.add(*size, seconds)
    assert observed.model is not None
    return observed.model


def _grid(
    rows: Sequence[int], tokens: Sequence[int], context: int, position: int
) -> Iterator[tuple[int, float, int, float]]:
    """The other steps to measure, the most important first: a budget may end before the others. In a mixed
    step the prompt is one of the requests, and its tokens and the decodes are at most as many as those of a
    prompt."""
    middle, chunk = rows[len(rows) // 2], tokens[len(tokens) // 2]

    def with_slopes(size: int, count: int) -> Iterator[tuple[int, float, int, float]]:
        yield size, size, 0, 0.0
        yield 0, 0.0, count, 0.0
        yield size, size * context, 0, 0.0
        yield 0, 0.0, count, position
        decodes = min(size, rows[-1] - 1)
        more = max(tokens[0], chunk - decodes)  # so many rows in all need no padding
        if decodes and decodes + more <= tokens[-1]:
            yield decodes, decodes, more, 0.0

    steps = [
        *with_slopes(middle, chunk),
        (rows[-1], rows[-1], 0, 0.0),
        *((size, size, 0, 0.0) for size in rows),
        *((0, 0.0, size, 0.0) for size in tokens),
        *with_slopes(rows[-1], tokens[-1]),
    ]
    yield from dict.fromkeys(steps)
