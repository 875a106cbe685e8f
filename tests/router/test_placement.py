"""Placement: which worker computes a prompt, from costs that workers report. No router is needed."""

import itertools
import math
import random
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.kv_names import ImageSpan, Tier
from baton.router.policy import placement
from baton.router.policy.decode import DecodeLoad
from baton.router.policy.desk import Desk
from baton.router.policy.fleet import Fleet, Seen
from baton.router.policy.links import TRY_AGAIN, Links
from baton.router.policy.pace import MOST_BUSY, Pace
from baton.router.policy.placement import JOIN_STEPS, Offer, pace_of, place, place_without_room
from baton.router.policy.placement import offer as placed
from baton.router.policy.plan import Plan, Range
from baton.router.policy.planner import NOTHING, plan
from baton.router.policy.prefill import COMPARED, PrefillRequest
from baton.router.policy.prefill_loads import PrefillLoads, PrefillWork
from baton.router.policy.prefixes import Prefixes
from baton.router.policy.settings import PlanSettings
from baton.router.policy.split import LATEST
from baton.rpc import worker_pb2 as pb
from baton.steps.step_model import StepModel, long_seconds

from .fleets import fleet_of, seen_worker
from .formulas import evaluated

FIXED = StepModel((1, 256), (0.010, 0.010), 0.0, (1, 8192), (0.0001, 0.8192), 0.0, 0.0)
"""Steps that only decode take 10 ms, and a prompt token adds 0.1 ms."""
H200 = StepModel((1, 256), (0.0043, 0.0065), 0.03e-6, (16, 512, 8192), (0.0045, 0.0125, 0.19), 0.8e-9, 1.0)
"""About an 8B model."""
GAP = 0.016
SHORT = (GAP * 0.010) ** 0.5
"""Of `FIXED`."""


def offer(tokens: int = 2000, row: int = 0, **given: Any) -> Offer:
    """Of a request for 150 tokens, of which the worker has to compute so many."""
    cached, answer, target = given.pop("cached", 0), given.pop("answer", 150), given.pop("target", 1.0)
    request = PrefillRequest(key=1, tokens=cached + tokens, answer=answer)
    paces: dict[str, Any] = {"model": H200, "gap": GAP}
    paces |= {name: given.pop(name) for name in Pace.__match_args__ if name in given}
    gap, decodes = paces["gap"], paces.get("decodes", 0)
    paces.setdefault("gap_cost", decodes * target / gap / answer if gap else 0.0)
    given.setdefault("mean_prompt", 1000.0)
    return Offer(row, request, target, Pace(**paces), cached=cached, **given)


def changed(offer: Offer, target: float = 1.0, **given: Any) -> Offer:
    return replace(offer, target=target, pace=replace(offer.pace, **given))


def test_a_prompt_costs_its_first_token_and_what_it_adds_to_others() -> None:
    """Long steps take 16 ms, 6 of them for prompts."""
    alone = offer(1000, model=FIXED)
    assert alone.first == alone.within == alone.prompt_cost == pytest.approx(0.1)
    beside = offer(1000, model=FIXED, decodes=2, ahead=500, load=0.007, answer=100)
    own = 0.007 + 0.1 * 16 / 6 + 2 * 0.010
    assert (beside.first, beside.within) == pytest.approx((own + 0.05 * 16 / 6, own))
    gaps = 2 * 0.1 / 0.006 * (GAP - SHORT) / (100 * GAP)
    assert beside.prompt_cost == pytest.approx(beside.first + gaps)
    others = changed(beside, gap_cost=beside.pace.gap_cost / 2)
    assert others.prompt_cost == pytest.approx(beside.first + 0.5 * gaps), "what their own gaps cost"
    hasty = changed(beside, 0.5, gap_cost=beside.pace.gap_cost / 2)
    assert hasty.prompt_cost == pytest.approx(beside.first + 0.5 * gaps)
    long = offer(1000, model=FIXED, decodes=2, answer=10**6)
    assert long.prompt_cost == pytest.approx(long.first, abs=1e-3), "long answers wait for it"
    short = offer(1000, model=FIXED, decodes=2, answer=10)
    assert short.prompt_cost == pytest.approx(short.first + 2 * (GAP - SHORT) / GAP), "ten gaps of each"
    shown = offer(1000, model=FIXED, decodes=2, ahead=500, load=0.007, answer=100, encoding=0.03)
    assert shown.first == pytest.approx(beside.first + 0.03 * 16 / 6), (
        "images are encoded beside decodes, too"
    )
    late = offer(1000, model=FIXED, ahead=500, embeddings=[(0, 0.01), (900, 0.2), (990, 0.2)])
    assert late.first == late.within == pytest.approx(0.2 + 0.01), "from the last image that comes on"
    soon = offer(1000, model=FIXED, ahead=500, embeddings=[(0, 0.01), (900, 0.02)])
    assert soon.first == offer(1000, model=FIXED, ahead=500).first, "prompts ahead take longer than images"
    few = offer(20, model=FIXED, decodes=2)
    assert few.prompt_cost == few.first, "a short step costs nothing"
    busy = offer(1000, model=FIXED, rate=5000.0)
    assert busy.prompt_cost == pytest.approx(0.1 + 0.5 / 0.5 * 0.1 / 2), "prompts come behind it"
    full = offer(1000, model=FIXED, rate=1e6)
    most = MOST_BUSY / (1 - MOST_BUSY)
    assert full.prompt_cost == pytest.approx(0.1 + most * 0.1 / 2), "more than it can compute"
    assert changed(full, decodes=1, gap_cost=0.1).pace.behind == pytest.approx(most), "beside decodes, too"


