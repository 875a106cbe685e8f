"""The dashboard of a real cluster under load, while a worker is killed in the middle of answers."""

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.browser import browser
from tests.within import WITHIN

from .machine import Machine
from .serve import Serve

pytestmark = pytest.mark.all

STREAMS = 4
QUESTIONS = ("Why is the sky blue?", "Name the planets of the solar system.", "How do bridges stand?")


async def talk(http: aiohttp.ClientSession, url: str, name: str, until: asyncio.Event) -> None:
    """A chat of one question after the other. Each answer is complete, whichever worker dies."""
    for turn in range(1000):
        question = {
            "role": "user",
            "content": f"{QUESTIONS[turn % len(QUESTIONS)]} ({name}, {turn})" + " Please." * 90,
        }
        body: dict[str, Any] = {"messages": [question], "max_tokens": 32, "stream": True, "ignore_eos": True}
        headers = {"x-request-id": f"{name}-{turn}"}
        async with http.post(f"{url}/v1/chat/completions", json=body, headers=headers) as response:
            text = await response.text()
        assert '"finish_reason":"length"' in text, text[-500:]
        if until.is_set():
            return


@pytest.mark.long
async def test_a_load_with_a_killed_worker_is_seen(tmp_path: Path) -> None:
    machine = Machine()
    server = Serve(machine, "--prefill", "1", "--decode", "2")
    try:
        await asyncio.to_thread(server.until_ready)
        ending = asyncio.Event()
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10 * WITHIN)) as http,
            browser(f"{server.url}/dashboard", tmp_path / "profile") as page,
        ):
            await page.until("globalThis.main && !main.hidden", WITHIN)
            await page.show_as(1280, 1320, dark=False)
            talks = [asyncio.create_task(talk(http, server.url, f"user{n}", ending)) for n in range(STREAMS)]
            await page.until("requests.rows.length > 6", 10 * WITHIN)
            decode = server.role("decode 1")
            assert decode is not None
            decode.send_signal(signal.SIGKILL)
            await page.until("failures.rows.length > 1", 10 * WITHIN)
            await page.keep_picture("dashboard.png")
            await page.until(
                "[...workers.rows].some(row => /decode 1.*ready/.test(row.textContent))", 10 * WITHIN
            )
            ending.set()
            await asyncio.gather(*talks)
            # The killed worker's last request went on elsewhere, and its timeline shows how.
            name = json.loads(await page.run("JSON.stringify(failures.rows[1].cells[1].textContent)"))
            life: dict[str, Any] = {}
            kinds: set[str] = set()
            async with asyncio.timeout(WITHIN):
                while "decode" not in kinds:  # the worker reports it behind the last token
                    async with http.get(f"{server.url}/status/requests/{name}") as response:
                        life = await response.json()
                    kinds = {phase["kind"] for phases in life["phases"].values() for phase in phases}
            assert kinds >= {"queue", "prefill", "transfer", "injection"}
            assert "attempt ended: lost" in {event["what"] for event in life["events"]}
            await page.run("failures.rows[1].querySelector('button').click()")
            await page.until("!!lanes.querySelector('.decode')")
            await page.show_as(1000, 620, dark=False)
            await page.keep_picture("timeline.png")
        server.assert_whole()
        server.stop(signal.SIGTERM)
    finally:
        server.kill()
        machine.remove()
