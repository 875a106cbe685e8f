"""Held prefills: each transition by itself. tests/kv_transfer/test_lifecycle.py explores them together."""

from typing import Any

import pytest
from msgspec.structs import replace

from baton.kv_transfer.config import TransferDeadlines
from baton.kv_transfer.protocol.held import HeldPrefills, HoldState, StartTransfer
from baton.kv_transfer.protocol.local_messages import ContentWanted, FetchWaits, ReleasedOut, StopOut
from baton.kv_transfer.protocol.messages import Aborted, Commit, Fetch, FetchContent, FirstToken, Have, Reason
from baton.kv_transfer.protocol.shared import Expired, Send

P, Q, T1, T2 = b"p" * 16, b"q" * 16, b"1" * 16, b"2" * 16
FETCH = Fetch(P, 0, ((0, 8),))
COMMIT = Commit(FirstToken(1), 2, 64)
A, B = 1, 2  # sessions


def table(max_waiting: int = 2) -> HeldPrefills:
    return HeldPrefills(TransferDeadlines(fetch_wait=30, hold=30, progress=10, tombstone=60), max_waiting)


def streaming() -> HeldPrefills:
    held = table()
    held.offer(P, 0)
    assert held.fetch(T1, A, FETCH, 0) == [StartTransfer(P, T1, A, FETCH)]
    return held


def aborted(reason: str, frames: int = 0, session: int = A, transfer: bytes = T1) -> Send:
    return Send(session, transfer, Aborted(reason, frames))  # type: ignore[arg-type]


def expire(held: HeldPrefills, now: float, flow: dict[int, float] | None = None) -> list[Any]:
    """The effects; a deadline by its name alone."""
    effects = held.expire(now, flow or {})
    return [e.deadline if isinstance(e, Expired) else e for e in effects]


def test_the_good_way() -> None:
    held = streaming()
    assert held.begin_send(T1, 1)
    assert held.begin_send(T1, 1)
    held.finish(P, 2)
    assert held.commit(T1, COMMIT, 2) == [Send(A, T1, COMMIT)]
    assert held.ack(T1, 3) == [ReleasedOut(P, "acked")]
    assert not held.held
    assert not held.open
    assert held.fetch(T2, A, FETCH, 4) == [aborted("gone", transfer=T2)]


def test_a_fetch_waits_for_its_prefill() -> None:
    held = table()
    assert held.fetch(T1, A, FETCH, 0) == [FetchWaits(P)]
    assert held.offer(P, 1) == [StartTransfer(P, T1, A, FETCH)]
    assert not held.waiting


def test_the_table_of_waiting_fetches_is_bounded() -> None:
    held = table(max_waiting=1)
    held.fetch(T1, A, FETCH, 0)
    other = Fetch(Q, 0, ())
    assert held.fetch(T2, A, other, 0) == [aborted("busy", transfer=T2)]
    # A newer FETCH for the same id takes its place.
    assert held.fetch(T2, B, FETCH, 0) == [aborted("superseded")]
    assert held.offer(P, 1) == [StartTransfer(P, T2, B, FETCH)]


def test_waiting_ends_by_abort_deadline_or_session() -> None:
    for event in ("abort", "deadline", "session"):
        held = table()
        held.fetch(T1, A, FETCH, 0)
        if event == "abort":
            assert held.abort(T1, "cancelled", 1) == [aborted("cancelled"), FetchWaits(P, gone=True)]
        elif event == "session":
            assert held.session_down(A, 1) == [FetchWaits(P, gone=True)]
        else:
            assert expire(held, 29.9) == []
            assert expire(held, 30) == ["fetch_wait", aborted("deadline"), FetchWaits(P, gone=True)]
        assert not held.waiting


def test_abort_makes_it_ready_again() -> None:
    held = streaming()
    held.begin_send(T1, 1)
    assert held.abort(T1, "integrity", 2) == [aborted("integrity", 1), StopOut(P, T1)]
    assert held.held[P].state is HoldState.READY
    assert not held.begin_send(T1, 2), "a queued frame of an ended transfer must not leave"
    assert held.abort(T1, "integrity", 2) == []
    assert held.fetch(T2, A, FETCH, 3) == [StartTransfer(P, T2, A, FETCH)]
    assert held.ack(T1, 4) == [], "only the current transfer's ACK counts"


