"""Counts of processes that were replaced."""

from typing import Any

import msgspec

from baton.engine import EngineStats, ExpertStats, OffloadStats
from baton.kv_names import Tier
from baton.kv_transfer import TransferStats
from baton.worker.messages import EngineStatus
from baton.worker.service_process.counts import added
from baton.worker.stats import RequestCounts, StoreStats


def engine_status(number: int, experts: list[int], **now: Any) -> EngineStatus:
    """Each count is `number`."""
    stats = EngineStats(
        requests_running=now["running"], requests_decoding=0, requests_waiting=0, tokens_waiting=0,
        blocks_free=0, blocks_spare=0, blocks_total=9, blocks_cached=0, held_prefills=0, reservations=0,
        preemptions=number, prefix_cache_queries=number, prefix_cache_hits=number, prefill_position=0.0,
        experts=ExpertStats(experts, imbalance=1.5, used=2.0),
        offload=(OffloadStats(Tier.HOST, 8, 1, 5.0, number, number, number, number, number),),
    )  # fmt: skip
    counts = RequestCounts(
        number, number, number, number, number, number, number, [number] * len(Tier),
        number, number, number, number,
    )  # fmt: skip
    return EngineStatus(7, stats, counts, True, [], StoreStats(True, 3.0, number, number, number))


def test_counts_are_added_and_the_rest_is_of_the_moment() -> None:
    first, second = engine_status(10, [1, 2], running=4), engine_status(3, [10, 20], running=1)
    assert added(first, second) == engine_status(13, [11, 22], running=1)
    assert added(first, engine_status(3, [], running=1)).stats.experts == ExpertStats([1, 2], 1.5, 2.0)
    assert added(None, second) == second


def test_ends_of_transfers_are_added_by_their_names() -> None:
    def stats(sent: int, ends: dict[str, int]) -> TransferStats:
        return TransferStats(1, 2, 3, 4, 5, 6, 7, 8, sent, 0, sent, 0, 0, ends, {}, {}, {}, {}, {"a": sent})

    assert added(
        stats(5, {"acked": 1, "lost": 2}), stats(7, {"acked": 3, "busy": 1})
    ) == msgspec.structs.replace(stats(12, {"acked": 4, "lost": 2, "busy": 1}), sent_to={"a": 7})
