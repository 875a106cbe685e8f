"""A scheduler without a model, for tests: adds requests and takes steps."""

from dataclasses import fields
from typing import Any

import torch

from baton.engine import Engine
from baton.engine.api.request import EngineRequest, Hooks
from baton.engine.core.block_pool import BlockPool
from baton.engine.core.cells import Cells
from baton.engine.core.elastic import Amounts, Budget
from baton.engine.core.live_request import LiveRequest
from baton.engine.core.prefix_cache import PrefixCache
from baton.engine.core.request_lives import RequestLives
from baton.engine.core.scheduler import Scheduler
from baton.engine.core.speculation import Speculation
from baton.engine.core.step_builder import Schedule
from baton.engine.core.units import Units
from baton.engine.core.window_blocks import WindowBlocks
from baton.engine.model_config import FULL_STEP

BLOCK = 4
ROOT = b"root"


def make(
    num_blocks: int = 32,
    seqs: int = 4,
    budget: int = 16,
    prefix_cache: bool = False,
    mixed_rows: tuple[int, ...] = (),
    full_step: int = FULL_STEP,
    states: int = 0,
    block_size: int = BLOCK,
    speculation: Speculation | None = None,
    window_blocks: int | None = None,
    elastic: bool = False,
    **cache: Any,
) -> Scheduler:
    """`window_blocks`: of layers with windows, for the `windows` of the cache. `elastic`: these are the ones
    at the start, and share memory with the blocks, in units of two; a unit of blocks has 3 pages, one of
    window blocks 2. `cache`: options of the prefix cache."""
    windows = window_units = block_units = memory = None
    if window_blocks is not None:
        count = window_blocks
        if elastic:
            assert num_blocks % 2 == 0, "a unit has two"
            present, count = -(-window_blocks // 2), num_blocks + window_blocks % 2 + window_blocks
            window_units = Units(0, count, 2, present, keeps_first=True)
            block_units = Units(0, num_blocks, 2, num_blocks // 2, keeps_first=True)
        windows = WindowBlocks(num_blocks, count, block_size, cache["windows"], budget, window_units)
    pool = BlockPool(num_blocks, block_size, windows, block_units)
    if elastic:
        assert windows is not None, "they share memory with blocks"
        memory = Budget(
            pool, None, None, pages=Amounts(blocks=3, windows=2), page_bytes=1, free_pages=0, memory=2
        )
    lives = RequestLives(
        pool,
        max_num_seqs=seqs,
        cache=PrefixCache(pool, ROOT, **cache) if prefix_cache else None,
        states=Cells[bytes](Units.fixed(states)) if states else None,
        budget=memory,
    )
    return Scheduler(
        lives,
        max_num_batched_tokens=budget,
        mixed_rows=mixed_rows,
        full_step=full_step,
        speculation=speculation,
    )


def add(
    scheduler: Scheduler, number: int, prompt: int, *, handover: bool = False, **options: Any
) -> LiveRequest:
    """`options`: as in `EngineRequest`."""
    request = EngineRequest(bytes([number]), list(range(prompt)), **options)
    return scheduler.lives.add(request, handover=handover)


def live_of(engine: Engine, request_id: bytes) -> LiveRequest:
    """The request with this id, which has not ended."""
    return next(live for live in engine.lives if live.id == request_id)


def end(engine: Engine, request_id: bytes) -> None:
    """Ends the request with this id, if there is one."""
    for live in [live for live in engine.lives if live.id == request_id]:
        engine.cancel(live)


def step(scheduler: Scheduler, chunk_limit: int | None = None) -> Schedule:
    """Runs a step like the engine, but without a model: every sampled token is 7."""
    schedule = scheduler.schedule(None if chunk_limit is None else lambda _: chunk_limit)
    scheduler.launched(schedule)
    schedule.end_leases()
    scheduler.lives.memory.landed(schedule)
    for live, positions in schedule.chunks.items():
        if live.num_left == 0:
            if not live.shared.unverified:
                scheduler.lives.memory.publish(live, positions.stop)
            live.alone = False
            live.token_ids.append(7)
            if live.handover:
                scheduler.lives.hold(live)
    return schedule


def tokens_waiting(scheduler: Scheduler) -> int:
    return sum(count for _, count, _ in scheduler.parts_waiting())


def tokens(schedule: Schedule) -> list[tuple[int, int, int]]:
    return [(live.id[0], chunk.start, chunk.stop) for live, chunk in schedule.chunks.items()]


def hooks_to(listener: Any) -> Hooks:
    """Hooks that call the methods of these names, if the listener has them."""

    def call(name: str) -> Any:
        return lambda *given: getattr(listener, name)(*given)

    names = [field.name for field in fields(Hooks) if callable(getattr(listener, field.name, None))]
    return Hooks(**{name: call(name) for name in names})


def of_slots(engine: Engine) -> list[torch.Tensor]:
    """Tensors [slots, …] of what all layers keep of requests."""
    layers = zip(engine.cache_spec, engine.caches, strict=True)
    return [x for spec, cache in layers for x in spec.slots(cache)]
