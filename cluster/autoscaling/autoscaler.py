"""Polls the load of every worker once a second, and resizes the pools as `balancer` decides.

It runs in the process of the supervisor. A pool that grows while the other shrinks gets a worker from it. On
Ray, a new worker requests its resources, and Ray's own autoscaler adds a machine if none has them free.
"""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from grpc import RpcError
from grpc.aio import Channel

from baton.cluster.autoscaling.balancer import Balancer
from baton.cluster.autoscaling.scaling import Needed, Sample
from baton.cluster.supervision.blueprint import Pool
from baton.cluster.supervision.calls import named_pool, set_pool, status_of
from baton.cluster.supervision.role_process import RoleState
from baton.cluster.supervision.supervisor import Supervisor
from baton.router.workers.checks import clear_invalid_rates, step_model
from baton.rpc import worker_pb2 as pb
from baton.rpc.channel import connect
from baton.rpc.tls import TlsFiles

INTERVAL = 1.0  # seconds between two polls
PATIENCE = 2.0  # seconds for a worker to answer

log = logging.getLogger(__name__)


class Autoscaler:
    """Owns the connections to the workers and the last status of each."""

    def __init__(
        self, supervisor: Supervisor, balancer: Balancer, secret: bytes, tls: TlsFiles | None = None
    ) -> None:
        self._supervisor = supervisor
        self._secret = secret
        self._tls = tls
        self._balancer = balancer
        self._channels: dict[str, Channel] = {}
        self._last: dict[str, pb.WorkerStatus] = {}
        self._held_tokens = 0  # prompt tokens in the routers, as far as known
        self._failure = ""  # of the last poll

    async def run(self) -> None:
        """Polls until it is cancelled."""
        if not self._balancer.scalers:
            await asyncio.Event().wait()
        try:
            while True:
                await asyncio.sleep(INTERVAL)
                try:
                    self._supervisor.pools = await self.poll(time.monotonic())
                    self._failure = ""
                except Exception as error:  # a defect: the cluster serves on with the pools that it has
                    if self._fails_anew(error):
                        log.exception("a poll of the autoscaler failed; the next one is tried")
                await self._supervisor.tell_routers()
        finally:
            for channel in self._channels.values():
                await channel.close(None)

    def _fails_anew(self, error: Exception) -> bool:
        """Says in the report that a poll failed. Returns whether this failure is another than the last."""
        before = self._failure
        self._failure = f"the autoscaler failed ({type(error).__name__}: {error}); it goes on"
        sizes = {pool: len(self._supervisor.pool(pool)) for pool in self._balancer.scalers}
        self._supervisor.pools = self._report(sizes, {}, self._failure)
        return self._failure != before

    async def poll(self, now: float) -> dict[str, dict[str, Any]]:
        """Resizes the pools. Returns their part of the report."""
        scalers = self._balancer.scalers
        addresses = self._supervisor.worker_addresses()
        await self.forget_all_but(set(addresses))
        held_tokens = await self._supervisor.tokens_held() if "prefill" in scalers else None
        self._held_tokens = self._held_tokens if held_tokens is None else held_tokens
        answers = await asyncio.gather(*map(self.ask, addresses))
        samples = {
            address: sample for address, sample in zip(addresses, answers, strict=True) if sample is not None
        }
        pools = {
            a: pool for a, s in samples.items() if not s.silent and (pool := named_pool(s.status)) is not None
        }
        self._supervisor.set_pools(pools)
        # Workers in a pause look idle, and requests wait in the routers: neither says what the load needs.
        paused = any(s.status.pause or s.status.released for s in samples.values() if not s.silent)
        needs: dict[Pool, Needed | None] = {}
        sizes: dict[Pool, int] = {}
        starting: set[Pool] = set()
        for pool in scalers:
            states = self._supervisor.pool(pool)
            await self._join_groups(states, pools)
            reports = [samples[each] for state in states for each in state.addresses if each in samples]
            needs[pool] = None if paused else self._balancer.needed(now, pool, reports, self._held_tokens)
            sizes[pool] = len(states)
            if any(state.phase != "ready" and not state.crash_loop for state in states):
                starting.add(pool)
        workers = {pool: None if need is None else need.workers for pool, need in needs.items()}
        new_sizes = self._balancer.decide(now, workers, sizes, starting)
        await self._resize(sizes, new_sizes, samples)
        unknown = "the cluster is paused" if paused else "no worker has measured its speed yet"
        return self._report(new_sizes, needs, unknown)

    def _report(
        self, sizes: Mapping[Pool, int], needs: Mapping[Pool, Needed | None], unknown: str
    ) -> dict[str, dict[str, Any]]:
        """`unknown`: why the need of a pool is not known."""
        return {
            pool: {
                "size": sizes[pool],
                "ready": sum(state.phase == "ready" for state in self._supervisor.pool(pool)),
                "least": scaler.least,
                "most": scaler.most,
                "group": self._balancer.group,
                "needed": None if (need := needs.get(pool)) is None else round(need.workers, 2),
                "why": need.why if need else unknown,
            }
            for pool, scaler in self._balancer.scalers.items()
        }

    async def _resize(
        self, sizes: Mapping[Pool, int], new_sizes: Mapping[Pool, int], samples: Mapping[str, Sample]
    ) -> None:
        grows = [pool for pool in new_sizes if new_sizes[pool] > sizes[pool]]
        shrinks = [pool for pool in new_sizes if new_sizes[pool] < sizes[pool]]
        if grows and shrinks:
            await self.flip(shrinks[0], grows[0], samples)
            return
        for pool in (*grows, *shrinks):
            self._supervisor.resize(pool, new_sizes[pool])

    async def flip(self, source: Pool, target: Pool, samples: Mapping[str, Sample]) -> None:
        """Moves the worker of `source` that has the least work, or the group, unless no other is ready there:
        the size of a pool includes workers that start or crash. If that fails, a later poll decides again."""
        answered = [
            state.addresses
            for state in self._supervisor.pool(source)
            if state.addresses and all(a in samples and not samples[a].silent for a in state.addresses)
        ]
        if len(answered) < 2:
            return

        def left(addresses: Sequence[str]) -> tuple[int, int]:
            """What they would still do in their old pool."""
            statuses = [samples[address].status for address in addresses]
            return sum(x.tokens_waiting for x in statuses), sum(x.requests_running for x in statuses)

        addresses = min(answered, key=left)
        # The first one last: where it is, its group counts.
        if all([await self._move(address, target) for address in reversed(addresses)]):
            log.info("moved %s from the %s pool to the %s pool", " and ".join(addresses), source, target)
            self._supervisor.set_pools({addresses[0]: target})

    async def _join_groups(self, states: Sequence[RoleState], pools: Mapping[str, Pool]) -> None:
        """A worker of a group that could not be reached when its group moved follows the first one now."""
        for state in states:
            for address in state.addresses[1:]:
                pool = pools.get(state.addresses[0])
                if pool is not None and pools.get(address, pool) != pool:
                    await self._move(address, pool)

    async def _move(self, address: str, pool: Pool) -> bool:
        try:
            await set_pool(self._channels[address], pool, PATIENCE)
        except RpcError as error:
            log.warning("%s was not moved to the %s pool: %s", address, pool, error)
            return False
        return True

    async def ask(self, address: str) -> Sample | None:
        """The load of a worker: its last one, if it does not answer. None: it has never answered."""
        if address not in self._channels:
            self._channels[address] = connect(address, self._secret, self._tls)
        status = await status_of(self._channels[address], PATIENCE)
        if status is None:  # health checks and /status report what is wrong with the worker
            last = self._last.get(address)
            return None if last is None else Sample(last, step_model(last.step_model), 0, 0, silent=True)
        clear_invalid_rates(status)
        # What a worker did before its first answer came earlier than the load that is measured.
        before = self._last.get(address, status)
        self._last[address] = status
        return Sample(
            status,
            step_model(status.step_model),
            done=max(0, status.computed_prompt_tokens - before.computed_prompt_tokens),
            refused=max(0, status.no_room - before.no_room),
        )

    async def forget_all_but(self, addresses: set[str]) -> None:
        for address in self._channels.keys() - addresses:
            await self._channels.pop(address).close(None)
            self._last.pop(address, None)
