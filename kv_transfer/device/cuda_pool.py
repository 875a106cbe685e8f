"""KV between the engine's paged pool and slots, on a GPU. Imported where there is one: it needs Triton."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

import torch

from baton.kv_transfer.arena import Arena
from baton.kv_transfer.cuda_memory import ExportedMemory, PeerDeviceMemory, Slots
from baton.kv_transfer.device.pool import Event, Outcome, Remainder, Sums
from baton.kv_transfer.device.slice_kernels import RequestTable, SliceKernels
from baton.kv_transfer.device.tables import Table, Tables, pin, unpin
from baton.kv_transfer.layout import Dtypes
from baton.kv_transfer.peer_memory import PeerMemories, Unreachable
from baton.kv_transfer.protocol.messages import Export
from baton.kv_transfer.slices import Slice
from baton.kv_transfer.staging import (
    GATHER_BYTES,
    LANDINGS,
    at_once,
    coalesce,
    exported_slot_bytes,
    landing_bytes,
)
from baton.kv_transfer.transport import PagedKV
from baton.system.cuda_driver import CudaError, copy

_SLICES = 8  # that one kernel gathers at most


@dataclass(slots=True)
class _Landing:
    """Memory for slices of peers until a kernel has scattered them."""

    memory: torch.Tensor
    free: Event  # after the last kernel that reads it


def pin_arena(arena: Arena) -> None:
    """In place: it is shared with the transfer process, so it cannot be torch's to allocate."""
    if arena.pinned:
        return
    try:
        pin(torch.frombuffer(arena.memory, dtype=torch.uint8))
    except RuntimeError as error:
        raise ValueError(
            f"--advanced.kv-slots, --advanced.kv-slot-size: {arena.num_slots} slots of "
            f"{arena.slot_bytes} bytes: {error}; "
            "give the worker more memory of the host, or use fewer slots"
        ) from error
    arena.pinned = True


