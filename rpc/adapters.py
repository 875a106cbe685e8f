"""The calling side of SetAdapters: gives all workers the same adapters, or none of them others."""

from collections.abc import Mapping, Sequence

from grpc.aio import AioRpcError

from baton.rpc import worker_pb2 as pb
from baton.rpc.all_workers import NotDone, answers, connected, to_the_end
from baton.rpc.tls import TlsFiles

Replies = Mapping[str, pb.AdapterSet | AioRpcError]
"""By address."""


async def change_adapters(
    workers: Mapping[str, pb.AdapterSet],
    wanted: Sequence[pb.Adapter],
    secret: bytes,
    tls: TlsFiles | None,
    within: float,
) -> None:
    """Gives the workers at these addresses exactly the adapters `wanted`. Raises NotDone when workers refused
    them, or have other files at their paths. Then all that answer have the adapters of before.

    `workers`: what each has. `within`: seconds in which a worker must answer. A task that is cancelled waits
    for the end, so that no worker is left behind."""
    newest = max(workers.values(), key=lambda known: known.revision)
    revision = newest.revision + 1
    asked = {
        address: pb.AdapterSet(revision=revision, replaces=known.revision, adapters=wanted)
        for address, known in workers.items()
    }

    async def change() -> None:
        replies = await set_adapters(asked, secret, tls, within)
        faults = {address: reply for address, reply in replies.items() if isinstance(reply, AioRpcError)}
        changed = {address: reply for address, reply in replies.items() if isinstance(reply, pb.AdapterSet)}
        loaded = {frozenset(each.fingerprint for each in reply.adapters) for reply in changed.values()}
        if not faults and len(loaded) == 1:
            return
        before = pb.AdapterSet(revision=revision + 1, replaces=revision, adapters=newest.adapters)
        await set_adapters(dict.fromkeys(changed, before), secret, tls, within)
        raise NotDone(faults, changed=False)

    await to_the_end(change())


async def set_adapters(
    asked: Mapping[str, pb.AdapterSet], secret: bytes, tls: TlsFiles | None, within: float
) -> Replies:
    """Asks each worker to have these adapters. The answer of one that takes more than `within` seconds is
    DEADLINE_EXCEEDED: it may load them later, and routers know it then."""
    async with connected(asked, secret, tls) as stubs:
        return await answers({x: stub.SetAdapters(asked[x], timeout=within) for x, stub in stubs.items()})
