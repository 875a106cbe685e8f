"""Fetches the files that a request names by URLs of http or https.

A URL is a client's word, and the router stands inside a network that the client does not reach. So:

- Only hosts of `--allowed-media-domains` are asked, also behind redirects, of which there are few.
- A connection is opened only to a public address. The address is checked where its socket is made. So neither
  DNS, which may answer differently each time, nor a number in place of a name leads elsewhere.
- No proxy, cookie or credential of the router is used.
- The bytes of a request's files and their time are limited, and no compression hides bytes.

The files are decoded in child processes, like those of `data:` URLs.
"""

import asyncio
import errno
import socket
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from ipaddress import IPv6Address, ip_address

import aiohttp
from yarl import URL

from baton import version
from baton.router.admission.slots import Slots
from baton.router.config import host_of
from baton.router.errors import InvalidRequest, Unsupported

MOST_REDIRECTS = 3
MOST_CONNECTIONS = 64
MOST_OF_HOST = 16
"""Connections at a time."""
_CHUNK = 64 << 10
_REDIRECTS = (301, 302, 303, 307, 308)
_NAT64 = b"\x00\x64\xff\x9b" + bytes(8)
"""The prefix of IPv6 addresses that a gateway maps to IPv4 addresses (RFC 6052)."""


class MediaFetcher:
    """Of one router process. It opens no connection before the first file."""

    def __init__(self, domains: Collection[str], most_bytes: int, seconds: float) -> None:
        """`domains`: hosts that may be asked. `most_bytes`: of all files of a request. `seconds`: for all of
        them together."""
        self._domains = frozenset(map(host_of, domains))
        self._most_bytes = most_bytes
        self._seconds = seconds
        self._session: aiohttp.ClientSession | None = None
        self._connections = Slots(MOST_CONNECTIONS)
        self._of_host = {host: Slots(MOST_OF_HOST) for host in self._domains}

    async def fetch(self, key: str, urls: Sequence[str], receive: Callable[[int], None]) -> dict[str, bytes]:
        """Fetches the files of these URLs at the same time. `key` names the client's API key: keys take turns
        for connections. `receive` is told of all bytes, and may refuse them. Raises InvalidRequest naming the
        URL, and what `receive` raises."""
        files: dict[str, bytes] = {}
        total = 0

        def count(url: str, size: int) -> None:
            nonlocal total
            total += size
            if total > self._most_bytes:
                text = f"the images of the request have more than {self._most_bytes} bytes"
                raise _wrong(url, f"{text} (--advanced.max-body-size)")
            receive(size)

        async def one(url: str) -> None:
            files[url] = await self._fetched(key, url, lambda size: count(url, size))

        try:
            async with asyncio.timeout(self._seconds), asyncio.TaskGroup() as group:
                for url in urls:
                    group.create_task(one(url))
        except TimeoutError:
            late_url = next((url for url in urls if url not in files), urls[0])
            raise _wrong(late_url, f"did not come within {self._seconds:g} s") from None
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return files

    async def _fetched(self, key: str, sent: str, count: Callable[[int], None]) -> bytes:
        try:
            target = self._allowed(URL(sent), sent)
            for _ in range(MOST_REDIRECTS + 1):
                async with self._connection(key, target) as response:
                    if response.status not in _REDIRECTS:
                        return await _body(response, sent, count)
                    location = response.headers.get("Location", "")
                target = self._allowed(target.join(URL(location)), sent)
        except ValueError as error:  # of yarl
            raise _wrong(sent, f"is not a URL: {error}") from None
        except (aiohttp.ClientError, OSError) as error:
            raise _wrong(sent, f"cannot be fetched: {_reason(error)[:300]}") from None
        raise _wrong(sent, f"leads to more than {MOST_REDIRECTS} redirects")

    @asynccontextmanager
    async def _connection(self, key: str, target: URL) -> AsyncIterator[aiohttp.ClientResponse]:
        """Waits for a turn at the host, and then for one of all connections: what waits for a busy host holds
        none of these."""
        of_host = self._of_host[_host(target)]
        async with (
            of_host.turn(key),
            self._connections.turn(key),
            self._client.get(target, allow_redirects=False) as response,
        ):
            yield response

    def _allowed(self, target: URL, sent: str) -> URL:
        if target.scheme not in ("http", "https") or not _host(target):
            raise _wrong(sent, "does not lead to a URL of http or https")
        if target.user is not None or target.password is not None:
            raise _wrong(sent, "has a user or a password")
        if _host(target) not in self._domains:
            text = f"leads to {target.raw_host}, which is not one of --allowed-media-domains"
            raise Unsupported(f"{_shown(sent)} {text}")
        return target

    @property
    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(
                limit=0,  # `_connection` limits them
                use_dns_cache=False,
                socket_factory=public_socket,
            )
            self._session = aiohttp.ClientSession(
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                trust_env=False,
                timeout=aiohttp.ClientTimeout(total=None),  # `fetch` has one
                headers={"Accept-Encoding": "identity", "User-Agent": f"baton/{version()}"},
            )
        return self._session

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


def _host(target: URL) -> str:
    return (target.raw_host or "").lower()


async def _body(response: aiohttp.ClientResponse, url: str, count: Callable[[int], None]) -> bytes:
    if response.status != 200:
        raise _wrong(url, f"was answered with the status {response.status}")
    if response.headers.get("Content-Encoding", "identity") != "identity":
        raise _wrong(url, "was answered with a Content-Encoding, which was not asked for")
    file = bytearray()
    async for chunk in response.content.iter_chunked(_CHUNK):
        count(len(chunk))
        file += chunk
    return bytes(file)


def public_socket(
    info: tuple[int, int, int, str, tuple[str, int] | tuple[str, int, int, int]],
) -> socket.socket:
    """The socket for a connection to this address. Raises OSError for one that is not public."""
    family, kind, protocol, _, address = info
    if not is_public(address[0]):
        raise OSError(errno.EACCES, "its host has no public address")
    return socket.socket(family, kind, protocol)


def is_public(address: str) -> bool:
    """Whether an IP address is one of the internet. One that carries an IPv4 address is judged by that."""
    ip = ip_address(address.partition("%")[0])
    if isinstance(ip, IPv6Address):
        carried = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if ip.packed.startswith(_NAT64):
            carried = ip_address(ip.packed[-4:])
        if carried is not None:
            ip = carried
    return ip.is_global and not ip.is_multicast


def _reason(error: aiohttp.ClientError | OSError) -> str:
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    return (cause.strerror if isinstance(cause, OSError) else "") or str(error) or type(error).__name__


def _shown(url: str) -> str:
    return repr(url if len(url) <= 100 else url[:100] + "…")


def _wrong(url: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"{_shown(url)} {reason}")
