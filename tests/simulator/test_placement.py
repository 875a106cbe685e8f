"""What the simulator shows of placement, step by step."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import astuple, replace
from functools import cache, partial
from typing import Any

import pytest

from baton.cluster.options.optimize import PROFILES
from baton.router.policy.desk import Desk
from baton.router.policy.plan import Plan
from baton.router.policy.planner import Held, Lack, plan
from baton.router.policy.prefill import PrefillRequest
from baton.router.policy.settings import PlanSettings
from baton.rpc import worker_pb2 as pb
from baton.simulator import step_worker
from baton.simulator.agents import agents
from baton.simulator.placement import Kind, Measured, simulate
from baton.simulator.placement_outcome import PlacementOutcome, Quantiles
from baton.simulator.router import Router
from baton.simulator.steps import H200_8B, modelled, step_seconds
from baton.simulator.trace import Load, Session, Turn
from baton.steps.quantiles import percentile
from baton.steps.step_model import StepModel

MEASURED = {
    Load(2000, 150, 12): (179, 16.0),
    Load(2000, 150, 22): (350, 18.5),
    Load(8000, 200, 3): (569, 20.6),
    Load(500, 500, 12): (42, 12.6),
}
"""p99 of TTFT and gaps in ms: two colocated vLLM engines with steps of 512 tokens on H200."""


@cache
def outcome(load: Load, kind: Kind, seed: int = 1) -> PlacementOutcome:
    return simulate(load, kind, requests=400, seed=seed)


def typical(load: Load, kind: Kind) -> Quantiles:
    """The median of each quantile over three draws."""
    drawn = [astuple(outcome(load, kind, seed).quantiles()) for seed in (1, 2, 3)]
    return Quantiles(*map(statistics.median, zip(*drawn, strict=True)))


def test_steps_cost_what_an_h200_measured():
    for decodes, measured in {1: 4.25, 8: 4.58, 32: 5.51, 64: 6.81, 128: 9.31, 256: 15.2}.items():
        assert 1e3 * step_seconds(decodes, decodes * 1064, []) == pytest.approx(measured, rel=0.03)
    assert step_seconds(1, 1064, [(256, 1872)]) == pytest.approx(9.8e-3, rel=0.05)
    assert step_seconds(1, 1064, [(512, 1744)]) == pytest.approx(16.9e-3, rel=0.05)
    assert step_seconds(0, 0, [(2000, 0)]) == pytest.approx(48e-3, rel=0.05)
    assert step_seconds(0, 0, [(8000, 0)]) == pytest.approx(205e-3, rel=0.05)


def test_steps_with_chunks_are_padded_to_the_next_graph():
    below, above, whole = (step_seconds(8, 0, [(rows - 8, 0)]) for rows in (320, 321, 384))
    assert below < 0.95 * above
    assert above == pytest.approx(whole, rel=0.005)


@pytest.mark.all
@pytest.mark.parametrize(
    "load",
    [pytest.param(load, marks=() if load.rate == 12 else pytest.mark.long) for load in MEASURED],
    ids=str,
)
def test_the_policy_is_no_worse_than_a_fixed_split_and_than_colocated_engines(load: Load):
    ours, split = typical(load, "policy"), typical(load, "split")
    ttft, gap = MEASURED[load]
    assert ours.ttft_p99 <= 1.1 * split.ttft_p99
    assert 1e3 * ours.ttft_p99 <= 1.1 * ttft
    assert 1e3 * ours.gap_p99 <= gap
    assert 1e3 * ours.first_gap_p99 <= 25


def test_an_idle_prompt_is_shared_as_planned() -> None:
    """By three workers: one that computes the end of prompts, where attention takes long, counts as no slower
    than the others."""
    idle = Load(30_000, 2, 0.03)
    shared, whole = (
        simulate(idle, "policy", requests=12, workers=3, prefills=2, splits=x) for x in (True, False)
    )
    assert shared.places == {"split": 12}
    assert shared.quantiles().ttft < 0.45 * whole.quantiles().ttft
    flat = simulate(idle, "policy", requests=12, workers=3, prefills=2, machine=replace(H200_8B, layers=2))
    assert flat.quantiles().ttft > 1.1 * shared.quantiles().ttft, "a range begins half a step after another"


@pytest.mark.all
def test_shared_prompts_come_earlier_and_others_hardly_later() -> None:
    """The plan of a prompt counts the prompts that come before it ends, and what decode workers could do.
    Without that the second ratio was 1.6."""
    seeds, load = range(1, 4), Load(8000, 200, 3)
    shared, whole = (
        [simulate(load, "policy", requests=250, workers=4, seed=s, splits=x).quantiles() for s in seeds]
        for x in (True, False)
    )
    assert statistics.mean(x.ttft for x in shared) < 0.85 * statistics.mean(x.ttft for x in whole)
    assert statistics.mean(x.ttft_p99 for x in shared) < 1.1 * statistics.mean(x.ttft_p99 for x in whole)
    assert statistics.mean(x.gap_p99 for x in shared) < 1.01 * statistics.mean(x.gap_p99 for x in whole)


@pytest.mark.all
def test_a_worker_that_has_computed_no_prompt_beside_decodes_gets_some():
    """In this draw many prompts come at the start."""
    load, draw = Load(8000, 200, 4), 106
    ours, colocated = (outcome(load, kind, draw).quantiles() for kind in ("policy", "colocated"))
    assert ours.ttft_p99 <= 1.3 * colocated.ttft_p99


@pytest.mark.all
@pytest.mark.parametrize(
    ("load", "slower"),
    [
        (Load(2000, 150, 22), 8),
        pytest.param(Load(8000, 200, 3), 8, marks=pytest.mark.long),
        (Load(500, 500, 12), 2),
    ],
    ids=str,
)
def test_slower_workers_keep_the_order(load: Load, slower: int) -> None:
    """The policies have no constants of one model on one GPU: on one half as fast (2), and with a model
    four times as large there (8)."""
    policy, colocated = outcome(load, "policy").quantiles(), outcome(load, "colocated").quantiles()
    machine = replace(H200_8B, step=partial(step_seconds, weights=slower, attention=slower))
    fewer = Load(load.prompt, load.answer, load.rate / slower)
    ours, theirs = (
        simulate(fewer, kind, requests=400, machine=machine).quantiles() for kind in ("policy", "colocated")
    )
    assert ours.ttft_p99 / theirs.ttft_p99 < 1.15 * policy.ttft_p99 / colocated.ttft_p99
    assert ours.gap_p99 / theirs.gap_p99 < 1.15 * policy.gap_p99 / colocated.gap_p99


def test_light_loads_are_handed_over_and_short_prompts_are_not():
    assert outcome(Load(2000, 150, 12), "policy").places["handover"] > 200
    places = outcome(Load(200, 20, 80), "policy").places
    assert places["handover"] < 0.4 * places.total()


@pytest.mark.all
@pytest.mark.parametrize("load", [Load(2000, 150, 6), Load(8000, 200, 1.5)], ids=str)
def test_a_full_link_makes_no_token_later_than_one_worker_alone(load: Load) -> None:
    """The link carries half of the KV. Handed over all the same, second tokens come minutes late."""
    alone = simulate(replace(load, rate=2 * load.rate), "policy", requests=300, workers=1, prefills=0)
    machine = replace(H200_8B, link=load.prompt * load.rate / 2)
    full = simulate(load, "policy", requests=300, machine=machine)
    for tokens in (lambda x: x.ttft, lambda x: x.first_gaps):  # first and second ones
        assert statistics.mean(tokens(full)) <= 1.15 * statistics.mean(tokens(alone))
        assert percentile(tokens(full), 0.99) <= 1.15 * percentile(tokens(alone), 0.99)
    wide = simulate(load, "policy", requests=300, machine=replace(machine, link=40 * machine.link))
    assert wide.places["handover"] > 0.5 * len(wide.answers)
    assert wide.quantiles().first_gap_p99 < 0.025


def test_idle_workers_report_no_more_until_a_request_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request an hour: each report a second would take longer than all else."""
    reports = list[float]()
    reported = Router.reported

    def counted(router: Router, row: int, status: pb.WorkerStatus) -> None:
        reports.append(router.clock.now)
        reported(router, row, status)

    monkeypatch.setattr(Router, "reported", counted)
    sessions = [(3600.0 * number, Session(number, (Turn(2000, (), 0.0, 150),), 0)) for number in range(1, 4)]
    outcome = simulate(sessions, "policy", warm_up=0.0)
    assert len(outcome.answers) == 3
    assert len(reports) < 20
    assert all(at == int(at) for at in reports), "as often as before, at whole seconds"


