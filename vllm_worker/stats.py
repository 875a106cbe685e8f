"""The load and the speed of a vLLM engine, from what vLLM says after each step. Without vLLM itself."""

from collections.abc import Collection
from dataclasses import dataclass, field, fields
from typing import Any

from baton.engine import EngineStats
from baton.engine.api.stats import EncoderStats, StepStats
from baton.vllm_worker.engine import VLLMRequest


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
    costs: StepStats = field(default_factory=StepStats)
    """As the connector says."""
    encoder: EncoderStats | None = None
    """As the connector says. None: vLLM takes no images."""

    def step(self, scheduler: Any, iteration: Any) -> None:
        """A step has ended. vLLM's statistics of it may be None."""
        if iteration is not None:
            self.preemptions += iteration.num_preempted_reqs
        if scheduler is not None:
            self.usage = scheduler.kv_cache_usage
            self.running = scheduler.num_running_reqs
            self.waiting = scheduler.num_waiting_reqs + scheduler.num_skipped_waiting_reqs
            self.queries += scheduler.prefix_cache_stats.queries
            self.hits += scheduler.prefix_cache_stats.hits

    def prompt_seconds(self, tokens: int) -> float:
        """As `Meters.prompt_seconds`."""
        speed, step = self.costs.prefill_tokens_per_s, self.costs.long
        if self.running and step.tokens:
            speed = min(speed, step.tokens / step.seconds)
        return tokens / speed if speed else 0.0

    def stats(self, blocks: int, lives: Collection[VLLMRequest]) -> EngineStats:
        """`blocks`: of vLLM's pool. `lives`: all of the worker."""
        return EngineStats(
            requests_running=self.running,
            requests_decoding=sum(live.decodes for live in lives),
            requests_waiting=self.waiting,
            tokens_waiting=sum(live.uncached for live in lives if live.computes_prompt),
            blocks_free=(free := round(blocks * (1 - self.usage))),
            blocks_spare=free,  # vLLM does not tell what it has cached
            blocks_total=blocks,
            blocks_cached=0,
            held_prefills=sum(live.handover and live.submission is None for live in lives),
            reservations=sum(live.awaits_kv for live in lives),
            preemptions=self.preemptions,
            prefix_cache_queries=self.queries,
            prefix_cache_hits=self.hits,
            encoder=self.encoder,
            **{each.name: getattr(self.costs, each.name) for each in fields(self.costs)},
        )
