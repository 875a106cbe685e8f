"""The formats of tool calls, by name and by chat template."""

from baton.router.tools.hermes import HermesParser
from baton.router.tools.llama import LlamaParser
from baton.router.tools.mistral import MistralParser
from baton.router.tools.parser import ToolParser

FORMATS: dict[str, type[ToolParser]] = {p.name: p for p in (HermesParser, LlamaParser, MistralParser)}
# A text that is in the chat templates of models with this format.
_MARKS = {
    "<tool_call>": HermesParser,
    "[TOOL_CALLS]": MistralParser,
    '{"name": function name, "parameters":': LlamaParser,
}


def format_of(template: str) -> type[ToolParser] | None:
    """Returns the format that this chat template uses, or None if it is unknown."""
    return next((parser for mark, parser in _MARKS.items() if mark in template), None)
