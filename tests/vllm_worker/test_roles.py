"""Prefills and decodes over a vLLM that the test plays: admission, tokens, reports, ends."""

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from typing import Any, ClassVar, TypeVar

import msgspec
import pytest
from msgspec import structs

from baton.engine import EngineConfig, EngineRequest, Image
from baton.kv_names import extend_names, salted
from baton.kv_names.cache_kinds import Window
from baton.kv_transfer import Closed, ContentWanted, FetchFailed, Injected, InjectStats, Released
from baton.kv_transfer.protocol.messages import FirstToken
from baton.rpc import worker_pb2 as pb
from baton.vllm_worker.adapters import Adapters
from baton.vllm_worker.attachment import Close, Commit, FromConnector, Pool
from baton.vllm_worker.cached_blocks import CachedBlocks
from baton.vllm_worker.engine import EngineGone
from baton.vllm_worker.metadata import REJECTED, Blind, BlockTable, Started
from baton.vllm_worker.roles import VLLMRoles
from baton.worker import messages
from baton.worker.engine_process.attempt import AttemptTable
from baton.worker.engine_process.engine_attempt import EngineAttempt
from baton.worker.engine_process.start import EngineProcessConfig
from baton.worker.messages import FromEngine
from tests.layouts import kv_layout
from tests.router_messages import (
    Asked,
    cancel,
    failures_told,
    retarget,
    submit_decode,
    submit_prefill,
    tokens_told,
    told,
)
from tests.router_messages import work as asked_work
from tests.stand_in import stand_in
from tests.vllm_worker.played import played

pytestmark = pytest.mark.all

OURS, THEIRS = 1, 2  # incarnations
M = TypeVar("M")
FINISH = ("", "stop", "length")
POOL = Pool(16, 11, tables=(BlockTable(16),))
FIRST = FirstToken(5, -1.5, (6,), (-0.5,))
STATS = InjectStats(100, 20, 1, *(0.0 for _ in range(7)))


def output(tokens: Sequence[int], reason: str | None = None) -> Any:
    completion = played(
        "vllm/outputs.py", "CompletionOutput",
        token_ids=tokens, finish_reason=reason, logprobs=None, stop_reason=None,
    )  # fmt: skip
    return played(
        "vllm/outputs.py", "RequestOutput",
        outputs=[completion], prompt_logprobs=None, num_cached_tokens=0, metrics=None,
    )  # fmt: skip


class Worker:
    """Blocks of 16 tokens, 10 of them, and 3 seats."""

    def __init__(self, pool: Pool = POOL) -> None:
        self.sent: list[FromEngine] = []
        self.told: list[Any] = []
        self.computed: list[bytes] = []
        self.fields: dict[bytes, dict[str, Any]] = {}
        self.images: dict[bytes, tuple[Image, ...]] = {}
        self.priorities: dict[bytes, int] = {}
        self.fetches: dict[bytes, bytes] = {}
        self._outputs: defaultdict[bytes, asyncio.Queue[Any]] = defaultdict(asyncio.Queue)
        self.aborted: list[bytes] = []
        self.running: dict[bytes, dict[str, Any]] = {}  # requests in vLLM: their fields
        self.is_gone = False
        self.attempts = AttemptTable[EngineAttempt](self.sent.append)
        self.cached = CachedBlocks(b"root")
        self.adapters = stand_in(Adapters, on_device=[], move_seconds=0.0)
        self.pins: dict[bytes, dict[str, Any]] = {}
        self.roles = VLLMRoles(
            self.attempts, self.sent.append,
            played(
                "vllm_worker/llm.py", "VLLM",
                generate=self.generate, pin=self.pin, adapters=self.adapters,
            ),
            self, self.told.append, self.cached,
            pool,
            stand_in(
                EngineProcessConfig, incarnation=OURS, rank_arenas=(),
                engine=stand_in(EngineConfig, max_num_seqs=3, enable_prefix_caching=True),
            ),
            messages.EngineReady(
                pb.WorkerDescription(
                    num_blocks=11, block_size=16, max_model_len=200, content_root=b"root",
                    exchanges_prefixes=True, vocab_size=100,
                ),
                kv_layout(1, 1, 8, "float32"),
            ),
        )  # fmt: skip

    def computing(self, ids: Iterable[bytes]) -> None:
        self.computed = list(ids)

    def gone(self) -> None:
        self.is_gone = True

    def soon(self) -> None:
        """The test does so."""

    async def pin(self, pin_id: bytes, params: dict[str, Any]) -> None:
        self.pins[pin_id] = params

    async def generate(
        self, request: EngineRequest, fields: dict[str, Any], priority: int
    ) -> AsyncGenerator[Any, None]:
        self.fields[request.id], self.priorities[request.id] = fields, priority
        self.images[request.id] = request.images
        if (fetch := fields["extra_args"]["kv_transfer_params"].get("decode_id")) is not None:
            self.fetches[request.id] = bytes.fromhex(fetch)
        self.running[request.id] = fields
        try:
            while True:
                each = await self._outputs[request.id].get()
                if isinstance(each, Exception):
                    raise each
                yield each
                if each.outputs[0].finish_reason:
                    return
        except (asyncio.CancelledError, GeneratorExit):
            self.aborted.append(request.id)
            raise
        finally:
            del self.running[request.id]
            self._outputs.pop(request.id, None)

    async def says(self, request_id: bytes, *outputs: Any) -> None:
        for each in outputs:
            self._outputs[request_id].put_nowait(each)
        await self.settle()

    def heard(self, message: FromConnector) -> None:
        """The connector says this. It names a fetch as it was told to. Each prefill has started before it is
        released."""
        if isinstance(message, Released):
            self.roles.heard(Started(message.prefill_id))
        if isinstance(message, Injected | FetchFailed | Closed | Blind):
            fetch = self.fetches.get(message.decode_id, message.decode_id)
            message = structs.replace(message, decode_id=fetch)
        self.roles.heard(message)
        self._turn()

    def handle(self, message: Any) -> None:
        self.roles.handle(message)
        self._turn()

    def _turn(self) -> None:
        self.roles.move_kv()
        self.attempts.flush()

    async def settle(self) -> None:
        for _ in range(10):
            await asyncio.sleep(0)
            self._turn()

    def of(self, kind: type[M]) -> list[M]:
        return [message for message in self.sent if isinstance(message, kind)]

    def tokens(self) -> list[tuple[int, int, str]]:
        said = tokens_told(self.sent)
        return [(token.output_index, token.token_id, FINISH[token.finish_reason]) for token in said]

    def failures(self) -> list[pb.FailureCode]:
        return [failure.code for failure in failures_told(self.sent)]

    @property
    def idle(self) -> bool:
        return self.roles.status(0).told.idle


