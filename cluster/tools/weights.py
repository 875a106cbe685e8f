"""`baton weights`: replaces the weights of all workers, or of none."""

import asyncio
import uuid
from pathlib import Path

from baton.cluster.options.clients import EndpointOptions, LocalOptions, WeightsOptions
from baton.cluster.options.roles import SecretOptions
from baton.cluster.tools.flip import refusal
from baton.cluster.tools.http import fetch
from baton.cluster.tools.secret import secret_for
from baton.cluster.tools.status import name_of
from baton.rpc.all_workers import NotDone
from baton.rpc.pools import in_turns
from baton.rpc.tls import TlsFiles
from baton.rpc.weights import named, outcome_of, replace_weights
from baton.system.words import counted


def run(
    weights: WeightsOptions, endpoint: EndpointOptions, secret: SecretOptions, local: LocalOptions
) -> int:
    """Prints what changed. Returns 0.

    Raises ValueError if a worker is not ready, or if the weights do not fit one; then none has changed.
    """
    path = _absolute(weights.path)
    key = secret_for(endpoint, secret, local)
    print(asyncio.run(_replace(path, endpoint, key, secret.tls(), weights.max_unavailable or 0)))
    return 0


def _absolute(path: str) -> str:
    """A relative path is one of this directory: workers run in others. Raises ValueError if it has no such
    file or directory."""
    if Path(path).is_absolute():
        return path
    if not Path(path).exists():
        raise ValueError(
            f"{path}: no such file or directory in {Path.cwd()}; give the absolute path that the checkpoint "
            "has on the hosts of the workers"
        )
    return str(Path(path).absolute())


async def _replace(
    path: str, endpoint: EndpointOptions, secret: bytes, tls: TlsFiles | None, at_once: int = 0
) -> str:
    workers = (await fetch(endpoint, "status"))["workers"]
    if not workers:
        raise ValueError("the router knows no worker")
    # Routers refuse a worker that has started again with the weights of its --model: it gets these, too.
    if missing := [name_of(worker) for worker in workers if worker["state"] not in ("ready", "refused")]:
        raise ValueError(
            f"{', '.join(missing)}: not ready, and all workers must get the new weights; see `baton status`"
        )
    names = {worker["address"]: name_of(worker) for worker in workers}
    order = in_turns(workers)
    version = uuid.uuid4().hex
    try:
        done = await replace_weights(order, named(path, version, rolls=at_once > 0), secret, tls, at_once)
    except NotDone as error:
        faults = list[str]()
        for address, fault in error.faults.items():
            why = "it ended the call" if fault is None else refusal(fault, "replace its weights")
            faults.append(f"{names[address]}: {why}")
        raise ValueError(f"{'; '.join(faults)}. {outcome_of(error)}") from error
    return (
        f"The weights of {counted(len(workers), 'worker')} are {path}, version {version}: "
        f"{done.nbytes / 1e9:.3g} GB read in {done.read_seconds:.1f} s, {done.outage}."
    )
