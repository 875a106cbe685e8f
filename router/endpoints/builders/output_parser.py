"""Divides the text of a choice into reasoning, content and tool calls."""

import secrets
import string
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from baton.router.active_request import ActiveRequest
from baton.router.api.bodies import ChatOptions
from baton.router.api.tools import NamedTool
from baton.router.text.tokenizer import ModelTokenizer
from baton.router.tools import Piece, Text

_ALPHANUMERIC = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class Part:
    """A part of an output. Later text cannot change it."""

    kind: Literal["reasoning", "content", "call"]
    text: str
    """For a call, a part of its arguments."""
    call: int = -1
    """The index of the call."""
    call_id: str | None = None
    name: str | None = None
    """The name of the function. Only the first part of a call has it and `call_id`."""


class OutputParser:
    """Parses the text of one choice of a chat.

    Attributes:
        reasons: reasoning is divided from the answer.
        reasoning_tokens: texts that added to the reasoning.
    """

    def __init__(self, request: ActiveRequest, tokenizer: ModelTokenizer) -> None:
        body = request.body
        assert isinstance(body, ChatOptions)
        self._max_calls = 1 if body.parallel_tool_calls is False else None
        self._only_calls = body.must_call
        self._named = isinstance(body.tool_choice, NamedTool)
        tool_format = tokenizer.format_of_calls(forced=body.must_call) if body.offered_tools else None
        self._tools = None if tool_format is None else tool_format()
        reasoning = tokenizer.reasoning_parser if body.separate_reasoning else None
        self.reasons = reasoning is not None
        self.reasoning_tokens = 0
        self._reasoning = None if reasoning is None else reasoning(request.beginning)
        self._with_reasoning = body.include_reasoning
        self._withheld: list[str] | None = None if body.stream_reasoning else []  # reasoning so far

    @property
    def called(self) -> bool:
        """True if there was a tool call."""
        return self._tools is not None and self._tools.num_calls > 0

    @property
    def chose_to_call(self) -> bool:
        """True if there was a tool call, and not because `tool_choice` names the tool."""
        return self.called and not self._named

    def push(self, text: str, *, last: bool) -> list[Part]:
        """Takes the text of the next token. Returns the parts that are certain. `last`: none follows."""
        parts: list[Part] = []
        if self._reasoning is not None:
            pushed = self._reasoning.push(text)
            self.reasoning_tokens += bool(pushed.reasoning)
            held = self._reasoning.finish() if last else Text()
            reasoning, text = pushed.reasoning + held.reasoning, pushed.content + held.content
            if self._withheld is not None:
                self._withheld.append(reasoning)
                reasoning = ""
                if text or last:
                    reasoning, self._withheld = "".join(self._withheld), None
            if reasoning and self._with_reasoning:
                parts.append(Part("reasoning", reasoning))
        if self._tools is not None:
            parts += map(
                _part, self._kept([*self._tools.push(text), *(self._tools.finish() if last else ())])
            )
        elif text:
            parts.append(Part("content", text))
        return parts

    def _kept(self, pieces: list[Piece]) -> Iterator[Piece]:
        for piece in pieces:
            if piece.call is None:
                # The grammar allows only calls. Other text is the beginning of a call that was cut off.
                if not self._only_calls and piece.text:
                    yield piece
            elif self._max_calls is None or piece.call < self._max_calls:
                yield piece


def _part(piece: Piece) -> Part:
    if piece.call is None:
        return Part("content", piece.text)
    if piece.name is None:
        return Part("call", piece.text, piece.call)
    # Mistral's chat templates demand an id of nine letters and digits.
    call_id = "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))
    return Part("call", piece.text, piece.call, call_id, piece.name)
