"""Copies between KV caches and arena slots when an engine has several ranks.

    rank 0: sender or receiver ── Copy(slot, heads, positions) ─▶ other ranks: `rank_copier`
                              ◀─ Copied(count) ─────────────────  copies between its KV cache and the slot
            sender            ◀─ Exported ──────────────────────  its own memory, once
            receiver          ── ExportIn, ExportGone ──────────▶ opens the memory of a peer, closes it
                              ◀─ Opened ────────────────────────

To peers, a worker has one KV cache with all heads, however many ranks share it. The README of the package
has the rules (Ranks).

A rank may be behind rank 0, so a Copy names the count of layers at which its layer is ready. KV in a prefix
cache is there on all ranks, because it comes from steps that have ended. A scatter waits for nothing. No step
under way touches what it writes: a step ends on rank 0 only after all ranks have added to the sums of its
last layer. Rank 0 starts a step with the KV only after every rank has copied. If the step waits for the KV of
a layer inside (`Receiver.wait_for_layer`), no rank uses it before rank 0 has seen all copies.
"""

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from msgspec.structs import replace

from baton.kv_transfer.arena import Arena
from baton.kv_transfer.channel import ChannelClosed
from baton.kv_transfer.device.host_pool import open_pool
from baton.kv_transfer.device.pool import Event, Outcome, Pool, Remainder, Sums
from baton.kv_transfer.endpoint.other_ranks import Line, OtherRanks
from baton.kv_transfer.layout import Dtypes, Piece, Range, rank_of
from baton.kv_transfer.peer_memory import PeerMemory, Unreachable, join
from baton.kv_transfer.protocol import local_messages as local
from baton.kv_transfer.protocol.messages import Export
from baton.kv_transfer.slices import Slice
from baton.kv_transfer.transport import PagedKV

LOOK = 0.002
"""Seconds between two looks for an answer of a rank about memory, of which there are a few at the start."""


def open_ranks(kv: PagedKV, arena: Arena, ranks: OtherRanks, line: int) -> Pool:
    """The KV cache of all ranks, as rank 0 uses it for one line."""
    rank0 = open_pool(kv, arena)
    return RankedPool(rank0, kv, Line(ranks, line)) if len(ranks) else rank0


class _Ready(NamedTuple):
    """A layer is written."""

    rank0: Event  # on this rank's device
    layers_ready: int  # on all ranks


class _Copies(NamedTuple):
    """Copies are over."""

    rank0: Event | None  # on this rank's device; None: no copy there
    ordered: tuple[int, ...]  # of each other rank: these many since the start


class RankedTable(NamedTuple):
    rank0: Any
    block_ids: Sequence[int]
    state_slot: int


class _Order(NamedTuple):
    item: Slice
    ready: _Ready  # of a gather: its layer


class _Orders:
    """The copies of one call, by rank."""

    def __init__(self, ranks: int, line: Line) -> None:
        self.by_rank: list[list[_Order]] = [[] for _ in range(ranks)]
        self._line = line
        self._before = 0, *line.ordered
        self._numbers: list[list[tuple[int, int]]] = []  # of each slice: ranks, and their numbers of the copy

    def add(self, item: Slice, ranks: Sequence[int], ready: _Ready | None = None) -> None:
        for rank in ranks:
            self.by_rank[rank].append(_Order(item, ready or _Ready(None, 0)))
        self._numbers.append([(rank, self._before[rank] + len(self.by_rank[rank])) for rank in ranks])

    def found(self, by_rank0: Sequence[Remainder]) -> list[list[tuple[int, Remainder]]]:
        """What the ranks of each slice found when they copied it: as in `Copied`. All copies are over."""
        found = [dict(enumerate(by_rank0, 1)), *self._line.found]
        return [[(rank, found[rank].pop(number, 0)) for rank, number in each] for each in self._numbers]


@dataclass(frozen=True, slots=True, eq=False)
class RankedMemory:
    """Implements PeerMemory: memory of a peer as all ranks have it."""

    rank0: PeerMemory
    number: int
    line: Line
    opening: dict[int, list[local.Opened | None]]  # `RankedPool._opening`

    def close(self) -> None:
        self.rank0.close()
        self.opening.pop(self.number, None)
        with suppress(ChannelClosed):  # the other ranks then close it by themselves
            self.line.tell(local.ExportGone(self.number))


