"""How many prompt tokens a decode step may take, so that the decoding requests are hardly slowed down.

This is stall-free batching (Sarathi-Serve, Agrawal 2024), but the budget is measured and not fixed. The limit
learns two costs from past steps: that of a step that only decodes, and that of each prompt token beside
decodes. The scheduler lets a step only decode now and then, also if prompts are waiting. Pure.

    seconds(step with prompts) = seconds(step without) + tokens · slope

The real curve is not a line: the first tokens are cheap, since the step reads the weights anyway. But the
slope comes from recent chunks, and these are as large as the limit. So the limit settles where a step takes
its full time.
"""

DECAY = 0.9
"""Factor on the weight of a past step with each later step of its kind."""
GROWTH = 1.5
"""Without a target, a step with prompts may take this many times the time of one without."""
FIRST = 64
"""Tokens of the first chunk, while the cost of a prompt token is unknown."""
LEAST = 16
"""Fewest tokens of a chunk: a prefill that has started must make progress."""


class ChunkLimit:
    """Learns from each step, and returns the number of prompt tokens for the next."""

    def __init__(self, target: float | None, most: int) -> None:
        """`target`: seconds that a step with decodes may take. None: `GROWTH` times a step without prompts.
        `most`: token budget of any step."""
        self._target = target
        self._most = most
        self._steps = self._step_seconds = 0.0  # of steps that only decode; weighted sums
        self._prompt_tokens = self._added_seconds = 0.0  # of steps with prompts; weighted sums
        self._recent_most = 0.0  # tokens of the largest recent chunk; decays

    def record(self, decodes: bool, prompt_tokens: int, seconds: float) -> None:
        """Learns from a step with `prompt_tokens` that took `seconds`. A step that does not decode teaches
        nothing: the limit does not hold for it, and it lacks the cost of the decodes."""
        if not decodes:
            return
        if prompt_tokens:
            self._prompt_tokens = DECAY * self._prompt_tokens + prompt_tokens
            self._recent_most = max(DECAY * self._recent_most, prompt_tokens)
            self._added_seconds = DECAY * self._added_seconds + max(0.0, seconds - self.step_seconds)
        else:
            self._steps = DECAY * self._steps + 1
            self._step_seconds = DECAY * self._step_seconds + seconds

    @property
    def step_seconds(self) -> float:
        """Average time of a step that only decodes; 0 before the first."""
        return self._step_seconds / self._steps if self._steps else 0.0

    @property
    def _slope(self) -> float:
        """Seconds that a prompt token adds to a step."""
        return self._added_seconds / self._prompt_tokens

    @property
    def fitting(self) -> int:
        """Prompt tokens that fit into a step with decodes. 0: fewer than `LEAST` fit, or no step was recorded
        that only decodes."""
        step = self.step_seconds
        spare = (GROWTH * step if self._target is None else self._target) - step
        if not self._steps or spare <= 0:
            return 0
        if not self._prompt_tokens:
            return min(FIRST, self._most)
        most = min(self._most, int(2 * self._recent_most))  # the slope of much larger chunks is a guess
        tokens = most if spare >= self._slope * most else int(spare / self._slope)
        return tokens if tokens >= LEAST else 0

    @property
    def seconds(self) -> float:
        """Expected time of a step with `fitting` prompt tokens."""
        if not self._prompt_tokens:
            return GROWTH * self.step_seconds
        return self.step_seconds + self.fitting * self._slope

    @property
    def tokens(self) -> int:
        """Most prompt tokens of a step with decodes: at least `LEAST`."""
        return max(LEAST, self.fitting)
