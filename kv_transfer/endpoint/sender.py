"""The engine's half of the sending side: what is ready. The `pump` moves it into the arena."""

from collections.abc import Sequence
from typing import Any

from baton.kv_transfer.arena import ArenaEnd
from baton.kv_transfer.endpoint.pump import Pump
from baton.kv_transfer.protocol.messages import FirstToken, Reason
from baton.kv_transfer.trace import TraceWriter
from baton.kv_transfer.transport import ContentWanted, PagedKV, Released


class Sender:
    """Serves the KV of held prefills to the decode workers that fetch them. Owns the pump.

    The engine thread makes all calls, and none waits for the pump but `shutdown`."""

    def __init__(
        self, end: ArenaEnd, kv: PagedKV, trace: TraceWriter, *, exports: bool = False, adopts: bool = False
    ) -> None:
        """`exports` and `adopts` as in `Transport`."""
        self._pump = Pump(end, kv, trace, exports=exports, adopts=adopts)

    def fileno(self) -> int:
        """Readable when `poll` has something."""
        return self._pump.fileno()

    def poll(self) -> list[Released | ContentWanted]:
        """What came since the last call. Raises RuntimeError if a thread of the sender died."""
        return self._pump.poll()

    @property
    def idle(self) -> bool:
        """No prefill is open or expected, and no memory of the transport is in use."""
        return self._pump.idle

    def shutdown(self) -> None:
        """Stops reading blocks and closes the sender."""
        self._pump.shutdown()

    def expect(self, prefill_id: bytes) -> None:
        """The prefill is accepted but not scheduled yet. Its FETCH waits without a deadline."""
        self._pump.order(self._pump.expect, prefill_id)

    def open(
        self,
        prefill_id: bytes,
        block_ids: Sequence[int],
        num_tokens: int,
        state_slot: int = 0,
        states_at: Sequence[int] | None = None,
        owner: Any = None,
    ) -> None:
        """The prefill of positions [0, num_tokens) starts in these blocks, which stay until `Released`, which
        has the `owner`. So does the slot of its states, if the layout has states.

        `states_at`: of a part of a shared prompt, the positions after which its states are sent, if the
        transfer asks for a range that ends there. None: those after `num_tokens` are sent, in any case."""
        table = self._pump.pool.table(block_ids, num_tokens, state_slot)
        self._pump.order(self._pump.open, prefill_id, table, num_tokens, states_at, owner)

    def extend(self, prefill_id: bytes, block_ids: Sequence[int], num_tokens: int) -> None:
        """The prefill has these blocks now: more than at `open`, for an engine that allocates chunk by chunk.
        Call it before `ready` for positions in the new blocks."""
        table = self._pump.pool.table(block_ids, num_tokens)
        self._pump.order(self._pump.extend, prefill_id, table, wakes=False)

    def ready(self, prefill_id: bytes, layer: int | None, start: int, stop: int) -> None:
        """K and V of [start, stop) are written when the current stream gets here. `layer` None: of all layers
        with KV. Of a layer with states: they cover [0, stop)."""
        if start < stop:
            # After the last layer the pump is woken: no computation may follow, so nothing would hide the
            # time until its next look.
            pump, is_last = self._pump, layer == self._pump.last_layer
            pump.order(pump.ready, prefill_id, layer, start, stop, pump.pool.record(), wakes=is_last)

    def commit(self, prefill_id: bytes, first_token: FirstToken) -> None:
        """All positions of all layers are ready. The prefill is held until the decode worker's ACK."""
        self._pump.order_now(self._pump.commit, prefill_id, first_token)

    def close(self, prefill_id: bytes, reason: Reason) -> None:
        """The engine ends the prefill. Idempotent, also for ids that were never opened."""
        self._pump.order(self._pump.close, prefill_id, reason)

    def serve(
        self, pin_id: bytes, block_ids: Sequence[int], start: int, stop: int, owner: Any = None
    ) -> None:
        """Sends positions [start, stop) of these blocks, which are complete and stay until `Released`.

        This answers `ContentWanted`. The positions are those of its first chunks."""
        self._pump.order(self._pump.serve, pin_id, self._pump.pool.table(block_ids, stop), start, stop, owner)

    def has_fetch(self, prefill_id: bytes) -> bool:
        """A decode worker asks for the prefill. This may be true before `open`."""
        return prefill_id in self._pump.fetched
