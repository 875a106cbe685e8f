"""How many prompt tokens a decode step may take beside its own, so that those who decode hardly notice.

Learnt from the steps themselves: what a step costs that only decodes, and what each prompt token adds to one
(stall-free batching, Sarathi-Serve, Agrawal 2024, with a measured budget instead of a fixed one). Pure.

    seconds(step with prompts) = step + tokens · slope

That is not quite a line: the first tokens are cheap, as the weights are read anyway. But the slope is that of
chunks of late, whose size is the limit itself, so where it settles the step takes what it may.
"""

DECAY = 0.9
"""What a step's weight shrinks by with each step of its kind after it."""
GROWTH = 1.5
"""Without a target, a step may take so many times what it takes without a prompt."""
FIRST = 64
"""Tokens to learn from, before it is known what they cost."""
LEAST = 16
"""Tokens that are taken in any case: what has begun must go on."""


class ChunkLimit:
    """`target`: seconds that a step with decodes may take; None: `GROWTH` times one without a prompt. `most`:
    tokens that any step takes."""

    def __init__(self, target: float | None, most: int) -> None:
        self._target = target
        self._most = most
        self._steps = self._step_seconds = 0.0  # that only decoded
        self._prompt_tokens = self._added_seconds = 0.0
        self._reach = 0.0  # the largest chunk of late

    def record(self, decodes: int, prompt_tokens: int, seconds: float) -> None:
        """A step of so many decoding requests and prompt tokens took `seconds`."""
        if prompt_tokens:
            self._prompt_tokens = DECAY * self._prompt_tokens + prompt_tokens
            self._reach = max(DECAY * self._reach, prompt_tokens)
            self._added_seconds = DECAY * self._added_seconds + max(0.0, seconds - self.step_seconds)
        elif decodes:
            self._steps = DECAY * self._steps + 1
            self._step_seconds = DECAY * self._step_seconds + seconds

    @property
    def step_seconds(self) -> float:
        """Of a step that only decodes; 0 before the first."""
        return self._step_seconds / self._steps if self._steps else 0.0

    @property
    def _slope(self) -> float:
        """Seconds that a prompt token adds."""
        return self._added_seconds / self._prompt_tokens

    @property
    def fitting(self) -> int:
        """Prompt tokens that fit into a step with decodes. 0: too few to be worth it, or nothing is known."""
        step = self.step_seconds
        spare = (GROWTH * step if self._target is None else self._target) - step
        if not self._steps or spare <= 0:
            return 0
        if not self._prompt_tokens:
            return min(FIRST, self._most)
        most = min(self._most, int(2 * self._reach))  # beyond, the slope is a guess
        tokens = most if spare >= self._slope * most else int(spare / self._slope)
        return tokens if tokens >= LEAST else 0

    @property
    def seconds(self) -> float:
        """That a step with so many is expected to take."""
        if not self._prompt_tokens:
            return GROWTH * self.step_seconds
        return self.step_seconds + self.fitting * self._slope

    @property
    def tokens(self) -> int:
        """That such a step takes of prompts which are here already."""
        return max(LEAST, self.fitting)
