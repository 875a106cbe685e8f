"""Prompts that several workers compute at the same time: real workers, driven as a router would."""

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from baton.kv_transfer import Receiver, Sender, TraceWriter
from baton.prefill_worker.attempt import PrefillAttempt
from baton.prefill_worker.parts import PartAttempt, SplitSteps
from baton.prefill_worker.role import SenderSink
from baton.rpc import worker_pb2 as pb
from baton.worker.engine_process.engine_attempt import Resources
from baton.worker.messages import Origin
from tests.bad_network import BadNetwork
from tests.cluster_helpers import (
    WorkerProcess,
    WorkerStream,
    assert_whole,
    attached,
    metrics,
    request,
    sampling,
    side_by_side,
    tiny_model,
)
from tests.device import DEVICE
from tests.engine.checkpoints import edit_json
from tests.kv_transfer import second_wire
from tests.stand_in import stand_in
from tests.within import eventually
from tests.worker.test_states import HYBRID, LATENTS, LEDGER, SPARSE, WITH_LEDGER

pytestmark = pytest.mark.all

PARAMS = sampling(max_tokens=8, ignore_eos=True)
ENDLESS = sampling(max_tokens=3000, ignore_eos=True)
ENGINE: dict[str, Any] = {
    "load_format": "dummy",
    "num_blocks": 200,
    "block_size": 16,
    "max_num_batched_tokens": 512,
    "enable_prefix_caching": True,
}
TWO_RANKS = {"tensor_parallel_size": 2}
RANKS = pytest.mark.skipif(DEVICE != "cpu", reason="needs two devices")
Workers = Sequence[WorkerProcess]


@dataclass
class Submitted:
    """A split prompt: the id of each worker's part, and the decode."""

    parts: dict[int, bytes]
    final: int
    decode_id: bytes


class Streams(list[WorkerStream]):
    """A router's streams to the workers, by number."""

    def __init__(self, workers: Workers, streams: Sequence[WorkerStream]) -> None:
        super().__init__(streams)
        self.workers = workers

    def source(self, worker: int, prefill_id: bytes) -> pb.PrefillSource:
        ready = self.workers[worker].ready
        return pb.PrefillSource(
            prefill_id=prefill_id, kv_address=ready["kv_address"], incarnation=ready["incarnation"]
        )

    async def share(
        self, token_ids: Sequence[int], plan: Sequence[tuple[int, int]], decode: int
    ) -> Submitted:
        """`plan`: the worker of each range, and its end. `decode`: the worker that decodes."""
        parts = {worker: os.urandom(16) for worker, _ in plan}
        starts = [0, *(stop for _, stop in plan)]
        ranges = [
            pb.PlanRange(
                prefill_id=parts[worker],
                kv_address=self.workers[worker].ready["kv_address"],
                incarnation=self.workers[worker].ready["incarnation"],
                start=start,
                stop=stop,
            )
            for start, (worker, stop) in zip(starts, plan, strict=False)
        ]
        for worker, prefill_id in parts.items():
            end = max(stop for of, stop in plan if of == worker)
            asked = request(token_ids[:end], PARAMS)
            submit = pb.SubmitPrefill(
                prefill_id=prefill_id,
                request=asked,
                handover=True,
                plan=ranges,
                report_start=worker == plan[-1][0],
            )
            await self[worker].send(prefill=submit)
        final = plan[-1][0]
        source = self.source(final, parts[final])
        decode_id = await self[decode].submit_decode(request(token_ids, PARAMS), source)
        return Submitted(parts, final, decode_id)

    async def answer(self, asked: Submitted, decode: int) -> list[int]:
        first, _ = await self[asked.final].token(asked.parts[asked.final])
        await self[decode].reserved(asked.decode_id)
        tokens = [token.token_id for token, _ in await self[decode].tokens(asked.decode_id)]
        assert tokens[0] == first.token_id
        return tokens

    async def alone(self, token_ids: Sequence[int]) -> list[int]:
        """What one worker gives that never has a part of such a prompt in its cache."""
        asked = request(token_ids, PARAMS)
        asked.cache_salt = os.urandom(8)
        decode_id = await self[-1].reserve(asked)
        return [token.token_id for token, _ in await self[-1].tokens(decode_id)]


