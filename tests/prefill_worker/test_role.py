"""The prefill role: orders of events, cancels, ends, and what it gives to a decode on its worker."""

from collections.abc import Callable
from pathlib import Path

import pytest

from baton.engine.core.live_request import LiveRequest
from baton.kv_names import extend_names, salted
from baton.kv_transfer.protocol import local_messages as local
from baton.rpc import worker_pb2 as pb
from baton.worker import messages
from tests.router_messages import tokens_told, told

from .conftest import STREAM, Worker, decode_here, workers

P, Q, D, E, T = (letter * 16 for letter in (b"p", b"q", b"d", b"e", b"t"))


def test_a_handover_from_its_queue_to_its_ack(worker: Worker) -> None:
    worker.prefill(P, 20, report_start=True)
    assert not worker.sent, "it is queued"
    assert worker.told(local.Offer) == local.Offer(P), "its FETCH may wait"
    worker.step()
    [started] = told(worker.sent)
    assert started.prefill_started.prefill_id == P
    worker.fetched(P, T, (0, 20))
    s, _ = worker.slices(1)[0]
    assert (s.piece.layer, s.piece.token_start) == (0, 0), "before all is computed"
    worker.compute()
    assert worker.tokens == [(P, 0, "")]
    assert [type(message) for message in worker.sent[1:]] == [messages.ToRouter, messages.Prefilled]
    [token] = tokens_told(worker.sent)
    commit = worker.told(local.CommitOut)
    assert commit.first_token.token_id == token.token_id
    worker.slices(commit.frames - 1)  # they may come after the commit
    assert worker.blocks_of(P), "another worker may still read its blocks"
    worker.released(P, "acked")
    assert worker.idle
    assert not worker.failures


def test_prompts_wait_for_the_routers_that_sent_them(worker: Worker) -> None:
    worker.prefill(P, 20, handover=False)
    worker.prefill(Q, 10, stream=STREAM + 1, handover=False)

    def waiting() -> dict[int, int]:
        worker.roles.handle(messages.AskStatus(0))
        status = worker.answers[-1]
        assert isinstance(status, messages.EngineStatus)
        assert sum(status.waiting_of_streams.values()) == status.stats.tokens_waiting
        return status.waiting_of_streams

    assert waiting() == {STREAM: 20, STREAM + 1: 10}
    worker.step()
    assert waiting() == {STREAM: 14}, "a step of 16 tokens: the short prompt goes first"
    worker.compute()
    assert waiting() == {}


def test_the_first_token_alone_is_no_matter_of_the_sender(worker: Worker) -> None:
    worker.prefill(P, 20, max_tokens=1, handover=False)
    worker.compute()
    assert worker.tokens == [(P, 0, "length")]
    assert worker.idle
    assert not worker.outgoing.receive()


def test_a_handover_whose_token_is_the_last_is_closed(worker: Worker) -> None:
    worker.prefill(P, 20, max_tokens=1)
    worker.compute()
    assert worker.tokens == [(P, 0, "length")]
    assert worker.told(local.CloseOut) == local.CloseOut(P, "finished")
    worker.move()
    assert worker.idle
    assert not worker.failures, "its router has the token"


CANCELLED: list[tuple[str, Callable[[Worker], object]]] = [
    ("queued", lambda worker: None),
    ("between two chunks", Worker.step),
    ("held", Worker.compute),
]


@pytest.mark.parametrize(("when", "until"), CANCELLED, ids=[when for when, _ in CANCELLED])
@pytest.mark.parametrize("is_fetched", [False, True], ids=["", "fetched"])
def test_a_cancel_ends_a_prefill_once(
    worker: Worker, when: str, until: Callable[[Worker], object], is_fetched: bool
) -> None:
    """Its blocks are free when the sender reads them no more, and not before."""
    worker.prefill(P, 20)
    worker.told(local.Offer)
    if is_fetched:
        worker.fetched(P, T, (0, 20))
    until(worker)
    said = len(worker.tokens)
    worker.cancel(P)
    worker.cancel(P)
    assert bool(worker.blocks_of(P)) is (when != "queued")
    assert worker.told(local.CloseOut) == local.CloseOut(P, "cancelled")
    worker.settle()
    assert len(worker.tokens) == said, "its router needs no more"
    assert len(worker.of(messages.Cancelled)) == 1
    assert not worker.failures


def test_an_id_is_free_when_the_blocks_are(worker: Worker) -> None:
    worker.prefill(P, 20)
    worker.compute()
    worker.prefill(P, 20)
    assert worker.failures == [pb.FAILURE_CODE_INVALID]
    worker.cancel(P)
    worker.prefill(P, 20)
    assert worker.failures == [pb.FAILURE_CODE_INVALID] * 2, "the sender has not released it"
    worker.settle()
    worker.prefill(P, 20)
    worker.cancel(P)
    assert len(worker.failures) == 2