def work(attempt_id: bytes, tokens: int = 20, output_ids: Sequence[int] = (), **params: Any) -> Asked:
    wanted: dict[str, Any] = {"temperature": 1.0, "ignore_eos": False} | params
    return asked_work(attempt_id, output_ids=output_ids, prompt_ids=[1] * tokens, **wanted)


def name(letter: str) -> bytes:
    return letter.encode() * 16


P, D, E = name("p"), name("d"), name("e")


def extended(tokens: int) -> list[bytes]:
    """The names of the chunks of the prompts of `work`."""
    names: list[bytes] = []
    extend_names(names, [1] * tokens, tokens, salted(b"root", b""))
    return names


def source(incarnation: int = THEIRS) -> pb.PrefillSource:
    return pb.PrefillSource(prefill_id=P, kv_address="10.0.0.5:7002", incarnation=incarnation, attempt=3)


@pytest.fixture
async def worker() -> Worker:
    return Worker()


async def test_what_vllm_has_cached_does_not_wait(worker: Worker) -> None:
    names: list[bytes] = []
    extend_names(names, [1] * 130, 130, salted(b"root", b""))
    worker.cached.chunks.add(b"second", names[1:])
    worker.handle(submit_decode(7, work(P, 130), None))
    assert worker.roles.status(0).stats.tokens_waiting == 130, "its beginning is gone"
    worker.cached.chunks.add(b"first", names[:1])
    worker.handle(submit_decode(8, work(D, 130), None))
    assert worker.roles.status(0).stats.tokens_waiting == 130 + 2
    assert worker.roles.status(0).waiting_of_streams == {7: 130, 8: 2}
    for attempt_id in (P, D):
        await worker.says(attempt_id, output([5], "length"))
    assert worker.idle


async def test_a_handover_is_held_until_nothing_reads_it(worker: Worker) -> None:
    worker.handle(submit_prefill(7, work(P), handover=True, report_start=True))
    await worker.settle()
    assert not told(worker.sent), "it may wait in vLLM's queue"
    worker.heard(Started(P))
    assert told(worker.sent)[0].prefill_started.prefill_id == P
    assert worker.fields[P]["max_tokens"] == 1
    assert worker.fields[P]["extra_args"]["kv_transfer_params"] == {
        "do_remote_decode": True,
        "prefill_id": P.hex(),
        "worker_commits": True,
        "due": math.inf,
        "gap_cost": 0.0,
        "uncached": 20,
    }
    assert worker.computed == [P]
    assert worker.roles.status(0).stats.tokens_waiting == 20
    await worker.says(P, output([5], "length"))
    assert worker.tokens() == [(0, 5, "")], "the decode worker goes on"
    assert worker.of(messages.Prefilled)
    assert worker.computed == []
    assert worker.roles.status(0).stats.held_prefills == 1
    worker.heard(Released(P, "acked"))
    assert worker.idle
    assert not worker.failures()


