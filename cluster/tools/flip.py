"""`baton flip`: moves a worker to the other pool."""

import asyncio
from collections.abc import Sequence
from typing import Any

from grpc import RpcError

from baton.cluster.options.clients import EndpointOptions, FlipOptions, LocalOptions
from baton.cluster.options.roles import SecretOptions
from baton.cluster.supervision.calls import set_pool
from baton.cluster.tools.http import fetch
from baton.cluster.tools.secret import LOCAL, secret_for
from baton.cluster.tools.status import name_of, ready
from baton.rpc.channel import connect
from baton.rpc.pools import pool_of
from baton.rpc.tls import TlsFiles

PATIENCE = 10.0  # seconds for the worker to answer


def run(flip: FlipOptions, endpoint: EndpointOptions, secret: SecretOptions, local: LocalOptions) -> int:
    """Prints what changed. Returns 0, also if the worker is in that pool already.

    Raises ValueError for an unknown worker, a refused secret, a worker that cannot be reached, and the last
    worker of a pool without `--force`.
    """
    key = secret_for(endpoint, secret, local)
    print(asyncio.run(_flip(flip, endpoint, key, secret.tls())))
    return 0


async def _flip(flip: FlipOptions, endpoint: EndpointOptions, secret: bytes, tls: TlsFiles | None) -> str:
    workers = (await fetch(endpoint, "status"))["workers"]
    worker = chosen(flip.worker, workers)
    group = group_of(worker, workers)
    alone = len(group) == 1
    name, before = " and ".join(map(name_of, group)), pool_of(worker)
    if all(pool_of(each) == flip.pool for each in group):
        return f"{name} {'is' if alone else 'are'} in the {flip.pool} pool already."
    remaining = [w for w in workers if w not in group and ready(w) and pool_of(w) == before]
    if ready(worker) and not remaining and not flip.force:
        last = "is the last ready worker" if alone else "are the last ready workers"
        raise ValueError(
            f"{name} {last} of the {before} pool; without one, workers of the {flip.pool} pool take over its "
            "work; to move it nevertheless, add --force"
        )
    for each in group:
        address = each["address"]
        try:
            async with connect(address, secret, tls) as channel:
                await set_pool(channel, flip.pool, PATIENCE)
        except RpcError as error:
            text = f"{name_of(each)} at {address}: {refusal(error, 'change the pool')}"
            raise ValueError(text) from error
    place = "on it" if alone else "there"
    return f"{name}: {before} → {flip.pool}. What runs {place} goes on to its end."


def group_of(worker: dict[str, Any], workers: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The workers that compute each step together with this one, and itself. They move together."""
    group = (worker.get("description") or {}).get("group")
    if not group:
        return [worker]
    return [each for each in workers if (each.get("description") or {}).get("group") == group]


def chosen(text: str, workers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The worker with this name or address. Raises ValueError that names the known workers."""
    name = text.replace("-", " ", 1) if ":" not in text else text
    matches = [w for w in workers if name in (name_of(w), w.get("address"))]
    if len(matches) == 1:
        return matches[0]
    if matches:
        addresses = ", ".join(str(worker["address"]) for worker in matches)
        raise ValueError(f"{text}: several workers have this name; give one of the addresses {addresses}")
    names = ", ".join(f"{name_of(w).replace(' ', '-')} ({w.get('address')})" for w in workers)
    raise ValueError(f"{text}: the router knows no such worker; it knows {names or 'none'}")


def refusal(error: RpcError, action: str) -> str:
    """Why a worker did not do `action`, and the remedy."""
    from grpc import StatusCode
    from grpc.aio import AioRpcError

    assert isinstance(error, AioRpcError)
    code, details = error.code(), error.details() or ""
    if code is StatusCode.UNAUTHENTICATED or "CERTIFICATE_VERIFY_FAILED" in details:
        return (
            f"it does not prove this secret ({details}); set BATON_CLUSTER_SECRET or --cluster-secret-file "
            f"to the secret of the cluster. {LOCAL}"
        )
    if code is StatusCode.UNIMPLEMENTED:
        return f"its version of Baton cannot {action}; upgrade it"
    if code in (StatusCode.UNAVAILABLE, StatusCode.DEADLINE_EXCEEDED):
        return f"no answer ({details}); this command must reach the gRPC port of the worker"
    if code is StatusCode.FAILED_PRECONDITION:
        return details
    return f"{code.name}: {details}"
