"""Calls to workers that several parts of the cluster make, and the names of pools."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Collection

from grpc import RpcError
from grpc.aio import Channel

from baton.cluster.supervision.plan import Pool
from baton.rpc import worker_pb2 as pb
from baton.rpc.channel import connect
from baton.rpc.tls import TlsFiles
from baton.rpc.worker_pb2_grpc import WorkerStub

_POOLS: dict[Pool, pb.Pool] = {"prefill": pb.POOL_PREFILL, "decode": pb.POOL_DECODE}
_NAMES: dict[pb.Pool, Pool] = {value: name for name, value in _POOLS.items()}


def named_pool(status: pb.WorkerStatus) -> Pool | None:
    """The pool in which a worker serves now; None for a worker that does not report one."""
    return _NAMES.get(status.pool)


async def ask_pools(
    addresses: Collection[str], secret: bytes, tls: TlsFiles | None, timeout: float
) -> dict[str, Pool]:
    """The pools of the workers at these addresses, without workers that do not answer within `timeout` s."""

    async def ask(address: str) -> pb.WorkerStatus | None:
        async with connect(address, secret, tls) as channel:
            answer: Awaitable[pb.WorkerStatus] = WorkerStub(channel).GetStatus(
                pb.StatusRequest(), timeout=timeout
            )
            try:
                return await answer
            except RpcError:
                return None

    answers = zip(addresses, await asyncio.gather(*map(ask, addresses)), strict=True)
    return {
        address: pool
        for address, status in answers
        if status is not None and (pool := named_pool(status)) is not None
    }


async def set_pool(channel: Channel, pool: Pool, timeout: float) -> pb.WorkerStatus:
    """Moves a worker to a pool. `timeout` is in seconds. Raises RpcError if it does not."""
    answer: Awaitable[pb.WorkerStatus] = WorkerStub(channel).SetPool(
        pb.SetPoolRequest(pool=_POOLS[pool]), timeout=timeout
    )
    return await answer
