"""Simulates both pools under Poisson arrivals of equal requests. Times are in seconds."""

import random
from collections import Counter, deque
from dataclasses import dataclass

from baton.machine.quantiles import percentile
from baton.machine.step_model import StepModel
from baton.router.policy.prefill import PREFILL_POLICIES
from baton.simulator.prefill import Setting, Simulation
from baton.simulator.trace import Session, Turn

SEED = 1
REQUESTS, PER_WORKER = 2_000, 40  # simulated requests: at least, and more per worker


@dataclass(frozen=True, slots=True)
class Latency:
    p50: float
    p99: float


def prefill(steps: StepModel, *, workers: int, rate: float, tokens: int) -> Latency:
    """The time to the first token with the router's policy and without prefix-cache hits."""
    count = REQUESTS + PER_WORKER * workers
    rng = random.Random(SEED)
    sessions = [Session(rng.getrandbits(63), (Turn(tokens, (), 0.0),), 0) for _ in range(count)]
    setting = Setting(workers, 1, 1, rate, 0.0, steps.prefill, warm_up=0.2, seed=SEED)
    outcome = Simulation(sessions, PREFILL_POLICIES["sticky"], setting).run()
    return Latency(percentile(outcome.ttft, 0.5), percentile(outcome.ttft, 0.99))


@dataclass(frozen=True, slots=True)
class Decoded:
    """The simulated behaviour of one decode worker.

    Attributes:
        gap: time between two tokens of a request.
        waited: share of the requests that waited for a slot in the batch.
        busy: share of the time in which the worker computed.
        most: largest number of requests in the batch.
    """

    gap: Latency
    waited: float
    busy: float
    most: int


def decode(model: StepModel, *, rate: float, prompt: int, output: int, slots: int) -> Decoded:
    """Simulates one worker with `slots` places in its batch.

    A real pool has more even batches, because the router chooses the better of two workers.
    """
    rng = random.Random(SEED)
    now, arrival, steps, busy, most = 0.0, rng.expovariate(rate), 0, 0.0, 0
    ends: deque[int] = deque()  # the last step of each running request: in order, as all are equally long
    positions, waited, came = 0, 0, 0
    waiting = 0
    gaps: Counter[float] = Counter()  # seconds → requests that saw them
    wanted = REQUESTS + 2 * slots
    while came < wanted:
        while arrival <= now:
            arrival += rng.expovariate(rate)
            came += 1
            waited += len(ends) + waiting >= slots
            waiting += 1
        while waiting and len(ends) < slots:
            waiting -= 1
            ends.append(steps + output - 1)
            positions += prompt + 1
        if not ends:
            now = arrival
            continue
        seconds = model.decode(len(ends), positions)
        steps, now, busy = steps + 1, now + seconds, busy + seconds
        positions += len(ends)
        most = max(most, len(ends))
        if came > wanted // 5:
            gaps[seconds] += len(ends)
        while ends and ends[0] <= steps:
            ends.popleft()
            positions -= prompt + output
    values, weights = [*gaps], [*gaps.values()]
    gap = Latency(*(percentile(values, q, weights) for q in (0.5, 0.99)))
    return Decoded(gap, waited / came, busy / now, most)
