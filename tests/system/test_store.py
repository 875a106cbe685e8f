"""`baton serve --kv-store local`: chats go on after all workers and their store were restarted."""

import asyncio
import os
import re
import signal
from pathlib import Path

import openai
import pytest

from baton.bench.lab.harness.workers import prompt_of
from baton.cluster.tools import status
from tests.kv_transfer.conftest import until
from tests.mooncake import libraries

from .machine import Machine
from .serve import Serve

pytestmark = pytest.mark.all


async def turn(client: openai.AsyncOpenAI, model: str, prompt: list[int]) -> tuple[str, int]:
    """The answer, and how many tokens of the prompt were cached."""
    answer = await client.completions.create(model=model, prompt=prompt, max_tokens=16, temperature=0)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    return answer.choices[0].text, answer.usage.prompt_tokens_details.cached_tokens or 0


@pytest.mark.long
async def test_chats_go_on_after_all_workers_and_then_the_store_were_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", libraries(tmp_path / "lib"))
    machine = Machine()
    served = Serve(machine, "--kv-store", "local?size=256MiB", "--advanced.num-threads", "1")
    try:
        await asyncio.to_thread(served.until_ready)
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", timeout=120) as client:
            [model] = [each.id for each in (await client.models.list()).data]
            prompts = [prompt_of(400, number) for number in range(3)]
            expected = [(await turn(client, model, prompt))[0] for prompt in prompts]

            async def restart(count: int) -> None:
                os.kill(served.process.pid, signal.SIGUSR1)
                while served.output().count("All workers have restarted.") < count:
                    assert served.process.poll() is None, served.output()
                    await asyncio.sleep(0.2)
                # Workers serve while they connect to the store.
                await asyncio.to_thread(
                    until, lambda: all(": open" in each for each in stores()), "its workers"
                )

            def stores() -> list[str]:
                return [status.store(worker) for worker in served.get("/status")["workers"]]

            await restart(1)
            found = [await turn(client, model, prompt) for prompt in prompts]
            assert [text for text, _ in found] == expected
            assert sum(cached for _, cached in found) >= 0.9 * 3 * 384, found
            await asyncio.to_thread(served.assert_whole)
            found_stores = await asyncio.to_thread(stores)
            assert all(re.search(": open, [1-9].* tokens/s", each) for each in found_stores), found_stores
            store = served.role("store 0")
            assert store is not None
            [master] = [each for each in store.children() if each.name() == "mooncake_master"]
            master.kill()
            assert [(await turn(client, model, prompt))[0] for prompt in prompts] == expected
            await asyncio.to_thread(until, lambda: served.output().count("store 0: ready") >= 1, "a store")
            await restart(2)
            assert [(await turn(client, model, prompt))[0] for prompt in prompts] == expected
            await asyncio.to_thread(served.assert_whole)
            store = served.role("store 0")
            assert store is not None
            processes = [store, *store.children()]
            assert len(processes) == 3
            await asyncio.to_thread(served.stop, signal.SIGTERM)
            assert not [each for each in processes if each.is_running()], "of the store"
    finally:
        served.kill()
        machine.remove()
