"""What routers learn of a vLLM engine's load and speed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from baton.engine import EngineStats
from baton.vllm_worker.stats import Load


def scheduler(running: int, usage: float = 0.0, waiting: int = 0) -> Any:
    looked_up = SimpleNamespace(queries=10, hits=4)
    return SimpleNamespace(
        num_running_reqs=running, num_waiting_reqs=waiting, num_skipped_waiting_reqs=waiting,
        kv_cache_usage=usage, prefix_cache_stats=looked_up,
    )  # fmt: skip


def iteration(*gaps: float) -> Any:
    return SimpleNamespace(num_preempted_reqs=1, inter_token_latencies_iter=list(gaps))


def stats(load: Load) -> EngineStats:
    return load.stats(blocks=100, decoding=1, tokens_waiting=2, held=3, reservations=4)


def test_load_is_that_of_the_last_step() -> None:
    load = Load()
    assert stats(load).fastest_step_seconds == stats(load).step_seconds == 0.0
    load.step(scheduler(5, 0.25, 2), iteration(), 1.0, prefills=True)
    load.step(scheduler(3, 0.1), None, 2.0, prefills=True)
    found = stats(load)
    assert (found.requests_running, found.requests_waiting) == (3, 0)
    assert (found.blocks_free, found.blocks_total) == (90, 100)
    load.step(scheduler(3, waiting=2), None, 3.0, prefills=True)
    assert stats(load).requests_waiting == 4, "fetches of KV are skipped in vLLM's queue"
    assert (found.preemptions, found.prefix_cache_queries, found.prefix_cache_hits) == (1, 20, 8)


def test_seconds_of_a_step_are_those_of_vllms_process() -> None:
    """Of a prompt without a decode beside it they are those between two reports. An idle engine has none."""
    load = Load()
    load.step(scheduler(1), iteration(), 100.0, prefills=True)
    assert stats(load).step_seconds == 0.0
    load.step(scheduler(2), iteration(), 100.5, prefills=True)
    assert stats(load).step_seconds == 0.5
    load.step(scheduler(2), iteration(0.25, 0.75), 109.0, prefills=True)
    assert stats(load).decode_seconds == 0.0, "it also computed a prompt"
    load.step(scheduler(2), iteration(0.125), 110.0, prefills=False)
    assert stats(load).decode_seconds == stats(load).fastest_step_seconds == 0.125


def test_prompts_at_the_same_time_share_the_speed() -> None:
    load = Load()
    load.prefilled(100, began_at=1.0, ended_at=2.0)
    load.prefilled(100, began_at=1.0, ended_at=3.0)
    assert stats(load).prefill_tokens_per_s == pytest.approx(100)