def test_superseded() -> None:
    held = streaming()
    held.begin_send(T1, 1)
    assert held.fetch(T2, B, FETCH, 2) == [
        aborted("superseded", 1),
        StopOut(P, T1),
        StartTransfer(P, T2, B, FETCH),
    ]
    assert held.abort(T1, "cancelled", 3) == []
    assert held.session_down(A, 3) == []
    held.commit(T2, COMMIT, 4)
    assert held.ack(T2, 5) == [ReleasedOut(P, "acked")]


def test_the_engines_own_end() -> None:
    held = streaming()
    held.begin_send(T1, 1)
    assert held.close(P, "cancelled", 2) == [aborted("cancelled", 1)]
    assert held.close(P, "cancelled", 2) == []
    assert held.ack(T1, 3) == []
    assert held.fetch(T2, A, FETCH, 3) == [aborted("cancelled", transfer=T2)]
    expire(held, 63)
    assert held.fetch(T2, A, FETCH, 63) == [FetchWaits(P)], "tombstones do not last"


def test_an_id_that_is_used_again_is_released_at_once() -> None:
    """Otherwise it has neither a FETCH nor a hold deadline, and its blocks stay for ever."""
    held = table()
    held.offer(P, 0)
    held.close(P, "cancelled", 1)
    assert held.offer(P, 2) == [ReleasedOut(P, "reused")]
    assert not held.held
    expire(held, 62)
    assert held.offer(P, 62) == []
    assert P in held.held


PIN, PIN2 = b"pin:" + T1, b"pin:" + T2
CONTENT = FetchContent((b"a" * 16, b"b" * 16, b"c" * 16), 2)


def pinned() -> HeldPrefills:
    held = table()
    assert held.fetch_content(T1, A, CONTENT, 0) == [ContentWanted(PIN, CONTENT.chunks, 2)]
    fetch = Fetch(PIN, 0, ((128, 256),), (256,))
    assert held.pinned(PIN, 2, 1) == [Send(A, T1, Have(2)), StartTransfer(PIN, T1, A, fetch)]
    return held


def test_content_is_pinned_sent_and_released() -> None:
    held = pinned()
    assert held.begin_send(T1, 2)
    assert held.commit(T1, COMMIT, 2) == [Send(A, T1, COMMIT)]
    assert held.ack(T1, 3) == [ReleasedOut(PIN, "acked")]
    assert not held.held
    assert not held.open


@pytest.mark.parametrize("committed", [True, False])
def test_a_pin_ends_with_its_transfer(committed: bool) -> None:
    for end in ("abort", "session", "progress", "pin"):
        held = pinned()
        if committed:
            held.commit(T1, COMMIT, 2)
        if end == "abort":
            assert held.abort(T1, "cancelled", 2) == [ReleasedOut(PIN, "cancelled"), aborted("cancelled")]
        elif end == "session":
            assert held.session_down(A, 2) == [ReleasedOut(PIN, "gone")]
        elif end == "progress":
            assert expire(held, 12) == ["progress", ReleasedOut(PIN, "deadline"), aborted("deadline")]
        else:
            assert expire(held, 30.9, {A: 30.9}) == []
            assert expire(held, 31, {A: 31}) == ["pin", ReleasedOut(PIN, "deadline"), aborted("deadline")]
        assert not held.held
        assert held.ack(T1, 32) == []
        assert expire(held, 40) == []


def test_content_that_is_not_there_or_whose_peer_left() -> None:
    held = table()
    held.fetch_content(T1, A, CONTENT, 0)
    assert held.close(PIN, "gone", 1) == [aborted("gone"), FetchWaits(PIN, gone=True)]
    held.fetch_content(T2, A, CONTENT, 1)
    assert held.session_down(A, 2) == [FetchWaits(PIN2, gone=True)]
    assert held.pinned(PIN2, 1, 3) == [ReleasedOut(PIN2, "gone")]
    assert not held.held


