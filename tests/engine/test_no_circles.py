"""Two engines that prefill and decode for each other exhaust their blocks and seats. Every request ends."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import pytest

from baton.engine.api.request import EngineRequest
from baton.engine.core.live_request import LiveRequest, Phase
from baton.engine.core.making_room import to_drop
from baton.engine.core.prefix_exchange import Import, Pin
from baton.engine.core.scheduler import Scheduler
from baton.kv_names import CHUNK_TOKENS
from tests.engine.scheduling import BLOCK, make, step

ROUNDS = 3000


@dataclass(eq=False)
class Shared:
    """A prompt that both workers compute, as they see it."""

    ranges: Sequence[tuple[Scheduler, range]]
    """In order, each with its worker."""
    final: LiveRequest
    other: LiveRequest
    begun: int = 0
    """Steps compute the positions below."""


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
    imports: bool = False
    """It waits for KV from the other worker's prefix cache."""
    shared: Shared | None = None

    def request(self, kind: bytes, stop: int | None = None) -> EngineRequest:
        """`stop`: the end of a part of its prompt, with all that it has been given."""
        tokens = [self.number % 2] * self.prompt
        if stop is not None:
            return EngineRequest(kind + self.number.to_bytes(2), [*tokens, *[7] * self.base][:stop])
        return EngineRequest(kind + self.number.to_bytes(2), tokens, [7] * self.base)

    def forget_the_gone(self) -> None:
        if self.prefill is not None and self.prefill.phase is Phase.GONE:
            self.prefill = None
        if self.decode is not None and self.decode.phase is Phase.GONE:
            self.decode = None


