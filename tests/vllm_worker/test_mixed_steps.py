"""How vLLM's steps with decodes are bounded, and what is said of their costs."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from baton.engine.api.stats import StepStats
from baton.engine.core.meters import LEAST, MIXED_STEPS
from baton.router.policy.decode import DecodeLoad
from baton.router.policy.fleet import Seen
from baton.router.policy.pace import Pace
from baton.router.policy.placement import TTFT_GAPS, Offer
from baton.router.policy.plan import Plan
from baton.router.policy.planner import NOTHING, plan
from baton.router.policy.prefill import PrefillRequest
from baton.router.policy.prefill_loads import PrefillLoads, PrefillWork
from baton.router.workers.checks import step_model
from baton.rpc import worker_pb2 as pb
from baton.vllm_worker.mixed_steps import ALIKE, NOT_ENCODED, Bounds, MixedSteps
from baton.vllm_worker.stats import Load
from baton.worker.service_process.status import reported_step_model, same_names
from tests.router.fleets import fleet_of, seen_worker

STEP, TOKEN = 0.010, 0.0001
MOST = 2048

COSTLY = 1e9
"""Gaps that cost so much leave prompts as much time as decodes take, or the gap target."""


def requested(
    request_id: str, prompt: int, left: int, *, runs: bool = True, most: int = 100, priority: float = 0,
    **params: Any,
) -> Any:  # fmt: skip
    """As vLLM's Request. `prompt`: tokens of the prompt. `left`: those that are in no step yet."""
    tokens = max(prompt, 1)
    return SimpleNamespace(
        request_id=request_id, num_prompt_tokens=prompt, num_computed_tokens=tokens - left,
        num_tokens_with_spec=tokens, num_output_placeholders=0, max_tokens=most, priority=priority,
        status=SimpleNamespace(name="RUNNING" if runs else "WAITING"), kv_transfer_params=params,
    )  # fmt: skip


class VLLM:
    """Computes prompts as the bounds allow, beside requests that decode.

    Attributes:
        decoding: ids of these, with the tokens that they have, and their gap costs.
        waiting: requests whose KV comes, and prefixes.
        slow: seconds in which a step with a chunk is launched.
    """

    def __init__(self, usual: int = 0, target: float | None = None, graph: int = 0, chunk: int = 0) -> None:
        self.now = self.slow = 0.0
        self.steps = MixedSteps(usual, MOST, target, graph=graph, chunk=chunk)
        self.left: dict[str, int] = {}
        self.total: dict[str, int] = {}
        self.params: dict[str, dict[str, Any]] = {}
        self.begun, self.priorities = set[str](), dict[str, float]()
        self.decoding: dict[str, tuple[int, float]] = {}
        self.waiting: list[Any] = []

    def ask(
        self, request_id: str, tokens: int, within: float = math.inf, *, priority: float = 0,
        gap_cost: float = COSTLY, cached: int = 0,
    ) -> None:  # fmt: skip
        """The request ends with its first token."""
        uncached = tokens - cached
        self.left[request_id], self.total[request_id] = uncached, tokens
        self.params[request_id] = {"due": self.now + within, "gap_cost": gap_cost, "uncached": uncached}
        self.priorities[request_id] = priority

    def decodes(self, request_id: str, gap_cost: float = COSTLY) -> None:
        self.decoding[request_id] = 100, gap_cost

    def comes(self, request_id: str) -> None:
        self.waiting.append(requested(request_id, 100, 100, runs=False, gap_cost=COSTLY, decode_id=""))

    def bound(self) -> Bounds:
        requests = [requested(x, n, 1, gap_cost=cost) for x, (n, cost) in self.decoding.items()]
        for name, left in self.left.items():
            runs, tokens = name in self.begun, self.total[name]
            left, priority = left if runs else tokens, self.priorities[name]
            requests.append(requested(name, tokens, left, runs=runs, priority=priority, **self.params[name]))
        bounds = self.steps.bound(self.now, [*requests, *self.waiting])
        assert bounds is not None
        return bounds

    def step(self) -> dict[str, int]:
        """Returns the tokens of each prompt in the step."""
        (budget, most), waiting = self.bound(), len(self.waiting)
        counts = dict.fromkeys(self.decoding, 1)
        budget -= len(counts)
        order = [x for x in self.left if x in self.begun]
        if self.steps.may_begin:
            order += sorted((x for x in self.left if x not in self.begun), key=self.priorities.__getitem__)
        for request_id in order:
            if request_id not in self.begun:  # those that wait come first
                budget, waiting = budget - waiting, 0
            if count := min(self.left[request_id], most or budget, budget):
                counts[request_id] = count
                budget -= count
        assert budget >= waiting, "there is a token for each"
        computed = {x: self.total[x] - left for x, left in self.left.items()}
        computed |= {x: tokens for x, (tokens, _) in self.decoding.items()}
        for request_id, count in counts.items():
            self.steps.scheduled(request_id, computed[request_id], count)
        number, chunks = self.steps.begins(self.now), {x: n for x, n in counts.items() if x in self.left}
        self.begun |= chunks.keys()
        seconds = STEP * bool(self.decoding) + TOKEN * sum(chunks.values())
        self.now += max(seconds, self.slow) if chunks and self.decoding else seconds
        self.steps.over(number, self.now)
        for request_id, count in chunks.items():
            self.left[request_id] -= count
            if not self.left[request_id]:
                self.end(request_id)
        return chunks

    def end(self, request_id: str) -> None:
        self.left.pop(request_id, None)
        self.decoding.pop(request_id, None)
        self.begun.discard(request_id)

    def learned(self, gap_cost: float = COSTLY) -> VLLM:
        """It knows its costs, and decodes a request."""
        self.ask("l", MOST, gap_cost=gap_cost)
        while self.left:
            self.step()
        self.decodes("d", gap_cost)
        for _ in range(ALIKE):
            self.step()
        return self


