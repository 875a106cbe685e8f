"""What must not happen with the real policy, whatever workers and clients do."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from baton.bench.routing_sim.agents import agents
from baton.content import CHUNK_TOKENS
from baton.machine.quantiles import percentile
from baton.router.workers.checks import clear_invalid_rates
from baton.rpc import worker_pb2 as pb
from baton.simulator.placement import Pool, simulate
from baton.simulator.requests import Request
from baton.simulator.step_worker import Worker
from baton.simulator.trace import Load, Session, Turn

LOAD = Load(2000, 150, 10)
"""Of four workers: 0 and 1 are prefill workers."""


class Recorded:
    """The workers of a simulation by name, and which of them computed each request."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **slowness: float) -> None:
        self.workers: dict[str, Worker] = {}
        self.computed: list[tuple[Request, str]] = []
        init, prefill = Worker.__init__, Worker.prefill

        def recorded(worker: Worker, name: str, *args, **settings) -> None:
            init(worker, name, *args, **settings)
            worker.slowness = slowness.get(f"w{name}", 1.0)
            self.workers[name] = worker

        def computes(worker: Worker, request: Request) -> None:
            self.computed.append((request, worker.name))
            prefill(worker, request)

        monkeypatch.setattr(Worker, "__init__", recorded)
        monkeypatch.setattr(Worker, "prefill", computes)

    @property
    def counts(self) -> Counter[str]:
        return Counter(name for _, name in self.computed)


def test_a_worker_twice_as_slow_gets_less(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = simulate(LOAD, "policy", requests=200, workers=4).quantiles()
    seen = Recorded(monkeypatch, w0=2.0, w3=2.0)
    slow = simulate(LOAD, "policy", requests=200, workers=4).quantiles()
    assert seen.counts["0"] < 0.8 * seen.counts["1"]
    assert slow.ttft < 2 * usual.ttft
    assert slow.ttft_p99 < 3 * usual.ttft_p99


@pytest.mark.parametrize(
    "nonsense",
    [
        {"tokens_waiting": 10**15, "queue_seconds": 1e300},
        {"prefill_tokens_per_s": 1e300, "decode_seconds": 1e-300, "long_chunk_tokens": 2**31},
        {"prefill_tokens_per_s": float("nan"), "decode_seconds": -1.0, "gap_target_seconds": float("inf")},
        {"requests_running": 2**31, "requests_decoding": 2**32 - 1, "blocks_free": 2**32 - 1},
    ],
    ids=["a queue without end", "no time at all", "no numbers", "more than there are"],
)
def test_a_worker_that_reports_nonsense_harms_few(nonsense: Mapping[str, float], monkeypatch) -> None:
    status = Worker.status

    def reported(worker: Worker) -> pb.WorkerStatus:
        found = status(worker)
        if worker.name == "0":
            for name, value in nonsense.items():
                setattr(found, name, value)
            clear_invalid_rates(found)
        return found

    usual = simulate(LOAD, "policy", requests=150, workers=4).quantiles()
    monkeypatch.setattr(Worker, "status", reported)
    found = simulate(LOAD, "policy", requests=150, workers=4)
    assert len(found.answers) == 135, "all that are measured"
    assert found.quantiles().ttft_p99 < 4 * usual.ttft_p99


def test_a_burst_of_long_prompts_holds_up_no_others() -> None:
    """They take seconds at both prefill workers. Meanwhile decode workers compute short prompts."""
    short = [(0.1 * i, Session(i << 32, (Turn(1000, (), 0.0, 50),), 0)) for i in range(100)]
    long = [(3.0, Session(i << 40, (Turn(100_000, (), 0.0, 20),), 0)) for i in range(1, 3)]
    found = simulate(
        sorted([*short, *long], key=lambda each: each[0]), "policy", workers=4, warm_up=0, splits=False
    )
    ttft = [answer.ttft for answer in found.answers if answer.prompt == 1000]
    assert percentile(ttft, 0.95) < 0.3


def test_all_sessions_of_one_tenant_are_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Recorded(monkeypatch)
    sessions = [(at, replace(session, key=1)) for at, session in agents(8, 3, seed=1)]
    simulate(sessions, "policy", at_a_time=8, workers=4, warm_up=0)
    assert min(seen.counts["0"], seen.counts["1"]) > 0.2 * seen.counts.total()


def test_workers_that_come_back_empty_compute_again(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Recorded(monkeypatch)

    def empties(now: float, reports: Mapping[Pool, Sequence[pb.WorkerStatus]]) -> Mapping[Pool, int]:
        if now == 3.0:
            for worker in seen.workers.values():
                lease = worker.kv.take((), worker.kv.free * CHUNK_TOKENS, 0)
                assert lease is not None
                worker.kv.release(lease)
                worker.cache_changed()
        return {pool: len(statuses) for pool, statuses in reports.items()}

    sessions = agents(4, 4, seed=1)
    usual, found = (
        simulate(sessions, "policy", at_a_time=4, workers=4, warm_up=0, flips=flips)
        for flips in (None, empties)
    )
    cached = [sum(answer.cached for answer in each.answers) for each in (usual, found)]
    assert 0.5 * cached[0] < cached[1] < cached[0]
    assert found.quantiles().ttft_p99 < 2 * usual.quantiles().ttft_p99


def test_a_wrong_estimate_of_answers_costs_little() -> None:
    """Clients allow 100,000 tokens, and get 60 to 240."""
    sessions = agents(8, 3, seed=1)
    known, unknown = (
        [answer.latency for answer in simulate(
            sessions, "policy", at_a_time=8, warm_up=0, max_answer=most
        ).answers]
        for most in (0, 100_000)
    )  # fmt: skip
    assert percentile(unknown, 0.9) < 1.1 * percentile(known, 0.9)
