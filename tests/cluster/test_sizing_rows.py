"""`baton plan` against rows that GPUs measured (docs/lab/load-tests.md, docs/lab/tables.md).

Each row has the requests of its run: the same lengths at the same times, from the bench's own seed. Agents
had one burst of first turns in a run, so their p99 has few samples. `-s` prints the table.
"""

import zlib
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from itertools import islice
from typing import NamedTuple

import pytest

from baton.bench.lab.shapes import GATED_DELTA, SHAPES
from baton.bench.load.measurement.quantiles import Series, interval
from baton.bench.load.traffic.workload import AGENTS, Arrivals, Distribution, Synthetic
from baton.cluster.tools.sizing.simulated import Served, Workers, serve
from baton.cluster.tools.sizing.speeds import H200, REFERENCE, Speeds
from baton.engine.loader.hf_config import model_config_from_hf
from baton.kv_names import CHUNK_TOKENS
from baton.router.admission.fairness import FairQueue
from baton.simulator import step_worker
from baton.simulator.agents import CONTEXT, PREFIX, agents, chunk_name
from baton.simulator.requests import Request
from baton.simulator.trace import SPREAD, Session, Turn

WITHIN = 0.15
"""How far a prediction may be off, unless so many requests say no more."""

QWEN = replace(
    H200,
    decode={1: 2.91e-3, 8: 6.36e-3, 32: 13.4e-3, 64: 18.3e-3, 128: 22.5e-3, 256: 28.9e-3},
    prefill={2000: 42.9e-3, 8000: 130e-3, 32000: 549e-3},
    planned=True,
    host_memory=256 << 30,  # two of the four GPUs of a machine had these workers
)
"""Steps of Qwen3.5-35B-A3B, by `bench.engine`."""

Row = tuple[str, int, Mapping[str, float]]
"""The load, workers of each pool, and what was measured in ms and tokens/s."""