class RankedPool:
    """Implements `Pool` on rank 0, for one line to the other ranks.

    Only the thread that gathers or scatters may call `passed`."""

    def __init__(self, rank0: Pool, kv: PagedKV, line: Line) -> None:
        self.gather_most = rank0.gather_most
        self._rank0 = rank0
        self._line = line
        self._ranks = kv.ranks
        self._kv = kv
        self._layout = kv.layout
        self._layers_ready = kv.layers_ready
        # Of each array of the layout, by rank.
        self._heads = [
            [array.heads_of(rank, kv.ranks) for rank in range(kv.ranks)] for array in kv.layout.arrays
        ]
        self._exports: list[local.Exported | None] = [None] * len(line.ordered)
        self._memories = 0  # of peers, that were opened
        # By number, what each other rank answered, until all could open the memory or it is closed.
        self._opening: dict[int, list[local.Opened | None]] = {}

    def enter_thread(self) -> None:
        self._rank0.enter_thread()

    def table(self, block_ids: Sequence[int], num_tokens: int, state_slot: int = 0) -> RankedTable:
        return RankedTable(self._rank0.table(block_ids, num_tokens, state_slot), block_ids, state_slot)

    def record(self) -> _Ready:
        return _Ready(self._rank0.record(), self._layers_ready())

    def passed(self, event: _Ready | _Copies) -> bool:
        """Raises `ChannelClosed` if a rank is gone, and `RuntimeError` if it hangs."""
        if isinstance(event, _Ready):
            return self._rank0.passed(event.rank0)
        self._receive()
        return self._line.over(event.ordered) and (event.rank0 is None or self._rank0.passed(event.rank0))

    def gather(self, batch: Sequence[Slice], after: Sequence[_Ready | None] = ()) -> tuple[_Copies, Sums]:
        orders = _Orders(self._ranks, self._line)
        for item, ready in zip(batch, after or [None] * len(batch), strict=True):
            rank = rank_of(self._layout, item.piece.head_start, self._ranks, item.piece.array)
            orders.add(item, [rank], ready)
        self._order(orders, into_pool=False)
        rank0, events = _of_rank0(orders.by_rank[0]), [order.ready.rank0 for order in orders.by_rank[0]]
        gathered, sums = self._rank0.gather(rank0, events if after else ()) if rank0 else (None, list)
        return self._copies(gathered), lambda: [found or 0 for [(_, found)] in orders.found(sums())]

    def scatter(self, batch: Sequence[Slice], memory: RankedMemory | None = None) -> tuple[_Copies, Outcome]:
        orders = _Orders(self._ranks, self._line)
        for item in batch:
            orders.add(item, self._holders(item.piece))
        rank0, of_rank0 = _of_rank0(orders.by_rank[0]), memory and memory.rank0
        scattered, outcome = self._rank0.scatter(rank0, of_rank0) if rank0 else (None, list)
        self._order(orders, into_pool=True, memory=memory.number if memory else 0)

        def joined() -> list[Remainder]:
            return [
                _joined({(self._heads[x.piece.array][rank], left) for rank, left in found})
                for x, found in zip(batch, orders.found(outcome()), strict=True)
            ]

        return self._copies(scattered), joined

    def export(self) -> Export:
        exports = [self._rank0.export()]
        self._await(lambda: all(self._exports))
        for rank, exported in enumerate(self._exports, start=1):
            assert exported is not None, "all have come"
            if exported.export is None:
                raise Unreachable(f"rank {rank}: {exported.why}")
            exports.append(exported.export)
        return join(exports)

    def adopt(self, export: Export) -> None:
        self._rank0.adopt(export)
        self._ask_to_open(0, export)
        self._await(lambda: self._all_opened(0))

    def _await(self, condition: Callable[[], bool]) -> None:
        """Until the other ranks have answered. Another thread may take an answer from the channel."""
        self._receive()
        while not condition():
            time.sleep(LOOK)
            self._receive()

    def open(self, export: Export, dtypes: Dtypes | None) -> RankedMemory:
        rank0 = self._rank0.open(export, dtypes)
        self._memories += 1
        self._ask_to_open(self._memories, export, dtypes)
        return RankedMemory(rank0, self._memories, self._line, self._opening)

    def opened(self, memory: RankedMemory) -> bool:
        self._receive()
        return self._all_opened(memory.number)

    def _ask_to_open(self, number: int, export: Export, dtypes: Dtypes | None = None) -> None:
        self._opening[number] = [None] * len(self._exports)  # `_receive` fills in the answers
        self._line.tell(local.ExportIn(number, export, dtypes))

    def _all_opened(self, number: int) -> bool:
        """Raises Unreachable if a rank could not open the memory."""
        answers = self._opening[number]
        for rank, answer in enumerate(answers, start=1):
            if answer and not answer.reached:
                raise Unreachable(f"rank {rank}: {answer.why}")
        if all(answers):
            del self._opening[number]
        return all(answers)

    def close(self) -> None:
        self._rank0.close()

    def _holders(self, piece: Piece) -> list[int]:
        """The ranks that hold heads of the slice."""
        start, stop = piece.head_start, piece.head_start + piece.head_count
        heads = self._heads[piece.array]
        return [rank for rank, (first, last) in enumerate(heads) if first < stop and start < last]

    def _receive(self) -> None:
        """Takes what the other ranks report."""
        for rank, answer in self._line.receive():
            match answer:
                case local.Exported():
                    self._exports[rank] = answer
                case local.Opened(number) if number in self._opening:
                    self._opening[number][rank] = answer

    def _order(self, orders: _Orders, *, into_pool: bool, memory: int = 0) -> None:
        """`memory`: as the other ranks number it, if slices lie there."""
        for rank, batch in enumerate(orders.by_rank[1:]):
            if batch:
                self._line.order(rank, [self._copy(*order, memory, into_pool=into_pool) for order in batch])

    def _copy(self, item: Slice, ready: _Ready, memory: int, *, into_pool: bool) -> local.Copy:
        """With the blocks of the slice alone, which all tables of the other rank get."""
        of = item.table
        blocks, start = self._kv.blocks(item.piece, of.block_ids, of.state_slot)
        table = [*blocks] * self._kv.num_tables, of.state_slot
        piece = replace(item.piece, token_start=start)
        item = replace(item, piece=piece, table=table, memory=memory or item.memory)
        return local.Copy(item, into_pool, ready.layers_ready)

    def _copies(self, rank0: Event | None) -> _Copies:
        return _Copies(rank0, tuple(self._line.ordered))


def _joined(read: Collection[tuple[Range, Remainder]]) -> Remainder:
    """The remainder of a slice: None if ranks with the same heads read different words."""
    known = [remainder for remainder in dict(read).values() if remainder is not None]
    return sum(known) % (1 << 64) if len(known) == len(read) else None


def _of_rank0(batch: Sequence[_Order]) -> list[Slice]:
    return [replace(item, table=item.table.rank0) for item, _ in batch]
