"""Parts of a split prompt: two workers compute one prompt, in all orders of events, and lose each other."""

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from baton.engine import kernels
from baton.kv_transfer import Began, FetchFailed, Injected
from baton.kv_transfer.protocol import local_messages as local
from baton.prefill_worker import parts
from baton.prefill_worker.parts import pair_id
from baton.rpc import worker_pb2 as pb
from baton.worker.engine_process.paged_kv import kv_layout
from tests.cluster_helpers import tiny_model
from tests.engine.checkpoints import edit_json
from tests.engine.conftest import save_tiny
from tests.engine.scheduling import live_of
from tests.router_messages import planned, tokens_told, told
from tests.worker.test_states import HYBRID

from .conftest import SLOTS, Worker, decode_here, workers

A, B, C = (letter * 16 for letter in (b"a", b"b", b"c"))
PAIR = pair_id(A, B)
KINDS = {"attention": {}, "states": HYBRID}
"""Changes of the tiny model."""
WINDOWS: dict[str, dict[str, Any]] = {"Gemma3Text": {}, "Mistral": {"sliding_window": 40}}
PLAN = planned((A, 1, 0, 16), (B, 2, 16, 30))


class Pair(NamedTuple):
    """The workers of a prompt of 30 tokens. The first one computes 16 of them. The second one has asked for
    their KV, and has the final part."""

    first: Worker
    last: Worker
    fetch: local.FetchIn
    slices: Sequence[int]
    """Of each layer."""

    def bring(self, *layers: int) -> None:
        """KV or states of the next layers come to the last worker."""
        for layer in layers:
            found = self.first.slices(self.slices[layer])
            assert {s.piece.layer for s, _ in found} == {layer}
            self.last.arrive(found)

    def bring_all(self) -> None:
        self.bring(*range(len(self.slices)))

    def commit(self) -> None:
        self.last.complete(self.first.told(local.CommitOut))


