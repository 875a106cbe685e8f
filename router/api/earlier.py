"""Earlier and other forms of the fields of chats: `functions` of OpenAI, and `reasoning` as an object."""

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from baton.router.api.fields import Part, invalid


class NamedFunctionCall(Part):
    name: str


FunctionCall = Literal["none", "auto"] | NamedFunctionCall


class ChatReasoning(Part):
    """As `reasoning_effort`, `thinking_token_budget` and `include_reasoning`, whose place it takes. Other
    members have no effect."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    enabled: bool | None = None
    """False: as the effort none."""
    exclude: bool | None = None
    """The response does not show the reasoning."""


def with_tools(cls: type, data: Any) -> Any:
    """Is a validator of a chat: puts `tools` and `tool_choice` in place of `functions` and `function_call`.

    An empty list of functions stays: then a call comes back as `function_call`."""
    if not isinstance(data, dict) or not data.get("functions"):
        return data
    if data.get("tools") or data.get("tool_choice") is not None:
        raise invalid("functions excludes tools and tool_choice", "functions")
    functions, choice = data["functions"], data.get("function_call")
    if not isinstance(functions, list):
        raise invalid("must be a list of functions", "functions")
    named = isinstance(choice, dict) and {"type": "function", "function": choice}
    return {
        **data,
        "functions": [],
        "function_call": "auto" if choice is None else choice,
        "tools": [{"type": "function", "function": function} for function in functions],
        "tool_choice": named or choice,
        "parallel_tool_calls": False,
    }


def with_effort(cls: type, data: Any) -> Any:
    """Is a validator of a chat: puts other fields in place of `reasoning`. Those that are set stay."""
    given = data.get("reasoning") if isinstance(data, dict) else None
    if given is None:
        return data
    try:
        reasoning = ChatReasoning.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise invalid(first["msg"], ".".join(map(str, ("reasoning", *first["loc"])))) from None
    fields = {
        "reasoning_effort": "none" if reasoning.enabled is False else reasoning.effort,
        "thinking_token_budget": reasoning.max_tokens,
        "include_reasoning": False if reasoning.exclude else None,
    }
    new = {name: value for name, value in fields.items() if value is not None and data.get(name) is None}
    return {**data, **new, "reasoning": None}


def with_calls(cls: type, data: Any) -> Any:
    """Is a validator of a message: the call of a function, and its result, become those of a tool."""
    if not isinstance(data, dict):
        return data
    if isinstance(call := data.get("function_call"), dict) and not data.get("tool_calls"):
        calls = [{"id": _id(call.get("name")), "type": "function", "function": call}]
        return {**data, "function_call": None, "tool_calls": calls}
    if data.get("role") == "function":
        if data.get("tool_call_id") is not None:
            raise invalid("messages of role tool, and no others, have a tool_call_id")
        return {**data, "role": "tool", "tool_call_id": _id(data.get("name"))}
    return data


def _id(name: Any) -> str:
    """Returns the id of the call of a function, which had none. Its result names the function."""
    if not isinstance(name, str):
        raise invalid("must have the name of the function")
    return f"call_{name}"