async def test_the_decode_worker_gets_log_probabilities_too(worker: Worker) -> None:
    """Its router may hear of the first token only from there, if this worker ends."""
    worker.handle(submit_prefill(7, work(P, logprobs=1), handover=True))
    await worker.settle()
    flat = played(
        "vllm/logprobs.py", "FlatLogprobs",
        start_indices=[0], end_indices=[2], token_ids=[5, 6], logprobs=[-1.5, -0.5],
    )  # fmt: skip
    sampled = output([5], "length")
    sampled.outputs[0].logprobs = flat
    await worker.says(P, sampled)
    assert worker.told == [Commit(P, FIRST)]
    assert worker.tokens() == [(0, 5, "")]


@pytest.mark.parametrize("first", [("stop", "stop"), ("length", "length")])
async def test_a_prefill_whose_token_is_the_last_is_closed(worker: Worker, first: tuple[str, str]) -> None:
    last = 1 if first[0] == "length" else 8
    worker.handle(submit_prefill(7, work(P, max_tokens=last), handover=True))
    await worker.says(P, output([5], first[0]))
    assert worker.tokens() == [(0, 5, first[1])]
    assert worker.told == [Close(P, "finished")]
    worker.heard(Released(P, "finished"))
    assert worker.idle
    assert not worker.failures(), "its router has the token"


@pytest.mark.parametrize("reason", ["acked", "finished"])
async def test_freed_before_vllms_answer(worker: Worker, reason: str) -> None:
    """The connector's socket may be faster than vLLM's."""
    worker.handle(submit_prefill(7, work(P), handover=True))
    await worker.settle()
    worker.heard(Released(P, reason))
    assert not worker.idle
    await worker.says(P, output([5], "length"))
    assert worker.tokens() == [(0, 5, "")]
    assert worker.idle


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        ("deadline", pb.FAILURE_CODE_DROPPED),
        ("reused", pb.FAILURE_CODE_INVALID),
        ("cancelled", pb.FAILURE_CODE_DROPPED),
    ],
)
async def test_a_prefill_that_lost_its_blocks_is_dropped(
    worker: Worker, reason: str, code: pb.FailureCode
) -> None:
    """As when vLLM preempts it before its token."""
    worker.handle(submit_prefill(7, work(P), handover=True))
    await worker.settle()
    worker.heard(Released(P, reason))
    await worker.settle()
    assert worker.failures() == [code]
    assert worker.aborted == [P]
    assert worker.idle


async def test_a_prompt_counts_though_its_router_needs_no_answer(worker: Worker) -> None:
    """The decode worker may have a token before this process has vLLM's answer."""
    worker.handle(submit_prefill(7, work(P), handover=True))
    await worker.settle()
    worker.heard(Released(P, "acked"))
    worker.handle(cancel(7, P))
    await worker.settle()
    assert not worker.aborted
    computed = output([5], "length")
    computed.num_cached_tokens = 16
    await worker.says(P, computed)
    counts = worker.attempts.counts
    assert (counts.computed_prompt_tokens, counts.prompt_tokens_cached) == (4, 16)
    assert not worker.tokens()
    assert worker.idle


async def test_a_decode_fetches_and_repeats_the_first_token(worker: Worker) -> None:
    worker.handle(submit_decode(7, work(D, prompt_logprobs=1), source()))
    assert [message.reserved.decode_id for message in told(worker.sent)] == [D]
    assert worker.roles.status(0).stats.reservations == 1
    await worker.settle()
    assert "prompt_logprobs" not in worker.fields[D]
    params = worker.fields[D]["extra_args"]["kv_transfer_params"]
    assert (params["remote_host"], params["remote_port"], params["attempt"]) == ("10.0.0.5", 7002, 3)
    assert params["remote_request_id"] == P.hex()
    await worker.says(D, output([6, 7]), output([8], "stop"))
    assert not worker.tokens(), "vLLM's socket may be faster than the connector's"
    worker.heard(Injected(D, FIRST, STATS))
    await worker.settle()
    assert worker.tokens() == [(0, 5, ""), (1, 6, ""), (2, 7, ""), (3, 8, "stop")]
    logprobs = tokens_told(worker.sent)[0].logprobs
    assert (logprobs.logprob, [*logprobs.top_ids], [*logprobs.top_logprobs]) == (-1.5, [6], [-0.5])
    assert len(worker.of(messages.SecondToken)) == len(worker.of(messages.KVInjected)) == 1
    [decoded] = worker.of(messages.Decoded)
    assert decoded.output_tokens == 3
    assert not worker.of(messages.Prefilled)
    assert worker.attempts.counts.generation_tokens == 3
    assert worker.idle


