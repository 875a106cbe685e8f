"""The status that `baton status` shows: of the router and of every worker."""

import asyncio
import json
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from baton import version
from baton.router import history
from baton.router.config import RouterConfig
from baton.router.generation.context import Services
from baton.router.policy.plan import REASONS
from baton.router.workers.worker import Worker
from baton.rpc import worker_pb2 as pb
from baton.rpc.plain import described_as, plain

Condition = Literal["ready", "routable"]
"""What is true of a router, or of each process."""
ASKED = 50
"""The most workers that a status asks at once. Of more it shows the last reports, which are a second old."""
PAUSES: dict["pb.Pause", str] = {pb.PAUSE_NONE: "none", pb.PAUSE_NEW: "new", pb.PAUSE_STEPS: "steps"}
_COUNTS = (
    "requests", "waiting_for_turn", "waiting_for_room", "waiting_for_workers", "waiting_tokens", "handovers",
    "split_prompts",
)  # fmt: skip

_BY_LABEL = ("overflow", "errors", "retries")
_MOST = ("expected_wait_seconds", "pool_changes")
"""Every process reports the same."""
_LISTS = ("failures", "recent_requests", "overflow_why")


async def router_status(services: Services, draining: bool, key: str | None = None) -> dict[str, Any]:
    """Asks the workers, unless they are many. For one that does not answer it shows the last report.

    `key`: name of the API key that sees only its own requests. None: all are listed."""
    connections, workers = services.pool.connections, []
    for first in range(0, len(connections), ASKED):  # streams have their turn in between
        part = connections[first : first + ASKED]
        workers += await asyncio.gather(*(_worker(each, ask=len(connections) <= ASKED) for each in part))
    return {
        "router": router_state(services, draining, key),
        "workers": workers,
        "cluster": _cluster(services.config.cluster_file),
    }


def router_state(services: Services, draining: bool, key: str | None = None) -> dict[str, Any]:
    """The status of the router itself, without a question to a worker."""
    config, pool, admission = services.config, services.pool, services.admission
    return {
        "index": config.index,
        "pid": os.getpid(),
        "version": version(),
        "model": config.model_name,
        "models": [*config.model_names, *pool.adapters.served],
        "state": "draining" if draining else "serving",
        "pause": PAUSES[pool.pause],
        "ready": pool.complete,
        "routable": not pool.blind,
        "requests": len(services.active),
        "waiting_for_turn": len(admission.queue) - admission.waiting_for_decode,
        "waiting_for_room": admission.waiting_for_decode,
        "waiting_for_workers": len(services.parked.without_worker),
        "waiting_tokens": admission.waiting_tokens,
        "expected_wait_seconds": round(admission.expected_wait, 3),
        "pool_changes": pool.pool_changes,
        **services.metrics.paths(),
        **services.metrics.history.status(key),
    }


def merged_status(statuses: dict[int, Any], config: RouterConfig) -> dict[str, Any]:
    """Merges the status of all processes. `router` has sums, the workers are those of the first process."""
    routers = [status["router"] for status in statuses.values()]
    counts = {name: sum(router[name] for router in routers) for name in _COUNTS}
    by_label = {name: dict(sum((Counter(r[name]) for r in routers), Counter())) for name in _BY_LABEL}
    by_label["overflow"] = dict.fromkeys(REASONS, 0) | by_label["overflow"]
    why = {reason: text for each in routers for reason, text in each["overflow_why"].items()}
    most = {name: max((router[name] for router in routers), default=0) for name in _MOST}
    return {
        "router": {
            "index": config.index,
            "pid": os.getpid(),
            "version": version(),
            "model": config.model_name,
            "models": [name for name in routers[0]["models"] if all(name in r["models"] for r in routers)]
            if routers
            else [*config.model_names],
            "state": "draining" if any(r["state"] == "draining" for r in routers) else "serving",
            "pause": pause_of(routers),
            "ready": all_are("ready", routers),
            "routable": all_are("routable", routers),
            **counts,
            **most,
            **by_label,
            "overflow_why": why,
            **history.merged(routers),
        },
        "processes": [
            {"number": number}
            | {name: value for name, value in status["router"].items() if name not in _LISTS}
            for number, status in statuses.items()
        ],
        "workers": next(iter(statuses.values()))["workers"] if statuses else [],
        "cluster": next(iter(statuses.values()))["cluster"] if statuses else None,
    }


def health(state: str, pause: str) -> dict[str, str]:
    """What `/health` shows. The router lives in each state, also while the cluster is paused."""
    return {"status": state, "pause": pause}


def pause_of(routers: list[dict[str, Any]]) -> str:
    """The furthest pause that a process knows of."""
    return max((router["pause"] for router in routers), key=[*PAUSES.values()].index, default="none")


def all_are(condition: Condition, routers: list[dict[str, Any]]) -> bool:
    """True when it holds for every process that listens. One that restarts gets no connections."""
    return bool(routers) and all(r[condition] and r["state"] == "serving" for r in routers)


async def request_timeline(
    services: Services, request_id: str, key: str | None = None
) -> dict[str, Any] | None:
    """The life of a request that has ended, with the phases that its workers report. None: not known."""
    ended = services.metrics.history.find(request_id, key)
    if ended is None:
        return None
    workers = [*services.pool.encoders.ready]  # each may have had an image of it
    workers += [worker for worker in services.pool.connections if worker.address in ended.route.values()]
    answers = await asyncio.gather(*(worker.phases(request_id) for worker in workers))
    phases = {
        str(worker): [plain(each) for each in answer]
        for worker, answer in zip(workers, answers, strict=True)
        if answer or not worker.encodes
    }
    return history.timeline(ended, phases)


def _cluster(file: str | None) -> dict[str, Any] | None:
    """The supervisor's report of all roles; None without a supervisor, or before its first report."""
    try:
        return json.loads(Path(file).read_text()) if file is not None else None
    except FileNotFoundError:
        return None


def scrape_targets(status: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the metrics addresses of the workers for Prometheus' HTTP service discovery.

    `status` comes from `router_status`.
    """
    return [
        {
            "targets": [worker["description"]["metrics_address"]],
            "labels": {"worker": f"{worker['role']} {worker['index']}"},
        }
        for worker in status["workers"]
        if worker["description"]["metrics_address"]
    ]


async def _worker(worker: Worker, *, ask: bool) -> dict[str, Any]:
    status = (await worker.ask() if ask else None) or worker.status
    return {
        "address": worker.address,
        "state": str(worker.state),
        "reason": worker.reason,
        "remedy": worker.remedy,
        "attempts": len(worker.attempts),
        **described_as(worker.description, status),
    }
