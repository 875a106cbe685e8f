"""A `baton router` over fake workers, as tests of its processes start it: `start`."""

import asyncio
import contextlib
import json
import os
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from baton.bench.lab.harness.processes import spawn
from baton.router.text.tokenizer import ModelTokenizer
from baton.rpc import worker_pb2
from tests.fake_worker import SECRET, FakeWorker, Lanes
from tests.forked import forking
from tests.within import WITHIN, eventually

TEXT = "The capital of France is Paris. Größe: 🙂🚀 and that is all I know about it."
KEY = "sk-a-secret-key"
AS_CLIENT = {"Authorization": f"Bearer {KEY}"}


@dataclass
class Routers:
    """A `baton router` and its processes."""

    popen: subprocess.Popen[bytes]
    ready: dict[str, Any]
    said: list[dict[str, Any]]
    log: Path
    http: aiohttp.ClientSession
    prefill: FakeWorker
    decode: FakeWorker
    prefills: list[FakeWorker]

    @property
    def url(self) -> str:
        return self.ready["url"]

    @property
    def admin(self) -> str:
        return self.ready["admin_url"]

    async def get(self, url: str) -> Any:
        async with self.http.get(url, headers={"Connection": "close"}) as response:
            return (
                await response.json()
                if response.content_type == "application/json"
                else await response.text()
            )

    async def ask(self, **body: Any) -> dict[str, Any]:
        """Opens a new connection, so that the kernel chooses a process."""
        asked = {"prompt": "Hello", "max_tokens": 99, **body}
        headers = {**AS_CLIENT, "Connection": "close"}
        async with self.http.post(self.url + "/v1/completions", json=asked, headers=headers) as response:
            assert response.status == 200, await response.text()
            return await response.json()

    async def new_keys(self, path: str, text: str, logged: str) -> None:
        """Replaces the file of keys, and waits for what the router logs of it."""
        before = self.log.read_text().count(logged)
        draft = Path(path).with_suffix(".new")
        draft.write_text(text)
        draft.replace(path)
        await eventually(lambda: self.log.read_text().count(logged) != before)

    async def statuses(self, key: str) -> set[int]:
        """Those of requests with this key. The kernel chooses their processes."""
        found = set()
        for _ in range(16):
            headers = {"Authorization": f"Bearer {key}", "Connection": "close"}
            async with self.http.get(self.url + "/v1/models", headers=headers) as response:
                found.add(response.status)
        return found

    async def processes(self) -> dict[int, int]:
        """Number and pid of each process that replies."""
        status = await self.get(self.admin + "/status")
        return {process["number"]: process["pid"] for process in status["processes"]}

    async def until(self, condition: Callable[[Any], bool]) -> Any:
        async with asyncio.timeout(WITHIN):
            while not condition(status := await self.get(self.admin + "/status")):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        return status

    async def exit_code(self) -> int:
        return await asyncio.to_thread(self.popen.wait, WITHIN)


@pytest.fixture(scope="module")
def forked_roles() -> Iterator[None]:
    with forking():
        yield


@pytest.fixture
async def start(
    tokenizer: ModelTokenizer, directory: Path, tmp_path: Path, forked_roles: None
) -> AsyncIterator[Callable[..., Any]]:
    async with contextlib.AsyncExitStack() as stack:
        http = await stack.enter_async_context(aiohttp.ClientSession())

        async def begin(*flags: str, prefills: int = 1) -> Routers:
            lanes, output_ids = Lanes(), [*tokenizer.encode(TEXT), 2]
            roles = [*[worker_pb2.POOL_PREFILL] * prefills, worker_pb2.POOL_DECODE]
            workers = [FakeWorker(role, lanes, output_ids) for role in roles]
            for worker in workers:
                worker.cache = set() if prefills > 1 else None
                worker.model, worker.served_model_name = str(directory), "fake"
                stack.push_async_callback((await worker.start()).kill)
            log = tmp_path / "router.log"
            environment = os.environ | {"BATON_CLUSTER_SECRET": SECRET.decode(), "BATON_GRPC_PORT": "0"}
            given = (
                "--port", "0", "--index", "4",  # the model of its workers
                *(part for worker in workers for part in ("--worker", worker.address)), *flags,
            )  # fmt: skip
            with log.open("wb") as output:
                popen, pipe = spawn("router", *given, environment=environment, output=output)
            stack.callback(popen.wait)
            stack.callback(popen.kill)

            def read() -> list[dict[str, Any]]:
                with pipe:
                    return [json.loads(line) for line in pipe]

            said = await asyncio.to_thread(read)
            ready = said[-1].get("ready", {}) if said else {}
            return Routers(popen, ready, said, log, http, workers[0], workers[-1], workers[:-1])

        yield begin