def test_the_formula_of_the_docstring_is_what_costs_are_computed_by() -> None:
    """Steps take 10 ms and 1 ms for each further decode. Long ones take 1.6 times as long, so prompts take
    16 / 6 times as long as alone."""
    text = placement.__doc__ or ""
    formulas = dict(
        re.findall(r"^    (one worker|handover|prompt|decode|join) += (.*?)(?:  .*)?$", text, re.M)
    )
    [cost_of_gap] = re.findall(r"^c = (F / .*?) seconds", text, re.M)
    rows = re.findall(r"^    (\S+|d, d')  +\w", text.partition(" join ")[2], re.M)
    growing = replace(FIXED, decode_seconds=(0.010, 0.010 + 255 * 0.001))

    def value(name: str, terms: dict[str, float]) -> float:
        return evaluated(formulas[name].replace("d'", "d_"), terms)

    loads: list[dict[str, Any]] = [
        {"decodes": 3},
        {"decodes": 3, "rate": 1500.0},
        {"rate": 1500.0},
        {"rate": 1500.0, "mean_prompt": 10_000.0},
    ]
    for load in loads:
        found = offer(1000, model=growing, ahead=500, **load)
        alone = 1e-4 * found.mean_prompt
        pace, request = found.pace, found.request
        step, stretch = (0.012, 16 / 6) if pace.decodes else (0.0, 1.0)
        share = pace.busy * stretch
        behind = share / (1 - share) * stretch
        then = pace.steps(
            pace.decodes + 1, pace.context + request.tokens, pace.gap_cost + found.gap_weight / request.answer
        )
        gap, late = pace.gap_of(then, pace.busy)
        later = then.stretch - stretch + JOIN_STEPS * (then.step - step) / alone
        # It may compute prompts only, but no more than fit into a step.
        first_step = 0.0 if pace.decodes else pace.busy * min(alone, 0.8192)

        def longer(alone: float, step: float = step) -> float:
            return alone / (0.6 * step) * (1.6 * step - max(step, SHORT)) if step else 0.0

        terms = {
            "c": evaluated(cost_of_gap, {"F": 1.0, "G": GAP, "N": request.answer}),
            "C": pace.decodes * 1.0 / GAP / request.answer,
            "N": request.answer,
            "step": step,
            "first": stretch * (0.05 + 0.1) + JOIN_STEPS * step,
            "behind": behind * (0.05 + 0.1 / 2),
            "longer": longer(0.1),
            "d": pace.late,
            "d_": late + first_step / request.answer,
            "slower": pace.busy * request.answer * gap * later
            / (1 - min(MOST_BUSY, pace.busy * then.stretch)),
        }  # fmt: skip
        assert late > pace.late, "this request makes the gaps of others longer"
        for name, cost in (
            ("prompt", found.prompt_cost), ("decode", found.decode_cost()), ("join", found.join_cost)
        ):  # fmt: skip
            assert cost == pytest.approx(value(name, terms)), (name, load)
        full: dict[str, Any] = {"spare": 500.0, "reuse": 0.5}
        prefill, decode = (offer(1000, row, model=growing, ahead=500, **load, **full) for row in (1, 0))
        forgotten, of_prompt = (
            0.5 * (seconds * (stretch + behind) + terms["C"] * longer(seconds)) for seconds in (0.065, 0.05)
        )
        decode.arrives = prefill.first + 0.25
        costs = place(prefill, decode).costs
        one = {"prompt": decode.prompt_cost, "decode": decode.decode_cost(), "forgotten": forgotten}
        assert (costs["decode"], costs["prefill"]) == pytest.approx((value("one worker", one),) * 2)
        both = {**one, "late": 0.25, "join": decode.join_cost, "forgotten": (of_prompt + forgotten) / 2}
        assert costs["handover"] == pytest.approx(value("handover", both))
        explained = {*terms, *both} - {"c", "N", *formulas}
        assert sorted(rows) == sorted({*explained, "d, d'"} - {"d", "d_"}), "each term has its row"


@pytest.mark.parametrize(("position", "within"), [(0.0, 0.01), (4000.0, 0.08)])
@pytest.mark.parametrize("overlap", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("decodes", "context"), [(1, 0.0), (20, 2000.0), (60, 0.0), (60, 2000.0)])
def test_a_worker_computes_as_many_prompt_tokens_beside_decodes_as_fit_into_a_long_step(
    position: float, within: float, overlap: float, decodes: int, context: float
) -> None:
    pace = offer(
        model=replace(H200, overlap=overlap), decodes=decodes, context=decodes * context, position=position
    ).pace
    fitting = pace.model.fitting(decodes, decodes * context, position, pace.now.long)
    assert pace.now.prompts == pytest.approx(fitting * pace.token, rel=within)


@pytest.mark.parametrize("decodes", [1, 20])
def test_a_long_step_is_longer_where_any_prompt_adds_much_to_a_step(decodes: int) -> None:
    """As with experts: a step with 16 prompt tokens takes 11 ms, one with a decode alone 4 ms."""
    experts = replace(H200, prompt_seconds=(0.011, 0.016, 0.12))
    pace = offer(model=experts, decodes=decodes).pace
    fixed, fastest = experts.fixed(decodes), experts.decode_seconds[0]
    expected = long_seconds(pace.now.step, fastest, GAP, pace.gap_cost, 1.0, fixed)
    assert fixed > 0
    assert pace.now.long == pytest.approx(expected)


def test_tokens_far_behind_the_beginning_take_longer_and_a_worker_has_time_to_decode() -> None:
    far = replace(FIXED, pair_seconds=1e-9)
    middle, later = (offer(1000, model=far, ahead=500, position=at).pace for at in (4096.0, 14_096.0))
    assert (middle.token, later.token) == pytest.approx((1e-4, 1e-4 + 1e4 * 1e-9)), "a large step is the mean"
    full = offer(model=far, decodes=3, rate=1e6, position=1e5).pace
    assert full.busy * (full.now.long - full.now.step) / full.now.prompts > MOST_BUSY
    assert full.gap_of(full.now, full.busy)[0] == pytest.approx(full.now.step / (1 - MOST_BUSY))


