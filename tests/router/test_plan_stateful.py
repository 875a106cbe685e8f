"""One request is planned, submitted and interrupted in every way at every point, by the real router parts.

from array import array
Only the network is missing: each worker is driven by its messages. A life draws events at random, then heals,
and must end with the whole answer. Checked after each event: the answer so far, and that nothing is open
which the request does not need.
"""

import asyncio
import random
import time
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from baton.router.admission.entry import Deadline, entering
from baton.router.admission.keys import ANY_CLIENT, Account
from baton.router.admission.parked import Parked, RetryBudget
from baton.router.admission.queue import Admission
from baton.router.api.jobs import Job
from baton.router.config import RouterConfig
from baton.router.generation.context import RequestContext, Services
from baton.router.generation.failures import MAX_FAILURES, MAX_LOSSES
from baton.router.generation.generation import Generation
from baton.router.generation.output import Consumers, Delta, TokenQueue
from baton.router.metrics import Metrics
from baton.router.policy import desk
from baton.router.policy.planner import plan
from baton.router.workers.checks import RouterModel
from baton.router.workers.pool import WorkerPool
from baton.router.workers.stream import WorkerStream
from baton.router.workers.worker import SendQueue, Worker
from baton.rpc import worker_pb2 as pb
from baton.system.tracing import Tracer
from tests.stand_in import stand_in

PREFILL, DECODE = pb.POOL_PREFILL, pb.POOL_DECODE
METRICS = Metrics("plans")
PROMPT, STOP = 3000, 2
FAILURES = [
    pb.FAILURE_CODE_ENGINE, pb.FAILURE_CODE_NO_ROOM, pb.FAILURE_CODE_DRAINING, pb.FAILURE_CODE_HANDED_BACK,
    pb.FAILURE_CODE_DROPPED, pb.FAILURE_CODE_UNSPECIFIED,
]  # fmt: skip


@dataclass
class Work:
    """What a worker has of an attempt, as it knows it."""

    kind: str
    request: pb.Request
    source: bytes = b""
    sent: int = 0
    """Tokens."""
    computed: bool = False
    reserved: bool = False
    queued: bool = False
    hands_over: bool = False
    retargeted: bool = False
    parts: list[bytes] = field(default_factory=list)
    """Of a split prompt: the prefills of all workers, the last one last."""

    @property
    def next_index(self) -> int:
        return len(self.request.output_ids) + self.sent


class Stream(WorkerStream):
    """Opens no connection: a life attaches it and takes its messages."""

    async def _run(self) -> None:
        pass


