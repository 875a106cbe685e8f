"""The pump: a thread that gathers KV of prefills into arena slots, for the peers that fetch it.

The engine thread appends to `_commands` and takes from `_events`. Both deques are safe for one producer and
one consumer. The pump thread has all else, the channel included, while it holds `_awake`. The engine thread
takes this lock only if the pump sleeps, and never waits for it.
"""

import contextlib
import itertools
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from baton.content import CHUNK_TOKENS
from baton.kv_transfer.arena import ArenaEnd
from baton.kv_transfer.channel import Channel, ChannelClosed
from baton.kv_transfer.endpoint.outgoing import OutgoingPrefill, OutgoingTransfer, Slicing, Turns
from baton.kv_transfer.endpoint.pulls import exported
from baton.kv_transfer.layout import slice_bytes
from baton.kv_transfer.protocol import local_messages as local
from baton.kv_transfer.protocol.credits import SenderSlots
from baton.kv_transfer.protocol.frame import FrameType, Header
from baton.kv_transfer.protocol.messages import FirstToken, Reason
from baton.kv_transfer.trace import TraceWriter
from baton.kv_transfer.transport import ContentWanted, PagedKV, Released
from baton.kv_transfer.wait import EVENT_POLL, wait

LOOK = 0.002
"""Seconds between two looks at CUDA events until all is launched. Each look and each gather takes the GIL
from the thread that launches a forward pass, and that pass hides the transfer."""
NO_TOKEN = FirstToken(0)
"""In COMMIT of a transfer by content. It means nothing."""
_Taken = tuple[OutgoingPrefill, local.Staged, local.SliceOut]
"""A slice to gather, and the message that hands it over."""


