"""Which prefill workers have which prefixes: an index from chunk hash to workers.

A worker has a chunk (64 tokens, `rpc.chunk_hash`) when it reported so, or while a prompt with it, which this
router sent there, waits for its first token: the next turn, or the next user of a system prompt, may come
before the report does. What was expected and not reported is forgotten with the attempt, so only reports
last.
"""

from collections.abc import Iterable, Sequence

from rpc import CHUNK_TOKENS

MAX_LEVELS = 8


class Overlap:
    """How many tokens of one prompt each worker need not compute: full blocks of what it has of the prompt's
    beginning, and never the last position."""

    __slots__ = ("_levels",)

    def __init__(self, levels: list[tuple[int, int]]) -> None:
        """(tokens, rows that have at least so many), the fewest tokens first."""
        self._levels = levels

    @property
    def most(self) -> int:
        """Of any."""
        return self._levels[-1][0] if self._levels else 0

    def of(self, row: int) -> int:
        for tokens, rows in reversed(self._levels):
            if rows >> row & 1:
                return tokens
        return 0

    def holders(self) -> list[int]:
        """The rows that have most; empty where that is nothing."""
        left = self._levels[-1][1] if self._levels else 0
        rows = []
        while left:
            last = left & -left
            rows.append(last.bit_length() - 1)
            left ^= last
        return rows


class ChunkIndex:
    """Workers are rows, and sets of them the bits of an int: an intersection over 1,000 workers is 50 ns."""

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}  # chunk → rows that have it; no empty ones
        self._bits: list[int] = []  # row → its bit, the one object for all chunks that only it has
        self._reported: list[set[int]] = []
        self._expected: list[dict[int, int]] = []  # row → chunk → prompts that will bring it

    def __len__(self) -> int:
        return len(self._holders)

    def grow(self, rows: int) -> None:
        for row in range(len(self._bits), rows):
            self._bits.append(1 << row)
            self._reported.append(set())
            self._expected.append({})

    def reported(self, row: int) -> int:
        """How many chunks the worker says it has."""
        return len(self._reported[row])

    def add(self, row: int, chunks: Iterable[int]) -> None:
        reported = self._reported[row]
        for chunk in chunks:
            reported.add(chunk)
            self._hold(row, chunk)

    def discard(self, row: int, chunks: Iterable[int]) -> None:
        reported, expected = self._reported[row], self._expected[row]
        for chunk in chunks:
            if chunk in reported:
                reported.remove(chunk)
                if chunk not in expected:
                    self._release(row, chunk)

    def expect(self, row: int, chunks: Iterable[int]) -> None:
        """A prompt with these chunks was sent there. Ends with `unexpect`."""
        expected = self._expected[row]
        for chunk in chunks:
            expected[chunk] = expected.get(chunk, 0) + 1
            self._hold(row, chunk)

    def unexpect(self, row: int, chunks: Iterable[int]) -> None:
        reported, expected = self._reported[row], self._expected[row]
        for chunk in chunks:
            expected[chunk] -= 1
            if not expected[chunk]:
                del expected[chunk]
                if chunk not in reported:
                    self._release(row, chunk)

    def clear(self, row: int) -> None:
        """Nothing is known of its cache; what is expected stays."""
        self.discard(row, list(self._reported[row]))

    def forget(self, row: int) -> None:
        """The worker is gone, and with it what was expected of it."""
        self.clear(row)
        for chunk in self._expected[row]:
            self._release(row, chunk)
        self._expected[row] = {}

    def _hold(self, row: int, chunk: int) -> None:
        bit = self._bits[row]
        holders = self._holders.get(chunk)
        self._holders[chunk] = bit if holders is None or holders == bit else holders | bit

    def _release(self, row: int, chunk: int) -> None:
        left = self._holders[chunk] & ~self._bits[row]
        if left:
            self._holders[chunk] = left
        else:
            del self._holders[chunk]

    def overlap(self, chunks: Sequence[int], tokens: int, block_size: int, among: int) -> Overlap:
        """What the workers of `among`, a set of rows, have of the beginning of a prompt of so many tokens.

        A prefix ends at its first missing chunk. Stops where nobody has more, so what nobody knows costs one
        lookup. Of more than `MAX_LEVELS` different lengths the longest count.
        """
        levels: list[tuple[int, int]] = []  # (chunks, rows that have at least so many)
        rows = among
        holders_of = self._holders.get
        for depth, chunk in enumerate(chunks):
            holders = holders_of(chunk, 0)
            if holders is not rows and (left := rows & holders) != rows:
                levels.append((depth, rows))
                rows = left
                if not rows:
                    break
        else:
            levels.append((len(chunks), rows))
        found: list[tuple[int, int]] = []
        most = 0
        for depth, rows in levels[-MAX_LEVELS:]:
            hit = min(depth * CHUNK_TOKENS, tokens - 1) // block_size * block_size
            if hit > most:
                most = hit
                found.append((hit, rows))
        return Overlap(found)
