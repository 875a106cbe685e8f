"""Calls to workers that several parts of the cluster make, and the names of pools."""

from __future__ import annotations

from collections.abc import Awaitable

import rpc
from cluster.plan import Pool
from rpc import worker_pb2 as pb
from rpc.worker_pb2_grpc import WorkerStub

_POOLS: dict[Pool, pb.Pool] = {"prefill": pb.POOL_PREFILL, "decode": pb.POOL_DECODE}
_NAMES: dict[pb.Pool, Pool] = {value: name for name, value in _POOLS.items()}


def pool_of(status: pb.WorkerStatus, first_pool: Pool) -> Pool:
    """The pool in which a worker serves now. `first_pool` is that of a worker that does not report one."""
    return _NAMES.get(status.pool, first_pool)


async def set_pool(channel: rpc.Channel, pool: Pool, timeout: float) -> pb.WorkerStatus:
    """Moves a worker to a pool. `timeout` is in seconds. Raises rpc.RpcError if it does not."""
    answer: Awaitable[pb.WorkerStatus] = WorkerStub(channel).SetPool(
        pb.SetPoolRequest(pool=_POOLS[pool]), timeout=timeout
    )
    return await answer
