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
from collections.abc import Iterator
from enum import IntEnum

import numpy as np

from baton.engine.execution.rank_files import RankFiles
from baton.engine.execution.upload import aligned
from baton.engine.step import Draws, Scored, Step, Variant

SLOTS = 8
"""At most two steps, with two commands each, are under way on a GPU."""
LINE = 64
"""Bytes of a cache line: each rank's count has its own."""
FULL_SECONDS = 1e-4
"""Between two looks at a full ring."""


class Kind(IntEnum):
    STOP = 0
    RUN = 1
    SAMPLE = 2


class Sample:
    """The step that was run last is to be sampled."""


class Followers:
    """The ranks that compute what rank 0 computes. This class is a model with one rank, which has none."""

    def run(self, step: Step) -> None:
        """They run the step."""

    def sample(self) -> None:
        """They take part in sampling the step that was run last."""

    def stop(self) -> None:
        """They end."""


HEAD = 16  # int64: kind, the sizes of the arrays, and the other fields of a step
TYPES = tuple(map(np.dtype, "qqqiiiqqqqqqqfiiff"))  # q: int64, i: int32, f: float32
"""Of the arrays of a step, in the order of `_arrays`."""


def _shapes(
    tokens: int,
    requests: int,
    width: int,
    states: int,
    restores: int,
    saves: int,
    copies: int,
    prefills: int,
    sampled: int,
    scored: int,
) -> list[tuple[int, ...]]:
    """The shapes of the arrays of a step, in the order of `_arrays`."""
    by_token, draws = [(tokens,)] * 3, [(sampled,)] * 5
    return [
        *by_token,
        (requests, width),
        (requests,),
        (states,),
        (restores, 2),
        (saves, 2),
        (copies, 2),
        (prefills, 2),
        (sampled,),
        (scored,),
        (scored,),
        *draws,
    ]


def _arrays(step: Step) -> list[np.ndarray]:
    lists = step.restores, step.saves, step.copies, step.prefills
    pairs = [np.array(x, dtype=np.int64).reshape(-1, 2) for x in lists]
    none = np.zeros(0, np.int64)
    scored = (none, none) if step.scored is None else (step.scored.rows, step.scored.tokens)
    states = none if step.state_slots is None else step.state_slots
    return [
        step.token_ids, step.positions, step.slots, step.block_tables, step.contexts, states, *pairs,
        step.sampled_rows, *scored, *step.draws,
    ]  # fmt: skip


class Commands(Followers):
    """The stream. Rank 0 writes with `run`, `sample` and `stop`; each other rank reads with `received`.

    All ranks make one, with equal sizes, before the first command."""

    def __init__(self, files: RankFiles, *, tokens: int, requests: int, table_width: int) -> None:
        """`tokens`, `requests`: most of them in a step."""
        shapes = _shapes(
            tokens, requests, table_width, requests, requests, requests, tokens, requests, requests, tokens
        )
        most = zip(shapes, TYPES, strict=True)
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in most]
        self._slot_bytes = 8 * HEAD + sum(map(aligned, sizes))
        self._wakes = files.wakes
        slots = LINE * (1 + len(files.wakes))
        size = slots + SLOTS * self._slot_bytes
        os.ftruncate(files.commands, size)
        memory = mmap.mmap(files.commands, size)
        self._memory = np.frombuffer(memory, dtype=np.uint8)
        self._done = self._memory[:slots].view(np.int64).reshape(-1, LINE // 8)[:, 0]  # by rank
        self._slots = self._memory[slots:].reshape(SLOTS, self._slot_bytes)
        self._written = 0

    # Rank 0

    def run(self, step: Step) -> None:
        arrays = _arrays(step)
        requests, width = step.block_tables.shape
        scored = (0, 0) if step.scored is None else (len(step.scored.rows), step.scored.top)
        head = [
            Kind.RUN, len(step.token_ids), requests, width, 0 if step.state_slots is None else requests,
            len(step.restores), len(step.saves), len(step.copies), len(step.prefills),
            len(step.sampled_rows), *scored, step.num_decodes, step.hands_over, step.variant.value,
        ]  # fmt: skip
        slot = self._next(head)
        at = 8 * HEAD
        for array in arrays:
            slot[at : at + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            at += aligned(array.nbytes)
        self._publish()

    def sample(self) -> None:
        self._next([Kind.SAMPLE])
        self._publish()

    def stop(self) -> None:
        self._next([Kind.STOP])
        self._publish()

    def _next(self, head: list[int]) -> np.ndarray:
        while self._written - int(self._done[1:].min()) >= SLOTS:
            time.sleep(FULL_SECONDS)
        slot = self._slots[self._written % SLOTS]
        slot[: 8 * HEAD].view(np.int64)[: len(head)] = head
        return slot

    def _publish(self) -> None:
        self._written += 1
        for wake in self._wakes:
            os.eventfd_write(wake, 1)

    # The other ranks

    def received(self, rank: int) -> Iterator[Step | Sample]:
        """The commands in order, until `stop`. The arrays of a step are valid until the next command is asked
        for."""
        for number in range(1, 1 << 62):
            os.eventfd_read(self._wakes[rank - 1])
            slot = self._slots[(number - 1) % SLOTS]
            kind = slot[: 8 * HEAD].view(np.int64)[0]
            if kind == Kind.STOP:
                return
            yield _step(slot) if kind == Kind.RUN else Sample()
            self._done[rank] = number


def _step(slot: np.ndarray) -> Step:
    head = slot[: 8 * HEAD].view(np.int64).tolist()
    arrays = []
    at = 8 * HEAD
    for shape, dtype in zip(_shapes(*head[1:11]), TYPES, strict=True):
        arrays.append(np.ndarray(shape, dtype, slot, at))
        at += aligned(arrays[-1].nbytes)
    token_ids, positions, slots, block_tables, contexts, states, *pairs = arrays[:10]
    restores, saves, copies, prefills = ([(first, second) for first, second in x.tolist()] for x in pairs)
    sampled_rows, rows, tokens, *draws = arrays[10:]
    scored, top, num_decodes, hands_over, variant = head[10:15]
    return Step(
        token_ids=token_ids,
        positions=positions,
        slots=slots,
        block_tables=block_tables,
        contexts=contexts,
        num_decodes=num_decodes,
        prefills=prefills,
        sampled_rows=sampled_rows,
        hands_over=bool(hands_over),
        variant=Variant(variant),
        draws=Draws(*draws),
        scored=Scored(rows, tokens, top) if scored else None,
        state_slots=states if len(states) else None,
        restores=restores,
        saves=saves,
        copies=copies,
    )
