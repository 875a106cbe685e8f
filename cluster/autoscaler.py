"""Polls the load of every worker once a second and resizes the pools as `scaling` decides.

It runs in the process of the supervisor. On Ray, a new worker requests its resources, and Ray's own
autoscaler adds a machine if none has them free.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, Literal

import rpc
from cluster.options import PoolOptions, PoolSize
from cluster.scaling import DecodeDemand, DecodeLoad, Needed, PrefillDemand, PrefillLoad, Scaler
from cluster.supervisor import Supervisor
from rpc import TlsFiles
from rpc import worker_pb2 as pb
from rpc.worker_pb2_grpc import WorkerStub

INTERVAL = 1.0  # seconds between two polls
PATIENCE = 2.0  # seconds for a worker to answer
TTIT_TARGET = 100.0  # milliseconds, if the user sets no target

ScaledRole = Literal["prefill", "decode"]


@dataclass(frozen=True)
class Sample:
    """The answer of one worker to a poll.

    Attributes:
        done: prompt tokens that it prefilled since the last poll.
        refused: reservations that it refused for want of room since the last poll.
    """

    status: pb.WorkerStatus
    done: int
    refused: int


class Autoscaler:
    """Owns the connections to the workers and the history of their loads."""

    def __init__(
        self, supervisor: Supervisor, pools: PoolOptions, secret: bytes, tls: TlsFiles | None = None
    ) -> None:
        self._supervisor = supervisor
        self._secret = secret
        self._tls = tls
        self._sizes: dict[ScaledRole, PoolSize] = {"prefill": pools.prefill, "decode": pools.decode}
        self._scalers = {
            role: Scaler(size.least, size.most, pools.shrink_after)
            for role, size in self._sizes.items()
            if size.least < size.most
        }
        self._prefill = PrefillDemand(pools.ttft_target / 1000)
        self._decode = DecodeDemand((pools.ttit_target or TTIT_TARGET) / 1000)
        self._done = 0
        self._channels: dict[str, rpc.Channel] = {}
        self._last: dict[str, pb.WorkerStatus] = {}

    async def run(self) -> None:
        """Polls until it is cancelled."""
        if not self._scalers:
            await asyncio.Event().wait()
        try:
            while True:
                await asyncio.sleep(INTERVAL)
                await self._poll(time.monotonic())
        finally:
            for channel in self._channels.values():
                await channel.close(None)

    async def _poll(self, now: float) -> None:
        addresses = {role: self._ready(role) for role in self._scalers}
        await self._forget_all_but({address for ready in addresses.values() for address in ready})
        held = await self._supervisor.tokens_held() if "prefill" in self._scalers else 0
        pools: dict[str, Any] = {}
        for role, scaler in self._scalers.items():
            answers = await asyncio.gather(*map(self._ask, addresses[role]))
            samples = [sample for sample in answers if sample is not None]
            if len(samples) < len(answers) or (role == "prefill" and held is None):
                continue  # without every answer the load would look smaller than it is
            needed = self._needed(role, now, samples, held or 0)
            states = self._supervisor.pool(role)
            starting = any(state.phase != "ready" and not state.crash_loop for state in states)
            workers = None if needed is None else needed.workers
            size = scaler.decide(now, workers, len(states), starting=starting)
            if size != len(states):
                self._supervisor.resize(role, size)
            pools[role] = {
                "size": size,
                "ready": len(samples),
                "least": scaler.least,
                "most": scaler.most,
                "needed": None if workers is None else round(workers, 2),
                "why": needed.why if needed else "no worker has measured its speed yet",
            }
        self._supervisor.pools = {**self._supervisor.pools, **pools}
        await self._supervisor.refresh()

    def _needed(self, role: ScaledRole, now: float, samples: list[Sample], held: int) -> Needed | None:
        if role == "prefill":
            self._done += sum(sample.done for sample in samples)
            return self._prefill.needed(now, prefill_load([s.status for s in samples], self._done, held))
        return self._decode.needed(decode_load(samples))

    # ------------------------------------------------------------ workers

    def _ready(self, role: ScaledRole) -> list[str]:
        return [
            str(state.ready["address"]) for state in self._supervisor.pool(role) if state.ready is not None
        ]

    async def _ask(self, address: str) -> Sample | None:
        if address not in self._channels:
            self._channels[address] = rpc.connect(address, self._secret, self._tls)
        answer: Awaitable[pb.WorkerStatus] = WorkerStub(self._channels[address]).GetStatus(
            pb.StatusRequest(), timeout=PATIENCE
        )
        try:
            status = await answer
        except rpc.RpcError:
            return None  # health checks and /status report what is wrong with the worker
        before = self._last.get(address, pb.WorkerStatus())
        self._last[address] = status
        return Sample(
            status,
            done=max(0, status.prompt_tokens - before.prompt_tokens),
            refused=max(0, status.no_room - before.no_room),
        )

    async def _forget_all_but(self, addresses: set[str]) -> None:
        for address in self._channels.keys() - addresses:
            await self._channels.pop(address).close(None)
            self._last.pop(address, None)


def prefill_load(statuses: list[pb.WorkerStatus], done: int, held: int) -> PrefillLoad:
    """The load of a prefill pool. `done`: tokens computed since the start; `held`: tokens in the routers."""
    speeds = [status.prefill_tokens_per_s for status in statuses if status.prefill_tokens_per_s]
    return PrefillLoad(
        done=done,
        waiting=held + sum(status.tokens_waiting for status in statuses),
        queued=held
        + sum(
            status.tokens_waiting
            * status.requests_waiting
            / (status.requests_waiting + status.requests_running)
            for status in statuses
            if status.requests_waiting
        ),
        speed=sum(speeds) / len(speeds) if speeds else 0.0,
    )


def decode_load(samples: list[Sample]) -> DecodeLoad:
    """The load of a decode pool.

    A worker that refused a reservation counts as full, even if it has free blocks: they do not suffice.
    """
    statuses = [sample.status for sample in samples]
    return DecodeLoad(
        kv_used=tuple(
            1.0 if sample.refused else 1 - sample.status.blocks_free / sample.status.blocks_total
            for sample in samples
        ),
        steps=tuple(s.step_seconds for s in statuses if s.requests_running and s.step_seconds),
    )
