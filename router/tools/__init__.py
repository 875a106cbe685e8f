"""Tools: what a model may call, and how what it writes becomes calls.

    tools, tool_choice ──▶ chat template ──▶ the model's text ──▶ parser of its format ──▶ content, tool_calls

A *format* is how a family of models writes calls. It has one parser, fed with text in whatever pieces it
comes, and one grammar, by which workers enforce that calls are made where `tool_choice` says so; both are in
one file.
"""

from router.tools.definitions import NamedTool, Tool, ToolChoice
from router.tools.formats import FORMATS, format_of
from router.tools.parser import Piece, ToolParser

__all__ = ["FORMATS", "NamedTool", "Piece", "Tool", "ToolChoice", "ToolParser", "format_of"]
