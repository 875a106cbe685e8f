"""Which requests vLLM gets at its start, and what `mixed_steps` learns from their steps."""

import random
from typing import Any

import pytest

from baton.engine.core.meters import LONG
from baton.simulator.steps import H200_8B
from baton.steps.step_model import StepModel
from baton.vllm_worker.chosen_steps import CONTEXTS, DECODES, PROMPT, Chosen, Round, rounds
from baton.vllm_worker.mixed_steps import Bounds, MixedSteps
from tests.vllm_worker.test_mixed_steps import requested

SIZES: dict[str, Any] = {
    "seats": 256, "budget": 8192, "graph": 512, "longest": 49152, "block": 16, "room": 400_000,
}  # fmt: skip
SLOW_LAUNCH = 0.012
"""Seconds that a step beyond the largest graph is launched longer."""


SIDE = Chosen(-1, PROMPT, 1 << 16)
"""Decodes beside the prompts of a round."""


class VLLM:
    """Computes rounds as vLLM does: all that fits into a step, and prompts in chunks beside decodes."""

    def __init__(self, compiles: float = 0.0, noise: float = 0.0, fixed: float = 0.0) -> None:
        """`compiles`: seconds more of a step with so many decodes and prompt tokens as none before. `noise`:
        share by which a step takes more or less. `fixed`: seconds more of each step with prompts."""
        self.fixed = fixed
        self.noise, self._random = noise, random.Random(0)
        self.compiles = compiles
        self.now = 0.0
        self.steps = MixedSteps(0, SIZES["budget"], None, graph=SIZES["graph"])
        self._seen: set[tuple[int, int]] = set()

    def seconds(self, decodes: int, context: int, chunks: list[tuple[int, int]]) -> float:
        """`chunks`: tokens, and the position of the first."""
        rows = decodes + sum(tokens for tokens, _ in chunks)
        slower = SLOW_LAUNCH * (rows > SIZES["graph"]) + self.fixed * bool(chunks)
        return H200_8B.step(decodes, context, chunks) + slower

    def measure(self, chosen: list[Round]) -> None:
        cached: dict[int, int] = {}
        for number, (counts, requests) in enumerate(chosen):
            self.steps.measure(number, counts)
            computed: dict[Chosen, int] = {}
            if counts == "mixed":
                self._come(computed, {SIDE: 0})
                self._step(computed)
            self._come(
                computed, {each: min(cached.get(each.number, 0), each.tokens - 1) for each in requests}
            )
            while computed.keys() - {SIDE}:
                self._step(computed)
            cached |= {each.number: each.tokens for each in requests}
        self.steps.measure(len(chosen), None)

    def _come(self, computed: dict[Chosen, int], cached: dict[Chosen, int]) -> None:
        computed |= cached

    def _step(self, computed: dict[Chosen, int]) -> None:
        """`computed`: tokens of each request."""
        left, most = self._bound(computed)
        decodes = context = 0
        chunks: list[tuple[int, int]] = []
        for each, start in [*computed.items()]:
            count = 1 if start >= each.tokens else min(each.tokens - start, most or left, left)
            left -= count
            self.steps.scheduled(str(each), start, count)
            computed[each] += count
            if start >= each.tokens:
                decodes, context = decodes + 1, context + start
            elif count:
                chunks.append((count, start))
        number, size = self.steps.begins(self.now), (decodes, sum(tokens for tokens, _ in chunks))
        seconds = self.seconds(decodes, context, chunks) * self._random.uniform(
            1 - self.noise, 1 + self.noise
        )
        self.now += seconds + self.compiles * (size not in self._seen)
        self._seen.add(size)
        self.steps.over(number, self.now)
        for each, end in [*computed.items()]:
            if end >= each.tokens + each.answer - 1:
                del computed[each]

    def _bound(self, computed: dict[Chosen, int]) -> Bounds:
        requests = [
            requested(str(x), x.tokens, max(1, x.tokens - start), most=x.answer)
            for x, start in computed.items()
        ]
        bounds = self.steps.bound(self.now, requests)
        assert bounds is not None
        return bounds

    @property
    def learned(self) -> StepModel:
        [costs] = self.steps.news()
        assert costs.step_table is not None
        return costs.step_table


def test_steps_cost_what_is_measured() -> None:
    """Those of agents: beside decodes with long contexts up to the largest graph, and prompts alone."""
    vllm = VLLM()
    vllm.measure(rounds(**SIZES))
    model = vllm.learned
    assert model.rows == (1, 2, 4, 8, 16, 32, 64, 128, 256)
    assert model.tokens == (16, 32, 64, 128, 256, 512), "larger steps are no faster"
    for rows, context, tokens, position in (
        (1, 100, 0, 0), (24, 2_000, 0, 0), (4, 60_000, 0, 0), (24, 370_000, 0, 0), (8, 800, 100, 0),
        (8, 120_000, 400, 8_000), (24, 370_000, 480, 8_000), (0, 0, 512, 4_000),
    ):  # fmt: skip
        chunks = [(tokens, position)] if tokens else []
        right = vllm.seconds(rows, context, chunks)
        assert model.step(rows, context, tokens, position) == pytest.approx(right, rel=0.1), (rows, tokens)
    assert vllm.steps.bound(vllm.now, []) == (512, 512)
    in_steps = sum(vllm.seconds(0, 0, [(512, start)]) for start in range(0, 8_192, 512))
    assert model.prefill(8_192) == pytest.approx(in_steps, rel=0.1)


