"""Requests and outputs of an engine, and the hooks through which it reports its KV."""

import math
import time
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from baton.engine.api.sampling_params import SamplingParams
from baton.kv_names import IMAGE_NAME_BYTES, Tier
from baton.vision.images import Image, ImageSettings

PROMPT_PIECE = 64
"""Most tokens in a `PromptLogprobs`: a router writes them to a response in 9 ms, between two other tasks."""


@dataclass(slots=True)
class EngineRequest:
    """One request. Owned by the caller; the engine never changes it."""

    id: bytes
    """Names it in outputs and results."""
    prompt_ids: Sequence[int]
    """An `array` takes the least time."""
    output_ids: list[int] = field(default_factory=list)
    """Tokens that earlier attempts generated. They are prefilled like the prompt and count as generated."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0
    """Lower is sooner. Within a priority, retried requests go first, then the order of arrival counts."""
    alone: bool = False
    """The request shares no step until it has a token from this engine, since it may crash the engine."""
    retried: bool = False
    """The request was interrupted on another worker, so its client has waited already."""
    cache_salt: bytes = b""
    """Only requests with the same salt share prefixes in the prefix cache."""
    adapter: bytes = b""
    """The fingerprint of the adapter (LoRA) that changes the model for it. `cache_salt` depends on it. Empty:
    none does."""
    tenant: bytes = b""
    """Tenants get equal shares of the prompt tokens that the engine computes."""
    first_token_within: float = math.inf
    """Seconds from its arrival in which its prompt should be computed. Steps that also decode take more
    prompt tokens if the prompt would otherwise be late. Infinite: the prompt is in no hurry. Below 0: it is
    late already."""
    gap_cost: float = 0.0
    """What a second more in one of its gaps costs, in seconds of a first token. The more it is, the shorter
    are the steps that also compute prompts. 0: not known, it does not count."""
    images: tuple[Image[bytes], ...] = ()
    """Those of the prompt, in order."""
    arrived: float = field(default_factory=time.monotonic)
    """When it came to the worker (time.monotonic()). It may wait for a prefix before it comes to the
    engine."""


def check_request(
    request: EngineRequest, vocabulary: int, longest: int, images: ImageSettings | None = None
) -> None:
    """Raises `ValueError` if a model with `vocabulary` tokens and a context of `longest` positions can never
    serve the request. `images`: how the model sees images. None: it sees none."""
    import numpy as np  # here, since every quick command of the CLI imports this module

    if not request.prompt_ids:
        raise ValueError("prompt_ids is empty")
    for name, ids in (
        ("prompt_ids", request.prompt_ids),
        ("output_ids", request.output_ids),
        ("stop_token_ids", request.sampling.stop_token_ids),
        ("logit_bias", request.sampling.logit_bias),
        ("allowed_token_ids", request.sampling.allowed_token_ids),
        ("logprob_token_ids", request.sampling.logprob_token_ids),
        ("bad_words", [token for word in request.sampling.bad_words for token in word]),
        ("reasoning", request.sampling.reasoning.ids if request.sampling.reasoning else ()),
    ):
        # An array is looked at in a tenth of the time of a list.
        found = np.asarray(ids if isinstance(ids, array) else [*ids], np.int64)
        if found.size and not 0 <= found.min() <= found.max() < vocabulary:
            token = found.min() if found.min() < 0 else found.max()
            raise ValueError(f"{name} has token {token}, which is not in the vocabulary of {vocabulary}")
    emitted = len(request.output_ids)
    if emitted >= request.sampling.max_tokens:
        raise ValueError(f"max_tokens is {request.sampling.max_tokens}, but output_ids has {emitted} already")
    if len(request.prompt_ids) + emitted >= longest:
        raise ValueError(
            f"prompt_ids and output_ids have {len(request.prompt_ids) + emitted} tokens; "
            f"with at least one more, the limit is {longest} (max_model_len)"
        )
    if request.images:
        _check_images(request, images)


def _check_images(request: EngineRequest, settings: ImageSettings | None) -> None:
    if settings is None:
        raise ValueError(
            "images: this worker takes none, as with --language-model-only, or Gemma with --engine vllm"
        )
    end = 0
    for i, image in enumerate(request.images):
        if len(image.name) != IMAGE_NAME_BYTES:
            raise ValueError(f"images[{i}]: its name must have {IMAGE_NAME_BYTES} bytes")
        if image.rows < 1 or image.columns < 1 or image.start < end or image.stop > len(request.prompt_ids):
            raise ValueError(
                f"images[{i}]: {image.rows} × {image.columns} tokens from position {image.start} on are not "
                "in the prompt, or not behind those of the image before"
            )
        end = image.stop
        if any(token != settings.token_id for token in request.prompt_ids[image.start : image.stop]):
            raise ValueError(f"images[{i}]: its tokens must all be {settings.token_id}")
        if not settings.takes(image.rows, image.columns):
            raise ValueError(
                f"images[{i}]: the model takes no image of {image.rows} × {image.columns} tokens"
            )
        wanted = settings.pixel_bytes(image.rows, image.columns)
        if len(image.pixels) not in (0, wanted):
            raise ValueError(f"images[{i}]: {len(image.pixels)} bytes of pixels, not {wanted}")


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Natural log probabilities for one generated token, from the model's logits before any adjustment."""

    logprob: float
    """Log probability of the generated token."""
    top_ids: tuple[int, ...] = ()
    """The tokens that `logprob_token_ids` names, or the `logprobs` most likely ones, most likely first."""
    top_logprobs: tuple[float, ...] = ()


