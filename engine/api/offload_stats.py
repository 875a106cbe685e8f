"""The tiers that blocks of the prefix cache are offloaded to, as an engine reports them."""

from dataclasses import dataclass

from baton.content import Tier


@dataclass(frozen=True, slots=True)
class OffloadStats:
    """Blocks of the prefix cache in one tier. Counts are since the start."""

    tier: Tier
    blocks_total: int
    blocks_used: int
    tokens_per_s: float
    """Speed of recent loads. 0: not known."""
    saved: int
    """Blocks copied to the tier."""
    loaded_tokens: int
    """Prompt tokens with KV copied back."""
    dropped: int
    """Copies to the tier that came to nothing, since their blocks were needed before their end."""
    failed: int
    """Copies to the tier that came to nothing, since the disk was full or did not work."""
    damaged: int
    """Blocks that came back with other bytes than they were saved with. No request used them."""
