"""How slots go between an arena or a peer's memory and dense memory on a GPU, in few copies. Pure."""

from collections.abc import Sequence

from baton.kv_transfer.arena import exported_bytes
from baton.kv_transfer.config import EXPORTED_SLOT_BYTES

SLICES_AT_ONCE = 16
"""That are injected together at most."""
SLACK = 256 << 10
"""Bytes that are copied in vain rather than with a copy more (5 µs of the bus, or 17 of the host)."""
GATHER_BYTES = 128 << 20
"""Of slices that are gathered together. The receiver begins when all of them are gathered, so more bytes
would wait for each other. A link between GPUs carries so many in 0.35 ms. The host needs 0.3 for the next."""
SCATTER_BYTES = 2 * GATHER_BYTES
"""Of slices that are scattered together, if so many have arrived. Then the receiver's host is late: it needs
0.4 ms for each kernel, so larger ones keep the link busy."""
CONTEXT_BYTES = 600 << 20
"""That a process takes on a GPU before it allocates anything."""
LANDINGS = 2
"""Of a receiver, for slices of a peer that it converts: while a kernel scatters slices from one, the next are
copied into the other."""


def exported_slot_bytes(slot_bytes: int) -> int:
    """Of a slot on a GPU that peers read, beside arena slots of `slot_bytes`."""
    return max(slot_bytes, EXPORTED_SLOT_BYTES)


def at_once(most: int, most_bytes: int, slot_bytes: int) -> int:
    """How many slices are copied together: at most so many, and at most `most_bytes` in full slots."""
    return max(1, min(most, most_bytes // exported_slot_bytes(slot_bytes)))


def scattered_at_once(slot_bytes: int) -> int:
    """How many slices a receiver scatters together, on each of its ranks."""
    return at_once(SLICES_AT_ONCE, SCATTER_BYTES, slot_bytes)


def landing_bytes(slot_bytes: int) -> int:
    """The most that `coalesce` needs for the slices that are injected together."""
    return scattered_at_once(slot_bytes) * (exported_slot_bytes(slot_bytes) + SLACK)


def device_bytes(num_slots: int, slot_bytes: int, *, adopted: bool) -> int:
    """Memory of a GPU that KV transfer takes on each rank, if peers read slots there. `adopted`: the transfer
    process has slots for both directions, and a context. Landings are not counted, since few workers convert
    KV. If there is no memory for them, the pair of workers uses TCP."""
    slots = exported_bytes(num_slots, exported_slot_bytes(slot_bytes))
    return 2 * slots + CONTEXT_BYTES if adopted else slots


def coalesce(
    slots: Sequence[tuple[int, int]], slot_bytes: int
) -> tuple[list[tuple[int, int, int]], list[int]]:
    """Few copies between slots (address, bytes used; ascending) and one piece of other memory.

    Gives the copies (address, byte in the other memory, size) and where each slot's bytes are in the other
    memory. Slots of which all but a little is used, and their next neighbours, are one copy."""
    copies: list[tuple[int, int, int]] = []
    offsets: list[int] = []
    before = -1
    for at, size in slots:
        if copies and at == before + slot_bytes and at - sum(copies[-1][::2]) <= SLACK:
            start, offset, _ = copies[-1]
            copies[-1] = start, offset, at + size - start
            offsets.append(offset + at - start)
        else:
            offset = -(-sum(copies[-1][1:]) // 16) * 16 if copies else 0  # the kernel moves whole words
            copies.append((at, offset, size))
            offsets.append(offset)
        before = at
    return copies, offsets
