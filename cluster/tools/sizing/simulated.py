"""Simulates both pools with the router's policy. Times are in seconds."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from baton.cluster.options.optimize import PROFILES
from baton.simulator.placement import simulate
from baton.simulator.placement_outcome import Answer, PlacementOutcome
from baton.simulator.requests import idle_seconds
from baton.simulator.steps import Machine
from baton.simulator.trace import Load, Session, arrivals
from baton.steps.quantiles import percentile

SEED = 1
REQUESTS, PER_WORKER = 1_000, 40  # simulated requests: at least, and more per worker
SECONDS = 4.0  # in which requests arrive, at least


@dataclass(frozen=True, slots=True)
class Latency:
    p50: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Latency":
        return cls(percentile(values, 0.5), percentile(values, 0.99))


def prefill(machine: Machine, *, workers: int, rate: float, tokens: int) -> Latency:
    """The time to the only token of each answer, with the router's policy and without prefix-cache hits."""
    sessions = requests_at(rate, tokens, 1, workers)
    outcome = simulate(
        sessions, "policy", warm_up=0.2, workers=workers, prefills=workers, seed=SEED, machine=machine
    )
    return Latency.of([seconds - idle_seconds(tokens) for seconds in outcome.ttft])


@dataclass(frozen=True)
class Workers:
    """What both pools have.

    Attributes:
        prefill, decode: machines of their workers.
        seats: requests that a worker decodes at once.
        ttft_target: seconds. None: as of a router without this option.
        target_steps: the target of a gap, as a multiple of the fastest step.
        splits: whether several workers may compute a prompt. A router does not split those with images.
    """

    prefill: Machine
    decode: Machine
    seats: int
    ttft_target: float | None = None
    target_steps: float = PROFILES["balanced"].target_steps
    splits: bool = True


@dataclass(frozen=True)
class Served:
    """The simulated behaviour of both pools.

    Attributes:
        ttft: of all requests.
        first, later: of first turns, and of those after them; None: there are none.
        gap: time between two tokens of a request.
        latency: p50 and p90 of the time until the last token, divided by the tokens.
        tokens_per_s: of answers.
        busy: share of the time in which the workers of the prefill and of the decode pool computed.
        most: largest number of requests that a worker decoded at once.
        answers: each request, in the order of their last tokens.
        handed_over: share of the requests whose KV went from one worker to another.
        second_token: time between the first two tokens.
    """

    ttft: Latency
    first: Latency | None
    later: Latency | None
    gap: Latency
    latency: tuple[float, float]
    tokens_per_s: float
    busy: tuple[float, float]
    most: int
    answers: Sequence[Answer]
    handed_over: float = 0.0
    second_token: Latency | None = None


def requests_at(rate: float, prompt: int, answer: int, workers: int) -> list[tuple[float, Session]]:
    """Requests of equal lengths at random times (Poisson), for so many workers."""
    load = Load(prompt, answer, 2 * rate / workers)
    count = max(REQUESTS + PER_WORKER * workers, round(SECONDS * rate))
    return list(arrivals(lambda _: load, count, workers, random.Random(SEED)))


def serve(
    sessions: Sequence[tuple[float, Session]],
    workers: Workers,
    prefills: int,
    decodes: int,
    *,
    at_a_time: int = 0,
    warm_up: float = 0.0,
) -> Served:
    """`at_a_time`, `warm_up`: as in `simulator.placement.simulate`."""
    outcome = simulate(
        sessions,
        "policy",
        at_a_time=at_a_time,
        warm_up=warm_up,
        workers=prefills + decodes,
        prefills=prefills,
        seed=SEED,
        seats=workers.seats,
        target_steps=workers.target_steps,
        ttft_target=workers.ttft_target,
        splits=workers.splits,
        machine=workers.decode,
        prefill_machine=workers.prefill,
    )
    return _served(outcome, prefills, decodes, 1 - warm_up)


def _served(outcome: PlacementOutcome, prefills: int, decodes: int, measured: float) -> Served:
    """`measured`: share of the requests."""
    first, later = ([a.ttft for a in outcome.answers if a.first is turn] for turn in (True, False))
    latency = [answer.latency for answer in outcome.answers]
    busy = [outcome.busy[str(row)] / outcome.seconds for row in range(prefills + decodes)]
    return Served(
        Latency.of(outcome.ttft),
        Latency.of(first) if first else None,
        Latency.of(later) if later else None,
        Latency(outcome.gap(0.5), outcome.gap(0.99)),
        (percentile(latency, 0.5), percentile(latency, 0.9)),
        sum(answer.tokens for answer in outcome.answers) / measured / outcome.seconds,
        (sum(busy[:prefills]) / prefills, sum(busy[prefills:]) / decodes),
        outcome.most,
        outcome.answers,
        (outcome.places["handover"] + outcome.places["split"]) / max(1, outcome.places.total()),
        Latency.of(outcome.first_gaps) if outcome.first_gaps else None,
    )
