"""KV between two servers, with real transfer processes. The test has vLLM's part: blocks, steps, layers."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from baton.kv_transfer import (
    FetchFailed,
    Injected,
    PagedKV,
    Released,
    TraceWriter,
    TransferConfig,
    TransferDeadlines,
    Transport,
    channel_pair,
)
from baton.kv_transfer.channel import Channel
from baton.kv_transfer.device.host_pool import HostPool
from baton.kv_transfer.endpoint.rank_copier import RankCopier
from baton.kv_transfer.protocol.messages import FirstToken
from baton.kv_transfer.wait import wait
from baton.vllm_worker.attachment import Attach, Close, Commit, FromConnector, Pool, ToConnector, WorkerLink
from baton.vllm_worker.caches import Caches, Heads, caches_of
from baton.vllm_worker.metadata import Chunk, ConnectorScheduler, Fetch, Pinned, Source, StepMetadata
from baton.vllm_worker.transfer_process import Settings, TransferProcess
from baton.vllm_worker.transfers import Transfers
from tests.forked import forking
from tests.vllm_worker.groups import attention, group
from tests.within import WITHIN

pytestmark = pytest.mark.all

LAYERS, BLOCKS, BLOCK, HEADS, DIM = 3, 40, 16, 2, 8
VOCABULARY = 500
KINDS = ToConnector, FromConnector
SECRET = b"a secret of these two servers"
FETCH = b"f" * 16


class Server:
    """The connector's half in the process with the model, and a cache with random KV."""

    alone = False
    """Behind a proxy, without a worker."""

    def __init__(self, name: str, seed: int, model: str = "model", timeout: float = 60) -> None:
        generator = torch.Generator().manual_seed(seed)
        shape = BLOCKS, HEADS, BLOCK, 2 * DIM
        caches = {f"layers.{i}.attn": torch.rand(shape, generator=generator) for i in range(LAYERS)}
        groups = [attention(*caches, block=BLOCK, heads=HEADS, dim=DIM)]
        found = caches_of(caches, groups, BLOCKS, Heads(HEADS))
        self.kv = found.kv
        self.start(found, name, model, timeout)

    def start(self, found: Caches, name: str, model: str = "model", timeout: float = 60) -> None:
        self.process = TransferProcess(self.kv, Settings(), name, model, SECRET)
        link = self.attached(self.kv)
        self.heartbeat = link.heartbeat
        worker, self.worker = (Channel(end, kind) for end, kind in zip(channel_pair(), KINDS, strict=True))
        self.transfers = Transfers(
            self.kv,
            found.tables,
            Transport.inherited(link.arenas, TraceWriter(None, "")),
            link.heartbeat,
            timeout=timeout,
            vocabulary=VOCABULARY,
            worker=None if self.alone else worker,
        )
        self.sent: set[str] = set()
        self.received: set[str] = set()

    def attached(self, kv: PagedKV) -> WorkerLink:
        attach = Attach(kv.rank, kv.layout, Pool(BLOCK, BLOCKS), "model")
        return WorkerLink.open(self.process.path, attach)

    def close(self) -> None:
        self.transfers.close()
        self.process.close()

    def told(self, count: int) -> list[Any]:
        """The next messages to the worker's engine process."""
        found: list[Any] = []
        while len(found) < count:
            assert wait([self.worker.fileno()], WITHIN), f"{found} have come"
            found += self.worker.receive()
        return found

    def step(self, metadata: StepMetadata, finished: set[str] | None = None) -> None:
        self.transfers.begin(metadata)
        for layer in range(LAYERS):
            self.transfers.saved(layer)
        self.idle(finished)

    def idle(self, finished: set[str] | None = None) -> None:
        sent, received = self.transfers.ended(finished or set())
        self.sent |= sent
        self.received |= received

    def of(self, blocks: list[int], start: int, stop: int) -> list[torch.Tensor]:
        """K and V of positions, of each layer."""
        return [
            row[blocks].flatten(0, 1)[start:stop].clone() for rows in self.kv.planes[0][0] for row in rows
        ]


class Alone(Server):
    alone = True


@pytest.fixture(scope="module", autouse=True)
def forked_processes() -> Iterator[None]:
    with forking():
        yield


@pytest.fixture
def servers() -> Iterator[tuple[Server, Server]]:
    prefill, decode = Server("prefill", 0), Server("decode", 1)
    yield prefill, decode
    for server in (prefill, decode):
        server.close()


def until(what: Callable[[], bool], *servers: Server) -> None:
    deadline = time.monotonic() + WITHIN
    while not what():
        assert time.monotonic() < deadline
        for server in servers:
            server.idle()
        time.sleep(0.002)


def fetch(request: str, there: Source, block_ids: list[int], start: int, stop: int) -> Fetch:
    return Fetch(request, decode_id_of(request), 1, there, [block_ids], start, stop)


def decode_id_of(request: str) -> bytes:
    return request.encode().ljust(16)