def test_prompts_have_large_steps_where_those_are_faster() -> None:
    """Experts are read by each step."""
    vllm = VLLM(fixed=0.01)
    vllm.measure(rounds(**SIZES))
    assert vllm.learned.tokens == (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
    assert vllm.steps.bound(vllm.now, [requested("p", 6_000, 6_000, runs=False)]) == (6_000, 6_000)


def test_steps_that_compiled_are_forgotten() -> None:
    fast, slow = VLLM(), VLLM(compiles=3.0)
    for vllm in (fast, slow, slow):
        vllm.measure(rounds(**SIZES))
    found, right = slow.learned, fast.learned
    assert found.decode_seconds == pytest.approx(right.decode_seconds)
    assert found.prompt_seconds == pytest.approx(right.prompt_seconds)


def test_small_contexts_say_nothing_of_what_the_context_costs() -> None:
    """They grow by a few positions, and steps differ by more than what these cost."""
    noisy, right = VLLM(noise=0.03), VLLM()
    for each in (noisy, right):
        each.measure(rounds(**SIZES))
    assert noisy.learned.context_seconds == pytest.approx(right.learned.context_seconds, rel=0.2)


def test_the_table_stays_and_factors_follow() -> None:
    vllm = VLLM()
    vllm.measure(rounds(**SIZES))
    table = vllm.learned
    vllm.steps.bound(vllm.now, [requested("d", 100, 1, gap_cost=1.0)])
    for i in range(100):
        vllm.steps.scheduled("d", 99 + i, 1)
        number = vllm.steps.begins(vllm.now)
        vllm.now += 1.5 * table.step(1, 100 + i)
        vllm.steps.over(number, vllm.now)
    [costs] = vllm.steps.news()
    assert costs.step_table == table
    assert costs.step_factors[0] == pytest.approx(1.5, rel=0.05)
    assert costs.gap_target_seconds == pytest.approx(LONG * table.decode_seconds[0])
    vllm.now += 100 * table.step(1, 200)  # nothing runs
    vllm.steps.bound(vllm.now, [requested("e", 100, 100)])
    vllm.steps.scheduled("e", 0, 100)
    vllm.steps.begins(vllm.now)
    [costs] = vllm.steps.news()
    assert costs.step_factors == (1, 1), "what made it slow may be over"


def test_routers_are_told_when_all_is_measured() -> None:
    vllm = VLLM()
    vllm.steps.measure(0, "prompts")
    vllm.steps.bound(0.0, [requested("p", 512, 512)])
    vllm.steps.scheduled("p", 0, 512)
    vllm.steps.over(vllm.steps.begins(0.0), 0.1)
    assert not vllm.steps.news()


@pytest.mark.parametrize(
    ("changes", "most_rows", "contexts", "longest"),
    [
        ({}, 256, CONTEXTS, 10_240),
        ({"seats": 1}, 1, 1, 10_240),
        ({"longest": 9_000}, 256, CONTEXTS, 8_192),
        ({"longest": 4_096}, 256, CONTEXTS, 4_096 - DECODES),
        ({"room": 20_000}, 256, 9, 10_240),
        ({"room": 19_008, "block": 1_056}, 18, 6, 10_240),
        ({"room": 4_992}, 104, 2, 4_992),
        ({"room": 1_600}, 33, 0, 1_600),
        ({"room": 160}, 3, 0, 159),
    ],
)
def test_no_round_needs_more_than_there_is(
    changes: dict[str, int], most_rows: int, contexts: int, longest: int
) -> None:
    sizes = SIZES | changes
    found = rounds(**sizes)
    together = [each.requests for each in found if each.counts == "decodes"]
    assert max(len(requests) for requests in together) == most_rows
    assert (len(together[-1]) if together[-1][0].tokens > PROMPT else 0) == contexts
    assert max(each.tokens for each in found for each in each.requests) == longest
    for _, requests in found:
        blocks = (-(-(each.tokens + each.answer - 1) // sizes["block"]) for each in requests)
        assert sum(blocks) * sizes["block"] <= max(sizes["room"], sizes["block"] * len(requests))
        assert all(each.tokens + each.answer <= sizes["longest"] for each in requests)
    counted = [each for kind, asked in found for each in asked if kind == "mixed" or each.tokens == PROMPT]
    assert len(counted) == len({each.number for each in counted}), "no prompt is in the prefix cache"


def test_drafts_need_longer_answers() -> None:
    [first, *_] = rounds(**SIZES, drafts=3)
    assert [each.answer for each in first.requests] == [4 * DECODES]


@pytest.mark.parametrize("changes", [{"longest": 30}, {"room": 16}])
def test_nothing_is_measured_where_nothing_fits(changes: dict[str, int]) -> None:
    assert rounds(**SIZES | changes) == []
