"""The messages of `baton.v1.Inference`."""

from baton.router.active_request import ActiveRequest
from baton.router.errors import ApiError
from baton.router.generation.output import Delta
from baton.rpc import inference_pb2 as pb

_FINISH: dict[str | None, pb.Delta.FinishReason] = {
    None: pb.Delta.UNFINISHED,
    "stop": pb.Delta.STOP,
    "length": pb.Delta.LENGTH,
}


class MessagesBuilder:
    """Builds the bytes of a `GenerateResponse` for each delta. Several of them, one after the other, are one
    message with all their deltas, because protobuf joins repeated fields."""

    def __init__(self, request: ActiveRequest) -> None:
        self._request = request

    def events(self, index: int, delta: Delta) -> bytes:
        message = pb.GenerateResponse()
        written = message.deltas.add(
            index=index,
            token_id=delta.token_id,
            text=delta.text,
            finish_reason=_FINISH[delta.finish_reason],
        )
        if isinstance(delta.stop_reason, str):
            written.stop_string = delta.stop_reason
        elif delta.stop_reason is not None:
            written.stop_token_id = delta.stop_reason
        logprobs = delta.logprobs
        if logprobs is not None:
            written.logprobs.logprob = logprobs.logprob
            top = zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)
            written.logprobs.top.extend(pb.TopLogprob(token_id=t, logprob=logprob) for t, logprob in top)
        return message.SerializeToString()

    def end(self) -> bytes:
        used = self._request.usage()
        usage = pb.Usage(
            prompt_tokens=used.prompt_tokens,
            completion_tokens=used.completion_tokens,
            cached_tokens=used.cached_tokens,
            numerics_changed=used.numerics_changed,
            accepted_prediction_tokens=used.accepted_drafts,
            rejected_prediction_tokens=used.rejected_drafts,
            **used.weights,
        )
        return pb.GenerateResponse(usage=usage).SerializeToString()

    def failed(self, error: ApiError) -> bytes:
        raise AssertionError(f"the status of the call has the error: {error}")
