"""One HTTP request between a gateway and the picker, as messages of ext_proc. No I/O.

    headers ─▶ (body ─▶ …) ─▶ choice ─▶ (body ─▶ …) ─▶ response headers ─▶ (response body ─▶ …)

When the choice is made depends on the mode in which the gateway sends the request's body:

    FULL_DUPLEX_STREAMED         after the body, or `MAX_BODY_BYTES` of it. Until then nothing is answered.
    BUFFERED, BUFFERED_PARTIAL   with the body, which is one message. The headers are answered before.
    other modes, or no body      with the headers

Every message has one answer, except in the first mode. There the gateway forwards only the pieces that come
back.
The protocol: https://github.com/kubernetes-sigs/gateway-api-inference-extension, proposal 004, version 1.0.0.
"""

import json
import logging
from collections.abc import Iterator, Mapping

from google.protobuf import struct_pb2

from baton.endpoint_picker.conversation import conversation
from baton.endpoint_picker.routers import Routers
from baton.router.errors import ApiError, NoWorker
from baton.rpc import ext_proc_pb2 as pb

log = logging.getLogger(__name__)

DESTINATION = "x-gateway-destination-endpoint"
"""The header, and the key in the metadata `DESTINATION_NAMESPACE`."""
DESTINATION_NAMESPACE = "envoy.lb"
SUBSET = "x-gateway-destination-endpoint-subset"
"""A key in the gateway's metadata `SUBSET_NAMESPACE`: the endpoints to choose from."""
SUBSET_NAMESPACE = "envoy.lb.subset_hint"
MAX_BODY_BYTES = 1 << 20
"""Of a body that is read before the choice."""
PIECE_BYTES = 62_000
"""Of a body on its way back. Some gateways take at most 64 KiB."""
RETRY_AFTER = 1
_BUFFERED = (pb.BUFFERED, pb.BUFFERED_PARTIAL)
_OVERWRITE = pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD


class Exchange:
    """Answers the messages of one stream.

    Attributes:
        ended: the request was refused. The gateway expects no more messages.
    """

    def __init__(self, routers: Routers) -> None:
        self.ended = False
        self._routers = routers
        # Gateways that do not tell their mode are those that know only the one that the protocol demands.
        self._request_mode = self._response_mode = pb.FULL_DUPLEX_STREAMED
        self._headers: dict[str, str] = {}
        self._allowed: list[str] | None = None
        self._body = bytearray()
        self._begun = self._chosen = False

    def answers(self, message: pb.ProcessingRequest) -> Iterator[pb.ProcessingResponse]:
        """Yields the answers to the next message of the gateway. Raises ValueError for late headers."""
        kind = message.WhichOneof("request")
        if not self._begun and message.HasField("protocol_config"):
            self._request_mode = message.protocol_config.request_body_mode
            self._response_mode = message.protocol_config.response_body_mode
        if self._begun and kind == "request_headers":
            raise ValueError("the headers of a request must be the first message, and come once")
        self._begun = True
        match kind:
            case "request_headers":
                yield from self._request_headers(message)
            case "request_body":
                yield from self._request_body(message.request_body)
            case "request_trailers":
                if self._request_mode == pb.FULL_DUPLEX_STREAMED:
                    yield from self._after_the_body()
                if not self.ended:
                    yield pb.ProcessingResponse(request_trailers=pb.TrailersResponse())
            case "response_headers":
                yield pb.ProcessingResponse(response_headers=pb.HeadersResponse())
            case "response_body":
                body = message.response_body
                for answer in _body_answers(self._response_mode, body.body, end=body.end_of_stream):
                    yield pb.ProcessingResponse(response_body=answer)
            case "response_trailers":
                yield pb.ProcessingResponse(response_trailers=pb.TrailersResponse())

    def _request_headers(self, message: pb.ProcessingRequest) -> Iterator[pb.ProcessingResponse]:
        sent = message.request_headers
        for header in sent.headers.headers:
            value = header.raw_value.decode(errors="replace") if header.raw_value else header.value
            self._headers[header.key.lower()] = value
        self._allowed = _subset(message.metadata_context.filter_metadata)
        if sent.end_of_stream or self._request_mode not in (pb.FULL_DUPLEX_STREAMED, *_BUFFERED):
            yield self._choice("request_headers")
        elif self._request_mode in _BUFFERED:
            yield pb.ProcessingResponse(request_headers=pb.HeadersResponse())

    def _request_body(self, sent: pb.HttpBody) -> Iterator[pb.ProcessingResponse]:
        if self._request_mode == pb.FULL_DUPLEX_STREAMED and not self._chosen:
            self._body += sent.body
            if sent.end_of_stream or len(self._body) >= MAX_BODY_BYTES:
                yield from self._after_the_body(end=sent.end_of_stream)
        elif self._request_mode in _BUFFERED and not self._chosen:
            yield self._choice("request_body", sent.body[:MAX_BODY_BYTES])
        else:
            for answer in _body_answers(self._request_mode, sent.body, end=sent.end_of_stream):
                yield pb.ProcessingResponse(request_body=answer)

    def _after_the_body(self, *, end: bool = False) -> Iterator[pb.ProcessingResponse]:
        """Answers the headers, and sends back the body so far. `end`: there are no trailers after it."""
        if self._chosen:
            return
        body, self._body = bytes(self._body), bytearray()
        yield self._choice("request_headers", body)
        if not self.ended:
            for answer in _body_answers(self._request_mode, body, end=end):
                yield pb.ProcessingResponse(request_body=answer)

    def _choice(self, answered: str, body: bytes = b"") -> pb.ProcessingResponse:
        """The address for the gateway, as the answer to `request_headers` or `request_body`; or an error."""
        self._chosen = True
        address = self._routers.choose(conversation(self._headers, body), self._allowed)
        if address is None:
            self.ended = True
            text = "there is no router" if self._allowed is None else "the gateway allows none of the routers"
            log.warning("a request was refused: %s", text)
            return _refusal(NoWorker(text, retry_after=RETRY_AFTER))
        common = pb.CommonResponse(header_mutation=_headers({DESTINATION: address}), clear_route_cache=True)
        if answered == "request_headers":
            response = pb.ProcessingResponse(request_headers=pb.HeadersResponse(response=common))
        else:
            response = pb.ProcessingResponse(request_body=pb.BodyResponse(response=common))
        response.dynamic_metadata.update({DESTINATION_NAMESPACE: {DESTINATION: address}})
        return response


