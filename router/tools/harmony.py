"""Harmony, the form of gpt-oss's outputs: a list of messages, each on a channel.

`<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…`

Messages on the channel analysis are reasoning. Those to a function are calls, which the format `openai`
reads. Others are content.
"""

import re
from collections.abc import Callable

from baton.router.api.structured import Structure, json_rule
from baton.router.errors import Unsupported
from baton.router.tools.marker import Marker
from baton.router.tools.readers import MAX_HEAD, NAME
from baton.router.tools.regex import literal

_HEADS = "<|start|>", "<|channel|>"
_BODY = "<|message|>"
_CALL = "<|call|>"
_ENDS = "<|end|>", _CALL, "<|return|>"
SPECIALS = (*_HEADS, _BODY, *_ENDS, "<|constrain|>")
_TO_FUNCTION = re.compile(rf"to=functions\.{NAME}")
_ANALYSIS = re.compile(r"<\|channel\|>\s*analysis\b")


class HarmonyReasoning:
    """Divides one text into reasoning and the rest: content, and calls in the form of the format `openai`."""

    def __init__(self) -> None:
        self._marker = Marker(*_HEADS, _BODY, *_ENDS)
        self._head: str | None = None  # of the message that begins. None: inside of a message
        self._kind = "content"  # of the message

    def push(self, text: str) -> tuple[str, str]:
        """Takes the next text. Returns the reasoning and the rest that are certain now."""
        reasoning, content = "", ""
        after: str | None = text
        while after is not None:
            before, after = self._marker.split(after)
            if self._head is not None:
                self._head += before
            elif self._kind == "reasoning":
                reasoning += before
            else:
                content += before
            if self._head is not None and len(self._head) > MAX_HEAD:
                content, self._head, self._kind = content + self._head, None, "content"
            if after is not None:
                content += self._take(self._marker.mark)
        return reasoning, content

    def finish(self) -> tuple[str, str]:
        """Returns the reasoning and the rest that were held back, at the end of the output."""
        text = _addressed(self._head or "") + self._marker.pending
        return (text, "") if self._head is None and self._kind == "reasoning" else ("", text)

    def _take(self, mark: str) -> str:
        """Takes a mark. Returns the text that it makes certain."""
        head = self._head
        if mark == _BODY:
            if head is None:
                return ""
            self._head, to = None, _TO_FUNCTION.search(head)
            self._kind = "call" if to else "reasoning" if _ANALYSIS.search(head) else "content"
            return _addressed(head) + _BODY if to else ""
        if head is None:
            ended = _CALL if self._kind == "call" else ""
            self._head, self._kind = (mark if mark in _HEADS else None), "content"
            return ended
        self._head = head + mark if mark in _HEADS else None
        if mark in _HEADS:
            return ""
        # A call without arguments may have no body.
        return _addressed(head) + (_CALL if mark == _CALL and _TO_FUNCTION.search(head) else "")


def _addressed(head: str) -> str:
    """Returns the head of a call in the form of the format `openai`, and another head as it is."""
    to = _TO_FUNCTION.search(head)
    return f"<|channel|>commentary to=functions.{to['name']}" if to else head


def after_analysis(grammar: str, spell: Callable[[str], str]) -> str:
    """Returns the Lark grammar of messages that may begin with an analysis. `spell`: as in `ToolParser`."""
    head = f'{spell("<|channel|>")} "analysis" {spell(_BODY)}'
    end = f'{spell("<|end|>")} {spell("<|start|>")} "assistant"'
    messages = grammar.replace("start:", "messages:", 1)
    return f"start: analysis? messages\n{messages}\nanalysis: {head} /(?s:.*)/ {end}"


def final(spell: Callable[[str], str]) -> str:
    """Returns the Lark expression of what precedes an answer."""
    return f'{spell("<|channel|>")} "final" {spell(_BODY)}'


def in_final(structure: Structure, spell: Callable[[str], str]) -> Structure:
    """Returns the constraint for an output whose answer has this structure. Raises Unsupported."""
    match structure.kind:
        case "json_schema":
            answer = json_rule(structure)
        case "regex":
            answer = literal(structure.text)
        case "grammar":
            text = f"{structure.field} is not supported by this model's form of messages: use json or regex"
            raise Unsupported(text, param=structure.field)
    grammar = after_analysis(f"start: {final(spell)} body\nbody: {answer}", spell)
    return Structure("grammar", grammar, structure.field)
