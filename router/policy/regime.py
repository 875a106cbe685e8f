"""Whether prefill workers leave all decodes to decode workers: a decision for the fleet, about once a second.

    apart   prefill workers compute prompts only. Decode workers decode, and compute the prompts that would
            wait longest
    mixed   all workers decode, and all compute prompts

A plan compares what one request costs beside the work that is there (`placement`). In a mixed fleet it costs
about as much at each worker. To take away one decode of many helps no prompt, so no single plan leaves this
state, even if all requests would wait less in the other one. A model with experts is the usual case: a step
with a few decodes reads nearly all experts, so the first decode slows prompts most.

Here states with any share of the decodes at prefill workers are compared, as they would be after a while:

    cost = output · c · late + prompts · first       in seconds of a first token, in each second

    output, prompts   answer tokens and prompts that come in a second
    c                 what a second more in one gap costs, as in `placement`
    late              how much a gap is longer than a short step, on average
    first             until a first token: the prompt, beside the decodes there, and the wait for others

Plans know the queues of the moment, and avoid them. So the decision is taken if apart, with its waits, costs
less than all other states do without any. Where each decode less at prefill workers lowers the costs, plans
need no decision. Where no other state could serve what comes, this is a burst, and no state lasts: plans
serve it sooner with all workers. A decision stands while this state costs less than all others: the costs of
those with shared decodes are close, and which of them is least changes with each report.

A worker has as many decodes as write its share of the output at their pace (Little's law). As many prompts
wait for prefill workers as costs least, and others overflow to decode workers (M/M/m/K queues). What comes is
measured, and is about the same in all states, so the decision does not swing. Pure.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from baton.router.policy.fleet import Seen
from baton.router.policy.pace import Pace, Steps
from baton.router.policy.prefill_loads import Demand

MOST_WAITING = 8
"""Prompts that wait for prefill workers, at most. It bounds the time of a decision: with as many, nearly none
overflow, unless there are more than these workers can compute."""
STEPS = 4
"""From apart to mixed, where all workers decode equally."""


class _Group(NamedTuple):
    """Workers of one pool, which are taken for equal.

    Attributes:
        steps: of a worker with so many decodes.
        most: requests that a worker decodes at once, at most.
        alone: seconds of a prompt on a worker that decodes nothing.
    """

    pace: Pace
    steps: Callable[[int], Steps]
    count: int
    most: int
    alone: float


class _State(NamedTuple):
    """How the workers of a group go on.

    Attributes:
        late: as above, of their gaps.
        first: seconds until a first token, of a prompt that waits for no other one.
    """

    late: float
    first: float


def apart(prefills: Sequence[Seen], decodes: Sequence[Seen], demand: Demand | None, *, stands: bool) -> bool:
    """Whether prefill workers should leave all decodes to decode workers. False: plans find that themselves,
    or it does not cost less, or it is not known. `demand`: what comes to all of them. `stands`: the decision
    before. The worker of middle speed stands for all of its pool."""
    if demand is None or not prefills or not decodes:
        return False
    prefill, decode = (_group(workers, demand) for workers in (prefills, decodes))
    if prefill is None or decode is None:
        return False
    equal = prefill.count / (prefill.count + decode.count)
    others = [
        _cost(demand, prefill, decode, equal * step / STEPS, waits=False) for step in range(1, STEPS + 1)
    ]
    rising = others == sorted(others)  # also if none of them could serve it all
    return (stands or not rising) and _cost(demand, prefill, decode, 0.0) < min(others)


def _group(workers: Sequence[Seen], demand: Demand) -> _Group | None:
    """None: the steps of these workers, or their target of a gap, are not known."""
    known = [(w.step_model, w) for w in workers if w.step_model is not None and w.status.gap_target_seconds]
    if not known:
        return None
    known.sort(key=lambda each: each[0].prompt_seconds[-1])
    model, worker = known[len(known) // 2]
    positions = worker.load.blocks_total * worker.load.block_size
    most = min(worker.load.max_running, int(positions / max(1.0, demand.context)))
    status = worker.status
    pace = Pace(model, status.gap_target_seconds, position=demand.position, largest=status.mixed_step_tokens)
    alone = model.prefill(round(demand.prompt), max(0.0, demand.position - demand.prompt / 2))

    @lru_cache(None)  # each state asks for the same ones
    def steps(decodes: int) -> Steps:
        return pace.steps(decodes, decodes * demand.context, decodes * demand.gap_cost)

    return _Group(pace, steps, len(workers), most, alone)


def _cost(demand: Demand, prefill: _Group, decode: _Group, output: float, *, waits: bool = True) -> float:
    """Cost of a second, if this share of the output comes from prefill workers. Infinite: they could not
    serve all. `waits`: prompts wait for each other."""
    least = math.inf
    computes = _state(demand, prefill, 0.0, output)
    work = demand.prompts * computes.first if computes is not None else 0.0
    if not 0 < work < prefill.count + decode.count:  # also if reports are nonsense
        return math.inf
    for overflow, wait in _queues(work, prefill.count):
        one = _state(demand, prefill, 1 - overflow, output)
        other = _state(demand, decode, overflow, 1 - output)
        if one is None or other is None:
            continue
        first = (1 - overflow) * one.first * (1 + wait / 2 if waits else 1) + overflow * other.first
        late = output * one.late + (1 - output) * other.late
        cost = demand.output * demand.gap_cost * late + demand.prompts * first
        if cost > least:
            break
        least = cost
    return least


def _queues(work: float, servers: int) -> Iterator[tuple[float, float]]:
    """For each number of prompts that may wait, from 0: which part of them all finds so many waiting, and
    how long the others wait, in times of a prompt. `work`: servers that all prompts would keep busy."""
    states = 1.0  # times as likely as that all servers are busy and none waits
    for server in range(1, servers + 1):
        states = 1 + states * server / work
    likely, waiting, before = 1.0, 0.0, states - 1
    for number in range(MOST_WAITING + 1):
        yield likely / states, waiting / before / work if number else 0.0
        likely *= work / servers
        before, states = states, states + likely
        waiting += (number + 1) * likely


def _state(demand: Demand, group: _Group, prompts: float, output: float) -> _State | None:
    """`prompts`, `output`: shares of the group. None: it could not do it."""
    pace, tokens = group.pace, output * demand.output / group.count
    busy = prompts * demand.prompts * group.alone / group.count
    if not tokens:
        return _State(0.0, group.alone) if busy < 1 else None

    def suffices(decodes: int) -> bool:
        return tokens * pace.gap_of(group.steps(decodes), busy)[0] <= decodes

    decodes = 1 + bisect_left(range(1, group.most + 1), True, key=suffices)
    if decodes > group.most:
        return None
    steps = group.steps(decodes)
    gap, late = pace.gap_of(steps, busy)
    share = min(1.0, tokens * gap)  # of the time, in which it decodes
    stretch = 1 + share * (steps.stretch - 1)
    if busy * stretch >= 1:
        return None
    return _State(late, stretch * group.alone)
