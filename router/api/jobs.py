"""Makes jobs of a validated request, and of the model's sampling defaults, for each choice."""

import json
import os
import re
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from baton.engine.api.sampling_params import SamplingParams
from baton.kv_names import ImageSpan, prompt_hints, with_adapter
from baton.router.api.bodies import MAX_CHOICES, CompletionOptions, GenerationBody, Options
from baton.router.api.sampling import TOKEN_ID
from baton.router.api.structured import Structure
from baton.router.api.validation import validate
from baton.router.errors import ContextLengthExceeded, InvalidRequest
from baton.rpc import worker_pb2 as pb
from baton.vision.images import CHANNELS, MOST_PIXELS

DEFAULT_COMPLETION_TOKENS = 16
MAX_PROMPT_LOGPROBS = 4 << 20
"""Of all prompts of a request, with the alternatives. The router keeps some 100 bytes for each."""
SESSION_CHUNKS = 4
_SEED_MASK = 2**64 - 1
FILE = "generation_config.json"
NONE = "vllm"
"""The value of --advanced.generation-config without any recommended defaults."""
_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_AS_SENT = (
    *_NAMES, "presence_penalty", "frequency_penalty", "min_tokens", "ignore_eos", "stop_token_ids",
    "allowed_token_ids", "logprob_token_ids",
)  # fmt: skip
"""Fields that workers get under the same name."""
_DEFAULTS = {name: getattr(SamplingParams(), name) for name in _AS_SENT}


class PlacedImage(NamedTuple):
    """An image in a prompt. The fields but the last are those of `Image` in proto/worker.proto."""

    name: bytes
    start: int
    rows: int
    columns: int
    pixels: memoryview
    """Red, green and blue of each pixel, row by row."""

    @property
    def tokens(self) -> int:
        return self.rows * self.columns

    @property
    def span(self) -> ImageSpan:
        return ImageSpan(self.start, self.start + self.tokens, self.name)


@dataclass(frozen=True, slots=True)
class Job:
    """What one generation computes: token ids and sampling parameters, without text."""

    prompt_ids: list[int]
    sampling: pb.SamplingParams
    session_key: int
    """64-bit hash of the session."""
    chunks: list[int]
    """Hashes of the prompt's full 64-token chunks."""
    priority: int = 0
    cache_salt: bytes = b""
    tenant: bytes = b""
    adapter: bytes = b""
    """As in `Request` in proto/worker.proto."""
    pair: tuple[str, str] | None = None
    """As in `PrefillRequest`."""
    images: tuple[PlacedImage, ...] = ()
    """Those of the prompt, in order."""
    structure_field: str = ""
    """The field of the request that demands its structured output. Empty: none does."""

    @property
    def answer_names(self) -> tuple[int, bytes, str]:
        """By which answers are expected to be as long as earlier ones: session, key, and model."""
        return self.session_key, self.tenant, self.adapter.hex()

    @property
    def scores_prompt(self) -> bool:
        """Whether log probabilities of the prompt are asked for."""
        return self.sampling.HasField("prompt_logprobs")


class SamplingDefaults(GenerationBody):
    """The fields that a request gets if it leaves them out: what the model's generation_config.json says."""

    limits_output: bool = False
    """`max_tokens` also limits requests that set it."""


def sampling_defaults(chosen: str, model: Path) -> SamplingDefaults:
    """Returns the defaults of a model. `max_tokens` is a limit if it comes from a directory that was chosen.

    Args:
        chosen: the value of --advanced.generation-config: auto, vllm, or the path of a directory.
        model: the path of the model.

    Raises ValueError when the file is missing in that directory, or has a value out of range.
    """
    file = (model if chosen == "auto" else Path(chosen)) / FILE
    if chosen == NONE or (chosen == "auto" and not file.is_file()):
        return SamplingDefaults()
    try:
        recommended: dict[str, Any] = json.loads(file.read_text())
        fields = {name: recommended.get(name) for name in _NAMES}
        length = {"max_tokens": recommended.get("max_new_tokens"), "limits_output": chosen != "auto"}
        return validate(SamplingDefaults, fields | length)
    except OSError as error:
        raise ValueError(
            f"--advanced.generation-config {chosen}: {file} cannot be read: {error.strerror}"
        ) from error
    except (ValueError, AttributeError, InvalidRequest) as error:
        raise ValueError(
            f"--advanced.generation-config {chosen}: {file}: {error}; {NONE} ignores the file"
        ) from error


def shown(defaults: SamplingDefaults) -> dict[str, float]:
    """Returns the fields that have a value."""
    return defaults.model_dump(include={*_NAMES, "max_tokens"}, exclude_none=True)


