"""What a shared store is worth when all workers restart: second turns of chats, and chats that go on.

`baton serve --kv-store local` serves the embedded model: a prefill and a decode worker, and a store. Chats
get a first turn. All workers are restarted one by one. Then second turns alternate with prompts of the
same length that no worker has seen (`second_turn`). `found` is the share of the tokens of history and answer
that had KV. `step_beside_writes` is the median gap between tokens while the KV of their prompt is written,
compared with the same answer without any writes.

Then chats go on for a while, and the workers are restarted in the middle of it, with a store and without one:
hits, and times to first token of turns that began before, during and after the restart.

On a GPU one worker serves the 8B Llama shape. The trace needs two GPUs, for a prefill and a decode worker.
`second_turn.worst` is the longest time of these, over the median of computing.

`read` is GB/s from the store to blocks of that shape, verified, over those of the store's own client, which
reads all objects in one call.
"""

import asyncio
import contextlib
import itertools
import os
import shlex
import signal
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import aiohttp
import msgspec
import torch

from baton.bench.lab.driver import Bench, Run, in_turns
from baton.bench.lab.harness.processes import Server, spawn
from baton.bench.lab.harness.sides import SERVE, Side, started
from baton.bench.lab.harness.streams import Case, new_session, read, with_ends
from baton.bench.lab.harness.workers import prompt_of
from baton.bench.lab.shapes import DENSE, write_shape
from baton.bench.report import Row
from baton.kv_names import CHUNK_TOKENS
from baton.kv_names.cache_kinds import ATTENTION, CacheArray
from baton.kv_transfer import Injected, KVLayout, PagedKV
from baton.kv_transfer.endpoint.other_ranks import NO_RANKS
from baton.kv_transfer.endpoint.shared_store import SharedStore
from baton.kv_transfer.endpoint.store_offers import Lent
from baton.kv_transfer.shared_store import STORE_MODULE, StoreStart, Units
from baton.kv_transfer.shared_store.chunk_object import ObjectSeal, label
from baton.kv_transfer.shared_store.client import ClientProcess
from baton.kv_transfer.wait import wait
from baton.processes.spawn import spawn as spawn_child
from baton.steps.quantiles import percentile
from baton.system.addresses import free_port
from baton.worker.service_process.store import StoreEnds

