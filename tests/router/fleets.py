"""Workers as plans see them, without a router."""

import random
from collections.abc import Sequence
from typing import Any

from baton.router.policy.decode import DecodeCaches, DecodeLoad, DecodePool
from baton.router.policy.fleet import Fleet, Seen
from baton.router.policy.prefill import sticky
from baton.router.policy.prefill_loads import PrefillLoads
from baton.rpc import worker_pb2 as pb


def seen_worker(row: int, load: DecodeLoad, pool: "pb.Pool" = pb.POOL_PREFILL, **known: Any) -> Seen:
    """A worker in one of the pools."""
    return Seen(load.worker, row=row, decode_load=load, pool=pool, **known)


def fleet_of(
    loads: PrefillLoads, workers: Sequence[Seen], *, lost_decode: bool = False, **given: Any
) -> Fleet:
    """`loads`: they serve in it. `lost_decode`: the decode pool had workers."""
    caches = DecodeCaches(loads.index)
    for worker in workers:
        caches.join(worker.row, worker.load)
        caches.serve(worker.row, worker.ready_in(pb.POOL_DECODE))
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
        caches=caches,
        policy=sticky,
        **given,
    )