def _subset(metadata: Mapping[str, struct_pb2.Struct]) -> list[str] | None:
    """Returns the endpoints that the gateway allows; None if it allows all.

    They are a list, or a text with commas if the gateway took them from a header.
    """
    if SUBSET_NAMESPACE not in metadata or SUBSET not in metadata[SUBSET_NAMESPACE].fields:
        return None
    value = metadata[SUBSET_NAMESPACE].fields[SUBSET]
    texts = [each.string_value for each in value.list_value.values] or [value.string_value]
    return [name for text in texts for each in text.split(",") if (name := each.strip())]


def _body_answers(mode: int, body: bytes, *, end: bool) -> Iterator[pb.BodyResponse]:
    """Yields the answers to a piece of a body, which stays as it is."""
    if mode != pb.FULL_DUPLEX_STREAMED:
        yield pb.BodyResponse()
        return
    for start in range(0, max(1, len(body)), PIECE_BYTES):
        piece = body[start : start + PIECE_BYTES]
        streamed = pb.StreamedBodyResponse(body=piece, end_of_stream=end and start + PIECE_BYTES >= len(body))
        mutation = pb.BodyMutation(streamed_response=streamed)
        yield pb.BodyResponse(response=pb.CommonResponse(body_mutation=mutation))


def _refusal(error: ApiError) -> pb.ProcessingResponse:
    headers = {"content-type": "application/json", "retry-after": str(error.retry_after)}
    immediate = pb.ImmediateResponse(
        status=pb.HttpStatus(code=error.status),
        headers=_headers(headers),
        body=json.dumps(error.body).encode(),
        details=error.code,
    )
    return pb.ProcessingResponse(immediate_response=immediate)


def _headers(values: Mapping[str, str]) -> pb.HeaderMutation:
    """Sets headers. A header that the client sent under such a name is overwritten."""
    options = [
        pb.HeaderValueOption(
            header=pb.HeaderValue(key=name, raw_value=value.encode()), append_action=_OVERWRITE
        )
        for name, value in values.items()
    ]
    return pb.HeaderMutation(set_headers=options)