@pytest.mark.all
@pytest.mark.parametrize(
    "load", [pytest.param(Load(2000, 150, 80), marks=pytest.mark.long), Load(500, 500, 80)], ids=str
)
def test_profiles_trade_gaps_for_throughput(load: Load):
    """With more requests than two workers can serve."""
    gaps, seconds = [], []
    for profile in PROFILES.values():
        seats = profile.max_num_seqs[-1]
        found = simulate(load, "policy", requests=800, seats=seats, target_steps=profile.target_steps)
        gaps.append(found.quantiles().gap_p99)
        seconds.append(found.seconds)
    assert gaps == sorted(gaps)
    assert gaps[-1] > 1.5 * gaps[0]
    assert min(seconds[1:]) < 0.96 * seconds[0]
    assert seconds[2] <= 1.15 * seconds[1], "gaps within a larger target spread decodes less"


def agents_of_one(kind: Kind) -> PlacementOutcome:
    """Twelve agents at one worker."""
    return simulate(agents(12, 4), kind, at_a_time=12, warm_up=0, workers=1, prefills=0)


def test_no_token_waits_for_a_large_step_of_the_next_prompt() -> None:
    """Also not the second token of a prompt that ends in the step before."""
    gaps = agents_of_one("policy").gaps
    assert max(gap for gap, count in gaps.items() if count) < 0.06


