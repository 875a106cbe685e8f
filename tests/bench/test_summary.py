from __future__ import annotations

import pytest

from baton.bench.load.measurement.slo import Slo
from baton.bench.load.measurement.summary import Summary, request_value, summarize
from baton.bench.load.target.answer import Failure, Record
from tests.bench.support import record


def _summary(records: list[Record], slo: str = "", **more: object) -> Summary:
    return summarize(records, Slo.parse(slo), **{"warm_up": 0.0} | more)  # type: ignore[arg-type]


def _every(count: int, **more: object) -> list[Record]:
    return [record(i * 0.1, index=i, **more) for i in range(count)]  # type: ignore[arg-type]


def test_latencies_are_exact() -> None:
    records = [record(i * 0.1, ttft=0.2, gaps=(0.03,) * 9 + (0.15,)) for i in range(100)]
    found = _summary(records).rows
    assert found["ttft.p99"].value == pytest.approx(200)
    assert found["ttit.p50"].value == pytest.approx(30)
    assert found["ttit.p99"].value == pytest.approx(150)
    assert found["ttit.max"].value == pytest.approx(150)
    assert found["handover.max"].value == pytest.approx(30)
    assert found["ttit.request.p50"].value == pytest.approx(42)
    assert found["e2e.p50"].value == pytest.approx(620)


def test_latency_counts_from_the_intended_time() -> None:
    late = record(1.0, ttft=0.5)
    late.sent, late.lag = 1.4, 0.4
    assert _summary([late]).rows["ttft.p50"].value == pytest.approx(500)


def test_throughput_counts_arrivals_within_the_window() -> None:
    records = _every(101, ttft=0.05, gaps=(0.01, 0.01))
    found = _summary(records)
    assert found.detail["window"] == [0.0, pytest.approx(10.0)]
    assert found.rows["throughput.output_tokens"].value == pytest.approx(30, rel=0.02)
    assert found.rows["throughput.requests"].value == pytest.approx(10, rel=0.02)


def test_throughput_excludes_the_time_before_the_first_answer() -> None:
    """10 requests a second of 4 s each: nothing is complete in the first 4 s."""
    found = _summary(_every(201, ttft=1.0, gaps=(0.5,) * 6))
    assert found.rows["throughput.requests"].value == pytest.approx(10, rel=0.02)
    assert found.rows["throughput.output_tokens"].value == pytest.approx(70, rel=0.02)
    assert "throughput from 4.0 s on" in found.detail["window_statement"]


def test_the_warm_up_is_excluded_everywhere() -> None:
    slow = [record(i * 0.1, ttft=3.0, index=i) for i in range(20)]
    found = _summary(slow + [record(2 + i * 0.1, ttft=0.1, index=i) for i in range(60)], warm_up=2.0)
    assert found.rows["requests.sent"].value == 60
    assert found.rows["ttft.max"].value == pytest.approx(100)
    assert found.detail["window"][0] == 2.0


def test_a_burst_is_measured_until_its_last_answer() -> None:
    found = _summary([record(0.0, ttft=1.0, gaps=(1.0,), index=i) for i in range(8)])
    assert found.detail["window"][1] == pytest.approx(2.0)
    assert "too few requests" in found.detail["window_statement"]


def test_failures_are_misses_and_enter_no_latency() -> None:
    good = _every(90, ttft=0.1)
    bad = [
        record(i * 0.1, failure=Failure.HTTP, status=429, detail="busy", index=i, output_tokens=None)
        for i in range(10)
    ]
    found = _summary(good + bad, "ttft=500")
    assert [found.rows[f"requests.{name}"].value for name in ("sent", "ok", "failed")] == [100, 90, 10]
    assert found.detail["errors"] == {"http_429": {"count": 10, "sample": "busy"}}
    assert found.rows["goodput.share"].value == pytest.approx(0.9)
    assert found.detail["slo_met"] is False
    assert found.rows["ttft.max"].value == pytest.approx(100)


