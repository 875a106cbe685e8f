"""Reads the status and all metrics of a cluster once."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from baton.cluster.options import EndpointOptions
from baton.cluster.tools.histograms import Histogram, page_text
from baton.cluster.tools.http import checked, session

TIMEOUT = aiohttp.ClientTimeout(total=10)
WORKER_TIMEOUT = aiohttp.ClientTimeout(total=2)


@dataclass(frozen=True, slots=True)
class Page:
    """A metrics page, summed over all label sets.

    Attributes:
        values: counters and gauges by sample name, so counters end in `_total`.
        tiers: those with a label `tier`, also by sample name and tier.
        histograms: histograms by family name.
    """

    values: dict[str, float] = field(default_factory=dict)
    tiers: dict[tuple[str, str], float] = field(default_factory=dict)
    histograms: dict[str, Histogram] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Scrape:
    """One sample of a cluster.

    Attributes:
        at: time.monotonic() at its end.
        status: the router's /status.
        workers: pages by worker address, without workers whose page could not be read.
    """

    at: float
    status: dict[str, Any]
    router: Page
    workers: dict[str, Page]


def parse(text: str) -> Page:
    """Parses a page in Prometheus' text format. Raises ValueError for another format."""
    page = Page()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if family.type != "histogram":
                page.values[sample.name] = page.values.get(sample.name, 0.0) + sample.value
                if tier := sample.labels.get("tier"):
                    page.tiers[sample.name, tier] = sample.value
                continue
            page.histograms.setdefault(family.name, Histogram()).add(sample)
    return page


async def scrape(endpoint: EndpointOptions) -> Scrape:
    """Reads router and workers. Leaves out a worker that does not answer.

    Raises ValueError if the router does not answer.
    """
    # Workers get a separate session, because the API key is a secret between client and router.
    async with (
        session(endpoint, TIMEOUT) as client,
        aiohttp.ClientSession(timeout=WORKER_TIMEOUT) as to_workers,
    ):
        async with client.get("status") as response:
            status = await (await checked(response)).json()
        named = [w for w in status["workers"] if (w.get("description") or {}).get("metrics_address")]
        urls = [f"http://{w['description']['metrics_address']}/metrics" for w in named]
        pages = asyncio.gather(*(_worker_page(to_workers, url) for url in urls))
        async with client.get("metrics") as response:
            router = parse(await page_text(await checked(response)))
        found = zip(named, await pages, strict=True)
    workers = {w["address"]: page for w, page in found if page is not None}
    return Scrape(time.monotonic(), status, router, workers)


async def _worker_page(client: aiohttp.ClientSession, url: str) -> Page | None:
    try:
        async with client.get(url) as response:
            return parse(await page_text(response))
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
        return None  # the worker is starting, has ended, or cannot be reached from here
