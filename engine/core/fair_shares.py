"""The tags that give tenants equal shares of the prompt tokens. Pure."""


class FairShares:
    """Gives tenants equal shares of the prompt tokens, by the tags of their requests.

    A tag is the virtual time at which the prompt would be done if the tenants shared every step. The request
    with the least tag goes first. This is self-clocked fair queueing (Golestani 1994), here for each
    chunk. So a short prompt waits for one step of another tenant's long prompt, not for all of it."""

    def __init__(self) -> None:
        self.now = 0  # virtual time, in prompt tokens: requests up to this tag were served
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
