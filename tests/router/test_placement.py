"""Placement: which worker computes a prompt, from costs that workers report. No router is needed."""

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.router.policy.chunk_index import ChunkIndex
from baton.router.policy.decode import DecodeCaches, DecodeLoad
from baton.router.policy.placement import (
    FIRST_TOKEN_TARGET,
    SHORT_ANSWER,
    DecodeOffer,
    MixedPace,
    PrefillOffer,
    patience,
    place,
    place_without_room,
    prefill_offer,
)
from baton.router.policy.prefill import COMPARED, PrefillRequest
from baton.router.policy.prefill_loads import PrefillLoads
from baton.rpc import worker_pb2 as pb

from .fleets import SeenWorker, fleet_of

# 50 tokens in a step of 15 ms instead of 10: 3,333 tokens/s beside the decodes.
PACE = MixedPace(decode_seconds=0.010, short_tokens=50, short_seconds=0.015)
SPEED = 20_000.0  # tokens/s of a prefill worker


def decided(
    tokens: int, queue: int = 0, waiting: int = 0, cached: int = 0, answer: int = SHORT_ANSWER
) -> str | None:
    """Decides as if the prefill worker had as much of the prompt cached."""
    prefill = PrefillOffer((queue + tokens - cached) / SPEED)
    return place(tokens, answer, prefill, [DecodeOffer(PACE, waiting, cached)]).reason


@pytest.mark.parametrize(
    ("tokens", "queue", "waiting", "reason"),
    [
        (40, 0, 0, None),  # prefill takes 2 ms, and the handover ends before decode would be done
        (40, 200, 0, "short"),
        (40, 200, 30, None),  # the decode worker has another chunk to compute first
        (40, 800, 30, "saturated"),
        (2000, 0, 0, None),  # an idle prefill worker
        (2000, 9_000, 0, None),
        (2000, 10_000, 0, "saturated"),
        (2000, 10_000, 200, None),
    ],
)
def test_the_earlier_second_token_decides(tokens: int, queue: int, waiting: int, reason: str | None) -> None:
    assert decided(tokens, queue, waiting) == reason


def test_the_earlier_first_token_decides_about_long_answers() -> None:
    """A chunk on the decode worker has the first token after 19 ms, and the prefill worker after 12."""
    assert decided(40, 200) == "short"
    assert decided(40, 200, answer=SHORT_ANSWER + 1) is None
    assert decided(40, 400, answer=SHORT_ANSWER + 1) == "short"


@pytest.mark.parametrize(
    ("cached", "queue", "waiting", "reason"),
    [
        (1960, 0, 0, None),  # an idle prefill worker is as fast
        (1960, 200, 0, "cached"),
        (1960, 200, 30, None),
        (1940, 800, 0, "saturated"),  # more than one chunk is left
        (1500, 2_000, 0, None),
    ],
)
def test_only_the_uncached_part_of_a_prompt_counts(
    cached: int, queue: int, waiting: int, reason: str | None
) -> None:
    assert decided(2000, queue, waiting, cached) == reason


def test_the_faster_of_two_decode_workers_is_chosen() -> None:
    empty, holder = DecodeOffer(PACE), DecodeOffer(PACE, cached=1980, row=1)
    busy = DecodeOffer(PACE, waiting=5_000, cached=1980, row=1)

    def chosen(seconds: float | None, *offers: DecodeOffer) -> tuple[str, int | None, str | None]:
        found = place(2000, 100, None if seconds is None else PrefillOffer(seconds, row=2), offers)
        return found.place, found.decode, found.reason

    assert chosen(0.1, empty, holder) == ("decode", 1, "cached")
    assert chosen(2.0, empty, busy) == ("decode", 0, "saturated")
    assert chosen(None, empty, holder) == ("decode", 1, "no_prefill")
    assert chosen(0.001, empty, holder)[0] == "handover"


def test_a_prompt_that_makes_gaps_longer_than_their_target_costs_what_its_answer_may() -> None:
    """20 decodes take steps of 18 ms, over a target of 15. A prompt of 2,000 tokens takes ten of 30 ms."""
    saturated = DecodeOffer(MixedPace(0.018, 0, 0.0, 200, 0.030, gap_target=0.015), decodes=20)
    second = saturated.second_token(2000)
    late = 20 * 10 * 0.012
    assert saturated.cost(2000, 100) == pytest.approx(second + late * FIRST_TOKEN_TARGET / (100 * 0.015))
    assert saturated.cost(2000, 10**6) == pytest.approx(second, rel=0.01), "a long answer is ready to wait"
    roomy = replace(saturated, pace=replace(saturated.pace, decode_seconds=0.010, long_seconds=0.015))
    assert roomy.cost(2000, 100) == roomy.second_token(2000), "gaps within the target cost nothing"
    unknown = replace(saturated, pace=replace(saturated.pace, gap_target=0.0))
    assert unknown.cost(2000, 100) == second
    waits = PrefillOffer(first_token=second + 0.2)
    assert place(2000, 100, waits, [saturated]).place == "handover"
    assert place(2000, 100, waits, [replace(saturated, decodes=1)]).place == "decode"


