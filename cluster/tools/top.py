"""`baton top`: shows live metrics of a running cluster.

Life of a frame: `scrape` reads `/status` and `/metrics` of the router, which has the counts of each worker.
So the workers need not be within reach. `headline` and `row`, which are pure, show rates and quantiles
between two scrapes. `frame` draws them.
"""

import asyncio
import contextlib
import math
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
from rich.console import Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.text import Text

from baton.cluster.options.clients import EndpointOptions, TopOptions
from baton.cluster.tools import status
from baton.cluster.tools.http import TIMEOUT, answer, checked, session
from baton.cluster.tools.status import TEXTS, columns_for, merged
from baton.cluster.tools.tables import console, fitting, more, table
from baton.system.metrics_page import samples

PAGE_BYTES = 16 << 20  # of a metrics page, at most

COLUMNS = (
    "worker", "pool", "state", "running", "waiting", "KV used", "prompt/s", "output/s", "step ms", "KV MB/s",
    "hidden", "cached", "fetched/s", "store/s", "host/s", "disk/s", "drafts", "images/s", "transfers",
    "restarts", "device",
)  # fmt: skip
"""The most important ones first: a terminal may show only these."""
OPTIONAL = {
    "fetched/s": "prefix_fetched_tokens", "store/s": "store_fetched_tokens", "host/s": "host_loaded_tokens",
    "disk/s": "disk_loaded_tokens", "drafts": "draft_tokens",
    "images/s": "images_encoded",
}  # fmt: skip
"""Columns that stay away until a worker has counted something of this."""
LATENCIES = {
    "TTFT": "vllm:time_to_first_token_seconds",
    "ITL": "vllm:inter_token_latency_seconds",
    "handover": "baton:handover_gap_seconds",
}


# ------------------------------------------------------------ scrapes


Page = dict[tuple[str, str], float]
"""Sums of the samples of a metrics page, by their name, and by "" or the value of a label `le`."""


@dataclass(frozen=True, slots=True)
class Scrape:
    """One sample of a cluster.

    Attributes:
        at: time.monotonic() at its end.
        status: the router's /status.
        router: its metrics.
    """

    at: float
    status: dict[str, Any]
    router: Page

    def since(self, before: "Scrape | None") -> float:
        """Seconds since an earlier scrape; 0 without one, since then there are no rates."""
        return 0.0 if before is None else self.at - before.at


def parse(text: str) -> Page:
    """Parses a page in Prometheus' text format. Raises ValueError for another format."""
    page: defaultdict[tuple[str, str], float] = defaultdict(float)
    for sample in samples(text):
        for part in {"", sample.labels.get("le", "")}:
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
    """Reads the router's pages. Raises ValueError if it does not answer."""
    async with session(endpoint, TIMEOUT) as client:
        status = await answer(client.get("status"))
        async with client.get("metrics") as response:
            router = parse(await page_text(await checked(response)))
    return Scrape(time.monotonic(), status, router)


def counts_of(worker: dict[str, Any]) -> Page:
    """What a worker has counted since its start."""
    load = worker.get("status") or {}
    return {(name, ""): value for name, value in load.items() if isinstance(value, int | float)}


@dataclass(frozen=True, slots=True)
class Change:
    """The change of one page, or of the counts of one worker.

    A counter that decreased belongs to a new process: it yields None."""

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

    def share(self, part: str, total: str) -> float | None:
        added, looked_up = self.added(part), self.added(total)
        return added / looked_up if added is not None and looked_up else None

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
    rank = q * buckets[-1][1]
    for bound, count in buckets:
        if count >= rank and count > below:
            if math.isinf(bound):
                return lower
            return lower + (bound - lower) * (rank - below) / (count - below)
        below, lower = count, bound
    return lower


# ------------------------------------------------------------ frames


def frame(before: Scrape | None, after: Scrape, width: int) -> RenderableType:
    """Text and table. A dash stands for an unknown value, or a quantile without samples. `width`: of the
    terminal."""
    workers = merged(after.status)
    rows = [row(worker, before, after) for worker in workers]
    lines = [Text.from_markup(line) for line in headline(before, after)]
    if not rows:
        return Group(*lines, Text(), Text("No workers."))
    counts = [counts_of(worker) for worker in workers]
    unused = {column for column, name in OPTIONAL.items() if not any(each.get((name, "")) for each in counts)}
    columns = [column for column in columns_for(rows, COLUMNS) if column not in unused]
    shown, hidden = fitting(rows, columns, width)
    return Group(*lines, Text(), table(rows, shown, TEXTS), *([more(hidden)] if hidden else []))


