"""What the client commands share: one aiohttp session with the key, and errors a user understands."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

from cluster.options import EndpointOptions


@contextlib.asynccontextmanager
async def session(
    endpoint: EndpointOptions, timeout: aiohttp.ClientTimeout, flag: str = "--url"
) -> AsyncIterator[aiohttp.ClientSession]:
    """A session at the URL, which came by `flag`. Inside it, what goes wrong on the way becomes a ValueError
    that names both."""
    headers = {"Authorization": f"Bearer {endpoint.api_key[0]}"} if endpoint.api_key else {}
    base = endpoint.url.rstrip("/") + "/"
    try:
        async with aiohttp.ClientSession(base, headers=headers, timeout=timeout) as client:
            yield client
    except aiohttp.ClientConnectorCertificateError as error:
        raise ValueError(
            f"{flag} {endpoint.url}: its certificate is not trusted here ({error.certificate_error}); "
            "name the file of its authority in SSL_CERT_FILE"
        ) from error
    except aiohttp.ClientConnectorSSLError as error:
        raise ValueError(
            f"{flag} {endpoint.url}: no TLS connection ({error}); is it http://, or are clients asked for "
            "certificates?"
        ) from error
    except (aiohttp.InvalidURL, aiohttp.ClientConnectorError) as error:
        raise ValueError(
            f"{flag} {endpoint.url}: nothing answers there; is `baton serve` running?"
        ) from error
    except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
        raise ValueError(
            f"{flag} {endpoint.url}: the connection was closed; a port with TLS needs https://, and one that "
            "asks clients for certificates takes no command of Baton"
        ) from error
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ValueError(f"{flag} {endpoint.url}: {error or 'no answer in time'}") from error


async def told(response: aiohttp.ClientResponse) -> str:
    """The server's own words for an error status."""
    try:
        body: Any = await response.json()
        return str(body["error"]["message"])
    except (aiohttp.ContentTypeError, ValueError, KeyError, TypeError):
        return str(response.reason)


async def checked(response: aiohttp.ClientResponse) -> aiohttp.ClientResponse:
    """Raises ValueError with the server's own words for an error status."""
    if response.status < 400:
        return response
    hint = " Give a key with --api-key." if response.status == 401 else ""
    raise ValueError(f"{response.url}: {response.status} {await told(response)}{hint}")