def slices_of(worker: Worker) -> list[int]:
    """The slices of each layer, after a range: each part of its cache is one."""
    layout = kv_layout(worker.engine)
    layers = [layer for number in range(len(layout.arrays)) for layer in layout.layers[number]]
    return [layers.count(layer) for layer in range(layout.num_layers)]


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def path(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_model(tmp_path_factory.mktemp(kind))
    edit_json(model / "config.json", **KINDS[kind])
    return model


@pytest.fixture(scope="module")
def both(path: Path) -> Iterator[tuple[Worker, Worker]]:
    with workers(path, 2) as [first, last]:
        yield first, last


@pytest.fixture
def pair(both: tuple[Worker, Worker]) -> Iterator[Pair]:
    first, last = both
    for worker in both:
        worker.forget()
    first.prefill(A, 16, plan=PLAN)
    last.prefill(B, 30, plan=PLAN, report_start=True)
    fetch = last.asks()
    assert (fetch.prefill_id, fetch.incarnation, fetch.ranges) == (PAIR, 1, ((0, 16),))
    first.fetched(PAIR, fetch.transfer_id, *fetch.ranges)
    yield Pair(first, last, fetch, slices_of(first))
    for worker, attempt_id in ((first, A), (last, B)):
        if worker.has(attempt_id):
            worker.cancel(attempt_id)
        worker.settle()


def all_before(pair: Pair) -> None:
    pair.bring_all()
    pair.commit()
    pair.last.take_in(Began, Injected)
    pair.last.compute()


def commit_last(pair: Pair) -> None:
    pair.bring_all()
    pair.last.take_in(Began)
    pair.last.compute()
    assert not pair.last.tokens, "its KV may still turn out to be wrong"
    pair.commit()
    pair.last.take_in(Injected)


def layers_within_the_step(pair: Pair) -> None:
    pair.bring(0)
    pair.last.take_in(Began)
    pair.bring(*range(1, len(pair.slices)))
    pair.commit()
    pair.last.compute()
    if not pair.last.tokens:
        pair.last.take_in(Injected)


@pytest.mark.parametrize("order", [all_before, commit_last, layers_within_the_step])
def test_a_shared_prompt_has_the_token_of_one_worker(
    pair: Pair, order: Callable[[Pair], None], path: Path
) -> None:
    first, last, *_ = pair
    first.compute()
    assert first.tokens == [(A, 0, "length")], "it says that the part is computed"
    assert not last.engine.loop.has_work, "no step computes the first range, as far as it knows"
    assert not told(last.sent)
    order(pair)
    assert told(last.sent)[0].prefill_started.prefill_id == B
    assert last.tokens == [(B, 0, "")]
    last.fetched(B, b"t" * 16, (0, 30))
    pieces = [s.piece for s, _ in last.slices(sum(pair.slices))]
    assert {piece.layer for piece in pieces} == {*range(len(pair.slices))}
    assert {piece.token_start + piece.token_count for piece in pieces} == {30}
    assert last.told(local.CommitOut).frames == len(pieces)
    with workers(path) as [alone]:
        alone.prefill(C, 30, handover=False)
        alone.compute()
        tokens = [tokens_told(worker.sent)[0].token_id for worker in (alone, last)]
        assert tokens[0] == tokens[1]
    last.released(B, "acked")
    first.released(PAIR, "acked")
    assert (first.idle, last.idle) == (True, True)
    assert not first.failures + last.failures


@pytest.mark.parametrize("when", ["before its range", "after its step"])
def test_a_part_fails_with_the_kv_that_it_needs(pair: Pair, when: str) -> None:
    first, last, fetch, _ = pair
    first.compute()
    if when == "after its step":
        pair.bring_all()
        last.take_in(Began)
        last.compute()
    last.incoming.send(local.FailedIn(fetch.transfer_id, "lost", retry=True))
    last.take_in(FetchFailed)
    last.settle()
    assert last.failures == [pb.FAILURE_CODE_DROPPED]
    assert not last.tokens
    assert last.context.attempts.counts.prompt_parts_failed > 0


@pytest.mark.parametrize("missing", ["all but the first layer", "the last layer"])
def test_a_step_waits_for_kv_within_a_bound(
    pair: Pair, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And for states. Then the result of the step is of no use, though they come later."""
    monkeypatch.setattr(parts, "STEP_WAIT", 0.0)
    first, last, *_ = pair
    first.compute()
    pair.bring(*range(1 if missing.startswith("all") else len(pair.slices) - 1))
    last.take_in(Began)
    last.step()
    assert last.failures == [pb.FAILURE_CODE_DROPPED]
    last.settle()
    assert not last.tokens
    assert last.told(local.CloseOut) == local.CloseOut(B, "gone"), "nor does a decode worker get any of it"


@pytest.mark.parametrize("when", ["before its range", "begun", "computed", "complete"])
def test_a_cancel_of_a_part_ends_all_its_transfers(pair: Pair, when: str) -> None:
    first, last, *_ = pair
    first.compute()
    moments = ["before its range", "begun", "computed", "complete"]
    if when != moments[0]:
        pair.bring_all()
        last.take_in(Began)
    if when in moments[2:]:
        last.compute()
    if when == moments[3]:
        pair.commit()
        last.take_in(Injected)
    last.cancel(B)
    assert last.told(local.CloseOut) == local.CloseOut(B, "cancelled")
    last.settle()
    assert len(last.tokens) == (when == "complete")
    assert not last.failures


@pytest.mark.parametrize(
    ("reason", "codes"),
    [("acked", []), ("deadline", [pb.FAILURE_CODE_DROPPED]), ("reused", [pb.FAILURE_CODE_DROPPED])],
)
@pytest.mark.parametrize("is_computed", [False, True])
def test_a_part_that_another_worker_should_read(
    pair: Pair, reason: str, codes: list[pb.FailureCode], is_computed: bool
) -> None:
    first = pair.first
    if is_computed:
        first.compute()
    first.released(PAIR, reason)
    first.compute()
    first.settle()
    assert first.failures == codes


def test_a_decode_here_may_take_the_final_part_alone(pair: Pair) -> None:
    first, last, *_ = pair
    first.compute()
    decode = decode_here(C)
    assert first.take(A, decode) is None, "it has no token"
    commit_last(pair)
    assert not list(first.roles.spare()), "another worker reads it"
    assert [attempt.id for attempt in last.roles.spare()] == [B]
    assert last.take(B, decode) is False
    assert live_of(last.engine, B).goes_on
    while not last.take(B, decode):  # a move may come before the sender's thread has told
        last.move()
    assert not list(last.roles.spare())
    last.let_go(B, decode, resumed=False)
    last.settle()


def test_a_part_is_refused_if_its_plan_is_wrong_or_its_blocks_do_not_fit(worker: Worker) -> None:
    worker.prefill(A, 16, plan=planned((A, 1, 0, 16), (B, 1, 16, 30)))
    assert worker.failures == [pb.FAILURE_CODE_INVALID], "a worker computes one part of a prompt"
    worker.prefill(B, 300, plan=planned((A, 2, 0, 150), (B, 1, 150, 300)))
    assert worker.failures == [pb.FAILURE_CODE_INVALID, pb.FAILURE_CODE_NO_ROOM]
    assert worker.told(local.CloseOut) == local.CloseOut(pair_id(B, A), "gone")
    assert not list(worker.roles.spare())


def test_a_part_with_several_ranges_computes_each_after_the_range_before(path: Path) -> None:
    """A has positions 0 to 8 and 16 to 24, and B the others. Each range begins with the KV before it."""
    spans = planned((A, 1, 0, 8), (B, 2, 8, 16), (A, 1, 16, 24), (B, 2, 24, 30))
    with workers(path, 2, max_num_batched_tokens=64) as [first, last]:
        first.prefill(A, 24, plan=spans)
        last.prefill(B, 30, plan=spans)
        begun: list[tuple[bytes, int, int]] = []
        fetches = [first.asks(), last.asks()]
        assert [fetch.ranges for fetch in fetches] == [((8, 16),), ((0, 8), (16, 24))]
        last.fetched(fetches[0].prefill_id, fetches[0].transfer_id, *fetches[0].ranges)
        first.fetched(fetches[1].prefill_id, fetches[1].transfer_id, *fetches[1].ranges)
        for near, far, prefill_id in ((first, last, A), (last, first, B), (first, last, A), (last, first, B)):
            assert not far.engine.loop.has_work, "no two ranges begin before the KV between them"
            chunk = near.step().prompts[prefill_id]
            begun.append((prefill_id, chunk.start, chunk.stop))
            if chunk.stop < 30:
                far.arrive(near.slices(sum(slices_of(near))))
                far.take_in(Began)
        assert begun == [(A, 0, 8), (B, 8, 16), (A, 16, 24), (B, 24, 30)]
        for near, far in ((first, last), (last, first)):
            far.complete(near.told(local.CommitOut))
            far.take_in(Injected)
        assert last.tokens == [(B, 0, "")]
        first.released(pair_id(A, B), "acked")
        last.released(pair_id(B, A), "acked")
        last.cancel(B)


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", ["Gemma3Text", "Mistral"])
def test_a_part_gets_what_windows_of_its_ranges_read(kind: str, tmp_path: Path) -> None:
    """Of some layers, or of all. What is not sent is NaN. Later prompts begin with what is cached."""
    save_tiny(tmp_path, kind, vocab_size=1000, max_position_embeddings=1024, **WINDOWS[kind])
    plans = [
        ([(A, 1, 0, 300), (B, 2, 300, 600), (A, 1, 600, 660), (B, 2, 660, 760)], {A: 0, B: 0}),
        ([(A, 1, 0, 700), (B, 2, 700, 800)], {A: 656, B: 760}),
        ([(A, 1, 0, 400), (B, 2, 400, 700), (A, 1, 700, 800), (B, 2, 800, 900)], {A: 296, B: 800}),
    ]
    options = {"load_format": "auto", "num_blocks": 300, "block_size": 8, "max_num_batched_tokens": 128}
    with (
        workers(tmp_path, 2, enable_prefix_caching=True, **options) as [first, last],
        workers(tmp_path, **options) as [alone],
    ):
        for worker in (first, last):
            for cache in worker.engine.caches:
                kernels.parts(cache)[0].fill_(math.nan)
        for ranges, cached in plans:
            share(first, last, ranges, cached)
            alone.prefill(C, ranges[-1][3], handover=False)
            alone.compute()
            token, expected = (tokens_told(of.sent)[-1].token_id for of in (last, alone))
            assert token == expected


def share(
    first: Worker,
    last: Worker,
    ranges: list[tuple[bytes, int, int, int]],
    cached: dict[bytes, int],
) -> None:
    """The workers A and B compute a prompt, and a decode worker gets its KV. `cached`: positions that each
    has."""
    of = {A: first, B: last}
    layout = kv_layout(first.engine)
    starts = {each: tuple(start for name, _, start, _ in ranges if name == each) for each in of}

    def needed(start: int, stop: int, next_positions: Sequence[int]) -> int:
        return sum(
            array.bytes * len(layers) * sum(b - a for a, b in array.read_of([(start, stop)], next_positions))
            for array, layers in layout.token_arrays
            if start < stop
        )

    for name, worker in of.items():
        worker.forget()
        worker.prefill(name, max(stop for each, _, _, stop in ranges if each == name), plan=planned(*ranges))
        attempt = worker.context.attempts.find(name)
        assert attempt is not None
        assert attempt.live_request.num_cached == cached[name]
    fetches: dict[bytes, local.FetchIn] = {}
    for near, far in ((A, B), (B, A)):
        if starts[far][0] < starts[near][-1]:
            fetch = fetches[near] = of[near].asks()
            assert fetch.next_positions == starts[near]
            of[far].fetched(
                fetch.prefill_id, fetch.transfer_id, *fetch.ranges, next_positions=fetch.next_positions
            )
    sent = 0
    for name, _, start, stop in ranges:
        near, far = of[name], B if name == A else A
        near.compute()
        if far in fetches and start < starts[far][-1]:
            size = needed(max(start, cached[far]), stop, starts[far])
            sent += size
            slices = near.slices_of(size)
            while slices:
                of[far].arrive(slices[:SLOTS])
                del slices[:SLOTS]
                for event in of[far].receiver.poll():
                    event.owner.handle(event)
    for name in fetches:
        of[name].complete(of[B if name == A else A].told(local.CommitOut))
    while not last.tokens:
        for event in last.receiver.poll():
            event.owner.handle(event)
    prompt = ranges[-1][3]
    assert sent < needed(0, prompt, ())
    last.fetched(B, b"t" * 16, (0, prompt), next_positions=(prompt,))
    for s, data in last.slices_of(needed(0, prompt, (prompt,))):
        assert np.isfinite(np.frombuffer(data, np.float32)).all(), s
    last.released(B, "acked")
    for name in fetches:
        of[B if name == A else A].released(fetches[name].prefill_id, "acked")
    first.settle()
    last.settle()
