"""Each output index is emitted once, in order, and only from a current attempt, in any order of messages."""

import time
from array import array
from typing import cast

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.router.admission.parked import Waits
from baton.router.api.jobs import Job
from baton.router.generation.attempts import AttemptPair, DecodeAttempt, PrefillAttempt, Verdict
from baton.router.generation.context import RequestContext
from baton.router.policy.desk import Desk
from baton.router.policy.plan import Plan
from baton.router.workers.worker import Attempt, Worker
from baton.rpc import worker_pb2 as pb

WORKER = Worker("w", Desk(time.monotonic, seed=1), lambda: None, lambda _: None)
PLAN = Plan("handover", decode=0)


def make_pair() -> AttemptPair:
    job = Job(array("I", [1]), pb.SamplingParams(), 0, [])
    context, waits = cast("RequestContext", None), cast("Waits", None)
    return AttemptPair(lambda attempt, event: None, job, context, waits)


def begin_prefill(pair: AttemptPair) -> PrefillAttempt:
    pair.prefill = PrefillAttempt(
        worker=WORKER, name="r", on_event=lambda attempt, event: None, plan=PLAN, base=len(pair.output_ids)
    )
    return pair.prefill


def begin_decode(pair: AttemptPair) -> DecodeAttempt:
    pair.decode = DecodeAttempt(worker=WORKER, name="r", on_event=lambda attempt, event: None, plan=PLAN)
    return pair.decode


def true_token(index: int) -> int:
    return 1000 + index


class EmitMachine(RuleBasedStateMachine):
    """A request with changing attempts. Current attempts send correct tokens, replaced ones any tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = make_pair()
        self.received: list[int] = []
        self.prefill: PrefillAttempt | None = None
        self.prefill_base = 0
        self.decode: DecodeAttempt | None = None
        self.decode_next = 0
        self.dead: list[Attempt] = []
        self.ended = False

    def offer(self, attempt: Attempt, index: int, token: int) -> Verdict:
        verdict = self.pair.offer(attempt, index, token)
        if verdict is Verdict.EMIT:
            assert not self.ended
            assert index == len(self.received)
            self.received.append(token)
        return verdict

    @precondition(lambda self: not self.ended)
    @rule()
    def new_prefill(self) -> None:
        if self.prefill is not None:
            self.dead.append(self.prefill)
        self.prefill = begin_prefill(self.pair)
        self.prefill_base = self.prefill.base
        assert self.prefill_base == len(self.received)

    @precondition(lambda self: not self.ended)
    @rule()
    def new_decode(self) -> None:
        """Starts a decode after the emitted tokens, or at prefill's base, where it repeats a token."""
        if self.decode is not None:
            self.dead.append(self.decode)
        self.decode = begin_decode(self.pair)
        self.decode_next = min(self.prefill_base, len(self.received))

    @rule()
    def prefill_ends(self) -> None:
        if self.prefill is not None:
            self.dead.append(self.prefill)
            self.prefill = None
            self.pair.end_prefill()

    @rule()
    def decode_ends(self) -> None:
        if self.decode is not None:
            self.dead.append(self.decode)
            self.decode = None
            self.pair.end_decode()

    @rule(times=st.integers(1, 3))
    def prefill_answers(self, times: int) -> None:
        """Ends the request. Repeated and late ends must change nothing."""
        for _ in range(times if self.prefill is not None else 0):
            assert self.prefill is not None
            known = len(self.received) > self.prefill_base
            verdict = self.offer(self.prefill, self.prefill_base, true_token(self.prefill_base))
            assert verdict is (Verdict.DROP if known else Verdict.EMIT)

    @rule(beyond=st.integers(1, 6))
    def prefill_speaks_out_of_turn(self, beyond: int) -> None:
        if self.prefill is not None:
            assert self.offer(self.prefill, self.prefill_base + beyond, 7) is Verdict.DROP

    @rule()
    def decode_steps(self) -> None:
        if self.decode is not None and self.decode_next <= len(self.received):
            known = self.decode_next < len(self.received)
            verdict = self.offer(self.decode, self.decode_next, true_token(self.decode_next))
            assert verdict is (Verdict.DROP if known else Verdict.EMIT)
            self.decode_next += 1

    @rule(back=st.integers(0, 5))
    def decode_repeats(self, back: int) -> None:
        index = len(self.received) - 1 - back
        if self.decode is not None and index >= 0:
            assert self.offer(self.decode, index, true_token(index)) is Verdict.DROP

    @rule(ahead=st.integers(1, 5))
    def decode_skips(self, ahead: int) -> None:
        if self.decode is not None:
            verdict = self.offer(self.decode, len(self.received) + ahead, 7)
            assert verdict is Verdict.BROKEN

    @rule(back=st.integers(0, 5))
    def decode_contradicts(self, back: int) -> None:
        index = len(self.received) - 1 - back
        if self.decode is not None and index >= 0:
            verdict = self.offer(self.decode, index, 7)
            assert verdict is Verdict.BROKEN

    @rule(pick=st.integers(0, 1000), index=st.integers(-2, 2), token=st.integers(0, 5))
    def the_dead_speak(self, pick: int, index: int, token: int) -> None:
        speaker = self.dead[pick % len(self.dead)] if self.dead else begin_prefill(make_pair())
        at = max(0, len(self.received) + index)
        assert self.offer(speaker, at, token) is Verdict.DROP

    @rule()
    def ends(self) -> None:
        self.dead += [attempt for attempt in (self.prefill, self.decode) if attempt is not None]
        self.prefill = self.decode = None
        self.pair.end()
        self.ended = True

    @invariant()
    def the_client_has_the_truth(self) -> None:
        assert self.received == [true_token(i) for i in range(len(self.received))]
        assert self.pair.output_ids == self.received


TestEmit = EmitMachine.TestCase
TestEmit.settings = settings(max_examples=100, stateful_step_count=60)
