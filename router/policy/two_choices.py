"""Decode: of two workers with room, drawn at random, the less loaded one.

Loads are up to a second old. Taking the best of all would send everybody to the same worker until the next
report; the better of two random ones (Mitzenmacher 2001) stays balanced on stale data.
"""

import random
from collections.abc import Collection, Sequence

from router.policy.decode_load import DecodeLoad

DRAWS = 4


def two_choices(
    loads: Sequence[DecodeLoad], *, tokens: int, rng: random.Random, avoid: Collection[str] = ()
) -> str | None:
    """The worker to ask for a reservation of `tokens` positions; None when none seems to have room.

    Those in `avoid`, which failed this request, are taken only when there is no other.
    """

    # A few draws find room in any pool that is not nearly full, without looking at all of it.
    count = len(loads)
    for _ in range(DRAWS if count > 2 else 0):
        first, second = int(rng.random() * count), int(rng.random() * (count - 1))  # `sample` takes 2 µs
        pair = loads[first], loads[second + (second >= first)]
        drawn = [load for load in pair if load.has_room(tokens) and load.worker not in avoid]
        if drawn:
            return min(drawn, key=lambda load: load.pressure).worker
    found = [load for load in loads if load.has_room(tokens)]
    found = [load for load in found if load.worker not in avoid] or found
    if not found:
        return None
    drawn = found if len(found) <= 2 else rng.sample(found, 2)
    return min(drawn, key=lambda load: load.pressure).worker
