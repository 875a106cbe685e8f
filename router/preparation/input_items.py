"""The items of conversations of /v1/responses: what a body refers to, and pages of what a model got. Pure.

A conversation may have many MB, and each of its items would become an object. So items stay JSON until they
are shown, and a child process reads them.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from baton.router.api.queries import PageQuery, page_of
from baton.router.errors import InvalidRequest

Raw = bytes | bytearray


class _Named(msgspec.Struct):
    id: str | None = None


class _Responses(msgspec.Struct):
    input: msgspec.Raw = msgspec.Raw()
    previous_response_id: str | None = None
    background: bool | None = None
    store: bool | None = None


class Peek(msgspec.Struct, array_like=True):
    """What /v1/responses must know of a body to prepare it."""

    previous_response_id: str | None = None
    background: bool = False
    stored: bool = True
    start: int = 0
    """Where the JSON of the input begins in the body."""
    stop: int = 0
    references: list[str] = []
    """The ids of stored items that the input refers to."""


class _Item(msgspec.Struct):
    type: str | None = None
    id: str | None = None
    role: msgspec.Raw | None = None


_parts = msgspec.json.Decoder(list[msgspec.Raw]).decode
_responses = msgspec.json.Decoder(_Responses).decode
_item = msgspec.json.Decoder(_Item).decode
_named = msgspec.json.Decoder(_Named).decode
_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode, _encode = msgspec.json.decode, msgspec.json.encode


def peek(raw: Raw) -> Peek:
    """Raises InvalidRequest for bytes that are not JSON."""
    try:
        fields = _responses(raw)
    except msgspec.ValidationError:
        return Peek()  # the body is not valid; `prepare` raises the error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        # `prepare` might accept it, as it does NaN, and the fields here would have no effect.
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    input, stored = bytes(fields.input), fields.store is not False
    start = raw.find(input)  # the same bytes may also stand before the input
    place = start, start + len(input)
    references = [id for _, id in referring(input)] if b'"id"' in input else []
    return Peek(fields.previous_response_id, bool(fields.background), stored, *place, references)


def referring(input: bytes) -> list[tuple[int, str]]:
    """Returns the indices and ids of the items of an input that only refer to stored ones."""
    if not input.startswith(b"["):
        return []
    found = list[tuple[int, str]]()
    for index, raw in enumerate(_parts(input)):
        try:
            item = _item(raw)
        except msgspec.ValidationError:
            continue  # `prepare` raises the error
        if item.id is not None and item.role is None and item.type in (None, "item_reference"):
            found.append((index, item.id))
    return found


def resolved(input: bytes, items: Mapping[str, bytes]) -> bytes:
    """Returns an input with stored items in the places of their references. `items`: all, by their ids."""
    parts = [bytes(raw) for raw in _parts(input)]
    for index, id in referring(input):
        parts[index] = items[id]
    return b"[" + b",".join(parts) + b"]"


def input_items(history: Raw, query: PageQuery) -> bytes:
    """Returns the page as JSON. `history`: a JSON array of what was sent and answered in each turn: arrays of
    items, and texts of a user. Raises NotFound."""
    items: list[msgspec.Raw] = []
    for part in _parts(history):
        is_text = bytes(part).startswith(b'"')
        items += [msgspec.Raw(b'{"role":"user","content":%b}' % bytes(part))] if is_text else _parts(part)
    return _encode(page_of(query, [*enumerate(items)], lambda each: _id(*each), lambda each: _shown(*each)))


def _id(index: int, item: msgspec.Raw) -> str:
    return _named(item).id or f"item_{index}"


def _shown(index: int, item: msgspec.Raw) -> dict[str, Any]:
    fields: dict[str, Any] = dict(_members(item))
    fields |= {name: _decode(fields[name]) for name in ("type", "role") if name in fields}
    fields["id"] = _id(index, item)
    if fields.setdefault("type", "message") == "message" and bytes(fields["content"]).startswith(b'"'):
        kind = "output_text" if fields["role"] == "assistant" else "input_text"
        fields["content"] = [{"type": kind, "text": fields["content"]}]
    return fields
