"""Checks the messages of a router, before their bytes go to the engine process.

Routers are authenticated, but nothing from the network is trusted. Sizes are bounded, ids have 16 bytes,
tokens are in the vocabulary. A mistake in a request refuses that attempt (`RefusedAttempt`). A malformed id
names no attempt to answer, so it ends the stream (`StreamError`). `engine.SamplingParams` and
`engine.check_request` define the valid requests. They are applied here.
"""

import math
import re
import time
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from google.protobuf.message import DecodeError

from baton.engine import check_request
from baton.engine.api.sampling_params import MAX_LISTED
from baton.kv_names import CHUNK_TOKENS, IMAGE_NAME_BYTES
from baton.rpc import LONGEST_REPORT, bounded_report
from baton.rpc import worker_pb2 as pb
from baton.rpc.token_ids import BYTES as TOKEN_BYTES
from baton.system.tracing import valid_traceparent
from baton.vision.images import CHANNELS, MOST_PIXELS, PIXELS_PART, ImageSettings
from baton.worker.messages import Origin
from baton.worker.requests import engine_request

ID_BYTES = 16
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


class Checked(NamedTuple):
    """What `messages.FromRouter` has of a submission beside its bytes."""

    origin: Origin
    pixels: list[bytes]


class RefusedAttempt(Exception):
    """This worker refuses the attempt. `code` and the text go to the router."""

    def __init__(self, code: pb.FailureCode, message: str) -> None:
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


