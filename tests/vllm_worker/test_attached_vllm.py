"""Two real vLLM engines whose connectors are attached to workers. The test is both workers and the router."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import pytest

from baton.engine.api.stats import StepStats
from baton.kv_transfer import (
    FetchFailed,
    Heartbeat,
    Injected,
    Released,
    TransferConfig,
    channel_pair,
    spawn_transfer,
)
from baton.kv_transfer.spawn import MAX_MESSAGE, Ready, TransferStats, decode_from_transfer
from baton.vllm_worker.attachment import Close, ConnectorLink, FromConnector
from baton.vllm_worker.metadata import Costs
from tests.kv_transfer.transfer_process import deadlines
from tests.vllm_worker.arenas import make_arenas
from tests.vllm_worker.engines import GREEDY, Request, Server, generated, prompts_of, save_model
from tests.within import WITHIN

pytestmark = pytest.mark.all

SLOTS, SLOT_BYTES = 16, 1 << 20
TICK = 0.25


class Worker:
    """What a service process and an engine process do, around a real engine."""

    def __init__(self, model: Path, role: str, ranks: int, **options: Any) -> None:
        self.incarnation = int.from_bytes(os.urandom(8))
        self.heard: list[FromConnector] = []
        self.costs = StepStats()
        self._heartbeat = Heartbeat.create()
        arenas, self._theirs = make_arenas(ranks, SLOTS, SLOT_BYTES)
        self._directory = TemporaryDirectory()
        self.link = ConnectorLink(arenas, self._heartbeat.fd, Path(self._directory.name))
        connector = {
            "kv_role": role, "kv_load_failure_policy": "fail",
            "kv_connector_extra_config": {"attach": self.link.path},
        }  # fmt: skip
        self.server = Server(model, kv_transfer_config=connector, tensor_parallel_size=ranks, **options)
        self._service, self._transfer_service = channel_pair()
        self._more = asyncio.Event()

    async def start(self) -> None:
        attach = await self.link.attached()
        config = TransferConfig(
            name=f"vllm {attach.rank}", incarnation=self.incarnation, layout=attach.layout, lanes=2,
            model_fingerprint=attach.model_fingerprint, num_slots=SLOTS, slot_bytes=SLOT_BYTES,
            deadlines=deadlines(), exports=True,
        )  # fmt: skip
        self.transfer = spawn_transfer(
            config, sending=self._theirs[0], receiving=self._theirs[1], heartbeat=self._heartbeat,
            service=self._transfer_service, secret=b"s" * 32,
        )  # fmt: skip
        ready = decode_from_transfer(await asyncio.to_thread(self._service.recv, MAX_MESSAGE))
        assert isinstance(ready, Ready)
        self.port = ready.port
        await asyncio.to_thread(self.server.line)
        self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._tick())]

    async def _listen(self) -> None:
        while True:
            for message in await self.link.receive():
                if isinstance(message, Costs):
                    self.costs = message.costs
                else:
                    self.heard.append(message)
            self._more.set()

    async def _tick(self) -> None:
        while True:  # as while vLLM has no request
            self._heartbeat.tick()
            await asyncio.sleep(TICK)

    async def answers(self, requests: list[Request]) -> list[list[int]]:
        found = await asyncio.to_thread(self.server.answers, requests)
        return [tokens for tokens, _ in found]

    async def until_heard(self, count: int) -> list[FromConnector]:
        """Takes the next messages of the connector."""
        async with asyncio.timeout(WITHIN):
            while len(self.heard) < count:
                self._more.clear()
                await self._more.wait()
        found, self.heard = self.heard[:count], self.heard[count:]
        return found

    async def until_asked(self, count: int) -> None:
        """Returns when so many FETCHes wait for prefills of this worker."""
        async with asyncio.timeout(WITHIN):
            while True:  # the process reports once a second
                report = decode_from_transfer(await asyncio.to_thread(self._service.recv, MAX_MESSAGE))
                if isinstance(report, TransferStats) and report.fetches_waiting >= count:
                    return

    def sends(self, prefill_id: bytes) -> dict[str, Any]:
        return {"do_remote_decode": True, "prefill_id": prefill_id.hex()}

    def fetched_by(self, decode_id: bytes, prefill_id: bytes) -> dict[str, Any]:
        return {
            "do_remote_prefill": True, "remote_engine_id": f"{self.incarnation:016x}",
            "remote_request_id": prefill_id.hex(), "remote_host": "127.0.0.1", "remote_port": self.port,
            "remote_block_ids": [], "decode_id": decode_id.hex(), "attempt": 0,
        }  # fmt: skip

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        children = self.server.process.children(recursive=True)
        self.server.process.kill()
        _, alive = await asyncio.to_thread(psutil.wait_procs, children, WITHIN)
        assert not alive, "they die with the engine process"
        self.server.kill()
        self._service.close()
        await asyncio.to_thread(self.transfer.wait)
        self.link.close()
        self._directory.cleanup()


@contextlib.asynccontextmanager
async def pair(
    model: Path, ranks: int, both: dict[str, Any], **decode_options: Any
) -> AsyncIterator[tuple[Worker, Worker]]:
    prefill = Worker(model, "kv_producer", ranks, graphs=True, **both)
    decode = Worker(model, "kv_consumer", ranks, **both, **decode_options)
    try:
        await asyncio.gather(prefill.start(), decode.start())
        yield prefill, decode
    finally:
        await asyncio.gather(prefill.close(), decode.close())


TOKENS = 30
WHOLE: dict[str, Any] = {"enable_chunked_prefill": False, "max_num_batched_tokens": 2048}
"""Prompts in one step each. By default they are computed in chunks, and scheduling is asynchronous."""
V2 = {"v2": True}
"""The model runner that vLLM chooses on GPUs. On CPUs it chooses V1."""
SAMPLED: dict[str, Any] = {"temperature": 2.0, "max_tokens": 1, "ignore_eos": True}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("ranks", "both", "options"),
    [
        (1, {}, {"one_process": True}),
        pytest.param(1, {}, {}, marks=pytest.mark.long),
        pytest.param(1, V2, {}, marks=pytest.mark.long),
        pytest.param(1, {"async_scheduling": False, **V2}, {}, marks=pytest.mark.long),
        pytest.param(1, {**WHOLE, **V2}, {}, marks=pytest.mark.long),
        pytest.param(1, {"async_scheduling": False, **WHOLE, **V2}, {}, marks=pytest.mark.long),
        pytest.param(2, V2, {}, marks=pytest.mark.long),
        pytest.param(1, {"async_scheduling": False}, {}, marks=pytest.mark.long),
        pytest.param(1, WHOLE, {}, marks=pytest.mark.long),
        pytest.param(1, {"async_scheduling": False, **WHOLE}, {}, marks=pytest.mark.long),
        pytest.param(1, {}, {"block_size": 32, "num_gpu_blocks_override": 48}, marks=pytest.mark.long),
        pytest.param(2, {}, {}, marks=pytest.mark.long),
    ],
    ids=str,
)
async def test_a_decode_goes_on_after_the_first_token(
    tmp_path: Path, ranks: int, both: dict[str, Any], options: dict[str, Any]
) -> None:
    """Decode would sample another token: it is greedy. Blocks are few, so vLLM preempts requests. Others are
    in its batch that have no first token. Two prompts begin with a block that one step computes."""
    model = save_model(tmp_path)
    block, *prompts = prompts_of([128, 1, 60, 3, 700, *range(100, 128, 4)], 1)
    prompts[:2] = [block + prompts[0], block + prompts[1]]
    others = prompts_of([50, 120], 2)
    few = {"num_gpu_blocks_override": 12, "max_model_len": 1024}
    async with pair(model, ranks, both, **few | options) as (prefill, decode):
        prefill_ids, decode_ids = ([os.urandom(16) for _ in prompts] for _ in range(2))
        prefills: list[Request] = [
            (prompt, SAMPLED, prefill.sends(x)) for prompt, x in zip(prompts, prefill_ids, strict=True)
        ]
        greedy = GREEDY | {"max_tokens": TOKENS}
        decodes: list[Request] = [
            (prompt, greedy, prefill.fetched_by(decode_id, prefill_id))
            for prompt, decode_id, prefill_id in zip(prompts, decode_ids, prefill_ids, strict=True)
        ]
        plain: list[Request] = [(prompt, greedy, None) for prompt in others]
        decodes = [plain[0], *decodes, plain[1]]
        decoding = asyncio.create_task(decode.answers(decodes))
        await prefill.until_asked(2)
        first, found = await asyncio.gather(prefill.answers(prefills), decoding)
        landed = await decode.until_heard(len(prompts))
        assert {x.decode_id for x in landed if isinstance(x, Injected)} == set(decode_ids), landed
        told = await prefill.until_heard(2 * len(prompts))
        assert {x.prefill_id for x in told if isinstance(x, Released) and x.reason == "acked"} == set(
            prefill_ids
        )
        assert decode.server.preemptions > 0
        assert decode.costs.step_seconds > 0
        assert decode.costs.step_table is not None
        if "one_process" in options:  # the test sees steps of its own process
            assert decode.server.bounded > 0, "prompts beside decodes"
            one_decodes = (others[0], greedy | {"max_tokens": 60}, None)
            await decode.answers([one_decodes, *((each, greedy, None) for each in prompts_of([400, 401], 3))])
        assert first != [tokens[:1] for tokens in generated(model, prompts, 1)], "sampled"
        continued = [prompt + token for prompt, token in zip(prompts, first, strict=True)]
        rest = generated(model, continued, TOKENS - 1)
        alone = generated(model, others, TOKENS)
        assert found == [alone[0], *rest, alone[1]]
        local = await decode.answers([(prompts[0], greedy, {"first_token": 7})])
        assert local == generated(model, [[*prompts[0], 7]], TOKENS - 1), "a prefill of the same worker"
        await seed(prefill, decode, prompts[2])
        await close_and_lose(prefill, decode, prompts[1])


async def seed(prefill: Worker, decode: Worker, prompt: list[int]) -> None:
    """The decode's generator goes on where that of the prefill ended."""
    params = SAMPLED | {"seed": 5}
    [whole] = await prefill.answers([(prompt, params | {"max_tokens": TOKENS}, None)])
    prefill_id, decode_id = os.urandom(16), os.urandom(16)
    [first] = await prefill.answers([(prompt, params, prefill.sends(prefill_id))])
    fetched = decode.answers(
        [(prompt, params | {"max_tokens": TOKENS}, prefill.fetched_by(decode_id, prefill_id))]
    )
    assert first + (await fetched)[0] == whole
    await prefill.until_heard(2)
    await decode.until_heard(1)


async def close_and_lose(prefill: Worker, decode: Worker, prompt: list[int]) -> None:
    """The router closes a prefill that vLLM has finished. Its decode ends with an error."""
    prefill_id, decode_id = os.urandom(16), os.urandom(16)
    assert len(await prefill.answers([(prompt, SAMPLED, prefill.sends(prefill_id))])) == 1
    prefill.link.send(Close(prefill_id))
    told = await prefill.until_heard(2)  # in any order: vLLM's next step and the test are not in step
    assert Released(prefill_id, "cancelled") in told
    [tokens] = await decode.answers([(prompt, GREEDY, prefill.fetched_by(decode_id, prefill_id))])
    assert tokens == []
    [lost] = await decode.until_heard(1)
    assert isinstance(lost, FetchFailed)
    assert lost.decode_id == decode_id
