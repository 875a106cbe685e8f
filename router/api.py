"""Requests as clients write them: OpenAI's fields, and vLLM's beside them.

Types are strict. What Baton cannot do is refused by name; fields that nobody knows are ignored, as vLLM does.
"""

from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from router.errors import InvalidRequest, Unsupported

MAX_LOGPROBS = 20
MAX_CHOICES = 128
MAX_LISTED = 1024  # entries of stop_token_ids and of logit_bias
MAX_TIMEOUT = 86_400.0  # seconds
MAX_STOPS, MAX_STOP_LENGTH = 64, 1024

Prompts = list[str | list[int]]

# What a client may write where the validators below make one kind of value of it.
TokenId = Annotated[int, Field(ge=0, lt=2**32)]
TokenIds = Annotated[list[TokenId], Field(min_length=1)]
Text = Annotated[str, Field(min_length=1)]
PromptInput = Text | TokenIds | Annotated[list[Text | TokenIds], Field(min_length=1, max_length=MAX_CHOICES)]
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
Stops = Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None


class TextPart(BaseModel):
    type: Literal["text"]
    text: str


def _invalid(message: str) -> PydanticCustomError:
    return PydanticCustomError("invalid", "{reason}", {"reason": message})


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(i) is int and 0 <= i < 2**32 for i in value)


def _prompts(value: Any) -> Prompts:
    """One text, one list of token ids, or a list of either."""
    listed = value if isinstance(value, list) and not _is_ids(value) else [value]
    for prompt in listed:
        if not isinstance(prompt, str) and not _is_ids(prompt):
            raise _invalid("must be a string, a list of token ids, or a list of either")
        if not prompt:
            raise _invalid("must not be empty")
    if len(listed) > MAX_CHOICES:
        raise _invalid(f"must hold at most {MAX_CHOICES} prompts, not {len(listed)}")
    return listed


def _stops(value: Any) -> list[str]:
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise _invalid("must be a string or a list of strings")
    if len(stops) > MAX_STOPS or any(not 0 < len(stop) <= MAX_STOP_LENGTH for stop in stops):
        raise _invalid(f"must be at most {MAX_STOPS} strings of 1 to {MAX_STOP_LENGTH} characters")
    return stops


def _text(value: Any) -> str:
    """Message content: a string, or OpenAI's list of parts, of which only text is supported."""
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        raise _invalid("must be a string or a list of text parts")
    texts: list[str] = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise PydanticCustomError(
                "unsupported", "{reason}", {"reason": f"parts of type {kind!r} are not supported"}
            )
        if not isinstance(part.get("text"), str):
            raise _invalid("a text part must have a text")
        texts.append(part["text"])
    return "\n".join(texts)


