"""Whether prefill workers decode nothing, from rates and models of steps. No router is needed."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.router.policy.decode import DecodeLoad
from baton.router.policy.fleet import Seen
from baton.router.policy.prefill_loads import Demand
from baton.router.policy.regime import apart
from baton.rpc import worker_pb2 as pb
from baton.steps.step_model import StepModel

from .fleets import seen_worker

DENSE = StepModel((1, 256), (0.0043, 0.0065), 0.03e-6, (16, 512, 8192), (0.0045, 0.0125, 0.19), 0.8e-9, 1.0)
"""About an 8B model on an H200."""
EXPERTS = StepModel(
    (1, 8, 32, 64, 128, 256), (0.0029, 0.0064, 0.0134, 0.0183, 0.0225, 0.0289), 0.005e-6,
    (16, 64, 512, 2000, 8192), (0.009, 0.0175, 0.0225, 0.0429, 0.133), 0.2e-9, 1.0,
)  # fmt: skip
"""About Qwen3.5-35B-A3B: few tokens read nearly all experts."""
CHATS = Demand(12.0, 2000.0, 1000.0, 1800.0, 2075.0, 20 / 150)
"""2000/150 at 12/s."""
AGENTS = Demand(11.0, 1500.0, 16_000.0, 1700.0, 16_400.0, 20 / 150)
"""48 agents at a time: their decodes are too long for one worker."""


def workers(count: int, model: StepModel | None, gap: float | None = None, seats: int = 256) -> list[Seen]:
    if gap is None:
        gap = 3.5 * model.decode_seconds[0] if model else 0.0
    status = pb.WorkerStatus(gap_target_seconds=gap)
    return [
        seen_worker(DecodeLoad(row, str(row), 128, 7000, seats), status=status, step_model=model)
        for row in range(count)
    ]


def decided(
    model: StepModel | None,
    demand: Demand | None,
    pools: tuple[int, int] = (1, 1),
    *,
    stands: bool = False,
    **given: Any,
) -> bool:
    prefills, decodes = (workers(count, model, **given) for count in pools)
    return apart(prefills, decodes, demand, stands=stands)


@pytest.mark.parametrize("pools", [(1, 1), (2, 2), (500, 500)], ids=str)
def test_prefill_workers_decode_nothing_if_the_first_decode_costs_most(pools: tuple[int, int]) -> None:
    demand = CHATS._replace(prompts=CHATS.prompts * pools[0], output=CHATS.output * pools[0])
    assert decided(EXPERTS, demand, pools)


def test_a_dense_model_needs_no_decision() -> None:
    assert not decided(DENSE, CHATS), "plans find it: each decode less helps the prompts there"
    assert not decided(DENSE, AGENTS), "half of the decodes on each worker is better"


def test_decodes_that_decode_workers_cannot_hold_stay_on_prefill_workers() -> None:
    assert decided(EXPERTS, CHATS, seats=64)
    assert not decided(EXPERTS, CHATS, seats=10)


def test_plans_serve_a_burst_that_no_mixed_fleet_could_serve_for_long() -> None:
    """No worker has time for half of the prompts beside half of the decodes."""
    assert not decided(DENSE, CHATS._replace(prompts=22.0, output=3200.0), gap=0.0055)


@pytest.mark.parametrize(
    ("model", "demand", "pools"),
    [(None, CHATS, (1, 1)), (EXPERTS, None, (1, 1)), (EXPERTS, CHATS, (0, 1)), (EXPERTS, CHATS, (1, 0))],
)
def test_without_a_measurement_plans_decide(
    model: StepModel | None, demand: Demand | None, pools: tuple[int, int]
) -> None:
    assert not decided(model, demand, pools)


def test_the_decision_is_the_same_in_both_states() -> None:
    """Prompts in the mixed state seem up to 8 % shorter, and the load of a second varies."""
    assert {
        decided(EXPERTS, CHATS._replace(prompts=prompts, prompt=prompt, output=output))
        for prompts in (11.0, 12.0, 14.0)
        for prompt in (1850.0, 2000.0)
        for output in (1600.0, 1900.0)
    } == {True}


def test_a_decision_stands_while_no_other_fleet_costs_less() -> None:
    """Fleets with shared decodes cost about the same, so reports change which of them costs least."""
    fewer = CHATS._replace(prompts=9.0, output=1100.0)
    assert not decided(EXPERTS, fewer)
    assert decided(EXPERTS, fewer, stands=True)
    assert not decided(DENSE, AGENTS, stands=True)


nonsense = st.sampled_from([0.0, 1e-300, 1e-6, 1.0, 1e6, 1e300, math.inf, math.nan])


@settings(max_examples=50)
@given(st.tuples(*[nonsense] * 5), nonsense, nonsense)
def test_any_report_gives_a_decision(demand: tuple[float, ...], gap: float, seconds: float) -> None:
    model = replace(EXPERTS, context_seconds=seconds, pair_seconds=seconds)
    assert decided(model, Demand(demand[0], 2000.0, *demand[1:]), gap=gap) in (True, False)