class Life:
    def __init__(
        self,
        seed: int,
        pools: Sequence["pb.Pool"] = (),
        waiting: Sequence[int] = (0, 0, 5000),
        *,
        rolls: bool = False,
        steps: Sequence[float] = (),
        **config: Any,
    ) -> None:
        """`pools`: of the workers. Drawn if there are none. `waiting`: prompt tokens that one may have.
        `rolls`: workers that attach again have newer weights. `steps`: seconds that those of a worker may
        take, which knows its gap target then."""
        self.rng, self.waiting, self.rolls, self.steps = random.Random(seed), waiting, rolls, steps
        self.versions: dict[bytes, str] = {}
        """Of the weights of the worker that an attempt was sent to."""
        rng = self.rng
        made = RouterConfig(model="m", secret=b"s", port=0, worker_wait=1e6, max_wait=1e6, **config)
        self.pool = pool = WorkerPool(made, RouterModel("m", 10, ""))
        pool.desk.rng = random.Random(seed)
        self.admission = Admission(10**9, pool.desk.window, pool.desk.free_capacity)
        self.parked = Parked(RetryBudget())
        pool.on_capacity, pool.on_ready = self.admission.dispatch, self.parked.worker_ready
        self.streams: list[Stream] = []
        self.works: dict[Worker, dict[bytes, Work]] = {}
        self.tokens = TokenQueue(10**6, lambda: None, Consumers())
        self.received: list[int] = []
        self.ends: list[Any] = []
        self.computed = set[bytes]()
        self.submitted = self.events = 0
        self.seen: Counter[str] = Counter()
        length = rng.choice([30] if steps else [1, 2, 3, 6])
        self.output = [rng.randrange(3, 10) for _ in range(length - 1)] + [STOP]
        self.pools = pools or [PREFILL] * rng.choice([1, 2]) + [DECODE] * rng.choice([1, 1, 2, 3])
        for number, first in enumerate(self.pools):
            worker = Worker(f"w{number}", pool.desk, lambda: pool.on_capacity(), pool.breaker_changed)
            pool.listed[worker.address], self.works[worker] = worker, {}
            self.streams.append(Stream(worker, pool, made))
            self.attach(self.streams[-1], first)
        sampling = pb.SamplingParams(max_tokens=len(self.output) if rng.random() < 0.5 else 100)
        account, span = Account(ANY_CLIENT), Tracer(None, "", {}).begin("request", "", {})
        self.entering = entering(self.admission, account)
        self.account, entry = account, self.entering.__enter__()
        [turn] = entry.turns([PROMPT])
        entry.deadline = Deadline(time.monotonic(), 1e6)
        services = stand_in(Services, pool=pool, parked=self.parked, metrics=METRICS, config=made)
        context = RequestContext(services, entry)
        context.tokens, context.span = self.tokens, span
        job = Job(array("I", [5] * PROMPT), sampling, rng.getrandbits(64), [])
        self.generation = Generation(job, turn, 0, context)
        self.generation.advance()
        self.check()

    # ------------------------------------------------------------ the workers

    def attach(self, stream: Stream, pool: "pb.Pool") -> None:
        status = pb.WorkerStatus(
            health=pb.WorkerStatus.HEALTH_SERVING, pool=pool, blocks_free=512, prefill_tokens_per_s=1e3,
            fastest_step_seconds=0.01, step_seconds=0.01, long_chunk_tokens=50, long_chunk_seconds=0.015,
            tokens_waiting=self.rng.choice(self.waiting), staged_version="new" if self.rolls else "",
        )  # fmt: skip
        if self.steps:
            status.step_seconds, status.gap_target_seconds = self.rng.choice(self.steps), 0.01
        described = pb.WorkerDescription(
            first_pool=pool, incarnation=self.rng.getrandbits(64), vocab_size=10, kv_address="k",
            block_size=16, num_blocks=512, max_model_len=8192, max_num_seqs=64, max_num_batched_tokens=2048,
            num_layers=32, attention_doubles_at=30_000 * (self.rng.random() < 0.9), status=status,
            exchanges_prefixes=self.rng.random() < 0.9,
        )  # fmt: skip
        described.model_fingerprint = "model=m"
        if self.rolls and len(self.streams) == len(self.pools):
            described.weights.CopyFrom(pb.StageWeights(version="new", named_at=1, rolls=True))
            described.model_fingerprint += "; version=new"
        stream._attach(described, SendQueue(lambda: None), None)  # type: ignore[arg-type]

    def take(self) -> None:
        """The workers get what was sent to them."""
        computed = {worker: self.has_kv(works) for worker, works in self.works.items()}
        prefills = list[bytes]()
        for worker, works in self.works.items():
            version = worker.description.weights.version
            messages = worker.send_queue._queue if worker.send_queue is not None else asyncio.Queue()
            while not messages.empty():
                entry = messages.get_nowait()
                assert entry is not None
                message, _ = entry
                assert not isinstance(message, memoryview), "no image was asked about"
                match message.WhichOneof("kind"):
                    case "prefill":
                        submit = message.prefill
                        assert submit.request.output_ids == self.received
                        self.versions[submit.prefill_id] = version
                        assert {self.versions.setdefault(p.prefill_id, version) for p in submit.plan} <= {
                            version
                        }
                        parts = list(dict.fromkeys(part.prefill_id for part in submit.plan))
                        prefills += [] if parts else [submit.prefill_id]
                        work = Work("prefill", submit.request, queued=submit.report_start, parts=parts)
                        work.hands_over = submit.handover
                        works[submit.prefill_id] = work
                        self.submitted += 1
                        self.seen["split" if parts else "prefill" if submit.handover else "one token"] += 1
                        self.seen["queued"] += submit.report_start
                    case "decode":
                        submit = message.decode
                        inline, repeated = not submit.HasField("source"), len(submit.request.output_ids)
                        assert submit.request.output_ids == self.received[:repeated]
                        repeats = len(self.received) - repeated
                        assert repeats <= (not inline), "only the token of the prefill comes again"
                        assert not (inline and computed[worker]), "it would compute what it has"
                        if not inline:
                            assert self.versions.setdefault(submit.source.prefill_id, version) == version
                        self.versions[submit.decode_id] = version
                        works[submit.decode_id] = Work("decode", submit.request, submit.source.prefill_id)
                        self.submitted += 1
                        self.seen["inline" if inline else "decode"] += 1
                    case "retarget":
                        if (work := works.get(message.retarget.decode_id)) is None:
                            continue
                        self.seen["retarget"] += 1
                        source = message.retarget.source.prefill_id
                        assert self.versions.setdefault(source, version) == version
                        assert message.retarget.output_ids == self.received
                        work.retargeted = True
                        if work.source in self.computed and self.rng.random() < 0.5:
                            work.source = b""  # it had the KV already
                        else:
                            work.source = message.retarget.source.prefill_id
                            work.request.output_ids[:] = message.retarget.output_ids
                    case "cancel":
                        works.pop(message.cancel.attempt_id, None)
        for works in self.works.values():
            for work in works.values():
                if work.source in prefills and not work.retargeted and work.request.retried:
                    assert work.reserved, "no prompt is computed again without room for its KV"

    def has_kv(self, works: dict[bytes, Work]) -> bool:
        return any(work.computed and work.hands_over and not work.parts for work in works.values())

    def work_of(self, attempt_id: bytes) -> Work | None:
        return next((works[attempt_id] for works in self.works.values() if attempt_id in works), None)

    def fetched(self, prefill_id: bytes) -> None:
        """The transfer is over, and the prefill worker has released the KV."""
        for works in self.works.values():
            works.pop(prefill_id, None)

    def finished(self, prefill_id: bytes) -> None:
        """A decode worker learns that the token of this prefill is the last one."""
        for worker, works in self.works.items():
            for key in [key for key, work in works.items() if work.source == prefill_id]:
                self.fail(worker, key, pb.FAILURE_CODE_FINISHED)

    def say(self, worker: Worker, **message: Any) -> None:
        self.streams[list(self.works).index(worker)]._receive(pb.WorkerMessage(**message))

    def fail(
        self, worker: Worker, attempt_id: bytes, code: "pb.FailureCode", prefill_id: bytes = b""
    ) -> None:
        if code != pb.FAILURE_CODE_KV_FAILED:
            del self.works[worker][attempt_id]
        failed = pb.AttemptFailed(attempt_id=attempt_id, code=code, message="drawn", prefill_id=prefill_id)
        self.say(worker, failed=failed)

    def token(self, worker: Worker, attempt_id: bytes, work: Work, token_id: int) -> None:
        last = token_id == STOP or work.next_index + 1 == work.request.sampling.max_tokens
        reason = (
            pb.FINISH_REASON_STOP
            if token_id == STOP
            else pb.FINISH_REASON_LENGTH
            if last
            else pb.FINISH_REASON_NONE
        )
        event = pb.TokenEvent(
            attempt_id=attempt_id, output_index=work.next_index, token_id=token_id, finish_reason=reason
        )
        work.sent += 1
        if last and (work.kind == "decode" or not work.hands_over or token_id == STOP):
            del self.works[worker][attempt_id]
        self.say(worker, step=pb.StepOutput(tokens=[event]))

    # ------------------------------------------------------------ events

    def step(self, worker: Worker, attempt_id: bytes, work: Work) -> bool:
        """The attempt goes on, if it can."""
        if work.kind == "prefill":
            if work.queued:
                work.queued = False
                self.say(worker, prefill_started=pb.PrefillStarted(prefill_id=attempt_id))
            elif work.computed:
                return False
            else:
                work.computed = True
                self.computed.add(attempt_id)
                if not work.parts or work.parts[-1] == attempt_id:
                    if self.output[work.next_index] == STOP and self.rng.random() < 0.5:
                        self.finished(attempt_id)
                    self.token(worker, attempt_id, work, self.output[work.next_index])
            return True
        if not work.reserved:
            work.reserved = True
            self.say(worker, reserved=pb.Reserved(decode_id=attempt_id))
            return True
        if work.source and not work.sent:
            source = self.work_of(work.source)
            if source is None or not source.computed:
                return False
            self.fetched(work.source)
        self.token(worker, attempt_id, work, self.output[work.next_index])
        return True

    def disturb(self) -> None:
        """One fault, of an attempt or of a worker."""
        rng, stream = self.rng, self.rng.choice(self.streams)
        worker = stream.worker
        open_works = [(each, key, work) for each, works in self.works.items() for key, work in works.items()]
        kind = rng.choice(
            [
                "attempt",
                "attempt",
                "attempt",
                "attempt",
                "kv",
                "token",
                "lost",
                "lost",
                "flip",
                "drain",
                "room",
                "stale",
            ]
        )
        self.seen[kind] += 1
        if kind in ("attempt", "kv", "token", "stale") and open_works:
            worker, key, work = rng.choice(open_works)
            if kind == "attempt":
                self.fail(worker, key, rng.choice(FAILURES))
            elif kind == "kv" and work.kind == "decode" and work.source and not work.sent:
                self.fetched(work.source)
                self.fail(worker, key, pb.FAILURE_CODE_KV_FAILED, work.source)
            elif kind == "token" and work.kind == "decode" and work.sent:
                work.sent = len(self.received) + 1 - len(work.request.output_ids)  # it skips one
                self.token(worker, key, work, 1)
            elif kind == "stale" and work.kind == "decode" and work.sent > 1:
                work.sent -= 1
                self.token(worker, key, work, self.output[work.next_index])
        elif kind == "lost" and worker.attached:
            self.lose(worker)
        elif kind == "lost":
            self.attach(stream, rng.choice([PREFILL, DECODE]))
        elif worker.attached:
            if kind == "flip":
                self.flip(worker)
            elif kind == "room":
                self.report(worker, blocks_free=rng.choice([0, 100, 512]))
            elif kind == "drain":
                serving, draining = pb.WorkerStatus.HEALTH_SERVING, pb.WorkerStatus.HEALTH_DRAINING
                self.report(worker, health=rng.choice([serving, draining]))
            if self.rolls and not worker.weights_version and rng.random() < 0.1:
                self.report(worker, staged_version=rng.choice(["", "new"]))

    def lose(self, worker: Worker) -> None:
        self.works[worker].clear()
        self.streams[list(self.works).index(worker)]._detach()

    def flip(self, worker: Worker) -> None:
        self.report(worker, pool=PREFILL if worker.status.pool == DECODE else DECODE)

    def report(self, worker: Worker, **changes: Any) -> None:
        status = pb.WorkerStatus()
        status.CopyFrom(worker.status)
        for name, value in changes.items():
            setattr(status, name, value)
        self.say(worker, status=status)

    def heal(self) -> None:
        """All workers serve again, in their first pools."""
        for pool, stream in zip(self.pools, self.streams, strict=True):
            if stream.worker.attached and self.rolls and not stream.worker.weights_version:
                self.lose(stream.worker)  # the coordinator goes on
            if not stream.worker.attached:
                self.attach(stream, pool)
            status = pb.WorkerStatus(
                health=pb.WorkerStatus.HEALTH_SERVING, pool=pool, blocks_free=512, prefill_tokens_per_s=1e3
            )
            self.say(stream.worker, status=status)

    # ------------------------------------------------------------ checks

    def check(self) -> None:
        for _, item in self.tokens.pop():
            assert not self.ends, "nothing follows the end"
            if isinstance(item, Delta):
                self.received.append(item.token_id)
            if not isinstance(item, Delta) or item.finish_reason:
                self.ends.append(item)
        assert self.received == self.output[: len(self.received)], "no token twice, and none is missing"
        self.take()
        pair = self.generation.pair
        prefill = [] if pair.prefill is None else [pair.prefill, *pair.prefill.parts]
        needed = {each.id for each in [*prefill, *([pair.decode] if pair.decode else [])]}
        for worker, works in self.works.items():
            for work in works.values():
                own = works.get(work.source) if not work.sent else None
                assert own is None or own.computed or own.parts, "it would fetch from itself"
            assert worker.attempts.keys() <= needed, "an attempt is open that the request does not need"
            if worker.attached:
                assert worker.load.router_requests == sum(
                    each.tokens > 0 for each in worker.attempts.values()
                )
        assert self.pool.desk.promised_slots == pair.queues
        assert pair.failures.total <= MAX_FAILURES + MAX_LOSSES

    async def run(self) -> None:
        faults = self.rng.randrange(0, 60 if self.steps else 20)
        while not self.ends and faults:
            await self.round(disturbs=self.rng.random() < 0.4)
            faults -= 1
        healed = self.submitted
        self.heal()
        for _ in range(200):
            if self.ends:
                break
            self.check()
            self.parked._retry()
            await self.round(disturbs=False)
        assert self.ends, f"it hangs: {self.generation.pair.held()}"
        assert self.submitted - healed <= 12, "without faults there is nothing to try again"
        self.finish()

    async def round(self, *, disturbs: bool) -> None:
        if disturbs:
            self.disturb()
        else:
            ready = [
                (worker, key, work) for worker, works in self.works.items() for key, work in works.items()
            ]
            self.rng.shuffle(ready)
            any(key in self.works[worker] and self.step(worker, key, work) for worker, key, work in ready)
        await asyncio.sleep(0)  # those that wait for a worker are woken later
        self.check()

    def finish(self) -> None:
        [end] = self.ends
        if isinstance(end, Delta):
            wanted = self.generation.job.sampling.max_tokens
            assert self.received == self.output[:wanted]
        else:
            assert "without a new token" in end.message, end
        self.check()
        self.seen.update(event.what for event in self.generation.events if event.what == "returns")
        pool, entering = self.pool, self.entering
        entering.__exit__(None, None, None)
        assert not any(worker.attempts for worker in self.works)
        assert (pool.desk.promised_slots, pool.desk.promised_positions) == (0, 0)
        assert (self.account.running, self.account.positions) == (0, 0)
        self.admission.assert_whole()
        for worker, works in self.works.items():
            assert not worker.attached or pool.desk.loads.router_tokens(worker.row) == 0
            assert not works or not worker.attached, "each reservation has ended at its worker, too"


