"""Two engines that prefill and decode for each other exhaust their blocks and seats. Every request ends."""

import random
from collections import Counter
from dataclasses import dataclass

import pytest

from engine.api.request import EngineRequest
from engine.core.live_request import LiveRequest, Phase
from engine.core.scheduler import Scheduler
from tests.engine.test_scheduler import BLOCK, make, step

ROUNDS = 3000


@dataclass(eq=False)
class Answer:
    """A request as its router sees it."""

    number: int
    prompt: int
    left: int
    """Tokens that are still to come."""
    prefills: Scheduler
    decodes: Scheduler
    given: int = 0
    """Tokens that it has."""
    base: int = 0
    """Tokens that it had before its prefill."""
    prefill: LiveRequest | None = None
    decode: LiveRequest | None = None

    def request(self, kind: bytes) -> EngineRequest:
        return EngineRequest(kind + self.number.to_bytes(2), [1] * self.prompt, [7] * self.base)

    def forget_the_gone(self) -> None:
        if self.prefill is not None and self.prefill.phase is Phase.GONE:
            self.prefill = None
        if self.decode is not None and self.decode.phase is Phase.GONE:
            self.decode = None


class TwoWorkers:
    """The work of two workers and a router, in random order."""

    def __init__(self, seed: int, num_blocks: int, seats: int) -> None:
        self.rng = random.Random(seed)
        self.workers = [make(num_blocks=num_blocks, seqs=seats, budget=8) for _ in range(2)]
        self.answers: list[Answer] = []
        for number in range(14):
            prompt = self.rng.randrange(1, (num_blocks - 1) * BLOCK)
            left = self.rng.randrange(1, num_blocks * BLOCK - prompt + 1)
            near, far = self.rng.sample(self.workers, 2)
            self.answers.append(Answer(number, prompt, left, near, far))
        self.seen = Counter[str]()

    def serve(self) -> None:
        for _ in range(ROUNDS):
            self.rng.shuffle(self.answers)
            for answer in self.answers:
                if answer.left:
                    answer.forget_the_gone()
                    self.route(answer)
            for worker in self.workers:
                self.make_room(worker)
                self.step(worker)
                worker.pool.assert_consistent()
            if not any(answer.left for answer in self.answers):
                break
        for worker in self.workers:
            worker.assert_whole()
        assert not any(answer.left for answer in self.answers), "they wait for each other"

    def route(self, answer: Answer) -> None:
        near, far, rng = answer.prefills, answer.decodes, self.rng
        prefill, decode = answer.prefill, answer.decode
        if decode is not None and decode.phase is Phase.RUNNING:
            return
        if prefill is None:
            answer.base = answer.given
        if decode is None and prefill is None and rng.random() < 0.2:
            answer.decode = far.start(answer.request(b"s"))
            self.seen["started"] += answer.decode is not None
            return
        if prefill is None and rng.random() < 0.6:
            prefill = answer.prefill = near.add(answer.request(b"p"), handover=True)
            if decode is not None and not far.extend_reservation(decode, [7] * answer.base):
                far.drop(decode)
                decode = answer.decode = None
        if decode is None and rng.random() < 0.7:
            decode = answer.decode = far.reserve(answer.request(b"d"))
        if prefill is None or prefill.phase is not Phase.HELD:
            return
        if decode is not None:
            if rng.random() < 0.5:
                near.drop(prefill)
                far.join(decode)
                decode.token_ids.append(7)
                self.seen["joined"] += 1
        elif rng.random() < 0.3 and near.resume(prefill, answer.request(b"d").id):
            answer.decode, answer.prefill = prefill, None
            self.seen["resumed"] += 1

    def make_room(self, worker: Scheduler) -> None:
        """As workers do, with the prefills that a decode worker fetches."""
        fetched = {a.prefill.id for a in self.answers if a.prefill and a.decode}
        held = sorted((live for live in worker.held if live.id not in fetched), key=lambda r: r.arrival)
        not_begun = [
            answer.decode
            for answer in self.answers
            if answer.decode in worker.reserved
            and (answer.prefill is None or answer.prefill.phase is Phase.WAITING)
        ]
        spare = [live.id for live in (*held, *not_begun)]
        for request_id in worker.to_drop(fetched.__contains__, (), spare):
            live = worker.requests[request_id]
            self.seen[f"{live.phase.name} dropped"] += 1
            worker.drop(live)

    def step(self, worker: Scheduler) -> None:
        plan = step(worker, 5)
        self.seen["handed back"] += len(plan.handed_back)
        by_live = {live: answer for answer in self.answers for live in (answer.prefill, answer.decode)}
        for live, _, stop in plan.chunks:
            if stop < len(live.token_ids) - 1:
                continue
            answer = by_live[live]
            answer.given += 1
            answer.left -= 1
            if not answer.left:
                for other in (answer.prefill, answer.decode):
                    if other is not None and other.phase is not Phase.GONE:
                        (worker if other is live else self.other(worker)).drop(other)

    def other(self, worker: Scheduler) -> Scheduler:
        return self.workers[worker is self.workers[0]]


@pytest.mark.parametrize(("num_blocks", "seats"), [(4, 4), (9, 1), (9, 3)])
def test_every_request_ends(num_blocks: int, seats: int) -> None:
    seen = Counter[str]()
    for seed in range(20):
        workers = TwoWorkers(seed, num_blocks, seats)
        workers.serve()
        seen += workers.seen
    events = {"joined", "resumed", "started", "handed back", "HELD dropped", "RESERVED dropped"}
    assert seen.keys() == events, seen
