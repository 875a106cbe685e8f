"""Records what a desk is told, and makes its plans again from that.

A record has one JSON array a line: first the settings of the desk, then (time, event, arguments). The last
argument of a plan is the plan or lack. Messages stand as bytes, and numbers may be Infinity.
"""

import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from typing import IO, Any

import msgspec
from google.protobuf.message import Message

from baton.kv_names import Tier
from baton.router.policy.desk import Desk
from baton.router.policy.fleet import Seen
from baton.router.policy.plan import Plan
from baton.router.policy.planner import Held, Lack
from baton.router.policy.prefill import PrefillRequest
from baton.router.policy.prefill_loads import PrefillWork
from baton.router.policy.settings import PlanSettings
from baton.rpc import worker_pb2 as pb
from baton.steps.step_model import StepModel


def record(desk: Desk, file: IO[bytes]) -> None:
    """Writes all that this desk, which knows no worker yet, is told from now on."""

    def write(*line: Any) -> None:
        file.write(json.dumps(msgspec.to_builtins(line, enc_hook=_plain)).encode() + b"\n")

    settings = {field.name: getattr(desk.settings, field.name) for field in fields(PlanSettings)}
    write(desk.now, {"seed": desk.seed, **settings})  # a router's settings are more, and have secrets
    desk.listener = write


def _plain(value: Any) -> Any:
    if isinstance(value, Message):
        return value.SerializeToString()
    return dict(value) if isinstance(value, Mapping) else list(value)


def events(lines: Iterable[bytes]) -> Iterator[tuple[float, str, list[Any]]]:
    """Yields what a record has: the time, name and arguments of each event. First the settings of the desk,
    as an event."""
    told = iter(lines)
    now, settings = json.loads(next(told))
    yield now, "settings", [settings]
    for line in told:
        now, name, arguments = json.loads(line)
        kinds = _KINDS.get(name, ())
        yield now, name, [*map(_read, arguments, kinds), *arguments[len(kinds) :]]


def replay(
    lines: Iterable[bytes], step_model: Callable[[pb.StepModel], StepModel | None]
) -> Iterator[tuple[Plan | Lack, Plan | Lack]]:
    """Yields what each plan was, and what it is now. `step_model`: reads a reported model."""
    told = events(lines)
    now, _, [settings] = next(told)
    seed = settings.pop("seed")
    desk = Desk(lambda: now, PlanSettings(**settings), seed=seed)
    workers = dict[int, Seen]()
    for at, name, arguments in told:
        now = at
        if name == "plan":
            request, held, recorded = arguments
            yield recorded, desk.plan(request, held)
        elif name == "join":
            address, description, status = arguments
            worker = Seen(address, description=description, retired=True)
            _tell(worker, "reported", status, step_model)
            desk.join(worker)
            workers[worker.row] = worker
        elif name in ("reported", "placed", "described", "shown"):
            _tell(workers[arguments[0]], name, arguments[1], step_model)
            if name == "reported":
                desk.reported(arguments[0])
        elif name == "ended":
            desk.ended(arguments[0], computed=arguments[1])
        elif name == "released":
            desk.released(*arguments[:2], full=arguments[2])
        else:
            getattr(desk, name)(*arguments)


def _tell(
    worker: Seen, name: str, value: Any, step_model: Callable[[pb.StepModel], StepModel | None]
) -> None:
    """Changes what the connection to a worker would know."""
    if name == "reported":
        worker.status, worker.pool, worker.step_model = value, value.pool, step_model(value.step_model)
        worker.prefix_links = {(link.incarnation, Tier(link.tier)): link for link in value.prefix_links}
    elif name == "placed":
        worker.retired = not value
    elif name == "described":
        worker.description = value
    else:
        worker.shown_images = OrderedDict.fromkeys(value, 0)


_KINDS: dict[str, tuple[Any, ...]] = {
    "plan": (PrefillRequest, Held, Plan | Lack),
    "returns": (PrefillRequest, int, int),
    "join": (str, pb.WorkerDescription, pb.WorkerStatus),
    "reported": (int, pb.WorkerStatus),
    "described": (int, pb.WorkerDescription),
    "shown": (int, list[bytes]),
    "cached": (int, pb.CacheEvents),
    "sent": (bytes, int, PrefillWork),
    "ended": (bytes,),
}
"""Of the first arguments of events."""


def _read(value: Any, kind: Any) -> Any:
    if isinstance(kind, type) and issubclass(kind, Message):
        return kind.FromString(msgspec.convert(value, bytes, builtin_types=()))
    return msgspec.convert(value, kind, builtin_types=(), str_keys=True)
