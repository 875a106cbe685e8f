"""Steps with ranges of split prompts. Their layers may wait for KV of other workers, and a step of which
nothing is of use any more ends early. Plain steps do not come here."""

import time
from collections.abc import Callable

from baton.engine.core.step_builder import Schedule
from baton.engine.execution.runner import Launched, ModelRunner
from baton.engine.step import Step


class _GivenUp(Exception):
    """Nothing of the step is of use."""


def run(
    runner: ModelRunner, schedule: Schedule, step: Step, layer_done: Callable[[int], bool]
) -> Launched | None:
    """As `ModelRunner.run`. `layer_done` returns what the hook of this name says. None: the step was given
    up. It had no other requests, and there is one rank: others would wait in their next sum."""
    handed = sum(live.handover for live in schedule.prompts)
    may_give_up = handed == len(schedule.chunks) and runner.followers is None

    def waits(layer: int) -> None:
        began = time.monotonic()
        is_useless = layer_done(layer)
        schedule.waited += time.monotonic() - began
        if is_useless and may_give_up:
            raise _GivenUp

    try:
        launched = runner.run(step, waits)
    except _GivenUp:
        runner.synchronize()  # what was launched of it writes into blocks that are free then
        return None
    may_give_up = False  # a draft head computes its layer later
    return launched
