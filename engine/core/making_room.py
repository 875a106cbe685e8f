"""Chooses which requests must go so that another one can start. `engine.core.scheduler` shows why."""

from collections.abc import Callable, Iterable

from baton.engine.core.live_request import LiveRequest, Phase
from baton.engine.core.scheduler import Scheduler


def to_drop(
    scheduler: Scheduler, wanted: Callable[[bytes], bool], closing: Iterable[bytes], spare: Iterable[bytes]
) -> list[bytes]:
    """The `spare` requests, in their order, that must be dropped so that a waiting request can start.

    This is the first waiting request that is `wanted`; the requests before it in the queue start before
    it. Spare requests are held or reserved. Reserved ones stay while a request is running, since that
    one leaves its seat and its blocks. The caller drops the `closing` requests in any case."""
    if not any(wanted(live.id) for live in scheduler.waiting):
        return []
    ending = [scheduler.requests[request_id] for request_id in closing]
    droppable = [scheduler.requests[request_id] for request_id in spare]
    if scheduler.running or scheduler.loading:
        droppable = [live for live in droppable if live.phase is Phase.HELD]
    seats = scheduler.seats + sum(live.phase is Phase.RESERVED for live in ending)
    dropped: list[LiveRequest] = []
    if seats <= 0:
        dropped = [live for live in droppable if live.phase is Phase.RESERVED][:1]
        seats = len(dropped)
    if not seats:
        return []
    need, hits, count = 0, set[int](), 0
    for live in scheduler.waiting[:seats]:  # later ones need a seat, not blocks
        count += 1
        cached = scheduler.memory.hits(live)
        hits.update(cached)
        need += scheduler.memory.blocks_for(len(live.token_ids)) - len(cached)
        if wanted(live.id):
            break
    going = [live.blocks for live in (*scheduler.leaving, *ending, *dropped)]
    for live in droppable:
        has_slots = scheduler.states is None or count <= scheduler.states.free + len(going)
        if has_slots and need + scheduler.memory.headroom <= scheduler.pool.free_after(going, hits):
            break
        if live not in dropped:
            going.append(live.blocks)
            dropped.append(live)
    return [live.id for live in dropped]
