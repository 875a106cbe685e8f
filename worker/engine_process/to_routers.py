"""The messages of an engine process to routers, as proto/worker.proto defines them. They are made once, here:
the service process passes their bytes on."""

from baton.engine import Output, PromptLogprobs
from baton.rpc import worker_pb2 as pb
from baton.worker.messages import ToRouter

_FINISH = {"stop": pb.FINISH_REASON_STOP, "length": pb.FINISH_REASON_LENGTH}


class StepTokens:
    """All tokens of one engine step that belong to one router."""

    def __init__(self) -> None:
        self._message = pb.WorkerMessage()
        self._add = self._message.step.tokens.add

    def add(self, output: Output, cached_tokens: int) -> None:
        """`cached_tokens`: what the router is told of them."""
        event = self._add(attempt_id=output.id, output_index=output.output_index, token_id=output.token)
        # Most tokens have none of these, and each field that is set costs as much as a token.
        if output.finish_reason:
            event.finish_reason = _FINISH[output.finish_reason]
        if cached_tokens:
            event.cached_tokens = cached_tokens
        if output.accepted_draft:
            event.accepted_draft = True
        if output.rejected_drafts:
            event.rejected_drafts = output.rejected_drafts
        if (logprobs := output.logprobs) is not None:
            event.logprobs.logprob = logprobs.logprob
            event.logprobs.top_ids.extend(logprobs.top_ids)
            event.logprobs.top_logprobs.extend(logprobs.top_logprobs)

    def to(self, stream: int) -> ToRouter:
        return ToRouter(stream, self._message.SerializeToString())


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


def image_wanted(name: bytes, *, lost: bool) -> ToRouter:
    """For all routers. `lost`: the embeddings did not come from the encoder that a router has named."""
    message = pb.ImageWanted(name=name, lost=lost)
    return ToRouter(None, pb.WorkerMessage(image_wanted=message).SerializeToString())
