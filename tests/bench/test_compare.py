from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.contract import Report, Row
from bench.load.report import compare
from bench.load.report.compare import Condition


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