async def test_a_decode_without_a_source_computes_the_prompt(worker: Worker) -> None:
    worker.handle(submit_decode(7, work(D, output_ids=[4, 4]), None))
    await worker.says(D, output([5]), output([6], "length"))
    assert worker.fields[D]["extra_args"]["kv_transfer_params"] == {
        "due": -math.inf,  # its stream has begun
        "gap_cost": 0.0,
        "uncached": 22,
    }
    assert worker.tokens() == [(2, 5, ""), (3, 6, "length")]
    assert worker.of(messages.Prefilled)
    assert worker.attempts.counts.computed_prompt_tokens == 22


class TestPrefixes:
    """Prompts of which another worker has two chunks."""

    PLACE = pb.ContentSource(kv_address="10.0.0.5:7002", incarnation=THEIRS)
    NAMES: ClassVar = extended(130)

    @staticmethod
    def fetch_of(worker: Worker) -> bytes:
        """Its id: vLLM has no other request."""
        [fetch] = worker.fields
        return fetch

    @pytest.fixture(autouse=True)
    async def asked(self, worker: Worker) -> None:
        worker.handle(submit_prefill(7, work(P, 130), handover=True, content=self.PLACE))
        worker.handle(submit_decode(8, work(D, 130), None, self.PLACE))
        await worker.settle()

    async def test_prompts_wait_for_one_fetch(self, worker: Worker) -> None:
        """It is a request before all others, with the prefix and a token more."""
        fetch = self.fetch_of(worker)
        assert worker.priorities[fetch] < -(1 << 40)
        params = worker.fields[fetch]["extra_args"]["kv_transfer_params"]
        assert params["chunks"] == [each.hex() for each in self.NAMES]
        assert (params["remote_host"], params["decode_id"]) == ("10.0.0.5", fetch.hex())
        worker.heard(Injected(fetch, FIRST, structs.replace(STATS, tokens=128, injected_at=1.0)))
        await worker.settle()
        assert worker.fields.keys() == {fetch, P, D}, "vLLM has them, and caches the prefix first"
        await worker.says(fetch, output([5], "length"))
        computed = output([5], "length")
        computed.num_cached_tokens = 128
        await worker.says(P, computed)
        await worker.says(D, output([5], "length"))
        worker.heard(Released(P, "acked"))
        counts = worker.attempts.counts
        assert counts.prompt_tokens_fetched == 128, "vLLM says that the decode had nothing cached"
        assert counts.fetched_by_tier[0] == 128
        assert worker.roles.status(0).told.prefix_links
        assert worker.idle
        assert not worker.failures()

    @pytest.mark.parametrize("end", ["failed", "closed", "vllm", "late"])
    async def test_a_prefix_that_does_not_come_is_computed(
        self, worker: Worker, end: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fetch = self.fetch_of(worker)
        match end:
            case "failed":
                worker.heard(FetchFailed(fetch, "gone"))
            case "closed":
                worker.heard(Closed(fetch))
            case "vllm":
                await worker.says(fetch, output([], "error"))
            case "late":
                late = time.monotonic() + 60
                monkeypatch.setattr("baton.worker.engine_process.prefix_fetches.time.monotonic", lambda: late)
                worker.roles.move_kv()
        await worker.settle()
        assert {P, D} <= worker.fields.keys()
        assert worker.attempts.counts.fetched_by_tier[0] == 0
        assert worker.aborted == ([] if end == "vllm" else [fetch]), "vLLM may not know that it failed"

    async def test_a_fetch_that_has_just_ended_is_cancelled(self, worker: Worker) -> None:
        """Its end is heard, and the roles are not told of it yet."""
        fetch = self.fetch_of(worker)
        worker.roles.heard(Injected(fetch, FIRST, structs.replace(STATS, tokens=128, injected_at=1.0)))
        for stream, attempt_id in ((7, P), (8, D)):
            worker.roles.handle(cancel(stream, attempt_id))
        await worker.says(fetch, output([5], "length"))
        assert worker.fields.keys() == {fetch}
        assert worker.idle

    async def test_a_fetch_ends_with_the_last_prompt_that_waits(self, worker: Worker) -> None:
        fetch = self.fetch_of(worker)
        worker.handle(cancel(7, P))
        await worker.settle()
        assert not worker.aborted
        worker.handle(cancel(8, D))
        await worker.settle()
        assert worker.aborted == [fetch]
        assert worker.idle


@pytest.mark.parametrize(("known", "chunks"), [(0, 0), (1, 1), (2, 2), (9, 2)])
async def test_with_windows_a_prefix_ends_where_its_source_is_known_to_have_it(
    known: int, chunks: int
) -> None:
    """vLLM gives blocks of windows before the source says what it has."""
    tables = BlockTable(16), BlockTable(16, window=Window(17, tile=1))
    worker = Worker(Pool(16, 11, 2, ((16, 2),), tables=tables))
    place = pb.ContentSource(kv_address="10.0.0.5:7002", incarnation=THEIRS, chunks=known)
    worker.handle(submit_prefill(7, work(P, 130), handover=True, content=place))
    await worker.settle()
    [(first, fields)] = worker.fields.items()
    params = fields["extra_args"]["kv_transfer_params"]
    assert params.get("chunks", []) == [each.hex() for each in extended(130)[:chunks]]
    assert (first == P) == (not chunks), "it is computed"
    worker.handle(cancel(7, P))
    await worker.settle()


async def test_the_cache_is_shown_to_other_workers(worker: Worker) -> None:
    """vLLM's scheduler keeps blocks that are cached."""
    hashes = [bytes([i]) * 32 for i in range(8)]
    event = {"block_hashes": hashes, "parent_block_hash": None, "token_ids": [1] * 128, "block_size": 16}
    worker.cached.changed(msgspec.msgpack.encode([0.0, [{"type": "BlockStored", **event}], None]))
    names = extended(192)
    worker.heard(ContentWanted(P, tuple(names[1:]), 1))
    await worker.settle()
    shown = {"pin_id": P.hex(), "pinned": [x.hex() for x in hashes[4:]], "first_chunk": 1, "chunks": 2}
    assert worker.pins == {P: shown}
    assert not worker.idle, "the connector reads blocks"
    worker.roles.heard(Released(P, "acked"))
    worker._turn()
    assert worker.idle
    worker.heard(ContentWanted(D, tuple(names[2:]), 2))
    assert worker.told == [Close(D, "gone")]


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        ("gone", pb.FAILURE_CODE_KV_FAILED),
        ("closed", pb.FAILURE_CODE_KV_FAILED),
        ("finished", pb.FAILURE_CODE_FINISHED),
    ],
)
async def test_kv_that_does_not_come(worker: Worker, reason: str, code: pb.FailureCode) -> None:
    """The router may name another prefill. vLLM is told to end the request: it may not know."""
    worker.handle(submit_decode(7, work(D), source()))
    await worker.settle()
    worker.heard(Closed(D) if reason == "closed" else FetchFailed(D, reason))
    [failure] = failures_told(worker.sent)
    assert failure.code == code
    await worker.settle()
    assert worker.aborted == [D]
    assert worker.idle == (reason == "finished")
    worker.handle(cancel(7, D))
    await worker.settle()
    assert worker.idle