def source(server: Server, prefill_id: bytes) -> Source:
    return Source(*server.process.address, prefill_id)


def test_a_prompt_in_chunks_arrives_whole_and_touches_nothing_else(servers: tuple[Server, Server]) -> None:
    """The decode server has the first block, too."""
    prefill, decode = servers
    there, here, prefill_id, tokens = [7, 3, 30, 8, 12], [5, 1, 22, 6, 39], b"p" * 16, 77
    whole = prefill.of(there, 0, tokens)
    before = decode.of([b for b in range(BLOCKS) if b not in here], 0, BLOCKS * BLOCK)
    kept = decode.of(here, tokens, 5 * BLOCK)
    prefill.step(
        StepMetadata(
            opened={prefill_id: "a"},
            chunks=[Chunk(prefill_id, [there[:3]], 0, 40, tokens)],
        )
    )
    decode.step(StepMetadata(fetches=[fetch("b", source(prefill, prefill_id), here, 16, tokens)]))
    prefill.step(StepMetadata(chunks=[Chunk(prefill_id, [there], 40, tokens, tokens)]))
    prefill.step(StepMetadata(committed={prefill_id: 42}), {"a"})
    until(lambda: prefill.sent == {"a"} and decode.received == {"b"}, prefill, decode)
    assert decode.transfers.take_failed_blocks() == set()
    for got, sent in zip(decode.of(here, 16, tokens), whole, strict=True):
        assert torch.equal(got, sent[16:])
    after = decode.of([b for b in range(BLOCKS) if b not in here], 0, BLOCKS * BLOCK)
    assert all(map(torch.equal, before, after))
    assert all(map(torch.equal, kept, decode.of(here, tokens, 5 * BLOCK)))


def test_the_blocks_of_a_fetch_that_fails_are_named(servers: tuple[Server, Server]) -> None:
    prefill, decode = servers
    address, incarnation = prefill.process.address
    stale = Source(address, incarnation ^ 1, b"p" * 16)
    decode.step(StepMetadata(fetches=[fetch("b", stale, [4, 5, 6], 16, 40)]))
    until(lambda: decode.received == {"b"}, decode)
    assert decode.transfers.take_failed_blocks() == {5, 6}
    assert decode.transfers.take_failed_blocks() == set()


@pytest.mark.parametrize(
    "first", [FirstToken(VOCABULARY), FirstToken(3, -1.0, (VOCABULARY,), (-1.0,))], ids=str
)
def test_a_first_token_that_the_model_does_not_have(
    servers: tuple[Server, Server], first: FirstToken
) -> None:
    """vLLM, or the router, would crash. The request ends as one whose KV did not come."""
    prefill, decode = servers
    prefill_id = b"p" * 16
    chunk = Chunk(prefill_id, [[7, 3]], 0, 20, 20)
    prefill.step(StepMetadata(opened={prefill_id: "a"}, chunks=[chunk]))
    decode.step(StepMetadata(fetches=[fetch("b", source(prefill, prefill_id), [4, 5], 0, 20)]))
    prefill.step(StepMetadata(committed={prefill_id: None}), {"a"})
    prefill.worker.send(Commit(prefill_id, first))
    until(lambda: decode.received == {"b"}, prefill, decode)
    assert decode.transfers.take_failed_blocks() == {4, 5}
    assert decode.transfers.take_first_tokens() == {}
    [lost] = decode.told(1)
    assert lost == FetchFailed(
        decode_id_of("b"), f"COMMIT names token {VOCABULARY}, beyond the vocabulary of 500"
    )


def test_a_prompt_whose_kv_does_not_come_is_computed(servers: tuple[Server, Server]) -> None:
    """Half of its KV has come."""
    prefill, _ = servers
    decode = Alone("impatient", 3, timeout=0.5)
    prefill_id = b"p" * 16
    prefill.step(StepMetadata(opened={prefill_id: "a"}, chunks=[Chunk(prefill_id, [[1, 2]], 0, 20, 60)]))
    decode.step(StepMetadata(fetches=[fetch("b", source(prefill, prefill_id), [1, 2, 3, 4], 0, 60)]))
    until(lambda: decode.received == {"b"}, decode)
    assert decode.transfers.take_failed_blocks() == {1, 2, 3, 4}
    decode.close()


def test_in_a_worker_kv_may_come_as_late_as_its_prompt_is_computed(servers: tuple[Server, Server]) -> None:
    """Its prefill worker may have others to compute. The router says when it is too late."""
    prefill, _ = servers
    decode = Server("patient", 3, timeout=0.0)
    prefill_id = b"p" * 16
    prefill.step(StepMetadata(expected=[prefill_id]))
    decode.step(StepMetadata(fetches=[fetch("b", source(prefill, prefill_id), [1, 2], 0, 20)]))
    decode.idle()
    prefill.step(StepMetadata(opened={prefill_id: "a"}, chunks=[Chunk(prefill_id, [[1, 2]], 0, 20, 20)]))
    prefill.step(StepMetadata(committed={prefill_id: 42}), {"a"})
    until(lambda: decode.received == {"b"}, prefill, decode)
    assert decode.transfers.take_failed_blocks() == set()
    assert decode.transfers.take_first_tokens() == {"b": 42}
    decode.close()


