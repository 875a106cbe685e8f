"""The autoscaler's policy on traces of load: what it does to queues, and that it does not flap."""

import itertools
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from baton.cluster.autoscaling.scaling import (
    ITL_SHARE,
    KV_FULL,
    PREFILL_BUSY,
    DecodeDemand,
    PrefillDemand,
    Sample,
    Scaler,
)
from baton.rpc import worker_pb2 as pb
from baton.steps.quantiles import percentile
from baton.steps.step_model import StepModel

SPEED = 10_000.0  # tokens/s of one prefill worker
PROMPT = 2000
TTFT = 1.0
START = 20.0  # seconds until a new worker is ready
LEAST, MOST = 1, 8
Trace = Callable[[float], float]  # time → requests/s


def steps_of(*decode: float, prompt: float = 1.0) -> StepModel:
    """`decode`: seconds of 1, 2, … decodes. `prompt`: of a token of a prompt."""
    rows = tuple(range(1, len(decode) + 1))
    return StepModel(rows, decode, 0.0, (1, 1000), (prompt, 1000 * prompt), 0.0, 1.0)


def prefilling(done: float, waiting: float, queued: float, speed: float) -> Sample:
    """`done`: tokens since the last sample. `queued`: those of `waiting` whose requests have not started.
    `speed`: 0 if it is not known."""
    status = pb.WorkerStatus(
        tokens_waiting=round(waiting), requests_waiting=round(queued),
        requests_running=round(waiting - queued),
    )  # fmt: skip
    return Sample(status, steps_of(1.0, prompt=1 / speed) if speed else None, round(done), 0)


def decoding(used: float, rows: int, model: StepModel | None, refused: int = 0, context: int = 0) -> Sample:
    """`used`: share of the blocks."""
    status = pb.WorkerStatus(
        blocks_free=round(10**6 * (1 - used)), blocks_total=10**6, requests_decoding=rows,
        decode_context=context,
    )  # fmt: skip
    return Sample(status, model, 0, refused)


@dataclass
class Run:
    """What became of a pool: one entry a second."""

    sizes: list[int] = field(default_factory=list)
    ttft: list[tuple[float, float]] = field(default_factory=list)  # (arrival, TTFT) of each request

    @property
    def steps(self) -> list[int]:
        return [b - a for a, b in itertools.pairwise(self.sizes) if a != b]

    @property
    def turns(self) -> int:
        """How often growing became shrinking, or shrinking growing."""
        signs = [math.copysign(1, step) for step in self.steps]
        return sum(a != b for a, b in itertools.pairwise(signs))

    def p99(self, begin: float, end: float) -> float:
        return percentile([t for at, t in self.ttft if begin <= at < end], 0.99)


def prefill_pool(trace: Trace, seconds: int, *, seed: int = 1) -> Run:
    """Poisson arrivals. A request goes to the shortest queue. A worker that leaves drains first."""
    rng = random.Random(seed)
    demand, scaler, run = PrefillDemand(TTFT), Scaler(LEAST, MOST), Run()
    workers: list[deque[tuple[float, float]]] = [deque()]  # of each: (arrival, tokens left)
    leaving: list[deque[tuple[float, float]]] = []
    coming: list[float] = []
    done, told, tick = 0.0, 0.0, 0.05
    for step in range(int(seconds / tick)):
        now = step * tick
        while coming and coming[0] <= now:
            coming.pop(0)
            workers.append(deque())
        for _ in range(sum(rng.random() < trace(now) * tick / 10 for _ in range(10))):
            min(workers, key=lambda queue: sum(left for _, left in queue)).append((now, PROMPT))
        for queue in (*workers, *leaving):
            budget = SPEED * tick
            while queue and budget:
                arrival, left = queue.popleft()
                used = min(left, budget)
                done, budget = done + used, budget - used
                if left > used:
                    queue.appendleft((arrival, left - used))
                else:
                    run.ttft.append((arrival, now + tick - arrival))
        leaving = [queue for queue in leaving if queue]
        if step % int(1 / tick) == 0:
            waiting = sum(left for queue in workers for _, left in queue)
            queued = waiting - sum(queue[0][1] for queue in workers if queue)
            needed = demand.needed(now, [prefilling(done - told, waiting, queued, SPEED if done else 0.0)])
            told = done
            size = len(workers) + len(coming)
            wanted = None if needed is None else needed.workers
            new = scaler.decide(now, wanted, size, starting=bool(coming))
            coming += [now + START] * (new - size)
            for _ in range(size - new):
                leaving.append(workers.pop())
            run.sizes.append(new)
    return run