def headline(before: Scrape | None, after: Scrape) -> list[str]:
    """The cluster as a whole. All rates and latencies are of the time between the two scrapes."""
    change = Change(None if before is None else before.router, after.router, after.since(before))
    router = after.status.get("router") or {}
    names = (f"vllm:num_requests_{name}" for name in ("running", "waiting"))
    running, waiting = (round(after.router.get((name, ""), 0)) for name in names)
    latencies = (f"{name} {_pair(change.quantiles(metric))}" for name, metric in LATENCIES.items())
    return [
        f"[bold]{escape(str(router.get('model', '–')))}[/bold] · router {router.get('state', '–')}"
        f" · {running} running, {waiting} waiting"
        f" · [dim]{f'over {change.seconds:.1f} s' if change.seconds else 'no rates yet'}[/dim]",
        f"requests/s {_number(change.rate('vllm:request_success_total'))}"
        f" · prompt tokens/s {_number(change.rate('vllm:prompt_tokens_total'))}"
        f" · output tokens/s {_number(change.rate('vllm:generation_tokens_total'))}"
        f" · errors/s {_number(change.rate('baton:request_errors_total'))}",
        f"handovers {_number(change.added('baton:handover_gap_seconds_count'), digits=0)}"
        f" · split prompts {_number(change.added('baton:split_prompts_total'), digits=0)}"
        f" · on one worker {_number(change.added('baton:overflow_total'), digits=0)}"
        f" · retries {_number(change.added('baton:retries_total'), digits=0)}",
        f"{' · '.join(latencies)}  [dim]p50 / p99[/dim]",
    ]


def row(worker: dict[str, Any], before: Scrape | None, after: Scrape) -> dict[str, str]:
    """One worker: the columns of `baton status`, and those of `baton top`.

    - prompt/s, output/s: prompt tokens computed and tokens sampled; every worker can do both
    - cached: share of the prompt tokens that its prefix cache had, fetched ones included
    - fetched/s: prompt tokens with KV from the prefix caches of other workers
    - store/s: those of them from the shared store
    - host/s, disk/s: prompt tokens with KV from the memory of the host and from its disk
    - KV MB/s: sent (prefill) or received and verified (decode)
    - drafts: share of the drafts of tokens that were right
    - images/s: that were encoded
    - hidden: mean share of the time of a transfer that overlapped the prefill; decode only
    """
    change = Change(_same(worker, before), counts_of(worker), after.since(before))
    step = (worker.get("status") or {}).get("step_seconds") or None
    return status.row(worker) | {
        "prompt/s": _number(change.rate("computed_prompt_tokens")),
        "output/s": _number(change.rate("generation_tokens")),
        "step ms": _number(step, 1e3),
        "KV MB/s": _number(change.rate("kv_bytes"), 1e-6),
        "hidden": _share(change.share("handovers_hidden", "handovers")),
        "cached": _share(change.share("prefix_cache_hits", "prefix_cache_queries")),
        "fetched/s": _number(change.rate("prefix_fetched_tokens")),
        "store/s": _number(change.rate("store_fetched_tokens")),
        "host/s": _number(change.rate("host_loaded_tokens")),
        "disk/s": _number(change.rate("disk_loaded_tokens")),
        "drafts": _share(change.share("accepted_draft_tokens", "draft_tokens")),
        "images/s": _number(change.rate("images_encoded")),
    }


def _same(worker: dict[str, Any], before: Scrape | None) -> Page | None:
    """The earlier counts of a worker's incarnation. Another incarnation has other counters."""
    if before is None:
        return None
    same = [w for w in before.status["workers"] if w.get("incarnation") == worker.get("incarnation")]
    return counts_of(same[0]) if same else None


def _number(value: float | None, scale: float = 1.0, digits: int = 1) -> str:
    return "–" if value is None else f"{value * scale:,.{digits}f}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def _pair(pair: tuple[float, float] | None) -> str:
    return "–" if pair is None else f"{_number(pair[0], 1e3)} / {_number(pair[1], 1e3)} ms"


# ------------------------------------------------------------ the command


def run(endpoint: EndpointOptions, top: TopOptions) -> int:
    """Draws frames until Ctrl-C, or one if standard output is no terminal. Returns the exit code.

    Raises ValueError if the first scrape fails. Shows a later failure on the screen and tries again.
    """
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_run(endpoint, top))
    return 0


async def _run(endpoint: EndpointOptions, top: TopOptions) -> None:
    terminal, before = console(), await scrape(endpoint)
    if not sys.stdout.isatty():
        await asyncio.sleep(top.interval)
        terminal.print(frame(before, await scrape(endpoint), terminal.width))
        return
    screen = frame(None, before, terminal.width)
    with Live(screen, console=terminal, screen=True, auto_refresh=False) as live:
        while True:
            await asyncio.sleep(top.interval)
            try:
                after = await scrape(endpoint)
            except ValueError as error:
                failure = f"No answer for {time.monotonic() - before.at:.0f} s: {error}"
                live.update(Group(screen, Text(failure, style="red")), refresh=True)
                continue
            screen = frame(before, after, terminal.width)
            live.update(screen, refresh=True)
            before = after
