"""Computes a frame from two scrapes. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from baton.cluster.tools.histograms import Histogram, difference, quantile
from baton.cluster.tools.status import device_of, merged, name_of, pool_of, state
from baton.cluster.tools.top.scrape import Page, Scrape

TOKENS = {"prefill": "vllm:prompt_tokens_total", "decode": "vllm:generation_tokens_total"}
RETRIES = "baton:retries_total"


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """One worker. None means unknown. Rates are per second between the two scrapes.

    Attributes:
        pool: where it serves now.
        device: such as "2 GPUs"; "" if it is not known.
        tokens_per_s: prompt tokens computed (in the prefill pool) or tokens sampled (in the decode pool).
        kv_used: share of the KV blocks, 0 to 1.
        cached: share of the prompt tokens that its prefix cache had, 0 to 1, fetched ones included.
        fetched_per_s: prompt tokens with KV from the prefix caches of other workers.
        loaded_per_s: prompt tokens with KV from the memory of the host and from its disk. None without such a
            tier, too.
        kv_bytes_per_s: KV sent (prefill) or received and verified (decode).
        hidden: mean share of the time of a transfer that overlapped the prefill, 0 to 1; decode only.
    """

    name: str
    pool: str
    device: str
    state: str
    running: int | None
    waiting: int | None
    kv_used: float | None
    tokens_per_s: float | None
    step_seconds: float | None
    cached: float | None
    fetched_per_s: float | None
    loaded_per_s: tuple[float | None, float | None]
    kv_bytes_per_s: float | None
    hidden: float | None
    transfers: int | None
    restarts: int | None


@dataclass(frozen=True, slots=True)
class Frame:
    """Everything that `baton top` draws.

    Attributes:
        seconds: time between the scrapes; 0 for the first scrape, which has no rates.
        latencies: p50 and p99 in seconds between the scrapes, by name of the latency.
        retries: attempts replaced between the scrapes.
    """

    model: str
    state: str
    seconds: float
    running: int
    waiting: int
    requests_per_s: float | None
    prompt_tokens_per_s: float | None
    output_tokens_per_s: float | None
    errors_per_s: float | None
    retries: int | None
    latencies: dict[str, tuple[float, float] | None]
    workers: list[WorkerRow]


LATENCIES = {
    "TTFT": "vllm:time_to_first_token_seconds",
    "TTIT": "vllm:inter_token_latency_seconds",
    "handover": "baton:handover_gap_seconds",
}


def frame(before: Scrape | None, after: Scrape) -> Frame:
    seconds = after.at - before.at if before is not None else 0.0
    router = Change(before.router if before is not None else None, after.router, seconds)
    known = after.router.values
    told = after.status.get("router") or {}
    return Frame(
        model=str(told.get("model", "–")),
        state=str(told.get("state", "–")),
        seconds=seconds,
        running=round(known.get("vllm:num_requests_running", 0)),
        waiting=round(known.get("vllm:num_requests_waiting", 0)),
        requests_per_s=router.rate("vllm:request_success_total"),
        prompt_tokens_per_s=router.rate("vllm:prompt_tokens_total"),
        output_tokens_per_s=router.rate("vllm:generation_tokens_total"),
        errors_per_s=router.rate("baton:request_errors_total"),
        retries=None if (more := router.added(RETRIES)) is None else round(more),
        latencies={name: router.quantiles(metric) for name, metric in LATENCIES.items()},
        workers=[_row(worker, before, after, seconds) for worker in merged(after.status)],
    )


def _row(worker: dict[str, Any], before: Scrape | None, after: Scrape, seconds: float) -> WorkerRow:
    load, role = worker.get("status") or {}, worker.get("supervised") or {}
    page = after.workers.get(worker.get("address") or "", Page())
    change = Change(_same(worker, before), page, seconds)
    total = load.get("blocks_total")
    return WorkerRow(
        name=name_of(worker),
        pool=pool_of(worker),
        device=device_of(worker),
        state=state(worker, role),
        running=load.get("requests_running"),
        waiting=load.get("requests_waiting"),
        kv_used=(total - load["blocks_free"]) / total if total else None,
        tokens_per_s=change.rate(TOKENS.get(pool_of(worker), "")),
        step_seconds=load.get("step_seconds") or None,
        cached=change.share("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"),
        fetched_per_s=change.rate("baton:prefix_fetched_tokens_total"),
        loaded_per_s=(change.loaded_per_s("host"), change.loaded_per_s("disk")),
        kv_bytes_per_s=change.rate("baton:kv_bytes_total"),
        hidden=change.mean("baton:kv_hidden_share"),
        transfers=load.get("transfers_open"),
        restarts=role.get("restarts"),
    )


def _same(worker: dict[str, Any], before: Scrape | None) -> Page | None:
    """The earlier page of a worker's incarnation. Another incarnation has other counters."""
    if before is None:
        return None
    same = [w for w in before.status["workers"] if w.get("incarnation") == worker.get("incarnation")]
    return before.workers.get(same[0]["address"]) if same else None


@dataclass(frozen=True, slots=True)
class Change:
    """The change of one metrics page. A counter that decreased belongs to a new process: it yields None."""

    before: Page | None
    after: Page
    seconds: float

    def added(self, counter: str) -> float | None:
        if self.before is None or counter not in self.after.values:
            return None
        more = self.after.values[counter] - self.before.values.get(counter, 0.0)
        return more if more >= 0 else None

    def rate(self, counter: str) -> float | None:
        more = self.added(counter)
        return more / self.seconds if more is not None and self.seconds > 0 else None

    def loaded_per_s(self, tier: str) -> float | None:
        key = "baton:offload_loaded_tokens_total", tier
        if self.before is None or self.seconds <= 0 or key not in self.after.tiers:
            return None
        return max(0.0, self.after.tiers[key] - self.before.tiers.get(key, 0.0)) / self.seconds

    def share(self, part: str, whole: str) -> float | None:
        found, looked_up = self.added(part), self.added(whole)
        return found / looked_up if found is not None and looked_up else None

    def quantiles(self, metric: str) -> tuple[float, float] | None:
        found = self._histogram(metric)
        return (quantile(found, 0.5), quantile(found, 0.99)) if found is not None else None

    def mean(self, metric: str) -> float | None:
        found = self._histogram(metric)
        return found.total / found.count if found is not None else None

    def _histogram(self, metric: str) -> Histogram | None:
        """The samples added between the pages; None if there are none."""
        if self.before is None or metric not in self.after.histograms:
            return None
        empty = Histogram()
        found = difference(self.before.histograms.get(metric, empty), self.after.histograms[metric])
        return found if found is not None and found.count else None
