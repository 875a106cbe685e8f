"""What a service process makes, and its engine process inherits."""

from collections.abc import Sequence

from baton.kv_transfer import ArenaEnd, Arenas, WorkerEnds


def make_arenas(ranks: int, num_slots: int, slot_bytes: int) -> tuple[Sequence[Arenas], Sequence[ArenaEnd]]:
    """Returns the arenas of each rank, and the ends of the transfer process: to send, and to receive."""
    ends = WorkerEnds.create(num_slots, slot_bytes, ranks)
    arenas = ends.copied(exports=True, adopts=False)
    ends.close_inherited()
    return arenas, ends.transfer
