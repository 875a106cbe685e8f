"""What a reader sees of reports: tables and comparisons."""

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from rich.console import Console

from baton.bench.load.commands import report_of_sweep, write_requests
from baton.bench.load.experiment import Setup, client_of, report_of
from baton.bench.load.measurement.curves import BINS, QUANTILES, curves
from baton.bench.load.options import Options
from baton.bench.load.report import compare, page
from baton.bench.load.report.compare import Condition
from baton.bench.load.report.table import console, render, render_sweep
from baton.bench.load.target.answer import Failure, Record
from baton.bench.load.target.request import Dialect, Target
from baton.bench.load.traffic.fleet import Harvest
from baton.bench.report import Report, Row
from tests.bench.support import EXACT, record, short_prompts
from tests.browser import browser

pytestmark = pytest.mark.all

HOSTILE = "<script>alert('x')</script>\x1b[31m"


def records(failed: int = 0) -> list[Record]:
    answered = [record(i * 0.1, gaps=(0.01,) * 5, index=i, prompt_tokens=9) for i in range(60)]
    return answered + [
        record(i * 0.1, index=i, failure=Failure.HTTP, status=500, detail=HOSTILE, output_tokens=None)
        for i in range(failed)
    ]


def report(*, rate: float = 4.0, failed: int = 0, **more: Any) -> Report:
    """`more`: fields of the harvest."""
    options = Options(rate=rate, slo="ttft=500,itl.p99=20", seed=1, warmup=0.0)
    target = Target(("http://127.0.0.1:8000",), "completions", HOSTILE, Dialect())
    setup = Setup(options, client_of(options, target, short_prompts(), EXACT), ())
    harvest = replace(Harvest(ended=6.0, records=records(failed)), **more)
    return report_of(setup, harvest, "2026-01-01")


def _report(**more: Any) -> dict[str, Any]:
    return report(**more).as_dict()


def _sweep() -> dict[str, Any]:
    return report_of_sweep([(f"rate={r}", report(rate=r)) for r in (1.0, 2.0, 4.0)], None).as_dict()


def test_the_terminal_shows_why_numbers_are_invalid(capsys: pytest.CaptureFixture[str]) -> None:
    report = _report(died=["client process 0 died"], interrupted=True, failed=3)
    console().print(render(report))
    terminal = capsys.readouterr().out
    for said in ("INVALID", "client process 0 died", "INCOMPLETE", "http_500", "misses it", "TTFT"):
        assert said in terminal, said
    console().print(render_sweep(_sweep()))
    shown = capsys.readouterr().out
    assert "Sweep" in shown
    assert "within SLO" in shown


def test_a_report_fits_into_80_columns() -> None:
    slow = [record(i * 0.1, ttft=12.3, gaps=(1.5,) * 9, index=i, prompt_tokens=9) for i in range(1200)]
    shown = Console(width=80, file=io.StringIO(), highlight=False)
    shown.print(render(_report(records=slow)))
    lines = shown.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(len, lines)) <= 80
    [header] = [line for line in lines if "95 % of p50" in line]
    assert "p99.9" in header
    assert [line for line in lines if line.startswith("ITL by request ")], "no cell is folded"


def test_rows_have_the_names_and_units_of_the_contract() -> None:
    rows = {row["name"]: row for row in _report(failed=2)["results"]}
    for metric in ("ttft", "itl", "itl.request", "handover", "e2e"):
        for quantile in ("p50", "p90", "max"):
            assert rows[f"{metric}.{quantile}"]["unit"] == "ms"
    assert "ttft.p99" not in rows, "60 answers are too few"
    assert "60 answers: too few for p99" in " ".join(_report()["detail"]["notes"])
    assert rows["ttft.p50"]["value"] == pytest.approx(100)
    assert rows["ttft.p50"]["low"] <= rows["ttft.p50"]["value"] <= rows["ttft.p50"]["high"]
    assert rows["itl.p99"]["goal"] == 20
    assert rows["itl.p99"]["meets_goal"] is True
    assert rows["errors.http_500"]["value"] == 2
    assert rows["goodput.share"]["value"] == pytest.approx(60 / 62)