class Body(BaseModel):
    """Anything that is posted."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, frozen=True)

    model: str | None = None


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)

    include_usage: bool = False
    continuous_usage_stats: bool = False


# Name, and what may stand there all the same because it asks for nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (), "best_of": (1,), "chat_template": (), "function_call": ("none",), "functions": ([],),
    "guided_choice": (), "guided_grammar": (), "guided_json": (), "guided_regex": (),
    "include_stop_str_in_output": (False,), "modalities": (["text"],), "prediction": (),
    "prompt_logprobs": (0,), "response_format": ({"type": "text"},), "structured_outputs": ({},),
    "suffix": ("",), "tool_choice": ("none", "auto"), "tools": ([],), "truncate_prompt_tokens": (),
    "use_beam_search": (False,), "web_search_options": (), "lora_request": (), "bad_words": ([],),
}  # fmt: skip


class GenerationBody(Body):
    """What both kinds of completion share."""

    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: Annotated[list[str], PlainValidator(_stops, json_schema_input_type=Stops)] = []
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_LISTED)] | None = None
    logit_bias: (
        Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MAX_LISTED)] | None
    ) = None
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] = 0
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    return_token_ids: bool = False
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    timeout: Annotated[float, Field(gt=0, le=MAX_TIMEOUT)] | None = None
    user: str | None = None
    prompt_cache_key: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        if isinstance(data, dict):
            for name, harmless in _UNSUPPORTED.items():
                value = data.get(name)
                if value is not None and value not in harmless:
                    raise PydanticCustomError(
                        "unsupported", "{reason}", {"reason": f"{name} is not supported", "param": name}
                    )
        return data

    @property
    def logprobs_wanted(self) -> int | None:
        """How many alternatives per token; None is no logprobs at all."""
        raise NotImplementedError

    @property
    def max_tokens_field(self) -> str:
        return "max_tokens"

    @property
    def max_tokens_wanted(self) -> int | None:
        return self.max_tokens


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: Annotated[Prompts, PlainValidator(_prompts, json_schema_input_type=PromptInput)]
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool = False

    @model_validator(mode="after")
    def _no_prompt_logprobs(self) -> Self:
        if self.echo and self.logprobs is not None:
            reason = "echo is not supported together with logprobs"
            raise PydanticCustomError("unsupported", "{reason}", {"reason": reason, "param": "echo"})
        return self

    @property
    def logprobs_wanted(self) -> int | None:
        return self.logprobs


class Message(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_text, json_schema_input_type=str | list[TextPart] | None)] = ""
    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_tools(cls, data: Any) -> Any:
        if isinstance(data, dict):
            named = next((name for name in ("tool_calls", "function_call", "audio") if data.get(name)), None)
            if named or data.get("role") in ("tool", "function"):
                reason = f"{named or 'messages of role ' + repr(data['role'])} is not supported"
                raise PydanticCustomError("unsupported", "{reason}", {"reason": reason})
        return data


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None

    @model_validator(mode="after")
    def _logprobs_first(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            reason = "top_logprobs needs logprobs to be true"
            raise PydanticCustomError("invalid", "{reason}", {"reason": reason, "param": "top_logprobs"})
        return self

    @property
    def logprobs_wanted(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def max_tokens_field(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def max_tokens_wanted(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def template_messages(self) -> list[dict[str, str]]:
        """As chat templates know them: `developer` is OpenAI's newer name of `system`."""
        return [
            {"role": "system" if m.role == "developer" else m.role, "content": m.content}
            for m in self.messages
        ]


class TokenizeBody(Body):
    """POST /tokenize: a prompt or messages."""

    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError(
                "invalid", "{reason}", {"reason": "needs either prompt or messages", "param": "prompt"}
            )
        return self


class DetokenizeBody(Body):
    """POST /detokenize."""

    tokens: list[TokenId] = Field(validation_alias=AliasChoices("tokens", "token_ids"))


B = TypeVar("B", bound=Body)


def parse(kind: type[B], raw: bytes) -> B:
    """Of JSON. Raises InvalidRequest naming the field, what is wrong with it, and what was sent."""
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        raise _explained(error) from None


def validate(kind: type[B], fields: dict[str, Any]) -> B:
    """The same of what came by another way than JSON."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _explained(error) from None


def _explained(error: ValidationError) -> InvalidRequest:
    first = error.errors(include_url=False)[0]
    context = first.get("ctx", {})
    if first["type"] == "json_invalid":
        return InvalidRequest(f"the body is not valid JSON: {context['error']}")
    if not first["loc"] and "param" not in context:
        return InvalidRequest("the body must be a JSON object")
    param = context.get("param") or _path(first["loc"])
    reason = first["msg"][:1].lower() + first["msg"][1:]
    if first["type"] == "unsupported":
        message = reason if "param" in context else f"{param}: {reason}"
        return Unsupported(message, param=param)
    sent = "" if first["type"] in ("missing", "invalid") else f", not {_shown(first['input'])}"
    return InvalidRequest(f"{param}: {reason}{sent}", param=param)


def _path(location: tuple[int | str, ...]) -> str:
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return path.removeprefix(".")


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."
