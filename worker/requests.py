"""What routers ask for, on its way from the service process to the engine.

The service process checks a message of a router, and hands its bytes on (`messages.FromRouter`). The engine
process makes the engine's request of them.
"""

import math
from collections.abc import Sequence
from dataclasses import fields
from functools import cache
from typing import Any

from google.protobuf.message import Message

from baton.engine import EngineRequest, Image, Reasoning, SamplingParams, StructuredOutput
from baton.kv_names import Tier, with_adapter
from baton.rpc import worker_pb2 as pb
from baton.rpc.token_ids import unpacked_ids
from baton.worker.messages import Origin


def engine_request(origin: Origin, asked: pb.Request, pixels: Sequence[bytes]) -> EngineRequest:
    """`pixels`: of each of its images, as in `Image`. Raises ValueError, which names the sampling parameter
    that is out of range, and for a part of a token id."""
    sampling = asked.sampling
    converted = {
        "logit_bias": dict(sampling.logit_bias),
        "bad_words": tuple(tuple(word.token_ids) for word in sampling.bad_words),
        "structured_output": _structured_output(sampling),
        "reasoning": _reasoning(sampling),
    }
    return EngineRequest(
        origin.attempt_id,
        unpacked_ids(asked.prompt_ids),
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
        images=tuple(
            Image(image.name, image.start, image.rows, image.columns, data)
            for image, data in zip(asked.images, pixels, strict=True)
        ),
        arrived=origin.accepted_at,
    )


def prefill_source(submit: pb.SubmitDecode) -> pb.PrefillSource | None:
    """None: the decode worker computes the prompt."""
    return _alone(submit.source) if submit.HasField("source") else None


def content_source(submit: pb.SubmitPrefill | pb.SubmitDecode) -> pb.ContentSource | None:
    """None: no worker is known to have more of the prompt. A tier of a newer version counts as the slowest of
    a worker. The store is none of these."""
    if not submit.HasField("content"):
        return None
    content = _alone(submit.content)
    content.tier = min(content.tier, Tier.DISK)
    return content


def _alone(part: Any) -> Any:
    """A copy of a part of a message: the part itself keeps the whole message in memory."""
    copy = type(part)()
    copy.CopyFrom(part)
    return copy


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


def _same_names(sent: Message, kind: type, but: Sequence[str] | dict[str, Any] = ()) -> dict[str, Any]:
    """Reads the fields that a dataclass has under the same names. One with the default None is optional."""
    values: dict[str, Any] = {}
    for name, default in _defaults(kind):
        if name in but:
            continue
        value = getattr(sent, name)
        if default is None:
            values[name] = value if sent.HasField(name) else None
        else:
            values[name] = tuple(value) if default == () else value
    return values


@cache
def _defaults(kind: type) -> list[tuple[str, Any]]:
    return [(field.name, field.default) for field in fields(kind)]