def capacity(workers: float) -> float:
    """Requests/s at which so many workers compute all the time."""
    return workers * SPEED / PROMPT


@pytest.mark.cases(1)
@pytest.mark.parametrize("seed", range(5))
def test_a_steady_load_with_noise_never_flaps(seed: int) -> None:
    rng = random.Random(seed)
    noise = [1 + 0.3 * rng.uniform(-1, 1) for _ in range(1200)]
    run = prefill_pool(lambda now: capacity(1.5) * noise[int(now)], 1200, seed=seed)
    assert run.turns == 1, "up to clear what came while the second one started, then down, and no more"
    assert set(run.sizes[300:]) <= {2, 3, 4}
    assert run.p99(300, 1200) < TTFT


@pytest.mark.all
def test_a_ramp_is_followed_up_and_down() -> None:
    run = prefill_pool(lambda now: capacity(4) * max(0.0, 1 - abs(now - 600) / 600), 1320)
    assert run.turns == 1, "up, then down"
    assert max(run.sizes) in range(5, MOST + 1)
    assert run.sizes[-1] == LEAST
    assert run.p99(0, 1200) < 2 * TTFT


def test_a_spike_is_answered_at_once_and_forgotten_late() -> None:
    run = prefill_pool(lambda now: capacity(3 if 200 <= now < 260 else 0.3), 600)
    assert run.sizes[199] == 1
    assert run.sizes[208] > 1, "within seconds"
    assert run.turns == 1
    assert run.sizes[-1] == 1
    grown = max(index for index, size in enumerate(run.sizes) if size == max(run.sizes))
    assert grown >= 260 + 50, "the peak is kept for the length of the window"