@pytest.mark.parametrize(
    ("lost", "unheard"), [(False, False), (True, False), (False, True)], ids=["under way", "lost", "unheard"]
)
async def test_the_kv_of_another_prefill_is_fetched(worker: Worker, lost: bool, unheard: bool) -> None:
    """Its output has become longer meanwhile. What the connector says of the first fetch has no effect."""
    worker.handle(submit_decode(7, work(D), source()))
    await worker.settle()
    first = worker.fetches[D]
    if lost:
        worker.heard(FetchFailed(D, "gone"))
    elif unheard:
        worker.roles.heard(FetchFailed(first, "gone"))  # not by the role
    other = source()
    other.prefill_id = E
    worker.roles.handle(retarget(7, D, other, [4, 4]))
    await worker.settle()
    assert worker.aborted == [D]
    params = worker.fields[D]["extra_args"]["kv_transfer_params"]
    assert params["remote_request_id"] == E.hex()
    assert params["due"] == -math.inf
    worker.roles.heard(FetchFailed(first, "cancelled"))
    await worker.says(D, output([6], "stop"))
    worker.heard(Injected(D, FIRST, STATS))
    await worker.settle()
    assert worker.tokens() == [(2, 5, ""), (3, 6, "stop")]
    assert worker.failures() == [pb.FAILURE_CODE_KV_FAILED] * lost
    assert worker.idle


async def test_a_grammar_that_rejects_the_first_token(worker: Worker) -> None:
    """That of another engine, or of a peer that is wrong. vLLM can only end the output."""
    worker.handle(submit_decode(7, work(D), source()))
    await worker.settle()
    worker.heard(Injected(D, FIRST, STATS))
    ended = output([0], "stop")
    ended.outputs[0].stop_reason = REJECTED
    await worker.says(D, ended)
    assert worker.failures() == [pb.FAILURE_CODE_HANDED_BACK]
    assert worker.tokens() == [(0, 5, "")], "that of the prefill"
    assert worker.idle


