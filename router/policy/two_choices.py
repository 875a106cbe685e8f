"""Decode: the less loaded of two random workers with free capacity.

Loads are up to a second old. With the best of all workers, all routers would choose the same worker until the
next report. The better of two random workers stays balanced with old data (Mitzenmacher 2001).
"""

import random
from collections.abc import Collection, Sequence

from baton.router.policy.decode_load import DecodeLoad

DRAWS = 4


def two_choices(
    loads: Sequence[DecodeLoad], *, tokens: int, rng: random.Random, avoid: Collection[str] = ()
) -> str | None:
    """Chooses the worker for a reservation of `tokens` positions; None if none seems to have capacity.

    Workers in `avoid`, which failed this request, are chosen only if there is no other.
    """

    # Unless the pool is nearly full, a few draws find capacity without a search through all workers.
    count = len(loads)
    for _ in range(DRAWS if count > 2 else 0):
        first, second = int(rng.random() * count), int(rng.random() * (count - 1))  # `sample` takes 2 µs
        pair = loads[first], loads[second + (second >= first)]
        drawn = [load for load in pair if load.fits(tokens) and load.worker not in avoid]
        if drawn:
            return min(drawn, key=lambda load: load.pressure).worker
    found = [load for load in loads if load.fits(tokens)]
    found = [load for load in found if load.worker not in avoid] or found
    if not found:
        return None
    drawn = found if len(found) <= 2 else rng.sample(found, 2)
    return min(drawn, key=lambda load: load.pressure).worker
