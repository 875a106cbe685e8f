"""examples/chat.html streams a chat: its client in Node, and the page in a real browser."""

import asyncio
import contextlib
import json
import re
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from router.admission.keys import api_keys
from router.text.tokenizer import ModelTokenizer

from .conftest import TEXT, make_cluster

PAGE = Path(__file__).parents[2] / "examples/chat.html"
BROWSERS = [shutil.which("chromium"), shutil.which("google-chrome"), Path(sys.executable).parent / "chromium"]
"""In the order of preference. `make test` installs the last one."""
KEYS = api_keys(["k"], None)


async def test_the_client_of_the_page_yields_deltas(tokenizer: ModelTokenizer, tmp_path: Path):
    found = re.search(r'<script id="client">(.*?)</script>', PAGE.read_text(), re.S)
    assert found is not None
    call = """
    const texts = [], [url] = process.argv.slice(1), messages = [{role: "user", content: "Hi"}];
    for await (const delta of chatDeltas(url, "k", {messages})) texts.push(delta.content);
    const error = await chatDeltas(url, "wrong", {messages}).next().catch(error => error.message);
    console.log(JSON.stringify([texts, error]));
    """
    async with make_cluster(tokenizer, tmp_path, api_keys=KEYS) as cluster:
        flags = ["--input-type=module", "-e", found[1] + call, cluster.url]
        node = await asyncio.create_subprocess_exec("node", *flags, stdout=asyncio.subprocess.PIPE)
        printed, _ = await asyncio.wait_for(node.communicate(), 20)
        texts, error = json.loads(printed)
        assert "".join(texts) == TEXT
        assert len(texts) > 10
        assert "send a valid API key" in error


async def test_the_page_chats_in_a_browser(tokenizer: ModelTokenizer, tmp_path: Path):
    async with (
        served_page() as origin,
        make_cluster(tokenizer, tmp_path, api_keys=KEYS, allowed_origins=(origin,)) as cluster,
        browser(f"{origin}/chat.html", tmp_path / "profile") as page,
    ):
        await page.run(f"url.value = '{cluster.url}'; key.value = 'k'")
        for question in ("Where is Paris?", "And Rome?"):
            await page.run(f"text.value = {question!r}; form.requestSubmit()")
            await page.until("!send.disabled")
        shown = await page.run("[...chat.children].map(each => `${each.className}: ${each.textContent}`)")
        answer = f"assistant: {TEXT}"
        assert shown == ["user: Where is Paris?", answer, "user: And Rome?", answer]
        assert cluster.prompt.count(TEXT) == 1, "the second request has the first answer"
        await page.run("key.value = 'wrong'; text.value = 'x'; form.requestSubmit()")
        await page.until("!send.disabled")
        assert "valid API key" in await page.run("chat.querySelector('.error').textContent")


@contextlib.asynccontextmanager
async def served_page() -> AsyncIterator[str]:
    """Serves examples/. Yields the origin."""
    app = web.Application()
    app.router.add_static("/", PAGE.parent)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


class Page:
    """A page of a browser, through the Chrome DevTools Protocol."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket

    async def run(self, script: str) -> Any:
        """Returns the value of the script."""
        params = {"expression": script, "returnByValue": True}
        await self._socket.send_json({"id": 1, "method": "Runtime.evaluate", "params": params})
        result = (await self._socket.receive_json(timeout=20))["result"]
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def until(self, condition: str) -> None:
        async with asyncio.timeout(20):
            while not await self.run(condition):  # noqa: ASYNC110
                await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def browser(url: str, profile: Path) -> AsyncIterator[Page]:
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    flags += ["--remote-debugging-port=0", f"--user-data-dir={profile}"]
    program = next(filter(None, BROWSERS))
    process = await asyncio.create_subprocess_exec(program, *flags, url, stderr=asyncio.subprocess.PIPE)
    assert process.stderr is not None
    try:
        async with asyncio.timeout(30), aiohttp.ClientSession() as http:
            found = None
            while found is None:
                found = re.search(rb"ws://([^/]+)/", await process.stderr.readline())
            pages: list[dict[str, Any]] = []
            while not pages:
                async with http.get(f"http://{found[1].decode()}/json") as response:
                    pages = [page for page in await response.json() if page["url"] == url]
            async with http.ws_connect(pages[0]["webSocketDebuggerUrl"]) as socket:
                page = Page(socket)
                await page.until("globalThis.form && document.readyState === 'complete'")
                yield page
    finally:
        process.terminate()
        await process.communicate()
