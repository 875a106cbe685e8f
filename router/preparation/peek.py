"""A look at a few fields of a body, before it is validated. The largest bodies take half a second."""

from typing import Literal

import msgspec

from baton.router.errors import InvalidRequest

Raw = bytes | bytearray


class _Invocation(msgspec.Struct):
    """`Raw` skips over the value."""

    messages: msgspec.Raw = msgspec.Raw()


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


_invocation = msgspec.json.Decoder(_Invocation).decode
_responses = msgspec.json.Decoder(_Responses).decode


def kind_of(raw: Raw) -> Literal["chat", "completion"]:
    """A body with messages is a chat. All others are completions, which refuse what is not valid."""
    try:
        return "chat" if bytes(_invocation(raw).messages) else "completion"
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return "completion"


def peek(raw: Raw) -> Peek:
    """Raises InvalidRequest for bytes that are not JSON."""
    try:
        found = _responses(raw)
    except msgspec.ValidationError:
        return Peek()  # the body is not valid; `prepare` raises the error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        # `prepare` might accept it, as it does NaN, and the fields here would have no effect.
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    input, stored = bytes(found.input), found.store is not False
    start = raw.find(input)  # the same bytes may also stand before the input
    return Peek(found.previous_response_id, bool(found.background), stored, start, start + len(input))
