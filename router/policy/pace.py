"""How fast one worker is while it decodes: the part of its offers that is the same for all requests.

    Pace         kept by `Seen`, so it is computed once for each report and number of decodes
    Pace.steps   ─▶ Steps    those of the worker with other decodes
    delayed      by how much other prompts come later, for placement and for splits

A worker that decodes computes prompts for the time of a long step less what its decodes add to such a step,
and they take that much longer than alone. Pure.
"""

import math
from dataclasses import dataclass, field

from baton.steps.step_model import StepModel, interpolated, long_seconds

MOST_BUSY = 0.9
"""The most of its time that a worker counts as computing prompts. A bound, not a tuned value: the formula of
a queue divides by zero for a worker that gets more than it can compute."""


@dataclass(slots=True)
class Steps:
    """The steps of a worker that decodes, in seconds.

    Attributes:
        step: one that only decodes. 0: the worker does not decode.
        base: the same, but at least a short step.
        long: one with as many prompts as may be.
        prompts: what these would take in large steps of prompts alone.
        stretch: how many times as long prompts take as alone.
    """

    step: float = 0.0
    base: float = 0.0
    long: float = 1.0
    prompts: float = 1.0
    stretch: float = 1.0


PROMPTS_ALONE = Steps()
"""Those of a worker that does not decode."""


@dataclass(slots=True)
class Pace:
    """Of one worker now. Immutable.

    Attributes:
        model: what steps of the worker cost.
        gap: target of a gap in seconds. 0: unknown, since no worker has decoded.
        decodes: requests that it decodes, or will.
        context: positions of these.
        gap_cost: of these, in all, as in `EngineRequest`.
        rate: prompt tokens that it lately computed in a second.
        position: mean position of these.
        largest: tokens of its largest step with decodes. 0: that of the model. A fact of vLLM workers, whose
            graphs bound such steps.
        token: seconds of a prompt token in a large step.
        short: seconds of a short step.
        busy: share of its recent time that its prompts would have taken without decodes.
        now: its steps.
        late: mean seconds of a gap that cost, as in `gap_of`.
        behind: seconds of prompts that come lately, before the worker has none left, for each second in which
            it computes one.
        by_decodes: what `steps` needs of the model for so many decodes. Plans ask for the same ones again.
    """

    model: StepModel
    gap: float = 0.0
    decodes: int = 0
    context: float = 0.0
    gap_cost: float = 0.0
    rate: float = 0.0
    position: float = 0.0
    largest: int = 0
    token: float = field(init=False)
    short: float = field(init=False)
    busy: float = field(init=False)
    now: Steps = field(init=False)
    late: float = field(init=False)
    behind: float = field(init=False)
    by_decodes: dict[int, tuple[float, float]] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        model, gap, most = self.model, self.gap, self.model.tokens[-1]
        self.token = token = model.prompt_seconds[-1] / most + (self.position - most / 2) * model.pair_seconds
        busy, fastest = self.rate * token, model.decode_seconds[0]
        self.busy = busy = busy if busy < MOST_BUSY else MOST_BUSY  # `min` takes longer
        self.short = math.sqrt(gap * (gap if gap < fastest else fastest))
        self.now = now = self.steps(self.decodes, self.context, self.gap_cost)
        self.late = self.gap_of(now, busy)[1] if now.step else 0.0
        share = busy * now.stretch  # of its time, as prompts come lately
        self.behind = share / (1 - share) if share < MOST_BUSY else MOST_BUSY / (1 - MOST_BUSY)

    def steps(self, decodes: int, context: float, gap_cost: float) -> Steps:
        """Those of the worker if it decodes so many requests with so many positions and these costs."""
        model, gap = self.model, self.gap
        if not decodes or not gap:
            return PROMPTS_ALONE
        known = self.by_decodes.get(decodes)
        if known is None:
            alone = interpolated(model.rows, model.decode_seconds, decodes)
            known = self.by_decodes[decodes] = alone, model.fixed(decodes)
        alone, fixed = known
        step, overlap = alone + context * model.context_seconds, model.overlap
        long = long_seconds(step, model.decode_seconds[0], gap, gap_cost, 1.0, fixed)
        # As far as a step reads the weights once for all, a decode takes as long as a prompt token.
        spare = long - step + overlap * alone
        tokens = _fitting(model, spare) - overlap * decodes
        if tokens > 0 and spare > 0:  # those far behind the beginning take longer
            tokens *= spare / (spare + tokens * self.position * model.pair_seconds)
        if self.largest and tokens > (most := max(1, self.largest - decodes)):
            tokens, long = most, model.step(decodes, context, most, self.position)
        # A long step has time for prompts, whatever a worker reports.
        prompts, least = tokens * self.token, long / 16
        if prompts < least:
            prompts = least
        return Steps(step, step if step > self.short else self.short, long, prompts, long / prompts)

    def gap_of(self, steps: Steps, busy: float) -> tuple[float, float]:
        """Mean seconds of a gap with these steps, and how many of them cost: those beyond a short step. With
        vLLM also more of a shorter one the longer it is: its decodes gather on one worker otherwise (0.92 of
        the tokens of 16 agents on one of two H200). Those of Baton's engine spread without it, and with it
        500/500 at 24/s has gaps p99 of 16 ms for 9 (simulated). `busy`: of prompts."""
        if not steps.step:
            return 0.0, 0.0
        step, base, long, late = steps.step, steps.base, steps.long, 0.0
        busy /= steps.prompts
        gap = step / (1 - min(MOST_BUSY, busy * (long - step)))
        if long > base:
            late = busy * gap * (long - base)
        if self.largest:
            fastest = self.model.decode_seconds[0]
            beyond = (step if step < self.short else self.short) - fastest
            if beyond > 0:
                late += beyond * beyond / (self.short - fastest)
        return gap, late + base - self.short


def delayed(behind: float, wait: float, seconds: float) -> float:
    """By how many seconds prompts are delayed that come before a worker has none left, all together, if it
    gets one that takes `seconds` after `wait` (an M/G/1 queue). Those that come while it is computed wait for
    half of it. `behind`: as of its pace."""
    return behind * (wait + seconds / 2)


def _fitting(model: StepModel, seconds: float) -> float:
    """Prompt tokens of a step of so many seconds with prompts alone, at position 0."""
    least, most = model.prompt_seconds[0], model.prompt_seconds[-1]
    if least < seconds < most:
        return interpolated(model.prompt_seconds, model.tokens, seconds)
    return model.tokens[-1] if seconds >= most else 0.0
