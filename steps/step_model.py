"""What the steps of one engine cost: a table of seconds, which `learned_steps` makes and corrects.

    D = decode_seconds(rows) + context · context_seconds                    of a step that only decodes
    P = prompt_seconds(tokens) + tokens · position · pair_seconds           of a step with prompts alone
    step = overlap · shared + (1 - overlap) · (D + P)                       of a step with both

    shared = max(decode_seconds(rows), prompt_seconds(rows + tokens)) + what attention adds to D and P

`prompt_seconds` has the pairs of one prompt. Several prompts of as many tokens have fewer: what attention
adds is negative then, and counts within the maximum. Pairs are not all of the table, so no part is negative.

A step reads the weights once. So a mixed step costs less than its parts: `shared` counts a decode as one more
prompt token. The table follows mixtures of experts, in which a few rows more read many experts more.

Between two measured sizes the cost is linear. Graphs pad decodes to the next captured size, at most 7 rows
more. A table of all sizes would be long, and a plan needs what a row adds on average, not a stair.

Pure.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

LARGE = 512
"""Prompt tokens from which on a step shows the speed of prompts. A smaller one reads the weights for a few
tokens: to judge from it, a long prompt would take minutes."""
LARGEST_FACTOR = 8.0
"""A worker counts as at most so many times slower or faster than its table."""
MOST_ROWS = 1 << 20
"""More decodes than a worker has seats."""
MOST_IN_PAIRS = 0.9
"""Share of a step with one prompt that its pairs take at most. Else many short prompts would cost nothing."""


def long_seconds(
    decode: float, fastest: float, gap: float, gap_cost: float, prompts: float = 1.0, fixed: float = 0.0
) -> float:
    """Seconds that a step with decodes may take while prompts are late.

    A step of L seconds that decodes for D, and takes B = D + `fixed` with the first prompt token, has L - B
    for prompts. So they take L / (L - B) times as long as alone. A gap counts as L² / (2 · D) in place of L,
    since users see one that stands out. The sum of both costs is least with

        L = B + √(B² + 2 · B · D · prompts / gap_cost)

    The result is at least the target of a gap. Beyond that, it is at most D · gap / fastest, and `with_room`.

    Args:
        decode: of the step without prompts, D.
        fastest: of a step that only decodes. 0: not known.
        gap: the target. A gap counts as L² / (2 · gap) if D is longer.
        gap_cost: what a second more in one gap of each request costs, in seconds of a first token. 0: only
            the bounds count, as of the only worker.
        prompts: how many wait for each token of a prompt, on average.
        fixed: as `StepModel.fixed` gives it.
    """
    begins = decode + fixed
    longest = decode * max(1.0, gap / fastest) if fastest > 0 else decode
    if fixed:
        longest = with_room(longest, begins, fixed)
    if gap_cost > 0:
        square = begins * (begins + 2 * min(decode, gap) * prompts / gap_cost)
        longest = min(longest, begins + math.sqrt(square))
    return max(gap, longest)


def with_room(seconds: float, begins: float, fixed: float) -> float:
    """The bound of a step, or up to `fixed` more if it leaves prompts less than half of the step. A step of
    `begins` has one prompt token."""
    return max(seconds, min(seconds + fixed, 2 * begins))


@dataclass(frozen=True, slots=True)
class StepModel:
    """What steps of one worker cost. Seconds; immutable."""

    rows: tuple[int, ...]
    """Decode rows that were measured, ascending; at least one."""
    decode_seconds: tuple[float, ...]
    """Of a step with so many rows that only decodes, without context. Never falls."""
    context_seconds: float
    """That each position read by decodes adds."""
    tokens: tuple[int, ...]
    """Prompt tokens that were measured alone, ascending; at least one."""
    prompt_seconds: tuple[float, ...]
    """Of a step with so many prompt tokens at position 0. Never falls."""
    pair_seconds: float
    """That each pair of a prompt token and a position before the chunk adds. At most what leaves the pairs
    within each chunk of the table `MOST_IN_PAIRS` of its seconds."""
    overlap: float
    """0 to 1: how far a mixed step computes decodes and prompts in one pass over the weights."""
    factor: float = field(default=1.0, init=False)
    """Of decodes in these seconds, as in `corrected`."""
    table: "StepModel | None" = field(default=None, init=False, repr=False, compare=False)
    """The model without factors. None: this one."""

    def __post_init__(self) -> None:
        pairs = zip(self.tokens, self.prompt_seconds, strict=True)
        most = min((2 * seconds / size**2 for size, seconds in pairs), default=math.inf)
        object.__setattr__(self, "pair_seconds", min(self.pair_seconds, MOST_IN_PAIRS * most))

    def __hash__(self) -> int:
        return hash((self.prompt_seconds[-1:], self.context_seconds, self.pair_seconds))  # of 40 numbers

    def step(self, rows: int, context: float, tokens: int = 0, position: float = 0.0) -> float:
        """Seconds of a step.

        `rows`: requests that decode. `context`: positions that they read in all. `tokens`: of prompts.
        `position`: of the first of these tokens. With several prompts it is the mean position less half of
        `tokens`, which may be negative."""
        decode, prompt = self.parts(rows, context, tokens, position)
        return decode + prompt

    def decode(self, rows: int, context: float) -> float:
        """Seconds of a step that only decodes."""
        return interpolated(self.rows, self.decode_seconds, rows) + context * self.context_seconds

    def prompt(self, tokens: int, position: float = 0.0) -> float:
        """Seconds of a step with prompts alone."""
        return interpolated(self.tokens, self.prompt_seconds, tokens) + self.attention(tokens, position)

    def fixed(self, rows: int) -> float:
        """Seconds that a step with so many decodes takes longer with prompts, before what each of their
        tokens takes in a large step. A mixture of experts reads nearly all experts for a few dozen tokens;
        a dense model reads no more weights than for the decodes, and has about 0."""
        # Without the factors: they change at different times, and would then say that all steps begin late.
        return self.factor * _fixed(self.table or self, rows)

    def prefill(self, tokens: int, position: float = 0.0) -> float:
        """Seconds to compute so many prompt tokens, in as few steps with prompts alone as may be."""
        if tokens <= 0:
            return 0.0
        if tokens <= (largest := self.tokens[-1]):
            return interpolated(self.tokens, self.prompt_seconds, tokens) + self.attention(tokens, position)
        return tokens / largest * self.prompt(largest, position + (tokens - largest) / 2)

    def parts(self, rows: int, context: float, tokens: int, position: float) -> tuple[float, float]:
        """The seconds of `step`: those that scale with the cost of decodes, and with that of prompts."""
        if tokens <= 0:
            return (self.decode(rows, context), 0.0) if rows > 0 else (0.0, 0.0)
        if rows <= 0:
            return 0.0, self.prompt(tokens, position)
        overlap, separate = self.overlap, 1.0 - self.overlap
        decode_rows, prompt_rows = (
            interpolated(self.rows, self.decode_seconds, rows),
            interpolated(self.tokens, self.prompt_seconds, tokens),
        )
        attention = self.attention(tokens, position)
        all_rows = interpolated(self.tokens, self.prompt_seconds, rows + tokens) + min(0.0, attention)
        decode = context * self.context_seconds + separate * decode_rows
        prompt = separate * (prompt_rows + attention) + overlap * max(0.0, attention)
        if decode_rows > all_rows:
            return decode + overlap * decode_rows, prompt
        return decode, prompt + overlap * all_rows

    def fitting(self, rows: int, context: float, position: float, seconds: float, most: int = 0) -> int:
        """Most prompt tokens with which a step takes at most `seconds`, and at most `most`. 0: `most` is the
        largest measured number, which is the token budget of a step."""

        def cost(tokens: int) -> float:
            return self.step(rows, context, tokens, position)

        low, high = 0, most or self.tokens[-1]
        begin, end = cost(1), cost(high)
        if end <= seconds or begin > seconds:
            return high if end <= seconds else 0
        sizes = self.tokens[: bisect_left(self.tokens, high)]
        left, right = 0, len(sizes)
        while left < right:
            middle = (left + right) // 2
            if (found := cost(sizes[middle])) <= seconds:
                left, low, begin = middle + 1, sizes[middle], found
            else:
                right, high, end = middle, sizes[middle], found
        # Between two sizes a step is linear in its tokens, or about convex: the result may be a little short.
        for _ in range(2):
            tokens = low + int((high - low) * (seconds - begin) / (end - begin))
            if (found := cost(tokens)) <= seconds:
                low, begin = tokens, found
            else:
                high, end = tokens, found
        return max(1, low)

    def fitting_rows(self, context: float, seconds: float) -> int:
        """Most decodes, each of which reads `context` positions, with which a step that only decodes takes at
        most `seconds`."""
        return bisect_right(range(1, MOST_ROWS), seconds, key=lambda rows: self.decode(rows, rows * context))

    def prompt_speed(self, position: float) -> float:
        """Tokens of prompts that are computed in a second, if the steps are as large as may be. `position`:
        their mean position."""
        tokens = self.tokens[-1]
        seconds = self.prompt(tokens, position - tokens / 2)
        return tokens / seconds if seconds > 0 else math.inf

    def corrected(self, decode: float, prompt: float) -> "StepModel":
        """The model of a worker that takes so many times as long for decodes, and for prompts."""
        model = replace(
            self,
            decode_seconds=tuple(decode * seconds for seconds in self.decode_seconds),
            context_seconds=decode * self.context_seconds,
            prompt_seconds=tuple(prompt * seconds for seconds in self.prompt_seconds),
            pair_seconds=prompt * self.pair_seconds,
        )
        object.__setattr__(model, "factor", decode * self.factor)
        object.__setattr__(model, "table", self.table or self)
        return model

    def attention(self, tokens: int, position: float) -> float:
        """Seconds beyond those of as many tokens at position 0. Negative for several prompts, but by at most
        these."""
        if position >= 0.0:
            return tokens * position * self.pair_seconds
        # Beyond the largest size the table is linear, so it has no more pairs than that size.
        return max(tokens * position, -(min(tokens, self.tokens[-1]) ** 2) / 2) * self.pair_seconds


@lru_cache(1 << 16)  # 64 numbers of rows of each of 1,000 workers: 16 MB
def _fixed(model: StepModel, rows: int) -> float:
    """`StepModel.fixed` of a model without factors. Plans and steps ask again for the same rows."""
    most = model.tokens[-1]
    large = LARGE if most >= 2 * LARGE else most // 2
    if not large:
        return 0.0
    decode = model.decode(rows, 0.0)
    seconds, longest = (sum(model.parts(rows, 0.0, tokens, 0.0)) for tokens in (large, most))
    each = (longest - seconds) / (most - large)
    return max(0.0, seconds - large * each - decode)


def interpolated(sizes: Sequence[float], seconds: Sequence[float], size: float) -> float:
    """Linear between measured sizes, and beyond the last two of them. Below the first it is constant. With
    one size it is proportional beyond it."""
    right = bisect_left(sizes, size, 0, len(sizes) - 1)
    if right == 0:
        return seconds[0] if size <= sizes[0] else seconds[0] * size / sizes[0]
    left = right - 1
    begin, start = seconds[left], sizes[left]
    return begin + (seconds[right] - begin) / (sizes[right] - start) * (size - start)