def submission(
    attempt_id: bytes,
    asked: pb.Request,
    limits: Limits,
    pixels: bytes | bytearray = b"",
    *,
    handover: bool = True,
) -> Checked:
    """Checks the request of an attempt. No later code checks it again. `pixels`: those of its images.

    Without `handover` the next token must be the last, because no worker continues the request. Raises
    RefusedAttempt(INVALID), which names the field.
    """
    if len(asked.request_id) != ID_BYTES:
        raise _invalid(f"request_id must have {ID_BYTES} bytes, not {len(asked.request_id)}")
    if asked.timeout_ms == 0:
        raise _invalid("timeout_ms is 0: the request's deadline has passed")
    _check_labels(asked)
    sampling, emitted = asked.sampling, len(asked.output_ids)
    prompt = len(asked.prompt_ids) // TOKEN_BYTES
    length = prompt + max(sampling.max_tokens, emitted + 1)
    if length > limits.max_model_len:
        raise _invalid(
            f"{prompt} prompt tokens and {length - prompt} output tokens are more than the context of "
            f"{limits.max_model_len}"
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
    origin = _origin(attempt_id, asked, asked.request_id)
    try:
        of_images = _pixels(asked, limits, pixels)
        request = engine_request(origin, asked, of_images)
        check_request(request, limits.vocab_size, limits.max_model_len, limits.images)
    except ValueError as error:
        raise _invalid(str(error)) from error
    return Checked(origin, of_images)


def _origin(attempt_id: bytes, named: pb.Request | pb.SubmitEncode, default: bytes) -> Origin:
    return Origin(
        attempt_id,
        name=named.name if _NAME.fullmatch(named.name) else default.hex(),
        traceparent=valid_traceparent(named.traceparent),
        accepted_at=time.monotonic(),
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


def _pixels(asked: pb.Request, limits: Limits, pixels: bytes | bytearray) -> list[bytes]:
    """Of each image. Raises ValueError if they are others than these."""
    settings = limits.images
    sizes = [
        settings.pixel_bytes(x.rows, x.columns) if settings is not None and x.with_pixels else 0
        for x in asked.images
    ]
    if sum(sizes) != len(pixels):
        raise ValueError(f"images: {len(pixels)} bytes of pixels came, not {sum(sizes)}")
    stops = accumulate(sizes)
    return [bytes(memoryview(pixels)[stop - size : stop]) for size, stop in zip(sizes, stops, strict=True)]


def retarget(told: pb.Retarget, limits: Limits) -> None:
    """Raises RefusedAttempt(INVALID); StreamError for a malformed id."""
    source(told.source)
    output_ids = told.output_ids
    if len(output_ids) >= limits.max_model_len:
        raise _invalid(f"{len(output_ids)} output_ids fill the context of {limits.max_model_len}")
    if output_ids and max(output_ids) >= limits.vocab_size:
        raise _invalid(
            f"output_ids has token {max(output_ids)}, beyond the vocabulary of {limits.vocab_size}"
        )


def source(value: pb.PrefillSource) -> None:
    """Checks the source of a request's KV. Raises RefusedAttempt(INVALID); StreamError for a malformed id."""
    _address(value.kv_address)
    attempt_id(value.prefill_id, "prefill_id")


def content_source(submit: pb.SubmitPrefill | pb.SubmitDecode) -> None:
    """Checks the source of cached KV, if there is one. Raises RefusedAttempt(INVALID)."""
    if submit.HasField("content"):
        _address(submit.content.kv_address)


def image_ready(told: pb.ImageReady, limits: Limits) -> None:
    """Raises StreamError for a name or an address that is none."""
    if limits.images is None or len(told.name) != IMAGE_NAME_BYTES:
        raise StreamError(f"image_ready has a name of {len(told.name)} bytes, or the model takes no images")
    try:
        _address(told.kv_address)
    except RefusedAttempt as error:
        raise StreamError(str(error)) from error


def encode(encode_id: bytes, submit: pb.SubmitEncode, limits: Limits, pixels: bytes | bytearray) -> Checked:
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
    return Checked(_origin(encode_id, submit, encode_id), [bytes(pixels)])


def plan(submit: pb.SubmitPrefill) -> None:
    """Checks the plan of a split prompt. Raises RefusedAttempt(INVALID); StreamError for a malformed id."""
    ranges = submit.plan
    if not ranges:
        return
    if len(ranges) > MAX_RANGES:
        raise _invalid(f"plan has more than {MAX_RANGES} ranges")
    for of in ranges:
        attempt_id(of.prefill_id, "plan.prefill_id")
        _address(of.kv_address)
    part_stops = [of.stop for of in ranges if of.prefill_id == submit.prefill_id]
    request, stops = submit.request, [of.stop for of in ranges]
    workers = {(of.prefill_id, of.kv_address, of.incarnation) for of in ranges}
    if [0, *stops[:-1]] != [of.start for of in ranges] or any(of.start >= of.stop for of in ranges):
        raise _invalid("the ranges of plan must follow each other from position 0 on")
    if any(stop % CHUNK_TOKENS for stop in stops[:-1]):
        raise _invalid(f"the ranges of plan must end at multiples of {CHUNK_TOKENS}")
    if not len(workers) == len({of.prefill_id for of in ranges}) == len({of.incarnation for of in ranges}):
        raise _invalid("plan must have one prefill_id and one address for each worker")
    if not part_stops or part_stops[-1] != len(request.prompt_ids) // TOKEN_BYTES + len(request.output_ids):
        raise _invalid("the last range of this prefill in plan must end with the tokens of the request")
    if not submit.handover or request.images or request.sampling.HasField("prompt_logprobs"):
        raise _invalid("plan needs a handover, without images and prompt_logprobs")


def _address(address: str) -> None:
    match = _ADDRESS.fullmatch(address) if len(address) <= MAX_ADDRESS else None
    if match is None:
        raise _invalid(f"kv_address {address[:MAX_ADDRESS]!r} is not host:port")
    if not 1 <= int(match[2]) <= 65_535:
        raise _invalid(f"kv_address names port {match[2]}, which is not 1 to 65535")


def _invalid(message: str) -> RefusedAttempt:
    return RefusedAttempt(pb.FAILURE_CODE_INVALID, message)


def only_copies(told: pb.OnlyCopies) -> None:
    if len(told.chunks) > MAX_CHUNKS:
        raise StreamError(f"only_copies has {len(told.chunks)} chunks, more than {MAX_CHUNKS}")
