"""Counts that go on when the processes that count are replaced.

The engine and the transfer process count from their start. The service process adds what the ones before had
counted, so that metrics and `WorkerStatus` do not go back within an incarnation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass, replace
from itertools import zip_longest
from typing import Any, TypeVar

import msgspec

from baton.engine import EncoderStats, EngineStats, ExpertStats, MemoryStats, OffloadStats, SpeculationStats
from baton.kv_transfer import TransferStats
from baton.worker.messages import EngineStatus
from baton.worker.stats import RequestCounts, StoreStats

_COUNTS: Mapping[type, Sequence[str]] = {
    EngineStatus: ("stats", "counts", "store"),
    EngineStats: (
        "preemptions", "prefix_cache_queries", "prefix_cache_hits",
        "experts", "offload", "speculation", "memory", "encoder",
    ),
    ExpertStats: ("tokens",),
    OffloadStats: ("saved", "loaded_tokens", "dropped", "failed", "damaged"),
    SpeculationStats: ("steps", "drafts", "accepted"),
    MemoryStats: ("moved_bytes", "moving_seconds"),
    EncoderStats: ("images_encoded", "tokens", "seconds", "hits"),
    RequestCounts: tuple(RequestCounts.__dataclass_fields__),
    StoreStats: ("written", "refused", "missed"),
    TransferStats: (
        "bytes_sent", "bytes_received", "frames_sent", "frames_received", "late_frames",
        "transfers", "checksum_failures", "refused", "deadlines",
    ),
}  # fmt: skip
"""Fields that count from the start of a process, or that have such fields. All others are of the moment."""

T = TypeVar("T")


def added(before: T | None, now: T) -> T:
    """Returns `now` with the counts of `before` added. None: there is nothing to add."""
    return now if before is None or now is None else _added(before, now)


def _added(before: Any, now: Any) -> Any:
    if isinstance(now, int | float):
        return before + now
    if isinstance(now, dict):
        return {key: before.get(key, 0) + now.get(key, 0) for key in before | now}
    if isinstance(now, list | tuple):
        return type(now)(b if n is None else added(b, n) for b, n in zip_longest(before, now))
    both = {name: added(getattr(before, name), getattr(now, name)) for name in _COUNTS[type(now)]}
    return replace(now, **both) if is_dataclass(now) else msgspec.structs.replace(now, **both)
