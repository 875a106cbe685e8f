"""Decides the sizes of both pools together, from what the workers report. Pure.

Life of a decision: samples of all workers → `prefill_load`, `decode_load` → needs (`scaling`) → sizes.

If one pool should grow and the other has a worker too many, that worker moves (a flip). A flip takes
milliseconds, a new worker takes its start. So a pool gives a worker away much sooner than it shrinks.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from baton.cluster.autoscaling.scaling import (
    DecodeDemand,
    DecodePoolLoad,
    Needed,
    PrefillDemand,
    PrefillPoolLoad,
    Scaler,
)
from baton.cluster.options.pools import PoolOptions, PoolSize
from baton.cluster.supervision.plan import Pool
from baton.rpc import worker_pb2 as pb

FLIP_EVERY = 5.0  # seconds between two flips: the loads must first show what the last one did
TTIT_TARGET = 100.0  # milliseconds, if the user sets no target


@dataclass(frozen=True)
class Sample:
    """The answer of one worker to a poll.

    Attributes:
        done: prompt tokens that it prefilled since the last poll.
        refused: reservations that it refused for want of room since the last poll.
        silent: it did not answer; `status` is its last one.
    """

    status: pb.WorkerStatus
    done: int
    refused: int
    silent: bool = False


class Balancer:
    """Owns the history of both loads.

    Attributes:
        scalers: one for each pool that is given as a range; other pools keep their size.
    """

    def __init__(self, pools: PoolOptions) -> None:
        given: dict[Pool, PoolSize] = {"prefill": pools.prefill, "decode": pools.decode}
        self.scalers: dict[Pool, Scaler] = {
            pool: Scaler(size.least, size.most, pools.shrink_after)
            for pool, size in given.items()
            if size.least < size.most
        }
        self._prefill = PrefillDemand(pools.ttft_target / 1000)
        self._decode = DecodeDemand((pools.ttit_target or TTIT_TARGET) / 1000)
        self._done = 0
        self._flipped = -math.inf

    def needed(self, now: float, pool: Pool, samples: Sequence[Sample], held: int) -> Needed | None:
        """The need of a pool. `held`: prompt tokens in the routers."""
        if pool == "prefill":
            self._done += sum(sample.done for sample in samples)
            return self._prefill.needed(now, prefill_load([s.status for s in samples], self._done, held))
        return self._decode.needed(decode_load(samples))

    def decide(
        self,
        now: float,
        needed: Mapping[Pool, float | None],
        sizes: Mapping[Pool, int],
        starting: Collection[Pool],
    ) -> dict[Pool, int]:
        """The new sizes of the pools in `needed`. If one grows and the other shrinks, a worker moves.

        `starting`: pools with workers that start.
        """
        new = {
            pool: self.scalers[pool].decide(now, workers, sizes[pool], starting=pool in starting)
            for pool, workers in needed.items()
        }
        for pool, other in (("prefill", "decode"), ("decode", "prefill")):
            if not {pool, other} <= new.keys() or new[pool] <= sizes[pool] or new[other] > sizes[other]:
                continue
            if new[other] == sizes[other] and not self.scalers[other].spares_one(now, sizes[other]):
                continue
            flips = int(now - self._flipped >= FLIP_EVERY)  # 0: wait, rather than start a worker
            new[pool], new[other] = sizes[pool] + flips, sizes[other] - flips
            if flips:
                self._flipped = now
        return new


def prefill_load(statuses: Sequence[pb.WorkerStatus], done: int, held: int) -> PrefillPoolLoad:
    """The load of a prefill pool. `done`: tokens computed since the start; `held`: tokens in the routers."""
    speeds = [status.prefill_tokens_per_s for status in statuses if status.prefill_tokens_per_s]
    return PrefillPoolLoad(
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


def decode_load(samples: Sequence[Sample]) -> DecodePoolLoad:
    """The load of a decode pool.

    A worker that refused a reservation counts as full, even if it has free blocks: they do not suffice.
    """
    statuses = [sample.status for sample in samples]
    return DecodePoolLoad(
        kv_used=tuple(
            1.0 if sample.refused else 1 - sample.status.blocks_free / sample.status.blocks_total
            for sample in samples
        ),
        steps=tuple(s.step_seconds for s in statuses if s.requests_running and s.step_seconds),
        fastest=min((s.fastest_step_seconds for s in statuses if s.fastest_step_seconds), default=0.0),
    )
