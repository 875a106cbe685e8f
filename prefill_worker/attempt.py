"""One prefill: what it does when the engine, the KV sender, the KV receiver or a decode here reports."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import baton.kv_transfer as kv
from baton.engine import EngineRequest, Output
from baton.engine.core.live_request import LiveRequest
from baton.kv_transfer.endpoint.pump import NO_TOKEN
from baton.worker.engine_process.attempt import Attempt, handed_over
from baton.worker.engine_process.engine_attempt import EngineAttempt, Reading
from baton.worker.engine_process.parts import LayerWaits, Part, start_part
from baton.worker.engine_process.states import State
from baton.worker.messages import Code, PlanRange

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False, kw_only=True)
class PrefillAttempt(EngineAttempt):
    """One prefill, from its submission to the release of its blocks."""

    waits: LayerWaits
    handover: bool
    awaited: bool  # it has not started, and its router waits for that
    reading: Reading | None = None  # by its decode worker
    part: Part | None = None
    """Of a prompt that other workers compute, too."""
    taker: Attempt | None = None  # the decode on this worker that will go on with it

    @property
    def gives_token(self) -> bool:
        """Whether a decode may go on with it. A part that is not the last one has no token."""
        return self.handover and (self.part is None or self.part.is_final)

    # ------------------------------------------------------------ to the first token

    def add(self, request: EngineRequest, fetched: int) -> None:
        """Queues the prompt. `fetched`: as in the attribute."""
        self.fetched = fetched
        self.to(State.COMPUTING)
        self.shared.trace.instant("added", attempt=self.id.hex())
        self.live = self.shared.engine.add(request, handover=self.handover, owner=self)

    def started(self) -> None:
        """The prompt has its blocks, and a step is about to compute it."""
        if self.awaited:
            self.awaited = False
            self.attempts.prefill_started(self)

    def sampled(self, output: Output) -> None:
        if self.part is None:
            self._first_token(output)
            self.attempts.after_tokens(partial(self.hand_over, output))
        else:
            self._part_sampled(self.part, output)

    def _first_token(self, output: Output) -> None:
        shared, part = self.shared, self.part
        shared.trace.instant("first token", prefill=self.id.hex(), computing=output.prefill_seconds)
        tokens = self.tokens if part is None else part.tokens + output.cached_tokens
        shared.counts.count_prompt(tokens, output.cached_tokens, self.fetched)
        self.attempts.prefilled(self, output)
        self.attempts.sampled(self, output)

    def hand_over(self, output: Output) -> None:
        """The first token is sent, so the KV may be used. Not before: `commit` wakes the pump, whose thread
        competes for the GIL."""
        if self.closed:
            return
        if not self.handover:
            self.close("finished")
            return
        self.to(State.HELD)
        if output.finish_reason:
            self.stream = None
            self.close("finished")
        elif self.reading is None:
            self._end_if_unused()
        elif self.taker is None:
            self.shared.sender.commit(self.id, handed_over(output))
        else:
            self.reading.revoke("gone")

    # ------------------------------------------------------------ a part of a shared prompt

    def start_part(self, request: EngineRequest, plan: Sequence[PlanRange]) -> None:
        shared = self.shared
        if {of.prefill_id for of in plan if of.incarnation == shared.incarnation} != {request.id}:
            self.lost(Code.INVALID, "a worker computes one part of a prompt")
            return
        part = start_part(self, request, plan)
        if part is None:
            self.lost(Code.NO_ROOM, "no room for a part of a prompt now")
            return
        self.part, self.reading = part, part.reading
        self.to(State.COMPUTING)
        shared.counts.prompt_parts += 1
        self.advance(part)

    def advance(self, part: Part) -> None:
        """Computes the next range, if steps of other workers compute all earlier ones."""
        positions = self.shared.engine.next_range(self.live_request)
        if positions is not None and all(stop > positions.start for stop in part.not_begun):
            may_wait = partial(self.waits.may_wait, part, positions.start)
            self.shared.engine.begin_range(self.live_request, may_wait)
            self.started()

    def range_launched(self) -> None:
        if self.part is not None and self.state is State.COMPUTING:
            self.advance(self.part)

    def written(self, event: kv.Injected | kv.FetchFailed | kv.Closed | kv.Began) -> None:
        """KV of another part."""
        part = self.part
        if part is None or self.closed:
            return
        match event:
            case kv.Began(_, stop):
                part.not_begun.discard(stop)
                self.advance(part)
            case kv.Injected():
                part.uncommitted.discard(event.decode_id)
                self._finish_part(part)
                self._end_if_unused()
            case kv.FetchFailed(_, reason):
                self._part_failed(f"KV of another part did not come: {reason}")

    def computed(self, stop: int) -> None:
        part = self.part
        if part is None or self.closed:
            return
        if part.failed:
            self._part_failed(part.failed)
            return
        for output_id in [output_id for output_id, end in part.outputs.items() if end <= stop]:
            del part.outputs[output_id]
            self.shared.sender.commit(output_id, NO_TOKEN)

    def _part_sampled(self, part: Part, output: Output) -> None:
        part.output = output
        if not part.is_final:  # its token means nothing: it says that the part is computed
            self.shared.counts.count_prompt(part.tokens, 0, 0)
            self.attempts.token(self, output._replace(finish_reason="length"))
        if not self.closed:
            self.to(State.COMPUTED)
            self._finish_part(part)

    def _finish_part(self, part: Part) -> None:
        """Goes on with a part when all of it is known to be right."""
        output, shared = part.output, self.shared
        if self.state is not State.COMPUTED or not part.complete or output is None:
            return
        self.shared.engine.verified(self.live_request)
        shared.counts.prompt_parts_waited += part.waited
        shared.trace.instant("part", prefill=self.id.hex(), tokens=part.tokens, waited_us=part.waited * 1e6)
        if part.is_final:
            self._first_token(output)
            self.hand_over(output)
        else:
            self.to(State.HELD)
            self._end_if_unused()

    def _part_failed(self, why: str) -> None:
        self.shared.counts.prompt_parts_failed += 1
        self.lost(Code.DROPPED, why)

    # ------------------------------------------------------------ held

    def released(self, reading: Reading, reason: str) -> None:
        if self.closed:
            return
        if reading is self.reading:  # by its decode worker
            self.reading = None
            if reason == "acked":
                self.live_request.handed_over = True
            if self.taker is not None:
                return  # the blocks stay for the decode on this worker
        if self.part is not None:
            if reason == "acked":
                self._end_if_unused()
            else:
                self._part_failed(f"another worker has not fetched its KV: {reason}")
        elif reason == "deadline":
            self.lost(Code.DROPPED, "not fetched before the hold deadline")
        elif reason == "reused":
            self.lost(Code.INVALID, "this id was used before: draw a new one")
        else:
            self.close("finished")

    def _end_if_unused(self) -> None:
        """A held part ends when no transfer and no decode of this worker will use it."""
        if self.state is State.HELD and not self.leases and self.taker is None:
            self.close("finished")

    @property
    def is_wanted(self) -> bool:
        return self.shared.sender.has_fetch(self.id)

    @property
    def is_spare(self) -> bool:
        # A part that is not the last one is held only while other workers read it.
        return self.state is State.HELD and self.taker is None and self.gives_token and not self.is_wanted

    def drop(self) -> None:
        text = "prefill %s is dropped: no decode worker has fetched it, and its blocks are needed"
        log.warning(text, self.id.hex()[:8])
        self.lost(Code.DROPPED, "not fetched, and its blocks were needed")

    def take(self, decode: Attempt) -> LiveRequest | bool | None:
        if self.closed or not self.gives_token:
            return None
        if self.taker is None:
            self.taker = decode
            if self.state is State.HELD and self.reading is not None:
                self.reading.revoke("gone")
        if self.taker is not decode:
            return None
        return self.state is State.HELD and not self.leases and self.live_request

    def let_go(self, decode: Attempt, *, resumed: bool) -> None:
        assert self.taker is decode, "it has taken the prefill"
        self.stream = None
        if resumed:
            self.live = None
        self.close("finished" if resumed else "gone")