def test_a_prefill_that_no_server_fetches_is_freed_and_late_fetches_fail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A client behind a proxy went away, or came late. Other KV is in the blocks by then."""
    settings = partial(TransferConfig, deadlines=TransferDeadlines(hold=0.2))
    monkeypatch.setattr("baton.vllm_worker.transfer_process.TransferConfig", settings)
    prefill, decode = Server("prefill", 0), Server("decode", 1)
    ids = iter([b"p" * 16, b"d" * 16])
    scheduler = ConnectorScheduler(new_id=lambda: next(ids))
    scheduler.address = prefill.process.address
    scheduler.expect("a", {"do_remote_decode": True}, 40)
    scheduler.scheduled("a", [[7, 3, 30]], 0, 40, anew=True)
    prefill.step(scheduler.take())
    stays, params = scheduler.finished("a", 42)
    assert stays, "vLLM keeps the blocks"
    prefill.step(scheduler.take(), {"a"})
    until(lambda: prefill.sent == {"a"}, prefill)
    assert prefill.told(1) == [Released(b"p" * 16, "deadline")]
    for rows in prefill.kv.planes[0][0]:
        for row in rows:
            row[[7, 3, 30]] = 9.0
    before = decode.of([5, 1, 22], 0, 48)
    scheduler.expect("b", params, 40)
    scheduler.allocated("b", [[5, 1, 22]], scheduler.to_fetch("b", 0))
    decode.step(scheduler.take())
    until(lambda: decode.received == {"b"}, decode)
    assert decode.told(1) == [FetchFailed(b"d" * 16, "gone")]
    assert decode.transfers.take_failed_blocks() == {5, 1, 22}, "vLLM computes them"
    assert decode.transfers.take_first_tokens() == {}
    assert all(map(torch.equal, decode.of([5, 1, 22], 0, 48), before))
    for server in (prefill, decode):
        server.close()


def test_blocks_of_an_aborted_prompt_are_free_when_nothing_reads_them(servers: tuple[Server, Server]) -> None:
    """The decode server waits for it, and computes the prompt then."""
    prefill, decode = servers
    prefill_id = b"p" * 16
    prefill.step(StepMetadata(opened={prefill_id: "a"}, chunks=[Chunk(prefill_id, [[1]], 0, 16, 60)]))
    decode.step(StepMetadata(fetches=[fetch("b", source(prefill, prefill_id), [1, 2, 3, 4], 0, 60)]))
    prefill.step(StepMetadata(aborted={prefill_id: "cancelled"}), {"a"})
    until(lambda: prefill.sent == {"a"} and decode.received == {"b"}, prefill, decode)
    assert decode.transfers.take_failed_blocks() == {1, 2, 3, 4}


def test_a_request_that_ends_while_it_is_fetched_gets_its_blocks_back(servers: tuple[Server, Server]) -> None:
    prefill, decode = servers
    prefill_id = b"p" * 16
    prefill.step(StepMetadata(opened={prefill_id: "a"}, chunks=[Chunk(prefill_id, [[1, 2]], 0, 20, 60)]))
    decode.step(StepMetadata(fetches=[fetch("b", source(prefill, prefill_id), [1, 2, 3, 4], 0, 60)]))
    decode.idle({"b"})
    until(lambda: decode.received == {"b"}, decode)
    prefill.step(StepMetadata(aborted={prefill_id: "cancelled"}), {"a"})
    until(lambda: prefill.sent == {"a"}, prefill)


@pytest.mark.parametrize("kind", [Server, lambda name, _: States(name), lambda name, n: Groups(name, n)])
@pytest.mark.parametrize("when", ["queued", "cached", "fetched", "late"])
def test_a_client_that_leaves_a_proxy_frees_the_prefill(
    monkeypatch: pytest.MonkeyPatch, kind: Callable[[str, int], Server], when: str
) -> None:
    """Before its decode server asks for the KV, or while the KV comes (vLLM #50425). And if the KV comes too
    late, or is cached."""
    settings = partial(TransferConfig, deadlines=TransferDeadlines(hold=1000, progress=1000))
    monkeypatch.setattr("baton.vllm_worker.transfer_process.TransferConfig", settings)
    monkeypatch.setattr(Server, "alone", True)
    prefill, decode = kind("prefill", 0), kind("decode", 1)
    there, here = ConnectorScheduler(), ConnectorScheduler()
    there.address = prefill.process.address
    blocks = [[7, 3, 30]] * (3 if isinstance(prefill, Groups) else 1)
    there.expect("a", {"do_remote_decode": True}, 40)
    there.scheduled("a", [list(each) for each in blocks], 0, 20, anew=True)
    prefill.step(there.take())
    there.scheduled("a", [[] for _ in blocks], 20, 20, anew=False)
    committed = there.take()
    _, params = there.finished("a", 42)
    committed.committed = there.take().committed
    if when in ("queued", "cached"):
        prefill.step(committed, {"a"})
    here.expect("b", params, 40)
    if when == "cached":
        here.allocated("b", blocks, 0)
    elif when != "queued":
        here.allocated("b", blocks, here.to_fetch("b", 0))
        decode.step(here.take())
    if when == "late":
        [fetching] = decode.transfers._fetches.values()
        fetching.deadline = time.monotonic()
    elif when != "cached":
        here.finished("b", None)
    decode.step(here.take(), set() if when in ("cached", "late") else {"b"})
    if when in ("fetched", "late"):
        until(lambda: decode.received == {"b"}, decode)
        prefill.step(committed, {"a"})
    until(lambda: prefill.sent == {"a"}, prefill, decode)
    for server in (prefill, decode):
        server.close()


def test_nothing_of_a_preempted_prompt_is_used(servers: tuple[Server, Server]) -> None:
    """Other KV is in them at once. What arrived before, or under the new name, is of the prompt."""
    prefill, decode = servers
    rng = random.Random(0)
    for turn in range(5):
        old, new, request = rng.randbytes(16), rng.randbytes(16), f"request {turn}"
        prefill.step(StepMetadata(opened={old: request}, chunks=[Chunk(old, [[1, 2, 3]], 0, 48, 60)]))
        decode.step(StepMetadata(fetches=[fetch(f"lost {turn}", source(prefill, old), [1, 2, 3, 4], 0, 60)]))
        prefill.transfers.preempt([old])
        for rows in prefill.kv.planes[0][0]:
            for row in rows:
                row[[1, 2, 3]] = float(turn)
        whole = prefill.of([9, 8, 7, 6], 0, 60)
        prefill.step(StepMetadata(opened={new: request}, chunks=[Chunk(new, [[9, 8, 7, 6]], 0, 60, 60)]))
        decode.step(
            StepMetadata(fetches=[fetch(f"got {turn}", source(prefill, new), [11, 12, 13, 14], 0, 60)])
        )
        prefill.step(StepMetadata(committed={new: 1}), {request})
        wanted = {f"lost {turn}", f"got {turn}"}
        until(lambda: decode.received >= wanted and request in prefill.sent, prefill, decode)  # noqa: B023
        assert decode.transfers.take_failed_blocks() == {1, 2, 3, 4}
        assert all(map(torch.equal, decode.of([11, 12, 13, 14], 0, 60), whole))


def test_a_preemption_waits_for_no_copy(
    servers: tuple[Server, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's step waits for it. The copy may be late, and other KV is in the blocks then."""
    prefill, decode = servers
    prefill_id, copying, goes_on = b"p" * 16, threading.Event(), threading.Event()
    gather = HostPool._gather

    def slowly(pool: HostPool, *arguments: Any) -> None:
        copying.set()
        assert goes_on.wait(WITHIN)
        gather(pool, *arguments)

    monkeypatch.setattr(HostPool, "_gather", slowly)
    prefill.step(StepMetadata(opened={prefill_id: "a"}, chunks=[Chunk(prefill_id, [[1, 2, 3]], 0, 48, 60)]))
    decode.step(StepMetadata(fetches=[fetch("b", source(prefill, prefill_id), [1, 2, 3, 4], 0, 60)]))
    assert copying.wait(WITHIN)
    prefill.transfers.preempt([prefill_id])
    for rows in prefill.kv.planes[0][0]:
        for row in rows:
            row[[1, 2, 3]] = 0
    goes_on.set()
    until(lambda: decode.received == {"b"}, prefill, decode)
    assert decode.transfers.take_failed_blocks() == {1, 2, 3, 4}
    assert not prefill.sent, "vLLM has its blocks already"


def test_servers_with_other_models_do_not_share_kv(servers: tuple[Server, Server]) -> None:
    prefill, _ = servers
    other = Server("other", 2, "another model")
    other.step(StepMetadata(fetches=[fetch("b", source(prefill, b"p" * 16), [4], 0, 16)]))
    until(lambda: other.received == {"b"}, other)
    assert other.transfers.take_failed_blocks() == {4}
    other.close()


def test_the_worker_hears_what_happens_without_a_step_of_vllm(servers: tuple[Server, Server]) -> None:
    """The FETCH comes before the prompt is scheduled."""
    prefill, decode = servers
    prefill_id = b"p" * 16
    decode.step(StepMetadata(fetches=[fetch("b", source(prefill, prefill_id), [1, 2], 0, 20)]))
    ticks = prefill.heartbeat.ticks
    prefill.step(StepMetadata(expected=[prefill_id]))
    assert prefill.heartbeat.ticks > ticks + LAYERS
    prefill.step(StepMetadata(opened={prefill_id: "a"}, chunks=[Chunk(prefill_id, [[1, 2]], 0, 20, 20)]))
    prefill.step(StepMetadata(committed={prefill_id: 42}), {"a"})
    [landed] = decode.told(1)
    assert isinstance(landed, Injected)
    assert (landed.decode_id, landed.stats.tokens) == (decode_id_of("b"), 20)
    assert prefill.told(1) == [Released(prefill_id, "acked")]
    decode.idle()
    assert decode.transfers.take_first_tokens() == {"b": 42}
    assert decode.transfers.take_first_tokens() == {}


def test_kv_that_comes_after_a_step_was_launched_is_known_before_the_next_one(
    servers: tuple[Server, Server],
) -> None:
    """And it is told once, not with a step. The failure of a fetch is told with a step."""
    prefill, decode = servers
    prefill_id = b"p" * 16
    prefill.step(StepMetadata(opened={prefill_id: "a"}, chunks=[Chunk(prefill_id, [[1, 2]], 0, 20, 20)]))
    lost = fetch("c", Source(*prefill.process.address[:1], 7, b"q" * 16), [3], 0, 16)
    decode.step(StepMetadata(fetches=[fetch("b", source(prefill, prefill_id), [1, 2], 0, 20), lost]))
    prefill.step(StepMetadata(committed={prefill_id: 42}), {"a"})
    assert decode.transfers.injected() == {}
    decode.told(2)
    decode.idle()
    assert (decode.received, decode.transfers.take_failed_blocks()) == ({"c"}, {3})
    assert decode.transfers.injected() == {"b": 42}
    assert decode.transfers.injected() == {}
    decode.idle()
    assert decode.received == {"c"}


def test_the_worker_sends_a_first_token(servers: tuple[Server, Server]) -> None:
    """Before vLLM's next step says that the prompt has ended."""
    prefill, decode = servers
    prefill_id = b"p" * 16
    prefill.step(StepMetadata(opened={prefill_id: "a"}, chunks=[Chunk(prefill_id, [[1, 2]], 0, 20, 20)]))
    decode.step(StepMetadata(fetches=[fetch("b", source(prefill, prefill_id), [1, 2], 0, 20)]))
    prefill.worker.send(Commit(prefill_id, FirstToken(42, -0.5, (42,), (-0.5,))))
    assert prefill.told(1) == [Released(prefill_id, "acked")]
    assert not prefill.sent
    prefill.step(StepMetadata(committed={prefill_id: None}), {"a"})
    assert prefill.sent == {"a"}
    until(lambda: decode.received == {"b"}, decode)
    assert decode.transfers.take_first_tokens() == {"b": 42}


def test_the_worker_closes_a_prefill_that_vllm_has_finished(servers: tuple[Server, Server]) -> None:
    prefill, decode = servers
    held, ending = b"h" * 16, b"e" * 16
    prefill.step(
        StepMetadata(
            opened={held: "a", ending: "b"},
            chunks=[Chunk(held, [[1, 2]], 0, 20, 20), Chunk(ending, [[3, 4]], 0, 20, 20)],
        )
    )
    decode.step(StepMetadata(fetches=[fetch("d", source(prefill, ending), [1, 2], 0, 20)]))
    prefill.step(StepMetadata(committed={held: 42}), {"a"})
    prefill.worker.send(Close(held))
    assert prefill.told(1) == [Released(held, "cancelled")]
    until(lambda: prefill.sent == {"a"}, prefill)
    prefill.worker.send(Close(ending, "finished"))
    assert prefill.told(1) == [Released(ending, "finished")]
    assert decode.told(1) == [FetchFailed(decode_id_of("d"), "finished")]
    prefill.step(StepMetadata(aborted={ending: "finished"}), {"b"})
    until(lambda: prefill.sent == {"a", "b"}, prefill)


def test_a_prompt_that_is_aborted_before_it_starts_is_not_waited_for(servers: tuple[Server, Server]) -> None:
    prefill, decode = servers
    prefill_id = b"p" * 16
    prefill.step(StepMetadata(expected=[prefill_id]))
    decode.step(StepMetadata(fetches=[fetch("b", source(prefill, prefill_id), [1, 2], 0, 20)]))
    prefill.step(StepMetadata(aborted={prefill_id: "cancelled"}))
    assert decode.told(1) == [FetchFailed(decode_id_of("b"), "cancelled")]


def test_the_worker_hears_of_a_preemption(servers: tuple[Server, Server]) -> None:
    prefill, _ = servers
    prefill_id = b"p" * 16
    prefill.step(StepMetadata(opened={prefill_id: "a"}, chunks=[Chunk(prefill_id, [[1]], 0, 16, 60)]))
    prefill.transfers.preempt([prefill_id])
    assert prefill.told(1) == [Released(prefill_id, "cancelled")]


@pytest.mark.parametrize("cached", [4, 8])
def test_a_prefix_comes_from_another_cache(servers: tuple[Server, Server], cached: int) -> None:
    """The source has one or both of two chunks. One block of the first is cached here."""
    source, here = servers
    there, blocks, names = [*range(20, 32)], [*range(2, 14)], [bytes([i]) * 16 for i in range(3)]
    stop = 64 + cached * BLOCK
    sent, first, rest = source.of(there, 80, 192), here.of(blocks, 0, 80), here.of(blocks, stop, 192)
    prefix = Fetch("f", FETCH, 0, Source(*source.process.address, b""), [blocks], 80, 192, names)
    here.step(StepMetadata(fetches=[prefix]))
    [wanted] = source.told(1)
    assert (wanted.chunks, wanted.first_chunk) == (tuple(names[1:]), 1)
    pin = Pinned("p", wanted.pin_id, [[*[0] * 4, *there[4 : 4 + cached]]], 64, stop)
    source.step(StepMetadata(pinned=[pin]))
    until(lambda: source.sent == {"p"} and here.received == {"f"}, source, here)
    assert isinstance(here.told(1)[0], Injected)
    assert here.transfers.take_first_tokens() == {"f": stop}
    assert here.transfers.take_failed_blocks() == set()
    for got, right in zip(here.of(blocks, 80, stop), sent, strict=True):
        assert torch.equal(got, right[: stop - 80])
    assert all(map(torch.equal, here.of(blocks, stop, 192), rest))
    assert all(map(torch.equal, here.of(blocks, 0, 80), first)), "what is cached is not written again"


def test_a_prefix_that_is_not_cached_any_more(servers: tuple[Server, Server]) -> None:
    source, here = servers
    place = Source(*source.process.address, b"")
    here.step(StepMetadata(fetches=[Fetch("f", FETCH, 0, place, [[2, 3, 4, 5]], 0, 64, [b"c" * 16])]))
    [wanted] = source.told(1)
    source.step(StepMetadata(pinned=[Pinned("p", wanted.pin_id, (), 0, 0)]))
    assert source.told(1) == [Released(wanted.pin_id, "gone")]
    assert here.told(1) == [FetchFailed(FETCH, "gone")]
    assert source.sent == {"p"}


def test_a_server_behind_a_proxy_shows_no_cache() -> None:
    source, here = Alone("prefill", 0), Server("decode", 1)
    try:
        place = Source(*source.process.address, b"")
        here.step(StepMetadata(fetches=[Fetch("f", FETCH, 0, place, [[2, 3, 4, 5]], 0, 64, [b"c" * 16])]))
        assert here.told(1) == [FetchFailed(FETCH, "gone")]
    finally:
        source.close()
        here.close()


class TwoRanks(Server):
    """An engine whose two ranks have a half of the heads each."""

    def __init__(self, name: str, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        shape, half = (BLOCKS, HEADS // 2, BLOCK, 2 * DIM), HEADS // 2
        names = [f"layers.{i}.attn" for i in range(LAYERS)]
        groups = [attention(*names, block=BLOCK, heads=half, dim=DIM)]
        both = [
            caches_of(
                {name: torch.rand(shape, generator=generator) for name in names}, groups, BLOCKS,
                Heads(HEADS, rank=rank, ranks=2),
            )
            for rank in range(2)
        ]  # fmt: skip
        self.ranks = [found.kv for found in both]
        self.process = TransferProcess(self.ranks[0], Settings(), name, "model", SECRET)
        with ThreadPoolExecutor() as pool:  # the ranks are processes
            first, second = pool.map(self.attached, self.ranks)
        [rank0] = second.arenas.ranks()
        self.copier = RankCopier(self.ranks[1], rank0, *second.arenas.map(), exports=True)
        self.transfers = Transfers(
            self.ranks[0], both[0].tables, Transport.inherited(first.arenas, TraceWriter(None, "")),
            first.heartbeat, timeout=60, vocabulary=VOCABULARY,
        )  # fmt: skip
        self.sent, self.received = set(), set()

    def step(self, metadata: StepMetadata, finished: set[str] | None = None) -> None:
        self.transfers.begin(metadata)
        for layer in range(LAYERS):
            self.transfers.saved(layer)
            if metadata.chunks:
                self.copier.layer_done(layer)
        self.idle(finished)

    def of(self, blocks: list[int], start: int, stop: int) -> list[torch.Tensor]:
        halves = [
            [row[blocks].flatten(0, 1)[start:stop] for rows in kv.planes[0][0] for row in rows]
            for kv in self.ranks
        ]
        return [torch.cat(both, dim=1) for both in zip(*halves, strict=True)]


@pytest.mark.parametrize("sender", ["one rank", "two ranks"])
def test_each_rank_copies_its_heads(servers: tuple[Server, Server], sender: str) -> None:
    two = TwoRanks("ranks", 7)
    prefill, decode = (two, servers[1]) if sender == "two ranks" else (servers[0], two)
    there, here, prefill_id, tokens = [7, 3, 30], [5, 1, 22], b"p" * 16, 40
    decode.step(StepMetadata(fetches=[fetch("b", source(prefill, prefill_id), here, 0, tokens)]))
    prefill.step(StepMetadata())
    for start, stop in ((0, 20), (20, tokens)):
        opened = {} if start else {prefill_id: "a"}
        prefill.step(StepMetadata(opened=opened, chunks=[Chunk(prefill_id, [there], start, stop, tokens)]))
    prefill.step(StepMetadata(committed={prefill_id: 42}), {"a"})
    until(lambda: prefill.sent == {"a"} and decode.received == {"b"}, prefill, decode)
    assert decode.transfers.take_failed_blocks() == set()
    assert all(map(torch.equal, decode.of(here, 0, tokens), prefill.of(there, 0, tokens)))
    two.close()


STATE_BYTES, PAGE_BYTES, SHARE_BYTES = 96, 128, 12
WINDOW = 20


class FakeSpec:
    """Of a kind that Baton has never heard of: its blocks have twice as many tokens."""

    block_size = 2 * BLOCK


def states(*names: str) -> Any:
    shapes = ((STATE_BYTES // 4,),)
    return group("MambaSpec", *names, block_size=64, shapes=shapes, dtypes=(torch.float32,))


class Groups(Server):
    """Layers with windows, of an unknown kind, and with states. Blocks are filled at random."""

    def __init__(self, name: str, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)

        def fill(*shape: int) -> torch.Tensor:
            return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)

        windows = attention(
            "layers.0.attn",
            block=BLOCK,
            heads=HEADS,
            dim=DIM,
            kind="SlidingWindowSpec",
            sliding_window=WINDOW,
        )
        unknown = SimpleNamespace(layer_names=["layers.1.new"], kv_cache_spec=FakeSpec())
        self.pages = fill(BLOCKS, PAGE_BYTES)
        self.blocks = fill(BLOCKS, 1, 2 * BLOCK, SHARE_BYTES)
        self.windows = torch.rand(BLOCKS, HEADS, BLOCK, 2 * DIM, generator=generator)
        caches = {
            "layers.0.attn": self.windows,
            "layers.1.new": self.blocks,
            "layers.2.mixer": self.pages.as_strided((BLOCKS, 1, 1, STATE_BYTES), (PAGE_BYTES, 1, 1, 1)),
        }
        groups = [windows, unknown, states("layers.2.mixer")]
        found = caches_of(caches, groups, BLOCKS, Heads(HEADS))
        self.kv = found.kv
        self.start(found, name)


class States(Server):
    """All layers have states alone, as those of Mamba-1."""

    def __init__(self, name: str) -> None:
        self.pages = torch.rand(BLOCKS, LAYERS, STATE_BYTES // 4)
        names = [f"layers.{i}.mixer" for i in range(LAYERS)]
        caches = {name: self.pages[:, i] for i, name in enumerate(names)}
        found = caches_of(caches, [states(*names)], BLOCKS, Heads(HEADS))
        self.kv = found.kv
        self.start(found, name)


class Hybrid(Server):
    """Layers with all tokens, with a window and with states, in blocks of one size."""

    def __init__(self, name: str) -> None:
        kinds: dict[str, Any] = {"block": BLOCK, "heads": HEADS, "dim": DIM}
        shape = BLOCKS, HEADS, BLOCK, 2 * DIM
        self.pages = torch.rand(BLOCKS, STATE_BYTES // 4)
        caches = {
            "layers.0.attn": torch.rand(shape), "layers.1.attn": torch.rand(shape),
            "layers.2.mixer": self.pages,
        }  # fmt: skip
        groups = [
            attention("layers.0.attn", **kinds),
            attention("layers.1.attn", **kinds, kind="SlidingWindowSpec", sliding_window=WINDOW),
            group(
                "MambaSpec", "layers.2.mixer", block_size=BLOCK, shapes=((STATE_BYTES // 4,),),
                dtypes=(torch.float32,),
            ),
        ]  # fmt: skip
        found = caches_of(caches, groups, BLOCKS, Heads(HEADS))
        self.kv = found.kv
        self.start(found, name)

    def keys(self, array: int, blocks: list[int], start: int, stop: int) -> torch.Tensor:
        return self.kv.planes[array][0][0][0][blocks].flatten(0, 1)[start:stop].clone()


@pytest.mark.parametrize("stop", [128, 192])
def test_a_prefix_comes_with_its_windows_and_states_or_not_at_all(stop: int) -> None:
    """vLLM has given blocks for 192 tokens, of which 64 are cached. The source has some of the others."""
    source, here = Hybrid("prefill"), Hybrid("decode")
    there = [[*[0] * 4, *range(20, 28)], [*[0] * 10, 28, 29], [*[0] * 11, 30]]
    blocks, names = (
        [[*range(2, 14)], [*[0] * 10, 14, 15], [*[0] * 11, 16]],
        [bytes([i]) * 16 for i in range(3)],
    )
    prefix = Fetch("f", FETCH, 0, Source(*source.process.address, b""), blocks, 64, 192, names)
    here.step(StepMetadata(fetches=[prefix]))
    [wanted] = source.told(1)
    source.step(StepMetadata(pinned=[Pinned("p", wanted.pin_id, there, 64, stop)]))
    [end] = here.told(1)
    until(lambda: source.sent == {"p"}, source, here)
    if stop < 192:
        assert end == FetchFailed(FETCH, "gone")
        assert here.transfers.take_first_tokens() == {}
    else:
        assert isinstance(end, Injected)
        until(lambda: here.received == {"f"}, here)
        for number, first in ((0, 64), (1, 173)):  # where what is missing, and the window, begin
            came = here.keys(number, blocks[number], first, 192)
            assert torch.equal(came, source.keys(number, there[number], first, 192))
        assert torch.equal(here.pages[16], source.pages[30])
    for server in (source, here):
        server.close()


@pytest.mark.parametrize("start", [0, 64])
def test_groups_of_all_kinds_travel(start: int) -> None:
    """Also one that is not known. Blocks behind a window, padding, and what is behind the prompt do not."""
    prefill, decode = Groups("prefill", 0), Groups("decode", 1)
    before = [x.clone() for x in (decode.windows, decode.blocks, decode.pages)]
    prefill_id, tokens = b"p" * 16, 85
    there = [[0, 7, 3, 30, 9, 2], [4, 5, 6], [0, 8]]
    here = [[0, 0, 0, 0, 22, 23], [24, 25, 26], [0, 27]]
    source_there = source(prefill, prefill_id)
    decode.step(StepMetadata(fetches=[Fetch("b", decode_id_of("b"), 1, source_there, here, start, tokens)]))
    for first, last in ((0, 40), (40, tokens)):
        opened = {} if first else {prefill_id: "a"}
        known = [blocks[: -(-last // size)] for blocks, size in zip(there, (16, 32, 64), strict=True)]
        prefill.step(StepMetadata(opened=opened, chunks=[Chunk(prefill_id, known, first, last, tokens)]))
    prefill.step(StepMetadata(committed={prefill_id: 42}), {"a"})
    until(lambda: prefill.sent == {"a"} and decode.received == {"b"}, prefill, decode)
    after = [decode.windows, decode.blocks, decode.pages]
    [keys, values], [sent_keys, sent_values] = decode.kv.planes[0][0][0], prefill.kv.planes[0][0][0]
    for rows, sent in ((keys, sent_keys), (values, sent_values)):
        assert torch.equal(rows[[22, 23]].flatten(0, 1)[2:21], sent[[9, 2]].flatten(0, 1)[2:21])
    fetched = slice(start // 32, 3)
    assert torch.equal(decode.blocks[here[1][fetched]], prefill.blocks[there[1][fetched]])
    assert torch.equal(decode.pages[27, :STATE_BYTES], prefill.pages[8, :STATE_BYTES])
    changed = [
        {i for i in range(BLOCKS) if not torch.equal(x[i], y[i])} for x, y in zip(before, after, strict=True)
    ]
    assert changed == [{22, 23}, set(here[1][fetched]), {27}]
    assert torch.equal(decode.pages[27, STATE_BYTES:], before[2][27, STATE_BYTES:])
    for server in (prefill, decode):
        server.close()


@pytest.mark.parametrize(("tokens", "slot"), [(1, 8), (64, 8), (85, 5)])
def test_states_alone_travel(tokens: int, slot: int) -> None:
    """A request has one slot, however long its prompt is."""
    prefill, decode = States("prefill"), States("decode")
    prefill_id, before, there = b"p" * 16, decode.pages.clone(), [[8, 5]]
    fetch = Fetch("b", decode_id_of("b"), 1, source(prefill, prefill_id), [[3, 3]], 0, tokens)
    decode.step(StepMetadata(fetches=[fetch]))
    chunk = Chunk(prefill_id, there, 0, tokens, tokens)
    prefill.step(StepMetadata(opened={prefill_id: "a"}, chunks=[chunk], committed={prefill_id: 42}), {"a"})
    until(lambda: prefill.sent == {"a"} and decode.received == {"b"}, prefill, decode)
    before[3] = prefill.pages[slot]
    assert torch.equal(decode.pages, before)
    for server in (prefill, decode):
        server.close()


def test_a_worker_ends_a_request_of_several_groups_without_kv() -> None:
    """vLLM knows no way to fail it. It keeps the request until the worker has aborted it."""
    decode = Groups("decode", 1)
    address, incarnation = decode.process.address
    gone = Source(address, incarnation ^ 1, b"p" * 16)
    decode.step(StepMetadata(fetches=[Fetch("b", decode_id_of("b"), 1, gone, [[1, 2], [3], [4]], 0, 20)]))
    [failed] = decode.told(1)
    assert isinstance(failed, FetchFailed)
    decode.idle()
    assert (decode.received, decode.transfers.take_failed_blocks(), decode.transfers.take_failed()) == (
        set(), set(), set(),
    )  # fmt: skip
    decode.idle({"b"})
    assert decode.received == {"b"}
    decode.close()
