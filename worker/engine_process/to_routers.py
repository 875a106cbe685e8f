"""The messages to routers about attempts, as proto/worker.proto defines them. The engine process makes most
of them, and the service process passes their bytes on."""

from baton.engine import Output, PromptLogprobs
from baton.rpc import worker_pb2 as pb
from baton.worker.messages import ToRouter

_FINISH = {"stop": pb.FINISH_REASON_STOP, "length": pb.FINISH_REASON_LENGTH}


class StepTokens:
    """All tokens of one engine step that belong to one router."""

    def __init__(self) -> None:
        self.message = pb.WorkerMessage()
        self._add = self.message.step.tokens.add

    def add(self, output: Output, *, tell_cached: bool) -> None:
        """`tell_cached`: the router is told how much of the prompt was cached."""
        attempt_id, index, token, logprobs, finish_reason, cached, _, _, accepted, rejected = output
        event = self._add()
        # Each takes less than an argument of `add`.
        event.attempt_id, event.output_index, event.token_id = attempt_id, index, token
        # Most tokens have none of these, and each field that is set costs as much as a token.
        if finish_reason:
            event.finish_reason = _FINISH[finish_reason]
        if cached and tell_cached:
            event.cached_tokens = cached
        if accepted:
            event.accepted_draft = True
        if rejected:
            event.rejected_drafts = rejected
        if logprobs is not None:
            event.logprobs.logprob = logprobs.logprob
            event.logprobs.top_ids.extend(logprobs.top_ids)
            event.logprobs.top_logprobs.extend(logprobs.top_logprobs)


def scored(stream: int, logprobs: PromptLogprobs) -> ToRouter:
    values = logprobs._asdict()
    message = pb.PromptLogprobs(attempt_id=values.pop("id"), **values)
    return ToRouter(stream, pb.WorkerMessage(prompt_logprobs=message).SerializeToString())


def reserved(stream: int, decode_id: bytes) -> ToRouter:
    message = pb.Reserved(decode_id=decode_id)
    return ToRouter(stream, pb.WorkerMessage(reserved=message).SerializeToString())


def prefill_started(stream: int, prefill_id: bytes) -> ToRouter:
    message = pb.PrefillStarted(prefill_id=prefill_id)
    return ToRouter(stream, pb.WorkerMessage(prefill_started=message).SerializeToString())


def encoded(stream: int, encode_id: bytes) -> ToRouter:
    message = pb.Encoded(encode_id=encode_id)
    return ToRouter(stream, pb.WorkerMessage(encoded=message).SerializeToString())


def failed(
    stream: int | None, attempt_id: bytes, code: "pb.FailureCode", message: str, prefill_id: bytes = b""
) -> ToRouter:
    """`stream` None: for all routers, as only the router of the attempt knows its id."""
    failure = pb.AttemptFailed(attempt_id=attempt_id, code=code, message=message, prefill_id=prefill_id)
    return ToRouter(stream, pb.WorkerMessage(failed=failure).SerializeToString())


def image_wanted(name: bytes, *, lost: bool) -> ToRouter:
    """For all routers. `lost`: the embeddings did not come from the encoder that a router has named."""
    message = pb.ImageWanted(name=name, lost=lost)
    return ToRouter(None, pb.WorkerMessage(image_wanted=message).SerializeToString())
