"""A real browser, driven through the Chrome DevTools Protocol."""

import asyncio
import base64
import contextlib
import os
import re
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

from tests.within import WITHIN

BROWSERS = [shutil.which("chromium"), shutil.which("google-chrome"), Path(sys.executable).parent / "chromium"]
"""In the order of preference. `make prepare` installs the last one."""


class Page:
    """A page of the browser."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Calls a method of the protocol, and returns its result."""
        await self._socket.send_json({"id": 1, "method": method, "params": params})
        return (await self._socket.receive_json(timeout=WITHIN))["result"]

    async def run(self, script: str) -> Any:
        """Returns the value of the script."""
        result = await self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def show_as(self, width: int, height: int, *, dark: bool) -> None:
        """Gives the page this size in pixels, and a user's choice of colours."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        await self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def keep_picture(self, name: str) -> None:
        """Writes what the page shows to `name` in the folder that SCREENSHOTS names (`make screenshots`)."""
        if folder := os.environ.get("SCREENSHOTS"):
            picture = await self.call("Page.captureScreenshot", format="png")
            (Path(folder) / name).write_bytes(base64.b64decode(picture["data"]))

    async def until(self, condition: str, seconds: float = WITHIN) -> None:
        async with asyncio.timeout(seconds):
            while not await self.run(condition):  # noqa: ASYNC110
                await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def browser(url: str, profile: Path, locale: str = "en_US.UTF-8") -> AsyncIterator[Page]:
    """Opens the page at `url`. `profile`: a new directory."""
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    flags += ["--remote-debugging-port=0", f"--user-data-dir={profile}"]
    program = next(filter(None, BROWSERS))
    process = await asyncio.create_subprocess_exec(
        program, *flags, url, stderr=asyncio.subprocess.PIPE, env={**os.environ, "LC_ALL": locale}
    )
    assert process.stderr is not None
    try:
        async with aiohttp.ClientSession() as http:
            async with asyncio.timeout(WITHIN):
                found = None
                while found is None:
                    found = re.search(rb"ws://([^/]+)/", await process.stderr.readline())
                pages: list[dict[str, Any]] = []
                while not pages:
                    async with http.get(f"http://{found[1].decode()}/json") as response:
                        pages = [page for page in await response.json() if page["url"] == url]
            target = pages[0]["webSocketDebuggerUrl"]
            async with http.ws_connect(target, max_msg_size=64 << 20) as socket:
                yield Page(socket)
    finally:
        process.terminate()
        await process.communicate()
