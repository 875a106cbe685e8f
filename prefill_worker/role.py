"""The prefill role: makes attempts of prefills, and passes to them what engine and KV sender report."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import baton.kv_transfer as kv
from baton.engine import Engine, EngineRequest, Output
from baton.engine.core.live_request import LiveRequest
from baton.kv_transfer.endpoint.pump import NO_TOKEN
from baton.prefill_worker.serving import ServedPrefixes
from baton.worker import messages
from baton.worker.engine_process.attempts import Attempt, Reading, State, handed_over
from baton.worker.engine_process.loop import Context, Role
from baton.worker.engine_process.paged_kv import paged_kv
from baton.worker.engine_process.parts import LayerWaits, Part, start_part
from baton.worker.engine_process.prefix_fetches import PrefixFetches
from baton.worker.messages import Code, PlanRange, ToEngine

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False, kw_only=True)
class PrefillAttempt(Attempt):
    """One prefill, from its submission to the release of its blocks."""

    role: "PrefillRole"
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
        self.role.trace.instant("added", attempt=self.id.hex())
        self.live = self.role.engine.add(request, handover=self.handover, owner=self)

    def started(self) -> None:
        """The prompt has its blocks, and a step is about to compute it."""
        if self.awaited:
            self.awaited = False
            self.attempts.prefill_started(self)

    def sampled(self, output: Output) -> None:
        if self.part is None:
            self._first_token(output)
            self.role.sampled.append((self, output))
        else:
            self._part_sampled(self.part, output)

    def _first_token(self, output: Output) -> None:
        role, part = self.role, self.part
        role.trace.instant("first token", prefill=self.id.hex(), computing=output.prefill_seconds)
        tokens = self.tokens if part is None else part.tokens + output.cached_tokens
        role.counts.count_prompt(tokens, output.cached_tokens, self.fetched)
        role.counts.count(output)
        self.attempts.prefilled(self, output)
        self.attempts.token(self, output)

    def hand_over(self, output: Output) -> None:
        """The first token is sent, so the KV may be used."""
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
            self.role.sender.commit(self.id, handed_over(output))
        else:
            self.reading.revoke("gone")

    # ------------------------------------------------------------ a part of a shared prompt

    def start_part(self, request: EngineRequest, plan: Sequence[PlanRange]) -> None:
        role = self.role
        if {of.prefill_id for of in plan if of.incarnation == role.incarnation} != {request.id}:
            self.lost(Code.INVALID, "a worker computes one part of a prompt")
            return
        part = start_part(self, role.engine, role.receiver, role.sender, request, plan)
        if part is None:
            self.lost(Code.NO_ROOM, "no room for a part of a prompt now")
            return
        self.part, self.reading = part, part.reading
        self.to(State.COMPUTING)
        role.counts.prompt_parts += 1
        role.parts.append(self)
        self.advance(part)

    def advance(self, part: Part) -> None:
        """Computes the next range, if steps of other workers compute all earlier ones."""
        engine = self.role.engine
        found = engine.next_range(self.live_request)
        if found is not None and all(stop > found.start for stop in part.not_begun):
            engine.begin_range(self.live_request, partial(self.role.waits.may_wait, part, found.start))
            self.started()

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
            self.role.sender.commit(output_id, NO_TOKEN)

    def _part_sampled(self, part: Part, output: Output) -> None:
        part.output = output
        if not part.is_final:  # its token means nothing: it says that the part is computed
            self.role.counts.count_prompt(part.tokens, 0, 0)
            self.attempts.token(self, output._replace(finish_reason="length"))
        if not self.closed:
            self.to(State.COMPUTED)
            self._finish_part(part)

    def _finish_part(self, part: Part) -> None:
        """Goes on with a part when all of it is known to be right."""
        output, role = part.output, self.role
        if self.state is not State.COMPUTED or not part.complete or output is None:
            return
        role.engine.verified(self.live_request)
        role.counts.prompt_parts_waited += part.waited
        role.trace.instant("part", prefill=self.id.hex(), tokens=part.tokens, waited_us=part.waited * 1e6)
        if part.is_final:
            self._first_token(output)
            self.hand_over(output)
        else:
            self.to(State.HELD)
            self._end_if_unused()

    def _part_failed(self, why: str) -> None:
        self.role.counts.prompt_parts_failed += 1
        self.lost(Code.DROPPED, why)

    # ------------------------------------------------------------ held

    def released(self, reading: Reading, reason: str) -> None:
        if self.closed:
            return
        is_own = reading is self.reading
        if is_own:
            self.reading = None
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
        return self.role.sender.has_fetch(self.id)

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

    def stop(self) -> None:
        if self.live is not None:
            self.role.engine.cancel(self.live)


class SenderSink:
    """The engine's hooks of prefills: passes reports to the KV sender and to their routers.

    Only a shared prompt waits, for its KV from other workers. `sender` and `waits` are set after the engine
    is built, because they use its cache.
    """

    sender: kv.Sender
    waits: LayerWaits

    def __init__(self, trace: kv.TraceWriter) -> None:
        self._trace = trace
        self.layers_ready = 0
        """Layers of all steps that hand over KV. With several ranks, all ranks count the same."""
        self._cached: list[tuple[bytes, int]] = []  # prefills of the next step: positions in the prefix cache

    def prefill_started(
        self,
        prefill: PrefillAttempt,
        block_ids: Sequence[int],
        num_tokens: int,
        num_cached: int,
        state_slot: int,
    ) -> None:
        assert prefill.reading is not None, "the sender expects it"
        prefill.reading.open(block_ids, num_tokens, state_slot)
        if num_cached:
            self._cached.append((prefill.id, num_cached))
        prefill.started()

    def layer_done(self, layer: int, chunks: Mapping[PrefillAttempt, range]) -> bool:
        """As in `Hooks`: True if the KV that all these prompts await will not come."""
        self.layers_ready += 1
        # Not before: another rank may still be computing cached positions until it comes to this step.
        for request_id, num_cached in self._cached:
            self.sender.ready(request_id, None, 0, num_cached)
        self._cached.clear()
        shared: list[tuple[Part, range]] = []
        for prefill, chunk in chunks.items():
            if (part := prefill.part) is None:
                self.sender.ready(prefill.id, layer, chunk.start, chunk.stop)
                continue
            shared.append((part, chunk))
            # Before the chunk waits for KV of other workers. Once that did not come, all else is of no use.
            for output_id in () if part.failed else part.outputs:
                self.sender.ready(output_id, layer, chunk.start, chunk.stop)
        if layer == 0:
            self.waits.step_begins()
        for part, chunk in shared:
            # A decode worker gets all positions from the final part, which has those before the chunk now.
            if self.waits.wait(part, layer, chunk.start) and part.is_final:
                start = part.gaps.get(chunk.start, chunk.start)
                self.sender.ready(part.id, layer, start, chunk.stop)
        if self._trace.enabled:
            for prefill, chunk in chunks.items():
                self._trace.instant(
                    "layer", prefill=prefill.id.hex(), layer=layer, start=chunk.start, stop=chunk.stop
                )
        return len(shared) == len(chunks) and all(part.failed for part, _ in shared)


class PrefillRole(Role):
    """Prefills prompts for a handover, or for their first token alone. Owns the KV sender.

    The sender may read the blocks of a prefill while this has a lease `Reading`.
    """

    handles = (messages.Prefill,)

    def __init__(
        self,
        context: Context,
        engine: Engine,
        sink: SenderSink,
        receiver: kv.Receiver,
        prefix_fetches: PrefixFetches,
    ) -> None:
        """`sink` is the engine's. It gets its sender here. `receiver` is that of the decode role, which polls
        it."""
        self.attempts = context.attempts
        self.counts = context.counts
        self.trace = context.trace
        self.engine = engine
        self.sender = sink.sender = context.transport.sender(paged_kv(engine, lambda: sink.layers_ready))
        self.receiver = receiver
        self.waits = sink.waits = LayerWaits(receiver, context.heartbeat.tick)
        self.incarnation = context.config.incarnation
        self.parts: list[PrefillAttempt] = []  # of shared prompts, that have ranges to begin
        self.sampled: list[tuple[PrefillAttempt, Output]] = []  # by the step that has landed
        self._prefix_fetches = prefix_fetches
        self._served = ServedPrefixes(engine.prefix_exchange, self.sender, context.trace)

    @property
    def kv_fd(self) -> int:
        return self.sender.fileno()

    @property
    def empty(self) -> bool:
        return self._served.idle and self.sender.idle

    def handle(self, message: ToEngine) -> None:
        assert isinstance(message, messages.Prefill)
        request = message.work.request
        prefill = PrefillAttempt(
            role=self,
            stream=message.stream,
            origin=message.work.origin,
            tokens=len(request.prompt_ids) + len(request.output_ids),
            handover=message.handover,
            awaited=message.handover and message.report_start,
        )
        if not self.attempts.open(prefill):
            return
        self.trace.instant("taken", attempt=request.id.hex())
        if message.plan:
            prefill.start_part(request, message.plan)
            return
        if message.handover:
            prefill.reading = Reading(prefill, self.sender, request.id)
            self.sender.expect(request.id)
        if self._prefix_fetches.get(prefill, request, message.content, partial(prefill.add, request)):
            prefill.to(State.IMPORTING)
        else:
            prefill.add(request, 0)

    def move_kv(self, spare: float) -> None:
        for event in self.sender.poll():
            if isinstance(event, kv.ContentWanted):
                self._served.serve(event)
            else:
                event.owner.handle(event)

    def after_step(self) -> None:
        if self.parts:
            self.parts = [prefill for prefill in self.parts if prefill.state is State.COMPUTING]
            for prefill in self.parts:
                assert prefill.part is not None
                prefill.advance(prefill.part)

    def after_tokens(self) -> None:
        # After the tokens: `commit` wakes the pump, whose thread competes for the GIL.
        for prefill, output in self.sampled:
            prefill.hand_over(output)
        self.sampled.clear()

    def shutdown(self) -> None:
        self.sender.shutdown()
