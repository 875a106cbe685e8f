"""Calls to roles: whether they answer, the pools of workers, and what routers hold back."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from typing import Any

from grpc import RpcError
from grpc.aio import Channel

from baton.cluster.options.roles import DeadlineOptions
from baton.cluster.supervision.blueprint import Pool
from baton.processes.liveness import Silence, reply
from baton.rpc import worker_pb2 as pb
from baton.rpc.channel import check_health, connect
from baton.rpc.stubs import WorkerStub
from baton.rpc.tls import TlsFiles
from baton.system.addresses import split_address
from baton.system.metrics_page import samples

HEALTH_INTERVAL = 2.0  # seconds between two health checks
ANSWER_WITHIN = 10.0  # seconds for one answer of a role
PATIENCE = 2.0  # seconds for a router to tell its metrics

_POOLS: dict[Pool, pb.Pool] = {"prefill": pb.POOL_PREFILL, "decode": pb.POOL_DECODE}
_NAMES: dict[pb.Pool, Pool] = {value: name for name, value in _POOLS.items()}


# ------------------------------------------------------------ workers


async def status_of(channel: Channel, timeout: float) -> pb.WorkerStatus | None:
    """The load of a worker; None if it does not answer within `timeout` s."""
    answer: Awaitable[pb.WorkerStatus] = WorkerStub(channel).GetStatus(pb.StatusRequest(), timeout=timeout)
    try:
        return await answer
    except RpcError:
        return None


def named_pool(status: pb.WorkerStatus) -> Pool | None:
    """The pool in which a worker serves now; None for a worker that does not report one."""
    return _NAMES.get(status.pool)


async def ask_pools(
    addresses: Collection[str], secret: bytes, tls: TlsFiles | None, timeout: float
) -> dict[str, Pool]:
    """The pools of the workers at these addresses, without workers that do not answer within `timeout` s."""

    async def ask(address: str) -> pb.WorkerStatus | None:
        async with connect(address, secret, tls) as channel:
            return await status_of(channel, timeout)

    answers = zip(addresses, await asyncio.gather(*map(ask, addresses)), strict=True)
    return {
        address: pool
        for address, status in answers
        if status is not None and (pool := named_pool(status)) is not None
    }


async def set_pool(channel: Channel, pool: Pool, timeout: float) -> pb.WorkerStatus:
    """Moves a worker to a pool. `timeout` is in seconds. Raises RpcError if it does not."""
    answer: Awaitable[pb.WorkerStatus] = WorkerStub(channel).SetPool(
        pb.SetPoolRequest(pool=_POOLS[pool]), timeout=timeout
    )
    return await answer


# ------------------------------------------------------------ routers


async def tokens_held(ready: Mapping[str, Any]) -> int:
    """Prompt tokens held back by the router on this machine that reported `ready`.

    A router gives prefill workers at most two steps of prompts. The rest waits in its admission queue, and
    the load that workers report does not contain it. Raises ConnectionError if the router does not answer.
    """
    held = samples(await _get(ready, "metrics", PATIENCE), name := "baton:tokens_waiting_for_turn")
    if not held:
        raise ConnectionError(f"{ready['url']}: has no metric {name}")
    return int(held[0].value)


async def _get(ready: Mapping[str, Any], page: str, timeout: float) -> str:
    """A page of a router, whatever its status. Raises ConnectionError without an answer in `timeout` s.

    It is asked over its Unix socket. Clients may fill its ports, and those may ask for certificates."""
    import aiohttp

    try:
        async with (
            aiohttp.UnixConnector(ready["admin_socket"]) as connector,
            aiohttp.ClientSession(
                connector=connector, timeout=aiohttp.ClientTimeout(total=timeout)
            ) as session,
            session.get(f"http://router/{page}") as response,
        ):
            return await response.text()
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ConnectionError(f"{ready['url']}: {error}") from error


# ------------------------------------------------------------ health


async def until_silent(
    ready: Mapping[str, Any],
    secret: bytes,
    tls: TlsFiles | None = None,
    interval: float = HEALTH_INTERVAL,
    patience: float = DeadlineOptions.failure_timeout,
    waited: Callable[[], float] = lambda: 0.0,
) -> str:
    """Checks the role that reported `ready` until it gives no answer for `patience` seconds. `waited`: the
    seconds in which it had no CPU until now.

    Then returns the reason, for people. Without this check a hung process would stay forever.
    """
    silence = Silence(patience)
    async with contextlib.AsyncExitStack() as open_:
        check = await _check_of(ready, secret, tls, open_)
        while not silence.is_too_long:
            await asyncio.sleep(interval)
            try:
                await reply(check(), silence, interval, waited)
                silence.broken()
            except OSError:  # at once, or after intervals, of which `silence` knows
                if not silence.is_too_long:
                    silence.passed(interval, interval)
    return f"gave no answer for {silence.seconds:.0f} s"


async def _check_of(
    ready: Mapping[str, Any], secret: bytes, tls: TlsFiles | None, open_: contextlib.AsyncExitStack
) -> Callable[[], Coroutine[Any, Any, object]]:
    """The check for a worker (gRPC health), a router (GET /health) or a store (a connection). It raises
    OSError without an answer.

    Any answer will do: a draining worker answers "not serving".
    """
    if "store" in ready:
        host, port = split_address(ready["store"])

        async def connected() -> None:
            async with asyncio.timeout(ANSWER_WITHIN):
                _, writer = await asyncio.open_connection(host, port)
            writer.close()

        return connected
    if "address" not in ready:
        return lambda: _get(ready, "health", ANSWER_WITHIN)
    channel = await open_.enter_async_context(connect(ready["address"], secret, tls))

    async def check() -> None:
        try:
            await check_health(channel, ANSWER_WITHIN)
        except RpcError as error:
            raise OSError(str(error)) from error

    return check
