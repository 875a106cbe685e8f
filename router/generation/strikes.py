"""What speaks against a request: how often its attempts failed, and whether it is time to give up.

Pure: no clock, no I/O.
"""

MAX_FAILURES = 3
# Of workers whose stream just ended. Of what an engine was computing when it died its worker tells, so other
# requests are innocent; but where whole machines die one after the other, it may be this one that kills them.
MAX_LOSSES = 12
CRASHES_TOGETHER = 2


class Strikes:
    """Of one request. Failures and losses count in a row without a new token; crashed steps count for life.

    Attributes:
        avoid: workers that failed it since its last token.
    """

    __slots__ = ("_crashes", "_failures", "_losses", "avoid")

    def __init__(self) -> None:
        self.avoid: set[str] = set()
        self._failures = self._losses = self._crashes = 0

    @property
    def count(self) -> int:
        """Attempts that failed in a row."""
        return self._failures + self._losses

    @property
    def out(self) -> bool:
        """It has failed too often."""
        return self._failures >= MAX_FAILURES or self._losses >= MAX_LOSSES

    @property
    def alone(self) -> bool:
        """It was in so many crashed steps that it runs alone in its batch from now on: if it is the reason,
        nobody else is struck with it."""
        return self._crashes >= CRASHES_TOGETHER

    def token(self) -> None:
        self._failures = self._losses = 0
        self.avoid.clear()

    def failed(self, worker: str, *, crashed: bool) -> None:
        """An attempt failed there; `crashed`: in a step that the engine did not survive."""
        self._failures += 1
        self._crashes += crashed
        self.avoid.add(worker)

    def lost(self, worker: str) -> None:
        """The worker was lost with the attempt, which says little about either."""
        self._losses += 1
        self.avoid.add(worker)
