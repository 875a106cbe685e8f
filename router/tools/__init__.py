"""Reasoning and tool calls in the text of a model.

A *format* is the way in which a family of models writes tool calls. Each format is one file with two parts:

- a parser. It takes the model's text in pieces of any size and yields content and tool calls;
- a grammar. Workers enforce it when `tool_choice` demands a call.

`reasoning` divides the text before that into reasoning and content.
"""

from baton.router.tools.hermes import HermesParser
from baton.router.tools.llama import LlamaParser
from baton.router.tools.mistral import MistralParser
from baton.router.tools.parser import Piece, ToolParser
from baton.router.tools.reasoning import (
    REASONING,
    Beginning,
    ReasoningParser,
    Text,
    continues_reasoning,
    reasoning_of,
)

FORMATS: dict[str, type[ToolParser]] = {p.name: p for p in (HermesParser, LlamaParser, MistralParser)}
"""The formats of tool calls, by name."""
# A text that is in the chat templates of models with this format.
_MARKS = {
    "<tool_call>": HermesParser,
    "[TOOL_CALLS]": MistralParser,
    '{"name": function name, "parameters":': LlamaParser,
}


def format_of(template: str) -> type[ToolParser] | None:
    """Returns the format that this chat template uses, or None if it is unknown."""
    return next((parser for mark, parser in _MARKS.items() if mark in template), None)


__all__ = [
    "FORMATS",
    "REASONING",
    "Beginning",
    "Piece",
    "ReasoningParser",
    "Text",
    "ToolParser",
    "continues_reasoning",
    "format_of",
    "reasoning_of",
]
