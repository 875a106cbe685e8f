"""Prefill: the worker that has the session's prefix cached, unless computing it elsewhere is faster.

1. Each session has a home worker, by consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam
   2018): the first worker on the ring, from the session's point on, with a wait of at most `BOUND` times the
   mean. So sessions and their cached KV spread evenly, and new sessions avoid busy workers. A session whose
   home is busy goes to the next worker on the ring. That worker differs between sessions, so many routers
   with the same old loads do not all choose the same worker.
2. Another worker is chosen only if it has the most of the prefix cached, and if it costs less:

       cost = wait + load + RECOMPUTE × uncached tokens / speed        (seconds)

   `load` is the time to copy what the worker has below its device: in the memory or on the disk of its host.
   So a session stays at the worker that it went to, and requests of any session find a long document that is
   cached elsewhere. `RECOMPUTE` is above 1 because computing tokens twice also delays later requests, and
   their KV takes cache space twice.
3. The other worker must save at least `COPY_TOKENS` for each worker that has the prefix, unless there is only
   one. A short prefix of many sessions, such as a system prompt, is soon computed at home too. If it
   attracted whole sessions, the caches of a few workers would overflow while others are idle:
   `bench.routing_sim` with 64 workers then has 71 % cache hits instead of 87 %. A document of thousands of
   tokens stays on few workers.
"""

import numpy as np

from baton.router.policy.prefill import PrefillRequest, PrefillSnapshot

BOUND = 1.25
RECOMPUTE = 1.5
COPY_TOKENS = 512


def sticky(snapshot: PrefillSnapshot, request: PrefillRequest) -> int:
    wait, cached, rows = snapshot.wait, snapshot.cached, snapshot.rows
    bound = BOUND * float(np.add.reduce(wait if len(rows) == len(wait) else wait[rows])) / len(rows)
    # At least one worker is not above the mean, so the walk finds one.
    home = next(row for row in snapshot.ring.walk(request.key) if wait[row] <= bound)
    saved = cached.most - cached.of(home)
    if not saved:
        return home
    more = cached.holders()
    if len(more) > max(1, saved / COPY_TOKENS):
        return home

    def cost(row: int, hit: int) -> float:
        return wait[row] + snapshot.load(row) + RECOMPUTE * (request.tokens - hit) / snapshot.speed[row]

    best = min(more, key=lambda row: cost(row, cached.most))
    return best if cost(best, cached.most) < cost(home, cached.of(home)) else home
