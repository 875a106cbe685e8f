"""Checks the messages of a router and converts them to messages for the engine process.

Routers are authenticated, but nothing from the network is trusted. Sizes are bounded, ids have 16 bytes,
tokens are in the vocabulary. A mistake in a request refuses that attempt (`RefusedAttempt`). A malformed id
names no attempt to answer, so it ends the stream (`StreamError`). `engine.SamplingParams` and
`engine.check_request` define the valid requests. They are applied here, once.
"""

import math
import re
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Any

from google.protobuf.message import DecodeError, Message

from baton.engine import EngineRequest, Image, Reasoning, SamplingParams, StructuredOutput, check_request
from baton.kv_names import CHUNK_TOKENS, IMAGE_NAME_BYTES, Tier, with_adapter
from baton.rpc import LONGEST_REPORT, bounded_report
from baton.rpc import worker_pb2 as pb
from baton.system.tracing import valid_traceparent
from baton.vision.images import CHANNELS, MOST_PIXELS, PIXELS_PART, ImageSettings
from baton.worker import messages
from baton.worker.messages import Code

ID_BYTES = 16
MAX_LISTED = 1024
"""The most entries of logit_bias, stop_token_ids, allowed_token_ids and bad_words."""
MAX_ADDRESS = 256
MAX_RANGES = 256
"""Of a plan."""
MAX_LABEL_BYTES = 64
MAX_CHUNKS = 4096
"""Of a message about caches."""
_NAME = re.compile(r"[\x21-\x7e]{1,128}")  # printable, so that it cannot forge a line of the log
_ADDRESS = re.compile(r"([\x21-\x7e]+):([0-9]{1,5})")  # printable for the same reason


class StreamError(Exception):
    """The router broke the protocol, and its stream must end."""


class RefusedAttempt(Exception):
    """This worker refuses the attempt. `code` and the text go to the router."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of this worker's model, in token ids and positions."""

    vocab_size: int
    max_model_len: int
    images: ImageSettings | None = None
    """None: the model takes no images."""


def message(data: bytes) -> pb.RouterMessage:
    """Raises StreamError for bytes that are none."""
    try:
        return pb.RouterMessage.FromString(data)
    except DecodeError as error:
        raise StreamError("a message of the router cannot be read") from error


def attempt_id(value: bytes, name: str) -> bytes:
    """Returns `value` if it has the length of an id. Raises StreamError naming the field `name`."""
    if len(value) != ID_BYTES:
        raise StreamError(f"{name} must have {ID_BYTES} bytes, not {len(value)}")
    return value


def report_seconds(value: float) -> float:
    """Returns the least seconds between two reports to a router that asks for `value`. 0: it does not ask."""
    if not (math.isfinite(value) and value >= 0):
        raise StreamError(f"report_seconds must be a number of seconds, not {value}")
    return bounded_report(value) if value else LONGEST_REPORT


def add_pixels(pixels: bytearray, data: bytes) -> None:
    """Adds a part to the pixels of the next attempt. Raises StreamError for too many."""
    if len(data) > PIXELS_PART:
        raise StreamError(f"a part of pixels has {len(data)} bytes, more than {PIXELS_PART}")
    pixels += data
    if len(pixels) > CHANNELS * MOST_PIXELS:
        raise StreamError(f"the images of an attempt have more than {MOST_PIXELS} pixels")


def work(
    attempt_id: bytes,
    asked: pb.Request,
    limits: Limits,
    pixels: bytes | bytearray = b"",
    *,
    handover: bool = True,
) -> messages.Work:
    """Checks the request of an attempt and converts it. No later code checks it again. `pixels`: those of its
    images that have some.

    Without `handover` the next token must be the last, because no worker continues the request. Raises
    RefusedAttempt(INVALID), which names the field.
    """
    if len(asked.request_id) != ID_BYTES:
        raise _invalid(f"request_id must have {ID_BYTES} bytes, not {len(asked.request_id)}")
    if asked.timeout_ms == 0:
        raise _invalid("timeout_ms is 0: the request's deadline has passed")
    _check_labels(asked)
    sampling, emitted = asked.sampling, len(asked.output_ids)
    length = len(asked.prompt_ids) + max(sampling.max_tokens, emitted + 1)
    if length > limits.max_model_len:
        raise _invalid(
            f"{len(asked.prompt_ids)} prompt tokens and {length - len(asked.prompt_ids)} output tokens are "
            f"more than the context of {limits.max_model_len}"
        )
    for name in ("stop_token_ids", "logit_bias", "allowed_token_ids", "bad_words"):
        listed = getattr(sampling, name)
        if len(listed) > MAX_LISTED:
            raise _invalid(f"{name} has {len(listed)} entries, more than {MAX_LISTED}")
    if not handover and sampling.max_tokens > emitted + 1:
        raise _invalid(
            f"max_tokens is {sampling.max_tokens}, but a prefill without handover computes only token "
            f"{emitted + 1}: set handover"
        )
    try:
        request = _request(attempt_id, asked, _images(asked, limits, pixels))
        check_request(request, limits.vocab_size, limits.max_model_len, limits.images)
    except ValueError as error:
        raise _invalid(str(error)) from error
    return messages.Work(
        request,
        timeout=asked.timeout_ms / 1000,
        origin=messages.Origin(
            attempt_id,
            name=asked.name if _NAME.fullmatch(asked.name) else asked.request_id.hex(),
            traceparent=valid_traceparent(asked.traceparent),
            accepted_at=time.monotonic(),
        ),
    )


