"""One transfer as its receiver sees it: RESERVED → RECEIVING → COMPLETE → INJECTED, or ENDED from any. Pure.

Frames and COMMIT come in any order, over several lanes. The transfer is COMPLETE when three things hold:
COMMIT came; every frame that it counts came exactly once; and all frames together have exactly the KV that
FETCH asked for.
"""

import enum
from bisect import bisect_left
from collections.abc import Sequence

from baton.kv_names.cache_kinds import Range
from baton.kv_transfer.layout import KVLayout
from baton.kv_transfer.protocol.frame import Refusal
from baton.kv_transfer.protocol.messages import Commit, FirstToken
from baton.kv_transfer.slices import Slice

LayerArray = tuple[int, int]
"""`Piece.array`, and a layer."""


class TransferState(enum.Enum):
    RESERVED = enum.auto()  # FETCH is to be sent, or sent
    RECEIVING = enum.auto()
    COMPLETE = enum.auto()  # all handed to the engine, and verified by it or before
    INJECTED = enum.auto()  # the engine's last scatter is over: ACK
    ENDED = enum.auto()  # aborted by either side


class Fault(Refusal):
    """The frame or COMMIT contradicts the transfer: it is aborted (integrity)."""


class Incoming:
    def __init__(
        self,
        layout: KVLayout,
        ranges: Sequence[Range],
        *,
        slot_bytes: int,
        states_at: Sequence[int] = (),
        narrows: bool = False,
        next_positions: Sequence[int] = (),
    ) -> None:
        """Positions `ranges` (ascending, disjoint). `layout` is that of the sender, as far as it is known:
        see `sent_as`. `states_at`: the positions after which arrays of a request were asked for, if
        the layout has some. `narrows`: they come after one of these, and `narrow` says after which.
        `next_positions`: as in `Fetch`."""
        self.state = TransferState.RESERVED
        self.ranges = tuple(ranges)
        self.frames = 0  # verified
        self.bytes = 0
        self._commit: Commit | None = None
        self._seen: set[int] = set()  # sequence numbers
        self._states_at = states_at
        self._narrows = narrows
        self._next_positions = next_positions
        self._slot_bytes = slot_bytes
        self.sent_as(layout)
        # Of each array: heads of a frame → disjoint positions that so came, ascending, neighbours joined. An
        # array of a request counts as one position.
        self._covered: dict[LayerArray, dict[Range, list[Range]]] = {array: {} for array in self._missing}

    def sent_as(self, layout: KVLayout) -> None:
        """The session is up, so the layout of the sender is known. No frame has come yet."""
        assert self.state is TransferState.RESERVED
        self.layout = layout
        self._ask()
        states = 1 if self._narrows else len(self._states_at)
        # The heads of each array of each layer, and the bytes of one of them.
        arrays: dict[LayerArray, Range] = {
            (number, layer): (
                (self._positions[number] if array.per_token else states) * array.heads,
                array.head_bytes,
            )
            for number, array in enumerate(layout.arrays)
            if array.per_token or states
            for layer in layout.layers[number]
        }
        self._most_frames = sum(count for count, _ in arrays.values())
        self._missing = {array: count * size for array, (count, size) in arrays.items()}
        self._expected_bytes = sum(self._missing.values())
        self._count_missing_frames()

    @property
    def tokens(self) -> int:
        """Positions that were asked for."""
        return sum(stop - start for start, stop in self.ranges)

    def _ask(self) -> None:
        """Of each array, the positions that come if each token has it, and how many these are."""
        arrays = self.layout.arrays
        self._asked = [[*array.read_of(self.ranges, self._next_positions)] for array in arrays]
        self._positions = [sum(stop - start for start, stop in asked) for asked in self._asked]

    @property
    def live(self) -> bool:
        """Frames and COMMIT are still expected."""
        return self.state in (TransferState.RESERVED, TransferState.RECEIVING)

    @property
    def missing_frames(self) -> int:
        """The fewest frames that could carry the missing bytes, each frame being of one array."""
        return self._missing_frames if self.live else 0

    @property
    def missing_bytes(self) -> int:
        return sum(self._missing.values()) if self.live else 0

    @property
    def committed(self) -> bool:
        return self._commit is not None

    @property
    def first_token(self) -> FirstToken:
        assert self._commit is not None, "first token asked for before COMMIT"
        return self._commit.first_token

    def begin(self, s: Slice) -> None:
        """A slice begins to come; Fault unless exactly this one is still missing."""
        assert self.live
        piece, array = s.piece, (s.piece.array, s.piece.layer)
        if array not in self._missing:
            raise Fault("frame_fields", f"no such array of a layer was asked for: {piece}")
        start, stop = piece.token_start, piece.token_start + piece.token_count
        first, last = piece.head_start, piece.head_start + piece.head_count
        kept = self.layout.arrays[piece.array]
        if kept.per_token:
            size = piece.token_count * kept.head_bytes
            was_asked = any(a <= start and stop <= b for a, b in self._asked[piece.array])
        else:
            size = kept.head_bytes
            was_asked = start == stop and start in self._states_at
        if s.size != piece.head_count * size or s.size == 0:
            raise Fault("frame_length", f"length {s.size} for {piece.token_count} × {piece.head_count}")
        if not first < last <= kept.heads:
            raise Fault("frame_range", f"there are no heads {first}–{last}")
        if not was_asked:
            raise Fault("frame_range", f"positions {start}–{stop} were not asked for")
        if self._commit is not None and s.seq >= self._commit.frames:
            raise Fault("sequence", f"frame {s.seq} of {self._commit.frames}")
        if self._narrows and not kept.per_token:
            self._states_at = (start,)  # before HAVE: all others come after this position, too
        self._mark(s.seq)
        self._cover(array, (first, last), start, max(stop, start + 1))
        self.state = TransferState.RECEIVING

    def verified(self, s: Slice) -> bool:
        """The slice is whole and undamaged. True: that completed the transfer."""
        assert self.state is TransferState.RECEIVING
        self.frames += 1
        self.bytes += s.size
        array, size = (s.piece.array, s.piece.layer), self._slot_bytes
        before = self._missing[array]
        self._missing[array] = before - s.size
        self._missing_frames -= -(-before // size) - -(-(before - s.size) // size)
        return self._check_complete()

    def commit(self, commit: Commit) -> bool:
        """True: that completed the transfer."""
        assert self.live
        if self._commit is not None:
            raise Fault("commit", "a second COMMIT")
        if max(self._seen, default=-1) >= commit.frames:
            raise Fault("sequence", f"COMMIT of {commit.frames} frames after a later one came")
        if not commit.first_token.logprobs_valid:
            raise Fault("commit", f"a logprob of the first token is no logprob: {commit.first_token}")
        self._commit = commit
        self.state = TransferState.RECEIVING
        return self._check_complete()

    def narrow(self, stop: int) -> None:
        """The sender has only the positions of the one range below `stop`, where the receiver goes on. Raises
        Fault if frames came that contradict this."""
        assert self.live
        [(start, _)] = self.ranges
        asked = self._positions
        if stop not in self._states_at and self._narrows:
            raise Fault("frame_range", f"a frame came of states that are not those after {stop}")
        self.ranges, self._states_at, self._next_positions = ((start, stop),), (stop,), (stop,)
        self._ask()
        for (number, layer), heads in self._covered.items():
            if not (array := self.layout.arrays[number]).per_token:
                continue
            first = next((a for a, _ in self._asked[number]), stop)
            if any(parts[0][0] < first or parts[-1][1] > stop for parts in heads.values()):
                raise Fault("frame_range", f"a frame came of positions that are not from {first} to {stop}")
            left_out = (asked[number] - self._positions[number]) * array.bytes
            self._missing[number, layer] -= left_out
            self._expected_bytes -= left_out
        self._count_missing_frames()

    def injected(self) -> None:
        assert self.state is TransferState.COMPLETE
        self.state = TransferState.INJECTED

    def end(self) -> None:
        self.state = TransferState.ENDED

    def _check_complete(self) -> bool:
        commit = self._commit
        if commit is None or self.frames < commit.frames:
            return False
        if not commit.bytes == self.bytes == self._expected_bytes:
            raise Fault("commit", f"COMMIT counts {commit.bytes} bytes, {self.bytes} came")
        self.state = TransferState.COMPLETE
        return True

    def _count_missing_frames(self) -> None:
        self._missing_frames = sum(-(-missing // self._slot_bytes) for missing in self._missing.values())

    def _mark(self, seq: int) -> None:
        # Every frame has at least one head of one position, or of one state.
        if seq >= self._most_frames:
            raise Fault("sequence", f"sequence number {seq} is beyond any possible frame")
        if seq in self._seen:
            raise Fault("sequence", f"sequence number {seq} came twice")
        self._seen.add(seq)

    def _cover(self, array: LayerArray, heads: Range, start: int, stop: int) -> None:
        for (first, last), covered in self._covered[array].items():
            i = bisect_left(covered, (start, start))
            twice = (i > 0 and covered[i - 1][1] > start) or (i < len(covered) and covered[i][0] < stop)
            if twice and first < heads[1] and heads[0] < last:
                raise Fault("frame_range", f"positions {start}–{stop} of layer {array[1]} came twice")
        covered = self._covered[array].setdefault(heads, [])
        i = bisect_left(covered, (start, start))
        if i > 0 and covered[i - 1][1] == start:
            i -= 1
            start = covered.pop(i)[0]
        if i < len(covered) and covered[i][0] == stop:
            stop = covered.pop(i)[1]
        covered.insert(i, (start, stop))
