"""How many prompt tokens a decode step may take beside its own, so that those who decode hardly notice.

Learnt from the steps themselves: what a step costs that only decodes, what it costs to mix one with a prompt
at all, and what each prompt token adds (stall-free batching, Sarathi-Serve, Agrawal 2024, with a measured
budget instead of a fixed one). Pure.

    seconds(mixed step) = step + mixing + tokens · slope

Mixing costs something where a step that only decodes is cheaper to launch. If it alone passes the budget,
small chunks would only mean more such steps: then one is so large that half of what it adds is work.
"""

DECAY = 0.9
"""What a step's weight shrinks by with each step of its kind after it."""
GROWTH = 1.5
"""Without a target, a step may take so many times what it takes without a prompt."""
FIRST = 64
"""Tokens to learn from, before it is known what they cost."""
LEAST = 8
"""Tokens that are taken in any case: what has begun must go on."""


class _Line:
    """Least squares through (tokens, seconds that they added), the newer the heavier."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def record(self, tokens: int, added: float) -> None:
        self._weight = DECAY * self._weight + 1
        self._x = DECAY * self._x + tokens
        self._y = DECAY * self._y + added
        self._xx = DECAY * self._xx + tokens * tokens
        self._xy = DECAY * self._xy + tokens * added

    @property
    def known(self) -> bool:
        return self._weight > 0

    @property
    def slope(self) -> float:
        """Seconds per token; of chunks of one size all that they added is by the token."""
        spread = self._xx * self._weight - self._x * self._x
        if spread > 1e-6 * self._xx * self._weight:
            slope = (self._xy * self._weight - self._x * self._y) / spread
            return min(max(slope, 0.0), self._y / self._x)
        return self._y / self._x

    @property
    def start(self) -> float:
        """Seconds that are added whatever the number of tokens."""
        return max(0.0, (self._y - self.slope * self._x) / self._weight)


class ChunkLimit:
    """`target`: seconds that a step with decodes may take; None: `GROWTH` times one without a prompt. `most`:
    tokens that any step takes."""

    def __init__(self, target: float | None, most: int) -> None:
        self._target = target
        self._most = most
        self._steps = self._step_seconds = 0.0  # that only decoded
        self._prompts = _Line()

    def record(self, decodes: int, prompt_tokens: int, seconds: float) -> None:
        """A step of so many decoding requests and prompt tokens took `seconds`."""
        if decodes and not prompt_tokens:
            self._steps = DECAY * self._steps + 1
            self._step_seconds = DECAY * self._step_seconds + seconds
        elif prompt_tokens:
            added = seconds - self.step_seconds if decodes else seconds
            self._prompts.record(prompt_tokens, max(0.0, added))

    @property
    def step_seconds(self) -> float:
        """Of a step that only decodes; 0 before the first."""
        return self._step_seconds / self._steps if self._steps else 0.0

    @property
    def _spare(self) -> float:
        """Seconds that a prompt may add to a step."""
        step = self.step_seconds
        return (GROWTH * step if self._target is None else self._target) - step

    @property
    def fitting(self) -> int:
        """Prompt tokens that fit into a step with decodes. 0: too few to be worth it, or nothing is known."""
        if not self._steps or self._spare <= 0:
            return 0
        if not self._prompts.known:
            return min(FIRST, self._most)
        tokens = self._worth(self._spare - self._prompts.start)
        return tokens if tokens >= LEAST else 0

    def _worth(self, seconds: float) -> int:
        """Tokens that take so long, of as many as a step can have; they may seem to take no time at all."""
        slope = self._prompts.slope
        if seconds <= 0:
            return 0
        return self._most if seconds >= slope * self._most else int(seconds / slope)

    @property
    def seconds(self) -> float:
        """That a step with so many is expected to take."""
        if not self._prompts.known:
            return GROWTH * self.step_seconds
        return self.step_seconds + self._prompts.start + self.fitting * self._prompts.slope

    @property
    def tokens(self) -> int:
        """That such a step takes of prompts which are here already."""
        if self.fitting or not self._prompts.known or not self._prompts.slope:
            return max(LEAST, self.fitting)
        return max(LEAST, self._worth(self._prompts.start))
