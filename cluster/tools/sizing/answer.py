"""Searches the smallest pools that meet the latency targets, and explains what limits them."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from baton.cluster.options.clients import SizingOptions
from baton.cluster.tools.sizing.simulated import (
    Latency,
    Served,
    Workers,
    prefill,
    requests_at,
    serve,
)
from baton.cluster.tools.sizing.speeds import Speeds
from baton.router.policy.split import MOST_WORKERS
from baton.simulator.agents import agents
from baton.system.words import counted

GROWTH = 4
"""The search adds at most this part of a pool at once."""
ALONE = 20
"""Requests of equal lengths that are simulated one after the other."""
PADDED = 1.02
"""How far gaps may exceed their target: steps with prompts are filled up to it, and then padded."""
MOST_WORKERS_OF_A_PLAN = 1024
"""As of `--prefill` and `--decode`. A simulation of more takes minutes."""
MOST_IN_VAIN = 3
"""After so many times in which more workers brought no latency nearer to its target, there is no answer."""
AGENT_POSITIONS = 15_575
"""Of a turn of an agent, on average."""


class Targets(NamedTuple):
    """For the 99th percentile, in seconds."""

    ttft: float
    itl: float


class Pools(NamedTuple):
    """Numbers of workers."""

    prefill: int
    decode: int


@dataclass(frozen=True)
class Answer:
    """The pools and their simulated latencies.

    Attributes:
        kv_bytes, kv_room: largest use of KV memory in one decode worker, and its capacity, in bytes.
        why: the limit of the prefill pool and of the decode pool, for people. Empty: the pools were given.
        busy: workers that the load keeps busy all the time, at least. 0: agents.
    """

    pools: Pools
    served: Served
    kv_bytes: int
    kv_room: int
    why: tuple[str, ...] = ()
    busy: float = 0.0

    @property
    def overloaded(self) -> bool:
        """Whether requests come faster than these pools serve them."""
        return sum(self.pools) <= self.busy


def positions_of(load: SizingOptions) -> float:
    """Of a request on average."""
    return load.input_len + load.output_len / 2 if load.agents is None else AGENT_POSITIONS


def predicted(of_prefill: Speeds, of_decode: Speeds, load: SizingOptions, pools: Pools) -> Answer:
    """What these pools do, with targets if the load has any. Raises ValueError if no request fits."""
    targets = parse_slo(load.slo) if load.slo is not None else None
    busy, _ = _work(of_prefill, of_decode, load, math.inf, _in_memory(of_decode, load))
    simulated = _simulation(of_prefill, of_decode, load, targets, begins=True)
    return replace(_answer(of_decode, load, pools, simulated(pools)), busy=busy)


def answer(of_prefill: Speeds, of_decode: Speeds, load: SizingOptions, targets: Targets) -> Answer:
    """Sizes both pools, from the speeds of their workers.

    Raises ValueError if no number of workers can meet the targets.
    """
    alone = of_prefill.prefill(load.input_len)
    share = 1 if load.images else MOST_WORKERS
    if load.agents is None and targets.ttft < alone / share:
        shared = "prompts with images are not shared" if share == 1 else f"at most {share} workers share it"
        raise ValueError(
            f"--slo ttft={targets.ttft * 1e3:.0f}: one prefill of {load.input_len} tokens takes "
            f"{alone * 1e3:.1f} ms on an idle worker, and {shared}; "
            "a larger --prefill-tensor-parallel-size may help"
        )
    machine = of_decode.machine(positions_of(load), load.gpu_memory_utilization, load.max_num_seqs)
    shortest = machine.step(1, _longest(load), [])
    if targets.itl < shortest:
        raise ValueError(
            f"--slo itl={targets.itl * 1e3:.1f}: a step with a single request takes {shortest * 1e3:.2f} "
            "ms, and no number of workers makes it shorter; a larger --decode-tensor-parallel-size may"
        )
    in_memory = _in_memory(of_decode, load)
    if load.output_len == 1 and load.agents is None:
        return _one_token(of_prefill, of_decode, load, targets.ttft, alone)
    search, first = _search(of_prefill, of_decode, load, targets, in_memory)
    if search.missed(first) > 1:
        _check_alone(_workers(of_prefill, of_decode, load, targets), load, targets)
    pools = search.smallest(first)
    return replace(_answer(of_decode, load, pools, search.of(pools)), why=search.why(pools))


def _longest(load: SizingOptions) -> int:
    return load.input_len + load.output_len if load.agents is None else AGENT_POSITIONS


def _in_memory(speeds: Speeds, load: SizingOptions) -> int:
    """Requests whose KV fits into a worker. Raises ValueError if not even one does."""
    room = speeds.kv_room(load.gpu_memory_utilization)
    requests = int(room // speeds.kv_bytes(_longest(load)))
    if not requests:
        raise ValueError(
            f"a request of {_longest(load)} tokens needs more KV memory than one worker has "
            f"({room / 1e9:.1f} GB); reduce --input-len or --output-len, or choose a smaller --model"
        )
    return requests


def _answer(of_decode: Speeds, load: SizingOptions, pools: Pools, served: Served) -> Answer:
    room = of_decode.kv_room(load.gpu_memory_utilization)
    used = min(room, int(served.most * of_decode.kv_bytes(_longest(load))))
    return Answer(pools, served, used, room)


Simulate = Callable[[Pools], Served]


def _simulation(
    of_prefill: Speeds, of_decode: Speeds, load: SizingOptions, targets: Targets | None, *, begins: bool
) -> Simulate:
    """`targets`: those that the cluster is told of. `begins`: the first turns of agents that all begin at
    once count, as in a load test. No pool is sized for these."""
    workers = _workers(of_prefill, of_decode, load, targets)

    def simulated(pools: Pools) -> Served:
        if load.agents is not None:
            sessions = agents(load.agents)
            at_once = 0.0 if begins else load.agents / sum(len(each.turns) for _, each in sessions)
            return serve(sessions, workers, *pools, at_a_time=load.agents, warm_up=at_once)
        sessions = requests_at(load.rate, load.input_len, load.output_len, sum(pools))
        return serve(sessions, workers, *pools, warm_up=0.1)

    return simulated


def _workers(of_prefill: Speeds, of_decode: Speeds, load: SizingOptions, targets: Targets | None) -> Workers:
    positions, share, seats = positions_of(load), load.gpu_memory_utilization, load.max_num_seqs
    link = math.inf if load.link_gbps is None else load.link_gbps * 125e6 / of_decode.kv_bytes_per_token
    prefill, decode = (
        replace(speeds.machine(positions, share, seats), link=link) for speeds in (of_prefill, of_decode)
    )
    workers = Workers(prefill, decode, seats, splits=not load.images)
    if targets is None:
        return workers
    steps = targets.itl / decode.step(1, 1, [])
    return replace(workers, ttft_target=targets.ttft, target_steps=steps)


def _check_alone(workers: Workers, load: SizingOptions, targets: Targets) -> None:
    """Raises ValueError if not even a request that is alone in the cluster meets the targets."""
    if load.agents is None:
        sessions = requests_at(load.rate, load.input_len, load.output_len, 1)[:ALONE]
    else:
        sessions = agents(1)
    served = serve(sessions, workers, MOST_WORKERS, 1, at_a_time=1)
    if served.ttft.p50 > targets.ttft:
        raise ValueError(
            f"--slo ttft={targets.ttft * 1e3:.0f}: a request that is alone in the cluster has its first "
            f"token after {served.ttft.p50 * 1e3:.0f} ms; a larger --prefill-tensor-parallel-size may help"
        )
    if served.gap.p50 > targets.itl:
        raise ValueError(
            f"--slo itl={targets.itl * 1e3:.1f}: the tokens of a request that is alone in the cluster are "
            f"{served.gap.p50 * 1e3:.2f} ms apart; a larger --decode-tensor-parallel-size may help"
        )


def _work(
    of_prefill: Speeds, of_decode: Speeds, load: SizingOptions, itl: float, in_memory: int
) -> tuple[float, Pools]:
    """How many workers the load keeps busy all the time, and the pools with which the search begins: those in
    which each pool does its own work. Agents ask for more only when they have their answers.

    `itl`: seconds of the longest step that decodes."""
    if load.agents is not None:
        return 0.0, Pools(1, 1)
    context = load.input_len + load.output_len / 2
    rows = min(load.max_num_seqs, in_memory, of_decode.steps.fitting_rows(context, itl) or 1)
    prompts = load.rate * of_prefill.prefill(load.input_len)
    decodes = load.rate * load.output_len * of_decode.steps.decode(rows, rows * context) / rows
    return prompts + decodes, Pools(math.floor(prompts) + 1, math.ceil(decodes))


def _check_size(workers: int, load: SizingOptions) -> None:
    """Raises ValueError if a plan would have too many workers."""
    if workers > MOST_WORKERS_OF_A_PLAN:
        raise ValueError(
            f"--rate {load.rate:g}: the load keeps some {workers:,} workers busy, and a plan has at most "
            f"{MOST_WORKERS_OF_A_PLAN:,}; plan a part of the load, since pools grow as it does"
        )


def _search(
    of_prefill: Speeds, of_decode: Speeds, load: SizingOptions, targets: Targets, in_memory: int
) -> "tuple[Search, Pools]":
    """The search, and the pools with which it begins."""
    work, first = _work(of_prefill, of_decode, load, targets.itl, in_memory)
    _check_size(sum(first), load)
    simulate = _simulation(of_prefill, of_decode, load, targets, begins=False)
    rows = of_decode.steps.fitting_rows(positions_of(load), targets.itl)
    return Search(simulate, targets, in_memory, load.max_num_seqs, rows, work), first


class Search:
    """The smallest pools that meet the targets. Each simulation runs once."""

    def __init__(
        self, simulate: Simulate, targets: Targets, in_memory: int, seats: int, rows: int, work: float
    ) -> None:
        """`rows`: decodes of a step within the target. `work`: workers that the load keeps busy all the time.
        With fewer, queues grow without bound, and a simulation ends before they do."""
        self._simulate, self._targets = simulate, targets
        self._in_memory, self._seats = in_memory, seats
        self._rows, self._work = rows, work
        self._served: dict[Pools, Served] = {}

    def of(self, pools: Pools) -> Served:
        if pools not in self._served:
            self._served[pools] = self._simulate(pools)
        return self._served[pools]

    def smallest(self, first: Pools) -> Pools:
        """Adds workers to the pool where they help more, and then takes away those that are not needed."""
        pools, lowest, vain = first, math.inf, 0
        while (missed := self.missed(pools)) > 1:
            vain, lowest = (0, missed) if missed < lowest else (vain + 1, lowest)
            if vain == MOST_IN_VAIN:
                raise ValueError(
                    f"{counted(sum(pools), 'worker')} would miss a target of --slo by {missed - 1:.0%}; "
                    "allow more time"
                )
            prefills, decodes = pools
            larger = (
                Pools(prefills, decodes + max(1, decodes // GROWTH)),
                Pools(prefills + max(1, prefills // GROWTH), decodes),
            )
            pools = min(larger, key=self.missed)
        for part, pool in itertools.product((2 * GROWTH, math.inf), (0, 1)):
            while (less := _fewer(pools, pool, part)) is not None and self.missed(less) <= 1:
                pools = less
        return pools

    def why(self, pools: Pools) -> tuple[str, str]:
        return self._why(_fewer(pools, 0)), self._why(_fewer(pools, 1))

    def _why(self, less: Pools | None) -> str:
        if less is None:
            return "one worker is enough"
        if sum(less) <= self._work:
            return f"{self._bound('capacity')} decides: the load keeps {self._work:.2f} workers busy"
        served = self.of(less)
        if self._no_room(served) and served.ttft.p99 > self._targets.ttft:
            return f"{self._bound('TTFT')} decides: with one worker less requests wait for room"
        if served.ttft.p99 > self._targets.ttft:
            return f"TTFT decides: with one worker less its p99 is {served.ttft.p99 * 1e3:.0f} ms"
        return f"ITL decides: with one worker less its p99 is {served.gap.p99 * 1e3:.1f} ms"

    def missed(self, pools: Pools) -> float:
        """The larger of both latencies, ÷ its target. More than 1 without capacity."""
        if sum(pools) <= self._work:
            return math.inf
        served = self.of(pools)
        return max(served.ttft.p99 / self._targets.ttft, served.gap.p99 / (PADDED * self._targets.itl))

    def _bound(self, else_: str) -> str:
        """What keeps a worker from more requests at a time, or `else_`."""
        if self._in_memory < min(self._seats, self._rows):
            return f"KV memory for {counted(self._in_memory, 'request')} a worker"
        return f"--max-num-seqs {self._seats}" if self._seats < self._rows else else_

    def _no_room(self, served: Served) -> bool:
        """Whether a worker had as many requests as it can."""
        return served.most >= min(self._seats, self._in_memory)


def _fewer(pools: Pools, pool: int, part: float = math.inf) -> Pools | None:
    """With one worker less in a pool, or this part of it. None: it has one only."""
    counts = list(pools)
    counts[pool] -= max(1, int(counts[pool] // part))
    return Pools(*counts) if counts[pool] else None


def _one_token(
    of_prefill: Speeds, of_decode: Speeds, load: SizingOptions, ttft: float, alone: float
) -> Answer:
    """Prefill workers alone answer requests for one token, and split no prompt. Raises ValueError."""
    if ttft < alone:
        raise ValueError(
            f"--slo ttft={ttft * 1e3:.0f}: one prefill of {load.input_len} tokens takes {alone * 1e3:.1f} ms "
            "on an idle worker; a larger --prefill-tensor-parallel-size may help"
        )

    def simulated(workers: int) -> Latency:
        machine = of_prefill.machine(positions_of(load), load.gpu_memory_utilization, load.max_num_seqs)
        return prefill(machine, workers=workers, rate=load.rate, tokens=load.input_len)

    workers = math.floor(load.rate * alone) + 1  # with fewer workers the queue grows without bound
    _check_size(workers, load)
    before: Latency | None = None
    while (times := simulated(workers)).p99 > ttft * (1 + 1e-9):  # tolerates rounding of the simulated clock
        before = times
        workers += max(1, workers // 50)
    why = "one worker is enough"
    if workers > 1:
        why = f"capacity decides: prompts alone keep {load.rate * alone:.2f} workers busy"
    if before is not None:
        why = f"TTFT decides: with fewer workers its p99 is {before.p99 * 1e3:.0f} ms"
    served = Served(
        ttft=times, first=times, later=None, gap=Latency(0.0, 0.0), latency=(times.p50, times.p99),
        tokens_per_s=load.rate, busy=(load.rate * alone / workers, 0.0), most=0, answers=(),
    )  # fmt: skip
    room = of_decode.kv_room(load.gpu_memory_utilization)
    return Answer(
        Pools(workers, 0), served, 0, room, (why, "prefill workers alone answer requests of one token")
    )


def parse_slo(text: str) -> Targets:
    """Parses `ttft=500,itl=20`, in ms. Raises ValueError with the flag."""
    try:
        pairs = (word.split("=") for word in text.replace("ttit", "itl").split(","))  # its earlier name
        targets = {name.strip(): float(value) / 1e3 for name, value in pairs}
    except ValueError:
        targets = {}
    if set(targets) != {"ttft", "itl"} or not all(value > 0 for value in targets.values()):
        raise ValueError(f"--slo {text}: give both targets in milliseconds, as ttft=1000,itl=50")
    return Targets(targets["ttft"], targets["itl"])
