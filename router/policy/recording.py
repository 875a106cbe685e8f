"""Records what a desk is told, and makes its plans again from that.

A record has one JSON array a line: first the settings of the desk, then (time, event, arguments). The last
argument of a plan is what came of it. Messages stand as bytes.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import IO, Any, NamedTuple, TypeVar

import msgspec
from google.protobuf.message import Message

from baton.kv_names import Tier
from baton.router.policy.desk import Desk
from baton.router.policy.fleet import SeenWorker
from baton.router.policy.plan import Plan
from baton.router.policy.planner import Held, Lack
from baton.router.policy.prefill import PrefillRequest
from baton.router.policy.prefill_loads import PrefillWork
from baton.rpc import worker_pb2 as pb
from baton.steps.step_model import StepModel

T = TypeVar("T")


class Outcome(NamedTuple):
    """Of a plan: its place or lack, (worker, start, stop) of each range, the worker that decodes, the order,
    and the tokens and seconds that it expects."""

    place: str
    ranges: tuple[tuple[int, int, int], ...] = ()
    decode: int | None = None
    order: str = ""
    cached: int = 0
    within: float = 0.0
    source: int | None = None


def outcome(planned: Plan | Lack) -> Outcome:
    if isinstance(planned, Lack):
        return Outcome(planned.value)
    source = None if planned.source is None else planned.source.holder.row
    ranges = tuple(tuple(part) for part in planned.ranges)
    return Outcome(
        planned.place, ranges, planned.decode, planned.order, planned.cached, planned.within, source
    )


def record(desk: Desk, file: IO[bytes]) -> None:
    """Writes all that this desk, which knows no worker yet, is told from now on."""

    def write(*line: Any) -> None:
        file.write(msgspec.json.encode(line, enc_hook=_plain) + b"\n")

    def event(now: float, name: str, arguments: Sequence[Any]) -> None:
        if name == "plan":
            request, held, planned = arguments
            arguments = request, held, outcome(planned)
        write(now, name, arguments)

    write(desk.now, desk.settings)
    desk.listener = event


def _plain(value: Any) -> Any:
    return value.SerializeToString() if isinstance(value, Message) else list(value)


def replay(
    lines: Iterable[bytes], step_model: Callable[[pb.StepModel], StepModel | None]
) -> Iterator[tuple[Outcome, Outcome]]:
    """Yields of each plan what came of it, and what comes of it now. `step_model`: reads a reported model."""
    told = iter(lines)
    now, settings = json.loads(next(told))
    desk = Desk(lambda: now, **settings)
    workers = dict[int, SeenWorker]()
    for line in told:
        now, name, arguments = json.loads(line)
        if name == "plan":
            planned = desk.plan(_read(arguments[0], PrefillRequest), _read(arguments[1], Held))
            yield _read(arguments[2], Outcome), outcome(planned)
        elif name == "join":
            description = pb.WorkerDescription.FromString(_read(arguments[1], bytes))
            worker = SeenWorker(arguments[0], description, ready=False)
            _tell(worker, "reported", arguments[2], step_model)
            desk.join(worker)
            workers[worker.row] = worker
        elif name in ("reported", "placed", "described", "shown"):
            _tell(workers[arguments[0]], name, arguments[1], step_model)
            if name == "reported":
                desk.reported(arguments[0])
        elif name == "cached":
            desk.cached(arguments[0], pb.CacheEvents.FromString(_read(arguments[1], bytes)))
        elif name == "sent":
            desk.sent(_read(arguments[0], bytes), arguments[1], _read(arguments[2], PrefillWork))
        elif name == "ended":
            desk.ended(_read(arguments[0], bytes), computed=arguments[1])
        elif name == "released":
            desk.released(*arguments[:2], full=arguments[2])
        else:
            getattr(desk, name)(*arguments)


def _tell(
    worker: SeenWorker, name: str, value: Any, step_model: Callable[[pb.StepModel], StepModel | None]
) -> None:
    """Changes what the connection to a worker would know."""
    if name == "reported":
        status = worker.status = pb.WorkerStatus.FromString(_read(value, bytes))
        worker.pool, worker.step_model = status.pool, step_model(status.step_model)
        worker.prefix_links = {(link.incarnation, Tier(link.tier)): link for link in status.prefix_links}
    elif name == "placed":
        worker.ready = value
    elif name == "described":
        worker.description = pb.WorkerDescription.FromString(_read(value, bytes))
    else:
        worker.shown_images = _read(value, list[bytes])


def _read(value: Any, kind: type[T]) -> T:
    return msgspec.convert(value, kind, builtin_types=())