async def test_nothing_is_planned_without_retry_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """One lost worker may have thousands of requests, and a plan takes long."""
    plans = []
    monkeypatch.setattr(desk, "plan", lambda *args: plans.append(1) or plan(*args))
    life = Life(0)
    parked = life.parked
    while parked._budget.take(time.monotonic()):
        pass
    assert len(parked.without_budget) == 0
    planned = len(plans)
    [(worker, key)] = [(worker, key) for worker, works in life.works.items() for key in works][:1]
    life.fail(worker, key, pb.FAILURE_CODE_ENGINE)
    assert (len(plans), len(parked.without_budget)) == (planned, 1)
    life.generation.cancel()
    for stream in life.streams:
        await stream.close()


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"overflow": False},
        {"split_prompts": False},
        {"rolls": True},
        {"steps": [0.01, 1.0], "ttft_target": 1e6},
    ],
    ids=str,
)
def test_a_request_is_answered_once_whatever_fails(config: dict[str, Any]) -> None:
    async def lives() -> Counter[str]:
        seen = Counter[str]()
        for seed in range(100):
            life = Life(seed, **config)
            try:
                await life.run()
            except BaseException:
                print(f"seed {seed}", life.seen)
                raise
            seen += life.seen
            for stream in life.streams:
                await stream.close()
        return seen

    seen = asyncio.run(lives())
    expected = {"prefill", "decode", "retarget", "queued", "lost", "flip", "drain", "room", "kv"}
    expected |= {"inline"} if config.get("overflow", True) else set()
    expected |= {"split"} if config.get("split_prompts", True) else set()
    expected |= {"returns"} if "steps" in config else {"one token"}  # those that return are long
    assert expected <= seen.keys(), seen