def test_a_step_without_decodes_has_vllms_own_bound() -> None:
    vllm = VLLM(usual=512)
    vllm.ask("a", 700)
    assert vllm.step() == {"a": 512}
    assert vllm.step() == {"a": 188}
    assert vllm.bound() == (512, 512)


def test_prompts_are_computed_one_after_another() -> None:
    """Side by side each would be as late as the last one."""
    vllm = VLLM(usual=512)
    for name, tokens in {"a": 900, "b": 300, "c": 100, "d": 2000}.items():
        vllm.ask(name, tokens)
    steps = [vllm.step() for _ in range(4)]
    assert steps == [{"a": 512}, {"a": 388, "b": 124}, {"b": 176, "c": 100, "d": 236}, {"d": 512}]


def test_without_a_bound_of_vllm_a_step_ends_with_the_first_prompt() -> None:
    """As far as its other tokens are known to be cached. Small prompts share a step."""
    vllm = VLLM()
    vllm.ask("a", 1500, cached=600)
    vllm.ask("b", 700)
    assert vllm.step() == {"a": 900}
    vllm.ask("c", 700)
    assert vllm.step() == {"b": 700}
    for name, tokens in {"d": 200, "e": 300}.items():
        vllm.ask(name, tokens)
    vllm.left["c"] = 10
    assert vllm.step() == {"c": 10, "d": 200, "e": 300}


def test_the_first_prompt_is_the_one_that_vllm_takes_first() -> None:
    vllm = VLLM()
    vllm.ask("a", 1500)
    vllm.ask("b", 700, priority=-1)
    vllm.waiting.append(requested("pin", 2, 2, runs=False, priority=-2, pin_id="00"))
    assert vllm.step() == {"b": 700}
    assert vllm.step() == {"a": 1500}


def test_a_request_of_one_token_never_decodes() -> None:
    """vLLM may not know yet that it has ended."""
    vllm = VLLM(usual=512).learned()
    vllm.end("d")
    ended = requested("p", 100, 1, most=1)
    assert vllm.steps.bound(vllm.now, [ended]) == (512, 512)


def test_a_prompt_of_a_lower_priority_number_waits_for_no_other() -> None:
    """It shares the bound with a prompt that has begun."""
    vllm = VLLM(usual=512)
    vllm.ask("long", 100_000)
    assert vllm.step() == {"long": 512}
    vllm.ask("alike", 300)
    for name in ("first", "second"):
        vllm.ask(name, 300, priority=-1)
    steps = [vllm.step() for _ in range(3)]
    assert steps == [
        {"long": 256, "first": 256},
        {"long": 256, "first": 44, "second": 212},
        {"long": 256, "second": 88, "alike": 168},
    ]


