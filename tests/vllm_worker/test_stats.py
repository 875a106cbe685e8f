"""What routers learn of a vLLM engine's load and speed."""

from typing import Any

import msgspec
import pytest

from baton.engine import EngineStats, MixedStep
from baton.engine.api.stats import EncoderStats, StepStats
from baton.steps.step_model import StepModel
from baton.vllm_worker.metadata import Costs, Encoded
from baton.vllm_worker.stats import Load
from tests.vllm_worker.played import played

pytestmark = pytest.mark.all

STATS = "vllm/v1/metrics/stats.py"


def scheduler(running: int, usage: float = 0.0, waiting: int = 0) -> Any:
    looked_up = played(STATS, "PrefixCacheStats", queries=10, hits=4)
    return played(
        STATS, "SchedulerStats",
        num_running_reqs=running, num_waiting_reqs=waiting, num_skipped_waiting_reqs=waiting,
        kv_cache_usage=usage, prefix_cache_stats=looked_up,
    )  # fmt: skip


def stats(load: Load) -> EngineStats:
    return load.stats(100, [])


def test_load_is_that_of_the_last_step() -> None:
    load = Load()
    load.step(scheduler(5, 0.25, 2), played(STATS, "IterationStats", num_preempted_reqs=1))
    load.step(scheduler(3, 0.1), None)
    found = stats(load)
    assert (found.requests_running, found.requests_waiting) == (3, 0)
    assert (found.blocks_free, found.blocks_total) == (90, 100)
    load.step(scheduler(3, waiting=2), None)
    assert stats(load).requests_waiting == 4, "fetches of KV are skipped in vLLM's queue"
    assert (found.preemptions, found.prefix_cache_queries, found.prefix_cache_hits) == (1, 20, 8)


def test_what_steps_cost_is_what_the_connector_says() -> None:
    load = Load()
    assert stats(load).long == MixedStep(0, 0.0)
    model = StepModel((1,), (0.5,), 0.0, (16, 32), (0.5, 1.0), 0.0, 1.0)
    said = Costs(StepStats(0.006, 0.004, 4e4, 900.0, MixedStep(300, 0.015), model))
    load.costs = msgspec.msgpack.decode(msgspec.msgpack.encode(said), type=Costs).costs
    found = stats(load)
    assert found.step_table == model
    assert (found.step_seconds, found.fastest_step_seconds) == (0.006, 0.004)
    assert (found.prefill_tokens_per_s, found.prefill_position) == (4e4, 900.0)
    assert found.long == MixedStep(300, 0.015)


def test_only_a_model_that_takes_images_has_an_encoder() -> None:
    assert stats(Load()).encoder is None
    said = Encoded(EncoderStats(3, 45, 0.9, 0, 0, 0, 0.02, 0.0))
    said = msgspec.msgpack.decode(msgspec.msgpack.encode(said), type=Encoded)
    assert stats(Load(encoder=said.stats)).encoder == said.stats
