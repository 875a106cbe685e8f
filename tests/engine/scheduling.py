"""A scheduler without a model, for tests: adds requests and takes steps."""

from baton.engine.api.request import EngineRequest
from baton.engine.core.block_pool import BlockPool, StatePool
from baton.engine.core.chunk_limit import FULL_STEP
from baton.engine.core.live_request import LiveRequest
from baton.engine.core.schedule import Schedule
from baton.engine.core.scheduler import Scheduler

BLOCK = 4


def make(
    num_blocks: int = 32,
    seqs: int = 4,
    budget: int = 16,
    prefix_cache: bool = False,
    mixed_rows: tuple[int, ...] = (),
    full_step: int = FULL_STEP,
    states: int = 0,
) -> Scheduler:
    return Scheduler(
        BlockPool(num_blocks),
        block_size=BLOCK,
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        mixed_rows=mixed_rows,
        full_step=full_step,
        content_root=b"root" if prefix_cache else None,
        states=StatePool(states) if states else None,
    )


def add(
    scheduler: Scheduler,
    number: int,
    prompt: int,
    *,
    handover: bool = False,
    priority: int = 0,
    alone: bool = False,
    tenant: bytes = b"",
) -> LiveRequest:
    request = EngineRequest(
        bytes([number]), list(range(prompt)), priority=priority, alone=alone, tenant=tenant
    )
    scheduler.add(request, handover=handover)
    return scheduler.requests[request.id]


def step(scheduler: Scheduler, chunk_limit: int | None = None) -> Schedule:
    """Runs a step like the engine, but without a model: every sampled token is 7."""
    plan = scheduler.schedule(chunk_limit)
    for chunk in plan.chunks:
        scheduler.launched([chunk])
        scheduler.landed([chunk])
        live = chunk.live
        if live.num_left == 0:
            scheduler.verified(live, chunk.stop)
            live.alone = False
            live.token_ids.append(7)
            if live.handover:
                scheduler.hold(live)
    return plan


def tokens(plan: Schedule) -> list[tuple[int, int, int]]:
    return [(c.live.id[0], c.start, c.stop) for c in plan.chunks]
