from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from baton.bench.contract import Report, Row
from baton.bench.load.report import compare
from baton.bench.load.report.compare import Condition


def _report(detail: dict[str, Any] | None = None, **values: float) -> dict[str, Any]:
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


def test_conditions_take_row_names_of_sweeps() -> None:
    assert Condition.parse("rate=0.5.ttit.p99.9>+1%").row == "rate=0.5.ttit.p99.9"


def test_a_comparison_says_what_changed() -> None:
    """The setup, and the rows that changed by more than their intervals."""
    old, new = (_report(ttft_p50=10, ttit_p50=10, throughput=99, client_cpu=1, sent=51234) for _ in range(2))
    values = {"ttft.p50": (13, 12, 14), "ttit.p50": (11, 9, 12), "throughput": (100, None, None)}
    values["sent"] = (51234, None, None)
    for row in new["results"]:
        value, low, high = values.get(row["name"], (2, None, None))
        row |= {"value": value} | ({} if low is None else {"low": low, "high": high})
    for row in old["results"]:
        row |= {"low": 9, "high": 11} if row["name"] in ("ttft.p50", "ttit.p50") else {}
    new["parameters"] |= {"url": "http://other", "seed": 5}
    new["versions"] = {**old["versions"], "torch": "9"}
    verdict = compare.judge(old, new, [])
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(compare.render([old, new], ["a", "b"], verdict))
    text = console.export_text()
    assert "b: url: – → http://other" in text
    assert "b: torch: " in text
    assert "seed" not in text
    assert "51,234" in text
    assert "b is worse: ttft.p50 +30.0%, client.cpu +100.0%\n" in text
    assert "better" not in text, "1 % without an interval is not named"


def test_a_condition_that_holds_reports_the_change() -> None:
    verdict = compare.judge(_report(ttit_p99=10), _report(ttit_p99=12), [Condition.parse("ttit.p99>+5%")])
    assert verdict.failed == ("ttit.p99>+5%: 10 → 12 (+20.0%)",)


def test_a_missing_row_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"second report has no row 'ttit.p99'. Did you mean ttit.p90"):
        compare.judge(_report(ttit_p99=1), _report(ttit_p90=1), [Condition.parse("ttit.p99>+5%")])


def test_conditions_on_an_invalid_run_are_refused() -> None:
    bad = _report({"valid": False}, a=1)
    with pytest.raises(ValueError, match="the second run is invalid"):
        compare.judge(_report(a=1), bad, [Condition.parse("a>+5%")])
    assert "INVALID" in compare.judge(_report(a=1), bad, []).warnings[0]


def test_a_comparison_of_different_experiments_warns() -> None:
    other = _report(a=1)
    other["parameters"]["load"] = "open loop, poisson 4/s"
    (warning,) = compare.judge(_report(a=1), other, []).warnings
    assert "not the same experiment: load" in warning


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"results": [1]}', '{"results": [{"name": "a"}]}', "\x00"])
def test_a_file_that_is_no_report_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"x.json: no report.*--json"):
        compare.load(path)
