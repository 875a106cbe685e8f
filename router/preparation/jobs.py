"""Makes the jobs of a validated request, one for each choice."""

import os
import re
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import xxhash

from baton.engine.api.sampling_params import SamplingParams
from baton.kv_names import prompt_hints, with_adapter
from baton.router.api.bodies import MAX_CHOICES, CompletionOptions, Options
from baton.router.api.jobs import Job, SamplingDefaults, Sender, output_room
from baton.router.api.sampling import TOKEN_ID
from baton.router.api.structured import Structure
from baton.router.errors import InvalidRequest
from baton.router.preparation.prepare import Ids, Prepared
from baton.rpc import worker_pb2 as pb
from baton.vision.images import CHANNELS, MOST_PIXELS

DEFAULT_COMPLETION_TOKENS = 16
MAX_PROMPT_LOGPROBS = 4 << 20
"""Of all prompts of a request, with the alternatives. The router keeps some 100 bytes for each."""
SESSION_CHUNKS = 4
_SEED_MASK = 2**64 - 1
_MADE = {
    "seed", "max_tokens", "logit_bias", "bad_words", "logprobs", "prompt_logprobs", "structured_output",
    "reasoning",
}  # fmt: skip
"""Sampling parameters that are not what a body has under their names."""
_AS_SENT = {each.name: each.default for each in fields(SamplingParams) if each.name not in _MADE}
"""The others, with their defaults."""


def make_jobs(
    prepared: Prepared,
    sender: Sender,
    structure: Structure | None,
    reasoning: pb.Reasoning | None,
    *,
    context: int,
    vocab_size: int,
    content_root: bytes,
    defaults: SamplingDefaults,
) -> Iterator[list[Job]]:
    """Yields the `n` jobs of each prompt, in the order of the choices. Raises InvalidRequest.

    `structure`, `reasoning`: what workers enforce, and must know of the reasoning. `context`: tokens that a
    request may have. `content_root` is that of the workers. `defaults` are those of the model."""
    body, prompts = prepared.options, prepared.prompts
    salt = with_adapter(sender.cache_salt, sender.adapter)
    sampling = _sampling(body, vocab_size, defaults)
    sampling["structured_output"] = structure and structure.message
    sampling["reasoning"] = reasoning
    sampling["bad_words"] = [pb.BadWord(token_ids=word) for word in prepared.bad_words]
    if len(prompts) * body.n > MAX_CHOICES:
        text = f"{len(prompts)} prompts with n={body.n} are more than {MAX_CHOICES} choices"
        raise InvalidRequest.at("n", text)
    pixels = body.n * sum(len(image.pixels) // CHANNELS for listed in prepared.images for image in listed)
    if pixels > MOST_PIXELS:
        text = f"{body.n} choices with images of {pixels} pixels in all are more than {MOST_PIXELS}"
        raise InvalidRequest.at("n", text)
    scored = body.prompt_logprobs_wanted
    numbers = 0 if scored is None else body.n * (scored + 1) * sum(map(len, prompts))
    if numbers > MAX_PROMPT_LOGPROBS:
        field = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
        text = f"{numbers} log probabilities of prompts are more than {MAX_PROMPT_LOGPROBS}"
        raise InvalidRequest.at(field, text)
    for prompt, of_prompt in zip(prompts, prepared.images or [[]] * len(prompts), strict=True):
        if not prompt:
            raise InvalidRequest.at(prepared.prompt_field, "must not be empty")
        room = output_room(len(prompt), prepared.prompt_field, context)
        max_tokens = _max_tokens(body, room, defaults)
        if body.min_tokens > max_tokens:
            text = f"must be at most max_tokens ({max_tokens}), not {body.min_tokens}"
            raise InvalidRequest.at("min_tokens", text)
        # Where all of a prompt is computed, cached chunks help no worker.
        spans = [each.span for each in of_prompt]
        chunks = [] if scored is not None else prompt_hints(prompt, content_root, salt, spans)
        prompt_images = tuple(of_prompt)
        key = _session_key(sender.session, prompt, chunks, salt)
        seed = int.from_bytes(os.urandom(8)) if body.seed is None else body.seed
        common = pb.SamplingParams(**sampling, max_tokens=max(1, max_tokens))
        jobs: list[Job] = []
        for i in range(body.n):
            seeded = pb.SamplingParams(seed=(seed + i) & _SEED_MASK)
            seeded.MergeFrom(common)
            jobs.append(
                Job(
                    prompt,
                    seeded,
                    key,
                    chunks,
                    sender,
                    images=prompt_images,
                    structure_field="" if structure is None else structure.field,
                )
            )
        yield jobs


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
    chosen: dict[str, Any] = {
        "logit_bias": {int(key): value for key, value in bias.items()},
        "logprobs": body.logprobs_wanted,
        "prompt_logprobs": body.prompt_logprobs_wanted,
    }
    for name, default in _AS_SENT.items():
        if (value := getattr(body, name)) is None and (value := getattr(defaults, name)) is None:
            value = default
        if value:  # 0, or nothing, is what a message has without the field: to set it takes longer
            chosen[name] = value
    chosen["top_k"] = max(0, chosen.get("top_k", 0))
    return chosen


def _session_key(session: str | None, prompt: Ids, chunks: list[int], salt: bytes) -> int:
    """Returns the key of the client's session name, or else of the first chunks of the prompt."""
    if session:
        return xxhash.xxh3_64_intdigest(salt + session.encode(errors="replace"))
    if chunks:
        return chunks[:SESSION_CHUNKS][-1]
    return xxhash.xxh3_64_intdigest(salt + prompt.tobytes())
