"""Whether a decode worker prefills a request itself, because its second token is there earlier then.

A decode worker takes prompts in chunks so small that those who decode beside them hardly notice. A prompt
that fits into one chunk saves the handover; any other is worth it only where the prefill workers have a
queue, so that what decode has to spare becomes capacity for prefill.
"""

from dataclasses import dataclass
from typing import Literal

HANDOVER_STEPS = 2.0
"""Decode steps from prefill's token to decode's next one."""

Reason = Literal["short", "saturated", "no_prefill"]
REASONS: tuple[Reason, ...] = ("short", "saturated", "no_prefill")


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


def overflow(tokens: int, prefill_seconds: float | None, offer: ChunkOffer) -> Reason | None:
    """Why it should; None when it should not.

    Args:
        tokens: positions to compute.
        prefill_seconds: until the first token from the best prefill worker; None: there is none.
        offer: of the decode worker that would take the request in any case.
    """
    if prefill_seconds is None:
        return "no_prefill"  # slowly is better than not at all
    if not offer.tokens:
        return None
    full, rest = divmod(offer.waiting + tokens, offer.tokens)
    here = full * offer.seconds + offer.step_seconds
    if rest:
        here += offer.step_seconds + rest / offer.tokens * max(0.0, offer.seconds - offer.step_seconds)
    there = prefill_seconds + HANDOVER_STEPS * offer.step_seconds
    if here >= there:
        return None
    return "short" if offer.waiting + tokens <= offer.tokens else "saturated"
