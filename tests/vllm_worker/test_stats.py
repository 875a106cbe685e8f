"""What routers learn of a vLLM engine's load and speed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from baton.engine import EngineStats, MixedStep
from baton.vllm_worker.attachment import Costs
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
    load.step(scheduler(5, 0.25, 2), iteration(), 1.0)
    load.step(scheduler(3, 0.1), None, 2.0)
    found = stats(load)
    assert (found.requests_running, found.requests_waiting) == (3, 0)
    assert (found.blocks_free, found.blocks_total) == (90, 100)
    load.step(scheduler(3, waiting=2), None, 3.0)
    assert stats(load).requests_waiting == 4, "fetches of KV are skipped in vLLM's queue"
    assert (found.preemptions, found.prefix_cache_queries, found.prefix_cache_hits) == (1, 20, 8)


def test_seconds_of_a_step_are_those_of_vllms_process() -> None:
    """Of a prompt without a decode beside it they are those between two reports. An idle engine has none."""
    load = Load()
    load.step(scheduler(1), iteration(), 100.0)
    assert stats(load).step_seconds == 0.0
    load.step(scheduler(2), iteration(), 100.5)
    assert stats(load).step_seconds == 0.5
    load.step(scheduler(2), iteration(0.25, 0.75), 109.0)
    assert stats(load).step_seconds == pytest.approx(0.375, rel=0.1), "two steps: 0.5 and 0.25"


def test_what_steps_cost_is_what_the_connector_says() -> None:
    load = Load()
    assert stats(load).short == stats(load).long == MixedStep(0, 0.0)
    load.costs = Costs(0.005, 0.004, (100, 0.008), (300, 0.015))
    found = stats(load)
    assert (found.decode_seconds, found.fastest_step_seconds) == (0.005, 0.004)
    assert (found.short, found.long) == (MixedStep(100, 0.008), MixedStep(300, 0.015))


def test_prompts_at_the_same_time_share_the_speed() -> None:
    load = Load()
    load.prefilled(100, began_at=1.0, ended_at=2.0)
    load.prefilled(100, began_at=1.0, ended_at=3.0)
    assert stats(load).prefill_tokens_per_s == pytest.approx(100)
