"""The messages between the processes of one worker: engine, transfer process, movers and ranks.

Each message names what it hands over. A slot named in `SlicesOut` or `Arrived` belongs to the reader from
then on, until the reader names it in `Emptied` (or the transfer process in its `SlotFree`).
"""

from collections.abc import Mapping

import msgspec

from baton.kv_transfer.layout import Dtypes, KVLayout
from baton.kv_transfer.protocol.messages import Export, FirstToken, Reason
from baton.kv_transfer.slices import Slice


class Local(msgspec.Struct, array_like=True, tag=True):
    """Base of all messages between processes of one worker."""


# ---------------------------------------------------------------- prefill engine → transfer


class Exported(Local):
    """Peers on this host may read the slots there, or why they may not. Also from another rank to rank 0."""

    export: Export | None
    why: str


class Offer(Local):
    prefill_id: bytes


class SlicesOut(Local):
    """Slices that were gathered together, of any transfers: they lie in slots, and have no table."""

    slices: list[Slice]


class CommitOut(Local):
    """The transfer's COMMIT; frames of it may still follow."""

    transfer_id: bytes
    first_token: FirstToken
    frames: int
    size: int  # bytes


class Finished(Local):
    """The prefill is computed; the hold deadline runs."""

    prefill_id: bytes


class Pinned(Local):
    """Answers ContentWanted: the engine has pinned so many chunks, at least one. CloseOut refuses it."""

    pin_id: bytes
    chunks: int


class RefuseFetch(Local):
    """The transfer asks for what the prefill does not have."""

    transfer_id: bytes


class CloseOut(Local):
    prefill_id: bytes
    reason: Reason


class Recalled(Local):
    """Answers Granted(recall): so many frames of the session were handed over, no more will be."""

    session: int
    total: int
    sent: int


# ---------------------------------------------------------------- transfer → prefill engine


class StartOut(Local):
    """Serve this FETCH."""

    prefill_id: bytes
    transfer_id: bytes
    session: int
    slot_bytes: int
    lanes: int
    dtypes: Dtypes  # in which slices travel
    ranges: tuple[tuple[int, int], ...]
    next_positions: tuple[int, ...] = ()  # as in `Fetch`


class ContentWanted(Local):
    """A peer wants the KV of these chunks of 64 tokens (FETCH_CONTENT). The engine gets the same message. The
    answer is `serve` for the first of them that the prefix cache has, or `close` with the pin id."""

    pin_id: bytes
    chunks: tuple[bytes, ...]  # names (`kv_names`)
    first_chunk: int  # its position in the prompt, in chunks


class StopOut(Local):
    """The transfer is over; the prefill is still held."""

    prefill_id: bytes
    transfer_id: bytes


class Granted(Local):
    session: int
    total: int
    recall: bool


class Reached(Local):
    """Whether the peer of the session reads exported slots from now on."""

    session: int
    reached: bool


class RingOut(Local):
    """Slots of the transfer process, which peers read. Answered by Exported."""

    export: Export


class SlotFree(Local):
    """`unsent`: its frame never left, so its credit is unused."""

    slot: int
    unsent: bool


class SessionGone(Local):
    session: int


class FetchWaits(Local):
    """A FETCH for a prefill that was not offered yet waits here, or (gone) left again."""

    prefill_id: bytes
    gone: bool = False


class ReleasedOut(Local):
    """No FETCH of the prefill will be served any more."""

    prefill_id: bytes
    reason: str


# ---------------------------------------------------------------- decode engine → transfer


class FetchIn(Local):
    transfer_id: bytes
    prefill_id: bytes
    address: str
    incarnation: int
    attempt: int
    ranges: tuple[tuple[int, int], ...]
    states_at: tuple[int, ...] = ()  # the positions after which states are asked for, ascending
    chunks: tuple[bytes, ...] = ()  # FETCH_CONTENT: of the one range, in place of a prefill
    next_positions: tuple[int, ...] = ()  # as in `Fetch`. FETCH_CONTENT: the end of what came


class CancelIn(Local):
    transfer_id: bytes


class Emptied(Local):
    """These slots of Arrived are read, or dropped since their transfers ended."""

    slots: list[int]
    damaged: list[int] = []  # those of slices of which generation or checksum were wrong


