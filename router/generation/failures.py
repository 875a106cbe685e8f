"""Which ends of attempts are failures, and when a request has failed too often."""

from baton.rpc import worker_pb2 as pb

MAX_FAILURES = 3
# Attempts on workers that were lost. A lost worker names the requests in its crashed step, so the others are
# probably not the cause. But a request that is present each time a machine dies may be the cause.
MAX_LOSSES = 12
CRASHES_TOGETHER = 2

_NO_FAILURE = {
    pb.FAILURE_CODE_NO_ROOM,
    pb.FAILURE_CODE_HANDED_BACK,
    pb.FAILURE_CODE_DRAINING,
    pb.FAILURE_CODE_DROPPED,
    pb.FAILURE_CODE_NO_ADAPTER,
}


def is_failure(code: "pb.FailureCode") -> bool:
    """Whether the end of an attempt counts against the request and the worker."""
    return code not in _NO_FAILURE


class FailureCount:
    """Counts the failed attempts of a request. Pure: no clock, no I/O.

    A new token resets failures and losses, but not crashed steps.

    Attributes:
        avoid: addresses of workers that failed the request since its last token.
    """

    __slots__ = ("_crashes", "_failures", "_losses", "avoid")

    def __init__(self) -> None:
        self.avoid: set[str] = set()
        self._failures = self._losses = self._crashes = 0

    @property
    def total(self) -> int:
        """Failures and losses since the last token."""
        return self._failures + self._losses

    @property
    def exhausted(self) -> bool:
        """The request has failed too often."""
        return self._failures >= MAX_FAILURES or self._losses >= MAX_LOSSES

    @property
    def alone(self) -> bool:
        """The request was in several crashed steps. It may be the cause, so it runs in steps of its own."""
        return self._crashes >= CRASHES_TOGETHER

    def token(self) -> None:
        self._failures = self._losses = 0
        self.avoid.clear()

    def failed(self, worker: str, *, crashed: bool) -> None:
        """Records a failed attempt. `crashed`: the engine crashed in a step with this request."""
        self._failures += 1
        self._crashes += crashed
        self.avoid.add(worker)

    def lost(self, worker: str) -> None:
        """Records an attempt whose worker was lost."""
        self._losses += 1
        self.avoid.add(worker)
