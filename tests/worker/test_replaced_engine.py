"""An engine process that dies is replaced: attempts go on, and published KV is not computed again."""

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import grpc.aio
import psutil
import pytest

from baton.bench.lab.survive import stages_in
from baton.rpc import worker_pb2 as pb
from baton.rpc.token_ids import unpacked_ids
from tests.cluster_helpers import (
    WorkerProcess,
    WorkerStream,
    assert_whole,
    attached,
    request,
    sampling,
    start_worker,
    tiny_model,
)
from tests.device import TWO
from tests.engine.checkpoints import edit_json
from tests.forked.popen import FORKS_AGAIN
from tests.within import WITHIN, eventually, within

from .held_engine import HELD_AT
from .test_deaths import stop_in_step
from .test_kv_events import TOPIC, Subscriber
from .test_states import HYBRID
from .test_weights import described, first_token, replaced, replacement, saved

pytestmark = pytest.mark.all

ENGINE = {
    "load_format": "dummy",
    "num_blocks": 300,
    "block_size": 16,  # on a GPU, too: what is computed again depends on it
    "max_num_batched_tokens": 64,
    "enable_prefix_caching": True,
}
PROMPT = [7 * i % 500 for i in range(200)]
HELD_ENGINE = "tests.worker.held_engine"


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    directory = tmp_path_factory.mktemp("replaced")
    model = tiny_model(directory / "model")
    with start_worker(
        "decode", model, directory, engine=ENGINE, replace_engine=True, variables={FORKS_AGAIN: "1"},
        engine_module=HELD_ENGINE, trace_dir=str(directory / "traces"),
        kv_events_endpoint=f"ipc://{directory}/events", kv_events_topic=TOPIC,
    ) as started:  # fmt: skip
        yield started.wait_ready()


async def read(stream: WorkerStream, decode_id: bytes) -> list[pb.TokenEvent]:
    """Waits for all tokens of an attempt. Their indices must come in order."""
    tokens: list[pb.TokenEvent] = []
    while not tokens or not tokens[-1].finish_reason:
        message = (await stream.next(decode_id)).message
        if not isinstance(message, pb.Reserved):  # again from the next engine
            assert isinstance(message, pb.TokenEvent), message
            tokens.append(message)
    first = tokens[0].output_index
    assert [token.output_index for token in tokens] == [*range(first, first + len(tokens))]
    return tokens


def ids(tokens: list[pb.TokenEvent]) -> list[int]:
    return [token.token_id for token in tokens]


async def goes_on(
    stream: WorkerStream, decode_id: bytes, right: list[int], prompt: int = len(PROMPT), most: int = 2 * 16
) -> None:
    """The attempt has its tokens. The next engine computes at most so many positions again."""
    tokens = await within(read(stream, decode_id))
    assert ids(tokens) == right
    again = next((x for x in tokens if x.cached_tokens != tokens[0].cached_tokens), None)
    assert again is not None, f"no engine went on with more than the {tokens[0].cached_tokens} of the prompt"
    assert prompt + again.output_index - again.cached_tokens <= most


async def held(stream: WorkerStream, asked: pb.Request, count: int) -> bytes:
    """Submits a request. Returns when it has so many tokens, and the engine computes no more: the answer does
    not end before the engine is replaced."""
    [decode_id] = await all_held(count, (stream, asked))
    return decode_id


async def all_held(count: int, *asked: tuple[WorkerStream, pb.Request]) -> list[bytes]:
    """The same, of several requests. They begin together."""
    stub = asked[0][0].stub
    await stub.SetPause(pb.PauseRequest(pause=pb.PAUSE_STEPS, seconds=600))
    decodes = [await stream.reserve(held_at(count, each)) for stream, each in asked]
    await stub.SetPause(pb.PauseRequest(pause=pb.PAUSE_NONE))
    tokens = [stream.events[decode_id] for (stream, _), decode_id in zip(asked, decodes, strict=True)]
    await eventually(lambda: all(each.qsize() >= count for each in tokens))
    return decodes


def serving(status: pb.WorkerStatus) -> bool:
    return status.health == pb.WorkerStatus.HEALTH_SERVING


def held_at(count: int, asked: pb.Request) -> pb.Request:
    held = pb.Request(name=f"{HELD_AT}{count}")
    held.MergeFrom(asked)
    return held