def _check_labels(asked: pb.Request) -> None:
    for name in ("first_token_within", "waited", "gap_cost"):
        if not 0 <= (seconds := getattr(asked, name)) < math.inf:
            raise _invalid(f"{name} is {seconds}: give seconds, or 0")
    _check_label("cache_salt", asked.cache_salt)
    _check_label("tenant", asked.tenant)
    if len(asked.adapter) not in (0, ID_BYTES):
        raise _invalid(f"adapter must have {ID_BYTES} bytes, not {len(asked.adapter)}")


def _check_label(name: str, label: bytes) -> None:
    if len(label) > MAX_LABEL_BYTES:
        raise _invalid(f"{name} has {len(label)} bytes, more than {MAX_LABEL_BYTES}")


def _images(asked: pb.Request, limits: Limits, pixels: bytes | bytearray) -> tuple[Image, ...]:
    """Raises ValueError if they have other pixels than these."""
    settings = limits.images
    sizes = [
        settings.pixel_bytes(x.rows, x.columns) if settings is not None and x.with_pixels else 0
        for x in asked.images
    ]
    if sum(sizes) != len(pixels):
        raise ValueError(f"images: {len(pixels)} bytes of pixels came, not {sum(sizes)}")
    stops = accumulate(sizes)
    return tuple(
        Image(x.name, x.start, x.rows, x.columns, bytes(memoryview(pixels)[stop - size : stop]))
        for x, size, stop in zip(asked.images, sizes, stops, strict=True)
    )


def _request(attempt_id: bytes, asked: pb.Request, images: tuple[Image, ...]) -> EngineRequest:
    """Raises ValueError, which names the sampling parameter that is out of range."""
    sampling = asked.sampling
    converted = {
        "logit_bias": dict(sampling.logit_bias),
        "bad_words": tuple(tuple(word.token_ids) for word in sampling.bad_words),
        "structured_output": _structured_output(sampling),
        "reasoning": _reasoning(sampling),
    }
    return EngineRequest(
        attempt_id,
        asked.prompt_ids[:],  # a list, in half the time of `list`
        asked.output_ids[:],
        SamplingParams(**_same_names(sampling, SamplingParams, converted), **converted),
        priority=asked.priority,
        alone=asked.alone,
        retried=asked.retried,
        first_token_within=(asked.first_token_within or math.inf) - asked.waited,
        gap_cost=asked.gap_cost,
        cache_salt=with_adapter(asked.cache_salt, asked.adapter),
        adapter=asked.adapter,
        tenant=asked.tenant,
        images=images,
    )


def _structured_output(sampling: pb.SamplingParams) -> StructuredOutput | None:
    if not sampling.HasField("structured_output"):
        return None
    kind = sampling.structured_output.WhichOneof("kind")
    if kind is None:
        raise ValueError("structured_output has no kind")
    return StructuredOutput(kind, getattr(sampling.structured_output, kind))


def _reasoning(sampling: pb.SamplingParams) -> Reasoning | None:
    if not sampling.HasField("reasoning"):
        return None
    return Reasoning(**_same_names(sampling.reasoning, Reasoning))


def _same_names(sent: Message, kind: type, but: Collection[str] = ()) -> dict[str, Any]:
    """Reads the fields that a dataclass has under the same names. One with the default None is optional."""
    values: dict[str, Any] = {}
    for name, default in [(field.name, field.default) for field in fields(kind) if field.name not in but]:
        value = getattr(sent, name)
        if default is None:
            values[name] = value if sent.HasField(name) else None
        else:
            values[name] = tuple(value) if default == () else value
    return values


def output_tokens(output_ids: Sequence[int], limits: Limits) -> list[int]:
    """Checks the output ids of a Retarget. Raises RefusedAttempt(INVALID)."""
    if len(output_ids) >= limits.max_model_len:
        raise _invalid(f"{len(output_ids)} output_ids fill the context of {limits.max_model_len}")
    if output_ids and max(output_ids) >= limits.vocab_size:
        raise _invalid(
            f"output_ids has token {max(output_ids)}, beyond the vocabulary of {limits.vocab_size}"
        )
    return list(output_ids)


def source(value: pb.PrefillSource) -> messages.PrefillSource:
    """Checks the source of a request's KV. Raises RefusedAttempt(INVALID); StreamError for a malformed id."""
    address = _address(value.kv_address)
    prefill_id = attempt_id(value.prefill_id, "prefill_id")
    return messages.PrefillSource(prefill_id, address, value.incarnation, value.attempt)


