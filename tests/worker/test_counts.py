"""Counts of processes that were replaced."""

from typing import Any

import msgspec

from baton.engine import (
    EncoderStats,
    EngineStats,
    ExpertStats,
    MemoryStats,
    MixedStep,
    OffloadStats,
    SpeculationStats,
)
from baton.kv_names import Tier
from baton.kv_transfer import TransferStats
from baton.rpc import worker_pb2 as pb
from baton.worker.messages import EngineStatus
from baton.worker.service_process.counts import added
from baton.worker.service_process.status import reported
from baton.worker.stats import RequestCounts, StoreStats


def engine_status(number: int, experts: list[int], **now: Any) -> EngineStatus:
    """Each count is `number`."""
    stats = EngineStats(
        requests_running=now["running"], requests_decoding=0, requests_waiting=0, tokens_waiting=0,
        blocks_free=0, blocks_spare=0, blocks_total=9, blocks_cached=0, held_prefills=0, reservations=0,
        preemptions=number, prefix_cache_queries=number, prefix_cache_hits=number, prefill_position=0.0,
        long=MixedStep(20, 0.03),
        experts=ExpertStats(experts, imbalance=1.5, used=2.0),
        offload=(OffloadStats(Tier.HOST, 8, 1, 5.0, number, number, number, number, number),),
        speculation=SpeculationStats(number, number, number),
        memory=MemoryStats(1, 2, 3, 4, number, number),
        encoder=EncoderStats(number, number, number, number, 5, 6, 0.1, 0.2),
    )  # fmt: skip
    counts = RequestCounts(
        number, number, number, number, number, number, number, [number] * len(Tier),
        number, number, number, number, number, number,
    )  # fmt: skip
    told = pb.WorkerStatus(idle=True, store="open", store_tokens_per_s=3.0)
    return EngineStatus(7, stats, counts, told, StoreStats(number, number, number))


def test_counts_are_added_and_the_rest_is_of_the_moment() -> None:
    first, second = engine_status(10, [1, 2], running=4), engine_status(3, [10, 20], running=1)
    assert added(first, second) == engine_status(13, [11, 22], running=1)
    assert added(first, engine_status(3, [], running=1)).stats.experts == ExpertStats([1, 2], 1.5, 2.0)
    assert added(None, second) == second


def transfers(sent: int, ends: dict[str, int]) -> TransferStats:
    return TransferStats(
        1, 2, 3, 4, 5, 6, 7, 8, sent, 0, sent, 0, 0, ends, {}, {}, {}, {}, {"a": sent}, {9: (2.5, 5, 0.5)}
    )


def test_ends_of_transfers_are_added_by_their_names() -> None:
    assert added(
        transfers(5, {"acked": 1, "lost": 2}), transfers(7, {"acked": 3, "busy": 1})
    ) == msgspec.structs.replace(transfers(12, {"acked": 4, "lost": 2, "busy": 1}), sent_to={"a": 7})


def test_routers_are_told_what_each_process_knows() -> None:
    status = reported(engine_status(10, [], running=4), transfers(5, {"acked": 1, "injected": 2, "lost": 3}))
    assert (status.requests_running, status.blocks_total, status.transfers_open) == (4, 9, 1)
    counts = status.computed_prompt_tokens, status.generation_tokens, status.no_room, status.handovers
    assert counts == (10, 10, 10, 10)
    assert (status.prefix_fetched_tokens, status.store_fetched_tokens) == (10 * len(Tier), 10)
    assert (status.host_tokens_per_s, status.host_loaded_tokens, status.disk_loaded_tokens) == (5.0, 10, 0)
    memory = status.kv_memory_bytes, status.state_memory_bytes, status.window_memory_bytes
    assert (memory, status.images_encoded, status.images_waiting) == ((1, 2, 3), 10, 5)
    assert (status.encode_token_seconds, status.encode_queue_seconds) == (0.1, 0.2)
    assert (status.idle, status.store, status.store_tokens_per_s) == (True, "open", 3.0)
    assert (status.long_chunk_tokens, status.long_chunk_seconds) == (20, 0.03)
    assert (status.kv_transfers, status.kv_bytes, status.kv_sent) == (3, 5, {"a": 5})
    assert [*status.kv_links] == [pb.KvLink(incarnation=9, bytes_per_s=2.5, bytes_waiting=5, used=0.5)]