def test_the_largest_step_with_decodes_bounds_what_a_worker_computes_beside_them() -> None:
    """A long step would take 16 ms, 6 of them for 60 tokens. With 22 rows it has 20, and takes 12 ms."""
    beside = offer(1000, model=FIXED, decodes=2)
    bounded = changed(beside, largest=22)
    assert bounded.first == pytest.approx(0.1 * 12 / 2 + 2 * 0.010)
    assert changed(beside, largest=500).first == beside.first, "no step is as large"
    assert bounded.first > beside.first
    assert changed(bounded, decodes=0, gap_cost=0.0).first == pytest.approx(0.1), "alone it has no bound"


def test_a_prompt_that_is_all_cached_makes_no_gap_longer() -> None:
    cached = offer(0, cached=1000, model=FIXED, decodes=2)
    assert cached.prompt_cost == cached.first


def test_decoding_with_vllm_costs_gaps_beyond_the_fastest_step() -> None:
    slow = replace(FIXED, decode_seconds=(0.010, 0.010 + 255 * 0.001))
    assert offer(model=slow, largest=9000).decode_cost() == 0, "the fastest step costs nothing"
    two = offer(model=slow, decodes=1, largest=9000)  # 10 ms, then 11: less than a short step
    [formula] = re.findall(r"with vLLM (\(.*?) of a shorter", " ".join((placement.__doc__ or "").split()))
    late = evaluated(formula, {"s": 0.011, "f": 0.010, "short": SHORT})
    assert two.decode_cost() == pytest.approx(2 * late / GAP)
    ten = offer(model=slow, decodes=10, largest=9000)  # 19 ms, and 20 with this request
    assert ten.decode_cost() == pytest.approx((0.020 - 0.010 + 10 * 0.001) / GAP)


def test_decoding_costs_gaps_beyond_a_short_step_and_prompts_that_become_slower() -> None:
    slow = replace(FIXED, decode_seconds=(0.010, 0.010 + 255 * 0.001))
    assert offer(model=slow).decode_cost() == 0, "a short step costs nothing"
    ten = offer(model=slow, decodes=10)  # 19 ms, and 20 with this request
    assert ten.decode_cost() == pytest.approx((0.020 - SHORT + 10 * 0.001) / GAP)
    hasty = changed(ten, 0.5, gap_cost=ten.pace.gap_cost / 2)
    assert hasty.decode_cost() == pytest.approx(0.5 * ten.decode_cost())
    assert ten.join_cost == pytest.approx(0.019 / 150 / GAP), "it waits for the step under way"
    reads = offer(model=replace(FIXED, context_seconds=4e-6))  # 2,000 positions in 8 ms
    assert reads.decode_cost() == pytest.approx((0.018 - SHORT) / GAP)
    busy = offer(model=FIXED, rate=2000.0, decodes=1)  # prompts take a fifth of its time
    gap = 0.010 / (1 - 0.2)
    assert busy.decode_cost() == pytest.approx(0.2 / 0.006 * gap * (GAP - SHORT) / GAP)
    first = changed(busy, decodes=0, gap_cost=0.0)
    later = (16 / 6 - 1) + 2 * 0.010 / 0.1
    slower = 0.2 * 150 * gap * later / (1 - 0.2 * 16 / 6)
    assert first.decode_cost() == pytest.approx(busy.decode_cost() + slower + 0.2 * 0.1 / 150 / GAP)


DECODES = {"decodes": 20, "context": 20 * 2000.0}
AGENTS = {"decodes": 30, "context": 30 * 15_000.0}


@pytest.mark.parametrize(
    ("prefill", "decode", "expected"),
    [
        ({}, {}, "handover"),  # both are idle
        ({"rate": 20_000.0}, DECODES, "handover"),
        ({"rate": 20_000.0, "ahead": 40_000}, DECODES, "decode"),
        ({"rate": 20_000.0, "ahead": 40_000}, {**DECODES, "rate": 20_000.0, "ahead": 40_000}, "handover"),
        ({"rate": 5_000.0}, AGENTS, "prefill"),  # a step takes 18 ms there
        ({"rate": 5_000.0}, {**AGENTS, "gap": 0.2}, "handover"),  # users have time
        ({"rate": 5_000.0, "room": False}, AGENTS, "handover"),
        ({"rate": 5_000.0, **AGENTS}, AGENTS, "decode"),  # a handover would wait for a step
        ({"rate": 5_000.0, **DECODES, "ahead": 1}, {**AGENTS, "decodes": 10, "context": 0.0}, "decode"),
        ({"rate": 50_000.0}, AGENTS, "handover"),  # prompts need all of the prefill worker
        ({"gap": 0.0}, {"gap": 0.0}, "handover"),  # nothing is known yet
        ({"gap": 0.0, "ahead": 40_000}, {"gap": 0.0}, "handover"),
    ],
)
def test_the_least_cost_decides(prefill: dict[str, Any], decode: dict[str, Any], expected: str) -> None:
    found = place(offer(row=1, **prefill), offer(**decode))
    assert found.place == expected, found.costs
    assert found.decode == (expected == "prefill")
    assert found.ranges[0].worker == (expected != "decode")


def test_a_prefill_worker_that_leaves_decodes_to_others_gets_none() -> None:
    prefill, decode = offer(row=1, rate=5_000.0), offer(**AGENTS)
    assert place(prefill, decode).place == "prefill"
    found = place(prefill, decode, apart=True)
    assert (found.place, found.decode) == ("handover", 0)
    assert "prefill" not in found.costs


def test_what_the_cache_forgets_costs_as_a_prompt_if_prompts_are_cached() -> None:
    """A request for 1,150 positions, of which the worker has 200."""
    settings: dict[str, Any] = {"model": FIXED, "held_tokens": 200, "reuse": 0.8}
    for spare, forgotten in ((950, 0), (750, 200), (0, 950)):
        found = offer(1000, **settings, spare=spare)
        assert found.memory_cost(150) == pytest.approx(0.8 * forgotten * 0.0001)
    beside = offer(1000, **settings, spare=0, decodes=2)
    gaps = 2 / 150 / GAP * 0.8 / 0.006 * (GAP - SHORT)
    assert beside.memory_cost() == pytest.approx(0.8 * (0.8 * 0.1 * 16 / 6) + 0.8 * 0.1 * gaps)
    full = {"spare": 0.0, "reuse": 1.0}
    assert place(offer(row=1), offer()).place == "handover"
    assert place(offer(row=1, encoding=0.1), offer(encoding=0.2)).work(1, []).beside == 0.1
    assert place(None, offer(encoding=0.1)).work(0, []).beside == 0.1
    assert place(offer(row=1, **full, held_tokens=0), offer(**full, held_tokens=2000)).place == "decode"