async def test_decodes_are_refused_if_their_blocks_do_not_fit(worker: Worker) -> None:
    """A held prefill has blocks, too. 20 and 100 tokens, and one more each, are 2 and 7 of 10 blocks."""
    worker.handle(submit_prefill(7, work(P), handover=True))
    await worker.says(P, output([5], "length"))
    worker.handle(submit_decode(7, work(D, 100), source()))
    worker.handle(submit_decode(7, work(E), source()))
    assert worker.failures() == [pb.FAILURE_CODE_NO_ROOM]
    assert worker.attempts.counts.no_room == 1
    worker.heard(Released(P, "acked"))
    worker.handle(submit_decode(7, work(E), source()))
    assert worker.failures() == [pb.FAILURE_CODE_NO_ROOM]


async def test_decodes_are_refused_if_vllm_runs_as_many(worker: Worker) -> None:
    """Its blocks would fit, but vLLM would not start it. Prompts for other workers end soon."""
    worker.handle(submit_prefill(7, work(P), handover=True))
    for letter in "abc":
        worker.handle(submit_decode(7, work(name(letter)), source()))
    assert not worker.failures()
    worker.handle(submit_decode(7, work(D), source()))
    assert worker.failures() == [pb.FAILURE_CODE_NO_ROOM]
    assert worker.attempts.counts.no_room == 1
    worker.handle(cancel(7, name("a")))
    await worker.settle()
    worker.handle(submit_decode(7, work(E), source()))
    assert len(worker.failures()) == 1


async def test_blocks_of_a_common_prefix_count_once(worker: Worker) -> None:
    """130 tokens and one more are 9 blocks of 10. Of these 8 are shared."""
    worker.handle(submit_decode(7, work(D, 130), source()))
    other = work(P, 130)
    other.request.cache_salt = b"of another tenant"
    worker.handle(submit_decode(7, other, source()))
    assert worker.failures() == [pb.FAILURE_CODE_NO_ROOM]
    worker.handle(submit_decode(7, work(E, 130), source()))
    assert worker.failures() == [pb.FAILURE_CODE_NO_ROOM]
    assert [each.WhichOneof("kind") for each in told(worker.sent)] == ["reserved", "failed", "reserved"]


async def test_a_decode_does_not_walk_the_prefixes_of_others(worker: Worker) -> None:
    """There may be hundreds of thousands of chunks, and tokens wait for the event loop."""
    worker.handle(submit_decode(7, work(D, 130), source()))
    decode = worker.roles._engine.lives[D]

    class Chunks(list[bytes]):
        walks = 0

        def __iter__(self) -> Iterator[bytes]:
            self.walks += 1
            return super().__iter__()

    decode.chunks = chunks = Chunks(decode.chunks)
    worker.handle(submit_decode(7, work(E, 130), source()))
    assert (worker.failures(), chunks.walks) == ([], 0)
    worker.handle(messages.Detached(7))
    await worker.settle()
    assert worker.idle
    other = work(P, 130)
    other.request.cache_salt = b"of another tenant"
    worker.handle(submit_decode(8, other, source()))
    assert not worker.failures(), "what has left does not count"


async def test_decodes_go_first_in_vllms_queue(worker: Worker) -> None:
    worker.handle(submit_prefill(7, work(P), handover=True))
    worker.handle(submit_decode(7, work(D), source()))
    retried = work(E)
    retried.request.retried = True
    worker.handle(submit_decode(7, retried, None))
    await worker.settle()
    assert worker.priorities[D] < worker.priorities[E] < worker.priorities[P]


async def test_a_prefill_of_this_worker_is_taken(worker: Worker) -> None:
    """Its prefix is in vLLM's cache, and its blocks come back."""
    worker.handle(submit_decode(7, work(D), source(OURS)))
    assert worker.failures() == [pb.FAILURE_CODE_HANDED_BACK]
    worker.handle(submit_prefill(7, work(P), handover=True))
    await worker.says(P, output([5], "length"))
    worker.handle(submit_decode(7, work(D), source(OURS)))
    assert worker.told == [Commit(P, FirstToken(5)), Close(P, "gone")]
    assert not worker.fields.get(D), "its blocks come back first"
    worker.heard(Released(P, "gone"))
    await worker.says(D, output([6], "stop"))
    assert worker.fields[D]["extra_args"]["kv_transfer_params"] == {
        "first_token": 5,
        "due": math.inf,
        "gap_cost": 0.0,
        "uncached": 1,
    }
    assert worker.tokens() == [(0, 5, ""), (0, 5, ""), (1, 6, "stop")]
    assert worker.failures() == [pb.FAILURE_CODE_HANDED_BACK]
    assert worker.idle


