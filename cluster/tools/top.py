"""`baton top`: shows live metrics of a running cluster.

Life of a frame: `scrape` reads `/status` and `/metrics` of the router, and the metrics of each worker in
`/status`. `headline` and `row`, which are pure, show rates and quantiles between two scrapes. `frame` draws
them.
"""

import asyncio
import contextlib
import math
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.text import Text

from baton.cluster.options.clients import EndpointOptions, TopOptions
from baton.cluster.tools import status
from baton.cluster.tools.http import TIMEOUT, checked, session
from baton.cluster.tools.status import console, merged, pool_of, table

WORKER_TIMEOUT = aiohttp.ClientTimeout(total=2)
PAGE_BYTES = 16 << 20  # of a metrics page, at most

DRAFTS = "vllm:spec_decode_num_accepted_tokens_total", "vllm:spec_decode_num_draft_tokens_total"
COLUMNS = (
    "worker", "pool", "device", "state", "running", "waiting", "KV used", "tokens/s", "step ms", "cached",
    "fetched/s", "host/s", "disk/s", "store/s", "drafts", "KV GB/s", "hidden", "transfers", "restarts",
)  # fmt: skip
TOKENS = {"prefill": "vllm:prompt_tokens_total", "decode": "vllm:generation_tokens_total"}
LATENCIES = {
    "TTFT": "vllm:time_to_first_token_seconds",
    "TTIT": "vllm:inter_token_latency_seconds",
    "handover": "baton:handover_gap_seconds",
}


# ------------------------------------------------------------ scrapes


Page = dict[tuple[str, str], float]
"""Sums of the samples of a metrics page, by their name, and by "" or the value of a label `le` or `tier`."""


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

    def since(self, before: "Scrape | None") -> float:
        """Seconds since an earlier scrape; 0 without one, since then there are no rates."""
        return 0.0 if before is None else self.at - before.at