def test_a_worker_reports_what_its_decodes_cost_and_what_it_has_to_spare() -> None:
    """Decodes that this router sent since count, too."""
    loads = PrefillLoads()
    row = loads.join("a", block_size=16, now=0.0)
    seen = seen_worker(DecodeLoad(row, "a", 16, 100, max_running=8))
    seen.status = pb.WorkerStatus(
        requests_running=2, requests_decoding=2, gap_cost=0.4, gap_target_seconds=GAP,
        blocks_free=100, blocks_spare=40,
    )  # fmt: skip
    seen.load.reported(blocks_free=100, running=2)
    fleet = fleet_of(loads, [seen])
    request = PrefillRequest(key=1, tokens=100, answer=150)
    before = placed(fleet, request, row, 64)
    assert (before.pace.gap_cost, before.spare, before.held_tokens) == (0.4, 40 * 16, 64)
    seen.load.sent(160)
    after = placed(fleet, request, row, 64)
    assert (after.pace.gap_cost, after.spare) == (pytest.approx(0.6), 40 * 16), "spare as reported"
    seen.step_model, costs = H200, list[float]()
    for cost in (0.4, 0.4, 0.8):
        seen.status = pb.WorkerStatus.FromString(seen.status.SerializeToString())
        seen.status.gap_cost = cost
        costs.append(placed(fleet, request, row, 64).pace.gap_cost)
    assert costs == pytest.approx([0.6, 0.6, 1.2]), "also of a worker whose steps take as long as before"


@pytest.mark.parametrize(("workers", "cost"), [(1, 0.0), (2, 20 / 150)])
def test_gaps_of_the_only_worker_have_their_bound_and_cost_nothing(workers: int, cost: float) -> None:
    """Each prompt that it does not compute at once delays all that come later. `plan` tells the worker."""
    loads = PrefillLoads()
    seen = [
        seen_worker(DecodeLoad(loads.join(name, block_size=16, now=0.0), name, 16, 1000, 8), pool)
        for name, pool in (("a", pb.POOL_DECODE), ("b", pb.POOL_PREFILL))[:workers]
    ]
    for worker in seen:
        worker.status = pb.WorkerStatus(gap_target_seconds=GAP, step_seconds=GAP, prefill_tokens_per_s=1e4)
        worker.load.reported(blocks_free=1000, running=0)
    fleet = fleet_of(loads, seen, settings=PlanSettings(overflow=True))
    planned = plan(PrefillRequest(key=1, tokens=100, answer=150), NOTHING, fleet)
    assert isinstance(planned, Plan)
    assert planned.gap_cost == pytest.approx(cost)


COSTS = 0.0, 1e-300, 1.0, 1e300


@pytest.mark.parametrize("gap", [0.0, 1e-300, 1e300])
@pytest.mark.parametrize("overlap", [0.0, 1.0])
def test_any_report_gives_a_plan(gap: float, overlap: float) -> None:
    for step, prompt, each in itertools.product(COSTS, COSTS, COSTS):
        model = StepModel((1,), (step,), each, (1,), (prompt,), each, overlap)
        decoding = (0, 0.0), (1, 1e-300), (2**40, 1e300)
        for (decodes, cost), rate, ahead in itertools.product(decoding, (0.0, 1e300), (0.0, 1e300)):
            strange = offer(
                model=model, gap=gap, decodes=decodes, gap_cost=cost, context=1e300, rate=rate, ahead=ahead,
                position=1e300,
            )  # fmt: skip
            for prefill in (strange, offer(row=1), None):
                assert place(prefill, strange).decode is not None


def test_a_worker_whose_new_engine_has_not_decoded_yet_gets_an_offer() -> None:
    """Its decodes went on with the costs that they had, and its target of a gap is not known yet."""
    loads, request = PrefillLoads(), PrefillRequest(key=1, tokens=2000, answer=150)
    worker = seen(loads, "a:1", requests_running=2, requests_decoding=2, gap_cost=0.4, step_seconds=0.01)
    worker.load.reported(blocks_free=100, running=2)
    for gap in (0.0, GAP):
        found = placed(fleet_of(loads, [worker]), request, worker.row, 500, gap=gap)
        assert (found.pace.gap, found.pace.gap_cost) == (gap, 0.4)
        assert place(found, found).decode == worker.row


@pytest.mark.parametrize(
    ("offers", "chosen"),
    [
        ([(3000, True), (1000, True), (2000, True)], 1),
        ([(1000, True), (1000, True)], 0),  # the choice of `sticky` comes first
        ([(1000, False), (3000, True), (2000, True)], 2),  # it has no seat
        ([(1000, False), (3000, False)], None),
        ([], None),
    ],
)
@pytest.mark.parametrize("gap", [0.0, GAP])
def test_without_room_at_decode_workers_the_prefill_worker_with_room_and_the_least_cost_decodes(
    offers: list[tuple[int, bool]], chosen: int | None, gap: float
) -> None:
    found = place_without_room(
        [offer(row=row, ahead=ahead, room=room, gap=gap) for row, (ahead, room) in enumerate(offers)]
    )
    assert (None if found is None else found.decode) == chosen


