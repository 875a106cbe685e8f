"""How the receiving side paces itself: the tuning constants of its processes."""

from __future__ import annotations

from baton.kv_transfer.config import GPU_TRANSPORTS

# Engine process. All but the last are seconds.
EVENT_POLL = 0.00005  # between looks at CUDA events while some are awaited
INJECTING = 0.0005  # that one injection may take the host, rarely longer
HOLD = 0.002  # that a slice waits for others
PATIENCE = 0.02  # after which launches wait for a slice: on a busy host a launch is always due
SLICES_AT_ONCE = 16  # that are injected together at most

# Transfer process. Slots per lane that wait for frames: enough until the next grant is used. The memory of
# more slots would have left every cache before it is written to.
_CREDIT_PER_LANE = 4
_LEAST_LANES = 4  # a session with fewer lanes gets the credit of so many


def credit(missing_frames: int, lanes: int, transport: str = "tcp") -> int:
    """The credit that a session can use. One frame more per lane: slices need not have their full size."""
    wanted = missing_frames + lanes
    return wanted if transport in GPU_TRANSPORTS else min(wanted, _CREDIT_PER_LANE * max(lanes, _LEAST_LANES))
