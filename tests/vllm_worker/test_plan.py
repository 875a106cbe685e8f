"""What vLLM's scheduler plans for prompts that decode servers fetch, and for those that they fetch."""

from __future__ import annotations

from itertools import count
from typing import Any, ClassVar

import pytest

from baton.vllm_worker.plan import Chunk, Fetch, Plan, Planner, Source

HERE = "127.0.0.1:7000", 5
PREFILLS: dict[str, Any] = {"do_remote_decode": True}


@pytest.fixture
def planner() -> Planner:
    numbers = count(1)
    made = Planner(new_id=lambda: next(numbers).to_bytes(16))
    made.address = HERE
    return made


def prefill_id(number: int) -> bytes:
    return number.to_bytes(16)


def params_of(planner: Planner) -> dict[str, Any]:
    """Those with which a decode server fetches a prompt of 100 tokens."""
    planner.expect("p", PREFILLS, 100)
    planner.scheduled("p", [1], 0, 100, anew=True)
    stays, params = planner.finished("p", 7)
    assert stays
    assert params is not None
    return params


def test_each_chunk_names_all_blocks_up_to_its_end(planner: Planner) -> None:
    planner.expect("a", PREFILLS, 100)
    planner.scheduled("a", [4, 5], 32, 16, anew=True)
    first = planner.take()
    assert first.opened == {prefill_id(1): "a"}
    assert first.chunks == [Chunk(prefill_id(1), (4, 5), 0, 48, 100)], "with what is cached"
    planner.scheduled("a", [9, 6], 48, 60, anew=False)
    second = planner.take()
    assert second.opened == {}
    assert second.chunks == [Chunk(prefill_id(1), (4, 5, 9, 6), 48, 100, 100)], "without what it decodes"
    planner.scheduled("a", [], 100, 1, anew=False)
    assert planner.take().chunks == []


def test_a_prompt_that_has_finished_can_be_fetched_with_its_parameters(planner: Planner) -> None:
    params = params_of(planner)
    assert planner.take().committed == {prefill_id(1): 7}
    planner.expect("b", params, 100)
    assert planner.to_fetch("b", 40) == planner.to_fetch("b", 40) == 60, "there may be no blocks yet"
    planner.allocated("b", [3, 8], 60)
    assert planner.take().fetches == [
        Fetch("b", prefill_id(2), 1, Source(*HERE, prefill_id(1)), [3, 8], 40, 100)
    ]
    assert planner.to_fetch("b", 0) == 0, "after a preemption it is computed"


def test_a_preempted_prompt_starts_again_under_another_name(planner: Planner) -> None:
    planner.expect("a", PREFILLS, 100)
    planner.scheduled("a", [4], 0, 16, anew=True)
    planner.take()
    planner.preempted("a")
    planner.preempted("another request")
    assert planner.take().preempted == [prefill_id(1)]
    planner.scheduled("a", [7], 0, 16, anew=True)
    plan = planner.take()
    assert plan.opened == {prefill_id(2): "a"}
    assert plan.chunks == [Chunk(prefill_id(2), (7,), 0, 16, 100)]


def test_blocks_of_an_aborted_prompt_stay_until_nothing_reads_them(planner: Planner) -> None:
    planner.expect("waits", PREFILLS, 100)
    assert planner.finished("waits", None) == (False, None), "nothing has read its blocks"
    planner.expect("runs", PREFILLS, 100)
    planner.scheduled("runs", [4], 0, 16, anew=True)
    assert planner.finished("runs", None) == (True, None)
    assert planner.take().aborted == {prefill_id(1): "cancelled"}
    assert planner.finished("a request without parameters", 3) == (False, None)


@pytest.mark.parametrize(
    "wrong",
    [
        {"remote_host": None, "remote_port": "http"},
        {"remote_port": 0},
        {"remote_port": 70_000},
        {"remote_port": 1e999},
        {"remote_host": "h" * 257},
        {"remote_engine_id": "one of vLLM's"},
        {"remote_engine_id": "f" * 17},
        {"remote_request_id": "cmpl-1"},
        {"remote_request_id": "00"},
        {"remote_request_id": None},
    ],
    ids=str,
)
def test_a_prompt_with_wrong_parameters_is_computed_here(planner: Planner, wrong: dict[str, Any]) -> None:
    params = params_of(planner) | wrong
    planner.take()
    planner.expect("b", params, 100)
    assert planner.to_fetch("b", 0) == 0
    planner.allocated("b", [1], 0)
    assert planner.take().fetches == []


