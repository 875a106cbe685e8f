"""The simulator, and what it shows of the router's policies."""

import random
from dataclasses import replace

import pytest

from baton.bench.lab.routing_sim.baselines import POLICIES
from baton.bench.lab.routing_sim.traces import h200, multi_turn, size
from baton.router.policy.prefill import PrefillRequest, PrefillSnapshot
from baton.simulator.prefill import Outcome, Queued, Setting, Simulation, SimWorker
from baton.simulator.trace import Session, Trace, Turn, hit_tokens
from baton.steps.quantiles import percentile


def simulate(trace: Trace, policy: str, *, workers: int = 8, changes=()) -> Outcome:
    setting = size(trace, workers=workers, routers=4, sessions=15)
    return Simulation(trace, POLICIES[policy], replace(setting, changes=changes)).run()


def hits(outcome: Outcome) -> float:
    return outcome.hit_tokens / outcome.tokens


def test_the_simulated_speed_is_that_of_the_measured_engine():
    assert h200(2000, 0) == pytest.approx(49.8e-3, rel=0.05)
    assert h200(8000, 0) == pytest.approx(210e-3, rel=0.05)
    assert h200(1, 8000) < 5e-3


def test_a_worker_computes_one_prompt_after_another_and_evicts_the_least_recently_used_chunks():
    done: list[int] = []
    changes: list[list[int]] = []
    worker = SimWorker("w", capacity=4, speed=lambda uncached, cached: float(uncached))

    def compute(*chunks: int) -> int:
        turn = Turn(64 * len(chunks) + 1, chunks, 0.0)
        worker.queue.append(Queued(turn, 0.0, lambda now, at, hit: done.append(hit)))
        waiting = worker.tokens_waiting()
        worker.begin(0.0)
        _, hit, *changes[:] = worker.finish()
        assert waiting == turn.tokens - hit
        return hit

    assert compute(1, 2, 3) == 0
    assert compute(1, 2, 3) == 192
    assert compute(1, 9) == 64
    assert changes == [[], [9]]
    assert compute(7, 8) == 0
    assert changes == [[3, 2], [7, 8]], "the unused end of the prefix is evicted first"
    assert compute(7, 8, 10, 11, 12, 13) == 128
    assert changes == [[], []], "a prompt that is too long leaves nothing"
    assert hit_tokens(Turn(128, (1, 2), 0.0), {1, 2}) == 127, "the last position is computed"


def test_no_policy_finds_more_than_one_cache_of_all_workers_would():
    turns = (Turn(128, (1, 2), 1.0), Turn(200, (1, 2, 3), 1.0))
    trace = [Session(key, turns, 1) for key in range(50)]
    for policy in POLICIES:
        outcome = simulate(trace, policy)
        assert 0 < outcome.hit_tokens <= outcome.bound_tokens < outcome.tokens


def test_a_seed_gives_the_same_trace_and_prompts_share_prefixes():
    assert multi_turn(200, 3) == multi_turn(200, 3) != multi_turn(200, 4)
    chat = max(multi_turn(200, 3), key=lambda s: len(s.turns))
    for before, after in zip(chat.turns, chat.turns[1:], strict=False):
        assert after.chunks[: len(before.chunks)] == before.chunks


@pytest.mark.all
def test_every_request_is_answered_while_workers_join_and_leave():
    trace = multi_turn(1500, 1)
    outcome = simulate(trace, "sticky", changes=[(0.3, -3), (0.6, 2), (0.7, -1), (0.9, 3)])
    assert len(outcome.ttft) >= 0.55 * sum(len(session.turns) for session in trace)


@pytest.mark.all
def test_sticky_finds_prefixes_without_long_queues():
    """Hits against a policy that only balances; TTFT against a policy that only looks at queues."""
    trace = multi_turn(1000, 1)
    found = {name: simulate(trace, name) for name in ("sticky", "least_loaded", "round_robin")}
    p99 = {name: percentile(o.ttft, 0.99) for name, o in found.items()}
    assert hits(found["sticky"]) > 0.6 > hits(found["round_robin"]) + 0.2
    assert p99["sticky"] < p99["least_loaded"]
    assert found["sticky"].moved < 0.1 * found["sticky"].turns


@pytest.mark.all
def test_sticky_finds_a_document_that_another_session_cached():
    rng = random.Random(1)
    documents = [tuple(rng.getrandbits(64) for _ in range(rng.randint(15, 90))) for _ in range(200)]
    asked = rng.choices(documents, [1 / (i + 1) for i in range(len(documents))], k=800)
    sessions = [
        Session(rng.getrandbits(64), (Turn(64 * len(chunks) + 60, chunks, 0.0),), len(chunks))
        for chunks in asked
    ]

    def first_on_the_ring(snapshot: PrefillSnapshot, request: PrefillRequest) -> int:
        return next(iter(snapshot.ring.walk(request.key)))

    capacity = sum(map(len, documents)) // 8
    setting = Setting(workers=8, routers=4, capacity=capacity, rate=40.0, think=0.0, speed=h200)
    found = [
        hits(Simulation(sessions, policy, setting).run())
        for policy in (POLICIES["sticky"], first_on_the_ring)
    ]
    assert found[0] > found[1] + 0.2


@pytest.mark.all
def test_workers_that_leave_move_few_sessions():
    trace = multi_turn(1500, 1)
    still = simulate(trace, "sticky", workers=16)
    moved = simulate(trace, "sticky", workers=16, changes=[(0.6, -2)])
    assert moved.moved / moved.turns < still.moved / still.turns + 2 / 16
    assert hits(moved) > hits(still) - 0.1
