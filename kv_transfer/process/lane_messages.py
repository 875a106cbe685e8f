"""What a lane's connection reports, and what a mover is told of it. Between processes, or within one.

`lane` numbers the connections of one mover. A connection of no mover, which is in its handshake, has 0.
"""

from baton.kv_transfer.protocol.frame import FrameType, Header, LaneKeys
from baton.kv_transfer.protocol.local_messages import Local
from baton.kv_transfer.slices import Slice

# ---------------------------------------------------------------- transfer process → mover


class Adopt(Local):
    """Serve this lane, which is authenticated. Its state is that of `Connection.leave`. Its descriptor comes
    with it, to a fork on the side channel."""

    lane: int
    max_payload: int
    summed: bool  # as in `protocol.frame`
    read: bytes
    unwritten: bytes
    keys: LaneKeys | None
    sends: bool  # KV frames leave by this lane; else they come
    ahead: bool  # as in `Connection`


class Say(Local):
    """Send a control message. To a fork: a PING."""

    lane: int
    kind: FrameType
    transfer_id: bytes
    payload: bytes


class Move(Local):
    """Send this slice. Answered by Gone, or by the lane's `LaneClosed`."""

    lane: int
    slice: Slice


class Close(Local):
    lane: int
    kind: str
    why: str


# ---------------------------------------------------------------- reports of connections


class Begins(Local):
    """A slice begins to come, in a slot that was taken for it. Ends follows."""

    lane: int
    slice: Slice


class Ends(Local):
    """All of the slice came. `intact`: whether its checksum matched; None: the lane closed before. `began`,
    `ended`: when its header and its end were seen (time.monotonic()). `sum`: what came with it on a summed
    lane, where no checksum was compared."""

    lane: int
    intact: bool | None
    began: float
    ended: float
    sum: int | None = None


class Gone(Local):
    """The mover needs the slot no more. `sent`: its slice was sent. Otherwise the lane closed before.
    `taken`: all bytes of the lane so far that the peer's kernel has. `waiting`: those in this kernel."""

    lane: int
    slot: int
    sent: bool
    taken: int = 0
    waiting: int = 0


class Said(Local):
    """A control message came."""

    lane: int
    header: Header
    payload: bytes


class Heard(Local):
    """When bytes last came on the lane, and when bytes of KV last moved (time.monotonic())."""

    lane: int
    at: float
    kv_moved: float


class LaneClosed(Local):
    """The last report of a lane. `kind`: that of a FrameError or of Close, or "socket", or "eof"."""

    lane: int
    kind: str
    why: str


ToMover = Adopt | Say | Move | Close
Report = Begins | Ends | Gone | Said | Heard | LaneClosed
