"""Prefills as their sender sees them: READY → STREAMING → COMMITTED → RELEASED. Pure: events in, effects out.

A prefill is *held* from `offer` until the ACK of its current transfer, a `close` by the engine, or a
deadline. Only one transfer of it is open at a time. docs/protocol.md has the table of its states. FETCHes for
ids that are not offered yet wait in a bounded table. Ended ids leave a tombstone.

A FETCH_CONTENT is a FETCH for a *pin*. It waits until the engine has pinned the chunks, or has refused. The
pin ends with the transfer, and at a deadline that no message extends. A pin waits for the peer's credits
only. The peer grants them for blocks that it has reserved. The id of a pin is longer than that of a prefill.
So no peer can draw the id of a prefill for a pin, or name a pin in a FETCH.
"""

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec

from baton.kv_names import CHUNK_TOKENS
from baton.kv_transfer.config import MOST_PINS, TransferDeadlines
from baton.kv_transfer.protocol.local_messages import ContentWanted, FetchWaits, ReleasedOut, StopOut
from baton.kv_transfer.protocol.messages import Aborted, Commit, Fetch, FetchContent, Have, Reason
from baton.kv_transfer.protocol.shared import Expired, Send, Tombstones

_PIN = b"pin:"
"""Begins the id of a pin. The id of its transfer follows."""


class HoldState(enum.Enum):
    READY = enum.auto()  # no transfer open
    STREAMING = enum.auto()
    COMMITTED = enum.auto()  # COMMIT was sent; frames may still be under way
    RELEASED = enum.auto()


@dataclass(frozen=True, slots=True)
class StartTransfer:
    """To the engine: serve this transfer."""

    prefill_id: bytes
    transfer_id: bytes
    session: int
    fetch: Fetch


Effect = StartTransfer | ContentWanted | StopOut | ReleasedOut | FetchWaits | Send | Expired


@dataclass(slots=True, eq=False)
class HeldKV:
    prefill_id: bytes  # or the id of a pin
    state: HoldState = HoldState.READY
    transfer_id: bytes | None = None  # of the open transfer; READY: of the last, whose ACK may still come
    session: int = 0
    attempt: int = 0  # the newest one that has fetched
    stop: int = 0  # the position after the last one that its FETCH asks for
    sent: int = 0  # frames of the open transfer that have begun to leave
    moved: float = 0.0  # when the open transfer last made progress
    finished: bool = False  # the prefill is computed: the hold deadline runs
    since: float = 0.0  # finished, last FETCHed or last READY again
    pinned_until: float | None = None  # of a pin; None: a prefill


@dataclass(slots=True)
class _Waiting:
    transfer_id: bytes
    session: int
    fetch: Fetch
    deadline: float
    first_chunk: int | None = None  # of a FETCH_CONTENT; None: of a FETCH