class TwoWorkers:
    """The work of two workers and a router, in random order."""

    def __init__(
        self,
        seed: int,
        num_blocks: int,
        seats: int,
        *,
        budget: int = 8,
        cached: bool = False,
        shares: bool = False,
    ) -> None:
        self.rng = random.Random(seed)
        self.round = 0
        self.shares = shares
        self.pause = 5 if cached else 0  # rounds between two requests
        self.workers = [
            make(num_blocks=num_blocks, seqs=seats, budget=budget, prefix_cache=cached) for _ in range(2)
        ]
        self.imports: list[tuple[Answer, Import, Pin | None, int]] = []
        self.answers: list[Answer] = []
        for number in range(14):
            most = (num_blocks - 1) * BLOCK
            prompt = self.rng.randrange(CHUNK_TOKENS, most // 2) if cached else self.rng.randrange(1, most)
            left = self.rng.randrange(1, 40 if cached else num_blocks * BLOCK - prompt + 1)
            near, far = self.rng.sample(self.workers, 2)
            self.answers.append(Answer(number, prompt, left, near, far))
        self.seen = Counter[str]()

    def serve(self) -> None:
        for number in range(ROUNDS):
            self.round = number
            self.rng.shuffle(self.answers)
            for answer in self.answers:
                if answer.left and not answer.imports and answer.number * self.pause <= number:
                    answer.forget_the_gone()
                    self.route(answer)
            self.end_imports()
            for worker in self.workers:
                self.make_room(worker)
                self.step(worker)
                worker.lives.pool.assert_consistent()
            if not any(answer.left for answer in self.answers):
                break
        while self.imports:
            self.end_imports()
        for worker in self.workers:
            worker.lives.assert_whole()
        assert not any(answer.left for answer in self.answers), "they wait for each other"

    def route(self, answer: Answer) -> None:
        near, far, rng = answer.prefills.lives, answer.decodes.lives, self.rng
        prefill, decode = answer.prefill, answer.decode
        if decode is not None and decode.phase is Phase.RUNNING:
            return
        if answer.shared is not None:
            self.go_on(answer, answer.shared)
            return
        if prefill is None:
            answer.base = answer.given
            if decode is None and self.shares and rng.random() < 0.5 and self.share(answer):
                return
            if decode is None and rng.random() < 0.5 and self.start_import(answer):
                return
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

    def share(self, answer: Answer) -> bool:
        """Both workers get their blocks at once, or neither does."""
        near, far, tokens = answer.prefills, answer.decodes, answer.prompt + answer.base
        cuts = sorted(self.rng.sample(range(1, tokens), min(tokens - 1, self.rng.randrange(1, 4))))
        spans = [range(*span) for span in pairwise([0, *cuts, tokens])]
        if len(spans) < 2:
            return False
        theirs, ours = spans[-2::-2][::-1], spans[::-2][::-1]
        other = far.lives.start_part(answer.request(b"o", theirs[-1].stop), theirs)
        if other is None:
            return False
        final = near.lives.start_part(answer.request(b"p", tokens), ours)
        if final is None:
            far.lives.drop(other)
            self.seen["refused"] += 1
            return False
        answer.shared = Shared([(near if span in ours else far, span) for span in spans], final, other)
        self.seen["shared"] += 1
        return True

    def go_on(self, answer: Answer, shared: Shared) -> None:
        """Begins ranges, of which the KV before may take its time, and ends what both have computed."""
        for worker, live in ((answer.prefills, shared.final), (answer.decodes, shared.other)):
            if live.phase is Phase.RESERVED and live.shared.ranges[0].start <= shared.begun:
                arrives = self.round + self.rng.randrange(5)
                worker.lives.begin_range(live, lambda arrives=arrives: self.round < arrives)
        if shared.final.phase is shared.other.phase is Phase.HELD:
            answer.prefills.lives.verified(shared.final)
            answer.decodes.lives.drop(shared.other)
            answer.prefill, answer.shared = shared.final, None

    def start_import(self, answer: Answer) -> bool:
        """The answer then holds nothing until the import ends."""
        near, far = answer.prefills.lives.prefix_exchange, answer.decodes.lives.prefix_exchange
        if near is None or far is None:
            return False
        missing = near.missing(answer.request(b"i"), 99)
        if missing is None or (started := near.start_import(missing)) is None:
            return False
        pin = far.pin(missing.chunks, missing.first_chunk)
        tokens = 0 if pin is None else (missing.first_chunk + pin.num_chunks) * CHUNK_TOKENS
        self.seen["imported" if pin else "not pinned"] += 1
        self.imports.append((answer, started, pin, tokens))
        answer.imports = True
        return True

    def end_imports(self) -> None:
        """A transfer into reserved blocks waits for nothing, but may take its time."""
        for ended in [one for one in self.imports if self.rng.random() < 0.3]:
            self.imports.remove(ended)
            answer, started, pin, tokens = ended
            started.end(tokens)
            if pin is not None:
                pin.end()
            answer.imports = False

    def make_room(self, worker: Scheduler) -> None:
        """As workers do, with the prefills that a decode worker fetches."""
        fetched = {a.prefill.id for a in self.answers if a.prefill and a.decode}
        parts = {part for a in self.answers if a.shared for part in (a.shared.final, a.shared.other)}
        held = [live for live in worker.lives.held if live.id not in fetched and live not in parts]
        held.sort(key=lambda r: r.arrival)
        not_begun = [
            answer.decode
            for answer in self.answers
            if answer.decode in worker.lives.reserved
            and (answer.prefill is None or answer.prefill.phase is Phase.WAITING)
        ]
        for live in to_drop(worker.lives, fetched.__contains__, [*held, *not_begun]):
            self.seen[f"{live.phase.name} dropped"] += 1
            worker.lives.drop(live)

    def step(self, worker: Scheduler) -> None:
        held_back = [live for live in worker.lives.running if worker._is_held_back(live)]
        self.seen["held back"] += bool(held_back)
        schedule = step(worker, 5)
        # If all that decoded lost their blocks to it, the step makes none of them wait.
        assert schedule.preempted or not any(live in schedule.chunks for live in held_back)
        self.seen["handed back"] += sum(live.hand_back for live in schedule.preempted)
        by_live = {live: answer for answer in self.answers for live in (answer.prefill, answer.decode)}
        of_part = {live: a for a in self.answers if a.shared for live in (a.shared.final, a.shared.other)}
        for live, positions in schedule.chunks.items():
            if (sharing := of_part.get(live)) is not None and sharing.shared is not None:
                sharing.shared.begun = max(sharing.shared.begun, positions.stop)
                if live is sharing.shared.final and live.phase is Phase.HELD:
                    self.token(worker, sharing, live)
                continue
            if positions.stop < len(live.token_ids) - 1:
                continue
            self.token(worker, by_live[live], live)

    def token(self, worker: Scheduler, answer: Answer, live: LiveRequest) -> None:
        answer.given += 1
        answer.left -= 1
        if not answer.left:
            parts = () if answer.shared is None else (answer.shared.final, answer.shared.other)
            for other in (answer.prefill, answer.decode, *parts):
                if other is not None and other.phase is not Phase.GONE:
                    (worker if other is live else self.other(worker)).lives.drop(other)

    def other(self, worker: Scheduler) -> Scheduler:
        return self.workers[worker is self.workers[0]]


@pytest.mark.cases(1)
@pytest.mark.parametrize(("num_blocks", "seats"), [(4, 4), (9, 1), (9, 3)])
def test_every_request_ends(num_blocks: int, seats: int) -> None:
    seen = Counter[str]()
    for seed in range(20):
        workers = TwoWorkers(seed, num_blocks, seats)
        workers.serve()
        seen += workers.seen
    events = {"joined", "resumed", "started", "handed back", "HELD dropped", "RESERVED dropped"}
    assert {event for event, count in seen.items() if count} == events, seen


@pytest.mark.all
def test_every_request_ends_with_prefixes_on_their_way() -> None:
    """Prompts begin alike, so that each worker has what the other one lacks. Pins take a bounded share."""
    seen = Counter[str]()
    for seed in range(20):
        workers = TwoWorkers(seed, num_blocks=100, seats=3, budget=32, cached=True)
        workers.serve()
        seen += workers.seen
    assert {"imported", "not pinned", "joined", "started", "HELD dropped"} <= seen.keys(), seen


@pytest.mark.all
@pytest.mark.parametrize(("num_blocks", "seats"), [(9, 2), (24, 4)])
def test_every_request_ends_with_shared_prompts(num_blocks: int, seats: int) -> None:
    """Both workers compute ranges of a prompt, beside requests of all other kinds. Steps wait for KV, but
    none that decodes does."""
    seen = Counter[str]()
    for seed in range(15):
        workers = TwoWorkers(seed, num_blocks, seats, shares=True)
        workers.serve()
        seen += workers.seen
    assert {"shared", "refused", "held back", "joined", "started"} <= seen.keys(), seen