@pytest.mark.all
def test_days_are_followed_without_flapping() -> None:
    day = 1800
    run = prefill_pool(lambda now: capacity(2.2 - 2 * math.cos(2 * math.pi * now / day)), 3 * day)
    assert run.turns <= 2 * 3
    assert run.sizes[day // 2] >= 5
    assert min(run.sizes[day - 100 : day + 100]) <= 2
    assert run.p99(0, 3 * day) < 2 * TTFT


def test_steps_and_sizes_are_bounded() -> None:
    rng = random.Random(3)
    for _ in range(50):
        least = rng.randint(1, 3)
        most = least + rng.randint(0, 6)
        scaler, size = Scaler(least, most, rng.uniform(10, 60)), least
        for second in range(400):
            needed = rng.choice((0.0, 1.0, 5.0, 1e9, None))
            new = scaler.decide(second, needed, size, starting=rng.random() < 0.2)
            assert least <= new <= most
            assert size - 1 <= new <= 2 * size
            size = new


def test_a_pool_outside_its_bounds_comes_back_at_once() -> None:
    assert Scaler(2, 4).decide(0, None, 1, starting=True) == 2
    assert Scaler(2, 4).decide(0, None, 9, starting=True) == 4


def test_a_worker_that_finds_no_place_is_given_up_when_it_is_not_needed() -> None:
    scaler = Scaler(1, 8, shrink_after=30)
    sizes = [scaler.decide(second, 0.1, 2, starting=True) for second in range(40)]
    assert sizes[0] == 2
    assert 1 in sizes


def test_without_a_measured_speed_nothing_is_known() -> None:
    demand = PrefillDemand(TTFT)
    assert demand.needed(0, [prefilling(0, 5000, 3000, 0.0)]) is None
    idle = PrefillDemand(TTFT).needed(0, [prefilling(0, 0, 0, 0.0)])
    assert idle is not None
    assert idle.workers == 0


def test_prompts_that_are_computed_count_before_they_are_done() -> None:
    demand = PrefillDemand(TTFT)
    demand.needed(0, [prefilling(0, 0, 0, SPEED)])
    needed = demand.needed(10, [prefilling(0, 10 * SPEED, 0, SPEED)])
    assert needed is not None
    assert needed.workers == pytest.approx(1 / PREFILL_BUSY)


def test_a_queue_that_has_drained_needs_no_worker() -> None:
    """One worker, and now and then two prompts at once: for two seconds one of them waits."""
    demand, scaler = PrefillDemand(0.3), Scaler(1, 3)
    for second in range(600):
        waits = second % 20 < 2
        sample = prefilling(0, 250, 125, 120.0) if waits else prefilling(1, 0, 0, 120.0)
        needed = demand.needed(second, [sample])
        assert scaler.decide(second, needed.workers if needed else None, 1, starting=False) == 1


# ---------------------------------------------------------------- decode

BASE, PER_REQUEST, ROOM, ITL = 0.010, 0.0005, 40, 0.030
STEPS = steps_of(BASE + PER_REQUEST, BASE + 2 * PER_REQUEST)


def decode_pool(running: Callable[[float], float], seconds: int, itl: float = ITL, room: int = ROOM) -> Run:
    """Requests are spread evenly; a step takes longer with each of them; KV has room for `room` a worker."""
    demand, scaler, run = DecodeDemand(itl), Scaler(LEAST, MOST), Run()
    ready, coming = 1, []
    for now in range(seconds):
        while coming and coming[0] <= now:
            coming.pop(0)
            ready += 1
        each = min(running(now) / ready, room)
        needed = demand.needed([decoding(each / room, int(each), STEPS)] * ready).workers
        new = scaler.decide(now, needed, ready + len(coming), starting=bool(coming))
        if new < ready + len(coming):
            ready -= 1
        coming += [now + START] * (new - ready - len(coming))
        run.sizes.append(new)
    return run


def test_decode_grows_with_kv_use_and_shrinks_again() -> None:
    run = decode_pool(lambda now: 100 if 60 <= now < 400 else 10, 900, itl=10.0)
    assert 0.7 <= 100 / (max(run.sizes) * ROOM) <= 0.88, "neither full nor wasted"
    assert run.turns == 1
    assert run.sizes[-1] == 1


def test_decode_grows_for_itl_where_kv_has_room() -> None:
    run = decode_pool(lambda now: 100 if 60 <= now < 400 else 5, 900, room=10_000)
    assert BASE + PER_REQUEST * 100 / max(run.sizes) <= ITL, "the target is met"
    assert run.turns == 1
    assert run.sizes[-1] == 1


def test_a_target_below_a_lone_step_asks_for_no_workers() -> None:
    run = decode_pool(lambda now: 20, 300, itl=BASE / 2, room=10_000)
    assert set(run.sizes) == {1}, "more workers make no step shorter than with one request"
    needed = DecodeDemand(0.010).needed([decoding(0.4, 2, steps_of(0.020, 0.050))])
    assert needed.workers == pytest.approx(0.5), "that of the KV"
    assert needed.why == (
        "40% of the KV blocks in use, steps up to 50.0 ms; more workers cannot keep steps at 9.0 ms, 90% of "
        "--itl-target: a step with one request takes longer"
    )


@pytest.mark.parametrize(
    ("seconds", "rows", "positions", "workers"),
    [
        ((0.010, 0.020, 0.030), 9, 0, 3.0),  # three requests fit a step of 30 ms
        ((0.010, 0.020, 0.021), 9, 0, 9 / 12),  # the first requests cost most, as with experts: twelve fit
        ((0.010, 0.011, 0.012), 9, 9_000, 9 / 5),  # 3 ms of context each
        ((0.010, 0.011, 0.012), 0, 0, 0.0),
    ],
)
def test_the_need_is_by_the_requests_that_fit_a_step(
    seconds: tuple[float, ...], rows: int, positions: int, workers: float
) -> None:
    model = replace(steps_of(*seconds), context_seconds=3e-6)
    assert DecodeDemand(0.030 / ITL_SHARE + 1e-9).needed(
        [decoding(0.0, rows, model, 0, positions)]
    ).workers == (pytest.approx(workers))


# ---------------------------------------------------------------- several workers


def test_the_loads_of_workers_add_up() -> None:
    """A new worker has measured nothing. 700 tokens are in the routers."""
    busy, new = prefilling(5, 3000, 2000, 900.0), prefilling(0, 0, 0, 0.0)
    needed = PrefillDemand(TTFT).needed(0, [busy, new], held_tokens=700)
    assert needed is not None
    assert needed.why == "0 tokens/s arrive, 2700 are queued, a worker computes 900/s"
    steps = [decoding(0.75, 2, steps_of(0.02, 0.03)), decoding(0.0, 0, None)]
    needed = DecodeDemand(1.0).needed(steps)
    assert needed.workers == pytest.approx(0.75 / KV_FULL)
    assert needed.why == "38% of the KV blocks in use, steps up to 30.0 ms"
    full = decoding(0.75, 2, steps_of(0.02, 0.03), refused=1)
    assert DecodeDemand(1.0).needed([full]).workers == pytest.approx(1 / KV_FULL), "no room for the next"
