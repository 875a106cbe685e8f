"""`Slice`: KV or a state on its way from a layer to a block. One record for the whole way.

    pump       made when a layer is ready and a peer fetches it. It lies in the KV pool (`table`)
    gather     it lies in a slot: of the arena, or of memory that peers read (`memory`)
    transfer   the bytes of that slot go by a lane, or the peer reads them; with them goes `sum`
    peer       it lies in a slot of the peer's arena, or still in that memory, with a slot set aside for it
    scatter    it lies in the blocks (`table`), and its slots are free

Only its place changes, in the process that has it: `slot`, `memory`, `there`, `table`. Messages between the
processes of a worker carry it as it is. On a lane it is packed into the header of its frame
(`protocol.frame`), and in SLICES into `SliceAt` (`protocol.messages`).
"""

from typing import Any

import msgspec

from baton.kv_transfer.layout import Piece

NO_TRANSFER = bytes(16)
ARENA, EXPORTED = 0, 1
"""Memories of slots at a sender: the arena, and the one that peers read. At a receiver a memory is the arena,
or the number of the session whose peer exports it."""


class Slice(msgspec.Struct, array_like=True):
    """What it is, how many bytes it has, and where it lies now."""

    piece: Piece
    transfer_id: bytes = NO_TRANSFER
    seq: int = 0  # number within the transfer
    size: int = 0  # bytes, in a slot and on a lane
    slot: int = 0  # of the arena; at a sender with `memory`, of that memory, over all ranks
    memory: int = ARENA
    there: int = 0  # at a receiver, with `memory`: the slot in it
    sum: int = 0  # its checksum; with `memory`, if slots there have marks: its generation
    verified: bool = True  # False: the engine copies it first, and then compares `sum` with what it copied
    dtype: str | None = None  # in the slot; None: that of the pool. `gather` and `scatter` convert
    table: Any = None  # where the blocks of its request are, for copies from and to the pool