def parse(text: str) -> Page:
    """Parses a page in Prometheus' text format. Raises ValueError for another format."""
    page: defaultdict[tuple[str, str], float] = defaultdict(float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            for part in {"", sample.labels.get("le", ""), sample.labels.get("tier", "")}:
                page[sample.name, part] += sample.value
    return dict(page)


async def page_text(response: aiohttp.ClientResponse) -> str:
    """The whole text of a metrics page. Raises ValueError for an endless one."""
    data = bytearray()
    async for piece in response.content.iter_any():
        data += piece
        if len(data) > PAGE_BYTES:
            raise ValueError(f"more than {PAGE_BYTES} bytes")
    return data.decode(errors="replace")


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


@dataclass(frozen=True, slots=True)
class Change:
    """The change of one metrics page. A counter that decreased belongs to a new process: it yields None."""

    before: Page | None
    after: Page
    seconds: float

    def added(self, counter: str, part: str = "") -> float | None:
        key = counter, part
        if self.before is None or key not in self.after:
            return None
        more = self.after[key] - self.before.get(key, 0.0)
        return more if more >= 0 else None

    def rate(self, counter: str, part: str = "") -> float | None:
        more = self.added(counter, part)
        return more / self.seconds if more is not None and self.seconds > 0 else None

    def share(self, part: str, whole: str) -> float | None:
        found, looked_up = self.added(part), self.added(whole)
        return found / looked_up if found is not None and looked_up else None

    def quantiles(self, metric: str) -> tuple[float, float] | None:
        """p50 and p99 of a histogram; None without samples."""
        bucket = f"{metric}_bucket"
        bounds = sorted({bound for name, bound in self.after if name == bucket and bound}, key=float)
        added = [(float(bound), self.added(bucket, bound)) for bound in bounds]
        counts = [(bound, count) for bound, count in added if count is not None]
        if not counts or len(counts) < len(bounds) or not self.added(f"{metric}_count"):
            return None
        return quantile(counts, 0.5), quantile(counts, 0.99)


def quantile(buckets: Sequence[tuple[float, float]], q: float) -> float:
    """Interpolates within the bucket, as `histogram_quantile` of Prometheus. At most the last finite bound.

    `buckets`: upper bounds and cumulative counts, ascending.
    """
    below, lower = 0.0, 0.0
    wanted = q * buckets[-1][1]
    for bound, count in buckets:
        if count >= wanted and count > below:
            if math.isinf(bound):
                return lower
            return lower + (bound - lower) * (wanted - below) / (count - below)
        below, lower = count, bound
    return lower


# ------------------------------------------------------------ frames


def frame(before: Scrape | None, after: Scrape) -> RenderableType:
    """Text and table. A dash stands for an unknown value, or a quantile without samples."""
    rows = [row(worker, before, after) for worker in merged(after.status)]
    lines = (Text.from_markup(line) for line in headline(before, after))
    return Group(*lines, Text(), table(rows, COLUMNS, numbers_from=4))


def headline(before: Scrape | None, after: Scrape) -> list[str]:
    """The cluster as a whole. All rates and latencies are of the time between the two scrapes."""
    change = Change(None if before is None else before.router, after.router, after.since(before))
    told = after.status.get("router") or {}
    names = (f"vllm:num_requests_{name}" for name in ("running", "waiting"))
    running, waiting = (round(after.router.get((name, ""), 0)) for name in names)
    latencies = (f"{name} {_pair(change.quantiles(metric))}" for name, metric in LATENCIES.items())
    return [
        f"[bold]{escape(str(told.get('model', '–')))}[/bold] · router {told.get('state', '–')}"
        f" · {running} running, {waiting} waiting"
        f" · [dim]{f'over {change.seconds:.1f} s' if change.seconds else 'no rates yet'}[/dim]",
        f"requests/s {_number(change.rate('vllm:request_success_total'))}"
        f" · prompt tokens/s {_number(change.rate('vllm:prompt_tokens_total'))}"
        f" · output tokens/s {_number(change.rate('vllm:generation_tokens_total'))}"
        f" · errors/s {_number(change.rate('baton:request_errors_total'))}"
        f" · split prompts {_number(change.added('baton:split_prompts_total'), digits=0)}"
        f" · retries {_number(change.added('baton:retries_total'), digits=0)}",
        f"{' · '.join(latencies)}  [dim](p50 / p99)[/dim]",
    ]


def row(worker: dict[str, Any], before: Scrape | None, after: Scrape) -> dict[str, str]:
    """One worker: the columns of `baton status`, and those of `baton top`.

    - tokens/s: prompt tokens computed (in the prefill pool) or tokens sampled (in the decode pool)
    - cached: share of the prompt tokens that its prefix cache had, fetched ones included
    - fetched/s: prompt tokens with KV from the prefix caches of other workers
    - store/s: those of them from the shared store
    - host/s, disk/s: prompt tokens with KV from the memory of the host and from its disk
    - KV GB/s: sent (prefill) or received and verified (decode)
    - drafts: share of the drafts of tokens that were right
    - hidden: mean share of the time of a transfer that overlapped the prefill; decode only
    """
    page = after.workers.get(worker.get("address") or "", {})
    change = Change(_same(worker, before), page, after.since(before))
    step = (worker.get("status") or {}).get("step_seconds") or None
    return status.row(worker) | {
        "tokens/s": _number(change.rate(TOKENS.get(pool_of(worker), ""))),
        "step ms": _number(step, 1e3),
        "cached": _share(change.share("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total")),
        "fetched/s": _number(change.rate("baton:prefix_fetched_tokens_total")),
        "host/s": _number(change.rate("baton:offload_loaded_tokens_total", "host")),
        "disk/s": _number(change.rate("baton:offload_loaded_tokens_total", "disk")),
        "store/s": _number(change.rate("baton:prefix_fetched_tokens_total", "store")),
        "KV GB/s": _number(change.rate("baton:kv_bytes_total"), 1e-9, digits=2),
        "drafts": _share(change.share(*DRAFTS)),
        "hidden": _share(change.share("baton:kv_hidden_share_sum", "baton:kv_hidden_share_count")),
    }


def _same(worker: dict[str, Any], before: Scrape | None) -> Page | None:
    """The earlier page of a worker's incarnation. Another incarnation has other counters."""
    if before is None:
        return None
    same = [w for w in before.status["workers"] if w.get("incarnation") == worker.get("incarnation")]
    return before.workers.get(same[0]["address"]) if same else None


def _number(value: float | None, scale: float = 1.0, digits: int = 1) -> str:
    return "–" if value is None else f"{value * scale:,.{digits}f}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def _pair(pair: tuple[float, float] | None) -> str:
    return "–" if pair is None else f"{_number(pair[0], 1e3)} / {_number(pair[1], 1e3)} ms"


# ------------------------------------------------------------ the command


def run(endpoint: EndpointOptions, top: TopOptions) -> int:
    """Draws frames until Ctrl-C, or one with `--once`. Returns the exit code.

    Raises ValueError if the first scrape fails. Shows a later failure and tries again.
    """
    if not top.once:  # a shell starts programs with `&` with SIGINT ignored
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_run(endpoint, top))
    return 0


async def _run(endpoint: EndpointOptions, top: TopOptions) -> None:
    before = await scrape(endpoint)
    if top.once:
        await asyncio.sleep(top.interval)
        console().print(frame(before, await scrape(endpoint)))
    elif sys.stdout.isatty():
        with Live(frame(None, before), console=console(), screen=True, auto_refresh=False) as live:
            await _follow(endpoint, top, before, lambda shown: live.update(shown, refresh=True))
    else:
        await _follow(endpoint, top, before, console().print)


async def _follow(
    endpoint: EndpointOptions, top: TopOptions, before: Scrape, show: Callable[[RenderableType], None]
) -> None:
    shown = frame(None, before)
    while True:
        await asyncio.sleep(top.interval)
        try:
            after = await scrape(endpoint)
        except ValueError as error:
            failure = f"No answer for {time.monotonic() - before.at:.0f} s: {error}"
            show(Group(shown, Text(failure, style="red")))
            continue
        shown = frame(before, after)
        show(shown)
        before = after
