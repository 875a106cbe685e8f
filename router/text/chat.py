"""Chats as text, by the model's Jinja template, and as tokens, of which earlier turns are kept."""

import json
import logging
import os
import re
import sys
from array import array
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from datetime import datetime
from functools import partial
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
from tokenizers import Tokenizer

log = logging.getLogger(__name__)

_END = "THE FINAL MESSAGE GOES ON HERE\v"
"""Marks the end of the final message in the rendered text. A template that strips messages removes the
\\v."""


os.environ["TOKENIZERS_PARALLELISM"] = "false"
"""A batch would start a thread for each CPU. Here each has one text."""


def encode(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    """Returns only the ids. Without the places of tokens this takes half the time, and less memory."""
    [encoding] = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    return encoding.ids


NO_TOKENS: Mapping[str, str] = MappingProxyType({})


class ChatTemplateError(ValueError):
    """The template refuses these messages. The text is for the client."""


class _Generation(jinja2.ext.Extension):
    """Accepts the tag `{% generation %}`, which marks text for training and has no effect here."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Absent(jinja2.Undefined):
    """What a template reads where nothing is.

    A member that an object lacks, such as the description of a tool, is an empty text or list where Jinja's
    own class would fail. So are its own members and their methods. All else still fails: a template may want
    a function that does not exist.
    """

    @property
    def _of_object(self) -> bool:
        return isinstance(self._undefined_obj, dict | _Absent)

    def __getitem__(self, name: Any) -> Any:
        return _Absent(self._undefined_message, self, name) if self._of_object else super().__getitem__(name)

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name.startswith("__") else self[name]

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self if isinstance(self._undefined_obj, _Absent) else super().__call__(*arguments, **named)

    def __add__(self, other: Any) -> Any:
        return other if self._of_object and isinstance(other, str | _Absent) else super().__add__(other)

    __radd__ = __add__


def _json(value: Any) -> None:
    """Is called for what JSON does not have."""
    if not isinstance(value, _Absent):
        raise TypeError(f"{type(value).__name__} is not JSON")


class ChatTemplate:
    """Renders chat messages with the model's Jinja template, in a sandbox.

    Templates come with the model, never from a request. They get the same variables and functions as in
    transformers. Raises ValueError when a source is not valid Jinja.

    Attributes:
        takes_tools: it can describe tools to the model.
        shows_calls: it can show earlier calls.
        state: keyword arguments for a copy in another process.
    """

    def __init__(
        self, source: str, tool_use: str | None = None, tokens: Mapping[str, str] = NO_TOKENS
    ) -> None:
        """`tool_use`: the template of chats with tools, if the model has one of its own for them. `tokens`:
        special tokens, such as "bos_token"."""
        self.state: dict[str, Any] = {"source": source, "tool_use": tool_use, "tokens": dict(tokens)}
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, jinja2.ext.loopcontrols],
            undefined=_Absent,
        )
        environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False, default=_json)
        offered = {"raise_exception": _raise, "strftime_now": _now}
        with_tools = tool_use or source
        try:
            self._template = environment.from_string(source, globals=offered)
            self._with_tools = environment.from_string(with_tools, globals=offered)
            self.shows_calls = "tool_calls" in with_tools
            self.takes_tools = "tools" in jinja2.meta.find_undeclared_variables(environment.parse(with_tools))
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"the chat template is not valid Jinja: {error}") from error
        self._tokens = dict(tokens)

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        settings: dict[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """Returns the text for the model.

        Args:
            settings: further variables of the template.
            add_generation_prompt: end the text with the head of the assistant's next message.
            continue_final_message: end the text with the content of the last message.

        Raises ChatTemplateError when the template refuses the messages or fails on them.
        """
        if continue_final_message:
            *earlier, final = messages
            messages = [*earlier, {**final, "content": final["content"] + _END}]
        variables = {
            "messages": messages,
            "tools": tools or None,
            "add_generation_prompt": add_generation_prompt,
        }
        about_tools = tools or any("tool_calls" in m or m["role"] == "tool" for m in messages)
        template = self._with_tools if about_tools else self._template
        # A client sets no special token: `messages` say what has which role.
        variables = {"documents": None, **(settings or {}), **self._tokens, **variables}
        try:
            text = _rendered(template, variables)
        except ChatTemplateError:
            if all(message["role"] != "system" for message in messages[1:]):
                raise
            text = _rendered(template, variables | {"messages": _with_one_system_message(messages)})
        return _cut_at_end(text) if continue_final_message else text


def _rendered(template: jinja2.Template, variables: dict[str, Any]) -> str:
    try:
        text = template.render(variables)
    except Exception as error:
        # A template is a program, and may fail in any way. It works for other messages, so the cause is
        # in these messages or tools.
        kind = type(error).__name__
        if not isinstance(error, jinja2.TemplateError):
            log.warning("the model's chat template failed on a request: %s", kind)
        reason = str(error) or kind
        raise ChatTemplateError(
            f"the model's chat template does not take these messages: {reason}"
        ) from error
    # The JSON in the arguments of a call may name half a character.
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") if _HALF.search(text) else text


_HALF = re.compile("[\ud800-\udfff]")


def _with_one_system_message(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the messages with all system messages as one, the first: some templates take no other, and
    clients send several, such as instructions and a developer's message."""
    of_system = [message["content"] for message in messages if message["role"] == "system"]
    conversation = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(filter(None, of_system))}, *conversation]


