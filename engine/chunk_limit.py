"""How many prompt tokens a decode step may take beside its own, so that those who decode hardly notice.

Learnt from the steps themselves: what a step costs that only decodes, and what each prompt token adds to it
(stall-free batching, Sarathi-Serve, Agrawal 2024, with a measured budget instead of a fixed one). Pure.
"""

DECAY = 0.9
"""What a step's weight shrinks by with each step of its kind after it."""
GROWTH = 1.5
"""Without a target, a step may take so many times what it takes without a prompt."""
FIRST = 64
"""Tokens to learn from, before it is known what they cost."""
LEAST = 8
"""Tokens that are taken in any case: what has begun must go on."""


class ChunkLimit:
    """`target`: seconds that a step with decodes may take; None: `GROWTH` times one without a prompt. `most`:
    tokens that any step takes."""

    def __init__(self, target: float | None, most: int) -> None:
        self._target = target
        self._most = most
        self._steps = self._step_seconds = 0.0  # that only decoded
        self._tokens = self._token_seconds = 0.0  # of prompts, and what they added

    def record(self, decodes: int, prompt_tokens: int, seconds: float) -> None:
        """A step of so many decoding requests and prompt tokens took `seconds`."""
        if decodes and not prompt_tokens:
            self._steps = DECAY * self._steps + 1
            self._step_seconds = DECAY * self._step_seconds + seconds
        elif prompt_tokens:
            added = seconds - self.step_seconds if decodes else seconds
            self._tokens = DECAY * self._tokens + prompt_tokens
            self._token_seconds = DECAY * self._token_seconds + max(0.0, added)

    @property
    def step_seconds(self) -> float:
        """Of a step that only decodes; 0 before the first."""
        return self._step_seconds / self._steps if self._steps else 0.0

    @property
    def fitting(self) -> int:
        """Prompt tokens that fit into a step with decodes. 0: too few to be worth it, or nothing is known."""
        step = self.step_seconds
        spare = (GROWTH * step if self._target is None else self._target) - step
        if not self._steps or spare <= 0:
            return 0
        if not self._token_seconds:
            return min(FIRST, self._most)
        tokens = min(self._most, int(spare * self._tokens / self._token_seconds))
        return tokens if tokens >= LEAST else 0

    @property
    def seconds(self) -> float:
        """That a step with so many is expected to take."""
        if not self._token_seconds:
            return GROWTH * self.step_seconds
        return self.step_seconds + self.fitting * self._token_seconds / self._tokens

    @property
    def tokens(self) -> int:
        """That such a step takes of prompts which are here already."""
        return max(LEAST, self.fitting)
