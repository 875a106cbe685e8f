"""What a router knows of its prefill workers: how much waits at each, how fast it computes, what it has
cached.

Between two reports, a second apart, the queue of a worker is what it reported, plus what this router sent
there since, less what it computes in that time at the speed it reported; but never less than what this router
itself knows to be waiting there. What other routers sent since is not known: it is why `two_choices` draws
and `sticky` spreads sessions by a ring instead of sending everything to whoever seems idle.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from router.policy.chunk_index import ChunkIndex
from router.policy.prefill import PrefillRequest, PrefillSnapshot
from router.policy.ring import Ring

UNKNOWN_SPEED = 1_000.0
"""Tokens/s of a worker that has computed nothing yet, where no other is known either."""


@dataclass(frozen=True, slots=True)
class PrefillWork:
    """One prefill that was sent to a worker. `chunks` are expected in its cache until it ends."""

    tokens: int
    """Uncached, by the estimate at the time of the choice."""
    chunks: Sequence[int] = ()


class PrefillLoads:
    """Owned by one router (or a simulated one). A worker's *row* is its number from `join` to `leave`. Times
    are seconds of one monotonic clock.

    Attributes:
        index: whose caches have what. Owned here; `add`, `discard` and `clear` are the worker's reports.
    """

    def __init__(self) -> None:
        self.index = ChunkIndex()
        self._names: list[str] = []  # by row; "": free
        self._serving: list[bool] = []
        self._tokens: list[float] = []  # waiting at time `_at`, reported and sent
        self._at: list[float] = []
        self._own: list[int] = []  # tokens of this router's prefills without a first token
        self._speed = np.ones(0)
        self._clear_at = np.zeros(0)  # when `_tokens` will have been computed
        self._own_seconds = np.zeros(0)  # that `_own` takes
        self._measured = np.zeros(0, bool)
        self._block_sizes: list[int] = []
        self._block_size = (
            1  # the largest, where they differ: rather too little than too much counts as cached
        )
        self._ring = Ring({})
        self._rows = np.zeros(0, np.int64)
        self._among = 0  # as a set
        self._stale = False  # the four are

    def join(self, name: str, *, block_size: int, now: float) -> int:
        """A worker came, with nothing waiting and nothing cached. Returns its row."""
        assert name
        row = self._names.index("") if "" in self._names else self._new_row()
        self._names[row], self._serving[row], self._stale = name, True, True
        self._own[row] = 0
        self._tokens[row], self._at[row] = 0.0, now
        self._measured[row] = False
        self._block_sizes[row] = block_size
        self._guess_speeds()
        return row

    def leave(self, row: int) -> None:
        self.index.forget(row)
        self._names[row], self._serving[row], self._stale = "", False, True

    def serve(self, row: int, serving: bool) -> None:
        """Whether it takes new work."""
        if self._serving[row] is not serving:
            self._serving[row], self._stale = serving, True

    def _new_row(self) -> int:
        row = len(self._names)
        self._names.append("")
        self._serving.append(False)
        self._block_sizes.append(1)
        self._tokens.append(0.0)
        self._at.append(0.0)
        self._own.append(0)
        for array in ("_speed", "_clear_at", "_own_seconds", "_measured"):
            setattr(self, array, np.append(getattr(self, array), 1).astype(getattr(self, array).dtype))
        self.index.grow(row + 1)
        return row

    def _guess_speeds(self) -> None:
        guess = self._speed[self._measured].mean() if self._measured.any() else UNKNOWN_SPEED
        self._speed[~self._measured] = guess
        for row in np.flatnonzero(~self._measured).tolist():
            self._changed(row)

    def _changed(self, row: int) -> None:
        speed = self._speed[row]
        self._clear_at[row] = self._at[row] + self._tokens[row] / speed
        self._own_seconds[row] = self._own[row] / speed

    # ------------------------------------------------------------ what happens

    def reported(self, row: int, *, tokens_waiting: int, tokens_per_s: float, now: float) -> None:
        """By the worker. `tokens_per_s`: 0 until it is known."""
        self._tokens[row], self._at[row] = tokens_waiting, now
        if tokens_per_s > 0:
            first = not self._measured[row]
            self._speed[row], self._measured[row] = tokens_per_s, True
            if first:
                self._guess_speeds()
        self._changed(row)

    def sent(self, row: int, work: PrefillWork, now: float) -> None:
        """By this router."""
        self._tokens[row], self._at[row] = self._waiting(row, now) + work.tokens, now
        self._own[row] += work.tokens
        self._changed(row)
        self.index.expect(row, work.chunks)

    def ended(self, row: int, work: PrefillWork, *, computed: bool, now: float) -> None:
        """Its first token came, or else it was given up."""
        waiting = self._waiting(row, now)
        self._own[row] -= work.tokens
        if not computed:
            self._tokens[row], self._at[row] = waiting - work.tokens, now
        self._changed(row)
        self.index.unexpect(row, work.chunks)

    def _waiting(self, row: int, now: float) -> float:
        computed = self._speed[row] * (now - self._at[row])
        return max(self._own[row], self._tokens[row] - computed)

    # ------------------------------------------------------------ how it stands

    @property
    def serving(self) -> int:
        """Workers that may be chosen."""
        return sum(self._serving)

    def tokens_per_s(self) -> float:
        """Of all that may be chosen; 0 until something was computed."""
        self._settle()
        measured = self._rows[self._measured[self._rows]]
        return float(self._speed[measured].sum())

    def snapshot(
        self, request: PrefillRequest, now: float, avoid: Collection[int] = ()
    ) -> PrefillSnapshot | None:
        """None when there is no worker to choose. Those in `avoid` are to be chosen only when there is no
        other."""
        self._settle()
        rows = self._rows
        if avoid:
            rows = np.array([row for row in rows.tolist() if row not in avoid], np.int64)
        if not len(rows):
            rows, avoid = self._rows, ()
        if not len(rows):
            return None
        wait = np.maximum(self._own_seconds, self._clear_at - now)
        among = self._among
        if len(rows) < len(wait):
            chosen = wait[rows]
            wait[:] = np.inf
            wait[rows] = chosen
            among = _set_of(rows)
        cached = self.index.overlap(request.chunks, request.tokens, self._block_size, among)
        return PrefillSnapshot(self._ring, rows, wait, self._speed, cached)

    def _settle(self) -> None:
        if self._stale:
            serving = {name: row for row, name in enumerate(self._names) if self._serving[row]}
            self._ring = Ring(serving)
            self._rows = np.array([serving[name] for name in sorted(serving)], np.int64)
            self._block_size = max((self._block_sizes[row] for row in serving.values()), default=1)
            self._among = _set_of(self._rows)
            self._stale = False


def _set_of(rows: np.ndarray) -> int:
    """As the bits of an int."""
    return sum(1 << row for row in rows.tolist())