@pytest.mark.parametrize(("cached", "noted"), [(0, False), (16, False), (48, True)])
def test_the_chat_template_in_the_cache_is_no_reason_for_a_note(cached: int, noted: bool) -> None:
    """No seed changes the 16 tokens with which it begins each prompt."""
    target = Target(("http://127.0.0.1:8000",), "chat", "m", Dialect())
    exact = structs.replace(EXACT, overhead=16)
    setup = Setup(Options(), client_of(Options(), target, short_prompts(), exact), ())
    answered = [record(i * 0.1, index=i, prompt_tokens=64, cached_tokens=cached) for i in range(9)]
    notes = report_of(setup, Harvest(ended=6.0, records=answered), "2026-01-01").detail["notes"]
    assert any("from its cache" in note for note in notes) is noted


async def test_a_page_draws_a_run_a_sweep_and_two_runs_over_each_other(tmp_path: Path) -> None:
    slow = [
        record(i * 0.1, ttft=0.05 + i % 7 / 20, gaps=(0.01, 0.02 + i % 5 / 100), index=i) for i in range(120)
    ]
    runs = {"before": _report(), "after": _report(records=slow + records(failed=3)[60:])}
    for made in runs.values():
        made["parameters"]["model"] = "a model"
    pages = {
        "run": (page.page([runs["before"]], ["run"]), 7),
        "two": (page.page([*runs.values()], [*runs]), 8),
        "sweep": (page.page([_sweep()], ["</script><b>"]), 4),
    }
    for name, (text, plots) in pages.items():
        assert len(text) < 200_000
        assert "//unpkg" not in text
        assert "<script src" not in text
        file = tmp_path / f"{name}.html"
        file.write_text(text)
        async with browser(file.as_uri(), tmp_path / f"profile-{name}") as shown:
            await shown.show_as(1280, 1100, dark=False)
            await shown.until("document.readyState === 'complete' && !!document.getElementById('plots')")
            drawn = await shown.run(
                "[...document.querySelectorAll('#plots section')].map(each => each.innerText)"
            )
            assert len(drawn) == plots, drawn
            if name == "two":
                assert "before p99" in drawn[3]
                assert "after p99" in drawn[3]
                legend = "[...document.querySelectorAll('#plots section')[3].querySelectorAll('.u-marker')]"
                marks = f"{legend}.slice(1).map(each => each.style.borderStyle)"
                assert await shown.run(marks) == ["solid", "dashed"] * 2, "p50 and p99 of each run"
                await shown.keep_picture("report.png")


def test_a_comparison_says_what_the_terminal_says(tmp_path: Path) -> None:
    """The names of the rows, the changes with those that may be chance, and all notes."""
    old, new = _report(), _report()
    new["parameters"] |= {"seed": 2, "router": "b"}
    old["detail"]["notes"], new["detail"]["incomplete"] = ["the server reports no usage"], True
    for row in new["results"]:
        factor = {"ttft.p50": 1.01, "itl.p50": 3.0, "throughput.requests": 3.0}.get(row["name"], 1.0)
        for end in {"value", "low", "high"} & {*row}:
            row[end] *= factor
        if row["name"] == "ttft.p50":
            row["low"] = 1.0
    warnings = compare.judge([old, new], []).warnings
    verdict = compare.Verdict(("itl.p50>+5%: 10 → 30 (+200.0%)",), warnings)
    text = page.page([old, new], ["old", "new"], verdict)
    table, told = text[text.index("<table>") : text.index("</table>")], text[text.index("</table>") :]
    assert '<th class="number">change</th>' in table
    for key, name, kind, change in (
        ("ttft.p50", "TTFT p50", "dim", "+1.0% ≈"),
        ("itl.p50", "ITL, every gap p50", "bad", "+200.0%"),
        ("throughput.requests", "Requests/s", "good", "+200.0%"),
    ):
        row = table[table.index(f'title="{key}"') :].partition("</tr>")[0]
        assert f">{name}<" in row
        assert f'class="number {kind}">{change}<' in row
    for line in (
        '<p class="dim">old: Note: the server reports no usage.</p>',
        '<p class="">new: router: – → b</p>',
        '<p class="warn">Note: not the same experiment: seed is ',
        '<p class="warn">Note: the other run is incomplete</p>',
        '<p class="bad">FAILED itl.p50&gt;+5%: 10 → 30 (+200.0%)</p>',
    ):
        assert line in told


