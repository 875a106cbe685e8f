"""Gathers KV of prefills into arena slots, for the peers that fetch it. The thread of a `Sender` does it."""

import itertools
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from baton.kv_names import CHUNK_TOKENS
from baton.kv_transfer.arena import ArenaEnd
from baton.kv_transfer.channel import Channel
from baton.kv_transfer.endpoint import orders
from baton.kv_transfer.endpoint.copies import exported
from baton.kv_transfer.endpoint.other_ranks import SENDING, OtherRanks
from baton.kv_transfer.endpoint.outgoing import OutgoingPrefill, OutgoingTransfer, Slicing, Turns
from baton.kv_transfer.protocol import local_messages as local
from baton.kv_transfer.protocol.credits import SenderSlots
from baton.kv_transfer.protocol.local_messages import ContentWanted
from baton.kv_transfer.protocol.messages import FirstToken, Reason
from baton.kv_transfer.slices import EXPORTED, Slice
from baton.kv_transfer.trace import TraceWriter
from baton.kv_transfer.transport import PagedKV, Released
from baton.kv_transfer.wait import EVENT_POLL

if TYPE_CHECKING:
    from baton.kv_transfer.device.pool import Sums

LOOK = 0.002
"""Seconds between two looks at CUDA events until all is launched. Each look and each gather takes the GIL
from the thread that launches a forward pass, and that pass hides the transfer."""
NO_TOKEN = FirstToken(0)
"""In COMMIT of a transfer by content. It means nothing."""
_Taken = tuple[OutgoingPrefill, Slice]


