"""What a service process makes, and its engine process inherits."""

from __future__ import annotations

import os
from collections.abc import Sequence

from baton.kv_transfer import ArenaEnd, Arenas
from baton.worker.service_process.inherited import Ends


def make_arenas(ranks: int, num_slots: int, slot_bytes: int) -> tuple[list[Arenas], Sequence[ArenaEnd]]:
    """Returns the arenas of each rank, and the ends of the transfer process: to send, and to receive."""
    ends = Ends.create(num_slots, slot_bytes, ranks)
    found = [ends.of_rank(rank, exports=True, adopts=False) for rank in range(ranks)]
    # As in a child: ranks share the descriptor of the memory.
    inherited = {fd: os.dup(fd) for arenas in found for fd in arenas.fds}
    ends.close_inherited()
    return [arenas.with_fds([inherited[fd] for fd in arenas.fds]) for arenas in found], ends.transfer