def test_no_prompt_begins_in_the_place_of_a_request_whose_kv_comes() -> None:
    """Nor in that of a prefix, which vLLM must find in the step to fetch it."""
    vllm = VLLM(usual=512)
    vllm.ask("a", 2000)
    assert vllm.step() == {"a": 512}
    vllm.ask("b", 100)
    vllm.waiting.append(requested("prefix", 1000, 1000, runs=False, chunks=["00"]))
    assert vllm.bound() == (513, 512)
    assert vllm.step() == {"a": 512}
    vllm.comes("e")
    bounds = vllm.bound()
    assert bounds.step == bounds.prompt + 2
    assert [*vllm.step()] == ["a"]


def test_no_prompt_begins_while_a_step_without_a_graph_is_computed() -> None:
    """To launch another takes so long that the end of that step is heard late."""
    vllm = VLLM(graph=600)
    for name in "ab":
        vllm.ask(name, 700)
    vllm.bound()
    vllm.steps.scheduled("a", 0, 700)
    number = vllm.steps.begins(vllm.now)
    vllm.bound()
    assert not vllm.steps.may_begin
    vllm.steps.over(number, vllm.now + 1.0)
    vllm.bound()
    assert vllm.steps.may_begin


def test_steps_that_are_measured_begin_all_prompts() -> None:
    """Also if the last step before them might begin none."""
    vllm = VLLM(usual=512)
    vllm.ask("a", 512)
    vllm.step()
    vllm.ask("b", 1024)
    vllm.step()
    vllm.step()
    assert not vllm.steps.may_begin
    vllm.steps.measure(0, "prompts")
    vllm.ask("c", 100)
    assert vllm.step() == {"c": 100}


def test_a_step_with_decodes_takes_as_long_as_the_targets_allow() -> None:
    vllm = VLLM().learned()
    short = STEP * math.sqrt(3.5)
    vllm.ask("a", 1000)
    before = vllm.now
    vllm.step()
    assert vllm.now - before == pytest.approx(short, rel=0.05), "no prompt is late"
    vllm.ask("b", 1000, within=0.0)
    before, counts = vllm.now, vllm.step()
    assert vllm.now - before == pytest.approx(3.5 * STEP, rel=0.3), "a late prompt"
    assert [*counts] == ["a"], "the prompt before it takes the whole bound"
    left = vllm.left["a"]
    vllm.end("d")
    assert vllm.step() == {"a": left}, "nothing decodes"


def test_a_prompt_beside_decodes_whose_gaps_cost_nothing_does_not_wait_for_its_due_time() -> None:
    """Those of the only worker of a cluster."""
    seconds = list[float]()
    for within in (1e9, 0.0):
        vllm = VLLM().learned(gap_cost=0.0)
        vllm.ask("a", 1000, within, gap_cost=0.0)
        before = vllm.now
        while "a" in vllm.left:
            vllm.step()
        seconds.append(vllm.now - before)
    assert seconds[0] == seconds[1]


def test_a_target_in_seconds_is_kept() -> None:
    vllm = VLLM(target=0.02).learned()
    vllm.ask("a", 1000, within=0.0)
    for _ in range(5):
        assert vllm.step() == {"a": pytest.approx(100, abs=6)}
    assert vllm.step() == {"a": pytest.approx(100, abs=3)}


def test_requests_whose_kv_comes_count_as_decodes() -> None:
    vllm = VLLM()
    vllm.comes("d")
    vllm.ask("a", 1000)
    assert vllm.step() == {"a": LEAST}


def test_the_token_behind_a_prefix_that_came_is_no_decode() -> None:
    """It reads a long context, and the request ends with it."""
    contexts = list[int]()
    for prefixes in (0, 1):
        vllm = VLLM().learned()
        for _ in range(prefixes):
            vllm.steps.scheduled("prefix", 50_000, 1)
        vllm.step()
        vllm.bound()
        [said] = vllm.steps.news()
        contexts.append(said.decode_context)
    assert contexts == [101, 101]


def test_after_many_mixed_steps_one_has_a_token_of_each_prompt() -> None:
    vllm = VLLM().learned()
    vllm.ask("a", 100_000)
    counts = [vllm.step()["a"] for _ in range(MIXED_STEPS + 2)]
    assert counts[MIXED_STEPS] == 1
    vllm = VLLM().learned()
    vllm.ask("a", 100_000)
    for _ in range(MIXED_STEPS):
        vllm.step()
    vllm.end("d")
    vllm.comes("e")
    assert vllm.step()["a"] > 1, "no decode runs"
    assert min(counts[:MIXED_STEPS]) > 1
    assert counts[-1] > 1


