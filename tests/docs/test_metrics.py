"""docs/reference/metrics.md lists exactly the series that each role exports."""

import re
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client import Metric

from baton.engine import EncoderStats, EngineStats, ExpertStats, MemoryStats, OffloadStats, SpeculationStats
from baton.kv_names import Tier
from baton.kv_transfer import TransferStats
from baton.router.admission.parked import Parked, RetryBudget
from baton.router.admission.queue import Admission
from baton.router.metrics import Metrics as RouterMetrics
from baton.router.policy.decode import DecodePool
from baton.router.policy.desk import Desk
from baton.router.policy.placement import PrefillWindow
from baton.router.workers.encoders import Encoders
from baton.router.workers.pool import WorkerPool
from baton.rpc import worker_pb2 as pb
from baton.worker.messages import EngineStatus
from baton.worker.service_process.metrics import Metrics as WorkerMetrics
from baton.worker.stats import RequestCounts, StoreStats
from tests.stand_in import stand_in

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"
SUFFIX = {"counter": "_total", "info": "_info"}


def names(families: Iterable[Metric]) -> set[str]:
    found = {family.name + SUFFIX.get(family.type, "") for family in families}
    return {name for name in found if not name.startswith(("process_", "python_"))}


def documented(letter: str) -> set[str]:
    rows = re.findall(r"^\| `([^`]+)` \| \w \| [^|]* \| ([RW ]+) \|", PAGE.read_text(), re.M)
    return {name for name, roles in rows if letter in roles.split()}


def test_router() -> None:
    metrics = RouterMetrics("model")
    pools = {pb.POOL_DECODE: "decode"}
    parts = {"encoders": Encoders(1.0), "desk": stand_in(Desk, decodes=DecodePool())}
    pool = stand_in(WorkerPool, listed={}, pools=pools, pause=pb.PAUSE_NONE, **parts)
    metrics.follow(pool, Admission(1, lambda: PrefillWindow(0.0)), Parked(RetryBudget()))
    metrics.certificate_ends(0.0)
    assert names(metrics.registry.collect()) == documented("R")


def test_workers() -> None:
    metrics = WorkerMetrics("prefill", "model")
    values: dict[str, Any] = {field.name: 1 for field in fields(EngineStats)}
    values["experts"] = ExpertStats([1], 1.0, 1.0)
    values["offload"] = [OffloadStats(Tier.HOST, 1, 1, 1, 1, 1, 1, 1, 1)]
    values["speculation"] = SpeculationStats(1, 1, 1)
    values["memory"] = MemoryStats(1, 1, 1, 1, 1, 1.0)
    values["encoder"] = EncoderStats(1, 1, 1.0, 1, 1, 1, 1.0, 1.0)
    stats = EngineStats(**values)
    counts = RequestCounts()
    store = StoreStats(1, 1, 1)
    metrics.engine_status = EngineStatus(1, stats, counts, pb.WorkerStatus(), store)
    empty = {f.name: {} if "dict" in str(f.type) else 0 for f in msgspec.structs.fields(TransferStats)}
    metrics.transfer_stats = msgspec.convert(empty, TransferStats)
    assert names(metrics.registry.collect()) == documented("W")
