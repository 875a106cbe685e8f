"""Recordings of requests: their form as a client sends it, with texts of our own and no personal details.

A recording keeps names of members, types, schemas, ids and numbers. Each longer text becomes words of ours of
about the same length, but shorter. What the router itself wrote before (ids, signatures) is written as
`<turn:member:n>`, the n-th value of that member in its answer, so a replay sends what the router wrote now.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle, islice
from typing import Any

from tests.clients.recorder import Exchange

LONGEST = {"description": 60}
LONG = 400
"""Characters of texts, of members in `LONGEST` and of others."""
KEPT_HEADERS = re.compile(
    r"user-agent|anthropic-.*|x-app|originator|.*(session|thread|affinity|conversation|correlation).*"
)
_OF_ROUTER = "id", "call_id", "signature", "encrypted_content", "item_id"
"""Members of answers that clients send back."""
_BILLING = "x-anthropic-billing-header:"
_WORDS = ("the", "note", "tells", "how", "snow", "falls", "on", "a", "quiet", "town", "and", "its", "people")
_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_PERSONAL = re.compile(r"[0-9a-f]{32,}|ses_\w+")


def own_words(length: int) -> str:
    """Returns a text of ours of about this many characters."""
    count = max(2, length // 5)
    return " ".join(islice(cycle(_WORDS), count)).capitalize() + "."


def events(answer: str) -> list[Any]:
    """The JSON of an answer: its events, or the whole."""
    if answer.startswith("{"):
        return [json.loads(answer)]
    lines = (line.removeprefix("data: ") for line in answer.splitlines() if line.startswith("data: {"))
    return [json.loads(line) for line in lines]


def _members(value: Any) -> Iterator[tuple[str, Any]]:
    """The members of all objects in a value, in order."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield name, inner
            yield from _members(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _members(inner)


def of_router(answers: Sequence[str]) -> dict[str, str]:
    """What the router wrote that clients send back, by its name in recordings."""
    named: dict[str, str] = {}
    known: set[str] = set()
    for turn, answer in enumerate(answers):
        counts: dict[str, int] = {}
        for member, value in _members(events(answer)):
            if member in _OF_ROUTER and isinstance(value, str) and value and value not in known:
                known.add(value)
                number = counts[member] = counts.get(member, -1) + 1
                named[f"<{turn}:{member}:{number}>"] = value
    return named


class _Recording:
    """Rewrites the values of one client's requests."""

    def __init__(self, kept: Sequence[str], places: Mapping[str, str]) -> None:
        self._kept, self._places = kept, places
        self.names: dict[str, str] = {}
        """By what the router wrote: its name."""
        self._ids: dict[str, str] = {}

    def value(self, value: Any, at: tuple[str, ...] = ()) -> Any:
        if isinstance(value, dict):
            return {self._text(name, at): self.value(inner, (*at, name)) for name, inner in value.items()}
        if isinstance(value, list):
            return [self.value(inner, at) for inner in value]
        return self._text(value, at) if isinstance(value, str) else value

    def _text(self, text: str, at: tuple[str, ...]) -> str:
        if text in self.names:
            return self.names[text]
        for place, shown in self._places.items():
            text = text.replace(place, shown)
        if text.startswith(_BILLING):
            return re.sub(r"(cc_version=[\d.]+)\w*", r"\1abc", text)
        if text.strip('"\n ') in self._kept:
            return text
        if text.startswith(("{", "[")):
            try:
                return json.dumps(self.value(json.loads(text), at), separators=(",", ":"))
            except ValueError:
                pass
        text = self.ids(text)
        described = {"description", "text", "content", "output", "instructions", "system"} & {*at[-2:]}
        if " " in text.strip() or "\n" in text or len(text) > 80 or (described and len(text) > 30):
            return own_words(min(len(text), LONGEST.get(at[-1], LONG) if at else LONG))
        return text

    def ids(self, text: str) -> str:
        return _PERSONAL.sub(self._id, _UUID.sub(self._id, text))

    def _id(self, found: re.Match[str]) -> str:
        """An id of ours in the same form: each digit and letter of it is replaced."""
        old = found[0]
        if old not in self._ids:
            prefix = "ses_" if old.startswith("ses_") else ""
            digit = str((len(self._ids) + 1) % 10)
            made = re.sub(r"\w", digit, old.removeprefix(prefix))
            self._ids[old] = prefix + made
        return self._ids[old]


def recorded(exchanges: Sequence[Exchange], kept: Sequence[str], places: Mapping[str, str]) -> list[Any]:
    """Returns the requests as a recording has them. Members that the request before has, too, are left out.

    Args:
        kept: texts that stay: the task, and what the model wrote.
        places: what replaces the names of directories.
    """
    recording = _Recording(kept, places)
    made, before = [], {}
    for turn, exchange in enumerate(exchanges):
        recording.names = {
            value: name for name, value in of_router([x.answer for x in exchanges[:turn]]).items()
        }
        body = recording.value(exchange.body)
        headers = {
            name: recording.ids(value)
            for name, value in exchange.headers.items()
            if KEPT_HEADERS.fullmatch(name)
        }
        changed = {name: value for name, value in body.items() if name not in before or before[name] != value}
        gone = [name for name in before if name not in body]
        made.append(
            {"path": exchange.path, "headers": headers, "body": changed} | ({"without": gone} if gone else {})
        )
        before = body
    return made


def whole(requests: Sequence[Any], number: int) -> dict[str, Any]:
    """Returns the whole body of a recorded request."""
    body: dict[str, Any] = {}
    for request in requests[: number + 1]:
        body |= request["body"]
        for name in request.get("without", ()):
            del body[name]
    return body


def replayed(requests: Sequence[Any], number: int, answers: Sequence[str]) -> dict[str, Any]:
    """Returns a recorded body with what the router wrote in its answers to the requests before."""
    values, body = of_router(answers), whole(requests, number)
    return json.loads(
        re.sub(r"<\d+:\w+:\d+>", lambda found: json.dumps(values[found[0]])[1:-1], json.dumps(body))
    )


def paths(value: Any, at: str = "") -> set[str]:
    """The places of a body that have a value, without indices. A list's objects have their types in it."""
    if isinstance(value, dict):
        schema = at.endswith((".parameters", ".input_schema"))
        return (
            {at} if schema else {at}.union(*(paths(inner, f"{at}.{name}") for name, inner in value.items()))
        )
    if isinstance(value, list):
        kinds = (f"[{each.get('type', '')}]" if isinstance(each, dict) else "[]" for each in value)
        return {at}.union(*(paths(each, at + kind) for each, kind in zip(value, kinds, strict=True)))
    return {at}