DENSE: dict[str, Row] = {
    "8/s": ("2000/150@8", 1, {"ttft p50": 58, "ttft p99": 99, "gap p99": 13.1}),
    "12/s": ("2000/150@12", 1, {"ttft p50": 61, "ttft p99": 135, "gap p50": 5.1, "gap p99": 13.9}),
    "22/s": ("2000/150@22", 1, {"ttft p50": 110, "ttft p99": 274, "gap p50": 7.2, "gap p99": 18.0}),
    "128 at a time": ("2000/150@128 at a time", 1, {"tokens/s": 4137}),
    "44/s on four": ("2000/150@44", 2, {"ttft p50": 92, "ttft p99": 187, "gap p99": 20.6}),
    "16 agents": (
        "agents@16", 1,
        {
            "first p50": 376, "later p50": 79, "later p99": 328, "gap p50": 7.5, "gap p99": 20.8,
            "latency p50": 8.7, "latency p90": 12.3, "tokens/s": 655,
        },
    ),
    "48 agents": (
        "agents@48", 1,
        {
            "first p50": 720, "later p50": 144, "later p99": 2606, "gap p50": 13.1, "gap p99": 33.7,
            "latency p50": 16.9, "latency p90": 25.2, "tokens/s": 1528,
        },
    ),
    "96 agents": (
        "agents@96", 1,
        {
            "first p50": 2047, "later p50": 283, "later p99": 8449, "gap p50": 30.5, "gap p99": 53.3,
            "latency p50": 34.2, "latency p90": 55.8, "tokens/s": 1858,
        },
    ),
    "96 agents on four": (
        "agents@96", 2,
        {
            "first p50": 885, "later p50": 129, "later p99": 3045, "gap p50": 13.2, "gap p99": 37.3,
            "latency p50": 16.8, "latency p90": 27.3, "tokens/s": 3021,
        },
    ),
    "8000/200 at 3/s": ("8000/200@3", 1, {"ttft p50": 236, "ttft p99": 426, "gap p99": 16.4}),
    "8000/200 at 4/s": ("8000/200@4", 1, {"ttft p50": 317, "ttft p99": 544, "gap p99": 16.9}),
    "500/500 at 24/s": ("500/500@24", 1, {"ttft p50": 22, "ttft p99": 42, "gap p99": 9.8}),
    "200/20 at 80/s": ("200/20@80", 1, {"ttft p50": 19, "ttft p99": 27, "gap p99": 8.4}),
    "30000/100 at 0.8/s": ("30000/100@0.8", 1, {"ttft p50": 2562, "ttft p99": 5001, "gap p99": 21.5}),
}  # fmt: skip
"""Of the 8B model. The last five and that of 128 at a time are older than the placement of today."""
HYBRID: dict[str, Row] = {
    "Qwen3.5, 4/s": ("2000/150@4", 1, {"ttft p50": 53, "ttft p99": 87, "gap p99": 8.8}),
    "Qwen3.5, 8/s": ("2000/150@8", 1, {"ttft p50": 54, "ttft p99": 165, "gap p99": 11.7}),
    "Qwen3.5, 12/s": ("2000/150@12", 1, {"ttft p50": 57, "ttft p99": 158, "gap p99": 14.8}),
    "Qwen3.5, 16 agents": (
        "agents@16", 1,
        {
            "first p50": 421, "later p50": 79, "later p99": 488, "gap p50": 6.4, "gap p99": 31.8,
            "latency p50": 7.9, "latency p90": 12.4, "tokens/s": 700,
        },
    ),
    "Qwen3.5, 48 agents": (
        "agents@48", 1,
        {
            "first p50": 523, "later p50": 88, "later p99": 1968, "gap p50": 15.3, "gap p99": 44.7,
            "latency p50": 18.7, "latency p90": 24.1, "tokens/s": 1484,
        },
    ),
}  # fmt: skip
SEATS = 256
USERS = " at a time"
REQUESTS = {
    "8000/200 at 3/s": 90, "8000/200 at 4/s": 120, "200/20 at 80/s": 480, "30000/100 at 0.8/s": 40,
    "128 at a time": 512, "Qwen3.5, 4/s": 144, "Qwen3.5, 8/s": 288,
}  # fmt: skip
"""Of the rows that had not 300. With Qwen3.5, each rate had 36 seconds."""


def seed_of(load: str) -> int:
    """As `bench.disagg` chooses it for the first seed."""
    name, _, level = load.partition("@")
    return zlib.crc32(f"{name.replace('/', '_')}.{'a' if name == 'agents' else 'r'}{level}".encode()) % 2**31


def requests(load: str, count: int) -> list[tuple[float, Session]]:
    lengths, _, rate = load.partition("@")
    prompt, answer = map(int, lengths.split("/"))
    if rate.endswith(USERS):
        times = iter([0.0] * count)
    else:
        times = islice(Arrivals(float(rate)).times(seed_of(load)), count)
    return [
        (at, Session(number * SPREAD % 2**64, (Turn(prompt, (), 0.0, answer),), 0))
        for number, at in enumerate(times)
    ]


