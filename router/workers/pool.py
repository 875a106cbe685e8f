"""The connections to all workers, and what plans of requests read of them."""

import asyncio
import logging
import math
import random
import time
from collections.abc import Sequence
from dataclasses import replace

from baton.kv_names import CHUNK_TOKENS
from baton.router.config import RouterConfig
from baton.router.policy import placement as policy
from baton.router.policy import regime
from baton.router.policy.answers import AnswerLengths
from baton.router.policy.decode import DecodePool, FreeCapacity
from baton.router.policy.fleet import Fleet
from baton.router.policy.prefill import PREFILL_POLICIES
from baton.router.workers.checks import RouterModel
from baton.router.workers.roster import Roster
from baton.router.workers.stream import WorkerStream
from baton.router.workers.worker import POOL_NAMES, Worker
from baton.rpc import worker_pb2 as pb
from baton.steps.step_model import LARGE

log = logging.getLogger(__name__)

WINDOW_SECONDS = 1.0
"""How often the prefill window and the regime are updated. Workers report as often."""
WINDOW_CHANGE = 0.1
"""It is updated at once if a pool has grown or shrunk by more than this part: not at each change of many."""


def _shown_speed(worker: Worker, pool: pb.Pool) -> float:
    """Prompt tokens/s of a worker, as a large step showed. 0: unknown."""
    model = worker.step_model
    if model is not None and model.tokens[-1] < min(LARGE, worker.description.max_num_batched_tokens // 2):
        return 0.0
    if pool == pb.POOL_PREFILL:
        return worker.status.prefill_tokens_per_s
    tokens, seconds = policy.mixed_step(worker.status)
    return tokens / seconds if seconds else 0.0


class WorkerPool(Roster):
    """Owns the streams to the workers. Runs on the event loop, and never waits for a worker.

    Attributes:
        prompts: how many were sent.
    """

    def __init__(self, config: RouterConfig, model: RouterModel) -> None:
        super().__init__(model, config.worker_wait)
        self._promised_slots = self._promised_positions = 0  # of decode workers, for queued prompts
        self.answers = AnswerLengths()
        self._window = policy.PrefillWindow()
        self._window_until = 0.0  # time.monotonic()
        self._window_pools = 0, 0  # workers of both pools then
        self._apart = False  # as in `Fleet`
        self.prompts = 0
        self._config = config
        self._rng = random.Random()
        self._streams: dict[str, WorkerStream] = {}  # to the listed workers
        self._retired: set[WorkerStream] = set()  # no longer listed, with open attempts
        self._discovered = False  # there was a list

    async def run(self) -> None:
        """Follows discovery until cancelled, then closes every stream."""
        try:
            async for addresses in self._config.discovered().watch():
                for address in addresses - self.listed.keys():
                    await self.turn()
                    self._open(address)
                for address in self.listed.keys() - addresses:
                    await self.turn()
                    self.retire(address)
                self._discovered = True
                self.changed.set()
            await asyncio.Event().wait()
        finally:
            await asyncio.gather(*(stream.close() for stream in {*self._streams.values(), *self._retired}))

    def _open(self, address: str) -> None:
        worker = Worker(address, self.loads, lambda: self.on_capacity(), self.breaker_changed)
        self.listed[address] = worker
        self._streams[address] = WorkerStream(worker, self, self._config)

    def retire(self, address: str) -> None:
        """Discovery no longer lists this worker."""
        del self.listed[address]
        stream = self._streams.pop(address)
        self._retired.add(stream)
        stream.retire(self._retired.discard)

    # ------------------------------------------------------------ the workers

    @property
    def connections(self) -> list[Worker]:
        """All listed workers, by name."""
        return sorted(
            self.listed.values(), key=lambda w: (w.description.first_pool, w.description.index, w.address)
        )

    @property
    def _decoders(self) -> DecodePool:
        """The workers that decode new requests: prefill workers, if the decode pool has lost its last worker.
        A pool that never had one is only starting."""
        lost = self._config.overflow and self.had_decode and not self.decodes
        return self.prefills if lost else self.decodes

    @property
    def pools(self) -> dict[pb.Pool, str]:
        """The pools that the cluster has, with their names."""
        has_prefill = not self._config.decode_only
        return {p: name for p, name in POOL_NAMES.items() if has_prefill or p == pb.POOL_DECODE}

    @property
    def complete(self) -> bool:
        """Whether each pool of the cluster has a worker."""
        return bool(self.decodes) and (self._config.decode_only or bool(self.prefills))

    @property
    def blind(self) -> bool:
        """Whether this router reaches no worker, though some are listed or there was no list yet. Another
        router may reach them."""
        return not (self.prefills or self.decodes) and (bool(self.listed) or not self._discovered)

    def fleet(self) -> Fleet:
        """The workers as they are known now, for a plan."""
        config = self._config
        return Fleet(
            now=time.monotonic(),
            rng=self._rng,
            named=self.listed,
            workers=self.by_row,
            attached_rows=self.attached_rows,
            decodes=self.decodes,
            decoders=self._decoders,
            loads=self.loads,
            caches=self.decode_caches,
            policy=PREFILL_POLICIES[config.routing_policy],
            promised_slots=self._promised_slots,
            promised_positions=self._promised_positions,
            ttft_target=config.ttft_target,
            overflow=config.overflow,
            splits=config.split_prompts,
            prefix_fetches=config.prefix_fetches,
            apart=self._apart,
        )

    def uncached(self, chunks: Sequence[int], tokens: int) -> int:
        """Returns the tokens of a prompt that the worker with most of it in its caches would compute."""
        return tokens - self.loads.index.overlap(chunks, tokens, CHUNK_TOKENS, self.attached_rows).most

    def free_capacity(self) -> FreeCapacity:
        """Free capacity of all workers that decode. Infinite without such workers.

        Requests then leave the admission queue and wait for a worker instead, for a bounded time.
        """
        return self._decoders.free if self._decoders else FreeCapacity(math.inf, math.inf)

    def prefill_window(self) -> policy.PrefillWindow:
        """Prompt tokens that keep all workers busy. More would only wait at the workers. Up to a second old.

        Infinite if no worker can prefill or none can decode, as for `free_capacity`.
        """
        if not self._decoders or not (self.prefills or self._config.overflow):
            return policy.PrefillWindow(math.inf)
        now, pools = time.monotonic(), (len(self.prefills), len(self.decodes))
        changes = zip(self._window_pools, pools, strict=True)
        if now > self._window_until or any(abs(new - old) > WINDOW_CHANGE * old for old, new in changes):
            budgets = [w.description.max_num_batched_tokens for w in self.ready(pb.POOL_PREFILL)]
            decodes = [w.status for w in self.ready(pb.POOL_DECODE)] if self._config.overflow else []
            self._window = replace(
                policy.prefill_window(budgets, self.loads.tokens_per_s(), decodes),
                tokens_per_s=self._prompt_speed(),
                others=self.loads.tokens_of_others(),
            )
            prefills, decodes = (self.ready(pool) for pool in (pb.POOL_PREFILL, pb.POOL_DECODE))
            self._apart = self._config.overflow and regime.apart(prefills, decodes, self.loads.demand())
            self._window_until, self._window_pools = now + WINDOW_SECONDS, pools
        return self._window

    def _prompt_speed(self) -> float:
        """Prompt tokens that all workers compute in a second. Workers without a large step count as the mean
        of the others. 0: no worker of the first pool had one."""
        total = 0.0
        for pool in self.pools:
            workers = self.ready(pool)
            speeds = [speed for worker in workers if (speed := _shown_speed(worker, pool))]
            if workers and not speeds and not total:
                return 0.0
            if speeds and (pool == pb.POOL_PREFILL or self._config.overflow):
                total += sum(speeds) / len(speeds) * len(workers)
        return total

    def promise(self, slots: int, positions: int) -> None:
        """Queued prompts need so much more room for their decodes. Negative: they have it, or need none."""
        self._promised_slots += slots
        self._promised_positions += positions