class Opened(Local):
    """Answers ExportIn. Also from another rank to rank 0."""

    session: int
    reached: bool
    why: str


class InjectedIn(Local):
    """The last scatter is over: ACK."""

    transfer_id: bytes


# ---------------------------------------------------------------- transfer → decode engine


class Arrived(Local):
    """The slice lies in its slot. Or it lies in its memory, which a peer exports: its slot is set aside for
    it, and stays empty."""

    slice: Slice


class ExportIn(Local):
    """Memory that the peer of this session exports: try to read it. Also from rank 0 to the other ranks."""

    session: int  # for other ranks: a number that rank 0 gives. 0: to fill it, instead of memory of their own
    export: Export
    dtypes: Dtypes | None = None  # of slices in it; None: not known


class ExportGone(Local):
    """The session has ended: close the memory. Also from rank 0 to the other ranks."""

    session: int


class Arrival(Local, frozen=True):
    """What came of a transfer, and when. Times are time.monotonic(), which all processes of a host share."""

    bytes: int  # as they came
    tokens: int  # positions of the ranges that came
    frames: int
    asked_at: float  # the FETCH left: later than its fetch(), if a session had to be made first
    first_frame_at: float  # its header seen; with no frame this and the next one are commit_at
    last_frame_at: float  # verified
    commit_at: float  # COMMIT known: prefill has its first token


class Complete(Local):
    """Everything of the transfer has been named in Arrived."""

    transfer_id: bytes
    first_token: FirstToken
    came: Arrival


class FailedIn(Local):
    transfer_id: bytes
    reason: str
    retry: bool  # a new FETCH of the same prefill may succeed


# ---------------------------------------------------------------- between the ranks of an engine


class Copy(Local):
    """Copy the heads that the rank holds of this slice. Its memory is one that was opened under this number.
    Its table: the blocks that the slice needs, from position 0 on, and the slot of states."""

    slice: Slice
    into_pool: bool
    layers_ready: int = 0  # copy only when the rank has counted so many layers


class CopyCell(Local):
    """Copy what the rank holds of a cell to its place in a tier, or back."""

    cell: int
    place: int
    into_pool: bool
    window_cell: int  # the cell in arrays with windows


class Copied(Local):
    """That many copies are over, in the order of their orders."""

    count: int
    found: Mapping[int, int | None] = {}  # not 0: sums of gathered slices, remainders of others


class ToRank(Local):
    """Rank 0 → another rank."""

    line: int  # as in `endpoint.other_ranks`
    order: Copy | CopyCell | ExportIn | ExportGone


class FromRank(Local):
    """Another rank → rank 0."""

    line: int
    report: Copied | Exported | Opened


# ---------------------------------------------------------------- engine and store process


class StoreOrder(Local):
    """Engine → store process. Without units: which of these objects exist? With them: write them, or read
    them. An urgent put is a probe: objects are written, read and removed. `StoreOpened` says how fast. The
    units belong to the store process until it answers."""

    session: int  # as in StoreOpened
    ticket: int
    is_urgent: bool  # a prompt waits
    is_put: bool
    names: tuple[bytes, ...]
    units: tuple[int, ...] = ()


class StoreLayout(Local):
    """Engine → store process, when either begins: what the KV is. Only the first one counts."""

    identity: str  # as in `ObjectSeal`
    layout: KVLayout
    ranks: int


class StoreAnswer(Local):
    """Store process → engine: of each name, whether its object exists, was written, or is read and right."""

    ticket: int
    done: list[bool]


class StoreOpened(Local):
    """Store process → engine: a new process has begun, later that it is connected, and after probes. It does
    no order of an earlier session."""

    session: int  # 0: it is not connected yet
    waited: float = 0.0  # seconds until the store said what it has, in a probe
    chunk_seconds: float = 0.0  # that reading an object took in it. 0: there was none


FromSender = Exported | Offer | SlicesOut | CommitOut | Finished | Pinned | RefuseFetch | CloseOut | Recalled
ToSender = (
    Reached | StartOut | ContentWanted | StopOut | Granted | RingOut | SlotFree | SessionGone | FetchWaits
    | ReleasedOut
)  # fmt: skip
FromReceiver = FetchIn | CancelIn | Emptied | InjectedIn | Opened
ToReceiver = Arrived | Complete | FailedIn | ExportIn | ExportGone
