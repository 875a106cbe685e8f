"""Which worker has more of a prompt in its prefix cache than another one, which may fetch it."""

import math
import random
from typing import NamedTuple

from baton.content import CHUNK_TOKENS, Tier
from baton.router.workers.roster import Roster
from baton.router.workers.worker import Worker
from baton.rpc import worker_pb2 as pb

DRAWN = 2
"""Holders of a prefix to compare. More would all ask the fastest one."""


class PrefixSource(NamedTuple):
    """A worker with more of a prompt than another one, and the slowest tier with a part of it."""

    holder: Worker
    tier: Tier

    def seconds(self, asker: Worker, tokens: int) -> float:
        """Time in which the asker fetches so many tokens, by its recent measurements. 0: it has none."""
        link = asker.prefix_links.get((self.holder.description.incarnation, self.tier))
        return link.wait + tokens / link.tokens_per_s if link is not None else 0.0

    def message(self) -> pb.ContentSource:
        described = self.holder.description
        return pb.ContentSource(
            kv_address=described.kv_address,
            incarnation=described.incarnation,
            tier=pb.Tier.Name(self.tier),
        )


def prefix_source(
    roster: Roster, worker: Worker, chunks: list[int], tokens: int, rng: random.Random
) -> PrefixSource | None:
    """A worker of any pool that has more of a prompt cached than `worker`.

    None: there is no such worker, or fetching takes more than twice as long as computing. The bound is
    loose, because the worker decides in the end: it knows better what a few tokens of a long prompt cost.

    Only reported chunks count: a worker that will compute the prompt has nothing to send yet. A few
    workers are drawn at random, and the best of them is taken. So many requests do not go to one worker.
    """
    if not worker.attached:
        return None
    index = roster.loads.index
    cached = index.overlap(chunks, tokens, CHUNK_TOKENS, roster.attached_rows)
    own = cached.of(worker.row)
    best, most_saved = None, -math.inf
    for found, rows in cached.levels():
        if found < own + CHUNK_TOKENS:
            break
        wanted = chunks[own // CHUNK_TOKENS : found // CHUNK_TOKENS]
        have = [holder for holder in rows if index.has_reported(holder, wanted[-1])]
        for holder in have if len(have) <= DRAWN else rng.sample(have, DRAWN):
            source = PrefixSource(roster.by_row[holder], index.slowest_tier(holder, wanted))
            computing = (found - own) / roster.loads.speed(worker.row)
            saved = computing - source.seconds(worker, found - own)
            if saved > max(most_saved, -computing):
                best, most_saved = source, saved
    return best