def test_sglang_computes_prompts_at_once_while_decodes_wait() -> None:
    baton, sglang = agents_of_one("policy"), agents_of_one("sglang")
    assert statistics.median(baton.ttft) < 1.2 * statistics.median(sglang.ttft)
    assert sglang.gap(0.99) > 2 * baton.gap(0.99)
    assert sum(a.tokens for a in sglang.answers) == sum(a.tokens for a in baton.answers)


def test_short_gaps_leave_prompts_a_worker_without_decodes() -> None:
    """Beside decodes, steps of 8 ms hold too few prompt tokens. Without that the median of first
    tokens was 3 s."""
    profile = PROFILES["latency"]
    seats, steps = profile.max_num_seqs[-1], profile.target_steps
    found = simulate(Load(2000, 150, 22), "policy", requests=400, seats=seats, target_steps=steps).quantiles()
    assert found.ttft < 0.4


def test_prefill_workers_decode_while_decode_workers_have_no_room():
    """16 seats do not suffice for the answers of 500 tokens."""
    prompts, answers = Load(2000, 50, 12), Load(200, 500, 12)

    def goodput(kind: Kind) -> float:
        def swings(now: float) -> Load:
            return prompts if now % 10 < 5 else answers

        return simulate(swings, kind, requests=200, seats=16).goodput(ttft=0.25, gap=0.02)

    assert goodput("split") < 0.7
    assert goodput("policy") > 0.9


def test_routers_draw_differently(monkeypatch: pytest.MonkeyPatch) -> None:
    """With equal draws they would choose the same decode workers: 1,000 workers had a p99 of 1.3 times."""
    init, seeds = Desk.__init__, list[int]()

    def made(desk: Desk, clock: Callable[[], float], settings: PlanSettings, *, seed: int) -> None:
        seeds.append(seed)
        init(desk, clock, settings, seed=seed)

    monkeypatch.setattr(Desk, "__init__", made)
    simulate(Load(500, 2, 1.0), "policy", requests=1, routers=3)
    assert len(set(seeds)) == 3


