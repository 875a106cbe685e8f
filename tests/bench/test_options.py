import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton.bench.load.measurement.slo import Bound, Slo
from baton.bench.load.options import Options
from baton.bench.load.report.compare import Condition
from baton.bench.load.traffic.workload import Distribution


@pytest.mark.parametrize(
    ("text", "mean", "least"),
    [
        ("128", 128, 128),
        ("uniform:100,200", 150, 100),
        ("normal:500,100", 500, 0),
        ("lognormal:100,0.5", 100 * math.exp(0.125), 0),
        ("exponential:40", 40, 0),
        ("uniform:100,200@150,175", (150 * 50 + 162.5 * 25 + 175 * 25) / 100, 150),
    ],
)
def test_distributions_have_their_mean_and_least_value(text: str, mean: float, least: float) -> None:
    found = Distribution.parse(text, "--x")
    rng = np.random.default_rng(1)
    draws = [found.draw(rng) for _ in range(20_000)]
    assert np.mean(draws) == pytest.approx(mean, rel=0.03)
    assert min(draws) >= found.least == least
    assert Distribution.parse(str(found), "--x") == found


def test_objectives_are_parsed() -> None:
    assert Slo.parse("ttft=0.5s, itl.p99=15ms,gap=80").bounds == (
        Bound("ttft", "", 500.0),
        Bound("itl", "p99", 15.0),
        Bound("gap", "", 80.0),
    )
    assert Slo.parse("").bounds == ()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Options(url="localhost:8000"), r"--url 'localhost:8000'.*http://"),
        (lambda: Options(extra_body="{"), r"--advanced.extra-body '\{' is not JSON"),
        (lambda: Options(extra_body="[1]"), r"--advanced.extra-body '\[1\]' must be an object"),
        (lambda: Options(input_len="many"), r"--input-len 'many'.*uniform:LOW,HIGH"),
        (lambda: Options(output_len="uniform:9,3"), r"--output-len 'uniform:9,3'"),
        (lambda: Options(output_len="-3"), r"--output-len '-3'"),
        (lambda: Options(output_len="uniform:1,9@5"), r"'uniform:1,9@5'.*@LOW,HIGH"),
        (lambda: Options(output_len="9@5,2"), r"--output-len '9@5,2'"),
        (lambda: Options(context_len=-1), r"--context-len -1 must not be negative"),
        (lambda: Options(think_time="nan"), r"--think-time 'nan'"),
        (lambda: Options(turns="0"), r"--turns 0: .*at least one"),
        (lambda: Options(prefix_groups=2), r"--advanced.prefix-groups 2: .*give --prefix-len"),
        (lambda: Options(prefix_groups=0, prefix_len=10), r"--advanced.prefix-groups 0 must be a positive"),
        (lambda: Options(prefix_len=300, prefix_groups=2), r"--prefix-len 300.*--input-len 256"),
        (lambda: Options(speed=0), r"--speed 0 must be a positive"),
        (lambda: Options(rate=math.inf), r"--rate inf.*--concurrency instead"),
        (lambda: Options(concurrency=-1), r"--concurrency -1"),
        (lambda: Options(burstiness=2), r"--advanced.burstiness 2 shapes an open loop.*--rate"),
        (lambda: Options(first=0), r"--advanced.first 0 must be a positive"),
        (lambda: Options(rate=1, burstiness=0), r"--advanced.burstiness 0 must be a positive"),
        (lambda: Options(duration=0), r"--duration 0"),
        (lambda: Options(drain=-1), r"--advanced.drain -1"),
        (lambda: Options(duration=10, warmup=10), r"--warmup 10 leaves nothing of --duration 10"),
        (lambda: Options(slo="ttft<5"), r"--slo 'ttft<5'.*METRIC=LIMIT"),
        (lambda: Options(slo="tpot=5"), r"--slo 'tpot=5': cannot read 'tpot=5'.*itl"),
        (lambda: Options(slo="ttft.p95=5"), r"'ttft.p95=5'.*p99"),
        (lambda: Options(slo="ttft=soon"), r"'ttft=soon'"),
        (lambda: Options(attainment=99), r"--advanced.attainment 99 must be a share"),
        (lambda: Options(json=Path("/nowhere/at/all.json")), r"--json /nowhere/at/all.json"),
        (lambda: Options(jsonl=Path("/tmp")), r"--advanced.jsonl /tmp: no file"),
        (lambda: Condition.parse("itl.p99"), r"--fail-if 'itl.p99' is no condition"),
        (lambda: Condition.parse("itl.p99>5%"), r"has a sign, like itl.p99>\+5%"),
    ],
)
def test_errors_name_the_value_and_the_remedy(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_an_address_may_end_with_v1_or_a_slash() -> None:
    assert Options(url="http://x:8000/v1/").bases == ("http://x:8000",)
    assert Options(url="http://x:8000/,http://y:1").bases == ("http://x:8000", "http://y:1")
