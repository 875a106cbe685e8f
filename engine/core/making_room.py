"""Which requests give up their blocks for a waiting one, so that two workers never wait for each other
(`request_lives` has what waits for what). Pure."""

from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import Any

from baton.engine.core.live_request import LiveRequest, Phase
from baton.engine.core.request_lives import RequestLives


def to_drop(
    lives: RequestLives, wanted: Callable[[Any], bool], spare: Iterable[LiveRequest]
) -> list[LiveRequest]:
    """The `spare` requests, in their order, that must be dropped so that a waiting request can start.

    This is the first waiting request with an owner that is `wanted`; the requests before it in the queue
    start before it. If there is not enough room for all of these, as many start as can, and no request is
    dropped for the others. Spare requests are held or reserved. Reserved ones stay while a request is
    running, since that one leaves its seat and its blocks."""
    if not any(wanted(live.owner) for live in lives.waiting):
        return []
    pool, memory = lives.pool, lives.memory
    droppable = list(spare)
    if lives.running or lives.loading:
        droppable = [live for live in droppable if live.phase is Phase.HELD]
    seats, min_drops = lives.seats, 0
    if seats <= 0:
        reserved = next((live for live in droppable if live.phase is Phase.RESERVED), None)
        if reserved is None:
            return []
        droppable.remove(reserved)
        droppable.insert(0, reserved)
        seats = min_drops = 1
    holders = [*lives.leaving, *droppable]
    certain = len(lives.leaving)
    need, without_hits, window_need, hits, count, dropped = 0, 0, 0, set[int](), 0, 0

    def is_enough(drops: int) -> bool:
        going = holders[: certain + drops]
        freed = pool.freed_by(live.blocks for live in going)
        # As `RequestMemory.headroom`.
        headroom = 0 if count == 1 and len(freed) == pool.held else memory.watermark
        return any(  # as `RequestMemory.admit`
            memory.has_room(
                blocks + headroom,
                count,
                window_need + memory.kept_windows,
                cached,
                free_blocks=pool.free + len(freed.difference(cached)) - pool.unreferenced(cached),
                released=going,
            )
            for blocks, cached in ((need, hits), (without_hits, ()))
        )

    for live in lives.waiting[:seats]:  # later ones need a seat, not blocks
        count += 1
        cached = memory.hits(live)
        hits.update(cached)
        blocks = memory.blocks_for(len(live.token_ids))
        need += blocks - len(cached)
        without_hits += blocks
        window_need += memory.window_need(len(live.token_ids))
        if not is_enough(len(droppable)):
            break
        dropped = bisect_left(range(len(droppable)), True, lo=max(min_drops, dropped), key=is_enough)
        if wanted(live.owner):
            break
    return droppable[:dropped]
