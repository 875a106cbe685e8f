"""Grammars (llguidance's dialect of Lark) for tool calls, from how a format writes them."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from baton.engine.api.sampling_params import MAX_LENGTH
from baton.router.api.messages import SPACED, Tool
from baton.router.errors import InvalidRequest, Unsupported
from baton.router.tools.regex import anywhere, literal, of_ascii
from baton.router.tools.schema import (
    Types,
    allowed_values,
    conjuncts,
    resolved,
    subschemas,
    types_of,
    unknown_reference,
)

_PLACES = r"\{name\}|\{arguments\}|\{number\}|\{key\}|\{value\}"
_NUMBER = "/[0-9]{1,3}/"
_DEFINITIONS = ("$defs", "definitions")
_ANNOTATIONS = (
    "title",
    "description",
    "default",
    "examples",
    "deprecated",
    "readOnly",
    "writeOnly",
    "$comment",
)
OF_WHOLE = {
    "anyOf", "oneOf", "allOf", "not", "if", "patternProperties", "propertyNames", "minProperties",
    "maxProperties", "dependentRequired", "dependentSchemas",
}  # fmt: skip
"""Keywords of arguments as a whole, which a grammar of single arguments cannot enforce."""


Read = Callable[[Tool, Mapping[str, str]], Any]
"""What a parser reads where a call of a tool is written with these arguments."""


@dataclass(frozen=True)
class Written:
    """How a format writes calls. Names in braces are places: name, arguments, number, key and value."""

    call: str
    separator: str | None
    """Between two calls. None: an output has one call."""
    begin: str = ""
    """Before the calls."""
    end: str = ""
    pair: str | None = None
    """A key and a value. None: the arguments are a JSON object."""
    between_pairs: str = ""
    value_begin: str = ""
    """Before a string. Empty: before no value. Otherwise `value_end` ends strings alone."""
    value_end: str = ""
    """What ends a value. Strings are bare text up to it. Empty: all values are JSON."""
    keys: str = ""
    """A regular expression of the keys that can be written."""

    def text(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        """These calls, by name and arguments, as a model would write them."""

        def filled(text: str, **places: str) -> str:
            return re.sub(_PLACES, lambda place: places[place[0].strip("{}")], text)

        def arguments(members: Mapping[str, Any]) -> str:
            if self.pair is None:
                return json.dumps(members, ensure_ascii=False)

            def spelled(value: Any) -> str:
                bare = bool(self.value_end) and isinstance(value, str)
                text = value if bare else json.dumps(value)
                if self.value_begin and not bare:
                    return text
                return f"{self.value_begin}{text}{self.value_end}"

            values = ((key, spelled(value)) for key, value in members.items())
            return self.between_pairs.join(filled(self.pair, key=key, value=value) for key, value in values)

        each = (
            filled(self.call, name=name, arguments=arguments(members), number=str(number))
            for number, (name, members) in enumerate(calls)
        )
        return f"{self.begin}{(self.separator or '').join(each)}{self.end}"


def grammar_of(
    written: Written,
    tools: Sequence[Tool],
    *,
    many: bool,
    spell: Callable[[str], str],
    specials: Sequence[str],
    read: Read,
) -> str:
    """Returns a grammar for one call, or for several if `many`.

    `spell` turns a special token into its form in a grammar. Raises Unsupported if the format cannot write
    what a tool's schema demands.
    """

    def lark(text: str, places: Mapping[str, str] = {}) -> str:
        pieces = re.split(f"({'|'.join([_PLACES, *map(re.escape, specials)])})", text)
        spellings = {**{special: spell(special) for special in specials}, **places}
        return " ".join(spellings.get(piece) or quoted(piece) for piece in pieces if piece)

    more = f"({lark(written.separator)} call)*" if many and written.separator is not None else ""
    rules = [f"start: {lark(written.begin)} call {more} {lark(written.end)}"]
    rules.append(f"call: {' | '.join(f'call{i}' for i in range(len(tools)))}")
    length = 0  # of the rules of arguments
    known: dict[str, str] = {}  # rules, by their schemas
    for i, tool in enumerate(tools):
        arguments = known.setdefault(tool.schema_text, f"args{i}")
        places = {"{name}": quoted(tool.function.name), "{arguments}": arguments, "{number}": _NUMBER}
        rules.append(f"call{i}: {lark(written.call, places)}")
        if arguments != f"args{i}":
            continue
        if written.pair is None:
            rules.append(f"args{i}: %json {tool.schema_text}")
        else:
            for rule in _pairs(written, tool, f"args{i}", lark, read):
                rules.append(rule)
                length += len(rule)
                if length > MAX_LENGTH:  # each rule may repeat the definitions of its tool
                    text = f"a grammar of over {MAX_LENGTH} characters is too long for tool_choice"
                    raise InvalidRequest.at("tools", text)
    return "\n".join(rules)


def or_text(written: Written, mark: str, token: str | None, grammar: Callable[[Written], str]) -> str:
    """As `grammar` of the calls, but a text may precede them, or stand for them.

    `mark`: what the calls begin with, which no text has inside. One character: no text begins with it.
    `token`: the mark in a grammar, if it is a token, which is no part of a text.
    """
    if len(mark) == 1:
        calls = grammar(written)
        rules = [
            "start: SPACE? calls | TEXT",
            "SPACE: /\\s+/",
            f"TEXT: /(\\s*[^\\s{re.escape(mark)}](?s:.*))?/",
        ]
    else:
        follows = None if written.separator is None else written.separator + mark
        begin, call = written.begin, written.call
        without_mark = (
            replace(written, begin=begin.removeprefix(mark))
            if begin
            else replace(written, call=call.removeprefix(mark), separator=follows)
        )
        calls = grammar(without_mark)
        if token is not None:
            rules = [f"start: TEXT? ({token} calls)?", "TEXT: /(?s:.+)/"]
        else:
            holds = literal(f"(?s:.*){re.escape(mark)}(?s:.*)")
            rules = ["start: text calls | TEXT", f"text[suffix={quoted(mark)}]: /(?s:.*)/"]
            rules.append(f"TEXT: /(?s:.*)/ & ~{holds}")
    return "\n".join([*rules, calls.replace("start:", "calls:", 1)])


def _pairs(
    written: Written, tool: Tool, rule: str, lark: Callable[[str, Mapping[str, str]], str], read: Read
) -> Iterator[str]:
    """Yields the rules of arguments that are written one by one, in the order of the schema."""
    assert written.pair is not None
    root, memo = json.loads(tool.schema_text), dict[int, Types]()
    if (unknown := unknown_reference(root)) is not None:
        raise _unsupported(tool, unknown)
    schema = resolved(root, root)
    if not isinstance(schema, dict):
        raise _unsupported(tool, "this $ref")
    keywords = schema.keys() & OF_WHOLE
    if schema is not root:  # no keyword beside a reference may be lost
        keywords |= root.keys() - {"$ref", "type", *_DEFINITIONS, *SPACED, *_ANNOTATIONS}
    if keywords:
        raise _unsupported(tool, f"{min(keywords)} at the top")
    fields = dict(schema.get("properties") or {})
    fields |= {name: True for name in schema.get("required") or () if name not in fields}
    if not fields and schema.get("additionalProperties") is not False:
        pair = lark(written.pair, {"{key}": f"/{written.keys}/", "{value}": f"{rule}_value"})
        more = lark(written.between_pairs, {})
        yield f"{rule}: ({rule}_pair ({more} {rule}_pair)*)?"
        yield f"{rule}_pair: {pair}"
        yield from _value(written, tool, f"{rule}_value", "", True, root, memo, lark, read)
        return
    required = frozenset(schema.get("required") or ())
    # Each argument has two rules: before the first one that is written, and after it.
    for k, (key, of_value) in enumerate(fields.items()):
        if not re.fullmatch(written.keys, key):
            raise _unsupported(tool, f"an argument with the name {key[:40]!r}")
        pair = lark(written.pair, {"{key}": quoted(key), "{value}": f"{rule}_{k}v"})
        between = lark(written.between_pairs, {})
        first, later = (f"{rule}_{k}" if k else rule), f"{rule}_{k}b"
        next_first, next_later = f"{rule}_{k + 1}", f"{rule}_{k + 1}b"
        yield f"{first}: {pair} {next_later}" + ("" if key in required else f" | {next_first}")
        yield f"{later}: {between} {pair} {next_later}" + ("" if key in required else f" | {next_later}")
        yield from _value(written, tool, f"{rule}_{k}v", key, of_value, root, memo, lark, read)
    last = len(fields)
    yield f'{rule}_{last}: ""' if fields else f'{rule}: ""'
    yield f'{rule}_{last}b: ""'


def _value(
    written: Written,
    tool: Tool,
    rule: str,
    key: str,
    schema: Any,
    root: Mapping[str, Any],
    memo: dict[int, Types],
    lark: Callable[[str, Mapping[str, str]], str],
    read: Read,
) -> Iterator[str]:
    """Yields the rules of the value of `key`. `memo`: as of `types_of`."""
    begin = lark(written.value_begin, {})
    end = lark(written.value_end, {})
    if not begin and not end.startswith("<["):  # a text in several parts is no suffix
        end = quoted(written.value_end)
    if not written.value_end or "string" not in types_of(schema, root, memo):
        shared = {name: root[name] for name in _DEFINITIONS if name in root}
        shared = shared if any("$ref" in part for part in subschemas(schema)) else {}
        as_text = json.dumps({**SPACED, **(schema if isinstance(schema, dict) else {}), **shared})
        yield f"{rule}: {rule}j {'' if begin else end}"
        yield f"{rule}j: %json {as_text}"
        return
    texts, limits = _texts(schema, root, key), list(_limits(tool, schema, root))
    mark = written.value_end.strip()
    kinds = [literal(limit) for limit in limits or ([] if texts is not None else ["(?s:.*)"])]
    if texts is not None:
        is_text = types_of(schema, root, memo) == {"string"}  # else a text like 5 may be read as a number

        def is_read(text: str) -> bool:
            plain = is_text and mark[0] not in text  # no tag is inside, and a parser takes long
            return json.dumps({key: text} if plain else read(tool, {key: text})) in texts

        kept = list(filter(is_read, dict.fromkeys(texts.values())))
        if not kept:
            lack = f"form of {', '.join(texts.values())[:40]!r} that is read as such"
            raise _unsupported(tool, lack if texts else "value for an argument that must have several values")
        kinds.append("(" + " | ".join(map(quoted, kept)) + ")")
    if limits:  # a text is read up to the mark, and what precedes it need not have the schema
        kinds.append(f"~{literal(f'(?s:.*){re.escape(mark)}(?s:.*)')}")
    values = " & ".join(kinds)
    if not end.startswith('"'):  # a token is no part of a text, so it ends one
        yield f"{rule}: {begin} {rule.upper()} {end}"
    elif texts is None:
        yield f"{rule}: {begin} {rule}t"
        yield f"{rule}t[suffix={end}]: {rule.upper()}"
    else:  # one text may go on as the end of another begins
        yield f"{rule}: {begin} {rule.upper()}"
        values = f"({values}) {end}"
    yield f"{rule.upper()}: {values}"


def _texts(schema: Any, root: Mapping[str, Any], key: str) -> dict[str, str] | None:
    """Returns the texts of the values that a schema names, by what a parser should read. None: any text."""
    texts: dict[str, str] | None = None
    for each in conjuncts(schema, root):
        for values in allowed_values(each):
            spelled = {
                json.dumps({key: value}): value if isinstance(value, str) else json.dumps(value)
                for value in values
            }
            texts = {value: spelled[value] for value in spelled if texts is None or value in texts}
    return texts


def _limits(tool: Tool, schema: Any, root: Mapping[str, Any]) -> Iterator[str]:
    """Yields regular expressions that a text must match."""
    for each in conjuncts(schema, root):
        min_length, max_length = (_count(tool, each, name) for name in ("minLength", "maxLength"))
        if min_length is not None or max_length is not None:
            yield f"(?s:.{{{min_length or 0},{'' if max_length is None else max_length}}})"
        if isinstance(pattern := each.get("pattern"), str):
            yield anywhere(of_ascii(pattern))


def _count(tool: Tool, schema: Mapping[str, Any], name: str) -> int | None:
    """Returns a keyword that counts characters. None: the schema has none."""
    value = schema.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value % 1:
        raise _unsupported(tool, f"{name} of {str(value)[:40]!r}")
    return int(value)


def quoted(text: str) -> str:
    """Returns the text as a string of Lark, which has no control characters."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _unsupported(tool: Tool, lack: str) -> Unsupported:
    text = f"{tool.function.name} cannot be enforced: this model's format of calls has no {lack}"
    return Unsupported.at("tools", f"{text}; leave tool_choice at auto")
