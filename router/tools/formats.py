"""Which format a model writes tool calls in."""

from router.tools.hermes import HermesParser
from router.tools.llama import LlamaParser
from router.tools.mistral import MistralParser
from router.tools.parser import ToolParser

FORMATS: dict[str, type[ToolParser]] = {p.name: p for p in (HermesParser, LlamaParser, MistralParser)}
# What a template that teaches a format has in it.
_SIGNS = {
    "<tool_call>": HermesParser,
    "[TOOL_CALLS]": MistralParser,
    '{"name": function name, "parameters":': LlamaParser,
}


def format_of(template: str) -> type[ToolParser] | None:
    """The format that a chat template teaches, if it is one of these."""
    return next((parser for sign, parser in _SIGNS.items() if sign in template), None)
