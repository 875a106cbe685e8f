"""The interface of a rank's KV cache, as a sender or a receiver uses it: `Pool`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from msgspec.structs import replace

from baton.kv_transfer.layout import ITEM_BYTES, KVLayout, Range, Slice
from baton.kv_transfer.peer_memory import PeerMemory
from baton.kv_transfer.protocol.local_messages import Staged
from baton.kv_transfer.protocol.messages import Export

Event = Any  # torch.cuda.Event; None where everything is done at once
Rest = int | None
"""The checksum of a slice minus the sum of the words that a rank has read, modulo 2⁶⁴. None: wrong or
overwritten.

The ranks of a worker may read different heads of a slice. Then only the rank with the first head subtracts
from the checksum, the others from 0. So the slice is right if their rests add up to 0."""
Outcome = Callable[[], list[Rest]]
"""Returns the rest of each slice that was pulled."""


class Pool(Protocol):
    """The KV cache of one rank. Of a slice it copies the heads that the rank holds."""

    def enter_thread(self) -> None:
        """Call first in each thread that uses the pool."""
        ...

    def table(self, block_ids: Sequence[int], num_tokens: int, state_slot: int = 0) -> Any:
        """Where positions [0, num_tokens) and the states of a request lie."""
        ...

    def record(self) -> Event:
        """An event on the current stream."""
        ...

    def passed(self, event: Event) -> bool: ...

    gather_most: int
    """How many slices are worth gathering together."""

    def gather(self, batch: Sequence[Staged], after: Sequence[Event] = ()) -> Event:
        """Pool → slots. When the event that is returned has passed, the slots are filled and the pool is no
        longer read. `after`: nothing, or for each slice the event after which it may be read. None: at
        once."""
        ...

    def scatter(self, batch: Sequence[Staged]) -> tuple[Event, Event]:
        """Slots → pool. First event: the slots are free; second: the pool holds the bytes."""
        ...

    def export(self) -> Export:
        """Lets peers on this host read slots with a generation. Raises Unreachable if that is not supported
        here. With several ranks it waits for the others."""
        ...

    def adopt(self, export: Export) -> None:
        """Instead of `export`: slices with a generation go to these slots, which are the transfer process's.
        Raises Unreachable. With several ranks it waits for the others."""
        ...

    def open(self, export: Export, dtype: str) -> PeerMemory:
        """`dtype`: of KV there; "": not known. Raises Unreachable unless a test copy succeeded."""
        ...

    def opened(self, memory: Any) -> bool:
        """Whether all ranks can read `memory`, which `open` returned. False: not all have answered yet.
        Raises Unreachable if a rank cannot read it."""
        ...

    def pull(self, memory: Any, batch: Sequence[Staged]) -> tuple[Event, Outcome]:
        """Copies slots of `memory`, which is open, to the pool.

        When the event has passed, the slots may be used again and the outcome is known. Only the outcome says
        whether the bytes in the pool are right. Raises Unreachable if the memory cannot be read any more."""
        ...

    def close(self) -> None:
        """Wait for everything enqueued, and let go of the arena."""
        ...


def of_each_dtype(layout: KVLayout) -> dict[str | None, KVLayout]:
    """The layout with each dtype of KV, by dtype. None: the layout's own dtype."""
    return {dtype: replace(layout, dtype=dtype) for dtype in ITEM_BYTES} | {None: layout}


def held_heads(piece: Slice, heads: Range) -> Range:
    """The heads of a slice that are among `heads`."""
    return max(piece.head_start, heads[0]), min(piece.head_start + piece.head_count, heads[1])
