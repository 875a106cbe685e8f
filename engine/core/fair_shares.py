"""Gives tenants equal shares of the prompt tokens. Pure.

A request's tag is the virtual time at which its prompt would be done if the tenants shared every step. The
request with the least tag goes first. This is self-clocked fair queueing (Golestani 1994), here for each
chunk. So a short prompt waits for one step of another tenant's long prompt, not for all of it.
"""


class FairShares:
    """The tags of the newest requests, and the virtual time: the tag up to which requests were served."""

    def __init__(self) -> None:
        self.now = 0  # virtual time, in prompt tokens
        self._tags: dict[bytes, int] = {}  # by tenant, the tag of its newest request; only tags after `now`

    def tag(self, tenant: bytes, tokens: int) -> int:
        """The tag of a new request with so many prompt tokens to compute."""
        # A tenant without requests under way has no claim for the time before.
        self._tags = {tenant: tag for tenant, tag in self._tags.items() if tag > self.now}
        self._tags[tenant] = self._tags.get(tenant, self.now) + tokens
        return self._tags[tenant]

    def served(self, tag: int) -> None:
        """Requests up to this tag were served."""
        self.now = max(self.now, tag)
