"""A real Prometheus, with the rules of deploy/grafana, over a real router and the real pages of workers:
every query of every panel and rule finds data."""

from __future__ import annotations

import asyncio
from pathlib import Path

from kv_transfer import InjectStats, TransferStats
from router.tokenizer import ModelTokenizer
from tests.grafana import RULES, expressions, rules
from tests.prometheus import Prometheus
from worker import messages
from worker.metrics import Metrics

from .conftest import make_cluster


class Page:
    """The metrics port of a worker whose processes report ever larger counts."""

    def __init__(self, role: str) -> None:
        self._metrics = Metrics(role, "fake")
        self._role = role
        self._count = 0
        self.address = f"127.0.0.1:{self._metrics.listen('127.0.0.1', 0)}"
        self.close = self._metrics.close

    def work(self) -> None:
        self._count += 1
        n, metrics = self._count, self._metrics
        counts = dict.fromkeys(messages.EngineStatus.__struct_fields__, n) | {"blocks_total": 10**6}
        metrics.engine_status = messages.EngineStatus(**counts)  # pyrefly: ignore[bad-argument-type]
        metrics.transfer_stats = TransferStats(1, 1, 0, 1, 4, 64, 64, n, n, 0, {"injected": n}, {}, {}, {})
        metrics.prefilled(messages.Prefilled(b"", 0.0, 0.1, 0.2, 10, 0))
        if self._role == "decode":
            metrics.injected(InjectStats(10, 1, 0.0, 0.1, 0.2, 0.15, 0.2, 0.3))
            metrics.handover(0.1)
            metrics.decoded(messages.Decoded(b"", 0.0, 1.0, 5))


async def test_every_query_finds_data(tokenizer: ModelTokenizer, tmp_path: Path) -> None:
    pages, looked = [Page("prefill"), Page("decode")], asyncio.Event()
    async with make_cluster(tokenizer, tmp_path) as cluster:
        for connection, page in zip(cluster.router.services.pool.connections, pages, strict=True):
            connection.description.metrics_address = page.address  # which a fake does not have

        async def load() -> None:
            while not looked.is_set():
                await cluster.complete(max_tokens=10)
                for page in pages:
                    page.work()

        def look() -> None:
            with Prometheus(tmp_path, RULES, cluster.url.removeprefix("http://")) as prometheus:
                prometheus.wait_for(lambda: sum(prometheus.values("up")) == 1 + len(pages), "all targets")
                missing = [*expressions(), *(rule["record"] for rule in rules() if "record" in rule)]
                assert len(missing) > 100

                def answered() -> bool:
                    missing[:] = prometheus.without_numbers(missing)
                    return not missing

                prometheus.wait_for(answered, "all queries", lambda: "no data for:\n" + "\n".join(missing))
                assert "BatonNoWorker" not in {a["labels"]["alertname"] for a in prometheus.alerts()}

        loading = asyncio.create_task(load())
        try:
            await asyncio.to_thread(look)
        finally:
            looked.set()
            await loading
            for page in pages:
                page.close()
