"""Validates bodies, refuses fields that Baton does not have, and explains what is wrong with a body.

To ignore a field of OpenAI, vLLM, SGLang or llama.cpp would return a result that the client did not ask for.
Fields that do not change the result are not listed, and are ignored. So are new fields: clients send
them to each provider, and each of their requests would fail. Known and not listed:

- `stream_interval` (size of chunks)
- `spaces_between_special_tokens` (no effect on byte-exact text)
- `mm_payload`, `return_mm_kwargs` and `return_token_offsets` (of endpoints that only render)
- `custom_labels` (of metrics), `ngram_corpus_id` (for speculation)
- `context_management` of /v1/messages (Anthropic forgets what agents clear; here prefixes are cached),
  `mcp_servers` (of tools that Anthropic calls itself) and `speed` (there is one)
- `max_tool_calls` (of tools that OpenAI runs itself) and `prompt_cache_options` (prefixes are always cached)
- `options`, `keep_alive` and `think` (of Ollama's own API, not of its form of OpenAI's)
- `client_metadata`, `access_programs` and `reasoning.context` (what Codex sends to OpenAI)
"""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError, model_validator

from baton.router.api.fields import unsupported
from baton.router.errors import InvalidRequest, Unsupported

_OF_LLAMA_CPP: dict[str, tuple[Any, ...]] = {
    "dry_multiplier": (0,), "dynatemp_range": (0,), "lora": ([],), "mirostat": (0,), "n_predict": (-1,),
    "n_probs": (0,), "repeat_penalty": (1,), "t_max_predict_ms": (-1, 0), "top_n_sigma": (-1,),
    "typical_p": (1,), "xtc_probability": (0,),
}  # fmt: skip
# For each field the values that have no effect, and are accepted.
GENERATION: dict[str, tuple[Any, ...]] = {
    "audio": (), "best_of": (1,), "bootstrap_host": (),
    "bootstrap_port": (), "bootstrap_room": (), "chat_template": (),
    "custom_logit_processor": (), "custom_params": ({},), "data_parallel_rank": (),
    "disagg_prefill_dp_rank": (), "documents": ([],), "ec_transfer_params": ({},), "extra_key": (),
    "images_config": ({},),
    "input_ids": (), "kv_transfer_params": ({},), "length_penalty": (1,),
    "logits_processors": ([],), "lora_path": (), "lora_request": (), "max_dynamic_patch": (),
    "media_io_kwargs": ({},), "min_dynamic_patch": (), "mm_processor_kwargs": ({},),
    "modalities": (["text"],), "moderation": (), "no_stop_trim": (False,), "prediction": (),
    "prompt_embeds": (), "repetition_detection": (), "request_id": (),
    "return_cached_tokens_details": (False,), "return_hidden_states": (False,),
    "return_meta_info": (False,), "return_prompt_text": (False,), "return_prompt_token_ids": (False,),
    "return_routed_experts": (False,), "return_weight_versions": (False,), "rid": (), "routed_dp_rank": (),
    "routed_experts_prompt_start": (0,), "routed_experts_start_len": (0,),
    "stop_regex": ([],), "suffix": ("",),
    "use_audio_in_video": (False,), "use_beam_search": (False,),
    "vllm_xargs": ({},), "watermarking": (False,), "web_search_options": (),
    **_OF_LLAMA_CPP,
}  # fmt: skip
COMPLETION: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,), "continue_final_message": (False,), "function_call": ("none",),
    "functions": ([],), "include_reasoning": (True,),
    "max_completion_tokens": (), "thinking_token_budget": (-1,), "tool_choice": ("none", "auto"),
    "tools": ([],), "top_logprobs": (0,), "verbosity": ("medium",),
}  # fmt: skip
CHAT: dict[str, tuple[Any, ...]] = {
    "echo": (False,), "task": (),
}  # fmt: skip
TOKENIZE: dict[str, tuple[Any, ...]] = {"chat_template": ()}
COUNT_TOKENS: dict[str, tuple[Any, ...]] = {
    "output_format": (), "user_profile_id": (), "workspace_id": (),
}  # fmt: skip
_OF_CHATS: dict[str, tuple[Any, ...]] = {
    "echo": (False,), "function_call": ("none",), "functions": ([],), "logprobs": (False,),
    "max_completion_tokens": (), "n": (1,),
    "prompt_logprobs": (), "reasoning_effort": (), "response_format": ({"type": "text"},),
}  # fmt: skip
"""Fields that the other forms of a chat name otherwise, or do not have."""
MESSAGES: dict[str, tuple[Any, ...]] = GENERATION | _OF_CHATS | COUNT_TOKENS | {
    "container": (), "diagnostics": (), "inference_geo": (), "stop": ([],),
    "thread": (), "top_logprobs": (0,),
}  # fmt: skip
RESPONSES: dict[str, tuple[Any, ...]] = GENERATION | _OF_CHATS | {
    "context_management": ([],), "conversation": (), "enable_response_messages": (False,), "image": (),
    "max_tokens": (), "messages": (), "previous_input_messages": ([],), "prompt": (),
    "stop_sequences": ([],), "system": (), "thinking": (),
    "verbosity": ("medium",),
}  # fmt: skip
REFUSED = {
    "/v1/chat/completions": GENERATION | CHAT,
    "/v1/completions": GENERATION | COMPLETION,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": COUNT_TOKENS,
    "/tokenize": TOKENIZE,
}
"""The refused fields of each endpoint."""

