"""`baton weights`: replaces the weights of all workers, or of none.

All workers stage the new weights, then all are closed, then all apply them
(`worker.service_process.weights`). A fault before the last step ends all calls, which leaves the workers as
they were.
"""

import asyncio
import contextlib
import time
import uuid
from collections.abc import Mapping

from grpc.aio import AioRpcError

from baton.cluster.options.clients import EndpointOptions, LocalOptions, WeightsOptions
from baton.cluster.options.roles import SecretOptions
from baton.cluster.tools.flip import refusal
from baton.cluster.tools.http import fetch
from baton.cluster.tools.secret import secret_for
from baton.cluster.tools.status import name_of
from baton.rpc import worker_pb2 as pb
from baton.rpc.channel import connect
from baton.rpc.stubs import WorkerStub
from baton.rpc.tls import TlsFiles
from baton.rpc.weights import WeightsCall


def run(
    weights: WeightsOptions, endpoint: EndpointOptions, secret: SecretOptions, local: LocalOptions
) -> int:
    """Prints what changed. Returns 0.

    Raises ValueError if a worker is not ready, or if the weights do not fit one; then none has changed.
    """
    key = secret_for(endpoint, secret, local)
    print(asyncio.run(_replace(weights.path, endpoint, key, secret.tls())))
    return 0


async def _replace(path: str, endpoint: EndpointOptions, secret: bytes, tls: TlsFiles | None) -> str:
    workers = (await fetch(endpoint, "status"))["workers"]
    if not workers:
        raise ValueError("the router knows no worker")
    # Routers refuse a worker that has started again with the weights of its --model: it gets these, too.
    if missing := [name_of(worker) for worker in workers if worker["state"] not in ("ready", "refused")]:
        raise ValueError(
            f"{', '.join(missing)}: not ready, and all workers must get the new weights; see `baton status`"
        )
    version = uuid.uuid4().hex
    async with contextlib.AsyncExitStack() as until_the_end:
        calls = dict[str, WeightsCall]()
        for worker in workers:
            channel = await until_the_end.enter_async_context(connect(worker["address"], secret, tls))
            calls[name_of(worker)] = WeightsCall(WorkerStub(channel))
        stage = pb.StageWeights(path=path, version=version)
        staged = await _all(calls, pb.WeightsCommand(stage=stage), "No weights have changed.")
        began = time.monotonic()
        await _all(calls, pb.WeightsCommand(close=True), "No weights have changed.")
        await _all(calls, pb.WeightsCommand(apply=True), "Other workers have the new weights: try again.")
        pause = time.monotonic() - began
    size, slowest = max(report.bytes for report in staged), max(report.seconds for report in staged)
    return (
        f"{len(calls)} workers compute with {path}, version {version}: "
        f"{size / 1e9:.3g} GB read in {slowest:.1f} s, no worker served for {pause:.2f} s."
    )


async def _all(
    calls: Mapping[str, WeightsCall], command: pb.WeightsCommand, after: str
) -> list[pb.WeightsReport]:
    """The reports of all workers. Raises ValueError that names each worker without one."""
    sent = [call.report(command) for call in calls.values()]
    found = await asyncio.gather(*sent, return_exceptions=True)
    faults = []
    for name, report in zip(calls, found, strict=True):
        if isinstance(report, StopAsyncIteration):
            faults.append(f"{name}: it ended the call")
        elif isinstance(report, AioRpcError):
            faults.append(f"{name}: {refusal(report, 'replace its weights')}")
        elif isinstance(report, BaseException):
            raise report
    if faults:
        raise ValueError(f"{'; '.join(faults)}. {after}")
    return [report for report in found if not isinstance(report, BaseException)]
