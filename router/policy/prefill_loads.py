"""The prefill loads of the workers: waiting tokens, speed and cached chunks of each.

Workers report once a second to one router, and more often to several (`report_seconds`). Between reports the
queue of a worker is estimated: the reported tokens, plus what this router sent since, less what the worker
computes in that time at its reported speed. It is at most this router's own waiting tokens and what other
routers had in the last report. It is at least this router's own waiting tokens, less what the worker should
have computed of the first prompt, which takes as long as its plan says. Work that other routers sent since is
unknown. So a policy must not simply send everything to the worker that seems idle: `sticky` spreads sessions
by a ring.
"""

import math
import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from baton.kv_names import CHUNK_TOKENS, Tier
from baton.router.policy.chunk_index import ChunkIndex
from baton.router.policy.prefill import MAX_ROWS, PrefillRequest, PrefillSnapshot, Ring
from baton.rpc import bounded_report
from baton.rpc import worker_pb2 as pb
from baton.steps.averages import Average

UNKNOWN_SPEED = 1_000.0
"""Tokens/s of a worker that has no measured speed, if no other worker has one."""
REPORTS_PER_SECOND = 500
"""From all workers together. A report takes a router up to 0.1 ms."""


def report_seconds(workers: int) -> float:
    """The least seconds between two reports of each of so many workers that a router can take. Workers with
    several routers report as often as that."""
    return bounded_report(workers / REPORTS_PER_SECOND)


@dataclass(frozen=True, slots=True)
class PrefillWork:
    """One prefill that was sent to a worker. Its `chunks` are expected in the cache until it ends."""

    tokens: int
    """Uncached tokens, as estimated at the time of the choice."""
    chunks: Sequence[int] = ()
    cached: int = 0
    """Other tokens of the prompt."""
    seconds: float = 0.0
    """In which they should be computed, if none is ahead. 0: in those of as many tokens of other prompts."""
    beside: float = 0.0
    """Seconds in which the worker encodes images of the prompt, or waits for ranges of others."""
    shared: bool = False
    """Other workers compute ranges of the prompt, too."""


class Demand(NamedTuple):
    """What all clients ask lately, as the workers report it.

    Attributes:
        prompts: that come in a second.
        prompt: tokens of one that are not cached, on average.
        position: mean position of these tokens.
        output: tokens of answers in a second.
        context: positions that a token of an answer reads, on average.
        gap_cost: what a second more in one gap costs, on average, as in `EngineRequest`.
    """

    prompts: float
    prompt: float
    position: float
    output: float
    context: float
    gap_cost: float


@dataclass(slots=True)
class _Worker:
    name: str
    block_size: int
    at: float
    """Time at which `tokens` were waiting."""
    reported_at: float
    first_at: float
    """Time at which the first of `sent` began, or can begin."""
    first_seconds: float = 0.0
    """Of the time to compute it, what may be over."""
    router_seconds: float = 0.0
    """To compute all of `sent`."""
    serving: bool = False
    tokens: float = 0.0
    router_tokens: int = 0
    """Tokens of prefills that this router sent, without a first token."""
    sent: list[PrefillWork] = field(default_factory=list)
    """These prefills, in order."""
    others: int = 0
    """Tokens of the prefills of other routers in the last report."""
    load_speeds: Mapping[Tier, float] = field(default_factory=dict)
    computed: int | None = None
    """Prompt tokens since its start, as last reported. None: there was no report."""
    generated: int = 0
    """Tokens of answers since its start, as last reported."""
    # The weight of all before falls with each second:
    prompt_rate: Average = field(default_factory=Average)
    output_rate: Average = field(default_factory=Average)
    # Of these tokens, on average:
    position: Average = field(default_factory=Average)
    context: Average = field(default_factory=Average)
    gap_cost: Average = field(default_factory=Average)
    adapters: frozenset[bytes] = frozenset()
    """On its device, as last reported."""

    @property
    def beside(self) -> float:
        """Seconds of `sent` in which it encodes images, or waits for ranges of others."""
        return sum(work.beside for work in self.sent)

    def rates(self, status: pb.WorkerStatus, now: float) -> None:
        """Counts what the worker computed since the last report."""
        before, passed = self.computed, now - self.reported_at
        if before is not None and passed <= 0:
            return
        if before is not None:  # a worker may have run for days before the first report
            computed = max(0, status.computed_prompt_tokens - before)
            self.prompt_rate.add(computed, passed, steps=passed)
            self.output_rate.add(max(0, status.generation_tokens - self.generated), passed, steps=passed)
            self.position.add(status.prefill_position * computed, computed, steps=passed)
            if decodes := status.requests_decoding:
                self.context.add(status.decode_context / decodes * passed, passed, steps=passed)
                self.gap_cost.add(status.gap_cost / decodes * passed, passed, steps=passed)
        self.computed, self.generated = status.computed_prompt_tokens, status.generation_tokens
        self.reported_at = now


