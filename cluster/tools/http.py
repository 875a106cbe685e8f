"""The HTTP session of the client commands: adds the API key and turns failures into clear errors."""

import contextlib
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from baton.cluster.options.clients import EndpointOptions

TIMEOUT = aiohttp.ClientTimeout(total=10)


@contextlib.asynccontextmanager
async def session(
    endpoint: EndpointOptions, timeout: aiohttp.ClientTimeout, flag: str = "--url"
) -> AsyncIterator[aiohttp.ClientSession]:
    """A session for the URL of `endpoint`, which the user gave as `flag`.

    Inside the context, a connection error becomes a ValueError that names the flag, the URL and the remedy.
    """
    if not endpoint.url.startswith(("http://", "https://")):
        raise ValueError(f"{flag} {endpoint.url}: it must begin with http:// or https://")
    if not _has_address(endpoint.url):
        raise ValueError(f"{flag} {endpoint.url}: it must have the form http://HOST:PORT")
    headers = {"Authorization": f"Bearer {endpoint.api_key[0]}"} if endpoint.api_key else {}
    base = endpoint.url.rstrip("/").removesuffix("/v1").rstrip("/") + "/"  # clients of OpenAI's API have /v1
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
            f"{flag} {endpoint.url}: TLS failed ({error}); use http:// if the port has no TLS; a port that "
            "requires client certificates does not work with this command"
        ) from error
    except (aiohttp.InvalidURL, aiohttp.ClientConnectorError) as error:
        raise ValueError(
            f"{flag} {endpoint.url}: no server answers; start `baton serve`, or correct {flag}"
        ) from error
    except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
        raise ValueError(
            f"{flag} {endpoint.url}: the connection was closed; use https:// if the port has TLS; a port "
            "that requires client certificates does not work with this command"
        ) from error
    except aiohttp.ClientResponseError as error:
        raise ValueError(
            f"{flag} {endpoint.url}: what answers there is not the HTTP port of a router; correct {flag}"
        ) from error
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ValueError(f"{flag} {endpoint.url}: {error or 'no answer in time'}") from error


def _has_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.hostname is not None and parts.port != 0
    except ValueError:  # the port is no number of a port
        return False


async def fetch(endpoint: EndpointOptions, path: str) -> Any:
    """What a server answers in JSON. Raises ValueError as `session` and `answer`."""
    async with session(endpoint, TIMEOUT) as client:
        return await answer(client.get(path))


async def answer(request: AbstractAsyncContextManager[aiohttp.ClientResponse]) -> Any:
    """The JSON that answers a request of a session. Raises ValueError as `checked`."""
    async with request as response:
        return await (await checked(response)).json()


async def error_message(response: aiohttp.ClientResponse) -> str:
    """The error message in the body of a response, or its HTTP reason."""
    try:
        body: Any = await response.json()
        return str(body["error"]["message"])
    except (aiohttp.ContentTypeError, ValueError, KeyError, TypeError):
        return str(response.reason)


async def checked(response: aiohttp.ClientResponse) -> aiohttp.ClientResponse:
    """Returns `response`. Raises ValueError with the server's message for an error status."""
    if response.status < 400:
        return response
    hint = "; set BATON_API_KEY to a key of this server" if response.status == 401 else ""
    raise ValueError(f"{response.url}: {response.status} {await error_message(response)}{hint}")
