"""Divides the text of one output into reasoning, content and tool calls."""

from collections.abc import Iterator, Sequence

from baton.router.api.messages import Tool
from baton.router.tools.harmony import HarmonyReasoning
from baton.router.tools.parser import Part, ToolParser
from baton.router.tools.reasoning import Beginning, ReasoningParser, Way, reasoning_parser


class TextParser:
    """Parses one text. A call with marks around it ends the reasoning, as some models call before that.

    Attributes:
        reasoning_tokens: texts that added to the reasoning.
    """

    def __init__(
        self,
        beginning: Beginning,
        way: Way | None,
        tool_format: type[ToolParser] | None,
        tools: Sequence[Tool],
        *,
        calls_in_reasoning: bool = True,
    ) -> None:
        """`way` None: all reasoning is content. `tool_format` None: no text is a call."""
        self.reasoning_tokens = 0
        self._reasoning = None if way is None else reasoning_parser(beginning, way)
        self._tools = None if tool_format is None else tool_format(tools)
        self._thinking: ToolParser | None = None  # finds calls in the reasoning
        if isinstance(self._reasoning, ReasoningParser) and tool_format is not None and tool_format.marked:
            self._thinking = tool_format(tools) if calls_in_reasoning else None

    @property
    def is_plain(self) -> bool:
        """Whether all of the text is content."""
        return self._reasoning is None and self._tools is None

    @property
    def num_calls(self) -> int:
        """Tool calls so far."""
        return 0 if self._tools is None else self._tools.num_calls

    def push(self, text: str) -> list[Part]:
        """Takes the next text. Returns the parts that are certain now."""
        if self._reasoning is None:
            return self._answer(text)
        reasoning, content = self._reasoning.push(text)
        return self._divided(self._reasoning, reasoning, content)

    def finish(self, *, ended: bool) -> list[Part]:
        """Returns the parts that were held back, at the end of the text. `ended`: as of `ToolParser`."""
        parts = []
        if self._reasoning is not None:
            parts += self._divided(self._reasoning, *self._reasoning.finish())
        if self._thinking is not None and self._thinking is not self._tools:
            parts += self._of_reasoning(self._thinking.finish(ended=ended))
        if self._tools is not None:
            parts += self._tools.finish(ended=ended)
        return parts

    def _divided(
        self, parser: ReasoningParser | HarmonyReasoning, reasoning: str, content: str
    ) -> list[Part]:
        thinking = self._thinking
        if reasoning and (thinking is None or thinking is not self._tools):
            self.reasoning_tokens += 1
        if thinking is None:
            parts = [Part("reasoning", reasoning)] if reasoning else []
            return parts + self._answer(content)
        parts = list(self._of_reasoning(thinking.push(reasoning)))
        if isinstance(parser, ReasoningParser) and parser.over:
            self._thinking = None
            if thinking is not self._tools:
                parts += self._of_reasoning(thinking.finish())
            elif thinking.in_call:
                content = parser.end + content
        return parts + (self._answer(content) if content else [])

    def _of_reasoning(self, parts: list[Part]) -> Iterator[Part]:
        """Yields what was found in the reasoning. Behind the first call all is content."""
        for part in parts:
            if part.kind == "call":
                self._tools = self._thinking
            yield part if self._tools is self._thinking else part._replace(kind="reasoning")

    def _answer(self, text: str) -> list[Part]:
        if self._tools is not None:
            return self._tools.push(text)
        return [Part("content", text)] if text else []