@pytest.mark.parametrize("others", [0, COMPARED - 1, COMPARED, 50])
def test_the_chosen_prefill_worker_is_compared_with_some_that_suit(others: int) -> None:
    loads = PrefillLoads()
    for i in range(others + 3):
        loads.join(f"{i}:1", block_size=16, now=0)
    snapshot = loads.snapshot(PrefillRequest(key=1, tokens=10), 0, avoid=(0,))
    assert snapshot is not None
    drawn = [snapshot.compared(2, lambda row: row > 2, random.Random(seed)) for seed in range(500)]
    assert {rows[0] for rows in drawn} == {2}
    assert {len(set(rows)) for rows in drawn} == {1 + min(others, COMPARED - 1)}
    assert {row for rows in drawn for row in rows[1:]} == set(range(3, others + 3)), "each may be drawn"


def seen(loads: PrefillLoads, name: str, **status: Any) -> Seen:
    worker = seen_worker(DecodeLoad(loads.join(name, block_size=16, now=0), name, 16, 1000, 64, 1000))
    worker.status = pb.WorkerStatus(**status)
    loads.reported(worker.row, worker.status, 0)
    return worker


def sharing(slower: float = 1.0) -> tuple[Fleet, list[Seen]]:
    """Two prefill workers and a decode worker, which get 5,000 tokens a second, of 20,000 that they compute
    as they report. Their steps say that they compute them in `slower` times as many seconds."""
    loads, named = PrefillLoads(), ("a:1", "b:1", "c:1")
    workers = [seen(loads, name, prefill_tokens_per_s=20_000.0, fastest_step_seconds=0.004) for name in named]
    workers[2].pool = pb.POOL_DECODE
    loads.serve(workers[2].row, False)
    for worker in workers:
        worker.load = DecodeLoad(worker.row, worker.address, 16, 10_000, 64, 10_000)
        worker.description.attention_doubles_at, worker.description.num_layers = 10**9, 32
        worker.description.max_num_batched_tokens = 8192
        worker.step_model = replace(FIXED, prompt_seconds=(0.00005 * slower, 0.4096 * slower))
        worker.status.computed_prompt_tokens = 5_000
        loads.reported(worker.row, worker.status, 1.0)
    fleet = fleet_of(loads, workers)
    fleet.now = 1.0
    return fleet, workers


@pytest.mark.parametrize("slower", [1.0, 1.5])
def test_a_split_counts_what_it_costs_others_by_the_figure_of_placement(slower: float) -> None:
    """The model of their steps, which placement counts by, may say fewer. A split counted by the report."""
    fleet, workers = sharing(slower)
    split = plan(PrefillRequest(key=1, tokens=30_000, may_split=True), NOTHING, fleet)
    assert isinstance(split, Plan)
    assert split.place == "split"
    share, alone = 0.25 * slower, split.costs["unsplit"]
    busy = dict(split.waits)
    for part in split.ranges:
        busy[part.worker] += (part.stop - part.start) / 20_000
    delayed = sum(seconds * seconds / alone for seconds in busy.values()) / 2 - alone / 2
    assert split.costs["harm"] == pytest.approx(share / (1 - share) * delayed, rel=1e-3)
    # Workers that have not decoded count with the target of the decode worker, as in their offers.
    workers[2].status.gap_target_seconds, fleet.settings = GAP, PlanSettings(overflow=False)
    harms, behind = list[float](), list[float]()
    for reservations in (0, 1):  # of another router
        for worker in workers[:2]:
            worker.load.running = reservations
        found = plan(PrefillRequest(key=1, tokens=30_000, may_split=True), NOTHING, fleet)
        assert isinstance(found, Plan)
        harms.append(found.costs["harm"])
        behind.append(pace_of(fleet, workers[0], GAP, 1).behind)
    assert behind[1] > 1.1 * behind[0]
    assert harms[1] / harms[0] == pytest.approx(behind[1] / behind[0])


def test_a_split_waits_for_prompts_that_other_routers_send_unseen() -> None:
    """In 10 ms a tenth of a prompt of 500 tokens comes. In 50 ms it is half of one, but a queue that is a
    quarter full varies by that of an M/D/1 queue: b is 1/3, so b² / 4 + b / 3 is 5/36."""
    fleet, workers = sharing()
    loads, work = fleet.loads, PrefillWork(500)
    loads.sent(0, work, 1.0)
    loads.ended(0, work, computed=True, now=1.0)

    def seconds(after: float) -> float:
        fleet.now = 1.0 + after
        split = plan(PrefillRequest(key=1, tokens=30_000, may_split=True), NOTHING, fleet)
        assert isinstance(split, Plan)
        assert len({part.worker for part in split.ranges}) == 3
        return split.costs["split"]

    alone = seconds(0.0)
    assert seconds(0.05) == alone, "this router knows of all prompts"
    for worker in workers:
        worker.status.tokens_waiting = worker.status.tokens_of_others = 100
        loads.reported(worker.row, worker.status, 1.0)
        worker.status.tokens_waiting = worker.status.tokens_of_others = 0
        loads.reported(worker.row, worker.status, 1.0)
    assert seconds(0.0) == alone
    for after, prompts in ((0.01, 0.1), (0.05, 5 / 36)):
        assert seconds(after) - alone == pytest.approx(LATEST[3] * 500 / 20_000 * math.sqrt(prompts))