def test_a_curve_is_bounded_and_true() -> None:
    found = curves([record(i * 0.01, ttft=i / 1000, gaps=(0.5,), index=i) for i in range(1000)], 0, 5)
    ttft = found["distributions"]["ttft"]
    assert len(ttft) == QUANTILES + 1
    assert ttft[50] == pytest.approx(250, abs=1), "of the first half, which is in the window"
    assert found["distributions"]["itl"] == [500] * (QUANTILES + 1)
    line = found["timeline"]
    assert {len(values) for values in line.values()} == {BINS}
    assert sum(line["tokens_per_s"]) * line["at"][0] * 2 == pytest.approx(2000, rel=0.01)
    assert max(line["in_flight"]) > 50
    assert curves([], 0, 0) == {"distributions": {}, "timeline": {}}
    two = curves([record(0.0, ttft=0.1), record(0.0, ttft=0.2, index=1)], 0, 5)
    assert {*two["distributions"]["ttft"]} == {100, 200}, "a quantile is a sample, as in the table"
    assert {*two["timeline"]["ttft.p50"]} <= {100, 200, None}


def test_requests_are_written_in_order_with_their_failures(tmp_path: Path) -> None:
    write_requests(records(failed=2), tmp_path / "r.jsonl")
    lines = (tmp_path / "r.jsonl").read_text().splitlines()
    assert len(lines) == 62
    assert sum('"error_class":"http_500"' in line for line in lines) == 2
    assert '"ttft_ms":100.0' in lines[0]


def _with(detail: dict[str, Any] | None = None, **values: float) -> dict[str, Any]:
    rows = [Row(name.replace("_", "."), value, "ms") for name, value in values.items()]
    report = Report("load", {"model": "m", "load": "closed loop"}, rows=rows)
    report.detail = {"valid": True, "incomplete": False} | (detail or {})
    return json.loads(json.dumps(report.as_dict()))


@pytest.mark.parametrize(
    ("condition", "old", "new", "holds"),
    [
        ("a>+5%", 100, 105, False),
        ("a>+5%", 100, 105.1, True),
        ("a>+5%", 100, 50, False),
        ("a<-5%", 100, 95, False),
        ("a<-5%", 100, 94.9, True),
        ("a>-5%", 100, 96, True),
        ("a>+2", 100, 102, False),
        ("a>+2", 100, 102.1, True),
        ("a<-2", 100, 97, True),
        ("a>250", 100, 251, True),
        ("a>250", 300, 250, False),
        ("a<5", 1, 4, True),
        ("a>0", 0, 0, False),
        ("a>+5%", 0, 0, False),
        ("a>+5%", 0, 0.001, True),
        ("rate=0.5.itl.p99.9>+1%", 100, 102, True),
    ],
)
def test_a_condition_holds_strictly_beyond_its_bound(
    condition: str, old: float, new: float, holds: bool
) -> None:
    assert Condition.parse(condition).holds(old, new) is holds


@pytest.mark.parametrize("text", ["", "a", "a>", "a>5ms", "a=5", ">5", "a>+-5", "a>=5", "a>5%"])
def test_an_invalid_condition_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--fail-if"):
        Condition.parse(text)


Interval = tuple[float, float | None, float | None]
"""A value and its ends."""


def _rows(rows: dict[str, Interval]) -> dict[str, Any]:
    found = _with(None, **{name: value for name, (value, _, _) in rows.items()})
    for row, (_, low, high) in zip(found["results"], rows.values(), strict=True):
        row |= {end: bound for end, bound in (("low", low), ("high", high)) if bound is not None}
    return found


