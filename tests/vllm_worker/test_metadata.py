"""What vLLM's scheduler tells its workers: of prompts that decode servers fetch, and that they fetch."""

from itertools import count
from typing import Any, ClassVar

import pytest

from baton.vllm_worker.metadata import (
    Begun,
    Blind,
    BlockTable,
    Chunk,
    ConnectorScheduler,
    Fetch,
    Pinned,
    Source,
    Started,
    StepMetadata,
    block_ids,
)

HERE = "127.0.0.1:7000", 5
PREFILLS: dict[str, Any] = {"do_remote_decode": True}


@pytest.fixture
def scheduler() -> ConnectorScheduler:
    numbers = count(1)
    made = ConnectorScheduler(new_id=lambda: next(numbers).to_bytes(16))
    made.address = HERE
    return made


def prefill_id(number: int) -> bytes:
    return number.to_bytes(16)


def params_of(scheduler: ConnectorScheduler) -> dict[str, Any]:
    """Those with which a decode server fetches a prompt of 100 tokens."""
    scheduler.expect("p", PREFILLS, 100)
    scheduler.scheduled("p", [[1]], 0, 100, anew=True)
    stays, params = scheduler.finished("p", 7)
    assert stays
    assert params is not None
    return params


def test_each_chunk_names_all_blocks_up_to_its_end(scheduler: ConnectorScheduler) -> None:
    scheduler.expect("a", PREFILLS, 100)
    scheduler.scheduled("a", [[4, 5]], 32, 16, anew=True)
    first = scheduler.take()
    assert first.opened == {prefill_id(1): "a"}
    assert first.chunks == [Chunk(prefill_id(1), ((4, 5),), 0, 48, 100)], "with what is cached"
    scheduler.scheduled("a", [[9, 6]], 48, 60, anew=False)
    second = scheduler.take()
    assert second.opened == {}
    assert second.chunks == [Chunk(prefill_id(1), ((4, 5, 9, 6),), 48, 100, 100)], "without what it decodes"
    scheduler.scheduled("a", [[]], 100, 1, anew=False)
    assert scheduler.take().chunks == []


def test_tables_of_all_groups_have_the_blocks_of_a_block_that_is_not_full() -> None:
    tables = [BlockTable(16), BlockTable(32, pieces=2), BlockTable(16, states=True)]
    assert block_ids(tables, [[4, 5, 6], [1, 3], [7, 8, 9]], 33) == [4, 5, 6, 0, 2, 3, 6, 7, 9, 0, 0, 0]
    behind = block_ids(tables, [[4, 5, 6], [1, 3], [7, 8, 9]], 33, 32)
    assert behind == [0, 0, 6, 0, 0, 0, 6, 7, 9, 0, 0, 0], "what ends up to there is not written"


def test_a_prompt_that_has_finished_can_be_fetched_with_its_parameters(scheduler: ConnectorScheduler) -> None:
    params = params_of(scheduler)
    assert scheduler.take().committed == {prefill_id(1): 7}
    scheduler.expect("b", params, 100)
    assert scheduler.to_fetch("b", 40) == scheduler.to_fetch("b", 40) == 60, "there may be no blocks yet"
    scheduler.allocated("b", [[3, 8]], 60)
    assert scheduler.take().fetches == [
        Fetch("b", prefill_id(2), 1, Source(*HERE, prefill_id(1)), [[3, 8]], 40, 100)
    ]
    assert scheduler.to_fetch("b", 0) == 0, "after a preemption it is computed"


@pytest.mark.parametrize("address", ["127.0.0.1:7000", "[::1]:7000", "a.name:7000"])
def test_the_address_of_a_prefill_is_the_same_after_its_parameters(address: str) -> None:
    source = Source(address, 5, prefill_id(1))
    assert source.params["remote_host"] == address.removesuffix(":7000")
    assert Source.parse(source.params) == source


def test_what_lies_behind_fetched_kv_is_cleared_in_the_first_step(scheduler: ConnectorScheduler) -> None:
    params, clearing = params_of(scheduler), ConnectorScheduler(clears=True)
    for name in ("comes", "fails", "ends"):
        clearing.expect(name, params, 100)
        clearing.allocated(name, [[3, 8]], 60)
    assert clearing.finished("ends", None) == (False, None)
    assert clearing.take().begun == []
    clearing.scheduled("comes", [[3, 8, 5]], 100, 1, anew=True)
    clearing.scheduled("fails", [[3, 8]], 40, 60, anew=True)  # vLLM clears what it computes
    assert clearing.take().begun == [Begun([[3, 8, 5]], 100)]
    for name in ("comes", "ends"):
        clearing.scheduled(name, [[4]], 100, 1, anew=True)
    assert clearing.take().begun == [], "once"


