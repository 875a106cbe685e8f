"""The dashboard in a real browser: workers, rates, failures and timelines, only with a key."""

import asyncio
import time
from pathlib import Path

import pytest

from baton.router.admission.keys import api_keys
from baton.router.text.tokenizer import ModelTokenizer
from baton.rpc import worker_pb2 as pb
from tests.browser import browser
from tests.within import within

from .conftest import make_cluster

pytestmark = pytest.mark.all

KEY = {"Authorization": "Bearer k"}


async def test_a_killed_worker_is_seen_with_the_request_that_it_failed(
    tokenizer: ModelTokenizer, tmp_path: Path
):
    async with (
        make_cluster(tokenizer, tmp_path, decode=2, api_keys=api_keys(["k"], None)) as cluster,
        browser(f"{cluster.url}/dashboard", tmp_path / "profile") as page,
    ):
        for worker in cluster.workers:
            kind = "prefill" if worker in cluster.prefills else "transfer"
            worker.phases["mine"] = [pb.Phase(kind=kind, start=time.time(), seconds=0.01)]  # noqa: TID251
        await page.show_as(1280, 1000, dark=False)
        await page.until("globalThis.ask && !ask.hidden")
        assert await page.run("main.hidden"), "no data without the key"
        await page.run("key.value = 'k'; ask.requestSubmit()")
        await page.until("!main.hidden")
        assert await page.run("[...workers.rows].slice(1).map(row => row.cells[0].textContent)") == [
            "prefill 0", "decode 0", "decode 1",
        ]  # fmt: skip
        assert await page.run("network.hidden"), "no KV came so far"
        first = cluster.decodes[0]
        first.status.kv_links.add(
            incarnation=cluster.prefills[0].incarnation, bytes_per_s=3e9, bytes_waiting=2_000_000, used=0.25
        )
        first.report()
        await page.until("!network.hidden")
        shown = await page.run("[...links.rows[1].cells].map(cell => cell.textContent)")
        assert (*shown[:3], shown[4]) == ("prefill 0", "decode 0", "3.00", "2.00")
        for worker in cluster.decodes:
            worker.steps = asyncio.Semaphore(2)
        body = {"prompt": "Hello", "max_tokens": 20, "ignore_eos": True}
        answer = asyncio.create_task(cluster.post("/v1/completions", KEY | {"x-request-id": "mine"}, **body))
        await cluster.until(lambda: any(cluster.connection(each).attempts for each in cluster.decodes))
        [killed] = (each for each in cluster.decodes if cluster.connection(each).attempts)
        await cluster.until(lambda: any(each.usage().completion_tokens >= 2 for each in cluster.active))
        for worker in cluster.decodes:
            if worker is not killed and worker.steps is not None:
                for _ in range(100):
                    worker.steps.release()
        await killed.kill()
        assert (await within(answer))[0] == 200
        await page.until("failures.rows.length === 2 && requests.rows.length === 2")
        told = await page.run("failures.rows[1].textContent")
        assert f"decode {killed.index}" in told
        assert "lost" in told
        await page.until("[...workers.querySelectorAll('.bad')].length === 1")
        await page.run("failures.rows[1].querySelector('button').click()")
        await page.until("!!lanes.querySelector('.event')")
        lanes = await page.run(
            "[...lanes.querySelectorAll('.lane')].map(lane => lane.firstChild.textContent)"
        )
        assert lanes == ["router", "prefill · prefill 0", f"transfer · decode {1 - killed.index}"]
        events = await page.run("[...lanes.querySelectorAll('tr')].map(row => row.cells[1].textContent)")
        assert events[0] == "what"
        assert "attempt ended: lost" in events
        assert "first token" in events
        await page.run("timeline.close()")
        await page.until("document.querySelectorAll('.uplot').length >= 6")
        await page.show_as(390, 844, dark=True)
        await page.keep_picture("dashboard-phone.png")
        assert await page.run("document.documentElement.scrollWidth <= 390"), (
            "a phone scrolls tables, not the page"
        )


async def test_a_posix_locale_has_all_plots(tokenizer: ModelTokenizer, tmp_path: Path) -> None:
    """The language of such a browser is no tag of a language."""
    async with (
        make_cluster(tokenizer, tmp_path) as cluster,
        browser(f"{cluster.url}/dashboard", tmp_path / "profile", locale="POSIX") as page,
    ):
        await page.until("document.querySelectorAll('.uplot').length >= 6")
        assert await page.run("defect.hidden && alone.hidden && state.textContent.startsWith('serving')")
        cluster.router.services.metrics.on_one_worker("no_room", {})
        await page.until("why.rows.length === 2")
        told = "1on a prefill worker: no decode worker had roomno_room"
        assert await page.run("!alone.hidden && why.rows[1].textContent") == told


async def test_a_plot_that_fails_hides_no_table(tokenizer: ModelTokenizer, tmp_path: Path) -> None:
    """And the page does not blame the cluster."""
    async with (
        make_cluster(tokenizer, tmp_path, api_keys=api_keys(["k"], None)) as cluster,
        browser(f"{cluster.url}/dashboard", tmp_path / "profile") as page,
    ):
        await page.until("globalThis.ask && !ask.hidden")
        await page.run("uPlot = class { constructor() { throw new Error('no canvas') } }; key.value = 'k'")
        await page.run("ask.requestSubmit()")
        await page.until("defect.textContent.endsWith('this page fails: drawPlots: no canvas')")
        assert await page.run("!defect.hidden && !main.hidden && state.textContent.startsWith('serving')")
        assert await page.run("[workers, failures, requests].map(each => each.rows.length)") == [3, 1, 1]
        await page.keep_picture("dashboard-defect.png")
