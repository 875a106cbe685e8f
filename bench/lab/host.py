"""CPU time that a step, admission and a second turn take on the host, without a device: a scheduler runs, and
no model.

    host.step.bN       a step of N requests that decode
    host.admission     a request, of 1,000 that wait for blocks: it comes, is looked at, and is scheduled
    host.full          a look at the queue while the pool is full and 1,000 requests wait
    host.report        what is left to compute of 1,000 waiting requests, as each report says it
    host.second_turn   a request that begins with the blocks of the turn before, from `add` to its first step

CPU time of the thread, each the least of several rounds: other processes only add to it.
"""

import gc
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence

from baton.bench.lab.driver import Bench, Run
from baton.bench.report import Row
from baton.engine.api.request import EngineRequest
from baton.engine.core.block_pool import BlockPool
from baton.engine.core.live_request import LiveRequest, Phase
from baton.engine.core.prefix_cache import PrefixCache
from baton.engine.core.request_lives import RequestLives
from baton.engine.core.scheduler import Scheduler
from baton.engine.core.step_builder import Schedule

BLOCK = 16
WAITING = 1000
BATCHES = (1, 64, 256)
TOKEN = 7


class Host:
    """A scheduler, and what the engine does around its steps. Every sampled token is the same."""

    def __init__(self, blocks: int, seqs: int) -> None:
        self.pool = BlockPool(blocks, BLOCK)
        lives = RequestLives(self.pool, max_num_seqs=seqs, cache=PrefixCache(self.pool, b"root"))
        self.scheduler = Scheduler(lives, max_num_batched_tokens=8192)
        self.lives = lives
        self.number = 0
        self.scheduling = 0.0  # µs, of the last step

    def request(self, prompt: Sequence[int]) -> EngineRequest:
        self.number += 1
        return EngineRequest(self.number.to_bytes(16), list(prompt))

    def add(self, request: EngineRequest) -> LiveRequest:
        return self.lives.add(request, handover=False)

    def look(self) -> None:
        """What the loop of an engine asks in each turn."""
        scheduler = self.scheduler
        _ = scheduler.has_work, scheduler.has_next, scheduler.next_prompt, scheduler.may_look_ahead

    def step(self) -> Schedule:
        """As an engine steps, without the device."""
        began = time.thread_time()
        schedule = self.scheduler.schedule(None)
        self.scheduling = 1e6 * (time.thread_time() - began)
        self.scheduler.launched(schedule)
        schedule.end_leases()
        self.lives.memory.landed(schedule)
        for live, positions in schedule.chunks.items():
            if live.num_left == 0:
                self.lives.memory.publish(live, positions.stop)
                live.token_ids.append(TOKEN)
        self.look()
        return schedule


def cpu_us(call: Callable[[], object]) -> float:
    began = time.thread_time()
    call()
    return 1e6 * (time.thread_time() - began)


def steps(batch: int, count: int) -> float:
    """µs of a step."""
    host = Host(batch * 64, batch)
    for request in range(batch):
        host.add(host.request(range(request * 1000, request * 1000 + 200)))
    while len(host.lives.running) < batch or not all(live.decodes for live in host.lives.running):
        host.step()
    return cpu_us(lambda: deque((host.step() for _ in range(count)), 0)) / count


def admission(prompt: int, shared: int) -> float:
    """µs of a request, of `WAITING` that come at once to a pool with room for few. They share a beginning."""
    host, taken = Host(8 * (prompt // BLOCK + 2), 256), 0.0
    requests = [
        host.request([*range(shared), *range(1000 * number, 1000 * number + prompt - shared)])
        for number in range(1, WAITING + 1)
    ]
    taken += cpu_us(lambda: deque(map(host.add, requests), 0))
    while host.lives.some:
        taken += cpu_us(host.look)
        for live in host.step().chunks:
            host.lives.drop(live)
        taken += host.scheduling
    return taken / WAITING


def full(looks: int, ask: Callable[[Host], object]) -> float:
    """µs of a look at a queue of `WAITING` requests, none of which can start."""
    host = Host(1024, 256)
    for request in range(WAITING):
        host.add(host.request(range(request * 1000, request * 1000 + 500)))
    while host.lives.can_admit:
        host.step()
    host.step()
    ask(host)
    return cpu_us(lambda: deque((ask(host) for _ in range(looks)), 0)) / looks


def second_turn(history: int, new: int, count: int) -> float:
    """µs of a request, without the decode steps of its answer."""
    host, taken = Host(count * (history + new) // BLOCK + 64, 8), 0.0
    turns = [range(10**6 * turn, 10**6 * turn + history) for turn in range(count)]
    for turn in turns:
        live = host.add(host.request(turn))
        while not live.decodes:
            host.step()
        host.lives.drop(live)
    for turn in turns:
        request = host.request([*turn, *range(5 * 10**8, 5 * 10**8 + new)])

        def start(request: EngineRequest = request) -> None:
            live = host.add(request)
            host.step()
            assert live.phase is Phase.RUNNING
            assert live.num_cached >= history // BLOCK * BLOCK
            host.lives.drop(live)

        taken += cpu_us(start)
    return taken / count


def measure(run: Run) -> None:
    gc.collect()
    gc.freeze()  # as in an engine process
    rounds = 1 if run.short else 7
    run.parameters |= {"waiting": WAITING, "rounds": rounds}
    count = 20 if run.short else 200
    cases: dict[str, Callable[[], float]] = {
        **{f"step.b{batch}": lambda batch=batch: steps(batch, count) for batch in BATCHES},
        "admission": lambda: admission(512, 256),
        "full": lambda: full(count, lambda host: host.lives.can_admit),
        "report": lambda: full(2, lambda host: list(host.scheduler.parts_waiting())),
        "second_turn": lambda: second_turn(2000, 100, count // 4),
    }
    for name, case in cases.items():
        run.add(Row(f"host.{name}", min(case() for _ in range(rounds)), "us"))
    gc.unfreeze()


BENCH = Bench("host", measure, __doc__)

if __name__ == "__main__":
    sys.exit(BENCH.main())