@pytest.mark.parametrize(
    ("running", "decoding", "sent", "decodes"),
    [(5, 3, 0, 3), (5, 5, 0, 5), (0, 0, 4, 4), (5, 3, 4, 4)],
    ids=["two are prompts", "all decode", "they are on their way", "mine, and prompts of mine"],
)
def test_an_offer_counts_what_decodes_there(running: int, decoding: int, sent: int, decodes: int) -> None:
    loads, request = PrefillLoads(), PrefillRequest(key=1, tokens=2000)
    worker = seen(
        loads, "a:1", requests_running=running, requests_decoding=decoding, decode_context=1000 * decoding,
        prefill_tokens_per_s=20_000.0, step_seconds=0.010, gap_target_seconds=GAP,
    )  # fmt: skip
    worker.load.router_requests, worker.load.running = sent, max(sent, running)
    found = placed(fleet_of(loads, [worker]), request, worker.row, 500)
    assert (found.tokens, found.cached, found.pace.gap) == (1500, 500, GAP)
    assert found.target == pytest.approx(20 * GAP), "without a target for the first token"
    assert found.pace.decodes == decodes
    assert found.pace.context == 1000 * decodes * (decoding > 0)
    assert found.pace.model.decode(decodes, found.pace.context) == pytest.approx(0.010), "without a model"
    assert found.pace.model.prefill(1500) == pytest.approx(1500 / 20_000)
    worker.status.encode_token_seconds = 0.001
    request.images = [ImageSpan(100, 400, b"a"), ImageSpan(400, 1400, b"b")]  # the first one is cached
    assert placed(fleet_of(loads, [worker]), request, worker.row, 500).encoding == pytest.approx(1.0)
    worker.shown_images[b"b"] = 1
    assert placed(fleet_of(loads, [worker]), request, worker.row, 500).encoding == 0, "it keeps embeddings"
    worker.shown_images.clear()
    request.encoded_in = [0.1, 0.2]
    assert placed(fleet_of(loads, [worker]), request, worker.row, 500).embeddings == [], "it encodes itself"
    worker.description.image_fingerprint = "images=1"
    assert placed(fleet_of(loads, [worker]), request, worker.row, 500).embeddings == [(400, 0.2)]
    worker.step_model = H200
    fleet = fleet_of(loads, [worker], settings=PlanSettings(ttft_target=0.5))
    known = placed(fleet, request, worker.row, 500)
    assert (known.pace.model, known.target) == (H200, 0.5)


def test_an_offer_counts_what_another_worker_has_if_it_comes_sooner() -> None:
    loads, request = PrefillLoads(), PrefillRequest(key=1, tokens=2000, chunks=range(1, 32))
    asker, holder = (seen(loads, name, prefill_tokens_per_s=20_000.0) for name in ("a:1", "b:1"))
    for worker, chunks in ((asker, 7), (holder, 23)):
        worker.description.exchanges_prefixes = True
        loads.index.add(worker.row, request.chunks[:chunks])
    fleet = fleet_of(loads, [asker, holder])

    def found() -> Offer:
        source = Prefixes(fleet, request).source(asker.row)
        return placed(fleet, request, asker.row, 7 * 64, source, gap=0.02)

    known = found()
    assert (known.cached, known.load, known.pace.gap) == (23 * 64, 0.0, 0.02), "no prefix came lately"
    key = holder.description.incarnation, Tier.DEVICE
    asker.prefix_links = {key: pb.PrefixLink(wait=0.01, tokens_per_s=100_000.0)}
    sooner = found()
    assert (sooner.tokens, sooner.cached) == (2000 - 23 * 64, 23 * 64)
    assert sooner.load == pytest.approx(0.01 + 16 * 64 / 100_000)
    asker.prefix_links[key].wait = 1.0
    assert found().cached == 7 * 64, "they are computed sooner"
    asker.prefix_links.clear()
    holder.description.kv_token_bytes = 1000
    link = pb.KvLink(incarnation=holder.description.incarnation, bytes_per_s=1e8)
    fleet.links.reported(asker.row, [link], 0.0)
    assert found().load == pytest.approx(16 * 64 * 1000 / 1e8), "no prefix came so far"
    fleet.links.planned(asker.row, link.incarnation, 0.05, 0.0)
    assert found().cached == 7 * 64, "other KV comes first"


def test_kv_that_comes_later_than_the_first_token_costs_a_handover_as_much() -> None:
    prefill, decode = offer(row=1, model=FIXED, rate=1000.0), offer(model=FIXED, rate=1000.0)
    hidden = place(prefill, replace(decode, arrives=prefill.first))
    late = place(prefill, replace(decode, arrives=prefill.first + 0.5))
    assert hidden.costs == place(prefill, decode).costs
    assert late.costs["handover"] - hidden.costs["handover"] == pytest.approx(0.5)
    assert {**late.costs, "handover": 0} == {**hidden.costs, "handover": 0}, "one worker needs no link"
    assert (hidden.place, late.place) == ("handover", "decode")
    assert hidden.arrives == prefill.first, "the link is taken until then"


def test_kv_comes_behind_what_is_under_way_while_the_prompt_is_computed() -> None:
    loads, request = PrefillLoads(), PrefillRequest(key=1, tokens=2000)
    a, b = (seen(loads, name, prefill_tokens_per_s=20_000.0) for name in ("a:1", "b:1"))
    a.description.incarnation = 7
    a.description.kv_token_bytes = b.description.kv_token_bytes = 1000
    fleet = fleet_of(loads, [a, b])
    prefill = placed(fleet, request, a.row, 0)
    prefill.first = prefill.within + 2.0  # other prompts come before it

    def arrives(cached: int = 0) -> float:
        return placed(fleet, request, b.row, cached, prefill=prefill).arrives

    assert arrives() == 0, "the link was not measured lately"
    fleet.links.reported(b.row, [pb.KvLink(incarnation=7, bytes_per_s=1e6)], 0.0)
    assert arrives() == pytest.approx(2.0 + 2.0)
    assert arrives(cached=1500) == pytest.approx(2.0 + 0.5), "only what it lacks"
    for narrow, wide in ((a, b), (b, a)):
        narrow.description.kv_token_bytes, wide.description.kv_token_bytes = 500, 1000
        assert arrives() == pytest.approx(2.0 + 1.0), "in the narrower format of both"
    a.description.kv_token_bytes = b.description.kv_token_bytes = 1000
    assert placed(fleet, request, a.row, 0, prefill=prefill).arrives == 0, "no link"
    fleet.links.planned(b.row, 7, 3.0, 0.0)
    assert arrives() == pytest.approx(3.0 + 2.0), "behind what this router planned"
    fleet.links.reported(b.row, [pb.KvLink(incarnation=7, bytes_per_s=1e6, bytes_waiting=5_000_000)], 0.0)
    assert arrives() == pytest.approx(5.0 + 2.0), "behind what another router sent"
    fleet.links.reported(b.row, [], 0.0)
    assert arrives() == 0
    fleet.links.planned(b.row, 7, 9.0, 0.0)
    fleet.links.leave(b.row)