def test_plans_are_those_without_what_is_kept_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Paces are kept until a report comes, or the number of decodes changes."""
    planned, reused = Desk.plan, 0

    def compared(desk: Desk, request: PrefillRequest, held: Held) -> Plan | Lack:
        nonlocal reused
        drawn, workers = desk.rng.getstate(), desk.workers.values()
        before = [worker.pace for worker in workers]
        found = planned(desk, request, held)
        kept = [worker.pace for worker in workers]
        reused += sum(pace is not None and pace is old for pace, old in zip(kept, before, strict=True))
        for worker in workers:
            worker.pace = None
        desk.rng.setstate(drawn)
        assert plan(request, held, desk) == found
        for worker, pace in zip(workers, kept, strict=True):
            worker.pace = pace
        return found

    monkeypatch.setattr(Desk, "plan", compared)
    simulate(agents(16, 3), "policy", at_a_time=16, warm_up=0, workers=4, routers=2)
    assert reused > 100


@pytest.mark.parametrize("routers", [1, 3])
def test_reports_say_what_other_routers_have(routers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    reported, told = Router.reported, dict[tuple[float, int], list[tuple[int, int]]]()

    def hear(router: Router, row: int, status: pb.WorkerStatus) -> None:
        of_all = told.setdefault((router.clock.now, row), [])
        of_all.append((status.tokens_waiting, status.tokens_of_others))
        reported(router, row, status)

    monkeypatch.setattr(Router, "reported", hear)
    simulate(Load(2000, 150, 22), "policy", requests=60, routers=routers)
    for of_all in told.values():
        assert len(of_all) == routers
        assert sum(waiting - others for waiting, others in of_all) == of_all[0][0]
    assert any(others for of_all in told.values() for _, others in of_all) is (routers > 1)


@pytest.mark.long
def test_routers_that_hear_of_each_other_in_reports_do_about_as_well_as_one():
    """When reports came once a second, and lacked the prompts under way, the median was 1.6 times that of one
    router. A p99 of 300 requests is 1.5 to 1.7 times that of one router, as the arrivals are. Whole prompts:
    one router alone knows better which workers are free to share one."""
    load, seeds = Load(8000, 200, 4), (1, 2)
    one, four = (
        [
            simulate(load, "policy", requests=300, workers=16, routers=n, seed=s, splits=False).quantiles()
            for s in seeds
        ]
        for n in (1, 4)
    )
    assert all(ours.ttft < 1.05 * alone.ttft for ours, alone in zip(four, one, strict=True))
    assert sum(found.ttft_p99 for found in four) < 1.7 * sum(found.ttft_p99 for found in one)


def test_routers_that_hear_of_each_other_in_reports_leave_nothing_behind():
    found = simulate(Load(2000, 150, 12), "policy", requests=200, workers=4, routers=3)
    assert len(found.ttft) == 180
    assert found.places.total() == 200


@pytest.mark.parametrize(("wait", "fetched"), [(0.01, 1024), (60.0, None)])
def test_workers_cost_what_real_ones_have_reported(wait: float, fetched: int | None) -> None:
    """Worker 1 is the faster one at first, and worker 0 from 10 s on. A prefix is fetched if the link is said
    to be fast."""
    fast, plans, names = step_worker.measured(H200_8B), list[Plan](), tuple(range(1, 17))
    slow = fast.corrected(4.0, 4.0)

    def told(at: float, row: int, model: StepModel) -> Measured:
        machine = modelled(model, H200_8B.positions, H200_8B.doubles_at, 0.0, layers=32, copies=None)
        link = pb.PrefixLink(wait=wait, tokens_per_s=1e6)
        return Measured(at, row, machine, model, model.decode_seconds[0], {1 - row: link})

    def heard(_: float, name: str, arguments: Sequence[Any]) -> None:
        if name == "plan":
            plans.append(arguments[2])

    prompt = Session(1, (Turn(1100, names, 0.0, 8),), 0)
    reports = [told(0.0, 0, slow), told(0.0, 1, fast)]
    reports += [told(10.0, 0, fast.corrected(0.1, 0.1)), told(10.0, 1, slow)]
    found = simulate(
        [(5.0, prompt), (15.0, prompt)], "policy", warm_up=0, measured=reports, listener=heard, splits=False
    )
    assert [plan.ranges[0].worker for plan in plans] == [1, 0]
    assert [plan.source and plan.source.tokens for plan in plans] == [None, fetched]
    assert 2 * max(found.ttft[1:]) < found.ttft[0] < 2 * fast.prefill(1100), "steps take as long as reported"


def test_a_given_plan_is_followed_and_the_next_plans_know_it() -> None:
    """Two equal idle workers: the next turn of a session goes where its first one was sent."""
    plans, names = dict[int, Plan](), tuple(range(1, 17))

    def heard(_: float, name: str, arguments: Sequence[Any]) -> None:
        if name == "plan":
            plans[arguments[0].arrival] = arguments[2]

    sessions = [(at, Session(1, (Turn(1100, names, 0.0),), 0)) for at in (1.0, 5.0)]
    serve = partial(simulate, sessions, "policy", warm_up=0, prefills=2, listener=heard)
    serve()
    own = plans[0].ranges[0].worker
    other = plans[0]._replace(ranges=(plans[0].ranges[0]._replace(worker=1 - own),))
    serve(given={0: other})
    assert plans[0].ranges[0].worker == own, "the desk's own plan"
    assert [part.worker for part in plans[1].ranges] == [1 - own]
    assert plans[1].cached == 1024