@pytest.fixture(scope="module", params=["lanes and memory", pytest.param("nixl", marks=pytest.mark.long)])
def workers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    """Three that share prompts, and one that never does. Without NIXL, KV from and to worker 1 goes over TCP,
    and that from worker 0 to worker 2 through shared memory."""
    roles = dict(enumerate(("prefill", "prefill", "decode", "decode")))
    connectors = ("auto", "tcp", "auto", "auto") if request.param != "nixl" else ("nixl",) * 4
    given = {
        number: {"role": role, "index": number, "engine": ENGINE, "kv_connector": connectors[number]}
        for number, role in roles.items()
    }
    given[1]["engine"] = ENGINE | {"block_size": 32, "num_blocks": 100}
    with side_by_side(tmp_path_factory.mktemp("parts"), given) as started:
        yield [started[number].wait_ready() for number in roles]


@pytest.fixture
async def streams(workers: Workers) -> AsyncIterator[Streams]:
    async with AsyncExitStack() as stack:
        yield Streams(workers, [await stack.enter_async_context(attached(worker)) for worker in workers])
        await assert_whole(*workers)


def prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(500), k=length)


@pytest.mark.parametrize(
    ("plan", "decode"),
    [
        pytest.param([(0, 300)], 2, id="one range"),
        pytest.param([(0, 192), (2, 300)], 2, id="the last range at the decode worker"),
        pytest.param([(1, 64), (0, 128), (2, 192), (1, 256), (0, 320), (2, 391)], 2, id="three in turns"),
        pytest.param([(0, 64), (1, 1000)], 2, id="a range of several steps"),
    ],
)
async def test_the_tokens_are_those_of_one_worker(
    streams: Streams, plan: list[tuple[int, int]], decode: int
) -> None:
    token_ids = prompt(plan[-1][1], seed=len(plan) + decode)
    asked = await streams.share(token_ids, plan, decode)
    assert await streams.answer(asked, decode) == await streams.alone(token_ids)


async def test_parts_wait_behind_other_prompts_and_for_each_other(streams: Streams) -> None:
    """Two prompts are shared in opposite orders. Each of their workers computes other prompts first."""
    alone = sampling(max_tokens=1)
    others = {
        await streams[worker].submit_prefill(request(prompt(800, seed), alone), handover=False): worker
        for seed, worker in enumerate((0, 1, 0, 1))
    }
    there, back = [(0, 64), (1, 128), (0, 192), (1, 300)], [(1, 64), (0, 128), (1, 192), (0, 250)]
    prompts = [prompt(plan[-1][1], seed=20 + i) for i, plan in enumerate((there, back))]
    asked = [
        await streams.share(token_ids, plan, 2)
        for token_ids, plan in zip(prompts, (there, back), strict=True)
    ]
    for found, token_ids in zip(asked, prompts, strict=True):
        assert await streams.answer(found, 2) == await streams.alone(token_ids)
        assert found.parts[found.final] in streams[found.final].started, "the router is told when"
    for prefill_id, worker in others.items():
        await streams[worker].token(prefill_id)


CHAT = (
    [(0, 64), (1, 128), (0, 192), (1, 250)],
    [(0, 320), (1, 384), (0, 576), (1, 690)],
    [(1, 704), (0, 768), (1, 832)],
    [(0, 512), (1, 640), (0, 832), (1, 896), (0, 1000)],
    [(0, 704), (1, 1060)],
)
"""Plans of one prompt, which grows. From the second one on, workers have cached the beginning of the next."""


