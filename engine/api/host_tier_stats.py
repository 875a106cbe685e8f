"""The host tier of a prefix cache, as an engine reports it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HostTierStats:
    """Blocks of the prefix cache in the memory of the host. Counts are since the start."""

    blocks_total: int
    blocks_used: int
    saved: int
    """Blocks copied to the host."""
    loaded_tokens: int
    """Prompt tokens with KV copied back from the host."""
    dropped: int
    """Copies to the host that came to nothing, since their blocks were needed before their end."""
    damaged: int
    """Blocks that came back with other bytes than they were saved with. No request used them."""
