"""How the sending side paces itself: the tuning constants of its processes."""

from __future__ import annotations

from baton.kv_transfer.config import GPU_TRANSPORTS

# Engine process. Seconds between looks at CUDA events. Each look and each gather takes the GIL from the
# thread that launches a forward pass, and until all is launched the pass hides the transfer.
LOOK = 0.002
LOOK_OF_RANK = 0.0005  # of other ranks: rank 0 learns of their gathers when it looks itself
LOOK_LAUNCHED = 0.00005  # once all is launched

# Transfer process. Frames that a lane in a mover has: one that is written, and the next.
FRAMES_AHEAD = 2
# Slots under way per lane: one that is written, the next, and one that is sent but not reported yet.
_SLOTS_PER_LANE = 3
_LEAST_LANES = 4  # a session with fewer lanes gets the slots of so many


def window(lanes: int, num_slots: int, transport: str = "tcp") -> int:
    """How many of the arena's slots the frames of a session may have at once: at most half of them.

    Of slots on a GPU three quarters. From a gather to the answer that its slices were read it takes 2 ms. In
    this time a link between GPUs carries 700 MB."""
    if transport in GPU_TRANSPORTS:
        return max(1, num_slots * 3 // 4)
    return min(max(lanes, _LEAST_LANES) * _SLOTS_PER_LANE, max(1, num_slots // 2))