def test_a_prompt_goes_on_where_vllm_computes_whole_blocks() -> None:
    """Of states in a prefix cache. The block is larger than what targets and graphs allow."""
    vllm = VLLM(target=0.02, graph=256, chunk=544).learned()
    vllm.ask("a", 1000)
    assert vllm.step() == {"a": 544}
    assert vllm.step() == {"a": 456}, "the rest is no whole block"
    vllm = VLLM(usual=256, chunk=544)
    vllm.ask("a", 1000)
    assert vllm.step() == {"a": 544}
    vllm.ask("b", 1000, priority=-1)
    assert vllm.step() == {"a": 456, "b": 544}


def test_a_preempted_request_goes_on_where_vllm_computes_whole_blocks() -> None:
    """It computes its prompt and its output again, also one whose KV had come."""
    vllm = VLLM(target=0.02, graph=256, chunk=544).learned()
    request = requested("p", 1001, 1001, runs=False, decode_id="")
    request.status.name = "PREEMPTED"
    decode = requested("d", 100, 1, gap_cost=COSTLY)
    bounds = vllm.steps.bound(vllm.now, [decode, request])
    assert bounds == (545, 544)
    assert vllm.steps.may_begin


def test_a_prompt_with_a_cached_prefix_leaves_time_to_others() -> None:
    """Fewer tokens than a step has room for wait before it is due."""
    counts = list[dict[str, int]]()
    for cached in (0, 960):
        vllm = VLLM().learned()
        vllm.ask("a", 1000, cached=cached, within=0.06)
        vllm.ask("b", 1000)
        counts.append(vllm.step())
    assert counts[0]["a"] > 100
    assert counts[1]["a"] == 40
    assert 0 < counts[1]["b"] < 100


def test_a_prompt_of_few_tokens_alone_shows_no_speed() -> None:
    """vLLM may have compiled functions for it, for seconds."""
    steps = MixedSteps(0, MOST, None)
    for tokens, seconds in ((2, 5.0), (MOST, MOST * TOKEN)):
        steps.bound(0.0, [requested("a", tokens, tokens)])
        steps.scheduled("a", 0, tokens)
        steps.over(steps.begins(10.0 * tokens), 10.0 * tokens + seconds)
    [costs] = steps.news()
    assert costs.prefill_tokens_per_s == pytest.approx(1 / TOKEN)
    assert costs.step_seconds == pytest.approx(MOST * TOKEN)


def test_a_decode_with_its_drafts_is_no_prompt() -> None:
    """vLLM's bound holds for decodes, too, and vLLM dies if it cuts the first drafts of a request off."""
    steps = MixedSteps(0, MOST, None, drafts=3)
    comes = requested("handed over", 100, 100, runs=False, decode_id="")
    assert steps.bound(0.0, [comes]) == (4 + LEAST, LEAST)

    clock = itertools.count()

    def fastest(*scheduled: tuple[str, int, int]) -> float:
        """Of the steps that only decoded, after many such steps."""
        for _ in range(ALIKE):
            steps.bound(0.0, [requested("prompt", 6, 6), requested("handed over", 100, 4)])
            for each in scheduled:
                steps.scheduled(*each)
                now = next(clock) * STEP
                steps.over(steps.begins(now), now + STEP)
        return steps.news()[0].fastest_step_seconds

    assert fastest(("prompt", 0, 4), ("prompt", 4, 2)) == 0.0
    assert fastest(("handed over", 100, 4)) == pytest.approx(STEP)


def test_costs_are_said_once() -> None:
    vllm = VLLM()
    assert vllm.steps.news() == [StepStats(mixed_step_tokens=MOST)]
    vllm = vllm.learned()
    [costs] = vllm.steps.news()
    assert costs.fastest_step_seconds == pytest.approx(STEP)
    assert costs.prefill_tokens_per_s == pytest.approx(1 / TOKEN)
    long = 3.5 * STEP
    assert costs.long == (pytest.approx(250, rel=0.1), pytest.approx(long, rel=0.01))
    assert costs.step_table is not None
    assert costs.step_table.step(1, 101) == pytest.approx(STEP)
    assert costs.step_table.prompt(MOST) == pytest.approx(MOST * TOKEN, rel=0.01)
    assert (costs.step_factors, costs.decode_context) == ((1, 1), 101)
    assert vllm.steps.news() == []


def test_the_model_of_steps_is_learned_from_mixed_steps_too() -> None:
    vllm = VLLM(target=0.05).learned()
    vllm.ask("a", 5_000, within=0.0)
    while vllm.left:
        vllm.step()
    model = vllm.steps._meters.model
    assert model is not None
    assert model.step(1, 101, 300, 1_000) == pytest.approx(STEP + 300 * TOKEN, rel=0.1)


