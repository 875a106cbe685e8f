"""ReplaceWeights and SetPause on a real worker, as a coordinator calls them. It starts with dummy weights."""

import asyncio
import os
import shutil
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import grpc
import grpc.aio
import pytest
import torch
from safetensors.torch import save_file

from baton.engine import trainer_files
from baton.rpc import worker_pb2 as pb
from baton.rpc.channel import connect
from baton.rpc.stubs import WorkerStub
from baton.worker.messages import EngineStatus, WeightsReplaced, WeightsStaged
from baton.worker.service_process.backend import Backend
from baton.worker.service_process.checkpoint_files import CheckpointFiles
from baton.worker.service_process.live_engine import LiveEngine
from baton.worker.service_process.pause import WorkerPause
from baton.worker.service_process.streams import Routers
from baton.worker.service_process.weights import WeightsReplacement
from tests.cluster_helpers import (
    SECRET,
    WorkerProcess,
    assert_whole,
    attached,
    request,
    sampling,
    start_worker,
    tiny_model,
)
from tests.within import within

TINY = {
    "load_format": "dummy", "num_blocks": 300, "max_num_batched_tokens": 64, "enable_memory_saver": True,
    "enable_prefix_caching": True,
}  # fmt: skip
SHAPES = {"q_proj": (64, 64), "k_proj": (32, 64), "v_proj": (32, 64), "o_proj": (64, 64)}
MLP = {"gate_proj": (128, 64), "up_proj": (128, 64), "down_proj": (64, 128)}