def test_a_prompt_that_is_cached_whole_is_not_fetched(planner: Planner) -> None:
    planner.expect("b", params_of(planner), 100)
    assert planner.to_fetch("b", 100) == 0


class TestIdsOfARouter:
    """Both sides get a request at once."""

    params: ClassVar[dict[str, Any]] = PREFILLS | {"prefill_id": prefill_id(77).hex()}

    @pytest.fixture
    def planner(self) -> Planner:
        return Planner(named=True)

    def test_a_prompt_is_expected_before_it_is_scheduled(self, planner: Planner) -> None:
        planner.expect("a", self.params, 100)
        assert planner.take() == Plan(expected=[prefill_id(77)])
        planner.scheduled("a", [4], 0, 100, anew=True)
        assert planner.take().opened == {prefill_id(77): "a"}
        assert planner.finished("a", 7) == (True, None), "the router knows where it is"
        assert planner.take().committed == {prefill_id(77): 7}

    def test_the_worker_sends_a_first_token_with_log_probabilities(self, planner: Planner) -> None:
        planner.expect("a", self.params | {"logprobs": True}, 100)
        planner.scheduled("a", [4], 0, 100, anew=True)
        assert planner.finished("a", 7) == (True, None)
        assert planner.take().committed == {prefill_id(77): None}

    def test_a_prompt_that_is_never_scheduled_is_not_expected_any_more(self, planner: Planner) -> None:
        planner.expect("a", self.params, 100)
        assert planner.finished("a", None) == (False, None)
        assert planner.take().aborted == {prefill_id(77): "cancelled"}

    def test_a_prompt_whose_first_token_is_the_last(self, planner: Planner) -> None:
        planner.expect("a", self.params, 100)
        planner.scheduled("a", [4], 0, 100, anew=True)
        assert planner.finished("a", None, "finished") == (True, None)
        assert planner.take().aborted == {prefill_id(77): "finished"}

    def test_a_preempted_prompt_is_not_sent_again(self, planner: Planner) -> None:
        planner.expect("a", self.params, 100)
        planner.scheduled("a", [4], 0, 16, anew=True)
        planner.preempted("a")
        assert planner.take().preempted == [prefill_id(77)]
        planner.scheduled("a", [7], 0, 100, anew=True)
        assert planner.finished("a", 7) == (False, None)
        assert planner.take() == Plan()

    def test_a_decode_is_fetched_under_its_id(self, planner: Planner) -> None:
        fetched = {
            "do_remote_prefill": True, "remote_engine_id": "5", "remote_request_id": prefill_id(77).hex(),
            "remote_host": "127.0.0.1", "remote_port": 7000, "decode_id": prefill_id(9).hex(), "attempt": 3,
        }  # fmt: skip
        planner.expect("b", fetched, 100)
        assert planner.to_fetch("b", 0) == 100
        planner.allocated("b", [3, 8], 100)
        source = Source(*HERE, prefill_id(77))
        assert planner.take().fetches == [Fetch("b", prefill_id(9), 3, source, [3, 8], 0, 100)]
        planner.begins_with("b", 42)
        assert planner.take() == Plan(first_tokens={"b": 42})


@pytest.mark.parametrize(
    ("first_token", "reason", "computed"),
    [(7, "cancelled", [(100, 32)]), (None, "finished", [(100, 32)]), (None, "cancelled", [])],
)
def test_prompts_that_are_computed_count(
    planner: Planner, first_token: int | None, reason: Any, computed: list[tuple[int, int]]
) -> None:
    """With the tokens that were cached."""
    planner.expect("a", PREFILLS, 100)
    planner.scheduled("a", [4, 5], 32, 40, anew=True)
    planner.scheduled("a", [6], 72, 28, anew=False)
    planner.finished("a", first_token, reason)
    assert planner.take().computed == computed


def test_clients_cannot_choose_ids(planner: Planner) -> None:
    planner.expect("a", PREFILLS | {"prefill_id": "any text"}, 100)
    planner.scheduled("a", [4], 0, 100, anew=True)
    assert planner.take().opened == {prefill_id(1): "a"}


def test_a_router_waits_for_the_start_of_a_prompt(planner: Planner) -> None:
    """Which may wait in vLLM's queue."""
    planner.expect("p", PREFILLS | {"report_start": True}, 100)
    planner.expect("q", PREFILLS, 100)
    assert planner.take().started == []
    planner.scheduled("p", [1], 0, 50, anew=True)
    planner.scheduled("q", [2], 0, 50, anew=True)
    assert planner.take().started == [prefill_id(1)]
    planner.scheduled("p", [3], 50, 50, anew=False)
    assert planner.take().started == []