def test_without_prefill_workers_decode_prefills() -> None:
    known, unknown = DecodeOffer(PACE, row=1), DecodeOffer(MixedPace())
    assert place(5000, 100, None, [known]).reason == "no_prefill"
    assert place(5000, 100, None, [unknown]).reason == "no_prefill", "also a worker that has measured nothing"
    assert place(5000, 100, None, [unknown, known]).decode == 1


LONG = MixedPace(0.010, 50, 0.015, 200, 0.030)
"""A prompt token adds 0.1 ms. Short steps do 3,333 tokens/s, long ones 6,667."""


def test_a_prompt_beside_decodes_takes_its_patience_between_short_and_long_steps() -> None:
    assert LONG.seconds(200) == pytest.approx(4 * 0.010 + 0.020), "short steps are fast enough"
    assert LONG.seconds(2000) == pytest.approx(patience(0.2))
    assert LONG.seconds(2000) == pytest.approx(1.3 * 0.2 + 0.04)
    assert LONG.seconds(20_000) == pytest.approx(100 * 0.010 + 2.0), "long steps are the limit"
    assert replace(LONG, short_tokens=0).seconds(200) == pytest.approx(patience(0.02))
    assert MixedPace().seconds(1) == math.inf


def test_prompts_that_wait_beside_decodes_take_half_as_long_again() -> None:
    alone, both = LONG.seconds(2000), LONG.seconds(4000)
    assert DecodeOffer(LONG).second_token(2000) == pytest.approx(0.005 + alone + 0.010), "behind a short step"
    assert DecodeOffer(LONG, waiting=2000).second_token(2000) == pytest.approx(
        0.005 + alone + 1.5 * (both - alone) + 0.010
    )


def test_an_idle_decode_worker_computes_a_prompt_at_full_speed() -> None:
    assert DecodeOffer(LONG, idle=True).second_token(2000) == pytest.approx(0.2 + 2 * 0.010)
    assert DecodeOffer(LONG, idle=True, alone=0.0002).second_token(2000) == pytest.approx(0.4 + 2 * 0.010)
    assert DecodeOffer(MixedPace(), idle=True).second_token(2000) == math.inf


@pytest.mark.parametrize(
    ("answer", "utilisation", "decodes", "computes", "short_tokens", "expected"),
    [
        (20, 0.2, True, 100, 0, "prefill"),  # the future prompts wait 5 ms more, and the handover takes 10
        (20, 0.2, False, 100, 0, "handover"),  # no seat
        (2000, 0.2, True, 100, 0, "handover"),  # they would wait 120 ms more
        (65, 0.0, True, 100, 0, "handover"),  # there are none yet
        (50, 0.0, True, 100, 0, "prefill"),
        (20, 0.9, True, 100, 0, "handover"),
        (20, 0.2, True, 101, 0, "handover"),  # three short steps, if they are like those of the decode worker
        (20, 0.2, True, 120, 60, "prefill"),
        (20, 0.2, True, 121, 60, "handover"),
    ],
)
def test_a_prefill_worker_decodes_a_short_answer_that_slows_down_few_short_prompts(
    answer: int, utilisation: float, decodes: bool, computes: int, short_tokens: int, expected: str
) -> None:
    prefill = PrefillOffer(0.008, computes, short_tokens, decodes=decodes, utilisation=utilisation)
    assert place(1000, answer, prefill, [DecodeOffer(LONG)]).place == expected