def _cut_at_end(text: str) -> str:
    """Cuts the text after the content of the last message, as transformers does.

    If the template strips messages, the content loses its trailing spaces here too.
    """
    content, end, tail = text.rpartition(_END.rstrip())
    if not end:
        raise ChatTemplateError("the model's chat template leaves out the last message: it cannot continue")
    return content if tail.startswith("\v") else content.rstrip()


def _now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


MOST_BYTES = 32 << 20
"""Of the parts that are kept, with their tokens."""
ENTRY_BYTES = 512
"""What an entry takes beside its text and its tokens, about."""


class ChatEncoder:
    """Tokenizes the text of chats, and keeps the tokens: each turn of a chat repeats all turns before it.

    A tokenizer first cuts a text at its special tokens, and then looks at each piece alone. So a *part*, from
    one special token up to the next, has the same tokens in every text. What comes before the first special
    token may not: some tokenizers put a space at the beginning of a text.

    Gives the tokens that the tokenizer gives without `add_special_tokens`. Not thread-safe.
    """

    def __init__(self, tokenizer: Tokenizer, most_bytes: int = MOST_BYTES) -> None:
        self._tokenizer = tokenizer
        self._most_bytes = most_bytes
        self._bytes = 0
        self._cached: OrderedDict[tuple[Hashable, str], array[int]] = (
            OrderedDict()
        )  # least recently used first
        added = tokenizer.get_added_tokens_decoder()
        # The tokenizer finds these before it changes the text. Where several match, it takes the longest.
        raw = {token_id: token for token_id, token in added.items() if not token.normalized}
        longest_first = sorted((token.content for token in raw.values()), key=len, reverse=True)
        self._raw = re.compile("|".join(map(re.escape, longest_first)))
        # With `lstrip`, a token also takes the spaces before it, which would be in another part.
        self._heads = {i for i, t in raw.items() if t.special and not t.lstrip and not t.content[0].isspace()}
        changes = tokenizer.truncation or tokenizer.padding or tokenizer.encode_special_tokens
        if changes or any(token.single_word for token in raw.values()):
            self._heads = set()
        self._names = {raw[token_id].content for token_id in self._heads}

    def encode(self, text: str, scope: Hashable) -> list[int]:
        """`scope`: only texts of the same scope share parts. Otherwise the time that this takes would tell a
        client what others have sent."""
        if not self._heads:
            return self._encode(text)
        starts = [match.start() for match in self._raw.finditer(text) if match.group() in self._names]
        ids = array("I", self._encode(text[: starts[0]]) if starts else self._encode(text))
        encoded_parts = 0  # parts whose tokens are in `ids`
        for part, (start, stop) in enumerate(pairwise([*starts, len(text)])):
            tokens = self._cached.get((scope, text[start:stop]))
            if tokens is not None:
                self._cached.move_to_end((scope, text[start:stop]))
                ids.extend(self._new(text, starts[encoded_parts:part], start, scope))
                ids.extend(tokens)
                encoded_parts = part + 1
        ids.extend(self._new(text, starts[encoded_parts:], len(text), scope))
        return ids.tolist()

    def _encode(self, text: str) -> list[int]:
        return encode(self._tokenizer, text, add_special_tokens=False)

    def _new(self, text: str, starts: Sequence[int], stop: int, scope: Hashable) -> "array[int]":
        """Tokenizes and keeps the parts that begin at `starts`. The last one ends at `stop`."""
        if not starts:
            return array("I")
        ids = array("I", self._encode(text[starts[0] : stop]))
        heads = [place for place, token_id in enumerate(ids) if token_id in self._heads]
        if len(heads) == len(starts):  # no part has an unknown token, which may be one of them, too
            spans = zip(pairwise([*starts, stop]), pairwise([*heads, len(ids)]), strict=True)
            for (start, end), (first, last) in spans:
                self._keep((scope, text[start:end]), ids[first:last])
        return ids

    def _keep(self, key: tuple[Hashable, str], tokens: "array[int]") -> None:
        if key not in self._cached:
            self._cached[key] = tokens
            self._bytes += _size(key[1], tokens)
        while self._bytes > self._most_bytes:
            (_, text), tokens = self._cached.popitem(last=False)
            self._bytes -= _size(text, tokens)


def _size(text: str, tokens: "array[int]") -> int:
    return sys.getsizeof(text) + sys.getsizeof(tokens) + ENTRY_BYTES
