"""Statistics of an engine: its counts, and running averages of what its steps cost."""

from baton.engine.api.stats import EngineStats, ExpertStats
from baton.engine.core.chunk_limit import ChunkLimit
from baton.engine.core.schedule import Schedule
from baton.engine.core.scheduler import Scheduler

DECAY = 0.9
"""Factor on the weight of a past step with each later step."""
LARGE = 512
"""Prompt tokens from which on a step shows the speed of prefill. A smaller one reads the weights for a few
tokens, so it would promise too little for a long prompt."""


class Meters:
    """Counts preemptions and averages the cost of recent steps."""

    def __init__(self, prompt_tokens: int = 0, seconds: float = 0.0) -> None:
        """`prompt_tokens` were computed in one step of `seconds` at the start. 0: nothing was measured."""
        self.preemptions = 0
        self._prefilled, self._prefill_seconds = float(prompt_tokens), seconds
        self._largest = prompt_tokens
        self._steps = self._seconds = 0.0
        self._small: dict[int, float] = {}
        """Average seconds of steps with few prompt tokens alone, by size. Sizes differ by a factor of two."""

    def count(self, plan: Schedule) -> None:
        self.preemptions += len(plan.recomputed) + len(plan.handed_back)

    def record(self, decodes: bool, prefilled: int, seconds: float) -> None:
        """Adds a step that computed `prefilled` prompt tokens, or decoded, to the averages."""
        if 0 < prefilled < LARGE and not decodes:
            size = prefilled.bit_length()
            before = self._small.get(size, seconds)
            self._small[size] = DECAY * before + (1 - DECAY) * seconds
        self._steps = DECAY * self._steps + 1
        self._seconds = DECAY * self._seconds + seconds
        self._largest = max(self._largest, prefilled)
        if prefilled and prefilled >= min(LARGE, self._largest // 2):
            self._prefilled = DECAY * self._prefilled + prefilled
            self._prefill_seconds = DECAY * self._prefill_seconds + seconds

    @property
    def prefill_tokens_per_s(self) -> float:
        return self._prefilled / self._prefill_seconds if self._prefilled else 0.0

    def prompt_tokens_per_s(self, scheduler: Scheduler, chunk_limit: ChunkLimit) -> float:
        """Speed at which a prompt is computed now. Beside decodes it is that of long steps. 0: not known."""
        alone = self.prefill_tokens_per_s
        step = chunk_limit.mixed_step(chunk_limit.long_seconds)
        return min(alone, step.tokens / step.seconds) if step.tokens and scheduler.decoding else alone

    def prompt_seconds(self, tokens: int, rest: int, scheduler: Scheduler, chunk_limit: ChunkLimit) -> float:
        """Seconds by which a prompt is computed sooner if `tokens` of it have KV already and `rest` have not.
        0: not known.

        With few tokens in all this is less than their share of a long prompt, since a step reads the weights
        anyway. It is more if they come after many others."""
        speed = self.prompt_tokens_per_s(scheduler, chunk_limit)
        whole, without = self._alone(tokens + rest), self._alone(rest)
        if speed and not scheduler.decoding and 0 < without < whole:
            return whole - without
        return tokens / speed if speed else 0.0

    def _alone(self, tokens: int) -> float:
        """Seconds to compute so many tokens of a prompt, beside no decodes. 0: not known."""
        if tokens < LARGE:
            return self._small.get(tokens.bit_length(), 0.0)
        return tokens / self.prefill_tokens_per_s if self._prefilled else 0.0

    @property
    def step_seconds(self) -> float:
        return self._seconds / self._steps if self._steps else 0.0

    def stats(
        self, scheduler: Scheduler, chunk_limit: ChunkLimit, experts: ExpertStats | None, under_way: int
    ) -> EngineStats:
        """`under_way`: prompt tokens of the steps that are launched and not over."""
        return EngineStats(
            running=len(scheduler.running),
            decoding=scheduler.decoding,
            waiting=len(scheduler.waiting) + len(scheduler.loading),
            tokens_waiting=scheduler.tokens_waiting + under_way,
            blocks_free=scheduler.pool.free,
            blocks_total=scheduler.pool.num_blocks,
            blocks_cached=scheduler.pool.cached,
            held=len(scheduler.held),
            reservations=len(scheduler.reserved),
            preemptions=self.preemptions,
            prefix_cache_queries=scheduler.cache.queries if scheduler.cache else 0,
            prefix_cache_hits=scheduler.cache.hits if scheduler.cache else 0,
            prefill_tokens_per_s=self.prefill_tokens_per_s,
            step_seconds=self.step_seconds,
            decode_seconds=chunk_limit.step_seconds,
            fastest_seconds=chunk_limit.fastest_seconds,
            short=chunk_limit.mixed_step(chunk_limit.short_seconds),
            long=chunk_limit.mixed_step(chunk_limit.long_seconds),
            experts=experts,
            offload=[tier.stats for tier in scheduler.offload],
        )
