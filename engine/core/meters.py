"""What the steps of an engine cost lately, and from that, how many prompt tokens a decode step may take.

The chunk limit is stall-free batching (Sarathi-Serve, Agrawal 2024), but the budget is measured and follows
need. There are two bounds for the time of a step that both decodes and prefills:

    long    the gap target, or more if decodes take most of it (`long_seconds`); allowed only so far as a
            waiting prompt would otherwise miss its due time
    short   the geometric mean of the gap target and of a step that only decodes; always allowed

Both are longer if any prompt, however short, adds much to a step (`StepModel.fixed`, `with_room`): a mixture
of experts would otherwise read its experts for a dozen tokens, step by step.

So two targets and measured speeds say how long steps are: how long a gap may be, and when a prompt is due. A
model or a GPU that is slower has steps of the same shape.

The model of steps (`steps.step_model`) says what a step costs, and learns from all of them. The scheduler
lets a step only decode now and then, also if prompts are waiting: it teaches what decoding costs. Pure.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from baton.engine.api.config import EngineConfig
from baton.engine.api.stats import MixedStep
from baton.engine.model_config import FULL_STEP
from baton.steps.averages import Average
from baton.steps.learned_steps import LearnedSteps
from baton.steps.step_model import LARGE, StepModel, long_seconds, with_room

DECAY = 0.9
"""Factor on the weight of a past step with each later step of its kind."""
LONG = EngineConfig.itl_target_steps
"""A long step may take this many times the fastest step that only decodes, if no target is given. With an 8B
model on an H200 this is 15 ms."""
LEAST = 16
"""Fewest tokens of a chunk: a prefill that has started must make progress. Also those of the first one, while
nothing is known of steps."""
MIXED_STEPS = 31
"""Most steps in a row that both decode and take prompt tokens. The next one only decodes, and the model of
steps learns from it what decoding costs now."""


def prompt_limit(tokens: int, decodes: int, mixed_steps: int, rows: Sequence[int], first: int = 0) -> int:
    """Returns the most prompt tokens of a step with so many decodes: at most `tokens`, the chunk limit.

    `mixed_steps`: steps since the last one that only decoded.
    `rows`: rows of steps that need no padding, in ascending order. A step between two of them is padded to
    the larger, so it takes longer than expected. The smaller is better if it takes over half of the tokens,
    and does not cut off the end of the first prompt, which has `first` tokens left.
    """
    if decodes and mixed_steps >= MIXED_STEPS:
        return 0
    count = bisect_right(rows, decodes + tokens)
    if not 0 < count < len(rows):
        return tokens
    fitting = rows[count - 1] - decodes
    ends_first = fitting < first <= tokens
    return fitting if 2 * fitting > tokens and not ends_first else tokens


def may_join(tokens: int, scheduled: int, full_step: int = FULL_STEP) -> bool:
    """Whether a prompt with `tokens` left may share a step without decodes that has `scheduled` prompt
    tokens.

    Such prompts go one after another: together they would take as long, and the first would wait for the
    last."""
    return not scheduled or scheduled + tokens <= full_step


class Batch(NamedTuple):
    """What a step computes beside new prompt tokens."""

    rows: int
    """Requests that decode."""
    context: float
    """Positions that they read, in all."""
    position: float
    """Of the first prompt token."""
    gap_cost: float = 0.0
    """What a second more in one gap of each of these requests costs, in seconds of a first token."""


class ChunkLimit:
    """Returns the number of prompt tokens for the next step.

    Attributes:
        steps: the model of steps. The caller tells it of each step.
        fastest_seconds: of the fastest step that only decoded; 0: there was none.
    """

    def __init__(
        self, steps: LearnedSteps, target: float | None, most: int, target_steps: float = LONG
    ) -> None:
        """`target`: seconds of a gap. None: `target_steps` times the fastest step that only decodes. `most`:
        token budget of any step."""
        self.steps = steps
        self._target = target
        self._target_steps = target_steps
        self._most = most
        measured = steps.table
        self.fastest_seconds = 0.0 if measured is None else measured.decode_seconds[0]

    def decoded(self, seconds: float) -> None:
        """A step that only decoded took `seconds`."""
        self.fastest_seconds = min(self.fastest_seconds or seconds, seconds)

    @property
    def gap_target(self) -> float:
        """Seconds; 0 before the first step that only decodes, if it is given in steps."""
        return self._target or self._target_steps * self.fastest_seconds

    # ------------------------------------------------------------ what steps take

    def decode_seconds(self, batch: Batch) -> float:
        """Of a step that only decodes. 0: not known."""
        return 0.0 if (model := self.steps.model) is None else model.decode(max(1, batch.rows), batch.context)

    def long_step(self, batch: Batch) -> MixedStep:
        """The step with as many prompt tokens as a long one has room for."""
        seconds = self._long_seconds(batch, self.decode_seconds(batch), self._fixed_seconds(batch))
        return self._mixed_step(batch, seconds)

    def _short_seconds(self, decode_seconds: float, fixed: float) -> float:
        short = min(self.gap_target, max(decode_seconds, self.fastest_seconds + self._spare_seconds))
        return with_room(short, decode_seconds + fixed, fixed)

    def _long_seconds(self, batch: Batch, decode_seconds: float, fixed: float, prompts: float = 1.0) -> float:
        fastest, gap = self.fastest_seconds, self.gap_target
        return long_seconds(decode_seconds, fastest, gap, batch.gap_cost, prompts, fixed)

    def _fixed_seconds(self, batch: Batch) -> float:
        """As in `StepModel.fixed`: of the model that was measured. What was learned has few sizes, from
        different times."""
        measured = self.steps.measured
        return 0.0 if measured is None else measured.fixed(max(1, batch.rows)) * self.steps.factors[0]

    @property
    def _spare_seconds(self) -> float:
        """Time for prompts in a short step, if its decodes are as fast as ever."""
        return max(0.0, math.sqrt(self.fastest_seconds * self.gap_target) - self.fastest_seconds)

    def _mixed_step(self, batch: Batch, seconds: float) -> MixedStep:
        rows, context, position, _ = batch
        tokens, model = self._fitting(batch, seconds), self.steps.model
        return MixedStep(tokens, model.step(max(1, rows), context, tokens, position) if model else 0.0)

    def _fitting(self, batch: Batch, seconds: float) -> int:
        """Prompt tokens that fit into a step of `seconds`. 0: fewer than `LEAST`, or no step was seen that
        only decodes."""
        rows, context, position, _ = batch
        if (model := self.steps.model) is None or not self.fastest_seconds:
            return 0
        # What much larger prompts cost than those that were seen is a guess.
        most = min(self._most, max(LEAST, 2 * model.tokens[-1]))
        # Without decodes it counts as one, since a request may join.
        tokens = model.fitting(max(1, rows), context, position, seconds, most)
        return tokens if tokens >= LEAST else 0

    # ------------------------------------------------------------ the limit

    def tokens(
        self,
        batch: Batch,
        prompts: Iterable[tuple[int, float]],
        begins: float,
        joins_at: float = math.inf,
        encoding: float = 0.0,
    ) -> int:
        """Most prompt tokens of the next step with decodes: at least `LEAST`.

        `prompts`: of each prompt, in order, the tokens that are left and the time when they should be
        computed; -inf: of a stream that begins again. `begins`: when the step should begin. `joins_at`: when
        a request from another worker joins, which waits until the step is over. `encoding`: seconds of images
        that wait for the encoder here. Prompts and images share the time beside the decodes as their work is.

        The result is the fewest tokens with which all prompts are in time. They are computed a short step
        before they are due, since a prompt waits for the end of its last step. The result is bounded by a
        long step, and for a request that joins:

            joins_at ≤ begins   by a short step, in which the request gets its next token
            joins_at > begins   by a step that ends w short steps after `joins_at`, if w prompts wait for each
                                prompt token on average

        So its second token comes w + 1 short steps after its KV at most. Neither bound holds while a stream
        begins again, as after a takeover: it waits in a gap as the request does. If others joined in each
        step, 32 streams of 16,000 tokens would begin again in steps of 16 tokens.

        Where gaps cost nothing (`long_seconds`), a step that ends the first prompt may take longer, by the
        time that decodes take: the step after it would take that for them anyway.
        """
        decode, fixed, prompts = self.decode_seconds(batch), self._fixed_seconds(batch), list(prompts)
        behind = list(accumulate(uncomputed for uncomputed, _ in prompts))
        waiting = sum(behind) / behind[-1] if behind and behind[-1] else 1.0
        short, long = self._short_seconds(decode, fixed), self._long_seconds(batch, decode, fixed, waiting)
        if encoding and behind and (model := self.steps.model) is not None:
            computing = model.prefill(behind[-1], batch.position)
            images = encoding / (encoding + computing)
            short, long = (each - images * max(0.0, each - decode - fixed) for each in (short, long))
        full = self._mixed_step(batch, long)
        until = short if joins_at <= begins else joins_at - begins + waiting * short
        if any(due == -math.inf for _, due in prompts):
            until = math.inf
        most = max(LEAST, full.tokens if until >= long else self._fitting(batch, until))
        least = LEAST
        if behind and batch.rows and not batch.gap_cost and joins_at == math.inf:
            least = behind[0] if behind[0] <= self._fitting(batch, long + decode) else LEAST
        most = max(most, least)
        begin = decode + fixed  # of a step, with the first prompt token
        token_seconds = max(0.0, full.seconds - begin) / max(LEAST, full.tokens)
        tokens, ahead, begins = least, 0, begins + short
        for uncomputed, due in prompts:
            ahead += uncomputed
            # ahead / tokens steps must begin in the time that the prompts leave
            spare = due - begins - ahead * token_seconds
            tokens = max(tokens, int(ahead * begin / spare) + 1) if spare > 0 else most
            if tokens >= most:
                return most
        return max(tokens, min(most, self._fitting(batch, short)))


class Meters:
    """Averages the cost of recent steps. Owns the chunk limit, which learns from the same steps."""

    def __init__(self, chunk_limit: ChunkLimit, largest: tuple[int, float] = (0, 0.0)) -> None:
        """`largest`: prompt tokens and seconds of a step that was measured at the start; (0, 0.0): none."""
        self.chunk_limit = chunk_limit
        self.steps = chunk_limit.steps
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
        self.steps.record(decodes, context, prefilled, position - prefilled / 2, seconds)
        if not prefilled:
            self.chunk_limit.decoded(seconds)
        self._step.add(seconds)
        self._largest = max(self._largest, prefilled)
        if prefilled and prefilled >= min(LARGE, self._largest // 2):
            self._prefill.add(prefilled, seconds)
            self._position.add(prefilled * position, prefilled)

    def rest(self, idle: float) -> None:
        """The device had nothing to do for so many seconds. If that is longer than the steps that averages
        remember, it is forgotten how long they took."""
        if idle > self.step_seconds / (1 - DECAY):
            self.steps.rest()

    @property
    def model(self) -> StepModel | None:
        """What steps cost now. None: not known."""
        return self.steps.model

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

    def prompt_seconds(self, tokens: int, uncached: int, batch: Batch) -> float:
        """Seconds by which a prompt is computed sooner if the `tokens` from `batch.position` on have KV
        already, and the `uncached` ones behind them have not. 0: not known.

        With few tokens in all this is less than their share of a long prompt, since a step reads the weights
        anyway. It is more if they come after many others."""
        position = batch.position
        if not batch.rows and (model := self.model) is not None:
            with_all = model.prefill(tokens + uncached, position)
            if (with_uncached := model.prefill(uncached, position + tokens)) < with_all:
                return with_all - with_uncached
        speed = self.prefill_tokens_per_s
        if batch.rows and (step := self.chunk_limit.long_step(batch)).tokens:
            speed = min(speed, step.tokens / step.seconds)
        return tokens / speed if speed else 0.0

    def step_expected(self, decodes: int, context: int, prefilled: int, position: float) -> float:
        """Seconds of a step, as in `record`. 0: not known."""
        model = self.model
        return 0.0 if model is None else model.step(decodes, context, prefilled, position - prefilled / 2)
