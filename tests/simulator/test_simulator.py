"""The simulator, and what it shows of the router's policies."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest

from baton.bench.lab.routing_sim.__main__ import hits
from baton.bench.lab.routing_sim.baselines import POLICIES
from baton.bench.lab.routing_sim.traces import h200, multi_turn, size
from baton.simulator import placement
from baton.simulator.clock import Clock
from baton.simulator.placement import Change, Pool
from baton.simulator.placement_outcome import PlacementOutcome
from baton.simulator.requests import Request
from baton.simulator.step_worker import BLOCK, Worker
from baton.simulator.steps import H200_8B
from baton.simulator.trace import Trace
from baton.steps.quantiles import percentile


def simulate(
    trace: Trace, policy: str, *, workers: int = 8, changes: Sequence[tuple[float, int, Pool | None]] = ()
) -> PlacementOutcome:
    """`changes`: as of `Change`, at a share of the time in which sessions begin."""
    load = size(trace, workers=workers, sessions=15)
    last = load.sessions[-1][0]
    return placement.simulate(
        load.sessions,
        "policy",
        warm_up=0.4,
        workers=workers,
        prefills=workers,
        routers=4,
        machine=load.machine,
        policy=POLICIES[policy],
        prefix_fetches=False,
        changes=[Change(share * last, row, pool) for share, row, pool in changes],
    )


def test_the_simulated_speed_is_that_of_the_measured_engine():
    assert h200(2000, 0) == pytest.approx(49.8e-3, rel=0.05)
    assert h200(8000, 0) == pytest.approx(210e-3, rel=0.05)
    assert h200(1, 8000) < 5e-3


def test_a_seed_gives_the_same_trace_and_prompts_share_prefixes():
    assert multi_turn(200, 3) == multi_turn(200, 3) != multi_turn(200, 4)
    chat = max(multi_turn(200, 3), key=lambda s: len(s.turns))
    for before, after in zip(chat.turns, chat.turns[1:], strict=False):
        assert after.chunks[: len(before.chunks)] == before.chunks


@pytest.mark.all
def test_every_request_is_answered_while_workers_join_and_leave():
    trace = multi_turn(1500, 1)
    leave: list[tuple[float, int, Pool | None]] = [(0.3, row, None) for row in range(3)]
    back: list[tuple[float, int, Pool | None]] = [(0.6, row, "prefill") for row in range(2)]
    outcome = simulate(trace, "sticky", changes=[*leave, *back])
    assert len(outcome.ttft) >= 0.55 * sum(len(session.turns) for session in trace)


@pytest.mark.all
def test_sticky_finds_prefixes_without_long_queues():
    """Hits against a policy that only balances; TTFT against a policy that only looks at queues."""
    trace = multi_turn(1000, 1)
    found = {name: simulate(trace, name) for name in ("sticky", "least_loaded", "round_robin")}
    p99 = {name: percentile(o.ttft, 0.99) for name, o in found.items()}
    assert hits(found["sticky"]) > 0.6 > hits(found["round_robin"]) + 0.2
    assert p99["sticky"] < p99["least_loaded"]


@pytest.mark.all
def test_workers_that_leave_move_few_sessions():
    trace = multi_turn(1500, 1)
    still = simulate(trace, "sticky", workers=16)
    moved = simulate(trace, "sticky", workers=16, changes=[(0.6, row, None) for row in range(2)])
    assert hits(moved) > hits(still) - 0.1


def test_a_prompt_under_way_goes_on_past_one_for_which_there_is_no_room() -> None:
    """As in the engine. The second prompt is shorter and comes first in order, and waits for memory."""
    clock = Clock()
    worker = Worker(
        "0", clock, PlacementOutcome(False), rule="baton", target_steps=3.5,
        machine=replace(H200_8B, positions=100 * BLOCK),
    )  # fmt: skip
    computed: list[int] = []

    def ask(number: int, prompt: int) -> None:
        def answered() -> None:
            computed.append(number)
            worker.release(request)

        request = Request(number, prompt, 1, clock.now, False, positions=prompt)
        request.first_token = answered
        worker.prefill(request)

    ask(1, 10_000)
    clock.after(0.01, partial(ask, 2, 5_000))
    clock.run()
    assert computed == [1, 2]