class Pump:
    """What a sender knows of its prefills, and what is under way of them. Only the thread of the sender
    touches it, but for the attributes.

    Attributes:
        orders: of the engine's thread, which appends.
        stopped: `Stop` came.
        pool: the KV of the engine, and the slots.
        channel: to the transfer process.
        last_layer: its number.
        fetched: prefill ids with a FETCH that waits or is being served.
    """

    def __init__(
        self,
        end: ArenaEnd,
        kv: PagedKV,
        trace: TraceWriter,
        report: Callable[[Released | ContentWanted], None],
        *,
        exports: bool,
        adopts: bool,
        ranks: OtherRanks,
    ) -> None:
        """`exports` and the next as in `Transport`."""
        from baton.kv_transfer.endpoint.ranked_pool import open_ranks  # torch: in engine processes only

        self.pool = open_ranks(kv, end.arena, ranks, SENDING)
        self.orders: deque[orders.Order] = deque()
        self.stopped = False
        self.channel = Channel(end.channel, local.ToSender)
        self.last_layer = kv.layout.num_layers - 1
        self.fetched: set[bytes] = set()
        self._layout = kv.layout
        self._trace = trace
        self._report = report
        self._prefills: dict[bytes, OutgoingPrefill] = {}
        self._slicing = Slicing(kv.layout, kv.ranks, frees_windows=kv.window_blocks is not None)
        self._turns = Turns(kv.layout.num_layers)
        self._slots = SenderSlots(end.arena.num_slots)
        # In stream order, with the events.
        self._gathers: deque[tuple[Any, list[_Taken], Sums]] = deque()
        self._generations = itertools.count(1)
        self._exports = exports and not adopts
        self._adopts = adopts
        self._exported_slot_bytes = 0

    @property
    def idle(self) -> bool:
        """No prefill is open or expected, and no memory of the transport is in use."""
        return not self.orders and not self._prefills and self._slots.all_free

    def begin(self) -> None:
        """The thread begins."""
        self.pool.enter_thread()
        if self._exports:
            self._send_export(exported(self.pool))

    def turn(self) -> float | None:
        """Handles orders and messages, and starts gathers. Returns the seconds until the next look at the
        device. None: it need not be looked at."""
        self.channel.flush()
        while True:
            while self.orders:
                self._do(self.orders.popleft())
            while messages := self.channel.receive():
                for message in messages:
                    self._handle(message)
            while self._gathers and self.pool.passed(self._gathers[0][0]):
                self._gathered(*self._gathers.popleft()[1:])
            if not self._gather_next():
                break
        if not self._gathers and not (self._slots.free and self._turns.waiting):
            return None
        return EVENT_POLL if self._turns.urgent else LOOK

    def _gather_next(self) -> bool:
        """Starts a gather of the few slices that are next in turn. Returns False if there are none."""
        if self._turns.urgent and self._is_first():
            return False
        batch, after = self._next_batch(ahead=False)
        if not batch:
            batch, after = self._next_batch(ahead=True)
        if not batch:
            return False
        slices = [s for _, s in batch]
        with self._trace.measure(
            "gather", slices=len(slices), layers=sorted({s.piece.layer for s in slices})
        ):
            done, sums = self.pool.gather(slices, after)
        if done is None:
            self._gathered(batch, sums)
        else:
            self._gathers.append((done, batch, sums))
        return True

    def _is_first(self) -> bool:
        """Whether a gather is under way, and its reader has no other slice. Then the next gather waits until
        its slices are handed over: the launch would take as long as the gather."""
        slices = [s for _, batch, _ in self._gathers for _, s in batch]
        return 0 < len(slices) == self._slots.in_use and all(s.memory for s in slices)

    def _next_batch(self, *, ahead: bool) -> tuple[list[_Taken], list[Any]]:
        """The slices next in turn, and their events.

        With `ahead`, a gather of the last layer is launched before its event, and waits on the device. A
        launch after the event would come behind a long matrix product, and nothing would hide that time."""
        batch: list[_Taken] = []
        after: list[Any] = []
        now = time.monotonic()
        while self._slots.free and len(batch) < self.pool.gather_most:
            transfer = self._turns.next(self.pool.passed, now, ahead=ahead)
            if transfer is None:
                break
            after.append(transfer.pending[0][1])
            batch.append(self._take(transfer))
        return batch, after

    def _take(self, transfer: OutgoingTransfer) -> _Taken:
        """Takes the next slice of a transfer, with a credit and a slot for it."""
        s, _ = transfer.pending.popleft()
        transfer.left -= s.size
        s.slot, s.table = self._slots.take(transfer.account), transfer.prefill.table
        transfer.prefill.gathers += 1
        if transfer.account.reached or transfer.large:
            s.memory, s.sum = EXPORTED, next(self._generations)
        return transfer.prefill, s

    def _gathered(self, batch: list[_Taken], sums: "Sums") -> None:
        """The slots are filled: hands them over. The transfer process drops slices of ended transfers."""
        for (_, s), checksum in zip(batch, sums(), strict=True):
            s.table, s.sum = None, s.sum if s.memory else checksum
            if s.memory and not self._adopts:  # else all ranks fill the same slots
                s.slot += self._slicing.rank(s) * self._slots.total
        self.channel.send(local.SlicesOut([s for _, s in batch]))
        for prefill, _ in batch:
            prefill.gathers -= 1
            if prefill.ended is not None:
                self._end(prefill, prefill.ended)

    # ------------------------------------------------------------ orders

    def _do(self, order: orders.Order) -> None:
        match order:
            case orders.Ready():
                self._ready(order)
            case orders.Expect(prefill_id):
                self._expect(prefill_id)
            case orders.Open():
                self._open(order)
            case orders.Extend(prefill_id, table):
                if (prefill := self._prefills.get(prefill_id)) is not None:
                    prefill.table = table
            case orders.Serve():
                self._serve(order)
            case orders.Commit(prefill_id, first_token):
                self._commit(prefill_id, first_token)
            case orders.Close(prefill_id, reason):
                self._close(prefill_id, reason)
            case orders.Stop():
                self.stopped = True

    def _expect(self, prefill_id: bytes) -> None:
        if prefill_id not in self._prefills:
            self._prefills[prefill_id] = OutgoingPrefill(prefill_id)
            self.channel.send(local.Offer(prefill_id))

    def _open(self, order: orders.Open) -> None:
        self._expect(order.prefill_id)
        prefill, states_at = self._prefills[order.prefill_id], order.states_at
        assert prefill.table is None, "a prefill was opened twice"
        prefill.table, prefill.num_tokens, prefill.owner = order.table, order.num_tokens, order.owner
        prefill.is_part = states_at is not None
        if prefill.is_part:  # its peers compute one layer behind
            prefill.due = time.monotonic()
        prefill.states_at = (order.num_tokens,) if states_at is None else tuple(states_at)
        prefill.next_positions = tuple(order.next_positions)
        if prefill.transfer is not None:
            self._slice_ready(prefill.transfer)

    def _ready(self, order: orders.Ready) -> None:
        prefill = self._prefills.get(order.prefill_id)
        if prefill is None or prefill.ended is not None:
            return  # closed meanwhile
        last = self._layout.token_layers[-1] if order.layer is None else order.layer
        prefill.launched = order.stop == prefill.num_tokens and last == self.last_layer
        if prefill.launched:
            prefill.due = min(prefill.due, time.monotonic())
        prefill.ready.append(order)
        if prefill.transfer is not None:
            self._slicing.add(prefill.transfer, order)

    def _serve(self, order: orders.Serve) -> None:
        pin_id, table, start, stop, owner, event = order
        layers = range(self._layout.num_layers)
        ready = [orders.Ready(pin_id, layer, start, stop, event) for layer in layers]
        self._prefills[pin_id] = OutgoingPrefill(
            pin_id, table, stop, ready, time.monotonic(), launched=True, first_token=NO_TOKEN,
            states_at=(stop,), owner=owner,
        )  # fmt: skip
        self.channel.send(local.Pinned(pin_id, (stop - start) // CHUNK_TOKENS))

    def _commit(self, prefill_id: bytes, first_token: FirstToken) -> None:
        prefill = self._prefills.get(prefill_id)
        if prefill is None or prefill.ended is not None:
            return
        prefill.first_token = first_token
        # The receiver waits for COMMIT. Both messages go in one packet, since each packet is a wakeup.
        if prefill.transfer is not None:
            self.channel.post(self._commit_of(prefill.transfer, first_token))
        self.channel.send(local.Finished(prefill_id))

    def _close(self, prefill_id: bytes, reason: Reason) -> None:
        prefill = self._prefills.get(prefill_id)
        if prefill is None or prefill.ended is None:
            self.channel.send(local.CloseOut(prefill_id, reason))
        if prefill is not None:
            self._end(prefill, reason)

    # ------------------------------------------------------------ from the transfer process

    def _handle(self, message: Any) -> None:
        match message:
            case local.SlotFree(slot, unsent):
                self._slots.give_back(slot % self._slots.total, unsent=unsent)
            case local.Granted():
                self._granted(message)
            case local.Reached(number, reached):
                self._slots.account(number).reached = reached
            case local.RingOut(export):
                self._send_export(exported(self.pool, export))
            case local.StartOut():
                self._start(message)
            case local.ContentWanted():
                self._report(message)
            case local.StopOut():
                self._stop_transfer(message)
            case local.SessionGone(number):
                self._slots.close(number)
            case local.FetchWaits(prefill_id, gone):
                (self.fetched.discard if gone else self.fetched.add)(prefill_id)
            case local.ReleasedOut(prefill_id, reason):
                if prefill_id in self._prefills:
                    self._end(self._prefills[prefill_id], reason)

    def _granted(self, m: local.Granted) -> None:
        account = self._slots.account(m.session)
        if m.recall:
            self.channel.send(local.Recalled(m.session, m.total, account.recall()))
        else:
            account.grant(m.total)

    def _send_export(self, export: local.Exported) -> None:
        if export.export is not None:
            self._exported_slot_bytes = export.export.slot_bytes
        self.channel.send(export)

    def _start(self, m: local.StartOut) -> None:
        prefill = self._prefills.get(m.prefill_id)
        if prefill is None or prefill.ended is not None:
            # Closed meanwhile, and the transfer process will read that next. The FETCH no longer waits.
            self.fetched.discard(m.prefill_id)
            return
        self._drop_transfer(prefill)
        account = self._slots.account(m.session)
        large = account.reached and self._exported_slot_bytes > m.slot_bytes
        slot_bytes = self._exported_slot_bytes if large else m.slot_bytes
        reads = self._slicing.reads(m.ranges, m.next_positions)
        # Slices that a GPU reads of another one are copied together.
        lanes = 1 if account.reached and self.pool.gather_most > 1 else m.lanes
        transfer = OutgoingTransfer(
            m.transfer_id, prefill, account, self._layout.sent_as(m.dtypes), slot_bytes, large, m.ranges,
            reads, lanes=lanes,
        )  # fmt: skip
        transfer.goes_on = bool(m.next_positions)
        prefill.transfer = transfer
        self.fetched.add(prefill.id)
        self._turns.add(transfer)
        if prefill.table is not None:
            self._slice_ready(transfer)

    def _stop_transfer(self, m: local.StopOut) -> None:
        prefill = self._prefills.get(m.prefill_id)
        if prefill is not None and prefill.transfer is not None and prefill.transfer.id == m.transfer_id:
            self._drop_transfer(prefill)

    def _slice_ready(self, transfer: OutgoingTransfer) -> None:
        prefill = transfer.prefill
        if not self._slicing.can_serve(transfer):
            self.channel.send(local.RefuseFetch(transfer.id))
            self._drop_transfer(prefill)
            return
        for entry in prefill.ready:
            self._slicing.add(transfer, entry)
        if prefill.first_token is not None:
            self.channel.send(self._commit_of(transfer, prefill.first_token))

    def _commit_of(self, transfer: OutgoingTransfer, first_token: FirstToken) -> local.CommitOut:
        """Everything is sliced, so the counts are known: COMMIT need not wait for the last frames."""
        return local.CommitOut(transfer.id, first_token, transfer.frames, transfer.bytes)

    def _drop_transfer(self, prefill: OutgoingPrefill) -> None:
        if prefill.transfer is not None:
            self._turns.remove(prefill.transfer)
            prefill.transfer = None
            self.fetched.discard(prefill.id)

    def _end(self, prefill: OutgoingPrefill, reason: str) -> None:
        """Gathers no more of a prefill. It is released when the gathers under way are over."""
        prefill.ended = prefill.ended or reason
        self._drop_transfer(prefill)
        if prefill.gathers == 0:
            del self._prefills[prefill.id]
            if prefill.table is not None:
                self._report(Released(prefill.id, prefill.ended, prefill.owner))
