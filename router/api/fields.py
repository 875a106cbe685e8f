"""Types of request fields: their validators, and the JSON schemas of what clients may send."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
)
from pydantic_core import CoreSchema, PydanticCustomError, PydanticUseDefault, core_schema

from baton.engine.api.sampling_params import BOUNDS

MAX_CHOICES = 128
MAX_ITEMS = 1 << 16
"""Entries of lists of messages, of their parts and of tool calls. Each becomes an object of some hundred
bytes."""
MAX_STOPS, MAX_STOP_LENGTH = 64, 1024


def invalid(reason: str, param: str | None = None) -> PydanticCustomError:
    """Returns an error for a validator to raise. `param` names the field, if it is not the validated one."""
    return _error("invalid", reason, param)


def unsupported(reason: str, param: str | None = None) -> PydanticCustomError:
    """Returns the error for a valid value that asks for a feature that Baton does not have."""
    return _error("unsupported", reason, param)


def _error(kind: Literal["invalid", "unsupported"], reason: str, param: str | None) -> PydanticCustomError:
    return PydanticCustomError(kind, "{reason}", {"reason": reason} | ({"param": param} if param else {}))


def pointer(field: str) -> str:
    """Returns the JSON pointer to a field of the body, as errors name it."""
    return "/" + field.replace("[", "/").replace("]", "").replace(".", "/")


def _not_zero(value: int) -> int:
    if value == 0:
        raise invalid("must be -1, or at least 1")
    return value


def within(name: str) -> Any:
    """Returns the bounds of a sampling parameter, for a field with this name."""
    least, most, above = BOUNDS[name]
    return Field(ge=None if above else least, gt=least if above else None, le=most)


# What clients may send, for the JSON schema. The validators below normalize it.
TokenId = Annotated[int, Field(ge=0, lt=2**32)]
# -1, or at least 1.
TruncatedLength = Annotated[
    int, Field(ge=-1, lt=2**31, json_schema_extra={"not": {"const": 0}}), AfterValidator(_not_zero)
]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]

# Variables of a chat template beside messages and tools, such as Qwen 3's `enable_thinking`.
TemplateSettings = Annotated[
    dict[Annotated[str, Field(max_length=64)], Any], Field(max_length=64, fail_fast=True)
]


class _NullIsDefault:
    """Reads null as an absent field, because many clients send every field that they know."""

    def __get_pydantic_core_schema__(self, kind: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(kind)
        shown = core_schema.nullable_schema(schema)
        return core_schema.no_info_before_validator_function(_given, schema, json_schema_input_schema=shown)


def _given(value: Any) -> Any:
    if value is None:
        raise PydanticUseDefault
    return value


T = TypeVar("T")
Nullable = Annotated[T, _NullIsDefault()]


class Part(BaseModel):
    """A part of a body. Members that it does not have are ignored."""

    model_config = ConfigDict(strict=True, frozen=True)


Items = Annotated[list[T], Field(max_length=MAX_ITEMS, fail_fast=True)]
"""Validation stops at the first wrong entry: the errors of a large body could take gigabytes."""


class TextPart(BaseModel):
    type: Literal["text", "input_text", "output_text"]
    text: str


class RefusalPart(BaseModel):
    type: Literal["refusal"]
    refusal: str


Detail = Literal["auto", "low", "high", "original"]
"""How large an image may be for the model: `low` is at most `LOW_PIXELS`. The others change nothing."""


class ImagePart(Part):
    """An image in a message. With `detail` `low` it has at most 512 × 512 pixels for the model."""

    type: Literal["image_url", "input_image"]
    image_url: "str | ImageUrl"
    detail: Detail | None = None


class ImageUrl(Part):
    url: str
    detail: Detail | None = None


class ShownText(Part):
    """A text between images."""

    type: Literal["text"] = "text"
    text: str


class ShownImage(Part):
    """An image in a message, in whichever form it was sent."""

    type: Literal["image"] = "image"
    url: str
    low: bool = False
    """As `Detail` says."""


TextInput = str | list[str | TextPart | RefusalPart] | None
TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""The types of parts that hold text, and the member with it. Clients send parts of one endpoint to another.
vLLM takes them, too."""


@dataclass(frozen=True)
class Sent:
    """Annotates a field that clients send as another type. A value that is not of it has one error, without
    those of each type that it may have."""

    kind: Any
    what: str
    """What a value must be, for the error."""
    read: Callable[[Any], Any] = lambda value: value
    """Returns the value of the field."""

    def __get_pydantic_core_schema__(self, _: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        sent = handler.generate_schema(self.kind)
        checked = core_schema.custom_error_schema(
            sent, custom_error_type="invalid", custom_error_message=f"must be {self.what}"
        )
        return core_schema.no_info_after_validator_function(self.read, checked)


def _stops(sent: str | list[str] | None) -> list[str]:
    return [] if sent is None else [sent] if isinstance(sent, str) else sent


def _prompts(sent: str | list[Any]) -> list[str | list[int]]:
    return [sent] if isinstance(sent, str) or isinstance(sent[0], int) else sent


Stops = Annotated[
    list[str],
    Sent(
        StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS, fail_fast=True)] | None,
        f"a string or a list of strings, at most {MAX_STOPS} of 1 to {MAX_STOP_LENGTH} characters",
        _stops,
    ),
]
Prompts = Annotated[
    list[str | list[int]],
    Sent(
        str
        | TokenIds
        | Annotated[list[str | TokenIds], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)],
        f"a string, a list of token ids, or a list of at most {MAX_CHOICES} of either, and not empty",
        _prompts,
    ),
]


