"""What an operator sets of plans. Routers, desks and simulated routers take it whole."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    ttft_target: float | None = None
    """Seconds that users are ready to wait for a first token. None: as for `placement.TTFT_GAPS` gaps."""
    overflow: bool = True
    """One worker prefills and decodes a request when that costs less than a handover."""
    prefix_fetches: bool = True
    """A worker fetches what another worker has cached of a prompt, where that is faster than computing it."""
    split_prompts: bool = True
    """Several workers compute a prompt at the same time, if its first token is expected earlier that way."""
    decode_only: bool = False
    """The cluster has no prefill workers."""
    routing_policy: str = "sticky"
    """One of `router.policy.prefill.PREFILL_POLICIES`."""


DEFAULT_SETTINGS = PlanSettings()
