"""The prefill role: handles messages, reports of the KV sender, and the outputs of engine steps."""

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import baton.kv_transfer as kv
from baton.content import CHUNK_TOKENS
from baton.engine import Engine, Output, StepResult
from baton.engine.core.live_request import LiveRequest
from baton.engine.core.prefix_exchange import Pin, PrefixExchange
from baton.kv_transfer.endpoint.pump import NO_TOKEN
from baton.kv_transfer.endpoint.receiver import Event
from baton.worker import messages
from baton.worker.engine_process.attempts import Attempt, Attempts, handed_over
from baton.worker.engine_process.loop import Parts, Role
from baton.worker.engine_process.paged_kv import paged_kv
from baton.worker.engine_process.parts import LayerWaits, Part, start_part
from baton.worker.engine_process.prefix_fetches import PrefixFetches
from baton.worker.messages import Code, ToEngine

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False, kw_only=True)
class PrefillAttempt(Attempt):
    """One prefill, from its submission to the release of its blocks."""

    handover: bool
    awaited: bool  # it has not started, and its router waits for that
    opened: set[bytes] = field(default_factory=set)
    """Ids under which the sender may read its blocks, until it reports them released."""
    part: Part | None = None
    """Of a prompt that other workers compute, too."""
    held: bool = False  # computed and its first token sent; the blocks stay for the decode worker
    taker: bytes | None = None  # the decode on this worker that will go on with it

    @property
    def gives_token(self) -> bool:
        """Whether a decode may go on with it. A part that is not the last one has no token."""
        return self.handover and (self.part is None or self.part.is_final)

    @property
    def sent_at_once(self) -> Collection[bytes]:
        """Ids whose transfers get a layer of a chunk before the chunk waits for KV of other workers. There
        are none once such KV did not come: what the step computes from then on is of no use."""
        if self.part is None:
            return self.opened
        return () if self.part.failed else self.part.outputs.keys()

    @property
    def in_use(self) -> bool:
        """Whether a transfer reads or writes its blocks."""
        return bool(self.opened or (self.part is not None and self.part.inputs))


class SenderSink:
    """The engine's hooks of prefills: passes reports to the KV sender and to their routers.

    Only a shared prompt waits, for its KV from other workers. `sender` and `waits` are set after the engine
    is built, because they use its cache.
    """

    sender: kv.Sender
    waits: LayerWaits

    def __init__(self, trace: kv.TraceWriter, attempts: Attempts) -> None:
        self._trace = trace
        self._attempts = attempts
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
        prefill.opened.add(prefill.id)
        self.sender.open(prefill.id, block_ids, num_tokens, state_slot)
        if num_cached:
            self._cached.append((prefill.id, num_cached))
        if prefill.awaited:
            prefill.awaited = False
            self._attempts.prefill_started(prefill)

    def layer_done(self, layer: int, chunks: Mapping[PrefillAttempt, range]) -> bool:
        """As in `Hooks`: True if the KV that all these prompts await will not come."""
        self.layers_ready += 1
        # Not before: another rank may still be computing cached positions until it comes to this step.
        for request_id, num_cached in self._cached:
            self.sender.ready(request_id, None, 0, num_cached)
        self._cached.clear()
        for prefill, chunk in chunks.items():
            for opened_id in prefill.sent_at_once:
                self.sender.ready(opened_id, layer, chunk.start, chunk.stop)
        if layer == 0:
            self.waits.step_begins()
        is_useless = True
        for prefill, chunk in chunks.items():
            part = prefill.part
            # A decode worker gets all positions from the final part, which has those before the chunk now.
            if part is not None and self.waits.wait(part, layer, chunk.start) and part.is_final:
                start = part.gaps.get(chunk.start, chunk.start)
                self.sender.ready(prefill.id, layer, start, chunk.stop)
            is_useless &= part is not None and bool(part.failed)
        if self._trace.enabled:
            for prefill, chunk in chunks.items():
                self._trace.instant(
                    "layer", prefill=prefill.id.hex(), layer=layer, start=chunk.start, stop=chunk.stop
                )
        return is_useless