CHANGES: dict[
    str, tuple[Interval, Interval, tuple[str, str]]
] = {  # old, new, and what the comparison shows: 31 red, 32 green, 2 dim, 0 not judged
    "ttft_p50": ((10, 9, 11), (13, 12, 14), ("31", "+30.0%")),
    "itl_p50": ((10, 9, 11), (11, 9, 12), ("2", "+10.0% ≈")),
    "itl_p99": ((10, 9, None), (30, 29, 31), ("2", "+200.0% ≈")),  # too few samples for the upper end
    "e2e_max": ((10, None, None), (40, None, None), ("2", "+300.0% ≈")),
    "throughput_requests": ((10, 9, 11), (20, 19, 21), ("32", "+100.0%")),
    "throughput_output": ((100, 80, 120), (65, 50, 81), ("2", "-35.0% ≈")),  # 74 and 48 requests
    "goodput_share": ((1.0, 0.9, 1), (0.5, 0.4, 0.6), ("31", "-50.0%")),
    "requests_failed": ((1, None, None), (4, None, None), ("31", "+300.0%")),
    "requests_ok": ((51234, None, None), (30740, None, None), ("0", "-40.0%")),
    "client_cpu": ((1, None, None), (1.25, None, None), ("0", "+25.0%")),
    "rate=0.5_ttft_p50": ((10, 9, 11), (15, 14, 16), ("31", "+50.0%")),
}


def test_a_comparison_says_what_changed() -> None:
    """The setup, and each row; `≈` unless the intervals of a latency or a rate are apart."""
    old = _rows({name: change[0] for name, change in CHANGES.items()})
    new = _rows({name: change[1] for name, change in CHANGES.items()})
    new["parameters"] |= {"url": "http://other", "texts": 5}
    new["versions"] = {**old["versions"], "torch": "9"}
    verdict = compare.judge([old, new], [])
    console = Console(width=80, record=True, file=io.StringIO(), force_terminal=True)
    console.print(compare.render([old, new], ["a", "b"], verdict))
    styled, text = console.export_text(clear=False, styles=True), console.export_text()
    for color, change in (shown for *_, shown in CHANGES.values()):
        if color == "0":
            assert re.search(rf" {re.escape(change)} ", styled), change
        else:
            assert re.search(rf"\x1b\[{color}m *{re.escape(change)}", styled), change
    assert "b: url: – → http://other" in text
    assert "b: torch: " in text
    assert "texts" not in text
    assert "51,234" in text
    assert max(map(len, text.splitlines())) <= 80


def test_chance_fails_no_condition() -> None:
    old, new = _rows({"itl_p99": (10, 9, 12)}), _rows({"itl_p99": (12, 11, 13)})
    relative, absolute = Condition.parse("itl.p99>+5%"), Condition.parse("itl.p99>11")
    verdict = compare.judge([old, new], [relative])
    assert verdict.failed == ()
    assert verdict.warnings == (
        "itl.p99>+5%: 10 → 12 (+20.0%) may be chance, the intervals overlap: measure longer",
    )
    assert compare.judge([old, new], [absolute]).failed
    assert compare.judge([old, _rows({"itl_p99": (14, 13, 15)})], [relative]).failed


def test_a_comparison_judges_its_conditions() -> None:
    slower, bad = [Condition.parse("itl.p99>+5%")], _with({"valid": False}, itl_p99=1)
    verdict = compare.judge([_with(itl_p99=10), _with(itl_p99=12)], slower)
    assert verdict.failed == ("itl.p99>+5%: 10 → 12 (+20.0%)",)
    with pytest.raises(ValueError, match=r"second report has no row 'itl.p99'. Did you mean itl.p90"):
        compare.judge([_with(itl_p99=1), _with(itl_p90=1)], slower)
    with pytest.raises(ValueError, match="the second run is invalid"):
        compare.judge([_with(itl_p99=1), bad], slower)
    assert "INVALID" in compare.judge([_with(itl_p99=1), bad], []).warnings[0]


def test_a_comparison_of_different_experiments_warns() -> None:
    other = _with(a=1)
    other["parameters"]["load"] = "open loop, poisson 4/s"
    (warning,) = compare.judge([_with(a=1), other], []).warnings
    assert "not the same experiment: load" in warning


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"results": [1]}', '{"results": [{"name": "a"}]}', "\x00"])
def test_a_file_that_is_no_report_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"x.json: no report.*--json"):
        compare.load(path)
