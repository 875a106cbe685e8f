"""Decides whether a decode worker prefills a request itself, because its second token then comes earlier.

A decode worker computes prompts in small chunks, which hardly slow down the decodes beside them. A prompt
that fits into one chunk, perhaps after its cached part, saves the handover. A longer prompt gains only if the
prefill workers have a queue: it then uses the spare speed of the decode worker.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

HANDOVER_STEPS = 2.0
"""Decode steps between the first token, from prefill, and the second."""

OverflowReason = Literal["short", "cached", "saturated", "no_prefill"]
REASONS: tuple[OverflowReason, ...] = ("short", "cached", "saturated", "no_prefill")


@dataclass(frozen=True, slots=True)
class ChunkOffer:
    """Spare prefill speed of a decode worker, as reported. `tokens` is 0 if it is unknown or none."""

    tokens: int
    """Prompt tokens in one step."""
    seconds: float
    """Duration of a step with so many prompt tokens."""
    step_seconds: float
    """Duration of a step without prompt tokens."""
    waiting: int = 0
    """Prompt tokens that it computes before this request."""
    cached: int = 0
    """Cached tokens of this prompt."""

    def second_token(self, tokens: int) -> float:
        """Seconds until the second token of a prompt of `tokens` tokens; infinite without an offer."""
        if not self.tokens:
            return math.inf
        full, rest = divmod(self.waiting + tokens - self.cached, self.tokens)
        seconds = full * self.seconds + self.step_seconds
        if rest:
            share = rest / self.tokens
            seconds += self.step_seconds + share * max(0.0, self.seconds - self.step_seconds)
        return seconds


def overflow(
    tokens: int, prefill_seconds: float | None, offers: Sequence[ChunkOffer]
) -> tuple[int, OverflowReason] | None:
    """Returns the index of the offer to take, and the reason; None to use a prefill worker.

    Args:
        tokens: length of the prompt.
        prefill_seconds: estimate until the first token of the chosen prefill worker; None: there is none.
        offers: the first is that of the decode worker that was chosen to decode.
    """
    best = min(range(len(offers)), key=lambda i: offers[i].second_token(tokens))
    offer = offers[best]
    if prefill_seconds is None:
        return best, "no_prefill"  # the only way to compute the prompt
    if offer.second_token(tokens) >= prefill_seconds + HANDOVER_STEPS * offers[0].step_seconds:
        return None
    if offer.waiting + tokens <= offer.tokens:
        return best, "short"
    if offer.waiting + tokens - offer.cached <= offer.tokens:
        return best, "cached"
    return best, "saturated"