def test_requests_that_begin_with_one_token_are_named(scheduler: ConnectorScheduler) -> None:
    """Also after a preemption: another request has left states in its slot."""
    scheduler.scheduled("one", [[3], [4]], 0, 1, anew=True)
    scheduler.scheduled("two", [[5], [6]], 0, 2, anew=True)
    scheduler.scheduled("cached", [[7], [8]], 64, 1, anew=True)
    scheduler.scheduled("resumed", [[9], [1]], 0, 1, anew=True)
    assert scheduler.take().stateless == [[[3], [4]], [[9], [1]]]
    scheduler.scheduled("one", [[], []], 1, 1, anew=False)
    assert scheduler.take().stateless == []


def test_a_preempted_prompt_starts_again_under_another_name(scheduler: ConnectorScheduler) -> None:
    scheduler.expect("a", PREFILLS, 100)
    scheduler.scheduled("a", [[4]], 0, 16, anew=True)
    scheduler.take()
    scheduler.preempted("a")
    scheduler.preempted("another request")
    assert scheduler.take().preempted == [prefill_id(1)]
    scheduler.scheduled("a", [[7]], 0, 16, anew=True)
    metadata = scheduler.take()
    assert metadata.opened == {prefill_id(2): "a"}
    assert metadata.chunks == [Chunk(prefill_id(2), ((7,),), 0, 16, 100)]


def test_blocks_of_an_aborted_prompt_stay_until_nothing_reads_them(scheduler: ConnectorScheduler) -> None:
    scheduler.expect("waits", PREFILLS, 100)
    assert scheduler.finished("waits", None) == (False, None), "nothing has read its blocks"
    scheduler.expect("runs", PREFILLS, 100)
    scheduler.scheduled("runs", [[4]], 0, 16, anew=True)
    assert scheduler.finished("runs", None) == (True, None)
    assert scheduler.take().aborted == {prefill_id(1): "cancelled"}
    assert scheduler.finished("a request without parameters", 3) == (False, None)


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
def test_a_prompt_with_wrong_parameters_is_computed_here(
    scheduler: ConnectorScheduler, wrong: dict[str, Any]
) -> None:
    params = params_of(scheduler) | wrong
    scheduler.take()
    scheduler.expect("b", params, 100)
    assert scheduler.to_fetch("b", 0) == 0
    scheduler.allocated("b", [[1]], 0)
    assert scheduler.take().fetches == []


def test_a_prompt_that_is_cached_whole_is_not_fetched(scheduler: ConnectorScheduler) -> None:
    scheduler.expect("b", params_of(scheduler), 100)
    assert scheduler.to_fetch("b", 100) == 0
    scheduler.allocated("b", [[1]], 0)
    assert [fetch.request_id for fetch in scheduler.take().declined] == ["b"]


