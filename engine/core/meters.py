"""What the steps of an engine cost lately."""

from collections import defaultdict
from functools import partial

from baton.engine.core.chunk_limit import ChunkLimit
from baton.machine import Average

DECAY = 0.9
"""Factor on the weight of a past step with each later step."""
LARGE = 512
"""Prompt tokens from which on a step shows the speed of prefill. A smaller one reads the weights for a few
tokens, so it would promise too little for a long prompt."""


class Meters:
    """Averages the cost of recent steps. Owns the chunk limit, which learns from the same steps."""

    def __init__(self, chunk_limit: ChunkLimit, largest: tuple[int, float] = (0, 0.0)) -> None:
        """`largest`: prompt tokens and seconds of a step that was measured at the start; (0, 0.0): none."""
        self.chunk_limit = chunk_limit
        chunk_limit.record_alone(*largest)
        self._largest = largest[0]
        self._prefill = Average(DECAY)  # prompt tokens in a second
        self._prefill.add(*largest)
        self._position = Average(DECAY)  # of these tokens
        self._position.add(largest[0] ** 2 / 2, largest[0])
        self._step = Average(DECAY)  # seconds
        self._small = defaultdict[int, Average](partial(Average, DECAY))
        """Seconds of steps with few prompt tokens alone, by size. Sizes differ by a factor of two."""

    def record(self, decodes: bool, prefilled: int, seconds: float, position: float = 0.0) -> None:
        """Learns from a step that computed `prefilled` prompt tokens, with a mean `position`, or decoded."""
        self.chunk_limit.record(decodes, prefilled, seconds)
        if 0 < prefilled < LARGE and not decodes:
            self._small[prefilled.bit_length()].add(seconds)
        self._step.add(seconds)
        self._largest = max(self._largest, prefilled)
        if prefilled and prefilled >= min(LARGE, self._largest // 2):
            self._prefill.add(prefilled, seconds)
            self._position.add(prefilled * position, prefilled)

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

    def prompt_tokens_per_s(self, *, decoding: bool) -> float:
        """Speed at which a prompt is computed now. Beside decodes it is that of long steps. 0: not known."""
        alone = self.prefill_tokens_per_s
        step = self.chunk_limit.mixed_step(self.chunk_limit.long_seconds)
        return min(alone, step.tokens / step.seconds) if step.tokens and decoding else alone

    def prompt_seconds(self, tokens: int, rest: int, *, decoding: bool) -> float:
        """Seconds by which a prompt is computed sooner if `tokens` of it have KV already and `rest` have not.
        0: not known.

        With few tokens in all this is less than their share of a long prompt, since a step reads the weights
        anyway. It is more if they come after many others."""
        speed = self.prompt_tokens_per_s(decoding=decoding)
        whole, without = self._alone(tokens + rest), self._alone(rest)
        if speed and not decoding and 0 < without < whole:
            return whole - without
        return tokens / speed if speed else 0.0

    def _alone(self, tokens: int) -> float:
        """Seconds to compute so many tokens of a prompt, beside no decodes. 0: not known."""
        if tokens < LARGE:
            return self._small[tokens.bit_length()].value
        return tokens / self.prefill_tokens_per_s if self.prefill_tokens_per_s else 0.0
