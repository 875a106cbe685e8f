"""Finds what a request belongs to, so that the turns of a conversation go to one router. Pure.

A router knows best where the KV of its own requests is. Only the router that made a response can continue it
(`previous_response_id`).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import xxhash

from baton.router.api.sessions import claude_session, session_name

START_BYTES = 4096
"""Of a prompt that stands for its conversation. Later turns begin with the same bytes."""
START_MESSAGES = 16
"""Messages that stand for a conversation at most, if none of them is of a user. A body may have 350,000."""
_INVALID = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_RESPONSE_PATH = re.compile(r"/v1/responses/(resp_[0-9a-f]+)(?:[/?]|$)")


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a request belongs to. Both may be unknown."""

    key: int | None = None
    """64-bit hash of the conversation."""
    response_id: str | None = None
    """An earlier response that the request is about."""


class _Fields(msgspec.Struct):
    """The fields of all endpoints that may name a conversation. `Raw` skips over a value."""

    previous_response_id: str | None = None
    session_id: str | None = None
    session_params: msgspec.Raw = msgspec.Raw()
    prompt_cache_key: str | None = None
    user: str | None = None
    metadata: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    system: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()


class _Names(msgspec.Struct):
    """Of a user in `metadata`, or of a session in `session_params`."""

    user_id: str | None = None
    session_id: str | None = None
    id: str | None = None


class _Message(msgspec.Struct):
    role: str = ""


_fields = msgspec.json.Decoder(_Fields).decode
_names = msgspec.json.Decoder(_Names).decode
_messages = msgspec.json.Decoder(list[msgspec.Raw]).decode
_message = msgspec.json.Decoder(_Message).decode


def conversation(headers: Mapping[str, str], body: bytes) -> Conversation:
    """Returns the conversation of a request. `body` may be a part of the body, or empty.

    A conversation has the name that routers take. Without a name it is known by how it begins: the system
    prompt and the first message of the user, or the prompt.
    """
    target = headers.get(":path", "")
    path = _RESPONSE_PATH.match(target)
    try:
        fields = _fields(body)
    except _INVALID:
        # Not JSON, or a part of it. The same conversation begins with the same bytes.
        name = session_name(headers, None, None) or ""
        return Conversation(_hash(name.encode() or body[:START_BYTES]), path and path[1])
    user = fields.user
    if target.startswith("/v1/messages"):
        user = claude_session(_names_in(fields.metadata).user_id)
    params = _names_in(fields.session_params)
    field = fields.session_id or params.session_id or params.id or fields.prompt_cache_key
    name = session_name(headers, field, user)
    key = _hash(_start(fields) if not name else name.encode(errors="replace"))
    return Conversation(key, path[1] if path else fields.previous_response_id)


def _hash(text: bytes) -> int | None:
    return xxhash.xxh3_64_intdigest(text) if text else None


def _names_in(value: msgspec.Raw) -> _Names:
    try:
        return _names(value)
    except _INVALID:  # there is none, or the router refuses it
        return _Names()


def _start(fields: _Fields) -> bytes:
    start = [bytes(fields.prompt)[:START_BYTES], bytes(fields.system), bytes(fields.instructions)]
    for turns in (fields.messages, fields.input):
        try:
            for raw in _messages(turns)[:START_MESSAGES] if bytes(turns) else ():
                start.append(bytes(raw))
                if _message(raw).role == "user":
                    break
        except _INVALID:  # `input` may be a text, and a message may have any form
            start.append(bytes(turns)[:START_BYTES])
    return b"".join(start)