def test_a_server_that_fails_fast_cannot_meet_a_bound_on_quantiles() -> None:
    failed = [
        record(i * 0.1, failure=Failure.REFUSED, detail="x", index=i, output_tokens=None) for i in range(5)
    ]
    assert _summary(_every(95) + failed, "ttft.p99=500").detail["slo_met"] is False
    assert _summary(_every(95), "ttft.p99=500").detail["slo_met"] is True
    assert _summary(failed, "ttft.p99=500").detail["slo_met"] is False


def test_an_interrupted_request_is_no_failure() -> None:
    cut = record(9.0, failure=Failure.INTERRUPTED, detail="x", output_tokens=None)
    found = _summary([*_every(50), cut], "ttft=500")
    assert [found.rows[f"requests.{name}"].value for name in ("sent", "failed")] == [50, 0]
    assert found.detail["interrupted"] == 1
    assert found.rows["goodput.share"].value == 1.0


@pytest.mark.parametrize(
    ("slo", "met"),
    [
        ("ttft=100", True),
        ("ttft=99", False),
        ("ttit=20", True),
        ("gap=30", True),
        ("gap=29", False),
        ("handover=10", True),
        ("e2e=0.14s", True),
        ("e2e=139", False),
        ("ttft=100,gap=29", False),
    ],
)
def test_bounds_on_a_request_decide_goodput(slo: str, met: bool) -> None:
    one = record(0.0, ttft=0.1, gaps=(0.01, 0.03))
    value = {bound.metric: round(request_value(one, bound.metric) or 0, 6) for bound in Slo.parse(slo).bounds}
    assert Slo.parse(slo).met_by_request(lambda metric: value[metric]) is met


def test_an_answer_of_one_token_meets_bounds_on_gaps() -> None:
    assert _summary([record(0.0)], "ttit=1,gap=1,handover=1").rows["goodput.share"].value == 1.0


def test_a_chunk_of_several_tokens_with_running_usage() -> None:
    found = _summary([record(0.0, gaps=(0.04, 0.04), tokens=(1, 4, 4))])
    assert found.rows["output.tokens_per_chunk"].value == 3
    assert found.rows["ttit.p50"].value == pytest.approx(40), "as it came"
    assert found.rows["ttit.normalized.p50"].value == pytest.approx(10)
    assert found.rows["ttit.request.p50"].value == pytest.approx(10)


def test_a_chunk_of_several_tokens_without_running_usage() -> None:
    found = _summary([record(0.0, gaps=(0.04, 0.04), output_tokens=9)])
    assert found.rows["ttit.normalized.p50"].value == pytest.approx(10)


def test_lengths_other_than_asked_for_are_counted() -> None:
    records = _every(3, asked_input=100, prompt_tokens=100, asked_output=5, output_tokens=5)
    records += _every(1, asked_input=100, prompt_tokens=103, asked_output=5, output_tokens=2)
    found = _summary(records)
    assert (found.rows["input.off"].value, found.rows["output.short"].value) == (1, 1)
    assert found.rows["input.mean"].value == 100.75


def test_a_run_without_records() -> None:
    found = _summary([], "ttft=1")
    assert (found.rows["requests.sent"].value, found.detail["timeline"]) == (0, [])
    assert "ttft.p50" not in found.rows
    assert found.detail["slo_met"] is False


def test_the_time_line_adds_up() -> None:
    records = _every(100, ttft=0.05, gaps=(0.01,) * 4)
    failed = record(5.0, failure=Failure.REFUSED, detail="", output_tokens=None)
    failed.ended = 5.0
    bins = _summary([*records, failed]).detail["timeline"]
    width = bins[1]["at"]
    assert sum(b["tokens_per_s"] for b in bins) * width == pytest.approx(500, rel=1e-4)
    assert sum(b["in_flight"] for b in bins) * width == pytest.approx(sum(r.e2e for r in records), rel=0.01)
    assert sum(b["failed"] for b in bins) == 1