@pytest.mark.parametrize("ends", [cancel(7, D), messages.Detached(7)], ids=["cancel", "detached"])
async def test_ends_that_a_router_wants(worker: Worker, ends: Any) -> None:
    worker.handle(submit_decode(7, work(D), source()))
    await worker.says(D, output([6]))
    worker.handle(cancel(8, D))  # of another router
    assert not worker.of(messages.Cancelled)
    worker.handle(ends)
    await worker.settle()
    assert worker.aborted == [D]
    assert not worker.failures()
    assert worker.of(messages.Cancelled)
    assert worker.idle


async def test_an_attempt_that_ends_before_vllm_has_it(worker: Worker) -> None:
    worker.handle(submit_prefill(7, work(P), handover=True))
    worker.handle(submit_decode(7, work(D), source()))
    worker.attempts.fail_all(pb.FAILURE_CODE_DRAINING, "the worker shuts down")
    worker.roles.stop()
    await worker.settle()
    assert worker.idle
    assert not worker.fields
    assert worker.failures() == [pb.FAILURE_CODE_DRAINING] * 2


async def test_a_cancelled_handover_is_closed_once(worker: Worker) -> None:
    worker.handle(submit_prefill(7, work(P), handover=True))
    await worker.says(P, output([5], "length"))
    worker.handle(cancel(7, P))
    worker.handle(messages.Detached(7))
    assert worker.told == [Commit(P, FirstToken(5)), Close(P)]
    assert not worker.idle
    worker.heard(Released(P, "cancelled"))
    assert worker.idle
    assert not worker.failures()


@pytest.mark.parametrize(
    ("error", "codes"),
    [
        (ValueError("no such"), [pb.FAILURE_CODE_INVALID]),
        (RuntimeError("broken"), [pb.FAILURE_CODE_ENGINE]),
        (EngineGone(), []),
    ],
)
async def test_errors_of_vllm(worker: Worker, error: Exception, codes: list[pb.FailureCode]) -> None:
    """If its process has ended, the service tells the routers."""
    worker.handle(submit_decode(7, work(D), None))
    await worker.says(D, error)
    assert worker.failures() == codes
    assert worker.is_gone == isinstance(error, EngineGone)
    assert worker.idle != worker.is_gone


async def test_a_prompt_that_may_have_crashed_engines_is_computed_alone(worker: Worker) -> None:
    worker.handle(submit_decode(7, work(D), source()))
    await worker.settle()
    worker.heard(Injected(D, FIRST, STATS))
    await worker.says(D, output([6]))
    suspect, later = work(P), work(E)
    suspect.request.alone = True
    worker.handle(submit_prefill(7, suspect, handover=True))
    await worker.settle()
    assert worker.computed == [D], "no other request is blamed for a crash"
    await worker.says(D, output([7], "stop"))
    assert worker.computed == [P]
    worker.handle(submit_prefill(7, later, handover=True))
    await worker.settle()
    assert worker.computed == [P]
    await worker.says(P, output([5], "length"))
    assert worker.computed == [E]
    assert [token for _, token, _ in worker.tokens()] == [5, 6, 7, 5]


async def test_a_prompt_that_must_run_alone_has_its_turn_on_a_busy_worker(worker: Worker) -> None:
    """Decodes come and end all the time, and so do prompts: it waits for those that were there before it.
    Later prompts do not wait for these decodes."""
    first, last, suspect = name("1"), name("2"), work(P)
    worker.handle(submit_decode(7, work(first), source()))  # its KV has not come
    worker.handle(submit_decode(7, work(last), None))
    await worker.says(last, output([6]))
    suspect.request.alone = True
    worker.handle(submit_prefill(7, suspect, handover=True))
    for decode in (D, E):
        worker.handle(submit_decode(7, work(decode), source() if decode is D else None))
    assert worker.failures() == [pb.FAILURE_CODE_NO_ROOM] * 2
    stats = worker.roles.status(0).stats
    assert (stats.blocks_free, stats.blocks_spare) == (0, 0), "routers send decodes elsewhere"
    for letter in "ab":
        worker.handle(submit_prefill(7, work(name(letter)), handover=True))
    await worker.settle()
    assert worker.computed == [first, last, name("a"), name("b")]
    worker.heard(Injected(first, FIRST, STATS))
    await worker.says(last, output([7], "stop"))
    await worker.says(name("a"), output([5], "length"))
    worker.handle(submit_prefill(7, work(name("c")), handover=True))
    await worker.settle()
    assert worker.computed == [first, name("b"), name("c")]
    await worker.says(first, output([6], "stop"))
    worker.handle(submit_prefill(7, work(name("d")), handover=True))
    await worker.says(name("b"), output([5], "length"))
    assert worker.computed == [name("c")], "no other prompt starts from now on"
    await worker.says(name("c"), output([5], "length"))
    assert worker.computed == [P]
    await worker.says(P, output([5], "length"))
    assert worker.computed == [name("d")]
    worker.heard(Released(P, "acked"))
    worker.handle(submit_decode(7, work(E), source()))
    assert worker.failures() == [pb.FAILURE_CODE_NO_ROOM] * 2
    assert worker.roles.status(0).stats.blocks_free


