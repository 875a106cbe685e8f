"""The engine's half of the sending side: what is ready, and the thread that moves it into the arena.

The engine's thread appends orders for the pump, and takes from `_events`. Both deques are safe for one
producer and one consumer. All else of the pump belongs to the sender's thread.
"""

import contextlib
import os
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

from baton.kv_transfer.arena import ArenaEnd
from baton.kv_transfer.channel import ChannelClosed
from baton.kv_transfer.endpoint import orders
from baton.kv_transfer.endpoint.other_ranks import NO_RANKS, OtherRanks
from baton.kv_transfer.endpoint.pump import LOOK, Pump
from baton.kv_transfer.protocol.local_messages import ContentWanted
from baton.kv_transfer.protocol.messages import FirstToken, Reason
from baton.kv_transfer.trace import TraceWriter
from baton.kv_transfer.transport import PagedKV, Released
from baton.kv_transfer.wait import wait


class Sender:
    """Serves the KV of held prefills to the decode workers that fetch them. Owns a thread and its pump.

    The engine thread makes all calls, and none waits for the other thread but `shutdown`.

    Attributes:
        error: what ended the thread. None: it runs.
    """

    def __init__(
        self, end: ArenaEnd, kv: PagedKV, trace: TraceWriter, *, exports: bool = False, adopts: bool = False,
        ranks: OtherRanks = NO_RANKS,
    ) -> None:  # fmt: skip
        """`exports` and the next as in `Transport`."""
        self.error: Exception | None = None
        self._pump = Pump(end, kv, trace, self._report, exports=exports, adopts=adopts, ranks=ranks)
        self._events: deque[Released | ContentWanted] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._notify = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # `poll` has something
        self._asleep = False  # until it is woken
        self._thread = threading.Thread(target=self._run, name="kv pump", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """Readable when `poll` has something."""
        return self._notify

    def poll(self) -> list[Released | ContentWanted]:
        """What came since the last call. Raises RuntimeError if a thread of the sender died."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._notify)
        events = [self._events.popleft() for _ in range(len(self._events))]
        if isinstance(self.error, ChannelClosed):
            raise self.error
        if self.error is not None:
            raise RuntimeError("the KV pump died") from self.error
        return events

    @property
    def idle(self) -> bool:
        """No prefill is open or expected, and no memory of the transport is in use."""
        return self._pump.idle

    def shutdown(self) -> None:
        """Stops reading blocks and closes the sender."""
        self._order(orders.Stop())
        self._thread.join()
        self._pump.pool.close()
        self._pump.channel.sock.close()
        os.close(self._wake)
        os.close(self._notify)

    def expect(self, prefill_id: bytes) -> None:
        """The prefill is accepted but not scheduled yet. Its FETCH waits without a deadline."""
        self._order(orders.Expect(prefill_id))

    def open(
        self,
        prefill_id: bytes,
        block_ids: Sequence[int],
        num_tokens: int,
        state_slot: int = 0,
        states_at: Sequence[int] | None = None,
        next_positions: Sequence[int] = (),
        owner: Any = None,
    ) -> None:
        """The prefill of positions [0, num_tokens) starts in these blocks, which stay until `Released`, which
        has the `owner`. So does the slot of its states, if the layout has states.

        `states_at`: of a part of a split prompt, the positions after which its states are sent, if the
        transfer asks for a range that ends there. None: those after `num_tokens` are sent, in any case.
        `next_positions`: of a part, the positions where peers go on, ascending. Of arrays with windows it has
        what is read there."""
        table = self._pump.pool.table(block_ids, num_tokens, state_slot)
        self._order(orders.Open(prefill_id, table, num_tokens, states_at, next_positions, owner))

    def extend(self, prefill_id: bytes, block_ids: Sequence[int], num_tokens: int) -> None:
        """The prefill has these blocks now: more than at `open`, for an engine that allocates chunk by chunk.
        Call it before `ready` for positions in the new blocks."""
        table = self._pump.pool.table(block_ids, num_tokens)
        self._order(orders.Extend(prefill_id, table), wakes=False)

    def ready(self, prefill_id: bytes, layer: int | None, start: int, stop: int) -> None:
        """K and V of [start, stop) are written when the current stream gets here. `layer` None: of all layers
        with KV. Of a layer with states: they cover [0, stop)."""
        if start < stop:
            # After the last layer the pump is woken: no computation may follow, so nothing would hide the
            # time until its next look.
            pump = self._pump
            is_last, event = layer == pump.last_layer, pump.pool.record()
            self._order(orders.Ready(prefill_id, layer, start, stop, event), wakes=is_last)

    def commit(self, prefill_id: bytes, first_token: FirstToken) -> None:
        """All positions of all layers are ready. The prefill is held until the decode worker's ACK."""
        self._order(orders.Commit(prefill_id, first_token))

    def close(self, prefill_id: bytes, reason: Reason) -> None:
        """The engine ends the prefill. Idempotent, also for ids that were never opened."""
        self._order(orders.Close(prefill_id, reason))

    def serve(
        self,
        pin_id: bytes,
        block_ids: Sequence[int],
        start: int,
        stop: int,
        state_slot: int = 0,
        owner: Any = None,
        *,
        after_steps: bool = False,
    ) -> None:
        """Sends positions [start, stop) of these blocks, which are complete and stay until `Released`. If the
        layout has states, so are those after `stop`, in `state_slot`.

        This answers `ContentWanted`. The positions are those of its first chunks. `after_steps`: they are
        complete when the current stream gets here."""
        pool = self._pump.pool
        table, event = pool.table(block_ids, stop, state_slot), pool.record() if after_steps else None
        self._order(orders.Serve(pin_id, table, start, stop, owner, event))

    def has_fetch(self, prefill_id: bytes) -> bool:
        """A decode worker asks for the prefill. This may be true before `open`."""
        return prefill_id in self._pump.fetched

    # ------------------------------------------------------------ to and from the thread

    def _order(self, order: orders.Order, *, wakes: bool = True) -> None:
        """`wakes` False: an awake thread looks when it does anyway."""
        self._pump.orders.append(order)
        if wakes or self._asleep:  # looked at after the order is there: the thread looks in the other order
            os.eventfd_write(self._wake, 1)

    def _report(self, event: Released | ContentWanted) -> None:
        self._events.append(event)
        os.eventfd_write(self._notify, 1)

    def _run(self) -> None:
        try:
            pump, channel, look = self._pump, self._pump.channel, None
            pump.begin()
            fd = channel.fileno()
            while not pump.stopped:
                # While nothing is urgent, messages about free slots can wait, too.
                watched = [self._wake] if look == LOOK else [self._wake, fd]
                self._asleep = look is None
                limit = 0 if pump.orders else look  # orders from before it was seen to be asleep
                ready = wait(watched, limit, [fd] if channel.pending else [])
                self._asleep = False
                if self._wake in ready:
                    os.eventfd_read(self._wake)
                look = pump.turn()
        except Exception as e:  # noqa: BLE001  any error: poll() raises it in the engine's thread
            self.error = e
            os.eventfd_write(self._notify, 1)
