"""examples/chat.html streams a chat: its client in Node, and the page in a real browser."""

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path

from aiohttp import web

from baton.router.admission.keys import api_keys
from baton.router.text.tokenizer import ModelTokenizer
from tests.browser import browser

from .conftest import TEXT, make_cluster

PAGE = Path(__file__).parents[2] / "examples/chat.html"
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
        await page.until("globalThis.form && document.readyState === 'complete'")
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
