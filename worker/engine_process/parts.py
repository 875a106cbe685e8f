"""Parts of a prompt that several workers compute at the same time.

A *plan* names ranges of positions, in order, and the worker of each. The ranges of a worker are its *part*.
It is a prefill of the prompt up to its last range, and the KV of the other positions comes from the workers
that compute them. The *final* part has the last range: it samples, and hands over like any prefill.

1. The part gets all its blocks at once, or is refused. It is computed after earlier prompts of its worker.
2. For each other worker with an earlier range it fetches that KV. For each one with a later range it offers
   its own KV, under an id for this pair of workers. So a transfer of one receiver never ends that of another.
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

from baton.engine import EngineRequest, Output
from baton.kv_transfer import Receiver
from baton.worker.engine_process.engine_attempt import EngineAttempt, Reading, Writing
from baton.worker.messages import PlanRange

STEP_WAIT = 2.0
"""Seconds that a step waits at most for KV from other workers, all its layers together."""


def pair_id(sender: bytes, receiver: bytes) -> bytes:
    """The id under which one part of a plan offers its KV to another. Both know it without a message."""
    return hashlib.blake2b(sender + receiver, digest_size=16).digest()


@dataclass(slots=True, eq=False)
class Part:
    """The ranges of a prompt that this worker computes."""

    id: bytes
    is_final: bool
    tokens: int
    """That are computed here."""
    gaps: dict[int, int]
    """By the start of a range of its own, the end of what is here before the KV of other workers."""
    uncommitted: set[bytes] = field(default_factory=set)
    """Fetches of KV of other workers, until COMMIT."""
    outputs: dict[bytes, int] = field(default_factory=dict)
    """By id, the end of what another worker fetches. Until COMMIT."""
    reading: Reading | None = None
    """Of the final part: by the decode worker."""
    not_begun: set[int] = field(default_factory=set)
    """Ends of ranges of other workers that no step computes yet, as far as known."""
    waited: float = 0.0
    """Seconds that its steps waited for KV."""
    failed: str = ""
    """Why its result is of no use."""
    output: Output | None = None
    """What its last step has sampled."""

    @property
    def complete(self) -> bool:
        """All of its KV is right."""
        return self.output is not None and not self.uncommitted and not self.failed


class LayerWaits:
    """The waits of one step at a time, inside the engine's hook of its layers."""

    def __init__(self, receiver: Receiver, tick: Callable[[], None]) -> None:
        """`tick`: a sign of life."""
        self._receiver = receiver
        self._tick = tick
        self._left = STEP_WAIT

    def step_begins(self) -> None:
        self._left = STEP_WAIT

    def may_wait(self, part: Part, start: int) -> bool:
        """Whether a step that computes the part from `start` on may have to wait."""
        return not part.failed and self._receiver.may_wait(part.uncommitted, start)

    def wait(self, part: Part, layer: int, start: int) -> bool:
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


def start_part(attempt: EngineAttempt, request: EngineRequest, plan: Sequence[PlanRange]) -> Part | None:
    """Reserves the blocks of the part with the id of `request`, fetches what it lacks, and opens what it
    offers. These transfers have leases on the attempt. None: there is no room now."""
    own = [range(of.start, of.stop) for of in plan if of.prefill_id == request.id]
    engine, sender, receiver = attempt.shared.engine, attempt.shared.sender, attempt.shared.receiver
    live = attempt.live = engine.start_part(request, own, owner=attempt)
    others = {of.prefill_id: of for of in plan if of.prefill_id != request.id}
    if live is None:
        for other in others:
            sender.close(pair_id(request.id, other), "gone")
        return None
    block_ids, cached, state_slot = tuple(live.blocks), live.num_cached, live.state_slot
    starts, ends = {of.start for of in own}, {of.stop for of in own}
    uncached = [range(max(of.start, cached), of.stop) for of in own if of.stop > cached]
    part = Part(
        request.id,
        is_final=plan[-1].prefill_id == request.id,
        tokens=sum(map(len, uncached)),
        gaps=dict(_gaps(uncached, cached)),
    )
    for other, worker in others.items():
        theirs = [range(of.start, of.stop) for of in plan if of.prefill_id == other]
        if earlier := _before(theirs, own[-1]):
            # What is cached here is not fetched. If this is all, the ACK still lets the other worker go on.
            wanted = [(max(found.start, cached), found.stop) for found in earlier if found.stop > cached]
            fetch_id = pair_id(other, request.id)
            part.uncommitted.update([fetch_id] if wanted else ())
            part.not_begun.update(stop for _, stop in wanted)
            receiver.fetch_ranges(
                fetch_id,
                prefill_id=fetch_id,
                kv_address=worker.kv_address,
                incarnation=worker.incarnation,
                block_ids=block_ids,
                ranges=wanted,
                states_at=[stop for _, stop in wanted if stop in starts],
                state_slot=state_slot,
                owner=Writing(attempt, fetch_id),
            )
        if offered := _before(own, theirs[-1]):
            opened_id = pair_id(request.id, other)
            part.outputs[opened_id] = offered[-1].stop
            states_at = sorted(ends & {of.start for of in theirs})
            Reading(attempt, opened_id).open(offered[-1].stop, states_at)
            sender.ready(opened_id, None, 0, min(cached, offered[-1].stop))
    if part.is_final:
        part.reading = Reading(attempt, request.id)
        part.reading.open(own[-1].stop)
        sender.ready(request.id, None, 0, cached)
    return part


def _before(ranges: Sequence[range], other: range) -> list[range]:
    return [found for found in ranges if found.start < other.start]


def _gaps(ranges: Sequence[range], stop: int) -> Iterator[tuple[int, int]]:
    for found in ranges:
        yield found.start, stop
        stop = found.stop