def saved(directory: Path, seed: int, missing: str = "", intermediate_size: int = 128) -> Path:
    """The tiny model with random weights, without the tensor `missing`."""
    torch.manual_seed(seed)
    tensors = {"model.embed_tokens.weight": torch.randn(512, 64), "model.norm.weight": torch.ones(64)}
    for layer in range(2):
        name = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{name}.{norm}.weight"] = torch.ones(64)
        for part, shapes in (("self_attn", SHAPES), ("mlp", MLP)):
            tensors |= {f"{name}.{part}.{x}.weight": torch.randn(shape) / 8 for x, shape in shapes.items()}
    tensors.pop(missing, None)
    save_file(tensors, tiny_model(directory, intermediate_size) / "model.safetensors")
    return directory


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.long)])
def worker(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[WorkerProcess]:
    """With one rank, or with two."""
    directory = tmp_path_factory.mktemp("weights")
    engine = TINY | {"tensor_parallel_size": request.param}
    with start_worker("prefill", tiny_model(directory / "model"), directory, engine=engine) as started:
        yield started.wait_ready()


class Replacement:
    """One call."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.call = WorkerStub(channel).ReplaceWeights()  # pyrefly: ignore[missing-argument]  (it is written to)

    async def stage(self, path: Path, version: str) -> pb.WeightsReport:
        return await self.command(stage=pb.StageWeights(path=str(path), version=version))

    async def command(self, **kind: Any) -> pb.WeightsReport:
        await self.call.write(pb.WeightsCommand(**kind))
        report = await within(self.call.read())
        assert isinstance(report, pb.WeightsReport), report
        return report


@asynccontextmanager
async def replacement(worker: WorkerProcess) -> AsyncIterator[Replacement]:
    async with connect(worker.address, SECRET) as channel:
        yield Replacement(channel)


async def replaced(worker: WorkerProcess, path: Path, version: str) -> None:
    """The worker computes with the weights at this path."""
    async with replacement(worker) as new:
        await new.stage(path, version)
        await new.command(close=True)
        await new.command(apply=True)


async def described(worker: WorkerProcess) -> pb.WorkerDescription:
    async with connect(worker.address, SECRET) as channel:
        description = await WorkerStub(channel).Describe(pb.DescribeRequest())
    description.ClearField("status")
    return description


async def staged(worker: WorkerProcess) -> str:
    """The version for which it waits, as routers learn it."""
    async with connect(worker.address, SECRET) as channel:
        return (await WorkerStub(channel).GetStatus(pb.StatusRequest())).staged_version


async def first_token(worker: WorkerProcess) -> tuple[int, float]:
    async with attached(worker) as stream:
        one = sampling(max_tokens=1, logprobs=0)
        prefill_id = await stream.submit_prefill(request(range(100), one), handover=False)
        token = (await stream.token(prefill_id))[0]
        return token.token_id, token.logprobs.logprob


@pytest.mark.all
async def test_a_worker_computes_with_the_weights_of_the_newest_version(
    worker: WorkerProcess, tmp_path: Path
) -> None:
    one, two = saved(tmp_path / "one", 1), saved(tmp_path / "two", 2)
    tokens, names = [], set[bytes]()
    for path, version in ((one, "a"), (two, "b"), (one, "c")):
        async with replacement(worker) as new:
            assert (await new.stage(path, version)).bytes > 4 * 512 * 64
            assert await staged(worker) == version
            await new.command(close=True)
            await new.command(apply=True)
        after = await described(worker)
        assert await staged(worker) == ""
        assert after.model_fingerprint.endswith(f"; version={version}")
        assert after.weights == pb.StageWeights(path=str(path), version=version)
        names.add(after.content_root)
        tokens.append(await first_token(worker))
    assert len(names) == 3, "no version has names of KV of another one"
    assert tokens[0] == tokens[2] != tokens[1]
    await assert_whole(worker)


async def test_a_call_that_ends_before_apply_leaves_the_worker_as_it_was(
    worker: WorkerProcess, tmp_path: Path
) -> None:
    before, token, path = await described(worker), await first_token(worker), saved(tmp_path / "other", 3)
    async with attached(worker) as stream:
        held = await stream.submit_prefill(request(range(100), sampling()), handover=True)
        await stream.token(held)
        async with replacement(worker) as new:
            await new.stage(path, "d")
            decode_id = await stream.reserve(request([1], sampling(max_tokens=2000, ignore_eos=True)))
            await stream.token(decode_id)
            await new.command(close=True)
            await within(stream.ended.wait())
            *_, last = [
                (await stream.next(decode_id)).message for _ in range(stream.events[decode_id].qsize())
            ]
            assert isinstance(last, pb.AttemptFailed)
            assert last.code == pb.FAILURE_CODE_DRAINING, "an answer does not delay the change"
            waiting = asyncio.create_task(first_token(worker))
        assert await within(waiting) == pytest.approx(token), "a router that comes meanwhile waits"
    assert await described(worker) == before
    assert await staged(worker) == "", "its coordinator has ended"
    await assert_whole(worker)


async def test_a_call_that_ends_within_apply_leaves_all_old_or_all_new(
    worker: WorkerProcess, tmp_path: Path
) -> None:
    paths = [saved(tmp_path / str(seed), seed) for seed in (4, 5)]
    tokens = dict[str, tuple[int, float]]()
    for path in paths:
        await replaced(worker, path, path.name)
        tokens[str(path)] = await first_token(worker)
    for turn in range(4):
        async with replacement(worker) as new:
            await new.stage(paths[turn % 2], f"cut-{turn}")
            await new.command(close=True)
            await new.call.write(pb.WeightsCommand(apply=True))
            new.call.cancel()
        token = await first_token(worker)
        after = await described(worker)
        assert after.model_fingerprint.endswith(f"; version={after.weights.version}")
        assert token == pytest.approx(tokens[after.weights.path])


async def test_the_files_of_before_are_closed_after_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams wait for the report, and to give the memory of large files back takes a second."""
    backend, routers = create_autospec(Backend, instance=True), create_autospec(Routers, instance=True)
    backend.draining, backend.pause, backend.lacks_memory = "", pb.PAUSE_NONE, False
    backend.run_dir, backend.stage_weights.return_value = str(tmp_path), WeightsStaged(1, 1, "", "files=1")
    engine = backend.serving.return_value = create_autospec(LiveEngine, instance=True)
    engine.status.return_value = create_autospec(EngineStatus, instance=True, told=pb.WorkerStatus(idle=True))
    backend.replace_weights.return_value = WeightsReplaced(1, "files=1", b"root")
    changes = WeightsReplacement(backend, routers, WorkerPause(backend), pb.WorkerDescription())
    reported, closed = threading.Event(), list[bool]()
    close = CheckpointFiles.close

    def noted(files: CheckpointFiles) -> None:
        closed.append(reported.wait(60.0))
        close(files)

    monkeypatch.setattr(CheckpointFiles, "close", noted)
    (tmp_path / "weights").mkdir()
    for version in ("1", "2"):

        async def commands(version: str = version) -> AsyncIterator[pb.WeightsCommand]:
            yield pb.WeightsCommand(stage=pb.StageWeights(path=str(tmp_path / "weights"), version=version))
            yield pb.WeightsCommand(close=True)
            yield pb.WeightsCommand(apply=True)

        reports = changes.run(commands())
        for _ in range(3):
            await within(anext(reports))
        if version == "2":
            reported.set()
        assert await within(anext(reports, None)) is None
    assert closed == [True], "those of the first weights, and only after the report"


async def test_weights_that_are_not_at_the_path_come_from_a_worker_that_has_them(
    worker: WorkerProcess, tmp_path: Path
) -> None:
    """The worker is the other one, too: its files are those of the weights before."""
    path = saved(tmp_path / "gone", 7)
    await replaced(worker, path, "here")
    right, token = await described(worker), await first_token(worker)
    shutil.rmtree(path)
    asked = pb.StageWeights(path=str(path), version="here", peer=worker.address, named_at=9)
    asked.fingerprint = right.model_fingerprint
    for turn in range(3):
        async with replacement(worker) as new:
            await new.command(stage=asked)
            assert await staged(worker) == "", "it does not serve until it has them"
            await new.command(close=True)
            await new.command(apply=True)
        after = await described(worker)
        assert after.weights == pb.StageWeights(path=str(path), version="here", named_at=9)
        assert after.model_fingerprint == right.model_fingerprint
        assert await first_token(worker) == token
        if turn == 0:
            saved(path, 8)  # other ones are at the path
    other = right.model_fingerprint.replace("=here", "=nowhere")
    for version, fingerprint, peer, reason in (
        ("nowhere", other, worker.address, "there .*; .*: it has no weights of version nowhere"),
        ("here", right.model_fingerprint, "127.0.0.1:1", "there .*; 127.0.0.1:1: failed to connect"),
        ("here", right.model_fingerprint, "", r"other weights than those of the other workers \(model="),
    ):
        wrong = pb.StageWeights(path=str(path), version=version, fingerprint=fingerprint, peer=peer)
        async with replacement(worker) as new:
            with pytest.raises(grpc.aio.AioRpcError, match=reason):
                await new.command(stage=wrong)
    unreadable = tmp_path / (300 * "n")  # the system answers with an error, not that there is none
    elsewhere = pb.StageWeights(path=str(unreadable), version="here", peer=worker.address)
    elsewhere.fingerprint = right.model_fingerprint
    async with replacement(worker) as new:
        await new.command(stage=elsewhere)
    lock = trainer_files.write(path / "model-00001-of-00001.cuda.json", "{}")
    for reason in ("the trainer has not copied its tensors", "the trainer has ended before it copied its"):
        async with replacement(worker) as new:
            with pytest.raises(grpc.aio.AioRpcError, match=reason):
                await new.command(stage=asked)
        if "not" in reason:
            os.close(lock)
    assert await first_token(worker) == token
    await assert_whole(worker)


@pytest.mark.all
async def test_what_does_not_fit_is_refused_by_name(worker: WorkerProcess, tmp_path: Path) -> None:
    before = await described(worker)
    name = "model.layers.1.mlp.up_proj.weight"
    missing = saved(tmp_path / "missing", 1, missing=name)
    wrong = saved(tmp_path / "wrong", 1, intermediate_size=64)
    cases = [
        (missing, "e", name),
        (wrong, "e", "another model"),
        (tmp_path / "nowhere", "e", "no such file"),
        (tmp_path / (300 * "n"), "e", "File name too long"),
        (missing, "", "version must be"),
        (missing, "e;f", "version must be"),
    ]
    for path, version, reason in cases:
        async with replacement(worker) as new:
            with pytest.raises(grpc.aio.AioRpcError, match=reason):
                await new.stage(path, version)
    async with replacement(worker) as new:
        with pytest.raises(grpc.aio.AioRpcError, match="expected stage, not close"):
            await new.command(close=True)
    async with replacement(worker) as new, replacement(worker) as second:
        await new.stage(saved(tmp_path / "good", 1), "e")
        with pytest.raises(grpc.aio.AioRpcError, match="another replacement"):
            await second.stage(tmp_path / "good", "f")
        with pytest.raises(grpc.aio.AioRpcError, match="expected close, not apply"):
            await new.command(apply=True)
    assert await described(worker) == before


def paused(pause: "pb.Pause", seconds: float = 600.0, *, abort: bool = False) -> pb.PauseRequest:
    return pb.PauseRequest(pause=pause, seconds=seconds, abort=abort)


async def test_a_frozen_worker_keeps_its_attempts_and_goes_on_with_the_same_tokens(
    worker: WorkerProcess,
) -> None:
    asked = request(range(100), sampling(max_tokens=2000, ignore_eos=True))
    async with attached(worker) as stream:

        async def first(decode_id: bytes) -> list[int]:
            """Of the attempt, which ends."""
            tokens = [(await stream.token(decode_id))[0].token_id for _ in range(40)]
            await stream.cancel(decode_id)
            return tokens

        undisturbed = await first(await stream.reserve(asked))
        decode_id = await stream.reserve(asked)
        token = (await stream.token(decode_id))[0]
        status = await stream.stub.SetPause(paused(pb.PAUSE_STEPS))
        assert (status.pause, status.idle, status.requests_running) == (pb.PAUSE_STEPS, False, 1)
        late = await stream.submit_decode(asked)
        await stream.reserved(late)
        seen = stream.events[decode_id].qsize()
        assert (await stream.stub.GetStatus(pb.StatusRequest())).requests_running == 2
        assert stream.events[decode_id].qsize() == seen, "no step was computed meanwhile"
        status = await stream.stub.SetPause(pb.PauseRequest(pause=pb.PAUSE_NONE))
        assert status.pause == pb.PAUSE_NONE
        assert [token.token_id, *await first(decode_id)][:40] == undisturbed
        assert await first(late) == undisturbed
    await assert_whole(worker)


async def test_abort_ends_attempts_and_a_pause_ends_by_itself(worker: WorkerProcess) -> None:
    long = request([1], sampling(max_tokens=2000, ignore_eos=True))
    async with attached(worker) as stream:
        decode_id = await stream.reserve(long)
        await stream.token(decode_id)
        status = await stream.stub.SetPause(paused(pb.PAUSE_STEPS, 0.2, abort=True))
        assert status.pause == pb.PAUSE_STEPS
        assert status.idle
        last = (await stream.next(decode_id)).message
        while not isinstance(last, pb.AttemptFailed):
            last = (await stream.next(decode_id)).message
        assert last.code == pb.FAILURE_CODE_ABORTED
        await stream.token(await stream.reserve(long))  # it waits for the end of the pause
        assert (await stream.stub.GetStatus(pb.StatusRequest())).pause == pb.PAUSE_NONE
        with pytest.raises(grpc.aio.AioRpcError, match=r"seconds is 0: it must be above 0"):
            await stream.stub.SetPause(paused(pb.PAUSE_NEW, 0.0))
    await assert_whole(worker)


async def test_a_change_in_a_pause_that_keeps_kv_leaves_decodes_and_hands_prompts_back(
    worker: WorkerProcess, tmp_path: Path
) -> None:
    path = saved(tmp_path / "kept", 5)
    async with attached(worker) as stream:
        held = await stream.submit_prefill(request(range(100), sampling()), handover=True)
        await stream.token(held)
        asked = request(range(100), sampling(max_tokens=2000, ignore_eos=True))
        decode_id = await stream.reserve(asked)
        last = (await stream.token(decode_id))[0]
        keeping = pb.PauseRequest(pause=pb.PAUSE_STEPS, seconds=600, keep_kv=True)
        async with replacement(worker) as new:
            await new.stage(path, "kept")
            computed = (await stream.stub.SetPause(keeping)).computed_prompt_tokens
            await new.command(close=True)
            assert (await stream.failure(held)).code == pb.FAILURE_CODE_DRAINING
            going_on = asyncio.ensure_future(stream.stub.SetPause(pb.PauseRequest()))
            for _ in range(stream.events[decode_id].qsize()):
                last = (await stream.token(decode_id))[0]
            await new.command(apply=True)
        await within(going_on)  # it waits for the end of the change
        described = await within(stream.descriptions.get())
        assert described.weights == pb.StageWeights(path=str(path), version="kept")
        after = (await stream.token(decode_id))[0]
        assert after.output_index == last.output_index + 1
        assert (await stream.stub.GetStatus(pb.StatusRequest())).computed_prompt_tokens == computed
    token = await first_token(worker)
    await replaced(worker, path, "again")
    assert await first_token(worker) == token, "it had no KV of the weights before"
    await assert_whole(worker)


def pages_of(worker: WorkerProcess) -> int:
    """Bytes of memory that the engine process can give back, and has not."""
    status = Path(f"/proc/{worker.child('engine').pid}/status").read_text()
    [line] = [line for line in status.splitlines() if line.startswith("RssShmem")]
    return int(line.split()[1]) << 10


def memory(*tags: str, release: bool) -> pb.MemoryRequest:
    return pb.MemoryRequest(tags=tags, release=release)


@pytest.mark.all
async def test_a_worker_without_memory_waits_until_it_and_weights_are_back(
    worker: WorkerProcess, tmp_path: Path
) -> None:
    path = saved(tmp_path / "later", 6)
    await replaced(worker, path, "before")
    token = await first_token(worker)
    before = pages_of(worker)
    async with attached(worker) as stream:
        stub = stream.stub
        decode_id = await stream.reserve(request([1], sampling(max_tokens=2000, ignore_eos=True)))
        await stream.token(decode_id)
        for pause in (pb.PAUSE_NONE, pb.PAUSE_STEPS):
            await stub.SetPause(paused(pause))
            with pytest.raises(grpc.aio.AioRpcError, match=r"requests .*: call /pause\?mode=abort or"):
                await stub.SetMemory(memory("kv_cache", "weights", release=True))
            assert (await stub.GetStatus(pb.StatusRequest())).pause == pause
        await stub.SetPause(paused(pb.PAUSE_STEPS, 0.01, abort=True))
        status = await stub.SetMemory(memory("kv_cache", "weights", release=True))
        assert (list(status.released), status.lost_weights) == (["kv_cache", "weights"], True)
        assert before - pages_of(worker) > 1 << 18, "the system has it"
        refused = await stream.submit_prefill(request(range(100), sampling()), handover=True)
        assert (await stream.failure(refused)).code == pb.FAILURE_CODE_DRAINING
        with pytest.raises(grpc.aio.AioRpcError, match=r"memory is released \(kv_cache, weights\): call"):
            await stub.SetPause(pb.PauseRequest())
        async with replacement(worker) as new:
            with pytest.raises(grpc.aio.AioRpcError, match="the memory of the weights is released"):
                await new.stage(path, "early")
        status = await stub.SetMemory(memory("weights", release=False))
        assert (list(status.released), status.lost_weights) == (["kv_cache"], True)
        async with replacement(worker) as new:
            await new.stage(path, "after")
            with pytest.raises(grpc.aio.AioRpcError, match="the weights are being replaced: finish that"):
                await stub.SetMemory(memory("weights", release=True))
            await new.command(close=True)
            await new.command(apply=True)
        status = await stub.GetStatus(pb.StatusRequest())
        assert (status.pause, status.lost_weights) == (pb.PAUSE_STEPS, False), "its end brings no memory back"
        status = await stub.SetMemory(memory("kv_cache", "weights", release=False))
        assert (status.pause, list(status.released)) == (pb.PAUSE_NONE, [])
    assert await first_token(worker) == token
    await assert_whole(worker)


async def test_an_idle_worker_gives_its_cache_back_and_tells_routers(worker: WorkerProcess) -> None:
    token = await first_token(worker)
    async with attached(worker) as stream:
        cached, gone = set(await stream.hints(range(100))), set[int]()
        status = await stream.stub.SetMemory(memory("kv_cache", release=True))
        assert (status.pause, status.lost_weights) == (pb.PAUSE_STEPS, False)
        status = await stream.stub.SetMemory(memory("kv_cache", release=False))
        assert status.pause == pb.PAUSE_NONE, "nothing else had paused it"
        while not cached <= gone:
            gone |= {*(await within(stream.caches.get())).evicted}
        with pytest.raises(grpc.aio.AioRpcError, match="tags must be of kv_cache, weights, not 'graphs'"):
            await stream.stub.SetMemory(memory("graphs", release=True))
    assert await first_token(worker) == token
    await assert_whole(worker)