class HeldPrefills:
    """All prefills of one worker, and the FETCHes that wait for more of them."""

    def __init__(self, deadlines: TransferDeadlines, max_waiting: int, max_pins: int = MOST_PINS) -> None:
        self.held: dict[bytes, HeldKV] = {}  # by prefill id
        self.open: dict[bytes, HeldKV] = {}  # by the id of the open transfer
        self.waiting: dict[bytes, _Waiting] = {}  # by prefill id
        self._asked: set[bytes] = set()  # pins that the engine has not answered, also if their peer has left
        self._tombstones: Tombstones[Reason] = Tombstones(deadlines.tombstone)
        self._deadlines = deadlines
        self._max_waiting = max_waiting
        self._max_pins = max_pins
        self._newest_sent: tuple[HeldKV, float] | None = None  # the newest `all_sent`, and when

    # ------------------------------------------------------------ from the engine

    def offer(self, prefill_id: bytes, now: float) -> list[Effect]:
        if prefill_id in self.held:
            return []
        if self._tombstones.get(prefill_id) is not None:
            # A FETCH may still mean the earlier prefill of this id, so this one cannot be served.
            return [ReleasedOut(prefill_id, "reused")]
        held = self.held[prefill_id] = HeldKV(prefill_id, since=now)
        waiting = self.waiting.pop(prefill_id, None)
        if waiting is None:
            return []
        return self._start(held, waiting.transfer_id, waiting.session, waiting.fetch, now)

    def finish(self, prefill_id: bytes, now: float) -> list[Effect]:
        """The prefill is computed: from here on its deadlines run."""
        held = self.held.get(prefill_id)
        if held is not None:
            held.finished, held.since = True, now
        return []

    def commit(self, transfer_id: bytes, commit: Commit, now: float) -> list[Effect]:
        held = self.open.get(transfer_id)
        if held is None or held.state is not HoldState.STREAMING:
            return []  # ended while the engine spoke; or the peer used its id again, and this is the second
        held.state = HoldState.COMMITTED
        held.moved = now
        return [Send(held.session, transfer_id, commit)]

    def refuse(self, transfer_id: bytes, now: float) -> list[Effect]:
        """The FETCH asks for what the prefill does not have."""
        held = self.open.get(transfer_id)
        return [] if held is None else self._end_transfer(held, "integrity", now)

    def close(self, prefill_id: bytes, reason: Reason, now: float) -> list[Effect]:
        """The engine ends the prefill. It does not read the blocks any more, and expects no ReleasedOut."""
        effects = self._refuse_waiting(prefill_id, reason)
        held = self.held.get(prefill_id)
        if held is not None:
            effects += [e for e in self._release(held, reason, now) if isinstance(e, Send)]
        self._asked.discard(prefill_id)
        self._tombstones.bury(prefill_id, reason, now)
        return effects

    def pinned(self, pin_id: bytes, chunks: int, now: float) -> list[Effect]:
        """The engine has pinned so many chunks of a FETCH_CONTENT, at least one."""
        self._asked.remove(pin_id)
        waiting = self.waiting.pop(pin_id, None)
        if waiting is None:
            return [ReleasedOut(pin_id, "gone")]  # its peer left meanwhile
        assert waiting.first_chunk is not None
        until = now + self._deadlines.pin
        held = self.held[pin_id] = HeldKV(pin_id, finished=True, since=now, pinned_until=until)
        start, stop = (chunk * CHUNK_TOKENS for chunk in (waiting.first_chunk, waiting.first_chunk + chunks))
        fetch = msgspec.structs.replace(waiting.fetch, ranges=((start, stop),), next_positions=(stop,))
        have = Send(waiting.session, waiting.transfer_id, Have(chunks))
        return [have, *self._start(held, waiting.transfer_id, waiting.session, fetch, now)]

    # ------------------------------------------------------------ from a peer

    def fetch(self, transfer_id: bytes, session: int, fetch: Fetch, now: float) -> list[Effect]:
        if (reason := self._refusal(transfer_id, fetch)) is not None:
            return [Send(session, transfer_id, Aborted(reason, 0))]
        held = self.held.get(fetch.prefill_id)
        if held is not None:
            effects: list[Effect] = []
            if held.state is not HoldState.READY:
                effects = self._end_transfer(held, "superseded", now)
            return effects + self._start(held, transfer_id, session, fetch, now)
        effects = [FetchWaits(fetch.prefill_id)]
        old = self.waiting.get(fetch.prefill_id)
        if old is not None:
            effects = [Send(old.session, old.transfer_id, Aborted("superseded", 0))]
        deadline = now + self._deadlines.fetch_wait
        self.waiting[fetch.prefill_id] = _Waiting(transfer_id, session, fetch, deadline)
        return effects

    def fetch_content(
        self, transfer_id: bytes, session: int, message: FetchContent, now: float
    ) -> list[Effect]:
        pin_id = _PIN + transfer_id
        if self._is_used(transfer_id) or pin_id in self._asked or self._tombstones.get(pin_id):
            reason = "integrity"
        elif self._pins >= self._max_pins:
            reason = "busy"
        else:
            fetch = Fetch(pin_id, 0, ())
            deadline = now + self._deadlines.fetch_wait
            self.waiting[pin_id] = _Waiting(transfer_id, session, fetch, deadline, message.first_chunk)
            self._asked.add(pin_id)
            return [ContentWanted(pin_id, message.chunks, message.first_chunk)]
        return [Send(session, transfer_id, Aborted(reason, 0))]

    @property
    def _pins(self) -> int:
        """The pins that the engine was asked for, and those that it has made."""
        return len(self._asked) + sum(held.pinned_until is not None for held in self.held.values())

    def _is_used(self, transfer_id: bytes) -> bool:
        """Ids are drawn fresh for each FETCH."""
        return transfer_id in self.open or any(w.transfer_id == transfer_id for w in self.waiting.values())

    def _refusal(self, transfer_id: bytes, fetch: Fetch) -> Reason | None:
        """Why a FETCH cannot start or wait. None: it can."""
        if self._is_used(transfer_id):
            return "integrity"
        held, waiting = self.held.get(fetch.prefill_id), self.waiting.get(fetch.prefill_id)
        newest = held.attempt if held is not None else waiting.fetch.attempt if waiting is not None else 0
        if fetch.attempt < newest:
            return "superseded"
        if held is not None or waiting is not None:
            return None
        is_full = len(self.waiting) >= self._max_waiting
        return self._tombstones.get(fetch.prefill_id) or ("busy" if is_full else None)

    def ack(self, transfer_id: bytes, now: float) -> list[Effect]:
        """Releases the prefill of this transfer, if the transfer is current. A committed transfer stays
        current when its session ends."""
        for held in (self.open.get(transfer_id), *self.held.values()):
            if held is None or held.transfer_id != transfer_id:
                continue
            if held.state is HoldState.STREAMING:
                return self._end_transfer(held, "integrity", now)  # ACK of what was never committed
            return self._release(held, "acked", now)
        return []

    def abort(self, transfer_id: bytes, reason: Reason, now: float) -> list[Effect]:
        held = self.open.get(transfer_id)
        if held is not None:
            return self._end_transfer(held, reason, now)
        for prefill_id, waiting in self.waiting.items():
            if waiting.transfer_id == transfer_id:
                return self._refuse_waiting(prefill_id, reason)
        return []  # crossed our own ABORTED

    def uses(self, session: int) -> bool:
        """Whether the session has an open transfer, or a FETCH that waits."""
        return any(x.session == session for x in (*self.open.values(), *self.waiting.values()))

    def session_down(self, session: int, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for prefill_id in [p for p, w in self.waiting.items() if w.session == session]:
            effects += self._refuse_waiting(prefill_id, "gone")
        for held in [h for h in self.open.values() if h.session == session]:
            effects += self._end_transfer(held, "gone", now)
        return [e for e in effects if not isinstance(e, Send)]

    # ------------------------------------------------------------ frames and time

    def begin_send(self, transfer_id: bytes, now: float, frames: int = 1) -> bool:
        """Counts frames that are about to leave. False: their transfer has ended, and they must not leave."""
        held = self.open.get(transfer_id)
        if held is None:
            return False
        held.sent += frames
        held.moved = now
        return True

    def all_sent(self, held: HeldKV, now: float) -> None:
        """The engine has handed over the last slice of the open transfer."""
        self._newest_sent = held, now

    @property
    def commit_due(self) -> float:
        """Since when a transfer misses only its COMMIT. Infinite: none does. Of several the newest counts."""
        if self._newest_sent is None or self._newest_sent[0].state is not HoldState.STREAMING:
            return math.inf
        return self._newest_sent[1]

    def sent(self, transfer_id: bytes, now: float) -> None:
        """All of a frame has left, perhaps a while after it was counted: that is progress, too."""
        held = self.open.get(transfer_id)
        if held is not None:
            held.moved = now

    def expire(self, now: float, flow: Mapping[int, float]) -> list[Effect]:
        """`flow`: for each session that is up, when a byte of any frame last moved over it.

        Such a byte is progress of all transfers of the session: their frames may stand behind that frame."""
        limits = self._deadlines
        effects: list[Effect] = []
        for prefill_id in [p for p, w in self.waiting.items() if now >= w.deadline]:
            effects.append(Expired("fetch_wait", f"prefill {prefill_id.hex()} was not offered"))
            effects += self._refuse_waiting(prefill_id, "deadline")
        for held in list(self.held.values()):
            if not held.finished:
                continue  # the router bounds how long a prefill computes
            if held.pinned_until is not None and now >= held.pinned_until:
                effects.append(Expired("pin", f"{held.sent} frames left"))
                effects += self._release(held, "deadline", now)
                continue
            moved = max(held.moved, held.since, flow.get(held.session, 0.0))
            if held.state is not HoldState.READY and now >= moved + limits.progress:
                effects.append(Expired("progress", f"{held.sent} frames left"))
                effects += self._end_transfer(held, "deadline", now)
            if held.state is HoldState.READY and now >= held.since + limits.hold:
                effects.append(Expired("hold", f"no FETCH for prefill {held.prefill_id.hex()}"))
                effects += self._release(held, "deadline", now)
        self._tombstones.expire(now)
        return effects

    # ------------------------------------------------------------ transitions

    def _refuse_waiting(self, prefill_id: bytes, reason: Reason) -> list[Effect]:
        """Answers the FETCH that waits for this prefill, if one does."""
        waiting = self.waiting.pop(prefill_id, None)
        if waiting is None:
            return []
        answer = Send(waiting.session, waiting.transfer_id, Aborted(reason, 0))
        return [answer, FetchWaits(prefill_id, gone=True)]

    def _start(
        self, held: HeldKV, transfer_id: bytes, session: int, fetch: Fetch, now: float
    ) -> list[Effect]:
        assert held.state is HoldState.READY
        held.state, held.transfer_id, held.session = HoldState.STREAMING, transfer_id, session
        held.sent, held.moved, held.since = 0, now, now
        held.attempt = fetch.attempt
        held.stop = fetch.ranges[-1][1] if fetch.ranges else 0
        self.open[transfer_id] = held
        return [StartTransfer(held.prefill_id, transfer_id, session, fetch)]

    def _end_transfer(self, held: HeldKV, reason: Reason, now: float) -> list[Effect]:
        """STREAMING or COMMITTED → READY. A pin serves one transfer, so it is released."""
        if held.pinned_until is not None:
            return self._release(held, reason, now)
        transfer_id = held.transfer_id
        assert transfer_id is not None
        del self.open[transfer_id]
        # After these two ends of a committed transfer its ACK may still come.
        if held.state is not HoldState.COMMITTED or reason not in ("gone", "deadline"):
            held.transfer_id = None
        held.state, held.since = HoldState.READY, now
        answer = Send(held.session, transfer_id, Aborted(reason, held.sent))
        return [answer, StopOut(held.prefill_id, transfer_id)]

    def _release(self, held: HeldKV, reason: Reason | Literal["acked"], now: float) -> list[Effect]:
        effects: list[Effect] = []
        if held.state is not HoldState.READY:
            assert held.transfer_id is not None
            del self.open[held.transfer_id]
            if reason != "acked":
                effects.append(Send(held.session, held.transfer_id, Aborted(reason, held.sent)))
        held.state = HoldState.RELEASED
        del self.held[held.prefill_id]
        self._tombstones.bury(held.prefill_id, "gone" if reason in ("acked", "deadline") else reason, now)
        return [ReleasedOut(held.prefill_id, reason), *effects]
