"""Attempts of both roles in one engine, under what hypothesis thinks of: each edge of their states is walked.

The test plays routers, the transfer processes and other workers. In the end nothing is left: `Worker.settle`.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from baton.decode_worker.role import DecodeRole
from baton.engine.api.config import SpeculativeConfig
from baton.engine.execution import elastic_cache, memory_sizing
from baton.kv_names import extend_names, salted
from baton.kv_transfer import Closed, FetchFailed, FirstToken, Injected, InjectStats
from baton.kv_transfer.endpoint.shared_store import SharedStore
from baton.kv_transfer.layout import Range, cut, slice_bytes
from baton.kv_transfer.protocol import local_messages as local
from baton.kv_transfer.slices import Slice
from baton.prefill_worker.parts import PartAttempt, pair_id
from baton.rpc import worker_pb2 as pb
from baton.worker import messages
from baton.worker.engine_process.attempt import Attempt, AttemptTable
from baton.worker.engine_process.paged_kv import kv_layout
from baton.worker.engine_process.roles import Roles
from baton.worker.engine_process.shared_store import StoreSource
from baton.worker.engine_process.states import TRANSITIONS, State
from tests.cluster_helpers import tiny_model
from tests.engine.checkpoints import edit_json
from tests.router_messages import Asked, content_at, planned, retarget, submit_decode, submit_prefill, work
from tests.router_messages import source as source_of
from tests.stand_in import stand_in
from tests.within import WITHIN
from tests.worker.test_states import HYBRID

from .conftest import SLOT_BYTES, STREAM, Worker, decode_here

PEER = 2
"""Incarnation of the other worker."""
LENGTHS = (5, 16, 21, 40, 70, 135)
"""Tokens of prompts. All of them begin alike."""
OPTIONS = {
    "attention": {
        "enable_prefix_caching": True,
        "num_blocks": 90,
        "max_num_batched_tokens": 64,
        "speculative_config": SpeculativeConfig(num_speculative_tokens=2),
    },
    "states": {"num_blocks": 90, "max_num_batched_tokens": 64, "max_num_seqs": 4},
}


class Both(Worker):
    """A worker with both roles. `fetches_open`: what its receiver asks other workers for."""

    def __init__(self, model: Path, **options: Any) -> None:
        super().__init__(model, **options)
        decode = DecodeRole(self.shared, self.fetches)
        self.roles = Roles(self.context, self.shared, [self.role, decode])
        self.fetches_open: dict[bytes, local.FetchIn] = {}
        self.brought: dict[bytes, tuple[int, int]] = {}  # of these: frames and bytes
        self.asked_store: dict[bytes, Any] = {}
        if self.engine.prefix_exchange is not None:
            store = stand_in(
                SharedStore,
                fetch_content=lambda fetch_id, *, owner, **_: self.asked_store.update({fetch_id: owner}),
                cancel=lambda fetch_id: self.store_says(fetch_id, Closed(fetch_id)),
                ends=lambda fetch_id: 0.0,
            )
            source = StoreSource(self.engine, self.engine.prefix_exchange, lambda _: store)
            self.fetches.sources.append(source)

    def store_says(self, fetch_id: bytes, event: Injected | FetchFailed | Closed) -> None:
        self.asked_store.pop(fetch_id).handle(event)

    def hear(self, within: float) -> bool:
        """Another worker has read what was pinned."""
        heard = super().hear(within)
        pins = [message for message in self._inbox if isinstance(message, local.Pinned)]
        self.outgoing.send(*(local.ReleasedOut(pinned.pin_id, "acked") for pinned in pins))
        self._inbox.clear()
        return heard

    def turn(self) -> None:
        """One turn of the loop, without its step."""
        self.hear(0.0)
        while heard := self.incoming.receive():
            for message in heard:
                if isinstance(message, local.FetchIn):
                    self.fetches_open[message.transfer_id] = message
                elif isinstance(message, local.CancelIn):
                    self.end_fetch(message.transfer_id)
        self.move_if_due()

    def end_fetch(self, transfer_id: bytes) -> None:
        self.fetches_open.pop(transfer_id, None)
        self.brought.pop(transfer_id, None)

    def bring(self, fetch: local.FetchIn) -> None:
        """All KV comes for a fetch, without COMMIT."""
        if fetch.transfer_id in self.brought:
            return
        layout, count, size = kv_layout(self.engine), 0, 0
        for layer in range(layout.num_layers):
            for number, part in enumerate(layout.arrays):
                if layer not in layout.layers[number]:
                    continue
                spans: list[Range] = (
                    [*fetch.ranges] if part.per_token else [(0, at) for at in fetch.states_at]
                )
                for span in spans:
                    for piece in cut(layout, layer, span, (0, part.heads), SLOT_BYTES, number):
                        length = slice_bytes(layout, piece)
                        s = Slice(piece, fetch.transfer_id, count, length)
                        self.arrive([(s, bytes(length))])
                        count, size = count + 1, size + length
        self.brought[fetch.transfer_id] = count, size

    def commit(self, fetch: local.FetchIn) -> None:
        """So does COMMIT."""
        frames, size = self.brought[fetch.transfer_id]
        self.complete(local.CommitOut(fetch.transfer_id, FirstToken(7), frames, size))
        self.end_fetch(fetch.transfer_id)


class Lives(RuleBasedStateMachine):
    """Each rule does something that a router, another worker or the store may do at any time."""

    worker: ClassVar[Both]
    walked: ClassVar[set[tuple[State, State]]]

    def _work(self, length: int, max_tokens: int) -> Asked:
        return work(next(_IDS).to_bytes(16), length, max_tokens)

    def _pick(self, pick: int, *states: State) -> bytes:
        """The id of an attempt, in one of these states if there is one."""
        found = sorted(self.worker.context.attempts, key=lambda attempt: attempt.state not in states)
        some = [attempt for attempt in found if attempt.state in states] or found
        return some[pick % len(some)].id if some else b"none"

    @rule(
        length=st.sampled_from(LENGTHS),
        max_tokens=st.sampled_from([1, 8]),
        handover=st.booleans(),
        has_source=st.booleans(),
    )
    def prefill(self, length: int, max_tokens: int, handover: bool, has_source: bool) -> None:
        asked = self._work(length, max_tokens if handover else 1)
        content = content_at() if has_source else None
        self.worker.roles.handle(
            submit_prefill(STREAM, asked, handover, report_start=handover, content=content)
        )

    @rule(ranges=st.sampled_from(["ap", "pa", "apa", "pap"]))
    def part(self, ranges: str) -> None:
        """`a`: a range of this worker; `p`: one of the other."""
        length = 16 * (ranges.rindex("a") + 1)
        asked = self._work(length, 8)
        ids = {"a": (asked.origin.attempt_id, 1), "p": (b"p" * 16, PEER)}
        spans = [(*ids[of], 16 * i, 16 * i + 16) for i, of in enumerate(ranges)]
        self.worker.roles.handle(submit_prefill(STREAM, asked, True, plan=planned(*spans), report_start=True))

    @rule(
        length=st.sampled_from(LENGTHS),
        source=st.sampled_from(["", "peer", "here", "content"]),
        pick=st.integers(0, 5),
    )
    def decode(self, length: int, source: str, pick: int) -> None:
        found: pb.PrefillSource | None = None
        if source == "peer":
            found = source_of(b"q" * 16, PEER)
        elif source == "here":
            prefill_id = self._pick(pick, State.HELD, State.COMPUTING)
            found = source_of(prefill_id, 1)
        content = content_at() if source == "content" else None
        asked = self._work(length, 60)
        self.worker.roles.handle(submit_decode(STREAM, asked, found, content))

    @rule(pick=st.integers(0, 5))
    def retarget(self, pick: int) -> None:
        source = source_of(b"s" * 16, PEER, 2)
        decode_id = self._pick(pick, State.WITHOUT_KV)
        self.worker.roles.handle(retarget(STREAM, decode_id, source, []))

    @rule(pick=st.integers(0, 5), state=st.sampled_from(State), how=st.integers(0, 20))
    def cancel(self, pick: int, state: State, how: int) -> None:
        """Rarely a router leaves. Or the worker drains, and its time is over."""
        if how == 20:
            self.worker.roles.handle(messages.Detached(STREAM))
        elif how == 19:
            self.worker.context.attempts.fail_all(pb.FAILURE_CODE_DRAINING, "the worker shuts down")
        else:
            self.worker.cancel(self._pick(pick, state))

    @rule(steps=st.integers(1, 8))
    def steps(self, steps: int) -> None:
        for _ in range(steps):
            self.worker.turn()
            if self.worker.engine.loop.has_work:
                self.worker.step()

    def reaches(self, state: State) -> None:
        """Goes on until an attempt has this state."""
        until = time.monotonic() + WITHIN
        while not any(attempt.state is state for attempt in self.worker.context.attempts):
            assert time.monotonic() < until, f"no attempt is {state}"
            self.steps(1)

    @rule(pick=st.integers(0, 5), how=st.sampled_from(["slices", "all", "lost", "finished", "again"]))
    def kv(self, pick: int, how: str) -> None:
        """KV comes for a fetch, with or without COMMIT, or it does not."""
        self.worker.turn()
        if not (found := [*self.worker.fetches_open.values()]):
            return
        fetch = found[pick % len(found)]
        if how in ("slices", "all"):
            self.worker.bring(fetch)
            if how == "all":
                self.worker.commit(fetch)
        else:
            self.worker.end_fetch(fetch.transfer_id)
            reason = "finished" if how == "finished" else "lost"
            self.worker.incoming.send(local.FailedIn(fetch.transfer_id, reason, how == "again"))
        self.worker.turn()

    @rule(comes=st.booleans())
    def store(self, comes: bool) -> None:
        for fetch_id, fetch in list(self.worker.asked_store.items()):
            stats = InjectStats(1, fetch.tokens, 1, *(0.0 for _ in range(7)))
            came = Injected(fetch_id, FirstToken(0), stats)
            self.worker.store_says(fetch_id, came if comes else FetchFailed(fetch_id, "gone"))

    @rule(pick=st.integers(0, 5), reason=st.sampled_from(["acked", "deadline", "reused"]))
    def released(self, pick: int, reason: str) -> None:
        """The other worker has read a held prefill, or nobody has come for it."""
        attempt = self.worker.context.attempts.find(self._pick(pick, State.HELD))
        for lease in [] if attempt is None else list(attempt.leases):
            if (transfer_id := getattr(lease, "id", None)) is not None:
                self.worker.outgoing.send(local.ReleasedOut(transfer_id, reason))
        self.steps(1)

    @rule(pick=st.integers(0, 5), gone=st.booleans())
    def wanted(self, pick: int, gone: bool) -> None:
        self.worker.outgoing.send(local.FetchWaits(self._pick(pick), gone))

    @rule()
    def content_wanted(self) -> None:
        names: list[bytes] = []
        extend_names(names, list(range(3, 131)), 128, salted(self.worker.engine.content_root, b""))
        pin_id = next(_IDS).to_bytes(16)
        self.worker.outgoing.send(local.ContentWanted(pin_id, tuple(names), 0))
        self.worker.turn()

    @invariant()
    def what_has_ended_has_a_lease(self) -> None:
        attempts = self.worker.context.attempts
        assert attempts.decoding == sum(attempt.state is State.DECODING for attempt in attempts)
        for attempt in attempts:
            assert attempt.state is not State.ENDED
            assert attempt.closed == (attempt.state is State.CLOSING)
            is_held = attempt.state is State.HELD and getattr(attempt, "taker", None) is None
            assert attempt.leases or not (attempt.closed or is_held)

    def teardown(self) -> None:
        self.worker.roles.handle(messages.Detached(STREAM))
        for attempt in list(self.worker.context.attempts):
            attempt.close("cancelled")
        self.worker.settle()
        self.worker.forget()
        self.worker.fetches_open.clear()
        self.worker.brought.clear()


_IDS = itertools.count(1)


@pytest.fixture(params=OPTIONS)
def lives(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[type[Lives]]:
    model = tiny_model(tmp_path)
    if request.param == "states":
        edit_json(model / "config.json", **HYBRID)
    to: Callable[[Attempt, State], None] = Attempt.to
    walked = set[tuple[State, State]]()

    def noted(attempt: Attempt, state: State) -> None:
        walked.add((attempt.state, state))
        to(attempt, state)

    monkeypatch.setattr(Attempt, "to", noted)
    worker = Both(model, **OPTIONS[request.param])
    yield type("LivesOf", (Lives,), {"worker": worker, "walked": walked})
    worker.close()


WALKS: Sequence[Sequence[tuple[Any, ...]]] = (
    [("part", "pa"), ("kv", 0, "slices"), ("steps", 3), ("cancel", 0, State.COMPUTED, 0)],
    [("part", "pa"), ("kv", 0, "slices"), ("steps", 3), ("kv", 0, "all"), ("released", 0, "acked")],
    [("decode", 21, "peer", 0), ("kv", 0, "lost"), ("retarget", 0), ("kv", 0, "all"), ("steps", 2)],
    [("decode", 21, "peer", 0), ("kv", 0, "lost"), ("cancel", 0, State.WITHOUT_KV, 0)],
    [("decode", 21, "peer", 0), ("cancel", 0, State.FETCHING, 0)],
    [("prefill", 135, 8, True, True), ("cancel", 0, State.IMPORTING, 0)],
    [("prefill", 135, 8, True, True), ("kv", 0, "lost"), ("store", False), ("cancel", 0, State.COMPUTING, 0)],
    [("prefill", 21, 8, True, False), ("steps", 2), ("cancel", 0, State.HELD, 0)],
    [("decode", 21, "", 0), ("steps", 2), ("cancel", 0, State.DECODING, 0)],
    [("decode", 135, "peer", 0)] * 12,  # the last have no room
    [("prefill", 21, 8, True, False), ("decode", 21, "here", 0), ("reaches", State.DECODING)],
    [("prefill", 21, 8, True, False), ("decode", 21, "here", 0), ("cancel", 0, State.TAKING, 0)],
)
"""What each life may be, so that all edges are walked by any choice of hypothesis. The first are those for
which the prefix cache must have nothing."""


@pytest.mark.all
def test_nothing_is_left_of_any_life(lives: type[Lives]) -> None:
    for walk in WALKS:
        life = lives()
        for name, *how in walk:
            getattr(life, name)(*how)
            life.what_has_ended_has_a_lease()
        life.teardown()
    few = settings(max_examples=25, stateful_step_count=40, database=None)
    run_state_machine_as_test(lives, settings=few)
    edges = {(state, after) for state, afters in TRANSITIONS.items() for after in afters}
    if lives.worker.engine.prefix_exchange is None:
        edges = {edge for edge in edges if State.IMPORTING not in edge}
    assert edges <= lives.walked


def test_an_illegal_step_names_both_states() -> None:
    attempt = decode_here(b"d")
    assert AttemptTable[Attempt](lambda _: None).open(attempt)
    attempt.to(State.TAKING)
    with pytest.raises(RuntimeError, match="from TAKING to FETCHING"):
        attempt.to(State.FETCHING)


def test_an_attempt_waits_while_memory_moves_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as another request decodes, a step moves one unit. So the worker does not say "no room"."""
    model = tiny_model(tmp_path)
    edit_json(model / "config.json", **HYBRID)
    monkeypatch.setattr(memory_sizing, "CPU_POOL_BYTES", 900_000)
    monkeypatch.setattr(elastic_cache, "RESIDENT_SHARE", 3)  # then a unit has few slots
    worker = Both(
        model, **OPTIONS["states"] | {"num_blocks": None, "max_num_seqs": 30, "elastic_memory": True}
    )
    life = type("LivesOf", (Lives,), {"worker": worker, "walked": set()})()
    budget = worker.engine.lives.budget
    assert budget is not None
    go_on = budget.go_on
    monkeypatch.setattr(budget, "go_on", lambda seconds: go_on(0.0))
    life.decode(21, "", 0)
    life.reaches(State.DECODING)
    for _ in range(8):
        life.decode(5, "peer", 0)
        life.decode(5, "", 0)
        life.part("pa")
    attempts = worker.context.attempts
    waiting = [attempt for attempt in attempts if attempt.state is State.NEW]
    assert len(waiting) > 2, "a unit has some states"
    assert any(isinstance(attempt, PartAttempt) for attempt in waiting[:-1])
    part = waiting.pop()
    worker.cancel(part.id)
    assert Worker.hear(worker, 10.0)
    closed = [message.prefill_id for message in worker._inbox if isinstance(message, local.CloseOut)]
    assert closed == [pair_id(part.id, b"p" * 16)], "a worker that waits for its KV waits no longer"
    steps = 0
    while any(attempt.state is State.NEW for attempt in waiting):
        life.steps(1)
        steps += 1
    assert steps > 1
    assert not worker.failures
    life.teardown()
    worker.close()
