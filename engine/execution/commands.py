"""One ordered stream of commands from rank 0 to the other ranks, through shared memory.

    rank 0: write the command to the next slot ─▶ add 1 to each rank's eventfd
    others: wait for the eventfd ─▶ execute the command from the slot ─▶ count it as done

Rank 0 decides what is computed, and the others follow in its order. So all ranks call their collectives in
one order. The slots are a ring: rank 0 waits before it overwrites a command that some rank has not done.

The idea is that of nano-vllm's runner and of vLLM's `shm_broadcast`, which send pickled calls. Here a command
is the plain arrays of a step.
"""

import math
import mmap
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import IntEnum
from itertools import chain
from typing import NamedTuple

import numpy as np

from baton.engine.api.config import MEMORY_TAGS, MemoryTag
from baton.engine.execution.inputs import aligned
from baton.engine.execution.rank_files import RankFiles
from baton.engine.step import ARRAYS, DIMENSIONS, NUMBERS, Step, arrays_of, assembled, numbers_of

SLOTS = 8
"""At most two steps, with two commands each, are under way on a GPU."""
LINE = 64
"""Bytes of a cache line: each rank's count has its own."""
FULL_SECONDS = 1e-4
"""Between two looks at a full ring."""
LAYER_SECONDS = 2e-5
"""Between two looks whether rank 0 goes on with a layer."""


class Kind(IntEnum):
    STOP = 0
    RUN = 1
    SAMPLE = 2
    MOVE = 3
    STAGE = 4
    """Read and check other weights, beside steps."""
    REPLACE = 5
    """Compute with those from now on."""
    DROP = 6
    """They are not wanted."""
    MEMORY = 7
    """Give memory back to the device, or take it again."""


class Stage(NamedTuple):
    """A command to read the weights of a checkpoint."""

    number: int
    """Of the reading, from 1 on."""
    path: str


class Memory(NamedTuple):
    """A command to give memory back, or to take it again."""

    tag: MemoryTag
    release: bool


Moves = list[tuple[int, int, bool]]
"""Moves of memory, as in `ModelRunner.move`."""
MOST_MOVES = 64
"""Of a command."""
MOST_PATH, MOST_REASON = 16_384, 2_048
"""Bytes of a path, and of the reason why a rank cannot have weights."""
HEAD = 1 + len(DIMENSIONS) + len(NUMBERS)
"""int64 of a command before its arrays: its kind, the sizes of the dimensions, and the numbers of the
step."""


