"""The messages between a router and the children that prepare bodies.

A request is a line of JSON, then the history, then the client's bytes. The line is [kind, model names,
context length, salt in hexadecimal, bytes of the history]. A reply is MessagePack.
"""

import json
import logging
from array import array

import msgspec

from baton.machine.logs import stack_without_text
from baton.router.api.bodies import ChatOptions, CompletionOptions
from baton.router.errors import ApiError, InvalidRequest, all_errors
from baton.router.preparation.prepare import Kind, Prepared, Served
from baton.router.tools.reasoning import Beginning

log = logging.getLogger(__name__)

MAX_OPTIONS_BYTES = 512 << 10
"""Limit for the fields beside the prompt, because the router parses them on the event loop."""
_PROMPT = {"messages", "prompt", "chat_template_kwargs"}
_ERRORS = {kind.__name__: kind for kind in all_errors()}
assert array("I").itemsize == 4


class _Prepared(msgspec.Struct, tag=True, array_like=True):
    chat: bool
    options: bytes
    prompts: list[bytes]
    echoes: list[str]
    beginning: Beginning
    repeated: bytes


class _Response(msgspec.Struct, tag=True, array_like=True):
    body: bytes


class _Error(msgspec.Struct, tag=True, array_like=True):
    error: str
    message: str
    param: str | None


class _Crash(msgspec.Struct, tag=True, array_like=True):
    stack: str


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Prepared | _Response | _Error | _Crash).decode


def request_head(kind: Kind, served: Served, history: bytes = b"", salt: bytes = b"") -> bytes:
    """Returns what precedes the client's bytes."""
    head = [kind, served.model_names, served.context, salt.hex(), len(history)]
    return json.dumps(head).encode() + b"\n" + history


def read_request(request: bytes) -> tuple[Kind, Served, bytes, bytes, bytes]:
    """Returns the kind, the model, the history, the salt and the client's bytes."""
    head, _, rest = request.partition(b"\n")
    kind, model_names, context, salt, length = json.loads(head)
    return kind, Served(tuple(model_names), context), rest[:length], bytes.fromhex(salt), rest[length:]


def encode_prepared(prepared: Prepared | bytes) -> bytes:
    """Raises InvalidRequest when the fields beside the prompt are too large."""
    if isinstance(prepared, bytes):
        return _encode(_Response(prepared))
    chosen = prepared.options
    options = chosen.model_dump_json(
        by_alias=True,
        exclude_unset=True,
        exclude=_PROMPT,
        warnings=False,  # about values of a PlainValidator, which pydantic writes nevertheless
    ).encode()
    if len(options) > MAX_OPTIONS_BYTES:
        text = f"the fields beside the prompt take {len(options)} bytes, more than {MAX_OPTIONS_BYTES}"
        raise InvalidRequest(text)
    prompts = [array("I", prompt).tobytes() for prompt in prepared.prompts]
    chat = isinstance(chosen, ChatOptions)
    return _encode(_Prepared(chat, options, prompts, prepared.echoes, prepared.beginning, prepared.repeated))


def encode_error(error: ApiError) -> bytes:
    return _encode(_Error(type(error).__name__, error.message, error.param))


def encode_crash(error: Exception) -> bytes:
    return _encode(_Crash("\n".join(stack_without_text(error))))


def read_reply(reply: bytes) -> Prepared | bytes:
    """Raises the ApiError that the child raised, or one without details if the child had a defect."""
    match _decode(reply):
        case _Prepared(chat, options, prompts, echoes, beginning, repeated):
            kind = ChatOptions if chat else CompletionOptions
            token_ids = [array("I", prompt).tolist() for prompt in prompts]
            return Prepared(kind.model_validate_json(options), token_ids, echoes, beginning, repeated)
        case _Response(body):
            return body
        case _Error(error, message, param):
            raise _ERRORS[error](message, param=param)
        case _Crash(stack):
            log.error("preparing a request failed\n%s", stack)
            raise ApiError("the request failed inside the router")