@pytest.mark.parametrize(
    ("changes", "engine", "settings"),
    [
        pytest.param(LATENTS, {}, {}, id="latents"),
        pytest.param(SPARSE, {}, {}, id="an index"),
        pytest.param(HYBRID, {}, {}, id="states"),
        pytest.param(LEDGER, {}, WITH_LEDGER, id="kinds of tests"),
        pytest.param({"num_hidden_layers": 80}, {}, {}, id="80 layers", marks=pytest.mark.long),
        pytest.param({}, {"kv_cache_dtype": "fp8"}, {}, id="FP8", marks=pytest.mark.long),
        pytest.param({}, {}, {"kv_encrypt": True}, id="encrypted", marks=pytest.mark.long),
        pytest.param({}, TWO_RANKS, {}, id="equal ranks", marks=RANKS),
        pytest.param({}, {}, {"first": TWO_RANKS}, id="other ranks", marks=[RANKS, pytest.mark.long]),
        pytest.param(LATENTS, TWO_RANKS, {}, id="latents of ranks", marks=[RANKS, pytest.mark.long]),
        pytest.param(HYBRID, {}, {"first": TWO_RANKS}, id="states of ranks", marks=[RANKS, pytest.mark.long]),
    ],
)
async def test_each_kind_of_kv_is_shared(
    changes: dict[str, Any], engine: dict[str, Any], settings: dict[str, Any], tmp_path: Path
) -> None:
    """`settings`: `first` is what the engine of the first worker has beside `engine`."""
    model = tiny_model(tmp_path / "kind")
    edit_json(model / "config.json", **changes)
    first = settings.get("first", {})
    settings = {name: value for name, value in settings.items() if name != "first"}
    engine = ENGINE | engine | {"num_blocks": 300}
    given = {
        0: {"role": "prefill", "model": model, "engine": engine | first, **settings},
        1: {"role": "decode", "model": model, "engine": engine, **settings},
    }
    with side_by_side(tmp_path, given) as started:
        workers = [started[number].wait_ready() for number in given]
        async with AsyncExitStack() as stack:
            attach = [await stack.enter_async_context(attached(worker)) for worker in workers]
            streams, token_ids = Streams(workers, attach), prompt(1060, seed=9)
            for plan in CHAT:
                asked = await streams.share(token_ids[: plan[-1][1]], plan, 1)
                assert await streams.answer(asked, 1) == await streams.alone(token_ids[: plan[-1][1]])
            await assert_whole(*workers)
            assert all(metrics(worker)["vllm:prefix_cache_hits_total"] for worker in workers)


@contextmanager
def behind_a_network(path: Path, *, patient: bool, **waiting: Any) -> Iterator[tuple[Workers, BadNetwork]]:
    """Two that share prompts, and one that decodes. KV of the second layer from the first one passes a
    network. `patient`: no step gives up by itself. `waiting`: what the engine of the second one has beside
    `ENGINE`."""
    roles = dict(enumerate(("prefill", "prefill", "decode")))
    given = {
        number: {"role": role, "index": number, "engine": ENGINE, "kv_connector": "tcp"}
        for number, role in roles.items()
    }
    given[1]["engine"] = ENGINE | waiting
    if patient:
        given[1]["engine_module"] = "tests.worker.patient_engine"
    with side_by_side(path, given) as started:
        workers = [started[number].wait_ready() for number in roles]
        port = int(workers[0].ready["kv_address"].rpartition(":")[2])
        with closing(BadNetwork(port, layer=1)) as network:
            workers[0].ready["kv_address"] = network.address
            yield workers, network


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Workers, BadNetwork]]:
    with behind_a_network(tmp_path_factory.mktemp("patient"), patient=True) as started:
        yield started


async def lost(streams: Streams, network: BadNetwork, fault: str) -> Submitted:
    """Shares a prompt of which a slice of KV does not come."""
    network.fault, network.hits, network.suffered = fault, 1, 0
    asked = await streams.share(prompt(300, seed=1), [(0, 192), (1, 300)], 2)
    await eventually(lambda: network.suffered)  # a thread counts it
    return asked


