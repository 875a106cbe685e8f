"""Detects a ready role that no longer answers. Without this check a hung process would stay forever."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, urlsplit

if TYPE_CHECKING:
    from baton.rpc.tls import TlsFiles

INTERVAL = 2.0  # seconds between two health checks
PATIENCE = 10.0  # seconds without an answer after which a role counts as dead; as --engine-timeout

Check = Callable[[], Coroutine[Any, Any, None]]


async def until_silent(
    ready: Mapping[str, Any],
    secret: bytes,
    tls: TlsFiles | None = None,
    interval: float = INTERVAL,
    patience: float = PATIENCE,
) -> str:
    """Checks the role that reported `ready` until it gives no answer for `patience` seconds.

    Then returns the reason, for people. Counts only time in which this process itself ran: if it was stopped,
    an interval may have lasted long, and counts as one.
    """
    silent = 0.0
    async with contextlib.AsyncExitStack() as open_:
        check = await _check_of(ready, secret, tls, open_)
        while silent < patience:
            await asyncio.sleep(interval)
            checking = asyncio.create_task(check())
            try:
                while not checking.done() and silent < patience:
                    await asyncio.wait({checking}, timeout=interval)
                    silent += interval
                if checking.done():
                    checking.result()
                    silent = 0.0
            except (OSError, TimeoutError):
                pass
            finally:
                checking.cancel()
    return f"gave no answer for {silent:.0f} s"


async def _check_of(
    ready: Mapping[str, Any], secret: bytes, tls: TlsFiles | None, open_: contextlib.AsyncExitStack
) -> Check:
    """The check for a worker (gRPC health) or a router (GET /health). Raises OSError without an answer.

    Any answer will do: a draining worker answers "not serving".
    """
    if "address" not in ready:
        # The admin port, if there is one, covers all processes of the router and needs no certificate.
        return lambda: _get_health(urlsplit(ready.get("admin_url", ready["url"])))
    from grpc import RpcError

    from baton.rpc.channel import check_health, connect

    channel = await open_.enter_async_context(connect(ready["address"], secret, tls))

    async def check() -> None:
        try:
            await check_health(channel, PATIENCE)
        except RpcError as error:
            raise OSError(str(error)) from error

    return check


async def _get_health(url: SplitResult) -> None:
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    try:
        writer.write(b"GET /health HTTP/1.0\r\n\r\n")
        if not await reader.readline():
            raise ConnectionResetError("closed without an answer")
    finally:
        writer.close()
