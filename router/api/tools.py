"""The fields `tools` and `tool_choice` of a request."""

import json
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PlainValidator, model_validator

from baton.router.api.fields import Part, invalid
from baton.router.api.messages import FUNCTION_NAME
from baton.router.api.unsupported import refusing

WHITESPACE = r"[ \n\r\t]{1,32}"
"""Between the parts of a tool's arguments. Workers allow the same in other JSON."""
# The model would see a tool that the client wants to hide from it.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {"defer_loading": (False,)}


class Function(Part):
    """A function that the model may call.

    `strict` has no effect: workers enforce `parameters` when `tool_choice` demands a call.
    """

    name: Annotated[str, Field(pattern=FUNCTION_NAME)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of an object. None: the function takes no arguments."""
    strict: bool | None = None

    _refuse_unsupported = refusing(_UNSUPPORTED, nested=True)

    @model_validator(mode="after")
    def _arguments_are_an_object(self) -> Self:
        if (self.parameters or {}).get("type", "object") != "object":
            raise invalid("parameters must be the schema of an object")
        return self


class Tool(Part):
    type: Literal["function"]
    function: Function

    _refuse_unsupported = refusing(_UNSUPPORTED, nested=True)

    def for_template(self) -> dict[str, Any]:
        return {"type": "function", "function": self.function.model_dump(exclude_none=True)}

    @property
    def schema_text(self) -> str:
        """The JSON schema of the arguments, as workers enforce it."""
        nothing = {"type": "object", "properties": {}, "additionalProperties": False}
        spaced = {"x-guidance": {"whitespace_pattern": WHITESPACE}}
        schema = {**spaced, **(self.function.parameters or nothing)}
        schema.pop("$schema", None)  # as `grammar_child` reads it
        return json.dumps(schema)


class NamedFunction(Part):
    name: str


class NamedTool(Part):
    """A `tool_choice` that names the tool to call."""

    type: Literal["function"]
    function: NamedFunction


Choice = Literal["none", "auto", "required"] | NamedTool | None


def _choice(value: Any) -> Choice:
    if value in (None, "none", "auto", "required"):
        return value
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise invalid("must be none, auto, required, or a function by its name")
    return NamedTool(type="function", function=NamedFunction(name=function["name"]))


ToolChoice = Annotated[Choice, PlainValidator(_choice, json_schema_input_type=Choice)]
