"""Parts of a prompt that several workers compute at the same time.

A *plan* names ranges of positions, in order, and the worker of each. The ranges of a worker are its *part*.
It is a prefill of the prompt up to its last range, and the KV of the other positions comes from the workers
that compute them. The *final* part has the last range: it samples, and hands over like any prefill.

1. The part gets all its blocks at once, or is refused. If steps move memory for it (`engine.core.elastic`),
   it asks again after each of them, and holds nothing meanwhile. It is computed after earlier prompts of its
   worker.
2. For each other worker with an earlier range it fetches that KV, of layers with windows what its own ranges
   read. For each one with a later range it offers its own KV, under an id for this pair of workers. So a
   transfer of one receiver never ends that of another.
3. A range is computed when KV of the end of each earlier range has come: the steps that compute them have
   then started. If the first layer has states, those after the range before must have come, too.
4. Each layer of that step writes its own KV, which leaves at once. Before its attention it waits until the
   layer has the KV of all earlier ranges, and the next layer its states. These leave after a range, for the
   worker of the next one. The slot that they leave from is written again when that worker, and those of all
   ranges until then, have passed the layer.
5. When the step is over, COMMIT tells the receivers that its inputs were complete. COMMIT waits for no other
   COMMIT.
6. When COMMIT of each earlier part has come, the prefix cache may have the KV, and the first token leaves.
7. The blocks are free when no transfer reads or writes them.

Why nothing waits in a circle ("──▶": waits for):

    layer of a step   ──▶ transfer of that layer ──▶ steps that started before this one
                          └─▶ arena slots here, which the waiting thread itself empties
    the same, rank 1… ──▶ the layer on rank 0 ──▶ copies of KV by other threads of all ranks
    start of a range  ──▶ start of each earlier range, and prompts of its worker that have their blocks;
                          while requests decode here, all KV of each earlier range
    COMMIT            ──▶ the end of the steps of its own part
    token, cache      ──▶ COMMIT of each earlier part
    end of the blocks ──▶ ACK of each later part ──▶ COMMIT

A step waits only for steps that started before it, and for the workers of one plan: another plan has other
workers, which may be well. No request that decodes waits with it (`Scheduler`): beside decodes, a range comes
when all KV before it is there. If a worker is lost or slow, `STEP_WAIT` bounds the waits of a step together.
The step then computes garbage in the rows of this part only. If it has no other rows, and the engine has one
rank, it ends with that layer. The part fails, and so do the parts that rest on it.
"""

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import baton.kv_transfer as kv
from baton.engine import EngineRequest, Output
from baton.kv_transfer.endpoint.pump import NO_TOKEN
from baton.prefill_worker.attempt import PrefillAttempt
from baton.rpc import worker_pb2 as pb
from baton.worker.engine_process.engine_attempt import BatonResources, Reading, Writing
from baton.worker.engine_process.states import State

STEP_WAIT = 2.0
"""Seconds that a step waits at most for KV from other workers, all its layers together."""


def pair_id(sender: bytes, receiver: bytes) -> bytes:
    """The id under which one part of a plan offers its KV to another. Both know it without a message."""
    return hashlib.blake2b(sender + receiver, digest_size=16).digest()


def pair_ids(part: bytes, plan: Sequence[pb.PlanRange]) -> set[bytes]:
    """The ids under which a part may move KV, from and to the other parts of its plan."""
    others = {of.prefill_id for of in plan} - {part}
    return {pair_id(*pair) for other in others for pair in ((part, other), (other, part))}


class SplitSteps:
    """The layers of steps with parts, one step at a time: what leaves of them, and what they wait for. Steps
    without a part do not come here."""

    def __init__(self, receiver: kv.Receiver, sender: kv.Sender, tick: Callable[[], None]) -> None:
        """`tick`: a sign of life."""
        self._receiver = receiver
        self._sender = sender
        self._tick = tick
        self._left = STEP_WAIT

    def layer_done(self, layer: int, parts: "Sequence[tuple[PartAttempt, range]]") -> bool:
        """The layer is written for the chunks of these parts. Waits for the KV before them. True: it will not
        come for any part."""
        for part, chunk in parts:
            # Before the chunk waits for KV of other workers. Once that did not come, all else is of no use.
            for output_id in () if part.failed else part.outputs:
                self._sender.ready(output_id, layer, chunk.start, chunk.stop)
        if layer == 0:
            self._left = STEP_WAIT
        for part, chunk in parts:
            # A decode worker gets all positions from the final part, which has those before the chunk now.
            if self._wait(part, layer, chunk.start) and part.is_final:
                start = part.gaps.get(chunk.start, chunk.start)
                self._sender.ready(part.id, layer, start, chunk.stop)
        return all(part.failed for part, _ in parts)

    def may_wait(self, part: "PartAttempt", start: int) -> bool:
        """Whether a step that computes the part from `start` on may have to wait."""
        return not part.failed and self._receiver.may_wait(part.uncommitted, start)

    def _wait(self, part: "PartAttempt", layer: int, start: int) -> bool:
        """Waits until the layer has all KV of the part below `start`. False: it will not have it."""
        if part.failed:
            return False
        began = time.monotonic()
        if not self._receiver.wait_for_layer(part.uncommitted, layer, start, began + self._left, self._tick):
            part.failed = (
                f"KV of layer {layer} below position {start} did not come from another worker in time"
            )
        seconds = time.monotonic() - began
        self._left -= seconds
        part.waited += seconds
        return not part.failed


