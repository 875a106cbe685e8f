"""What the steps of an engine cost lately, and from that, how many prompt tokens a decode step may take.

The chunk limit is stall-free batching (Sarathi-Serve, Agrawal 2024), but the budget is measured and follows
need. There are three bounds for the time of a step that both decodes and prefills:

    long    the gap target; allowed only so far as a waiting prompt would otherwise miss its due time
    short   the geometric mean of the gap target and of a step that only decodes; always allowed
    late    longer than a long one by as much as a short step is longer than one that only decodes; allowed
            while a prompt would miss its due time by far in spite of long steps, since then many prompts
            have come at once, and the last of them waits the longest

So two targets and measured speeds say how long steps are: how long a gap may be, and when a prompt is due. A
model or a GPU that is slower has steps of the same shape.

The limit learns two costs from past steps: that of a step that only decodes, and that of each prompt token
beside decodes. The scheduler lets a step only decode now and then, also if prompts are waiting. Pure.

    seconds(step with prompts) = seconds(step without) + tokens · slope

The real curve is not a line: the first tokens are cheap, since the step reads the weights anyway. But the
slope comes from recent chunks, and these are as large as the limit. So the limit settles where a step takes
its full time.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence

from baton.engine.api.config import EngineConfig
from baton.engine.api.stats import MixedStep
from baton.engine.model_config import FULL_STEP
from baton.machine import Average
from baton.machine.step_model import LARGE, LearnedSteps, StepModel

DECAY = 0.9
"""Factor on the weight of a past step with each later step of its kind."""
OUTLIER = 4.0
"""A step that only decodes counts as at most this many average ones. One that takes longer was a pause of the
process or its host. Beside prompts, few steps only decode, so it would raise the average for a minute."""
LONG = EngineConfig.ttit_target_steps
"""A long step may take this many times the fastest step that only decodes, if no target is given. With an 8B
model on an H200 this is 15 ms."""
LATE_STEPS = 10
"""A prompt that would be late by so many long steps, if all steps are long, is behind many others."""
LEAST = 16
"""Fewest tokens of a chunk: a prefill that has started must make progress. Also those of the first one, while
the cost of a prompt token is unknown."""
MIXED_STEPS = 31
"""Most steps in a row that both decode and take prompt tokens. The next one only decodes, and the chunk limit
learns from it what decoding costs now."""


def prompt_limit(tokens: int, decodes: int, mixed_steps: int, rows: Sequence[int]) -> int:
    """Returns the most prompt tokens of a step with so many decodes: at most `tokens`, the chunk limit.

    `mixed_steps`: steps since the last one that only decoded.
    `rows`: rows of steps that need no padding, in ascending order. A step between two of them is padded to
    the larger, so it takes longer than expected. The smaller is better if it takes over half of the tokens.
    """
    if decodes and mixed_steps >= MIXED_STEPS:
        return 0
    whole = bisect_right(rows, decodes + tokens)
    if not 0 < whole < len(rows):
        return tokens
    fitting = rows[whole - 1] - decodes
    return fitting if 2 * fitting > tokens else tokens


def may_join(left: int, scheduled: int, full_step: int = FULL_STEP) -> bool:
    """Whether a prompt with `left` tokens may share a step without decodes that has `scheduled` prompt
    tokens.

    Such prompts go one after another: together they would take as long, and the first would wait for the
    last."""
    return not scheduled or scheduled + left <= full_step


class ChunkLimit:
    """Learns from each step, and returns the number of prompt tokens for the next.

    Attributes:
        fastest_seconds: of the fastest step that only decoded; 0: there was none.
    """

    def __init__(self, target: float | None, most: int, target_steps: float = LONG) -> None:
        """`target`: seconds that a step with decodes may take. None: `target_steps` times the fastest step
        that only decodes. `most`: token budget of any step."""
        self._target = target
        self._target_steps = target_steps
        self._most = most
        self.fastest_seconds = 0.0
        self._decode = Average(DECAY)  # seconds of a step that only decodes
        self._prompt = Average(DECAY)  # seconds that a prompt token adds to it
        self._recent_most = 0.0  # tokens of the largest recent chunk; decays; 0: there was none
        self._alone = 0, 0.0  # of the largest step without decodes: prompt tokens, and seconds for each

    def record_alone(self, prompt_tokens: int, seconds: float) -> None:
        """Learns from a large step without decodes, until one with decodes teaches better. Beside decodes a
        token costs no more than there."""
        if prompt_tokens >= max(1, self._alone[0]):
            self._alone = prompt_tokens, seconds / prompt_tokens

    def record(self, decodes: bool, prompt_tokens: int, seconds: float) -> None:
        """Learns from a step with `prompt_tokens` that took `seconds`. A step that does not decode teaches
        nothing: the limit does not hold for it, and it lacks the cost of the decodes."""
        if not decodes:
            return
        if prompt_tokens:
            self._prompt.add(max(0.0, seconds - self.step_seconds), prompt_tokens)
            self._recent_most = max(DECAY * self._recent_most, prompt_tokens)
        else:
            self.fastest_seconds = min(self.fastest_seconds or seconds, seconds)
            if OUTLIER * seconds < self.step_seconds:  # the first step was the pause
                self._decode = Average(DECAY)
            elif self.step_seconds:
                seconds = min(seconds, OUTLIER * self.step_seconds)
            self._decode.add(seconds)

    # ------------------------------------------------------------ what was learned

    @property
    def step_seconds(self) -> float:
        """Average time of a step that only decodes; 0 before the first."""
        return self._decode.value

    @property
    def token_seconds(self) -> float:
        """Time that a prompt token adds to a step with decodes; 0: not known."""
        return self._prompt.value if self._recent_most else self._alone[1]

    @property
    def short_seconds(self) -> float:
        """Time of a short step; 0 before the first step that only decodes."""
        return min(self.gap_target, max(self.step_seconds, self.fastest_seconds + self._spare_seconds))

    @property
    def long_seconds(self) -> float:
        """Time of a long step; 0 before the first step that only decodes."""
        if self._target is not None:
            return self._target if self.step_seconds else 0.0
        return max(self.gap_target, math.sqrt(self._target_steps) * self.step_seconds)

    @property
    def gap_target(self) -> float:
        """Seconds; 0 before the first step that only decodes, if it is given in steps."""
        return self._target or self._target_steps * self.fastest_seconds

    @property
    def _spare_seconds(self) -> float:
        """Time for prompts in a short step, if its decodes are as fast as ever."""
        return max(0.0, math.sqrt(self.fastest_seconds * self.gap_target) - self.fastest_seconds)

    def fitting(self, seconds: float) -> int:
        """Prompt tokens that fit into a step of `seconds` with decodes. 0: fewer than `LEAST` fit, or no step
        was recorded that only decodes."""
        spare = seconds - self.step_seconds
        if not self.step_seconds or spare <= 0:
            return 0
        slope, most = self.token_seconds, self._most
        if self._recent_most:
            most = min(most, int(2 * self._recent_most))  # the slope of much larger chunks is a guess
        elif not slope:
            return min(LEAST, most)
        tokens = most if spare >= slope * most else int(spare / slope)
        return tokens if tokens >= LEAST else 0

    def mixed_step(self, seconds: float) -> MixedStep:
        """The step with as many prompt tokens as fit into `seconds`."""
        tokens = self.fitting(seconds)
        return MixedStep(tokens, self.mixed_seconds(tokens))

    def mixed_seconds(self, tokens: int) -> float:
        """Expected time of a step with decodes and `tokens` prompt tokens."""
        return self.step_seconds + tokens * self.token_seconds

    # ------------------------------------------------------------ the limit

    @property
    def short_tokens(self) -> int:
        """Most prompt tokens of a short step: at least `LEAST`."""
        return max(LEAST, self.fitting(self.short_seconds))

    def tokens(self, prompts: Iterable[tuple[int, float]], begins: float, joins_at: float = math.inf) -> int:
        """Most prompt tokens of the next step with decodes: at least `LEAST`.

        `prompts`: of each prompt, in order, the tokens that are left and the time when they should be
        computed. `begins`: when the step should begin. `joins_at`: when a request from another worker joins,
        which waits until the step is over.

        The result is the fewest tokens with which all prompts are in time. They are computed a short step
        before they are due, since a prompt waits for the end of its last step. The result is bounded by a
        long step, and by one that ends a short step after a request joins. So a request that joins waits for
        a short step at most, and for its own, which is short, too. While a prompt would be late by
        `LATE_STEPS`, both bounds are longer by the prompts of a short step. A target in seconds is kept.
        """
        prompts, tokens = list(prompts), self.short_tokens
        late = self._spare_seconds if self._target is None and self._late(prompts, begins) else 0.0
        longest = late + min(self.long_seconds, max(0.0, joins_at - begins) + self.short_seconds)
        most = max(tokens, self.fitting(longest))
        ahead, begins = 0, begins + self.short_seconds
        for left, due in prompts:
            if tokens >= most:
                break
            ahead += left
            tokens = max(tokens, min(most, self._needed(ahead, due - begins)))
        return tokens

    def _needed(self, prompt_tokens: int, seconds: float) -> int:
        """Prompt tokens of each step with which so many are computed within `seconds`."""
        spare = seconds - prompt_tokens * self.token_seconds
        # prompt_tokens / result steps must decode in the time that the prompts leave
        return int(prompt_tokens * self.step_seconds / spare) + 1 if spare > 0 else self._most

    def _late(self, prompts: Sequence[tuple[int, float]], begins: float) -> bool:
        """Whether a prompt would be late by `LATE_STEPS`, if all steps are long."""
        token_seconds = self.long_seconds / max(LEAST, self.fitting(self.long_seconds))
        ends = begins
        for left, due in prompts:
            ends += left * token_seconds
            if ends > due + LATE_STEPS * self.long_seconds:
                return True
        return False


class Meters:
    """Averages the cost of recent steps. Owns the chunk limit, which learns from the same steps."""

    def __init__(
        self,
        chunk_limit: ChunkLimit,
        largest: tuple[int, float] = (0, 0.0),
        steps: LearnedSteps | None = None,
    ) -> None:
        """`largest`: prompt tokens and seconds of a step that was measured at the start; (0, 0.0): none.
        `steps`: what learns the model of steps. None: there is none."""
        self.chunk_limit = chunk_limit
        self.steps = steps
        chunk_limit.record_alone(*largest)
        self._largest = largest[0]
        self._prefill = Average(DECAY)  # prompt tokens in a second
        self._prefill.add(*largest)
        self._position = Average(DECAY)  # of these tokens
        self._position.add(largest[0] ** 2 / 2, largest[0])
        self._step = Average(DECAY)  # seconds

    def record(
        self, decodes: int, prefilled: int, seconds: float, position: float = 0.0, context: float = 0.0
    ) -> None:
        """Learns from a step that computed `prefilled` prompt tokens, with a mean `position`, or `decodes`
        rows of requests that decode, which read `context` positions."""
        self.chunk_limit.record(decodes > 0, prefilled, seconds)
        if self.steps is not None:
            self.steps.record(decodes, context, prefilled, position - prefilled / 2, seconds)
        self._step.add(seconds)
        self._largest = max(self._largest, prefilled)
        if prefilled and prefilled >= min(LARGE, self._largest // 2):
            self._prefill.add(prefilled, seconds)
            self._position.add(prefilled * position, prefilled)

    @property
    def model(self) -> StepModel | None:
        """What steps cost now. None: not known."""
        return None if self.steps is None else self.steps.model

    @property
    def step_seconds(self) -> float:
        """Of all steps; 0 before the first."""
        return self._step.value

    @property
    def prefill_tokens_per_s(self) -> float:
        """Of steps with many prompt tokens; 0 before the first."""
        return self._prefill.value

    @property
    def prefill_position(self) -> float:
        """Mean position of the tokens in `prefill_tokens_per_s`."""
        return self._position.value

    def queue_seconds(self, parts: Iterable[tuple[int, float]], *, decoding: bool) -> float:
        """Seconds in which these parts of prompts are computed: (tokens, position of the first). `decoding`:
        in long steps, beside decodes. 0: none, or not known."""
        model, parts = self.model, list(parts)
        tokens = sum(count for count, _ in parts)
        if model is None or not tokens:
            return 0.0
        step = self.chunk_limit.mixed_step(self.chunk_limit.long_seconds)
        if decoding and step.tokens:
            return tokens * step.seconds / step.tokens
        position = sum(count * (first + count / 2) for count, first in parts) / tokens
        return model.prefill(tokens, position - tokens / 2)

    def prompt_tokens_per_s(self, *, decoding: bool) -> float:
        """Speed at which a prompt is computed now. Beside decodes it is that of long steps. 0: not known."""
        alone = self.prefill_tokens_per_s
        step = self.chunk_limit.mixed_step(self.chunk_limit.long_seconds)
        return min(alone, step.tokens / step.seconds) if step.tokens and decoding else alone

    def prompt_seconds(self, tokens: int, uncached: int, position: int = 0, *, decoding: bool) -> float:
        """Seconds by which a prompt is computed sooner if the `tokens` from `position` on have KV already,
        and the `uncached` ones behind them have not. 0: not known.

        With few tokens in all this is less than their share of a long prompt, since a step reads the weights
        anyway. It is more if they come after many others."""
        if not decoding and (model := self.model) is not None:
            whole = model.prefill(tokens + uncached, position)
            if (rest := model.prefill(uncached, position + tokens)) < whole:
                return whole - rest
        speed = self.prompt_tokens_per_s(decoding=decoding)
        return tokens / speed if speed else 0.0

    def step_expected(self, decodes: int, context: int, prefilled: int, position: float) -> float:
        """Seconds of a step, as in `record`. 0: not known."""
        model = self.model
        return 0.0 if model is None else model.step(decodes, context, prefilled, position - prefilled / 2)