class Pump:
    """Gathers slices into arena slots. Owns its thread and the channel.

    Attributes:
        error: what ended the thread. None: it runs.
        pool: the KV of the engine, and the slots.
        last_layer: its number.
        fetched: prefill ids with a FETCH that waits or is being served.
    """

    def __init__(
        self, end: ArenaEnd, kv: PagedKV, trace: TraceWriter, *, exports: bool = False, adopts: bool = False
    ) -> None:
        """`exports` and `adopts` as in `Transport`."""
        from baton.kv_transfer.endpoint.ranked_pool import open_ranks  # torch: in engine processes only

        self.pool = open_ranks(kv, end, exported=exports)
        self._layout = kv.layout
        self._kv_layers = kv.layout.kv_layers
        self.last_layer = kv.layout.num_layers - 1
        self._trace = trace
        self._commands: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._events: deque[Released | ContentWanted] = deque()
        self.error: Exception | None = None
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._asleep = False  # until it is woken
        self._awake = threading.Lock()  # held unless the pump sleeps
        self._notify = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # `poll` has something
        self._channel = Channel(end.channel, local.ToSender)
        self._prefills: dict[bytes, OutgoingPrefill] = {}
        self._slicing = Slicing(kv.layout, kv.ranks)
        self._turns = Turns(kv.layout.num_layers)
        self._slots = SenderSlots(end.arena.num_slots)
        # In stream order, with the events.
        self._gathers: deque[tuple[Any, list[tuple[OutgoingPrefill, local.SliceOut]]]] = deque()
        self.fetched: set[bytes] = set()
        self._stopping = False
        self._generations = itertools.count(1)
        self._exports = exports and not adopts
        self._adopts = adopts
        self._exported_slot_bytes = 0
        self._thread = threading.Thread(target=self._run, name="kv pump", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------ engine thread

    def order(self, command: Callable[..., None], *args: Any, wakes: bool = True) -> None:
        """Makes the pump call one of its commands. `wakes` False: an awake pump looks when it does anyway."""
        self._commands.append((command, args))
        if wakes or self._asleep:  # looked at after the command is there: the pump looks in the other order
            os.eventfd_write(self._wake, 1)

    def order_now(self, command: Callable[..., None], *args: Any) -> None:
        """As `order`, but in this thread if the pump sleeps. A request waits, and waking takes 0.1 ms."""
        self._commands.append((command, args))
        if self._awake.acquire(blocking=False):
            is_alone = len(self._commands) == 1
            try:
                self._do_commands()
                if is_alone and not self._channel.pending:
                    return  # the pump has nothing to do, and would compete for the GIL
            except ChannelClosed as e:
                self.error = e
            finally:
                self._awake.release()
        os.eventfd_write(self._wake, 1)

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

    def fileno(self) -> int:
        """Readable when poll() has something."""
        return self._notify

    @property
    def idle(self) -> bool:
        """No prefill is open or expected, and no memory of the transport is in use."""
        return not self._commands and not self._prefills and self._slots.whole

    def shutdown(self) -> None:
        """Stops reading blocks and closes the sender."""
        self.order(self._stop)
        self._thread.join()
        self.pool.close()
        self._channel.sock.close()
        os.close(self._wake)
        os.close(self._notify)

    # ------------------------------------------------------------ pump thread

    def _run(self) -> None:
        try:
            self.pool.enter_thread()
            channel, waiting, urgent = self._channel, False, False
            if self._exports:
                with self._awake:
                    self._send_export(exported(self.pool))
            fd = channel.fileno()
            while not self._stopping:
                watched, look = [self._wake, fd], None
                if waiting and urgent:
                    look = EVENT_POLL
                elif waiting:
                    watched, look = [self._wake], LOOK  # messages about free slots can wait, too
                self._asleep = not waiting
                if self._commands:  # from before it was seen to be asleep
                    look = 0
                ready = wait(watched, look, [fd] if channel.pending else [])
                self._asleep = False
                if self._wake in ready:
                    os.eventfd_read(self._wake)
                with self._awake:
                    channel.flush()
                    waiting = self._turn()
                    urgent = self._turns.urgent
        except Exception as e:  # noqa: BLE001  any error: poll() raises it in the engine's thread
            self.error = e
            os.eventfd_write(self._notify, 1)

    def _turn(self) -> bool:
        """Handles commands and messages, and starts gathers. Returns whether to look at the device again."""
        while True:
            self._do_commands()
            while messages := self._channel.receive():
                for message in messages:
                    self._handle(message)
            while self._gathers and self.pool.passed(self._gathers[0][0]):
                self._gathered(self._gathers.popleft()[1])
            if not self._gather_next():
                return bool(self._gathers or (self._slots.free and self._turns.waiting))

    def _gather_next(self) -> bool:
        """Starts a gather of the few slices that are next in turn. Returns False if there are none."""
        if self._turns.urgent and self._is_first():
            return False
        batch, after = self._next_batch(ahead=False)
        if not batch:
            batch, after = self._next_batch(ahead=True)
        if not batch:
            return False
        staged = [item for _, item, _ in batch]
        with self._trace.measure(
            "gather", slices=len(staged), layers=sorted({x.piece.layer for x in staged})
        ):
            done = self.pool.gather(staged, after)
        handed = [(prefill, message) for prefill, _, message in batch]
        if done is None:
            self._gathered(handed)
        else:
            self._gathers.append((done, handed))
        return True

    def _is_first(self) -> bool:
        """Whether a gather is under way, and its reader has no other slice. Then the next gather waits until
        its slices are handed over: the launch would take as long as the gather."""
        slices = [message for _, handed in self._gathers for _, message in handed]
        return 0 < len(slices) == self._slots.in_use and all(message.generation for message in slices)

    def _next_batch(
        self, *, ahead: bool
    ) -> tuple[list[tuple[OutgoingPrefill, local.Staged, local.SliceOut]], list[Any]]:
        """The slices next in turn, and their events.

        With `ahead`, a gather of the last layer is launched before its event, and waits on the device. A
        launch after the event would come behind a long matrix product, and nothing would hide that time."""
        batch: list[_Taken] = []
        after: list[Any] = []
        while self._slots.free and len(batch) < self.pool.gather_most:
            transfer = self._turns.next(self.pool.passed, ahead=ahead)
            if transfer is None:
                break
            after.append(transfer.pending[0][1])
            batch.append(self._take(transfer))
        return batch, after

    def _take(self, transfer: OutgoingTransfer) -> _Taken:
        """Takes the next slice of a transfer, with a credit and a slot for it."""
        piece, _ = transfer.pending.popleft()
        slot = self._slots.take(transfer.account)
        transfer.prefill.gathers += 1
        generation = rank = 0
        if transfer.account.reached or transfer.large:
            generation = next(self._generations)
            if not self._adopts:  # else all ranks fill the same slots
                rank = self._slicing.rank(piece)
        length = slice_bytes(self._layout, piece)
        header = Header(FrameType.KV, transfer.id, piece, transfer.seq, length)
        message = local.SliceOut(header, slot, generation, rank)
        transfer.seq += 1
        staged = local.Staged(piece, slot, transfer.prefill.table, generation=generation)
        return transfer.prefill, staged, message

    def _gathered(self, handed: list[tuple[OutgoingPrefill, local.SliceOut]]) -> None:
        """The slots are filled: hands them over. The transfer process drops slices of ended transfers."""
        self._channel.send(local.SlicesOut([message for _, message in handed]))
        for prefill, _ in handed:
            prefill.gathers -= 1
            if prefill.ended is not None:
                self._end(prefill, prefill.ended)

    # ------------------------------------------------------------ commands: the thread holds `_awake`

    def _do_commands(self) -> None:
        while self._commands:
            function, args = self._commands.popleft()
            function(*args)

    def _stop(self) -> None:
        self._stopping = True

    def expect(self, prefill_id: bytes) -> None:
        if prefill_id not in self._prefills:
            self._prefills[prefill_id] = OutgoingPrefill(prefill_id)
            self._channel.send(local.Offer(prefill_id))

    def open(
        self, prefill_id: bytes, table: Any, num_tokens: int, states_at: Sequence[int] | None, owner: Any
    ) -> None:
        self.expect(prefill_id)
        prefill = self._prefills[prefill_id]
        assert prefill.table is None, "a prefill was opened twice"
        prefill.table, prefill.num_tokens, prefill.is_part = table, num_tokens, states_at is not None
        prefill.states_at = (num_tokens,) if states_at is None else tuple(states_at)
        prefill.owner = owner
        if prefill.transfer is not None:
            self._plan_all(prefill.transfer)

    def extend(self, prefill_id: bytes, table: Any) -> None:
        if (prefill := self._prefills.get(prefill_id)) is not None:
            prefill.table = table

    def ready(self, prefill_id: bytes, layer: int | None, start: int, stop: int, event: Any) -> None:
        prefill = self._prefills.get(prefill_id)
        if prefill is None or prefill.ended is not None:
            return  # closed meanwhile
        is_last = stop == prefill.num_tokens
        if layer in self._layout.state_layers and stop not in prefill.states_at:
            return  # later positions change its states
        layers = self._kv_layers if layer is None else (layer,)
        prefill.launched = is_last and layers[-1] == self.last_layer
        for i in layers:
            entry = (i, start, stop, event)
            prefill.ready.append(entry)
            if prefill.transfer is not None:
                self._slicing.add(prefill.transfer, *entry)

    def serve(self, pin_id: bytes, table: Any, start: int, stop: int, owner: Any) -> None:
        # No event: the steps that wrote the KV are over, and it need not wait for those under way.
        ready = [(layer, start, stop, None) for layer in self._kv_layers]
        self._prefills[pin_id] = OutgoingPrefill(
            pin_id, table, stop, ready, launched=True, first_token=NO_TOKEN, owner=owner
        )
        self._channel.send(local.Pinned(pin_id, (stop - start) // CHUNK_TOKENS))

    def commit(self, prefill_id: bytes, first_token: FirstToken) -> None:
        prefill = self._prefills.get(prefill_id)
        if prefill is None or prefill.ended is not None:
            return
        prefill.first_token = first_token
        # The receiver waits for COMMIT. Both messages go in one packet, since each packet is a wakeup.
        if prefill.transfer is not None:
            self._channel.post(self._commit_of(prefill.transfer, first_token))
        self._channel.send(local.Finished(prefill_id))

    def close(self, prefill_id: bytes, reason: Reason) -> None:
        prefill = self._prefills.get(prefill_id)
        if prefill is None or prefill.ended is None:
            self._channel.send(local.CloseOut(prefill_id, reason))
        if prefill is not None:
            self._end(prefill, reason)

    # ------------------------------------------------------------ from the transfer process

    def _handle(self, message: Any) -> None:
        match message:
            case local.SlotFree(slot, unsent):
                self._slots.give_back(slot, unsent=unsent)
            case local.Granted():
                self._granted(message)
            case local.Reached(number, reached):
                self._slots.account(number).reached = reached
            case local.RingOut(export):
                self._send_export(exported(self.pool, export))
            case local.StartOut():
                self._start(message)
            case local.PinOut(pin_id, chunks, first_chunk):
                self._report(ContentWanted(pin_id, chunks, first_chunk))
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
            self._channel.send(local.Recalled(m.session, m.total, account.recall()))
        else:
            account.grant(m.total)

    def _send_export(self, export: local.Exported) -> None:
        if export.export is not None:
            self._exported_slot_bytes = export.export.slot_bytes
        self._channel.send(export)

    def _start(self, m: local.StartOut) -> None:
        prefill = self._prefills.get(m.prefill_id)
        if prefill is None or prefill.ended is not None:
            # Closed meanwhile, and the transfer process will read that next. The FETCH no longer waits.
            self.fetched.discard(m.prefill_id)
            return
        self._drop_transfer(prefill)
        account = self._slots.account(m.session)
        account.window = m.window
        large = account.reached and self._exported_slot_bytes > m.slot_bytes
        slot_bytes = self._exported_slot_bytes if large else m.slot_bytes
        transfer = OutgoingTransfer(m.transfer_id, prefill, account, slot_bytes, large, m.ranges)
        prefill.transfer = transfer
        self.fetched.add(prefill.id)
        self._turns.add(transfer)
        if prefill.table is not None:
            self._plan_all(transfer)

    def _stop_transfer(self, m: local.StopOut) -> None:
        prefill = self._prefills.get(m.prefill_id)
        if prefill is not None and prefill.transfer is not None and prefill.transfer.id == m.transfer_id:
            self._drop_transfer(prefill)

    def _plan_all(self, transfer: OutgoingTransfer) -> None:
        prefill = transfer.prefill
        if not self._slicing.can_serve(transfer):
            self._channel.send(local.RefuseFetch(transfer.id))
            self._drop_transfer(prefill)
            return
        for entry in prefill.ready:
            self._slicing.add(transfer, *entry)
        if prefill.first_token is not None:
            self._channel.send(self._commit_of(transfer, prefill.first_token))

    def _commit_of(self, transfer: OutgoingTransfer, first_token: FirstToken) -> local.CommitOut:
        """Everything is planned, so the counts are known: COMMIT need not wait for the last frames."""
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

    def _report(self, event: Released | ContentWanted) -> None:
        self._events.append(event)
        os.eventfd_write(self._notify, 1)
