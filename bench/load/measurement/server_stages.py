"""Where the time went inside the server: its histograms, from `/metrics` before and after the run.

Knows the names of the metrics of vLLM, SGLang and Baton. If the server has none of them, the report says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from baton.bench.contract import Row
from baton.bench.load.measurement.quantiles import QUANTILES, enough_samples
from baton.cluster.tools.histograms import Histogram, difference, page_text, quantile

# Stage -> the histograms that measure it. A server has one of them.
STAGES: Mapping[str, tuple[str, ...]] = {
    "router_queue": ("baton:router_queue_seconds",),
    "prefill_queue": ("vllm:request_queue_time_seconds", "sglang:queue_time_seconds"),
    "prefill": ("vllm:request_prefill_time_seconds",),
    "transfer": ("baton:kv_transfer_seconds",),
    "exposed_transfer": ("baton:kv_exposed_seconds",),
    "handover": ("baton:handover_gap_seconds",),
    "router_lag": ("baton:event_loop_lag_seconds",),
    "decode": ("vllm:request_decode_time_seconds",),
    "ttft": ("vllm:time_to_first_token_seconds", "sglang:time_to_first_token_seconds"),
    "e2e": ("vllm:e2e_request_latency_seconds", "sglang:e2e_request_latency_seconds"),
}


ServerView = dict[str, Any]
"""What the server measured during the run.

`statement` says where the stages come from, or why there are none. Each of `stages` has `name`, `metric`,
`count`, and in seconds `mean`, `p50` and `p99` (None if there are too few samples). `beyond` has the
quantiles that are in the last bucket, which has no upper bound: they are larger than the value here.
"""
Snapshot = dict[str, Histogram] | str  # a string says why there is none


async def pages(http: aiohttp.ClientSession, url: str, headers: Mapping[str, str]) -> list[str]:
    """The metrics page of the server. For a Baton router also those of its workers, which `/status` names."""
    found = [f"{url}/metrics"]
    try:
        async with http.get(
            f"{url}/status", headers=headers, timeout=aiohttp.ClientTimeout(total=10)
        ) as response:
            workers = (await response.json())["workers"]
            found += [f"http://{worker['description']['metrics_address']}/metrics" for worker in workers]
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError, LookupError, TypeError):
        return found[:1]  # not a Baton router: it has one page
    return found


async def scrape(http: aiohttp.ClientSession, urls: Sequence[str], headers: Mapping[str, str]) -> Snapshot:
    """The sum of all pages, since several workers may export a stage."""
    merged: dict[str, Histogram] = {}
    for url in urls:
        try:
            async with http.get(url, headers=headers, timeout=aiohttp.ClientTimeout(total=10)) as response:
                if response.status != 200:
                    return f"{url} answered {response.status}"
                parse(await page_text(response), merged)
        except (aiohttp.ClientError, TimeoutError, OSError) as e:
            return f"{url}: {e or type(e).__name__}"
        except (ValueError, KeyError, IndexError) as e:  # the parser raises these for a bad page
            return f"{url} is not in Prometheus's text format ({str(e)[:80]!r})"
    return merged


def parse(text: str, into: dict[str, Histogram]) -> None:
    """Adds the known histograms. Raises the errors of the parser for a bad page."""
    known = {metric for metrics in STAGES.values() for metric in metrics}
    for family in text_string_to_metric_families(text):
        if family.name not in known:
            continue
        histogram = into.setdefault(family.name, Histogram())
        for sample in family.samples:
            histogram.add(sample)


def between(before: Snapshot, after: Snapshot) -> ServerView:
    """What the server measured between two snapshots."""
    for snapshot in (before, after):
        if isinstance(snapshot, str):
            return _without_stages(snapshot)
    assert isinstance(before, dict)
    assert isinstance(after, dict)
    stages = []
    for name, metrics in STAGES.items():
        metric = next((each for each in metrics if each in after), None)
        if metric is None:
            continue
        added = difference(before.get(metric, Histogram()), after[metric])
        if added is None:
            return _without_stages("counters went backwards, the server restarted during the run")
        if added.count:
            stages.append(_stage(name, metric, added))
    if not stages:
        return _without_stages("/metrics has none of the histograms of vLLM, SGLang and Baton")
    told = "by the server's own histograms over the whole run, warm-up included; quantiles from buckets"
    return {"statement": told, "stages": stages}


def _without_stages(reason: str) -> ServerView:
    return {"statement": f"no server-side stages: {reason}", "stages": []}


def _stage(name: str, metric: str, added: Histogram) -> dict[str, Any]:
    quantiles = {q: quantile(added, QUANTILES[q]) for q in ("p50", "p99")}
    last = max((bound for bound in added.buckets if math.isfinite(bound)), default=0.0)
    below = added.buckets.get(last, 0.0)
    return {
        "name": name,
        "metric": metric,
        "count": round(added.count),
        "mean": added.total / added.count,
        "p50": quantiles["p50"],
        "p99": quantiles["p99"] if enough_samples(added.count, QUANTILES["p99"]) else None,
        "beyond": [q for q in quantiles if QUANTILES[q] * added.count > below],
    }


def rows(stage: Mapping[str, Any]) -> Iterator[Row]:
    """A quantile in the last bucket is at least its value."""
    for name in ("mean", "p50", "p99"):
        if stage[name] is not None:
            ms = stage[name] * 1e3
            yield Row(f"server.{stage['name']}.{name}", ms, "ms", low=ms if name in stage["beyond"] else None)