def test_a_link_that_plans_avoid_is_tried_by_one_of_them_now_and_then() -> None:
    links, link = Links(), pb.KvLink(incarnation=7, bytes_per_s=10.0)
    links.reported(1, [link], 0.0)
    assert links.arrival(1, 7, 50, 0.0) == 5.0
    now = TRY_AGAIN + 1
    links.reported(1, [link], now)
    assert links.arrival(1, 7, 50, now) == 0, "it may have been mended"
    links.planned(1, 7, 0.0, now)
    assert links.arrival(1, 7, 50, now) == now + 5, "the next request does not try it"
    link.bytes_waiting = 50
    links.reported(1, [link], 2 * now)
    assert links.arrival(1, 7, 50, 2 * now) == 2 * now + 5 + 5, "it is in use"


def test_moving_an_adapter_delays_the_request_and_all_decodes_there() -> None:
    there, away = offer(model=FIXED, decodes=2), offer(model=FIXED, decodes=2, adapter=0.05)
    assert away.first - there.first == away.within - there.within == pytest.approx(0.05)
    others = there.pace.gap_cost * 0.05
    assert away.prompt_cost - there.prompt_cost == pytest.approx(0.05 + others)
    assert away.join_cost - there.join_cost == pytest.approx(0.05 / GAP / 150 + others)
    assert offer(model=FIXED, gap=0.0, adapter=0.05).join_cost == 0, "without a target of a gap"


A = b"a" * 16
"""An adapter."""


def with_adapters(loads: PrefillLoads, name: str, *adapters: bytes, decode: bool = False) -> Seen:
    worker = seen(loads, name, adapters_on_device=adapters, adapter_move_seconds=0.05)
    if decode:
        worker.pool = pb.POOL_DECODE
    else:
        loads.serve(worker.row, True)
    return worker


def test_prompts_go_where_their_adapter_is_unless_others_are_faster() -> None:
    loads = PrefillLoads()
    workers = [with_adapters(loads, f"{i}:1", *([A] if i == 2 else [b"b" * 16])) for i in range(4)]
    fleet = fleet_of(loads, workers)

    def chosen(adapter: bytes) -> set[int]:
        requests = [PrefillRequest(key << 60, 100, adapter=adapter) for key in range(16)]
        return {fleet.policy(fleet.prefill_snapshot(x), x) for x in requests}  # type: ignore[arg-type]

    assert chosen(A) == {2}
    request = PrefillRequest(1, 100, adapter=A)
    assert [placed(fleet, request, row, 0).adapter for row in range(4)] == [0.05, 0.05, 0.0, 0.05]
    assert chosen(b"") == chosen(b"c" * 16) == {0, 1, 2, 3}, "it is on no device, or on all"
    loads.reported(2, pb.WorkerStatus(tokens_waiting=10_000, prefill_tokens_per_s=10_000.0), 0)
    assert 2 not in chosen(A), "the second of prompts ahead is longer than the move"


def test_requests_decode_where_their_adapter_is_unless_that_worker_is_much_more_loaded() -> None:
    loads = PrefillLoads()
    workers = [with_adapters(loads, f"{i}:1", *([A] if i == 2 else ()), decode=True) for i in range(4)]
    fleet, request = fleet_of(loads, workers), PrefillRequest(1, 100, adapter=A)

    def chosen(request: PrefillRequest) -> set[int]:
        return {found[0] for _ in range(32) if (found := fleet.choose_decode(request, 101))}

    assert chosen(request) == {2}
    assert len(chosen(replace(request, adapter=b""))) > 1
    assert 2 not in chosen(replace(request, avoid=["2:1"]))
    workers[2].load.reported(blocks_free=1000, running=10)  # of 64
    assert 2 not in chosen(request)
    workers[2].load.reported(blocks_free=1000, running=0)
    workers[2].load.sent(101)
    workers[2].load.ended(101, full=True)
    assert 2 not in chosen(request), "it has refused a request"


def test_a_choice_explains_itself() -> None:
    prefill, decode = offer(row=1, rate=20_000.0), offer(**DECODES)
    found = place(prefill, decode)
    assert found.attributes() == {
        "baton.place": "handover",
        "baton.ranges": "1:0-2000",
        "baton.cost_s.handover": prefill.prompt_cost + decode.join_cost + decode.decode_cost(),
        "baton.cost_s.decode": decode.prompt_cost + decode.decode_cost(),
        "baton.cost_s.prefill": prefill.prompt_cost + prefill.decode_cost(),
    }
    assert "baton.cost_s.prefill" not in place(None, decode).attributes()


CHUNKS = list(range(100, 110))


def test_the_worker_with_most_of_the_prompt_decodes_unless_it_is_much_more_loaded() -> None:
    """Workers have 100 blocks of 16 positions."""
    prefills = PrefillLoads()
    rows = [prefills.join(str(i), block_size=16, now=0.0) for i in range(3)]
    loads = [DecodeLoad(row, str(row), 16, 100, 64, blocks_free=100) for row in rows]
    fleet = fleet_of(prefills, [seen_worker(load, pb.POOL_DECODE) for load in loads])
    index = prefills.index

    def nearest(chosen: int = 0, avoid: tuple[str, ...] = ()) -> tuple[int, int]:
        return fleet.nearest(loads[chosen], PrefillRequest(1, 700, CHUNKS, avoid))

    assert nearest() == (0, 0), "nothing is cached"
    index.add(0, CHUNKS[:1])
    index.add(1, CHUNKS[:2])
    assert nearest() == (1, 128)
    index.add(2, CHUNKS)
    assert nearest() == nearest(chosen=2) == (2, 640)
    assert nearest(avoid=("2",)) == (0, 64), "it failed this request"
    loads[2].blocks_free = 91
    assert nearest() == (2, 640)
    loads[2].blocks_free = 89
    assert nearest() == (0, 64)
    loads[0].blocks_free = 80
    assert nearest() == (2, 640)
    loads[0].blocks_free, loads[2].blocks_free = 30, 43  # 688 positions
    assert nearest() == (0, 64), "it has no room"
    loads[2].blocks_free = 44
    assert nearest() == (2, 640)
    fleet.decodes.remove(loads[2])
    assert nearest() == (1, 128)
    fleet.decodes.add(loads[2])
    index.add(0, CHUNKS)
    assert nearest() == (0, 640), "it has as much"
    index.clear(0)
    index.clear(2)
    assert nearest() == (1, 128)