def content_source(submit: pb.SubmitPrefill | pb.SubmitDecode) -> messages.ContentSource | None:
    """Checks the source of cached KV, if there is one. Raises RefusedAttempt(INVALID)."""
    if not submit.HasField("content"):
        return None
    return messages.ContentSource(
        _address(submit.content.kv_address), submit.content.incarnation, _tier(submit.content.tier)
    )


def image_ready(told: pb.ImageReady, limits: Limits) -> messages.ImageReady:
    """Raises StreamError for a name or an address that is none."""
    if limits.images is None or len(told.name) != IMAGE_NAME_BYTES:
        raise StreamError(f"image_ready has a name of {len(told.name)} bytes, or the model takes no images")
    try:
        source = messages.ContentSource(_address(told.kv_address), told.incarnation)
    except RefusedAttempt as error:
        raise StreamError(str(error)) from error
    return messages.ImageReady(told.name, source)


def encode(
    stream: int, encode_id: bytes, submit: pb.SubmitEncode, limits: Limits, pixels: bytes | bytearray
) -> messages.Encode:
    """Checks an image for an encoder. Raises RefusedAttempt(INVALID)."""
    image, settings = submit.image, limits.images
    assert settings is not None, "it encodes"
    if len(image.name) != IMAGE_NAME_BYTES:
        raise _invalid(f"image: its name must have {IMAGE_NAME_BYTES} bytes, not {len(image.name)}")
    size = settings.pixel_bytes(image.rows, image.columns)
    if not 0 < size <= CHANNELS * MOST_PIXELS:
        raise _invalid(
            f"image: {image.rows} × {image.columns} tokens are none, or more than {MOST_PIXELS} pixels"
        )
    if len(pixels) not in (0, size):
        raise _invalid(f"image: {len(pixels)} bytes of pixels came, not {size}")
    _check_label("tenant", submit.tenant)
    origin = messages.Origin(
        encode_id,
        name=submit.name if _NAME.fullmatch(submit.name) else encode_id.hex(),
        traceparent=valid_traceparent(submit.traceparent),
        accepted_at=time.monotonic(),
    )
    return messages.Encode(
        stream, origin, image.name, image.rows, image.columns, bytes(pixels), submit.tenant
    )


def plan(submit: pb.SubmitPrefill) -> tuple[messages.PlanRange, ...]:
    """Checks the plan of a split prompt. Raises RefusedAttempt(INVALID); StreamError for a malformed id."""
    ranges = tuple(
        messages.PlanRange(
            attempt_id(of.prefill_id, "plan.prefill_id"),
            _address(of.kv_address),
            of.incarnation,
            of.start,
            of.stop,
        )
        for of in submit.plan[: MAX_RANGES + 1]
    )
    if not ranges:
        return ()
    part_stops = [of.stop for of in ranges if of.prefill_id == submit.prefill_id]
    request, stops = submit.request, [of.stop for of in ranges]
    workers = {(of.prefill_id, of.kv_address, of.incarnation) for of in ranges}
    if len(ranges) > MAX_RANGES:
        raise _invalid(f"plan has more than {MAX_RANGES} ranges")
    if [0, *stops[:-1]] != [of.start for of in ranges] or any(of.start >= of.stop for of in ranges):
        raise _invalid("the ranges of plan must follow each other from position 0 on")
    if any(stop % CHUNK_TOKENS for stop in stops[:-1]):
        raise _invalid(f"the ranges of plan must end at multiples of {CHUNK_TOKENS}")
    if not len(workers) == len({of.prefill_id for of in ranges}) == len({of.incarnation for of in ranges}):
        raise _invalid("plan must have one prefill_id and one address for each worker")
    if not part_stops or part_stops[-1] != len(request.prompt_ids) + len(request.output_ids):
        raise _invalid("the last range of this prefill in plan must end with the tokens of the request")
    if not submit.handover or request.images or request.sampling.HasField("prompt_logprobs"):
        raise _invalid("plan needs a handover, without images and prompt_logprobs")
    return ranges


def _tier(tier: "pb.Tier") -> Tier:
    """A tier of a newer version counts as the slowest one of a worker. The store is none of these."""
    return Tier(min(tier, Tier.DISK))


def _address(address: str) -> str:
    match = _ADDRESS.fullmatch(address) if len(address) <= MAX_ADDRESS else None
    if match is None:
        raise _invalid(f"kv_address {address[:MAX_ADDRESS]!r} is not host:port")
    if not 1 <= int(match[2]) <= 65_535:
        raise _invalid(f"kv_address names port {match[2]}, which is not 1 to 65535")
    return address


def _invalid(message: str) -> RefusedAttempt:
    return RefusedAttempt(Code.INVALID, message)


def chunks(message: pb.OnlyCopies) -> list[int] | None:
    """None: all."""
    if len(message.chunks) > MAX_CHUNKS:
        raise StreamError(f"only_copies has {len(message.chunks)} chunks, more than {MAX_CHUNKS}")
    return None if message.all else list(message.chunks)
