"""Every kind of message of a router that is about an attempt, for tests that send each one in each state."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

from baton.engine import EngineRequest, SamplingParams
from baton.rpc import worker_pb2 as pb
from baton.worker import messages
from baton.worker.messages import Origin, PlanRange, PrefillSource, ToEngine, Work

STREAM, OTHER_STREAM = 7, 8
HERE, PEER = 1, 2
"""Incarnations."""
PART_OF_PEER = b"p" * 16
"""The prefill id of another worker in plans of `PLANNED` tokens: its range is the first one."""
PLANNED = 32
KINDS = {"prefill", "decode", "retarget", "cancel", "only_copies"}
"""The others are no matter of attempts."""
_IDS = itertools.count(1)


def new_id() -> bytes:
    return next(_IDS).to_bytes(16)


def work(attempt_id: bytes, tokens: int = 20, max_tokens: int = 8, output_ids: Sequence[int] = ()) -> Work:
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    request = EngineRequest(attempt_id, list(range(3, 3 + tokens)), list(output_ids), sampling)
    return Work(request, 60.0, Origin(attempt_id, "r", "", 0.0))


def source(prefill_id: bytes, incarnation: int = PEER) -> PrefillSource:
    return PrefillSource(prefill_id, "127.0.0.1:1", incarnation, 1)


def part(part_id: bytes) -> messages.Prefill:
    peer = PlanRange(PART_OF_PEER, "127.0.0.1:1", PEER, 0, 16)
    here = PlanRange(part_id, "127.0.0.1:1", HERE, 16, PLANNED)
    return messages.Prefill(STREAM, work(part_id, PLANNED), handover=True, plan=(peer, here))


MESSAGES: dict[str, Callable[[bytes], ToEngine]] = {
    "a prefill": lambda of: messages.Prefill(STREAM, work(of), handover=True, report_start=True),
    "a prefill of another router": lambda of: messages.Prefill(OTHER_STREAM, work(of), handover=True),
    "a prefill without a handover": lambda of: messages.Prefill(STREAM, work(of, max_tokens=1), False),
    "a part": part,
    "a part with it as that of the peer": lambda of: messages.Prefill(
        STREAM,
        work(mine := new_id(), PLANNED),
        handover=True,
        plan=(
            PlanRange(of, "127.0.0.1:1", PEER, 0, 16),
            PlanRange(mine, "127.0.0.1:1", HERE, 16, PLANNED),
        ),
    ),
    "a decode": lambda of: messages.Decode(STREAM, work(of), None),
    "a decode that fetches": lambda of: messages.Decode(STREAM, work(of), source(new_id())),
    "a decode of it": lambda of: messages.Decode(STREAM, work(new_id()), source(of, HERE)),
    "a decode of more tokens of it": lambda of: messages.Decode(STREAM, work(new_id(), 30), source(of, HERE)),
    "a decode of itself": lambda of: messages.Decode(STREAM, work(of), source(of, HERE)),
    "a decode of it on a peer": lambda of: messages.Decode(STREAM, work(new_id()), source(of)),
    "a retarget": lambda of: messages.Retarget(STREAM, of, source(new_id()), []),
    "a retarget to here": lambda of: messages.Retarget(STREAM, of, source(of, HERE), []),
    "a retarget with outputs": lambda of: messages.Retarget(STREAM, of, source(new_id()), [5, 6]),
    "a retarget with too many": lambda of: messages.Retarget(STREAM, of, source(new_id()), [5] * 4000),
    "a retarget of another router": lambda of: messages.Retarget(OTHER_STREAM, of, source(new_id()), []),
    "a cancel": lambda of: messages.Cancel(STREAM, of),
    "a cancel of another router": lambda of: messages.Cancel(OTHER_STREAM, of),
    "a cancel of all": lambda _: messages.Cancel(STREAM),
    "only copies": lambda of: messages.OnlyCopies([int.from_bytes(of[-8:])]),
    "only copies of all": lambda _: messages.OnlyCopies(None),
}
"""By what it is, of an attempt with this id, or of its id."""


def told(sent: Iterable[object]) -> list[pb.WorkerMessage]:
    """What an engine process tells routers."""
    return [pb.WorkerMessage.FromString(each.data) for each in sent if isinstance(each, messages.ToRouter)]


def tokens_told(sent: Iterable[object]) -> list[pb.TokenEvent]:
    return [token for message in told(sent) for token in message.step.tokens]