def sessions(load: str) -> list[tuple[float, Session]]:
    """Of agents, as the client sends them."""
    at_a_time = int(load.partition("@")[2])
    lengths, answers, thought = (
        Distribution.parse(str(AGENTS[name]), name) for name in ("input_len", "output_len", "think_time")
    )
    turns = Distribution("fixed", (10 if at_a_time <= 16 else 8,))
    sent = Synthetic(
        seed_of(load), lengths, answers, turns, thought, 1, PREFIX, PREFIX + CONTEXT,
    )  # fmt: skip
    found = list[tuple[float, Session]]()
    for number in range(2 * at_a_time):
        tokens, asked, turns_sent = 0, list[Turn](), sent.session(number).turns
        for turn, after in zip(turns_sent, [*turns_sent[1:], None], strict=True):
            tokens += turn.input_tokens
            count = (tokens + turn.output_tokens) // CHUNK_TOKENS
            chunks = tuple(
                chunk_name("agents" if (i + 1) * CHUNK_TOKENS <= PREFIX else f"agent {number}", i)
                for i in range(count)
            )
            asked.append(Turn(tokens, chunks, after.think_seconds if after else 0.0, turn.output_tokens))
            tokens += turn.output_tokens
        found.append((0.0, Session(chunk_name("agent", number), tuple(asked), PREFIX // CHUNK_TOKENS)))
    return found


@cache
def speeds(hybrid: bool, positions: float) -> Speeds:
    if not hybrid:
        return Speeds(H200, REFERENCE, positions=positions)
    return Speeds(QWEN, model_config_from_hf(SHAPES[GATED_DELTA], {}, GATED_DELTA), positions=positions)


def simulated(name: str, row: Row, *, hybrid: bool = False) -> Served:
    (load, pool, _), at_a_time = row, 0
    lengths, _, level = load.partition("@")
    if lengths == "agents":
        positions, sent, at_a_time = 15_500.0, sessions(load), int(level)
    else:
        prompt, answer = map(int, lengths.split("/"))
        positions, sent = prompt + answer / 2, requests(load, REQUESTS.get(name, 300))
        if (users := level.removesuffix(USERS)) != level:
            at_a_time = int(users)
    machine = speeds(hybrid, positions).machine(positions, 0.9, SEATS)
    return serve(sent, Workers(machine, machine, SEATS), pool, pool, at_a_time=at_a_time)


class Prediction(NamedTuple):
    """Divided by what was measured. `low`, `high`: the interval that so many requests give, computed as in
    `bench.disagg`. For gaps and tokens/s they are the ratio."""

    ratio: float
    low: float
    high: float

    @property
    def nearest(self) -> float:
        """To 1, in the interval."""
        return max(self.low, min(1.0, self.high))

    @property
    def holds(self) -> bool:
        return abs(self.ratio - 1) <= WITHIN or self.nearest == 1

    def __str__(self) -> str:
        return (
            f"{self.ratio:.2f}"
            if self.low == self.high
            else f"{self.ratio:.2f} ({self.low:.2f}–{self.high:.2f})"
        )


def predictions(name: str, row: Row, *, hybrid: bool = False) -> dict[str, Prediction]:
    figures = simulated(name, row, hybrid=hybrid)
    assert figures.first is not None
    later = figures.later or figures.first
    found = {
        "ttft p50": figures.ttft.p50, "ttft p99": figures.ttft.p99,
        "first p50": figures.first.p50, "later p50": later.p50, "later p99": later.p99,
        "gap p50": figures.gap.p50, "gap p99": figures.gap.p99,
        "latency p50": figures.latency[0], "latency p90": figures.latency[1],
        "tokens/s": figures.tokens_per_s / 1e3,
    }  # fmt: skip
    of_requests = {
        "ttft": [answer.ttft for answer in figures.answers],
        "first": [answer.ttft for answer in figures.answers if answer.first],
        "later": [answer.ttft for answer in figures.answers if not answer.first],
        "latency": [answer.latency for answer in figures.answers],
    }
    result = dict[str, Prediction]()
    for what, value in row[2].items():
        kind, _, quantile = what.partition(" p")
        low = high = found[what]
        if kind in of_requests:
            series = Series.of([[seconds] for seconds in of_requests[kind]])
            low, high = interval(series.draws(int(quantile) / 100))
        result[what] = Prediction(*(1e3 * seconds / value for seconds in (found[what], low, high)))
    print(f"{name:20}", ", ".join(f"{what} {each}" for what, each in result.items()))
    return result


OFF = {
    # Both GPUs compute in 0.9 of the time, and 3 % longer steps make it 5 to 14 % longer.
    ("22/s", "ttft p50"): 0.98,
    # Half of the gaps are decodes alone, below 6.1 ms, and from 57 % on there are prompts, above 11 ms.
    ("22/s", "gap p50"): 0.84,
    # A request that decoded where it was computed could wait for a large step of the next prompt then.
    ("22/s", "gap p99"): 0.84,
    # The router's loop tokenized prompts then, so tokens of a step came up to 4 ms late.
    ("44/s on four", "gap p99"): 0.72,
    # Plans that split prompts end sooner than those of the measured routers did, and less often in vain.
    ("44/s on four", "ttft p50"): 0.90,
    ("44/s on four", "ttft p99"): 0.80,
    ("30000/100 at 0.8/s", "ttft p99"): 0.83,
    # The measured placement was an older one, which gave decode workers fewer prompts.
    ("200/20 at 80/s", "gap p99"): 1.29,
    # More of the steps have prompts than was measured.
    ("96 agents", "gap p99"): 1.17,
    ("96 agents on four", "gap p50"): 1.34,
    # What was measured is the predicted quantile of 99.4 %: first gaps, which are 0.7 % of all, begin there.
    ("Qwen3.5, 4/s", "gap p99"): 0.78,
    # A router that has just started knows no rates, so the first seconds have decodes on both workers.
    ("Qwen3.5, 12/s", "gap p99"): 1.56,
    # The measured cluster had no decision for all of its workers. The p99 are 3 and 7 later turns: with 48
    # agents, trees since that decision gave 342 to 1,055 ms, so it jumps.
    ("Qwen3.5, 16 agents", "later p99"): 0.49,
    ("Qwen3.5, 48 agents", "later p99"): 0.84,
    ("Qwen3.5, 48 agents", "latency p50"): 0.90,
}
"""The nearest ratios to 1 that are further off, with their causes."""
NOT_WORSE = 1.15
"""Such a ratio may be so many times further off than it was, since small changes move it."""


def check(name: str, row: Row, *, hybrid: bool = False) -> None:
    for what, found in predictions(name, row, hybrid=hybrid).items():
        known = OFF.get((name, what))
        if known is None:
            assert found.holds, (name, what, str(found))
        else:
            off, was = (max(ratio, 1 / ratio) for ratio in (found.nearest, known))
            assert off <= NOT_WORSE * was, (name, what, str(found))


LONG = {"48 agents", "96 agents", "96 agents on four", "Qwen3.5, 16 agents", "Qwen3.5, 48 agents"}
NAMES = [
    pytest.param(name, marks=pytest.mark.long if name in LONG else ()) for name in (*DENSE, *HYBRID)
]  # fmt: skip


@pytest.fixture
def prompts_in_order_of_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the routers and engines of the measured runs. Today's take short prompts before long ones."""
    push = FairQueue[None, Request].push

    def pushed(queue, key, rank, item, ticket=None, order=0, *, tokens, lane):
        return push(queue, key, rank, item, ticket, order, lane=lane)

    monkeypatch.setattr(FairQueue, "push", pushed)
    monkeypatch.setattr(step_worker, "insort", lambda prompts, request, key: prompts.append(request))


@pytest.mark.cases(1)
@pytest.mark.usefixtures("prompts_in_order_of_arrival")
@pytest.mark.parametrize("name", NAMES)
def test_plan_predicts_what_was_measured(name: str) -> None:
    hybrid = name in HYBRID
    check(name, HYBRID[name] if hybrid else DENSE[name], hybrid=hybrid)


def test_simulated_agents_are_those_of_the_load_test() -> None:
    """Of each both, on average: tokens of a prompt, of an answer, and the thought."""
    drawn = [
        [turn for _, session in found for turn in session.turns]
        for found in (agents(48, 8), sessions("agents@48"))
    ]
    for figure in ("tokens", "answer", "think"):
        ours, sent = (sum(getattr(turn, figure) for turn in turns) / len(turns) for turns in drawn)
        assert ours == pytest.approx(sent, rel=0.15), figure
