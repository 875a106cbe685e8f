"""The page /chat streams a chat and draws Markdown: its client in Node, and the page in a real browser."""

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from baton.router.admission.keys import api_keys
from baton.router.text.tokenizer import ModelTokenizer
from tests.browser import browser
from tests.within import within

from .conftest import TEXT, make_cluster

pytestmark = pytest.mark.all

PAGES = Path(__file__).parents[2] / "router/endpoints/pages"
SHOWN = """[...chat.children].map(each =>
    `${each.className}: ${(each.querySelector('.content') ?? each).textContent}`)"""
KEYS = api_keys(["k"], None)


async def test_the_client_of_the_page_yields_choices(tokenizer: ModelTokenizer, tmp_path: Path):
    client = (PAGES / "client.js").read_text()
    call = """
    const texts = [], [url] = process.argv.slice(1), messages = [{role: "user", content: "Hi"}];
    for await (const {delta} of chatChoices(url, "k", {messages})) texts.push(delta.content);
    const error = await chatChoices(url, "wrong", {messages}).next().catch(error => error.message);
    const cut = [];
    for await (const {finish_reason} of chatChoices(url, "k", {messages, max_tokens: 2}))
        cut.push(finish_reason);
    const gone = await chatChoices("http://127.0.0.1:9", "", {messages}).next().catch(error => error.message);
    console.log(JSON.stringify([texts, error, cut.at(-1), gone]));
    """
    async with make_cluster(tokenizer, tmp_path, api_keys=KEYS) as cluster:
        flags = ["--input-type=module", "-e", client + call, cluster.url]
        node = await asyncio.create_subprocess_exec("node", *flags, stdout=asyncio.subprocess.PIPE)
        printed, _ = await within(node.communicate())
        texts, error, cut, gone = json.loads(printed)
        assert "".join(texts) == TEXT
        assert len(texts) > 10
        assert "send a valid API key" in error
        assert cut == "length"
        assert gone.startswith("No answer from http://127.0.0.1:9. Check that the server runs")


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
        shown = await page.run(SHOWN)
        answer = f"assistant: {TEXT}"
        assert shown == ["user: Where is Paris?", answer, "user: And Rome?", answer]
        assert cluster.prompt.count(TEXT) == 1, "the second request has the first answer"
        footer = await page.run("chat.lastChild.querySelector('footer').textContent")
        assert re.search(r"tokens/s · prefill 0 → decode 0$", footer), footer
        await page.run("key.value = 'wrong'; text.value = 'x'; form.requestSubmit()")
        await page.until("!send.disabled")
        assert "valid API key" in await page.run("chat.querySelector('.error').textContent")


async def test_the_first_page_leads_to_a_chat_with_its_own_router(tokenizer: ModelTokenizer, tmp_path: Path):
    async with (
        make_cluster(tokenizer, tmp_path, api_keys=KEYS) as cluster,
        aiohttp.ClientSession() as http,
        browser(f"{cluster.url}/chat", tmp_path / "profile") as page,
    ):
        async with http.get(cluster.url) as response:
            links = re.findall(r'href="(\w+)"', await response.text())
            assert links == ["dashboard", "chat", "docs"]
            assert "script-src 'self'" in response.headers["Content-Security-Policy"]
        await page.until("globalThis.form && document.readyState === 'complete'")
        await page.run("key.value = 'k'; text.value = 'Hi'; form.requestSubmit()")
        await page.until("!send.disabled")
        assert await page.run(SHOWN) == ["user: Hi", f"assistant: {TEXT}"]
        await page.until("model.textContent")  # the page asks for it beside the answer
        assert await page.run("model.textContent") == "fake"


async def test_a_page_that_may_not_ask_the_router_says_what_to_do(tokenizer: ModelTokenizer, tmp_path: Path):
    async with (
        served_page() as origin,
        make_cluster(tokenizer, tmp_path) as cluster,
        browser(f"{origin}/chat.html", tmp_path / "profile") as page,
    ):
        await page.until("globalThis.form && document.readyState === 'complete'")
        await page.run(f"url.value = '{cluster.url}'; text.value = 'Hi'; form.requestSubmit()")
        await page.until("!send.disabled")
        error = await page.run("chat.querySelector('.error').textContent")
        assert error.endswith(f"give the router --allowed-origins {origin}.")


MARKDOWN = """# A *title*
Text with **bold `code`**, _light_, 2*3*4 and snake_case_name,
<b>no HTML</b>, [a link](https://x.example/a), [a trap](javascript:alert(1)).

- one
- two
  1. inner

> quoted

| a | b |
|---|---|
| 1 | `2` |

```python
print("# <script>")
```"""
DRAWN = (
    "<h1>A <em>title</em></h1>"
    "<p>Text with <strong>bold <code>code</code></strong>, <em>light</em>, 2*3*4 and snake_case_name,\n"
    '&lt;b&gt;no HTML&lt;/b&gt;, <a href="https://x.example/a" rel="noopener noreferrer nofollow" '
    'target="_blank">a link</a>, [a trap](javascript:alert(1)).</p>'
    '<ul><li>one</li><li>two<ol start="1"><li>inner</li></ol></li></ul><blockquote><p>quoted</p></blockquote>'
    "<table><tr><th>a</th><th>b</th></tr><tr><td>1</td><td><code>2</code></td></tr></table>"
    '<pre><code>print("# &lt;script&gt;")</code></pre>'
)


async def test_markdown_becomes_elements_and_never_html(tmp_path: Path):
    async with served_page() as origin, browser(f"{origin}/home.html", tmp_path / "profile") as page:
        await page.until("document.querySelector('.home') && document.readyState === 'complete'")
        await page.run("import('./markdown.js').then(({markdown}) => { globalThis.draw = markdown })")
        await page.until("!!globalThis.draw")
        script = f"document.body.replaceChildren(...draw({json.dumps(MARKDOWN)})), document.body.innerHTML"
        assert await page.run(script) == DRAWN
        cut = json.dumps(
            [MARKDOWN[:end] for end in range(len(MARKDOWN))] + ["*" * 3000, "`" * 3001, "> " * 500, "[" * 900]
        )
        assert await page.run(f"{cut}.map(draw).length") == len(MARKDOWN) + 4


@contextlib.asynccontextmanager
async def served_page() -> AsyncIterator[str]:
    """Serves the page from another origin. Yields the origin."""
    app = web.Application()
    app.router.add_static("/", PAGES)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