@pytest.mark.parametrize(
    ("reason", "codes"),
    [("acked", []), ("deadline", [pb.FAILURE_CODE_DROPPED]), ("reused", [pb.FAILURE_CODE_INVALID])],
)
@pytest.mark.parametrize("chunks", [1, 2])
def test_why_a_prefill_was_released(
    worker: Worker, reason: str, codes: list[pb.FailureCode], chunks: int
) -> None:
    """Also between two chunks, of which the second is then not computed."""
    worker.prefill(P, 20)
    for _ in range(chunks):
        worker.step()
    worker.released(P, reason)
    assert worker.failures == codes
    assert worker.idle


def test_the_order_of_a_decode_here_and_its_prefill(worker: Worker) -> None:
    """The decode gets the blocks when no other worker reads them."""
    decode, other = decode_here(D), decode_here(E)
    worker.prefill(P, 20)
    assert worker.take(P, decode) is False, "it has no token"
    assert worker.take(P, other) is None, "another decode has it"
    worker.compute()
    assert worker.told(local.CloseOut) == local.CloseOut(P, "gone"), "no other worker may fetch it"
    assert worker.take(P, decode) is False
    worker.move()
    live = worker.take(P, decode)
    assert isinstance(live, LiveRequest)
    assert worker.engine.resume(live, D) is not None
    worker.let_go(P, decode, resumed=True)
    assert not worker.has(P)
    worker.compute()
    assert worker.idle


@pytest.mark.parametrize(("when", "until"), CANCELLED, ids=[when for when, _ in CANCELLED])
def test_a_decode_here_that_ends_before_it_goes_on(
    worker: Worker, when: str, until: Callable[[Worker], object]
) -> None:
    worker.prefill(P, 20)
    until(worker)
    said = len(worker.tokens)
    decode = decode_here(D)
    worker.take(P, decode)
    worker.let_go(P, decode, resumed=False)
    assert worker.take(P, decode_here(E)) is None
    worker.compute()
    worker.settle()
    assert len(worker.tokens) == said, "its router needs no more"
    assert not worker.failures


def test_spare_is_what_no_worker_wants_in_order_of_arrival(worker: Worker) -> None:
    for prefill_id in (P, Q, D, E):
        worker.prefill(prefill_id, 8)
    assert not list(worker.roles.spare()), "nothing is computed"
    worker.compute()
    worker.outgoing.send(local.FetchWaits(Q))
    worker.outgoing.send(local.ContentWanted(T, (), 0))
    worker.move()  # so Q was heard of, too
    worker.take(E, decode_here(T))
    found = {prefill_id: worker.context.attempts.by_id[prefill_id] for prefill_id in (P, Q)}
    assert found[Q].is_wanted
    assert [prefill.id for prefill in worker.roles.spare()] == [P, D]
    found[P].drop()
    assert [prefill.id for prefill in worker.roles.spare()] == [D]
    assert worker.failures == [pb.FAILURE_CODE_DROPPED]
    for prefill_id in (Q, D, E):
        worker.cancel(prefill_id)


def test_what_the_prefix_cache_has_is_sent_with_the_first_layer(model: Path) -> None:
    """Other ranks may compute cached positions until they come to this step."""
    with workers(model, enable_prefix_caching=True) as [worker]:
        worker.prefill(P, 20, handover=False)
        worker.compute()
        worker.prefill(Q, 21)
        worker.fetched(Q, T, (0, 21))
        worker.compute()
        pieces = [s.piece for s, _ in worker.slices(4)]
        spans = sorted((p.layer, p.token_start, p.token_start + p.token_count) for p in pieces)
        assert spans == [(0, 0, 20), (0, 20, 21), (1, 0, 20), (1, 20, 21)]
        assert worker.told(local.CommitOut).frames == 4
        counts = worker.context.attempts.counts
        assert (counts.computed_prompt_tokens, counts.prompt_tokens_cached) == (20 + 1, 20)
        worker.released(Q, "acked")


def test_a_pin_lasts_until_it_is_released(model: Path) -> None:
    with workers(model, enable_prefix_caching=True, max_num_batched_tokens=64, num_blocks=200) as [worker]:
        worker.prefill(P, 130, handover=False)
        worker.compute()
        names: list[bytes] = []
        extend_names(names, list(range(3, 133)), 128, salted(worker.engine.content_root, b""))
        for pin_id, chunks in ((Q, tuple(names)), (D, (b"x" * 16,))):
            worker.outgoing.send(local.ContentWanted(pin_id, chunks, 0))
            worker.move()
        assert worker.told(local.Pinned) == local.Pinned(Q, 2)
        assert worker.told(local.CloseOut) == local.CloseOut(D, "gone")
        assert not worker.idle
        worker.fetched(Q, T, (0, 128))
        assert worker.told(local.CommitOut).frames == len(worker.slices(2))
        worker.released(Q, "acked")
        assert worker.idle


def test_a_worker_without_a_cache_has_nothing_to_pin(worker: Worker) -> None:
    worker.outgoing.send(local.ContentWanted(Q, (b"x" * 16,), 0))
    worker.move()
    assert worker.told(local.CloseOut) == local.CloseOut(Q, "unsupported")
