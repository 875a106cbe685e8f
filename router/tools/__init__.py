"""Reasoning and tool calls in the text of a model.

A *format* is the way in which a family of models writes tool calls. Each format is one file with two parts:

- a parser. It takes the model's text in pieces of any size and yields content and tool calls;
- a grammar. Workers enforce it when `tool_choice` demands a call.

`reasoning` divides the text before that into reasoning and content.
"""

from baton.router.tools.formats import FORMATS, format_of
from baton.router.tools.parser import Piece, ToolParser
from baton.router.tools.reasoning import (
    REASONING,
    Beginning,
    ReasoningParser,
    Text,
    continues_reasoning,
    reasoning_of,
)

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
