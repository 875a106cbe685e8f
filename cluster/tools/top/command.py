"""Draws frames: in a terminal in place, otherwise one after the other."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import Callable

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from baton.cluster.options import EndpointOptions, TopOptions
from baton.cluster.tools.top.frame import Frame, frame
from baton.cluster.tools.top.scrape import Scrape, scrape

COLUMNS = (
    "worker", "pool", "device", "state", "running", "waiting", "KV used", "tokens/s", "step ms", "cached",
    "fetched/s", "host/s", "disk/s", "KV GB/s", "hidden", "transfers", "restarts",
)  # fmt: skip


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
    terminal = sys.stdout.isatty()
    console = Console(highlight=False, width=None if terminal else 160)
    before = await scrape(endpoint)
    if top.once:
        await asyncio.sleep(top.interval)
        console.print(drawn(frame(before, await scrape(endpoint))))
    elif terminal:
        with Live(drawn(frame(None, before)), console=console, screen=True, auto_refresh=False) as live:
            await _follow(endpoint, top, before, lambda shown: live.update(shown, refresh=True))
    else:
        await _follow(endpoint, top, before, console.print)


async def _follow(
    endpoint: EndpointOptions, top: TopOptions, before: Scrape, show: Callable[[RenderableType], None]
) -> None:
    shown = drawn(frame(None, before))
    while True:
        await asyncio.sleep(top.interval)
        try:
            after = await scrape(endpoint)
        except ValueError as error:
            failure = f"No answer for {time.monotonic() - before.at:.0f} s: {error}"
            show(Group(shown, Text(failure, style="red")))
            continue
        shown = drawn(frame(before, after))
        show(shown)
        before = after


def drawn(found: Frame) -> RenderableType:
    """The frame as text and table. A dash stands for an unknown value, or a quantile without samples."""
    over = f"over {found.seconds:.1f} s" if found.seconds else "no rates yet"
    latencies = " · ".join(f"{name} {_pair(pair)}" for name, pair in found.latencies.items())
    lines = [
        f"[bold]{escape(found.model)}[/bold] · router {found.state}"
        f" · {found.running} running, {found.waiting} waiting · [dim]{over}[/dim]",
        f"requests/s {_number(found.requests_per_s)} · prompt tokens/s {_number(found.prompt_tokens_per_s)}"
        f" · output tokens/s {_number(found.output_tokens_per_s)} · errors/s {_number(found.errors_per_s)}"
        f" · retries {'–' if found.retries is None else found.retries}",
        f"{latencies}  [dim](p50 / p99)[/dim]",
    ]
    table = Table(*COLUMNS, header_style="bold", box=None, pad_edge=False)
    for column in table.columns[4:]:
        column.justify = "right"
    for w in found.workers:
        table.add_row(
            escape(w.name),
            w.pool or "–",
            w.device or "–",
            escape(w.state),
            *("–" if value is None else str(value) for value in (w.running, w.waiting)),
            _share(w.kv_used),
            _number(w.tokens_per_s),
            _number(w.step_seconds, 1e3),
            _share(w.cached),
            _number(w.fetched_per_s),
            *map(_number, w.loaded_per_s),
            _number(w.kv_bytes_per_s, 1e-9, digits=2),
            _share(w.hidden),
            *("–" if value is None else str(value) for value in (w.transfers, w.restarts)),
        )
    return Group(*(Text.from_markup(line) for line in lines), Text(), table)


def _number(value: float | None, scale: float = 1.0, digits: int = 1) -> str:
    return "–" if value is None else f"{value * scale:,.{digits}f}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def _pair(pair: tuple[float, float] | None) -> str:
    return "–" if pair is None else f"{_number(pair[0], 1e3)} / {_number(pair[1], 1e3)} ms"
