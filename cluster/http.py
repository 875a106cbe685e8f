"""What the client commands share: one aiohttp session with the key, and errors a user understands."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

from cluster.options import EndpointOptions


@contextlib.asynccontextmanager
async def session(
    endpoint: EndpointOptions, timeout: aiohttp.ClientTimeout
) -> AsyncIterator[aiohttp.ClientSession]:
    """A session at `--url`. Inside it, what goes wrong on the way becomes a ValueError that names the URL."""
    headers = {"Authorization": f"Bearer {endpoint.api_key[0]}"} if endpoint.api_key else {}
    base = endpoint.url.rstrip("/") + "/"
    try:
        async with aiohttp.ClientSession(base, headers=headers, timeout=timeout) as client:
            yield client
    except (aiohttp.InvalidURL, aiohttp.ClientConnectorError) as error:
        raise ValueError(f"--url {endpoint.url}: nothing answers there; is `baton serve` running?") from error
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ValueError(f"--url {endpoint.url}: {error or 'no answer in time'}") from error


async def checked(response: aiohttp.ClientResponse) -> aiohttp.ClientResponse:
    """Raises ValueError with the server's own words for an error status."""
    if response.status < 400:
        return response
    try:
        body: Any = await response.json()
        message = body["error"]["message"]
    except (aiohttp.ContentTypeError, ValueError, KeyError, TypeError):
        message = response.reason
    hint = " Give a key with --api-key." if response.status == 401 else ""
    raise ValueError(f"{response.url}: {response.status} {message}{hint}")