class TestIdsOfARouter:
    """Both sides get a request at once."""

    params: ClassVar[dict[str, Any]] = PREFILLS | {"prefill_id": prefill_id(77).hex()}

    @pytest.fixture
    def scheduler(self) -> ConnectorScheduler:
        return ConnectorScheduler(named=True)

    def test_a_prompt_is_expected_before_it_is_scheduled(self, scheduler: ConnectorScheduler) -> None:
        scheduler.expect("a", self.params, 100)
        assert scheduler.take() == StepMetadata(expected=[prefill_id(77)])
        scheduler.scheduled("a", [[4]], 0, 100, anew=True)
        assert scheduler.take().opened == {prefill_id(77): "a"}
        assert scheduler.finished("a", 7) == (True, None), "the router knows where it is"
        assert scheduler.take().committed == {prefill_id(77): 7}

    def test_the_worker_may_send_the_first_token(self, scheduler: ConnectorScheduler) -> None:
        scheduler.expect("a", self.params | {"worker_commits": True}, 100)
        scheduler.scheduled("a", [[4]], 0, 100, anew=True)
        assert scheduler.finished("a", 7) == (True, None)
        assert scheduler.take().committed == {prefill_id(77): None}

    def test_a_prompt_that_is_never_scheduled_is_not_expected_any_more(
        self, scheduler: ConnectorScheduler
    ) -> None:
        scheduler.expect("a", self.params, 100)
        assert scheduler.finished("a", None) == (False, None)
        assert scheduler.take().aborted == {prefill_id(77): "cancelled"}

    def test_a_prompt_whose_first_token_is_the_last(self, scheduler: ConnectorScheduler) -> None:
        scheduler.expect("a", self.params, 100)
        scheduler.scheduled("a", [[4]], 0, 100, anew=True)
        assert scheduler.finished("a", None, "finished") == (True, None)
        assert scheduler.take().aborted == {prefill_id(77): "finished"}

    def test_a_preempted_prompt_is_not_sent_again(self, scheduler: ConnectorScheduler) -> None:
        scheduler.expect("a", self.params, 100)
        scheduler.scheduled("a", [[4]], 0, 16, anew=True)
        scheduler.preempted("a")
        assert scheduler.take().preempted == [prefill_id(77)]
        scheduler.scheduled("a", [[7]], 0, 100, anew=True)
        assert scheduler.finished("a", 7) == (False, None)
        assert scheduler.take() == StepMetadata()

    def test_a_decode_is_fetched_under_its_id(self, scheduler: ConnectorScheduler) -> None:
        fetched = {
            "do_remote_prefill": True, "remote_engine_id": "5", "remote_request_id": prefill_id(77).hex(),
            "remote_host": "127.0.0.1", "remote_port": 7000, "decode_id": prefill_id(9).hex(), "attempt": 3,
        }  # fmt: skip
        scheduler.expect("b", fetched, 100)
        assert scheduler.to_fetch("b", 0) == 100
        scheduler.allocated("b", [[3, 8]], 100)
        source = Source(*HERE, prefill_id(77))
        assert scheduler.take().fetches == [Fetch("b", prefill_id(9), 3, source, [[3, 8]], 0, 100)]
        scheduler.begins_with("b", 42)
        assert scheduler.take() == StepMetadata(first_tokens={"b": 42})

    def test_a_prefix_is_fetched_behind_what_is_cached(self, scheduler: ConnectorScheduler) -> None:
        source, names = Source(*HERE, bytes(16)), [bytes([i]) * 16 for i in range(3)]
        params = source.params | {"decode_id": prefill_id(9).hex(), "attempt": 0}
        scheduler.expect("f", params | {"chunks": [name.hex() for name in names]}, 193)
        assert scheduler.to_fetch("f", 80) == 112
        scheduler.allocated("f", [[3, 8]], 112)
        fetched = Fetch("f", prefill_id(9), 0, source, [[3, 8]], 80, 192, tuple(names))
        assert scheduler.take().fetches == [fetched]

    @pytest.mark.parametrize(
        ("block_size", "blocks", "tables", "stop"),
        [
            (16, [[4, 5, 6, 7, 8]], [[0, 0, 0, 0, 4, 5, 6, 7, 8]], 128),  # a part of a chunk is not sent
            (16, [[4, 5, 6]], (), 64),
            (16, [[]], (), 64),
            (128, [[4]], [[4]], 128),  # the first chunk is in the middle of a block
            (16, [[*range(4, 24)]], [[0, 0, 0, 0, *range(4, 24)]], 256),  # more than was asked for
            (64, [[4, 5], [0, 6]], [[0, 4, 5], [0, 0, 6]], 192),
            (128, [[4, 5], [0, 6]], [[4, 5], [0, 6]], 256),
            (128, [[4, 5, 7], [0, 0, 6]], (), 64),  # what was asked for ends within a block, states do not
        ],
    )
    def test_pinned_blocks_have_full_chunks(
        self, scheduler: ConnectorScheduler, block_size: int, blocks: list[list[int]], tables: Any, stop: int
    ) -> None:
        params = {"pin_id": prefill_id(9).hex(), "first_chunk": 1, "chunks": 3}
        scheduler.pins("p", params, blocks, block_size)
        assert scheduler.take().pinned == [Pinned("p", prefill_id(9), tables, 64, stop)]


def test_clients_cannot_choose_ids(scheduler: ConnectorScheduler) -> None:
    scheduler.expect("a", PREFILLS | {"prefill_id": "any text"}, 100)
    scheduler.scheduled("a", [[4]], 0, 100, anew=True)
    assert scheduler.take().opened == {prefill_id(1): "a"}


def test_a_router_is_told_of_the_start_of_a_prompt() -> None:
    """Which may wait in vLLM's queue."""
    scheduler = ConnectorScheduler(named=True)
    scheduler.expect("p", PREFILLS | {"prefill_id": prefill_id(1).hex()}, 100)
    assert scheduler.take().told == []
    scheduler.scheduled("p", [[1]], 0, 50, anew=True)
    assert scheduler.take().told == [Started(prefill_id(1))]
    scheduler.scheduled("p", [[3]], 50, 50, anew=False)
    assert scheduler.take().told == []


def test_a_preempted_decode_whose_images_are_elsewhere_waits_until_it_is_aborted() -> None:
    """Its worker is told once. What the prefix cache has of the images need not be encoded."""
    scheduler = ConnectorScheduler(named=True)
    source = Source("10.0.0.5:7002", 5, prefill_id(1))
    fetches = {**source.params, "decode_id": prefill_id(2).hex(), "attempt": 1, "unseen_until": 60}
    scheduler.expect("d", fetches, 100, [20, 30])
    assert not scheduler.waits("d", 0 + scheduler.to_fetch("d", 0))
    scheduler.allocated("d", [[1, 2]], 100)
    assert scheduler.take().told == []
    assert not scheduler.waits("d", 64), "after a preemption"
    assert scheduler.waits("d", 32)
    assert scheduler.take().told == [Blind(prefill_id(2))]
    assert scheduler.waits("d", 32)
    assert scheduler.take().told == []
    scheduler.finished("d", None)
    assert not scheduler.waits("d", 0)


def test_images_that_are_encoded_count() -> None:
    scheduler = ConnectorScheduler(named=True)
    scheduler.expect("a", {}, 100, [20, 30])
    scheduler.expect("b", {}, 100, [7])
    assert scheduler.encodes("a", [1]) == 30
    assert scheduler.encodes("b", [0]) == 7
    assert (scheduler.images, scheduler.image_tokens) == (2, 37)
    scheduler.finished("a", None)
    assert scheduler.encodes("a", [0]) == 0
