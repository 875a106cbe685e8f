"""One ordered stream of commands from rank 0 to the other ranks, through shared memory.

    rank 0: write the command to the next slot ─▶ add 1 to each rank's eventfd
    others: wait for the eventfd ─▶ execute the command from the slot ─▶ count it as done

Rank 0 decides what is computed, and the others follow in its order. So all ranks call their collectives in
one order. The slots are a ring: rank 0 waits before it overwrites a command that some rank has not done.

The idea is that of nano-vllm's runner and of vLLM's `shm_broadcast`, which send pickled calls. Here a step is
its plain arrays, and another command is JSON.
"""

import json
import math
import mmap
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, get_args

import numpy as np

from baton.engine.api.config import MemoryTag
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


class Stop(NamedTuple):
    """Nothing follows."""


class Sample(NamedTuple):
    """Take part in sampling the step that was run last."""


class Move(NamedTuple):
    """Make these moves of memory, as in `ModelRunner.move`."""

    moves: Sequence[tuple[int, int, bool]]


class Stage(NamedTuple):
    """Read and check the weights of a checkpoint, beside steps."""

    number: int
    """Of the reading, from 1 on."""
    path: str


class Replace(NamedTuple):
    """Compute with the weights that are staged."""


class Drop(NamedTuple):
    """The weights that are staged are not wanted."""


class Memory(NamedTuple):
    """Give memory back to the device, or take it again."""

    tag: MemoryTag
    release: bool


Command = Stop | Sample | Move | Stage | Replace | Drop | Memory
_KINDS = {kind.__name__: kind for kind in get_args(Command)}

MOST_MOVES = 64
"""Of a command."""
MOST_COMMAND = 1 << 17
"""Bytes of a command that runs no step, as JSON. A character of a path may take six."""
MOST_PATH, MOST_REASON = 16_384, 2_048
"""Bytes of a path, and of the reason why a rank cannot have weights."""
HEAD = 1 + len(DIMENSIONS) + len(NUMBERS)
"""int64 of a step before its arrays: 0, the sizes of the dimensions, and the numbers of the step. Another
command begins with the number of its bytes."""


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
        self._slot_bytes = max(arrays, aligned(8 + MOST_COMMAND))
        self._wakes, self._reading = files.wakes, files.readings
        slots = LINE * (1 + len(files.wakes))
        answers = slots + SLOTS * self._slot_bytes
        size = answers + 2 * (16 + MOST_REASON) * (1 + len(files.wakes))
        os.ftruncate(files.commands, size)
        memory = mmap.mmap(files.commands, size)
        self._memory = np.frombuffer(memory, dtype=np.uint8)
        # By rank, the commands that are done. Of rank 0, the layers of `waited` that may go on.
        self._done = self._memory[:slots].view(np.int64).reshape(-1, LINE // 8)[:, 0]
        self._slots = self._memory[slots:answers].reshape(SLOTS, self._slot_bytes)
        # Of readings of weights, and of memory; by rank: the number of the reading, the bytes of the reason
        # why the rank could not do it, and the reason.
        self._of_readings, self._of_memory = self._memory[answers:].reshape(2, -1, 16 + MOST_REASON)
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
        slot = self._next([0, *(sizes[name] for name in DIMENSIONS), *numbers_of(step)])
        for target, array in zip(_arrays_in(slot, sizes), arrays, strict=True):
            target[...] = array
        self._publish()

    def send(self, command: Command) -> None:
        """The other ranks do this, after all that was sent before."""
        encoded = json.dumps([type(command).__name__, *command]).encode()
        slot = self._next([len(encoded)])
        slot[8 : 8 + len(encoded)] = np.frombuffer(encoded, np.uint8)
        self._publish()

    def move(self, moves: Sequence[tuple[int, int, bool]]) -> Callable[[], None]:
        """The other ranks make these moves of memory. Returns what waits until all have made them: then KV
        may be written on any rank. They wait only for what they compute."""
        for first in range(0, len(moves), MOST_MOVES):
            self.send(Move(moves[first : first + MOST_MOVES]))
        return self._wait

    def stage(self, path: str) -> Callable[[], None]:
        """The other ranks read and check the weights of a checkpoint, beside steps. Returns what waits for
        all of them, in any thread. It raises `ValueError` with the reason of a rank that cannot have them."""
        self._readings += 1
        number = self._readings
        if len(path.encode()) > MOST_PATH:
            raise ValueError(f"{path[:100]}…: a path has at most {MOST_PATH} bytes")
        self.send(Stage(number, path))

        def wait() -> None:
            while self._of_readings[1:, :8].view(np.int64).min() < number:
                os.eventfd_read(self._reading)  # it may count an earlier reading
            if reason := _reason(self._of_readings):
                raise ValueError(reason)

        return wait

    def memory(self, tag: MemoryTag, *, release: bool) -> None:
        """The other ranks give memory back, or take it again. Returns when all have. Raises
        `MemoryError` with the reason of a rank whose device has not as much."""
        self.send(Memory(tag, release))
        self._wait()
        if reason := _reason(self._of_memory):
            raise MemoryError(reason)

    def replace(self) -> Callable[[], None]:
        """The other ranks compute with the weights that they have read. Returns what waits until they do."""
        self.send(Replace())
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

    def answer(self, rank: int, command: Stage | Memory, reason: str) -> None:
        """The rank has done the command; weights are read in any thread. `reason`: why it could not. Empty:
        it could."""
        answers = self._of_readings if isinstance(command, Stage) else self._of_memory
        answer, encoded = answers[rank], reason.encode()[:MOST_REASON]
        answer[16 : 16 + len(encoded)] = np.frombuffer(encoded, np.uint8)
        head = answer[:16].view(np.int64)
        head[1] = len(encoded)
        if isinstance(command, Stage):
            head[0] = command.number  # last: rank 0 looks at it
            os.eventfd_write(self._reading, 1)

    def received(self, rank: int) -> Iterator[Step | Command]:
        """The commands in order, until `Stop`, and steps to run. The arrays of a step are valid until the
        next command is asked for."""
        for number in range(1, 1 << 62):
            os.eventfd_read(self._wakes[rank - 1])
            slot = self._slots[(number - 1) % SLOTS]
            if length := int(slot[:8].view(np.int64)[0]):
                kind, *fields = json.loads(slot[8 : 8 + length].tobytes())
                if kind == Stop.__name__:
                    return
                yield _KINDS[kind](*fields)
            else:
                yield _step(slot)
            self._done[rank] = number


def _reason(answers: np.ndarray) -> str:
    """The first rank from 1 on that could not do the command, and why. Empty: all could."""
    for rank, answer in enumerate(answers[1:], 1):
        if length := int(answer[8:16].view(np.int64)[0]):
            return f"rank {rank}: {answer[16 : 16 + length].tobytes().decode(errors='replace')}"
    return ""


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


def _step(slot: np.ndarray) -> Step:
    _, *head = slot[: 8 * HEAD].view(np.int64).tolist()
    arrays = _arrays_in(slot, dict(zip(DIMENSIONS, head, strict=False)))
    numbers = [kind(x) for kind, x in zip(NUMBERS.values(), head[len(DIMENSIONS) :], strict=True)]
    return assembled(dict(zip((*ARRAYS, *NUMBERS), (*arrays, *numbers), strict=True)))