def test_cached_tokens_are_whole_blocks_of_the_largest_in_the_decode_pool() -> None:
    prefills = PrefillLoads()
    sizes = 16, 512
    rows = [prefills.join(str(size), block_size=size, now=0.0) for size in sizes]
    loads = [
        DecodeLoad(row, str(size), size, 100, 64, blocks_free=100)
        for row, size in zip(rows, sizes, strict=True)
    ]
    fleet = fleet_of(prefills, [seen_worker(load, pb.POOL_DECODE) for load in loads])
    prefills.index.add(0, CHUNKS)
    for _ in range(2):
        assert fleet.nearest(loads[0], PrefillRequest(1, 700, CHUNKS)) == (0, 512)
        fleet.decodes.remove(loads[1])
        assert fleet.nearest(loads[0], PrefillRequest(1, 700, CHUNKS)) == (0, 640)
        fleet.decodes.add(loads[1])


def test_a_worker_that_computes_a_range_of_a_prompt_decodes_others_only_if_no_other_has_room() -> None:
    """Beside decodes its steps are shorter, and the other workers of that prompt wait for them."""
    desk = Desk(lambda: 0.0, seed=1)
    described = pb.WorkerDescription(block_size=16, num_blocks=100, max_num_seqs=99)
    shares, decodes = (Seen(name, pool=pb.POOL_DECODE, description=described) for name in ("a:1", "b:1"))
    for worker, blocks_free in ((shares, 100), (decodes, 50)):
        worker.status.blocks_free = blocks_free
        desk.join(worker)
        desk.serve(worker.row, pb.POOL_DECODE, True)
    request = PrefillRequest(1, 700)
    split = Plan("split", (Range(9, 0, 64), Range(shares.row, 64, 128)), shares.row)
    assert desk.choose_decode(request, 700) == (shares.row, 0)
    desk.sent(b"range", shares.row, split.work(shares.row, ()))
    assert desk.choose_decode(request, 700) == (decodes.row, 0)
    assert desk.choose_decode(request, 1000) == (shares.row, 0)
    desk.ended(b"range", computed=True)
    assert desk.choose_decode(request, 700) == (shares.row, 0)
    whole = Plan("decode", (Range(shares.row, 0, 128),), shares.row)
    desk.sent(b"whole", shares.row, whole.work(shares.row, ()))
    assert desk.choose_decode(request, 700) == (shares.row, 0)


def test_a_worker_that_leaves_takes_its_open_prompts_with_it() -> None:
    """Another worker may get its row."""
    desk = Desk(lambda: 0.0, seed=1)
    described = pb.WorkerDescription(block_size=16, num_blocks=999, max_num_seqs=99)
    gone, next_one = (Seen(name, pool=pb.POOL_PREFILL, description=described) for name in ("a:1", "b:1"))
    desk.join(gone)
    desk.sent(b"attempt", gone.row, PrefillWork(700, CHUNKS))
    assert desk.uncached(CHUNKS, 700) == 60
    desk.leave(gone.row)
    desk.join(next_one)
    assert next_one.row == gone.row
    assert (desk.uncached(CHUNKS, 700), desk.loads.router_tokens(next_one.row)) == (700, 0)
    with pytest.raises(KeyError):
        desk.ended(b"attempt", computed=True)


@given(
    st.integers(1, 10_000), st.integers(0, 200_000), st.integers(0, 50_000), st.integers(0, 50_000),
    st.integers(0, 60), st.integers(0, 60),
)  # fmt: skip
def test_a_longer_prefill_queue_favours_overflow_and_more_work_at_decode_disfavours_it(
    tokens: int, queue: int, waiting: int, more: int, there: int, here: int
) -> None:
    def at_decode(queue: int, waiting: int) -> bool:
        prefill = offer(tokens, 1, ahead=queue, decodes=there, context=2000.0 * there)
        decode = offer(tokens, ahead=waiting, decodes=here, context=2000.0 * here)
        return place(prefill, decode).place == "decode"

    if at_decode(queue, waiting):
        assert at_decode(queue + more, waiting)
    else:
        assert not at_decode(queue, waiting + more)


@pytest.mark.parametrize(("there", "returns"), [(3, True), (4, False), (5, False)])
def test_a_stream_returns_where_fewer_others_decode_than_beside_it(there: int, returns: bool) -> None:
    """It counts at no worker meanwhile, so two streams do not change places."""
    desk = Desk(lambda: 0.0, PlanSettings(ttft_target=1e6), seed=1)
    slower = StepModel((1, 256), (0.010, 2.560), 0.0, (1, 8192), (0.0001, 0.8192), 0.0, 0.0)
    described = pb.WorkerDescription(block_size=16, num_blocks=999, max_num_seqs=99)
    status = pb.WorkerStatus(blocks_free=999, gap_target_seconds=0.02)
    for address, decodes in (("a", 5), ("b", there)):
        worker = Seen(address, pool=pb.POOL_DECODE, description=described, status=status)
        worker.step_model = slower
        desk.join(worker)
        desk.serve(worker.row, pb.POOL_DECODE, True)
        for _ in range(decodes):
            desk.reserved(worker.row, 100)
    before = [replace(worker.load) for worker in desk.workers.values()]
    planned = desk.returns(PrefillRequest(key=1, tokens=64, answer=100), 0, 100)
    assert (None if planned is None else planned.decode) == (1 if returns else None)
    assert [worker.load for worker in desk.workers.values()] == before
