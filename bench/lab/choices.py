"""Whether a simulation chooses the workers that a router has chosen.

Two prefill workers and a decode worker run as real processes, and chats come at random times. The router
records what its plans follow from (`--advanced.record-plans`). Then the same requests come at the same times
to the simulator. Its workers have the names, the memory, and at each time the steps and links that the real
ones had reported: a worker on a CPU learns what its steps cost, and a pause changes that for long. The
simulator predicts all else: queues, steps, caches, and so what each plan knows.

Equal workers cost nearly the same, and a choice that differs takes the next turns of its session along. So
steps take many times as long as a pause of a process, and workers are idle most of the time. At three times
the rate two simulations whose steps vary by 5 % choose the same workers for 0.5 to 0.95 of the requests.

`choices.same` is the share of requests for which both choose the same workers. The others are counted by
what differs first, in this order:

cached    tokens of the prompt that a worker has, as far as known
place     which kinds of workers: costs are close, or a step took longer than usual
prefill   the worker that computes the prompt: what is ahead of it
"""

import asyncio
import itertools
import random
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec

from baton.bench.lab.driver import LOGS, Bench, Option, Run
from baton.bench.lab.harness.cluster import served
from baton.bench.lab.harness.streams import Case, Stream, new_session, post, with_ends
from baton.bench.lab.shapes import DENSE, SHAPES
from baton.bench.report import Row
from baton.kv_names import CHUNK_TOKENS
from baton.router.policy.plan import Plan
from baton.router.policy.prefill import PrefillRequest
from baton.router.policy.recording import events
from baton.router.workers.checks import step_model
from baton.rpc import worker_pb2 as pb
from baton.simulator.agents import chunk_name
from baton.simulator.placement import Measured, simulate
from baton.simulator.steps import modelled
from baton.simulator.trace import Session, Turn
from baton.steps.step_model import StepModel

SHAPE = "llama-tiny"
SHAPES[SHAPE] = SHAPES[DENSE] | {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 2048,
}  # fmt: skip
"""A prompt takes 0.1 s on one thread, and a decode 3 ms."""
FLAGS = ("--max-model-len", "8192", "--advanced.block-size", "128")
"""As the simulator has them."""
RATE = 1.0
"""Requests in a second."""
SESSIONS, TURNS = 12, 5
PROMPT, NEW, ANSWER = (400, 1600), (50, 400), (8, 48)
"""Least and most tokens of a first prompt, of what each turn adds, and of an answer."""
WARM_UP = 16
"""Requests that do not count, and that the simulator sends where the router has sent them. Workers on a CPU
do not know their steps yet: a worker was measured as ten times slower than it was, and one prompt more on it
changed the next sixty plans."""
BEFORE = 1.0
"""Simulated seconds before the first request, as workers that have started."""


@dataclass(frozen=True, slots=True)
class Sent:
    """One request. `at`: seconds after the first one."""

    at: float
    session: int
    prompt: Sequence[int]
    answer: int


def chats(count: int, seed: int) -> list[Sent]:
    """Turns of sessions at random times. Each prompt holds the ones before."""
    rng, at, sent, number = random.Random(seed), 0.0, list[Sent](), 0
    live = dict[int, tuple[int, list[int]]]()  # turns and tokens by session
    for _ in range(count):
        at += rng.expovariate(RATE)
        if begins := len(live) < SESSIONS:
            number += 1
        session = number if begins else rng.choice([*live])
        turns, prompt = live.pop(session, (0, []))
        new = rng.randint(*(PROMPT if begins else NEW))
        prompt = [*prompt, *(rng.randrange(1, SHAPES[SHAPE]["vocab_size"]) for _ in range(new))]
        sent.append(Sent(at, session, prompt, rng.randint(*ANSWER)))
        if turns + 1 < TURNS:
            live[session] = turns + 1, prompt
    return sent


async def send(url: str, load: Iterable[Sent]) -> list[Stream]:
    start = time.monotonic()

    async def one(http: aiohttp.ClientSession, request: Sent) -> Stream:
        await asyncio.sleep(request.at - (time.monotonic() - start))
        stream = Stream(Case("", request.answer, 0.0, 0))
        body = {**stream.case.body(), "prompt": request.prompt}
        headers = {"x-session-id": str(request.session)}
        return await post(http, f"{url}/v1/completions", msgspec.json.encode(body), stream, headers)

    async with new_session() as http:
        return await asyncio.gather(*(one(http, request) for request in load))


class Recorded(NamedTuple):
    """What a router has recorded.

    Attributes:
        settings: of its desk.
        workers: name, description and pool of each, by row.
        reports: with their times and rows.
        plans: the first plan of each request, with its time.
    """

    settings: dict[str, Any]
    workers: list[tuple[str, pb.WorkerDescription, "pb.Pool"]]
    reports: list[tuple[float, int, pb.WorkerStatus]]
    plans: dict[int, tuple[float, PrefillRequest, Plan]]


def recorded(file: Path) -> Recorded:
    found = Recorded({}, [], [], {})
    for now, name, arguments in events(file.read_bytes().splitlines()):
        if name == "settings":
            found.settings.update(arguments[0])
        elif name == "join":
            address, description, status = arguments
            found.reports.append((now, len(found.workers), status))
            found.workers.append((address, description, status.pool))
        elif name == "reported":
            found.reports.append((now, *arguments))
        elif name == "plan" and isinstance(planned := arguments[2], Plan) and planned.ranges:
            request = arguments[0]
            found.plans.setdefault(request.arrival, (now, request, planned))
    return found