async def test_kv_that_is_fetched_again_shares_no_step_with_such_a_prompt(worker: Worker) -> None:
    """A reservation without KV holds up no prompt. While its fetch is under way, the prompt waits."""
    again, suspect = source(), work(P)
    again.prefill_id, suspect.request.alone = E, True
    worker.handle(submit_decode(7, work(D), source()))
    worker.handle(submit_prefill(7, suspect, handover=True))
    worker.handle(retarget(7, D, again, []))
    await worker.settle()
    assert worker.computed == [D]
    worker.heard(FetchFailed(D, "gone"))
    await worker.settle()
    assert worker.computed == [P]
    worker.handle(retarget(7, D, again, []))
    await worker.settle()
    assert worker.computed == [P]
    assert worker.failures() == [pb.FAILURE_CODE_KV_FAILED, pb.FAILURE_CODE_NO_ROOM]


async def test_two_prompts_that_must_run_alone_take_turns(worker: Worker) -> None:
    for letter in "ab":
        suspect = work(name(letter))
        suspect.request.alone = True
        worker.handle(submit_prefill(7, suspect, handover=True))
    worker.handle(submit_prefill(7, work(E), handover=True))
    await worker.settle()
    for letter, after in (("a", name("b")), ("b", E)):
        assert worker.computed == [name(letter)]
        await worker.says(name(letter), output([5], "length"))
        assert worker.computed == [after]


async def test_a_request_that_vllm_cannot_have_is_refused(worker: Worker) -> None:
    worker.handle(submit_prefill(7, work(P, output_ids=[4], presence_penalty=1.0), handover=True))
    await worker.settle()
    assert worker.failures() == [pb.FAILURE_CODE_INVALID]
    assert worker.idle


SEEN = Image(b"i" * 32, 3, 2, 4, b"pixels")
UNSEEN = Image(SEEN.name, SEEN.start, SEEN.rows, SEEN.columns, b"")


def seeing(attempt_id: bytes, *images: Image) -> Asked:
    return work(attempt_id, 80).show(images)


async def test_images_are_in_the_names_of_chunks(worker: Worker) -> None:
    worker.handle(submit_prefill(7, seeing(P, SEEN), handover=True))
    worker.handle(submit_prefill(7, work(E, 80), handover=True))
    [seen, text] = [live.chunks for live in worker.roles._engine.lives.values()]
    expected: list[bytes] = []
    extend_names(expected, [1] * 80, 80, salted(b"root", b""), [SEEN.span])
    assert seen == expected != text


async def test_a_decode_that_fetches_needs_no_pixels_until_it_is_preempted(worker: Worker) -> None:
    worker.handle(submit_decode(7, seeing(D, UNSEEN), source()))
    await worker.settle()
    assert worker.fields[D]["extra_args"]["kv_transfer_params"]["unseen_until"] == SEEN.stop
    worker.heard(Blind(D))
    await worker.settle()
    assert worker.failures() == [pb.FAILURE_CODE_HANDED_BACK]
    assert worker.aborted == [D]
    assert worker.idle


async def test_a_decode_of_this_worker_has_the_pixels_of_its_prefill(worker: Worker) -> None:
    worker.handle(submit_prefill(7, seeing(P, SEEN), handover=True))
    await worker.says(P, output([5], "length"))
    worker.handle(submit_decode(7, seeing(D, UNSEEN), source(OURS)))
    worker.heard(Released(P, "gone"))
    await worker.settle()
    assert worker.images[D] == (SEEN,)


@pytest.mark.parametrize("decodes", [False, True])
async def test_a_prompt_without_its_pixels_is_refused(worker: Worker, decodes: bool) -> None:
    asked = seeing(P, SEEN, UNSEEN)
    worker.handle(submit_decode(7, asked, None) if decodes else submit_prefill(7, asked, True))
    await worker.settle()
    assert worker.failures() == [pb.FAILURE_CODE_INVALID]
    assert not worker.fields
    assert worker.idle
