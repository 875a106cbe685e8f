"""Reads how many prompt tokens a router holds back.

A router gives prefill workers at most two steps of prompts. The rest waits in its admission queue, and the
load that workers report does not contain it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

PATIENCE = 2.0  # seconds for a router to answer

_SERIES = re.compile(r"^baton:tokens_waiting_for_turn(?:\{.*\})? (\S+)$", re.M)


async def tokens_held(ready: Mapping[str, Any]) -> int:
    """Prompt tokens held back by the router on this machine that reported `ready`.

    Raises ConnectionError if the router does not answer.
    """
    import aiohttp

    # The admin port, if there is one, covers all processes of the router and needs no certificate.
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
        raise ConnectionError(f"{url}: has no metric baton:tokens_waiting_for_turn")
    return int(float(found[1]))