class PrefillLoads:
    """Owned by one router, or a simulated one. A worker's row is its number from `join` to `leave`.

    Times are seconds of one monotonic clock.

    Attributes:
        index: the cached chunks. The caller applies the workers' reports to it.
        prompts: tokens that a prompt of this router needed to compute lately.
        reused: share of the tokens of its recent prompts that were cached.
        others_share: of the tokens that wait at workers, as lately reported, those that other routers sent.
    """

    def __init__(self) -> None:
        self.index = ChunkIndex()
        self._workers: list[_Worker | None] = []  # by row; None: free
        self._free: list[int] = []  # these rows
        self.prompts, self.reused, self.others_share = Average(), Average(), Average()
        self._speed = np.ones(0)
        # The wait is at least the first, and lasts until the second; infinite if the worker does not serve.
        self._least_wait, self._wait_until = np.zeros(0), np.zeros(0)
        self._measured = np.zeros(0, bool)
        self._works = np.zeros(0, bool)  # whether it has prompts
        self._move_seconds = np.zeros(0)  # in which a worker moves an adapter to its device
        # The memory of these arrays, with room for later rows.
        self._numbers, self._flags = np.zeros((4, 0)), np.zeros((2, 0), bool)
        self._mean: float | None = None  # of measured speeds; None: they have changed since
        self._with_adapter: dict[bytes, set[int]] = {}  # rows that have it there
        # Of the workers that serve:
        self._ring = Ring()
        self._names: list[str] = []  # in order
        self._rows = np.zeros(0, np.int64)  # in the order of the names
        self._among = 0  # the rows as a set of bits
        self._stores = 0  # those that read from the shared store, at a known speed
        self._block_size = 1  # the largest, so that the cached tokens are not overestimated
        self._block_sizes: Counter[int] = Counter()

    def join(self, name: str, *, block_size: int, now: float, serving: bool = True) -> int:
        """Adds a worker with an empty queue and an empty cache. Returns its row.

        Raises ValueError if there is none left."""
        row = self._free.pop() if self._free else self._new_row()
        self._workers[row] = _Worker(name, block_size, at=now, reported_at=now, first_at=now)
        self._measure(row, None)
        self._changed(row)
        self.serve(row, serving)
        return row

    def leave(self, row: int) -> None:
        for work in self._worker(row).sent:
            self.index.unexpect(row, work.chunks)
        self.index.clear(row)
        self._set_store(row, False)
        self._set_adapters(row, pb.WorkerStatus())
        self.serve(row, False)
        self._workers[row], self._works[row] = None, False
        self._free.append(row)

    def serve(self, row: int, serving: bool) -> None:
        """Whether it takes new work of the prefill pool."""
        worker = self._worker(row)
        if worker.serving is serving:
            return
        worker.serving = serving
        self._changed(row)
        self._among ^= 1 << row
        self._block_sizes[worker.block_size] += 1 if serving else -1
        self._block_size = max((size for size, n in self._block_sizes.items() if n), default=1)
        place = bisect_left(self._names, worker.name)
        if serving:
            self._ring.add(worker.name, row)
            self._names.insert(place, worker.name)
            self._rows = np.concatenate((self._rows[:place], (row,), self._rows[place:]))
        else:
            self._ring.remove(worker.name, row)
            del self._names[place]
            self._rows = np.concatenate((self._rows[:place], self._rows[place + 1 :]))

    def _set_store(self, row: int, reads: bool) -> None:
        self._stores = self._stores | 1 << row if reads else self._stores & ~(1 << row)

    def _set_adapters(self, row: int, status: pb.WorkerStatus) -> None:
        self._move_seconds[row] = status.adapter_move_seconds
        worker, adapters = self._worker(row), frozenset(status.adapters_on_device)
        for adapter in adapters - worker.adapters:
            self._with_adapter.setdefault(adapter, set()).add(row)
        for adapter in worker.adapters - adapters:
            rows = self._with_adapter[adapter]
            rows.remove(row)
            if not rows:
                del self._with_adapter[adapter]
        worker.adapters = adapters

    def adapter_seconds(self, row: int, adapter: bytes) -> float:
        """Seconds in which the worker moves the adapter to its device. 0: it is there, or none is needed
        (empty), or the worker has not measured that."""
        has_adapter = not adapter or row in self._with_adapter.get(adapter, ())
        return 0.0 if has_adapter else self._move_seconds.item(row)

    def _worker(self, row: int) -> _Worker:
        worker = self._workers[row]
        assert worker is not None
        return worker

    def _new_row(self) -> int:
        if len(self._workers) == MAX_ROWS:
            raise ValueError(f"a router knows at most {MAX_ROWS} workers at a time")
        self._workers.append(None)
        rows = len(self._workers)
        if rows > self._flags.shape[1]:
            self._numbers, self._flags = (
                np.pad(each, ((0, 0), (0, rows))) for each in (self._numbers, self._flags)
            )
        self._speed, self._least_wait, self._wait_until, self._move_seconds = self._numbers[:, :rows]
        self._measured, self._works = self._flags[:, :rows]
        self.index.grow(rows)
        return rows - 1

    def draw(self, count: int, rng: random.Random) -> list[int]:
        """Rows of workers that serve prefills, at random: the first of equal ones is another one for each
        router."""
        rows = self._rows
        return [int(rows[place]) for place in rng.sample(range(len(rows)), min(count, len(rows)))]

    def speed(self, row: int) -> float:
        """Tokens/s of this worker, measured or guessed."""
        return self._speed.item(row)

    def _guessed_speed(self) -> float:
        if self._mean is None:
            count = np.count_nonzero(self._measured)
            total = float(np.add.reduce(self._speed, where=self._measured))
            self._mean = total / count if count else UNKNOWN_SPEED
        return self._mean

    def _measure(self, row: int, speed: float | None) -> None:
        """The speed of the worker. None: it has measured none, and gets the mean of the others."""
        if speed is not None or self._measured[row]:
            self._mean = None
        self._measured[row] = speed is not None
        self._speed[row] = self._guessed_speed() if speed is None else speed

    def _changed(self, row: int) -> None:
        worker, speed = self._worker(row), self._speed.item(row)
        self._works[row] = worker.tokens or worker.router_tokens
        worker.router_seconds = worker.router_tokens / speed + worker.beside
        worker.first_seconds = 0.0
        if worker.sent and (tokens := worker.sent[0].tokens):
            alone = tokens / speed + worker.sent[0].beside
            seconds = worker.sent[0].seconds or alone
            worker.router_seconds += seconds - alone
            # Its last token is not computed, so a worker that is late has something left.
            worker.first_seconds = seconds - seconds / tokens
        seconds = worker.router_seconds if worker.serving else math.inf
        self._least_wait[row] = seconds - worker.first_seconds
        self._wait_until[row] = max(seconds + worker.first_at, worker.at + worker.tokens / speed)

    # ------------------------------------------------------------ changes

    def reported(self, row: int, status: pb.WorkerStatus, now: float, *, alone: bool = True) -> None:
        """Applies a report of the worker. It counts the tokens of all routers, also of a running step.

        `alone`: the worker is in the prefill pool. Others compute prompts beside decodes, which says nothing
        about the speed of another worker.
        """
        worker, tokens_waiting = self._worker(row), status.tokens_waiting
        worker.load_speeds = {
            Tier.HOST: status.host_tokens_per_s,
            Tier.DISK: status.disk_tokens_per_s,
            Tier.STORE: status.store_tokens_per_s,
        }
        self._set_store(row, status.store_tokens_per_s > 0)
        self._set_adapters(row, status)
        worker.others = min(status.tokens_of_others, tokens_waiting)
        self.others_share.add(worker.others, tokens_waiting, steps=1 / len(self._workers))
        if alone and status.prefill_tokens_per_s > 0:
            first = not self._measured[row]
            self._measure(row, status.prefill_tokens_per_s)
            if first:
                self._guess_speeds()
        elif not alone and status.long_chunk_tokens and status.long_chunk_seconds > 0:
            self._speed[row], self._mean = status.long_chunk_tokens / status.long_chunk_seconds, None
        if worker.sent:  # what is left of the first prompt, at the new speed
            self._changed(row)
        tokens_waiting += self._as_tokens(row, status.encode_queue_seconds)
        worker.tokens, worker.at = max(0.0, tokens_waiting - self._tokens_of_first(row, now)), now
        self._changed(row)
        worker.rates(status, now)

    def _guess_speeds(self) -> None:
        """Workers without a measured speed get the mean of the others."""
        unmeasured = ~self._measured
        self._speed[unmeasured] = self._guessed_speed()
        for row in np.flatnonzero(unmeasured & self._works).tolist():
            self._changed(row)

    def sent(self, row: int, work: PrefillWork, now: float) -> None:
        """This router sent a prefill."""
        worker = self._worker(row)
        waiting = self.tokens_waiting(row, now) + work.tokens + self._as_tokens(row, work.beside)
        worker.tokens, worker.at = waiting, now
        if not worker.sent:
            worker.first_at = now
        worker.router_tokens += work.tokens
        worker.sent.append(work)
        self.prompts.add(work.tokens)
        self.reused.add(work.cached, work.cached + work.tokens)
        self._changed(row)
        self.index.expect(row, work.chunks)

    def ended(self, row: int, work: PrefillWork, *, computed: bool, now: float) -> None:
        """The first token came (`computed`), or the prefill was cancelled. `work` is the object of `sent`."""
        worker, waiting = self._worker(row), self.tokens_waiting(row, now)
        worker.router_tokens -= work.tokens
        place = next(i for i, sent in enumerate(worker.sent) if sent is work)
        del worker.sent[place]
        if place == 0:
            worker.first_at = now
        elif computed:  # it came before the first prompt, which waited meanwhile
            seconds = (work.seconds or work.tokens / self.speed(row)) + work.beside
            worker.first_at = min(now, worker.first_at + seconds)
        if not computed:
            waiting -= work.tokens + self._as_tokens(row, work.beside)
        most_left = worker.router_tokens + self._as_tokens(row, worker.beside) + worker.others
        worker.tokens, worker.at = min(waiting, most_left), now
        self._changed(row)
        self.index.unexpect(row, work.chunks)

    def _as_tokens(self, row: int, seconds: float) -> float:
        """Prompt tokens that the device computes in the time in which it encodes images."""
        return seconds * self._speed.item(row)

    def router_tokens(self, row: int) -> int:
        """Tokens of the prompts of this router without a first token."""
        return self._worker(row).router_tokens

    def tokens_waiting(self, row: int, now: float) -> float:
        """Prompt tokens that the worker has not computed yet, as estimated."""
        worker, speed = self._workers[row], self._speed.item(row)
        assert worker is not None
        of_first, since = worker.first_seconds, now - worker.first_at  # `min` and `max` take longer
        tokens = speed * worker.router_seconds - speed * (of_first if of_first < since else since)
        reported = worker.tokens - speed * (now - worker.at)
        return tokens if tokens > reported else reported

    def unreported(self, row: int, now: float) -> float:
        """Prompts that came to the worker since its last report, if as many come as it lately computed."""
        worker, prompt = self._worker(row), self.prompts.value
        return worker.prompt_rate.value * (now - worker.reported_at) / prompt if prompt else 0.0

    def _tokens_of_first(self, row: int, now: float) -> float:
        """Tokens of this router's first prompt that should be computed."""
        worker = self._worker(row)
        return self._speed.item(row) * min(worker.first_seconds, now - worker.first_at)

    # ------------------------------------------------------------ the current state

    def prompt_rate(self, row: int) -> float:
        """Prompt tokens that the worker lately computed in a second."""
        return self._worker(row).prompt_rate.value

    def demand(self) -> Demand | None:
        """What comes to the workers of both pools. None: no prompt or no answer lately."""
        computed = generated = position = context = gap_cost = 0.0
        for worker in self._workers:
            if worker is not None:
                prompts, output = worker.prompt_rate.value, worker.output_rate.value
                computed += prompts
                generated += output
                position += prompts * worker.position.value
                context += output * worker.context.value
                gap_cost += output * worker.gap_cost.value
        prompt = self.prompts.value
        if not (computed and generated and prompt):
            return None
        return Demand(
            computed / prompt,
            prompt,
            position / computed,
            generated,
            context / generated,
            gap_cost / generated,
        )

    def tokens_per_s(self) -> float:
        """Measured speed of all workers that may be chosen; 0 if none is known."""
        measured = self._rows[self._measured[self._rows]]
        return float(self._speed[measured].sum())

    def tokens_of_others(self) -> int:
        """Prompt tokens of other routers at all workers, in their last reports."""
        return sum(worker.others for worker in self._workers if worker is not None)

    def snapshot(
        self, request: PrefillRequest, now: float, avoid: Collection[int] = ()
    ) -> PrefillSnapshot | None:
        """Makes the snapshot for one choice; None if there is no worker.

        Rows in `avoid` may be chosen only if there is no other.
        """
        rows, among = self._rows, self._among
        if not len(rows):
            return None
        moves = None
        if request.adapter:
            moves = self._move_seconds.copy()
            moves[[*self._with_adapter.get(request.adapter, ())]] = 0.0
        avoided = [row for row in avoid if among >> row & 1] if avoid else []
        if len(avoided) == len(rows):
            avoided = []
        if avoided:
            rows = np.setdiff1d(rows, avoided, assume_unique=True)  # keeps the order of `rows`
            among &= ~sum(1 << row for row in avoided)
        cached = self.index.overlap(request.chunks, request.tokens, self._block_size, among, self._stores)
        below_device = self._stores or self.index.has_offloaded

        def load(row: int) -> float:
            if not below_device:
                return 0.0
            return self._load_seconds(row, request.chunks[: cached.of(row) // CHUNK_TOKENS])

        return PrefillSnapshot(
            self._ring,
            rows,
            self._speed,
            cached,
            load,
            self.prompts.value,
            now,
            self._least_wait,
            self._wait_until,
            moves,
            avoided,
        )

    def _load_seconds(self, row: int, chunks: Sequence[int]) -> float:
        """A worker computes what it would not load faster."""
        seconds = 0.0
        below = self.index.offloaded(row, chunks)
        if self._stores >> row & 1:
            below[Tier.STORE] = self.index.only_stored(row, chunks)
        for tier, count in below.items():
            if speed := self._worker(row).load_speeds.get(tier, 0.0):
                seconds += count * CHUNK_TOKENS / max(speed, float(self._speed[row]))
        return seconds
