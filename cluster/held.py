"""What a router holds back: the part of the load that no worker sees. Its gate gives workers two steps of
prompts and keeps the rest, so that a long queue is there, and not where prefill workers could tell of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

PATIENCE = 2.0  # seconds that a router has to answer

_SERIES = re.compile(r"^baton:tokens_waiting_for_turn(?:\{.*\})? (\S+)$", re.M)


async def tokens_held(ready: Mapping[str, Any]) -> int:
    """By the router, on this machine, that reported `ready`. Raises ConnectionError where it does not
    say."""
    import aiohttp

    # The admin port, where there is one: it knows all processes, and asks for no certificate.
    url = f"{ready.get('admin_url', ready['url'])}/metrics"
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PATIENCE)) as session,
            session.get(url) as response,
        ):
            found = _SERIES.search(await response.text())
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ConnectionError(f"{url}: {error}") from error
    if found is None:
        raise ConnectionError(f"{url}: it does not say what it holds back")
    return int(float(found[1]))
