"""The messages of a request, and their translation into those of a chat."""

import json
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from baton.router.api.fields import ByType, Items, Nullable, Part, TextPart, text
from baton.router.api.messages import FUNCTION_NAME

Text = Annotated[str, BeforeValidator(text, json_schema_input_type=str | list[TextPart] | None)]
"""A string or text blocks. Members such as `cache_control` have no effect."""


class Block(Part):
    """A block of content. Unknown members have no effect."""


class TextBlock(Block):
    type: Literal["text"]
    text: str


class ThinkingBlock(Block):
    """Reasoning of an earlier message. `signature` has no effect."""

    type: Literal["thinking"]
    thinking: str


class ToolUseBlock(Block):
    type: Literal["tool_use"]
    id: str
    name: Annotated[str, Field(pattern=FUNCTION_NAME)]
    input: dict[str, Any]


class ToolResultBlock(Block):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Text = ""
    is_error: Nullable[bool] = False


AnyBlock = Annotated[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, ByType()]


def _blocks(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class InputMessage(Part):
    role: Literal["user", "assistant", "system"]
    content: Annotated[
        Items[AnyBlock], BeforeValidator(_blocks, json_schema_input_type=str | Items[AnyBlock])
    ]


def chat_messages(system: str, messages: Iterable[InputMessage]) -> list[dict[str, Any]]:
    """Returns the messages of the chat. Consecutive messages of a role become one, as at Anthropic."""
    chat: list[dict[str, Any]] = [{"role": "system", "content": [system]}] if system else []
    for message in messages:
        for block in message.content:
            new = _message(message.role, block)
            last = chat[-1] if chat else None
            if last is not None and last["role"] == new["role"] and "tool_call_id" not in new:
                for name in new.keys() - {"role"}:
                    last.setdefault(name, []).extend(new[name])
            else:
                chat.append(new)
    for each in chat:
        for name in each.keys() & {"content", "reasoning"}:
            each[name] = "\n".join(filter(None, each[name]))
    return chat


def _message(role: str, block: Block) -> dict[str, Any]:
    """Returns the message of one block. Its texts are lists, which grow while messages become one."""
    match block:
        case ThinkingBlock():
            return {"role": role, "content": [], "reasoning": [block.thinking]}
        case ToolUseBlock():
            function = {"name": block.name, "arguments": json.dumps(block.input)}
            calls = [{"id": block.id, "type": "function", "function": function}]
            return {"role": role, "content": [], "tool_calls": calls}
        case ToolResultBlock():
            # A chat has no mark for a failed call.
            content = f"Error: {block.content}" if block.is_error else block.content
            return {"role": "tool", "content": [content], "tool_call_id": block.tool_use_id}
        case TextBlock():
            return {"role": role, "content": [block.text]}
    raise AssertionError(block)
