"""Prefill: where the session's prefix is, unless the wait there costs more than computing it again.

1. The session's *home* is found by consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam
   2018): the first worker on the ring, from the session's point on, whose wait is within `BOUND` times the
   mean. So sessions, and with them cache space, spread evenly; new ones avoid the busy; a hot one overflows
   to its neighbours on the ring, which are others for each session: many routers with the same old loads do
   not all run to the same worker.
2. The home is left only for a worker that has most of the prefix cached, and only where that costs less time:

       cost = wait + RECOMPUTE × uncached tokens / speed        (seconds)

   That keeps a session where it overflowed to, and brings requests of any session to a long document that is
   cached elsewhere. `RECOMPUTE` above 1 counts what the request itself does not feel: tokens computed twice
   delay those who come after, and their KV, held twice, takes the place of somebody else's.
3. The more workers have a prefix, and the shorter it is, the less reason it is to leave: `COPY_TOKENS` for
   each of them must be saved, unless there is but one. A system prompt is soon computed at home too. If whole
   sessions were led by it to those who have it already, their caches would overflow while others idle:
   `bench.routing_sim` with 64 workers finds 71 % instead of 87 %. A document of thousands of tokens stays on
   few.
"""

import numpy as np

from router.policy.prefill import PrefillRequest, PrefillSnapshot

BOUND = 1.25
RECOMPUTE = 1.5
COPY_TOKENS = 512


def sticky(snapshot: PrefillSnapshot, request: PrefillRequest) -> int:
    wait, cached, rows = snapshot.wait, snapshot.cached, snapshot.rows
    bound = BOUND * float(np.add.reduce(wait if len(rows) == len(wait) else wait[rows])) / len(rows)
    # Some worker is within the mean.
    home = next(row for row in snapshot.ring.walk(request.key) if wait[row] <= bound)
    saved = cached.most - cached.of(home)
    if not saved:
        return home
    more = cached.holders()
    if len(more) > max(1, saved / COPY_TOKENS):
        return home

    def cost(row: int, hit: int) -> float:
        return wait[row] + RECOMPUTE * (request.tokens - hit) / snapshot.speed[row]

    best = min(more, key=lambda row: cost(row, cached.most))
    return best if cost(best, cached.most) < cost(home, cached.of(home)) else home
