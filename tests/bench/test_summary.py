"""From records to rows."""

import numpy as np
import pytest

from baton.bench.load.measurement.quantiles import Series
from baton.bench.load.measurement.slo import Slo
from baton.bench.load.measurement.summary import PARTS, Summary, rate, request_value, share, summarize
from baton.bench.load.target.answer import Failure, Record
from tests.bench.support import record


def _summary(records: list[Record], slo: str = "", **more: object) -> Summary:
    return summarize(records, Slo.parse(slo), **{"warm_up": 0.0} | more)  # type: ignore[arg-type]


def _every(count: int, **more: object) -> list[Record]:
    return [record(i * 0.1, index=i, **more) for i in range(count)]  # type: ignore[arg-type]


def test_latencies_are_exact() -> None:
    records = [record(i * 0.1, ttft=0.2, gaps=(0.03,) * 9 + (0.15,)) for i in range(100)]
    for one in records:  # latency counts from the intended time
        one.sent, one.lag = one.intended + 0.1, 0.1
    found = {name: row.value for name, row in _summary(records).rows.items()}
    expected = {"ttft.p99": 200, "itl.p50": 30, "itl.p99": 150, "itl.max": 150, "handover.max": 30}
    expected |= {"itl.request.p50": 42, "e2e.p50": 620}
    assert {name: found[name] for name in expected} == pytest.approx(expected)


@pytest.mark.parametrize("gaps", [(0.1,) * 9, ()], ids=["chunks", "one chunk"])
@pytest.mark.parametrize("waves", [2, 3, 4, 9])
def test_throughput_of_answers_that_end_together(waves: int, gaps: tuple[float, ...]) -> None:
    """Eight requests at a time, of 1 s and ten tokens each: the next ones start when all have ended."""
    more = {"ttft": 1 - sum(gaps), "gaps": gaps, "prompt_tokens": 30, "tokens": (1,) * 10 if gaps else (10,)}
    records = [record(wave + i * 0.001, index=i, **more) for wave in range(waves) for i in range(8)]  # type: ignore[arg-type]
    rows = _summary(records, "e2e=1.1s").rows
    for name, value in (("requests", 8), ("output_tokens", 80), ("input_tokens", 240)):
        assert rows[f"throughput.{name}"].value == pytest.approx(value, rel=0.02), name
    assert rows["goodput.requests"].value == pytest.approx(8, rel=0.02)


def test_throughput_excludes_the_time_before_the_first_answer() -> None:
    """10 requests a second of 4 s each: nothing is complete in the first 4 s."""
    found = _summary(_every(201, ttft=1.0, gaps=(0.5,) * 6))
    assert found.rows["throughput.requests"].value == pytest.approx(10, rel=0.02)
    assert found.rows["throughput.output_tokens"].value == pytest.approx(70, rel=0.02)
    assert "throughput from 4.0 s on" in found.detail["window_statement"]


def test_the_warm_up_is_excluded_everywhere() -> None:
    slow = [record(i * 0.1, ttft=3.0, index=i) for i in range(20)]
    found = _summary(slow + [record(2 + i * 0.1, ttft=0.1, index=i) for i in range(60)], warm_up=2.5)
    assert found.rows["requests.sent"].value == 55
    assert found.rows["ttft.max"].value == pytest.approx(100)
    assert found.detail["window"][0] == 2.5, "as given, not as detected"
    assert found.detail["steady"] is True


