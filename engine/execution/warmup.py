"""Runs steps before the first request: to measure their memory and their time, and to compile kernels.

    measure_steps   on a small cache that is thrown away: how much memory the KV pool must leave free
    warm_up         on the real cache, since kernels are compiled for its size, too
    measure_times   on the real cache, and with graphs: what steps of some sizes cost
    first_steps     of a CPU, in place of all these: what one decode costs, and one step of a prompt

The first two run the same steps, in this order:

1. prompts of as many requests as a step can hold, which fill its token budget
2. decodes of all these requests, of half of them, of a quarter, and so on; and with drafts, if there are
3. long prompts that fill a step beside one decode, and the rest of these prompts, with log probabilities
4. ends of a long prompt, of few tokens and of more: latents have other kernels for each number, as when many
   streams go on after another engine process
5. steps with other kernels for sampling or matrix products
"""

import random
import statistics
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from baton.engine.api.config import EngineConfig
from baton.engine.api.pools import Pool
from baton.engine.arrange import arrange
from baton.engine.execution.memory_sizing import PoolSize
from baton.engine.execution.runner import ModelRunner
from baton.engine.step import NOT_FINITE, NOT_SCORED, Draws, Scored, Step, Variant
from baton.engine.step_adjustments import Adjustments, Penalties
from baton.engine.step_drafts import Draft
from baton.steps.learned_steps import row_sizes, token_sizes
from baton.steps.measured_steps import Step as Timing
from baton.steps.measured_steps import measure
from baton.steps.step_model import LARGE, StepModel

