"""Workers as plans see them, without a router."""

import random
from collections.abc import Sequence
from typing import Any

from baton.router.policy.decode import DecodeLoad, DecodePool
from baton.router.policy.fleet import Fleet, Seen
from baton.router.policy.prefill import sticky
from baton.router.policy.prefill_loads import PrefillLoads
from baton.rpc import worker_pb2 as pb


def seen_worker(load: DecodeLoad, pool: "pb.Pool" = pb.POOL_PREFILL, **known: Any) -> Seen:
    """A worker in one of the pools."""
    worker = Seen(load.worker, row=load.row, pool=pool, **known)
    worker.load = load
    return worker


def fleet_of(
    loads: PrefillLoads, workers: Sequence[Seen], *, lost_decode: bool = False, **given: Any
) -> Fleet:
    """`loads`: they serve in it. `lost_decode`: the decode pool had workers."""
    prefills, decodes = (
        DecodePool(worker.load for worker in workers if worker.ready_in(pool))
        for pool in (pb.POOL_PREFILL, pb.POOL_DECODE)
    )
    return Fleet(
        now=0.0,
        rng=random.Random(1),
        named={worker.address: worker for worker in workers},
        workers={worker.row: worker for worker in workers},
        attached_rows=sum(1 << worker.row for worker in workers),
        prefills=prefills,
        decodes=decodes,
        had_decode=lost_decode,
        loads=loads,
        policy=sticky,
        **given,
    )
