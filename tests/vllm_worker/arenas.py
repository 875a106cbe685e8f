"""What a service process makes, and its engine process inherits."""

from __future__ import annotations

import os
from itertools import chain

from baton.kv_transfer import ArenaEnd, Arenas


def make_arenas(ranks: int, num_slots: int, slot_bytes: int) -> tuple[list[Arenas], list[ArenaEnd]]:
    """Returns the arenas of each rank, and the ends of the transfer process: to send, and to receive."""
    directions, transfer = [], []
    for _ in range(2):
        engine, theirs = ArenaEnd.pair(num_slots, slot_bytes)
        first, others = engine.of_ranks(ranks)
        directions.append([first, *others])
        transfer.append(theirs)
    # As in a child: ranks share the descriptor of the memory.
    inherited = {fd: os.dup(fd) for end in chain(*directions) for fd in end.fds}
    arenas = []
    for ends in zip(*directions, strict=True):
        sends, receives = ([inherited[fd] for fd in end.fds] for end in ends)
        arenas.append(Arenas(sends, receives, num_slots, slot_bytes, exports=True, adopts=False))
        for end in ends:
            end.close_channels()
    return arenas, transfer