TOP_LOGPROBS = 20
PLAINER = [(1, Variant.GREEDY), (24, Variant.DRAWN)] + [(n, Variant.GREEDY) for n in (48, 96, 384, 768, 192)]
"""(prompt length, variant): matrix products choose other kernels for these numbers of rows, or measure them
(`engine.kernels.fastest`), and sampling has other kernels for these variants. The last one also takes the
memory in which attention converts FP8 blocks (`engine.kernels.attention.gather_kv`): the largest steps may
have too many positions for that."""
LONG_CONTEXT = 4_096
"""Positions of a decode in timed steps with a long context, and before a chunk of a long prompt."""
LAST_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Of the rehearsed ends of a long prompt."""
TIMED_RUNS = 3
"""Of a timed step: the median counts, and on a CPU the fastest. One that takes longer than `LONG_STEP` is the
last."""
LONG_STEP = 0.05
DECODE_TOKENS = 8
"""Prompt tokens that a CPU computes in the time of a decode, at least, if they are many: a decode reads the
weights for one token."""


@dataclass(slots=True, eq=False)
class _Sequence:
    """A request of the rehearsal: a prompt of zeros, and its blocks."""

    prompt: int
    blocks: "array[int]"
    state_slot: int
    computed: int = 0


class _Chunk(NamedTuple):
    sequence: _Sequence
    count: int = 1  # tokens, without drafts
    decodes: bool = True
    drafts: int = 0


class TimedStep(NamedTuple):
    """A step that was measured; the sizes are those of `StepModel.step`."""

    rows: int
    context: float
    tokens: int
    position: float
    seconds: float


class Rehearsal:
    """The steps for an engine with these limits."""

    def __init__(
        self,
        config: EngineConfig,
        max_model_len: int,
        block_size: int,
        *,
        pool: int | None = None,
        num_slots: int = 0,
        window_blocks: int | None = None,
    ) -> None:
        """`pool`: blocks of the cache; requests that find no more blocks share some. None: the cache will
        have `num_blocks`. `num_slots`: requests with states, which may be fewer than requests; 0: no layer
        has states. `window_blocks`: as in `PoolSize`; requests share some of these, too."""
        seats, budget = config.max_num_seqs, config.max_num_batched_tokens
        self._budget = budget
        self._max_model_len = max_model_len
        self._block_size = block_size
        self._pool = pool
        self._num_slots = num_slots
        self._window_blocks = None
        if pool is not None and window_blocks is not None:
            self._window_blocks = (np.arange(pool, dtype=np.int32) % (window_blocks - 1)) + 1
        speculative = config.speculative_config
        self._guesses = config.ahead - 1 if speculative is not None and speculative.by_device else 0
        self._ahead = 1 if num_slots and not self._guesses else config.ahead
        self._drafting = config.max_decode_rows // self._ahead if self._ahead > 1 else 0
        """Requests of a step in which each has all drafts."""
        self._sequences = 0
        self._random = random.Random(0)
        self.num_blocks = 0
        decodes = seats.bit_length() + 2 + 2 * self._ahead  # tokens that the first request decodes
        self._first = [
            self._sequence(min((budget + number) // seats, max_model_len - decodes), decodes)
            for number in range(seats)
        ]
        longest = min(budget * 3 // 2, max_model_len - 1)
        mixes = min(seats, budget) > 1  # whether a decode and a chunk fit into one step
        count = min(budget // max(1, longest) + 1, seats - mixes)
        self._long = [self._sequence(longest) for _ in range(count)]
        self._ending = self._sequence(min(LONG_CONTEXT + LAST_TOKENS[-1], max_model_len))
        self._mixed = self._first[:1] if mixes else []
        self._plainer = [(self._sequence(min(n, max_model_len - 1), 1), variant) for n, variant in PLAINER]

    def _sequence(self, prompt: int, decodes: int = 0) -> _Sequence:
        prompt = max(1, prompt)
        blocks = -(-min(prompt + decodes, self._max_model_len) // self._block_size)
        self.num_blocks += blocks
        ids = range(self.num_blocks - blocks, self.num_blocks)
        self._sequences += 1
        slot = self._sequences % self._num_slots if self._num_slots else 0
        table = array("i", [block % self._pool if self._pool else block for block in ids])
        return _Sequence(prompt, table, slot)

    def steps(self, table_width: int | None) -> Iterator[Step]:
        """All steps in order; `table_width` as in `arrange`."""
        for sequence in (*self._first, *self._long, *(sequence for sequence, _ in self._plainer)):
            sequence.computed = 0

        def step(
            chunks: Sequence[_Chunk], variant: Variant = Variant.FILTERED, *, scored: bool = False
        ) -> Step:
            return self._step(chunks, variant, table_width, scored=scored)

        while chunks := self._fill(self._first, self._budget):
            yield step(chunks)
        count = len(self._first)
        while count:
            yield step([_Chunk(sequence) for sequence in self._first[:count]])
            count //= 2
        if self._drafting:
            one_by_one = not self._num_slots
            drafting = self._first[: self._drafting]
            yield step([_Chunk(s, decodes=one_by_one, drafts=self._ahead - 1) for s in drafting])
        decodes = [_Chunk(sequence) for sequence in self._mixed]
        while chunks := self._fill(self._long, self._budget - len(decodes)):
            yield step([*decodes, *chunks], scored=True)
        for last in LAST_TOKENS:
            # What comes before was not computed, so it gets no logits, which may be no numbers.
            count = min(last, self._budget, self._ending.prompt - 1)
            self._ending.computed = self._ending.prompt - 1 - count
            yield step([_Chunk(self._ending, count, decodes=False)])
        for sequence, variant in self._plainer:
            while chunks := self._fill([sequence], self._budget):
                yield step(chunks, variant)
            yield step([_Chunk(sequence)], variant)

    def sized(
        self,
        rows: int,
        context: float,
        tokens: int,
        position: float,
        *,
        table_width: int | None,
        vocab_size: int,
    ) -> Step:
        """A step with these sizes, as in `StepModel.step`, of at most `max_model_len` positions a request.
        The cache has `pool` blocks, of which the next ones are used: their KV is in no cache of the
        device. The tokens are drawn, since equal ones would choose the same experts. All ranks draw the
        same."""
        assert self._pool is not None, "the cache is that of the engine"
        chunks = []
        for _ in range(rows):
            sequence = self._sequence(min(max(1, int(context) // rows), self._max_model_len))
            sequence.computed = sequence.prompt - 1
            chunks.append(_Chunk(sequence))
        if tokens:
            sequence = self._sequence(min(int(position) + tokens, self._max_model_len))
            sequence.computed = int(position)
            chunks.append(_Chunk(sequence, tokens, decodes=False))
        token_ids = self._random.choices(range(vocab_size), k=rows + tokens)
        return self._step(chunks, Variant.DRAWN, table_width, scored=False, token_ids=token_ids)

    @staticmethod
    def _fill(sequences: Sequence[_Sequence], room: int) -> list[_Chunk]:
        """Chunks of `room` tokens at most, of prompts that are not computed yet."""
        chunks = []
        for sequence in sequences:
            if count := min(room, max(0, sequence.prompt - sequence.computed)):
                chunks.append(_Chunk(sequence, count, decodes=False))
                room -= count
        return chunks

    def _step(
        self,
        chunks: Sequence[_Chunk],
        variant: Variant,
        table_width: int | None,
        *,
        scored: bool,
        token_ids: Sequence[int] | None = None,
    ) -> Step:
        """The arrays of these chunks, which count as computed from then on. A decode at the end of its blocks
        computes the last position again."""
        ends = [min(self._max_model_len, len(s.blocks) * self._block_size) for s, *_ in chunks]
        starts = [
            max(0, min(chunk.sequence.computed, end - chunk.count - chunk.drafts))
            for chunk, end in zip(chunks, ends, strict=True)
        ]
        stops = [start + chunk.count for start, chunk in zip(starts, chunks, strict=True)]
        for (sequence, *_), stop in zip(chunks, stops, strict=True):
            sequence.computed = stop
        sampled = [i for i, (s, _, decodes, _) in enumerate(chunks) if decodes or s.computed >= s.prompt]
        tokens = token_ids or [0] * sum(chunk.count for chunk in chunks)
        drafts = {
            i: Draft([0] * chunk.drafts, chunk.drafts) for i, chunk in enumerate(chunks) if chunk.drafts
        }
        rows = len(sampled) + sum(chunk.drafts for chunk in chunks)
        all_rows = Scored(np.arange(len(tokens)), np.array(tokens), TOP_LOGPROBS)
        return arrange(
            tokens, starts, stops,
            [sequence.blocks for sequence, *_ in chunks], sampled, variant, _draws(rows, variant),
            num_decodes=sum(chunk.decodes for chunk in chunks),
            hands_over=False, block_size=self._block_size, table_width=table_width,
            scored=all_rows if scored else NOT_SCORED,
            state_slots=[sequence.state_slot for sequence, *_ in chunks] if self._num_slots else None,
            drafts=drafts, keys=np.zeros((rows, self._ahead), np.int32) if self._drafting else None,
            following={} if self._guesses else None,
            guessed=sampled if self._guesses else (), guesses=self._guesses,
            window_blocks=self._window_blocks,
        )  # fmt: skip


def rehearsal_in(pool: PoolSize, config: EngineConfig, block_size: int) -> Rehearsal:
    """In the cache of the engine."""
    return Rehearsal(
        config,
        pool.max_model_len,
        block_size,
        pool=pool.of(Pool.BLOCKS).present,
        num_slots=pool.of(Pool.SLOTS).present,
        window_blocks=pool.window_blocks and pool.of(Pool.WINDOWS).present,
    )


def _draws(rows: int, variant: Variant) -> Draws[np.ndarray]:
    temperature = 0.0 if variant is Variant.GREEDY else 2.0
    top_p, min_p = (0.999, 1e-9) if variant is Variant.FILTERED else (2.0, 0.0)
    return Draws(
        np.full(rows, temperature, np.float32),
        np.arange(rows, dtype=np.int32),
        np.full(rows, np.iinfo(np.int32).max, np.int32),
        np.full(rows, top_p, np.float32),
        np.full(rows, min_p, np.float32),
    )


def _adjustments(rows: int) -> Adjustments:
    """The adjustments that take the most memory, for all rows."""
    each = np.arange(rows)
    ones = np.ones(rows, np.float32)
    counted = (each, np.zeros(rows, np.int64))
    penalties = Penalties(each, ones, ones, ones, counted, counted, (each[:0], each[:0]))
    return Adjustments(penalties=penalties, logprob_rows=each, top_logprobs=TOP_LOGPROBS)


def measure_steps(
    runner: ModelRunner, rehearsal: Rehearsal, progress: Callable[[str, float], None]
) -> tuple[int, int]:
    """Runs the steps. Returns the bytes that they allocate beside weights and KV, at the peak: any step, and
    one that only decodes, with as many requests as fit. Captured graphs need as much as that one. Raises
    `ValueError` if the model's logits are not finite."""
    device = runner.device
    torch.cuda.empty_cache()
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    peak_of_all, peak_of_decodes = 0, 0
    torch.cuda.reset_peak_memory_stats(device)
    for only_decodes in rehearse(runner, rehearsal, lambda done: progress("measuring memory", done)):
        peak = torch.cuda.max_memory_allocated(device) - allocated
        peak_of_all = max(peak_of_all, peak, torch.cuda.max_memory_reserved(device) - reserved)
        peak_of_decodes = max(peak_of_decodes, peak) if only_decodes else peak_of_decodes
        torch.cuda.reset_peak_memory_stats(device)
    return peak_of_all, peak_of_decodes