def measured(real: Recorded, rows: Sequence[int], start: float) -> list[Measured]:
    """What the workers of these rows have reported, as of the simulated workers in this order. `start`: the
    time at which the simulation begins.

    A step costs what its worker has learned from it: what the next model says that differs."""
    by_incarnation = {real.workers[row][1].incarnation: place for place, row in enumerate(rows)}
    found, seen, learned = list[Measured](), dict[int, StepModel](), dict[int, StepModel]()
    for now, row, status in reversed(real.reports):
        described, model = real.workers[row][1], step_model(status.step_model)
        assert model is not None, "it has measured steps at its start"
        if (later := seen.get(row, model)) != model:
            learned[row] = later
        seen[row] = model
        positions, doubles_at = described.num_blocks * described.block_size, described.attention_doubles_at
        costs = learned.get(row, model)
        machine = modelled(costs, positions, doubles_at, 0.0, 1.0, layers=described.num_layers, copies=None)
        links = {by_incarnation[link.incarnation]: link for link in status.prefix_links}
        at, fastest = max(0.0, now - start), status.fastest_step_seconds
        found.append(Measured(at, rows.index(row), machine, model, fastest, links))
    return found[::-1]


def simulated(real: Recorded, load: Sequence[Sent]) -> dict[int, Plan]:
    """What the simulated router plans for the same requests, with the rows of the real one. The first ones go
    where that has sent them."""
    start = min(now for now, _, _ in real.plans.values()) - BEFORE
    sessions = list[tuple[float, Session]]()
    for (number, (now, request, _)), sent in zip(sorted(real.plans.items()), load, strict=True):
        assert request.tokens == len(sent.prompt), "requests arrive in the order in which they are sent"
        chunks = (request.tokens + sent.answer) // CHUNK_TOKENS
        names = [*request.chunks, *(chunk_name(f"answer {number}", i) for i in range(chunks))][:chunks]
        turn = Turn(request.tokens, tuple(names), 0.0, sent.answer)
        sessions.append((now - start, Session(request.key, (turn,), 0)))
    pools = [
        [row for row, worker in enumerate(real.workers) if worker[2] == pool]
        for pool in (pb.POOL_PREFILL, pb.POOL_DECODE)
    ]
    rows, plans = [*pools[0], *pools[1]], dict[int, Plan]()

    def heard(_: float, name: str, arguments: Sequence[Any]) -> None:
        if name == "plan" and isinstance(planned := arguments[2], Plan):
            plans.setdefault(arguments[0].arrival, _moved(planned, rows))

    places = {row: place for place, row in enumerate(rows)}
    first = {number: _moved(real.plans[number][2], places) for number in real.plans if number < WARM_UP}
    described = real.workers[0][1]
    on = [set(worker.computes_on) for _, worker, _ in real.workers]
    apart = any(one.isdisjoint(other) for one, other in itertools.combinations(on, 2))
    reports = measured(real, rows, start)
    simulate(
        sessions, "policy", warm_up=0, workers=len(rows), prefills=len(pools[0]), seed=real.settings["seed"],
        seats=described.max_num_seqs, machine=reports[0].machine, measured=reports,
        names=[real.workers[row][0] for row in rows], given=first, listener=heard, splits=apart,
    )  # fmt: skip
    return plans


def _moved(planned: Plan, rows: Sequence[int] | Mapping[int, int]) -> Plan:
    """The plan with other rows of the workers."""
    ranges = tuple(part._replace(worker=rows[part.worker]) for part in planned.ranges)
    decode = None if planned.decode is None else rows[planned.decode]
    source = None if planned.source is None else planned.source._replace(holder=rows[planned.source.holder])
    return planned._replace(ranges=ranges, decode=decode, source=source)


def difference(real: Plan, simulated: Plan) -> str:
    """What differs first, as above. Empty: both have the same workers."""
    workers = [({part.worker for part in each.ranges}, each.decode) for each in (real, simulated)]
    if workers[0] == workers[1]:
        return ""
    if real.cached != simulated.cached:
        return "cached"
    return "place" if real.place != simulated.place else "prefill"


def measure(run: Run) -> None:
    load = chats(WARM_UP + run.args.requests, 1)
    record = run.logs / "plans"
    flags = ("--advanced.record-plans", str(record))
    with served(run, *FLAGS, shape=SHAPE, prefill=2, router_flags=flags) as cluster:
        with_ends(asyncio.run(send(cluster.url, load)))
    [file] = record.parent.glob("plans.*")
    real = recorded(file)
    ours = simulated(real, load)
    counted = [number for number in real.plans if number >= WARM_UP]
    differ = Counter(difference(real.plans[number][2], ours[number]) for number in counted)
    count = len(counted)
    run.add(Row("choices.same", differ.pop("", 0) / count, "of requests", goal=0.9, better="higher"))
    for cause in ("cached", "place", "prefill"):
        run.add(Row(f"choices.{cause}", differ[cause] / count, "of requests"))
    places = Counter(real.plans[number][2].place for number in counted)
    run.parameters["places"] = dict(places)


BENCH = Bench(
    "choices", measure, __doc__, options=(Option("--requests", default=150, short=30), LOGS), devices=("cpu",)
)

if __name__ == "__main__":
    sys.exit(BENCH.main())
