"""The load and the speed of a vLLM engine, from what vLLM says after each step. Without vLLM itself."""

from collections.abc import Collection
from dataclasses import dataclass, field, fields
from typing import Any

from baton.engine import EngineStats
from baton.engine.api.stats import EncoderStats, StepStats
from baton.vllm_worker.attachment import Encoded
from baton.vllm_worker.attempt import VLLMAttempt
from baton.worker.engine_process.states import State


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
    encoded: Encoded | None = None
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

    def stats(self, blocks: int, attempts: Collection[VLLMAttempt]) -> EngineStats:
        """`blocks`: of vLLM's pool. `attempts`: all of the worker."""
        return EngineStats(
            requests_running=self.running,
            requests_decoding=sum(attempt.decodes for attempt in attempts),
            requests_waiting=self.waiting,
            tokens_waiting=sum(attempt.uncached for attempt in attempts if attempt.computes_prompt),
            blocks_free=(free := round(blocks * (1 - self.usage))),
            blocks_spare=free,  # vLLM does not tell what it has cached
            blocks_total=blocks,
            blocks_cached=0,
            held_prefills=sum(x.computing is None and x.state is not State.IMPORTING for x in attempts),
            reservations=sum(x.source is not None and not x.answered for x in attempts),
            preemptions=self.preemptions,
            prefix_cache_queries=self.queries,
            prefix_cache_hits=self.hits,
            encoder=None if self.encoded is None else _encoder(self.encoded),
            **{each.name: getattr(self.costs, each.name) for each in fields(self.costs)},
        )


def _encoder(encoded: Encoded) -> EncoderStats:
    """vLLM does not tell what its encoder keeps, and no image waits for it: its prompt does."""
    return EncoderStats(
        encoded.images,
        encoded.tokens,
        encoded.seconds,
        hits=0,
        waiting=0,
        kept_bytes=0,
        token_seconds=encoded.token_seconds,
        queue_seconds=0.0,
    )
