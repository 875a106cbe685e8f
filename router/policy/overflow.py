"""Whether a decode worker prefills a request itself, because its second token is there earlier then.

A decode worker takes prompts in chunks so small that those who decode beside them hardly notice. A prompt
that fits into one chunk, by itself or because the worker has the rest of it cached, saves the handover; any
other is worth it only where the prefill workers have a queue, so that what decode has to spare becomes
capacity for prefill.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

HANDOVER_STEPS = 2.0
"""Decode steps from prefill's token to decode's next one."""

Reason = Literal["short", "cached", "saturated", "no_prefill"]
REASONS: tuple[Reason, ...] = ("short", "cached", "saturated", "no_prefill")


@dataclass(frozen=True, slots=True)
class ChunkOffer:
    """What a decode worker has to spare, as it reports it. Tokens 0: nothing, or it is not known yet."""

    tokens: int
    """Of prompts, that it takes in one step."""
    seconds: float
    """That such a step takes."""
    step_seconds: float
    """That a step without takes."""
    waiting: int = 0
    """Prompt tokens that it has to compute before."""
    cached: int = 0
    """Of this prompt, tokens that it need not compute."""

    def second_token(self, tokens: int) -> float:
        """Seconds until then for a prompt of so many tokens; infinite where nothing is offered."""
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
) -> tuple[int, Reason] | None:
    """Which of these should, and why; None when none should.

    Args:
        tokens: of the prompt.
        prefill_seconds: until the first token from the best prefill worker; None: there is none.
        offers: the first is of the decode worker that would take the request in any case.
    """
    best = min(range(len(offers)), key=lambda i: offers[i].second_token(tokens))
    offer = offers[best]
    if prefill_seconds is None:
        return best, "no_prefill"  # slowly is better than not at all
    if offer.second_token(tokens) >= prefill_seconds + HANDOVER_STEPS * offers[0].step_seconds:
        return None
    if offer.waiting + tokens <= offer.tokens:
        return best, "short"
    if offer.waiting + tokens - offer.cached <= offer.tokens:
        return best, "cached"
    return best, "saturated"