def test_without_chunks_no_prompt_fits_beside_decodes() -> None:
    steps = MixedSteps(0, 0, None)
    for tokens in (1, 1000, 1000):
        steps.bound(0.0, [requested("d", 1000, tokens)])
        steps.scheduled("d", 0, tokens)
        steps.over(steps.begins(0.0), 1.0)
    assert steps.bound(2.0, []) is None
    [costs] = steps.news()
    assert costs.long.tokens == 0


def test_a_step_begins_when_the_one_before_is_over() -> None:
    """vLLM schedules it before that."""
    steps = MixedSteps(0, MOST, None)
    began = [begin(steps, 100, at) for at in (0.0, 0.001, 0.002)]
    for i, number in enumerate(began, 1):
        steps.over(number, i * STEP)
    for i in range(4, 10):
        began.append(begin(steps, 0, (i - 2) * STEP))
        began.append(begin(steps, 1, (i - 1) * STEP))
        late = 0.3 * STEP * (i % 2)
        steps.over(began[-2], (i - 0.6) * STEP)  # no step: it says nothing
        steps.over(began[-1], i * STEP + late)
    [costs] = steps.news()
    assert costs.fastest_step_seconds == pytest.approx(STEP, rel=0.05), "one that ended late says little"


def begin(steps: MixedSteps, computed: int, now: float) -> int:
    """A request decodes, unless it has computed no token: then nothing does."""
    if computed:
        steps.bound(now, [requested("d", 100, 1)])
        steps.scheduled("d", computed, 1)
    return steps.begins(now)


@pytest.mark.parametrize("graph", [0, 120])
def test_a_prompt_beside_decodes_takes_as_long_as_routers_expect(graph: int) -> None:
    """Beside decodes that were handed over, too: steps have no bound that routers do not know."""
    vllm = VLLM(graph=graph).learned()
    vllm.decodes("e")
    vllm.step()
    vllm.bound()
    [costs] = vllm.steps.news()
    assert costs.step_table is not None
    pace = Pace(
        costs.step_table.corrected(*costs.step_factors), costs.gap_target_seconds, 2, costs.decode_context,
        costs.gap_cost, largest=costs.mixed_step_tokens,
    )  # fmt: skip
    expected = Offer(0, PrefillRequest(key=1, tokens=4_000), 1.0, pace).within
    begins = vllm.now
    vllm.ask("a", 4_000, within=0.0)
    while vllm.left:
        vllm.step()
    assert vllm.now - begins == pytest.approx(expected, rel=0.15)


def test_steps_with_decodes_fit_into_the_largest_graph() -> None:
    vllm = VLLM(graph=60).learned()
    [costs] = vllm.steps.news()
    assert (costs.long.tokens, costs.mixed_step_tokens) == (60, 60), "routers expect no more"
    vllm.ask("a", 1000, within=0.0)
    assert vllm.step() == {"a": 59}
    vllm.ask("b", 1000)
    vllm.comes("e")
    assert vllm.step() == {"a": 58}
    vllm.end("d")
    vllm.waiting.clear()
    assert vllm.step() == {"a": 883}
    vllm = VLLM(graph=60).learned()
    for i in range(60):
        vllm.decodes(f"d{i}")
    vllm.ask("a", 1000)
    assert vllm.step()["a"] >= LEAST, "decodes alone are more"


def test_a_chunk_computes_at_least_as_long_as_its_launch_takes() -> None:
    """A step with a chunk takes 50 ms or more. Its decodes and 400 tokens need that time, too."""
    vllm = VLLM(target=0.02).learned()
    vllm.slow = 5 * STEP
    vllm.ask("a", 10_000)
    chunks = [vllm.step()["a"] for _ in range(20)]
    assert chunks[0] < 100, "what the target allows"
    assert chunks[-1] == pytest.approx(200, rel=0.1), "as many tokens as compute half of the time"


@pytest.mark.parametrize(("ahead", "computes"), [(0, "p"), (200_000, "d")])
def test_routers_place_prompts_beside_decodes_by_what_vllms_steps_cost(ahead: int, computes: str) -> None:
    """An idle prefill worker computes the prompt. If prompts queue there, the decode worker does, in steps
    that still meet the gap target."""
    vllm = VLLM(target=4 * STEP).learned()
    vllm.ask("a", 1000, within=0.0)
    while vllm.left:
        vllm.step()
    assert placed(vllm, ahead) == computes