def test_two_pins_at_a_time() -> None:
    held = pinned()
    held.fetch_content(T2, A, CONTENT, 1)
    assert held.fetch_content(Q, B, CONTENT, 1) == [aborted("busy", session=B, transfer=Q)]
    held.abort(T1, "cancelled", 2)
    assert held.fetch_content(P, B, CONTENT, 2) == [ContentWanted(b"pin:" + P, CONTENT.chunks, 2)]


def test_a_peer_that_leaves_early_is_asked_for_once() -> None:
    """The engine still looks for the chunks. More of this would be work without bound."""
    held = table()
    held.fetch_content(T1, A, CONTENT, 0)
    assert held.abort(T1, "cancelled", 1) == [aborted("cancelled"), FetchWaits(PIN, gone=True)]
    assert held.fetch_content(T1, A, CONTENT, 1) == [aborted("integrity")]
    held.fetch_content(T2, A, CONTENT, 1)
    held.session_down(A, 2)
    assert held.fetch_content(Q, B, CONTENT, 2) == [aborted("busy", session=B, transfer=Q)]
    assert held.pinned(PIN, 2, 3) == [ReleasedOut(PIN, "gone")]
    held.close(PIN2, "gone", 3)
    for transfer in (P, Q):
        assert held.fetch_content(transfer, B, CONTENT, 3) == [
            ContentWanted(b"pin:" + transfer, CONTENT.chunks, 2)
        ]
    assert not held.held


def test_a_pin_is_never_a_prefill() -> None:
    held = pinned()
    fetch = Fetch(T1, 9, ())
    assert held.fetch(T2, B, fetch, 2) == [FetchWaits(T1)]
    assert held.fetch_content(T1, B, CONTENT, 2) == [aborted("integrity", session=B)]
    assert held.offer(T1, 3) == [StartTransfer(T1, T2, B, fetch)]
    assert held.ack(T2, 4) == [aborted("integrity", session=B, transfer=T2), StopOut(T1, T2)]
    assert held.open == {T1: held.held[PIN]}
    held.fetch_content(P, A, CONTENT, 5)
    assert held.fetch(T2, B, FETCH, 5) == [FetchWaits(P)], "the FETCH of a prefill stays"
    assert held.offer(P, 6) == [StartTransfer(P, T2, B, FETCH)]


@pytest.mark.parametrize("committed", [True, False])
def test_an_ack_that_crosses_the_deadline_counts(committed: bool) -> None:
    """Decode has everything, and its ACK was on its way; or it had nothing to ACK yet."""
    held = streaming()
    if committed:
        held.commit(T1, COMMIT, 1)
    held.finish(P, 1)
    assert expire(held, 11) == ["progress", aborted("deadline"), StopOut(P, T1)]
    assert held.ack(T1, 12) == ([ReleasedOut(P, "acked")] if committed else [])
    assert held.ack(T1, 13) == []


@pytest.mark.parametrize("reason", ["integrity", "cancelled"])
def test_an_ack_of_what_its_receiver_ended_means_nothing(reason: Reason) -> None:
    held = streaming()
    held.commit(T1, COMMIT, 1)
    assert held.abort(T1, reason, 2) == [aborted(reason), StopOut(P, T1)]
    assert held.ack(T1, 3) == []


def test_an_ack_of_what_was_never_committed_is_an_error() -> None:
    held = streaming()
    assert held.ack(T1, 1) == [aborted("integrity"), StopOut(P, T1)]


def test_a_transfer_id_is_used_once() -> None:
    held = streaming()
    held.offer(Q, 0)
    assert held.fetch(T1, B, Fetch(Q, 0, ()), 1) == [aborted("integrity", session=B)]
    assert held.open[T1].prefill_id == P


@pytest.mark.parametrize("end", ["close", "deadline"])
def test_a_peer_that_uses_a_transfer_id_again_ends_nothing(end: str) -> None:
    """P remembers T1, which was lost after COMMIT, while T1 is open for Q. The end of P leaves Q alone."""
    held = streaming()
    held.finish(P, 1)
    held.commit(T1, COMMIT, 1)
    held.session_down(A, 2)
    held.offer(Q, 2)
    start = StartTransfer(Q, T1, B, Fetch(Q, 0, ()))
    assert held.fetch(T1, B, start.fetch, 2) == [start]
    if end == "close":
        held.close(P, "cancelled", 3)
    else:
        expire(held, 1000)
    assert list(held.held) == [Q]
    assert held.close(Q, "cancelled", 1001) == [aborted("cancelled", session=B)]
    assert not held.open