class Output(NamedTuple):
    """One generated token of one request."""

    id: bytes
    output_index: int
    """Index among all generated tokens of the request, those in `output_ids` included."""
    token: int
    logprobs: Logprobs | None = None
    finish_reason: str = ""
    """Empty: the request goes on. "stop": the token is EOS or a stop token. "length": the output reached
    max_tokens or max_model_len."""
    cached_tokens: int = 0
    """Prompt positions that came from the prefix cache."""
    queue_seconds: float = 0.0
    """Time from the request's arrival to the step that admitted it. Like `prefill_seconds`, it is set with
    the first token after a prefill here."""
    prefill_seconds: float = 0.0
    """Time from that step to this token."""
    accepted_draft: bool = False
    """The token was a draft."""
    rejected_drafts: int = 0
    """Drafts behind this token that were wrong."""


class PromptLogprobs(NamedTuple):
    """Natural log probabilities of consecutive tokens of a prompt, from the model's logits before any
    adjustment. The bytes are little-endian arrays."""

    id: bytes
    position: int
    """Position of the first of these tokens. At least 1: the first token of a prompt has no probability."""
    logprobs: bytes
    """[tokens] float32."""
    ranks: bytes
    """[tokens] int32. 1: no token was more likely."""
    top_ids: bytes
    """[tokens, alternatives] int32: the most likely tokens, most likely first."""
    top_logprobs: bytes
    """[tokens, alternatives] float32."""


@dataclass(slots=True)
class StepResult:
    """The result of one call of `StepLoop.step`.

    Requests in `preempted`, `failed` and `refused` have left the engine. Exception: requests that were added
    with handover and fail or are refused before their first token are held until `Engine.cancel`."""

    outputs: list[Output] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    """Comes while a prompt is computed, if its request asks for it. Each position comes once, in order, and
    before the first output. One entry has at most `PROMPT_PIECE` tokens."""
    preempted: list[bytes] = field(default_factory=list)
    """Requests of `reserve`, `start` or `resume` that are handed back for lack of blocks."""
    failed: list[tuple[bytes, str]] = field(default_factory=list)
    """(request id, message) of requests that failed here and may succeed on another worker."""
    refused: list[tuple[bytes, str]] = field(default_factory=list)
    """(request id, message) of requests that would fail anywhere: their grammar or parameters are wrong."""
    seconds: float = 0.0
    """Device time of the step that landed in this call. 0: no step landed."""
    decodes: int = 0
    """Requests that this step decoded."""
    prompts: dict[bytes, range] = field(default_factory=dict)
    """The positions of prompts that this step computed, or that a step gave up, by request id."""
    ranges_launched: list[bytes] = field(default_factory=list)
    """Requests of `start_part` of which this call has launched a range up to its end. They wait for
    `begin_range` of the next one."""


class CachedBlock(NamedTuple):
    """A full block in the prefix cache."""

    name: bytes
    """Stands for all tokens up to the end of the block (`kv_names`)."""
    chunks: Sequence[bytes]
    """The names of the 64-token chunks that end in it."""
    first_chunk: int
    """The position of the first of these in the prompt, in chunks."""
    salt: bytes
    before: bytes
    """The name of the block before it in its prompt. Empty: there is none."""
    token_ids: Sequence[int]
    tenant: bytes = b""
    """Of the request that computed it."""


class Moved(NamedTuple):
    """The fastest tier that has the block of this name is another one now."""

    name: bytes
    tier: Tier | None
    """None: the block left the cache."""


class Kept(NamedTuple):
    """The cache has more of this chunk than full blocks."""

    salt: bytes
    name: bytes
    chunk: int
    """Its position in the prompt, in chunks."""
    states: bool
    """It has the states after the chunk. If not, the pool has the chunk in a block that is not full."""


CacheChange = CachedBlock | Moved | Kept
"""Of the prefix cache, all tiers included. A `CachedBlock` entered it, on the device."""


def _nothing(*_: object) -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """What an engine tells its caller, in the thread of its calls. No hook may block or call the engine, but
    for what `layer_done` says. An *owner* is what the caller gave with a request, else the request's id."""

    progress: Callable[[str, float], None] = _nothing
    """(stage, fraction): how far the start is."""
    tick: Callable[[], None] = _nothing
    """A sign of life, for each tensor loaded and each layer of a step."""
    computing: Callable[[Collection[bytes]], None] = _nothing
    """The ids of all requests under way, whenever these change. So a supervisor knows which requests were in
    a step that crashed."""

    # Of requests that were added with handover, so that KV can leave layer by layer
    prefill_started: Callable[[Any], None] = _nothing
    """(request): this `LiveRequest` got its blocks. They hold the positions of all its tokens and stay the
    request's until its end and that of all leases on it. Cached positions, the first ones, have their KV
    already."""
    layer_done: Callable[[int, Mapping[Any, range]], bool | None] = _nothing
    """(layer, positions by owner): K and V of the layer, or its states, are written for these (on CUDA:
    enqueued on the current stream). Called between the launches of two layers, before the attention. The
    layer of a draft head comes with the sampling of the step: prompts that have ended by then are left out.
    This hook may block while it writes the KV of the layer, and the states of the next one, that other
    workers compute of a prompt (`Engine.start_part`). True: this will not come for any of these requests, so
    a step for them alone need not go on. The caller then cancels them."""

    cache_changed: Callable[[CacheChange], None] = _nothing
    """What is cached has changed. The changes come in order."""

    def stage(self, name: str, fraction: float) -> None:
        """Tells how far the start is, which is a sign of life."""
        self.tick()
        self.progress(name, fraction)


NO_HOOKS = Hooks()
