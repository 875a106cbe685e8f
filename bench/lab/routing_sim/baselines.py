"""Policies to compare with, which the router does not offer, and the autoscaler for simulated pools."""

from collections.abc import Mapping, Sequence

from baton.cluster.autoscaling.balancer import Balancer
from baton.cluster.autoscaling.scaling import Sample
from baton.cluster.options.pools import PoolOptions, PoolSize
from baton.cluster.supervision.blueprint import Pool
from baton.router.policy.prefill import PrefillPolicy, PrefillRequest, PrefillSnapshot, round_robin, sticky
from baton.rpc import worker_pb2 as pb
from baton.simulator.step_worker import measured
from baton.simulator.steps import H200_8B


def least_loaded(snapshot: PrefillSnapshot, request: PrefillRequest) -> int:
    """The shortest queue in seconds. Ignores caches."""
    return int(snapshot.wait.argmin())


POLICIES: dict[str, PrefillPolicy] = {
    "sticky": sticky,
    "round_robin": round_robin,
    "least_loaded": least_loaded,
}


class Flips:
    """The autoscaler's policy for the simulators. The pools have as many workers in all as at the start."""

    def __init__(self, *, most: int, ttft: float, gap: float, seats: int) -> None:
        """`most`: workers of a pool. `ttft`, `gap`: the targets in seconds. `seats`: of each worker. A worker
        without a free one refuses requests."""
        size = PoolSize(1, most)
        self._balancer = Balancer(PoolOptions(size, size), 1e3 * ttft, 1e3 * gap)
        self._seats, self._model = seats, measured(H200_8B)
        self._computed = 0

    def __call__(self, now: float, reports: Mapping[Pool, Sequence[pb.WorkerStatus]]) -> dict[Pool, int]:
        computed = sum(status.computed_prompt_tokens for statuses in reports.values() for status in statuses)
        done, self._computed = computed - self._computed, computed
        needs = {}
        for pool, statuses in reports.items():
            samples = [
                Sample(
                    s,
                    self._model,
                    0 if i else done,
                    int(s.requests_decoding + s.reservations >= self._seats),
                )
                for i, s in enumerate(statuses)
            ]
            need = self._balancer.needed(now, pool, samples, 0)
            needs[pool] = None if need is None else need.workers
        return self._balancer.decide(
            now, needs, {pool: len(statuses) for pool, statuses in reports.items()}, ()
        )
