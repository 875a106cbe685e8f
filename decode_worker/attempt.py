"""One decode: what it does when its router, the KV receiver, the engine or a prefill here reports."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from baton.engine import EngineRequest, Output
from baton.kv_transfer import Began, Closed, FetchFailed, Injected
from baton.kv_transfer.protocol.messages import Reason
from baton.rpc import worker_pb2 as pb
from baton.worker.engine_process.attempt import Lease, logprobs_of
from baton.worker.engine_process.engine_attempt import EngineAttempt, Writing
from baton.worker.engine_process.states import State


@dataclass(slots=True, eq=False)
class Taking(Lease["DecodeAttempt"]):
    """The decode waits for the blocks of a prefill on this worker.

    A held prefill never waits for another attempt, and it needs only a seat to go on. A running request
    leaves its seat in the end, so this wait forms no circle.
    """

    prefill: EngineAttempt

    def revoke(self, reason: Reason) -> None:
        self.end()
        self.prefill.let_go(self.attempt, resumed=False)


@dataclass(slots=True, eq=False, kw_only=True)
class DecodeAttempt(EngineAttempt):
    """One request, from its reservation to its end."""

    prompt_tokens: int
    source: pb.PrefillSource | None  # None: the prompt is prefilled on this worker
    deadline: float  # time.monotonic(), before which the KV must arrive
    writing: Writing | None = None  # of the fetch that is under way
    taking: Taking | None = None

    # ------------------------------------------------------------ to its KV

    def compute(self, request: EngineRequest, fetched: int) -> None:
        """Computes the prompt here. `fetched`: as in the attribute."""
        self.fetched = fetched
        self.shared.trace.instant("added", attempt=self.id.hex())
        self.live = self.shared.engine.start(request, owner=self)
        if self.live is None:
            self.no_room(partial(self.compute, request, fetched))
            return
        self.again = None
        self.to(State.COMPUTING)
        self.attempts.reserved(self)

    def reserve(self, request: EngineRequest) -> None:
        """Reserves blocks for the KV of another worker, and fetches it."""
        self.live = self.shared.engine.reserve(request, owner=self)
        if self.live is None:
            self.no_room(partial(self.reserve, request))
            return
        self.again = None
        self.attempts.reserved(self)
        self._fetch()

    def _fetch(self) -> None:
        """Starts a fetch of what the prefix cache lacks. It replaces an earlier fetch of the attempt."""
        source, live = self.source, self.live_request
        assert source is not None
        if self.writing is None:
            self.to(State.FETCHING)
            self.writing = Writing(self, self.id)
        self.shared.receiver.fetch(
            self.id,
            prefill_id=source.prefill_id,
            kv_address=source.kv_address,
            incarnation=source.incarnation,
            attempt=source.attempt,
            block_ids=tuple(live.blocks),
            num_tokens=self.tokens,
            start=live.num_cached,
            state_slot=live.state_slot,
            owner=self.writing,
        )

    def retarget(self, source: pb.PrefillSource, output_ids: Sequence[int]) -> None:
        """Fetches the KV from another prefill. A request that already has its KV ignores the message."""
        if self.state not in (State.FETCHING, State.WITHOUT_KV):
            return
        if source.incarnation == self.shared.incarnation:
            self.lost(pb.FAILURE_CODE_HANDED_BACK, "the new prefill is on this worker: submit again")
            return
        try:
            extended = self.shared.engine.extend_reservation(self.live_request, output_ids)
        except ValueError as error:
            self.lost(pb.FAILURE_CODE_INVALID, str(error))
            return
        if not extended:
            self.lost(pb.FAILURE_CODE_NO_ROOM, self.shared.no_room())
            return
        self.tokens = self.prompt_tokens + len(output_ids)
        self.source = source
        self._fetch()

    def written(self, event: Injected | FetchFailed | Closed | Began) -> None:
        self.writing = None
        if self.closed:
            return
        if isinstance(event, Injected):
            self._join(event)
            return
        assert isinstance(event, FetchFailed), "only an attempt that has ended closes its fetch"
        self.to(State.WITHOUT_KV)
        if event.reason == "finished":
            self.lost(pb.FAILURE_CODE_FINISHED, "prefill's token is the last")
        else:
            assert self.source is not None
            self.attempts.fail(self, pb.FAILURE_CODE_KV_FAILED, event.reason, self.source.prefill_id)

    def _join(self, event: Injected) -> None:
        shared, stats, first = self.shared, event.stats, event.first_token
        self.to(State.DECODING)
        self.joined_at = time.monotonic()
        fetch_us = stats.fetch_seconds * 1e6
        shared.trace.instant("joined", decode=self.id.hex(), bytes=stats.bytes, fetch_us=fetch_us)
        self.attempts.injected(self, stats)
        if defect := first.defect(shared.engine.vocab_size):
            self.lost(pb.FAILURE_CODE_ENGINE, defect)
            return
        output = self.shared.engine.join(self.live_request, first.token_id, logprobs_of(first))
        self._repeat(output)

    def take_prefill(self, prefill_id: bytes) -> None:
        """The KV is in this worker already. The request needs neither blocks nor a transfer."""
        prefill = self.attempts.find(prefill_id)
        if prefill is None or prefill.take(self) is None:
            self.lost(
                pb.FAILURE_CODE_HANDED_BACK, f"there is no prefill {prefill_id.hex()[:8]} on this worker"
            )
            return
        self.taking = Taking(self, prefill)
        self.to(State.TAKING)
        self.attempts.reserved(self)

    def _resume(self, taking: Taking) -> None:
        """Resumes the prefill that the attempt takes, if it is ready and there is a seat."""
        live = taking.prefill.take(self)
        if live is None:
            self.lost(pb.FAILURE_CODE_HANDED_BACK, "the prefill has ended before")
        elif not isinstance(live, bool) and (output := self.shared.engine.resume(live, self.id, owner=self)):
            self.live = live
            taking.end()
            self.taking = None
            taking.prefill.let_go(self, resumed=True)
            self.to(State.DECODING)
            self.joined_at = time.monotonic()
            self._repeat(output)

    def go_on(self, now: float) -> None:
        """Goes on if its prefill is ready. Hands the request back if its KV is too late."""
        if self.deadline < now:
            lacks = "the KV did not arrive" if self.again is None else "memory did not move"
            self.lost(pb.FAILURE_CODE_HANDED_BACK, f"{lacks} before the request's deadline")
        elif self.again is not None:
            self.again()
        elif self.taking is not None:
            self._resume(self.taking)

    @property
    def is_spare(self) -> bool:
        """Its KV has not begun to come."""
        waits = self.state is State.FETCHING and not self.shared.receiver.began(self.id)
        return waits or self.state is State.WITHOUT_KV

    def drop(self) -> None:
        self.lost(pb.FAILURE_CODE_HANDED_BACK, "prompts on this worker need its blocks")

    # ------------------------------------------------------------ tokens

    def sampled(self, output: Output) -> None:
        if not self.num_sampled and self.state is State.COMPUTING:
            self.to(State.DECODING)
            self.joined_at = time.monotonic()
            self.prefilled(output, self.tokens)
        self.attempts.token(self, output)
        if output.finish_reason:
            self._last()

    def _repeat(self, output: Output) -> None:
        """Sends the token of the prefill. The router emits each index once, from the worker that sends it
        first."""
        self.attempts.token(self, output, elsewhere=True)
        if output.finish_reason:
            self._last()

    def _last(self) -> None:
        """Its last token ends the attempt: the engine has already freed its blocks."""
        self.close("finished")
        self.attempts.decoded(self)
