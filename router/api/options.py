"""What a router reads of a validated body beside its prompt."""

from typing import Annotated

import msgspec
from msgspec import Meta

from baton.router.api.bodies import (
    MAX_CHOICES,
    MAX_LOGPROBS,
    ChatOptions,
    CompletionOptions,
    GenerationBody,
)
from baton.router.api.messages import NamedTool, Tool

Count = Annotated[int, Meta(ge=0)]
_Alternatives = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Fields without a text have the meaning that they have in `GenerationBody`, `ChatOptions` and
    `CompletionOptions`. A child that prepared the body sends them, and msgspec checks types and bounds."""

    is_chat: bool
    prompt_field: str
    model: str | None
    stream: bool
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)]

    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    seed: int | None
    min_tokens: Count
    ignore_eos: bool
    stop_token_ids: list[Count] | None
    allowed_token_ids: list[Count] | None
    logprob_token_ids: list[Count] | None
    logit_bias: dict[str, float] | None
    max_tokens_wanted: Count | None
    logprobs_wanted: _Alternatives | None
    prompt_logprobs: _Alternatives | None
    prompt_logprobs_wanted: _Alternatives | None

    stop: list[Annotated[str, Meta(min_length=1)]]
    skip_special_tokens: bool
    include_stop_str_in_output: bool
    return_token_ids: bool
    return_tokens_as_token_ids: bool
    usage_at_the_end: bool
    usage_in_each_chunk: bool

    priority: int
    timeout: Annotated[float, Meta(gt=0)] | None
    cache_salt: str | None
    session: str | None
    user: str | None

    echo: bool = False
    offered_tools: list[Tool] = []
    """After a child with the names, parameters and strictness of the functions alone."""
    must_call: bool = False
    names_tool: bool = False
    """`tool_choice` names the tool to call."""
    parallel_tool_calls: bool | None = None
    calls_functions: bool = False
    reasoning_budget: Count | None = None
    separate_reasoning: bool = True
    include_reasoning: bool = True
    stream_reasoning: bool = True


_COMPUTED = {"is_chat", "names_tool", "usage_at_the_end", "usage_in_each_chunk"}
_SAME = [name for name in Options.__struct_fields__ if name not in _COMPUTED]
_FIELDS: dict[type[GenerationBody], list[str]] = {
    kind: [name for name in _SAME if hasattr(kind, name) or name in kind.model_fields]
    for kind in (ChatOptions, CompletionOptions)
}


def options_of(body: ChatOptions | CompletionOptions) -> Options:
    """Returns what the router reads of a body."""
    is_chat, streamed = isinstance(body, ChatOptions), body.stream_options
    names = _FIELDS[ChatOptions if is_chat else CompletionOptions]
    return Options(
        **{name: getattr(body, name) for name in names},
        is_chat=is_chat,
        names_tool=isinstance(body, ChatOptions) and isinstance(body.tool_choice, NamedTool),
        usage_at_the_end=streamed is not None and streamed.usage_at_the_end,
        usage_in_each_chunk=streamed is not None and streamed.usage_in_each_chunk,
    )