CHATS, ANSWER, NEW = {"cpu": 9, "cuda": 6}, 40, 32
HISTORY = {"cpu": 700, "cuda": 8000}
GOAL = {"cpu": 0.5, "cuda": 1.02}  # of second turns
WRITING, STEPS = 12, 100
FEW = 3  # chats, and answers beside writes, of the short form on CPUs, which has no trace
LAYOUT, BLOCK = KVLayout.of([(CacheArray(ATTENTION, "kv", 2, 8, 128, "bfloat16"),)] * 32), 64
READ, READS = {"cpu": 1024, "cuda": 8000 // CHUNK_TOKENS * CHUNK_TOKENS}, 7  # tokens, and fetches
TRACE_CHATS, TRACE_HISTORY, PAUSE_S = 6, {"cpu": 300, "cuda": 2000}, 4.0
AROUND_S = 25.0  # before and after the restart
START_S = 120.0
RESTARTED = "All workers have restarted."


class Turn(NamedTuple):
    began: float
    ttft: float
    gap: float  # the median
    cached: int
    text: list[int]  # prompt and answer


class Cluster:
    def __init__(self, session: aiohttp.ClientSession, url: str, server: Server, log: Path) -> None:
        self.session, self.url, self._server, self._log = session, url, server, log

    async def turn(self, prompt: Sequence[int], answer: int = ANSWER) -> Turn:
        case, usage = Case("", answer, 0.0, seed=0), {"include_usage": True}
        [stream] = with_ends(
            [await read(self.session, self.url, case, prompt=list(prompt), stream_options=usage)]
        )
        text = [*prompt, *stream.token_ids]
        return Turn(stream.started, stream.ttft, statistics.median(stream.gaps), stream.cached_tokens, text)

    async def restart(self) -> None:
        """Restarts all workers, one after the other."""
        before = self._log.read_text().count(RESTARTED)
        self._server.process.send_signal(signal.SIGUSR1)
        while self._log.read_text().count(RESTARTED) == before:
            assert self._server.process.poll() is None, self._log.read_text()
            await asyncio.sleep(0.1)


@contextlib.contextmanager
def mooncake(size: str) -> Iterator[str]:
    """`baton store` while the context is open. Returns its URL."""
    port = free_port()
    flags = ("serve", "--port", str(port), "--size", size)
    popen, pipe = spawn("store", *flags, environment={**os.environ, "GLOG_minloglevel": "2"})
    try:
        with pipe:
            if b"ready" not in pipe.readline():
                raise RuntimeError("the store does not start")
        yield f"mooncake://127.0.0.1:{port}"
    finally:
        popen.send_signal(signal.SIGINT)
        popen.wait()


def reads(run: Run, url: str) -> None:
    """The engine's end of the store without an engine: writes chunks, and reads them again and again."""
    chunks, secret = READ[run.device] // CHUNK_TOKENS, os.urandom(32)
    kv = [torch.randn(2, chunks, BLOCK, 8, 128, device=run.device, dtype=torch.bfloat16) for _ in range(32)]
    ends, units = StoreEnds.create(), Units(LAYOUT, 1)
    start = StoreStart(
        url=url, name="bench", title="baton", parent_pid=os.getpid(), encrypt=False, logging=None,
        arena_fd=ends.memory, channel_fd=ends.store.fileno(),
    )  # fmt: skip
    lines = msgspec.json.encode(start) + b"\n" + secret.hex().encode()
    child = spawn_child("-m", STORE_MODULE, given=lines, pass_fds=(start.arena_fd, start.channel_fd))
    blocks = range(chunks)
    store = SharedStore(
        PagedKV([[kv]], BLOCK, LAYOUT, str(kv[0].device), 0, 1), ends.of_rank(0), NO_RANKS, "bench",
        lend=lambda *_: Lent(blocks, 0, lambda: None), known=lambda *_: None,
        answered=lambda _: None, probed=lambda *_: None,
    )  # fmt: skip

    def until(condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + START_S
        while not condition():
            assert time.monotonic() < deadline, "the store does not answer"
            wait([store.fileno()], 0.0002 if store.copies else 0.05)
            store.move(busy=False)

    def ours() -> float:
        began = time.monotonic()
        store.fetch_content(
            b"", salt=b"", chunks=names, first_chunk=0, block_ids=blocks, state_slot=None
        )  # fmt: skip
        events: list[object] = []
        until(lambda: events.extend(store.poll()) or events)
        assert isinstance(events[0], Injected), events
        assert events[0].stats.tokens == chunks * CHUNK_TOKENS
        return time.monotonic() - began

    def own() -> float:
        began = time.monotonic()
        assert all(client.call(0, "get", keys, places))
        return time.monotonic() - began

    client = ClientProcess(url, "baton: client of the bench")
    try:
        until(lambda: store.session)
        names = [os.urandom(16) for _ in blocks]
        for chunk, name in enumerate(names):
            store.offer(b"", name, chunk)
        until(lambda: not store.offers.writes)
        size, seal = units.object_bytes(0), ObjectSeal(secret, "bench", encrypt=False)
        keys = [seal.key(label(b"", name), 0) for name in names]
        places = [(chunk * size, size) for chunk in blocks]
        client.open(chunks * size)
        assert client.reason() == ""
        ours(), own()  # page faults
        pairs = in_turns(ours, own, rounds=READS)
    finally:
        client.close()
        child.kill()
        child.wait()
        store.close()
    speeds = [[chunks * size / seconds / 1e9 for seconds in series] for series in pairs]
    goal = 0.8 if run.on_gpus else None
    name, to = f"store.{run.device}.read", "batch_get_into"
    run.add_ratio(name, speeds[0], "GB/s", speeds[1], to, goal=goal, better="higher")


@contextlib.asynccontextmanager
async def cluster(run: Run, name: str, *flags: str) -> AsyncIterator[Cluster]:
    log = run.directory / f"{name}.log"
    starting = started(Side(name, 1, SERVE + shlex.join(flags)), Path(), log=log)
    [(url, server)] = (await asyncio.to_thread(starting.__enter__)).items()
    try:
        async with new_session() as session:
            yield Cluster(session, url, server, log)
    finally:
        await asyncio.to_thread(starting.__exit__, None, None, None)


async def second_turns(run: Run, serving: Cluster, chats: int) -> None:
    history, name = HISTORY[run.device], f"store.{run.device}"
    firsts = [await serving.turn(prompt_of(history, chat)) for chat in range(chats)]
    await serving.restart()
    for kind in range(2):  # warms up: the first prompts of a process
        await serving.turn(prompt_of(history, 1000 + kind))
    turns: list[Turn] = []
    computed: list[float] = []
    for chat, first in enumerate(firsts):
        turns.append(await serving.turn([*first.text, *prompt_of(NEW, 100 + chat)], 2))
        computed.append((await serving.turn(prompt_of(len(first.text) + NEW, 200 + chat), 2)).ttft)
    ttfts = [turn.ttft for turn in turns]
    fields = {"scale": 1e3, "p99": percentile(ttfts, 0.99) * 1e3, "goal": GOAL[run.device]}
    run.add_ratio(f"{name}.second_turn", ttfts, "ms", computed, "computing it all", **fields)
    tokens = sum(len(first.text) for first in firsts)
    share = sum(turn.cached for turn in turns) / tokens
    goal = 0.9 if not run.on_gpus else None  # a GPU computes a prompt faster than TCP carries its KV
    run.add(Row(f"{name}.found", share, "share", goal=goal, better="higher"))
    if run.on_gpus:
        worst = max(ttfts) / statistics.median(computed)
        run.add(Row(f"{name}.second_turn.worst", worst, "of computing", goal=1.02))


async def steps_beside_writes(run: Run, serving: Cluster, count: int) -> None:
    """Each answer beside writes has one without before it and one after it."""
    writing, alone = list[float](), list[float]()
    for number in range(-1, count):
        prompt = prompt_of(HISTORY[run.device], 500 + number)
        writing.append((await serving.turn(prompt, STEPS)).gap)
        alone.append((await serving.turn(prompt, STEPS)).gap)
    idle = [(before + after) / 2 for before, after in itertools.pairwise(alone)]
    fields = {"scale": 1e3, "goal": 1.02}
    run.add_ratio(f"store.{run.device}.step_beside_writes", writing[1:], "ms", idle, "no writes", **fields)


async def trace(run: Run, serving: Cluster, name: str) -> None:
    """Chats that go on, and a restart in the middle."""
    turns: list[Turn] = []
    numbers, ends, history = itertools.count(10_000), asyncio.Event(), TRACE_HISTORY[run.device]
    seconds = AROUND_S / 3 if run.short else AROUND_S

    async def chat(number: int) -> None:
        text = prompt_of(history, next(numbers))
        await asyncio.sleep(PAUSE_S * number / TRACE_CHATS)
        while not ends.is_set():
            turns.append(turn := await serving.turn(text))
            text = [*turn.text, *prompt_of(NEW, next(numbers))]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PAUSE_S):
                    await ends.wait()

    async with asyncio.TaskGroup() as chats:
        for number in range(TRACE_CHATS):
            chats.create_task(chat(number))
        await asyncio.sleep(seconds)
        began = time.monotonic()
        await serving.restart()
        over = time.monotonic()
        await asyncio.sleep(seconds)
        ends.set()
    parts = {"before": (0.0, began), "during": (began, over), "after": (over, float("inf"))}
    for part, (start, stop) in parts.items():
        later = [turn for turn in turns if len(turn.text) > history + ANSWER]
        of_part = [turn for turn in later if start <= turn.began < stop]
        if of_part:
            ttfts = [turn.ttft for turn in of_part]
            row = f"store.{run.device}.{name}.{part}"
            run.add_median(f"{row}.ttft", ttfts, "ms", scale=1e3)
            hits = sum(turn.cached for turn in of_part) / sum(len(turn.text) - ANSWER for turn in of_part)
            run.add(Row(f"{row}.hits", hits, "share"))


async def serve(run: Run) -> None:
    flags, one, size = ["--dtype", "float32"], [], "1GiB"
    if run.on_gpus:
        model, size = write_shape(DENSE, run.directory, tokenizer=True), "12GiB"
        flags, one = ["--model", str(model), "--load-format", "dummy"], ["--prefill", "0"]
    few, store = run.short and not run.on_gpus, ["--kv-store", f"local?size={size}"]
    async with cluster(run, "turns", *flags, *one, *store) as serving:
        await second_turns(run, serving, FEW if few else CHATS[run.device])
        await steps_beside_writes(run, serving, FEW if few else WRITING)
    traced = torch.cuda.device_count() > 1 if run.on_gpus else not few
    for kind, store_flags in (("trace", store), ("trace_without", [])) if traced else ():
        async with cluster(run, kind, *flags, *store_flags) as serving:
            await trace(run, serving, kind)


def measure(run: Run) -> None:
    with mooncake("2GiB") as url:
        reads(run, url)
    asyncio.run(serve(run))


BENCH = Bench("store", measure, __doc__)

if __name__ == "__main__":
    sys.exit(BENCH.main())