class CudaPool:
    """Gathers and scatters on a side stream, between the pool and the pinned arena.

    However many slices a batch has, it is one kernel, one copy of the kernel's table, and a copy for each
    run of neighbouring slots. A launch costs the host more than a slice costs the device, and the host has
    the next step to launch.
    """

    def __init__(self, kv: PagedKV, arena: Arena) -> None:
        self._device = torch.device(kv.device)
        self._kv = kv
        self._layout = kv.layout
        self._heads = kv.heads
        self._slot_bytes = arena.slot_bytes
        self.gather_most = at_once(_SLICES, GATHER_BYTES, arena.slot_bytes)
        self._num_slots = arena.num_slots
        self._token = arena.token
        self._exported: Slots | None = None  # slots that peers read, beside those of the arena
        self._landings: deque[_Landing] = deque()  # the one that is free first, first
        self._arena = torch.frombuffer(arena.memory, dtype=torch.uint8)
        pin_arena(arena)
        # Of high priority: few short programs, which would else wait for the end of a large matrix product.
        self._stream = torch.cuda.Stream(self._device, priority=-1)
        self._pulls = torch.cuda.Stream(self._device, priority=-1)
        self._marks = torch.cuda.Stream(self._device, priority=-1)
        self._tables = Tables(self._device, self._stream)
        # What torch has pinned once it gives out again at once; pinning more would wait for the device.
        _ = [torch.empty(1 << i, dtype=torch.int64, pin_memory=True) for i in range(5, 13) for _ in range(8)]
        with torch.cuda.stream(self._stream):
            self._kernels = SliceKernels(kv, self._tables, self.table([0] * kv.num_tables, 1))
            self._record()

    def enter_thread(self) -> None:
        torch.cuda.set_device(self._device)
        torch.cuda.synchronize(self._device)  # `cuda_memory` needs the context, which `set_device` may leave

    def table(self, block_ids: Sequence[int], num_tokens: int, state_slot: int = 0) -> RequestTable:
        assert self._kv.holds(block_ids, num_tokens), "more positions than blocks"
        return RequestTable(self._kv, block_ids, state_slot, self._on_device)

    def _on_device(self, numbers: Sequence[int], into: torch.Tensor | None) -> torch.Tensor:
        """int64, in `into` or in new memory. Not of `_tables`: another thread may call this, and a table
        lives as long as its request."""
        with torch.cuda.stream(self._stream):
            pinned = torch.tensor(numbers, pin_memory=True)
            if into is None:
                return pinned.to(self._device, non_blocking=True)
            return into.copy_(pinned, non_blocking=True)

    def record(self) -> Event:
        return _event(torch.cuda.current_stream(self._device))

    def _record(self) -> Event:
        """After all gathers and scatters so far, and so after their tables are read."""
        event = _event(self._stream)
        self._tables.over(event)
        return event

    def passed(self, event: Event) -> bool:
        return event.query()

    def gather(self, batch: Sequence[Slice], after: Sequence[Event] = ()) -> tuple[Event, Sums]:
        sums: Callable[[], Mapping[int, int]] = dict
        with torch.cuda.stream(self._stream):
            for event in {id(event): event for event in after if event is not None}.values():
                self._stream.wait_event(event)
            if exported := [item for item in batch if item.memory]:
                self._gather_exported(exported)
            if in_arena := [item for item in batch if not item.memory]:
                in_arena, offsets, copies = self._stage(in_arena, self._in_arena, self._slot_bytes)
                dense = self._dense(copies)
                table, _ = self._kernels.move_and_sum(_at(in_arena, dense, offsets), into_pool=False)
                for slot, at, size in copies:
                    copy(slot, dense.data_ptr() + at, size, self._stream.cuda_stream)
                sums = self._fetched(table, in_arena)
            event = self._record()

        def outcome() -> list[int]:
            found = sums()
            return [0 if x.memory else found[x.slot] for x in batch]

        return event, outcome

    def _gather_exported(self, batch: Sequence[Slice]) -> None:
        assert self._exported is not None
        batch = sorted(batch, key=lambda x: x.slot)
        runs: list[tuple[int, int]] = []  # of marks: (address, words)
        for item in batch:
            mark = self._exported.mark(item.slot)
            if runs and mark == runs[-1][0] + 8 * runs[-1][1]:
                runs[-1] = runs[-1][0], runs[-1][1] + 2
            else:
                runs.append((mark, 2))
        self._tables.write([word for item in batch for word in (item.sum, 0)], runs)
        items = [(item, self._exported.slot(item.slot)) for item in batch]
        sums = [self._exported.mark(item.slot) + 8 for item in batch]
        self._kernels.move(items, sums, into_pool=False)

    def scatter(
        self, batch: Sequence[Slice], memory: PeerMemories[PeerDeviceMemory] | None = None
    ) -> tuple[Event, Outcome]:
        if memory is not None:
            return self._pull(memory, batch)
        with torch.cuda.stream(self._stream):
            placed, offsets, copies = self._stage(batch, self._in_arena, self._slot_bytes)
            dense = self._dense(copies)
            for slot, at, size in copies:
                copy(dense.data_ptr() + at, slot, size, self._stream.cuda_stream)
            table, _ = self._kernels.move_and_sum(_at(placed, dense, offsets), into_pool=True)
            sums = self._fetched(table, placed)
            event = self._record()

        def outcome() -> list[Remainder]:
            found = sums()
            return [0 if x.verified else self._remainder(x, x.sum, found[x.slot]) for x in batch]

        return event, outcome

    def _fetched(self, table: Table, batch: Sequence[Slice]) -> Callable[[], Mapping[int, int]]:
        """Fetches the checksums from the beginning of the table. What it returns says them by slot. Call it
        once, when an event behind this has passed."""
        table.fetch(len(batch), self._stream)

        def words() -> Mapping[int, int]:
            sums = table.words[: len(batch)].tolist()
            self._tables.give(table)
            return {x.slot: checksum % (1 << 64) for x, checksum in zip(batch, sums, strict=True)}

        return words

    def _remainder(self, item: Slice, checksum: int, found: int) -> int:
        """`found`: the sum of the words that this rank has read."""
        if not (self._kernels.window(item.piece).is_first or self._kernels.is_converted(item)):
            checksum = 0  # another rank has it
        return (checksum - found) % (1 << 64)

    def export(self) -> Export:
        try:
            with torch.cuda.device(self._device):
                memory = ExportedMemory(self._num_slots, exported_slot_bytes(self._slot_bytes), self._token)
        except (CudaError, OSError) as e:
            raise Unreachable(f"no memory to export: {e}") from None
        self._exported = memory
        return memory.export

    def adopt(self, export: Export) -> None:
        with torch.cuda.device(self._device), torch.cuda.stream(self._pulls):
            self._exported = self._open_one(export)

    def open(self, export: Export, dtypes: Dtypes | None) -> PeerMemories[PeerDeviceMemory]:
        if export.slot_bytes > (most := exported_slot_bytes(self._slot_bytes)):
            raise Unreachable(f"the sender has slots of {export.slot_bytes} bytes, the receiver takes {most}")
        with torch.cuda.device(self._device), torch.cuda.stream(self._pulls):
            memory = PeerMemories(export, self._layout, self._heads, self._open_one)
            try:
                if dtypes not in (None, self._layout.dtypes):
                    self._make_landings()
            except Unreachable:
                memory.close()
                raise
        return memory

    def _make_landings(self) -> None:
        """Where there are none yet. Raises Unreachable."""
        try:
            while len(self._landings) < LANDINGS:
                size = landing_bytes(self._slot_bytes)
                memory = torch.empty(size, dtype=torch.uint8, device=self._device)
                self._landings.append(_Landing(memory, self.record()))
        except torch.OutOfMemoryError:
            raise Unreachable("no memory to convert KV in") from None

    def _open_one(self, export: Export) -> PeerDeviceMemory:
        """With `_pulls` as the current stream: then `cpu` waits for the copy."""
        memory = PeerDeviceMemory(export)
        token = torch.empty(len(export.token), dtype=torch.uint8, device=self._device)
        try:
            copy(token.data_ptr(), memory.token, len(export.token), self._pulls.cuda_stream)
            received = token.cpu().numpy().tobytes()
        except RuntimeError as e:
            memory.close()
            raise Unreachable(f"the test copy failed: {e}") from None
        if received != export.token:
            memory.close()
            raise Unreachable("the test copy brought other bytes")
        return memory

    def opened(self, memory: object) -> bool:
        return True

    def _pull(self, memory: PeerMemories[PeerDeviceMemory], batch: Sequence[Slice]) -> tuple[Event, Outcome]:
        """The kernel that scatters the slices reads this rank's heads in the memory of the peer, and sums
        them. The marks are copied after that, on a stream of their own, so the next kernel does not wait.

        Each byte is read once, since a second look may find other bytes. Slices that are converted are read
        by two kernels, so they are copied here first."""
        asked = batch
        places = {item.there: memory.place(item.there) for item in batch}
        sources = list({source.address: source for source, _ in places.values()}.values())

        def address_of(item: Slice) -> int:
            source, number = places[item.there]
            return source.slot(number)

        landing = None
        if not any(self._kernels.is_converted(item) for item in batch):
            items = [(item, address_of(item)) for item in batch]
        else:
            landing, items = self._land(batch, address_of, memory.slot_bytes)
            batch = [item for item, _ in items]
        each = sources[0].marks_bytes // 8
        with torch.cuda.stream(self._stream):
            table, marks_at = self._kernels.move_and_sum(items, into_pool=True, more=len(sources) * each)
            self._marks.wait_event(_event(self._stream))
        count = marks_at + len(sources) * each
        for i, source in enumerate(sources):
            marks = table.on_device.data_ptr() + 8 * (marks_at + i * each)
            copy(marks, source.marks, source.marks_bytes, self._marks.cuda_stream)
        table.fetch(count, self._marks)
        event = _event(self._marks)
        self._tables.over(event)
        if landing is not None:
            landing.free = event

        def outcome() -> list[Remainder]:
            words = table.words[:count].tolist()
            self._tables.give(table)
            sums = {item.there: words[i] for i, item in enumerate(batch)}
            first = {source.address: marks_at + i * each for i, source in enumerate(sources)}
            remainders: list[Remainder] = []
            for item in asked:
                source, number = places[item.there]
                mark = first[source.address] + 2 * number
                generation, checksum = words[mark : mark + 2]
                right = generation == item.sum
                remainders.append(self._remainder(item, checksum, sums[item.there]) if right else None)
            return remainders

        return event, outcome

    def _land(
        self, batch: Sequence[Slice], address_of: Callable[[Slice], int], slot_bytes: int
    ) -> tuple[_Landing, list[tuple[Slice, int]]]:
        """Copies slices of a peer to memory here. Copies have a stream of their own: the next ones run while
        a kernel scatters the slices before. Raises Unreachable."""
        self._make_landings()
        landing = self._landings.popleft()
        self._landings.append(landing)
        batch, offsets, copies = self._stage(batch, address_of, slot_bytes)
        self._pulls.wait_event(landing.free)
        try:
            for source, at, size in copies:
                copy(landing.memory.data_ptr() + at, source, size, self._pulls.cuda_stream)
        except CudaError as e:
            raise Unreachable(str(e)) from None
        self._stream.wait_event(_event(self._pulls))
        return landing, _at(batch, landing.memory, offsets)

    def close(self) -> None:
        for stream in (self._pulls, self._stream, self._marks):
            stream.synchronize()
        unpin(self._arena)
        self._kernels.close()
        self._landings.clear()
        self._arena = torch.empty(0)

    def _in_arena(self, item: Slice) -> int:
        return self._arena.data_ptr() + item.slot * self._slot_bytes

    def _stage(
        self, batch: Sequence[Slice], address_of: Callable[[Slice], int], slot_bytes: int
    ) -> tuple[list[Slice], list[int], list[tuple[int, int, int]]]:
        """By address, the byte of each in dense memory, and the copies between slots and that memory."""
        placed = sorted([(address_of(x), x) for x in batch], key=itemgetter(0))
        copies, offsets = coalesce([(at, self._kernels.slice_bytes(x)) for at, x in placed], slot_bytes)
        return [x for _, x in placed], offsets, copies

    def _dense(self, copies: Sequence[tuple[int, int, int]]) -> torch.Tensor:
        return torch.empty(sum(copies[-1][1:]), dtype=torch.uint8, device=self._device)


def _event(stream: torch.cuda.Stream) -> Event:
    """After all that the stream has so far."""
    event = torch.cuda.Event()
    event.record(stream)
    return event


def _at(batch: Sequence[Slice], dense: torch.Tensor, offsets: Sequence[int]) -> list[tuple[Slice, int]]:
    """Each with its address in `dense`."""
    return [(item, dense.data_ptr() + at) for item, at in zip(batch, offsets, strict=True)]