async def test_decodes_do_not_wait_for_other_workers(patient: tuple[Workers, BadNetwork]) -> None:
    """KV of a split prompt does not come. Requests that decode beside it get their tokens meanwhile."""
    beside = request(prompt(40, seed=2), ENDLESS)
    workers, network = patient
    async with AsyncExitStack() as stack:
        a, b, d = [await stack.enter_async_context(attached(worker)) for worker in workers]
        other = await b.reserve(beside)
        before = [(await b.token(other))[0].token_id]
        asked = await lost(Streams(workers, (a, b, d)), network, "lose")
        while not b.events[other].empty():
            before.append((await b.token(other))[0].token_id)
        tokens = before + [(await b.token(other))[0].token_id for _ in range(40)]
        assert b.events[asked.parts[1]].empty(), "no step has waited for the lost slice"
        await a.cancel(asked.parts[0])
        assert (await b.failure(asked.parts[1])).code == pb.FAILURE_CODE_DROPPED
        await d.cancel(asked.decode_id)
        await b.cancel(other)
        again = await d.reserve(beside)
        assert [(await d.token(again))[0].token_id for _ in tokens] == tokens
        await d.cancel(again)
        await assert_whole(*workers)


async def test_a_slow_worker_only_delays_the_first_token(patient: tuple[Workers, BadNetwork]) -> None:
    workers, network = patient
    network.fault, network.hits, network.suffered = "delay", 1000, 0
    async with AsyncExitStack() as stack:
        attach = [await stack.enter_async_context(attached(worker)) for worker in workers]
        streams, token_ids = Streams(workers, attach), prompt(300, seed=4)
        asked = await streams.share(token_ids, [(0, 64), (1, 128), (0, 192), (1, 300)], 2)
        assert await streams.answer(asked, 2) == await streams.alone(token_ids)
        assert network.suffered
        network.hits = 0
        await assert_whole(*workers)
        assert metrics(workers[1])["baton:prompt_parts_wait_seconds_total"] > 0


AT_DEADLINE = ("deadline", "deadline of two ranks", "stop")
EARLY = ("cancel", "broken lanes", "kill -9 of the engine", "kill -9 of the transfer process")
LONG = ("deadline of two ranks", "broken lanes", "kill -9 of the transfer process", "stop")


@pytest.mark.parametrize(
    "how", [pytest.param(x, marks=[pytest.mark.long] * (x in LONG)) for x in (*AT_DEADLINE, *EARLY)]
)
async def test_a_step_waits_for_a_lost_worker_no_longer_than_it_may(
    tmp_path: Path, how: str, request: pytest.FixtureRequest
) -> None:
    """No block is left behind. The last test of `patient`."""
    async with AsyncExitStack() as stack:
        if how in LONG or how in AT_DEADLINE:
            waiting = TWO_RANKS if "ranks" in how else {}
            started = behind_a_network(tmp_path, patient=how in EARLY, **waiting)
            workers, network = stack.enter_context(started)
        else:
            workers, network = request.getfixturevalue("patient")
        first = workers[0]
        a, b, d = [await stack.enter_async_context(attached(worker)) for worker in workers]
        streams = Streams(workers, (a, b, d))
        asked = await lost(streams, network, "cut" if how == "broken lanes" else "lose")
        if how == "cancel":
            await a.cancel(asked.parts[0])
        elif how == "stop":
            first.child("engine").send_signal(signal.SIGSTOP)
        elif "kill" in how:
            first.child("engine" if "engine" in how else "transfer").kill()
        failure = await b.failure(asked.parts[1])
        assert failure.code == pb.FAILURE_CODE_DROPPED, failure.message
        is_there = "kill" not in how and how != "stop"
        if is_there:
            await a.cancel(asked.parts[0])
        await d.cancel(asked.decode_id)
        await assert_whole(*workers[0 if is_there else 1 :])
        if how == "stop":
            first.child("engine").send_signal(signal.SIGCONT)