@pytest.mark.parametrize(("slow", "computes"), [(0.0, "d"), (5 * STEP, "p")])
def test_prompts_stay_away_from_decodes_beside_which_they_cost_much_more(slow: float, computes: str) -> None:
    """Steps with chunks are launched slowly there: routers see it in the model of steps."""
    vllm = VLLM(target=4 * STEP).learned()
    vllm.slow = slow
    vllm.ask("a", 20_000, within=0.0)
    while vllm.left:
        vllm.step()
    assert placed(vllm, 5_000) == computes


def placed(vllm: VLLM, ahead: int) -> str:
    """Returns who computes a prompt: a prefill worker with prompts `ahead`, or this worker, which decodes."""
    [costs] = vllm.steps.news()
    loads, workers = PrefillLoads(), list[Seen]()
    for name, pool, decodes in (("p", pb.POOL_PREFILL, 0), ("d", pb.POOL_DECODE, 1)):
        prefills = pool == pb.POOL_PREFILL
        row = loads.join(name, block_size=16, now=0.0, serving=prefills)
        load = DecodeLoad(row, name, 16, 10_000, max_running=8)
        load.reported(blocks_free=10_000, running=decodes)
        status = pb.WorkerStatus(
            requests_running=decodes, requests_decoding=decodes, blocks_free=10_000, blocks_spare=10_000,
            blocks_total=10_000, step_model=reported_step_model(Load(costs=costs).stats(10_000, [])),
            **same_names(pb.WorkerStatus, costs) | {"gap_cost": decodes * TTFT_GAPS / 150},
        )  # fmt: skip
        seen = seen_worker(load, pool, status=status, step_model=step_model(status.step_model))
        assert seen.step_model is not None
        seen.description.max_num_batched_tokens = MOST
        loads.reported(row, status, 0.0, alone=prefills)
        workers.append(seen)
    if ahead:
        loads.sent(workers[0].row, PrefillWork(ahead), 0.0)
    found = plan(PrefillRequest(key=1, tokens=1000, answer=150), NOTHING, fleet_of(loads, workers))
    assert isinstance(found, Plan)
    return workers[found.ranges[0].worker].address


def test_steps_with_images_say_what_images_cost() -> None:
    """And not what a step costs, so bounds stay as they are."""
    vllm = VLLM().learned()
    bound, costs = vllm.bound(), vllm.steps.news()
    vllm.steps.bound(vllm.now, [requested("i", 300, 300), requested("d", 100, 1, gap_cost=COSTLY)])
    for decodes in (False, True):
        for _ in range(20):
            vllm.steps.scheduled("i", 0, 300)
            vllm.steps.encodes(200)
            if decodes:
                vllm.steps.scheduled("d", 100, 1)
            number = vllm.steps.begins(vllm.now)
            vllm.now += STEP * decodes + 300 * TOKEN + 200 * 0.005
            vllm.steps.over(number, vllm.now)
    encoder = vllm.steps.encoder(40, 40 * 200)
    assert encoder.encode_token_seconds == pytest.approx(0.005, rel=0.01)
    assert encoder.seconds == pytest.approx(40 * 200 * 0.005, rel=0.01)
    assert vllm.bound() == bound
    assert costs
    assert not vllm.steps.news()


def test_images_have_no_costs_until_those_of_tokens_are_known() -> None:
    vllm = VLLM()
    vllm.steps.bound(vllm.now, [requested("i", 300, 300)])
    vllm.steps.scheduled("i", 0, 300)
    vllm.steps.encodes(200)
    vllm.steps.over(vllm.steps.begins(vllm.now), vllm.now + 1.0)
    assert vllm.steps.encoder(0, 0) == NOT_ENCODED


def test_steps_whose_end_is_said_together_say_nothing() -> None:
    """If all requests of a step are aborted, vLLM reports its end with that of the next step."""
    vllm = VLLM().learned()
    [costs] = vllm.steps.news()
    vllm.steps.bound(vllm.now, [requested("p", 1000, 1000), requested("d", 100, 1, gap_cost=COSTLY)])
    for request_id, computed, count in (("d", 100, 1), ("p", 0, 1_000)):
        vllm.steps.scheduled(request_id, computed, count)
        number = vllm.steps.begins(vllm.now)
    vllm.now += 0.5
    vllm.steps.over(number, vllm.now)
    [after] = vllm.steps.news()  # the context of decodes has changed
    assert replace(after, decode_context=costs.decode_context) == costs
