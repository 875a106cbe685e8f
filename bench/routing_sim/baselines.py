"""Policies to compare with. The same interface, none worth shipping."""

import numpy as np

from router.policy import PrefillPolicy, PrefillRequest, PrefillSnapshot, round_robin, sticky


def least_loaded(snapshot: PrefillSnapshot, request: PrefillRequest) -> int:
    """The shortest queue in seconds, whatever is cached."""
    return int(snapshot.wait.argmin())


def pure_hash(snapshot: PrefillSnapshot, request: PrefillRequest) -> int:
    """Consistent hashing by session, whatever waits."""
    return next(row for row in snapshot.ring.walk(request.key) if np.isfinite(snapshot.wait[row]))


def prefix_only(snapshot: PrefillSnapshot, request: PrefillRequest) -> int:
    """The longest cached prefix, whatever waits; where nobody has any, the shortest queue."""
    return min(snapshot.cached.holders() or snapshot.rows.tolist(), key=snapshot.wait.__getitem__)


POLICIES: dict[str, PrefillPolicy] = {
    "sticky": sticky,
    "round_robin": round_robin,
    "least_loaded": least_loaded,
    "pure_hash": pure_hash,
    "prefix_only": prefix_only,
}
