"""Lists what a model got before its response: a page of the items of a conversation. Pure.

A conversation may have many MB, and each of its items would become an object. So items stay JSON until they
are shown, and a child process reads them.
"""

from typing import Any, Literal

import msgspec

Raw = bytes | bytearray


class Query(msgspec.Struct, array_like=True):
    """What a client asked for."""

    after: str | None
    """The id of the item before the page. None: the page is the first."""
    limit: int
    order: Literal["asc", "desc"]
    """desc: the newest first."""


class _Named(msgspec.Struct):
    id: str | None = None


_parts = msgspec.json.Decoder(list[msgspec.Raw]).decode
_named = msgspec.json.Decoder(_Named).decode
_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode, _encode = msgspec.json.decode, msgspec.json.encode


def input_items(history: Raw, query: Query) -> bytes:
    """Returns the page as JSON. `history`: a JSON array of what was sent and answered in each turn: arrays of
    items, and texts of a user."""
    items: list[msgspec.Raw] = []
    for part in _parts(history):
        is_text = bytes(part).startswith(b'"')
        items += [msgspec.Raw(b'{"role":"user","content":%b}' % bytes(part))] if is_text else _parts(part)
    order = range(len(items)) if query.order == "asc" else range(len(items) - 1, -1, -1)
    start = 0
    if query.after:
        places = (place for place, index in enumerate(order, 1) if _id(items[index], index) == query.after)
        start = next(places, 0)
    page = [_shown(items[index], index) for index in order[start : start + query.limit]]
    ids = [item["id"] for item in page]
    listed = {
        "object": "list", "data": page, "has_more": start + query.limit < len(items),
        "first_id": ids[0] if ids else None, "last_id": ids[-1] if ids else None,
    }  # fmt: skip
    return _encode(listed)


def _id(item: msgspec.Raw, index: int) -> str:
    return _named(item).id or f"item_{index}"


def _shown(item: msgspec.Raw, index: int) -> dict[str, Any]:
    fields: dict[str, Any] = dict(_members(item))
    fields |= {name: _decode(fields[name]) for name in ("type", "role") if name in fields}
    fields["id"] = _id(item, index)
    if fields.setdefault("type", "message") == "message" and bytes(fields["content"]).startswith(b'"'):
        kind = "output_text" if fields["role"] == "assistant" else "input_text"
        fields["content"] = [{"type": kind, "text": fields["content"]}]
    return fields