async def status(stream: WorkerStream) -> pb.WorkerStatus:
    return await stream.stub.GetStatus(pb.StatusRequest())


def follow(stream: WorkerStream, cached: set[int]) -> set[int]:
    """Applies the events about the prefix cache that have come. Returns the chunks that have left it."""
    gone = set[int]()
    while not stream.caches.empty():
        events = stream.caches.get_nowait()
        gone.update(events.evicted)
        cached.difference_update(events.evicted)
        cached.update(events.added)
    return gone


def kill(worker: WorkerProcess, how: signal.Signals = signal.SIGKILL) -> psutil.Process:
    engine = worker.child("engine")
    engine.send_signal(how)
    return engine


async def next_engine(worker: WorkerProcess, before: psutil.Process) -> psutil.Process:
    """Waits until another engine process starts."""
    found: list[psutil.Process] = []
    await eventually(
        lambda: found.extend(each for each in worker.children("engine") if each != before) or found
    )
    return found[0]


def open_files(worker: WorkerProcess) -> int:
    return len([*Path(f"/proc/{worker.popen.pid}/fd").iterdir()])


async def test_a_killed_engine_costs_what_it_had_not_published(worker: WorkerProcess) -> None:
    params = [
        sampling(max_tokens=150, ignore_eos=True, logprobs=2),
        sampling(max_tokens=150, ignore_eos=True, temperature=0.8, seed=7),
        sampling(
            max_tokens=150, ignore_eos=True, temperature=1.0, seed=3, presence_penalty=0.4,
            frequency_penalty=0.2, repetition_penalty=1.1, min_tokens=140,
        ),
    ]  # fmt: skip
    async with attached(worker) as stream:
        described = await stream.stub.Describe(pb.DescribeRequest())
        asked = [request(PROMPT[i:], each) for i, each in enumerate(params)]
        right = [ids(await read(stream, await stream.submit_decode(each))) for each in asked]
        files, cached = [], set[int]()
        for how in (signal.SIGKILL, signal.SIGABRT):
            decodes = await all_held(100, *((stream, each) for each in asked))
            follow(stream, cached)
            before = {*cached}
            assert before
            kill(worker, how)
            for decode_id, each, expected in zip(decodes, asked, right, strict=True):
                tokens = await within(read(stream, decode_id))
                assert ids(tokens) == expected
                again = next(x for x in tokens if x.cached_tokens != tokens[0].cached_tokens)
                length = len(unpacked_ids(each.prompt_ids)) + again.output_index
                assert length - again.cached_tokens <= 2 * 16, "a block, and that of the step under way"
            assert (await status(stream)).health == pb.WorkerStatus.HEALTH_SERVING
            assert before <= follow(stream, cached), "no router counts on chunks until they are verified"
            files.append(open_files(worker))
        assert files[0] == files[1]
        now = await stream.stub.Describe(pb.DescribeRequest())
        for description in (described, now):
            description.ClearField("status")
        assert now == described, "incarnation, address of KV lanes and all else stay"
    await assert_whole(worker)