def test_first_and_later_turns_of_sessions_have_their_own_figures() -> None:
    """The first turns come first and are slow. That is no trend."""
    records = [record(i * 0.01, ttft=2.0, index=i) for i in range(60)]
    records += [
        record(3 + i * 0.01, ttft=0.1, gaps=(0.02,) * 3, index=i % 60, turn=1 + i // 60) for i in range(120)
    ]
    found = _summary(records)
    expected = {"ttft.first.p50": 2000, "ttft.later.p99": 100, "e2e.per_token.p50": 40}
    expected |= {"e2e.per_token.p90": 2000, "interactivity.p90": 0.5}
    assert {name: found.rows[name].value for name in expected} == pytest.approx(expected)
    assert "ttft.first.p99" not in found.rows, "60 values are too few"
    assert "ttft.later.p50" not in _summary(_every(9)).rows, "sessions of one turn"
    assert found.detail["steady"] is True


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
    assert found.rows["requests.refused"].value == 10
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
        ("itl=20", True),
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
    assert _summary([record(0.0)], "itl=1,gap=1,handover=1").rows["goodput.share"].value == 1.0


def test_a_chunk_of_several_tokens() -> None:
    found = _summary([record(0.0, gaps=(0.04, 0.04), tokens=(1, 4, 4))])
    assert found.rows["output.tokens_per_chunk"].value == 3
    assert found.rows["itl.p50"].value == pytest.approx(40), "as it came"
    assert found.rows["itl.normalized.p50"].value == pytest.approx(10)
    assert found.rows["itl.request.p50"].value == pytest.approx(10)
    without_running_usage = _summary([record(0.0, gaps=(0.04, 0.04), output_tokens=9)])
    assert without_running_usage.rows["itl.normalized.p50"].value == pytest.approx(10)


def test_lengths_other_than_asked_for_are_counted() -> None:
    records = _every(3, asked_input=100, prompt_tokens=100, asked_output=5, output_tokens=5)
    records += _every(1, asked_input=100, prompt_tokens=103, asked_output=5, output_tokens=2)
    found = _summary(records)
    assert (found.rows["input.off"].value, found.rows["output.short"].value) == (1, 1)
    assert found.rows["input.mean"].value == 100.75


def test_a_run_without_records() -> None:
    found = _summary([], "ttft=1")
    assert found.rows["requests.sent"].value == 0
    assert "ttft.p50" not in found.rows
    assert found.detail["slo_met"] is False


QUANTILES = ("p50", "p90", "p99", "p99.9", "max")


@pytest.mark.parametrize(
    ("count", "values"),
    [(1, (1, 1)), (9, (5, 9)), (10, (5, 9, 10)), (99, (50, 90, 99)), (100, (50, 90, 99, 100)),
     (1000, (500, 900, 990, 999, 1000))],
)  # fmt: skip
def test_quantiles_are_by_nearest_rank_and_need_a_sample_above(count: int, values: tuple[float, ...]) -> None:
    found = Series.of([[float(x)] for x in range(1, count + 1)]).rows("x", {})
    names = (*QUANTILES[: len(values) - 1], "max")
    assert {quantile: row.value for quantile, row in found.items()} == dict(zip(names, values, strict=True))
    if count == 100:
        assert found["p99"].high is None, "too few samples for an upper bound"
        assert found["p50"].high is not None


@pytest.mark.all
@pytest.mark.parametrize("size", [1, 20])
def test_the_interval_covers_the_true_value(size: int) -> None:
    """95 of 100 times, also where the samples of a cluster are all alike."""
    rng = np.random.default_rng(4)
    covered = 0
    for _ in range(80):
        groups = [[x] * size for x in rng.exponential(1.0, 400).tolist()]
        found = Series.of(groups).rows("x", {})["p90"]
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= np.log(10) <= found.high
    assert 0.9 <= covered / 80 < 1


@pytest.mark.all
def test_the_interval_of_requests_in_one_queue_covers_the_true_value() -> None:
    """Each request is like the one before. Of single requests, 4 of 10 intervals would hold the median."""
    rng, covered, walks = np.random.default_rng(3), 0, np.zeros((60, 1000))
    for step in range(1, 1000):
        walks[:, step] = 0.9 * walks[:, step - 1] + rng.normal(size=60)
    for walk in walks.tolist():
        found = Series.of([[value] for value in walk]).rows("x", {})["p50"]
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= 0 <= found.high
    assert 0.85 <= covered / 60 < 1


@pytest.mark.parametrize(
    ("burst", "least", "most"),
    [(1, 0.9, 0.99), (8, 0.9, 0.99), (0, 1.0, 1.0)],
    ids=["poisson", "bursts", "even"],
)
def test_the_interval_of_a_rate_covers_the_true_value(burst: int, least: float, most: float) -> None:
    """Two runs of one server seldom count the same requests."""
    rng = np.random.default_rng(6)
    covered = 0
    for _ in range(300):
        counts = rng.poisson(40 / burst, PARTS) * burst if burst else np.full(PARTS, 40)
        found = rate("throughput.requests", "requests/s", counts, float(counts.sum()), 20.0)
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= 40 * PARTS / 20 <= found.high
    assert least <= covered / 300 <= most


@pytest.mark.parametrize(("run", "least"), [(1, 0.9), (12, 0.8)], ids=["alone", "in a row"])
def test_the_interval_of_a_share_covers_the_true_value(run: int, least: float) -> None:
    """Failures come in a row."""
    rng, covered = np.random.default_rng(8), 0
    for _ in range(300):
        found = share("x", np.repeat(rng.random(400 // run) < 0.8, run).tolist())
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= 0.8 <= found.high
    assert least <= covered / 300 <= 0.99


def test_clusters_widen_the_interval() -> None:
    def width(groups: list[list[float]], quantile: str = "p90") -> float:
        found = Series.of(groups).rows("x", {})[quantile]
        assert found.low is not None
        assert found.high is not None
        return found.high - found.low

    values = np.random.default_rng(5).exponential(1.0, 200).tolist()
    assert width([[x] * 50 for x in values]) > 3 * width([[x] for _ in range(50) for x in values])
    # Neighbours in time are alike, too, when the machine is slower for some seconds.
    slower = [[float(part)] for part in range(10) for _ in range(20)]
    mixed = [[float(part)] for _ in range(20) for part in range(10)]
    assert width(slower, "p50") > 3 * width(mixed, "p50")