# The pools of a fleet, and what happens to the worker with the prefill (p) and to that with the decode (d).
ORDERS: dict[str, tuple[str, list[str]]] = {
    "the decode is at the only prefill worker": ("pd", ["d goes on", "d flips", "p loses"]),
    "the decode is at a prefill worker": ("pdd", ["d goes on", "d flips", "p loses"]),
    "the only decode worker is lost before the KV is there": ("pd", ["d loses"]),
    "the only decode worker is lost when the KV is there": ("pd", ["p goes on", "d loses"]),
    "a worker of a request that waits is lost, and others may decode then": (
        "ppd", ["p full", "d full", "d refuses", "p flips", "d loses", "p loses"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("order", ORDERS)
def test_a_request_is_answered_whatever_comes_first(order: str) -> None:
    fleet, events = ORDERS[order]

    async def live(seed: int) -> bool:
        life = Life(seed, pools=[PREFILL if letter == "p" else DECODE for letter in fleet], waiting=[0])
        works = {
            work.kind: (worker, key, work)
            for worker, works in life.works.items()
            for key, work in works.items()
        }
        hands_over = works.keys() == {"prefill", "decode"}
        for event in events if hands_over else ():
            which, what = event.split(maxsplit=1)
            worker, key, work = works["prefill" if which == "p" else "decode"]
            match what:
                case "goes on":
                    life.step(worker, key, work)
                case "loses":
                    life.lose(worker)
                case "flips":
                    life.flip(worker)
                case "full":
                    life.report(worker, blocks_free=0)
                case "refuses":
                    life.fail(worker, key, pb.FAILURE_CODE_NO_ROOM)
            life.check()
        await life.run()
        for stream in life.streams:
            await stream.close()
        return hands_over

    assert sum(asyncio.run(live(seed)) for seed in range(20)) >= 5
