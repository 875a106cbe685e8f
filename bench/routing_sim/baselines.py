"""Policies to compare with. The router does not offer them."""

from __future__ import annotations

import random

import numpy as np

from baton.router.policy import (
    DecodeLoad,
    PrefillPolicy,
    PrefillRequest,
    PrefillSnapshot,
    round_robin,
    sticky,
)


def least_loaded(snapshot: PrefillSnapshot, request: PrefillRequest) -> int:
    """The shortest queue in seconds. Ignores caches."""
    return int(snapshot.wait.argmin())


def pure_hash(snapshot: PrefillSnapshot, request: PrefillRequest) -> int:
    """Consistent hashing by session. Ignores queues."""
    return next(row for row in snapshot.ring.walk(request.key) if np.isfinite(snapshot.wait[row]))


def prefix_only(snapshot: PrefillSnapshot, request: PrefillRequest) -> int:
    """The longest cached prefix, with any queue. The shortest queue if no worker has a prefix."""
    return min(snapshot.cached.holders() or snapshot.rows.tolist(), key=snapshot.wait.__getitem__)


POLICIES: dict[str, PrefillPolicy] = {
    "sticky": sticky,
    "round_robin": round_robin,
    "least_loaded": least_loaded,
    "pure_hash": pure_hash,
    "prefix_only": prefix_only,
}


def emptiest(loads: list[DecodeLoad], *, tokens: int, rng: random.Random) -> str | None:
    """The decode worker with the least pressure of all, by its last report."""
    found = [load for load in loads if load.fits(tokens)]
    return min(found, key=lambda load: load.pressure).worker if found else None
