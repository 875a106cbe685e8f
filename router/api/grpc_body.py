"""Turns the message of a gRPC call into a body of the HTTP API."""

from typing import Any

from google.protobuf.message import DecodeError

from baton.router.api.bodies import ChatBody, CompletionBody
from baton.router.api.validation import validate
from baton.router.errors import InvalidRequest
from baton.rpc import inference_pb2 as pb


def parse_message(raw: bytes) -> ChatBody | CompletionBody:
    """Validates the fields that are set, under their JSON names. Raises InvalidRequest."""
    try:
        request = pb.GenerateRequest.FromString(raw)
    except DecodeError:
        raise InvalidRequest("the message is not a baton.v1.GenerateRequest") from None
    fields: dict[str, Any] = {field.name: value for field, value in request.ListFields()}
    for name in ("stop", "stop_token_ids"):
        if name in fields:
            fields[name] = list(fields[name])
    if "logit_bias" in fields:
        fields["logit_bias"] = {str(token_id): bias for token_id, bias in fields["logit_bias"].items()}
    if "structured_outputs" in fields:
        given = {field.name: value for field, value in fields["structured_outputs"].ListFields()}
        if "choice" in given:
            given["choice"] = list(given["choice"].texts)
        fields["structured_outputs"] = given
    if "chat" in fields:
        messages = fields.pop("chat").messages
        fields["messages"] = [{"role": m.role, "content": m.content} for m in messages]
        if "logprobs" in fields:
            fields["top_logprobs"], fields["logprobs"] = fields["logprobs"], True
        return validate(ChatBody, fields)
    if "token_ids" in fields:
        fields["prompt"] = list(fields.pop("token_ids").ids)
    elif "text" in fields:
        fields["prompt"] = fields.pop("text")
    return validate(CompletionBody, fields)