_ROUTED = "Baton chooses the workers and moves the KV cache by itself; leave it out"
_NAMED = "name the request in the header x-request-id"
# What the client can do instead, added to the error message.
REMEDIES = {
    "bootstrap_host": _ROUTED,
    "bootstrap_port": _ROUTED,
    "bootstrap_room": _ROUTED,
    "conversation": "use previous_response_id",
    "data_parallel_rank": _ROUTED,
    "disagg_prefill_dp_rank": _ROUTED,
    "echo": "the response holds only the new text; put the last message before it",
    "ec_transfer_params": _ROUTED,
    "input_ids": "send the token ids as prompt to /v1/completions",
    "kv_transfer_params": _ROUTED,
    "max_completion_tokens": "use max_tokens, or max_output_tokens of /v1/responses",
    "max_tokens": "use max_output_tokens",
    "messages": "use input",
    "n_predict": "use max_tokens, or max_output_tokens of /v1/responses",
    "n_probs": "use logprobs",
    "output_format": "use output_config.format",
    "previous_input_messages": "use previous_response_id",
    "prompt": "there are no prompt templates; use instructions",
    "reasoning_effort": "use output_config.effort, or reasoning.effort of /v1/responses",
    "repeat_penalty": "use repetition_penalty",
    "repetition_detection": "use repetition_penalty or stop",
    "request_id": _NAMED,
    "response_format": "use output_config.format, or text.format of /v1/responses",
    "return_prompt_token_ids": "use return_token_ids",
    "rid": _NAMED,
    "routed_dp_rank": _ROUTED,
    "stop": "use stop_sequences",
    "stop_regex": "use stop",
    "stop_sequences": "use stop",
    "system": "use instructions",
    "t_max_predict_ms": "use timeout",
    "thinking": "use reasoning.effort, or chat_template_kwargs.enable_thinking",
    "thread": "send the whole conversation",
    "top_logprobs": "use logprobs of /v1/completions",
    "typical_p": "use min_p or top_p",
    "verbosity": "use text.verbosity",
    "vllm_xargs": "Baton has no such extensions; leave it out",
}


def refuse(data: Any, fields: dict[str, tuple[Any, ...]], *, nested: bool = False) -> Any:
    """Returns `data` without these fields, unless one of them has a value that has an effect.

    Raises the error for a validator otherwise. `nested`: `data` is a part of the body, and the error names
    its path instead of the field. `REMEDIES` are for fields of the body.
    """
    if not isinstance(data, dict):
        return data
    for name, harmless in fields.items():
        value = data.get(name)
        if value is not None and value not in harmless:
            remedy = f": {REMEDIES[name]}" if name in REMEDIES and not nested else ""
            raise unsupported(f"{name} is not supported{remedy}", None if nested else name)
    return {name: value for name, value in data.items() if name not in fields}


def refusing(fields: dict[str, tuple[Any, ...]], *, nested: bool = False) -> Any:
    """Makes a validator that passes a body, or a part of it, through `refuse`."""

    def check(cls: type, data: Any) -> Any:
        return refuse(data, fields, nested=nested)

    return model_validator(mode="before")(classmethod(check))


B = TypeVar("B", bound=BaseModel)


def parse(kind: type[B], raw: bytes | bytearray) -> B:
    """Parses and validates JSON. 5.0 is an integer, as in a JSON schema.

    Raises InvalidRequest with the field, the reason and the value that was sent.
    """
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        first = error
    try:
        return kind.model_validate_json(_with_integers(raw))
    except ValidationError as error:
        raise _explained(first if _place(first) == _place(error) else error) from None


def _place(error: ValidationError) -> Any:
    """Returns where a body is wrong, and how."""
    first = error.errors(include_url=False)[0]
    return first["loc"], first["type"]


def _integer(number: str) -> int | float:
    value = float(number)
    if math.isinf(value):  # the encoder would write null, which stands for the default
        raise ValueError(f"{_shown(number)} is too large for a number")
    return int(value) if value.is_integer() and abs(value) < 2**63 else value


_numbers = msgspec.json.Decoder(float_hook=_integer)


def _with_integers(raw: bytes | bytearray) -> bytes | bytearray:
    """Returns the same JSON, but with numbers such as 5.0 as integers. What is no JSON stays as it is."""
    try:
        return msgspec.json.encode(_numbers.decode(raw))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return raw


NO_NAMES: Mapping[str, str] = MappingProxyType({})


def validate(kind: type[B], fields: dict[str, Any], names: Mapping[str, str] = NO_NAMES) -> B:
    """Validates fields that are already parsed. Raises InvalidRequest like `parse`.

    `names`: what the client's body has in the place of a field, with all its parts."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _explained(error, names) from None


def _explained(error: ValidationError, names: Mapping[str, str] = NO_NAMES) -> InvalidRequest:
    first = error.errors(include_url=False)[0]
    context = first.get("ctx", {})
    if first["type"] == "json_invalid":
        return InvalidRequest(f"the body is not valid JSON: {context['error']}")
    if not first["loc"] and "param" not in context:
        return InvalidRequest("the body must be a JSON object")
    param = context.get("param") or names.get(str(first["loc"][0])) or _path(first["loc"])
    reason = first["msg"][:1].lower() + first["msg"][1:].partition(" after validation")[0]
    if first["type"] == "unsupported":
        message = reason if "param" in context else f"{param}: {reason}"
        return Unsupported(message, param=param)
    sent = "" if first["type"] in ("missing", "invalid") else f", not {_shown(first['input'])}"
    return InvalidRequest.at(param, f"{reason}{sent}")


def _path(location: tuple[int | str, ...]) -> str:
    """Returns the path of a field, without the tags of unions (see `fields.tag`)."""
    named = [part for part in location if isinstance(part, int) or not part.startswith("<")]
    # A key of an object is the client's: it may be as long as the body.
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{_cut(part)}" for part in named)
    return path.removeprefix(".")


def _shown(value: Any) -> str:
    return _cut(repr(value))


def _cut(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."