def make_jobs(
    body: Options,
    prompts: "Sequence[array[int]]",
    *,
    prompt_field: str,
    context: int,
    vocab_size: int,
    session: str | None,
    content_root: bytes,
    cache_salt: bytes,
    adapter: bytes,
    tenant: bytes,
    priority: int,
    structure: Structure | None,
    reasoning: pb.Reasoning | None,
    bad_words: "Sequence[array[int]]",
    images: list[list[PlacedImage]],
    defaults: SamplingDefaults,
) -> Iterator[list[Job]]:
    """Yields the `n` jobs of each prompt, in the order of the choices. Raises InvalidRequest.

    `prompt_field` has the prompts in the client's body. `session` is a name (`session_name`). `content_root`
    is that of the workers. `priority` counts beside the requests of other keys. `defaults` are those of the
    model. `images`: of each prompt. Empty: there are none."""
    salt = with_adapter(cache_salt, adapter)
    sampling = _sampling(body, vocab_size, defaults)
    sampling["structured_output"] = structure and structure.message
    sampling["reasoning"] = reasoning
    sampling["bad_words"] = [pb.BadWord(token_ids=word) for word in bad_words]
    if len(prompts) * body.n > MAX_CHOICES:
        text = f"{len(prompts)} prompts with n={body.n} are more than {MAX_CHOICES} choices"
        raise InvalidRequest.at("n", text)
    pixels = body.n * sum(len(image.pixels) // CHANNELS for listed in images for image in listed)
    if pixels > MOST_PIXELS:
        text = f"{body.n} choices with images of {pixels} pixels in all are more than {MOST_PIXELS}"
        raise InvalidRequest.at("n", text)
    scored = body.prompt_logprobs_wanted
    numbers = 0 if scored is None else body.n * (scored + 1) * sum(map(len, prompts))
    if numbers > MAX_PROMPT_LOGPROBS:
        field = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
        text = f"{numbers} log probabilities of prompts are more than {MAX_PROMPT_LOGPROBS}"
        raise InvalidRequest.at(field, text)
    lists = map(array.tolist, prompts)
    for prompt_ids, of_prompt in zip(lists, images or [[]] * len(prompts), strict=True):
        if not prompt_ids:
            raise InvalidRequest.at(prompt_field, "must not be empty")
        room = output_room(len(prompt_ids), prompt_field, context)
        max_tokens = _max_tokens(body, room, defaults)
        if body.min_tokens > max_tokens:
            text = f"must be at most max_tokens ({max_tokens}), not {body.min_tokens}"
            raise InvalidRequest.at("min_tokens", text)
        # Where all of a prompt is computed, cached chunks help no worker.
        spans = [each.span for each in of_prompt]
        chunks = [] if scored is not None else prompt_hints(prompt_ids, content_root, salt, spans)
        prompt_images = tuple(of_prompt)
        key = _session_key(session, prompt_ids, chunks, salt)
        seed = int.from_bytes(os.urandom(8)) if body.seed is None else body.seed
        common = pb.SamplingParams(**sampling, max_tokens=max(1, max_tokens))
        jobs: list[Job] = []
        for i in range(body.n):
            seeded = pb.SamplingParams(seed=(seed + i) & _SEED_MASK)
            seeded.MergeFrom(common)
            jobs.append(
                Job(
                    prompt_ids,
                    seeded,
                    key,
                    chunks,
                    priority,
                    cache_salt,
                    tenant,
                    adapter,
                    images=prompt_images,
                    structure_field="" if structure is None else structure.field,
                )
            )
        yield jobs


def output_room(prompt_tokens: int, field: str, context: int) -> int:
    """Returns how many tokens fit after the prompt. Raises ContextLengthExceeded when none does."""
    room = context - prompt_tokens
    if room < 1:
        raise ContextLengthExceeded.of_prompt(field, prompt_tokens, "tokens", context - 1, context)
    return room


def _max_tokens(body: Options, room: int, defaults: SamplingDefaults) -> int:
    """Returns the limit for output tokens: an upper bound, as in vLLM, which the context may lower to `room`.
    Clients send the largest limit that some model has."""
    max_tokens = body.max_tokens_wanted
    limit = defaults.max_tokens or room
    if max_tokens is None:
        max_tokens = min(limit, DEFAULT_COMPLETION_TOKENS) if isinstance(body, CompletionOptions) else limit
    return min(max_tokens, room, limit) if defaults.limits_output else min(max_tokens, room)


def _sampling(body: Options, vocab_size: int, defaults: SamplingDefaults) -> dict[str, Any]:
    bias = body.logit_bias or {}
    wrong = [key[:20] for key in bias if not re.fullmatch(TOKEN_ID, key) or int(key) >= vocab_size]
    if wrong:
        text = f"{', '.join(wrong[:10])}: a key must be a token id below {vocab_size}"
        raise InvalidRequest.at("logit_bias", text)
    for field in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
        for token_id in getattr(body, field) or ():
            if token_id >= vocab_size:
                text = f"{token_id} is out of vocabulary, which has {vocab_size} tokens"
                raise InvalidRequest.at(field, text)
    chosen: dict[str, Any] = dict(_DEFAULTS)
    for source in (defaults, body):
        chosen |= {name: value for name in _AS_SENT if (value := getattr(source, name)) is not None}
    return chosen | {
        "top_k": max(0, chosen["top_k"]),
        "logit_bias": {int(key): value for key, value in bias.items()},
        "logprobs": body.logprobs_wanted,
        "prompt_logprobs": body.prompt_logprobs_wanted,
    }


def _session_key(session: str | None, prompt_ids: list[int], chunks: list[int], salt: bytes) -> int:
    """Returns the key of the client's session name, or else of the first chunks of the prompt."""
    if session:
        return xxhash.xxh3_64_intdigest(salt + session.encode(errors="replace"))
    if chunks:
        return chunks[:SESSION_CHUNKS][-1]
    return xxhash.xxh3_64_intdigest(salt + repr(prompt_ids).encode())