async def test_a_worker_shares_a_prompt_with_another_implementation(tmp_path: Path) -> None:
    """The other one has the first and the last range. It speaks the wire as docs/protocol.md has it."""
    given = {"role": "prefill", "engine": ENGINE, "secret": second_wire.SECRET, "kv_connector": "tcp"}
    with side_by_side(tmp_path, {0: given}) as started:
        worker = started[0].wait_ready()
        async with attached(worker, second_wire.SECRET) as stream:
            described = await stream.stub.Describe(pb.DescribeRequest())
            about = {
                "model": described.model_fingerprint,
                "layout": described.layout_fingerprint,
                "slot_bytes": 1 << 20,
                "incarnation": 77,
            }
            peer = second_wire.FakePrefill(**about)
            mine, theirs = os.urandom(16), os.urandom(16)
            addresses = {mine: (described.kv_address, described.incarnation), theirs: (peer.address, 77)}
            plan = [
                pb.PlanRange(
                    prefill_id=of, kv_address=addresses[of][0], incarnation=addresses[of][1], start=a, stop=b
                )
                for of, a, b in ((theirs, 0, 64), (mine, 64, 128), (theirs, 128, 200))
            ]
            asked = request(prompt(128, seed=3), PARAMS)
            submit = pb.SubmitPrefill(prefill_id=mine, request=asked, handover=True, plan=plan)
            await stream.send(prefill=submit)
            await asyncio.to_thread(share_with, peer, described, mine, theirs, about)
            assert (await stream.token(mine))[0].finish_reason
        assert worker.stop() == 0


def share_with(
    peer: second_wire.FakePrefill,
    described: pb.WorkerDescription,
    mine: bytes,
    theirs: bytes,
    about: dict[str, Any],
) -> None:
    """The other implementation, both ways at once."""
    opened = [peer.accept()]
    while len(opened) < 4:
        opened.append(peer.accept())
    [lane] = [lane for lane in opened if lane.number == 0]
    transfer, fetch = lane.expect(second_wire.FETCH)
    assert fetch == [second_wire.part_id(theirs, mine), 0, [[0, 64]], [64]]
    while not lane.granted:
        assert lane.read()[0] == second_wire.CREDIT
    port = int(described.kv_address.rpartition(":")[2])
    coming = second_wire.connect(port, who=second_wire.identity("receiver", **about))
    coming.say(second_wire.FETCH, [second_wire.part_id(mine, theirs), 0, [[64, 128]]], os.urandom(16))
    coming.say(second_wire.CREDIT, [8])
    kv = bytes(2 * 64 * 2 * 16 * 4)
    for layer in range(2):  # the worker sends a layer of its own, and waits for this one
        head = {"layer": layer, "head_count": 2, "token_count": 64, "seq": layer}
        lane.send(second_wire.KV, kv, transfer, **head)
        kind, mine_id, head, payload = coming.read()
        assert (kind, head["layer"], head["token_start"], len(payload)) == (4, layer, 64, len(kv))
    commit_id, [_, frames, size] = coming.expect(second_wire.COMMIT)
    assert (commit_id, frames, size) == (mine_id, 2, 2 * len(kv)), "before COMMIT of the other part"
    lane.say(second_wire.COMMIT, [[0], 2, 2 * len(kv)], transfer)
    assert lane.expect(second_wire.ACK)[0] == transfer
    coming.say(second_wire.ACK, [], commit_id)
    for each in (*opened, coming):
        each.sock.close()


def prefill_of(sender: Sender, name: bytes, **part: Any) -> PrefillAttempt:
    """`part`: fields of a `PartAttempt`. None: it computes the whole prompt."""
    fields: dict[str, Any] = {
        "shared": stand_in(Resources, sender=sender), "stream": None, "origin": Origin(name, "", "", 0.0),
        "tokens": 24, "handover": True, "awaited": False,
    }  # fmt: skip
    return PartAttempt(steps=stand_in(SplitSteps), **fields, **part) if part else PrefillAttempt(**fields)


def test_a_part_sends_nothing_that_rests_on_kv_which_did_not_come() -> None:
    """Not even before the step is over: KV and states of the layers after it."""
    sink, sent = SenderSink(TraceWriter(None, "")), list[tuple[Any, ...]]()
    prefill = prefill_of(stand_in(Sender), b"p", outputs={b"out": 24})
    arriving = stand_in(Receiver, wait_for_layer=lambda ids, layer, *_: layer < 1)
    sink.sender = stand_in(Sender, ready=lambda *of: sent.append(of))
    sink.split = SplitSteps(arriving, sink.sender, lambda: None)
    for layer in range(4):
        sink.layer_done(layer, {prefill: range(16, 24)})
    assert sent == [(b"out", 0, 16, 24), (b"out", 1, 16, 24)]
