"""How the sending and the receiving side pace themselves: the tuning constants of their processes."""

_LEAST_LANES = 4  # a session with fewer lanes gets the slots and the credit of so many

# ---------------------------------------------------------------- sender

# Engine process. Seconds between looks at CUDA events. Each look and each gather takes the GIL from the
# thread that launches a forward pass, and until all is launched the pass hides the transfer.
LOOK = 0.002
LOOK_OF_RANK = 0.0005  # of other ranks: rank 0 learns of their gathers when it looks itself
LOOK_LAUNCHED = 0.00005  # once all is launched

# Transfer process. Frames that a lane in a mover has: one that is written, and the next.
FRAMES_AHEAD = 2
# Slots under way per lane: one that is written, the next, and one that is sent but not reported yet.
_SLOTS_PER_LANE = 3


def window(lanes: int, num_slots: int, *, exported: bool) -> int:
    """How many of the arena's slots the frames of a session may have at once: at most half of them.

    Three quarters of slots that the peer reads, in shared memory or on a GPU. It answers only when its engine
    looks: after 2 ms, in which a link between GPUs carries 700 MB, and on CPUs after a whole step."""
    if exported:
        return max(1, num_slots * 3 // 4)
    return min(max(lanes, _LEAST_LANES) * _SLOTS_PER_LANE, max(1, num_slots // 2))


# ---------------------------------------------------------------- receiver

# Engine process. All but the last are seconds.
EVENT_POLL = 0.00005  # between looks at CUDA events while some are awaited
INJECTING = 0.0005  # that one injection may take the host, rarely longer
HOLD = 0.002  # that a slice waits for others
PATIENCE = 0.02  # after which launches wait for a slice: on a busy host a launch is always due
SLICES_AT_ONCE = 16  # that are injected together at most

# Transfer process. Slots per lane that wait for frames: enough until the next grant is used. The memory of
# more slots would have left every cache before it is written to.
_CREDIT_PER_LANE = 4


def credit(missing_frames: int, lanes: int, *, exported: bool) -> int:
    """The credit that a session can use. One frame more per lane: slices need not have their full size."""
    wanted = missing_frames + lanes
    return wanted if exported else min(wanted, _CREDIT_PER_LANE * max(lanes, _LEAST_LANES))