@pytest.mark.parametrize(
    ("offers", "chosen"),
    [
        ([(0.3, True), (0.1, True), (0.2, True)], 1),
        ([(0.1, True), (0.1, True)], 0),  # the choice of `sticky` comes first
        ([(0.1, False), (0.3, True), (0.2, True)], 2),  # it has no seat
        ([(0.1, False), (0.3, False)], None),
        ([], None),
    ],
)
def test_without_room_at_decode_workers_the_prefill_worker_with_room_and_the_first_token_decodes(
    offers: list[tuple[float, bool]], chosen: int | None
) -> None:
    found = place_without_room(
        9, [PrefillOffer(seconds, decodes=decodes, row=row) for row, (seconds, decodes) in enumerate(offers)]
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


@pytest.mark.parametrize(("decoding", "own", "seconds"), [(0, 0, 0.1), (1, 0, 0.3), (0, 1, 0.3)])
def test_a_prefill_worker_is_slow_beside_decodes_only(decoding: int, own: int, seconds: float) -> None:
    """A prompt under way counts as running, too."""
    loads, request = PrefillLoads(), PrefillRequest(key=1, tokens=2000)
    row = loads.join("a:1", block_size=16, now=0)
    loads.reported(row, pb.WorkerStatus(prefill_tokens_per_s=SPEED), 0)
    snapshot = loads.snapshot(request, 0)
    assert snapshot is not None
    status = pb.WorkerStatus(
        requests_running=1, requests_decoding=decoding, decode_seconds=0.010,
        chunk_tokens=50, chunk_seconds=0.015, long_chunk_tokens=200, long_chunk_seconds=0.030,
    )  # fmt: skip
    load = DecodeLoad("a:1", 16, 100, 64)
    load.reported(blocks_free=100, running=1)
    load.own = own
    worker = SeenWorker(row, load)
    worker.status = status
    fleet = fleet_of(loads, [worker])
    assert prefill_offer(fleet, snapshot, request, row).first_token == pytest.approx(seconds)


def test_a_choice_explains_itself() -> None:
    found = place(200, 20, PrefillOffer(0.008, decodes=True, utilisation=0.5, row=1), [DecodeOffer(LONG)])
    assert found.attributes() == {
        "baton.place": "handover",
        "baton.ranges": "1:0-200",
        "baton.cost_s.handover": pytest.approx(0.028),
        "baton.cost_s.decode": pytest.approx(0.075),
        "baton.cost_s.prefill": pytest.approx(0.008 + 0.010 + 0.12 * 0.5 * 0.2),
    }
    assert "baton.cost_s.prefill" not in place(200, 20, None, [DecodeOffer(LONG)]).attributes()


CHUNKS = list(range(100, 110))


def caches(*free: int) -> tuple[DecodeCaches, ChunkIndex, list[DecodeLoad]]:
    """Decode workers "0", "1", … with so many free blocks of 16 positions."""
    loads = [DecodeLoad(str(i), 16, 100, 64, blocks_free=blocks) for i, blocks in enumerate(free)]
    found = DecodeCaches(index := ChunkIndex())
    index.grow(len(loads))
    for row, load in enumerate(loads):
        found.join(row, load)
        found.serve(row, True)
    return found, index, loads


def holders(found: DecodeCaches, chosen: int = 0, avoid: tuple[str, ...] = ()) -> list[tuple[int, int]]:
    return found.candidates(chosen, PrefillRequest(1, 700, CHUNKS, avoid), random.Random(1))


def test_the_worker_with_most_of_the_prompt_is_offered_if_it_has_capacity() -> None:
    found, index, loads = caches(100, 100, 100, 100)
    assert holders(found) == [(0, 0)]
    index.add(0, CHUNKS[:1])
    index.add(1, CHUNKS[:5])
    index.add(2, CHUNKS)
    assert holders(found) == [(0, 64), (2, 640)]
    assert holders(found, chosen=2) == [(2, 640)], "no other worker has more"
    assert holders(found, avoid=("2",)) == [(0, 64)], "it failed this request"
    loads[2].blocks_free = 43  # 688 positions
    assert holders(found) == [(0, 64)]
    loads[2].blocks_free = 44
    assert holders(found) == [(0, 64), (2, 640)]
    found.serve(2, False)
    assert holders(found) == [(0, 64), (1, 320)]
    found.serve(2, True)
    index.clear(2)
    assert holders(found) == [(0, 64), (1, 320)]
    found.leave(1)
    assert holders(found) == [(0, 64)]


def test_the_worker_with_most_of_the_prompt_decodes_unless_it_is_much_more_loaded() -> None:
    found, index, loads = caches(100, 100, 100)

    def nearest() -> int:
        return found.nearest(0, PrefillRequest(1, 700, CHUNKS), random.Random(1))

    assert nearest() == 0, "nothing is cached"
    index.add(1, CHUNKS[:2])
    assert nearest() == 1
    index.add(2, CHUNKS)
    assert nearest() == 2
    loads[2].blocks_free = 91
    assert nearest() == 2
    loads[2].blocks_free = 89
    assert nearest() == 0
    loads[0].blocks_free = 80
    assert nearest() == 2
    index.add(0, CHUNKS)
    assert nearest() == 0, "it has as much"


def test_without_prefill_workers_the_worker_with_most_of_the_prompt_prefills() -> None:
    found, index, _ = caches(100, 100, 10)
    for row in (1, 2):
        index.add(row, CHUNKS)
    assert {holders(found)[1] for _ in range(20)} == {(1, 640)}, "the other has no capacity"


@given(st.integers(1, 10_000), st.integers(0, 200_000), st.integers(0, 5_000), st.integers(0, 5_000))
def test_a_longer_prefill_queue_favours_overflow_and_more_work_at_decode_disfavours_it(
    tokens: int, queue: int, waiting: int, more: int
) -> None:
    if decided(tokens, queue, waiting) is not None:
        assert decided(tokens, queue + more, waiting) is not None
    else:
        assert decided(tokens, queue, waiting + more) is None