class PrefillRole(Role):
    """Prefills prompts for a handover, or for their first token alone. Owns the KV sender.

    The sender may read the blocks of an opened prefill. The engine gets them back only after the sender has
    reported the prefill as released.
    """

    handles = (messages.Prefill,)

    def __init__(
        self,
        parts: Parts,
        engine: Engine,
        sink: SenderSink,
        receiver: kv.Receiver,
        prefix_fetches: PrefixFetches,
    ) -> None:
        """`sink` is the engine's. It gets its sender here. `receiver` is that of the decode role, which
        reports to `fetched`."""
        self._attempts = parts.attempts
        self._counts = parts.counts
        self._trace = parts.trace
        self._sink = sink
        self.engine = engine
        cache = paged_kv(self.engine, lambda: sink.layers_ready)
        self._sender = self._sink.sender = parts.transport.sender(cache)
        self._receiver = receiver
        sink.waits = LayerWaits(receiver, parts.heartbeat.tick)
        self._incarnation = parts.config.incarnation
        self._shared: dict[bytes, PrefillAttempt] = {}  # by the id of each transfer of a part
        self._prefix_fetches = prefix_fetches
        self._prefills = parts.attempts.table(PrefillAttempt)
        self._pins: dict[bytes, Pin] = {}  # what transfers read of the prefix cache

    def owns(self, attempt_id: bytes) -> bool:
        return attempt_id in self._prefills

    @property
    def kv_fd(self) -> int:
        return self._sender.fileno()

    @property
    def empty(self) -> bool:
        return not self._pins and self._sender.idle

    # ------------------------------------------------------------ messages

    def handle(self, message: ToEngine) -> None:
        assert isinstance(message, messages.Prefill)
        request = message.work.request
        prefill_id = request.id
        prefill = PrefillAttempt(
            stream=message.stream,
            origin=message.work.origin,
            tokens=len(request.prompt_ids) + len(request.output_ids),
            handover=message.handover,
            awaited=message.handover and message.report_start,
        )
        if not self._attempts.open(prefill):
            return
        self._trace.instant("taken", attempt=prefill_id.hex())
        if message.plan:
            self._start_part(prefill, message)
            return
        if message.handover:
            self._sender.expect(prefill_id)

        def add(fetched: int) -> None:
            prefill.fetched = fetched
            self._trace.instant("added", attempt=prefill_id.hex())
            prefill.live = self.engine.add(request, handover=message.handover, owner=prefill)

        if not self._prefix_fetches.get(request, message.content, add):
            add(0)

    def _start_part(self, prefill: PrefillAttempt, message: messages.Prefill) -> None:
        request, engine = message.work.request, self.engine
        here = {of.prefill_id for of in message.plan if of.incarnation == self._incarnation}
        if here != {request.id}:
            text = "a worker computes one part of a prompt"
            del self._prefills[prefill.id]
            self._attempts.fail(prefill, Code.INVALID, text)
            return
        part = start_part(engine, self._receiver, self._sender, prefill, request, message.plan)
        if part is None:
            del self._prefills[prefill.id]
            self._attempts.fail(prefill, Code.NO_ROOM, "no room for a part of a prompt now")
            return
        prefill.part = part
        prefill.opened = {*part.outputs, *([prefill.id] if part.is_final else ())}
        self._shared |= dict.fromkeys([*prefill.opened, *part.inputs], prefill)
        self._counts.prompt_parts += 1
        self._advance(prefill, part)

    def _advance(self, prefill: PrefillAttempt, part: Part) -> None:
        """Computes the next range, if steps of other workers compute all earlier ones."""
        if prefill.closed or prefill.live is None:
            return
        found = self.engine.next_range(prefill.live)
        if found is not None and all(stop > found.start for stop in part.not_begun):
            self.engine.begin_range(prefill.live, partial(self._sink.waits.may_wait, part, found.start))
            if prefill.awaited:
                prefill.awaited = False
                self._attempts.prefill_started(prefill)

    def fetched(self, event: Event) -> bool:
        """Handles an event of the receiver about KV of a part. False: it is about other KV."""
        prefill = self._shared.get(event.decode_id)
        if prefill is None or (part := prefill.part) is None:
            return False
        if isinstance(event, kv.Began):
            part.not_begun.discard(event.stop)
            self._advance(prefill, part)
            return True
        del self._shared[event.decode_id]
        part.inputs.remove(event.decode_id)
        if isinstance(event, kv.Injected):
            part.uncommitted.discard(event.decode_id)
            self._finish_part(prefill, part)
        elif isinstance(event, kv.FetchFailed):
            self._part_failed(prefill, f"KV of another part did not come: {event.reason}")
        self._settle(prefill)
        return True

    def _part_landed(self, prefill: PrefillAttempt, part: Part, stop: int) -> None:
        """A step has computed the positions below `stop`."""
        if part.failed:
            self._part_failed(prefill, part.failed)
        for output_id in [found for found, end in part.outputs.items() if end <= stop and not prefill.closed]:
            del part.outputs[output_id]
            self._sender.commit(output_id, NO_TOKEN)

    def _part_failed(self, prefill: PrefillAttempt, why: str) -> None:
        if not prefill.closed:
            self._counts.prompt_parts_failed += 1
            self._attempts.fail(prefill, Code.DROPPED, why)
            self._close(prefill, "gone")

    def _finish_part(self, prefill: PrefillAttempt, part: Part) -> None:
        """Goes on with a part when all of it is known to be right."""
        output = part.output
        if prefill.closed or prefill.held or not part.complete or output is None:
            return
        assert prefill.live is not None, "its part has blocks"
        self.engine.verified(prefill.live)
        self._counts.prompt_parts_waited += part.waited
        self._trace.instant("part", prefill=prefill.id.hex(), tokens=part.tokens, waited_us=part.waited * 1e6)
        if part.is_final:
            self._first_token(prefill, output)
            self._hand_over(prefill, output)
        else:
            prefill.held = True

    def cancel(self, prefill_id: bytes) -> None:
        self._close(self._prefills[prefill_id], "cancelled")

    def shutdown(self) -> None:
        self._sender.shutdown()

    def _close(self, prefill: PrefillAttempt, reason: Literal["cancelled", "finished", "gone"]) -> None:
        """Ends a prefill on this worker. If the sender has opened it, its blocks stay until `_released`."""
        if prefill.closed:
            return
        prefill.closed = True
        if prefill.handover:
            # This includes a prefill that is not opened yet, because a FETCH may wait for it.
            for opened_id in prefill.opened or (prefill.id,):
                self._sender.close(opened_id, reason)
        for fetch_id in () if prefill.part is None else prefill.part.inputs:
            self._receiver.cancel(fetch_id)
        self._settle(prefill)

    def _settle(self, prefill: PrefillAttempt) -> None:
        """Removes a prefill that has ended or was handed over, when no transfer uses its blocks."""
        if prefill.in_use or self._prefills.get(prefill.id) is not prefill:
            return
        stays = prefill.taker is not None or (prefill.part is not None and not prefill.held)
        if prefill.closed or not stays:
            self._forget(prefill)

    def _forget(self, prefill: PrefillAttempt) -> None:
        self._prefix_fetches.cancel(prefill.id)
        del self._prefills[prefill.id]
        if prefill.live is not None:
            self.engine.cancel(prefill.live)

    # ------------------------------------------------------------ KV

    def move_kv(self, spare: float) -> None:
        for event in self._sender.poll():
            if isinstance(event, kv.ContentWanted):
                self._serve(event)
            elif event.prefill_id in self._shared:
                self._part_released(event)
            elif (pin := self._pins.pop(event.prefill_id, None)) is not None:
                pin.end()
            else:
                self._released(event)

    def _serve(self, wanted: kv.ContentWanted) -> None:
        """Sends another worker what the prefix cache has of a prompt, its host tier included."""
        exchange = self.engine.prefix_exchange
        if exchange is None:
            self._sender.close(wanted.pin_id, "unsupported")
        elif not exchange.bring(wanted.chunks, wanted.first_chunk, lambda: self._pin(exchange, wanted)):
            self._pin(exchange, wanted)

    def _pin(self, exchange: PrefixExchange, wanted: kv.ContentWanted) -> None:
        pin_id, first = wanted.pin_id, wanted.first_chunk
        pin = exchange.pin(wanted.chunks, first)
        if pin is None:
            self._sender.close(pin_id, "gone")
            return
        self._trace.instant("pinned", chunks=pin.num_chunks)
        self._pins[pin_id] = pin
        start, stop = (chunk * CHUNK_TOKENS for chunk in (first, first + pin.num_chunks))
        self._sender.serve(pin_id, pin.table, start, stop)

    def wanted(self, attempt: Attempt) -> bool:
        return self._sender.has_fetch(attempt.id)

    def spare(self) -> Iterator[PrefillAttempt]:
        """Held prefills that no decode worker fetches, in order of arrival."""
        for prefill in self._prefills.values():
            # A part that is not the last one is held only while other workers read it.
            free = prefill.held and not prefill.closed and prefill.taker is None and prefill.gives_token
            if free and not self.wanted(prefill):
                yield prefill

    def drop(self, prefill: PrefillAttempt) -> None:
        text = "prefill %s is dropped: no decode worker has fetched it, and its blocks are needed"
        log.warning(text, prefill.id.hex()[:8])
        self._attempts.fail(prefill, Code.DROPPED, "not fetched, and its blocks were needed")
        self._close(prefill, "gone")

    # ------------------------------------------------------------ decoding here

    def take(self, prefill_id: bytes, decode_id: bytes) -> LiveRequest | bool | None:
        """Keeps a prefill for a decode on this worker, instead of other workers.

        Returns its request when the prefill is held and no transfer reads its blocks: the engine can resume
        it then. Returns False before that. None: there is no such prefill, it has ended, or another decode
        took it.
        """
        prefill = self._prefills.get(prefill_id)
        if prefill is None or prefill.closed or not prefill.gives_token:
            return None
        if prefill.taker is None:
            prefill.taker = decode_id
            if prefill.held:
                self._sender.close(prefill_id, "gone")
        if prefill.taker != decode_id:
            return None
        return prefill.held and not prefill.in_use and prefill.live

    def let_go(self, prefill_id: bytes, decode_id: bytes, *, resumed: bool) -> None:
        """The engine has resumed the prefill under the id of its decode, or the decode has ended before."""
        prefill = self._prefills.get(prefill_id)
        if prefill is None or prefill.taker != decode_id:
            return
        prefill.stream = None
        if resumed:
            del self._prefills[prefill_id]
        else:
            prefill.taker = None
            self._close(prefill, "gone")

    def _released(self, released: kv.Released) -> None:
        prefill = self._prefills[released.prefill_id]
        prefill.opened.clear()
        if prefill.taker is not None and not prefill.closed:
            return  # the blocks stay for the decode on this worker
        if released.reason == "deadline":
            self._attempts.fail(prefill, Code.DROPPED, "not fetched before the hold deadline")
        elif released.reason == "reused":
            self._attempts.fail(prefill, Code.INVALID, "this id was used before: draw a new one")
        self._forget(prefill)

    def _part_released(self, released: kv.Released) -> None:
        prefill = self._shared.pop(released.prefill_id)
        prefill.opened.discard(released.prefill_id)
        is_taken = released.prefill_id == prefill.id and prefill.taker is not None
        if released.reason != "acked" and not is_taken:
            self._part_failed(prefill, f"another worker has not fetched its KV: {released.reason}")
        self._settle(prefill)

    # ------------------------------------------------------------ steps

    def after_step(self, result: StepResult) -> None:
        for prefill_id, chunk in result.prompts.items():
            prefill = self._prefills.get(prefill_id)
            if prefill is not None and prefill.part is not None:
                self._part_landed(prefill, prefill.part, chunk.stop)
        for output in result.outputs:
            prefill = self._prefills.get(output.id)
            if prefill is not None and prefill.part is None:
                self._first_token(prefill, output)
            elif prefill is not None and prefill.part is not None:
                self._part_output(prefill, prefill.part, output)
        for code, ended in ((Code.ENGINE, result.failed), (Code.INVALID, result.refused)):
            for prefill_id, message in ended:
                if (prefill := self._prefills.get(prefill_id)) is not None:
                    self._attempts.fail(prefill, code, message)
                    self._close(prefill, "gone")

        for prefill in {*self._shared.values()}:
            if prefill.part is not None:
                self._advance(prefill, prefill.part)

    def _part_output(self, prefill: PrefillAttempt, part: Part, output: Output) -> None:
        part.output = output
        if not part.is_final:  # its token means nothing: it says that the part is computed
            self._counts.count_prompt(part.tokens, 0, 0)
            self._attempts.token(prefill, output._replace(finish_reason="length"))
        self._finish_part(prefill, part)
        self._settle(prefill)

    def after_tokens(self, result: StepResult) -> None:
        # After the tokens: `commit` wakes the pump, whose thread competes for the GIL.
        for output in result.outputs:
            prefill = self._prefills.get(output.id)
            if prefill is not None and prefill.part is None:
                self._hand_over(prefill, output)

    def _first_token(self, prefill: PrefillAttempt, output: Output) -> None:
        self._trace.instant("first token", prefill=output.id.hex(), computing=output.prefill_seconds)
        tokens = prefill.tokens if prefill.part is None else prefill.part.tokens + output.cached_tokens
        self._counts.count_prompt(tokens, output.cached_tokens, prefill.fetched)
        self._counts.count(output)
        self._attempts.prefilled(prefill, output)
        self._attempts.token(prefill, output)

    def _hand_over(self, prefill: PrefillAttempt, output: Output) -> None:
        if not prefill.handover:
            del self._prefills[output.id]
            return
        prefill.held = True
        if prefill.closed:
            return
        if output.finish_reason:
            prefill.stream = None
            self._close(prefill, "finished")
            return
        if prefill.taker is not None:
            self._sender.close(output.id, "gone")
            return
        self._sender.commit(output.id, handed_over(output))
