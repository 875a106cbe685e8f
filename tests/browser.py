"""A real browser, driven through the Chrome DevTools Protocol."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

BROWSERS = [shutil.which("chromium"), shutil.which("google-chrome"), Path(sys.executable).parent / "chromium"]
"""In the order of preference. `make test` installs the last one."""


class Page:
    """A page of the browser."""

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
    """Opens the page at `url`. `profile`: a new directory."""
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
                yield page
    finally:
        process.terminate()
        await process.communicate()
