"""Asks workers for their status, as when no router runs."""

import asyncio
from collections.abc import Sequence
from typing import Any

from grpc.aio import AioRpcError

from baton.rpc import worker_pb2 as pb
from baton.rpc.channel import connect
from baton.rpc.plain import described_as
from baton.rpc.stubs import WorkerStub
from baton.rpc.tls import TlsFiles

ASK_SECONDS = 5.0
"""For a worker to answer."""


async def report_of(addresses: Sequence[str], secret: bytes, tls: TlsFiles | None) -> dict[str, Any]:
    """Returns a report in the form of a router's. It is ready if all workers answer."""
    workers = await asyncio.gather(*(_ask(address, secret, tls) for address in addresses))
    answered = all(worker["state"] != "silent" for worker in workers)
    return {"router": {"ready": answered}, "workers": workers, "cluster": None}


async def _ask(address: str, secret: bytes, tls: TlsFiles | None) -> dict[str, Any]:
    try:
        async with connect(address, secret, tls) as channel:
            described = await WorkerStub(channel).Describe(pb.DescribeRequest(), timeout=ASK_SECONDS)
    except AioRpcError as error:
        reason = f"no answer ({error.code().name}: {error.details()})"
        remedy = "Look at its log, its address, and the secret of the cluster."
        return {"address": address, "state": "silent", "reason": reason, "remedy": remedy}
    draining = described.status.health == pb.WorkerStatus.HEALTH_DRAINING
    return {"address": address, "state": "draining" if draining else "ready", **described_as(described)}