@dataclass(slots=True, eq=False, kw_only=True)
class PartAttempt(PrefillAttempt):
    """The prefill of the ranges of a prompt that this worker computes."""

    steps: SplitSteps
    is_final: bool = False
    part_tokens: int = 0
    """That are computed here."""
    gaps: dict[int, int] = field(default_factory=dict)
    """By the start of a range of its own, the end of what is here before the KV of other workers."""
    uncommitted: set[bytes] = field(default_factory=set)
    """Fetches of KV of other workers, until COMMIT."""
    outputs: dict[bytes, int] = field(default_factory=dict)
    """By id, the end of what another worker fetches. Until COMMIT."""
    not_begun: set[int] = field(default_factory=set)
    """Ends of ranges of other workers that no step computes yet, as far as known."""
    unopened: Sequence[bytes] = ()
    """Ids under which other workers may ask for its KV, while it has no room."""
    waited: float = 0.0
    """Seconds that its steps waited for KV."""
    failed: str = ""
    """Why its result is of no use."""
    output: Output | None = None
    """What its last step has sampled."""

    @property
    def _baton(self) -> BatonResources:
        assert isinstance(self.shared, BatonResources), "other engines compute no parts of prompts"
        return self.shared

    @property
    def gives_token(self) -> bool:
        """A part that is not the last one has no token, and is held only while other workers read it."""
        return self.is_final

    def start(self, request: EngineRequest, plan: Sequence[pb.PlanRange]) -> None:
        """Reserves the blocks of the part, fetches what it lacks, and opens what it offers. These transfers
        have leases on the attempt."""
        engine, sender = self._baton.engine, self._baton.sender
        if {of.prefill_id for of in plan if of.incarnation == self.shared.incarnation} != {request.id}:
            self.lost(pb.FAILURE_CODE_INVALID, "a worker computes one part of a prompt")
            return
        part_ranges = [range(of.start, of.stop) for of in plan if of.prefill_id == request.id]
        workers = {of.prefill_id: of for of in plan if of.prefill_id != request.id}
        read_at = [of.start for of in plan if of.prefill_id != request.id and of.start > part_ranges[0].start]
        live = self.live = engine.start_part(request, part_ranges, read_at, owner=self)
        if live is None:
            self.unopened = [pair_id(request.id, worker_id) for worker_id in workers]
            self.no_room(partial(self.start, request, plan))
            return
        self.again, self.unopened = None, ()
        cached = live.num_cached
        uncached = [range(max(of.start, cached), of.stop) for of in part_ranges if of.stop > cached]
        self.is_final = plan[-1].prefill_id == request.id
        self.part_tokens = sum(map(len, uncached))
        self.gaps = dict(_gaps(uncached, cached))
        starts, ends = {of.start for of in part_ranges}, {of.stop for of in part_ranges}
        for worker_id, worker in workers.items():
            worker_ranges = [range(of.start, of.stop) for of in plan if of.prefill_id == worker_id]
            if earlier := _before(worker_ranges, part_ranges[-1]):
                self._fetch(worker, earlier, starts)
            if offered_ranges := _before(part_ranges, worker_ranges[-1]):
                opened_id = pair_id(request.id, worker_id)
                self.outputs[opened_id] = offered_ranges[-1].stop
                worker_starts = [each.start for each in worker_ranges]
                states_at = sorted(ends.intersection(worker_starts))
                Reading(self, opened_id).open(offered_ranges[-1].stop, states_at, worker_starts)
                sender.ready(opened_id, None, 0, min(cached, offered_ranges[-1].stop))
        if self.is_final:
            self.reading = Reading(self, request.id)
            stop = part_ranges[-1].stop
            self.reading.open(stop, next_positions=[stop])
            sender.ready(request.id, None, 0, cached)
        self.to(State.COMPUTING)
        self.attempts.counts.prompt_parts += 1
        self._advance()

    def stop(self) -> None:
        PrefillAttempt.stop(self)
        for unopened_id in self.unopened:
            self.shared.sender.close(unopened_id, "gone")

    def _fetch(self, worker: pb.PlanRange, ranges: Sequence[range], starts: set[int]) -> None:
        """Fetches ranges of another worker. `starts`: of the ranges of this one."""
        live, cached = self.live_request, self.live_request.num_cached
        # What is cached here is not fetched. If this is all, the ACK still lets the other worker go on.
        wanted = [(max(each.start, cached), each.stop) for each in ranges if each.stop > cached]
        fetch_id = pair_id(worker.prefill_id, self.id)
        self.uncommitted.update([fetch_id] if wanted else ())
        self.not_begun.update(stop for _, stop in wanted)
        self._baton.receiver.fetch_ranges(
            fetch_id,
            prefill_id=fetch_id,
            kv_address=worker.kv_address,
            incarnation=worker.incarnation,
            block_ids=tuple(live.blocks),
            ranges=wanted,
            next_positions=sorted(starts),
            states_at=[stop for _, stop in wanted if stop in starts],
            state_slot=live.state_slot,
            owner=Writing(self, fetch_id),
        )

    def _advance(self) -> None:
        """Computes the next range, if steps of other workers compute all earlier ones."""
        live = self.live_request
        positions = live.next_range
        if positions is not None and all(stop > positions.start for stop in self.not_begun):
            may_wait = partial(self.steps.may_wait, self, positions.start)
            self._baton.engine.lives.begin_range(live, may_wait)
            self.started()

    def range_launched(self) -> None:
        if self.state is State.COMPUTING:
            self._advance()

    def written(self, event: kv.Injected | kv.FetchFailed | kv.Closed | kv.Began) -> None:
        """KV of another part."""
        if self.closed:
            return
        match event:
            case kv.Began(_, stop):
                self.not_begun.discard(stop)
                self._advance()
            case kv.Injected():
                self.uncommitted.discard(event.decode_id)
                self._finish()
                self._end_if_unused()
            case kv.FetchFailed(_, reason):
                self._fail(f"KV of another part did not come: {reason}")

    def computed(self, stop: int) -> None:
        if self.closed:
            return
        if self.failed:
            self._fail(self.failed)
            return
        for output_id in [output_id for output_id, end in self.outputs.items() if end <= stop]:
            del self.outputs[output_id]
            self.shared.sender.commit(output_id, NO_TOKEN)

    def sampled(self, output: Output) -> None:
        self.output = output
        if not self.is_final:  # its token means nothing: it says that the part is computed
            self.attempts.counts.count_prompt(self.part_tokens, 0, 0)
            self.attempts.prefilled(self, output)
            self.attempts.token(self, output._replace(finish_reason="length"), elsewhere=True)
        if not self.closed:
            self.to(State.COMPUTED)
            self._finish()

    def _finish(self) -> None:
        """Goes on when all KV of the part is known to be right."""
        output, shared = self.output, self._baton
        if self.state is not State.COMPUTED or output is None or self.uncommitted:
            return
        shared.engine.lives.verified(self.live_request)
        self.attempts.counts.prompt_parts_waited += self.waited
        shared.trace.instant(
            "part", prefill=self.id.hex(), tokens=self.part_tokens, waited_us=self.waited * 1e6
        )
        if self.is_final:
            self.prefilled(output, self.part_tokens + output.cached_tokens)
            self.attempts.token(self, output)
            self.hand_over(output)
        else:
            self.to(State.HELD)
            self._end_if_unused()

    def _fail(self, why: str) -> None:
        self.attempts.counts.prompt_parts_failed += 1
        self.lost(pb.FAILURE_CODE_DROPPED, why)

    def _unread(self, reason: str) -> None:
        if reason == "acked":
            self._end_if_unused()
        else:
            self._fail(f"another worker has not fetched its KV: {reason}")


def _before(ranges: Sequence[range], other: range) -> list[range]:
    return [each for each in ranges if each.start < other.start]


def _gaps(ranges: Sequence[range], stop: int) -> Iterator[tuple[int, int]]:
    for each in ranges:
        yield each.start, stop
        stop = each.stop
