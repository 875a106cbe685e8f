"""Which failures of the connection to a worker a router logs.

    lost ─▶ logged ─▶ ready again, logged ─▶ lost within `FLAP_SECONDS`: it flaps, and is only counted
                                          └▶ ready for `FLAP_SECONDS`: the count is logged, if there is one

Pure.
"""

import math
from dataclasses import dataclass, field

FLAP_SECONDS = 60.0
"""A connection that is lost again within this time flaps."""
_REASONS = 64
"""Of one worker that are remembered."""


@dataclass(slots=True)
class Flaps:
    """Owned by the connection to one worker."""

    count: int = 0
    """How often it was lost since it was last logged."""
    _lost_at: float = -math.inf
    _logged: set[str] = field(default_factory=set)
    """Reasons, since it flaps or was not reached."""

    def lost(self, now: float, reason: str, *, was_ready: bool) -> bool:
        """Returns whether this failure is to be logged. `was_ready`: it ended a connection; else this is one
        more try. `now`: seconds of a monotonic clock."""
        if was_ready:
            flaps, self._lost_at = now < self._lost_at + FLAP_SECONDS, now
            self.count += flaps
            if not flaps:
                self._logged.clear()
        if reason in self._logged:
            return False
        if len(self._logged) == _REASONS:
            self._logged.clear()
        self._logged.add(reason)
        return True

    def taken(self) -> int:
        """Returns the count, which is logged now."""
        count, self.count = self.count, 0
        return count
