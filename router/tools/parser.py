"""Parsers that find tool calls in the text of a model.

They read one character at a time, so the result does not depend on the pieces in which the text arrives.
"""

import json
import re
import secrets
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

from baton.router.api.messages import Tool
from baton.router.tools.grammar import Written, grammar_of, or_text
from baton.router.tools.json_text import SPACE
from baton.router.tools.offered import OfferedTools
from baton.router.tools.readers import Reader

_ALPHANUMERIC = string.ascii_letters + string.digits


class Part(NamedTuple):
    """A part of an output. Later text cannot change it."""

    kind: Literal["reasoning", "content", "call"]
    text: str
    """For a call, a part of its arguments."""
    call: int = -1
    """The index of the call."""
    name: str | None = None
    """The name of the function. Only the first part of a call has it and `call_id`."""
    call_id: str | None = None


class ToolParser:
    """Parses one text. A format says what is outside of the calls, and what ends a call.

    Attributes:
        num_calls: tool calls so far.
    """

    name: ClassVar[str]
    """The name for --tool-call-parser, as in vLLM."""
    specials: ClassVar[tuple[str, ...]] = ()
    """Special tokens of the format. The tokenizer leaves them in the text."""
    tokens: ClassVar[tuple[str, ...]] = ()
    """Marks that most tokenizers of the format have as tokens. Outside of calls they are text. In a grammar a
    token is no part of a text (`grammars.compiler.for_texts`), so it names these marks."""

    written: ClassVar[Written]
    """How calls are written, for the grammar."""
    mark: ClassVar[str]
    """What the calls begin with, as in `or_text`."""

    marked: ClassVar[bool] = True
    """Calls have marks around them, so what looks like a call is one, also in reasoning."""

    def __init__(self, tools: Sequence[Tool] = ()) -> None:
        """`tools`: those that the model may call. Some formats leave out the types of arguments."""
        self.num_calls = 0
        self._tools = OfferedTools(tools)
        self._call: Reader | None = None  # that is read
        self._space: list[str] = []  # held back: space and marks before a call are not content
        # A grammar constrains the calls of strict tools where they should be, and not elsewhere.
        self._strict = any(tool.function.strict for tool in tools)
        self._specials = re.compile("|".join(map(re.escape, self.specials)) or r"(?!)")

    @property
    def in_call(self) -> bool:
        """True if a call has begun and is not over."""
        return self._call is not None and self._call.begun

    @classmethod
    def shown_id(cls, call_id: str) -> str:
        """Returns the id of an earlier call as the model's chat template takes it."""
        return call_id

    @classmethod
    def grammar(
        cls, tools: Sequence[Tool], *, many: bool, spell: Callable[[str], str], text: bool = False
    ) -> str:
        """Returns a Lark grammar (llguidance's dialect) for one call, or for several if `many`.

        `spell` turns one of `specials` or `tokens` into its form in a grammar. `text`: the output may be
        text, too. Raises Unsupported.
        """
        spelled_alone = cls.specials + cls.tokens
        grammar = partial(
            grammar_of, tools=tools, many=many, spell=spell, specials=spelled_alone, read=cls._read
        )
        if not text:
            return grammar(cls.written)
        spelled = spell(cls.mark) if cls.mark in spelled_alone else ""
        return or_text(cls.written, cls.mark, spelled if spelled.startswith("<") else None, grammar)

    @classmethod
    def _read(cls, tool: Tool, arguments: Mapping[str, str]) -> Any:
        parser = cls([tool])
        parts = parser.push(cls.written.text([(tool.function.name, arguments)])) + parser.finish(ended=True)
        return json.loads("".join(part.text for part in parts if part.kind == "call") or "null")

    def push(self, text: str) -> list[Part]:
        """Takes the next text. Returns the parts that are certain now."""
        return _joined(self._push(text))

    def _push(self, text: str) -> Iterator[Part]:
        at = 0
        while at < len(text):
            call = self._call
            end = self._plain_end(text, at) if call is None else at
            plain = "" if call is None else call.take_plain(text, at)
            if end > at:
                yield from self._content(text[at:end])
            elif plain:
                yield Part("call", plain, self.num_calls - 1)
            else:
                yield from self._take(text[at])
            at = max(end, at + len(plain or text[at]))

    def _plain_end(self, text: str, at: int) -> int:
        """Returns the end of the characters from `at` on that are content and begin neither a call nor a
        mark."""
        return at

    def finish(self, *, ended: bool = False) -> list[Part]:
        """Returns the parts that were held back, at the end of the text.

        `ended`: the model ended the text, so an open call is complete. Otherwise a limit cut it off.
        """
        return _joined(self._finish(ended))

    def _finish(self, ended: bool) -> Iterator[Part]:
        call = self._call
        if call is not None:
            before = call.begun
            yield from self._of_call(call, before, call.finish(ended=ended))
            yield from self._content(call.unread) if call.begun else self._give_up(call.raw)
        if call is None or not call.begun:
            yield from self._end()

    def _of_call(self, call: Reader, before: bool, new: str) -> Iterator[Part]:
        """Yields the new part of a call. `before`: it had begun before that."""
        if call.begun and not before:
            self.num_calls += 1
            # Mistral's chat templates demand an id of nine letters and digits.
            call_id = call.call_id or "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))
            yield Part("call", "", self.num_calls - 1, call.name, call_id)
        if new:
            yield Part("call", new, self.num_calls - 1)

    def _content(self, text: str) -> Iterator[Part]:
        """Yields text as content, without special tokens. Holds back the space at its end."""
        text = self._specials.sub("", text)
        stripped = text.rstrip(SPACE)
        if stripped:
            yield Part("content", "".join(self._space) + stripped)
            self._space.clear()
        if len(stripped) < len(text):
            self._space.append(text[len(stripped) :])

    def _take(self, character: str) -> Iterator[Part]:
        call = self._call
        if call is None:
            yield from self._take_outside(character)
            return
        before = call.begun
        yield from self._of_call(call, before, call.take(character))
        if not call.over:
            return
        self._call = None
        if call.begun:
            self._end_call(call)
        else:
            yield from self._give_up(call.raw)
        for unread in call.unread:
            yield from self._take(unread)

    def _take_outside(self, character: str) -> Iterator[Part]:
        """Takes a character outside of calls. It may begin a call (`_call`)."""
        raise NotImplementedError

    def _end_call(self, call: Reader) -> None:
        """Is called when a call is over, before the text behind it."""
        raise NotImplementedError

    def _give_up(self, raw: str) -> Iterator[Part]:
        """Yields what was held back, and `raw`, which looked like a call."""
        raise NotImplementedError

    def _end(self) -> Iterator[Part]:
        """Yields what was held back outside of calls, at the end of the text."""
        if self._space and not self.num_calls:
            yield Part("content", "".join(self._space))


def _joined(parts: Iterator[Part]) -> list[Part]:
    """Joins adjacent parts of the same content or call."""
    joined: list[tuple[Part, list[str]]] = []
    for part in parts:
        if joined and joined[-1][0].call == part.call and part.name is None:
            joined[-1][1].append(part.text)
        else:
            joined.append((part, [part.text]))
    return [Part(p.kind, "".join(texts), p.call, p.name, p.call_id) for p, texts in joined]