@pytest.mark.long
async def test_a_model_with_states_goes_on_from_the_last_copy(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    edit_json(model / "config.json", **HYBRID)
    with start_worker(
        "decode", model, tmp_path, engine=ENGINE, replace_engine=True, variables={FORKS_AGAIN: "1"},
        engine_module=HELD_ENGINE,
    ) as started:  # fmt: skip
        worker = started.wait_ready()
        asked = request(PROMPT, sampling(max_tokens=150, ignore_eos=True))
        async with attached(worker) as stream:
            right = ids(await read(stream, await stream.submit_decode(asked)))
            asked.cache_salt = b"another"
            decode_id = await held(stream, asked, 100)
            kill(worker)
            await goes_on(stream, decode_id, right, most=2 * 64)
        await assert_whole(worker)


@pytest.mark.long
async def test_an_engine_that_hangs_is_replaced_and_counts_go_on(worker: WorkerProcess) -> None:
    """Metrics, events and traces of the worker know both engine processes."""
    directory = worker.run_dir.parent
    traces = len([*(directory / "traces").iterdir()])
    events = Subscriber(f"ipc://{directory}/events", 16, first=None)
    await within(events.connected())
    prompt = [token * 3 % 499 for token in range(200)]
    asked = request(prompt, sampling(max_tokens=150, ignore_eos=True))
    async with attached(worker) as stream:
        right = ids(await read(stream, await stream.submit_decode(asked)))
        while events.hit(prompt) < 192:
            await within(events.follow())
        before = await status(stream)
        decode_id = await held(stream, asked, 50)
        await stream.send(decode=pb.SubmitDecode(decode_id=decode_id, request=asked))
        early = [(await stream.token(decode_id))[0] for _ in range(50)]
        assert (await stream.failure(decode_id)).code == pb.FAILURE_CODE_INVALID, "this id is in use"
        kill(worker, signal.SIGSTOP)
        assert ids([*early, *await within(read(stream, decode_id))]) == right
        while events.hit(prompt):
            await within(events.follow())
        while events.hit(prompt) < 192:
            await within(events.follow())
        now = await status(stream)
        assert now.generation_tokens >= before.generation_tokens + 50
        assert now.computed_prompt_tokens > before.computed_prompt_tokens
    events.close()
    assert "decode 0 engine gave no sign of life" in worker.log.read_text()
    assert len([*(directory / "traces").iterdir()]) == traces + 2, "none was written over"
    await assert_whole(worker)


async def test_what_comes_meanwhile_waits_or_ends(worker: WorkerProcess) -> None:
    """Routers are told that the worker drains. One may have sent something before."""
    params = sampling(max_tokens=40, ignore_eos=True)
    async with attached(worker) as stream, attached(worker) as other:
        right = ids(await read(stream, await stream.submit_decode(request(PROMPT, params))))
        streams = stream, stream, other
        cancelled, stays, _ = await all_held(5, *((each, request(PROMPT, params)) for each in streams))
        count, engine = stream.events[cancelled].qsize(), kill(worker)
        while (await stream.next_status()).health != pb.WorkerStatus.HEALTH_DRAINING:
            pass
        await stream.cancel(cancelled)
        other.call.cancel()
        late = await stream.submit_decode(request(PROMPT, params))
        prefill = await stream.submit_prefill(request(PROMPT, sampling(max_tokens=1)), handover=False)
        assert ids(await within(read(stream, stays))) == right
        assert ids(await within(read(stream, late))) == right
        assert ids(await within(read(stream, prefill))) == right[:1]
        assert not engine.is_running()
        assert stream.events[cancelled].qsize() == count
        hints = await stream.hints(PROMPT)
        cached: set[int] = set()
        while stream.caches.qsize():
            events = stream.caches.get_nowait()
            cached = (set() if events.reset else cached) - {*events.evicted} | {*events.added}
        assert {*hints} <= cached, "routers know what the next engine has"
    await assert_whole(worker)


async def test_a_planned_restart_ends_the_engine_between_two_steps(worker: WorkerProcess) -> None:
    """Also twice in a row, before the engine has computed a token. `test_replacement_orders.py` has two calls
    at once."""
    asked = request(PROMPT[1:], sampling(max_tokens=130, ignore_eos=True))
    async with attached(worker) as stream, attached(worker) as other:
        right = ids(await read(stream, await stream.submit_decode(asked)))
        decode_id = await held(stream, asked, 100)
        log = worker.log.read_text()
        engines = [worker.child("engine")]
        for restart in (stream, other):
            await within(restart.stub.RestartEngine(pb.RestartEngineRequest()))
            engines.append(worker.child("engine"))
        assert len({engine.pid for engine in engines}) == 3
        await goes_on(stream, decode_id, right, len(unpacked_ids(asked.prompt_ids)), 16)
        assert (await status(stream)).health == pb.WorkerStatus.HEALTH_SERVING
    new = worker.log.read_text().removeprefix(log)
    assert new.count("another engine process goes on\n") == 2
    stages = stages_in(new)
    assert {len(seconds) for seconds in stages.values()} == {2}
    assert [*stages] == [
        "ending processes", "starting the engine process", "loading weights", "mapping KV", "verifying KV",
        "preparing transfers", "starting the transfer process", "submitting attempts",
    ]  # fmt: skip
    assert "ERROR" not in new
    await assert_whole(worker)


async def test_an_engine_that_dies_before_its_first_token_is_the_end(tmp_path: Path) -> None:
    """The attempts of its last step may be the cause, and routers learn of these."""
    with start_worker(
        "decode",
        tiny_model(tmp_path / "model"),
        tmp_path,
        engine=ENGINE,
        replace_engine=True,
        variables={FORKS_AGAIN: "1"},
    ) as started:
        worker = started.wait_ready()
        async with attached(worker) as stream:
            decode_id = await stream.reserve(request(PROMPT, sampling(max_tokens=3800, ignore_eos=True)))
            first = worker.child("engine")
            stop_in_step(first)
            first.kill()
            (await next_engine(worker, first)).kill()
            await within(stream.ended.wait())
            seen = [
                stream.events[decode_id].get_nowait().message for _ in range(stream.events[decode_id].qsize())
            ]
            assert isinstance(seen[-1], pb.AttemptFailed)
            assert seen[-1].code == pb.FAILURE_CODE_ENGINE
        assert await asyncio.to_thread(worker.popen.wait, WITHIN) == 1
        assert list(worker.run_dir.iterdir()) == []


async def test_the_next_engine_has_the_newest_weights_and_the_kv_of_them(
    worker: WorkerProcess, tmp_path: Path
) -> None:
    path = saved(tmp_path / "trained", 7)
    before = await first_token(worker)
    await replaced(worker, path, "a")
    names, asked = await described(worker), request(PROMPT, sampling(max_tokens=60, ignore_eos=True))
    token = await first_token(worker)
    assert token != before
    async with attached(worker) as stream:
        right = ids(await read(stream, await stream.submit_decode(asked)))
        decode_id = await held(stream, asked, 20)
        kill(worker)
        tokens = await within(read(stream, decode_id))
        assert ids(tokens) == right
        assert len(PROMPT) - tokens[-1].cached_tokens <= 2 * 16, "the KV of this version is used"
        assert await described(worker) == names
        async with replacement(worker) as late:
            await late.stage(saved(tmp_path / "later", 8), "b")
            gone = kill(worker)
            await next_engine(worker, gone)
            await stream.until(serving)
            with pytest.raises(grpc.aio.AioRpcError, match="the engine process has ended"):
                await late.command(close=True)
    assert await described(worker) == names
    assert await first_token(worker) == pytest.approx(token)
    await assert_whole(worker)


async def test_an_engine_that_dies_in_the_change_is_followed_by_one_with_all_old_or_all_new_weights(
    worker: WorkerProcess, tmp_path: Path
) -> None:
    tokens = dict[str, tuple[int, float]]()
    for seed in (9, 10):
        path = saved(tmp_path / str(seed), seed)
        await replaced(worker, path, path.name)
        tokens[str(path)] = await first_token(worker)
    async with replacement(worker) as cut, attached(worker) as stream:
        await cut.stage(tmp_path / "9", "cut")
        await cut.command(close=True)
        engine = worker.child("engine")
        engine.suspend()
        await cut.call.write(pb.WeightsCommand(apply=True))
        engine.kill()
        with pytest.raises(grpc.aio.AioRpcError, match="engine"):
            assert not isinstance(await within(cut.call.read()), pb.WeightsReport)
        await stream.until(serving)
    after = await described(worker)
    assert after.weights.version == "10"
    assert await first_token(worker) == pytest.approx(tokens[after.weights.path])
    await assert_whole(worker)


@pytest.mark.long
async def test_a_group_of_ranks_is_replaced_as_a_whole(tmp_path: Path) -> None:
    """Whichever of them dies. On two GPUs, too."""
    with start_worker(
        "decode", tiny_model(tmp_path / "model"), tmp_path, engine=ENGINE | {"tensor_parallel_size": 2},
        replace_engine=True, variables={FORKS_AGAIN: "1"} | TWO, engine_module=HELD_ENGINE,
    ) as started:  # fmt: skip
        worker = started.wait_ready()
        asked = request(PROMPT, sampling(max_tokens=300, ignore_eos=True))
        async with attached(worker) as stream:
            right = ids(await read(stream, await stream.submit_decode(asked)))
            kinds = "engine", "rank 1", "transfer"
            for kind in kinds[:2]:
                decode_id = await held(stream, asked, 100)
                before = [worker.child(each) for each in kinds]
                worker.child(kind).kill()
                await goes_on(stream, decode_id, right)
                assert not any(process.is_running() for process in before)
        await assert_whole(worker)
