"""The load and the speed of a vLLM engine, from what vLLM says after each step. Without vLLM itself."""

from dataclasses import dataclass, field
from typing import Any

from baton.engine import EngineStats, MixedStep
from baton.engine.api.stats import UNKNOWN_STEP
from baton.machine import Average
from baton.vllm_worker.attachment import Costs


@dataclass(slots=True)
class Load:
    """What vLLM's steps say together."""

    usage: float = 0.0
    """Share of the blocks that requests hold."""
    running: int = 0
    waiting: int = 0
    preemptions: int = 0
    queries: int = 0
    """Tokens looked up in the prefix cache."""
    hits: int = 0
    prefill_speed: Average = field(default_factory=Average)
    steps: Average = field(default_factory=Average)
    costs: Costs = field(default_factory=lambda: Costs(0.0, 0.0, UNKNOWN_STEP, UNKNOWN_STEP))
    _stepped_at: float = 0.0
    _prefilled_at: float = 0.0

    def step(self, scheduler: Any, iteration: Any, now: float) -> None:
        """A step has ended. vLLM's statistics of it may be None."""
        seconds, self._stepped_at = now - self._stepped_at, now
        if iteration is not None:
            self.preemptions += iteration.num_preempted_reqs
            if gaps := iteration.inter_token_latencies_iter:  # as vLLM's process saw them
                seconds = min(gaps)
            if gaps or self.running:  # since the step before, vLLM was not idle
                self.steps.add(seconds)
        if scheduler is not None:
            self.usage = scheduler.kv_cache_usage
            self.running = scheduler.num_running_reqs
            self.waiting = scheduler.num_waiting_reqs + scheduler.num_skipped_waiting_reqs
            self.queries += scheduler.prefix_cache_stats.queries
            self.hits += scheduler.prefix_cache_stats.hits

    def prefilled(self, tokens: int, began_at: float, ended_at: float) -> None:
        """A prompt was computed, without its `tokens` from the cache. Prompts are computed one after the
        other, more or less."""
        seconds = ended_at - max(began_at, self._prefilled_at)
        self._prefilled_at = ended_at
        if seconds > 0:
            self.prefill_speed.add(tokens, seconds)

    def stats(
        self, *, blocks: int, decoding: int, tokens_waiting: int, held: int, reservations: int
    ) -> EngineStats:
        return EngineStats(
            requests_running=self.running,
            requests_decoding=decoding,
            requests_waiting=self.waiting,
            tokens_waiting=tokens_waiting,
            blocks_free=round(blocks * (1 - self.usage)),
            blocks_total=blocks,
            blocks_cached=0,
            held_prefills=held,
            reservations=reservations,
            preemptions=self.preemptions,
            prefix_cache_queries=self.queries,
            prefix_cache_hits=self.hits,
            prefill_tokens_per_s=self.prefill_speed.value,
            prefill_position=0.0,  # it computes no part of a shared prompt
            step_seconds=self.steps.value,
            decode_seconds=self.costs.decode_seconds,
            fastest_step_seconds=self.costs.fastest_seconds,
            short=MixedStep(*self.costs.short),
            long=MixedStep(*self.costs.long),
        )
