"""Decides the sizes of both pools together, from what the workers report. Pure.

Life of a decision: samples of all workers → needs (`scaling`) → sizes.

If one pool should grow and the other has a worker too many, that worker moves (a flip). A flip takes
milliseconds, a new worker takes its start. So a pool gives a worker away much sooner than it shrinks.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from baton.cluster.autoscaling.scaling import DecodeDemand, Needed, PrefillDemand, Sample, Scaler
from baton.cluster.options.pools import PoolOptions, PoolSize
from baton.cluster.supervision.blueprint import POOLS, Pool

FLIP_EVERY = 5.0  # seconds between two flips: the loads must first show what the last one did
TTFT_TARGET, ITL_TARGET = 1000.0, 100.0  # milliseconds, if the user sets no targets


class Balancer:
    """Owns the history of both loads.

    Attributes:
        group: workers of a group. All sizes count groups.
        scalers: one for each pool that is given as a range; other pools keep their size.
    """

    def __init__(
        self, pools: PoolOptions, ttft_target: float | None, itl_target: float | None, group: int = 1
    ) -> None:
        """`ttft_target`, `itl_target`: in ms, as given."""
        self.group = group
        sizes: dict[Pool, PoolSize] = dict(zip(POOLS, pools.sizes, strict=True))
        self.scalers: dict[Pool, Scaler] = {
            pool: Scaler(size.least, size.most, pools.shrink_after)
            for pool, size in sizes.items()
            if size.least < size.most
        }
        self._prefill = PrefillDemand((ttft_target or TTFT_TARGET) / 1000)
        self._decode = DecodeDemand((itl_target or ITL_TARGET) / 1000)
        self._flipped = -math.inf

    def needed(self, now: float, pool: Pool, samples: Sequence[Sample], held_tokens: int) -> Needed | None:
        """The need of a pool, in groups. `samples`: of all workers. `held_tokens`: of prompts in routers."""
        if pool == "decode":
            need: Needed | None = self._decode.needed(samples)
        else:
            need = self._prefill.needed(now, samples, held_tokens)
        return need and replace(need, workers=need.workers / self.group)

    def decide(
        self,
        now: float,
        needs: Mapping[Pool, float | None],
        sizes: Mapping[Pool, int],
        starting: Collection[Pool],
    ) -> dict[Pool, int]:
        """The new sizes of the pools in `needs`. If one grows and the other shrinks, a worker moves.

        `starting`: pools with workers that start.
        """
        new = {
            pool: self.scalers[pool].decide(now, workers, sizes[pool], starting=pool in starting)
            for pool, workers in needs.items()
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