def text(value: Any, kinds: Mapping[str, str] = TEXTS) -> str:
    """Normalizes the content of a message: null, a string or a list of text parts becomes a string.

    `kinds`: as `TEXTS`.
    """
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        raise invalid("must be a string or a list of text parts")
    texts: list[str] = []
    for part in value:
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str) or kind not in kinds:
            raise unsupported(f"parts of type {kind!r} are not supported")
        if not isinstance(string := part.get(kinds[kind]), str):
            raise invalid("a text part must have a text")
        texts.append(string)
    return "\n".join(texts)


IMAGES = ("image_url", "input_image")
"""The types of parts that hold images. Clients send parts of one endpoint to another."""
MAX_IMAGES = 256
"""Of a message."""


def content(value: Any) -> str | list[ShownText | ShownImage]:
    """Normalizes the content of a message that may have images. Without any it becomes a string (`text`)."""
    if not isinstance(value, list) or not any(_is_image(part) for part in value):
        return text(value)
    parts: list[ShownText | ShownImage] = []
    for part in value:
        if isinstance(part, ShownText | ShownImage):
            parts.append(part)
        elif _is_image(part):
            url, detail = part.get("image_url"), part.get("detail")
            if isinstance(url, dict):
                url, detail = url.get("url"), url.get("detail", detail)
            if not isinstance(url, str):
                raise invalid("a part with an image must have an image_url, with a url")
            if detail not in (None, *get_args(Detail)):
                raise invalid(f"detail must be one of {', '.join(get_args(Detail))}")
            parts.append(ShownImage(url=url, low=detail == "low"))
        else:
            parts.append(ShownText(text=text([part])))
    if sum(isinstance(part, ShownImage) for part in parts) > MAX_IMAGES:
        raise invalid(f"must have at most {MAX_IMAGES} images")
    return parts


UNSEEN = "[{}, which this model cannot see]"


def readable(parts: Any, sees: Callable[[str, dict[str, Any]], bool]) -> Any:
    """Returns the parts of the result of a call with a text in place of each that the model cannot see. The
    client cannot know what a tool returns, and each later turn would be refused. `sees`: by the type."""
    if not isinstance(parts, list):
        return parts

    def shown(part: Any) -> Any:
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str) or sees(kind, part):
            return part
        return {"type": "text", "text": UNSEEN.format(f"a part of type {kind[:40]}")}

    return [shown(part) for part in parts]


def result(value: Any) -> Any:
    """Normalizes the result of a call, with `readable`."""
    return content(
        readable(
            value, lambda kind, part: kind in TEXTS or (kind in IMAGES and part.get("image_url") is not None)
        )
    )


def _is_image(part: Any) -> bool:
    return isinstance(part, ShownImage) or (isinstance(part, dict) and part.get("type") in IMAGES)


ContentInput = str | list[str | TextPart | RefusalPart | ImagePart] | None
Content = Annotated[
    str | list[ShownText | ShownImage], BeforeValidator(content, json_schema_input_type=ContentInput)
]
"""A string, or parts with text and images."""
ResultContent = Annotated[
    str | list[ShownText | ShownImage], BeforeValidator(result, json_schema_input_type=ContentInput)
]

Text = Annotated[str, BeforeValidator(text, json_schema_input_type=TextInput)]
"""A string or text parts. Other members of a part, such as `cache_control`, have no effect."""


class Hosted(Part):
    """What a vendor runs or defines itself, and clients send to each provider: it has no effect. It stays in
    its list, so that errors name the others by the places that they have for the client."""

    type: str


@dataclass(frozen=True)
class ByType:
    """Annotates a model, or a union of models where the member `type` of a value says which one it is."""

    default: str | None = None
    """The type of a value that has none."""
    what: str = "parts"
    """What such values are, for the error of an unknown type."""
    hosted: tuple[str, ...] = ()
    """How the types of values begin that become `Hosted`."""

    def __get_pydantic_core_schema__(self, union: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        # The brackets tell a type from the name of a field in the location of an error.
        choices = {
            f"<{kind}>": handler.generate_schema(model)
            for model in get_args(union) or (union,)
            for kind in get_args(model.model_fields["type"].annotation)
        }

        def tag(value: Any) -> str:
            return f"<{value.get('type') or self.default}>"

        def check(value: Any, validate: core_schema.ValidatorFunctionWrapHandler) -> Any:
            if not isinstance(value, dict):
                raise invalid("must be an object")
            kind = str(value.get("type") or self.default)
            if self.hosted and kind.startswith(self.hosted):
                return Hosted(type=kind)
            if tag(value) not in choices:
                raise unsupported(f"{self.what} of type {kind!r} are not supported")
            return validate(value)

        tagged = core_schema.tagged_union_schema(choices, tag)
        return core_schema.no_info_wrap_validator_function(check, tagged)
