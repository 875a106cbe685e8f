"""One prefill: what it does when the engine, the KV sender or a decode here reports."""

import logging
from dataclasses import dataclass
from functools import partial

from baton.engine import EngineRequest, Output
from baton.rpc import worker_pb2 as pb
from baton.worker.engine_process.attempt import UNREAD, Attempt, handed_over
from baton.worker.engine_process.engine_attempt import EngineAttempt, Reading
from baton.worker.engine_process.engine_protocol import Live
from baton.worker.engine_process.states import State

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False, kw_only=True)
class PrefillAttempt(EngineAttempt):
    """One prefill, from its submission to the release of its blocks."""

    handover: bool
    awaited: bool  # it has not started, and its router waits for that
    reading: Reading | None = None  # by its decode worker
    taker: Attempt | None = None  # the decode on this worker that will go on with it

    @property
    def gives_token(self) -> bool:
        """Whether a decode may go on with it."""
        return self.handover

    # ------------------------------------------------------------ to the first token

    def add(self, request: EngineRequest, fetched: int) -> None:
        """Queues the prompt. `fetched`: as in the attribute."""
        self.fetched = fetched
        self.to(State.COMPUTING)
        self.shared.trace.instant("added", attempt=self.id.hex())
        self.live = self.shared.engine.add(request, handover=self.handover, owner=self)

    def open(self, num_tokens: int) -> None:
        assert self.reading is not None, "the sender expects it"
        self.reading.open(num_tokens)
        self.started()

    def started(self) -> None:
        """The prompt has its blocks, and a step is about to compute it."""
        if self.awaited:
            self.awaited = False
            self.attempts.prefill_started(self)

    def sampled(self, output: Output) -> None:
        self.prefilled(output, self.tokens)
        self.attempts.token(self, output)
        self.attempts.after_tokens(partial(self.hand_over, output))

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
        self._unread(reason)

    def _unread(self, reason: str) -> None:
        """No worker reads it any more under one of its ids."""
        if reason in UNREAD:
            self.lost(*UNREAD[reason])
        else:
            self.close("finished")

    def _end_if_unused(self) -> None:
        """A held prefill ends when no transfer and no decode of this worker will use it."""
        if self.state is State.HELD and not self.leases and self.taker is None:
            self.close("finished")

    @property
    def is_wanted(self) -> bool:
        return self.shared.sender.has_fetch(self.id)

    @property
    def is_spare(self) -> bool:
        return self.state is State.HELD and self.taker is None and self.gives_token and not self.is_wanted

    def drop(self) -> None:
        text = "prefill %s is dropped: no decode worker has fetched it, and its blocks are needed"
        log.warning(text, self.id.hex()[:8])
        self.lost(pb.FAILURE_CODE_DROPPED, "not fetched, and its blocks were needed")

    def take(self, decode: Attempt) -> Live | bool | None:
        if self.closed or not self.gives_token:
            return None
        if self.taker is None:
            self.taker = decode
            if self.state is State.HELD and self.reading is not None:
                self.reading.revoke("gone")
        if self.taker is not decode:
            return None
        if self.live is not None:
            self.live.goes_on = True
        return self.state is State.HELD and not self.leases and self.live_request

    def let_go(self, decode: Attempt, *, resumed: bool) -> None:
        assert self.taker is decode, "it has taken the prefill"
        self.stream = None
        if resumed:
            self.live = None
        self.close("finished" if resumed else "gone")
