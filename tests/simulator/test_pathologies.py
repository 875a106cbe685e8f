"""What must not happen with the real policy, whatever workers and clients do."""

import itertools
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from baton.kv_names import CHUNK_TOKENS
from baton.router.policy.answers import AnswerLengths
from baton.router.policy.decode import DecodeLoad
from baton.router.policy.fleet import Fleet
from baton.router.policy.prefill import PrefillRequest
from baton.router.workers.checks import clear_invalid_rates
from baton.rpc import worker_pb2 as pb
from baton.simulator.agents import agents
from baton.simulator.placement import Pool, simulate
from baton.simulator.placement_outcome import Quantiles
from baton.simulator.requests import Request
from baton.simulator.step_worker import Worker
from baton.simulator.trace import Load, Session, Turn
from baton.steps.quantiles import percentile
from baton.steps.step_model import StepModel

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


@pytest.mark.all
def test_a_worker_twice_as_slow_gets_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """A p99 is that of two requests, so six draws count together."""

    def drawn() -> list[Quantiles]:
        return [simulate(LOAD, "policy", requests=200, workers=4, seed=s).quantiles() for s in range(1, 7)]

    usual = drawn()
    seen = Recorded(monkeypatch, w0=2.0, w3=2.0)
    slow = drawn()
    computed = Counter[str]()  # tokens: a slow worker gets the smaller part of a prompt
    for request, name in seen.computed:
        computed[name] += request.tokens
    assert computed["0"] < 0.7 * computed["1"]
    assert computed["3"] < 0.5 * computed["2"]
    assert sum(found.ttft for found in slow) < 1.75 * sum(found.ttft for found in usual)
    assert sum(found.ttft_p99 for found in slow) < 3 * sum(found.ttft_p99 for found in usual)


NOTHING, FOREVER = (StepModel((1,), (cost,), cost, (1,), (cost,), cost, 1.0) for cost in (0.0, 1e30))
"""Models of steps that routers accept."""


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", ["0", "3"], ids=["prefill", "decode"])
@pytest.mark.parametrize(
    ("nonsense", "model"),
    [
        ({"tokens_waiting": 10**15}, None),
        ({"prefill_tokens_per_s": 1e300, "step_seconds": 1e-300, "long_chunk_tokens": 2**31}, None),
        ({"prefill_tokens_per_s": float("nan"), "step_seconds": -1.0}, None),
        ({"requests_running": 2**31, "requests_decoding": 2**32 - 1, "blocks_free": 2**32 - 1}, None),
        ({"gap_target_seconds": 1e-300, "prefill_position": 1e300, "decode_context": 2**63}, None),
        ({"gap_target_seconds": 1e300, "computed_prompt_tokens": 2**63}, None),
        ({}, NOTHING),
        ({}, FOREVER),
    ],
    ids=["endless", "no time", "no numbers", "too many", "no gap", "any gap", "free steps", "no steps"],
)
def test_a_worker_that_reports_nonsense_harms_few(
    nonsense: Mapping[str, float], model: StepModel | None, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, learned = Worker.status, Worker.step_model
    assert isinstance(learned, property)

    def reported(worker: Worker) -> pb.WorkerStatus:
        found = status(worker)
        if worker.name == name:
            for field, value in nonsense.items():
                setattr(found, field, value)
            clear_invalid_rates(found)
        return found

    def claimed(worker: Worker) -> StepModel | None:
        return model if model and worker.name == name else learned.fget(worker)

    usual = simulate(LOAD, "policy", requests=100, workers=4).quantiles()
    monkeypatch.setattr(Worker, "status", reported)
    monkeypatch.setattr(Worker, "step_model", property(claimed))
    found = simulate(LOAD, "policy", requests=100, workers=4)
    assert len(found.answers) == 90, "all that are measured"
    assert found.quantiles().ttft_p99 < 3 * usual.ttft_p99


@pytest.mark.cases(1)
@pytest.mark.parametrize("load", [Load(2000, 150, 22), Load(500, 500, 40), Load(500, 500, 60)], ids=str)
def test_decodes_do_not_swing_between_workers(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prefill worker has few of the 160 decodes of the second load, and half of the 410 of the third."""
    status, counts = Worker.status, {"0": list[int](), "1": list[int]()}

    def recorded(worker: Worker) -> pb.WorkerStatus:
        found = status(worker)
        counts[worker.name].append(found.requests_decoding + found.reservations)
        return found

    monkeypatch.setattr(Worker, "status", recorded)
    simulate(load, "policy", requests=round(15 * load.rate))
    both = list(zip(*counts.values(), strict=False))
    shares = [ours / max(1, ours + others) for ours, others in both[len(both) // 4 : -len(both) // 4]]
    assert statistics.pstdev(shares) < 0.15
    assert max(abs(after - before) for before, after in itertools.pairwise(shares)) < 0.3


@pytest.mark.all
def test_sessions_seldom_move(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, last, moved, turns = Recorded(monkeypatch), dict[int, str](), 0, 0
    simulate(agents(16, 6, seed=1), "policy", at_a_time=16, warm_up=0)
    for request, worker in seen.computed:
        moved += last.get(request.key, worker) != worker
        turns += request.key in last
        last[request.key] = worker
    assert moved < 0.5 * turns


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


def test_answers_that_clients_cut_make_no_later_first_tokens() -> None:
    """Eight requests for few tokens come before a burst of agents, as a warm-up."""

    def first_tokens(answer: int) -> float:
        turn, total = Turn(11_000, (), 0.0, answer), 0.0
        before = [(0.0, Session(i << 32, (turn,), 0)) for i in range(8)]
        for seed in (1, 2, 3):
            burst = [(5.0, session) for _, session in agents(8, 1, seed)]
            found = simulate(before + burst, "policy", warm_up=0)
            total += percentile([each.ttft for each in found.answers if each.prompt != turn.tokens], 0.9)
        return total

    assert first_tokens(8) < 1.06 * first_tokens(150)


def test_a_wrong_estimate_of_answers_costs_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients allow 100,000 tokens, and get 60 to 240. Or estimates are wrong by a factor."""
    sessions, expected = agents(8, 3, seed=1), AnswerLengths.expected

    def latency(factor: float = 1.0, most: int = 0) -> float:
        monkeypatch.setattr(
            AnswerLengths, "expected", lambda *given: max(1, round(factor * expected(*given)))
        )
        found = simulate(sessions, "policy", at_a_time=8, warm_up=0, max_answer=most)
        return percentile([answer.latency for answer in found.answers], 0.9)

    usual = latency()
    assert latency(most=100_000) < 1.1 * usual
    for factor in (0.25, 4.0):
        assert latency(factor) < 1.15 * usual, factor


def test_routers_know_which_decode_worker_has_a_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    offered, nearest = set[bool](), Fleet.nearest

    def counted(fleet: Fleet, chosen: DecodeLoad, request: PrefillRequest) -> tuple[int, int]:
        found = nearest(fleet, chosen, request)
        offered.add(found[0] == chosen.row)
        return found

    monkeypatch.setattr(Fleet, "nearest", counted)
    simulate(agents(8, 2, seed=1), "policy", workers=4, at_a_time=8, warm_up=0)
    assert offered == {True, False}, "the chosen worker, or another one that has more of the prompt"