def test_the_second_commit_of_a_transfer_id_means_nothing() -> None:
    """The engine committed an aborted transfer, and then the next one, to which the peer gave the same id."""
    held = streaming()
    held.abort(T1, "cancelled", 1)
    held.fetch(T1, A, FETCH, 1)
    assert held.commit(T1, COMMIT, 2) == [Send(A, T1, COMMIT)]
    assert held.commit(T1, COMMIT, 2) == []


def test_deadlines_run_only_once_it_is_computed() -> None:
    held = streaming()
    assert expire(held, 1000) == []
    held.finish(P, 1000)
    held.begin_send(T1, 1005)
    assert expire(held, 1014) == []
    assert expire(held, 1015) == ["progress", aborted("deadline", 1), StopOut(P, T1)]
    assert expire(held, 1044) == []
    assert expire(held, 1045) == ["hold", ReleasedOut(P, "deadline")]
    assert expire(held, 2000) == []
    idle = table()
    idle.offer(Q, 0)
    idle.finish(Q, 5)
    assert expire(idle, 35) == ["hold", ReleasedOut(Q, "deadline")]


@pytest.mark.parametrize("last", ["fetched", "finished", "begun", "sent", "committed", "flowed"])
def test_a_transfer_ends_so_long_after_whatever_moved_it_last(last: str) -> None:
    """Frames, COMMIT, and bytes of any frames on its session; on another one they move nothing."""
    held = streaming()
    held.finish(P, 0)
    events = {
        "begun": lambda now: held.begin_send(next(iter(held.open)), now),
        "sent": lambda now: held.sent(next(iter(held.open)), now),
        "committed": lambda now: held.commit(next(iter(held.open)), COMMIT, now),
        "fetched": lambda now: held.fetch(T2, B, FETCH, now),
        "finished": lambda now: held.finish(P, now),
    }
    now = 0
    for name, event in events.items():
        if name != last:
            event(now := now + 1)
    if last != "flowed":
        events[last](100)
    flow = {B: 100.0 if last == "flowed" else 50.0, A: 1e9}
    assert expire(held, 109.9, flow) == []
    assert expire(held, 110, flow)[0] == "progress"


@pytest.mark.parametrize("committed", [False, True])
def test_neither_deadline_hits_what_still_flows(committed: bool) -> None:
    """For an hour, with one frame; then the line stands still: the transfer ends, then the prefill."""
    held = streaming()
    held.finish(P, 0)
    held.begin_send(T1, 0)
    if committed:
        held.commit(T1, COMMIT, 0)
    for now in range(0, 3600, 9):
        assert expire(held, now + 9, {A: now}) == []
    flow = {A: 3600.0}
    assert expire(held, 3609.9, flow) == []
    assert expire(held, 3610, flow) == ["progress", aborted("deadline", 1), StopOut(P, T1)]
    assert expire(held, 3639.9, {A: 3639.0}) == []
    assert expire(held, 3640, {A: 3640.0}) == ["hold", ReleasedOut(P, "deadline")], "no peer FETCHed it again"


def test_a_fetch_of_an_older_attempt_does_not_replace_a_newer_one() -> None:
    held = HeldPrefills(TransferDeadlines(), 4)
    newer, older = replace(FETCH, attempt=3), replace(FETCH, attempt=2)
    assert held.fetch(T1, A, newer, 0) == [FetchWaits(P)]
    assert held.fetch(T2, B, older, 0) == [aborted("superseded", transfer=T2, session=B)]
    held.offer(P, 0)
    assert held.fetch(T2, B, older, 1) == [aborted("superseded", transfer=T2, session=B)]
    assert held.open.keys() == {T1}
    held.abort(T1, "cancelled", 2)
    assert held.fetch(T2, B, older, 3) == [aborted("superseded", transfer=T2, session=B)]
