"""The items of an input, and their translation into the messages of a chat."""

from collections.abc import Iterable
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from baton.router.api.fields import ByType, Items, Part, TextPart, invalid, text
from baton.router.api.messages import FUNCTION_NAME

_TEXT = ("input_text", "output_text", "text")


class InputTextPart(TextPart):
    type: Literal["input_text", "output_text", "text"]  # pyrefly: ignore[bad-override]


class ReasoningTextPart(TextPart):
    type: Literal["reasoning_text"]  # pyrefly: ignore[bad-override]


Text = Annotated[
    str, BeforeValidator(partial(text, kinds=_TEXT), json_schema_input_type=str | list[InputTextPart] | None)
]
ReasoningText = Annotated[
    str,
    BeforeValidator(
        partial(text, kinds=("reasoning_text",)), json_schema_input_type=str | list[ReasoningTextPart] | None
    ),
]


class Item(Part):
    """An item of an input. Members that only responses have, such as `id` and `status`, have no effect."""


class MessageItem(Item):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Text


class ReasoningItem(Item):
    """Reasoning of an earlier response. `summary` and `encrypted_content` have no effect."""

    type: Literal["reasoning"]
    content: ReasoningText = ""


class FunctionCallItem(Item):
    type: Literal["function_call"]
    call_id: str
    name: Annotated[str, Field(pattern=FUNCTION_NAME)]
    arguments: str


class FunctionCallOutputItem(Item):
    type: Literal["function_call_output"]
    call_id: str
    output: Text


AnyItem = Annotated[
    MessageItem | ReasoningItem | FunctionCallItem | FunctionCallOutputItem, ByType(default="message")
]


def _items(value: Any) -> Any:
    if not isinstance(value, str | list):
        raise invalid("must be a string or a list of items")
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


Input = Annotated[Items[AnyItem], BeforeValidator(_items, json_schema_input_type=str | Items[AnyItem])]


def chat_messages(instructions: str | None, items: Iterable[Item]) -> list[dict[str, Any]]:
    """Returns the messages of the chat.

    Reasoning, a message of the assistant, and calls that follow each other become one message.
    """
    chat: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    for item in items:
        new = _message(item)
        last = chat[-1] if chat and chat[-1]["role"] == new["role"] == "assistant" else None
        if last is None or _ends(last, item):
            chat.append(new)
        elif "tool_calls" in new:
            last.setdefault("tool_calls", []).extend(new["tool_calls"])
        else:
            last["content"] = new["content"]
    return chat


def _ends(message: dict[str, Any], item: Item) -> bool:
    """Returns whether `item` begins another message of the assistant than `message`."""
    if isinstance(item, FunctionCallItem):
        return False
    return isinstance(item, ReasoningItem) or bool(message["content"]) or "tool_calls" in message


def _message(item: Item) -> dict[str, Any]:
    match item:
        case MessageItem():
            return {"role": item.role, "content": item.content}
        case ReasoningItem():
            return {"role": "assistant", "content": "", "reasoning": item.content}
        case FunctionCallItem():
            function = {"name": item.name, "arguments": item.arguments}
            calls = [{"id": item.call_id, "type": "function", "function": function}]
            return {"role": "assistant", "content": "", "tool_calls": calls}
        case FunctionCallOutputItem():
            return {"role": "tool", "content": item.output, "tool_call_id": item.call_id}
    raise AssertionError(item)
