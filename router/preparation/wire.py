"""How a router and its children exchange bodies and what was made of them.

A question is a line of JSON, [kind, model name, positions, sliding window], then the client's bytes. An
answer is MessagePack.
"""

import json
import logging
from array import array

import msgspec

from router.api.bodies import ChatOptions, CompletionOptions
from router.api.jobs import Context
from router.errors import ApiError, InvalidRequest, all_errors
from router.preparation.prepare import Kind, Prepared, Served
from rpc.logs import stack_without_text

log = logging.getLogger(__name__)

MAX_OPTIONS_BYTES = 512 << 10
"""Of the fields beside the prompt, which the router itself has to read."""
_PROMPT = {"messages", "prompt", "chat_template_kwargs"}
_ERRORS = {kind.__name__: kind for kind in all_errors()}
assert array("I").itemsize == 4


class _Request(msgspec.Struct, tag=True, array_like=True):
    chat: bool
    options: bytes
    prompts: list[bytes]
    echoes: list[str]


class _Answer(msgspec.Struct, tag=True, array_like=True):
    body: bytes


class _Refusal(msgspec.Struct, tag=True, array_like=True):
    error: str
    message: str
    param: str | None


class _Failure(msgspec.Struct, tag=True, array_like=True):
    stack: str


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Request | _Answer | _Refusal | _Failure).decode


def question_head(kind: Kind, served: Served) -> bytes:
    context = served.context
    head = [kind, served.model_name, context.positions, context.sliding_window]
    return json.dumps(head).encode() + b"\n"


def read_question(question: bytes) -> tuple[Kind, Served, bytes]:
    head, _, raw = question.partition(b"\n")
    kind, model_name, positions, sliding_window = json.loads(head)
    return kind, Served(model_name, Context(positions, sliding_window)), raw


def answer_of(prepared: Prepared | bytes) -> bytes:
    """Raises InvalidRequest when the router would have to read too much."""
    if isinstance(prepared, bytes):
        return _encode(_Answer(prepared))
    chosen = prepared.options
    options = chosen.model_dump_json(
        by_alias=True,
        exclude_unset=True,
        exclude=_PROMPT,
        warnings=False,  # pydantic does not expect what a PlainValidator made, and writes it all the same
    ).encode()
    if len(options) > MAX_OPTIONS_BYTES:
        text = f"the fields beside the prompt take {len(options)} bytes, and may take {MAX_OPTIONS_BYTES}"
        raise InvalidRequest(text)
    prompts = [array("I", prompt).tobytes() for prompt in prepared.prompts]
    return _encode(_Request(isinstance(chosen, ChatOptions), options, prompts, prepared.echoes))


def refusal_of(error: ApiError) -> bytes:
    return _encode(_Refusal(type(error).__name__, error.message, error.param))


def failure_of(error: Exception) -> bytes:
    return _encode(_Failure("\n".join(stack_without_text(error))))


def read_answer(answer: bytes) -> Prepared | bytes:
    """Raises ApiError where the child did."""
    match _decode(answer):
        case _Request(chat, options, prompts, echoes):
            kind = ChatOptions if chat else CompletionOptions
            token_ids = [array("I", prompt).tolist() for prompt in prompts]
            return Prepared(kind.model_validate_json(options), token_ids, echoes)
        case _Answer(body):
            return body
        case _Refusal(error, message, param):
            raise _ERRORS[error](message, param=param)
        case _Failure(stack):
            log.error("preparing a request failed\n%s", stack)
            raise ApiError("the request failed inside the router")