def warm_up(runner: ModelRunner, rehearsal: Rehearsal, progress: Callable[[str, float], None]) -> None:
    """Runs the steps, to compile kernels. Raises `ValueError` if the model's logits are not finite."""
    for _ in rehearse(runner, rehearsal, lambda done: progress("warming up", done)):
        pass


def measure_times(
    runner: ModelRunner, config: EngineConfig, pool: PoolSize, vocab_size: int, budget: float
) -> StepModel:
    """Measures what steps cost, in about `budget` seconds at most, beside the three that `measure` always
    runs. All ranks run the same steps: those that rank 0 has time for."""
    ranks = runner.ranks
    (budget,) = ranks.agreed([budget])
    once = _timing(runner, config, pool, vocab_size)

    def seconds(rows: int, context: float, tokens: int, position: float) -> float:
        return statistics.median(_runs(once, (rows, context, tokens, position)))

    half = max(1, pool.max_model_len // 2)  # a prompt is as long as the positions before it, at most
    long = min(LONG_CONTEXT, half)
    return measure(
        seconds,
        row_sizes(config.max_num_seqs),
        token_sizes(min(config.max_num_batched_tokens, half)),
        long,
        long,
        budget=budget / TIMED_RUNS,
    )


def first_steps(
    runner: ModelRunner, config: EngineConfig, pool: PoolSize, vocab_size: int, budget: float
) -> Sequence[TimedStep]:
    """Steps of a CPU at its start: a decode, and a prompt that should take `budget` seconds at most. All
    ranks run the same ones.

    Other processes may start on its cores meanwhile, and the first step of a process takes some milliseconds
    more. A worker that seems slow for it would get no prompts, and so not learn better: the fastest run
    counts. The engine learns from these steps as from those of requests, which soon count for more."""
    (budget,) = runner.ranks.agreed([budget])
    once = _timing(runner, config, pool, vocab_size)
    decode = 1, 1.0, 0, 0.0
    of_decode = min(_runs(once, decode))
    most = min(config.max_num_batched_tokens, max(1, pool.max_model_len // 2), LARGE)
    count = min(most, max(token_sizes(most)[0], int(DECODE_TOKENS * budget / of_decode)))
    prompt = 0, 0.0, count, 0.0
    return TimedStep(*decode, of_decode), TimedStep(*prompt, min(_runs(once, prompt)))


def _runs(once: Timing, size: tuple[int, float, int, float]) -> list[float]:
    """Seconds of some runs of a step."""
    timed: list[float] = []
    while len(timed) < TIMED_RUNS and (not timed or timed[-1] < LONG_STEP):
        timed.append(once(*size))
    return timed


def _timing(runner: ModelRunner, config: EngineConfig, pool: PoolSize, vocab_size: int) -> Timing:
    """Returns a function that runs a step in the cache of the engine. It returns seconds, the same on all
    ranks."""
    rehearsal = rehearsal_in(pool, config, runner.block_size)

    def seconds(rows: int, context: float, tokens: int, position: float) -> float:
        step = rehearsal.sized(
            rows, context, tokens, position, table_width=runner.cache.table_width, vocab_size=vocab_size
        )
        launched = runner.run(step, lambda _: None)
        runner.sample(launched, None)
        launched.wait()
        return runner.ranks.agreed([launched.seconds])[0]

    return seconds


def rehearse(runner: ModelRunner, rehearsal: Rehearsal, progress: Callable[[float], None]) -> Iterator[bool]:
    """Runs the steps one by one. Yields after each whether it only decoded."""
    steps = list(rehearsal.steps(runner.cache.table_width))
    for done, step in enumerate(steps, 1):
        launched = runner.run(step, lambda _: None)
        heaviest = step.variant is Variant.FILTERED and launched.rows
        runner.sample(launched, _adjustments(launched.rows) if heaviest else None)
        if NOT_FINITE in launched.wait():
            raise ValueError(
                "the model's logits are not finite numbers in a rehearsed step, before any request"
            )
        progress(done / len(steps))
        yield not step.num_prefills
