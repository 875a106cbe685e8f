from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from baton.bench.contract import Report
from baton.bench.load.commands import report_of_sweep, write_requests
from baton.bench.load.experiment import Plan, client_of, report_of
from baton.bench.load.options import Options
from baton.bench.load.report.page import add_line, page, panels
from baton.bench.load.report.table import console, render, render_sweep
from baton.bench.load.target.answer import Failure, Record
from baton.bench.load.target.request import Dialect, Target
from baton.bench.load.traffic.fleet import Harvest
from baton.bench.load.traffic.workload import Listed
from tests.bench.support import EXACT, one_turn, record
from tests.browser import browser

HOSTILE = "<script>alert('x')</script>\x1b[31m"


def records(failed: int = 0) -> list[Record]:
    answered = [record(i * 0.1, gaps=(0.01,) * 5, index=i, prompt_tokens=9) for i in range(60)]
    return answered + [
        record(i * 0.1, index=i, failure=Failure.HTTP, status=500, detail=HOSTILE, output_tokens=None)
        for i in range(failed)
    ]


def report(*, rate: float = 4.0, failed: int = 0, **more: Any) -> Report:
    """`more`: fields of the harvest."""
    options = Options(rate=rate, slo="ttft=500,ttit.p99=20", seed=1, warmup=0.0)
    target = Target(("http://127.0.0.1:8000",), "completions", HOSTILE, Dialect())
    plan = Plan(options, client_of(options, target, Listed((one_turn(),)), EXACT), ())
    harvest = replace(Harvest(ended=6.0, records=records(failed)), **more)
    queue = {"name": "prefill_queue", "metric": "vllm:request_queue_time_seconds", "count": 60, "mean": 0.01}
    queue |= {"p50": 64.0, "p99": None, "beyond": ["p50"]}
    return report_of(plan, harvest, {"statement": "by it", "stages": [queue]}, "2026-01-01")


def _report(**more: Any) -> dict[str, Any]:
    return report(**more).as_dict()


def _sweep() -> dict[str, Any]:
    return report_of_sweep([(f"rate={r}", report(rate=r)) for r in (1.0, 2.0, 4.0)], None).as_dict()


class _Tags(HTMLParser):
    """Every tag is closed, and nothing is loaded from anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        for name, value in attrs:
            assert name not in ("src", "href", "action", "data", "poster", "srcset"), (tag, name, value)
            assert not name.startswith("on"), (tag, name)
            assert "url(" not in (value or ""), (tag, name, value)
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


PAGES = {
    "run": lambda: page([_report()], ["one"]),
    "failures": lambda: page([_report(failed=5)], ["one"]),
    "sweep": lambda: page([_sweep()], ["sweep"]),
    "several": lambda: page(
        [_report(), _sweep(), _report(died=["client process 0 died"])], ["a", "b", HOSTILE]
    ),
    "nothing": lambda: page([_report(records=[])], ["empty"]),
}


@pytest.mark.parametrize("kind", PAGES)
def test_a_page_is_valid_and_loads_nothing(kind: str) -> None:
    text = PAGES[kind]()
    tags = _Tags()
    tags.feed(text)
    assert tags.open == []
    assert {"link", "img", "iframe"}.isdisjoint(tags.seen)
    assert "alert('x')</script>" not in text, "what came over the network is text"
    assert "Time line: " in text


async def test_a_browser_draws_the_charts(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(page([_report()], ["one"]))
    async with browser(file.as_uri(), tmp_path / "profile") as shown:
        # four distributions, four time lines, the stages of the server
        await shown.until("document.querySelectorAll('.subplot').length === 9")


def test_a_page_shows_why_its_numbers_are_invalid() -> None:
    text = page([_report(died=["client process 0 died"], interrupted=True, failed=3)], ["x"])
    for said in (
        "INVALID",
        "client process 0 died",
        "INCOMPLETE",
        "http_500",
        "misses it",
    ):
        assert said in text, said


def test_lines_of_a_chart_are_at_their_values() -> None:
    figure = panels(["one", "other"])
    add_line(figure, 1, "p50", [(0, 1.5), (50, 10)], 0)
    add_line(figure, 0, "p50", [(0, 2)], 0)
    first, second = figure.data
    assert (first.x, first.y, first.xaxis) == ((0, 50), (1.5, 10), "x2")
    assert (second.x, second.y, second.xaxis) == ((0,), (2,), "x")
    assert [first.showlegend, second.showlegend] == [True, False], "one entry for a name"


def test_a_page_without_plotly_names_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"--html needs plotly.*pip install -e '\.\[bench\]'"):
        Options(html=tmp_path / "page.html")
    with pytest.raises(ValueError, match=r"'\.\[bench\]'"):
        page([_report()], ["one"])
    Options(json=tmp_path / "report.json")


def test_a_report_of_another_bench_is_refused() -> None:
    with pytest.raises(ValueError, match="kv is no report of a load test"):
        page([{"bench": "kv", "results": [], "parameters": {}}], ["kv"])


def test_rows_have_the_names_and_units_of_the_contract() -> None:
    rows = {row["name"]: row for row in _report(failed=2)["results"]}
    for metric in ("ttft", "ttit", "ttit.request", "handover", "e2e"):
        for quantile in ("p50", "p90", "max"):
            assert rows[f"{metric}.{quantile}"]["unit"] == "ms"
    assert "ttft.p99" not in rows, "60 answers are too few"
    assert "60 answers are too few for p99" in " ".join(_report()["detail"]["notes"])
    assert rows["ttft.p50"]["value"] == pytest.approx(100)
    assert rows["ttft.p50"]["low"] <= rows["ttft.p50"]["value"] <= rows["ttft.p50"]["high"]
    assert rows["ttit.p99"]["goal"] == 20
    assert rows["ttit.p99"]["meets_goal"] is True
    assert rows["errors.http_500"]["value"] == 2
    assert rows["goodput.share"]["value"] == pytest.approx(60 / 62)
    assert rows["server.prefill_queue.mean"]["value"] == pytest.approx(10)
    assert rows["server.prefill_queue.p50"]["low"] == 64_000, "in the last bucket: at least so much"
    assert "server.prefill_queue.p99" not in rows
    assert "&gt; 64,000" in page([_report()], ["x"])


def test_requests_are_written_in_order_with_their_failures(tmp_path: Path) -> None:
    write_requests(records(failed=2), tmp_path / "r.jsonl")
    lines = (tmp_path / "r.jsonl").read_text().splitlines()
    assert len(lines) == 62
    assert sum('"error_class":"http_500"' in line for line in lines) == 2
    assert '"ttft_ms":100.0' in lines[0]


def test_terminal_tables_print(capsys: pytest.CaptureFixture[str]) -> None:
    console().print(render(_report(failed=2, died=["client process 0 died"], interrupted=True)))
    console().print(render_sweep(_sweep()))
    shown = capsys.readouterr().out
    for said in ("TTFT", "INVALID", "INCOMPLETE", "http_500", "Sweep", "within SLO"):
        assert said in shown, said
