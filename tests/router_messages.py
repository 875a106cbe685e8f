"""Every kind of message of a router that is about an attempt, for tests that send each one in each state."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from baton.engine import Image
from baton.rpc import worker_pb2 as pb
from baton.rpc.token_ids import packed_ids
from baton.worker import messages
from baton.worker.messages import FromRouter, Origin, ToEngine
from baton.worker.service_process.streams import RouterStream

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


class Asked(NamedTuple):
    """A request of a router, and what the service process adds to it."""

    origin: Origin
    request: pb.Request
    pixels: list[bytes]

    def show(self, images: Sequence[Image]) -> Asked:
        """It has these images."""
        for image in images:
            self.request.images.add(
                name=image.name, start=image.start, rows=image.rows, columns=image.columns
            )
        self.pixels.extend(image.pixels for image in images)
        return self


def work(
    attempt_id: bytes,
    tokens: int = 20,
    max_tokens: int = 8,
    output_ids: Sequence[int] = (),
    prompt_ids: Sequence[int] = (),
    **params: Any,
) -> Asked:
    """`tokens`: of the prompt, without `prompt_ids`. `params`: fields of SamplingParams."""
    wanted: dict[str, Any] = {"top_p": 1, "repetition_penalty": 1, "ignore_eos": True} | params
    sampling = pb.SamplingParams(**wanted, max_tokens=max_tokens)
    asked = pb.Request(
        prompt_ids=packed_ids(prompt_ids or range(3, 3 + tokens)), output_ids=output_ids, sampling=sampling,
        timeout_ms=60_000,
    )  # fmt: skip
    return Asked(Origin(attempt_id, "r", "", time.monotonic()), asked, [])


def source(prefill_id: bytes, incarnation: int = PEER, attempt: int = 1) -> pb.PrefillSource:
    return pb.PrefillSource(
        prefill_id=prefill_id, kv_address="127.0.0.1:1", incarnation=incarnation, attempt=attempt
    )


def content_at(
    kv_address: str = "127.0.0.1:1", incarnation: int = PEER, tier: pb.Tier = pb.TIER_DEVICE
) -> pb.ContentSource:
    return pb.ContentSource(kv_address=kv_address, incarnation=incarnation, tier=tier)


def planned(*ranges: tuple[bytes, int, int, int]) -> tuple[pb.PlanRange, ...]:
    """Of (prefill id, incarnation, start, stop)."""
    return tuple(
        pb.PlanRange(prefill_id=of, kv_address="127.0.0.1:1", incarnation=incarnation, start=start, stop=stop)
        for of, incarnation, start, stop in ranges
    )


def said(stream: int, message: pb.RouterMessage, asked: Asked | None = None) -> FromRouter:
    origin, pixels = (None, []) if asked is None else (asked.origin, asked.pixels)
    return FromRouter(stream, message.SerializeToString(), origin, pixels)


def submit_prefill(stream: int, asked: Asked, handover: bool = True, **fields: Any) -> FromRouter:
    submit = pb.SubmitPrefill(
        prefill_id=asked.origin.attempt_id, request=asked.request, handover=handover, **fields
    )
    return said(stream, pb.RouterMessage(prefill=submit), asked)


def submit_decode(
    stream: int, asked: Asked, source: pb.PrefillSource | None, content: pb.ContentSource | None = None
) -> FromRouter:
    submit = pb.SubmitDecode(
        decode_id=asked.origin.attempt_id, request=asked.request, source=source, content=content
    )
    return said(stream, pb.RouterMessage(decode=submit), asked)


def retarget(
    stream: int, decode_id: bytes, source: pb.PrefillSource, output_ids: Sequence[int]
) -> FromRouter:
    told = pb.Retarget(decode_id=decode_id, source=source, output_ids=output_ids)
    return said(stream, pb.RouterMessage(retarget=told))


def cancel(stream: int, attempt_id: bytes) -> FromRouter:
    return said(stream, pb.RouterMessage(cancel=pb.Cancel(attempt_id=attempt_id)))


def only_copies(*chunks: int, all: bool = False) -> FromRouter:
    return said(STREAM, pb.RouterMessage(only_copies=pb.OnlyCopies(chunks=chunks, all=all)))


def part(part_id: bytes) -> FromRouter:
    plan = planned((PART_OF_PEER, PEER, 0, 16), (part_id, HERE, 16, PLANNED))
    return submit_prefill(STREAM, work(part_id, PLANNED), plan=plan)


MESSAGES: dict[str, Callable[[bytes], ToEngine]] = {
    "a prefill": lambda of: submit_prefill(STREAM, work(of), handover=True, report_start=True),
    "a prefill of another router": lambda of: submit_prefill(OTHER_STREAM, work(of), handover=True),
    "a prefill without a handover": lambda of: submit_prefill(STREAM, work(of, max_tokens=1), False),
    "a part": part,
    "a part with it as that of the peer": lambda of: submit_prefill(
        STREAM,
        work(mine := new_id(), PLANNED),
        plan=planned((of, PEER, 0, 16), (mine, HERE, 16, PLANNED)),
    ),
    "a decode": lambda of: submit_decode(STREAM, work(of), None),
    "a decode that fetches": lambda of: submit_decode(STREAM, work(of), source(new_id())),
    "a decode of it": lambda of: submit_decode(STREAM, work(new_id()), source(of, HERE)),
    "a decode of more tokens of it": lambda of: submit_decode(STREAM, work(new_id(), 30), source(of, HERE)),
    "a decode of itself": lambda of: submit_decode(STREAM, work(of), source(of, HERE)),
    "a decode of it on a peer": lambda of: submit_decode(STREAM, work(new_id()), source(of)),
    "a retarget": lambda of: retarget(STREAM, of, source(new_id()), []),
    "a retarget to here": lambda of: retarget(STREAM, of, source(of, HERE), []),
    "a retarget with outputs": lambda of: retarget(STREAM, of, source(new_id()), [5, 6]),
    "a retarget with too many": lambda of: retarget(STREAM, of, source(new_id()), [5] * 4000),
    "a retarget of another router": lambda of: retarget(OTHER_STREAM, of, source(new_id()), []),
    "a cancel": lambda of: cancel(STREAM, of),
    "a cancel of another router": lambda of: cancel(OTHER_STREAM, of),
    "a cancel of all": lambda _: messages.Detached(STREAM),
    "only copies": lambda of: only_copies(int.from_bytes(of[-8:])),
    "only copies of all": lambda _: only_copies(all=True),
}
"""By what it is, of an attempt with this id, or of its id."""


def told(sent: Iterable[object]) -> list[pb.WorkerMessage]:
    """What an engine process tells routers."""
    return [pb.WorkerMessage.FromString(each.data) for each in sent if isinstance(each, messages.ToRouter)]


def tokens_told(sent: Iterable[object]) -> list[pb.TokenEvent]:
    return [token for message in told(sent) for token in message.step.tokens]


def failures_told(sent: Iterable[object]) -> list[pb.AttemptFailed]:
    return [message.failed for message in told(sent) if message.HasField("failed")]


def next_message(stream: RouterStream) -> bytes | None:
    """What the stream writes next, which counts as unread."""
    return stream._queue.popleft() if stream._queue else stream._next_part()