class Commands:
    """The stream. Rank 0 writes with `run` and `send`; each other rank reads with `received`.

    All ranks make one, with equal sizes, before the first command."""

    def __init__(
        self,
        files: RankFiles,
        *,
        tokens: int,
        requests: int,
        table_width: int,
        ahead: int = 1,
        image_bytes: int = 0,
    ) -> None:
        """`tokens`, `requests`: most of them in a step. `ahead`, `image_bytes`: the sizes of these
        dimensions. Without images it is 0."""
        sizes = dict.fromkeys(DIMENSIONS, tokens)
        sizes |= {"requests": requests, "width": table_width, "ahead": ahead, "image bytes": image_bytes}
        items = [(math.prod(layout.shape(sizes)), np.dtype(layout.dtype)) for layout in ARRAYS.values()]
        arrays = aligned(8 * HEAD) + sum(aligned(n * dtype.itemsize) for n, dtype in items)
        self._slot_bytes = max(arrays, aligned(8 * (2 + 3 * MOST_MOVES)), aligned(8 * 3 + MOST_PATH))
        self._wakes, self._reading = files.wakes, files.readings
        slots = LINE * (1 + len(files.wakes))
        reports = slots + SLOTS * self._slot_bytes
        size = reports + 2 * (16 + MOST_REASON) * (1 + len(files.wakes))
        os.ftruncate(files.commands, size)
        memory = mmap.mmap(files.commands, size)
        self._memory = np.frombuffer(memory, dtype=np.uint8)
        # By rank, the commands that are done. Of rank 0, the layers of `waited` that may go on.
        self._done = self._memory[:slots].view(np.int64).reshape(-1, LINE // 8)[:, 0]
        self._slots = self._memory[slots:reports].reshape(SLOTS, self._slot_bytes)
        # By rank, how its last reading of weights ended.
        # Then, why it has no memory.
        self._reports, self._lacks = self._memory[reports:].reshape(2, -1, 16 + MOST_REASON)
        self._readings = 0
        self._written = 0
        self._layers = 0  # of `waited`, on this rank

    def waited(self, rank: int, layer_done: Callable[[int], None]) -> Callable[[int], None]:
        """`layer_done` for a step that awaits KV: no rank attends before it has returned on rank 0. There it
        returns when all ranks have the KV of the layer, or when that will not come.

        So a rank waits only for rank 0, and rank 0 for no rank's step: other threads copy the KV."""

        def done(layer: int) -> None:
            layer_done(layer)
            self._layers += 1
            if rank == 0:
                self._done[0] = self._layers
            while self._done[0] < self._layers:
                time.sleep(LAYER_SECONDS)

        return done

    # Rank 0

    def run(self, step: Step) -> None:
        """The other ranks run the step."""
        arrays = arrays_of(step)
        sizes = _sizes_of(arrays)
        slot = self._next([Kind.RUN, *(sizes[name] for name in DIMENSIONS), *numbers_of(step)])
        for target, array in zip(_arrays_in(slot, sizes), arrays, strict=True):
            target[...] = array
        self._publish()

    def send(self, kind: Kind) -> None:
        """The other ranks take part in sampling the step that was run last, or they end, or they drop the
        weights that are staged."""
        self._next([kind])
        self._publish()

    def move(self, moves: Sequence[tuple[int, int, bool]]) -> Callable[[], None]:
        """The other ranks make these moves of memory. Returns what waits until all have made them: then KV
        may be written on any rank. They wait only for what they compute."""
        for first in range(0, len(moves), MOST_MOVES):
            some = moves[first : first + MOST_MOVES]
            self._next([Kind.MOVE, len(some), *chain.from_iterable(some)])
            self._publish()

        return self._wait

    def stage(self, path: str) -> Callable[[], None]:
        """The other ranks read and check the weights of a checkpoint, beside steps. Returns what waits for
        all of them, in any thread. It raises `ValueError` with the reason of a rank that cannot have them."""
        self._readings += 1
        number, encoded = self._readings, path.encode()
        if len(encoded) > MOST_PATH:
            raise ValueError(f"{path[:100]}…: a path has at most {MOST_PATH} bytes")
        slot = self._next([Kind.STAGE, number, len(encoded)])
        slot[24 : 24 + len(encoded)] = np.frombuffer(encoded, np.uint8)
        self._publish()

        def wait() -> None:
            heads = self._reports[1:, :16].view(np.int64)
            while heads[:, 0].min() < number:
                os.eventfd_read(self._reading)  # it may count an earlier reading
            for rank, (head, report) in enumerate(zip(heads, self._reports[1:], strict=True), 1):
                if head[1]:
                    reason = report[16 : 16 + int(head[1])].tobytes().decode(errors="replace")
                    raise ValueError(f"rank {rank}: {reason}")

        return wait

    def memory(self, tag: MemoryTag, *, release: bool) -> None:
        """The other ranks give memory back, or take it again. Returns when all have. Raises
        `MemoryError` with the reason of a rank whose device has not as much."""
        self._next([Kind.MEMORY, MEMORY_TAGS.index(tag), release])
        self._publish()
        self._wait()
        for rank, report in enumerate(self._lacks[1:], 1):
            if length := int(report[:8].view(np.int64)[0]):
                raise MemoryError(
                    f"rank {rank}: {report[16 : 16 + length].tobytes().decode(errors='replace')}"
                )

    def replace(self) -> Callable[[], None]:
        """The other ranks compute with the weights that they have read. Returns what waits until they do."""
        self._next([Kind.REPLACE])
        self._publish()
        return self._wait

    def _wait(self) -> None:
        """Until the other ranks have done all commands."""
        while int(self._done[1:].min()) < self._written:
            time.sleep(FULL_SECONDS)

    def _next(self, head: list[int]) -> np.ndarray:
        while self._written - int(self._done[1:].min()) >= SLOTS:
            time.sleep(FULL_SECONDS)
        slot = self._slots[self._written % SLOTS]
        slot[: 8 * len(head)].view(np.int64)[:] = head
        return slot

    def _publish(self) -> None:
        self._written += 1
        for wake in self._wakes:
            os.eventfd_write(wake, 1)

    # The other ranks

    def read(self, rank: int, number: int, reason: str) -> None:
        """A rank has read these weights, in any thread. `reason`: why it cannot have them; empty: it can."""
        report, encoded = self._reports[rank], reason.encode()[:MOST_REASON]
        report[16 : 16 + len(encoded)] = np.frombuffer(encoded, np.uint8)
        head = report[:16].view(np.int64)
        head[1] = len(encoded)
        head[0] = number  # last: rank 0 looks at it
        os.eventfd_write(self._reading, 1)

    def lacks(self, rank: int, reason: str) -> None:
        """Why a rank has not taken the memory that was asked for last. Empty: it has."""
        report, encoded = self._lacks[rank], reason.encode()[:MOST_REASON]
        report[16 : 16 + len(encoded)] = np.frombuffer(encoded, np.uint8)
        report[:8].view(np.int64)[0] = len(encoded)

    def received(self, rank: int) -> Iterator[Step | Moves | Stage | Memory | Kind | None]:
        """The commands in order, until `stop`: a step to run, moves of memory, weights to read, memory to
        give back or to take, `REPLACE`, `DROP`, or None to sample the step that was run last. The arrays of a
        step are valid until the next command is asked for."""
        for number in range(1, 1 << 62):
            os.eventfd_read(self._wakes[rank - 1])
            slot = self._slots[(number - 1) % SLOTS]
            kind = slot[: 8 * HEAD].view(np.int64)[0]
            if kind == Kind.STOP:
                return
            if kind == Kind.MOVE:
                yield _moves(slot)
            elif kind == Kind.STAGE:
                _, reading, length = slot[:24].view(np.int64).tolist()
                yield Stage(reading, slot[24 : 24 + length].tobytes().decode())
            elif kind == Kind.MEMORY:
                _, tag, release = slot[:24].view(np.int64).tolist()
                yield Memory(MEMORY_TAGS[tag], bool(release))
            elif kind in (Kind.REPLACE, Kind.DROP):
                yield Kind(kind)
            else:
                yield _step(slot) if kind == Kind.RUN else None
            self._done[rank] = number


def _sizes_of(arrays: Sequence[np.ndarray]) -> dict[str, int]:
    """The dimensions of the arrays of a step."""
    return {
        str(dim): size
        for layout, array in zip(ARRAYS.values(), arrays, strict=True)
        for dim, size in zip(layout.dims, array.shape, strict=True)
    }


def _arrays_in(slot: np.ndarray, sizes: Mapping[str, int]) -> Iterator[np.ndarray]:
    """The places of the arrays of a step, in the order of `ARRAYS`."""
    at = aligned(8 * HEAD)
    for layout in ARRAYS.values():
        array = np.ndarray(layout.shape(sizes), layout.dtype, slot, at)
        yield array
        at += aligned(array.nbytes)


def _moves(slot: np.ndarray) -> Moves:
    numbers = slot[: 8 * (2 + 3 * MOST_MOVES)].view(np.int64)
    rows = numbers[2 : 2 + 3 * int(numbers[1])].reshape(-1, 3).tolist()
    return [(cells, unit, bool(present)) for cells, unit, present in rows]


def _step(slot: np.ndarray) -> Step:
    _, *head = slot[: 8 * HEAD].view(np.int64).tolist()
    arrays = _arrays_in(slot, dict(zip(DIMENSIONS, head, strict=False)))
    numbers = [kind(x) for kind, x in zip(NUMBERS.values(), head[len(DIMENSIONS) :], strict=True)]
    return assembled(dict(zip((*ARRAYS, *NUMBERS), (*arrays, *numbers), strict=True)))
