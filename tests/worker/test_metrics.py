"""The metrics port of a worker."""

import asyncio
import contextlib
import dataclasses
import threading
import urllib.request
from typing import Any

import pytest

from baton.engine import EncoderStats, EngineStats, ExpertStats, MemoryStats, OffloadStats, SpeculationStats
from baton.kv_names import Tier
from baton.kv_transfer import TransferStats
from baton.rpc import worker_pb2 as pb
from baton.worker.messages import EngineStatus
from baton.worker.service_process.metrics import Metrics
from baton.worker.stats import RequestCounts, StoreStats
from tests.within import WITHIN, eventually, within

# The Accept headers of Prometheus 2.42 and 3.5.
ACCEPTED = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,*/*;q=0.1",
    "*/*",
)


def get(url: str, accept: str = "*/*") -> str:
    with urllib.request.urlopen(urllib.request.Request(url, headers={"Accept": accept})) as response:
        return response.read().decode()


@pytest.mark.parametrize("accept", ACCEPTED)
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_metric_names_keep_their_colons_for_every_accept_header(accept: str, host: str) -> None:
    metrics = Metrics("prefill", "m", tensor_parallel_size=2)
    values: dict[str, Any] = {field.name: 4 for field in dataclasses.fields(EngineStats)} | {
        "experts": ExpertStats([70, 0, 5], 2.8, 1.5),
        "offload": [OffloadStats(Tier.HOST, 8, 2, 1e3, 30, 40, 5, 6, 7)],
        "speculation": SpeculationStats(3, 9, 5),
        "memory": MemoryStats(300, 200, 150, 100, 50, 0.25),
        "encoder": EncoderStats(6, 900, 0.5, 3, 2, 4096, 0.001, 0.1),
    }
    metrics.engine_status = EngineStatus(
        4, EngineStats(**values), RequestCounts(4, 4, 4, 4, 4),
        pb.WorkerStatus(store="open", store_tokens_per_s=9.0), StoreStats(8, 7, 6),
    )  # fmt: skip
    metrics.transfer_stats = TransferStats(
        0, 0, 0, 1, 4, 64, 60, 64, 1000, 0, 2, 0, 0, {"acked": 1}, {}, {}, {},
        {"decode 0": "nixl", "decode 1": "tcp: another machine"}, {"decode 0": 1000, "decode 1": 0}, {},
    )  # fmt: skip
    port = await metrics.listen(host, 0, lambda: True)
    try:
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}/metrics"
        page = await asyncio.to_thread(get, url, accept)
    finally:
        metrics.close()
    labels = 'model_name="m",role="prefill"'
    for line in (
        f"vllm:prompt_tokens_total{{{labels}}} 12.0",
        f"baton:tensor_parallel_size{{{labels}}} 2.0",
        f'baton:expert_tokens_total{{expert="0",{labels}}} 70.0',
        f"baton:expert_imbalance{{{labels}}} 2.8",
        f"baton:experts_used{{{labels}}} 1.5",
        f'baton:offload_usage_perc{{{labels},tier="host"}} 0.25',
        f'baton:offload_loaded_tokens_total{{{labels},tier="host"}} 40.0',
        f"vllm:spec_decode_num_draft_tokens_total{{{labels}}} 9.0",
        f"vllm:spec_decode_num_accepted_tokens_total{{{labels}}} 5.0",
        f'baton:elastic_memory_bytes{{kind="states",{labels}}} 200.0',
        f'baton:elastic_memory_bytes{{kind="windows",{labels}}} 150.0',
        f"baton:elastic_memory_moved_bytes_total{{{labels}}} 50.0",
        f"baton:images_waiting{{{labels}}} 2.0",
        f"baton:images_encoded_total{{{labels}}} 6.0",
        f"baton:image_tokens_encoded_total{{{labels}}} 900.0",
        f"baton:encode_seconds_total{{{labels}}} 0.5",
        f"baton:encoder_cache_hits_total{{{labels}}} 3.0",
        f"baton:encoder_cache_bytes{{{labels}}} 4096.0",
        f"baton:store_open{{{labels}}} 1.0",
        f"baton:store_tokens_per_second{{{labels}}} 9.0",
        'baton:store_chunks_total{model_name="m",result="missed",role="prefill"} 6.0',
        f"vllm:kv_cache_usage_perc{{{labels}}} 0.0",
        'baton:kv_readers{model_name="m",role="prefill",transport="nixl"} 1.0',
        f'baton:kv_bytes_total{{direction="send",{labels}}} 1000.0',
        'baton:kv_transfers_total{model_name="m",reason="acked",role="prefill"} 1.0',
        f'baton:kv_checksum_failures_total{{kind="payload",{labels}}} 0.0',  # before any failure
        f"vllm:request_queue_time_seconds_count{{{labels}}} 0.0",
    ):
        assert f"\n{line}\n" in page
    assert "_created" not in page


@pytest.mark.all
async def test_idle_connections_take_no_threads_and_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.worker.service_process.metrics.ANSWER_SECONDS", 1.0)
    begun, answer = 0, Metrics._answer

    async def counted(*of: Any) -> None:
        nonlocal begun
        begun += 1
        await answer(*of)

    monkeypatch.setattr(Metrics, "_answer", counted)
    metrics = Metrics("decode", "m")
    port = await metrics.listen("127.0.0.1", 0, lambda: True)
    threads = threading.active_count()
    try:
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(50)]
        for number, (_, writer) in enumerate(idle):
            writer.write((b"", b"GET / HTTP/1.1\r\n", bytes(1 << 20))[number % 3])
        await eventually(lambda: begun >= 50)
        monkeypatch.setattr("baton.worker.service_process.metrics.ANSWER_SECONDS", WITHIN)
        page = await asyncio.to_thread(get, f"http://127.0.0.1:{port}/metrics")
        assert "vllm:request_queue_time_seconds_count" in page
        assert threading.active_count() <= threads + 2, "those of `to_thread`"
        for reader, writer in idle:
            with contextlib.suppress(ConnectionResetError):
                assert await within(reader.read()) == b""
            writer.close()
    finally:
        metrics.close()


async def test_idle_connections_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest ones end at once, and a probe is answered."""
    monkeypatch.setattr("baton.worker.service_process.metrics._MOST_CONNECTIONS", 4)
    monkeypatch.setattr("baton.worker.service_process.metrics.ANSWER_SECONDS", 1000.0)
    metrics = Metrics("decode", "m")
    port = await metrics.listen("127.0.0.1", 0, lambda: True)
    try:
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(10)]
        for reader, _ in idle[:6]:
            with contextlib.suppress(ConnectionResetError):
                assert await within(reader.read()) == b""
        assert await asyncio.to_thread(get, f"http://127.0.0.1:{port}/health") == ""
        for _, writer in idle:
            writer.close()
    finally:
        metrics.close()


async def test_a_port_in_use_is_an_error() -> None:
    first, second = Metrics("decode", "m"), Metrics("decode", "m")
    port = await first.listen("127.0.0.1", 0, lambda: True)
    try:
        with pytest.raises(OSError, match="in use"):
            await second.listen("127.0.0.1", port, lambda: True)
    finally:
        first.close()
